"""Batches straight from the bytes of chunks: one gather per field in place of one decode per sample.

The result is that of decoding each sample and collating them. What has the same size all over a batch (numbers, arrays of equal shape) is
gathered by numpy; what varies (texts, JSON, images) is decoded value by value, field by field.
"""

from __future__ import annotations

import builtins
import math
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from liveset.format import collate as _collate
from liveset.format import media
from liveset.format.chunk import ArrowSamples, Buffer, Chunk, ClassicChunk, FramedChunk, SampleCompressedChunk
from liveset.format.dtypes import import_torch, numpy_dtype, torch_dtype
from liveset.format.leaves import FIXED_SIZES, LeafCode
from liveset.format.sample import Damaged, DecodeLeaves, compile_leaf_decoder
from liveset.format.schema import Decoder, Schema
from liveset.format.tree import MAPPING_KINDS, Branch, Leaf, Node, leaves

__all__ = ["BatchDecoder", "Part", "part_of"]

Array: TypeAlias = np.ndarray[Any, Any]
# Samples of one chunk: its bytes, its offset table, and their slots.
Part: TypeAlias = tuple[Buffer, Array, Array]

# Items of up to this size are gathered as a whole, and their fields copied out of them; of larger ones that would copy too much twice.
_SMALL = 2_048
# How much larger they may become by padding them to the longest one.
_PADDING = 4
# Chunks with fewer samples than this in a batch, on average, are read item by item.
_FEW = 10
# From this size on, copying values one by one costs nothing beside the bytes that it moves, and needs no memory between.
_LARGE = 4_096


def part_of(chunk: Chunk, slots: Sequence[int] | Array) -> Part | None:
    """Return what ``BatchDecoder.decode`` needs of a chunk; None for layouts without items, whose samples must be read one by one."""
    if isinstance(chunk, ClassicChunk):
        return chunk.buffer, chunk.offsets, np.asarray(slots, np.intp)
    if isinstance(chunk, SampleCompressedChunk | FramedChunk):
        # In the order of the file, so that no frame is inflated twice.
        wanted, places = np.unique(np.asarray(slots), return_inverse=True)
        items = [chunk.item(slot) for slot in wanted.tolist()]
        offsets = np.fromiter(accumulate(map(len, items), initial=0), np.uint32, len(items) + 1)
        return b"".join(items), offsets, places
    return None


