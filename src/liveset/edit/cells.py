"""Cells of a table as values of a field: text of CSV, and scalars and lists of other libraries, become what the encoder takes.

No value is changed on the way. Integers come out exactly or are refused, and so do typed arrays and scalars whose dtype is not that of the
field. Only numbers with a decimal point, in text or in lists, are rounded to the nearest float that the field holds, as 0.1 always is.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from liveset.format.dtypes import NUMPY_INDEX, TORCH_NAMES, import_torch, numpy_dtype, torch_dtype
from liveset.format.infer import describe
from liveset.format.leaves import is_tensor
from liveset.format.tree import Branch, Node

__all__ = ["ARRAYS", "plain", "reader"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf|nan", re.IGNORECASE)
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
_EXACT = 1 << 53
"""A float from here on may stand for another integer."""
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_BUILTIN = frozenset({str, int, float, bool, bytes, type(None), list, dict, datetime.datetime})
ARRAYS = ("no_header_numpy", "numpy", "no_header_tensor", "tensor")
_MEDIA = ("image", "jpeg", "jpeg_array", "pil", "file")


def reader(node: Node, source: str) -> Callable[[Any], Any]:
    """Return the function that makes a cell a value of a field; it raises ``ValueError`` that says why a cell does not fit.

    Args:
        node: the field. The values of a container are left as they are.
        source: ``csv`` (all cells are text, and an empty one is None), ``json``, ``frame``, ``pandas`` (NaN may mean None), or ``python``.
    """
    fmt = "" if isinstance(node, Branch) else node.format
    name, _, argument = fmt.partition(":")

    def refuse(value: Any, hint: str = "") -> ValueError:
        return ValueError(f"{reprlib.repr(value)} does not fit: the field holds {describe(node)}{hint}")

    def read(value: Any) -> Any:
        if source == "csv":
            empty, value = not value, _from_text(name, value)
            if empty and value is None and name not in ("json", "pickle"):
                raise ValueError(f"the cell is empty, and the field holds {describe(node)} and never None")
        elif name != "pickle" or source != "python":
            value = plain(value)
            if source == "pandas" and type(value) is float and math.isnan(value) and name != "float":
                value = None
        kind = type(value)
        if name == "pickle":
            # Such a field may hold arrays, tuples, dates: what looks like JSON is hardly what it held, unless it comes from Python.
            if source == "python" or value is None or kind not in _BUILTIN or kind is datetime.datetime:
                return value
            raise refuse(value, ", which only Python can give: pass rows as dicts")
        if value is None and name != "json":
            raise ValueError(f"the field holds {describe(node)} and never None")
        if name in ARRAYS:
            return _array(name, argument, value, refuse)
        if name == "int" and kind is float and value.is_integer() and abs(value) < _EXACT:
            return int(value)  # a column with gaps, of other tools
        if name == "float" and kind is int and abs(value) <= 1 << 1023 and int(float(value)) == value:
            return float(value)
        if name == "bytes" and kind in (bytearray, memoryview):
            return bytes(value)
        if name == "json":
            return _as_json(value)
        if (name in ("int", "float", "bool", "str", "bytes") and kind.__name__ != name) or (name in _MEDIA and kind is str):
            raise refuse(value)
        if name == "int" and not -(1 << 63) <= value < 1 << 63:
            raise refuse(value, " of 64 bits")
        if name == "" and kind in (str, int, float, bool):
            raise refuse(value)
        return value

    return read


def plain(value: Any) -> Any:
    """Return a scalar of numpy, Arrow or pandas as the Python value that it stands for; ``ValueError`` when there is none."""
    kind = type(value)
    if kind in _BUILTIN:
        return value
    if isinstance(value, np.datetime64 | np.timedelta64):
        exact = value.astype(f"{value.dtype.kind}8[us]")
        if exact != value and not np.isnat(value):
            raise ValueError(f"{value} has nanoseconds, which Python's datetime does not hold")
        return exact.item()
    if isinstance(value, np.generic):
        return value.item()
    library = kind.__module__.partition(".")[0]
    if library == "pyarrow" and hasattr(value, "as_py"):
        return plain(value.as_py())
    if library == "pandas":
        if kind.__name__ in ("NAType", "NaTType"):
            return None
        if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
            raise ValueError(f"{value} has nanoseconds, which Python's datetime does not hold")
        for convert in ("to_pydatetime", "to_pytimedelta"):
            if hasattr(value, convert):
                return getattr(value, convert)()
    return value


def _from_text(name: str, text: str) -> Any:
    """Return what the text of a CSV cell says; text that says nothing of the kind stays text."""
    if name in ("str", "text"):
        return text
    if not text:
        return None
    if name in ("int", "float"):
        if _INTEGER.fullmatch(text):
            return int(text)
        if name == "int":
            return _whole(text)
        number = float(text) if _NUMBER.fullmatch(text) else None
        return text if number is None or (math.isinf(number) and "inf" not in text.lower()) else number
    if name == "bool":
        return _BOOLS.get(text.lower(), text)
    if name in ("", "json", *ARRAYS):
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return text
    return text


def _whole(text: str) -> Any:
    """Return the integer that a decimal number such as ``3.0`` is; any other text stays text."""
    number = decimal.Decimal(text) if _DECIMAL.fullmatch(text) else decimal.Decimal("nan")
    if not number.is_finite() or number.adjusted() > 18:
        return text
    whole = int(number)
    return whole if whole == number else text


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) is list:
        return [_as_json(item) for item in value]
    if type(value) is dict:
        return {key: _as_json(item) for key, item in value.items()}
    return plain(value)


def _array(name: str, argument: str, value: Any, refuse: Callable[..., ValueError]) -> Any:
    """Return an array or tensor; numbers must survive the dtype of the field, but for the rounding of the floats in lists."""
    if is_tensor(value) and "tensor" in name:
        return value
    if not (isinstance(value, list | tuple | np.ndarray) or is_tensor(value)):
        raise refuse(value, ": give a list")
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        raise refuse(value, ", and these lists have different lengths") from None
    dtype = found.dtype
    index = int(argument) if argument else None
    if index is not None:
        wanted = TORCH_NAMES[index] if "tensor" in name else numpy_dtype(index).name
        dtype = np.dtype("float32" if wanted == "bfloat16" else wanted)
    if found.dtype not in NUMPY_INDEX or (index is not None and found.ndim != 1) or (found.dtype.kind == "c") > (dtype.kind == "c"):
        raise refuse(value)
    with np.errstate(all="ignore"):
        made = found.astype(dtype, copy=False)
    if not _kept(value, found, made):
        raise refuse(value)
    if "tensor" not in name:
        return made
    torch = import_torch("A tensor")
    return torch.tensor(made, dtype=None if index is None else torch_dtype(index))


def _kept(value: Any, found: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array holds the values that were given: as a list, or as the array that was found."""
    if not found.size:
        return True
    if (found.dtype.kind == "b") != (made.dtype.kind == "b"):
        return False
    if not isinstance(value, list | tuple):
        if found.dtype.kind in "fc" and made.dtype.kind in "fc":
            return np.array_equal(found, made, equal_nan=True)
        return found.dtype == made.dtype or bool(found.tolist() == made.tolist())  # numpy compares large integers as floats
    pairs = zip(_numbers(value), made.ravel().tolist(), strict=True)
    if made.dtype.kind in "fc":
        return np.array_equal(np.isfinite(found), np.isfinite(made)) and all(a == b for a, b in pairs if type(a) is int)
    return all(a == b and (type(a) is not float or abs(a) < _EXACT) for a, b in pairs)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers of nested lists, as Python has them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    else:
        yield value
