"""StreamingDataLoader where torch is not installed: threads and numpy arrays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from liveset.format.collate import collate
from liveset.read.fetch import Job
from liveset.read.loading import Loader, refuse_orders, refuse_profiling
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together

# Arguments of torch's DataLoader besides those that both loaders name.
_OF_TORCH = frozenset("timeout worker_init_fn multiprocessing_context generator pin_memory_device in_order".split())


class StreamingDataLoader(Loader):
    """Batches of a ``StreamingDataset`` as numpy arrays, read by threads: for JAX, or any loop without torch.

    It is what ``liveset.StreamingDataLoader`` is where torch is not installed: see there for the arguments. Batches are those of torch's
    ``default_collate`` with arrays in place of tensors. Arguments that only concern processes or pinned memory have no effect.

    Args:
        dataset: the dataset, or a part of it.
        batch_size: samples per batch, or a list with one size for each dataset of a mixture; None yields single samples.
        num_workers: threads that read ahead; 0 reads in this one.
        shuffle: sets ``dataset.shuffle``, if given.
        drop_last: leave out what is no whole batch on every rank, if given.
        collate_fn: makes a batch of a list of samples.
        prefetch_factor: batches that are read ahead for each thread; 2 if not given.
        persistent_workers: has no effect.
        pin_memory: has no effect.
        rank: of this process, with ``world_size``.
        world_size: number of ranks.
        sampler: positions or keys in the order in which they are read.
        batch_sampler: lists of them, each of which is a batch.
        pad: repeat samples until all ranks have the same number of whole batches.
        on_error: "skip" leaves out samples that cannot be read.
        **options: others of torch's ``DataLoader``, which have no effect.
    """

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
        for name in options:
            if name not in _OF_TORCH:
                raise TypeError(f"StreamingDataLoader.__init__() got an unexpected keyword argument {name!r}")
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
        self.dataset, self.num_workers, self.batch_sampler = dataset, num_workers, batch_sampler
        self.batch_size = batch_size if batch_sampler is None else None
        self.collate_fn = collate_fn or (_single if batch_size is None else collate)
        self.prefetch_factor = 2 if prefetch_factor is None else prefetch_factor

    def _readers(self) -> int:
        return 1  # threads share the open chunks

    def _collate(self) -> Collate:
        return self.collate_fn

    def _together(self) -> Together | None:
        return Together(collate, _same) if self.collate_fn is collate else None

    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        if not self.num_workers:
            return map(reader.__getitem__, batches)
        return _read_ahead(reader, batches, self.num_workers, self.num_workers * max(self.prefetch_factor, 1))


def _read_ahead(reader: BatchReader, batches: Iterator[Task], threads: int, ahead: int) -> Iterator[Fetched]:
    waiting: deque[Job[Fetched]] = deque()
    jobs: SimpleQueue[Job[Fetched] | None] = SimpleQueue()
    # Those of an executor would keep the process from ending until all that they have asked for is there.
    for _ in range(threads):
        threading.Thread(target=_work, args=(jobs,), name="liveset-loader", daemon=True).start()
    try:
        for task in batches:
            job = Job(partial(reader.__getitem__, task))
            waiting.append(job)
            jobs.put(job)
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        with suppress(Empty):
            while True:
                jobs.get_nowait()
        for _ in range(threads):
            jobs.put(None)


def _work(jobs: SimpleQueue[Job[Fetched] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job


def _single(samples: list[Any]) -> Any:
    return samples[0]


def _same(value: Any) -> Any:
    return value
