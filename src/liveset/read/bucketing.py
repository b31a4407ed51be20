"""BucketBatchSampler: batches of samples of about the same length."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from liveset.read.options import check_seed

Array: TypeAlias = np.ndarray[Any, Any]

# Where no boundaries are given: the longest sample of a bucket is so many times as long as the shortest one at most, but each bucket has so
# many batches at least, so that batches differ between epochs.
_NEAR = 1.1
_BATCHES = 4


class BucketBatchSampler:
    """Batches of samples of about the same length, for ``StreamingDataLoader(ds, batch_sampler=...)``.

    Samples are sorted into buckets by length; each batch is of one bucket. With ``shuffle``, samples are shuffled within their buckets and
    batches over all buckets: anew in each epoch, as a pure function of ``seed`` and the epoch, so that states go on exactly. The number of
    batches is the same in all epochs.

    Args:
        lengths: of the samples, by position: numbers, such as those of tokens or seconds.
        batch_size: samples per batch.
        max_tokens: how long a batch may be, with all of its samples padded to the longest one: batches of short samples have more of them.
            Together with ``batch_size``, both are the most that there may be.
        boundaries: ascending lengths, each of which is the first of a bucket; what is shorter than the first one is a bucket, too. By
            default the lengths in a bucket differ by a tenth, or by more where these are less than 4 batches; only one batch in all is
            smaller than it could be then. With ``max_tokens``, wide buckets are divided in this way, too.
        shuffle: whether the order is random.
        seed: of the order.
        drop_last: leave out the last, smaller batch of each bucket.

    Raises:
        ValueError: an argument is wrong, or a sample is longer than ``max_tokens``.

    Example:
        >>> lengths = [len(row["id"]) for row in ds]
        >>> sampler = liveset.BucketBatchSampler(lengths, batch_size=16)
        >>> loader = liveset.StreamingDataLoader(ds, batch_sampler=sampler)
        >>> len(loader), sum(len(batch["id"]) for batch in loader)
        (8, 120)
    """

    def __init__(
        self,
        lengths: Sequence[float] | Array,
        batch_size: int | None = None,
        *,
        max_tokens: float | None = None,
        boundaries: Sequence[float] | Array | None = None,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = False,
    ) -> None:
        numbers = np.asarray(lengths)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
            raise ValueError(f"lengths must be a list of numbers, one for each sample. Found {lengths!r:.80}.")
        if not (np.isfinite(numbers) & (numbers >= 0)).all():
            wrong = int(np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))[0])
            raise ValueError(f"lengths must be at least 0. Found {numbers[wrong]} for the sample at position {wrong}.")
        if batch_size is None and max_tokens is None:
            raise ValueError("batch_size= or max_tokens= must say how large a batch is.")
        if batch_size is not None and (not isinstance(batch_size, SupportsIndex) or isinstance(batch_size, bool) or batch_size < 1):
            raise ValueError(f"batch_size must be a number of samples, at least 1. Found {batch_size!r}.")
        if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int | float) or not max_tokens > 0):
            raise ValueError(f"max_tokens must be a number greater than 0. Found {max_tokens!r}.")
        for name, flag in {"shuffle": shuffle, "drop_last": drop_last}.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False. Found {flag!r}.")
        if max_tokens is not None and len(numbers) and numbers.max() > max_tokens:
            longest = int(numbers.argmax())
            raise ValueError(
                f"the sample at position {longest} has the length {numbers[longest]}, more than max_tokens={max_tokens}: choose the "
                "samples that fit with subset(), or give a larger max_tokens."
            )
        self._shuffle, self._seed, self._drop = shuffle, check_seed(seed), drop_last
        self._most = operator.index(batch_size) if batch_size is not None else None
        self._tokens = max_tokens
        self._buckets = self._divide(numbers, boundaries)
        self._sizes = [self._size_of(float(numbers[bucket].max())) for bucket in self._buckets]
        self.epoch = 0

    def _divide(self, lengths: Array, boundaries: Sequence[float] | Array | None) -> list[Array]:
        """Return the positions in each bucket that has any."""
        ends = np.asarray([] if boundaries is None else boundaries)
        if ends.ndim != 1 or (len(ends) and ends.dtype.kind not in "iuf") or not (np.diff(ends) > 0).all():
            raise ValueError(f"boundaries must be ascending lengths. Found {boundaries!r:.80}.")
        order = np.argsort(lengths, kind="stable")
        buckets = np.split(order, np.searchsorted(lengths[order], ends))
        if boundaries is None or self._tokens is not None:
            buckets = [part for bucket in buckets for part in self._near(bucket, lengths[bucket])]
        return [bucket for bucket in buckets if len(bucket)]

    def _near(self, bucket: Array, lengths: Array) -> list[Array]:
        """Divide a bucket, whose lengths ascend, so that lengths are near each other in each part."""
        parts, end = [], len(bucket)
        while end:
            longest = float(lengths[end - 1])
            size = self._size_of(longest)
            near = end - int(np.searchsorted(lengths[:end], longest / _NEAR, "right"))
            count = max(-(-near // size), _BATCHES) * size
            begin = end - count if end - count >= size else 0
            parts.append(bucket[begin:end])
            end = begin
        return parts[::-1]

    def _size_of(self, longest: float) -> int:
        """Return how many samples are in a batch whose longest one has this length."""
        fitting = [self._most] if self._most is not None else []
        if self._tokens is not None:
            fitting.append(int(self._tokens // longest) if longest > 0 else max(int(self._tokens), 1))
        return max(min(size for size in fitting if size is not None), 1)

    def __len__(self) -> int:
        """Number of batches, over all ranks."""
        sizes = zip(map(len, self._buckets), self._sizes, strict=True)
        return sum(samples // size if self._drop else -(-samples // size) for samples, size in sizes)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0; a ``StreamingDataLoader`` does so when a pass begins."""
        self.epoch = operator.index(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, as positions."""
        random = np.random.RandomState([self._seed, self.epoch])
        order = np.concatenate([np.empty(0, np.int64), *(random.permutation(each) if self._shuffle else each for each in self._buckets)])
        cuts, begin = [], 0
        for bucket, size in zip(self._buckets, self._sizes, strict=True):
            end = begin + len(bucket)
            cuts += list(pairwise([*range(begin, end, size), end]))
            if self._drop and len(bucket) % size:
                cuts.pop()
            begin = end
        for number in random.permutation(len(cuts)).tolist() if self._shuffle else range(len(cuts)):
            first, last = cuts[number]
            yield order[first:last].tolist()
