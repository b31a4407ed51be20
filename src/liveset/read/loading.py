"""What all loaders share: epochs, ranks, states and rates. Who reads the batches, and where, is up to the two that are built on it."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from liveset.errors import BadSample, StateMismatch
from liveset.read.agreement import Agreement
from liveset.read.epoch import Epoch, Stretch
from liveset.read.grid import check_ranks, find_ranks
from liveset.read.mixture import Mixture
from liveset.read.options import check_drop_last, check_epoch
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together
from liveset.read.resumable import check_rank
from liveset.read.state import Progress, next_stretches
from liveset.read.training import Training

# How many chunks a worker is told of, the one that it reads included.
AHEAD = 9


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a pass of a loader has done so far.

    Attributes:
        epoch: its number, from 1.
        batches: how many were delivered.
        samples: how many were in them.
        bytes: that these take in the dataset, at the mean size of the samples of their chunks.
        skipped: samples that could not be read and were left out (``on_error="skip"``).
        seconds: since the pass began, or how long it took.
        waited: seconds that the training loop waited for batches.
    """

    epoch: int
    batches: int
    samples: int
    bytes: int
    skipped: int
    seconds: float
    waited: float

    @property
    def samples_per_second(self) -> float:
        """Samples per second since the pass began."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second since the pass began."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Position:
    """Where a pass is: what a state tells of it, as long as the loader does not begin another one."""

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


class Meter:
    """Counts what a pass hands on."""

    def __init__(self, epoch: int) -> None:
        self.batches = self.samples = self.skipped = 0
        self.bytes = self.waited = 0.0
        self._epoch, self._began = epoch, time.perf_counter()
        self._ended: float | None = None

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def stats(self) -> LoaderStats:
        seconds = (self._ended or time.perf_counter()) - self._began
        return LoaderStats(self._epoch, self.batches, self.samples, round(self.bytes), self.skipped, seconds, self.waited)


class Pass(Iterator[Any]):
    """One pass over the batches of a rank. Nothing that lives longer refers to it, so that a loop that is left lets go of its workers."""

    def __init__(self, position: Position, meter: Meter, fetched: Iterator[Fetched], sizes: deque[float]) -> None:
        self._position, self._meter, self._sizes = position, meter, sizes
        self._fetched: Iterator[Fetched] | None = fetched
        self._failed: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._failed is not None:
            raise _again(self._failed)
        if self._fetched is None:
            raise StopIteration
        try:
            return self._next(self._fetched)
        except StopIteration:
            self._position.finished, self._fetched = True, None
            self._meter.stop()
            raise
        except BaseException as error:
            # What failed is neither read nor counted, and what was read ahead would follow in its place: nothing comes after an error.
            self._failed, self._fetched = _again(error), None
            self._meter.stop()
            raise

    def _next(self, results: Iterator[Fetched]) -> Any:
        meter = self._meter
        while True:
            began = time.perf_counter()
            fetched = next(results)
            meter.waited += time.perf_counter() - began
            if (error := fetched.error) is not None:
                del fetched
                try:
                    raise error
                finally:
                    del error  # or it would refer to itself through this frame, and workers would stay until the garbage is collected
            if not fetched.samples:
                self._check_skip(fetched.skipped[0])
            self._position.batches += 1
            size = self._sizes.popleft()
            meter.skipped += len(fetched.skipped)
            if fetched.samples:
                meter.batches += 1
                meter.samples += fetched.samples
                meter.bytes += size
                return fetched.batch

    def become(self, other: Pass) -> None:
        """Go on as another pass, which nobody else reads."""
        self._position, self._meter, self._fetched, self._sizes = other._position, other._meter, other._fetched, other._sizes
        self._failed = other._failed

    def _check_skip(self, first: BadSample) -> None:
        if self._position.epoch.stretches[-1].world > 1:
            raise BadSample(
                "no sample of a batch can be read, and without it this rank would have one batch less than the others, which would wait "
                f"for it. The first: {first}",
                **vars(first),
            )


def _again(error: BaseException) -> BaseException:
    """Return an error that says the same, without the frames of this one, which would keep workers until the garbage is collected."""
    try:
        again = copy.copy(error)
    except Exception:  # not all can be copied
        again = None
    return again if type(again) is type(error) else RuntimeError(f"this pass has ended with {type(error).__name__}: {error}")


def _feed(position: Position, sizes: deque[float]) -> Iterator[Task]:
    """Yield the tasks of a pass, and note how large the batches are."""
    dataset = position.dataset
    following = dataset.following(position.epoch, position.rank)
    turns = position.epoch.turns(position.rank) if following else iter(())
    for runs in position.epoch.batches(position.rank):
        places = dataset.places(runs)
        sizes.append(sum(dataset.sample_size(chunk) * len(slots) for chunk, slots in places))
        yield Task(places, _chain(following[next(turns)], places[-1][0]) if following else ())


def _chain(following: Mapping[int, int], chunk: int) -> tuple[int, ...]:
    found = [chunk]
    while (after := following.get(found[-1])) is not None and len(found) < AHEAD:
        found.append(after)
    return tuple(found)


class Loader(ABC):
    """The part of a loader that does not depend on torch."""

    dataset: Any
    num_workers: int

    _loaded: Progress | None = None
    _position: Position | None = None
    _warned = False

    def _configure(
        self,
        dataset: Any,
        *,
        batch_size: int | Sequence[int] | None,
        num_workers: int,
        shuffle: bool | None,
        drop_last: bool | None,
        rank: int | None,
        world_size: int | None,
        pad: bool,
        on_error: OnError,
    ) -> None:
        several = isinstance(batch_size, list | tuple) and isinstance(dataset, Mixture)  # which checks them
        if not isinstance(dataset, Training):
            raise RuntimeError(
                "The provided dataset should be either an instance of StreamingDataset, or of CombinedStreamingDataset, "
                f"ParallelStreamingDataset or another class of liveset. Found {type(dataset).__name__}."
            )
        single = None if several else batch_size
        if single is not None and (isinstance(single, bool) or not isinstance(single, int) or single < 1):
            raise ValueError(f"batch_size must be a number of samples, at least 1. Found {batch_size!r}.")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers must be a number, at least 0. Found {num_workers!r}.")
        if shuffle is not None and not isinstance(shuffle, bool):
            raise ValueError(f"shuffle must be True, False or None. Found {shuffle!r}.")
        check_drop_last(drop_last)
        if not isinstance(pad, bool):
            raise ValueError(f"pad must be True or False. Found {pad!r}.")
        if on_error not in get_args(OnError):
            raise ValueError(f'on_error must be "raise" or "skip". Found {on_error!r}.')
        if (rank is None) != (world_size is None):
            raise ValueError("rank= and world_size= go together.")
        self._ranks = None
        if rank is not None and world_size is not None:
            self._ranks = check_ranks(world_size, rank, f"rank={rank} of world_size={world_size}")
        if shuffle is not None:
            dataset.set_shuffle(shuffle)
        if drop_last is not None:
            dataset.set_drop_last(drop_last)
        sizes: Any = batch_size or 1
        dataset.set_batch_size(sizes)
        self._width: int = max(sizes) if several else sizes
        dataset.set_num_workers(num_workers)
        self._pad, self._on_error = pad, on_error
        self._agreement = Agreement(f"{num_workers}x{self._width}")
        self._meter = Meter(0)
        self._latest: Callable[[], Pass | None] = nobody
        self.current_epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": nobody}

    @abstractmethod
    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        """Yield what the reader makes of the batches, in their order."""

    @abstractmethod
    def _collate(self) -> Collate:
        """Return what makes a batch of samples."""

    @abstractmethod
    def _together(self) -> Together | None:
        """Return how batches are decoded at once; None where ``collate_fn`` must see the samples."""

    # --- passes ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Pass:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        position = self._begin()
        reader = BatchReader(position.dataset, self._collate(), self._on_error, self._together())
        sizes: deque[float] = deque()
        meter = Meter(self.current_epoch)
        current = Pass(position, meter, self._read(reader, _feed(position, sizes)), sizes)
        self._latest, self._position, self._meter = weakref.ref(current), position, meter
        return current

    def __len__(self) -> int:
        """Number of batches of this rank in an epoch; in one whose state was loaded, those before it count, too."""
        if self._loaded is None and self._latest() is not None and self._position is not None and not self._position.finished:
            return self._position.count
        return Position(self.dataset, self._next(self._loaded), self._grid()[1]).count

    def _grid(self) -> tuple[int, int]:
        return self._ranks or find_ranks()

    def _next(self, progress: Progress | None) -> Epoch:
        """Return the epoch that a pass reads that begins now, from where on it reads it."""
        world, _ = self._grid()
        workers = max(self.num_workers, 1)
        dataset: Training = self.dataset
        if progress is not None and not progress.finished:
            return dataset.epoch(progress.rules, next_stretches(progress, world, workers, self._width))
        rules = dataset.rules(self._upcoming(progress), pad=self._pad)
        return dataset.epoch(rules, (Stretch(world, workers, self._width, 0),))

    def _upcoming(self, progress: Progress | None) -> int:
        """Return the number of the epoch that comes after all that was read."""
        return (progress.rules.epoch if progress is not None else self.current_epoch) + 1

    def _begin(self) -> Position:
        world, rank = self._grid()
        progress = self._loaded or self.dataset.take_resumed() or self._left()
        if world > 1 and (progress is None or progress.finished):  # a state names its version
            self.dataset.agree(self._agreement, self._upcoming(progress))
        epoch = self._next(progress)
        self._check(epoch, world, rank)
        if progress is not None and not progress.finished:
            check_rank(progress, world, rank)
        self._loaded = None
        self.current_epoch = epoch.rules.epoch
        self.dataset.set_epoch(self.current_epoch)
        return Position(self.dataset.as_of_now(), epoch, rank)

    def _left(self) -> Progress | None:
        """Return where the last pass was left, if this dataset goes on from there."""
        position = self._position
        if not self.dataset.goes_on or position is None or position.finished or position.epoch.rules.epoch != self.current_epoch:
            return None
        return position.progress()

    def _check(self, epoch: Epoch, world: int, rank: int) -> None:
        if world == 1:
            return
        rules, samples = epoch.rules, self.dataset.samples
        if samples and len(epoch.stretches) == 1 and rules.drops(world) and not epoch.count(rank):
            raise ValueError(
                f"{samples:,} samples are not one batch of {self._width} for each of {world} ranks, so that there is nothing to read. Use "
                "a smaller batch_size, pad=True (which repeats samples), or drop_last=False (then ranks have different numbers of batches)."
            )
        if rules.drop_last is False and not rules.pad and not self._warned:
            self._warned = True
            warnings.warn(
                "drop_last=False with several ranks: each sample is read once, but some ranks may have more batches than others, which "
                "then wait for them where all ranks meet. pad=True makes them equal.",
                stacklevel=4,
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 1) of the next pass; ignored while a state is loaded, which says where to go on."""
        if self._loaded is None:
            self.current_epoch = check_epoch(epoch) - 1

    def _tell_epoch(self, epoch: int) -> None:
        """Move on to an epoch that a trainer begins; also a pass of which nothing has been read. Never back.

        Trainers that count the batches do not see the end of an epoch, and a state of one that they have left may not be loaded at all.
        """
        current, position = self._latest(), self._position
        if self._loaded is not None or epoch <= self.current_epoch:
            return
        self.current_epoch = epoch - 1
        if current is not None and position is not None and position.unread:
            current.become(self.__iter__())
            self._latest = weakref.ref(current)

    # --- states and rates --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: plain numbers and text, of the same size for any dataset.

        It counts the batches that the loop has had from the pass that began last. It can be asked for at any time, and costs nothing
        before.

        Example:
            >>> loader = liveset.StreamingDataLoader(ds, batch_size=50)
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> loader.load_state_dict(state)
            >>> [len(batch["square"]) for batch in loader]
            [50, 20]
        """
        position = self._position
        dataset, progress = self.dataset, self._loaded
        if progress is None and position is not None:
            progress = position.progress()
            # A loop that is through goes on with the version that is open by then.
            dataset = dataset if position.finished else position.dataset
        if progress is None or (progress.finished and progress.rules.epoch != self.current_epoch):
            progress = Position(dataset, self._next(None), self._grid()[1]).progress()
        workers = max(self.num_workers, 1)
        batches = progress.stretches[-1].batches
        return {
            "dataset": dataset.state_of(progress, workers),
            "current_epoch": progress.rules.epoch,
            "num_samples_yielded": progress.samples,
            "latest_worker_idx": (batches - 1) % workers if batches else 0,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was taken: see ``StreamingDataset.load_state_dict``.

        A state from between two epochs goes on with the next one; one from after the last batch, but inside of the loop, with no batch.

        Args:
            state_dict: what ``state_dict`` returned, on this rank.

        Raises:
            StateMismatch: the state is of another dataset, or of what is not there any more; nothing has changed.
        """
        state = state_dict.get("dataset") if isinstance(state_dict, Mapping) else None
        if not isinstance(state, Mapping):
            raise StateMismatch("this is no state of a liveset loader: give load_state_dict() what state_dict() of a loader returned.")
        self._loaded = self.dataset.progress_of(state)
        self.dataset.reset_state_dict()
        self.current_epoch = self._loaded.rules.epoch

    def reset_state_dict(self) -> None:
        """Forget a state that was loaded, and where the last pass was: the next pass is a whole one of the next epoch."""
        self._loaded = self._position = None
        self.dataset.reset_state_dict()

    def stats(self) -> LoaderStats:
        """Return samples, bytes and waiting time of the pass that began last.

        Example:
            >>> loader = liveset.StreamingDataLoader(ds, batch_size=50)
            >>> for batch in loader:
            ...     pass
            >>> loader.stats().batches, loader.stats().samples
            (3, 120)
        """
        return self._meter.stats()


def nobody() -> None:
    """Stand for a weak reference to what is not there."""


def refuse_orders(options: Mapping[str, Any]) -> None:
    """Refuse arguments of torch that would have it read in another order."""
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}= cannot steer a StreamingDataset: give torch's DataLoader dataset.as_map(), or read dataset.subset(positions)."
            )
    if not options.get("in_order", True):
        raise ValueError("in_order=False is not possible: states count batches in their order.")


def refuse_profiling(options: Iterable[tuple[str, Any]]) -> None:
    """Raise for the arguments of the old tool that ask for a profile."""
    for name, value in options:
        if value:
            raise NotImplementedError(f"{name}= is not supported: profile with py-spy or torch.profiler, and see loader.stats().")
