"""Chunk files: many items behind one table of offsets, in the layouts that the format knows."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from mmap import mmap
from typing import Any, Protocol, TypeAlias

import numpy as np

from liveset.errors import Corrupt, DatasetError, SampleError
from liveset.format import codec
from liveset.format.arrow import ArrowChunk, end_mark, is_arrow, may_be_arrow
from liveset.format.framed import FramedItems, is_framed, sample_item
from liveset.format.index import ChunkRecord
from liveset.format.schema import Decoder

# Offsets are u32.
MAX_CHUNK_SIZE = (1 << 32) - 1

# What a chunk is read from: slicing it gives bytes.
Buffer: TypeAlias = bytes | mmap

_bounds = struct.Struct("<II").unpack_from


class Chunk(Protocol):
    """The samples of one chunk file."""

    def read(self, slot: int) -> Any:
        """Return the sample in a slot (0-based)."""

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples in slots ``start`` to ``stop - 1``."""


def pack_classic(items: Sequence[bytes]) -> list[bytes]:
    """Return the header (count and offsets) and the items: the buffers of a classic chunk file.

    Raises:
        SampleError: the file would reach 4 GiB.
    """
    count = len(items)
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = 4 + 4 * (count + 1)
    np.cumsum(np.fromiter(map(len, items), np.int64, count), out=offsets[1:])
    offsets[1:] += offsets[0]
    if offsets[-1] > MAX_CHUNK_SIZE:
        raise SampleError(
            f"a chunk of {offsets[-1]:,} bytes cannot be written: the format ends at 4 GiB per chunk. Use a smaller chunk_size."
        )
    return [struct.pack("<I", count) + offsets.astype("<u4").tobytes(), *items, *end_mark(items)]


def plain_buffer(view: memoryview) -> Buffer:
    """Return the ``bytes`` or ``mmap`` behind a view of a whole file: slicing those gives bytes."""
    if isinstance(view.obj, bytes | mmap) and len(view.obj) == view.nbytes:
        return view.obj
    return bytes(view)


def open_chunk(buffer: Buffer, record: ChunkRecord, decoder: Decoder, compression: codec.Compression | None) -> Chunk:
    """Return the reader of a chunk file, after checking its header and tables.

    Args:
        buffer: the whole file.
        record: the entry of the file in the index.
        decoder: what turns its items into samples.
        compression: as the index config says.

    Raises:
        Corrupt: the header, a table or a recorded length is wrong; ``file`` names the chunk.
    """
    file = record.filename
    if compression is not None and compression.level == "chunk" and codec.is_frame(buffer):
        buffer = codec.inflate(buffer, file=file, size=record.size)
    if is_framed(buffer):
        return FramedChunk(FramedItems(buffer, record.samples, file), record, decoder)
    if is_arrow(buffer):
        return ArrowSamples(buffer, record, decoder)
    offsets = read_offsets(buffer, record)
    if compression is not None and compression.level == "sample":
        return SampleCompressedChunk(buffer, offsets, record, decoder)
    return ClassicChunk(buffer, offsets, record, decoder)


