"""One epoch of several datasets: which samples of which of them make up each batch. Pure functions, as for one dataset.

The samples of all datasets are numbered through, and each dataset is dealt out to the workers by the rules for one. What a worker does with
its parts is up to a *blend*: it takes from one of them at random for each sample (``Stratified``) or for each batch (``PerStream``), or one
from each (``Zipped``).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, repeat
from typing import Any, TypeAlias

import numpy as np

from liveset.errors import StateMismatch
from liveset.format.lazy import lazy
from liveset.read.epoch import Epoch, FirstGrid, Rules, Run, Stretch, taken

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Samples: their numbers, or a row for each where several make up one."""

ENDLESS = 1 << 60
"""Batches of a worker that never ends."""
# Choices that are drawn at once.
_BLOCK = 8192
ROW = 2
"""Columns of a row before the numbers of its samples: the epoch, and a number of the row in it."""
_NOTHING = np.empty(0, np.int64)
# Rows of a worker are numbered from a multiple of this.
_PER_WORKER = 1 << 40


@dataclass(frozen=True, slots=True)
class MixRules(Rules):
    """What the order of an epoch of several datasets depends on, besides their regions and the readers.

    ``shuffle`` and ``window`` mean nothing here: each dataset has its own.

    Attributes:
        members: the rules of each dataset.
        weights: of the datasets; None for their lengths.
        to_the_end: go on until all datasets are read, not only the first.
        batches: samples of each dataset in a batch, where batches are of one dataset each.
        zipped: take one sample from each dataset.
        length: samples per rank, for which datasets are begun again; -1 for no end, None for the length of the shortest.
        go_on: an epoch begins where the one before ended, in each dataset.
    """

    members: tuple[Rules, ...] = ()
    weights: tuple[float, ...] | None = None
    to_the_end: bool = True
    batches: tuple[int, ...] | None = None
    zipped: bool = False
    length: int | None = None
    go_on: bool = True

    @classmethod
    def of(cls, seed: int, epoch: int, members: Sequence[Rules], **others: Any) -> MixRules:
        """Return the rules of datasets with these rules."""
        dropped = False if others.get("length") is None and any(rules.drop_last is False for rules in members) else None
        return cls(seed, epoch, False, 0, dropped, members[0].pad, members=tuple(members), **others)

    def drops(self, world: int) -> bool:
        """Whether ranks are made equal by leaving samples out."""
        return self.length is None and all(rules.drops(world) for rules in self.members)


