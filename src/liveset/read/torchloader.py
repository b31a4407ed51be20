"""StreamingDataLoader where torch is installed: a torch DataLoader."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from liveset.format.collate import to_tensors
from liveset.read.loading import Loader, refuse_profiling
from liveset.read.reader import BatchReader, Collate, Fetched, OnError, Task, Together

# Tensors up to this size are sent through a pipe, larger ones as shared memory.
_LARGE = 1 << 18
_SENT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})


class StreamingDataLoader(Loader, DataLoader[Any]):  # type: ignore[misc]
    """Batches of a ``StreamingDataset`` for a training loop, on any number of ranks and workers, with exact states.

    Where torch is installed it is a ``torch.utils.data.DataLoader``; without torch it reads with threads and yields numpy arrays. Each
    ``iter()`` begins the next epoch, from 1. Rank and number of ranks are those of ``torch.distributed``, or of the launcher's variables
    (torchrun, Open MPI, Slurm), when an epoch begins. The order depends on the dataset's ``seed``, the epoch, the ranks, the workers and
    the batch size, and on nothing else. The plan is made here, workers are told what to read: a state is exact however far ahead they are.

    Args:
        dataset: the dataset, or a part of it.
        batch_size: samples per batch; None yields single samples.
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

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
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
        for name in ("sampler", "batch_sampler"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name}= cannot steer a StreamingDataset: give torch's DataLoader dataset.as_map(), or read dataset.subset(positions)."
                )
        if not options.get("in_order", True):
            raise ValueError("in_order=False is not possible: states count batches in their order.")
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
        self._busy: Callable[[], Any] = lambda: None
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            **options,
        )

    def _collate(self) -> Collate:
        collate = self.collate_fn
        return partial(_convert_single, collate) if self.batch_size is None else collate

    def _together(self) -> Together | None:
        return Together(default_collate, to_tensors) if self.collate_fn is default_collate else None

    def _read(self, reader: BatchReader, batches: Iterator[Task]) -> Iterator[Fetched]:
        inner = self._inner
        # Workers that stay know one version; and an iterator that is still read keeps its own.
        if inner is None or not inner.persistent_workers or inner.version is not reader.version or self._busy() is not None:
            inner = self._inner = _Inner(reader, self)
        inner.feed.batches = batches
        results = _Results(iter(inner))
        if inner.persistent_workers:
            self._busy = weakref.ref(results)
        return results


class _Inner(DataLoader[Any]):
    """What reads: a map-style loader whose indices are batches. Everything that makes processes, queues and pins memory is torch's."""

    def __init__(self, reader: BatchReader, outer: StreamingDataLoader) -> None:
        self.feed = _Feed()
        self.version = reader.version
        super().__init__(
            reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.feed,
            collate_fn=_pack if outer.num_workers and not outer.pin_memory else _same,
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

    def __init__(self, results: Iterator[Any]) -> None:
        self._results = results

    def __next__(self) -> Fetched:
        fetched: Fetched = next(self._results)
        return fetched._replace(batch=_unpack(fetched.batch)) if type(fetched.batch) in _HOLDERS else fetched


class _Feed:
    """The sampler of a loader that lives longer than a pass."""

    batches: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.batches


class _Packed:
    """A tensor on its way from a worker, as an array: torch would send a file descriptor, which costs more than the bytes of most."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


_HOLDERS = (_Packed, dict, list, tuple)


def _pack(fetched: Any) -> Fetched:
    packed: Fetched = fetched._replace(batch=_packed(fetched.batch))
    return packed


def _packed(batch: Any) -> Any:
    kind = type(batch)
    if kind is torch.Tensor:
        plain = batch.layout is torch.strided and batch.device.type == "cpu" and not batch.requires_grad and batch.dtype in _SENT
        return _Packed(batch.numpy()) if plain and batch.nbytes <= _LARGE else batch
    if kind is dict:
        return {key: _packed(value) for key, value in batch.items()}
    return kind(map(_packed, batch)) if kind in (list, tuple) and not _is_text(batch) else batch


def _unpack(batch: Any) -> Any:
    kind = type(batch)
    if kind is _Packed:
        return torch.from_numpy(batch.array)
    if kind is dict:
        return {key: _unpack(value) for key, value in batch.items()}
    return kind(map(_unpack, batch)) if kind in (list, tuple) and not _is_text(batch) else batch


def _is_text(batch: Any) -> bool:
    """Whether it is a column of texts or bytes, which are many and hold no tensors."""
    return bool(batch) and type(batch[0]) in (str, bytes) and type(batch[-1]) in (str, bytes)


def _same(value: Any) -> Any:
    return value


def _convert_single(convert: Collate, samples: list[Any]) -> Any:
    return convert(samples[0])
