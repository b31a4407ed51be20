"""Samples to a batch, as ``torch.utils.data.default_collate`` does it, but with numpy arrays in place of tensors.

Torch is not needed. ``to_tensors`` turns such a batch into the one that ``default_collate`` returns, without copying it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np

from liveset.errors import CollateError
from liveset.format.dtypes import import_torch
from liveset.format.tree import Path, path_text

__all__ = ["collate", "to_tensors"]

# Torch reads a Python number among others as its default types.
_DEFAULTS = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float32), complex: np.dtype(np.complex64)}
_RANK = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


def collate(samples: Sequence[Any], *, path: Path = ()) -> Any:
    """Return a batch: what the samples hold, field by field.

    Args:
        samples: of the same structure; at least one.
        path: where they stand in the whole samples, for messages.

    Returns:
        int64 arrays of ints, float64 arrays of floats, stacked arrays and tensors, the sequence itself of str and bytes; dicts, lists and
        named tuples of these, and lists in place of tuples.

    Raises:
        CollateError: the samples are not alike, lack a field of the first one, or hold what cannot be in a batch, such as None; ``field``
            names the place.

    Example:
        >>> collate([{"id": "a", "x": 1.5}, {"id": "b", "x": 2.0}])
        {'id': ['a', 'b'], 'x': array([1.5, 2. ])}
    """
    first = samples[0]
    kind = type(first)
    if kind in (str, bytes) or isinstance(first, str | bytes):
        return samples
    if isinstance(first, np.ndarray):
        return _stack(samples, path)
    if isinstance(first, bool | int | float | np.number | np.bool_):
        return _numbers(samples, path)
    if (torch := sys.modules.get("torch")) is not None and isinstance(first, torch.Tensor):
        return _stack_tensors(torch, samples, path)
    if isinstance(first, Mapping):
        return _mapping(first, {key: collate(_column(samples, key, path), path=(*path, key)) for key in first})
    if isinstance(first, Sequence):
        lengths = {len(sample) if isinstance(sample, Sequence) else None for sample in samples}
        if len(lengths) != 1 and not hasattr(first, "_fields"):
            raise _unlike(f"sequences of different lengths ({_some(lengths)})", path)
        return _sequence(first, [collate(column, path=(*path, i)) for i, column in enumerate(zip(*samples, strict=False))])
    raise _unlike("None" if first is None else f"a {kind.__module__}.{kind.__qualname__}", path)


def to_tensors(batch: Any) -> Any:
    """Return a batch of ``collate`` with a torch tensor over the memory of each array.

    Raises:
        MissingDependency: torch is not installed.
        CollateError: torch has no such dtype; also a ``TypeError``.
    """
    return _convert(batch, import_torch("A batch of tensors").from_numpy, ())


def _convert(batch: Any, convert: Any, path: Path) -> Any:
    if type(batch) is np.ndarray:
        try:
            return convert(batch)
        except TypeError as error:
            raise _unlike(f"{batch.dtype}, for which torch has no dtype", path) from error
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: _convert(value, convert, (*path, key)) for key, value in batch.items()})
    # A sequence of texts is a column; one of columns is a container.
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and not (batch and isinstance(batch[0], str | bytes)):
        return _sequence(batch, [_convert(value, convert, (*path, i)) for i, value in enumerate(batch)])
    return batch


# --- containers ---------------------------------------------------------------------------------------------------------------------------


def _mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping with what a subclass has besides its items; a dict for types that cannot be made so."""
    if type(like) is dict:
        return items
    try:
        if isinstance(like, MutableMapping):
            clone = copy.copy(like)
            clone.update(items)
            return clone
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _column(samples: Sequence[Any], key: Any, path: Path) -> list[Any]:
    try:
        return [sample[key] for sample in samples]
    except KeyError as error:
        raise _unlike("values in some samples, and is missing in others", (*path, key)) from error
    except (TypeError, IndexError) as error:
        other = next((sample for sample in samples if not isinstance(sample, Mapping)), None)
        raise _unlike(f"a mapping in some samples and {_named(other)} in others", path) from error


def _sequence(like: Sequence[Any], columns: list[Any]) -> Any:
    if isinstance(like, tuple):
        return type(like)(*columns) if hasattr(like, "_fields") else columns
    if type(like) is list:
        return columns
    try:
        if isinstance(like, MutableSequence):
            clone = copy.copy(like)
            for i, column in enumerate(columns):
                clone[i] = column
            return clone
        return type(like)(columns)  # type: ignore[call-arg]
    except TypeError:
        return columns


# --- numbers and arrays -------------------------------------------------------------------------------------------------------------------


def _numbers(samples: Sequence[Any], path: Path) -> np.ndarray[Any, Any]:
    first = type(samples[0])
    dtypes = {_number_dtype(sample, path) for sample in samples}
    if first is float:  # torch asks for float64 only where the first is a float of Python
        dtype = np.dtype(np.float64)
        if not np.can_cast(_common(dtypes), dtype, "same_kind"):
            raise _unlike("floats and complex numbers", path)
    else:
        dtype = _common(dtypes)
    try:
        with np.errstate(over="ignore"):
            return np.array(samples, dtype)
    except OverflowError as error:
        raise _unlike("an int beyond 64 bits", path) from error


def _number_dtype(value: Any, path: Path) -> np.dtype[Any]:
    if (known := _DEFAULTS.get(type(value))) is not None:
        return known
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and value.dtype.kind in _RANK:
        return value.dtype
    for kind, dtype in _DEFAULTS.items():
        if isinstance(value, kind):
            return dtype
    raise _unlike(f"a number in some samples and {_named(value)} in others", path)


def _common(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype for all as torch chooses it: beside floats, ints do not count."""
    found = set(dtypes)
    if all(dtype.kind in _RANK for dtype in found):
        top = max(_RANK[dtype.kind] for dtype in found)
        found = {dtype for dtype in found if _RANK[dtype.kind] >= min(top, _RANK["f"])}
    return np.result_type(*found)


def _stack(samples: Sequence[Any], path: Path) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(sample) for sample in samples]
    if (dtype := arrays[0].dtype).kind in "SUO":
        raise _unlike(f"an array of {dtype}", path)
    if len(shapes := {array.shape for array in arrays}) > 1:
        raise _unlike(f"arrays of different shapes ({_some(shapes)})", path)
    return np.stack(arrays, dtype=_common(array.dtype for array in arrays))


def _stack_tensors(torch: Any, samples: Sequence[Any], path: Path) -> Any:
    try:
        return torch.stack(list(samples))
    except (RuntimeError, TypeError) as error:
        raise _unlike(f"tensors that cannot be stacked ({error})", path) from error


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _some(values: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, values))[:4])


def _unlike(what: str, path: Path) -> CollateError:
    field = path_text(path)
    return CollateError(
        f"field {field!r} cannot be in a batch: it holds {what}. Leave it out with fields=[...], change it in transform=, "
        "or pass a collate_fn that handles it.",
        field=field,
    )
