"""Faults that were found by reading and by use, each with the right value."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from liveset import StreamingDataset, adopt, build_keys_index, dataset_update, export, optimize, set_attributes, vacuum, verify
from liveset.edit.session import DatasetUpdate
from liveset.edit.vacuum import vacuum_store
from liveset.errors import Corrupt, DatasetError, SessionExpired
from liveset.storage import Buffer
from liveset.storage.local import LocalStore

pytest.importorskip("pyarrow", exc_type=ImportError)


def play(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "v": i}


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    optimize(play, range(10), tmp_path / "plays", chunk_size=5, key_fn="id", num_workers=1)
    return tmp_path / "plays"


class SlowWriter(LocalStore):
    """Waits after its first chunk until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.staged, self.go = threading.Event(), threading.Event()

    def write(self, name: str, data: Buffer | Iterable[Buffer]) -> None:
        super().write(name, data)  # type: ignore[arg-type]
        self.staged.set()
        assert self.go.wait(60)


def test_a_later_vacuum_with_more_grace_does_not_hide_what_an_earlier_one_is_deleting(plays: Path) -> None:
    for value in (1, 2):  # something for both vacuums to do
        with dataset_update(plays) as update:
            update["k1"] = {"id": "k1", "v": value}
            update.commit()
    store = SlowWriter(plays)
    update = DatasetUpdate(store)
    update["k2"] = {"id": "k2", "v": -2}
    failed: list[BaseException] = []

    def commit() -> None:
        try:
            update.commit()
        except DatasetError as error:
            failed.append(error)

    writer = threading.Thread(target=commit)
    writer.start()
    assert store.staged.wait(60)

    class SlowVacuum(LocalStore):
        """Lets another vacuum, and then the writer, pass before it deletes."""

        passed = False

        def delete(self, names: Iterable[str]) -> None:
            doomed = list(names)
            if not self.passed and any(name.startswith("chunk") for name in doomed):
                self.passed = True
                vacuum_store(LocalStore(plays), keep=1, grace=timedelta(days=1))
                store.go.set()
                writer.join(60)
            super().delete(doomed)

    vacuum_store(SlowVacuum(plays), keep=100, grace=timedelta(0))
    assert [type(error) for error in failed] == [SessionExpired]
    assert StreamingDataset(plays)["k2"] == play(2)
    assert verify(plays).ok


