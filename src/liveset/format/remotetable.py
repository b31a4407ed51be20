"""Key tables that lie elsewhere: a few keys are looked up by reading parts of the file.

Hashes are spread evenly, so the row of a key follows from its hash but for a few standard deviations. A lookup reads that window instead
of searching by halves, then what stands in the row, then the key itself to compare; all that one step needs is asked for at once. What was
read is kept as pages, so what lies nearby costs nothing more.

The checksum of a table is of the whole file, so it says nothing here: only what is read is checked, and only for whether it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from liveset.errors import Corrupt
from liveset.format.keytable import DELETED, HEADER_SIZE, Key, KeyColumn, Layout, Listing, Place, hashed_key
from liveset.format.lazy import lazy

__all__ = ["RangedKeyTable", "ReadRanges"]

ReadRanges: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[bytes]]
"""Returns parts of one file, each given by its start and length; all at once."""

_PAGE = 4096
_GAP = 16  # pages that are read along rather than asked for around: a request costs as much as some hundred kilobytes
_KEPT = 1024  # pages, twice
_SIGMAS = 4  # one lookup in 16,000 needs a second window
_HASHES = 1 << 64
_Span: TypeAlias = tuple[int, int]
_Array: TypeAlias = np.ndarray[Any, Any]
# Sections by their place in `Layout.starts`, and the bytes that a row has in each.
_HASH, _KEY, _CHUNK, _SLOT, _ORDER, _DIRECTORY, _HEAP, _FREE = range(8)
_WIDTHS = (8, 8, 4, 4, 4)
_TYPES = ("<u8", "<u8", "<u4", "<u4", "<u4")


class RangedKeyTable:
    """A table file of which parts are read; it answers as ``KeyTable`` does, and is as safe with threads and forks as its ``read``.

    Args:
        read: returns parts of the file, each given by its start and length; one call is one round trip.
        size: bytes of the file.
        file: its name, for errors.
    """

    def __init__(self, read: ReadRanges, size: int, file: str = "") -> None:
        self.file, self._size = file, size
        self._pages = _Pages(read, size, file)

    @lazy
    def _layout(self) -> Layout:
        return Layout.parse(self._pages.read([(0, min(HEADER_SIZE, self._size))])[0], self._size, self.file)

    @lazy
    def _listing(self) -> Listing:
        return self._listed(*self._pages.read(self._listing_spans()))

    @property
    def kind(self) -> type:
        """``str`` or ``int``."""
        return self._layout.kind

    @property
    def rows(self) -> int:
        """Number of rows, those of deleted keys too."""
        return self._layout.rows

    @property
    def directory(self) -> list[tuple[str, int]]:
        """Id and number of samples of each chunk whose keys the table holds."""
        return self._listing.directory

    @property
    def removed(self) -> dict[str, _Array]:
        """The slots that became free, by chunk."""
        # Most tables have none, which their size tells.
        return self._listing.removed if self._size > self._layout.starts[_FREE] else {}

    def has_chunk(self, chunk: str) -> bool:
        """Tell whether the table holds the keys of a chunk."""
        return chunk in self._listing.numbers

    def find(self, key: Key) -> int | None:
        """Return the row of a key (also of a deleted one), or None."""
        return self.find_stored(*hashed_key(key)) if type(key) is self.kind else None

    def find_stored(self, stored: bytes, hashed: int) -> int | None:
        """Return the row of a key of the right type, of which ``hashed_key`` has been asked."""
        (row,) = self._find([(stored, hashed)])
        return row if row >= 0 else None

    def find_many(self, keys: KeyColumn) -> _Array:
        """Return the rows of many keys, -1 for those that are not here; as many round trips as for one."""
        if not len(keys) or keys.kind is not self.kind:
            return np.full(len(keys), -1, np.int64)
        return np.array(self._find([(keys.stored(i), hashed) for i, hashed in enumerate(keys.hashes.tolist())]), np.int64)

    def places(self, rows: _Array) -> tuple[_Array, _Array]:
        """Return numbers in the directory (``DELETED`` for deleted keys) and slots of many rows."""
        listed = rows.tolist()
        parts = self._pages.read([self._span(section, row, row + 1) for section in (_CHUNK, _SLOT) for row in listed])
        chunks, slots = np.frombuffer(b"".join(parts), "<u4").reshape(2, len(listed))
        live = chunks != DELETED
        samples = np.array([samples for _, samples in self.directory] or [0], np.int64)
        if (chunks[live] >= len(self.directory)).any() or (slots[live] >= samples[chunks[live]]).any():
            raise Corrupt(f"{self.file}: the key table names a sample that its directory lacks.", file=self.file)
        return chunks, slots

    def place(self, row: int) -> Place | None:
        """Return where the sample of a row lives; None for a deleted key."""
        (chunk,), (slot,) = (part.tolist() for part in self.places(np.array([row])))
        return None if chunk == DELETED else Place(self.directory[chunk][0], slot)

    def key_at(self, chunk: str, slot: int) -> Key:
        """Return the key of the sample in a slot of a chunk; ``KeyError`` when the table does not hold it."""
        number = self._listing.numbers[chunk]
        if not 0 <= slot < self.directory[number][1]:
            raise KeyError(slot)
        first = self._listing.starts[number] + slot
        return self._keys(self._column(_ORDER, first, first + 1).tolist())[0]

    def keys_of(self, chunk: str) -> list[Key]:
        """Return the keys of a chunk, slot by slot; they lie scattered, so this reads much of a table."""
        number = self._listing.numbers[chunk]
        first, end = self._listing.starts[number : number + 2]
        return self._keys(self._column(_ORDER, first, end).tolist())

    def _listing_spans(self) -> list[_Span]:
        starts = self._layout.starts
        directory = (starts[_DIRECTORY], starts[_DIRECTORY] + self._layout.sizes[_DIRECTORY])
        return [directory, (starts[_FREE], self._size)]

    def _listed(self, directory: bytes, free: bytes) -> Listing:
        return Listing(self._layout, directory, free, self.file)

    def _find(self, keys: Sequence[tuple[bytes, int]]) -> list[int]:
        found = [-1] * len(keys)
        runs = self._runs([hashed for _, hashed in keys])
        candidates = [(i, row) for i, run in enumerate(runs) for row in run]
        if not candidates:
            return found
        for (i, row), here in zip(candidates, self._stored([row for _, row in candidates], places=True), strict=True):
            if found[i] < 0 and here == keys[i][0]:
                found[i] = row
        return found

    def _runs(self, hashes: Sequence[int]) -> list[range]:
        """Return the rows that have each hash."""
        runs = [range(0)] * len(hashes)
        searches = {i: _Search(hashed, self.rows) for i, hashed in enumerate(hashes)}
        while searches:
            windows = {i: search.window() for i, search in searches.items()}
            parts = self._pages.read([self._span(_HASH, *window) for window in windows.values()])
            for (i, (start, _)), part in zip(windows.items(), parts, strict=True):
                if (run := searches[i].look(start, self._ascending(part))) is not None:
                    runs[i] = run
                    del searches[i]
        return runs

    def _ascending(self, part: bytes) -> _Array:
        window = np.frombuffer(part, "<u8")
        if (window[1:] < window[:-1]).any():
            raise Corrupt(f"{self.file}: the key table is damaged: its hashes are not in order.", file=self.file)
        return window

    def _keys(self, rows: Sequence[int]) -> list[Key]:
        if max(rows, default=-1) >= self.rows:
            raise Corrupt(f"{self.file}: the order of the key table names rows that it lacks.", file=self.file)
        stored = self._stored(rows)
        if self.kind is int:
            return [int.from_bytes(part, "little", signed=True) for part in stored]
        try:
            return [part.decode() for part in stored]
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.file}: the key table is damaged.", file=self.file) from error

    def _stored(self, rows: Sequence[int], *, places: bool = False) -> list[bytes]:
        """Return the bytes of the keys of some rows; ``places`` reads along what their places need, which saves a round trip later."""
        last = 1 if self.kind is int else 2
        spans = [self._span(_KEY, row, row + last) for row in rows]
        if places:
            spans += [self._span(section, row, row + 1) for section in (_CHUNK, _SLOT) for row in rows]
            if listing := "_listing" not in self.__dict__:
                spans += self._listing_spans()
        parts = self._pages.read(spans)
        if places and listing:
            self.__dict__.setdefault("_listing", self._listed(*parts[-2:]))
        parts = parts[: len(rows)]
        if self.kind is int:
            return parts
        heap, size = self._layout.starts[_HEAP], self._layout.sizes[_HEAP]
        bounds = [tuple(np.frombuffer(part, "<u8").tolist()) for part in parts]
        if any(not start <= end <= size for start, end in bounds):
            raise Corrupt(f"{self.file}: the key table is damaged: a key lies outside of it.", file=self.file)
        return self._pages.read([(heap + start, heap + end) for start, end in bounds])

    def _column(self, section: int, first: int, end: int) -> _Array:
        return np.frombuffer(self._pages.read([self._span(section, first, end)])[0], _TYPES[section])

    def _span(self, section: int, first: int, end: int) -> _Span:
        """Return where some rows of a section lie in the file."""
        start, width = self._layout.starts[section], _WIDTHS[section]
        return start + width * first, start + width * end


class _Search:
    """The search for the rows of one hash: rows before ``low`` have a smaller one, those from ``high`` on a larger one."""

    def __init__(self, hashed: int, rows: int) -> None:
        self._hashed, self._rows = hashed, rows
        self._low, self._high = 0, rows
        self._known = 0, _HASHES  # hashes at both ends
        self._margin = 1

    def window(self) -> tuple[int, int]:
        """Return which rows to look at next."""
        (least, most), among = self._known, self._high - self._low
        part = (self._hashed - least) / (most - least)
        middle = self._low + int(part * among)
        reach = self._margin * (8 + math.ceil(_SIGMAS * math.sqrt(among * part * (1 - part))))
        return max(self._low, middle - reach), min(self._high, middle + reach)

    def look(self, start: int, window: _Array) -> range | None:
        """Return the rows with the hash, or None when the window does not hold them all and another one is needed."""
        hashed, end = self._hashed, start + len(window)
        first, stop = (start + int(window.searchsorted(np.uint64(hashed), side)) for side in ("left", "right"))
        if (first > start or start == self._low) and (stop < end or end == self._high):
            return range(first, stop)
        self._margin *= 2  # hashes that are not spread evenly must not make it endless
        least, most = self._known
        if first == end:
            self._low, self._known = end, (int(window[-1]), most)
        elif stop == start:
            self._high, self._known = start, (least, int(window[0]))
        return None


class _Pages:
    """Parts of a file in whole pages, those kept that were used last."""

    def __init__(self, read: ReadRanges, size: int, file: str) -> None:
        self._read, self._size, self._file = read, size, file
        # Two generations: so no thread needs a lock, which a fork could leave locked.
        self._young: dict[int, bytes] = {}
        self._old: dict[int, bytes] = {}

    def read(self, spans: Sequence[_Span]) -> list[bytes]:
        """Return the bytes between start and end of each span; what is missing is read in one call."""
        held: dict[int, bytes] = {}
        young, old = self._young, self._old
        missing: set[int] = set()
        for start, end in spans:
            for number in _pages_of(start, end):
                page = young.get(number) or old.get(number)
                if page is None:
                    missing.add(number)
                else:
                    held[number] = page
        if missing:
            held.update(self._fetch(sorted(missing)))
        if len(young) + len(held) > _KEPT:
            self._old, self._young = young, {}
        self._young.update(held)
        return [_cut(held, start, end) for start, end in spans]

    def _fetch(self, missing: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        runs: list[list[int]] = []
        for number in missing:
            if runs and number - runs[-1][1] <= _GAP:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        ranges = [(first * _PAGE, min((last + 1) * _PAGE, self._size) - first * _PAGE) for first, last in runs]
        for (start, length), part in zip(ranges, self._read(ranges), strict=True):
            if len(part) != length:
                raise Corrupt(f"{self._file} is truncated: it should have {self._size} bytes.", file=self._file)
            for at in range(0, length, _PAGE):
                yield (start + at) // _PAGE, part[at : at + _PAGE]


def _pages_of(start: int, end: int) -> range:
    return range(start // _PAGE, -(-end // _PAGE)) if end > start else range(0)


def _cut(pages: dict[int, bytes], start: int, end: int) -> bytes:
    numbers = _pages_of(start, end)
    first = numbers.start * _PAGE
    return b"".join([pages[number] for number in numbers])[start - first : end - first]