class MixedEpoch(Epoch):
    """The batches of one epoch of several datasets; runs are of regions that are numbered over all of them.

    Args:
        sizes: of the regions of each dataset.
        rules: of the order.
        stretches: the grids that read it.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], rules: MixRules, stretches: Sequence[Stretch]) -> None:
        super().__init__([size for each in sizes for size in each], rules, stretches)
        self._members, self._mix = sizes, rules
        if len(stretches) > 1 and (reason := self._why_not()):
            before, now = stretches[-2:]
            raise StateMismatch(
                f"the state is of {before.world} ranks with batches of {before.batch} samples, and {reason}: go on with these instead of "
                f"{now.world} ranks and {now.batch} samples (any number of workers will do), or start afresh without load_state_dict()."
            )

    def _why_not(self) -> str:
        if self._mix.length is not None:
            return "datasets that are begun again have no rest that could be dealt out anew"
        return "batches of one dataset each cannot be dealt out anew" if self._mix.batches else ""

    def count(self, rank: int) -> int:
        if self._mix.length == -1:
            raise TypeError("length=inf: it never ends, and has no length.")
        return super().count(rank)

    def worker(self, number: int) -> Iterator[list[Run]]:
        """Yield the batches of one worker, counted over all ranks."""
        return map(self.runs, self._first.blends[number].batches(0))

    def windows(self, rank: int, width: int) -> Iterator[list[int]]:
        """Yield for each batch of a rank the regions that its worker is in, and that it reads next: so many of each dataset.

        Only where datasets are begun again: others have ``streams``.
        """
        return self._first.windows(rank, self._now.batches, width) if self._mix.length is not None else iter(())

    def windows_of(self, number: int, width: int) -> Iterator[list[int]]:
        """Yield the same for one worker, counted over all ranks, from its first batch on."""
        return self._first.windows_of(number, 0, width) if self._mix.length is not None else iter(())

    @lazy
    def _first(self) -> _MixedGrid:
        return _MixedGrid(self._members, self._mix, self.stretches[0], self.runs)

    def runs(self, samples: Numbers) -> list[Run]:
        return [(0, samples)] if self._mix.zipped else super().runs(samples)

    def _regions_of(self, samples: Numbers) -> list[int]:
        firsts = list(accumulate(map(len, self._members)))
        regions = super()._regions_of(samples[:, ROW:].T.ravel() if self._mix.zipped else samples)
        return sorted(regions, key=lambda region: bisect_right(firsts, region))  # dataset by dataset


class _MixedGrid:
    """The workers of the grid that an epoch began on."""

    def __init__(self, sizes: Sequence[Sequence[int]], rules: MixRules, stretch: Stretch, runs: Any) -> None:
        self._world, self._workers, batch, _ = stretch
        self._batch, self._runs = batch, runs
        bases = accumulate((sum(each) for each in sizes), initial=0)
        widths = rules.batches or tuple(repeat(batch, len(sizes)))
        self._members = [
            _Member(each, member, stretch._replace(batch=width), base)
            for each, member, width, base in zip(sizes, rules.members, widths, bases, strict=False)
        ]
        self._rules = rules

    @lazy
    def blends(self) -> list[Blend]:
        """What the workers of all ranks read."""
        return [self._blend(worker) for worker in range(self._world * self._workers)]

    def _blend(self, worker: int) -> Blend:
        rules = self._rules
        if rules.zipped:
            return Zipped(self._members, rules, worker, self._workers, self._batch)
        rank = worker // self._workers
        weights = rules.weights or [member.of_rank(rank) for member in self._members]
        if rules.batches:
            return PerStream(self._members, rules, worker, weights, self._batch)
        return Stratified(self._members, rules, worker, weights, self._batch, drop=rules.drops(self._world))

    def _of_rank(self, rank: int) -> list[Blend]:
        return self.blends[rank * self._workers : (rank + 1) * self._workers]

    def count(self, rank: int) -> int:
        return sum(blend.count for blend in self._of_rank(rank))

    def samples(self, rank: int, batches: int) -> int:
        """Return how many samples the first batches of a rank hold."""
        blends = self._of_rank(rank)
        given = taken([blend.count for blend in blends], batches)
        return sum(blend.samples(number) for blend, number in zip(blends, given, strict=True))

    def batches(self, rank: int, done: int) -> Iterator[list[Run]]:
        return map(self._runs, self._numbers(rank, done))

    def streams(self, rank: int) -> list[list[int]]:
        """Return the regions that each worker of a rank reads, dataset by dataset; nothing where datasets are begun again (``windows``)."""
        if self._rules.length is not None:
            return []
        firsts = accumulate((member.regions for member in self._members), initial=0)
        found: list[list[int]] = [[] for _ in range(self._workers)]
        for member, first in zip(self._members, firsts, strict=False):
            for stream, regions in zip(found, member.streams(rank), strict=True):
                stream += [first + region for region in regions]
        return found

    def turns(self, rank: int, done: int) -> Iterator[int]:
        counts = [blend.count for blend in self._of_rank(rank)]
        given = taken(counts, done)
        for turn in count(min(given)):
            if turn >= max(counts):
                return
            for worker, (begin, stop) in enumerate(zip(given, counts, strict=True)):
                if begin <= turn < stop:
                    yield worker

    def _numbers(self, rank: int, done: int) -> Iterator[Numbers]:
        blends = self._of_rank(rank)
        given = taken([blend.count for blend in blends], done)
        streams = [blend.batches(begin) for blend, begin in zip(blends, given, strict=True)]
        return (next(streams[worker]) for worker in self.turns(rank, done))

    def windows(self, rank: int, done: int, width: int) -> Iterator[list[int]]:
        """Yield for each batch, but for the first few, the regions that its worker is in and reads next."""
        given = taken([blend.count for blend in self._of_rank(rank)], done)
        streams = [self.windows_of(rank * self._workers + worker, begin, width) for worker, begin in enumerate(given)]
        return (next(streams[worker]) for worker in self.turns(rank, done))

    def windows_of(self, number: int, done: int, width: int) -> Iterator[list[int]]:
        """Yield the same for one worker of all ranks."""
        blend = self.blends[number]
        assert isinstance(blend, Zipped)
        firsts = list(accumulate((member.regions for member in self._members), initial=0))
        for windows in blend.windows(done, width):
            yield [first + region for first, window in zip(firsts, windows, strict=False) for region in window]

    def rest(self, done: int) -> Numbers:
        """Return the samples that are left when each rank has read so many batches, in the order of all ranks together."""
        ranks = [list(self._numbers(rank, 0)) for rank in range(self._world)]
        steps = range(max(map(len, ranks), default=0))
        had, left = ([b[step] for step in part for b in ranks if step < len(b)] for part in (steps[:done], steps[done:]))
        if self._rules.zipped:
            return np.concatenate([np.empty((0, ROW + len(self._members)), np.int64), *left])
        # What this grid would have left out comes last, where all is to be read: another one may have room for it.
        spare = [member.left_out() for member in self._members] if self._rules.to_the_end else []
        every = np.concatenate([_NOTHING, *had, *left, *spare])
        # Of a sample that is repeated to fill up, the first place counts.
        first = np.sort(np.unique(every, return_index=True)[1])
        return every[first[first >= sum(map(len, had))]]


class _Member:
    """One of the datasets, dealt out to workers; its samples are counted from ``base``."""

    def __init__(self, sizes: Sequence[int], rules: Rules, stretch: Stretch, base: int) -> None:
        self._sizes, self._rules, self._stretch, self._base = sizes, rules, stretch, base
        self._grid = FirstGrid(sizes, rules, stretch)
        self._cycles: dict[int, FirstGrid] = {}
        self.total, self.regions = sum(sizes), len(sizes)

    def streams(self, rank: int) -> list[list[int]]:
        """Return the regions that each worker of a rank reads in this epoch, in their order."""
        return self._grid.streams(rank)

    def of_rank(self, rank: int) -> int:
        return sum(self._grid.counts_of(rank))

    def of_worker(self, worker: int) -> int:
        rank, number = divmod(worker, self._stretch.workers)
        return self._grid.counts_of(rank)[number]

    def stream(self, worker: int, skip: int) -> Tap:
        """Return the samples of a worker in this epoch, but for the first few."""
        return Tap(self._base + numbers for numbers in self._grid.numbers(worker, skip))

    def endless(self, worker: int, skip: int) -> Tap:
        """Return the samples of a worker in all epochs from the first on, but for the first few."""
        return Tap(self._all_epochs(worker, skip))

    def _all_epochs(self, worker: int, skip: int) -> Iterator[Numbers]:
        size = self.of_worker(worker)
        cycle, skip = divmod(skip, size or self.total)
        for epoch in count(cycle + 1):
            grid = self._cycles.get(epoch)
            if grid is None:
                grid = FirstGrid(self._sizes, replace(self._rules, epoch=epoch), self._stretch)
                # Workers are in about the same epoch; others would only be kept for nothing.
                self._cycles = {epoch - 1: self._cycles[epoch - 1]} if epoch - 1 in self._cycles else {}
                self._cycles[epoch] = grid
            # Fewer samples than workers: each that would have none reads them all.
            yield from (self._base + numbers for numbers in grid.numbers(worker if size else None, skip))
            skip = 0

    def regions_again(self, worker: int, skip: int) -> Iterator[tuple[int, int]]:
        """Yield the regions that a worker reads in all epochs from the first on, and how many samples of each, but for the first few."""
        size = self.of_worker(worker)
        cycle, skip = divmod(skip, size or self.total)
        for epoch in count(cycle + 1):  # not kept: it is looked up to a window before it is read
            yield from FirstGrid(self._sizes, replace(self._rules, epoch=epoch), self._stretch).shares(worker if size else None, skip)
            skip = 0

    def left_out(self) -> Numbers:
        return self._base + self._grid.left_out()


class _Window:
    """The next few regions of a worker.

    Args:
        parts: the regions that it reads, endless, and how many samples of each.
        total: how many samples it reads in all.
        width: how many regions are to be shown.
    """

    def __init__(self, parts: Iterator[tuple[int, int]], total: int, width: int) -> None:
        self._parts = _up_to(total, parts)
        self._held = deque(islice(self._parts, width))
        self._left = self._held[0][1] if self._held else 0

    def move(self, samples: int) -> list[int]:
        """Go on by so many samples, and return the region of the last one and those after it."""
        while samples > self._left:
            samples -= self._left
            self._held.popleft()
            self._held.extend(islice(self._parts, 1))
            self._left = self._held[0][1]
        self._left -= samples
        return [region for region, _ in self._held]


def _up_to(total: int, parts: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield regions until there are so many samples in them."""
    while total > 0:
        region, size = next(parts)
        yield region, min(size, total)
        total -= size


