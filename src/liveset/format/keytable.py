"""Key tables: where the sample of each key lives, as arrays that are searched in place.

A table is one immutable file: hashes of the keys in ascending order, and beside each the key itself, the chunk and the slot. A lookup is a
binary search in the mapped file and one comparison with the stored key, so it reads a few pages whatever the number of keys, needs no
decoding, and works in forked processes. A table names chunks by their ids, which outlive the files that hold the chunks.

Samples that leave a chunk make those behind them move down. A delta says so by the slots that became free, not by new rows for all that
moved: the place of a key is the one in its row, less the free slots before it that later tables name. So a delete writes as many rows as it
removes samples, whatever the size of the chunks.

Layout, little-endian, each section padded to a multiple of 8 bytes::

    header      "LSKEYS02" ("LSKEYS03" where slots became free), u8 kind (0 text, 1 int), 7 bytes 0, u64 rows, u64 live rows,
                u64 bytes of the directory, u64 bytes of the heap,
                u64 xxh3-64 of all that follows the header and, before it, of the header without this
    hashes      u64[rows]       xxh3-64 of the key's bytes, ascending
    keys        i64[rows] for int keys; u64[rows + 1] bounds in the heap for text
    chunks      u32[rows]       number in the directory; 0xffffffff: the key was deleted
    slots       u32[rows]
    order       u32[live rows]  rows by chunk and slot
    directory   JSON [[chunk id, samples], ...]; with a third number, how many slots became free, where some chunk has such slots
    heap        UTF-8 of the text keys
    removed     u32[...]        the slots that became free, ascending, chunk by chunk of the directory
"""

from __future__ import annotations

import reprlib
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from liveset.errors import Corrupt, DuplicateKeys, UnsupportedFormat

Key: TypeAlias = str | int

MAGIC = b"LSKEYS02"
MAGIC_REMOVED = b"LSKEYS03"  # who does not know of free slots must not guess
DELETED = 0xFFFFFFFF
_HEADER = struct.Struct("<8sB7xQQQQ")
_CHECK = struct.Struct("<Q")
HEADER_SIZE = _HEADER.size + _CHECK.size
"""Bytes before the first section."""
# Larger tables are only checked when somebody asks for it: reading them whole would make the first lookup slow.
CHECKED_SIZE = 64_000_000
_INT = struct.Struct("<q")
_KINDS: tuple[type, type] = (str, int)
_hash = xxhash.xxh3_64_intdigest
_Array: TypeAlias = np.ndarray[Any, Any]
_Bytes: TypeAlias = bytes | memoryview


class Place(NamedTuple):
    """Where a sample lives: a chunk by its id, and the slot in it."""

    chunk: str
    slot: int


def normalize_key(key: Any) -> Key:
    """Return a key as ``str`` or ``int``: bytes are decoded as UTF-8, numpy integers become int; ``TypeError`` for everything else."""
    kind = type(key)
    if kind is str:
        return key if key.isascii() else _checked_text(key)
    if kind is int or isinstance(key, np.integer) or (isinstance(key, int) and kind is not bool):
        number = int(key)
        if -(1 << 63) <= number < 1 << 63:
            return number
        raise TypeError(f"Unsupported key type: the integer {number} does not fit into 64 bits; use text.")
    if isinstance(key, bytes | bytearray | memoryview):
        try:
            return bytes(key).decode()
        except UnicodeDecodeError as error:
            raise TypeError(f"Unsupported key type: bytes that are not UTF-8: {reprlib.repr(bytes(key))}.") from error
    if isinstance(key, str):
        return _checked_text(str(key))
    raise TypeError(f"Unsupported key type: {kind.__qualname__}. Keys are text (preferred) or integers.")


def _checked_text(key: str) -> str:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"Unsupported key type: text that is not valid Unicode: {reprlib.repr(key)}.") from error
    return key


def shard_of(key: Key, shards: int) -> int:
    """Return the number of the published shard that holds a key (BLAKE2b of its text; a fact of the file format)."""
    if shards <= 1:
        return 0
    import hashlib

    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little") % shards


