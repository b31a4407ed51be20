"""Batches from chunk bytes: what decoding each sample and torch's default_collate give."""

from __future__ import annotations

import mmap
import random
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import liveset
import liveset.format.batch as batch_module
from liveset.errors import CollateError, Corrupt, MissingDependency
from liveset.format.batch import BatchDecoder, Part, part_of
from liveset.format.chunk import ArrowSamples, pack_classic
from liveset.format.collate import collate, to_tensors
from liveset.format.index import ChunkRecord
from liveset.format.sample import Damaged
from liveset.format.schema import Decoder, Encoder, Schema
from liveset.format.tree import Leaf
from liveset.read.chunks import OpenChunks
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.testing.strategies import arrays, json_values, leaf_values, numpy_scalars, same, samples

try:
    import torch
    from torch.utils.data import default_collate
except ImportError:
    TORCHLESS = True
else:
    TORCHLESS = False

needs_torch = pytest.mark.skipif(TORCHLESS, reason="needs torch")
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
_NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool".split()
Values = st.SearchStrategy[Any]


def like(a: Any, b: Any) -> bool:
    """Tell whether two batches are equal in type, structure, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if type(a).__module__ == "torch":
        if a.dtype != b.dtype or a.shape != b.shape or not a.is_contiguous():
            return False
        bits = (a.view(torch.int16), b.view(torch.int16)) if a.dtype is torch.bfloat16 else (a, b)
        return bool(bits[0].numpy().tobytes() == bits[1].numpy().tobytes())
    if isinstance(a, np.ndarray):
        return same(a, b) and bool(a.flags.writeable and a.flags.c_contiguous)
    if isinstance(a, dict):
        kinds = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return kinds and list(a) == list(b) and all(like(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and all(map(like, a, b))
    return same(a, b)


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return error


# --- samples of one schema ----------------------------------------------------------------------------------------------------------------


@st.composite
def one_array(draw: st.DrawFn) -> Values:
    """Arrays of one dtype and shape."""
    dtype = np.dtype(draw(st.sampled_from(_NUMBERS)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    top = 1 if dtype.kind == "b" else 255
    return st.lists(st.integers(0, top), min_size=size, max_size=size).map(lambda data: np.array(data, np.uint8).view(dtype).reshape(shape))


@st.composite
def one_tensor(draw: st.DrawFn) -> Values:
    """Tensors of one dtype and shape."""
    dtype = getattr(
        torch, draw(st.sampled_from("float32 float64 complex64 float16 uint8 int8 int16 int32 int64 bool uint16 bfloat16".split()))
    )
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape))
    return st.lists(st.integers(0, 100), min_size=count, max_size=count).map(lambda data: torch.tensor(data).reshape(shape).to(dtype))


def png(value: int) -> liveset.Image:
    return liveset.Image(array=np.full((2, 3, 3), value, np.uint8))


def leaf_kinds() -> st.SearchStrategy[Values]:
    """Strategies for the values of one leaf."""
    fixed: list[Values] = [
        _INT64,
        st.floats(),
        st.booleans(),
        _TEXT,
        st.binary(max_size=5),
        st.none() | _TEXT,
        st.none() | _INT64,
        st.integers() | st.floats(),
        st.lists(_INT64, max_size=2),
        json_values(3),
        arrays(),
        numpy_scalars(),
        st.complex_numbers(),
        _TEXT.map(lambda text: liveset.Text(text=text)),
        st.binary(max_size=3).map(lambda data: liveset.File(bytes=data)),
    ]
    kinds = st.sampled_from(fixed) | one_array()
    return kinds if TORCHLESS else kinds | one_tensor() | st.sampled_from([st.integers(0, 255).map(png)])


def containers(inner: st.SearchStrategy[Values]) -> st.SearchStrategy[Values]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(_TEXT | _INT64 | st.none(), inner, max_size=4)
    return st.one_of(
        lists.map(lambda parts: st.tuples(*parts)),
        lists.map(lambda parts: st.tuples(*parts).map(list)),
        lists.map(lambda parts: st.tuples(*parts).map(lambda values: deque(values, 5))),
        dicts.map(st.fixed_dictionaries),
        dicts.map(lambda parts: st.fixed_dictionaries(parts).map(lambda values: OrderedDict((key, values[key]) for key in parts))),
        dicts.map(lambda parts: st.fixed_dictionaries(parts).map(lambda values: defaultdict(list, values))),
    )


SCHEMAS = st.recursive(leaf_kinds(), containers, max_leaves=8) | containers(leaf_kinds())
BATCHES = SCHEMAS.flatmap(lambda values: st.lists(values, min_size=1, max_size=7))


# --- chunks -------------------------------------------------------------------------------------------------------------------------------


def encoded(values: list[Any]) -> tuple[Schema, list[bytes]]:
    encoder = Encoder()
    for value in values:
        encoder.encode(value)
    items = [encoder.encode(value) for value in values]
    assert encoder.schema is not None
    return encoder.schema, [encoder.encode(value) for value in values] if items else []


def chunk_of(items: list[bytes], *, mapped: bool = False) -> tuple[Any, np.ndarray[Any, Any]]:
    data = b"".join(pack_classic(items))
    offsets = np.frombuffer(data, "<u4", len(items) + 1, 4)
    if not mapped:
        return data, offsets
    file = mmap.mmap(-1, len(data))
    file.write(data)
    return file, offsets


def spread(items: list[bytes], seed: int) -> tuple[list[Part], np.ndarray[Any, Any], list[int]]:
    """Put items into chunks in a random order, and ask for some of them in another; return the parts, their order and what is asked for."""
    dice = random.Random(seed)
    places = dice.sample(range(len(items)), len(items))
    chunks, at = [], 0
    while at < len(places):
        width = dice.randint(1, 4)
        inside = places[at : at + width]
        chunks.append((inside, chunk_of([items[i] for i in inside], mapped=dice.random() < 0.5)))
        at += width
    asked = dice.choices(range(len(items)), k=dice.randint(1, 2 * len(items)))
    parts, order = [], []
    for inside, (buffer, offsets) in chunks:
        rows = [row for row, i in enumerate(asked) if i in inside]
        if rows:
            parts.append((buffer, offsets, np.array([inside.index(asked[row]) for row in rows])))
            order += rows
    return parts, np.array(order), asked


TUNINGS = st.fixed_dictionaries(
    {
        "_FEW": st.sampled_from([0, 10]),
        "_SMALL": st.sampled_from([0, 40, 2048]),
        "_LARGE": st.sampled_from([4, 4096]),
        "_PADDING": st.sampled_from([0, 4]),
    }
)


@contextmanager
def tuned(values: dict[str, int]) -> Iterator[None]:
    """Choose the ways that are taken by size."""
    before = {name: getattr(batch_module, name) for name in values}
    vars(batch_module).update(values)
    try:
        yield
    finally:
        vars(batch_module).update(before)


def decoded(schema: Schema, items: list[bytes], **options: Any) -> list[Any]:
    decode = Decoder(schema, **options).decode
    return [decode(item, 0, len(item)) for item in items]


# --- equality -----------------------------------------------------------------------------------------------------------------------------


@needs_torch
@given(BATCHES, st.integers(0, 1 << 30), TUNINGS)
@example([{"x": np.arange(3.0), "y": i, "b": i == 1, "t": "é" * i} for i in range(4)], 1, {})
@example([{"x": torch.tensor(i) if not TORCHLESS else None, "y": (f"{i}", [i])} for i in range(4)], 2, {})
def test_as_default_collate(values: list[Any], seed: int, tuning: dict[str, int]) -> None:
    schema, items = encoded(values)
    parts, order, asked = spread(items, seed)
    one_by_one = decoded(schema, [items[i] for i in asked])
    wanted = attempt(default_collate, one_by_one)
    functions: tuple[Callable[[Any], Any], ...] = (default_collate, collate)
    for function in functions:
        with tuned(tuning):
            found = attempt(lambda function=function: to_tensors(BatchDecoder(schema, collate=function).decode(parts, order)))
        if isinstance(wanted, Exception):
            assert isinstance(found, Exception) or (function is collate and beyond_torch(one_by_one))
        else:
            assert like(found, wanted)


def beyond_torch(values: list[Any]) -> bool:
    """Tell whether there may be what numpy can do, and torch cannot: mix unsigned numbers with others, and turn bytes around."""
    return any(word in repr(values) for word in ("uint", "dtype='>"))


@given(BATCHES, st.integers(0, 1 << 30), TUNINGS)
def test_as_numpy_collate(values: list[Any], seed: int, tuning: dict[str, int]) -> None:
    schema, items = encoded(values)
    parts, order, asked = spread(items, seed)
    wanted = attempt(collate, decoded(schema, [items[i] for i in asked]))
    with tuned(tuning):
        found = attempt(BatchDecoder(schema).decode, parts, order)
    assert isinstance(found, Exception) if isinstance(wanted, Exception) else like(found, wanted)


@given(BATCHES, st.data())
def test_some_fields(values: list[Any], data: st.DataObject) -> None:
    schema, items = encoded(values)
    if not schema.fields or isinstance(schema.root, Leaf):
        return
    fields = data.draw(st.lists(st.sampled_from(sorted(schema.fields)), max_size=3))
    wanted = attempt(collate, decoded(schema, items, fields=fields))
    batched = BatchDecoder(schema, fields=fields)
    found = attempt(batched.decode, [(*chunk_of(items), np.arange(len(items)))])
    assert isinstance(found, Exception) if isinstance(wanted, Exception) else like(found, wanted)
    assert batched.supported or isinstance(found, ValueError)


@needs_torch
@given(
    BATCHES
    | samples().map(lambda value: [value, value])
    | leaf_values().map(lambda value: [value, value])
    | st.lists(numpy_scalars() | st.floats() | st.integers(), min_size=1)
)
def test_collate_as_torch_does(values: list[Any]) -> None:
    wanted = attempt(default_collate, values)
    found = attempt(lambda: to_tensors(collate(values)))
    if isinstance(wanted, Exception):
        assert isinstance(found, Exception) or beyond_torch(values) or "negative" in str(wanted)
    else:
        assert like(found, wanted)


class Pair(NamedTuple):
    a: Any
    b: Any


@needs_torch
@pytest.mark.parametrize(
    "values",
    [
        [Pair(1, "x"), Pair(2, "y")],
        [1, 2.5],
        [True, 2],
        [True, False],
        [1.0, 2],
        [np.int8(1), np.float32(2)],
        [np.float16(1), np.float32(2), 3],
        [np.zeros(2, np.int64), np.ones(2, np.float32)],
        [np.zeros(2, np.complex64), np.ones(2, np.float64)],
        [("a", 1, (2.0,)), ("b", 2, (3.0,))],
        [range(2), range(2, 4)],
        [np.str_("a"), np.str_("b")],
        [[], []],
        [{}, {}],
    ],
)
def test_dtypes_and_containers_of_torch(values: list[Any]) -> None:
    assert like(to_tensors(collate(values)), default_collate(values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"a": None}], "field 'a' cannot be in a batch: it holds None"),
        ([{"a": [1, None]}, {"a": [None, 1]}], r"field 'a\[0\]' .* a number in some samples and None in others"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(3)}], r"arrays of different shapes \(\(2,\), \(3,\)\)"),
        ([[1], [1, 2]], "sequences of different lengths"),
        ([1 << 63], "an int beyond 64 bits"),
        ([1.0, "2"], "a number in some samples and a str in others"),
        ([{1}], "a builtins.set"),
        ([np.array(["a"])], "an array of <U1"),
    ],
)
def test_what_does_not_fit_into_a_batch(values: list[Any], message: str) -> None:
    with pytest.raises(CollateError, match=message) as caught:
        collate(values)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RuntimeError)


# --- what is not alike --------------------------------------------------------------------------------------------------------------------


def test_arrays_of_unlike_shape_raise_as_collating_does() -> None:
    schema, items = encoded([{"x": np.zeros(2)}, {"x": np.zeros(3)}])
    with pytest.raises(CollateError, match="different shapes"):
        BatchDecoder(schema).decode([(*chunk_of(items), np.arange(2))])


def test_items_of_the_same_length_may_differ_inside() -> None:
    values = [{"a": "xx", "b": "y"}, {"a": "zz", "b": "w"}, {"a": "p", "b": "qq"}]
    schema, items = encoded(values)
    assert len({len(item) for item in items}) == 1
    buffer, offsets = chunk_of(items)
    batched = BatchDecoder(schema)
    assert batched.decode([(buffer, offsets, np.array([0, 1]))]) == {"a": ["xx", "zz"], "b": ["y", "w"]}
    assert batched.decode([(buffer, offsets, np.array([2, 2]))]) == {"a": ["p", "p"], "b": ["qq", "qq"]}
    assert batched.decode([(buffer, offsets, np.array([0, 2]))]) == {"a": ["xx", "p"], "b": ["y", "qq"]}


def test_array_headers_are_compared() -> None:
    values = [np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2), np.arange(6.0).reshape(2, 3)]
    schema, items = encoded(values)
    buffer, offsets = chunk_of(items)
    batched = BatchDecoder(schema)
    assert batched.decode([(buffer, offsets, np.array([0, 2]))]).shape == (2, 2, 3)
    assert batched.decode([(buffer, offsets, np.array([1, 1]))]).shape == (2, 3, 2)
    with pytest.raises(CollateError):
        batched.decode([(buffer, offsets, np.array([0, 1]))])


@pytest.mark.parametrize("few", [0, 10])
def test_the_last_item_of_a_chunk_may_be_the_shortest(few: int) -> None:
    values = [{"t": "x" * (20 - i), "y": i} for i in range(8)]
    schema, items = encoded(values)
    parts = [(*chunk_of(items[:4]), np.array([3, 0])), (*chunk_of(items[4:]), np.array([3, 2, 3]))]
    with tuned({"_FEW": few}):
        found = BatchDecoder(schema).decode(parts, np.array([4, 3, 2, 1, 0]))
    assert like(found, collate([values[i] for i in (7, 6, 7, 0, 3)]))


@pytest.mark.parametrize("few", [0, 10])
def test_large_values(few: int) -> None:
    rng = np.random.default_rng(0)
    values = [{"x": rng.random((40, 50), np.float32), "y": i, "blob": rng.bytes(5_000 + i)} for i in range(9)]
    schema, items = encoded(values)
    asked = [5, 1, 8, 1, 0]
    parts = [(*chunk_of(items[:4], mapped=True), np.array([1, 1, 0])), (*chunk_of(items[4:]), np.array([1, 4]))]
    with tuned({"_FEW": few}):
        found = BatchDecoder(schema).decode(parts, np.array([1, 3, 4, 0, 2]))
    assert like(found, collate([values[i] for i in asked]))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=1, max_size=3), st.booleans(), TUNINGS)
def test_damage_is_never_read_as_something_else(flips: list[tuple[int, int]], alike: bool, tuning: dict[str, int]) -> None:
    values = [
        {"x": np.full(2, i, np.int16), "t": "ab" * (1 if alike else i), "y": i, "m": np.ones((1, 1 if alike else i))} for i in range(3)
    ]
    schema, items = encoded(values)
    buffer, offsets = chunk_of(items)
    damaged = bytearray(buffer)
    for at, change in flips:
        damaged[16 + at % (len(buffer) - 16)] ^= change
    bounds = offsets.tolist()
    decode = Decoder(schema).decode
    wanted = attempt(lambda: collate([decode(bytes(damaged), bounds[i], bounds[i + 1]) for i in range(3)]))
    with tuned(tuning):
        found = attempt(BatchDecoder(schema).decode, [(bytes(damaged), offsets, np.arange(3))])
    assert isinstance(found, Exception) if isinstance(wanted, Exception) else like(found, wanted)


def test_items_that_are_longer_than_their_leaves() -> None:
    schema, items = encoded([{"x": i, "y": 0.5} for i in range(3)])
    part = (*chunk_of([item + b"\0\0" for item in items]), np.arange(3))
    lenient = BatchDecoder(schema, strict=False)
    assert lenient.decode([part])["x"].tolist() == [0, 1, 2]
    with pytest.raises(Damaged):
        BatchDecoder(schema).decode([part])


@pytest.mark.parametrize("blobs", [(b"xy", b"zw"), (b"xy", b"z")])
def test_numbers_of_another_size_are_damage(blobs: tuple[bytes, bytes]) -> None:
    schema, items = encoded([{"x": 1, "b": blob} for blob in blobs])
    moved = [struct.pack("<II", 7, len(blob) + 1) + item[8:] for blob, item in zip(blobs, items, strict=True)]
    with pytest.raises(Damaged):
        BatchDecoder(schema).decode([(*chunk_of(moved), np.arange(2))])


def test_erased_items_are_not_read_as_the_next_one() -> None:
    schema, items = encoded([{"x": i} for i in range(3)])
    part = (*chunk_of([items[0], b"", items[2]]), np.array([0, 1]))
    batched = BatchDecoder(schema)
    assert batched.decode([(*part[:2], np.array([0, 2]))])["x"].tolist() == [0, 2]
    with pytest.raises(Damaged):
        batched.decode([part])


def test_readers_of_ones_own() -> None:
    class Hex:
        def deserialize(self, data: bytes) -> str:
            return data.hex()

    schema, items = encoded([{"x": np.zeros(1, np.int8), "y": 1}, {"x": np.ones(1, np.int8), "y": 2}])
    batch = BatchDecoder(schema, serializers={"no_header_numpy": Hex()}).decode([(*chunk_of(items), np.arange(2))])
    assert batch["x"] == ["00", "01"]
    assert batch["y"].tolist() == [1, 2]


def test_nothing_to_decode_is_not_supported() -> None:
    schema, _ = encoded([1, 2])
    assert not BatchDecoder(schema, fields=[]).supported
    with pytest.raises(ValueError, match="at least one sample"):
        BatchDecoder(schema).decode([])


def test_tensors_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingDependency, match="pip install torch"):
        to_tensors({"x": np.zeros(1)})


# --- chunks of a dataset ------------------------------------------------------------------------------------------------------------------


def row(i: int) -> dict[str, Any]:
    return {"id": f"n-{i}", "x": np.arange(i, i + 4, dtype=np.float32), "y": i, "z": (i / 2, b"\0" * (i % 3))}


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:batch", "zstd:sample"])
def test_chunks_of_a_dataset(compression: str | None, tmp_path: Path) -> None:
    codec, _, level = (compression or "").partition(":")
    options: dict[str, Any] = {"compression": codec, "compression_level": level or "chunk"} if codec else {}
    liveset.optimize(row, range(50), tmp_path, num_workers=1, chunk_size=20, **options)
    snapshot = open_snapshot(open_store(tmp_path))
    assert snapshot.index.config is not None
    schema = Schema.from_config(snapshot.index.config)
    chunks = OpenChunks(snapshot, Decoder(schema))
    parts = [part_of(chunks[number], slots) for number, slots in ((2, [3, 0]), (0, [19]), (1, [0, 7, 7]))]
    assert None not in parts
    batch = BatchDecoder(schema).decode([part for part in parts if part is not None], np.array([5, 4, 3, 2, 1, 0]))
    assert like(batch, collate([row(i) for i in (27, 27, 20, 19, 40, 43)]))


def test_read_takes_what_has_items_and_leaves_the_rest(tmp_path: Path) -> None:
    liveset.optimize(row, range(50), tmp_path, num_workers=1, chunk_size=20)
    snapshot = open_snapshot(open_store(tmp_path))
    assert snapshot.index.config is not None
    schema = Schema.from_config(snapshot.index.config)
    chunks, batched = OpenChunks(snapshot, Decoder(schema)), BatchDecoder(schema)
    assert like(batched.read([(chunks[2], [3, 0]), (chunks[0], np.array([19]))]), collate([row(i) for i in (43, 40, 19)]))

    class Other:
        def read(self, slot: int) -> Any:
            return row(slot)

        def iterate(self, start: int, stop: int) -> Iterator[Any]:
            return map(row, range(start, stop))

    assert batched.read([(chunks[2], [3]), (Other(), [0])]) is None
    assert batched.read([]) is None
    assert BatchDecoder(schema, fields=[]).read([(chunks[0], [0])]) == {}


@pytest.mark.parametrize("fields", [None, ["t", "n"]])
@pytest.mark.parametrize("stream", [True, False])
def test_arrow_rows(stream: bool, fields: list[str] | None) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    from tests.test_arrow import pack

    def value(i: int) -> dict[str, Any]:
        return {
            "n": i,
            "x": i / 3,
            "b": i % 2 == 0,
            "t": f"é{i}",
            "raw": bytes([i]),
            "l": [i, i + 1],
            "s": {"a": i},
            "f": 0.5 if i < 40 else i,
        }

    def open_rows(values: list[dict[str, Any]]) -> ArrowSamples:
        data = pack(values, batch=7, stream=stream)
        record = ChunkRecord("c.bin", len(values), len(data))
        return ArrowSamples(data, record, Decoder(Schema.of(values[0]), fields=fields))

    first, second = open_rows([value(i) for i in range(30)]), open_rows([{**value(i), "x": 0.25} for i in range(40, 60)])
    batched = BatchDecoder(Schema.of(value(0)), fields=fields)
    one, other = (first, np.array([29, 0, 7, 7, 3])), (second, np.array([19, 1]))
    for places in ([one], [one, other], [other, one]):
        wanted = collate([chunk.read(slot) for chunk, slots in places for slot in slots.tolist()])
        assert like(batched.read(places), wanted)
    missing = open_rows([{**value(1), "n": None, "t": "z"}, value(2)])
    assert like(batched.read([(missing, [1]), (first, [0])]), collate([missing.read(1), first.read(0)]))
    with pytest.raises(CollateError):
        batched.read([(first, [0]), (missing, [0])])


def test_memory_is_not_shared_with_the_chunk() -> None:
    schema, items = encoded([{"x": np.arange(4)}])
    buffer, offsets = chunk_of(items, mapped=True)
    batch = BatchDecoder(schema).decode([(buffer, offsets, np.array([0]))])
    batch["x"][:] = 9
    assert b"\x09" not in buffer[:]
    buffer.close()  # nothing holds on to it


def test_any_byte_but_zero_is_true() -> None:
    schema, items = encoded([{"b": True}, {"b": False}])
    part = (*chunk_of([items[0][:-1] + b"\x07", items[1]]), np.arange(2))
    assert like(BatchDecoder(schema).decode([part]), {"b": np.array([True, False])})


def pictures(kind: str, count: int = 5, size: tuple[int, int] = (9, 7)) -> list[Any]:
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0], 3), np.uint8)
    made = [pillow.fromarray(each) for each in pixels]
    if kind == "png":
        return [liveset.Image(image=each, format="png") for each in made]
    if kind == "grey":
        return [liveset.Image(image=each.convert("L"), format="png") for each in made]
    if kind == "deep":
        return [liveset.Image(image=pillow.fromarray(each[:, :, 0].astype(np.uint16) * 257), format="png") for each in pixels]
    return [liveset.Jpeg(image=each.convert("CMYK") if kind == "cmyk" else each, quality=90) for each in made]


@pytest.mark.parametrize("kind", ["png", "grey", "deep", "jpeg", "cmyk"])
@pytest.mark.parametrize("order", [None, [3, 0, 4, 1, 2]])
def test_images_are_decoded_where_they_stand_in_the_batch(kind: str, order: list[int] | None) -> None:
    schema, items = encoded([{"id": i, "image": each} for i, each in enumerate(pictures(kind))])
    first, second = chunk_of(items[:2]), chunk_of(items[2:])
    places = None if order is None else np.array(order)
    batch = BatchDecoder(schema).decode([(*first, np.arange(2)), (*second, np.arange(3))], places)
    assert tuple(batch["image"].shape) == (5, 3, 7, 9)
    for place, sample in zip(order or range(5), decoded(schema, items), strict=True):
        assert batch["id"][place] == sample["id"]
        assert np.array_equal(batch["image"][place], sample["image"])
        assert type(batch["image"]) is type(sample["image"])
    batch["image"][:] = 0  # its own memory


def test_images_of_different_sizes_are_no_batch() -> None:
    schema, items = encoded([{"image": each} for each in [*pictures("png", 2), *pictures("png", 1, (3, 4))]])
    with pytest.raises(CollateError, match=r"\[3, 4, 3\]|different shapes"):
        BatchDecoder(schema).decode([(*chunk_of(items), np.arange(3))])


def test_a_damaged_image_is_an_error_of_the_batch() -> None:
    schema, items = encoded([{"image": each} for each in pictures("jpeg", 3)])
    items[1] = items[1][: len(items[1]) // 3] + bytes(len(items[1]) - len(items[1]) // 3)
    with pytest.raises(Corrupt):
        BatchDecoder(schema, strict=False).decode([(*chunk_of(items), np.arange(3))])
