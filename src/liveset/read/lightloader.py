"""StreamingDataLoader where torch is not installed: threads and numpy arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from liveset.format.collate import collate
from liveset.read.loading import Loader, refuse_profiling
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together


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
        pad: repeat samples until all ranks have the same number of whole batches.
        on_error: "skip" leaves out samples that cannot be read.
        **options: others of torch's, which have no effect.
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
        pad: bool = False,
        on_error: OnError = "raise",
        profile_batches: bool | int = False,
        profile_skip_batches: int = 0,
        profile_dir: str | None = None,
        profile_cprofile: bool = False,
        **options: Any,
    ) -> None:
        refuse_profiling([("profile_batches", profile_batches), ("profile_cprofile", profile_cprofile)])
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
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers
        self.collate_fn = collate_fn or (_single if batch_size is None else collate)
        self.prefetch_factor = 2 if prefetch_factor is None else prefetch_factor

    def _collate(self) -> Collate:
        return self.collate_fn

    def _together(self) -> Together | None:
        return Together(collate, _same) if self.collate_fn is collate else None

    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        if not self.num_workers:
            return map(reader.__getitem__, batches)
        return _read_ahead(reader, batches, self.num_workers, self.num_workers * max(self.prefetch_factor, 1))


def _read_ahead(reader: BatchReader, batches: Iterator[Task], threads: int, ahead: int) -> Iterator[Fetched]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="liveset-loader")
    try:
        waiting: deque[Future[Fetched]] = deque()
        for task in batches:
            waiting.append(pool.submit(reader.__getitem__, task))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _single(samples: list[Any]) -> Any:
    return samples[0]


def _same(value: Any) -> Any:
    return value
