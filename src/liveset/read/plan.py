"""Who reads which samples in which order: a pure function of the regions, the seed, the epoch and the grid of readers.

The rules are those of the old tool, so that a training run which moves here sees the same order. A *region* is a run of neighbouring
samples in one chunk; a dataset without subsampling has one region per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

DEFAULT_WINDOW = 256

Offsets: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Numbers of samples."""


class Region(NamedTuple):
    """The samples in slots ``start`` to ``stop - 1`` of chunk ``chunk``."""

    chunk: int
    start: int
    stop: int


class Share(NamedTuple):
    """The part of a region that one worker reads: samples ``start`` to ``stop - 1``, counted from the region's first."""

    region: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The readers of a run: ``world`` ranks with ``workers`` loader workers each; ``rank`` and ``worker`` are the one that reads here."""

    world: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0
    batch: int = 1


def budgets(total: int, grid: Grid, drop_last: bool) -> list[int]:
    """Return how many samples each worker reads, rank-major (``world * workers`` numbers)."""
    per_rank = total // grid.batch // grid.world
    even, extra = divmod(per_rank, grid.workers)
    one_rank = [(even + (worker < extra)) * grid.batch for worker in range(grid.workers)]
    counts = one_rank * grid.world
    if not drop_last:
        counts[(grid.world - 1) * grid.workers + extra % grid.workers] += total - sum(counts)
    return counts


def rank_length(total: int, grid: Grid, drop_last: bool) -> int:
    """Return how many samples the workers of rank ``grid.rank`` read together."""
    return sum(budgets(total, grid, drop_last)[grid.rank * grid.workers : (grid.rank + 1) * grid.workers])


def region_order(count: int, *, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """Return the order in which regions are dealt out."""
    if not shuffle:
        return range(count)
    order: list[int] = np.random.RandomState([seed, epoch]).permutation(count).tolist()
    return order


def shares(sizes: Sequence[int], order: Sequence[int], grid: Grid, drop_last: bool) -> list[Share]:
    """Return what the worker ``grid.rank, grid.worker`` reads, in order.

    Workers are filled one after another in global order, so a region may be cut between neighbours; what exceeds all budgets is dropped.
    """
    counts = budgets(sum(sizes), grid, drop_last)
    mine = grid.rank * grid.workers + grid.worker
    begin = sum(counts[:mine])
    return list(Walk(sizes, order).cut(begin, begin + counts[mine]))


class Walk:
    """The samples of all regions in the order in which they are dealt out."""

    def __init__(self, sizes: Sequence[int], order: Sequence[int]) -> None:
        self._order = order
        self._sizes = np.asarray(sizes, np.int64)[np.asarray(order, np.int64)]
        self._ends = np.cumsum(self._sizes)

    def cut(self, begin: int, end: int) -> Iterator[Share]:
        """Yield the parts of regions that make up samples ``begin`` to ``end - 1`` of the walk."""
        for place in range(int(np.searchsorted(self._ends, begin, "right")), len(self._order)):
            size, last = int(self._sizes[place]), int(self._ends[place])
            first = last - size
            if first >= end:
                break
            start, stop = max(begin - first, 0), min(end - first, size)
            if start < stop:
                yield Share(self._order[place], start, stop)


def positions(share: Share, regions: int, *, seed: int, epoch: int, window: int) -> Offsets:
    """Return the shuffled order of a share: numbers counted from the region's first sample.

    Args:
        share: the part of a region.
        regions: how many regions the dataset has.
        seed: of the dataset.
        epoch: counted from 1.
        window: samples are shuffled in blocks of this many, and then the blocks; 0 or 1 shuffles the whole share.
    """
    plain = np.arange(share.start, share.stop)
    if len(plain) < 2:
        return plain
    random = np.random.RandomState([seed, regions, epoch, share.region])
    if window <= 1:
        return random.permutation(plain)
    blocks = [plain[at : at + window] for at in range(0, len(plain), window)]
    for block in blocks:
        random.shuffle(block)
    if len(blocks) == 1:
        return blocks[0]
    places = list(range(len(blocks)))
    random.shuffle(places)
    return np.concatenate([blocks[place] for place in places])


def subsample_regions(regions: Sequence[Region], fraction: float, *, shuffle: bool, seed: int) -> list[Region]:
    """Return the regions of a subsample: a leading part of the (shuffled) list, or whole copies and a part for a fraction above 1."""
    if fraction == 1.0 or not any(region.stop - region.start for region in regions):
        return list(regions)
    ordered = list(regions)
    random = np.random.RandomState([seed])
    wanted = int(sum(region.stop - region.start for region in regions) * fraction)
    result = []
    while wanted > 0:
        if shuffle:  # each copy shuffles the order of the one before
            ordered = [ordered[place] for place in random.permutation(len(ordered))]
        for region in ordered:
            size = min(region.stop - region.start, wanted)
            if size <= 0:
                break
            result.append(Region(region.chunk, region.start, region.start + size))
            wanted -= size
    return result
