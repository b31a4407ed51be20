"""What a restricted pickle may name, and what calling it may do.

Each allowed object stands beside a function of our own that checks the arguments and builds the value: the objects themselves trust their
arguments too much (``numpy.ndarray`` would read pointers from a buffer, ``Fraction("1e999999999")`` would never end).
"""

from __future__ import annotations

import codecs
import collections
import datetime
import decimal
import fractions
import functools
import math
import operator
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from liveset.errors import MissingDependency, PickleRefused

Call = Callable[..., Any]

SAFE_FACTORIES = frozenset({bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset})
PATH_TYPES = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_DATETIME_TYPES = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)

# Scalar types whose value a Python number, text or bytes carries exactly.
_NUMBER_NAMES = (
    "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intc uintc longlong ulonglong float16 float32 float64 complex64 complex128"
)
# Of two names for one type (int32 and intc), the first is the one to write.
_NUMBERS: dict[type, str] = {getattr(np, name): name for name in reversed(_NUMBER_NAMES.split())}
PLAIN_SCALARS: dict[type, str] = {**_NUMBERS, np.str_: "str_", np.bytes_: "bytes_"}

# Functions that numpy's own pickles call; their module differs between versions of numpy.
RECONSTRUCT = np.zeros(1).__reduce__()[0]
SCALAR = np.float32().__reduce__()[0]
FROMBUFFER = np.zeros(1).__reduce_ex__(5)[0]

# Cells of zero bytes in one array: any number of them would fit into any pickle.
MAX_EMPTY_CELLS = 1 << 20
# dtype.str of everything but Python objects and variable-width text, with or without the byte order.
_DTYPE = re.compile(r"[<>|=]?(?:[biufc][0-9]{1,2}|[SUV][0-9]{1,10}|[Mm]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)\Z")
_FRACTION = re.compile(r"[+-]?[0-9]{1,4000}(?:/[0-9]{1,4000})?\Z")


def refuse(what: str) -> PickleRefused:
    """Return the error for a pickle that holds more than plain values."""
    return PickleRefused(f"{what}: it is only read with allow_pickle=True, which runs code that it names. Do so if you trust its author.")


# --- numpy --------------------------------------------------------------------------------------------------------------------------------


def dtype_spec(dtype: np.dtype[Any]) -> Any:
    """Return what describes a dtype to every version of numpy: its code, or a dict for structured ones.

    Raises:
        PickleRefused: the dtype holds Python objects.
    """
    if dtype.subdtype is not None:
        return dtype_spec(dtype.subdtype[0]), dtype.subdtype[1]
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        spec: dict[str, Any] = {
            "names": list(dtype.names),
            "formats": [dtype_spec(item[0]) for item in fields],
            "offsets": [item[1] for item in fields],
            "itemsize": dtype.itemsize,
        }
        titles = [item[2] if len(item) > 2 else None for item in fields]
        if any(title is not None for title in titles):
            spec["titles"] = titles
        if dtype.isalignedstruct:
            spec["aligned"] = True
        return spec
    if dtype.hasobject or not _DTYPE.match(dtype.str):
        raise PickleRefused(f"a numpy dtype {dtype} holds Python objects, which are not stored: pass allow_pickle=True or convert it.")
    return dtype.str


def make_dtype(spec: Any, *_: bool) -> np.dtype[Any]:
    """Return a dtype from a code or dict; further arguments as in numpy's own pickles are ignored."""
    result: np.dtype[Any]
    if isinstance(spec, np.dtype):
        result = spec
    elif type(spec) is str and _DTYPE.match(spec):
        result = np.dtype(spec)
    elif type(spec) is tuple and len(spec) == 2 and type(spec[1]) is tuple:
        result = np.dtype((make_dtype(spec[0]), spec[1]))
    elif type(spec) is dict and spec.keys() <= {"names", "formats", "offsets", "titles", "itemsize", "aligned"}:
        described: Any = {**spec, "formats": [make_dtype(item) for item in spec["formats"]]}
        result = np.dtype(described)
    else:
        raise refuse(f"the pickle asks for a numpy dtype {str(spec)[:50]!r}")
    if result.hasobject:
        raise refuse("the pickle holds a numpy array of Python objects")
    return result