class BatchDecoder:
    """Turns items into collated batches; safe to use from several threads.

    Args:
        schema: what the items hold.
        fields: names of the fields to decode; None means whole samples.
        allow_pickle: let pickle leaves create objects of any type. Only for datasets that you trust.
        serializers: readers for leaf types by name, before ours.
        strict: an item must end exactly where its leaves end.
        collate: what puts values together that are decoded one by one; ``torch.utils.data.default_collate`` makes tensors of them at once.

    Attributes:
        supported: whether batches can be decoded at all; if not, samples must be read one by one.
        copies: whether decoding does no more than copy numbers, texts and bytes.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        fields: Iterable[str] | None = None,
        allow_pickle: bool = False,
        serializers: Mapping[str, Any] | None = None,
        strict: bool = True,
        collate: Callable[[Sequence[Any]], Any] = _collate.collate,
    ) -> None:
        decoder = Decoder(schema, fields=fields, allow_pickle=allow_pickle, serializers=serializers, strict=strict)
        codes, self._strict, self._collate = decoder.codes, strict, collate
        self._count, self._head = len(codes), 4 * len(codes)
        # The sizes of a batch in which all items had the same, and as they are stored.
        self._known: tuple[bytes, list[Any]] = b"\xff" * self._head, []
        self._packed = [(number, FIXED_SIZES[code.pack]) for number, code in enumerate(codes) if code.pack]
        self._units = [(number, code.unit - 1) for number, code in enumerate(codes) if code.unit > 1]
        self._columns: list[_Column] = []
        self.copies = True
        wanted = decoder.wanted if decoder.wanted is not None else frozenset(range(len(codes)))
        self._root = self._plan(schema.root, None, iter(enumerate(codes)), wanted, serializers or {})
        self.supported = bool(self._columns) or isinstance(schema.root, Branch)

    def read(self, places: Sequence[tuple[Chunk, Sequence[int] | Array]]) -> Any:
        """Return the batch of the samples in some slots of chunks, in this order; None where they must be read one by one.

        It raises what ``decode`` raises.
        """
        if not self.supported or not places:
            return None
        if all(isinstance(chunk, ArrowSamples) for chunk, _ in places):
            return self._of_rows(places)
        parts = [part_of(chunk, slots) for chunk, slots in places]
        found = [part for part in parts if part is not None]
        return self.decode(found) if len(found) == len(parts) else None

    def _of_rows(self, places: Sequence[tuple[Chunk, Sequence[int] | Array]]) -> Any:
        found = [chunk.gather(np.asarray(slots).tolist()) for chunk, slots in places if isinstance(chunk, ArrowSamples)]
        tables = [table for table in found if table is not None]
        if len(tables) < len(found) or any(list(table) != list(tables[0]) for table in tables):
            return None
        return {name: self._joined([table[name] for table in tables]) for name in tables[0]}

    def _joined(self, columns: list[Any]) -> Any:
        if all(isinstance(column, np.ndarray) for column in columns) and len({column.dtype for column in columns}) == 1:
            return np.concatenate(columns)
        return self._collate(list(chain.from_iterable(column if isinstance(column, list) else column.tolist() for column in columns)))

    def decode(self, parts: Sequence[Part], order: Array | None = None) -> Any:
        """Return the batch of some samples, with numpy arrays where ``default_collate`` has tensors: see ``collate.to_tensors``.

        Args:
            parts: the samples, chunk by chunk, as ``part_of`` gives them. Slots that a purge has erased must not be among them.
            order: for each of these samples its place in the batch; None leaves them in this order.

        Raises:
            Exception: a sample is damaged, a value cannot be decoded, or the samples do not fit into one batch. The error that says which
                comes from reading them one by one.
        """
        if not self.supported:
            raise ValueError("nothing of the samples is to be decoded")
        parts = [part for part in parts if len(part[2])]
        if not parts:
            raise ValueError("a batch has at least one sample")
        return _assemble(self._root, iter(self._decode(_Rows.of(parts, order).packed())))

    def _plan(
        self,
        node: Node,
        parent: Branch | None,
        codes: Iterator[tuple[int, LeafCode]],
        wanted: frozenset[int],
        serializers: Mapping[str, Any],
    ) -> Node:
        """List the columns, and return the tree of what is wanted."""
        if isinstance(node, Leaf):
            number, code = next(codes)
            if number not in wanted:
                return node
            custom = node.format in serializers or node.format.partition(":")[0] in serializers
            self.copies &= not custom and (node.format in ("str", "bytes") or _form_of(node.format, code) is not None)
            in_sequence = parent is not None and parent.kind not in MAPPING_KINDS
            form_of = None if custom else _form_of(node.format, code)
            picture = not custom and media.is_picture(node.format)
            self._columns.append(_Column(number, form_of, compile_leaf_decoder(code), in_sequence, picture))
            return node
        kept = []
        for step, child in zip(node.keys if node.keys is not None else range(len(node.children)), node.children, strict=True):
            before = len(self._columns)
            found = self._plan(child, node, codes, wanted, serializers)
            if len(self._columns) > before or not any(True for _ in leaves(child)):
                kept.append((step, found))
        keys = tuple(step for step, _ in kept) if node.keys is not None else None
        return Branch(node.kind, tuple(child for _, child in kept), keys, node.option)

    def _decode(self, rows: _Rows) -> list[Any]:
        """Return the columns."""
        sizes = self._sizes(rows)
        # A leaf stands `at` bytes behind `base`, which is another one only behind leaves of different sizes.
        base, at = rows.starts, self._head
        places = []
        for size in sizes:
            places.append((base, at))
            if type(size) is int:
                at += size
            else:
                base = base + size
        rows.check_ends(base, at, strict=self._strict)
        columns = []
        for column in self._columns:
            (base, at), size = places[column.number], sizes[column.number]
            array = form = None
            if column.form_of is not None and type(size) is int:
                form = column.form_of(rows.first, int(base[0]) + at, size)
                array = _gather(rows, form, base, at)
            if form is not None and array is not None:
                columns.append(form.finish(array) if form.finish else array)
                continue
            starts = base + at
            if column.picture and (pictures := media.decode_pictures(rows.files(starts, starts + size), rows.count)) is not None:
                columns.append(pictures)
                continue
            values = rows.values(column.decode, starts, starts + size)
            # Transposing sequences, as default_collate does, makes tuples of their items.
            columns.append(self._collate(tuple(values) if column.in_sequence else values))
        return columns

    def _sizes(self, rows: _Rows) -> list[Any]:
        """Return the size of each leaf: an int where it is the same in all items, else an array."""
        if not self._count:
            return []
        table = rows.gather(self._head, rows.starts)
        stored = table.tobytes()
        alike = stored == stored[: self._head] * rows.count
        known, sizes = self._known
        if alike and stored.startswith(known):
            return sizes
        sizes = list(struct.unpack_from(f"<{self._count}I", stored))
        if not alike:
            by_leaf = np.ascontiguousarray(table.view("<u4").reshape(rows.count, self._count).T)
            for number in np.flatnonzero((by_leaf != by_leaf[:, :1]).any(axis=1)).tolist():
                sizes[number] = by_leaf[number]
        if any(type(sizes[number]) is not int or sizes[number] != size for number, size in self._packed):
            raise Damaged
        if any(sizes[number] & rest if type(sizes[number]) is int else (sizes[number] & rest).any() for number, rest in self._units):
            raise Damaged
        if alike:
            self._known = stored[: self._head], sizes
        return sizes


# --- leaves -------------------------------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What the values of a leaf have in common, so that they can be gathered: their header, and the array that follows it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    finish: Callable[[Array], Any] | None = None
    head: bytes = b""


# From what the first value is in, where it starts, and its size.
FormOf: TypeAlias = Callable[[Any, int, int], _Form]


@dataclass(frozen=True, slots=True)
class _Column:
    """A leaf that is wanted: how it is gathered, if it can be, and how it is decoded otherwise."""

    number: int
    form_of: FormOf | None
    decode: DecodeLeaves
    in_sequence: bool
    picture: bool


_BYTE = np.dtype("u1")
_PACKED = {"q": _Form(np.dtype("<i8"), (), 8), "d": _Form(np.dtype("<f8"), (), 8), "?": _Form(_BYTE, (), 1, lambda array: array != 0)}


def _form_of(fmt: str, code: LeafCode) -> FormOf | None:
    """Return what tells the form of the values of a leaf; None for leaves that are no arrays."""
    if code.pack:
        return _always(_PACKED[code.pack])
    name, _, argument = fmt.partition(":")
    if name == "no_header_numpy":
        return partial(_vector_form, numpy_dtype(int(argument)))
    if name == "no_header_tensor":
        return partial(_tensor_vector_form, int(argument))
    return {"numpy": _array_form, "tensor": _tensor_form}.get(fmt)


def _always(form: _Form) -> FormOf:
    return lambda *_: form


def _vector_form(dtype: np.dtype[Any], _: Any, __: int, size: int) -> _Form:
    return _Form(dtype, (size // dtype.itemsize,), size)


def _tensor_vector_form(index: int, _: Any, __: int, size: int) -> _Form:
    return _Form(_BYTE, (size,), size, partial(_as_tensor, index, (-1,) if size else (0,)))


def _array_form(buffer: Any, start: int, size: int) -> _Form:
    index, ndim = struct.unpack_from("<II", buffer, start)
    shape, head = struct.unpack_from(f"<{ndim}I", buffer, start + 8), 8 + 4 * ndim
    dtype = numpy_dtype(index)
    if head + math.prod(shape) * dtype.itemsize != size:
        raise Damaged
    return _Form(dtype, shape, size - head, None, bytes(buffer[start : start + head]))


def _tensor_form(buffer: Any, start: int, size: int) -> _Form:
    index, ndim = struct.unpack_from(">II", buffer, start)
    shape, head = struct.unpack_from(f">{ndim}I", buffer, start + 8), 8 + 4 * ndim
    if head + math.prod(shape) * torch_dtype(index).itemsize != size:
        raise Damaged
    return _Form(_BYTE, (size - head,), size - head, partial(_as_tensor, index, shape), bytes(buffer[start : start + head]))


def _as_tensor(index: int, shape: tuple[int, ...], array: Array) -> Any:
    torch, dtype = import_torch("Reading a tensor"), torch_dtype(index)
    if not array.size:
        return torch.empty((len(array), *shape), dtype=dtype)
    return torch.from_numpy(array).view(dtype).reshape(len(array), *shape)


# --- items --------------------------------------------------------------------------------------------------------------------------------


class _Rows:
    """The items of a batch, in the order in which they are stored: what they are in, where each one starts, and how long it is.

    Args:
        buffers: what the items are in, with the slice of them that is in each.
        starts: where each one starts in its buffer.
        lengths: their sizes.
        order: the place of each one in the batch; None when that is their order here.
        width: how far the starts are apart, if they are so evenly; else 0.
        alike: the length of all items, if they are known to have the same; else 0.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[Buffer | Array, slice]],
        starts: Array,
        lengths: Array,
        order: Array | None,
        width: int = 0,
        alike: int = 0,
    ) -> None:
        self._buffers, self.starts, self._lengths, self._order, self._width, self._alike = buffers, starts, lengths, order, width, alike
        self.first, self.count = buffers[0][0], len(starts)

    @classmethod
    def of(cls, parts: Sequence[Part], order: Array | None) -> _Rows:
        if len(parts) == 1:
            buffer, offsets, slots = parts[0]
            starts, ends = offsets[slots], offsets[slots + 1]
            return cls([(buffer, slice(None))], starts.astype(np.int64), ends - starts, order)
        if sum(len(slots) for _, _, slots in parts) < _FEW * len(parts):
            return cls._joined(parts, order)
        places = accumulate((len(slots) for _, _, slots in parts), initial=0)
        starts = np.concatenate([offsets[slots] for _, offsets, slots in parts])
        ends = np.concatenate([offsets[slots + 1] for _, offsets, slots in parts])
        buffers = [(part[0], slice(*place)) for part, place in zip(parts, pairwise(places), strict=True)]
        return cls(buffers, starts.astype(np.int64), ends - starts, order)

    @classmethod
    def _joined(cls, parts: Sequence[Part], order: Array | None) -> _Rows:
        """Copy the items of many chunks into one buffer: what numpy does per chunk would take longer."""
        items = [buffer[offsets.item(slot) : offsets.item(slot + 1)] for buffer, offsets, slots in parts for slot in slots.tolist()]
        lengths = np.fromiter(map(len, items), np.uint32, len(items))
        return cls([(b"".join(items), slice(None))], np.cumsum(lengths, dtype=np.int64) - lengths, lengths, order)

    def packed(self) -> _Rows:
        """Return copies of the items in one buffer and in the order of the batch, if they are small; else the items as they are."""
        width = int(self._lengths[0])
        alike = self._lengths.tobytes() == width.to_bytes(4, "little") * self.count
        if not alike:
            width = int(self._lengths.max())
        if not 0 < width <= _SMALL:
            return self
        if alike:
            items, lengths = self._arrange(self.gather(width, self.starts)).view(_BYTE), self._lengths
        else:
            if width * self.count > _PADDING * int(self._lengths.sum()) or any(len(buffer) < width for buffer, _ in self._buffers):
                return self
            items, lengths = self._arrange(self._padded(width)).view(_BYTE), self._arrange(self._lengths)
        return _Rows([(items, slice(None))], np.arange(0, width * self.count, width), lengths, None, width, width if alike else 0)

    def _padded(self, width: int) -> Array:
        """Return as many bytes of each item, with any bytes behind shorter ones."""
        limits = np.empty(self.count, np.int64)
        for buffer, here in self._buffers:
            limits[here] = len(buffer) - width
        items = self.gather(width, np.minimum(self.starts, limits))
        rows = items.view(_BYTE).reshape(self.count, width)
        for row in np.flatnonzero(self.starts > limits).tolist():  # too close to the end of the buffer, so it is the end that was taken
            late = int(self.starts[row] - limits[row])
            rows[row, : width - late] = rows[row, late:].copy()
        return items

    def check_ends(self, base: Array, at: int, *, strict: bool) -> None:
        """Raise ``Damaged`` unless the items end here, or at least not before."""
        if base is self.starts and at == self._alike:
            return
        used = at if base is self.starts else base - self.starts + at
        if (self._lengths != used if strict else self._lengths < used).any():
            raise Damaged

    def gather(self, size: int, base: Array, at: int = 0) -> Array:
        """Return as many bytes from each place on, as elements of a void dtype."""
        if self._width and base is self.starts:
            return np.ndarray((self.count,), _void(size), self.first, at, (self._width,)).copy()
        starts = base + at
        found = [np.ndarray((len(buffer) - size + 1,), _void(size), buffer, 0, (1,))[starts[here]] for buffer, here in self._buffers]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def column(self, size: int, base: Array, at: int) -> Array:
        """Return the same in the order of the batch."""
        if size < _LARGE:
            return self._arrange(self.gather(size, base, at))
        out = np.empty((self.count, size), _BYTE)
        order = range(self.count) if self._order is None else self._order.tolist()
        for buffer, here in self._buffers:
            source = np.frombuffer(buffer, _BYTE)
            for row, start in zip(order[here], (base[here] + at).tolist(), strict=True):
                out[row] = source[start : start + size]
        return out

    def values(self, decode: DecodeLeaves, starts: Array, ends: Array) -> list[Any]:
        """Return what stands between the bounds, in the order of the batch."""
        found: list[Any] = []
        for buffer, here in self._buffers:
            found += decode(buffer.tobytes() if isinstance(buffer, np.ndarray) else buffer, starts[here].tolist(), ends[here].tolist())
        if self._order is None:
            return found
        out = found.copy()
        for row, value in zip(self._order.tolist(), found, strict=True):
            out[row] = value
        return out

    def files(self, starts: Array, ends: Array) -> Iterator[tuple[int, bytes]]:
        """Return the bytes that stand between the bounds, with their places in the batch."""
        order = range(self.count) if self._order is None else self._order.tolist()
        for buffer, here in self._buffers:
            for row, start, end in zip(order[here], starts[here].tolist(), ends[here].tolist(), strict=True):
                yield row, bytes(buffer[start:end])

    def _arrange(self, array: Array) -> Array:
        if self._order is None:
            return array
        out = np.empty_like(array)
        out[self._order] = array
        return out


@lru_cache(256)
def _void(size: int) -> np.dtype[Any]:
    return np.dtype((np.void, size))


def _gather(rows: _Rows, form: _Form, base: Array, at: int) -> Array | None:
    """Return the array of all values, or None when their headers differ."""
    head = len(form.head)
    if head and rows.gather(head, base, at).tobytes() != form.head * rows.count:
        return None
    if not form.size:
        return np.empty((rows.count, *form.shape), form.dtype)
    found = rows.column(form.size, base, at + head).view(form.dtype)
    return found.reshape(rows.count, *form.shape) if form.shape else found.reshape(rows.count)


def _assemble(node: Node, columns: Iterator[Any]) -> Any:
    """Return the containers around the columns, as ``collate`` returns them."""
    if isinstance(node, Leaf):
        return next(columns)
    children = [_assemble(child, columns) for child in node.children]
    if node.keys is not None:
        items = dict(zip(node.keys, children, strict=True))
        if node.kind == "OrderedDict":
            return OrderedDict(items)
        return defaultdict(getattr(builtins, node.option), items) if node.kind == "defaultdict" else items
    return deque(children, node.option) if node.kind == "deque" else children
