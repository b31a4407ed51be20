"""Versions: opening, listing and asking for them, on stores with a history."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

import liveset
from liveset.edit.changes import HISTORY, Append, SetAttributes
from liveset.edit.commit import commit
from liveset.edit.versions import list_versions, was_committed
from liveset.errors import (
    Corrupt,
    DatasetNotFound,
    ForeignEdit,
    NotFound,
    OverwriteConflict,
    PositionOutOfRange,
    VersionExpired,
    VersionNotFound,
)
from liveset.format.index import ChunkRecord, Index
from liveset.snapshot import open_snapshot
from liveset.storage import Store, open_store, version_name
from liveset.testing import MemoryStore

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}


def append(store: Store, name: str, samples: int = 2, session: str | None = None) -> Index:
    store.write(name, name.encode())
    return commit(store, Append(CONFIG, (ChunkRecord(name, samples, len(name)),)), None, session=session, message=f"adds {name}")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    for name in ("a", "b", "c"):
        append(store, name, session=f"job {name}")
    return store


def test_each_version_can_be_opened(store: MemoryStore) -> None:
    for version in (1, 2, 3):
        snapshot = open_snapshot(store, version)
        assert snapshot.version == version
        assert [record.filename for record in snapshot.index.chunks] == ["a", "b", "c"][:version]
        assert b"".join(snapshot.chunk_buffer(chunk) for chunk in range(version)) == b"abc"[:version]
    assert open_snapshot(store).version == 3


def test_versions_that_never_were_or_are_gone_are_told_apart(store: MemoryStore) -> None:
    for version in (0, 4, -1):
        with pytest.raises(VersionNotFound, match=f"no version {version}"):
            open_snapshot(store, version)
    store.delete([version_name(1)])
    with pytest.raises(VersionExpired, match="version 1 "):
        open_snapshot(store, 1)


def test_a_version_archived_between_two_looks_is_found(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = store.read_head

    def late() -> object:
        monkeypatch.setattr(store, "read_head", plain)
        append(store, "d")
        return store.read_head()

    monkeypatch.setattr(store, "read_head", late)
    assert open_snapshot(store, 3).version == 3


def test_an_adopted_dataset_keeps_its_version_zero() -> None:
    store = MemoryStore()
    old = json.dumps({"chunks": [{"filename": "old", "chunk_size": 5, "chunk_bytes": 3}], "config": CONFIG}).encode()
    store.foreign_head(old)
    assert open_snapshot(store, 0).version == 0
    assert open_snapshot(store).version == 0
    append(store, "a")
    assert open_snapshot(store, 0).index.to_bytes() == old
    assert len(open_snapshot(store, 1)) == 7
    assert [entry.version for entry in list_versions(store)] == [1]


def test_a_missing_dataset_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"absent does not exist\."):
        open_snapshot(open_store(tmp_path / "absent"))
    for version in (None, 3):
        with pytest.raises(DatasetNotFound, match=r"doesn't contain any index\.json file\.") as info:
            open_snapshot(open_store(tmp_path), version)
    assert isinstance(info.value, FileNotFoundError)
    assert isinstance(info.value, ValueError)


def test_damaged_archives_are_not_opened(store: MemoryStore) -> None:
    name = version_name(2)
    data = store.read(name)
    for wrong in (data[:-10], store.read(version_name(1)), data.replace(b'"chunk_size": 2', b'"chunk_size": 3')):
        store.delete([name])
        store.write(name, wrong)
        with pytest.raises(Corrupt, match="00000002"):
            open_snapshot(store, 2)


def test_a_changed_head_is_no_numbered_version(store: MemoryStore) -> None:
    head = store.read_head()
    assert head is not None
    store.foreign_head(head.data.replace(b'"chunk_size": 2', b'"chunk_size": 3'))
    with pytest.raises(ForeignEdit, match="changed by another program"):
        open_snapshot(store, 3)
    assert len(open_snapshot(store)) == 9


def test_a_chunk_that_is_gone_is_named(store: MemoryStore) -> None:
    snapshot = open_snapshot(store, 2)
    store.delete(["b"])
    assert bytes(snapshot.chunk_buffer(0)) == b"a"
    with pytest.raises(NotFound, match=r"/b does not exist, but version 2.*`liveset repair`"):
        snapshot.chunk_buffer(1)
    store.write("b", b"")
    with pytest.raises(Corrupt, match="truncated"):
        snapshot.chunk_buffer(1)


def test_chunks_that_are_compressed_as_a_whole_may_be_shorter_than_their_size() -> None:
    store = MemoryStore()
    store.write("a.zstd.bin", b"short")
    record = ChunkRecord("a.zstd.bin", 1, 1000)
    commit(store, Append(CONFIG | {"compression": "zstd"}, (record,)), None)
    assert bytes(open_snapshot(store).chunk_buffer(0)) == b"short"


def test_positions_lead_to_chunk_and_slot() -> None:
    sizes = [random.Random(1).choice([0, 1, 2, 5]) for _ in range(50)]
    store = MemoryStore()
    commit(store, Append(CONFIG, tuple(ChunkRecord(f"{i}", size, 0) for i, size in enumerate(sizes))), None)
    snapshot = open_snapshot(store)
    assert [snapshot.locate(i) for i in range(len(snapshot))] == [(c, s) for c, size in enumerate(sizes) for s in range(size)]
    for position in (-1, len(snapshot)):
        with pytest.raises(PositionOutOfRange):
            snapshot.locate(position)


def test_snapshots_are_pickled_for_workers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, "a")
    snapshot = open_snapshot(store)
    append(store, "b")
    copy = pickle.loads(pickle.dumps(snapshot))
    assert copy.index == snapshot.index
    assert copy.starts == [0, 2]
    assert bytes(copy.chunk_buffer(0)) == b"a"


def test_history_is_listed_newest_first_beyond_what_a_head_remembers() -> None:
    store = MemoryStore()
    total = 2 * HISTORY + 10
    for number in range(1, total + 1):
        append(store, f"{number}", session=f"job {number}")
    head = open_snapshot(store).index
    assert head.edit is not None
    assert len(head.edit.history) == HISTORY
    listed = list_versions(store)
    assert [entry.version for entry in listed] == list(range(total, 0, -1))
    assert [entry.session for entry in listed] == [f"job {n}" for n in range(total, 0, -1)]
    assert listed[-1].message == "adds 1"
    assert all(was_committed(store, f"job {number}") for number in (1, HISTORY, HISTORY + 1, total))
    assert not was_committed(store, "job 0")
    # Where the history is cut, "not found" cannot be told from "no longer known".
    store.delete([version_name(total - HISTORY)])
    assert was_committed(store, f"job {total - HISTORY}")
    with pytest.raises(VersionExpired, match="cut"):
        was_committed(store, "job 1")
    assert [entry.version for entry in list_versions(store)][-1] == total - HISTORY


def test_an_archive_of_another_dataset_is_not_taken_for_history() -> None:
    stores = MemoryStore(), MemoryStore()
    for store in stores:
        for number in range(HISTORY + 3):
            append(store, f"{number}", session=f"job {number}")
    ours, theirs = stores
    oldest = version_name(3)  # of those that the head remembers: where the search goes on
    ours.delete([oldest])
    ours.write(oldest, theirs.read(oldest))
    with pytest.raises(VersionExpired, match="another line"):
        was_committed(ours, "job 0")


def test_a_base_of_another_dataset_is_not_taken_for_an_ancestor() -> None:
    here, elsewhere = MemoryStore(), MemoryStore()
    for store in (here, elsewhere):
        append(store, "a")
    base = open_snapshot(elsewhere).index
    append(here, "b")
    with pytest.raises(OverwriteConflict, match="another one was put in its place"):
        commit(here, Append(CONFIG, ()), base)


def test_nothing_was_committed_where_nothing_is(tmp_path: Path) -> None:
    """What a first commit leaves that did not land has no index yet; a path that is wrong must not say that nothing was done."""
    assert not was_committed(open_store(tmp_path), "job")
    with pytest.raises(DatasetNotFound, match="absent does not exist"):
        liveset.was_committed(tmp_path / "absent", "job")
    with pytest.raises(TypeError, match="session= must be text, not NoneType"):
        was_committed(open_store(tmp_path), None)  # type: ignore[arg-type]


def test_attributes_are_versioned(store: MemoryStore) -> None:
    base = open_snapshot(store).index
    commit(store, SetAttributes({"name": "digits"}), base)
    assert open_snapshot(store).index.attributes == {"name": "digits"}
    assert open_snapshot(store, 3).index.attributes == {}
