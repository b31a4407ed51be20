"""The key store of one version: which sample has which key.

A dataset of ours names its key tables in the head: the newest table that knows a key, or a chunk, is right about it. A dataset that another
program wrote has only the published Parquet shards, which are searched row group by row group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from liveset.errors import Corrupt, KeyNotFound, NotFound
from liveset.format.index import Index
from liveset.format.keytable import DELETED, Key, KeyColumn, KeyTable, Place, hashed_key, moved_up
from liveset.format.lazy import lazy
from liveset.format.stamp import KeyFiles
from liveset.snapshot import Snapshot, open_snapshot

__all__ = ["KeyStore", "TableKeys", "open_keys"]


class KeyStore(Protocol):
    """What reading and editing ask of the keys of a version; positions are chunk number and slot."""

    @property
    def kind(self) -> type:
        """``str`` or ``int``: all keys of a dataset are of one type."""

    def __len__(self) -> int: ...

    def locate(self, key: Key) -> tuple[int, int] | None:
        """Return chunk number and slot of a key, or None."""

    def locate_many(self, keys: Sequence[Key]) -> list[tuple[int, int] | None]:
        """Return the places of many keys."""

    def locate_column(self, keys: KeyColumn) -> list[tuple[int, int] | None]:
        """Return the places of many keys of one type, already hashed."""

    def key_at(self, chunk: int, slot: int) -> Key:
        """Return the key of a sample; where a purge erased it, a random one, which leads nowhere."""

    def keys_of(self, chunk: int) -> list[Key]:
        """Return the keys of a chunk, slot by slot, like ``key_at``."""


def open_keys(snapshot: Snapshot) -> KeyStore | None:
    """Return the keys of a version, or None when it has none; opens files, and reads nothing before the first lookup."""
    edit = snapshot.index.edit
    if edit is not None:
        return TableKeys(snapshot, edit.key_files) if edit.key_files is not None else None
    from liveset.parquetkeys import open_published

    published = open_published(snapshot)
    # Looked at only now that the shards are open: those of a later version are published after its head.
    if (head := snapshot.store.read_head()) is not None and Index.parse(head.data).edit is not None:
        files = _adopted_keys(snapshot)
        return TableKeys(snapshot, files) if files is not None else None
    return published


def _adopted_keys(snapshot: Snapshot) -> KeyFiles | None:
    """Return the table that the keys of another program became, if the first version of ours was made from all of its samples."""
    try:
        edit = open_snapshot(snapshot.store, 1).index.edit
    except NotFound:
        return None
    if edit is None or edit.key_files is None or edit.op not in ("adopt", "replace", "insert", "delete", "edit"):
        return None
    # What an edit made of the keys in the same commit is in deltas.
    return KeyFiles(edit.key_files.kind, len(snapshot), edit.key_files.base)


class TableKeys:
    """The keys of a dataset of ours; safe to use from several threads and after a fork."""

    def __init__(self, snapshot: Snapshot, files: KeyFiles) -> None:
        self._snapshot, self.files = snapshot, files

    @property
    def kind(self) -> type:
        return int if self.files.kind == "int" else str

    def __len__(self) -> int:
        return self.files.count

    @lazy
    def tables(self) -> list[KeyTable]:
        """The tables, newest first; files are mapped, not read. A purge may have replaced them since the version was opened."""
        while True:
            found = []
            try:
                for name in reversed(self.files.tables):
                    found.append(KeyTable(self._snapshot.store.map(name, 0), name))
                return found
            except NotFound as error:
                self._snapshot.follow()
                again = open_keys(self._snapshot)
                if not isinstance(again, TableKeys) or again.files == self.files:
                    raise self._snapshot.gone(name) from error
                self.files = again.files

    @lazy
    def _numbers(self) -> dict[str, int]:
        return {record.id or record.filename: number for number, record in enumerate(self._snapshot.index.chunks)}

    @lazy
    def _removed(self) -> dict[str, list[tuple[int, list[int]]]]:
        """The slots that became free in a chunk: numbers of the tables (newest first) that say so, oldest first, and the slots."""
        found: dict[str, list[tuple[int, list[int]]]] = {}
        for number in range(len(self.tables) - 1, -1, -1):
            for chunk, free in self.tables[number].removed.items():
                found.setdefault(chunk, []).append((number, free.tolist()))
        return found

    def locate(self, key: Key) -> tuple[int, int] | None:
        if type(key) is not self.kind:
            return None
        stored, hashed = hashed_key(key)
        for number, table in enumerate(self.tables):
            if (row := table.find_stored(stored, hashed)) is not None:
                place = self._resolve(table.place(row), table)
                return self._there(self._moved(place, number) if self._removed else place) if place is not None else None
        return None

    def _there(self, place: tuple[int, int]) -> tuple[int, int] | None:
        """Return a place, or None when a purge erased the sample that stood there."""
        erased = self._snapshot.index.chunks[place[0]].erased
        at = bisect_left(erased, place[1])
        return None if at < len(erased) and erased[at] == place[1] else place

    def _moved(self, place: tuple[int, int], known: int) -> tuple[int, int]:
        """Return where a sample stands now, of which the table number ``known`` says where it stood."""
        slot = place[1]
        for number, free in self._removed.get(self._id(place[0]), ()):
            if number < known:
                slot -= bisect_left(free, slot)
        return place[0], slot

    def locate_many(self, keys: Sequence[Key]) -> list[tuple[int, int] | None]:
        if any(type(key) is not self.kind for key in keys):
            return [self.locate(key) for key in keys]
        return self.locate_column(KeyColumn.of(keys))

    def locate_column(self, keys: KeyColumn) -> list[tuple[int, int] | None]:
        places: list[tuple[int, int] | None] = [None] * len(keys)
        left = np.arange(len(keys))
        for number, table in enumerate(self.tables):
            if not len(left):
                break
            rows = table.find_many(keys.take(left) if len(left) < len(keys) else keys)
            hits = np.flatnonzero(rows >= 0)
            chunks, slots = table.places(rows[hits])
            for i, chunk, slot in zip(left[hits].tolist(), chunks.tolist(), slots.tolist(), strict=True):
                if chunk != DELETED:
                    place = self._number(table, chunk), slot
                    places[i] = self._there(self._moved(place, number) if self._removed else place)
            left = left[rows < 0]
        return places

    def key_at(self, chunk: int, slot: int) -> Key:
        known, name = self._table_of(chunk), self._id(chunk)
        for number, free in reversed(self._removed.get(name, ())):
            if number < known:
                slot = int(moved_up(slot, np.array(free)))
        return self.tables[known].key_at(name, slot)

    def keys_of(self, chunk: int) -> list[Key]:
        known, name = self._table_of(chunk), self._id(chunk)
        keys = self.tables[known].keys_of(name)
        for number, free in self._removed.get(name, ()):
            if number < known:
                gone = set(free)
                keys = [key for slot, key in enumerate(keys) if slot not in gone]
        return keys

    def _id(self, chunk: int) -> str:
        record = self._snapshot.index.chunks[chunk]
        return record.id or record.filename

    def _table_of(self, chunk: int) -> int:
        name = self._id(chunk)
        for number, table in enumerate(self.tables):
            if table.has_chunk(name):
                return number
        raise Corrupt(f"no key table of version {self._snapshot.version} knows the chunk {name!r}.", file=name)

    def _number(self, table: KeyTable, chunk: int) -> int:
        """Return the number that a chunk of a table's directory has in this version."""
        try:
            return self._numbers[table.directory[chunk][0]]
        except LookupError:
            raise Corrupt(f"{table.file} names a chunk that the index does not list.", file=table.file) from None

    def _resolve(self, place: Place | None, table: KeyTable) -> tuple[int, int] | None:
        if place is None:
            return None
        number = self._numbers.get(place.chunk)
        if number is None:
            raise Corrupt(f"{table.file} names the chunk {place.chunk!r}, which the index does not list.", file=table.file)
        return number, place.slot


def missing_key(keys: KeyStore, key: Any, path: str) -> KeyNotFound:
    """Return the error for a key that is not there; it says so when the key has the wrong type."""
    if type(key) is not keys.kind:
        have = "text" if keys.kind is str else "integers"
        return KeyNotFound(f"{key!r}: the keys of {path} are {have}, not {type(key).__name__}.", key=key)
    return KeyNotFound(f"{path} has no sample with the key {key!r}.", key=key)
