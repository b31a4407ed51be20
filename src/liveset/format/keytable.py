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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    name_chunks,
    page_bits,
    room,
)

Key: TypeAlias = str | int

DELETED = 0xFFFFFFFF
CHECKED_SIZE = 64_000_000
"""Of larger tables each page is checked when it is first looked at: reading them whole would make the first lookup slow."""
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

    def __init__(self, kind: type, hashes: _Array, bounds: _Array, heap: bytes | memoryview) -> None:
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
        return bytes(self.heap[int(self.bounds[row]) : int(self.bounds[row + 1])])

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
    by_hash, keys = np.arange(len(rows.keys)), rows.keys
    if (keys.hashes[1:] < keys.hashes[:-1]).any():
        by_hash = np.argsort(keys.hashes, kind="stable")
        keys = keys.take(by_hash)
    _refuse_repeated(keys, by_hash, rows.keys)
    chunks, slots = rows.chunks[by_hash], rows.slots[by_hash]
    live = np.flatnonzero(chunks != DELETED)
    order = live[np.argsort(chunks[live].astype(np.uint64) << np.uint64(32) | slots[live])].astype("<u4")
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
    free = _padded(b"".join(slots.astype("<u4").tobytes() for slots in rows.removed.values()))
    if free:
        free += CHECK.pack(checksum([free]))
    body = [CHECK.pack(checksum([header, *front])), *front, pages, _padded(order.tobytes()), free]
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
    seen: set[bytes] = set()
    for row in np.union1d(same, same + 1).tolist():
        key = keys.stored(row)
        if key in seen:
            found.append(row)
        seen.add(key)
    return found


Page: TypeAlias = tuple[memoryview, memoryview, int, int]
"""A file or a part of it as words and as bytes, the word at which a page begins in it, and the rows of the page."""


class _Spots(NamedTuple):
    """Rows of a table: bytes that have their pages, at which word these begin in them, how many rows these have, and which is meant."""

    view: memoryview
    at: _Array
    rows: _Array
    i: _Array

    def places(self) -> tuple[_Array, _Array]:
        """Return numbers in the directory and slots."""
        places = np.frombuffer(self.view, np.uint64)[self.at + self.rows + self.i]
        return (places & np.uint64(DELETED)).astype(np.int64), (places >> np.uint64(32)).astype(np.int64)

    def spans(self, kind: type) -> Iterator[tuple[int, int]]:
        """Return where the keys begin and end."""
        bound = self.at + 2 * self.rows + self.i
        if kind is int:
            return zip((8 * bound).tolist(), (8 * bound + 8).tolist(), strict=True)
        words = np.frombuffer(self.view, np.int64)
        return zip((8 * self.at + words[bound]).tolist(), (8 * self.at + words[bound + 1]).tolist(), strict=True)


