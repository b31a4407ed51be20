"""One epoch as batches of samples, from any point on: a pure function of region sizes, rules of the order, and grids of readers.

An epoch begins on one grid. Where a run stops in it and goes on with another number of ranks or another batch size, the samples that are
left are dealt out again: they stand in the order in which all ranks together would have read them, and the new ranks take batches from it
in turn. This can happen any number of times in an epoch; each grid is a *stretch* of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from liveset.format.lazy import lazy
from liveset.read.plan import Grid, Offsets, Share, Walk, budgets, positions, region_order

Run: TypeAlias = tuple[int, Offsets]
"""Samples of one region, counted from its first."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the order of an epoch depends on besides the regions and the readers.

    Attributes:
        seed: of the shuffle.
        epoch: counted from 1.
        shuffle: whether samples are shuffled at all.
        window: samples that are shuffled as one block; 0 or 1 shuffles whole regions.
        drop_last: leave out what does not fill a batch on every rank; None does so with several ranks only.
        pad: repeat samples instead, until there is a whole batch for every rank.
    """

    seed: int
    epoch: int
    shuffle: bool
    window: int
    drop_last: bool | None = None
    pad: bool = False

    def drops(self, world: int) -> bool:
        """Whether ranks are made equal by leaving samples out."""
        return not self.pad and (world > 1 if self.drop_last is None else self.drop_last)


class Stretch(NamedTuple):
    """The part of an epoch that one grid read: so many batches on each of its ranks, or all of a rank that has fewer."""

    world: int
    workers: int
    batch: int
    batches: int


class Epoch:
    """The batches of one epoch.

    Args:
        sizes: of the regions.
        rules: of the order.
        stretches: the grids that read it; the last one is the grid that reads now, from its ``batches`` on.
    """

    def __init__(self, sizes: Sequence[int], rules: Rules, stretches: Sequence[Stretch]) -> None:
        self.rules, self.stretches = rules, tuple(stretches)
        self._now = self.stretches[-1]
        self._sizes = sizes

    @property
    def earlier(self) -> int:
        """Batches of each rank that grids before this one read."""
        return sum(stretch.batches for stretch in self.stretches[:-1])

    def count(self, rank: int) -> int:
        """Return how many batches a rank has on this grid."""
        if len(self.stretches) == 1:
            return self._first.count(rank)
        world, _, batch, _ = self._now
        whole, part = divmod(len(self._rest), batch)
        if self.rules.drops(world):
            return whole // world
        return -(-(whole + bool(part) - rank) // world)

    def samples(self, rank: int, batches: int) -> int:
        """Return how many samples the first batches of a rank hold on this grid; all batches but the last are full."""
        if len(self.stretches) == 1:
            return self._first.samples(rank, batches)
        if batches < self.count(rank):
            return batches * self._now.batch
        return sum(len(self._rest[begin : begin + self._now.batch]) for begin in self._begins(rank, 0))

    def batches(self, rank: int) -> Iterator[list[Run]]:
        """Yield what a rank has still to read on this grid, batch by batch."""
        done = self._now.batches
        if len(self.stretches) == 1:
            return self._first.batches(rank, done)
        return (self.runs(self._rest[begin : begin + self._now.batch]) for begin in self._begins(rank, done))

    def streams(self, rank: int) -> list[list[int]]:
        """Return the regions that each worker of a rank reads, in their order; of a rest, each where it is read first."""
        if len(self.stretches) == 1:
            return self._first.streams(rank)
        _, workers, batch, done = self._now
        begins = np.fromiter(self._begins(rank, done), np.int64)
        places = ((begins[worker::workers, None] + np.arange(batch)).ravel() for worker in range(workers))
        return [self._regions_of(self._rest[at[at < len(self._rest)]]) for at in places]

    def turns(self, rank: int) -> Iterator[int]:
        """Yield whose turn each of these batches is, as places in ``streams``."""
        return self._first.turns(rank, self._now.batches) if len(self.stretches) == 1 else cycle(range(self._now.workers))

    def _regions_of(self, samples: Offsets) -> list[int]:
        """Return the regions of samples in the order in which they come first."""
        regions = np.searchsorted(self._starts, samples, "right") - 1
        found: list[int] = regions[np.sort(np.unique(regions, return_index=True)[1])].tolist()
        return found

    def _begins(self, rank: int, done: int) -> Iterator[int]:
        world, _, batch, _ = self._now
        return ((step * world + rank) * batch for step in range(done, self.count(rank)))

    @lazy
    def _first(self) -> Dealt:
        return FirstGrid(self._sizes, self.rules, self.stretches[0])

    @lazy
    def _rest(self) -> Offsets:
        """What was left when the grid that reads now began: numbers of samples, counted over all regions."""
        first, *later = self.stretches[:-1]
        rest = self._first.rest(first.batches)
        for world, _, batch, batches in later:
            rest = rest[world * batch * batches :]
        if self.rules.pad and len(rest):
            width = self._now.world * self._now.batch
            rest = rest[np.resize(np.arange(len(rest)), -(-len(rest) // width) * width)]
        return rest

    @lazy
    def _starts(self) -> Offsets:
        return np.array([0, *accumulate(self._sizes)], np.int64)

    def runs(self, samples: Offsets) -> list[Run]:
        regions = np.searchsorted(self._starts, samples, "right") - 1
        offsets = samples - self._starts[regions]
        cuts = [0, *(np.flatnonzero(regions[1:] != regions[:-1]) + 1).tolist(), len(samples)]
        return [(int(regions[a]), offsets[a:b]) for a, b in pairwise(cuts)]


class Dealt(Protocol):
    """What the grid that an epoch began on reads."""

    def count(self, rank: int) -> int:
        """Return how many batches a rank has."""

    def samples(self, rank: int, batches: int) -> int:
        """Return how many samples the first batches of a rank hold."""

    def batches(self, rank: int, done: int) -> Iterator[list[Run]]:
        """Yield the batches of a rank, but for the first few."""

    def rest(self, done: int) -> Offsets:
        """Return the numbers of the samples that are left when each rank has read so many batches, in the order of all ranks together."""

    def streams(self, rank: int) -> list[list[int]]:
        """Return the regions that each worker of a rank reads, in their order."""

    def turns(self, rank: int, done: int) -> Iterator[int]:
        """Yield which worker of a rank reads each of its batches, but for the first few."""


class FirstGrid:
    """The rules of the old tool: workers in global order get neighbouring parts, and a rank takes batches of its workers in turn."""

    def __init__(self, sizes: Sequence[int], rules: Rules, stretch: Stretch) -> None:
        self._rules, self._sizes, self._regions = rules, sizes, len(sizes)
        self._world, self._workers, self._batch, _ = stretch
        total = sum(sizes)
        self._padding = -total % (self._world * self._batch) if rules.pad and total else 0
        self._total = total + self._padding
        grid = Grid(self._world, 0, self._workers, 0, self._batch)
        self._counts = budgets(self._total, grid, rules.drops(self._world))
        self._begins = list(accumulate(self._counts, initial=0))

    @lazy
    def _dealt(self) -> tuple[Walk, list[int]]:
        """The order of the regions, and which of them are repeated: copies have numbers of their own, behind all others."""
        sizes, rules = self._sizes, self._rules
        order = region_order(len(sizes), shuffle=rules.shuffle, seed=rules.seed, epoch=rules.epoch)
        copies = list(_fill(sizes, order, self._padding)) if self._padding else []
        walk = Walk([*sizes, *(size for _, size in copies)], [*order, *range(len(sizes), len(sizes) + len(copies))])
        return walk, [region for region, _ in copies]

    @lazy
    def _starts(self) -> Offsets:
        return np.array([0, *accumulate(self._sizes)], np.int64)

    def counts_of(self, rank: int) -> list[int]:
        return self._counts[rank * self._workers : (rank + 1) * self._workers]

    def count(self, rank: int) -> int:
        return sum(self._batches_of(rank))

    def samples(self, rank: int, batches: int) -> int:
        return batches * self._batch if batches < self.count(rank) else sum(self.counts_of(rank))

    def batches(self, rank: int, done: int) -> Iterator[list[Run]]:
        streams = []
        for worker, batches in enumerate(taken(self._batches_of(rank), done), rank * self._workers):
            begin, end = self._begins[worker : worker + 2]
            streams.append(_batched(self._read(begin, end, batches * self._batch), self._batch))
        return (next(streams[worker]) for worker in self.turns(rank, done))

    def turns(self, rank: int, done: int) -> Iterator[int]:
        counts = self._batches_of(rank)
        given = taken(counts, done)
        for turn in range(min(given), max(counts)):
            for worker, (first, stop) in enumerate(zip(given, counts, strict=True)):
                if first <= turn < stop:
                    yield worker

    def _batches_of(self, rank: int) -> list[int]:
        return [-(-samples // self._batch) for samples in self.counts_of(rank)]

    def streams(self, rank: int) -> list[list[int]]:
        walk, _ = self._dealt
        workers = range(rank * self._workers, (rank + 1) * self._workers)
        return [[self._source(share) for share in walk.cut(*self._begins[worker : worker + 2])] for worker in workers]

    def shares(self, worker: int | None, skip: int) -> Iterator[tuple[int, int]]:
        """Yield the regions that a worker (None: one that reads all) reads, and how many samples of each, but for the first few."""
        for share in self._dealt[0].cut(*(self._begins[worker : worker + 2] if worker is not None else (0, self._total))):
            size = share.stop - share.start
            if skip < size:
                yield self._source(share), size - skip
            skip = max(skip - size, 0)

    def _read(self, begin: int, end: int, skip: int) -> Iterator[Run]:
        """Yield samples ``begin`` to ``end - 1`` of the walk in the order in which a worker reads them, but for the first few."""
        walk, _ = self._dealt
        for share in walk.cut(begin, end):
            size = share.stop - share.start
            if skip < size:
                yield self._source(share), self._offsets(share)[skip:]
            skip = max(skip - size, 0)

    def _source(self, share: Share) -> int:
        return share.region if share.region < self._regions else self._dealt[1][share.region - self._regions]

    def _offsets(self, share: Share) -> Offsets:
        rules = self._rules
        if not rules.shuffle:
            return np.arange(share.start, share.stop)
        return positions(share, self._regions, seed=rules.seed, epoch=rules.epoch, window=rules.window)

    def rest(self, done: int) -> Offsets:
        """Return the numbers of the samples that are left when each rank has read so many batches, in the order of all ranks together."""
        steps, parts = [], []
        for rank in range(self._world):
            samples, turns = [], []
            for worker in range(rank * self._workers, (rank + 1) * self._workers):
                numbers = self._numbers(*self._begins[worker : worker + 2])
                samples.append(numbers)
                turns.append(np.arange(len(numbers)) // self._batch)
            mine = np.concatenate(samples)[np.argsort(np.concatenate(turns), kind="stable")]
            parts.append(mine[done * self._batch :])
            steps.append(np.arange(len(mine))[done * self._batch :] // self._batch)
        planned = np.concatenate(parts)[np.argsort(np.concatenate(steps), kind="stable")]
        # What this grid would have left out comes last: another one may have room for it.
        rest = np.concatenate([planned, self._numbers(self._begins[-1], self._total)])
        return rest[rest >= 0]

    def numbers(self, worker: int | None, skip: int) -> Iterator[Offsets]:
        """Yield the samples of a worker (None: of all) but for the first few, as numbers over all regions."""
        begin, end = self._begins[worker : worker + 2] if worker is not None else (0, self._total)
        return (self._starts[region] + offsets for region, offsets in self._read(begin, end, skip))

    def left_out(self) -> Offsets:
        """Return the numbers of the samples that no worker reads."""
        numbers = self._numbers(self._begins[-1], self._total)
        return numbers[numbers >= 0]

    def _numbers(self, begin: int, end: int) -> Offsets:
        """Return numbers of samples over all regions, -1 for those that only fill up."""
        parts = [np.empty(0, np.int64)]
        for share in self._dealt[0].cut(begin, end):
            size = share.stop - share.start
            parts.append(self._starts[share.region] + self._offsets(share) if share.region < self._regions else np.full(size, -1))
        return np.concatenate(parts)


def taken(counts: Sequence[int], done: int) -> list[int]:
    """Return how many batches each worker has given when so many have been taken from all in turn, passing by those that have no more."""
    rounds = 0
    # The rounds that all took part in are found by halving: epochs have millions of batches.
    low, high = 0, max(counts, default=0)
    while low <= high:
        middle = (low + high) // 2
        if sum(min(number, middle) for number in counts) <= done:
            rounds, low = middle, middle + 1
        else:
            high = middle - 1
    given = [min(number, rounds) for number in counts]
    left = done - sum(given)
    for worker in islice([worker for worker, number in enumerate(counts) if number > rounds], left):
        given[worker] += 1
    return given


def _batched(runs: Iterable[Run], batch: int) -> Iterator[list[Run]]:
    held: list[Run] = []
    room = batch
    for region, offsets in runs:
        at = 0
        while at < len(offsets):
            part = offsets[at : at + room]
            held.append((region, part))
            at += len(part)
            room -= len(part)
            if not room:
                yield held
                held, room = [], batch
    if held:
        yield held


def _fill(sizes: Sequence[int], order: Sequence[int], wanted: int) -> Iterator[tuple[int, int]]:
    """Yield regions, and how many of their first samples, that make up the wanted number; ``sizes`` must not all be 0."""
    while wanted:
        for region in order:
            size = min(sizes[region], wanted)
            if size:
                yield region, size
            wanted -= size
