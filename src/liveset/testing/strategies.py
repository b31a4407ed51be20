"""Hypothesis strategies for samples that liveset promises to return equal."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections import OrderedDict, deque
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from hypothesis import strategies as st

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool".split()


def json_values(leaves: int = 6) -> st.SearchStrategy[Any]:
    """Values made of None, numbers, text, lists and dicts."""
    scalars = st.one_of(st.none(), st.booleans(), _INT64, st.floats(), _TEXT)
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=leaves)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of every dtype: 0-d, empty, of many dimensions, big-endian, not contiguous."""
    dtype = np.dtype(draw(st.sampled_from([*_NUMBERS, ">f4", ">i8", "datetime64[ms]", "U3"])))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    array = np.array(numbers, dtype=np.int64).astype(dtype).reshape(shape)
    return array[::-1].T if draw(st.booleans()) and array.ndim else array


def numpy_scalars() -> st.SearchStrategy[Any]:
    """Numpy scalars of every numeric dtype."""
    return st.builds(lambda name, number: np.dtype(name).type(number), st.sampled_from(_NUMBERS), st.integers(0, 100))


def leaf_values() -> st.SearchStrategy[Any]:
    """Single values of every kind that needs no optional package."""
    return st.one_of(
        json_values(3),
        st.binary(max_size=8),
        arrays(),
        numpy_scalars(),
        st.integers(),
        st.datetimes(),
        st.dates(),
        st.timedeltas(),
        st.datetimes(timezones=st.just(datetime.UTC)),
        st.decimals(allow_nan=False).map(decimal.Decimal),
        st.uuids().map(lambda value: uuid.UUID(value.hex)),
        _TEXT.map(lambda text: PurePosixPath(text.replace("\0", ""))),
        st.sets(_INT64, max_size=3),
        st.complex_numbers(allow_nan=False),
    )


def samples() -> st.SearchStrategy[Any]:
    """Whole samples: nested containers over ``leaf_values``."""
    keys = st.one_of(_TEXT, _INT64, st.booleans(), st.none())

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            lists.map(deque),
            st.dictionaries(keys, inner, max_size=4),
            st.dictionaries(_TEXT, inner, max_size=3).map(OrderedDict),
        )

    return st.recursive(leaf_values(), containers, max_leaves=8)


def same(a: Any, b: Any) -> bool:
    """Tell whether two samples are equal in type, structure and every bit that a user can see: dtypes, shapes, NaN, signs of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, OrderedDict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return repr(a) == repr(b)
    if type(a).__module__ == "torch":
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    return bool(a == b)