def read_offsets(buffer: Buffer, record: ChunkRecord) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the offsets of a classic chunk (``u32[samples + 1]``, a copy), after checking them."""
    return _checked_offsets(buffer, record, len(buffer))


def _checked_offsets(buffer: Buffer, record: ChunkRecord, size: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    file, count = record.filename, record.samples
    head = 4 + 4 * (count + 1)
    if len(buffer) < head:
        raise Corrupt(f"{file} is cut short: {len(buffer)} bytes cannot hold the header of {count} samples.", file=file)
    if (found := int.from_bytes(buffer[:4], "little")) != count:
        raise Corrupt(f"{file}: the header item count is {found}, but the index says {count}.", file=file)
    if record.head_check and codec.checksum(buffer[:head]) != record.head_check:
        raise Corrupt(f"{file}: the header or the offset table is damaged (its checksum differs).", file=file)
    offsets = np.frombuffer(buffer, "<u4", count + 1, 4).copy()
    if offsets[0] < head or offsets[-1] > size or bool((offsets[1:] < offsets[:-1]).any()):
        raise Corrupt(f"{file}: the offset table is damaged.", file=file)
    return offsets


def ranged_head(record: ChunkRecord) -> int:
    """Return how many bytes the header and the offsets of a classic chunk take."""
    return 4 + 4 * (record.samples + 1)


class ItemRanges:
    """Where the items of a chunk lie in its file, for those who fetch them one by one."""

    def __init__(self, offsets: np.ndarray[Any, np.dtype[np.uint32]], record: ChunkRecord, decoder: Decoder, *, compressed: bool) -> None:
        self._offsets, self._record, self._decoder, self._compressed = offsets, record, decoder, compressed

    def range(self, slot: int) -> tuple[int, int]:
        """Return where the item of a sample starts, and its length."""
        start, end = self._offsets[slot : slot + 2].tolist()
        return start, end - start

    def decode(self, item: bytes, slot: int) -> Any:
        """Return the sample of an item."""
        plain = sample_item(item, self._record.filename) if self._compressed else item
        try:
            return self._decoder.decode(plain, 0, len(plain))
        except Exception as error:
            raise _explain(self._decoder, plain, error, slot, self._record.filename) from error


def open_ranges(
    head: bytes, tail: bytes, record: ChunkRecord, decoder: Decoder, compression: codec.Compression | None
) -> ItemRanges | None:
    """Return where the items lie, given the first ``ranged_head`` bytes of a chunk and its last ones; None where all must be read.

    Raises:
        Corrupt: the header or the offsets are damaged.
    """
    if (compression is not None and compression.level != "sample") or is_framed(head) or may_be_arrow(tail):
        return None
    return ItemRanges(_checked_offsets(head, record, record.size), record, decoder, compressed=compression is not None)


def _explain(decoder: Decoder, item: bytes, error: Exception, slot: int, file: str) -> DatasetError:
    """Return the error to raise for an item that did not decode."""
    if not item:  # a stored item holds at least the sizes of its leaves
        return Corrupt(f"sample {slot} of {file} has no bytes: it was erased, or the file is damaged.", file=file)
    return decoder.explain(item, error, f"sample {slot} of {file}", file)


class ClassicChunk:
    """Items stored one after another, uncompressed."""

    def __init__(self, buffer: Buffer, offsets: np.ndarray[Any, np.dtype[np.uint32]], record: ChunkRecord, decoder: Decoder) -> None:
        self.buffer, self.offsets, self._record, self._decoder = buffer, offsets, record, decoder
        self._decode = decoder.decode

    def read(self, slot: int) -> Any:
        start, end = _bounds(self.buffer, 4 + 4 * slot)
        try:
            return self._decode(self.buffer, start, end)
        except Exception as error:
            raise self._explain(slot, error) from error

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        return self._decoder.iterate(self.buffer, self.offsets[start : stop + 1].tolist(), partial(self._fail, start))

    def item(self, slot: int) -> bytes:
        """Return the stored bytes of a sample."""
        start, end = _bounds(self.buffer, 4 + 4 * slot)
        return self.buffer[start:end]

    def _fail(self, first: int, at: int, error: Exception) -> None:
        # An erased item begins where the next one does, and is the one that fails.
        raise self._explain(first + int(np.searchsorted(self.offsets[first:], at)), error) from error

    def _explain(self, slot: int, error: Exception) -> DatasetError:
        return _explain(self._decoder, self.item(slot), error, slot, self._record.filename)


class _ItemChunk:
    """Items that must be inflated before they are decoded."""

    def __init__(self, record: ChunkRecord, decoder: Decoder) -> None:
        self._record, self._decoder = record, decoder

    def item(self, slot: int) -> bytes:
        """Return the inflated bytes of a sample."""
        raise NotImplementedError

    def read(self, slot: int) -> Any:
        item = self.item(slot)
        try:
            return self._decoder.decode(item, 0, len(item))
        except Exception as error:
            raise _explain(self._decoder, item, error, slot, self._record.filename) from error

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        return map(self.read, range(start, stop))


class SampleCompressedChunk(_ItemChunk):
    """Each item is a zstd frame of its own."""

    def __init__(self, buffer: Buffer, offsets: np.ndarray[Any, np.dtype[np.uint32]], record: ChunkRecord, decoder: Decoder) -> None:
        super().__init__(record, decoder)
        self._buffer, self._offsets = buffer, offsets

    def item(self, slot: int) -> bytes:
        start, end = _bounds(self._buffer, 4 + 4 * slot)
        return sample_item(self._buffer[start:end], self._record.filename)


class FramedChunk(_ItemChunk):
    """Items in zstd frames of a few hundred."""

    def __init__(self, items: FramedItems, record: ChunkRecord, decoder: Decoder) -> None:
        super().__init__(record, decoder)
        self._items = items

    def item(self, slot: int) -> bytes:
        return self._items.item(slot)

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        width = self._items.frame_items
        for number in range(start // width, -(-stop // width)):
            data, offsets = self._items.frame(number)
            first = number * width
            begin = max(start - first, 0)
            bounds = offsets[begin : min(stop - first, width) + 1]
            yield from self._decoder.iterate(data, bounds, partial(self._fail, first + begin, data, bounds))

    def _fail(self, first: int, data: bytes, bounds: Sequence[int], at: int, error: Exception) -> None:
        number = bounds.index(at)
        raise _explain(self._decoder, data[at : bounds[number + 1]], error, first + number, self._record.filename) from error


class ArrowSamples:
    """Rows of an Arrow file that the chunk carries instead of items."""

    def __init__(self, buffer: Buffer, record: ChunkRecord, decoder: Decoder) -> None:
        self._rows = ArrowChunk(buffer, record.samples, record.filename, fields=decoder.fields)

    def read(self, slot: int) -> Any:
        return self._rows.read(slot)

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        return self._rows.iterate(start, stop)

    def gather(self, slots: Sequence[int]) -> dict[str, Any] | None:
        """Return samples by field; None where they must be read one by one."""
        return self._rows.gather(slots)


def items_of(chunk: Chunk, count: int) -> list[bytes]:
    """Return the stored items of a chunk, inflated; ``TypeError`` for layouts that store rows instead."""
    if isinstance(chunk, ClassicChunk | SampleCompressedChunk | FramedChunk):
        return [chunk.item(slot) for slot in range(count)]
    raise TypeError(f"{type(chunk).__name__} has no items")