def build_dtype(base: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """Return the dtype that numpy's own pickles describe by a code and a state, without ``dtype.__setstate__``, which trusts its flags."""
    version, order, sub, names, fields, itemsize, _, flags = state[:8]
    if version not in (3, 4):
        raise refuse(f"the pickle describes a numpy dtype in version {version}")
    if sub is not None:
        return make_dtype((sub[0], sub[1]))
    if names:
        described = [fields[name] for name in names]
        spec: dict[str, Any] = {
            "names": list(names),
            "formats": [item[0] for item in described],
            "offsets": [item[1] for item in described],
            "itemsize": itemsize,
        }
        if any(len(item) > 2 for item in described):
            spec["titles"] = [item[2] if len(item) > 2 else None for item in described]
        if flags & 0x80:
            spec["aligned"] = True
        return make_dtype(spec)
    if base.kind in "Mm":
        unit, count = state[8][1][:2]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        return make_dtype(f"{order}{base.kind}8" + ("" if unit == "generic" else f"[{count}{unit}]"))
    return np.dtype((base.newbyteorder(order) if order in ("<", ">") else base).str)


def make_array(shape: Any, spec: Any, data: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    """Return an array that owns a copy of the bytes."""
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise refuse("the pickle builds a numpy array from something other than bytes")
    dtype = make_dtype(spec)
    shape = (shape,) if type(shape) is int else tuple(shape)
    # In Python's own integers, which do not wrap around; numpy only checks for buffers that are too small.
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("the shape of an array is made of sizes")
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) or count > max(len(data), MAX_EMPTY_CELLS):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not take {len(data)} bytes")
    return np.ndarray(shape, dtype, data, order=order).copy(order="K")


def build_array(state: Any) -> np.ndarray[Any, Any]:
    """Return the array that numpy's own pickles describe by a state."""
    *_, shape, dtype, fortran, data = state
    return make_array(shape, dtype, data, "F" if fortran else "C")


def reconstruct(kind: Any, *_: Any) -> np.ndarray[Any, Any]:
    """Return an empty array, whose state follows."""
    if kind is not np.ndarray:
        raise refuse(f"the pickle holds a {getattr(kind, '__qualname__', kind)}")
    return np.empty(0, np.int8)


def make_scalar(dtype: Any, data: Any = b"") -> Any:
    """Return the numpy scalar with these bytes."""
    return make_array((), dtype, data)[()]


def _getitem(array: Any, key: Any) -> Any:
    if type(array) is not np.ndarray or array.ndim or key != ():
        raise refuse("the pickle indexes a value")
    return array[()]


# --- everything else ----------------------------------------------------------------------------------------------------------------------


def _only(kind: Call, *types: type) -> Call:
    """Return a call that takes positional arguments of these exact types, or fewer."""

    def call(*arguments: Any) -> Any:
        if len(arguments) > len(types) or any(type(a) is not t for a, t in zip(arguments, types, strict=False)):
            raise refuse(f"the pickle calls {getattr(kind, '__qualname__', kind)} with unusual arguments")
        return kind(*arguments)

    return call


def _make_range(start: int, stop: int, step: int) -> range:
    if not type(start) is type(stop) is type(step) is int:
        raise TypeError("a range is made of integers")
    return range(start, stop, step)


def _make_complex(real: float, imag: float = 0.0) -> complex:
    if type(real) not in (int, float) or type(imag) not in (int, float):
        raise TypeError("a complex number is made of numbers")
    return complex(real, imag)


def _make_bytearray(data: Any = b"", encoding: str = "latin-1") -> bytearray:
    if type(data) is str and encoding == "latin-1":
        return bytearray(data, encoding)
    if type(data) is not bytes:
        raise TypeError("a bytearray is made of bytes")
    return bytearray(data)


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise refuse("the pickle calls a codec")
    return text.encode("latin-1")


def _make_deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    if type(items) not in (list, tuple):
        raise TypeError("a deque is made of a list")
    return collections.deque(items, maxlen)


def _make_defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is not None and factory not in SAFE_FACTORIES:
        raise refuse("the pickle holds a defaultdict with a factory of its own")
    return collections.defaultdict(factory)


def _make_fraction(number: Any, denominator: Any = 1) -> fractions.Fraction:
    if type(number) is str and _FRACTION.match(number):
        return fractions.Fraction(number)
    if type(number) is not int or type(denominator) is not int:
        raise TypeError("a fraction is made of integers")
    return fractions.Fraction(number, denominator)


def _path_maker(kind: Call, pure: Call) -> Call:
    def call(*parts: Any) -> Any:
        if any(type(part) is not str for part in parts):
            raise TypeError("a path is made of text")
        try:
            return kind(*parts)
        except NotImplementedError:  # a path of another operating system: keep what it says
            return pure(*parts)

    return call


def _make_zone(key: Any) -> Any:
    import zoneinfo

    if type(key) is not str:
        raise TypeError("a time zone has a name")
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise MissingDependency(f"the time zone {key!r} is not known on this machine: pip install tzdata", package="tzdata") from error


def _from_numpy(array: Any) -> Any:
    import torch

    if type(array) is not np.ndarray:
        raise refuse("the pickle builds a tensor from something other than an array")
    return torch.from_numpy(array)


def uuid_from_state(state: Any) -> uuid.UUID:
    """Return the UUID that the standard library's own pickles describe by a state."""
    if type(state) is not dict or type(state.get("int")) is not int:
        raise TypeError("a UUID is made of an integer")
    return uuid.UUID(int=state["int"])


CALLS: dict[Any, Call] = {
    complex: _make_complex,
    range: _make_range,
    slice: slice,
    bytearray: _make_bytearray,
    bytes: _only(bytes),
    set: _only(set, list),
    frozenset: _only(frozenset, list),
    codecs.encode: _encode,
    collections.OrderedDict: _only(collections.OrderedDict, list),
    collections.Counter: _only(collections.Counter, dict),
    collections.deque: _make_deque,
    collections.defaultdict: _make_defaultdict,
    decimal.Decimal: _only(decimal.Decimal, str),
    fractions.Fraction: _make_fraction,
    uuid.UUID: _only(uuid.UUID, str),
    np.ndarray: make_array,
    np.dtype: make_dtype,
    RECONSTRUCT: reconstruct,
    SCALAR: make_scalar,
    FROMBUFFER: lambda data, dtype, shape, order: make_array(shape, dtype, data, order),
    operator.getitem: _getitem,
    np.str_: _only(np.str_, str),
    np.bytes_: _only(np.bytes_, bytes),
    np.datetime64: _only(np.datetime64, int, str),
    np.timedelta64: _only(np.timedelta64, int, str),
    **{kind: kind for kind in (*_DATETIME_TYPES, *_NUMBERS)},
    **{kind: _path_maker(kind, PATH_TYPES[2 + i % 2]) for i, kind in enumerate(PATH_TYPES)},
}

_NUMPY_FUNCTIONS = {
    "numpy.core.multiarray": {"_reconstruct": RECONSTRUCT, "scalar": SCALAR},
    "numpy._core.multiarray": {"_reconstruct": RECONSTRUCT, "scalar": SCALAR},
    "numpy.core.numeric": {"_frombuffer": FROMBUFFER},
    "numpy._core.numeric": {"_frombuffer": FROMBUFFER},
}

NAMES: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in (*SAFE_FACTORIES, range, slice)},
    **{("collections", name): getattr(collections, name) for name in ("OrderedDict", "Counter", "deque", "defaultdict")},
    **{("datetime", kind.__name__): kind for kind in _DATETIME_TYPES},
    **{(module, kind.__name__): kind for kind in PATH_TYPES for module in ("pathlib", "pathlib._local")},
    **{("numpy", name): getattr(np, name) for name in (*_NUMBER_NAMES.split(), "str_", "bytes_")},
    **{(module, name): function for module, functions in _NUMPY_FUNCTIONS.items() for name, function in functions.items()},
    ("_codecs", "encode"): codecs.encode,
    ("_operator", "getitem"): operator.getitem,
    ("decimal", "Decimal"): decimal.Decimal,
    ("fractions", "Fraction"): fractions.Fraction,
    ("uuid", "UUID"): uuid.UUID,
    ("numpy", "bool"): np.bool_,
    ("numpy", "datetime64"): np.datetime64,
    ("numpy", "timedelta64"): np.timedelta64,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
}


