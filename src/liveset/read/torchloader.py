"""StreamingDataLoader where torch is installed: a torch DataLoader."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Sampler, default_collate

from liveset.errors import CollateError
from liveset.format.collate import collate, to_tensors
from liveset.read.loading import Loader, nobody, refuse_orders, refuse_profiling
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together
from liveset.read.transfer import LOST_WORKER, PARCEL, Here, Packed, Parcel, Receiver, Sender, Worker, hold, stack, stacked

# Parcels of a worker in shared memory besides those that it reads ahead: the one that it makes, and those that the loop holds.
_MORE_SLOTS = 4
# A parcel takes no longer than this to make, and has no more batches, ...
_PARCEL_SECONDS = 0.01
_PARCEL_BATCHES = 32
# ... and is no more than so much larger than the one before: the first batch of a pass does not wait for others.
_GROWTH = 4


class StreamingDataLoader(Loader, DataLoader[Any]):  # type: ignore[misc]
    """Batches of a ``StreamingDataset`` for a training loop, on any number of ranks and workers, with exact states.

    Where torch is installed it is a ``torch.utils.data.DataLoader``; without torch it reads with threads and yields numpy arrays. Each
    ``iter()`` begins the next epoch, from 1. Rank and number of ranks are those of ``torch.distributed``, or of the launcher's variables
    (torchrun, Open MPI, Slurm), when an epoch begins. The order depends on the dataset's ``seed``, the epoch, the ranks, the workers and
    the batch size, and on nothing else. The plan is made here, workers are told what to read: a state is exact however far ahead they are.

    Args:
        dataset: the dataset, or a part of it.
        batch_size: samples per batch; None yields single samples. For a mixture with batches of one dataset each, a list has one size for
            each dataset.
        num_workers: processes that read; 0 reads in this one.
        shuffle: sets ``dataset.shuffle``, if given.
        drop_last: leave out what is no whole batch on every rank, if given; by default only with several ranks. An explicit False reads
            each sample once, and may give some ranks more batches than others.
        collate_fn: makes a batch of a list of samples; torch's ``default_collate`` if not given.
        prefetch_factor: batches that each worker reads ahead; 2 if not given. Small ones that are made quickly are read and sent several
            at a time, up to 1 MB, and then count as one.
        persistent_workers: keep the workers between epochs.
        pin_memory: copy tensors to pinned memory.
        rank: of this process, with ``world_size``; for launchers that are not known.
        world_size: number of ranks.
        sampler: positions or keys in the order in which they are read: a list, or a sampler of torch. An int is a position, also where keys
            are integers. Ranks divide it among themselves, step by step.
        batch_sampler: lists of positions or keys, each of which is a batch, such as a ``BucketBatchSampler``. Of each ``world_size`` of
            them a rank reads one. Samplers are told the epoch by ``set_epoch``, from 0, if they have it.
        pad: repeat samples until all ranks have the same number of whole batches, instead of leaving some out.
        on_error: "skip" leaves samples out that cannot be read or transformed, and counts them in ``stats()``. A batch without any sample
            is left out, too; with several ranks that is an error.
        **options: as of ``torch.utils.data.DataLoader``, such as ``multiprocessing_context``, ``worker_init_fn`` and ``timeout``.

    Raises:
        BadSample: in the loop: a sample could not be read, or a transform failed.
        ValueError: an argument is wrong; in the loop: there are too few samples for all ranks.

    Example:
        >>> loader = liveset.StreamingDataLoader(ds, batch_size=32, shuffle=True)
        >>> len(loader), sum(len(batch["square"]) for batch in loader)
        (4, 120)
    """

    # Accelerate would put a loader of its own in place of this one, and divide among the ranks what each of them has divided before. These
    # tell it that this one is ready as it is, and that checkpoints are to hold its state.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int | Sequence[int] | None = 1,
        num_workers: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        pad: bool = False,
        on_error: OnError = "raise",
        profile_batches: bool | int = False,
        profile_skip_batches: int = 0,
        profile_dir: str | None = None,
        profile_cprofile: bool = False,
        **options: Any,
    ) -> None:
        refuse_profiling([("profile_batches", profile_batches), ("profile_cprofile", profile_cprofile)])
        refuse_orders(options)
        self._configure(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            rank=rank,
            world_size=world_size,
            pad=pad,
            on_error=on_error,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            options=options,
        )
        self._inner: _Inner | None = None
        # torch's timeout is for one batch.
        self._pace = _Pace(1 if options.get("timeout") else _PARCEL_BATCHES)
        self._busy: Callable[[], Any] = nobody
        super().__init__(
            dataset,
            batch_size=None if batch_size is None else self._width,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            **options,
        )
        self._single = batch_size is None
        if batch_sampler is not None:  # as torch tells it; it takes none beside an iterable dataset, and reads nothing of it
            for name, value in {"batch_sampler": batch_sampler, "batch_size": None}.items():
                object.__setattr__(self, name, value)
        object.__setattr__(self, "sampler", _Epochs(self))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_inner": None, "_busy": nobody, "sampler": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "sampler", _Epochs(self))

    def _collate(self) -> Collate:
        function = self.collate_fn
        if self._single:
            return partial(_convert_single, function)
        return _collate_or_explain if function is default_collate else function

    def _together(self) -> Together | None:
        return Together(hold if self.num_workers else stack, to_tensors) if self.collate_fn is default_collate else None

    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        if not self.num_workers:
            return iter(_Inner(reader, self, batches))
        inner = self._inner
        # Workers that stay know one version; and an iterator that is still read keeps its own.
        if inner is None or inner.version is not reader.version or self._busy() is not None:
            inner = _Inner(reader, self, ())
        parcels = _Parcels(batches, self.num_workers, self._pace)
        inner.feed.tasks = parcels
        results = _Results(iter(inner), inner.receiver, parcels, reader)
        if inner.persistent_workers:
            self._inner, self._busy = inner, weakref.ref(results)
        return results


class _TakenOver:
    """What Lightning applies to a loader that it makes again from public attributes, as it does to predict: order and ranks stay."""

    def __get__(self, loader: StreamingDataLoader | None, owner: type) -> list[tuple[tuple[Any, ...], Callable[..., None]]]:
        return [((loader,), _take_over)] if loader is not None else []


setattr(StreamingDataLoader, "__pl_attrs_record", _TakenOver())


def _take_over(again: StreamingDataLoader, loader: StreamingDataLoader) -> None:
    for name in ("_order", "_ranks", "_pad", "_on_error", "_width", "_single", "batch_size", "batch_sampler"):
        object.__setattr__(again, name, getattr(loader, name))
    again.dataset.set_batch_size(again._width)  # noqa: SLF001 - that of the class


class _Inner(DataLoader[Any]):
    """What reads: a map-style loader whose indices are parcels, or batches where there are no workers.

    Everything that makes processes, queues and pins memory is torch's.
    """

    def __init__(self, reader: BatchReader, outer: StreamingDataLoader, tasks: Iterable[Any]) -> None:
        self.feed = _Feed()
        self.feed.tasks = tasks
        self.version = reader.version
        self.receiver = Receiver()
        dataset: Any = reader
        if outer.num_workers:
            sender = Sender(self.receiver.number, (outer.prefetch_factor or 0) + _MORE_SLOTS, pin=outer.pin_memory)
            dataset = Worker(reader, sender)
        super().__init__(
            dataset,
            batch_size=None,
            sampler=self.feed,
            collate_fn=_same,
            num_workers=outer.num_workers,
            prefetch_factor=outer.prefetch_factor if outer.num_workers else None,
            persistent_workers=outer.persistent_workers,
            pin_memory=outer.pin_memory,
            timeout=outer.timeout,
            worker_init_fn=outer.worker_init_fn,
            multiprocessing_context=outer.multiprocessing_context,
            generator=outer.generator,
        )


class _Feed:
    """The sampler of a loader that lives longer than a pass."""

    tasks: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)


class _Pace:
    """How many batches are worth a message, after what the last ones took.

    Args:
        limit: the most that there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.batches, self._seconds = limit, 1, math.inf

    def note(self, parcel: Parcel) -> None:
        count = len(parcel.batches)
        seconds = parcel.seconds / count
        # The first one took long to begin with, and any other one may have had to wait for a processor.
        self._seconds = seconds if seconds < self._seconds else (3 * self._seconds + seconds) / 4
        fitting = PARCEL * count // max(parcel.size, 1)
        quick = int(_PARCEL_SECONDS / max(self._seconds, 1e-9))
        self.batches = max(1, min(self._limit, fitting, quick))


