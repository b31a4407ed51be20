"""Key tables: where the sample of each key lives, in pages that are searched in place.

A table is one immutable file. Its rows (a hash of the key, chunk and slot, and the key itself) stand in the order of the hashes, divided
into pages by the first bits of the hash. So the page of a key follows from its hash, and has all that a lookup needs: in a mapped file that
is a binary search among some hundred rows, which decodes nothing and works in forked processes, and on another machine it is one request. A
table names chunks by their ids, which outlive the files that hold the chunks.

Samples that leave a chunk make those behind them move down. A delta says so by the slots that became free, not by new rows for all that
moved: the place of a key is the one in its row, less the free slots before it that later tables name. So a delete writes as many rows as it
removes samples, whatever the size of the chunks. The layout of the file is in ``keyfront``.
"""

from __future__ import annotations

import reprlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from liveset.errors import Corrupt, DuplicateKeys
from liveset.format.keyfront import (
    CHECK,
    COLUMNS_HEADER,
    HEADER,
    HEADER_SIZE,
    KINDS,
    MAGIC,
    Front,
    Listing,
    checksum,
    damaged,
    has_pages,
    page_bits,
    room,
)

Key: TypeAlias = str | int

DELETED = 0xFFFFFFFF
# Larger tables are only checked when somebody asks for it: reading them whole would make the first lookup slow.
CHECKED_SIZE = 64_000_000
_INT = struct.Struct("<q")
_hash = xxhash.xxh3_64_intdigest
_Array: TypeAlias = np.ndarray[Any, Any]


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


