"""Numbers that stand for dtypes in array leaves; the tables are facts of the file format."""

from __future__ import annotations

from typing import Any

import numpy as np

from liveset.errors import Corrupt, MissingDependency

# Index -> dtype. Indices 14 to 17 (object, bytes, str, void) hold pointers or nothing and are refused.
NUMPY_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name)
    for name in ("int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool".split())
)
NUMPY_INDEX: dict[np.dtype[Any], int] = {dtype: index for index, dtype in enumerate(NUMPY_DTYPES)}

# Index -> dtype name; several indices are aliases, and the last one is the one to write.
TORCH_NAMES: tuple[str, ...] = (
    "float32 float32 float64 float64 complex64 complex64 complex128 complex128 float16 float16 bfloat16 "
    "uint8 int8 int16 int16 int32 int32 int64 int64 bool uint16"
).split()  # type: ignore[assignment]
TORCH_INDEX: dict[str, int] = {name: index for index, name in enumerate(TORCH_NAMES)}


def numpy_dtype(index: int) -> np.dtype[Any]:
    """Return the dtype of a numpy index, or raise ``Corrupt``."""
    if 0 <= index < len(NUMPY_DTYPES):
        return NUMPY_DTYPES[index]
    raise Corrupt(f"an array leaf names the numpy dtype number {index}, which holds no portable values")


def import_torch(why: str) -> Any:
    """Return torch, or raise ``MissingDependency`` that says why it is needed."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(f"{why} needs PyTorch: pip install torch", package="torch") from error
    return torch


def torch_dtype(index: int) -> Any:
    """Return the torch dtype of a torch index, or raise ``Corrupt``."""
    if 0 <= index < len(TORCH_NAMES):
        return getattr(import_torch("Reading a tensor"), TORCH_NAMES[index])
    raise Corrupt(f"a tensor leaf names the torch dtype number {index}, which is unknown")
