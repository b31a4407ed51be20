"""The key store of one version: which sample has which key.

A dataset of ours names its key tables in the head: the newest table that knows a key, or a chunk, is right about it. A dataset that another
program wrote has only the published Parquet shards, which are searched row group by row group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np

from liveset.errors import Corrupt, KeyNotFound, NotFound
from liveset.format.index import ChunkRecord, Index
from liveset.format.keyjoin import moved_up
from liveset.format.keytable import CHECKED_SIZE, DELETED, Key, KeyColumn, KeyTable, hashed_key
from liveset.format.lazy import lazy
from liveset.format.remotetable import RangedKeyTable
from liveset.format.stamp import KeyFiles
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store, has_ranges

__all__ = ["KeyStore", "TableFile", "TableKeys", "open_keys"]

P = ParamSpec("P")
T = TypeVar("T")

_Table: TypeAlias = KeyTable | RangedKeyTable

# Reading parts of a table is a request for each lookup; fetching it whole is one for all, and all of its bytes. What is spent on parts
# before a table is fetched is about what fetching costs, so no order of lookups costs much more than twice the cheapest way.
_REQUEST = 1_000_000
"""Bytes that cost about as much as a request; tables up to twice as large are fetched at once."""
_TOGETHER = 16
"""Tables that are fetched at the same time."""
_BYTES_PER_KEY = 400_000
"""Where more keys are looked up at once, much of the table would be read anyway."""


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
    return KeyFiles(edit.key_files.kind, len(snapshot), edit.key_files.base, sizes=edit.key_files.sizes)


class _Missing(NotFound):
    """A key table is not there; ``table`` names it."""

    table: str = ""


class TableFile:
    """The file of a key table: whole where that costs nothing or pays, in parts otherwise.

    Args:
        store: where it lies.
        name: of the file.
        size: its bytes, 0 where they are not known.
        directory: bytes that naming the chunks takes, as far as that is known.
    """

    def __init__(self, store: Store, name: str, size: int = 0, directory: int = 0) -> None:
        self._store, self._name, self._size, self._directory = store, name, size, directory
        self._lookups = 0
        self._parts: RangedKeyTable | None = None

    @lazy
    def whole(self) -> KeyTable:
        """The table, fetched or mapped; one that was fetched is compared with its checksum, and fetched again if a cache has damaged it."""
        with self._named():
            try:
                return self._opened(fresh=False)
            except Corrupt:
                if not self._store.remote:
                    raise
            return self._opened(fresh=True)

    def _opened(self, *, fresh: bool) -> KeyTable:
        view = self._store.map(self._name, self._size, fresh=fresh)
        return KeyTable(view, self._name, checked=len(view) if self._store.remote else CHECKED_SIZE)

    @property
    def opened(self) -> bool:
        """Whether the whole table is open."""
        return "whole" in self.__dict__

    @property
    def small(self) -> bool:
        """Whether it is never read in parts."""
        return self._size <= 2 * _REQUEST

    def table(self, keys: int = 0) -> _Table:
        """Return the table for looking up so many keys at once; 0 for a look at its header."""
        if not self.opened and (parts := self._in_parts(keys)) is not None:
            return parts
        return self.whole

    def _in_parts(self, keys: int) -> RangedKeyTable | None:
        self._lookups += keys > 0
        if self.small or self._lookups > self._size // _REQUEST or keys > self._size // _BYTES_PER_KEY:
            self._parts = None
        elif self._parts is None and not self._is_cached() and has_ranges(self._store):
            parts = RangedKeyTable(self._read, self._size, self._name, self._directory)
            self._parts = parts if parts.readable else None
        return self._parts

    def _is_cached(self) -> bool:
        with self._named():
            return self._store.cached(self._name, self._size) is not None

    def _read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        with self._named():
            return self._store.read_ranges(self._name, ranges)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except NotFound as error:
            raise _Missing(str(error), file=self._name, table=self._name) from error


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
        """The tables, newest first, for whoever reads all of them; mapped where they are on this machine, and fetched where not."""
        return self._following(lambda: self._fetched(self._files))

    @lazy
    def _files(self) -> list[TableFile]:
        records = self._snapshot.index.chunks if self._snapshot.store.remote else ()
        directory = sum(len(record.id or record.filename) + len(f'["",{record.samples}],') for record in records)
        return [TableFile(self._snapshot.store, name, self.files.sizes.get(name, 0), directory) for name in reversed(self.files.tables)]

    def _each(self, keys: int) -> Iterable[_Table]:
        """Return the tables, newest first, for looking up so many keys; on a remote store each is opened when its turn comes."""
        if "tables" in self.__dict__ or not self._snapshot.store.remote:
            return self.tables
        self._fetched([file for file in self._files if file.small])  # a lookup has to know all but the oldest
        return (file.table(keys) for file in self._files)

    def _fetched(self, files: Sequence[TableFile]) -> list[KeyTable]:
        """Return whole tables; those that are not open yet are fetched together where that costs a transfer each."""
        missing = [file for file in files if not file.opened] if self._snapshot.store.remote else []
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), _TOGETHER)) as pool:
                list(pool.map(attrgetter("whole"), missing))
        return [file.whole for file in files]

    def _following(self, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something with the tables; a purge may have replaced them since the version was opened."""
        while True:
            try:
                return look(*args, **kwargs)
            except _Missing as error:
                self._snapshot.follow()
                again = open_keys(self._snapshot)
                if not isinstance(again, TableKeys) or error.table in again.files.tables:
                    raise self._snapshot.gone(error.table) from error
                self.files = again.files
                for made in ("_files", "tables", "_removed"):
                    self.__dict__.pop(made, None)

    @lazy
    def _numbers(self) -> dict[str, int]:
        return {record.id or record.filename: number for number, record in enumerate(self._snapshot.index.chunks)}

    @lazy
    def _removed(self) -> dict[str, list[tuple[int, list[int]]]]:
        """The slots that became free in a chunk: numbers of the tables (newest first) that say so, oldest first, and the slots."""
        found: dict[str, list[tuple[int, list[int]]]] = {}
        tables = islice(self._each(0), len(self.files.tables) - 1)  # what the oldest one says, no older one needs to know
        for number, table in reversed([*enumerate(tables)]):
            for chunk, free in table.removed.items():
                found.setdefault(chunk, []).append((number, free.tolist()))
        return found

    def locate(self, key: Key) -> tuple[int, int] | None:
        return self._following(self._locate, key) if type(key) is self.kind else None

    def _locate(self, key: Key) -> tuple[int, int] | None:
        stored, hashed = hashed_key(key)
        for number, table in enumerate(self._each(1)):
            if (found := table.look_up(stored, hashed)) is not None:
                if found[0] == DELETED:
                    return None
                place = self._number(table, found[0]), found[1]
                return self._there(table, self._moved(place, number) if self._removed else place)
        return None

    def _there(self, table: _Table, place: tuple[int, int]) -> tuple[int, int] | None:
        """Return a place, or None when a purge erased the sample that stood there."""
        record = self._snapshot.index.chunks[place[0]]
        if place[1] >= record.samples:
            raise _unlisted(table, record)
        erased = record.erased
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
        return self._following(self._locate_column, keys)

    def _locate_column(self, keys: KeyColumn) -> list[tuple[int, int] | None]:
        places: list[tuple[int, int] | None] = [None] * len(keys)
        left = np.arange(len(keys))
        for number, table in enumerate(self._each(len(keys))):
            if not len(left):
                break
            chunks, slots = table.look_up_many(keys.take(left) if len(left) < len(keys) else keys)
            live = (chunks >= 0) & (chunks != DELETED)
            for i, chunk, slot in zip(left[live].tolist(), chunks[live].tolist(), slots[live].tolist(), strict=True):
                place = self._number(table, chunk), slot
                places[i] = self._there(table, self._moved(place, number) if self._removed else place)
            left = left[chunks < 0]
        return places

    def key_at(self, chunk: int, slot: int) -> Key:
        return self._following(self._key_at, chunk, slot)

    def _key_at(self, chunk: int, slot: int) -> Key:
        name = self._id(chunk)
        known, table = self._table_of(name, 1)
        for number, free in reversed(self._removed.get(name, ())):
            if number < known:
                slot = int(moved_up(slot, np.array(free)))
        try:
            return table.key_at(name, slot)
        except KeyError:
            raise _unlisted(table, self._snapshot.index.chunks[chunk]) from None

    def keys_of(self, chunk: int) -> list[Key]:
        return self._following(self._keys_of, chunk)

    def _keys_of(self, chunk: int) -> list[Key]:
        name = self._id(chunk)
        known, table = self._table_of(name, self._snapshot.index.chunks[chunk].samples)
        keys = table.keys_of(name)
        for number, free in self._removed.get(name, ()):
            if number < known:
                gone = set(free)
                keys = [key for slot, key in enumerate(keys) if slot not in gone]
        if len(keys) != (record := self._snapshot.index.chunks[chunk]).samples:
            raise _unlisted(table, record)
        return keys

    def _id(self, chunk: int) -> str:
        record = self._snapshot.index.chunks[chunk]
        return record.id or record.filename

    def _table_of(self, name: str, keys: int) -> tuple[int, _Table]:
        """Return number and table that hold the keys of a chunk, for looking up so many of them."""
        for number, table in enumerate(self._each(0)):
            if table.has_chunk(name):
                return number, table if isinstance(table, KeyTable) else self._files[number].table(keys)
        raise Corrupt(f"no key table of version {self._snapshot.version} knows the chunk {name!r}.", file=name)

    def _number(self, table: _Table, chunk: int) -> int:
        """Return the number that a chunk of a table's directory has in this version."""
        try:
            return self._numbers[table.directory[chunk][0]]
        except LookupError:
            raise Corrupt(f"{table.file} names a chunk that the index does not list.", file=table.file) from None


def _unlisted(table: _Table, record: ChunkRecord) -> Corrupt:
    text = f"{table.file} has other samples of {record.filename} than the index lists. Build the keys again with build_keys_index."
    return Corrupt(text, file=table.file)


def missing_key(keys: KeyStore, key: Any, path: str) -> KeyNotFound:
    """Return the error for a key that is not there; it says so when the key has the wrong type."""
    if type(key) is not keys.kind:
        have = "text" if keys.kind is str else "integers"
        return KeyNotFound(f"{key!r}: the keys of {path} are {have}, not {type(key).__name__}.", key=key)
    return KeyNotFound(f"{path} has no sample with the key {key!r}.", key=key)