def test_an_error_while_unlocking_does_not_look_like_a_failed_commit(plays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def failing(fd: int, operation: int) -> None:
        real(fd, operation)
        if operation == fcntl.LOCK_UN:
            raise OSError(5, "Input/output error")

    with dataset_update(plays) as update:
        update["k3"] = {"id": "k3", "v": -3}
        monkeypatch.setattr(fcntl, "flock", failing)
        result = update.commit()
    monkeypatch.undo()
    assert StreamingDataset(plays).version == result.version
    assert StreamingDataset(plays)["k3"]["v"] == -3


def foreign(path: Path) -> None:
    """Make a dataset look as if another program had written it."""
    index = json.loads((path / "index.json").read_bytes())
    del index["edit"]
    index["keys"].pop("field", None)
    for number, chunk in enumerate(index["chunks"]):
        plain = f"chunk-0-{number}.bin"
        (path / chunk["filename"]).rename(path / plain)
        for name in ("id", "check", "head_check"):
            del chunk[name]
        chunk["filename"] = plain
    (path / "index.json").unlink()
    (path / "index.json").write_text(json.dumps(index))
    for file in sorted((path / "_liveset").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (path / "_liveset").rmdir()


@pytest.mark.parametrize("first", ["append", "keys", "attributes", "adopt"])
def test_every_first_edit_adopts(plays: Path, first: str) -> None:
    foreign(plays)
    if first == "append":
        optimize(play, range(10, 12), plays, mode="append", key_fn="id", num_workers=1)
    elif first == "keys":
        build_keys_index(plays, "id", overwrite=True, verbose=False)
    elif first == "attributes":
        set_attributes(plays, name="plays")
    else:
        adopt(plays)
    names = [chunk["filename"] for chunk in json.loads((plays / "index.json").read_bytes())["chunks"]]
    # With such names the old tool's writers refuse before they touch anything.
    assert all(name.count("-") == 3 for name in names), names
    ds = StreamingDataset(plays)
    assert [ds[f"k{i}"] for i in range(10)] == [play(i) for i in range(10)]
    assert StreamingDataset(plays, version=0)[3] == play(3)


def test_files_of_others_that_look_like_chunks_survive_a_vacuum(plays: Path) -> None:
    optimize(play, range(3), plays, mode="overwrite", num_workers=1)
    for name in ("chunk-0-7.bin", "chunk-0-7-mine.bin", "chunk-notes.bin", "notes.txt"):
        (plays / name).write_text("mine")
    report = vacuum(plays, keep=0, grace=timedelta(0))
    assert report.files > 0
    for name in ("chunk-0-7.bin", "chunk-0-7-mine.bin", "chunk-notes.bin", "notes.txt"):
        assert (plays / name).read_text() == "mine"
    assert {"chunk-0-7.bin", "notes.txt"} <= set(report.unknown)


def test_a_damaged_key_table_is_found_wherever_it_is_damaged(plays: Path) -> None:
    (table,) = (plays / "_liveset" / "keys").iterdir()
    whole = table.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        table.write_bytes(damaged)
        assert not verify(plays).ok
        with pytest.raises(Corrupt, match=table.name):
            StreamingDataset(plays)["k1"]
    table.unlink()
    assert [damage.file for damage in verify(plays).damaged] == [f"_liveset/keys/{table.name}"]


def test_an_exported_copy_holds_chunks_index_and_keys_and_nothing_else(plays: Path, tmp_path: Path) -> None:
    export(plays, tmp_path / "plain")
    found = {str(file.relative_to(tmp_path / "plain")) for file in (tmp_path / "plain").rglob("*") if file.is_file()}
    assert found == {"index.json", "chunk-0-0.bin", "chunk-0-1.bin", "keys/shard-00000.parquet"}
    ds = StreamingDataset(tmp_path / "plain")
    assert ds.version == 0
    assert ds["k7"] == play(7)


def test_an_export_into_the_dataset_itself_is_refused(plays: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(plays)
    before = sorted(plays.rglob("*"))
    for target in (plays / "sub", plays, tmp_path / "link/sub", plays / "sub/../other"):
        with pytest.raises(ValueError, match="in the dataset itself"):
            export(plays, target)
    assert sorted(plays.rglob("*")) == before
    export(plays, plays.parent / f"{plays.name}-beside")


def test_a_failed_export_leaves_nothing(plays: Path, tmp_path: Path) -> None:
    next(plays.glob("chunk-0-1-*")).unlink()
    with pytest.raises(DatasetError):
        export(plays, tmp_path / "plain")
    assert not [file for file in (tmp_path / "plain").rglob("*") if file.is_file()]


def test_a_file_of_others_among_the_key_tables_does_not_hide_an_error(plays: Path) -> None:
    (plays / "_liveset" / "keys" / ".DS_Store").write_bytes(b"x")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        optimize(lambda i: 1 // 0, range(3), plays, mode="append", num_workers=1)


def test_a_place_that_cannot_be_written_to_is_found_out_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    called: list[int] = []
    with pytest.raises(DatasetError):
        optimize(called.append, range(3), tmp_path / "file", num_workers=1)
    assert called == []


@pytest.mark.parametrize("texts", [{"session": 5}, {"message": 5}])
def test_texts_that_are_none_are_refused_before_any_work(tmp_path: Path, texts: dict[str, Any]) -> None:
    called: list[int] = []
    with pytest.raises(TypeError, match="must be text"):
        optimize(called.append, range(3), tmp_path / "ds", num_workers=1, **texts)
    assert called == []


@pytest.mark.parametrize("value", [{1, 2}, [float("nan"), 1], b"x", {1: 2}, (1, 2)])
def test_attributes_that_would_read_back_changed_are_refused(plays: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="'a'"):
        set_attributes(plays, a=value)
    assert StreamingDataset(plays).version == 1
