"""Key tables that lie elsewhere: a few keys are looked up by reading parts of the file.

First what comes before the pages is read, of which the size is known well enough to take one request mostly; then a key costs the one page
that has it. All pages that are asked for at once are read at once, and some are kept. What is read has checksums of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from liveset.errors import Corrupt
from liveset.format.keyfront import Front, check_page, has_pages
from liveset.format.keytable import Key, KeyColumn, Page, PagedTable
from liveset.format.lazy import lazy

__all__ = ["RangedKeyTable", "ReadRanges"]

ReadRanges: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[bytes]]
"""Returns parts of one file, each given by its start and length; all at once."""

_KEPT = 4_000_000
"""Bytes of pages, twice."""
_Array: TypeAlias = np.ndarray[Any, Any]


class RangedKeyTable(PagedTable):
    """A table file of which parts are read; it answers as ``KeyTable`` does, and is as safe with threads and forks as its ``read``.

    Args:
        read: returns parts of the file, each given by its start and length; one call is one round trip.
        size: bytes of the file.
        file: its name, for errors.
        directory: how many bytes the chunks of the table take in it, as far as that is known.
    """

    def __init__(self, read: ReadRanges, size: int, file: str = "", directory: int = 0) -> None:
        self.file, self._read, self._size, self._directory = file, read, size, directory
        # Two generations: so no thread needs a lock, which a fork could leave locked.
        self._young: dict[int, Page] = {}
        self._old: dict[int, Page] = {}
        self._held = 0

    @property
    def readable(self) -> bool:
        """Whether the table has pages; those of earlier versions are only read whole."""
        return has_pages(self._start, self.file)

    @lazy
    def _start(self) -> bytes:
        return self._parts([(0, Front.expected(self._size, self._directory))])[0]

    @lazy
    def _front(self) -> Front:
        data = self._start
        if (whole := min(Front.size(data, self.file), self._size)) > len(data):
            data += self._parts([(len(data), whole - len(data))])[0]
        return Front(data, self._size, self.file)

    @lazy
    def removed(self) -> dict[str, _Array]:
        """The slots that became free, by chunk."""
        listing, at = self._front.listing, self._front.free
        return listing.removed(self._parts([(at, listing.tail)])[0]) if listing.freed else {}

    def look_up_many(self, keys: KeyColumn) -> tuple[_Array, _Array]:
        """Return numbers in the directory (``DELETED`` for deleted keys, -1 for those that are not here) and slots of many keys."""
        found: list[tuple[int, int] | None] = [None] * len(keys)
        if keys.kind is self.kind:
            hashes = keys.hashes.tolist()
            pages = self._pages(hashed >> self._front.shift for hashed in hashes)
            found = [self._in_page(pages[hashed >> self._front.shift], keys.stored(i), hashed) for i, hashed in enumerate(hashes)]
        chunks, slots = zip(*(place or (-1, 0) for place in found), strict=True) if found else ((), ())
        return np.array(chunks, np.int64), np.array(slots, np.int64)

    def key_at(self, chunk: str, slot: int) -> Key:
        """Return the key of the sample in a slot of a chunk; ``KeyError`` when the table does not hold it."""
        return self._keys(chunk, slot, *self._order_of(chunk, slot))[0]

    def keys_of(self, chunk: str) -> list[Key]:
        """Return the keys of a chunk, slot by slot; they lie scattered, so this reads much of a table."""
        return self._keys(chunk, 0, *self._order_of(chunk))

    def _keys(self, chunk: str, slot: int, first: int, end: int) -> list[Key]:
        """Return the keys of the slots of a chunk from ``slot`` on, whose rows are these of ``order``."""
        front = self._front
        (part,) = self._parts([(front.order + 4 * first, 4 * (end - first))])
        rows = np.frombuffer(part, "<u4").astype(np.int64)
        if len(rows) and rows.max() >= front.rows:
            raise self._misplaced()
        firsts, _ = front.columns
        numbers = firsts.searchsorted(rows, "right") - 1
        pages = self._pages(numbers.tolist())
        found = []
        for number, i in zip(numbers.tolist(), (rows - firsts[numbers]).tolist(), strict=True):
            # The order has no checksum here, but the row tells where its sample is.
            if self._place(pages[number], i) != (front.listing.numbers[chunk], slot):
                raise self._misplaced()
            found.append(self._decoded(self._stored(pages[number], i)))
            slot += 1
        return found

    def _misplaced(self) -> Corrupt:
        return Corrupt(f"{self.file}: the order of the key table does not fit its rows.", file=self.file)

    def _page(self, number: int) -> Page:
        return self._pages([number])[number]

    def _pages(self, numbers: Iterable[int]) -> dict[int, Page]:
        """Return pages by their numbers; what is missing is read in one call."""
        young, old = self._young, self._old
        pages = {number: young.get(number) or old.get(number) for number in numbers}
        missing = sorted(number for number, page in pages.items() if page is None)
        offsets, firsts = self._front.offsets, self._front.firsts
        ranges = [(8 * offsets[number], 8 * (offsets[number + 1] - offsets[number])) for number in missing]
        for number, data in zip(missing, self._parts(ranges) if ranges else (), strict=True):
            view = memoryview(data)
            check_page(view, self.file)
            pages[number] = view.cast("Q"), view, 0, firsts[number + 1] - firsts[number]
        found = {number: page for number, page in pages.items() if page is not None}
        if (read := sum(length for _, length in ranges)) + self._held > _KEPT:
            self._old, self._young, self._held = young, {}, 0
        self._held += read
        self._young.update(found)
        return found

    def _parts(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        parts = self._read(ranges)
        if any(len(part) != length for part, (_, length) in zip(parts, ranges, strict=True)):
            raise Corrupt(f"{self.file} is truncated: it should have {self._size} bytes.", file=self.file)
        return parts