class _Parcels(Iterator[list[Task]]):
    """Deals the batches of a pass to workers in turn, as many rounds at once as are worth a message.

    Attributes:
        dealt: the parcels that have not come yet, in their order.
        rounds: how many of them are of each round that has not begun to come.
        pace: how many batches are in one.
    """

    def __init__(self, tasks: Iterator[Task], workers: int, pace: _Pace) -> None:
        self.dealt: deque[list[Task]] = deque()
        self.rounds: deque[int] = deque()
        self.pace = pace
        self._tasks, self._workers, self._width = tasks, workers, 0
        self._round: deque[list[Task]] = deque()
        self._failed: Exception | None = None

    def __next__(self) -> list[Task]:
        if not self._round:
            self._deal()
        if not self._round:
            raise StopIteration
        return self._round.popleft()

    def check(self) -> None:
        """Raise the error that has ended the plan, when all before it has been read."""
        if self._failed is not None:
            raise self._failed

    def _deal(self) -> None:
        self._width = min(self.pace.batches, self._width * _GROWTH) or 1
        tasks: list[Task] = []
        try:
            for task in islice(self._tasks, self._width * self._workers):
                tasks.append(task)  # noqa: PERF402 - what comes before an error is read
        except Exception as error:
            self._failed = error
        parcels = [tasks[worker :: self._workers] for worker in range(min(self._workers, len(tasks)))]
        self._round.extend(parcels)
        if parcels:
            self.dealt.extend(parcels)
            self.rounds.append(len(parcels))


