"""StreamingDataLoader where torch is installed: a torch DataLoader."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch.utils.data import DataLoader, Sampler, default_collate

from liveset.errors import CollateError
from liveset.format.collate import collate, to_tensors
from liveset.read.loading import Loader, nobody, refuse_orders, refuse_profiling
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together
from liveset.read.transfer import Packed, Receiver, Sender, hold, stack

# Batches of a worker in shared memory besides those that it reads ahead: the one that it makes, and those that the loop holds.
_MORE_SLOTS = 4


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
        prefetch_factor: batches that each worker reads ahead; 2 if not given.
        persistent_workers: keep the workers between epochs.
        pin_memory: copy tensors to pinned memory.
        rank: of this process, with ``world_size``; for launchers that are not known.
        world_size: number of ranks.
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
            rank=rank,
            world_size=world_size,
            pad=pad,
            on_error=on_error,
        )
        self._inner: _Inner | None = None
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
        object.__setattr__(self, "sampler", _Epochs(self))  # torch takes none beside an iterable dataset, and reads nothing of it

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_inner": None, "_busy": nobody, "sampler": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "sampler", _Epochs(self))

    def _collate(self) -> Collate:
        function = self.collate_fn
        if self.batch_size is None:
            return partial(_convert_single, function)
        return _collate_or_explain if function is default_collate else function

    def _together(self) -> Together | None:
        return Together(hold if self.num_workers else stack, to_tensors) if self.collate_fn is default_collate else None

    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        inner = self._inner
        # Workers that stay know one version; and an iterator that is still read keeps its own.
        if inner is None or inner.version is not reader.version or self._busy() is not None:
            inner = _Inner(reader, self)
        inner.feed.batches = batches
        results = _Results(iter(inner), inner.receiver)
        if inner.persistent_workers:
            self._inner, self._busy = inner, weakref.ref(results)
        return results


class _Inner(DataLoader[Any]):
    """What reads: a map-style loader whose indices are batches. Everything that makes processes, queues and pins memory is torch's."""

    def __init__(self, reader: BatchReader, outer: StreamingDataLoader) -> None:
        self.feed = _Feed()
        self.version = reader.version
        self.receiver = Receiver()
        send: Any = Sender(self.receiver.number, (outer.prefetch_factor or 0) + _MORE_SLOTS, pin=outer.pin_memory)
        super().__init__(
            reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.feed,
            collate_fn=send if outer.num_workers else _same,
            num_workers=outer.num_workers,
            prefetch_factor=outer.prefetch_factor if outer.num_workers else None,
            persistent_workers=outer.persistent_workers,
            pin_memory=outer.pin_memory,
            timeout=outer.timeout,
            worker_init_fn=outer.worker_init_fn,
            multiprocessing_context=outer.multiprocessing_context,
            generator=outer.generator,
        )


class _Results(Iterator[Fetched]):
    """What an iterator of torch yields; that one cannot be referred to weakly where workers stay, since its loader keeps it."""

    def __init__(self, results: Iterator[Any], receiver: Receiver) -> None:
        self._results, self._receiver = results, receiver

    def __next__(self) -> Fetched:
        fetched: Fetched = next(self._results)
        return fetched._replace(batch=fetched.batch.unpack()) if type(fetched.batch) is Packed else fetched


class _Feed:
    """The sampler of a loader that lives longer than a pass."""

    batches: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.batches


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
