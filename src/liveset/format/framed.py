"""Chunks whose items are compressed: many per zstd frame (framed), or each in a frame of its own."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from liveset.errors import Corrupt, SampleError
from liveset.format import codec
from liveset.format.arrow import end_mark
from liveset.format.codec import Compression
from liveset.format.locks import ForkLock

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"LDFZ01\0\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("packed", "<u4"), ("plain", "<u4")])
_U32_MAX = (1 << 32) - 1
# A reader that steps through a chunk needs one frame; a few more serve readers at different places.
_KEPT_FRAMES = 4


def is_framed(buffer: Buffer) -> bool:
    """Tell whether a chunk file has the framed layout."""
    with memoryview(buffer) as view:
        return bytes(view[:8]) == MAGIC


def _too_large(size: int) -> SampleError:
    return SampleError(f"a chunk of {size:,} bytes cannot be written: the format ends at 4 GiB per chunk. Use a smaller chunk_size.")


def pack_framed(items: Sequence[bytes], compression: Compression) -> list[bytes]:
    """Return the buffers of a framed chunk file: header and tables, then the frames.

    Items without any content (samples such as ``{}``) make a classic chunk, since the layout has no frames of nothing; readers take both.

    Raises:
        SampleError: all items of one frame are empty but others are not, or the items reach 4 GiB.
    """
    count, width = len(items), compression.batch_size
    if not count:
        raise ValueError("a chunk holds at least one item")
    logical = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, count), out=logical[1:])
    if logical[-1] > _U32_MAX:
        raise _too_large(int(logical[-1]))
    if not logical[-1]:
        return [struct.pack(f"<{count + 2}I", count, *[4 + 4 * (count + 1)] * (count + 1))]
    firsts = range(0, count, width)
    table = np.zeros(len(firsts), _FRAME)
    start = _HEAD.size + 4 * (count + 1) + table.nbytes
    frames = []
    for number, first in enumerate(firsts):
        group = items[first : first + width]
        plain = b"".join(group)
        if not plain:
            raise SampleError("samples without any content cannot be compressed in batches: use compression_level='sample', or none.")
        frame = codec.compress(plain, compression)
        if len(frame) > _U32_MAX:
            raise _too_large(len(frame))
        table[number] = (first, len(group), start, len(frame), len(plain))
        start += len(frame)
        frames.append(frame)
    header = _HEAD.pack(MAGIC, 1, 0, count, width, len(firsts))
    return [header + logical.astype("<u4").tobytes() + table.tobytes(), *frames, *end_mark(frames)]


class FramedItems:
    """The items of a framed chunk file; safe to use from several threads.

    Attributes:
        count: number of items.
        frame_items: items per frame; the last frame may have fewer.
        frames: number of frames.
    """

    def __init__(self, buffer: Buffer, count: int, file: str = "") -> None:
        """Check the header and both tables.

        Args:
            buffer: the whole file.
            count: how many items the index says it has.
            file: named in errors.

        Raises:
            Corrupt: anything in the header or a table contradicts itself, the file or the count.
        """
        self._view, self._file = memoryview(buffer).cast("B"), file
        self._lock = ForkLock()
        self._inflated: OrderedDict[int, tuple[bytes, list[int]]] = OrderedDict()
        size = len(self._view)
        if size < _HEAD.size:
            raise self._corrupt(f"is cut short: {size} bytes cannot hold a header")
        magic, version, flags, found, self.frame_items, self.frames = _HEAD.unpack_from(self._view)
        if magic != MAGIC or version != 1 or flags != 0:
            raise self._corrupt(f"has no framed header of version 1 (version {version}, flags {flags})")
        if found != count:
            raise self._corrupt(f"the framed item count is {found}, but the index says {count}")
        if not count or not self.frame_items or self.frames != -(-count // self.frame_items):
            raise self._corrupt(f"{self.frames} frames of {self.frame_items} items cannot hold {count} items")
        self.count = count
        tables = _HEAD.size + 4 * (count + 1)
        body = tables + _FRAME.itemsize * self.frames
        if size < body:
            raise self._corrupt(f"is cut short: {size} bytes cannot hold the tables of {count} items")
        # Copies, so that no array keeps the buffer exported.
        self._logical = np.frombuffer(self._view, "<u4", count + 1, _HEAD.size).astype(np.int64)
        table = np.frombuffer(self._view, _FRAME, self.frames, tables)
        self._packed, self._plain = table["packed"].astype(np.int64), table["plain"].astype(np.int64)
        self._check_tables(table, body, size)
        self._offsets = table["offset"].astype(np.int64)

    def _check_tables(self, table: np.ndarray[Any, Any], body: int, size: int) -> None:
        logical, firsts = self._logical, np.arange(self.frames, dtype=np.int64) * self.frame_items
        lasts = np.minimum(firsts + self.frame_items, self.count)
        if logical[0] != 0 or bool((logical[1:] < logical[:-1]).any()):
            raise self._corrupt("the table of item offsets is damaged")
        if bool((table["first"] != firsts).any()) or bool((table["items"] != lasts - firsts).any()):
            raise self._corrupt("the table of frames is damaged (items per frame)")
        sizes = logical[lasts] - logical[firsts]
        # Only frames whose every item was erased inflate to nothing.
        if bool((self._packed == 0).any()) or bool((self._plain != sizes).any()):
            raise self._corrupt("the table of frames is damaged (sizes)")
        # u64 offsets are bounded first, so that the sums below cannot wrap around.
        if bool((table["offset"] > size).any()):
            raise self._corrupt("a frame lies outside the file")
        starts = table["offset"].astype(np.int64)
        ends = starts + self._packed
        if starts[0] < body or ends[-1] > size or bool((starts[1:] < ends[:-1]).any()):
            raise self._corrupt("a frame lies outside the file or overlaps another one")

    def _corrupt(self, what: str) -> Corrupt:
        name = self._file or "a framed chunk"
        return Corrupt(f"{name}{'' if what.startswith(('is ', 'has ')) else ':'} {what}.", file=self._file)

    def frame(self, number: int) -> tuple[bytes, list[int]]:
        """Return the inflated bytes of a frame, and where its items start in them (plus the end of the last one).

        Raises:
            Corrupt: the frame is damaged.
        """
        with self._lock:
            if (kept := self._inflated.get(number)) is not None:
                self._inflated.move_to_end(number)
                return kept
        if not 0 <= number < self.frames:
            raise IndexError(f"frame {number} of {self.frames}")
        start = int(self._offsets[number])
        packed = self._view[start : start + int(self._packed[number])]
        data = codec.decompress(packed, size=int(self._plain[number]), file=self._file)
        first = number * self.frame_items
        bounds = self._logical[first : first + self.frame_items + 1]
        result = data, (bounds - bounds[0]).tolist()
        with self._lock:  # two threads may inflate the same frame: cheaper than to wait for each other
            self._inflated[number] = result
            while len(self._inflated) > _KEPT_FRAMES:
                self._inflated.popitem(last=False)
        return result

    def item(self, slot: int) -> bytes:
        """Return the bytes of one item."""
        if not 0 <= slot < self.count:
            raise IndexError(f"item {slot} of {self.count}")
        number, at = divmod(slot, self.frame_items)
        data, bounds = self.frame(number)
        return data[bounds[at] : bounds[at + 1]]

    def spliced(
        self,
        items: Mapping[int, bytes],
        compression: Compression,
        removed: AbstractSet[int] = frozenset(),
        erased: AbstractSet[int] = frozenset(),
    ) -> list[Buffer]:
        """Return the buffers of a file in which some slots hold other items, are gone, or are left without bytes.

        Frames whose items stay as they are and together are copied. All frames but the last hold equally many items (readers find an item
        by dividing), so those behind a removed item are cut anew, unless what is removed makes up whole frames.

        Raises:
            SampleError: the items of one frame are all empty, or the file would reach 4 GiB.
            Corrupt: a frame that is opened is damaged.
        """
        width, sizes = self.frame_items, np.diff(self._logical)
        slots, gone = list(items), list(erased)
        sizes[slots] = np.fromiter(map(len, items.values()), np.int64, len(items))
        sizes[gone] = 0
        fresh = np.zeros(self.count, bool)
        fresh[slots] = fresh[gone] = True
        kept = np.delete(np.arange(self.count), list(removed))
        logical = np.concatenate([[0], np.cumsum(sizes[kept])])
        if logical[-1] > _U32_MAX:
            raise _too_large(int(logical[-1]))
        firsts = range(0, len(kept), width)
        table = np.zeros(len(firsts), _FRAME)
        start = _HEAD.size + logical.size * 4 + table.nbytes
        frames: list[Buffer] = []
        for number, first in enumerate(firsts):
            group = kept[first : first + width]
            old, last = int(group[0]), first + len(group)
            stored = old // width
            if old % width == 0 and group[-1] == min(old + width, self.count) - 1 == old + len(group) - 1 and not fresh[group].any():
                offset = int(self._offsets[stored])
                frame: Buffer = self._view[offset : offset + int(self._packed[stored])]
            else:
                members = group.tolist()
                plain = b"".join(b"" if slot in erased else items[slot] if slot in items else self.item(slot) for slot in members)
                if not plain and not items.keys().isdisjoint(members):
                    raise SampleError("samples without any content cannot be compressed in batches.")
                frame = codec.compress(plain, compression)
            packed = memoryview(frame).nbytes
            table[number] = (first, len(group), start, packed, int(logical[last] - logical[first]))
            start += packed
            frames.append(frame)
        if start > _U32_MAX:
            raise _too_large(start)
        header = _HEAD.pack(MAGIC, 1, 0, len(kept), width, len(firsts))
        return [header + logical.astype("<u4").tobytes() + table.tobytes(), *frames, *end_mark(frames)]


def pack_sample_compressed(items: Sequence[bytes], compression: Compression) -> list[bytes]:
    """Return the buffers of a chunk file whose every item is a zstd frame: header, then the frames.

    Raises:
        SampleError: the file would reach 4 GiB.
    """
    count = len(items)
    frames = [codec.compress(item, compression) for item in items]
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = 4 + 4 * (count + 1)
    np.cumsum(np.fromiter(map(len, frames), np.int64, count), out=offsets[1:])
    offsets[1:] += offsets[0]
    if offsets[-1] > _U32_MAX:
        raise _too_large(int(offsets[-1]))
    return [struct.pack("<I", count) + offsets.astype("<u4").tobytes(), *frames, *end_mark(frames)]


def sample_item(slot: Buffer, file: str = "") -> bytes:
    """Return the item in a slot of a per-sample compressed chunk.

    The old tool writes some of these chunks without compressing them. No item starts like a frame: its first leaf would be 4 GB.
    """
    return codec.decompress(slot, file=file) if codec.is_frame(slot) else bytes(slot)


def inflate_file(buffer: Buffer, expected: int, file: str = "") -> bytes:
    """Return the plain bytes of a chunk file that is one zstd frame; ``expected`` is its ``chunk_bytes``."""
    return codec.inflate(buffer, size=expected, file=file)