def find(module: str, name: str) -> Any:
    """Return the object of an allowed name; names are compared whole, so nothing is reached through attributes."""
    if module == "__builtin__":  # what protocol 2 calls it
        module = "builtins"
    try:
        return NAMES[module, name]
    except (KeyError, TypeError):
        pass
    if (module, name) == ("zoneinfo", "ZoneInfo"):
        import zoneinfo

        return zoneinfo.ZoneInfo
    if (module, name) == ("torch", "from_numpy"):
        return _torch_from_numpy()
    if module == "numpy.dtypes" and type(name) is str and name.endswith("DType") and "." not in name:
        kind = getattr(np.dtypes, name, None)
        if isinstance(kind, type) and issubclass(kind, np.dtype):
            return kind
    raise refuse(f"the pickle names {module}.{name}")


def call_for(function: Any) -> Call:
    """Return what to call in place of an allowed object."""
    try:
        return CALLS[function]
    except (KeyError, TypeError):
        pass
    if getattr(function, "__module__", "") == "zoneinfo" and function is find("zoneinfo", "ZoneInfo"):
        return _make_zone
    if isinstance(function, type) and issubclass(function, np.dtype):
        return functools.partial(_make_dtype_of, function)
    if getattr(function, "__name__", "") == "from_numpy" and function is _torch_from_numpy():
        return _from_numpy
    raise refuse(f"the pickle calls {str(function)[:80]}")


def _make_dtype_of(kind: Any) -> np.dtype[Any]:
    return make_dtype(kind())


def _torch_from_numpy() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("reading a tensor needs PyTorch: pip install torch", package="torch") from error
    return torch.from_numpy
