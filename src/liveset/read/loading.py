"""What all loaders share: epochs, ranks, states and rates. Who reads the batches, and where, is up to the two that are built on it."""

from __future__ import annotations

import copy
import math
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from liveset.errors import BadSample, StateMismatch
from liveset.format import codec
from liveset.read.agreement import Agreement, has_group
from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Epoch, Stretch
from liveset.read.grid import check_ranks, find_ranks
from liveset.read.mixture import Mixture
from liveset.read.options import check_count, check_drop_last, check_epoch, check_flags
from liveset.read.orders import Order, OrderedEpoch, OrderedPosition
from liveset.read.position import Position
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together
from liveset.read.resumable import check_rank
from liveset.read.state import Progress, next_stretches
from liveset.read.training import Training


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
        throttled: how often an object store said that it has too many requests; fewer are sent at once then, for seconds.
    """

    epoch: int
    batches: int
    samples: int
    bytes: int
    skipped: int
    seconds: float
    waited: float
    throttled: int = 0

    @property
    def samples_per_second(self) -> float:
        """Samples per second since the pass began."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second since the pass began."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Meter:
    """Counts what a pass hands on."""

    def __init__(self, epoch: int) -> None:
        self.batches = self.samples = self.skipped = self.throttled = 0
        self.bytes = self.waited = 0.0
        self._epoch, self._began = epoch, time.perf_counter()
        self._ended: float | None = None

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def stats(self) -> LoaderStats:
        seconds = (self._ended or time.perf_counter()) - self._began
        return LoaderStats(self._epoch, self.batches, self.samples, round(self.bytes), self.skipped, seconds, self.waited, self.throttled)


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
            fetched = next(results, None)
            meter.waited += time.perf_counter() - began
            if (error := self._position.failed if fetched is None else fetched.error) is not None:
                fetched = self._position.failed = None
                try:
                    raise error
                finally:
                    del error  # or it would refer to itself through this frame, and workers would stay until the garbage is collected
            if fetched is None:
                raise StopIteration
            if not fetched.samples:
                self._check_skip(fetched.skipped[0])
            self._position.took()
            size = self._sizes.popleft()
            meter.skipped += len(fetched.skipped)
            meter.throttled += fetched.throttled
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


