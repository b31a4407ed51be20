"""Restore: an earlier version becomes the newest, as a commit like any other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

import liveset
from liveset.edit.changes import Append, Change, Keys, Overwrite, Restore, Retag, SetAttributes, Stamp, apply
from liveset.edit.publish import publish_keys
from liveset.edit.rebase import check_rebase
from liveset.errors import NotFound, OverwriteConflict, SessionExpired, VersionExpired, VersionNotFound
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import KeyFiles, tokens_of
from liveset.snapshot import open_snapshot
from liveset.storage import Swap, Tag, open_store
from liveset.testing import MemoryStore, WrappedStore
from liveset.testing.invariants import check_dataset, unneeded_files
from liveset.tools.history import _restore_foreign
from tests.support.foreign import write_foreign
from tests.support.racing import append, commit_with, content, overwrite, restore, sweep
from tests.support.writing import write_dataset

CONFIG = {"compression": None, "data_format": ["int"], "data_spec": "spec"}


def line(index: Index | None, *changes: Change) -> Index:
    for change in changes:
        version = index.version if index else 0
        index = apply(index, change, Stamp(f"id {version}", f"job {version}", datetime(2030, 1, 1, tzinfo=UTC)))
    assert index is not None
    return index


def test_samples_schema_and_attributes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, [{"n": 1}, {"n": 2}])
    liveset.set_attributes(path, name="first")
    old = liveset.StreamingDataset(path)
    write_dataset(path, ["other", "samples", "of", "text"])
    liveset.set_attributes(path, name="second", licence="free")
    before = {file.name: file.stat().st_mtime_ns for file in path.glob("chunk-*")}

    assert liveset.restore(path, 2, message="the text was wrong", author="me") == 5
    new = liveset.StreamingDataset(path)
    assert (new[:], new.schema, new.attributes) == (old[:], old.schema, {"name": "first"})
    assert {file.name: file.stat().st_mtime_ns for file in path.glob("chunk-*")} == before  # nothing was rewritten
    newest = liveset.history(path)[0]
    assert (newest.op, newest.message, newest.author) == ("restore", "the text was wrong", "me")
    # And back again: nothing was lost.
    assert liveset.restore(path, 4) == 6
    assert liveset.StreamingDataset(path)[0] == "other"
    check_dataset(open_store(path))


def test_a_tag_or_a_time_names_the_version_too(tmp_path: Path) -> None:
    for number in range(3):
        write_dataset(tmp_path / "ds", [number])
    liveset.tag(tmp_path / "ds", "paper", 1)
    assert liveset.restore(tmp_path / "ds", "paper") == 5
    assert liveset.StreamingDataset(tmp_path / "ds")[:] == [0]
    when = liveset.history(tmp_path / "ds")[-2].when
    assert when is not None
    liveset.restore(tmp_path / "ds", when)
    assert liveset.StreamingDataset(tmp_path / "ds")[:] == [1]
    assert liveset.StreamingDataset(tmp_path / "ds", version="paper")[:] == [0]  # tags are not part of a version


def test_what_is_the_newest_already_makes_no_version(tmp_path: Path) -> None:
    for number in range(2):
        write_dataset(tmp_path / "ds", [number])
    assert liveset.restore(tmp_path / "ds", 2) == 2
    liveset.tag(tmp_path / "ds", "paper")
    assert liveset.restore(tmp_path / "ds", 2) == 3
    with pytest.raises(VersionNotFound, match="no version 9"):
        liveset.restore(tmp_path / "ds", 9)


def test_the_same_session_restores_once(tmp_path: Path) -> None:
    for number in range(2):
        write_dataset(tmp_path / "ds", [number])
    assert liveset.restore(tmp_path / "ds", 1, session="undo") == 3
    write_dataset(tmp_path / "ds", [7])
    assert liveset.restore(tmp_path / "ds", 1, session="undo") == 3
    assert liveset.StreamingDataset(tmp_path / "ds")[:] == [7]
    assert liveset.was_committed(tmp_path / "ds", "undo")
    assert not liveset.was_committed(tmp_path / "ds", "redo")
    liveset.vacuum(tmp_path / "ds", keep=1, grace=timedelta(0))
    assert liveset.restore(tmp_path / "ds", 1, session="undo") == 3
    assert liveset.restore(tmp_path / "ds", 4, session="undo") == 3
    with pytest.raises(VersionExpired):
        liveset.restore(tmp_path / "ds", 1, session="redo")
    assert liveset.StreamingDataset(tmp_path / "ds")[:] == [7]


BASE = line(None, Append(CONFIG, (ChunkRecord("a", 1, 1),)), Overwrite(CONFIG, (ChunkRecord("b", 1, 1),)))
FIRST = line(None, Append(CONFIG, (ChunkRecord("a", 1, 1),)))


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        (Append(CONFIG, (ChunkRecord("c", 1, 1),)), True),
        (Overwrite(CONFIG, (ChunkRecord("c", 1, 1),)), True),
        (SetAttributes({"x": 1}), True),
        (Restore(FIRST), True),
        (Retag("paper", 1), False),
    ],
    ids=lambda value: value.op if hasattr(value, "op") else "",
)
def test_it_conflicts_like_an_overwrite(theirs: Change, refused: bool) -> None:
    head = line(BASE, theirs)
    assert head.edit is not None
    since = [head.edit.entry]
    check_rebase(Restore(FIRST, force=True), BASE, head, since)
    if refused:
        with pytest.raises(OverwriteConflict, match="cannot restore: version 2 was to be replaced, but meanwhile version 3"):
            check_rebase(Restore(FIRST), BASE, head, since)
    else:
        check_rebase(Restore(FIRST), BASE, head, since)


def test_appends_stand_back_from_a_restore() -> None:
    head = line(BASE, Restore(FIRST))
    assert head.edit is not None
    with pytest.raises(OverwriteConflict, match=r"replaced meanwhile \(version 3 \(restore\)"):
        check_rebase(Append(CONFIG, ()), BASE, head, [head.edit.entry])


def test_keys_come_back_with_their_samples() -> None:
    keys = Keys(KeyFiles("text", 1, ("_liveset/keys/base-1.keys",)), {"version": 1, "num_shards": 1})
    keyed = line(None, Overwrite(CONFIG, (ChunkRecord("a", 1, 1),), keys=keys))
    plain = line(keyed, Overwrite(CONFIG, (ChunkRecord("b", 1, 1),)), Retag("paper", 1))
    assert plain.edit is not None
    assert plain.edit.key_files is None
    back = line(plain, Restore(keyed))
    assert back.edit is not None
    assert back.edit.key_files == keys.files
    assert back.layout_of_keys == keys.published
    assert back.edit.tags == {"paper": 1}
    assert line(back, Restore(plain)).layout_of_keys == {}
    assert back.members["updated_at"] != keyed.members["updated_at"]


def test_keyed_samples_are_found_again(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")

    def write(first: int, mode: Literal["overwrite"] | None) -> None:
        liveset.optimize(
            lambda i: {"id": f"k{i}", "n": i},
            range(first, first + 5),
            tmp_path / "ds",
            num_workers=1,
            mode=mode,
            key_fn="id",
            verbose=False,
        )

    write(0, None)
    write(100, "overwrite")
    with pytest.raises(KeyError):
        liveset.StreamingDataset(tmp_path / "ds")["k3"]
    liveset.restore(tmp_path / "ds", 1)
    dataset = liveset.StreamingDataset(tmp_path / "ds")
    assert dataset["k3"] == {"id": "k3", "n": 3}
    assert "k103" not in dataset.keys
    # The shards that other tools read are those of the restored version, not those of the one that was newest.
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "ds" / "keys" / "shard-00000.parquet").column("key").to_pylist() == [f"k{i}" for i in range(5)]


def test_keys_of_another_program_are_not_told_without_their_tables(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    store.foreign_head(b'{"chunks": [], "config": null, "keys": {"version": 1, "num_shards": 1}}')
    restored = line(line(open_snapshot(store).index, Append(CONFIG, ())), Restore(open_snapshot(store).index))
    assert restored.layout_of_keys == {}  # never a description of shards that are not there


def plays(count: int = 10) -> list[dict[str, Any]]:
    return [{"id": f"k{i}", "n": i} for i in range(count)]


def update(path: Path, key: str, number: int) -> None:
    with liveset.dataset_update(path) as session:
        session[key] = {"id": key, "n": number}
        session.commit()


def check_restored(path: Path) -> None:
    """All is as another program wrote it, and in files that it does not change."""
    dataset = liveset.StreamingDataset(path)
    assert dataset[:] == plays()
    assert list(dataset.keys) == [f"k{i}" for i in range(10)]
    assert dataset["k7"] == {"id": "k7", "n": 7}
    index = open_snapshot(open_store(path)).index
    assert all(tokens_of(record.filename) for record in index.chunks)
    import pyarrow.parquet as pq

    assert pq.read_table(path / "keys" / "shard-00000.parquet").column("key").to_pylist() == [f"k{i}" for i in range(10)]
    check_dataset(open_store(path))
    assert unneeded_files(open_store(path)) == set()


def test_what_another_program_wrote_comes_back_with_its_keys(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "ds"
    write_foreign(path, plays())
    update(path, "k3", 30)  # adopts it in the same commit
    write_dataset(path, [{"id": "other", "n": 0}], key="id")
    with pytest.raises(KeyError):
        liveset.StreamingDataset(path)["k3"]
    assert liveset.restore(path, 0, author="me") == 3
    newest = liveset.history(path)[0]
    assert (newest.op, newest.message, newest.author) == ("restore", "version 0", "me")
    check_restored(path)
    update(path, "k7", 70)
    assert liveset.StreamingDataset(path)["k7"]["n"] == 70
    check_dataset(open_store(path))


def test_an_adopted_version_is_the_one_that_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "ds"
    write_foreign(path, plays())
    assert liveset.restore(path, 0, session="early") == 0
    assert liveset.adopt(path) == 1
    assert liveset.restore(path, 0) == 1
    update(path, "k3", 30)
    before = set(path.glob("chunk-*"))
    assert liveset.restore(path, 0) == 3
    assert set(path.glob("chunk-*")) == before
    check_restored(path)


def test_keys_of_another_program_that_are_gone_are_not_brought_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "ds"
    write_foreign(path, plays())
    update(path, "k3", 30)
    write_dataset(path, [{"id": "other", "n": 0}], key="id")
    liveset.tag(path, "first", 0)
    assert 1 in liveset.vacuum(path, keep=0, grace=timedelta(0)).expired
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != "lock"}
    with pytest.raises(ValueError, match="version 0 .*keys that another program published, and those are gone"):
        liveset.restore(path, "first")
    after = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != "lock"}
    assert {file for file in after if file.is_file()} == {file for file in before if file.is_file()}
    assert liveset.StreamingDataset(path)[:] == [{"id": "other", "n": 0}]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_vacuum_while_what_another_program_wrote_is_restored(tmp_path: Path, forgets: bool) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "ds"
    write_foreign(path, plays())
    update(path, "k3", 30)
    write_dataset(path, [{"id": "other", "n": 0}], key="id")
    if not forgets:
        for version in (0, 1):
            liveset.tag(path, f"keep-{version}", version)

    class Meanwhile(WrappedStore):
        swaps = 0

        def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
            self.swaps += 1
            if self.swaps == 1:
                swept = liveset.vacuum(path, keep=0, grace=timedelta(0))
                assert forgets == (0 in swept.expired)
            return self.store.swap_head(data, expected, withdraw)

    store = Meanwhile(open_store(path))
    base = open_snapshot(store).index
    arguments = {"force": False, "session": None, "message": "", "author": ""}
    if forgets:
        with pytest.raises((ValueError, NotFound)):
            _restore_foreign(store, 0, base, **arguments)  # type: ignore[arg-type]
        assert liveset.StreamingDataset(path)[:] == [{"id": "other", "n": 0}]
    else:
        index = _restore_foreign(store, 0, base, **arguments)  # type: ignore[arg-type]
        publish_keys(store, index)
        assert store.swaps == 2
        check_restored(path)
    check_dataset(open_store(path))
    assert unneeded_files(open_store(path)) == set()


def test_expired_versions_are_not_restored() -> None:
    store = MemoryStore()
    append(store)
    overwrite(store)
    old = open_snapshot(store, 1).index
    base = open_snapshot(store).index
    sweep(store)
    head = open_snapshot(store).index
    for force in (False, True):
        with pytest.raises(VersionExpired, match="cannot restore: version 1 has expired"):
            check_rebase(Restore(old, force), base, head, [])
    with pytest.raises(VersionExpired):
        restore(store, 1)


def test_a_vacuum_between_looking_and_restoring() -> None:
    store = MemoryStore()
    append(store)
    overwrite(store)
    old, base = open_snapshot(store, 1).index, open_snapshot(store).index
    sweep(store)
    before = content(store)
    with pytest.raises((VersionExpired, SessionExpired)):
        commit_with(store, Restore(old), base)
    assert content(store) == before
