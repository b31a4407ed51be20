"""train_test_split: parts of a dataset that share no sample, by position or by key."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from liveset.read.dataset import StreamingDataset
from liveset.read.plan import Region


def train_test_split(
    streaming_dataset: StreamingDataset,
    splits: Sequence[float],
    seed: int = 42,
    shuffle: bool = True,
    *,
    by: Literal["position", "key"] = "position",
) -> list[StreamingDataset]:
    """Return parts of a dataset that share no sample, such as one for training and one for testing.

    By position, parts are of whole chunks as far as possible, cut one after the other: quick, and the parts of the old tool, but other
    ones whenever the dataset has changed. By key, a hash of the key of each sample decides: a sample stays in its part whatever is
    appended, replaced, deleted or compacted, and only the sizes are not exact. Such parts can be refreshed.

    Args:
        streaming_dataset: what is split; its shuffling, transforms and other settings become those of the parts.
        splits: the size of each part, from 0 to 1, together at most 1. By position a part has ``int(size * samples)`` samples.
        seed: of the order of the chunks, or of the hash.
        shuffle: shuffle the chunks before they are cut; by key it has no meaning.
        by: "position" or "key".

    Raises:
        ValueError: the sizes are wrong.
        KeyNotFound: ``by="key"``, and the dataset has no keys.

    Example:
        >>> train, test = liveset.train_test_split(ds, [0.75, 0.25], by="key")
        >>> len(train) + len(test), set(train.keys) & set(test.keys)
        (120, set())
    """
    if not isinstance(streaming_dataset, StreamingDataset):
        raise ValueError(f"train_test_split() splits a StreamingDataset. Found {type(streaming_dataset).__name__}.")
    if not all(isinstance(size, float) for size in splits):
        raise ValueError(f"Each split should be a float. Found {list(splits)!r}.")
    if not all(0 <= size <= 1 for size in splits):
        raise ValueError(f"Each Split should be a float with each value in [0,1]. Found {list(splits)!r}.")
    if sum(splits) > 1 + 1e-12:
        raise ValueError(f"Splits' sum must be less than 1. Found {list(splits)!r}, which are {sum(splits)} together.")
    if by == "key":
        ends = list(accumulate(splits))
        parts = streaming_dataset.parts_by_key([1.0 if end > 1 - 1e-12 else end for end in ends], seed)
    elif by == "position":
        regions = streaming_dataset.layout.regions
        order = np.random.RandomState([seed]).permutation(len(regions)).tolist() if shuffle else range(len(regions))
        sizes = [int(streaming_dataset.samples * size) for size in splits]
        parts = [streaming_dataset.part(chosen) for chosen in _cut([regions[number] for number in order], sizes)]
    else:
        raise ValueError(f'by must be "position" or "key". Found {by!r}.')
    for number, (part, size) in enumerate(zip(parts, splits, strict=True)):
        if not part.samples:
            warnings.warn(
                f"part {number}, of the size {size}, has no samples: {streaming_dataset.path} has {streaming_dataset.samples:,}.",
                stacklevel=2,
            )
    return parts


def _cut(regions: Sequence[Region], sizes: Sequence[int]) -> list[list[Region]]:
    """Return regions of so many samples each, one after the other."""
    rest = iter(regions)
    left = Region(0, 0, 0)
    parts = []
    for size in sizes:
        part = []
        wanted = size
        while wanted:
            if left.start == left.stop:
                left = next(rest)
            taken = min(wanted, left.stop - left.start)
            if taken:
                part.append(left._replace(stop=left.start + taken))
            left = left._replace(start=left.start + taken)
            wanted -= taken
        parts.append(part)
    return parts
