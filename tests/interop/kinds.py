"""Kinds of samples by name, made alike in both environments. Imports only what both have, and no liveset."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np

Make = Callable[[int], Any]


def make(kind: str) -> Make:
    """Return a function (that pickles by name) from position to sample."""
    return partial(_make, kind)


def _make(kind: str, i: int) -> Any:
    return {**BOTH, **THEIRS, **OURS, **ALTERED}[kind](i)


def torch() -> Any:
    import torch

    return torch


def picture(i: int, mode: str = "RGB") -> Any:
    from PIL import Image

    shape = (5, 7) if mode == "L" else (5, 7, 3)
    return Image.fromarray(np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8))


def jpeg_file(i: int) -> Any:
    from PIL import Image

    stream = io.BytesIO()
    picture(i).save(stream, "JPEG", quality=90)
    return Image.open(io.BytesIO(stream.getvalue()))


def default_dict(i: int) -> defaultdict[str, Any]:
    filled: defaultdict[str, Any] = defaultdict(list)
    filled["k"] = i
    return filled


def some(i: int, *shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(i).integers(0, 100, shape).astype(dtype)


# Written the same by both tools, and read back equal by both
BOTH: dict[str, Make] = {
    "int": lambda i: i - 3,
    "str": lambda i: f"número {i}" * (i % 3),
    "float": lambda i: i / 7,
    "bool": lambda i: i % 3 == 0,
    "bytes": lambda i: bytes(range(i % 7)),
    "tuple": lambda i: (i, f"row {i}", i / 3, i % 2 == 0),
    "list": lambda i: [i, -i],
    "nested-tuple": lambda i: (i, (f"{i}", [i / 2, (i,)]), {"k": i, "l": (i, i + 1)}),
    "dict": lambda i: {"id": f"row-{i}-é", "n": i * 10**14, "x": i / 3, "flag": i % 2 == 0},
    "dict-with-bytes": lambda i: {"id": f"row-{i}", "raw": bytes([i % 256]) * (i % 50)},
    "dict-nested": lambda i: {"a": {"b": i, "c": (i, float(i))}, "d": f"x{i}"},
    "dict-int-keys": lambda i: {1: i, 2: f"{i}"},
    "dict-non-ascii-keys": lambda i: {"ключ": i, 'a"b\\c': i},
    "array-1d": lambda i: some(i, i % 5 + 1),
    "array-2d": lambda i: some(i, 2, i % 4 + 1, dtype="int64"),
    "arrays": lambda i: {
        t: some(i, 2, 2, dtype=t) for t in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "float16", "float64")
    },
    "arrays-complex": lambda i: (some(i, 3, dtype="complex64"), some(i, 1, 2, dtype="complex128"), some(i, 3, dtype="bool")),
    "dict-of-arrays": lambda i: {"id": f"row-{i}", "x": some(i, 16), "img": some(i, 3, 4, dtype="uint8"), "label": i},
    "tensor-1d": lambda i: {"x": torch().arange(i % 5 + 1), "n": i},
    "tensor-2d": lambda i: torch().arange(6.0 + i % 2 * 2).reshape(2, -1),
    "tensor-0d": lambda i: (torch().tensor(i), torch().tensor(i / 2)),
    "tensors": lambda i: {
        t: torch().arange(4).reshape(2, 2).to(getattr(torch(), t)) for t in ("float16", "float64", "int8", "int16", "uint8", "bool")
    },
    "pil": lambda i: {"image": picture(i), "label": i},
    "pil-grey": lambda i: picture(i, "L"),
    "json-lists": lambda i: {"ints": [i] * (i % 4), "text": [f"{i}", "b"], "floats": [i / 3], "flags": [True, i % 2 == 0]},
    "json-nested": lambda i: {"boxes": [{"x": i, "y": 1.5, "name": f"{i}"}] * (i % 3), "matrix": [[i, 2], [3]]},
    "ordered-dict": lambda i: (OrderedDict(b=i, a=f"{i}"),),
    "default-dict": lambda i: (default_dict(i),),
    "deque": lambda i: (deque([i, i + 1], maxlen=5), deque([f"{i}"])),
    "numpy-scalars": lambda i: (np.int64(i), np.float32(i / 3), np.bool_(i % 2)),
    "mixed": lambda i: [f"{i}", some(i, 3), {"a": [torch().tensor([i]), b"x" * i]}],
}

# Only written by the old tool
THEIRS: dict[str, Make] = {
    "dict-with-none": lambda i: {"id": f"row-{i}", "x": None if i % 3 == 1 else i / 2, "s": None if i % 4 == 2 else f"{i}"},
    "dict-late-field": lambda i: {"id": i} if i < 5 else {"id": i, "late": f"{i}"},
    "dict-list-of-struct": lambda i: {"l": [{"a": i, "b": None}, {"a": None, "b": f"{i}"}], "e": []},
}

# Only written by us: the old tool refuses or changes these, and yet reads them back equal from our chunks
OURS: dict[str, Make] = {
    "none-mixes": lambda i: {
        "id": f"row-{i}",
        "x": None if i % 3 == 1 else i / 2,
        "n": None if i % 4 == 2 else i,
        "s": None if i % 2 else f"{i}",
    },
    "int-float-mix": lambda i: {"v": i if i % 2 else i / 4},
    "big-ints": lambda i: {"v": 2 ** (60 + i), "w": -(2**70) if i % 2 else 0},
    "array-0d": lambda i: {"x": np.array(i / 2, dtype="float32"), "n": np.array(i)},
    "array-empty": lambda i: {"a": some(i, i % 2), "b": some(i, 0, 3), "c": some(i, 2, i % 2)},
    "array-mixed-shapes": lambda i: some(i, *[2] * (i % 3)),
    "array-non-contiguous": lambda i: (some(i, 4, 6)[::2, ::3], some(i, 3, 4).T, np.asfortranarray(some(i, 2, 3))),
    "array-or-none": lambda i: {"x": None if i % 3 else some(i, 2, 2), "y": some(i, 3) if i % 4 else None},
    "ordered-dict-root": lambda i: OrderedDict(b=i, a=f"{i}"),
    "deque-root": lambda i: deque([i, i + 1], maxlen=5),
    "default-dict-root": default_dict,
    "tensor-empty": lambda i: {"a": torch().zeros(i % 2), "b": torch().zeros(0, 3), "c": torch().zeros(2, i % 2)},
    "tensor-bfloat16": lambda i: {"a": torch().arange(4).to(torch().bfloat16), "b": torch().ones(2, 2, dtype=torch().bfloat16) * i},
    "dates": lambda i: {
        "at": datetime(2024, 1, 1, tzinfo=UTC) + timedelta(hours=i),
        "on": date(2024, 2, 1 + i % 28),
        "for": timedelta(seconds=i),
    },
    "empty-containers": lambda i: {"id": i, "t": (), "d": {}},
    "nan-and-inf": lambda i: {"x": float("nan") if i % 2 else float("-inf"), "y": -0.0},
    "long-text": lambda i: {"t": "é" * 5000 * (i % 2), "z": "\x00"},
}

# The old tool hands out JPEG files as decoded tensors, so they are compared apart from the others
ALTERED: dict[str, Make] = {
    "jpeg": lambda i: {"image": jpeg_file(i), "label": i},
    "jpeg-list": lambda i: (i, [jpeg_file(i), jpeg_file(i + 1)]),
}