class _Results(Iterator[Fetched]):
    """The batches of parcels, in the order of the pass.

    The iterator of torch cannot be referred to weakly where workers stay, since its loader keeps it.
    """

    def __init__(self, results: Iterator[Any], receiver: Receiver, parcels: _Parcels, reader: BatchReader) -> None:
        self._results, self._receiver, self._parcels, self._reader = results, receiver, parcels, reader
        self._open: deque[deque[Any]] = deque()
        self._coming = 0  # parcels of this round

    def __next__(self) -> Fetched:
        if not self._coming and not self._open:
            rounds = self._parcels.rounds
            self._coming = rounds.popleft() if rounds else 0
        parcel = self._open.popleft() if self._open and not self._coming else self._receive()
        fetched, task = parcel.popleft()
        if parcel:
            self._open.append(parcel)
        if isinstance(fetched, ExceptionWrapper):
            fetched.reraise()  # type: ignore[no-untyped-call]
        if fetched.batch is Here:
            fetched = self._reader[task]
            fetched = fetched._replace(batch=stacked(fetched.batch))
        elif type(fetched.batch) is Packed:
            fetched = fetched._replace(batch=fetched.batch.unpack())
        found: Fetched = fetched
        return found

    def _receive(self) -> deque[Any]:
        if not self._coming:
            self._parcels.check()
        try:
            parcel: Parcel = next(self._results)
        except (EOFError, ConnectionError) as error:  # what a message is that was cut short, before torch sees why
            raise RuntimeError(LOST_WORKER) from error
        self._coming -= 1
        self._parcels.pace.note(parcel)
        return deque(zip(parcel.batches, self._parcels.dealt.popleft(), strict=False))  # an error ends a parcel early


class _Epochs(Sampler[None]):
    """What Lightning tells which epoch begins, from 0: it does so through the sampler of a loader."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[None]:
        return repeat(None)

    def set_epoch(self, epoch: int) -> None:
        loader = self._loader()
        if loader is not None:
            loader._tell_epoch(epoch + 1)  # noqa: SLF001 - that of the class


def _collate_or_explain(samples: list[Any]) -> Any:
    """Collate as torch does, with an error that names the field."""
    try:
        return default_collate(samples)
    except Exception as error:
        try:
            to_tensors(collate(samples))
        except CollateError as why:
            raise why from error
        raise


def _same(value: Any) -> Any:
    return value


def _convert_single(convert: Collate, samples: list[Any]) -> Any:
    return convert(samples[0])
