from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt
from liveset.format.jsonleaf import MAX_DEPTH, NotExact, dumps, is_exact, loads

VECTORS = [
    ([1, 2, 3], "02 03000000 010000000000000002000000000000000300000000000000"),
    (["a", "bb"], "01 02000000 01000000 61 02000000 6262"),
    ([], "01 00000000"),
    ([1, "a", None], "00 0c000000 5b312c2261222c6e756c6c5d"),
    ([0.5, -0.0], "03 02000000 000000000000e03f 0000000000000080"),
    ([True, False], "04 02000000 0100"),
    ("é", "07 02000000 c3a9"),
    (-2, "08 feffffffffffffff"),
    (2.5, "09 0000000000000440"),
    (True, "0a 01"),
    (False, "0a 00"),
    (None, "0b"),
    ([None], "00 06000000 5b6e756c6c5d"),
    ({}, "00 02000000 7b7d"),
    ({"é": [1, [2]]}, "00 0e000000 7b22c3a9223a5b312c5b325d5d7d"),
]


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


@pytest.mark.parametrize(("value", "data"), VECTORS, ids=str)
def test_vectors(value: Any, data: str) -> None:
    assert dumps(value) == bytes.fromhex(data)
    same(value, loads(bytes.fromhex(data)))


def test_tags_that_only_the_old_tool_writes() -> None:
    rows = bytes.fromhex("06 01000000 02000000 01000000 61 01000000 62 12 0100000000000000 11 01000000 71")
    same([{"a": 1, "b": "q"}], loads(rows))
    cells = bytes.fromhex("06 02000000 01000000 01000000 61 10 13 000000000000f83f")
    same([{"a": None}, {"a": 1.5}], loads(cells))
    same([{"a": True}], loads(bytes.fromhex("06 01000000 01000000 01000000 61 14 01")))
    nested = bytes.fromhex("05 02000000 01000000 61 05 01000000 01000000 62 0b 01000000 63 02 01000000 0700000000000000")
    same({"a": {"b": None}, "c": [7]}, loads(nested))
    same([], loads(bytes.fromhex("06 00000000 00000000")))
    same({"a": [1, None]}, loads(b'{"a": [1, null]}'))
    same([1, "é"], loads('[1, "é"]'.encode()))
    same(2**70, loads(b"\x00" + struct.pack("<I", 22) + str(2**70).encode()))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars | st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.floats()) | st.lists(st.booleans()) | st.lists(st.text()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(values)
def test_what_is_written_reads_back_equal(value: Any) -> None:
    try:
        data = dumps(value)
    except NotExact:
        assert not math.isfinite(_sum_of_floats(value))  # nothing else here may be refused
        return
    same(value, loads(data))


def _sum_of_floats(value: Any) -> float:
    if isinstance(value, list):
        return sum(map(_sum_of_floats, value))
    if isinstance(value, dict):
        return sum(map(_sum_of_floats, value.values()))
    return 0.0 if not isinstance(value, float) or math.isfinite(value) else math.nan


@given(st.floats())
def test_floats_keep_their_bits(value: float) -> None:
    same(value, loads(dumps(value)))
    same([value], loads(dumps([value])))


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Items(list[Any]):
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(MAX_DEPTH + 1):
    DEEP = [DEEP]

INEXACT = [
    *((1, 2), [(1,)], {"a": (1,)}, {1: 2}, {"a": {None: 1}}, b"a", [b"a"], {"a": bytearray()}, {1, 2}, 1 + 2j),
    *(2**63, -(2**63) - 1, [2**63], [1, -(2**64)], [1, "a", 2**63], {"a": 2**70}, {"a": math.nan}, [math.inf, 1], [[math.inf]]),
    *(
        Colour.RED,
        [Colour.RED],
        {"a": Colour.RED},
        Text("a"),
        [Text("a")],
        {Text("a"): 1},
        Items([1]),
        [Items([1])],
        np.float64(1),
        [np.float64(1)],
    ),
    *(np.int64(1), np.str_("a"), [1, np.bool_(True)], collections.OrderedDict(a=1), {"a": collections.Counter()}, collections.deque([1])),
    *("\ud800", ["\ud800"], {"\ud800": 1}, {"a": "\ud800"}, ["a", 1, "\ud800"], CYCLE, DEEP, ..., object(), int),
]


@pytest.mark.parametrize("value", INEXACT, ids=range(len(INEXACT)))
def test_what_would_change_is_refused(value: Any) -> None:
    assert not is_exact(value)
    with pytest.raises(NotExact):
        dumps(value)


def test_the_deepest_value_that_is_taken() -> None:
    value: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert is_exact(value)
    same(value, loads(dumps(value)))


DAMAGED = [
    *(
        b"",
        b"\x0c",
        b"\x20",
        b"\x0b\x00",
        b"\x08\x01",
        b"\x0a",
        b"\x07\x05\0\0\0ab",
        b"\x07\x01\0\0\0\xff",
        b"\x00\x02\0\0\0[1",
        b"{",
        b"[1,]",
        b'"\xff"',
    ),
    *(
        b"\x02\xff\xff\xff\xff",
        b"\x01\xff\xff\xff\xff\x01\0\0\0a",
        b"\x04\xff\xff\xff\xff\x01",
        b"\x05\x01\0\0\0\x01\0\0\0a",
        b"\x05\xff\xff\xff\xff",
    ),
    *(b"\x06\xff\xff\xff\xff\0\0\0\0", b"\x06\x01\0\0\0\x01\0\0\0\x01\0\0\0a\x15", b"\x06\x01\0\0\0", b"\x02\x01\0\0\0" + b"\0" * 9),
    *(b"[" * 5000, b"\x05\x01\0\0\0\0\0\0\0" * 5000, b"\x00" + struct.pack("<I", 100_000) + b"[" * 100_000),
]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_leaves_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        loads(data)


@given(st.binary(max_size=60) | st.tuples(st.integers(0, 12), st.binary(max_size=40)).map(lambda pair: bytes([pair[0]]) + pair[1]))
def test_random_bytes_give_a_value_or_corrupt(data: bytes) -> None:
    with contextlib.suppress(Corrupt):
        loads(data)


@given(values)
def test_text_is_what_the_standard_module_would_write(value: Any) -> None:
    value = {"v": value}
    if is_exact(value):
        data = dumps(value)
        assert data[5:].decode() == json.dumps(value, separators=(",", ":"), ensure_ascii=False)
