"""What a key table says before its pages: how many there are and where, and the chunks.

Layout, little-endian, each section padded to a multiple of 8 bytes::

    header      "LSKEYS04", u8 kind (0 text, 1 int), u8 bits (there are 2^bits pages), 6 bytes 0, u64 rows, u64 live rows,
                u64 bytes of the directory,
                u64 xxh3-64 of all that follows this and, before it, of the header,
                u64 xxh3-64 of what follows this up to the first page and, before it, of the header
    firsts      u32[2^bits + 1] first row of each page, and the number of rows
    offsets     u64[2^bits + 1] where each page begins in the file, and where the last one ends, in units of 8 bytes
    directory   JSON [[chunk id, samples], ...]; with a third number, how many slots became free, where some chunk has such slots
    pages       u64[n] hashes (xxh3-64 of the key's bytes, ascending); u64[n] slot << 32 | number of the chunk in the directory, which is
                0xffffffff where the key was deleted; u64[n + 1] the int keys and a 0 or, for text, where in the page each key begins and
                the last one ends, in bytes; UTF-8 of the text keys, padded; u64 xxh3-64 of the page before this
    order       u32[live rows]  rows by chunk and slot
    removed     u32[...]        the slots that became free, ascending, chunk by chunk of the directory; padded, and u64 xxh3-64 of all of
                them before this; nothing where there are none

Each part that is read alone has a checksum, but for the order: the row that it leads to says where its sample is. What comes before the
pages is small, and a page is about as large: reading one key costs the least bytes then. Tables of earlier versions ("LSKEYS02",
"LSKEYS03") have each column in one piece; they are checked, and made into pages in memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from liveset.errors import Corrupt, UnsupportedFormat

MAGIC = b"LSKEYS04"
COLUMNS = (b"LSKEYS02", b"LSKEYS03")
"""Of earlier versions; the second one has free slots, too."""
HEADER = struct.Struct("<8sBB6xQQQ")
COLUMNS_HEADER = struct.Struct("<8sB7xQQQQ")
CHECK = struct.Struct("<Q")
HEADER_SIZE = HEADER.size + 2 * CHECK.size
"""Bytes before the first section."""
_PAGE = 4096
"""Smaller pages would not make a request cheaper."""
_PER_PAGE = 12
"""Bytes that a page adds to what comes before the pages."""
KINDS: tuple[type, type] = (str, int)
_MOST = (1 << 32) - 1
Bytes: TypeAlias = bytes | memoryview
_Array: TypeAlias = np.ndarray[Any, Any]


def room(size: int) -> int:
    """Return how many bytes a section of ``size`` bytes takes with its padding."""
    return size + -size % 8


def checksum(buffers: Iterable[Any]) -> int:
    """Return the xxh3-64 of buffers one after the other."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def page_bits(size: int) -> int:
    """Return of how many bits the numbers of pages are, for rows of so many bytes."""
    return min(size // _PAGE, math.isqrt(size // _PER_PAGE)).bit_length()


def has_pages(header: Bytes, file: str) -> bool:
    """Tell whether a table has pages, or is of an earlier version.

    Raises:
        Corrupt: the file does not start like a key table.
        UnsupportedFormat: it is one of a newer format.
    """
    start = bytes(memoryview(header)[: len(MAGIC)])
    if start[:6] == MAGIC[:6] and (number := start[6:]).isdigit() and number > MAGIC[6:]:
        raise UnsupportedFormat(f"{file} was written by a newer liveset. Update liveset.", file=file)
    if memoryview(header).nbytes < HEADER_SIZE or start not in (MAGIC, *COLUMNS):
        raise Corrupt(f"{file} is not a key table.", file=file)
    return start == MAGIC


def check_part(part: memoryview, file: str) -> None:
    """Compare a page, or the free slots, with the checksum at its end; ``Corrupt`` when they differ."""
    if xxhash.xxh3_64_intdigest(part[: -CHECK.size]) != CHECK.unpack_from(part, len(part) - CHECK.size)[0]:
        raise damaged(file)


def name_chunks(numbers: _Array, directory: int) -> bool:
    """Tell whether all numbers are those of chunks in a directory of so many, or of deleted keys."""
    most: int = (numbers + np.uint32(1)).max(initial=0)  # that of deleted keys becomes 0
    return most <= directory


def damaged(file: str) -> Corrupt:
    """Return the error for a table whose checksum differs."""
    return Corrupt(f"{file} is damaged: its checksum differs. Build the keys again with build_keys_index.", file=file)


class Listing:
    """The chunks of a table, checked against its rows.

    Attributes:
        directory: id and number of samples of each chunk whose keys the table holds.
        freed: how many slots became free, by chunk.
        starts: where the rows of each chunk start in the section ``order``, and the end of the last ones.
        numbers: the chunks' numbers in the directory.
    """

    __slots__ = ("directory", "file", "freed", "numbers", "starts")

    def __init__(self, directory: Bytes, live: int, file: str) -> None:
        """Read the directory; ``Corrupt`` names ``file``."""
        listed = _directory(directory, file)
        self.file = file
        self.directory: list[tuple[str, int]] = [entry[:2] for entry in listed if entry[1] or len(entry) < 3 or not entry[2]]
        self.freed: dict[str, int] = {entry[0]: entry[2] for entry in listed if len(entry) > 2 and entry[2]}
        self.starts = list(accumulate((samples for _, samples in self.directory), initial=0))
        if self.starts[-1] != live or min((*self.freed.values(), *(samples for _, samples in self.directory)), default=0) < 0:
            raise Corrupt(f"{file}: the directory of the key table does not fit its rows.", file=file)
        self.numbers = {chunk: number for number, (chunk, _) in enumerate(self.directory)}

    @property
    def tail(self) -> int:
        """Bytes of the free slots, padded."""
        return room(4 * sum(self.freed.values()))

    def removed(self, free: Bytes) -> dict[str, _Array]:
        """Return the free slots by chunk, as the last section says."""
        slots = np.frombuffer(memoryview(free)[: 4 * sum(self.freed.values())], np.uint32)
        parts = np.split(slots, list(accumulate(self.freed.values()))[:-1]) if self.freed else []
        if any((gone[1:] <= gone[:-1]).any() for gone in parts):
            raise Corrupt(f"{self.file}: the directory of the key table does not fit its rows.", file=self.file)
        return dict(zip(self.freed, parts, strict=True))


class Front:
    """What a table says before its pages.

    Attributes:
        kind: ``str`` or ``int``.
        rows: number of rows, those of deleted keys too.
        shift: the number of a page is a hash without this many bits.
        firsts: first row of each page, and the number of rows.
        offsets: where each page begins in the file, and where the last one ends, in units of 8 bytes.
        columns: both as arrays to count with.
        listing: the chunks.
    """

    __slots__ = ("columns", "firsts", "kind", "listing", "live", "offsets", "rows", "shift")

    def __init__(self, data: Bytes, size: int, file: str) -> None:
        """Read the beginning of a table of ``size`` bytes, at least ``Front.size``; ``Corrupt`` names ``file``."""
        view = memoryview(data)
        end = self.size(view, size, file)
        (expected,) = CHECK.unpack_from(view, HEADER.size + CHECK.size)
        if checksum([view[: HEADER.size], view[HEADER_SIZE:end]]) != expected:
            raise damaged(file)
        _, kind, bits, rows, live, directory = HEADER.unpack_from(view)
        self.rows: int = rows
        self.live: int = live
        self.kind, self.shift = KINDS[kind], 64 - bits
        pages = (1 << bits) + 1
        at = HEADER_SIZE + room(4 * pages)
        firsts = np.frombuffer(view, "<u4", pages, HEADER_SIZE).astype(np.int64)
        offsets = np.frombuffer(view, "<u8", pages, at).astype(np.int64)
        self.columns = firsts, offsets
        self.firsts: list[int] = firsts.tolist()
        self.offsets: list[int] = offsets.tolist()
        self.listing = Listing(view[at + 8 * pages : at + 8 * pages + directory], self.live, file)
        sizes, words = np.diff(firsts), np.diff(offsets)
        # None of them far away, so that no difference overflows.
        fits = 8 * self.offsets[0] == end and offsets.min() == self.offsets[0] and offsets.max() <= size
        if not fits or self.firsts[0] or self.firsts[-1] != rows or (sizes < 0).any() or (words < 3 * sizes + 2).any():
            raise Corrupt(f"{file}: the pages of the key table do not fit its rows.", file=file)
        if (whole := self.free + self.tail) != size:
            raise Corrupt(f"{file}: the key table has {size} bytes and should have {whole}.", file=file)

    @staticmethod
    def size(header: Bytes, whole: int, file: str) -> int:
        """Return how many bytes come before the pages of a table of ``whole`` bytes, which are more."""
        has_pages(header, file)
        _, kind, bits, rows, live, directory = HEADER.unpack_from(header)
        if kind not in (0, 1) or bits > 32 or max(rows, live) > _MOST:
            raise Corrupt(f"{file}: the header of the key table is damaged.", file=file)
        pages: int = 1 << bits
        end = HEADER_SIZE + room(4 * (pages + 1)) + 8 * (pages + 1) + room(directory)
        if (least := end + 24 * rows + 16 * pages + 4 * live) > whole:
            raise Corrupt(f"{file}: the key table has {whole} bytes and should have {least} or more.", file=file)
        return end

    @staticmethod
    def expected(size: int, directory: int) -> int:
        """Return about how many bytes come before the pages of a table of ``size`` bytes, and seldom too few."""
        return min(size, HEADER_SIZE + _PER_PAGE * ((1 << page_bits(size)) + 2) + directory)

    def check(self, number: int, page: memoryview) -> None:
        """Compare a page with its checksum, and its numbers with what they count; ``Corrupt`` when they differ."""
        check_part(page, self.listing.file)
        rows = self.firsts[number + 1] - self.firsts[number]
        words = np.frombuffer(page, "<u8")
        fits = name_chunks(words[rows : 2 * rows].view("<u4")[::2], len(self.listing.directory))
        if self.kind is str:
            bounds = words[2 * rows : 3 * rows + 1]
            fits &= bool(bounds[0] == 24 * rows + 8 and bounds[-1] <= len(page) - CHECK.size and (bounds[1:] >= bounds[:-1]).all())
        if not fits:
            raise Corrupt(f"{self.listing.file}: a page of the key table does not fit its rows.", file=self.listing.file)

    @property
    def order(self) -> int:
        """Where the section ``order`` begins, in bytes."""
        return 8 * self.offsets[-1]

    @property
    def free(self) -> int:
        """Where the section of free slots begins, in bytes."""
        return self.order + room(4 * self.live)

    @property
    def tail(self) -> int:
        """Bytes of the section of free slots."""
        return self.listing.tail + CHECK.size if self.listing.freed else 0

    def removed(self, part: Bytes) -> dict[str, _Array]:
        """Return the free slots by chunk, as their section says; ``Corrupt`` when it is damaged."""
        if self.listing.freed:
            check_part(memoryview(part), self.listing.file)
        return self.listing.removed(part)


def _directory(part: Bytes, file: str) -> list[Any]:
    for kind in (list[tuple[str, int]], list[tuple[str, int, int]]):
        try:
            return list(msgspec.json.decode(part, type=kind))
        except msgspec.ValidationError:
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
    raise Corrupt(f"{file}: the directory of the key table is damaged.", file=file)