class Tap:
    """Hands out what arrays hold, in any portions."""

    def __init__(self, parts: Iterator[Numbers]) -> None:
        self._parts, self._part = parts, _NOTHING

    def take(self, wanted: int) -> Numbers:
        """Return the next few numbers; fewer at the end."""
        found = []
        while wanted:
            if not len(self._part):
                part = next(self._parts, None)
                if part is None:
                    break
                self._part = part
            found.append(self._part[:wanted])
            self._part = self._part[wanted:]
            wanted -= len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate([_NOTHING, *found])


class Blend(ABC):
    """What one worker makes of its parts of the datasets."""

    count: int
    """Number of its batches."""

    @abstractmethod
    def samples(self, batches: int) -> int:
        """Return how many samples its first batches hold."""

    @abstractmethod
    def batches(self, done: int) -> Iterator[Numbers]:
        """Yield its batches, but for the first few."""


class Even(Blend):
    """All batches but the last one are of the same size."""

    _total: int
    _batch: int

    @property
    def count(self) -> int:  # type: ignore[override]
        return -(-self._total // self._batch)

    def samples(self, batches: int) -> int:
        return min(batches * self._batch, self._total)


class Stratified(Even):
    """A dataset is chosen for each sample."""

    def __init__(
        self, members: Sequence[_Member], rules: MixRules, worker: int, weights: Sequence[float], batch: int, *, drop: bool
    ) -> None:
        self._members, self._worker, self._weights, self._batch = members, worker, weights, batch
        self._seed, self._all, self._drop = rules.seed, rules.to_the_end, drop
        self._sizes = [member.of_worker(worker) for member in members]

    @lazy
    def _total(self) -> int:
        total = sum(self._sizes) if self._all else sum(map(len, self._choices()))
        return total - total % self._batch if self._drop else total

    def _choices(self) -> Iterator[Numbers]:
        return choices(self._sizes, self._weights, self._seed, to_the_end=self._all)

    def batches(self, done: int) -> Iterator[Numbers]:
        skip, end = self.samples(done), self._total
        had = np.zeros(len(self._members), np.int64)
        held: list[Numbers] = []
        taps: list[Tap] = []
        at = room = 0
        for block in self._choices():
            chosen = block[: end - at]
            at += len(chosen)
            if skip:
                passed, chosen = chosen[:skip], chosen[skip:]
                skip -= len(passed)
                had += np.bincount(passed, minlength=len(had))
            if not len(chosen):
                continue
            taps = taps or [member.stream(self._worker, int(n)) for member, n in zip(self._members, had, strict=True)]
            numbers = np.empty(len(chosen), np.int64)
            for number, tap in enumerate(taps):
                places = np.flatnonzero(chosen == number)
                if len(places):
                    numbers[places] = tap.take(len(places))
            while len(numbers):
                room = room or self._batch
                held.append(numbers[:room])
                numbers = numbers[room:]
                room -= len(held[-1])
                if not room:
                    yield np.concatenate(held)
                    held = []
        if held:
            yield np.concatenate(held)


class PerStream(Blend):
    """A dataset is chosen for each batch, another one than before; where it ends, its last batch is short."""

    def __init__(self, members: Sequence[_Member], rules: MixRules, worker: int, weights: Sequence[float], batch: int) -> None:
        self._members, self._worker, self._weights = members, worker, weights
        self._widths = rules.batches or (batch,) * len(members)
        self._seed, self._all = rules.seed, rules.to_the_end
        self._sizes = [member.of_worker(worker) for member in members]

    def _choices(self) -> Iterator[tuple[int, int]]:
        return batch_choices(self._sizes, self._weights, self._widths, self._seed, to_the_end=self._all)

    @lazy
    def count(self) -> int:
        if self._all:
            return sum(-(-size // width) for size, width in zip(self._sizes, self._widths, strict=True))
        return sum(1 for _ in self._choices())

    def samples(self, batches: int) -> int:
        return sum(size for _, size in islice(self._choices(), batches))

    def batches(self, done: int) -> Iterator[Numbers]:
        chosen = self._choices()
        had = [0] * len(self._members)
        for number, size in islice(chosen, done):
            had[number] += size
        taps = [member.stream(self._worker, skip) for member, skip in zip(self._members, had, strict=True)]
        return (taps[number].take(size) for number, size in chosen)


class Zipped(Even):
    """One sample from each dataset; rows of the epoch, a number of the row in it, and the numbers of the samples."""

    def __init__(self, members: Sequence[_Member], rules: MixRules, worker: int, workers: int, batch: int) -> None:
        self._members, self._worker, self._batch, self._epoch = members, worker, batch, rules.epoch
        self._begin = 0
        if rules.length is None:
            self._cycles, self._total = False, min(member.of_worker(worker) for member in members)
        elif rules.length == -1:
            self._cycles, self._total = True, ENDLESS * batch
        else:
            even, extra = divmod(rules.length, workers)
            self._cycles, self._total = True, even + (worker % workers < extra)
            self._begin = (rules.epoch - 1) * self._total if rules.go_on else 0

    def batches(self, done: int) -> Iterator[Numbers]:
        at, begin = self.samples(done), self._begin
        if self._cycles:
            taps = [member.endless(self._worker, begin + at) for member in self._members]
        else:
            taps = [member.stream(self._worker, at) for member in self._members]
        while at < self._total:
            size = min(self._batch, self._total - at)
            rows = np.arange(at, at + size) + self._worker * _PER_WORKER
            yield np.stack([np.full(size, self._epoch), rows, *(tap.take(size) for tap in taps)], axis=1)
            at += size

    def windows(self, done: int, width: int) -> Iterator[list[list[int]]]:
        """Yield for each batch, but for the first few, the next regions of each dataset, where these are begun again."""
        at = self.samples(done)
        rest = self._total - at
        windows = [_Window(member.regions_again(self._worker, self._begin + at), rest, width) for member in self._members]
        while at < self._total:
            size = min(self._batch, self._total - at)
            yield [window.move(size) for window in windows]
            at += size


def choices(sizes: Sequence[int], weights: Sequence[float], seed: int, *, to_the_end: bool) -> Iterator[Numbers]:
    """Yield numbers of datasets, as ``random.Random(seed).choices`` draws them one by one, in blocks.

    A dataset that is drawn when it has no more samples is left out from there on, or ends it all.
    """
    draw = _generator(seed)
    left = np.array(sizes, np.int64)
    alive = [number for number, weight in enumerate(weights) if weight > 0]
    drawn = draw.random_sample(0)
    while alive:
        if len(alive) == 1:
            (number,) = alive
            for at in range(0, int(left[number]), _BLOCK):
                yield np.full(min(_BLOCK, int(left[number]) - at), number)
            return
        if not len(drawn):
            drawn = draw.random_sample(_BLOCK)
        sums = np.array(list(accumulate(weights[number] for number in alive)))
        chosen = np.array(alive)[np.minimum(np.searchsorted(sums, drawn * sums[-1], "right"), len(alive) - 1)]
        end, out = len(chosen), None
        for number in alive:
            places = np.flatnonzero(chosen == number)
            if len(places) > left[number] and places[left[number]] < end:
                end, out = int(places[left[number]]), number
        yield chosen[:end]
        left -= np.bincount(chosen[:end], minlength=len(left))
        drawn = drawn[end + 1 :]
        if out is not None:
            if not to_the_end:
                return
            alive.remove(out)


def _generator(seed: int) -> np.random.RandomState:
    """Return numpy's generator in the state of Python's, of which it is the same."""
    _, state, _ = random.Random(seed).getstate()
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
    return generator


def batch_choices(
    sizes: Sequence[int], weights: Sequence[float], widths: Sequence[int], seed: int, *, to_the_end: bool
) -> Iterator[tuple[int, int]]:
    """Yield a dataset for each batch, never the same twice in a row while there is another one, and the size of the batch."""
    draw = random.Random(seed)
    left = list(sizes)
    alive = [number for number, weight in enumerate(weights) if weight > 0]
    last = -1
    while alive:
        number = alive[0]
        if len(alive) > 1:
            shares = [weights[each] for each in alive]
            while (number := draw.choices(alive, shares)[0]) == last:
                pass
        size = min(left[number], widths[number])
        last = number
        if size:
            left[number] -= size
            yield number, size
        if size < widths[number]:
            if not to_the_end:
                return
            alive.remove(number)
