"""Where a pass of a loader is, and what it has still to read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import cycle, groupby
from typing import Any

from liveset.read.agreement import DATASET_ORDER
from liveset.read.epoch import Epoch
from liveset.read.mixture import AHEAD, CHUNKS
from liveset.read.reader import Task
from liveset.read.state import Progress
from liveset.read.training import Training, merged

# What rules are called where they are given.
_NAMES = {"window": "item_shuffle_window", "to_the_end": "iterate_over_all", "batches": "batch_size of each dataset", "go_on": "resume"}


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

    def terms(self) -> dict[str, Any]:
        """Return what must be the same on all ranks that read this epoch, by the names of the arguments that say it."""
        _, workers, batch, _ = self.epoch.stretches[-1]
        terms = {"order": DATASET_ORDER, "batch_size": batch, "num_workers": workers}
        rules = asdict(self.epoch.rules)
        members = rules.pop("members", ())
        terms |= {_NAMES.get(name, name): value for name, value in rules.items()}
        for number, of_dataset in enumerate(members):
            terms |= {f"{_NAMES.get(name, name)} of dataset {number}": value for name, value in of_dataset.items()}
        return terms

    def begin(self) -> None:
        """Make ready to read, before the first batch is asked for."""

    def tasks(self, sizes: deque[float], readers: int = 0) -> Iterator[Task]:
        """Yield the tasks of the pass, and note how large the batches are.

        Args:
            sizes: of the batches.
            readers: how many there are that take the tasks in turn; 0 for one for each worker of the plan.
        """
        dataset, epoch = self.dataset, self.epoch
        following = dataset.following(epoch, self.rank)
        windows = dataset.windows(epoch, self.rank, AHEAD)
        turns = epoch.turns(self.rank) if any(member.remote for member in dataset.members) else None
        coming = cycle([_Coming() for _ in range(readers)]) if readers else None
        for runs in epoch.batches(self.rank):
            places = dataset.places(runs)
            sizes.append(size_of(dataset, places))
            if turns is None:
                yield Task(places)
                continue
            worker = next(turns)
            ahead = _chains(following[worker], dataset.ends(places)) if following else next(windows, ())
            yield Task(places, next(coming).tell(worker, ahead) if coming is not None else ahead)


class _Coming:
    """The chunks that one reader is going to read, who has the batches of several workers of the plan in turn, or of one."""

    def __init__(self) -> None:
        # Of each dataset, worker by worker, those that have been longest in their chunk first; and when each was told of last.
        self._chains: dict[int, dict[int, tuple[int, list[int]]]] = {}
        self._told: Counter[int] = Counter()

    def tell(self, worker: int, ahead: tuple[int, ...]) -> tuple[int, ...]:
        """Return what the reader is told with a batch of a worker who is going to read these chunks."""
        for dataset, each in groupby(ahead, key=lambda chunk: chunk >> CHUNKS):
            chains, chain = self._chains.setdefault(dataset, {}), list(each)
            if worker in chains and chains[worker][1][0] != chain[0]:
                del chains[worker]
            self._told[dataset] += 1
            chains[worker] = self._told[dataset], chain
        found: list[int] = []
        for dataset, chains in self._chains.items():
            for other in [other for other, (when, _) in chains.items() if self._told[dataset] - when > 8 * len(chains)]:
                del chains[other]  # it has no more batches
            depth = 1 + -(-(AHEAD - 1) // max(len(chains), 1))
            found += dict.fromkeys(merged([chain[:depth] for _, chain in chains.values()]))
        return tuple(found)


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
