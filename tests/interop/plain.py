"""Values of two environments, made comparable: everything becomes tuples of builtins that keep type, dtype, shape and bytes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

Plain = Any


def plain(value: Any) -> Plain:
    """Return a value that is equal for equal samples only, and unequal for 1, 1.0 and True, list and tuple, array and tensor."""
    kind = type(value)
    if kind is memoryview:
        return ("bytes", repr(bytes(value)))  # how the old tool hands out bytes of local chunks
    if kind is defaultdict:
        return ("defaultdict", value.default_factory.__name__, _items(value))
    if kind in {dict, OrderedDict}:
        return (kind.__name__, _items(value))
    if kind in {list, tuple}:
        return (kind.__name__, [plain(item) for item in value])
    if kind is deque:
        return ("deque", value.maxlen, [plain(item) for item in value])
    if kind.__module__.partition(".")[0] == "torch":
        return _tensor(value)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return (kind.__name__, value.dtype.str, tuple(value.shape), value.tobytes())
    if hasattr(value, "getbands"):
        return ("image", value.mode, value.size, value.tobytes())
    if kind in {set, frozenset}:
        return (kind.__name__, sorted((plain(item) for item in value), key=repr))
    return (kind.__name__, repr(value))


def _items(value: dict[Any, Any]) -> list[Plain]:
    return [(plain(key), plain(item)) for key, item in value.items()]


def _tensor(value: Any) -> Plain:
    import torch

    # bfloat16 is not known to numpy, so the bytes are taken as such
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return ("tensor", str(value.dtype), tuple(value.shape), raw)
