"""Splicing: a chunk file in which some slots hold other samples and all others keep their stored bytes.

What is not replaced is neither decoded nor encoded again. In classic chunks and those compressed by sample each stored item stays as it is;
where many samples share a frame (framed chunks, Arrow batches) the frames without a replaced sample do; a file that is compressed as a
whole is inflated and compressed again, but its items stay.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from liveset.errors import SampleError
from liveset.format import codec
from liveset.format.arrow import ArrowChunk, end_mark, is_arrow
from liveset.format.arrowsplice import same_row, splice_rows
from liveset.format.chunk import MAX_CHUNK_SIZE, Buffer, read_offsets
from liveset.format.framed import FramedItems, is_framed, sample_item
from liveset.format.index import ChunkRecord
from liveset.storage import Buffer as Bytes

__all__ = ["Spliced", "StoredChunk", "changed_slots", "fresh_name", "open_stored", "splice"]

_NAME = re.compile(r"(?:.*/)?chunk-(\d+)-(\d+)(?:[-.].*)?")


@dataclass(frozen=True, slots=True)
class Spliced:
    """A new chunk file.

    Attributes:
        buffers: its bytes, as they are to be written.
        size: how long it is before compression of the whole file.
        head_check: checksum of header and offsets, for layouts that have these in the clear.
    """

    buffers: Sequence[Bytes]
    size: int
    head_check: str | None


class StoredChunk(Protocol):
    """The samples of a chunk file in the form in which they are stored."""

    @property
    def holds_rows(self) -> bool:
        """Whether samples are Arrow rows instead of items."""

    def content(self, slot: int) -> Any:
        """Return the item (or the row) in a slot, free of how it is packed."""

    def splice(self, contents: Mapping[int, Any]) -> Spliced:
        """Return the file with other items (or rows) in some slots."""


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


def splice(buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None, contents: Mapping[int, Any]) -> Spliced:
    """Return a chunk file with other contents in some slots.

    Args:
        buffer: the file as it is.
        record: its entry in the index.
        compression: as the index config says.
        contents: the new items by slot; dicts where the file holds Arrow rows.

    Raises:
        SampleError: the file would reach 4 GiB, or a row does not fit the columns of the file.
        Corrupt: the file is damaged, as far as it has to be looked at.
    """
    return open_stored(buffer, record, compression).splice(contents)


def changed_slots(old: StoredChunk, new: StoredChunk, slots: Iterable[int]) -> list[int]:
    """Return those of the slots whose samples differ between two files of the same chunk."""
    if old.holds_rows != new.holds_rows:
        return list(slots)
    same = same_row if old.holds_rows else bytes.__eq__
    return [slot for slot in slots if not same(old.content(slot), new.content(slot))]


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


class _Items:
    """Items one after another, each perhaps a zstd frame of its own."""

    holds_rows = False

    def __init__(self, buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None) -> None:
        self._buffer, self._file, self._compression = buffer, record.filename, compression
        self._offsets = read_offsets(buffer, record).astype(np.int64)

    def content(self, slot: int) -> bytes:
        stored = self._buffer[self._offsets[slot] : self._offsets[slot + 1]]
        return stored if self._compression is None else sample_item(stored, self._file)

    def splice(self, contents: Mapping[int, bytes]) -> Spliced:
        offsets, count = self._offsets, len(self._offsets) - 1
        slots = sorted(contents)
        items = [contents[slot] if self._compression is None else codec.compress(contents[slot], self._compression) for slot in slots]
        sizes = np.diff(offsets)
        sizes[slots] = np.fromiter(map(len, items), np.int64, len(items))
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
        for slot, item in zip(slots, items, strict=True):
            buffers += [view[start : int(offsets[slot])], item]
            start = int(offsets[slot + 1])
        buffers.append(view[start : int(offsets[-1])])
        mark = end_mark(buffers)
        return Spliced([*buffers, *mark], size + len(mark), codec.checksum(head))


class _WholeFile:
    """Items in a file that is one zstd frame."""

    holds_rows = False

    def __init__(self, items: _Items, compression: codec.Compression) -> None:
        self._items, self._compression = items, compression

    def content(self, slot: int) -> bytes:
        return self._items.content(slot)

    def splice(self, contents: Mapping[int, bytes]) -> Spliced:
        plain = self._items.splice(contents)
        return Spliced([codec.compress(b"".join(plain.buffers), self._compression)], plain.size, None)


class _Framed:
    """Items in zstd frames of a few hundred."""

    holds_rows = False

    def __init__(self, items: FramedItems, compression: codec.Compression | None) -> None:
        # A file may be framed where the index does not say so.
        self._items, self._compression = items, compression or codec.Compression()

    def content(self, slot: int) -> bytes:
        return self._items.item(slot)

    def splice(self, contents: Mapping[int, bytes]) -> Spliced:
        buffers = self._items.spliced(contents, self._compression)
        return Spliced(buffers, _length(buffers), None)


class _Rows:
    """Rows of an Arrow file."""

    holds_rows = True

    def __init__(self, buffer: Buffer, record: ChunkRecord) -> None:
        self._buffer, self._record = buffer, record
        self._rows: ArrowChunk | None = None

    def content(self, slot: int) -> Any:
        if self._rows is None:
            self._rows = ArrowChunk(self._buffer, self._record.samples, self._record.filename)
        return self._rows.read(slot)

    def splice(self, contents: Mapping[int, Any]) -> Spliced:
        buffers: list[Bytes] = list(splice_rows(self._buffer, self._record.samples, contents, self._record.filename))
        return Spliced(buffers, _length(buffers), codec.checksum(buffers[0]))


def _length(buffers: Iterable[Bytes]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
