"""The three kinds of samples that are measured. Imports numpy only: every peer's environment has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Sample = dict[str, Any]

_VECTORS = np.random.default_rng(0).standard_normal((1024, 16)).astype("float32")
_BLOBS = [np.random.default_rng(i).bytes(50_000) for i in range(8)]
_ARRAYS = np.random.default_rng(0).standard_normal((4, 512, 512)).astype("float32")


def small(i: int) -> Sample:
    return {"id": f"sample-{i:08}", "x": _VECTORS[i % 1024], "n": i}


def blob(i: int) -> Sample:
    return {"id": f"sample-{i:08}", "raw": _BLOBS[i % 8]}


def array(i: int) -> Sample:
    return {"id": f"sample-{i:08}", "x": _ARRAYS[i % 4]}


def use_small(sample: Sample) -> Any:
    return sample["n"]


def use_blob(sample: Sample) -> Any:
    """Look at every byte: whoever hands out a view of a file pays for the pages here, as a decoder would."""
    return np.frombuffer(sample["raw"], "u8").sum()


def use_array(sample: Sample) -> Any:
    return sample["x"].view("u8").sum()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of samples: how many, how they are made, and what the "training loop" does with one."""

    name: str
    count: int
    make: Callable[[int], Sample]
    use: Callable[[Sample], Any]
    lookups: int


KINDS = {
    kind.name: kind
    for kind in (
        Kind("small", 200_000, small, use_small, 20_000),
        Kind("blobs", 4_000, blob, use_blob, 2_000),
        Kind("arrays", 300, array, use_array, 300),
    )
}
