"""Comparing the stored samples of two chunk files: runs of equal bytes are found without looking at single samples, nothing is decoded."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from liveset.errors import Corrupt, DatasetError
from liveset.format import codec
from liveset.format.arrow import FILE_MAGIC, ArrowChunk, find_blob, is_arrow, load_pyarrow
from liveset.format.arrowsplice import same_row
from liveset.format.chunk import Buffer, read_offsets
from liveset.format.framed import FramedItems, is_framed, sample_item
from liveset.format.index import ChunkRecord
from liveset.format.schema import Decoder, Schema
from liveset.format.tree import Leaf

__all__ = ["FieldNames", "Items", "Rows", "differing", "open_samples"]

_Array: TypeAlias = np.ndarray[Any, Any]

# Rows that differ are looked for one by one once they are known to be among so few.
_FEW_ROWS = 16
# Bytes that are compared at a time: they, and what the comparison says of each, fit into the cache of a core.
_STEP = 1 << 17


class Items:
    """The items of a chunk file, wherever in it they are packed."""

    def __init__(self, buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None) -> None:
        self._file = record.filename
        self._frames: FramedItems | None = None
        self.packed = False
        if is_framed(buffer):
            self._frames = FramedItems(buffer, record.samples, record.filename)
            self.width = self._frames.frame_items
        else:
            self.packed = compression is not None and compression.level == "sample"
            self.width = max(record.samples, 1)
            self._whole = buffer, read_offsets(buffer, record).astype(np.int64)

    def block(self, number: int) -> tuple[Buffer, _Array]:
        """Return the bytes that hold the items from ``number * width`` on, and where each begins and the last one ends."""
        if self._frames is None:
            return self._whole
        data, bounds = self._frames.frame(number)
        return data, np.array(bounds, np.int64)

    def __getitem__(self, slot: int) -> bytes:
        if self._frames is not None:
            return self._frames.item(slot)
        buffer, bounds = self._whole
        stored = buffer[bounds[slot] : bounds[slot + 1]]
        return sample_item(stored, self._file) if self.packed else stored


class Rows:
    """The rows of a chunk file that carries Arrow data."""

    def __init__(self, buffer: Buffer, record: ChunkRecord) -> None:
        self._rows = ArrowChunk(buffer, record.samples, record.filename)
        pa, blob = load_pyarrow(), find_blob(buffer, record.filename)
        is_file = bytes(blob[: len(FILE_MAGIC)]) == FILE_MAGIC
        try:
            self.table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.py_buffer(blob)).read_all()
            self.table.validate(full=True)  # damaged offsets would read beyond the buffers
        except (pa.ArrowException, OSError) as error:
            raise Corrupt(f"{record.filename}: the Arrow data is damaged ({error}).", file=record.filename) from error

    def __getitem__(self, slot: int) -> dict[str, Any]:
        return self._rows.read(slot)


def open_samples(buffer: Buffer, record: ChunkRecord, compression: codec.Compression | None) -> Items | Rows:
    """Open a chunk file for comparing, after checking its header and tables; arguments as for ``open_chunk``."""
    if compression is not None and compression.level == "chunk" and codec.is_frame(buffer):
        buffer = codec.inflate(buffer, file=record.filename, size=record.size)
    return Rows(buffer, record) if not is_framed(buffer) and is_arrow(buffer) else Items(buffer, record, compression)


def differing(old: Items | Rows, new: Items | Rows, mine: _Array, theirs: _Array) -> _Array:
    """Return for which pairs of slots, ``mine`` of the old and ``theirs`` of the new file, the stored samples differ."""
    found = np.ones(len(mine), bool)
    if isinstance(old, Rows) and isinstance(new, Rows):
        for start, stop in _runs(mine, theirs):
            found[start:stop] = _differing_rows(old, new, int(mine[start]), int(theirs[start]), stop - start)
    elif isinstance(old, Items) and isinstance(new, Items):
        # A run lies in one frame of each file.
        for start, stop in _runs(mine, theirs, mine // old.width, theirs // new.width):
            blocks = old.block(int(mine[start]) // old.width), new.block(int(theirs[start]) // new.width)
            found[start:stop] = _differing_items(*blocks, mine[start] % old.width, theirs[start] % new.width, stop - start)
        if old.packed or new.packed:  # other bytes may be the same sample, packed in another way
            for i in np.flatnonzero(found).tolist():
                found[i] = old[int(mine[i])] != new[int(theirs[i])]
    return found


def _runs(mine: _Array, theirs: _Array, *same: _Array) -> Iterator[tuple[int, int]]:
    """Yield where slots follow one another in both files."""
    if not len(mine):
        return
    breaks = (np.diff(mine) != 1) | (np.diff(theirs) != 1)
    for column in same:
        breaks |= np.diff(column) != 0
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(mine)]
    yield from pairwise(edges)


def _differing_items(old: tuple[Buffer, _Array], new: tuple[Buffer, _Array], mine: int, theirs: int, count: int) -> _Array:
    """Compare neighbouring items: where their sizes agree as one piece of bytes, some at a time."""
    bounds, others = old[1][mine : mine + count + 1], new[1][theirs : theirs + count + 1]
    found: _Array = np.diff(bounds) != np.diff(others)
    edges = np.flatnonzero(np.diff(np.concatenate([[True], found, [True]])))
    a, b = np.frombuffer(old[0], np.uint8), np.frombuffer(new[0], np.uint8)
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        end, shift = int(bounds[stop]), int(others[start] - bounds[start])
        for here in range(int(bounds[start]), end, _STEP):
            there = min(here + _STEP, end)
            differs = a[here:there] != b[here + shift : there + shift]
            if differs.any():
                at = np.flatnonzero(differs) + here
                first = int(np.searchsorted(bounds, here, side="right")) - 1
                last = int(np.searchsorted(bounds, there))
                found[first:last] |= np.diff(np.searchsorted(at, bounds[first : last + 1])) > 0
    return found


def _differing_rows(old: Rows, new: Rows, mine: int, theirs: int, count: int) -> _Array:
    found = np.zeros(count, bool)
    parts = [(0, count)]
    while parts:
        start, stop = parts.pop()
        if old.table.slice(mine + start, stop - start).equals(new.table.slice(theirs + start, stop - start)):
            continue
        if stop - start <= _FEW_ROWS:
            found[start:stop] = [not same_row(old[mine + i], new[theirs + i]) for i in range(start, stop)]
        else:
            middle = (start + stop) // 2
            parts += [(start, middle), (middle, stop)]
    return found


class FieldNames:
    """Tells in which fields two stored samples differ: leaves of the same type by their bytes, others by their values.

    Attributes:
        added: fields that only the new schema has.
        dropped: fields that only the old schema has.
        retyped: fields of both that are stored as another type.
    """

    def __init__(self, old: Schema, new: Schema) -> None:
        before, after = old.fields, new.fields
        self.added = tuple(name for name in after if name not in before)
        self.dropped = tuple(name for name in before if name not in after)
        self.retyped = tuple(name for name in before if name in after and before[name] != after[name])
        self._schemas = old, new
        self._leaf_names = list(before), list(after)
        self._decoders: dict[tuple[int, str | None], Decoder] = {}

    def differing(self, old: bytes | dict[str, Any], new: bytes | dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the fields of both schemas in which two items, or rows, differ."""
        if isinstance(old, dict) or isinstance(new, dict):
            before, after = (self._decoder(i, None).decode(x, 0, len(x)) if isinstance(x, bytes) else x for i, x in enumerate((old, new)))
            return tuple(_differing_values(before, after))
        mine, theirs = self._leaves(0, old), self._leaves(1, new)
        return tuple(
            name
            for name, leaf in mine.items()
            if name in theirs and (self._values_differ(name, leaf, theirs[name]) if name in self.retyped else leaf != theirs[name])
        )

    def _leaves(self, side: int, item: bytes) -> dict[str, bytes | None]:
        names = self._leaf_names[side]
        if not item:  # erased
            return dict.fromkeys(names)
        start = 4 * len(names)
        if len(item) >= start:
            sizes = struct.unpack_from(f"<{len(names)}I", item)
            if start + sum(sizes) <= len(item):
                found: dict[str, bytes | None] = {}
                for name, size in zip(names, sizes, strict=True):
                    found[name] = item[start : start + size]
                    start += size
                return found
        raise Corrupt("a sample is damaged: its stored sizes contradict each other. `liveset verify` tells in which file.")

    def _values_differ(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        if old is None or new is None:
            return old is not new
        try:
            values = [self._value(side, name, leaf) for side, leaf in enumerate((old, new))]
        except (DatasetError, ImportError):
            return True  # what cannot be loaded here is not known to be the same
        return not _equal(*values)

    def _value(self, side: int, name: str, leaf: bytes) -> Any:
        decoder = self._decoder(side, name)
        try:
            return decoder.decode(struct.pack("<I", len(leaf)) + leaf, 0, 4 + len(leaf))
        except Exception as error:
            raise Corrupt(f"the field {name!r} of a sample is damaged: {error}") from error

    def _decoder(self, side: int, name: str | None) -> Decoder:
        """Return what decodes whole items, or the one leaf of a name."""
        if (side, name) not in self._decoders:
            schema = self._schemas[side]
            if name is not None:
                schema = Schema(Leaf(schema.fields[name]))
            self._decoders[side, name] = Decoder(schema, strict=False)
        return self._decoders[side, name]


def _differing_values(old: Any, new: Any, name: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in old:
            if key in new:
                yield from _differing_values(old[key], new[key], f"{name}.{key}" if name else str(key))
            elif name:  # inside a field of JSON-like rows, where a member is no field of the schema
                yield f"{name}.{key}"
        if name:
            yield from (f"{name}.{key}" for key in new if key not in old)
    elif not _equal(old, new):
        yield name or "sample"


def _equal(a: Any, b: Any) -> bool:
    if hasattr(a, "getbands") and hasattr(b, "getbands"):  # PIL images
        return (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
    if hasattr(a, "shape") or hasattr(b, "shape"):
        x, y = np.asarray(a), np.asarray(b)
        return np.array_equal(x, y, equal_nan=x.dtype.kind in "fc" and y.dtype.kind in "fc")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
