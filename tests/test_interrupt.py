"""Ctrl-C while a dataset is changed: what is raised tells whether there is a new version, and no handler of errors catches it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import CommitInterrupted
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.storage.local import LocalStore
from liveset.testing.invariants import check_dataset
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

CALLS = ("read", "write", "write_once", "copy", "read_head", "swap_head", "publish", "list", "delete", "now", "map", "probe")


def play(number: int) -> dict[str, Any]:
    return {"id": f"play-{number}", "n": number}


def turned(sample: Any) -> Any:
    return {**sample, "n": -1}


def optimize(path: Path, mode: Any, **more: Any) -> None:
    liveset.optimize(play, range(20, 24), path, mode=mode, key_fn="id", num_workers=1, verbose=False, **more)


def update(path: Path) -> None:
    with liveset.dataset_update(path, session="job") as work:
        work["play-3"] = turned(play(3))
        work.commit()


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "append": lambda path: optimize(path, "append"),
    "append without some keys": lambda path: optimize(path, "append", on_duplicate="skip"),
    "overwrite": lambda path: optimize(path, "overwrite"),
    "overwrite with a checkpoint": lambda path: optimize(path, "overwrite", use_checkpoint=True),
    "update": update,
    "transform": lambda path: liveset.transform(path, turned, verbose=False),
    "transform to a new schema": lambda path: liveset.transform(path, lambda sample: {**sample, "more": 1}, verbose=False),
    "build_keys_index": lambda path: liveset.build_keys_index(path, "id", overwrite=True, verbose=False),
    "compact": lambda path: liveset.compact(path, small=1),
    "purge": lambda path: liveset.purge(path, ["play-1"]),
    "restore": lambda path: liveset.restore(path, 1),
    "vacuum": lambda path: liveset.vacuum(path, keep=1, grace=timedelta(0)),
}


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Version 2 has another sample in the place of one, so that its keys are published no more."""
    path = tmp_path / "plays"
    write_dataset(path, map(play, range(8)), key="id")
    with liveset.dataset_update(path) as work:
        del work["play-5"]
        work.insert("play-9", play(9))
        work.commit()
    return path


def interrupt(patch: pytest.MonkeyPatch, at: int, *, after: bool) -> list[str]:
    """Raise ``KeyboardInterrupt`` at one call of a store; return the list that gets the names of all calls."""
    made: list[str] = []
    within = [False]

    def around(name: str) -> Callable[..., Any]:
        method = getattr(LocalStore, name)

        def call(*arguments: Any, **more: Any) -> Any:
            if within[0]:
                return method(*arguments, **more)
            made.append(name)
            if len(made) == at and not after:
                raise KeyboardInterrupt
            within[0] = True
            try:
                return method(*arguments, **more)
            finally:
                within[0] = False
                if len(made) == at:
                    raise KeyboardInterrupt

        return call

    for name in CALLS:
        patch.setattr(LocalStore, name, around(name))
    return made


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_tells_whether_there_is_a_new_version(plays: Path, tmp_path: Path, name: str, after: bool) -> None:
    operation = OPERATIONS[name]
    shutil.copytree(plays, tmp_path / "counted")
    with pytest.MonkeyPatch.context() as patch:
        made = interrupt(patch, 0, after=after)
        operation(tmp_path / "counted")
    outcomes = set()
    for call in range(made.index("swap_head"), len(made) + 1):  # counted from 1: the last one before the swap is the first
        path = tmp_path / f"{call}"
        shutil.copytree(plays, path)
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, call, after=after)
            with pytest.raises(KeyboardInterrupt) as info:
                operation(path)
        assert not isinstance(info.value, Exception)
        index = open_snapshot(open_store(path)).index
        told = info.value.version if isinstance(info.value, CommitInterrupted) else 2
        assert told == index.version, f"{name} at {made[call - 1]}, call {call} of {len(made)}"
        if isinstance(info.value, CommitInterrupted):
            assert liveset.was_committed(path, info.value.session)
        outcomes.add(index.version)
        check_dataset(open_store(path))
    assert outcomes == {2, 3} or (outcomes == {2} and made[-1] == "swap_head" and not after)


def interrupt_after_the_swap(patch: pytest.MonkeyPatch) -> None:
    swap = LocalStore.swap_head

    def swapped(*arguments: Any) -> Any:
        swap(*arguments)
        raise KeyboardInterrupt

    patch.setattr(LocalStore, "swap_head", swapped)


def test_an_update_that_was_interrupted_after_its_commit_is_not_done_twice(plays: Path) -> None:
    with liveset.dataset_update(plays) as work:
        work["play-3"] = turned(play(3))
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after_the_swap(patch)
            with pytest.raises(CommitInterrupted, match=r"version 3 of .* is committed"):
                work.commit()
        assert work.commit().version == 3
    assert [entry.version for entry in liveset.history(plays)] == [3, 2, 1]


@pytest.mark.parametrize("call", ["swap_head", "write_once"])
def test_a_repair_that_was_interrupted_after_its_swap_tells_it(plays: Path, call: str) -> None:
    liveset.set_attributes(plays, {"a": 1})  # version 3, which is lost with its head
    (plays / "index.json").unlink()
    done = getattr(LocalStore, call)

    def interrupted(store: LocalStore, name: Any, *arguments: Any) -> Any:
        done(store, name, *arguments)
        if call == "swap_head" or (plays / "index.json").exists():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, call, interrupted)
        with pytest.raises(CommitInterrupted) as info:
            liveset.repair(plays)
    assert info.value.version == open_snapshot(open_store(plays)).index.version
    assert liveset.verify(plays).ok


def test_a_quarantine_that_was_interrupted_after_its_commit_tells_it(plays: Path) -> None:
    chunk = min(plays.glob("chunk-*"))
    chunk.chmod(0o644)
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"~")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after_the_swap(patch)
        with pytest.raises(CommitInterrupted) as info:
            liveset.repair(plays, quarantine=True)
    assert info.value.version == open_snapshot(open_store(plays)).index.version == 3


def test_the_command_line_tells_it(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from liveset.cli import main

    with pytest.MonkeyPatch.context() as patch:
        interrupt_after_the_swap(patch)
        with pytest.raises(SystemExit) as info:
            main(["patch", str(plays), "play-3", "n=7"])
    assert info.value.code == 130
    assert capsys.readouterr().err.startswith("liveset: version 3 of ")