def key_bytes(key: Key) -> bytes:
    """Return what is hashed and stored for a key."""
    return key.encode() if type(key) is str else _INT.pack(key)


def hashed_key(key: Key) -> tuple[bytes, int]:
    """Return what is stored for a key, and the hash that tables are sorted by."""
    stored = key_bytes(key)
    return stored, _hash(stored)


class KeyColumn:
    """Many keys as arrays: compact, quick to join and to pickle.

    Attributes:
        kind: ``str`` or ``int``.
        hashes: xxh3-64 of each key, ``u64``.
        bounds: where each key's bytes start in ``heap``, and the end of the last one, ``u64``.
        heap: the bytes of all keys.
    """

    __slots__ = ("bounds", "hashes", "heap", "kind")

    def __init__(self, kind: type, hashes: _Array, bounds: _Array, heap: bytes) -> None:
        self.kind, self.hashes, self.bounds, self.heap = kind, hashes, bounds, heap

    @classmethod
    def of(cls, keys: Sequence[Key]) -> KeyColumn:
        """Return the column of normalized keys; ``TypeError`` when text and integers are mixed."""
        kinds = set(map(type, keys))
        if len(kinds) > 1:
            raise TypeError("Unsupported key type: keys are all text or all integers in one dataset, and these are mixed.")
        stored = list(map(key_bytes, keys))
        bounds = np.zeros(len(keys) + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, stored), np.uint64, len(stored)), out=bounds[1:])
        return cls(kinds.pop() if kinds else str, np.fromiter(map(_hash, stored), np.uint64, len(stored)), bounds, b"".join(stored))

    @classmethod
    def join(cls, columns: Sequence[KeyColumn]) -> KeyColumn:
        """Return one column after the other; ``TypeError`` when text and integers are mixed."""
        filled = [column for column in columns if len(column)]
        if len(filled) < 2:
            return filled[0] if filled else cls.of([])
        if len({column.kind for column in filled}) > 1:
            raise TypeError("Unsupported key type: keys are all text or all integers in one dataset, and these are mixed.")
        starts = np.array([0, *accumulate(len(column.heap) for column in filled)], np.uint64)
        bounds = [column.bounds[:-1] + start for column, start in zip(filled, starts[:-1], strict=True)]
        hashes = np.concatenate([column.hashes for column in filled])
        return cls(filled[0].kind, hashes, np.concatenate([*bounds, starts[-1:]]), b"".join(column.heap for column in filled))

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, row: int) -> Key:
        stored = self.stored(row)
        return stored.decode() if self.kind is str else _INT.unpack(stored)[0]

    def __iter__(self) -> Iterator[Key]:
        return map(self.__getitem__, range(len(self)))

    def stored(self, row: int) -> bytes:
        """Return the bytes of a key."""
        return self.heap[int(self.bounds[row]) : int(self.bounds[row + 1])]

    def take(self, rows: _Array) -> KeyColumn:
        """Return the keys of these rows, in their order."""
        sizes = (self.bounds[1:] - self.bounds[:-1])[rows]
        bounds = np.zeros(len(rows) + 1, np.uint64)
        np.cumsum(sizes, out=bounds[1:])
        heap = self.heap
        starts = self.bounds[:-1][rows].tolist()
        pieces = [heap[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]
        return KeyColumn(self.kind, self.hashes[rows], bounds, b"".join(pieces))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and their places as columns, in any order; ``chunks`` counts into ``directory``, ``DELETED`` marks a key that is gone.

    ``removed`` holds the slots, ascending, that became free in chunks whose rows are in older tables.
    """

    keys: KeyColumn
    chunks: _Array
    slots: _Array
    directory: Sequence[tuple[str, int]]
    removed: Mapping[str, _Array] = field(default_factory=dict)

    @classmethod
    def of_chunks(cls, chunks: Iterable[tuple[str, KeyColumn]]) -> Rows:
        """Return the rows of whole chunks: id and the keys of slots 0, 1, ..."""
        listed = list(chunks)
        counts = [len(keys) for _, keys in listed]
        starts = np.repeat(np.array([0, *accumulate(counts)][:-1], np.int64), counts)
        return cls(
            KeyColumn.join([keys for _, keys in listed]),
            np.repeat(np.arange(len(listed), dtype=np.uint32), counts),
            (np.arange(sum(counts)) - starts).astype(np.uint32),
            [(chunk, len(keys)) for chunk, keys in listed],
        )


def pack_table(rows: Rows) -> list[bytes]:
    """Return the buffers of a table file.

    Raises:
        DuplicateKeys: a key occurs more than once; ``keys`` names some of them.
    """
    by_hash = np.argsort(rows.keys.hashes, kind="stable")
    keys = rows.keys.take(by_hash)
    _refuse_repeated(keys, by_hash, rows.keys)
    if keys.kind is int:
        column, heap = keys.heap, b""
    else:
        column, heap = keys.bounds.tobytes(), keys.heap
    chunks, slots = rows.chunks[by_hash].astype("<u4"), rows.slots[by_hash].astype("<u4")
    live = np.flatnonzero(chunks != DELETED)
    order = live[np.lexsort((slots[live], chunks[live]))].astype("<u4")
    listed: list[tuple[str | int, ...]] = [*rows.directory]
    if rows.removed:
        listed = [(*entry, 0) for entry in listed] + [(chunk, 0, len(free)) for chunk, free in rows.removed.items()]
    directory = msgspec.json.encode(listed)
    header = _HEADER.pack(MAGIC_REMOVED if rows.removed else MAGIC, int(keys.kind is int), len(keys), len(order), len(directory), len(heap))
    free = b"".join(slots.astype("<u4").tobytes() for slots in rows.removed.values())
    sections = [keys.hashes.tobytes(), column, chunks.tobytes(), slots.tobytes(), order.tobytes(), directory, heap, free]
    body = [header, *map(_padded, sections)]
    body.insert(1, _CHECK.pack(_checksum(body)))
    return body


def _checksum(buffers: Iterable[Any]) -> int:
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def refuse_duplicates(keys: KeyColumn) -> None:
    """Raise ``DuplicateKeys`` if a key occurs more than once in a column."""
    by_hash = np.argsort(keys.hashes, kind="stable")
    _refuse_repeated(keys.take(by_hash), by_hash, keys)


def _refuse_repeated(keys: KeyColumn, by_hash: _Array, original: KeyColumn) -> None:
    if repeated := _repeated(keys):
        raise DuplicateKeys.naming(original[row] for row in sorted(by_hash[repeated].tolist()))


def _repeated(keys: KeyColumn) -> list[int]:
    """Return the rows of a column sorted by hash whose key stands in an earlier row too."""
    same = np.flatnonzero(keys.hashes[1:] == keys.hashes[:-1])
    found: list[int] = []
    seen: set[Key] = set()
    for row in np.union1d(same, same + 1).tolist():
        key = keys[row]
        if key in seen:
            found.append(row)
        seen.add(key)
    return found


class Layout(NamedTuple):
    """Where the sections of a table lie, as its header says."""

    kind: type
    rows: int
    live: int
    starts: list[int]
    """Of hashes, keys, chunks, slots, order, directory, heap and the free slots, which fill the rest of the file."""
    sizes: list[int]
    """Of the same, without padding, but the last."""

    @classmethod
    def parse(cls, header: _Bytes, size: int, file: str) -> Layout:
        """Check the header of a table of ``size`` bytes; ``Corrupt`` names ``file``."""
        refuse_others(header, file)
        _, kind, rows, live, directory, heap = _HEADER.unpack_from(header)
        if kind not in (0, 1) or max(rows, live, directory, heap) > size:
            raise Corrupt(f"{file}: the header of the key table is damaged.", file=file)
        sizes = [8 * rows, 8 * (rows + (kind == 0)), 4 * rows, 4 * rows, 4 * live, directory, heap]
        starts = list(accumulate((part + -part % 8 for part in sizes), initial=HEADER_SIZE))
        if starts[-1] > size:
            raise Corrupt(f"{file}: the key table has {size} bytes and should have {starts[-1]}.", file=file)
        return cls(_KINDS[kind], rows, live, starts, sizes)


class Listing:
    """The chunks of a table, checked against its rows.

    Attributes:
        directory: id and number of samples of each chunk whose keys the table holds.
        removed: the slots that became free, by chunk, ascending.
        starts: where the rows of each chunk start in the section ``order``, and the end of the last ones.
        numbers: the chunks' numbers in the directory.
    """

    __slots__ = ("directory", "numbers", "removed", "starts")

    def __init__(self, layout: Layout, directory: _Bytes, free: _Bytes, file: str) -> None:
        """Read the directory and the section of free slots, with its padding; ``Corrupt`` names ``file``."""
        listed = _directory(directory, file)
        counts = [entry[2] for entry in listed if len(entry) > 2]
        size, found = 4 * sum(counts), memoryview(free).nbytes
        if size + -size % 8 != found or min(counts, default=0) < 0:
            end = layout.starts[-1]
            raise Corrupt(f"{file}: the key table has {end + found} bytes instead of {end + size + -size % 8}.", file=file)
        slots = np.frombuffer(memoryview(free)[:size], np.uint32)
        self.directory: list[tuple[str, int]] = [entry[:2] for entry in listed if entry[1] or len(entry) < 3 or not entry[2]]
        self.removed: dict[str, _Array] = {}
        for (chunk, *_), start, count in zip(listed, accumulate(counts, initial=0), counts, strict=False):
            if count:
                self.removed[chunk] = slots[start : start + count]
        self.starts = list(accumulate((samples for _, samples in self.directory), initial=0))
        counted = self.starts[-1] == layout.live and min((samples for _, samples in self.directory), default=0) >= 0
        if not counted or any((gone[1:] <= gone[:-1]).any() for gone in self.removed.values()):
            raise Corrupt(f"{file}: the directory of the key table does not fit its rows.", file=file)
        self.numbers = {chunk: number for number, (chunk, _) in enumerate(self.directory)}


class KeyTable:
    """A table file, opened in place; safe to use from several threads and after a fork."""

    def __init__(self, buffer: Any, file: str = "") -> None:
        """Check the header and the sections; ``Corrupt`` names ``file``."""
        view = memoryview(buffer)
        refuse_others(view, file)
        self.file, self._view = file, view
        if len(view) <= CHECKED_SIZE:
            self.check()
        layout = Layout.parse(view, len(view), file)
        self.kind, self.rows, self.live = layout.kind, layout.rows, layout.live
        parts = [view[start : start + size] for start, size in zip(layout.starts, layout.sizes, strict=False)]
        self._hashes = parts[0].cast("Q")
        self._keys = parts[1].cast("q" if self.kind is int else "Q")
        self._chunks, self._slots, self._order = (part.cast("I") for part in parts[2:5])
        self._heap = parts[6]
        self._columns = parts
        listing = Listing(layout, parts[5], view[layout.starts[-1] :], file)
        self.directory, self.removed = listing.directory, listing.removed
        self._starts, self._number = listing.starts, listing.numbers

    def check(self) -> None:
        """Compare the file with its checksum; ``Corrupt`` when they differ."""
        (expected,) = _CHECK.unpack_from(self._view, _HEADER.size)
        if _checksum([self._view[: _HEADER.size], self._view[HEADER_SIZE:]]) != expected:
            raise Corrupt(f"{self.file} is damaged: its checksum differs. Build the keys again with build_keys_index.", file=self.file)

    def find(self, key: Key) -> int | None:
        """Return the row of a key (also of a deleted one), or None."""
        return self.find_stored(*hashed_key(key)) if type(key) is self.kind else None

    def find_stored(self, stored: bytes, hashed: int) -> int | None:
        """Return the row of a key of the right type, of which ``hashed_key`` has been asked."""
        hashes = self._hashes
        row = bisect_left(hashes, hashed)
        while row < self.rows and hashes[row] == hashed:
            if self._stored(row) == stored:
                return row
            row += 1
        return None

    def find_many(self, keys: KeyColumn) -> _Array:
        """Return the rows of many keys, -1 for those that are not here: one vectorised search instead of one for each."""
        found = np.full(len(keys), -1, np.int64)
        if not len(keys) or not self.rows or keys.kind is not self.kind:
            return found
        column = np.frombuffer(self._columns[0], np.uint64)
        by_hash = np.argsort(keys.hashes)  # so that the table is walked through once, from its beginning to its end
        hashes = keys.hashes[by_hash]
        rows = column.searchsorted(hashes)
        hits = np.flatnonzero(column[np.minimum(rows, self.rows - 1)] == hashes)
        bounds, heap, stored_here = keys.bounds.tolist(), keys.heap, self._stored
        for i, row in zip(by_hash[hits].tolist(), rows[hits].tolist(), strict=True):
            stored = heap[bounds[i] : bounds[i + 1]]
            if stored_here(row) == stored:
                found[i] = row
                continue
            hashed, at = self._hashes[row], row + 1  # another key has the same hash
            while at < self.rows and self._hashes[at] == hashed:
                if stored_here(at) == stored:
                    found[i] = at
                    break
                at += 1
        return found

    def places(self, rows: _Array) -> tuple[_Array, _Array]:
        """Return numbers in the directory (``DELETED`` for deleted keys) and slots of many rows."""
        return tuple(np.frombuffer(self._columns[i], np.uint32)[rows] for i in (2, 3))  # type: ignore[return-value]

    def place(self, row: int) -> Place | None:
        """Return where the sample of a row lives; None for a deleted key."""
        chunk = self._chunks[row]
        if chunk == DELETED:
            return None
        if chunk >= len(self.directory):
            raise Corrupt(f"{self.file}: the key table names a chunk that its directory lacks.", file=self.file)
        return Place(self.directory[chunk][0], self._slots[row])

    def key(self, row: int) -> Key:
        """Return the key of a row."""
        if self.kind is int:
            return self._keys[row]
        try:
            return self._stored(row).decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.file}: the key table is damaged.", file=self.file) from error

    def has_chunk(self, chunk: str) -> bool:
        """Tell whether the table holds the keys of a chunk."""
        return chunk in self._number

    def key_at(self, chunk: str, slot: int) -> Key:
        """Return the key of the sample in a slot of a chunk; ``KeyError`` when the table does not hold it."""
        number = self._number[chunk]
        if not 0 <= slot < self.directory[number][1]:
            raise KeyError(slot)
        return self.key(self._order[self._starts[number] + slot])

    def keys_of(self, chunk: str) -> list[Key]:
        """Return the keys of a chunk, slot by slot."""
        number = self._number[chunk]
        return [self.key(row) for row in self._order[self._starts[number] : self._starts[number + 1]].tolist()]

    def to_rows(self) -> Rows:
        """Return copies of the columns, sorted by hash."""
        hashes = np.frombuffer(self._columns[0], np.uint64).copy()
        if self.kind is int:
            bounds, heap = np.arange(0, 8 * self.rows + 8, 8, dtype=np.uint64), bytes(self._columns[1])
        else:
            bounds, heap = np.frombuffer(self._columns[1], np.uint64).copy(), bytes(self._heap)
        chunks, slots = (np.frombuffer(self._columns[i], np.uint32).copy() for i in (2, 3))
        return Rows(KeyColumn(self.kind, hashes, bounds, heap), chunks, slots, self.directory, self.removed)

    def __iter__(self) -> Iterator[tuple[Key, Place | None]]:
        """Yield every key with its place (None when deleted), by hash."""
        for row in range(self.rows):
            yield self.key(row), self.place(row)

    def _stored(self, row: int) -> bytes:
        if self.kind is int:
            return _INT.pack(self._keys[row])
        return bytes(self._heap[self._keys[row] : self._keys[row + 1]])


def refuse_others(header: _Bytes, file: str) -> None:
    """Raise ``Corrupt`` when a file does not start like a key table, ``UnsupportedFormat`` when it is one of a newer format."""
    start = bytes(memoryview(header)[:8])
    if start[:6] == MAGIC[:6] and (number := start[6:]).isdigit() and number > MAGIC_REMOVED[6:]:
        raise UnsupportedFormat(f"{file} was written by a newer liveset. Update liveset.", file=file)
    if memoryview(header).nbytes < HEADER_SIZE or start not in (MAGIC, MAGIC_REMOVED):
        raise Corrupt(f"{file} is not a key table.", file=file)


def _directory(part: _Bytes, file: str) -> list[Any]:
    for kind in (list[tuple[str, int]], list[tuple[str, int, int]]):
        try:
            return list(msgspec.json.decode(part, type=kind))
        except msgspec.ValidationError:
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
    raise Corrupt(f"{file}: the directory of the key table is damaged.", file=file)


def moved_down(slots: Any, free: _Array) -> Any:
    """Return where samples stand once the slots in ``free`` (ascending) have gone; for those in ``free`` it means nothing."""
    return slots - np.searchsorted(free, slots)


def moved_up(slots: Any, free: _Array) -> Any:
    """Return where samples stood before the slots in ``free`` (ascending) went: the reverse of ``moved_down``."""
    return slots + np.searchsorted(free.astype(np.int64) - np.arange(len(free)), slots, side="right")


def join_tables(tables: Sequence[KeyTable], listed: Collection[str], *, whole: bool = False) -> Rows:
    """Return the rows of one table that says what several do.

    Args:
        tables: oldest first; a later one is right where two know the same key or chunk.
        listed: ids of the chunks of the version; what is said of others is left out.
        whole: no table is older than these, so nothing needs to be said of what is gone.
    """
    numbers: dict[str, int] = {}
    columns: list[KeyColumn] = []
    chunks, slots = np.zeros(0, np.int64), np.zeros(0, np.int64)
    removed: dict[str, _Array] = {}
    for table in tables:
        rows = table.to_rows()
        for chunk, free in rows.removed.items():
            if (number := numbers.get(chunk)) is not None:
                at = np.flatnonzero(chunks == number)
                slots[at] = moved_down(slots[at], free)  # the rows of what stood in free slots are superseded
            elif (before := removed.get(chunk)) is not None:
                removed[chunk] = np.union1d(before, moved_up(free.astype(np.int64), before))
            else:
                removed[chunk] = free
        owned = np.array([numbers.setdefault(chunk, len(numbers)) for chunk, _ in rows.directory], np.int64)
        live = rows.chunks != DELETED
        here = np.full(len(rows.chunks), -1, np.int64)
        here[live] = owned[rows.chunks[live]]
        columns.append(rows.keys)
        chunks, slots = np.concatenate([chunks, here]), np.concatenate([slots, rows.slots.astype(np.int64)])
    keys = KeyColumn.join(columns)
    gone = _superseded(keys)
    if whole:
        gone |= chunks < 0
    keep = np.flatnonzero(~gone)
    chunks, slots = chunks[keep], slots[keep]
    names = list(numbers)
    counts = np.bincount(chunks[chunks >= 0], minlength=len(names))
    filled = [number for number in range(len(names)) if counts[number]]
    renumbered = np.full(len(names) + 1, DELETED, np.int64)  # the last one is for -1
    renumbered[filled] = np.arange(len(filled))
    directory = [(names[number], int(counts[number])) for number in filled]
    free_slots = {chunk: free for chunk, free in removed.items() if chunk in listed and not whole}
    return Rows(keys.take(keep), renumbered[chunks].astype(np.uint32), slots.astype(np.uint32), directory, free_slots)


def _superseded(keys: KeyColumn) -> _Array:
    """Return which keys of a column stand in a later row again."""
    found = np.zeros(len(keys), bool)
    by_hash = np.argsort(keys.hashes, kind="stable")
    hashes = keys.hashes[by_hash]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    last: dict[Key, int] = {}
    for row in by_hash[np.union1d(same, same + 1)].tolist():
        if (before := last.get(key := keys[row])) is not None:
            found[min(before, row)] = True
        last[key] = max(row, before) if before is not None else row
    return found
