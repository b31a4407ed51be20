"""Invariants: what must hold for a dataset whatever happened to it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import xxhash

from liveset.edit.changes import files_of
from liveset.edit.keyfiles import KEYS, ids_of
from liveset.edit.retention import STAGED
from liveset.edit.versions import list_versions
from liveset.format.chunk import open_chunk
from liveset.format.codec import Compression
from liveset.format.fields import field_value
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import normalize_key
from liveset.format.schema import Decoder, Schema
from liveset.keystore import TableKeys, open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import VERSIONS, Store, version_name

__all__ = ["check_dataset", "stage", "unneeded_files"]


def stage(store: Store, name: str, samples: int = 1) -> ChunkRecord:
    """Writes a chunk of any bytes, with the checksum by which ``check_dataset`` knows them again."""
    data = name.encode() * 50
    store.write(name, data)
    return ChunkRecord(name, samples, len(data), id=name, check=f"xxh3:{xxhash.xxh3_64_hexdigest(data)}")


def check_dataset(store: Store) -> list[Index]:
    """Asserts the promises about the head and every version before it, and returns all versions, oldest first; none where no head is."""
    if store.read_head() is None:
        assert not list(store.list(VERSIONS)), "versions are archived, but there is no head"
        return []
    newest = open_snapshot(store).index
    assert newest.digest_matches()
    versions = [open_snapshot(store, version) for version in _kept_numbers(store, newest)]
    for snapshot in versions:
        _check_version(snapshot)
    for parent, child in pairwise(versions):
        assert child.index.edit is not None
        if child.version != parent.version + 1:
            continue  # those between have expired
        assert child.index.edit.parent == (parent.version, parent.index.id)
        assert child.index.edit.history == ((parent.index.edit.entry, *parent.index.edit.history)[:64] if parent.index.edit else ())
        assert parent.index.edit is None or parent.index.edit.time < child.index.edit.time, "a version is not later than its parent"
        assert parent.index.members.get("updated_at") != child.index.members["updated_at"]
    sessions = Counter(entry.session for entry in list_versions(store))
    assert not sessions or max(sessions.values()) == 1, f"a session was applied more than once: {sessions}"
    known = {version_name(snapshot.version) for snapshot in versions}
    archived = {entry.name for entry in store.list(VERSIONS)}
    if newest.edit is not None and newest.edit.fence is not None:
        # What a vacuum did not get round to deleting is gone for everybody else.
        archived -= {version_name(version) for version in range(newest.edit.fence.expired_before)}
        assert all(newest.edit.fence.keeps(version) for version in newest.edit.tags.values()), "a tag names a version that expired"
    assert archived <= known, "an archived head never was one"
    return [snapshot.index for snapshot in versions]


def unneeded_files(store: Store) -> set[str]:
    """The names of files of ours that a vacuum without grace must not leave, since no version that is kept needs them."""
    newest = open_snapshot(store).index
    numbers = _kept_numbers(store, newest)
    needed = {name for version in numbers for name in files_of(open_snapshot(store, version).index)}
    needed |= {version_name(version) for version in numbers}
    ours = ("chunk-", KEYS, VERSIONS, STAGED)
    listed = {entry.name for entry in store.list("") if entry.name.startswith(ours) or entry.name.endswith(".tmp")}
    return listed - needed


def _kept_numbers(store: Store, newest: Index) -> list[int]:
    fence = newest.edit.fence if newest.edit is not None else None
    if fence is not None and fence.expired_before > 0:
        return [*fence.kept, *range(fence.expired_before, newest.version + 1)]
    first = 0 if newest.version == 0 or (oldest := open_snapshot(store, 1).index.edit) is None or oldest.parent is not None else 1
    return list(range(first, newest.version + 1))


def _check_version(snapshot: Snapshot) -> None:
    for number, record in enumerate(snapshot.index.chunks):
        name, data = snapshot.chunk_file(number)
        # The index tells the size of a file that is compressed as a whole before that; the old tool inflates such files where they lie.
        packed = snapshot.index.compressed_files and name == record.filename
        assert packed or len(data) == record.size, f"{name} of version {snapshot.version} is not whole"
        if record.check is not None and name == record.filename:
            assert record.check == f"xxh3:{xxhash.xxh3_64_hexdigest(data)}", f"{name} of version {snapshot.version} is damaged"
    keys = open_keys(snapshot)
    if isinstance(keys, TableKeys) and snapshot.index.edit is not None:  # those of another program are not kept with its version
        _check_keys(snapshot, keys)


def _check_keys(snapshot: Snapshot, keys: TableKeys) -> None:
    """Every sample has a key, every key leads to its sample, and no table leads anywhere else."""
    index, what = snapshot.index, f"of version {snapshot.version}"
    known = {chunk for table in keys.tables for chunk, _ in table.directory}
    assert set(ids_of(index)) <= known, f"no table {what} knows some of the chunks"
    found = [keys.keys_of(number) for number in range(len(index.chunks))]
    assert [len(of_chunk) for of_chunk in found] == [record.samples for record in index.chunks], f"keys {what} are missing or too many"
    places = {key: (number, slot) for number, of_chunk in enumerate(found) for slot, key in enumerate(of_chunk)}
    assert len(places) == len(keys) == index.samples, f"a key {what} occurs twice, or their count is wrong"
    there = {key: place for key, place in places.items() if place[1] not in index.chunks[place[0]].erased}
    assert keys.locate_many([*places]) == [there.get(key) for key in places], f"a key {what} leads to another sample"
    ever = {key for table in keys.tables for key, _ in table}
    for key in ever | places.keys():
        assert keys.locate(key) == there.get(key), f"the key {key!r} {what} leads elsewhere"
    for key, (number, slot) in places.items():
        assert keys.key_at(number, slot) == key, f"the sample of {key!r} {what} has another key"
    if (field := index.layout_of_keys.get("field")) is not None and index.config is not None:
        schema = Schema.from_config(index.config)
        decoder = Decoder(schema, fields=[field] if field in schema.fields else None, strict=not index.has_foreign_chunks)
        for number, (record, of_chunk) in enumerate(zip(index.chunks, found, strict=True)):
            chunk = open_chunk(snapshot.chunk_file(number)[1], record, decoder, Compression.from_config(index.config))
            for slot in sorted({*range(record.samples)} - {*record.erased}):
                stored = normalize_key(field_value(chunk.read(slot), field))
                assert stored == of_chunk[slot], f"{of_chunk[slot]!r} {what} leads to the sample of {stored!r}"
