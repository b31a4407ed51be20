"""Splicing: a chunk file in which some slots hold other samples, are gone or lose their bytes; all others keep what is stored.

What is kept is neither decoded nor encoded again. In classic chunks and those compressed by sample each stored item stays as it is; where
many samples share a frame (framed chunks, Arrow batches) the frames that keep all their samples do, but those behind a removed sample are
cut anew, since the old tool finds a sample by dividing its slot; a file that is compressed as a whole is inflated and compressed again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import numpy as np

from liveset.edit.patch import leaves_of
from liveset.errors import SampleError
from liveset.format import codec
from liveset.format.arrow import ArrowChunk, end_mark, is_arrow
from liveset.format.arrowsplice import same_row, splice_rows
from liveset.format.chunk import MAX_CHUNK_SIZE, Buffer, read_offsets
from liveset.format.framed import FramedItems, is_framed, sample_item
from liveset.format.index import ChunkRecord
from liveset.storage import Buffer as Bytes

__all__ = ["Piece", "Spliced", "StoredChunk", "changed_slots", "fresh_name", "open_stored", "splice"]

Piece: TypeAlias = tuple[int, bytes]
"""Bytes that are written over equally many of a file, and where."""

_BLOCK = 1 << 17  # leaves that are looked for at once
_NAME = re.compile(r"(?:.*/)?chunk-(\d+)-(\d+)(?:[-.].*)?")


@dataclass(frozen=True, slots=True)
class Spliced:
    """A new chunk file.

    Attributes:
        buffers: its bytes, as they are to be written.
        size: how long it is before compression of the whole file.
        samples: how many it holds.
        head_check: checksum of header and offsets, for layouts that have these in the clear.
    """

    buffers: Sequence[Bytes]
    size: int
    samples: int
    head_check: str | None


class StoredChunk(Protocol):
    """The samples of a chunk file in the form in which they are stored."""

    @property
    def holds_rows(self) -> bool:
        """Whether samples are Arrow rows instead of items."""

    def content(self, slot: int) -> Any:
        """Return the item (or the row) in a slot, free of how it is packed."""

    def pieces(self, patches: Mapping[int, bytes], leaves: int) -> tuple[list[Piece], list[int]]:
        """Return what patches of items change in the file, and the slots whose items have to be made anew for that.

        Args:
            patches: by slot.
            leaves: number of leaves of an item.
        """

    def holds(self, contents: Mapping[int, Any], pieces: Sequence[Piece] = ()) -> bool:
        """Tell whether ``splice`` would change nothing."""

    def splice(
        self,
        contents: Mapping[int, Any],
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
        pieces: Sequence[Piece] = (),
    ) -> Spliced:
        """Return the file with other items (or rows) in some slots and without those in others; arguments as for ``splice``."""


def open_stored(buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None) -> StoredChunk:
    """Open a chunk file for splicing, after checking its header and tables; arguments as for ``open_chunk``."""
    if compression is not None and compression.level == "chunk":
        plain = codec.inflate(buffer, file=record.filename, size=record.size) if codec.is_frame(buffer) else buffer
        return _WholeFile(_Items(plain, record, None), compression)
    if is_framed(buffer):
        return _Framed(FramedItems(buffer, record.samples, record.filename), compression)
    if is_arrow(buffer):
        return _Rows(buffer, record)
    return _Items(buffer, record, compression if compression is not None and compression.level == "sample" else None)


def splice(
    buffer: Buffer,
    record: ChunkRecord,
    compression: codec.Compression | None,
    contents: Mapping[int, Any],
    removed: AbstractSet[int] = frozenset(),
    erased: AbstractSet[int] = frozenset(),
) -> Spliced:
    """Return a chunk file with other contents in some slots, and without what others hold. A slot can be named once.

    Args:
        buffer: the file as it is.
        record: its entry in the index.
        compression: as the index config says.
        contents: the new items by slot; dicts where the file holds Arrow rows.
        removed: slots that are gone; the later ones move down.
        erased: slots that keep their place without bytes: reading them is ``Corrupt``, and Arrow rows are all null.

    Raises:
        ValueError: a slot is named twice or does not exist, or none would be left.
        SampleError: the file would reach 4 GiB, or a row does not fit the columns of the file.
        Corrupt: the file is damaged, as far as it has to be looked at.
    """
    return open_stored(buffer, record, compression).splice(contents, removed, erased)


def changed_slots(old: StoredChunk, new: StoredChunk, slots: Iterable[int], before: Iterable[int] | None = None) -> list[int]:
    """Return those of some slots whose samples differ between two files; ``before`` says where they stood in the old one, if elsewhere."""
    here = list(slots)
    if old.holds_rows != new.holds_rows:
        return here
    same = same_row if old.holds_rows else bytes.__eq__
    there = here if before is None else before
    return [slot for slot, stood in zip(here, there, strict=True) if not same(old.content(stood), new.content(slot))]


def fresh_name(old: str, number: int, token: str, compression: codec.Compression | None) -> str:
    """Return a file name that nothing ever had, with the rank and the number of the old name.

    Args:
        old: the name of the file that is replaced.
        number: stands in for a number that the old name does not have.
        token: random; the dash before it keeps old tools from writing over files that they do not know.
        compression: files that are compressed as a whole say so in their name.
    """
    match = _NAME.fullmatch(old)
    rank, count = match.groups() if match else ("0", str(number))
    suffix = f".{compression.name}" if compression is not None and compression.level == "chunk" else ""
    return f"chunk-{rank}-{count}-{token}{suffix}.bin"


class _Packed:
    """Samples that have to be taken out before anything in them can be changed."""

    holds_rows = False

    def content(self, slot: int) -> Any:
        raise NotImplementedError

    def pieces(self, patches: Mapping[int, bytes], leaves: int) -> tuple[list[Piece], list[int]]:
        return [], list(patches)

    def holds(self, contents: Mapping[int, Any], pieces: Sequence[Piece] = ()) -> bool:
        same = same_row if self.holds_rows else bytes.__eq__
        return all(same(self.content(slot), content) for slot, content in contents.items())


class _Items(_Packed):
    """Items one after another, each perhaps a zstd frame of its own."""

    def __init__(self, buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None) -> None:
        self._buffer, self._file, self._compression = buffer, record.filename, compression
        self._offsets = read_offsets(buffer, record).astype(np.int64)

    def content(self, slot: int) -> bytes:
        stored = self._buffer[self._offsets[slot] : self._offsets[slot + 1]]
        return stored if self._compression is None else sample_item(stored, self._file)

    def pieces(self, patches: Mapping[int, bytes], leaves: int) -> tuple[list[Piece], list[int]]:
        if self._compression is not None:
            return super().pieces(patches, leaves)
        found: list[Piece] = []
        others: list[int] = []
        step = max(1, _BLOCK // leaves)
        for start in range(0, len(patches), step):
            some = dict(islice(patches.items(), start, start + step))
            for slot, patch, places in zip(some, map(leaves_of, some.values()), self._places(list(some), leaves), strict=True):
                here = [(places[n], data) for n, data in patch.items() if places[n + 1] - places[n] == len(data)] if places else []
                if len(here) == len(patch):
                    found += here
                else:
                    others.append(slot)
        return found, others

    def _places(self, slots: list[int], leaves: int) -> Iterable[list[int]]:
        """Yield where each leaf of an item begins and the last one ends, or nothing for an item that is none."""
        first, end = self._offsets[:-1][slots], self._offsets[1:][slots]
        bounds = np.full((len(slots), leaves + 1), 0)
        whole = np.flatnonzero(first + 4 * leaves <= end)
        at = first[whole, None]
        bounds[whole, 1:] = np.frombuffer(self._buffer, np.uint8)[at + np.arange(4 * leaves)].view("<u4")
        bounds[whole, :1] = at + 4 * leaves
        bounds = bounds.cumsum(axis=1)
        return (places if fits else [] for places, fits in zip(bounds.tolist(), (bounds[:, -1] == end).tolist(), strict=True))

    def holds(self, contents: Mapping[int, Any], pieces: Sequence[Piece] = ()) -> bool:
        return all(self._buffer[at : at + len(data)] == data for at, data in pieces) and super().holds(contents)

    def splice(
        self,
        contents: Mapping[int, bytes],
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
        pieces: Sequence[Piece] = (),
    ) -> Spliced:
        offsets = self._offsets
        count = _left(len(offsets) - 1, contents, removed, erased)
        items = {slot: item if self._compression is None else codec.compress(item, self._compression) for slot, item in contents.items()}
        sizes = np.diff(offsets)
        sizes[list(items)] = np.fromiter(map(len, items.values()), np.int64, len(items))
        sizes[list(erased)] = 0
        sizes = np.delete(sizes, list(removed))
        new = np.empty(count + 1, np.int64)
        new[0] = 4 + 4 * (count + 1)  # a gap before the first item is not kept, nor what follows the last one
        np.cumsum(sizes, out=new[1:])
        new[1:] += new[0]
        size = int(new[-1])
        if size > MAX_CHUNK_SIZE:
            raise SampleError(f"{self._file} would grow to {size:,} bytes: the format ends at 4 GiB per chunk.")
        head = struct.pack("<I", count) + new.astype("<u4").tobytes()
        view = memoryview(self._buffer)
        buffers: list[Bytes] = [head]
        start = int(offsets[0])
        slots = sorted((*items, *removed, *erased))
        cuts = [(at, at + len(data), data) for at, data in pieces]
        cuts += zip(offsets[slots].tolist(), offsets[1:][slots].tolist(), [items.get(slot, b"") for slot in slots], strict=True)
        # What has no bytes begins where the next one does, and comes before it; several of these stay in order.
        for first, end, data in sorted(cuts, key=itemgetter(0, 1)):
            if start < first:
                buffers.append(view[start:first])
            if data:
                buffers.append(data)
            start = end
        buffers.append(view[start : int(offsets[-1])])
        mark = end_mark(buffers)
        return Spliced([*buffers, *mark], size + len(mark), count, codec.checksum(head))


class _WholeFile(_Packed):
    """Items in a file that is one zstd frame."""

    def __init__(self, items: _Items, compression: codec.Compression) -> None:
        self._items, self._compression = items, compression

    def content(self, slot: int) -> bytes:
        return self._items.content(slot)

    def pieces(self, patches: Mapping[int, bytes], leaves: int) -> tuple[list[Piece], list[int]]:
        return self._items.pieces(patches, leaves)

    def holds(self, contents: Mapping[int, Any], pieces: Sequence[Piece] = ()) -> bool:
        return self._items.holds(contents, pieces)

    def splice(
        self,
        contents: Mapping[int, bytes],
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
        pieces: Sequence[Piece] = (),
    ) -> Spliced:
        plain = self._items.splice(contents, removed, erased, pieces)
        return Spliced([codec.compress(b"".join(plain.buffers), self._compression)], plain.size, plain.samples, None)


class _Framed(_Packed):
    """Items in zstd frames of a few hundred."""

    def __init__(self, items: FramedItems, compression: codec.Compression | None) -> None:
        # A file may be framed where the index does not say so.
        self._items, self._compression = items, compression or codec.Compression()

    def content(self, slot: int) -> bytes:
        return self._items.item(slot)

    def splice(
        self,
        contents: Mapping[int, bytes],
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
        pieces: Sequence[Piece] = (),
    ) -> Spliced:
        count = _left(self._items.count, contents, removed, erased)
        buffers = self._items.spliced(contents, self._compression, removed, erased)
        return Spliced(buffers, _length(buffers), count, None)


class _Rows(_Packed):
    """Rows of an Arrow file."""

    holds_rows = True

    def __init__(self, buffer: Buffer, record: ChunkRecord) -> None:
        self._buffer, self._record = buffer, record
        self._rows: ArrowChunk | None = None

    def content(self, slot: int) -> Any:
        if self._rows is None:
            self._rows = ArrowChunk(self._buffer, self._record.samples, self._record.filename)
        return self._rows.read(slot)

    def splice(
        self,
        contents: Mapping[int, Any],
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
        pieces: Sequence[Piece] = (),
    ) -> Spliced:
        count = _left(self._record.samples, contents, removed, erased)
        buffers: list[Bytes] = list(splice_rows(self._buffer, self._record.samples, contents, self._record.filename, removed, erased))
        return Spliced(buffers, _length(buffers), count, codec.checksum(buffers[0]))


def _left(count: int, contents: Mapping[int, Any], removed: AbstractSet[int], erased: AbstractSet[int]) -> int:
    """Return how many samples are left of ``count``; ``ValueError`` for slots that make no sense."""
    slots = [*contents, *removed, *erased]
    if len(set(slots)) != len(slots):
        raise ValueError("a slot is named twice among those that are replaced, removed and erased.")
    if slots and not 0 <= min(slots) <= max(slots) < count:
        raise ValueError(f"the slots {min(slots)} to {max(slots)} are not all in a chunk of {count} samples.")
    if len(removed) == count:
        raise ValueError("no chunk file is without samples: drop the chunk instead of removing all of its slots.")
    return count - len(removed)


def _length(buffers: Iterable[Bytes]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
