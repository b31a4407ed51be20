"""Pickles of plain values: written so that every Python and numpy reads them, read so that no code of the file's choice runs.

Safe are builtin values, values of the standard library (dates, decimals, fractions, UUIDs, paths, collections), numpy arrays, scalars and
dtypes, and torch tensors. Their exact types only: a subclass may do anything when it is read.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import operator
import pickle
import sys
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from liveset.errors import Corrupt, DatasetError, MissingDependency, PickleRefused, SampleError
from liveset.format import picklenames
from liveset.format.picklenames import PATH_TYPES, PLAIN_SCALARS, SAFE_FACTORIES
from liveset.format.picklescalars import SCALAR_WRITERS, read_scalar
from liveset.format.unpickle import strict_loads

_PROTOCOL = 5
_Reduced = tuple[Any, ...]


def dumps(value: Any, *, allow: bool = False) -> bytes:
    """Return a pickle of a value that plain ``pickle.loads`` reads, too.

    Args:
        value: to be pickled.
        allow: let objects of any type pass.

    Raises:
        PickleRefused: the value, or one inside it, is not of a safe type; the message names the type.
        SampleError: the value cannot be pickled at all.
    """
    if (write := SCALAR_WRITERS.get(type(value))) is not None:
        return write(value)
    stream = io.BytesIO()
    try:
        try:
            _Pickler(stream, allow).dump(value)
        except _NeedsOtherNames:
            stream = io.BytesIO()
            _RenamingPickler(stream, allow).dump(value)
    except DatasetError:
        raise
    except Exception as error:  # objects may raise anything from their own methods
        raise SampleError(f"a {type(value).__qualname__} cannot be pickled: {type(error).__name__}: {error}") from error
    return stream.getvalue()


def is_safe(value: Any) -> bool:
    """Tell whether ``dumps`` takes a value without ``allow``."""
    try:
        dumps(value)
    except DatasetError:
        return False
    return True


def loads(data: bytes, *, allow: bool = False) -> Any:
    """Return the value of a pickle; arrays own their memory.

    Args:
        data: the pickle.
        allow: read objects of any type, which runs code that the pickle names.

    Raises:
        PickleRefused: the pickle holds something other than values of safe types; nothing of it was run.
        Corrupt: the pickle is damaged.
        MissingDependency: what it holds needs a package or module that is not there.
    """
    data = bytes(data)
    if (scalar := read_scalar(data)) is not None:
        return scalar
    if allow:
        return _load_anything(data)
    if _is_plain(data):
        unpickler = _FastUnpickler(data)
        try:
            value = unpickler.load()
        except Exception:  # the strict reader finds out what is wrong
            return strict_loads(data)
        kept = [weakref.ref(call) for call in unpickler.stand_ins]
        del unpickler
        if not any(call() is not None for call in kept):
            return value
        # The pickle holds a class itself, not only values made by it: the strict reader returns real classes.
    return strict_loads(data)


# --- writing ------------------------------------------------------------------------------------------------------------------------------


class _NeedsOtherNames(Exception):
    """A class is known by another module name in other versions of Python."""


class _Reducer:
    """Decides what may be pickled, and in which form; the base of both picklers."""

    def __init__(self, stream: io.BytesIO, allow: bool) -> None:
        super().__init__(stream, _PROTOCOL)  # type: ignore[call-arg]
        self._allow = allow
        # Classes and functions that the value just reduced is made by; the pickler asks for them next.
        self._makers: tuple[Any, ...] = ()

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _NATIVE:
            return NotImplemented
        try:
            reduce = _REDUCERS.get(kind)
            if reduce is not None:
                reduced = reduce(value)
            elif any(value is maker for maker in self._makers):
                return self.name_of(value)
            elif isinstance(value, np.dtype):
                reduced = np.dtype, (picklenames.dtype_spec(value),)
            elif kind is getattr(sys.modules.get("torch"), "Tensor", None):
                reduced = _reduce_tensor(value)
            elif kind is getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None):
                reduced = _reduce_zone(value)
            elif self._allow:
                return self.name_of(value) if isinstance(value, type) else NotImplemented
            else:
                raise _refused(kind if not isinstance(value, type) else value)
        except PickleRefused:
            if self._allow:
                return NotImplemented
            raise
        if reduced is NotImplemented:
            self._makers = (kind,)
            return NotImplemented
        # A factory of a defaultdict is a class among the arguments.
        self._makers = (reduced[0], *(a for a in reduced[1] if isinstance(a, type)))
        return reduced

    def name_of(self, value: Any) -> Any:
        if value is np.bool_:
            return "bool_"  # numpy 2 calls it bool, which numpy 1 does not know
        if getattr(value, "__name__", "") == "from_numpy":
            return "from_numpy"
        if value in PATH_TYPES and value.__module__ != "pathlib":
            raise _NeedsOtherNames
        return NotImplemented


class _Pickler(_Reducer, pickle.Pickler):
    pass


# The standard library keeps the Python version of its pickler under this name in every supported release.
_SlowPickler: Any = pickle._Pickler  # noqa: SLF001


class _RenamingPickler(_Reducer, _SlowPickler):  # type: ignore[misc]
    """The slow pickler of the standard library, whose names can be changed."""

    def name_of(self, value: Any) -> Any:
        return NotImplemented if value in PATH_TYPES else super().name_of(value)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", None) != "pathlib._local":
            super().save_global(obj, name)
            return
        self.save("pathlib")
        self.save(obj.__qualname__ if name is None else name)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def _refused(kind: type) -> PickleRefused:
    name = f"{kind.__module__}.{kind.__qualname__}"
    return PickleRefused(f"a {name} is not stored as it is: pass allow_pickle=True or convert it to builtin types.")


def _as_is(_: Any) -> Any:
    return NotImplemented


def _reduce_array(array: np.ndarray[Any, Any]) -> _Reduced:
    spec = picklenames.dtype_spec(array.dtype)
    if not array.itemsize and array.size > picklenames.MAX_EMPTY_CELLS:
        raise PickleRefused(f"an array of {array.size:,} empty cells is not stored as it is: pass allow_pickle=True or convert it.")
    data = bytearray(array.nbytes)
    np.ndarray(array.shape, array.dtype, data)[...] = array
    return np.ndarray, (array.shape, spec, data)


def _reduce_scalar(value: Any) -> _Reduced:
    return type(value), (value.item(),)


def _reduce_text(value: Any) -> _Reduced:
    base: Any = str if isinstance(value, str) else bytes
    return type(value), (base.__getitem__(value, slice(None)),)  # item() would drop zeros at the end


def _reduce_time(value: Any) -> _Reduced:
    unit, count = np.datetime_data(value.dtype)
    if unit == "generic":  # numpy makes no datetime64 of a number without a unit
        return _reduce_cell(value)
    return type(value), (int(value.astype(np.int64)), unit if count == 1 else f"{count}{unit}")


def _reduce_cell(value: Any) -> _Reduced:
    """Reduce a scalar that no Python value carries exactly, as the cell of an array."""
    array = np.empty((), value.dtype)
    array[()] = value
    return operator.getitem, (array, ())


def _reduce_dict(value: Any) -> Any:
    if value.__dict__:
        raise PickleRefused(f"a {type(value).__qualname__} with attributes is not stored as it is: pass allow_pickle=True or convert it.")
    return NotImplemented


def _reduce_defaultdict(value: Any) -> _Reduced:
    factory = value.default_factory
    if factory is None:
        return collections.defaultdict, (), None, None, iter(value.items())
    if factory not in SAFE_FACTORIES:
        raise PickleRefused(f"a defaultdict of {factory!r} is not stored as it is: pass allow_pickle=True or convert it to a dict.")
    return collections.defaultdict, (factory,), None, None, iter(value.items())


def _reduce_tensor(tensor: Any) -> _Reduced:
    torch = sys.modules["torch"]
    problem = ""
    if tensor.layout is not torch.strided:
        problem = f"of layout {tensor.layout}"
    elif tensor.device.type != "cpu":
        problem = f"on the device {tensor.device}"
    elif tensor.requires_grad:
        problem = "that requires a gradient"
    else:
        try:
            return torch.from_numpy, (tensor.resolve_conj().resolve_neg().numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, float8, quantised
            problem = f"of dtype {tensor.dtype}"
    raise PickleRefused(f"a tensor {problem} has no equal among numpy arrays: pass allow_pickle=True or convert it (detach, cpu, float).")


def _reduce_zone(zone: Any) -> _Reduced:
    if zone.key is None:
        raise PickleRefused("a time zone without a name is not stored as it is: pass allow_pickle=True or use ZoneInfo(key).")
    return type(zone), (zone.key,)


# The pickler writes these by itself.
_NATIVE = frozenset({type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset})
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys(
        (
            *(complex, range, slice, collections.deque, decimal.Decimal),
            *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
        ),
        _as_is,
    ),
    **dict.fromkeys((collections.OrderedDict, collections.Counter), _reduce_dict),
    **dict.fromkeys(PATH_TYPES, lambda value: (type(value), (str(value),))),
    **dict.fromkeys(PLAIN_SCALARS, _reduce_scalar),
    **dict.fromkeys((np.str_, np.bytes_), _reduce_text),
    **dict.fromkeys((np.datetime64, np.timedelta64), _reduce_time),
    **dict.fromkeys((np.void, np.longdouble, np.clongdouble), _reduce_cell),
    collections.defaultdict: _reduce_defaultdict,
    fractions.Fraction: lambda value: (fractions.Fraction, (value.numerator, value.denominator)),
    uuid.UUID: lambda value: (uuid.UUID, (value.hex,)),
    np.ndarray: _reduce_array,
}


# --- reading ------------------------------------------------------------------------------------------------------------------------------


class _StandIn:
    """What the fast reader calls in place of an allowed object; one per read, so that it can be seen whether a value kept it."""

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class _FastUnpickler(pickle.Unpickler):
    """The unpickler in C; only for pickles of the instructions that ``_is_plain`` lets pass."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.stand_ins: list[_StandIn] = []

    def find_class(self, module: str, name: str) -> Any:
        found = picklenames.find(module, name)
        call = picklenames.call_for(found)
        if call is found:  # safe with any arguments
            return found
        stand_in = _StandIn(call)
        self.stand_ins.append(stand_in)
        return stand_in


