"""Checks of the arguments of a StreamingDataset."""

from __future__ import annotations

import math
import operator
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, SupportsIndex

import numpy as np

from liveset.read.plan import DEFAULT_WINDOW
from liveset.storage.cache import parse_limit

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
    if isinstance(subsample, bool) or not isinstance(subsample, int | float) or not 0 < subsample < math.inf:
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


def check_opening_options(*, cache_dir: Any, max_cache_size: Any, index_path: Any, version: Any, serializers: Any, **flags: Any) -> None:
    """Check the types of the arguments that say what is opened and how; whether there is such a thing shows when it is opened.

    Raises:
        ValueError: an argument has a wrong type or value.
    """
    wanted: list[tuple[str, Any, tuple[type, ...], str]] = [
        ("cache_dir", cache_dir, (str, os.PathLike, bool), "a path, True or False"),
        ("index_path", index_path, (str, os.PathLike), "a path"),
        ("version", version, (str, datetime, SupportsIndex), "a number, a tag or a time"),
        ("serializers", serializers, (Mapping,), "a mapping from leaf types to objects with deserialize()"),
    ]
    for name, value, types, what in wanted:
        if value is not None and not isinstance(value, types):
            raise ValueError(f"{name} must be {what}. Found {value!r}.")
    check_flags(**flags)
    parse_limit(max_cache_size)


def check_flags(**flags: Any) -> None:
    """Check arguments that are True or False; ``ValueError`` names the first one that is neither."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False. Found {value!r}.")


def check_count(name: str, value: Any, what: str = "a number") -> int:
    """Return an argument that counts something as an int; ``ValueError`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 0:
        raise ValueError(f"{name} must be {what}, at least 0. Found {value!r}.")
    return operator.index(value)


def check_ahead(max_pre_download: Any) -> int:
    """Return how many chunks are fetched ahead."""
    chunks = check_count("max_pre_download", max_pre_download, "a number of chunks")
    return max(chunks, AHEAD) if chunks else 0


def transformed(sample: Any, transforms: Iterable[Callable[[Any], Any]]) -> Any:
    """Return a sample to which the transforms were applied in turn."""
    for transform in transforms:
        sample = transform(sample)
    return sample


def failed_in_transform(error: BaseException) -> bool:
    """Whether this came out of ``transformed``."""
    return any(frame.f_code is transformed.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def check_seed(seed: Any) -> int:
    """Return the seed of an order as an int; ``ValueError`` for what is none."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) or not 0 <= operator.index(seed) < 2**32:
        raise ValueError(f"seed must be an integer, at least 0 and below 2**32. Found {seed!r}.")
    return operator.index(seed)


def check_drop_last(drop_last: Any) -> bool | None:
    """Return what was given, if that can be; ``ValueError`` else."""
    if drop_last is not None and not isinstance(drop_last, bool):
        raise ValueError(f"drop_last must be True, False or None. Found {drop_last!r}.")
    return drop_last


def check_epoch(epoch: Any) -> int:
    """Return the number of an epoch as an int; ``ValueError`` for what is none."""
    if isinstance(epoch, bool) or not isinstance(epoch, SupportsIndex) or not 1 <= operator.index(epoch) < 2**32:
        raise ValueError(f"an epoch is a number from 1 on. Found {epoch!r}.")
    return operator.index(epoch)


def check_position(position: Any) -> int:
    """Return the position of a sample as an int; ``TypeError`` for what is none, such as True and False of a mask."""
    if type(position) is int:
        return position
    kind = str(getattr(position, "dtype", type(position).__name__))
    many = isinstance(position, list | tuple)
    if kind in ("bool", "torch.bool") or (many and type(next(iter(position), None)) in (bool, np.bool_)):
        raise TypeError(
            "True and False are neither positions nor keys: of a mask, give numpy.flatnonzero(mask) to subset() or as an order."
        )
    try:
        return operator.index(position)
    except TypeError:
        hint = ": give lists of samples as batch_sampler=, and many positions to subset()" if many or np.ndim(position) else ""
        raise TypeError(f"{position!r:.80} is neither the position of a sample nor a key{hint}.") from None


def check_positions(positions: Iterable[Any]) -> list[int]:
    """Return the positions of samples as ints."""
    found: list[Any] = positions.tolist() if hasattr(positions, "tolist") else list(positions)
    return found if set(map(type, found)) == {int} else list(map(check_position, found))


def resolve_window(value: str | int | None) -> int:
    """Return the size of the shuffle blocks; 0 shuffles whole chunks."""
    if value is None or value == "auto":
        return DEFAULT_WINDOW
    if value == "full":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'item_shuffle_window must be "auto", "full" or a number of samples. Found {value!r}.')
    return value
