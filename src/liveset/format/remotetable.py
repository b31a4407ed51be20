"""Key tables that lie elsewhere: a few keys are looked up by reading parts of the file.

First what comes before the pages is read, of which the size is known well enough to take one request mostly; then a key costs the one page
that has it. All pages that are asked for at once are read at once, and some are kept. What is read has checksums of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from liveset.errors import Corrupt
from liveset.format.keyfront import Front, has_pages
from liveset.format.keytable import Page, PagedTable
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
        if (whole := Front.size(data, self._size, self.file)) > len(data):
            data += self._parts([(len(data), whole - len(data))])[0]
        return Front(data, self._size, self.file)

    @lazy
    def removed(self) -> dict[str, _Array]:
        """The slots that became free, by chunk."""
        front = self._front
        return front.removed(self._parts([(front.free, front.tail)])[0]) if front.tail else {}

    def _page(self, number: int) -> Page:
        return self._pages([number])[number]

    def _gathered(self, numbers: _Array) -> tuple[memoryview, _Array]:
        distinct, which = np.unique(numbers, return_inverse=True)
        pages = [page for _, page, _, _ in self._pages(distinct.tolist()).values()]
        starts = np.array([0, *accumulate(map(len, pages))], np.int64) >> 3
        return memoryview(b"".join(pages)), starts[which]

    def _ordered(self, first: int, end: int) -> memoryview:
        (part,) = self._parts([(self._front.order + 4 * first, 4 * (end - first))])
        return memoryview(part).cast("I")

    def _pages(self, numbers: Iterable[int]) -> dict[int, Page]:
        """Return pages by their numbers; what is missing is read in one call."""
        young, old = self._young, self._old
        pages = {number: young.get(number) or old.get(number) for number in numbers}
        missing = sorted(number for number, page in pages.items() if page is None)
        offsets, firsts = self._front.offsets, self._front.firsts
        ranges = [(8 * offsets[number], 8 * (offsets[number + 1] - offsets[number])) for number in missing]
        for number, data in zip(missing, self._parts(ranges) if ranges else (), strict=True):
            view = memoryview(data)
            self._front.check(number, view)
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