class _AnyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)


def _load_anything(data: bytes) -> Any:
    try:
        return _AnyUnpickler(io.BytesIO(data)).load()
    except (ImportError, AttributeError) as error:
        raise MissingDependency(f"a pickle needs what is not there: {error}") from error
    except (Exception, MemoryError) as error:
        raise Corrupt(f"a pickle is damaged ({type(error).__name__}: {error}).") from error


def _steps() -> list[int]:
    """Return how far each instruction reaches; -1, -4, -8: its argument starts with a length of so many bytes; 0: not for the fast reader.

    Left out are the instructions that set states, name objects in other ways, or choose the place in the memo, where a damaged number would
    ask for gigabytes.
    """
    steps = [0] * 256
    for names, step in (
        ("NONE NEWTRUE NEWFALSE EMPTY_LIST EMPTY_TUPLE EMPTY_DICT EMPTY_SET MARK TUPLE TUPLE1 TUPLE2 TUPLE3 POP POP_MARK", 1),
        ("APPEND APPENDS SETITEM SETITEMS ADDITEMS FROZENSET MEMOIZE STACK_GLOBAL REDUCE", 1),
        ("PROTO BININT1 BINGET", 2),
        ("BININT2", 3),
        ("BININT LONG_BINGET", 5),
        ("BINFLOAT FRAME", 9),
        ("SHORT_BINUNICODE SHORT_BINBYTES LONG1", -1),
        ("BINUNICODE BINBYTES", -4),
        ("BINUNICODE8 BINBYTES8 BYTEARRAY8", -8),
    ):
        for name in names.split():
            steps[getattr(pickle, name)[0]] = step
    return steps


_STEPS = _steps()
_STOP = pickle.STOP[0]


def _is_plain(data: bytes) -> bool:
    """Tell whether a pickle is made of simple instructions and ends where its bytes end."""
    at, steps = 0, _STEPS
    try:
        while step := steps[data[at]]:
            if step > 0:
                at += step
            elif step == -1:
                at += 2 + data[at + 1]
            else:
                at += 1 - step + int.from_bytes(data[at + 1 : at + 1 - step], "little")
        return data[at] == _STOP and at + 1 == len(data)
    except IndexError:
        return False