class PagedTable:
    """What is asked of a table in pages, however these are had; the subclasses give ``file``, ``_front`` and the three methods below it."""

    file: str
    _front: Front

    def _page(self, number: int) -> Page:
        raise NotImplementedError

    def _gathered(self, numbers: _Array) -> tuple[memoryview, _Array]:
        """Return bytes that have pages, and at which word each begins in them."""
        raise NotImplementedError

    def _ordered(self, first: int, end: int) -> memoryview:
        """Return a part of ``order``."""
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

    def has_chunk(self, chunk: str) -> bool:
        """Tell whether the table holds the keys of a chunk."""
        return chunk in self._front.listing.numbers

    def look_up(self, stored: bytes, hashed: int) -> tuple[int, int] | None:
        """Return number in the directory (``DELETED`` for a deleted key) and slot of a key of the right type; see ``hashed_key``."""
        page = self._page(hashed >> self._front.shift)
        i = self._search(page, stored, hashed)
        return _place(page, i) if i >= 0 else None

    def look_up_many(self, keys: KeyColumn) -> tuple[_Array, _Array]:
        """Return numbers in the directory (``DELETED`` for deleted keys, -1 for those that are not here) and slots of many keys."""
        chunks, slots = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int64)
        if len(keys) and self.rows and keys.kind is self.kind:
            found, spots = self._find_many(keys)
            chunks[found], slots[found] = spots.places()
        return chunks, slots

    def key_at(self, chunk: str, slot: int) -> Key:
        """Return the key of the sample in a slot of a chunk; ``KeyError`` when the table does not hold it."""
        first, end = self._order_of(chunk)
        if not 0 <= slot < end - first:
            raise KeyError(slot)
        row: int = self._ordered(first + slot, first + slot + 1)[0]
        if row < self.rows:
            page, i = self._spot(row)
            if _place(page, i) == (self._front.listing.numbers[chunk], slot):
                return self._decoded(self._stored(page, i))
        raise self._misplaced()

    def keys_of(self, chunk: str) -> list[Key]:
        """Return the keys of a chunk, slot by slot; ``KeyError`` when the table does not hold it."""
        first, end = self._order_of(chunk)
        if first == end:
            return []
        rows = np.asarray(self._ordered(first, end)).astype(np.int64)
        if rows.max() >= self.rows:
            raise self._misplaced()
        spots = self._spots(rows)
        chunks, slots = spots.places()
        if (chunks != self._front.listing.numbers[chunk]).any() or (slots != np.arange(end - first)).any():
            raise self._misplaced()
        return [self._decoded(bytes(spots.view[start:stop])) for start, stop in spots.spans(self.kind)]

    def _misplaced(self) -> Corrupt:
        """Return the error for rows that are not those of the slots in whose places ``order`` has them; it has no checksum of its own."""
        return Corrupt(f"{self.file}: the order of the key table does not fit its rows.", file=self.file)

    def _order_of(self, chunk: str) -> tuple[int, int]:
        """Return which part of ``order`` has the rows of a chunk; ``KeyError`` when the table does not hold it."""
        listing = self._front.listing
        number = listing.numbers[chunk]
        return listing.starts[number], listing.starts[number + 1]

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

    def _find_many(self, keys: KeyColumn) -> tuple[_Array, _Spots]:
        """Return which keys of the right type are here, and their rows: one vectorised search instead of one for each."""
        firsts, _ = self._front.columns
        by_hash = np.argsort(keys.hashes)  # so that the table is walked through once, from its beginning to its end
        hashes = keys.hashes[by_hash]
        pages = _pages_of(hashes, 64 - self._front.shift)
        view, at = self._gathered(pages)
        words, rows = np.frombuffer(view, np.uint64), firsts[pages + 1] - firsts[pages]
        low, left = at.copy(), rows.copy()
        while left.any():  # all of them halve what is left to search at once
            half = left >> 1
            smaller = (words[low + half] < hashes) & (left > 0)
            low = np.where(smaller, low + half + 1, low)
            left = np.where(smaller, left - half - 1, half)
        hits = np.flatnonzero((low < at + rows) & (words[low] == hashes))
        found, spots = by_hash[hits], _Spots(view, at[hits], rows[hits], (low - at)[hits])
        bounds, heap = keys.bounds.tolist(), keys.heap
        for hit, (key, (start, end)) in enumerate(zip(found.tolist(), spots.spans(self.kind), strict=True)):
            if view[start:end] != heap[bounds[key] : bounds[key + 1]]:  # another key has the same hash
                page = view.cast("Q"), view, int(spots.at[hit]), int(spots.rows[hit])
                spots.i[hit] = self._search(page, keys.stored(key), int(keys.hashes[key]))
        here = spots.i >= 0
        return found[here], _Spots(view, *(part[here] for part in spots[1:]))

    def _stored(self, page: Page, i: int) -> bytes:
        words, view, at, rows = page
        bound = at + 2 * rows + i
        if self._front.kind is int:
            return bytes(view[8 * bound : 8 * bound + 8])
        at *= 8
        return bytes(view[at + words[bound] : at + words[bound + 1]])

    def _spot(self, row: int) -> tuple[Page, int]:
        firsts = self._front.firsts
        number = bisect_right(firsts, row) - 1
        return self._page(number), row - firsts[number]

    def _spots(self, rows: _Array) -> _Spots:
        firsts, _ = self._front.columns
        pages = firsts.searchsorted(rows, "right") - 1
        return _Spots(*self._gathered(pages), firsts[pages + 1] - firsts[pages], rows - firsts[pages])

    def _decoded(self, stored: bytes) -> Key:
        if self._front.kind is int:
            return int(_INT.unpack(stored)[0])
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.file}: the key table is damaged.", file=self.file) from error


def _place(page: Page, i: int) -> tuple[int, int]:
    words, _, at, rows = page
    place: int = words[at + rows + i]
    return place & DELETED, place >> 32


