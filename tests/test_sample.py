"""Items: bytes as the format says, and every sample back as it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import PickleRefused, SampleError
from liveset.format.schema import Decoder, Encoder, Schema
from liveset.testing.strategies import json_values, leaf_values, same, samples


def through(*values: Any) -> list[Any]:
    """Encode values with one schema that widens as needed, and decode them with the final one."""
    encoder = Encoder()
    for value in values:
        encoder.encode(value)
    while True:
        schema = encoder.schema
        assert schema is not None
        items = [encoder.encode(value) for value in values]
        if encoder.schema == schema:
            break
    decoder = Decoder(Schema.from_config(schema.to_config()))
    buffer = b"junk" + b"".join(items) + b"junk"
    bounds = [4]
    for item in items:
        bounds.append(bounds[-1] + len(item))

    def fail(at: int, error: Exception) -> None:
        raise AssertionError(f"item at {at}") from error

    iterated = list(decoder.iterate(buffer, bounds, fail))
    read = [decoder.decode(buffer, start, end) for start, end in pairwise(bounds)]
    assert same(iterated, read)
    return read


def test_vector_list_of_ints() -> None:
    encoder = Encoder()
    item = encoder.encode([1, 2])
    assert item == bytes.fromhex("08000000 08000000 0100000000000000 0200000000000000")
    assert encoder.schema is not None
    assert encoder.schema.to_config() == {
        "data_format": ["int", "int"],
        "data_spec": '[1, {"type": "builtins.list", "context": "null", "children_spec": [{"type": null, "context": null, "children_spec": []}, '
        '{"type": null, "context": null, "children_spec": []}]}]',
    }


def test_vector_dict() -> None:
    item = Encoder().encode({"a": 1, "b": "hi", "c": 2.5, "d": True})
    assert item == bytes.fromhex("08000000 02000000 08000000 01000000 0100000000000000 6869 0000000000000440 01")


def test_vector_numpy_leaf() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    item = Encoder().encode(data)
    assert item[4:] == bytes.fromhex("09000000 02000000 02000000 03000000") + data.tobytes()


L = '{"type": null, "context": null, "children_spec": []}'


@pytest.mark.parametrize(
    ("sample", "formats", "spec"),
    [
        (7, ["int"], f"[1, {L}]"),
        ((1, "a"), ["int", "str"], f'[1, {{"type": "builtins.tuple", "context": "null", "children_spec": [{L}, {L}]}}]'),
        (
            {"a": 1, "b": "hi"},
            ["int", "str"],
            f'[1, {{"type": "builtins.dict", "context": "[\\"a\\", \\"b\\"]", "children_spec": [{L}, {L}]}}]',
        ),
        ({1: 2, 3: 4}, ["int", "int"], f'[1, {{"type": "builtins.dict", "context": "[1, 3]", "children_spec": [{L}, {L}]}}]'),
        ({"x": [1, 2, 3]}, ["json"], f'[1, {{"type": "builtins.dict", "context": "[\\"x\\"]", "children_spec": [{L}]}}]'),
        (
            (defaultdict[str, Any](list, {"k": 1}),),
            ["int"],
            '[1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": "collections.defaultdict", "context": '
            '{"default_factory_module": "builtins", "default_factory_name": "list", "dict_context": ["k"]}, "children_spec": ['
            + L
            + "]}]}]",
        ),
        (deque([1, 2], maxlen=5), ["int", "int"], f'[1, {{"type": "collections.deque", "context": "5", "children_spec": [{L}, {L}]}}]'),
        ({}, [], '[1, {"type": "builtins.dict", "context": "[]", "children_spec": []}]'),
        ([], [], '[1, {"type": "builtins.list", "context": "null", "children_spec": []}]'),
    ],
)
def test_spec_texts(sample: Any, formats: list[str], spec: str) -> None:
    assert Schema.of(sample).to_config() == {"data_format": formats, "data_spec": spec}


@given(samples())
def test_any_sample_reads_back_equal(sample: Any) -> None:
    (read,) = through(sample)
    assert same(read, sample), (read, sample)


@given(st.lists(samples(), min_size=2, max_size=4))
def test_samples_of_changing_shape_read_back_equal(values: list[Any]) -> None:
    read = through(*values)
    assert all(map(same, read, values)), (read, values)


@given(
    st.lists(st.fixed_dictionaries({"id": st.integers(0, 9), "v": leaf_values()}, optional={"late": json_values()}), min_size=2, max_size=4)
)
def test_changing_fields_read_back_equal(values: list[Any]) -> None:
    read = through(*values)
    assert all(map(same, read, values)), (read, values)


@pytest.mark.parametrize(
    ("values", "formats"),
    [
        ([{"n": 1}, {"n": None}], {"n": "json"}),
        ([{"n": 1}, {"n": 2.0}], {"n": "json"}),
        ([{"n": 1}, {"n": 1, "late": "x"}], {"sample": "json"}),
        ([[1], [1, 2]], {"sample": "json"}),
        ([np.zeros(2, np.float32), np.zeros(2, np.float64)], {"sample": "numpy"}),
        ([np.zeros(2), np.zeros((2, 2))], {"sample": "numpy"}),
        ([{"a": np.zeros(2)}, {"a": None}], {"a": "pickle"}),
        ([{"a": 1, "b": b"x"}, {"a": 1}], {"sample": "pickle"}),
        ([{"n": 1}, {"n": 1 << 70}], {"n": "pickle"}),
        ([{"n": [1]}, {"n": [1, float("nan"), "x"]}], {"n": "pickle"}),
    ],
)
def test_widening_takes_the_narrowest_leaf(values: list[Any], formats: dict[str, str]) -> None:
    encoder = Encoder()
    for value in values:
        encoder.encode(value)
    assert encoder.schema is not None
    assert encoder.schema.fields == formats
    assert all(map(same, through(*values), values))


def test_a_fixed_schema_names_the_field_that_does_not_fit() -> None:
    encoder = Encoder(Schema.of({"id": "a", "box": {"w": 1}}), fixed=True)
    with pytest.raises(SampleError, match=r"field 'box.w' is float here, but the dataset has int") as caught:
        encoder.encode({"id": "a", "box": {"w": 1.5}})
    assert caught.value.field == "box.w"
    with pytest.raises(SampleError, match=r"field 'id' is missing here"):
        encoder.encode({"box": {"w": 1}})
    with pytest.raises(SampleError, match=r"field 'new' is str here, but the dataset has no such field"):
        encoder.encode({"id": "a", "box": {"w": 1}, "new": "x"})
    with pytest.raises(SampleError, match="sample"):
        encoder.encode(3)


def test_nullable_fields_take_none_under_a_fixed_schema() -> None:
    schema = Schema.of({"label": 3, "vec": np.zeros(2)}).nullable(["label", "vec"])
    encoder = Encoder(schema, fixed=True)
    decoder = Decoder(schema)
    for sample in ({"label": None, "vec": None}, {"label": 4, "vec": np.ones(2)}):
        item = encoder.encode(sample)
        assert same(decoder.decode(item, 0, len(item)), sample)
    with pytest.raises(SampleError, match="nullable= names the fields"):
        schema.nullable(["labels"])


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    """A subclass, which would read back as its base."""


@pytest.mark.parametrize("value", [{"p": Point(1, 2)}, {"p": Text("x")}, {"p": object()}, {"p": lambda: 1}])
def test_what_only_pickle_could_carry_is_refused_and_named(value: Any) -> None:
    with pytest.raises(PickleRefused, match="'p'") as caught:
        Encoder().encode(value)
    assert caught.value.field == "p"


def test_text_that_is_not_unicode_is_refused_and_named() -> None:
    with pytest.raises(SampleError, match="field 't'.*Unicode"):
        Encoder().encode({"t": "\ud800"})


def test_object_arrays_are_refused() -> None:
    with pytest.raises(SampleError, match="field 'a'"):
        Encoder().encode({"a": np.array([object()])})


def test_selected_fields_leave_the_others_undecoded() -> None:
    sample = {"id": "x", "img": b"...", "meta": {"w": 1, "h": 2}, "pair": (1, "two")}
    schema = Schema.of(sample)
    item = Encoder(schema).encode(sample)

    def read(*fields: str) -> Any:
        return Decoder(schema, fields=fields).decode(item, 0, len(item))

    assert read("id", "meta.h") == {"id": "x", "meta": {"h": 2}}
    assert read("meta") == {"meta": {"w": 1, "h": 2}}
    assert read("pair[1]") == {"pair": ("two",)}
    with pytest.raises(ValueError, match="'nope'.*id, img, meta.w, meta.h"):
        read("nope")


def test_ordered_dicts_keep_their_order() -> None:
    first, second = OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)
    read = through(first, second)
    assert [list(item) for item in read] == [["a", "b"], ["b", "a"]]


def test_decoded_arrays_own_writable_memory() -> None:
    (read,) = through({"a": np.arange(4), "b": np.zeros((2, 2))})
    for array in read.values():
        array += 1
        assert array.flags.writeable
