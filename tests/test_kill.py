"""Writers that are killed at any moment: nothing acknowledged is lost, and nothing is half there."""

from __future__ import annotations

import multiprocessing
import random
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from liveset.edit.changes import Append
from liveset.edit.commit import commit, new_token
from liveset.edit.session import dataset_update
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import KeyConflict
from liveset.keystore import open_keys
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.storage.local import LocalStore
from liveset.testing.invariants import check_dataset, stage, unneeded_files
from tests.support.writing import write_dataset

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}


def _append_until_killed(root: str, ear: Connection) -> None:
    store = open_store(root)
    while True:
        session = new_token()
        commit(store, Append(CONFIG, (stage(store, f"chunk-{session}"),)), None, session=session)
        ear.send(session)


def kill_writers(root: Path, seconds: float, seed: int) -> tuple[int, int]:
    """Kills two writers at a time at random moments; returns how many were killed and how many commits they reported."""
    dice = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "liveset.edit.commit", "liveset.storage.local", "liveset.testing.invariants"])
    acknowledged: set[str] = set()
    killed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writers = []
        for _ in range(2):
            mouth, ear = context.Pipe(duplex=False)
            process = context.Process(target=_append_until_killed, args=(str(root), ear), daemon=True)
            process.start()
            ear.close()
            writers.append((process, mouth))
        for process, mouth in writers:
            wait([mouth], timeout=30)  # the first commit of each, so that the kill falls somewhere in the work
            process.join(dice.uniform(0, 0.04))
            process.kill()
            killed += 1
        for process, mouth in writers:
            process.join()
            try:
                while True:
                    acknowledged.add(mouth.recv())
            except EOFError:
                mouth.close()
        versions = check_dataset(LocalStore(root))
        found = {entry.session for entry in list_versions(LocalStore(root))}
        assert acknowledged <= found, "a commit that was reported is not in the history"
        # A commit may have landed without its writer living to say so: at most one for each that was killed.
        assert len(versions) <= len(acknowledged) + killed
    return killed, len(acknowledged)


def _edit_until_killed(root: str, ear: Connection) -> None:
    """Insert a sample of one's own in each commit, delete an older one, and patch one that others patch too."""
    mine: list[str] = []
    while True:
        session, gone = new_token(), mine[0] if len(mine) > 3 else None
        with dataset_update(root, session=session) as update:
            update.insert(session, {"id": session, "v": len(mine)})
            if gone is not None:
                del update[gone]
            update.patch(f"k{len(mine)}", v=len(mine))
            try:
                update.commit()
            except KeyConflict:
                continue
        mine = [*mine, session] if gone is None else [*mine[1:], session]
        ear.send((session, gone))


def kill_editors(root: Path, seconds: float, seed: int) -> tuple[int, int]:
    """Kills two editors at a time at random moments; returns how many were killed and how many commits they reported."""
    write_dataset(root, [{"id": f"k{i}", "v": i} for i in range(10)], key="id")
    store = LocalStore(root)
    dice = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "liveset.edit.session", "liveset.testing.invariants"])
    present, killed, commits = {f"k{i}" for i in range(10)}, 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writers = []
        for _ in range(2):
            mouth, ear = context.Pipe(duplex=False)
            process = context.Process(target=_edit_until_killed, args=(str(root), ear), daemon=True)
            process.start()
            ear.close()
            writers.append((process, mouth))
        for process, mouth in writers:
            wait([mouth], timeout=30)
            process.join(dice.uniform(0, 0.15))
            process.kill()
            killed += 1
        acknowledged: set[str] = set()
        deleted: set[str] = set()
        for process, mouth in writers:
            process.join()
            try:
                while True:
                    session, gone = mouth.recv()
                    acknowledged.add(session)
                    deleted |= {gone} - {None}
            except EOFError:
                mouth.close()
        check_dataset(store)
        done = [entry for entry in list_versions(store) if entry.op in ("insert", "delete", "edit")]
        assert acknowledged <= {entry.session for entry in done}, "a commit that was reported is not in the history"
        keys = open_keys(open_snapshot(store))
        assert keys is not None
        found = {key for number in range(len(open_snapshot(store).index.chunks)) for key in keys.keys_of(number)}
        present = (present | acknowledged) - deleted
        assert not found & deleted, "a sample that was deleted is back"
        # Each writer may have made a commit without living to say so.
        assert len(present - found) <= len(writers), "a sample that was added is gone"
        assert len(found - present) <= len(writers)
        present, commits = {str(key) for key in found}, commits + len(acknowledged)
        vacuum_store(store, keep=2, grace=timedelta(0))
        assert unneeded_files(store) == set()
    return killed, commits


@pytest.mark.slow
def test_killed_editors_lose_nothing(tmp_path: Path) -> None:
    killed, commits = kill_editors(tmp_path / "ds", 3, seed=1)
    assert killed >= 4
    assert commits >= killed


@pytest.mark.nightly
def test_killed_editors_lose_nothing_for_long(tmp_path: Path) -> None:
    for number in range(6):
        killed, _ = kill_editors(tmp_path / str(number), 10, seed=number)
        assert killed >= 10


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    killed, commits = kill_writers(tmp_path, 3, seed=1)
    assert killed >= 4
    assert commits >= killed


@pytest.mark.nightly
def test_killed_writers_lose_nothing_for_long(tmp_path: Path) -> None:
    for number in range(6):  # a new dataset each time, since all of it is checked after each kill
        killed, _ = kill_writers(tmp_path / str(number), 5, seed=number)
        assert killed >= 10