class KeyTable(PagedTable):
    """A table file, opened in place; safe to use from several threads and after a fork.

    Args:
        buffer: the file.
        file: its name, for errors.
        checked: a file of so many bytes, or fewer, is compared with its checksum when it is opened.
    """

    def __init__(self, buffer: Any, file: str = "", *, checked: int = CHECKED_SIZE) -> None:
        """Check the header and the sections; ``Corrupt`` names ``file``."""
        view = memoryview(buffer)
        self.file, self._view = file, view if has_pages(view, file) else _in_pages(view, file)
        if len(view) <= checked:
            self.check()
        view = self._view
        self._front = front = Front(view, len(view), file)
        self.live, self.removed = front.live, front.removed(view[front.free :])
        self._words = view.cast("Q")
        self._order = view[front.order : front.order + 4 * front.live].cast("I")
        # A byte for each page that was checked; threads that check one at the same time come to the same.
        self._seen = bytearray(len(front.offsets) - 1)

    def check(self) -> None:
        """Compare the file with its checksum; ``Corrupt`` when they differ."""
        _check_file(self._view, HEADER.size, self.file)

    def _page(self, number: int) -> Page:
        front = self._front
        at, firsts = front.offsets[number], front.firsts
        if not self._seen[number]:
            front.check(number, self._view[8 * at : 8 * front.offsets[number + 1]])
            self._seen[number] = 1
        return self._words, self._view, at, firsts[number + 1] - firsts[number]

    def _gathered(self, numbers: _Array) -> tuple[memoryview, _Array]:
        for number in np.unique(numbers[np.frombuffer(self._seen, np.uint8)[numbers] == 0]).tolist():
            self._page(number)
        return self._view, self._front.columns[1][numbers]

    def _ordered(self, first: int, end: int) -> memoryview:
        return self._order[first:end]

    def find(self, key: Key) -> int | None:
        """Return the row of a key (also of a deleted one), or None."""
        if type(key) is not self.kind:
            return None
        stored, hashed = hashed_key(key)
        number = hashed >> self._front.shift
        i = self._search(self._page(number), stored, hashed)
        return self._front.firsts[number] + i if i >= 0 else None

    def key(self, row: int) -> Key:
        """Return the key of a row."""
        return self._decoded(self._stored(*self._spot(row)))

    def place(self, row: int) -> Place | None:
        """Return where the sample of a row lives; None for a deleted key."""
        chunk, slot = _place(*self._spot(row))
        return Place(self.directory[chunk][0], slot) if chunk != DELETED else None

    def to_rows(self) -> Rows:
        """Return copies of the columns, sorted by hash."""
        firsts, offsets = self._front.columns
        self._gathered(np.arange(len(self._seen)))
        words = np.frombuffer(self._words, np.uint64)
        spots = self._spots(np.arange(self.rows))
        bound = spots.at + 2 * spots.rows + spots.i
        if self.kind is int:
            bounds, heap = np.arange(0, 8 * self.rows + 8, 8, dtype=np.uint64), words[bound].tobytes()
        else:
            bounds = np.zeros(self.rows + 1, np.uint64)
            np.cumsum(words[bound + 1] - words[bound], out=bounds[1:])
            last = (8 * offsets[:-1] + words[offsets[:-1] + 3 * np.diff(firsts)].astype(np.int64)).tolist()
            starts = (8 * (offsets[:-1] + 3 * np.diff(firsts) + 1)).tolist()
            heap = b"".join([self._view[start:end] for start, end in zip(starts, last, strict=True)])
        chunks, slots = spots.places()
        counts = np.bincount(chunks[chunks != DELETED], minlength=len(self.directory))
        if counts.tolist() != [samples for _, samples in self.directory]:
            raise Corrupt(f"{self.file}: the directory of the key table does not fit its rows.", file=self.file)
        column = KeyColumn(self.kind, words[spots.at + spots.i], bounds, heap)
        return Rows(column, chunks.astype(np.uint32), slots.astype(np.uint32), self.directory, self.removed)

    def __iter__(self) -> Iterator[tuple[Key, Place | None]]:
        """Yield every key with its place (None when deleted), by hash."""
        for row in range(self.rows):
            yield self.key(row), self.place(row)


def _check_file(view: memoryview, at: int, file: str) -> None:
    """Compare a file with its checksum, which stands at ``at``; ``Corrupt`` when they differ."""
    if checksum([view[:at], view[at + CHECK.size :]]) != CHECK.unpack_from(view, at)[0]:
        raise damaged(file)


def _in_pages(view: memoryview, file: str) -> memoryview:
    """Return a table of an earlier version as one of this."""
    try:
        return memoryview(b"".join(pack_table(_rows_of_columns(view, file))))
    except DuplicateKeys as error:
        raise Corrupt(f"{file}: the key table has a key twice.", file=file) from error


def _rows_of_columns(view: memoryview, file: str) -> Rows:
    """Return the rows of a table of an earlier version.

    Its header also has the bytes of the heap, and one checksum; then come the hashes, the int keys or the bounds of the text keys in the
    heap, u32 chunks, u32 slots, order, directory, heap and free slots.
    """
    _check_file(view, COLUMNS_HEADER.size, file)
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
    keys = parts[6]
    if KINDS[kind] is int:
        keys, bounds = parts[1], np.arange(0, 8 * rows + 8, 8, dtype=np.uint64)
    chunks, slots = (np.frombuffer(part, np.uint32) for part in parts[2:4])
    fits = bounds[0] == 0 and bounds[-1] == len(keys) and (bounds[1:] >= bounds[:-1]).all() and (hashes[1:] >= hashes[:-1]).all()
    if not fits or not name_chunks(chunks, len(listing.directory)):
        raise Corrupt(f"{file}: the columns of the key table do not fit each other.", file=file)
    return Rows(KeyColumn(KINDS[kind], hashes, bounds, keys), chunks, slots, listing.directory, listing.removed(view[starts[-1] :]))
