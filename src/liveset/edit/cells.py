"""Cells of a table as values of a field: text of CSV, and scalars and lists of other libraries, become what the encoder takes."""

from __future__ import annotations

import datetime
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from liveset.format.dtypes import NUMPY_INDEX, TORCH_NAMES, import_torch, numpy_dtype, torch_dtype
from liveset.format.infer import describe
from liveset.format.leaves import is_tensor
from liveset.format.tree import Branch, Node

__all__ = ["plain", "reader"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf|nan", re.IGNORECASE)
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_BUILTIN = frozenset({str, int, float, bool, bytes, type(None), list, dict, datetime.datetime})
_ARRAYS = ("no_header_numpy", "numpy", "no_header_tensor", "tensor")
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
            value = _from_text(name, value)
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
        if name in _ARRAYS:
            return _array(name, argument, value, refuse)
        if name == "int" and kind is float and value.is_integer() and abs(value) <= 1 << 53:
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
        number = float(text) if _NUMBER.fullmatch(text) else None
        return text if number is None or (math.isinf(number) and "inf" not in text.lower()) else number
    if name == "bool":
        return _BOOLS.get(text.lower(), text)
    if name in ("", "json", *_ARRAYS):
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return text
    return text


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) is list:
        return [_as_json(item) for item in value]
    if type(value) is dict:
        return {key: _as_json(item) for key, item in value.items()}
    return plain(value)


def _array(name: str, argument: str, value: Any, refuse: Callable[..., ValueError]) -> Any:
    """Return an array or tensor; numbers must survive the dtype of the field, but for the rounding of floats."""
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
    if not _kept(found, made):
        raise refuse(value)
    if "tensor" not in name:
        return made
    torch = import_torch("A tensor")
    return torch.tensor(made, dtype=None if index is None else torch_dtype(index))


def _kept(found: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> bool:
    if not found.size or found.dtype == made.dtype:
        return True
    if (found.dtype.kind == "b") != (made.dtype.kind == "b"):
        return False
    if made.dtype.kind in "fc":
        return bool(np.array_equal(np.isfinite(found), np.isfinite(made)))
    return bool(np.array_equal(found, made))