def pack_table(rows: Rows) -> list[Any]:
    """Return the buffers of a table file.

    Raises:
        DuplicateKeys: a key occurs more than once; ``keys`` names some of them.
    """
    by_hash = np.argsort(rows.keys.hashes, kind="stable")
    keys = rows.keys.take(by_hash)
    _refuse_repeated(keys, by_hash, rows.keys)
    chunks, slots = rows.chunks[by_hash], rows.slots[by_hash]
    live = np.flatnonzero(chunks != DELETED)
    order = live[np.lexsort((slots[live], chunks[live]))].astype("<u4")
    listed: list[tuple[str | int, ...]] = [*rows.directory]
    if rows.removed:
        listed = [(*entry, 0) for entry in listed] + [(chunk, 0, len(free)) for chunk, free in rows.removed.items()]
    directory = msgspec.json.encode(listed)
    bits = page_bits(24 * len(keys) + (len(keys.heap) if keys.kind is str else 0))
    firsts = np.searchsorted(_pages_of(keys.hashes, bits), np.arange((1 << bits) + 1))
    start = HEADER_SIZE + room(4 * len(firsts)) + 8 * len(firsts) + room(len(directory))
    offsets, pages = _pack_pages(keys, chunks.astype("<u8") | slots.astype("<u8") << np.uint64(32), firsts, start // 8)
    header = HEADER.pack(MAGIC, int(keys.kind is int), bits, len(keys), len(order), len(directory))
    front = [_padded(firsts.astype("<u4").tobytes()), offsets.astype("<u8").tobytes(), _padded(directory)]
    free = b"".join(slots.astype("<u4").tobytes() for slots in rows.removed.values())
    body = [CHECK.pack(checksum([header, *front])), *front, pages, _padded(order.tobytes()), _padded(free)]
    return [header, CHECK.pack(checksum([header, *body])), *body]


def _pages_of(hashes: _Array, bits: int) -> _Array:
    return (hashes >> np.uint64(1) >> np.uint64(63 - bits)).astype(np.int64)  # no number is shifted by all of its bits


def _pack_pages(keys: KeyColumn, places: _Array, firsts: _Array, start: int) -> tuple[_Array, memoryview]:
    """Return where the pages begin, from ``start`` on, and their bytes."""
    rows, text = np.diff(firsts), keys.kind is str
    heap_at = keys.bounds[firsts].astype(np.int64) if text else np.zeros(len(firsts), np.int64)
    heap_in = 8 * (3 * rows + 1)
    ends = heap_in + np.diff(heap_at)
    offsets = start + np.concatenate([[0], np.cumsum(-(-ends // 8) + 1)])
    made = np.zeros(offsets[-1] - start, "<u8")
    at = np.repeat(offsets[:-1] - start - firsts[:-1], rows) + np.arange(len(keys))
    step = np.repeat(rows, rows)
    made[at] = keys.hashes
    made[at + step] = places
    if text:
        made[at + 2 * step] = keys.bounds[:-1].astype(np.int64) + np.repeat(heap_in - heap_at[:-1], rows)
        made[offsets[:-1] - start + 3 * rows] = ends
    else:
        made[at + 2 * step] = np.frombuffer(keys.heap, "<u8")
    heap, plain = memoryview(keys.heap), made.view(np.uint8).data
    bounds = (8 * (offsets - start)).tolist()
    for begin, stop, inner, first, last in zip(bounds, bounds[1:], heap_in.tolist(), heap_at.tolist(), heap_at.tolist()[1:], strict=False):
        plain[begin + inner : begin + inner + last - first] = heap[first:last]
        plain[stop - 8 : stop] = CHECK.pack(xxhash.xxh3_64_intdigest(plain[begin : stop - 8]))
    return offsets, plain


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


Page: TypeAlias = tuple[memoryview, memoryview, int, int]
"""A file or a part of it as words and as bytes, the word at which a page begins in it, and the rows of the page."""


class PagedTable:
    """What is asked of a table in pages, however these are had; the subclasses give ``file``, ``_front`` and ``_page``."""

    file: str
    _front: Front

    def _page(self, number: int) -> Page:
        raise NotImplementedError

    @property
    def kind(self) -> type:
        """``str`` or ``int``."""
        return self._front.kind

    @property
    def rows(self) -> int:
        """Number of rows, those of deleted keys too."""
        return self._front.rows

    @property
    def directory(self) -> list[tuple[str, int]]:
        """Id and number of samples of each chunk whose keys the table holds."""
        return self._front.listing.directory

    def look_up(self, stored: bytes, hashed: int) -> tuple[int, int] | None:
        """Return number in the directory (``DELETED`` for a deleted key) and slot of a key of the right type; see ``hashed_key``."""
        return self._in_page(self._page(hashed >> self._front.shift), stored, hashed)

    def _in_page(self, page: Page, stored: bytes, hashed: int) -> tuple[int, int] | None:
        i = self._search(page, stored, hashed)
        return self._place(page, i) if i >= 0 else None

    def _place(self, page: Page, i: int) -> tuple[int, int]:
        words, _, at, rows = page
        place: int = words[at + rows + i]
        return place & DELETED, place >> 32

    def has_chunk(self, chunk: str) -> bool:
        """Tell whether the table holds the keys of a chunk."""
        return chunk in self._front.listing.numbers

    def _search(self, page: Page, stored: bytes, hashed: int) -> int:
        """Return which row of a page a key has, -1 for none."""
        words, _, at, rows = page
        end = at + rows
        i: int = bisect_left(words, hashed, at, end)
        while i < end and words[i] == hashed:
            if self._stored(page, i - at) == stored:
                return i - at
            i += 1
        return -1

    def _stored(self, page: Page, i: int) -> bytes:
        words, view, at, rows = page
        bound = at + 2 * rows + i
        if self._front.kind is int:
            return bytes(view[8 * bound : 8 * bound + 8])
        at *= 8
        return bytes(view[at + words[bound] : at + words[bound + 1]])

    def key(self, row: int) -> Key:
        """Return the key of a row."""
        return self._decoded(self._stored(*self._spot(row)))

    def place(self, row: int) -> Place | None:
        """Return where the sample of a row lives; None for a deleted key."""
        chunk, slot = self._place(*self._spot(row))
        if chunk == DELETED:
            return None
        if chunk >= len(self.directory):
            raise Corrupt(f"{self.file}: the key table names a chunk that its directory lacks.", file=self.file)
        return Place(self.directory[chunk][0], slot)

    def _spot(self, row: int) -> tuple[Page, int]:
        firsts = self._front.firsts
        number = bisect_right(firsts, row) - 1
        return self._page(number), row - firsts[number]

    def _decoded(self, stored: bytes) -> Key:
        if self._front.kind is int:
            return int(_INT.unpack(stored)[0])
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.file}: the key table is damaged.", file=self.file) from error

    def _order_of(self, chunk: str, slot: int | None = None) -> tuple[int, int]:
        """Return which part of ``order`` has the rows of a chunk, or of one slot; ``KeyError`` when the table does not hold it."""
        listing = self._front.listing
        number = listing.numbers[chunk]
        first, end = listing.starts[number : number + 2]
        if slot is None:
            return first, end
        if not 0 <= slot < end - first:
            raise KeyError(slot)
        return first + slot, first + slot + 1


class KeyTable(PagedTable):
    """A table file, opened in place; safe to use from several threads and after a fork."""

    def __init__(self, buffer: Any, file: str = "") -> None:
        """Check the header and the sections; ``Corrupt`` names ``file``."""
        view = memoryview(buffer)
        self.file, self._file, self._paged = file, view, has_pages(view, file)
        if len(view) <= CHECKED_SIZE or not self._paged:
            self.check()
        if not self._paged:
            view = memoryview(b"".join(pack_table(_rows_of_columns(view, file))))
        self._front = front = Front(view, len(view), file)
        self.live, self.removed = front.live, front.listing.removed(view[front.free :])
        self._view, self._words = view, view.cast("Q")
        self._order = view[front.order : front.order + 4 * front.live].cast("I")

    def check(self) -> None:
        """Compare the file with its checksum; ``Corrupt`` when they differ."""
        view = self._file
        at = (HEADER if self._paged else COLUMNS_HEADER).size
        if checksum([view[:at], view[at + CHECK.size :]]) != CHECK.unpack_from(view, at)[0]:
            raise damaged(self.file)

    def _page(self, number: int) -> Page:
        firsts = self._front.firsts
        return self._words, self._view, self._front.offsets[number], firsts[number + 1] - firsts[number]

    def find(self, key: Key) -> int | None:
        """Return the row of a key (also of a deleted one), or None."""
        if type(key) is not self.kind:
            return None
        stored, hashed = hashed_key(key)
        number = hashed >> self._front.shift
        i = self._search(self._page(number), stored, hashed)
        return self._front.firsts[number] + i if i >= 0 else None

    def look_up_many(self, keys: KeyColumn) -> tuple[_Array, _Array]:
        """Return numbers in the directory (``DELETED`` for deleted keys, -1 for those that are not here) and slots of many keys."""
        rows = self._find_many(keys) if len(keys) and self.rows and keys.kind is self.kind else np.full(len(keys), -1, np.int64)
        chunks, slots = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int64)
        hits = np.flatnonzero(rows >= 0)
        chunks[hits], slots[hits] = self._places(rows[hits])
        return chunks, slots

    def _find_many(self, keys: KeyColumn) -> _Array:
        """Return the rows of keys of the right type: one vectorised search instead of one for each."""
        words = np.frombuffer(self._words, np.uint64)
        firsts, offsets = self._front.columns
        found = np.full(len(keys), -1, np.int64)
        by_hash = np.argsort(keys.hashes)  # so that the table is walked through once, from its beginning to its end
        hashes = keys.hashes[by_hash]
        pages = _pages_of(hashes, 64 - self._front.shift)
        at, rows = offsets[pages], firsts[pages + 1] - firsts[pages]
        low, left = at.copy(), rows.copy()
        while left.any():  # all of them halve what is left to search at once
            half = left >> 1
            smaller = (words[low + half] < hashes) & (left > 0)
            low = np.where(smaller, low + half + 1, low)
            left = np.where(smaller, left - half - 1, half)
        hits = np.flatnonzero((low < at + rows) & (words[low] == hashes))
        starts, ends = self._spans(at[hits], rows[hits], (low - at)[hits])
        bounds, heap, view, wanted = keys.bounds.tolist(), keys.heap, self._view, by_hash[hits].tolist()
        found[by_hash[hits]] = firsts[pages[hits]] + (low - at)[hits]
        for i, start, end in zip(wanted, starts, ends, strict=True):
            if view[start:end] != heap[bounds[i] : bounds[i + 1]]:  # another key has the same hash
                hashed = int(keys.hashes[i])
                row = self._search(self._page(hashed >> self._front.shift), keys.stored(i), hashed)
                found[i] = self._front.firsts[hashed >> self._front.shift] + row if row >= 0 else -1
        return found

    def _spots(self, rows: _Array) -> tuple[_Array, _Array, _Array]:
        """Return where the pages of some rows begin, how many rows these have, and which of them are meant."""
        firsts, offsets = self._front.columns
        pages = firsts.searchsorted(rows, "right") - 1
        return offsets[pages], firsts[pages + 1] - firsts[pages], rows - firsts[pages]

    def _places(self, rows: _Array) -> tuple[_Array, _Array]:
        at, step, i = self._spots(rows)
        places = np.frombuffer(self._words, np.uint64)[at + step + i]
        return (places & np.uint64(DELETED)).astype(np.int64), (places >> np.uint64(32)).astype(np.int64)

    def key_at(self, chunk: str, slot: int) -> Key:
        """Return the key of the sample in a slot of a chunk; ``KeyError`` when the table does not hold it."""
        return self.key(self._order[self._order_of(chunk, slot)[0]])

    def keys_of(self, chunk: str) -> list[Key]:
        """Return the keys of a chunk, slot by slot."""
        first, end = self._order_of(chunk)
        return self._keys(np.asarray(self._order[first:end]).astype(np.int64))

    def _keys(self, rows: _Array) -> list[Key]:
        view, (starts, ends) = self._view, self._spans(*self._spots(rows))
        return [self._decoded(bytes(view[start:end])) for start, end in zip(starts, ends, strict=True)]

    def _spans(self, at: _Array, step: _Array, i: _Array) -> tuple[list[int], list[int]]:
        """Return where the keys of rows, as ``_spots`` tells them, begin and end in the file."""
        bound = at + 2 * step + i
        if self.kind is int:
            return (8 * bound).tolist(), (8 * bound + 8).tolist()
        words = np.frombuffer(self._words, np.int64)
        return (8 * at + words[bound]).tolist(), (8 * at + words[bound + 1]).tolist()

    def to_rows(self) -> Rows:
        """Return copies of the columns, sorted by hash."""
        words = np.frombuffer(self._words, np.uint64)
        firsts, offsets = self._front.columns
        at, step, i = self._spots(np.arange(self.rows))
        bound = at + 2 * step + i
        if self.kind is int:
            bounds, heap = np.arange(0, 8 * self.rows + 8, 8, dtype=np.uint64), words[bound].tobytes()
        else:
            bounds = np.zeros(self.rows + 1, np.uint64)
            np.cumsum(words[bound + 1] - words[bound], out=bounds[1:])
            last = (8 * offsets[:-1] + words[offsets[:-1] + 3 * np.diff(firsts)].astype(np.int64)).tolist()
            starts = (8 * (offsets[:-1] + 3 * np.diff(firsts) + 1)).tolist()
            heap = b"".join([self._view[start:end] for start, end in zip(starts, last, strict=True)])
        chunks, slots = (part.astype(np.uint32) for part in self._places(np.arange(self.rows)))
        return Rows(KeyColumn(self.kind, words[at + i], bounds, heap), chunks, slots, self.directory, self.removed)

    def __iter__(self) -> Iterator[tuple[Key, Place | None]]:
        """Yield every key with its place (None when deleted), by hash."""
        for row in range(self.rows):
            yield self.key(row), self.place(row)


def _rows_of_columns(view: memoryview, file: str) -> Rows:
    """Return the rows of a table of an earlier version.

    Its header also has the bytes of the heap, and one checksum; then come the hashes, the int keys or the bounds of the text keys in the
    heap, u32 chunks, u32 slots, order, directory, heap and free slots.
    """
    _, kind, rows, live, directory, heap = COLUMNS_HEADER.unpack_from(view)
    if kind not in (0, 1) or max(rows, live, directory, heap) > len(view):
        raise Corrupt(f"{file}: the header of the key table is damaged.", file=file)
    sizes = [8 * rows, 8 * (rows + (kind == 0)), 4 * rows, 4 * rows, 4 * live, directory, heap]
    starts = list(accumulate(map(room, sizes), initial=COLUMNS_HEADER.size + CHECK.size))
    parts = [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    listing = Listing(parts[5], live, file)
    if (whole := starts[-1] + listing.tail) != len(view):
        raise Corrupt(f"{file}: the key table has {len(view)} bytes and should have {whole}.", file=file)
    hashes, bounds = (np.frombuffer(part, np.uint64) for part in parts[:2])
    keys = bytes(parts[6])
    if KINDS[kind] is int:
        keys, bounds = bytes(parts[1]), np.arange(0, 8 * rows + 8, 8, dtype=np.uint64)
    chunks, slots = (np.frombuffer(part, np.uint32) for part in parts[2:4])
    return Rows(KeyColumn(KINDS[kind], hashes, bounds, keys), chunks, slots, listing.directory, listing.removed(view[starts[-1] :]))


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
