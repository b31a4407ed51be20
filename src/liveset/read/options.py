"""Checks of the arguments of a StreamingDataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liveset.read.plan import DEFAULT_WINDOW

# Chunks of a remote dataset that are fetched ahead at least, where any are.
AHEAD = 4


def check_dataset_options(*, shuffle: Any, subsample: Any, transform: Any, later: Mapping[str, Any]) -> tuple[Callable[[Any], Any], ...]:
    """Check the arguments that a caller may get wrong, and return the transforms as a tuple.

    Raises:
        ValueError: an argument has a wrong type or value.
        NotImplementedError: an argument would change what is read, and is not supported yet.
    """
    if not isinstance(shuffle, bool):
        raise ValueError(f"Shuffle should be a boolean. Found {shuffle!r}.")
    if isinstance(subsample, bool) or not isinstance(subsample, int | float) or not subsample > 0:
        raise ValueError(f"subsample must be a float with value greater than 0. Found {subsample!r}.")
    for name, value in later.items():
        if value:
            raise NotImplementedError(f"{name}= is not supported yet.")
    if transform is None:
        return ()
    chosen = tuple(transform) if isinstance(transform, Sequence) else (transform,)
    for function in chosen:
        if not callable(function):
            raise ValueError(f"Transform should be a callable. Found {function!r}.")
    return chosen


def resolve_window(value: str | int | None) -> int:
    """Return the size of the shuffle blocks; 0 shuffles whole chunks."""
    if value is None or value == "auto":
        return DEFAULT_WINDOW
    if value == "full":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'item_shuffle_window must be "auto", "full" or a number of samples. Found {value!r}.')
    return value