class Loader(ABC):
    """The part of a loader that does not depend on torch."""

    dataset: Any
    num_workers: int

    _order: Order | None = None
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
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
        rank: int | None,
        world_size: int | None,
        pad: bool,
        on_error: OnError,
        collate_fn: Callable[[list[Any]], Any] | None,
        prefetch_factor: int | None,
        persistent_workers: bool,
        pin_memory: bool,
        options: Mapping[str, Any],
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
        check_count("num_workers", num_workers)
        if shuffle is not None and not isinstance(shuffle, bool):
            raise ValueError(f"shuffle must be True, False or None. Found {shuffle!r}.")
        check_drop_last(drop_last)
        check_flags(pad=pad, persistent_workers=persistent_workers, pin_memory=pin_memory)
        check_count("prefetch_factor", 0 if prefetch_factor is None else prefetch_factor, "a number of batches")
        for name, function in {"collate_fn": collate_fn, "worker_init_fn": options.get("worker_init_fn")}.items():
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a callable. Found {function!r}.")
        timeout = options.get("timeout", 0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds, at least 0. Found {timeout!r}.")
        if on_error not in get_args(OnError):
            raise ValueError(f'on_error must be "raise" or "skip". Found {on_error!r}.')
        _check_order(dataset, sampler, batch_sampler, batch_size, shuffle, drop_last)
        if (rank is None) != (world_size is None):
            raise ValueError("rank= and world_size= go together.")
        self._ranks = None
        if rank is not None and world_size is not None:
            self._ranks = check_ranks(world_size, rank, f"rank={rank} of world_size={world_size}")
        if isinstance(dataset, StreamingDataset) and (order := sampler if batch_sampler is None else batch_sampler) is not None:
            self._order = Order(order, "sampler" if batch_sampler is None else "batch_sampler", dataset)
        if shuffle is not None:
            dataset.set_shuffle(shuffle)
        if drop_last is not None:
            dataset.set_drop_last(drop_last)
        sizes: Any = batch_size or 1
        dataset.set_batch_size(sizes)
        self._width: int = max(sizes) if several else sizes
        dataset.set_num_workers(num_workers)
        self._pad, self._on_error = pad, on_error
        self._agreement = Agreement()
        self._meter = Meter(0)
        self._latest: Callable[[], Pass | None] = nobody
        self.current_epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": nobody}

    @abstractmethod
    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        """Yield what the reader makes of the batches, in their order."""

    def _readers(self) -> int:
        """Return how many there are that take tasks in turn, each with open chunks of its own."""
        return max(self.num_workers, 1)

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
        current = Pass(position, meter, self._read(reader, position.tasks(sizes, self._readers())), sizes)
        self._latest, self._position, self._meter = weakref.ref(current), position, meter
        return current

    def __len__(self) -> int:
        """Number of batches of this rank in an epoch; in one whose state was loaded, those before it count, too."""
        if self._loaded is None and self._latest() is not None and self._position is not None and not self._position.finished:
            return self._position.count
        return self._at(self.dataset, self._next(self._loaded)).count

    def _grid(self) -> tuple[int, int]:
        return self._ranks or find_ranks()

    def _at(self, dataset: Training, epoch: Epoch | OrderedEpoch, progress: Progress | None = None) -> Position:
        """Return where a pass is that reads an epoch from here on."""
        rank = self._grid()[1]
        if not isinstance(epoch, OrderedEpoch):
            return Position(dataset, epoch, rank)
        assert isinstance(dataset, StreamingDataset)
        return OrderedPosition(dataset, epoch, rank, progress.samples if progress is not None and not progress.finished else 0)

    def _next(self, progress: Progress | None) -> Epoch | OrderedEpoch:
        """Return the epoch that a pass reads that begins now, from where on it reads it."""
        world, _ = self._grid()
        workers = max(self.num_workers, 1)
        dataset: Training = self.dataset
        mark, rules = None, dataset.rules(self._upcoming(progress), pad=self._pad)
        stretches: tuple[Stretch, ...] = (Stretch(world, workers, self._width, 0),)
        if progress is not None and not progress.finished:
            mark, rules, stretches = progress.order, progress.rules, next_stretches(progress, world, workers, self._width)
        return dataset.epoch(rules, stretches) if self._order is None else OrderedEpoch(self._order, rules, stretches, mark)

    def _upcoming(self, progress: Progress | None) -> int:
        """Return the number of the epoch that comes after all that was read."""
        return (progress.rules.epoch if progress is not None else self.current_epoch) + 1

    def _begin(self) -> Position:
        world, rank = self._grid()
        progress = self._loaded or self.dataset.take_resumed() or self._left()
        if progress is not None:
            self._check_state(progress.order.by if progress.order is not None else None, finished=progress.finished)
        if world == 1 or (progress is not None and not progress.finished) or not has_group():  # a state names its version
            position = self._start(progress, world, rank)
        else:
            position = self._start_together(progress, world, rank)
        self._loaded = None
        self.current_epoch = position.epoch.rules.epoch
        self.dataset.set_epoch(self.current_epoch)
        return position

    def _start_together(self, progress: Progress | None, world: int, rank: int) -> Position:
        """Begin an epoch as the other ranks do, which learn it if this one cannot."""
        agreement = self._agreement
        agreement.begin(self.dataset.members[0].path, self._upcoming(progress))
        try:
            self.dataset.agree(agreement)
            position = self._start(progress, world, rank)
            terms = position.terms() | {"samples": _describe(self.dataset)}
        except Exception as error:
            agreement.fail(error, world)
            raise
        agreement.compare(terms, world)
        return position

    def _start(self, progress: Progress | None, world: int, rank: int) -> Position:
        epoch = self._next(progress)
        self._check(epoch, world, rank)
        if progress is not None and not progress.finished:
            check_rank(progress, world, rank)
        if self._order is not None:
            self._order.check(self.dataset)
        position = self._at(self.dataset.as_of_now(), epoch, progress)
        position.begin()
        return position

    def _left(self) -> Progress | None:
        """Return where the last pass was left, if this dataset goes on from there."""
        position = self._position
        if not self.dataset.goes_on or position is None or position.finished or position.epoch.rules.epoch != self.current_epoch:
            return None
        return position.progress()

    def _check_state(self, by: str | None, *, finished: bool) -> None:
        """Refuse a state inside of an epoch whose order was given in another way."""
        here = self._order.by if self._order is not None else None
        if by != here and not finished:
            then, now = (f"one with {name}=" if name else "one without sampler= or batch_sampler=" for name in (by, here))
            raise StateMismatch(f"the state is of another kind of loader: of {then}, and this is {now}.")

    def _check(self, epoch: Epoch | OrderedEpoch, world: int, rank: int) -> None:
        if world == 1:
            return
        rules, samples = epoch.rules, self.dataset.samples
        if isinstance(epoch, OrderedEpoch):
            epoch.check_ranks(rank)
        elif samples and len(epoch.stretches) == 1 and rules.drops(world) and not epoch.count(rank):
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
            progress = self._at(dataset, self._next(None)).progress()
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
        order = state.get("order")
        self._check_state(order.get("by") if isinstance(order, Mapping) else None, finished=state.get("finished") is True)
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


def _describe(dataset: Training) -> str:
    """Return what is read as text that is another one wherever that is anything else."""
    parts = [member.identity for member in dataset.members]
    digest = codec.checksum(repr([part.layout for part in parts]).encode())
    return f"{sum(part.samples for part in parts):,} of a {type(dataset).__name__} ({digest})"


def nobody() -> None:
    """Stand for a weak reference to what is not there."""


def _check_order(dataset: Any, sampler: Any, batch_sampler: Any, batch_size: Any, shuffle: Any, drop_last: Any) -> None:
    """Refuse arguments that leave the order open."""
    if sampler is None and batch_sampler is None:
        return
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ValueError("batch_sampler= says itself what is in a batch: it excludes batch_size=, shuffle=, sampler= and drop_last=.")
    if shuffle:
        raise ValueError("sampler= gives the order: it excludes shuffle=.")
    if not isinstance(dataset, StreamingDataset):
        raise ValueError(
            f"sampler= and batch_sampler= choose samples of a StreamingDataset; a {type(dataset).__name__} mixes several, and has its own "
            "order."
        )


def refuse_orders(options: Mapping[str, Any]) -> None:
    """Refuse arguments of torch that would have batches come in another order."""
    if not options.get("in_order", True):
        raise ValueError("in_order=False is not possible: states count batches in their order.")


def refuse_profiling(options: Iterable[tuple[str, Any]]) -> None:
    """Raise for the arguments of the old tool that ask for a profile."""
    for name, value in options:
        if value:
            raise NotImplementedError(f"{name}= is not supported: profile with py-spy or torch.profiler, and see loader.stats().")
