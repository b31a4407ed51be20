"""Where a pass of a loader is, and what it has still to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from liveset.read.epoch import Epoch
from liveset.read.reader import Task
from liveset.read.state import Progress
from liveset.read.training import Training

# How many chunks a worker is told of, the one that it reads included.
AHEAD = 9


class Position:
    """Where a pass is: what a state tells of it, as long as the loader does not begin another one.

    Attributes:
        failed: why there are no more tasks, where that is not the end of the epoch. Raised by ``tasks``, it would come before the batches
            that are being read, and out of the middle of torch.
    """

    failed: BaseException | None = None

    def __init__(self, dataset: Training, epoch: Epoch, rank: int) -> None:
        self.dataset, self.epoch, self.rank = dataset, epoch, rank
        self.batches, self.finished = epoch.stretches[-1].batches, False

    @property
    def count(self) -> int:
        """Batches of the whole epoch, with those of earlier grids."""
        return self.epoch.earlier + self.epoch.count(self.rank)

    @property
    def unread(self) -> bool:
        """Whether the pass has just begun."""
        return not self.finished and self.batches == self.epoch.stretches[-1].batches

    def progress(self) -> Progress:
        """Return what a state tells."""
        *before, now = self.epoch.stretches
        samples = sum(stretch.batch * stretch.batches for stretch in before) + self.epoch.samples(self.rank, self.batches)
        stretches = (*before, now._replace(batches=self.batches))
        return Progress(self.epoch.rules, stretches, self.rank, samples, self.finished)

    def took(self) -> None:
        """Count a batch that the loop has had."""
        self.batches += 1

    def begin(self) -> None:
        """Make ready to read, before the first batch is asked for."""

    def tasks(self, sizes: deque[float]) -> Iterator[Task]:
        """Yield the tasks of the pass, and note how large the batches are."""
        dataset = self.dataset
        following = dataset.following(self.epoch, self.rank)
        turns = self.epoch.turns(self.rank) if following else iter(())
        for runs in self.epoch.batches(self.rank):
            places = dataset.places(runs)
            sizes.append(size_of(dataset, places))
            yield Task(places, _chains(following[next(turns)], dataset.ends(places)) if following else ())


def size_of(dataset: Training, places: list[Any]) -> float:
    """Return about how many bytes the samples in these places take."""
    return sum(dataset.sample_size(chunk) * len(slots) for chunk, slots in places)


def _chains(following: Mapping[int, int], ends: Iterable[int]) -> tuple[int, ...]:
    found = []
    for chunk in ends:
        found.append(chunk)
        for _ in range(AHEAD - 1):
            if (after := following.get(found[-1])) is None:
                break
            found.append(after)
    return tuple(found)
