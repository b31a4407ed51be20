"""Reading in a given order: what ``sampler=`` or ``batch_sampler=`` of a loader yields, divided among the ranks.

A sampler is read by the process that iterates, group by group: a group has what all ranks read in one step. Each rank reads all of the
sampler, and takes its own part of every group.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

from liveset.errors import PositionOutOfRange, StateMismatch
from liveset.format import codec
from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Rules, Stretch
from liveset.read.options import check_position, check_positions
from liveset.read.plan import Offsets
from liveset.read.position import Position, size_of
from liveset.read.reader import Task
from liveset.read.state import Mark, Progress

By: TypeAlias = Literal["sampler", "batch_sampler"]


class Order:
    """What a loader was given to say what it reads.

    Args:
        sampler: what yields positions and keys, or lists of them that are whole batches.
        by: the argument that it was given as.
        dataset: what is read.

    Raises:
        ValueError: it can be read only once.
        TypeError: it cannot be read at all, or yields something else.
        PositionOutOfRange, KeyNotFound: a list has what the dataset has not.
    """

    def __init__(self, sampler: Any, by: By, dataset: StreamingDataset) -> None:
        self.sampler, self.by = sampler, by
        self._told: int | None = None
        self._checked: tuple[str, int] | None = None
        if isinstance(sampler, str | bytes) or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            wanted = "positions or keys" if by == "sampler" else "lists of positions or keys"
            raise TypeError(f"{by}= must yield {wanted}. Found {sampler!r}.")
        if isinstance(sampler, Iterator) and not hasattr(sampler, "set_epoch") and not _has_state(sampler):
            raise ValueError(f"{by}= is an iterator, which has one epoch: give a list, or an object whose __iter__ begins anew.")
        self.check(dataset)

    def check(self, dataset: StreamingDataset) -> None:
        """Look whether a version has all that a list names; what other samplers yield shows when it is read."""
        version = dataset.path, dataset.version
        if version == self._checked or not (isinstance(self.sampler, list | tuple) or hasattr(self.sampler, "tolist")):
            return
        Places(dataset).find(self.samples(self.take(self._iterate())))
        self._checked = version

    def take(self, units: Iterator[Any], count: int | None = None) -> list[Any]:
        """Return the next of what it yields, or all of it: samples, or lists of them."""
        taken = islice(units, count)
        return list(taken) if self.by == "sampler" else list(map(_batch, taken))

    def samples(self, units: list[Any]) -> list[Any]:
        """Return the samples that some units are."""
        return units if self.by == "sampler" else list(chain.from_iterable(units))

    def length(self, epoch: int) -> int | None:
        """Return how much it yields in an epoch; None if it does not tell."""
        if not hasattr(self.sampler, "__len__"):
            return None
        if epoch != self._told:
            self._tell(epoch)
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):  # that of torch has the length of another one, which may have none
            return None

    def _tell(self, epoch: int) -> None:
        """Tell the sampler which epoch begins; samplers count from 0."""
        self._told = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch - 1)

    def _iterate(self) -> Iterator[Any]:
        return iter(self.sampler.tolist() if hasattr(self.sampler, "tolist") else self.sampler)

    def draw(self, epoch: int, stretches: Sequence[Stretch], mark: Mark | None) -> Drawing:
        """Begin an epoch, or the rest of one.

        Raises:
            StateMismatch: the sampler has not yielded what it did when the state was taken.
        """
        self._tell(epoch)
        units = self._iterate()
        begun = any(stretch.batches for stretch in stretches)
        if begun and mark is not None and mark.sampler is not None:
            if _has_state(units):
                units.load_state_dict(mark.sampler)  # type: ignore[attr-defined]
            elif _has_state(self.sampler):
                self.sampler.load_state_dict(mark.sampler)
                units = self._iterate()
            else:
                raise StateMismatch(f"the state holds one of its {self.by}, and the {self.by} of this loader has no load_state_dict().")
            return Drawing(self, units, mark.digest)
        drawing = Drawing(self, units, "")
        for world, _, batch, batches in stretches:
            for _ in range(batches):
                drawing.take(world * batch)
        if begun and mark is not None and drawing.digest != mark.digest:
            raise StateMismatch(
                f"the {self.by} does not yield what it did in epoch {epoch} when the state was taken, so that there is no way to go on: it "
                "must do so whenever its set_epoch() has been told the same epoch, or have a state_dict() and a load_state_dict()."
            )
        return drawing


class Drawing:
    """One pass over a sampler."""

    def __init__(self, order: Order, units: Iterator[Any], digest: str) -> None:
        self.digest = digest
        self._order, self._units = order, units
        self._stateful: Any = next((each for each in (units, order.sampler) if _has_state(each)), None)

    def take(self, count: int) -> list[Any]:
        """Return the next units; fewer at the end."""
        group = self._order.take(self._units, count)
        if group:
            ends = array("q", map(len, group)) if self._order.by == "batch_sampler" else array("q")
            self.digest = _digest(self.digest, self._order.samples(group), ends)
        return group

    def mark(self) -> Mark:
        """Return how far it is."""
        return Mark(self._order.by, self.digest, self._stateful.state_dict() if self._stateful is not None else None)


def _has_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _batch(unit: Any) -> list[Any]:
    if isinstance(unit, str | bytes) or not hasattr(unit, "__iter__") or not getattr(unit, "ndim", 1):
        if not isinstance(unit, str | bytes):
            check_position(unit)
        raise TypeError(f"batch_sampler= yields {unit!r:.80}, which is no list: give single positions or keys as sampler=.")
    samples: list[Any] = unit.tolist() if hasattr(unit, "tolist") else list(unit)
    if not samples:
        raise ValueError("batch_sampler= yields a batch without samples.")
    return samples


def _digest(before: str, samples: Sequence[Any], ends: array[int]) -> str:
    try:
        data = array("q", samples).tobytes()
    except (TypeError, OverflowError):  # keys
        data = "\0".join(map(str, samples)).encode(errors="surrogatepass")
    return codec.checksum([before.encode(), ends.tobytes(), data])


class OrderedEpoch:
    """The batches of an epoch whose order is given: to a loader what ``Epoch`` is.

    Args:
        order: what is read.
        rules: of the epoch; seed, shuffle and window have no meaning here.
        stretches: the grids that read it, whose batches are single units of a ``batch_sampler``.
        mark: where the sampler was when the last one had read as much as it says.
    """

    def __init__(self, order: Order, rules: Rules, stretches: Sequence[Stretch], mark: Mark | None) -> None:
        self.order, self.rules, self.stretches, self.mark = order, rules, tuple(stretches), mark

    @property
    def earlier(self) -> int:
        """Batches of each rank that grids before this one read."""
        return sum(stretch.batches for stretch in self.stretches[:-1])

    def known_count(self, rank: int) -> int | None:
        """Return how many batches a rank has on this grid; None if the sampler has no length."""
        length = self.order.length(self.rules.epoch)
        if length is None:
            return None
        *before, (world, _, batch, _) = self.stretches
        left = max(length - sum(stretch.world * stretch.batch * stretch.batches for stretch in before), 0)
        whole, part = divmod(left, world * batch)
        if self.rules.drops(world):
            return whole
        return whole + (part > (0 if self.rules.pad else rank * batch))

    def count(self, rank: int) -> int:
        """Return how many batches a rank has on this grid; ``TypeError`` if the sampler has no length."""
        count = self.known_count(rank)
        if count is None:
            raise TypeError(f"the {self.order.by} has no length, so that nobody knows how many batches there are.")
        return count

    def check_ranks(self, rank: int) -> None:
        """Look whether several ranks can read this; ``ValueError`` if not."""
        order, world = self.order, self.stretches[-1].world
        for sampler in (order.sampler, getattr(order.sampler, "sampler", None), getattr(order.sampler, "batch_sampler", None)):
            if isinstance(parts := getattr(sampler, "num_replicas", None), int) and parts > 1:
                raise ValueError(
                    f"{order.by}= yields one of {parts} parts (num_replicas of {type(sampler).__name__}), and this loader divides what it "
                    f"yields among {world} ranks: give it the whole order, or rank=0, world_size=1."
                )
        if len(self.stretches) == 1 and self.known_count(rank) == 0 and self.rules.drops(world) and order.length(self.rules.epoch):
            raise ValueError(
                f"what {order.by}= yields ({order.length(self.rules.epoch):,} in all) is not one batch for each of {world} ranks, so that "
                "there is nothing to read. Use pad=True (which repeats some), or drop_last=False (then ranks have different numbers of "
                "batches)."
            )

    def draw(self) -> Drawing:
        """Begin to read the sampler."""
        return self.order.draw(self.rules.epoch, self.stretches, self.mark)

    def batches(self, drawing: Drawing, rank: int) -> Iterator[tuple[list[Any], Mark]]:
        """Yield the samples of the batches of a rank that are left, and where the sampler is after each."""
        world, _, batch, _ = self.stretches[-1]
        width = world * batch
        while group := drawing.take(width):
            if len(group) < width:
                if self.rules.drops(world):
                    return
                if self.rules.pad:
                    group = list(islice(cycle(group), width))
            if mine := group[rank * batch : (rank + 1) * batch]:
                yield self.order.samples(mine), drawing.mark()


class OrderedPosition(Position):
    """Where a pass is whose order is given."""

    epoch: OrderedEpoch  # type: ignore[assignment]

    def __init__(self, dataset: StreamingDataset, epoch: OrderedEpoch, rank: int, samples: int) -> None:
        super().__init__(dataset, epoch, rank)  # type: ignore[arg-type]
        self._samples, self._mark = samples, epoch.mark or Mark(epoch.order.by, "", None)
        # Of the batches that were planned and not had yet.
        self._planned: deque[tuple[int, Mark]] = deque()
        self._batches: Iterator[tuple[list[Any], Mark]] = iter(())

    def progress(self) -> Progress:
        *before, now = self.epoch.stretches
        stretches = (*before, now._replace(batches=self.batches))
        return Progress(self.epoch.rules, stretches, self.rank, self._samples, self.finished, self._mark)

    def took(self) -> None:
        super().took()
        samples, self._mark = self._planned.popleft()
        self._samples += samples

    def begin(self) -> None:
        self._drawing = self.epoch.draw()
        self._batches = self.epoch.batches(self._drawing, self.rank)

    def terms(self) -> dict[str, Any]:
        first = list(islice(self._batches, 1))
        self._batches = chain(first, self._batches)
        rules, by = self.epoch.rules, self.epoch.order.by
        named = {"drop_last": rules.drop_last, "pad": rules.pad, "order": f"that of {by}= ({self._drawing.digest})"}
        return named | {"batch_size": self.epoch.stretches[-1].batch}

    def tasks(self, sizes: deque[float], readers: int = 0) -> Iterator[Task]:
        assert isinstance(self.dataset, StreamingDataset)
        places = Places(self.dataset)
        while True:
            try:
                samples, mark = next(self._batches)
                task = places.task(samples)
            except StopIteration:
                return
            except Exception as error:
                self.failed = error
                return
            sizes.append(size_of(self.dataset, task.places))
            self._planned.append((len(samples), mark))
            yield task


class Places:
    """Finds the samples of one version by position or key."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._starts = np.cumsum([0, *dataset.sizes])
        regions = np.array(dataset.layout.regions, np.int64).reshape(-1, 3)
        self._chunks, self._first, self._slots = regions[:, 0], regions[:, 1], dataset.layout.slots

    def task(self, samples: Sequence[Any]) -> Task:
        """Return what reads a batch: chunk by chunk, and from the first to the last in each."""
        chunks, slots = self.find(samples)
        order = np.lexsort((slots, chunks))
        chunks, slots = chunks[order], slots[order]
        cuts = [0, *(np.flatnonzero(chunks[1:] != chunks[:-1]) + 1).tolist(), len(chunks)]
        runs = [(int(chunks[a]), slots[a:b]) for a, b in pairwise(cuts)]
        return Task(runs, order=order)

    def find(self, samples: Sequence[Any]) -> tuple[Offsets, Offsets]:
        """Return chunks and slots of samples, in their order.

        Raises:
            PositionOutOfRange, KeyNotFound: there is no such sample.
            TypeError: something is neither a position nor a key.
        """
        named = np.fromiter((isinstance(sample, str | bytes) for sample in samples), np.bool_, len(samples))
        if not named.any():
            return self._at(samples)
        found = np.empty((2, len(samples)), np.int64)
        keys = [sample for sample, name in zip(samples, named.tolist(), strict=True) if name]
        found[:, named] = np.array(self._dataset.keys.places(keys), np.int64).T
        if len(keys) < len(samples):
            found[:, ~named] = self._at([sample for sample, name in zip(samples, named.tolist(), strict=True) if not name])
        return found[0], found[1]

    def _at(self, samples: Sequence[Any]) -> tuple[Offsets, Offsets]:
        positions, length = _numbers(samples), self._dataset.samples
        positions = np.where(positions < 0, positions + length, positions)
        wrong = np.flatnonzero((positions < 0) | (positions >= length))
        if len(wrong):
            raise PositionOutOfRange(f"no sample at position {samples[wrong[0]]} of {self._dataset.path}, which has {length:,}.")
        regions = np.searchsorted(self._starts, positions, "right") - 1
        chunks, slots = self._chunks[regions], positions - self._starts[regions] + self._first[regions]
        if self._slots is not None:
            for chunk in np.unique(chunks).tolist():
                slots[chunks == chunk] = self._slots[chunk][slots[chunks == chunk]]
        return chunks, slots


def _numbers(samples: Sequence[Any]) -> Offsets:
    positions = check_positions(samples)
    try:
        return np.array(array("q", positions), np.int64)
    except OverflowError:
        raise PositionOutOfRange(f"no sample at position {max(positions, key=abs)}.") from None
