"""Names of fields: each has one that finds it, in samples and in schemas, whatever its keys hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import SampleError
from liveset.format.fields import field_value, set_field
from liveset.format.schema import Decoder, Encoder, Schema, first_difference
from liveset.format.tree import field_names, leaves, locate, parse_path, path_text

BOTH: dict[str, Any] = {"a.b": 1, "a": {"b": 2, "c.d": 3, "": 4}, "": 5, "x[0]": 6, "x": (7, 8)}
_KEYS = st.one_of(st.text("a.[]'\"\\ \n0", max_size=4), st.integers(-3, 3), st.sampled_from([None, 1.5, 1e22]))
_SAMPLES = st.dictionaries(
    _KEYS,
    st.recursive(st.integers(0, 9), lambda inner: st.dictionaries(_KEYS, inner, min_size=1, max_size=3) | st.tuples(inner, inner)),
    min_size=1,
    max_size=4,
)


@given(_SAMPLES)
def test_the_name_of_every_field_finds_it(sample: dict[Any, Any]) -> None:
    schema = Schema.of(sample)
    for path, _ in leaves(schema.root):
        quoted = "".join(f"[{step!r}]" for step in path)
        value: Any = sample
        for step in path:
            value = value[step]
        # A key of the sample itself may spell another path, but never the whole of all paths.
        names = [name for name in (field_names(schema.root)[path], path_text(path), quoted) if len(path) == 1 or name not in sample]
        for name in names:
            assert locate(schema.root, name) == (path, dict(leaves(schema.root))[path])
            assert field_value(sample, name) == value
        assert parse_path(quoted) == path


def test_a_key_of_the_sample_goes_before_a_path() -> None:
    schema = Schema.of(BOTH)
    names = ["a.b", "['a']['b']", "a['c.d']", "a['']", "['']", "x[0]", "['x'][0]", "x[1]"]
    assert list(schema.fields) == names
    assert [line.partition("  ")[0] for line in str(schema).splitlines()] == names
    item = Encoder(schema).encode(BOTH)
    for number, name in enumerate(names):
        assert schema.select([name]) == {number}
        assert field_value(BOTH, name) == number + 1
        read = Decoder(schema, fields=[name]).decode(item, 0, len(item))
        assert name == "x[1]" or field_value(read, name) == number + 1  # of a tuple only the fields that were asked for
    assert schema.select(["a"]) == {1, 2, 3}
    assert schema.select([""]) == {4}
    with pytest.raises(ValueError, match=r"the fields a\.b, \['a'\]\['b'\], "):
        schema.select(["a.c"])
    assert Schema.of({"a": {"b": 1}}).select(["a.b"]) == Schema.of({"a": {"b": 1}}).select(["a['b']"]) == {0}


def test_a_field_is_set_where_it_is_read() -> None:
    names = list(Schema.of(BOTH).fields)
    for name in names:
        sample = {**BOTH, "a": dict(BOTH["a"]), "x": [7, 8]}
        set_field(sample, name, "new")
        assert [other for other in names if field_value(sample, other) == "new"] == [name]


def test_nullable_names_the_same_field() -> None:
    assert list(Schema.of({"a.b": 1, "a": {"b": 2}}).nullable(["a.b"]).fields.values()) == ["json", "int"]
    assert list(Schema.of({"a.b": 1, "a": {"b": 2}}).nullable(["a['b']"]).fields.values()) == ["int", "json"]
    with pytest.raises(SampleError, match="nullable= names the fields \\['a.c'\\]"):
        Schema.of({"a.b": 1}).nullable(["a.c"])


def test_fields_that_read_alike_are_not_taken_for_one() -> None:
    old = Schema.of({"a.b": 1, "a": {"b": 2.0}})
    assert first_difference(old, Schema.of({"a.b": 1, "a": {"b": ""}}))[1:] == ("float", "str")
    assert first_difference(old, Schema.of({"a.b": "", "a": {"b": 2.0}}))[1:] == ("int", "str")
    with pytest.raises(SampleError, match=r"field 'a\.b' is None here, but the dataset has float"):
        Encoder(old, fixed=True).encode({"a.b": 1, "a": {"b": None}})


@pytest.mark.parametrize("name", ["a..b", ".a", "a.", "[", "a[", "a[b]", "['a.b']c", "[0]x", "a['b'", "a[1+1]", "a[(1,)", "\0["])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(LookupError, match="not the name of a field"):
        field_value(BOTH, name)
    assert locate(Schema.of(BOTH).root, name) is None
