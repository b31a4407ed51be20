"""Reads one batch: a list of places to a collated batch, in whatever process or thread it is wanted."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from liveset.errors import (
    BadSample,
    CollateError,
    Corrupt,
    DatasetError,
    Erased,
    MissingDependency,
    NotFound,
    PickleRefused,
    StorageError,
    UnsupportedFormat,
)
from liveset.format.batch import BatchDecoder, part_of
from liveset.format.chunk import ClassicChunk
from liveset.read.epoch import Run
from liveset.read.options import failed_in_transform, transformed
from liveset.read.plan import Offsets
from liveset.read.training import Training
from liveset.storage import throttled_requests

OnError: TypeAlias = Literal["raise", "skip"]
Collate: TypeAlias = Callable[[list[Any]], Any]

# What says nothing about a single sample: the storage, the installation, or the arguments of the dataset.
_NOT_THE_SAMPLE = (NotFound, StorageError, MissingDependency, PickleRefused, UnsupportedFormat)

# The C library keeps up to twice this; blocks of 32 MB and more have no effect on it.
_BLOCK = 31 << 20

_PAGE = 4_096


class Task(NamedTuple):
    """One batch that is to be read.

    Attributes:
        places: of its samples: numbers of chunks, and slots in each.
        ahead: the chunk that it ends in, and those that the same reader is going to read after it, where they are fetched from afar.
        order: for each of these samples its place in the batch, where that is given: then the samples may be any ones, and those that
            stand beside them need not be wanted soon.
    """

    places: list[Run]
    ahead: tuple[int, ...] = ()
    order: Offsets | None = None

    def flat(self) -> list[tuple[int, int]]:
        """Return number of the chunk and slot of each sample, as they stand in the batch."""
        found = [(number, slot) for number, slots in self.places for slot in slots.tolist()]
        return found if self.order is None else [found[place] for place in np.argsort(self.order).tolist()]


class Fetched(NamedTuple):
    """A batch on its way to the training loop.

    Attributes:
        batch: as the loop gets it.
        samples: how many are in it.
        skipped: samples that were left out because they could not be read.
        error: the sample that could not be read, or the samples that make no batch, where that ends the loop.
        throttled: how often an object store was too busy, to the process that read it, since its batch before.
    """

    batch: Any
    samples: int
    skipped: tuple[BadSample, ...] = ()
    error: BadSample | CollateError | None = None
    throttled: int = 0


@dataclass(frozen=True, slots=True)
class Together:
    """How a whole batch is decoded at once.

    Attributes:
        collate: what puts values together that are decoded one by one.
        finish: what is applied to the batch, such as making tensors of its arrays.
    """

    collate: Callable[[Any], Any]
    finish: Callable[[Any], Any]


class BatchReader:
    """A map-style dataset whose items are batches, and whose indices are tasks.

    Args:
        dataset: what is read; it stays at its version.
        collate: what makes a batch of samples.
        on_error: whether a sample that cannot be read ends the loop or is left out.
        together: how to decode a batch at once, where ``collate`` does nothing that this would not do.
    """

    def __init__(self, dataset: Training, collate: Collate, on_error: OnError, together: Together | None = None) -> None:
        self.dataset, self._collate, self._skip = dataset, collate, on_error == "skip"
        self._together = together if isinstance(dataset, Training) and not dataset.transforms else None
        self._decoder: BatchDecoder | None = None
        self._began, self._throttled = False, 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoder": None, "_began": False}

    @property
    def version(self) -> object:
        """What is read, to be compared by ``is``."""
        return self.dataset.opened

    def __getitem__(self, task: Task) -> Fetched:
        if not self._began:
            self._began, self._throttled = True, throttled_requests()
            keep_memory()
        if task.ahead:
            self.dataset.expect(task.ahead)
        fetched = self._fetch(task)
        if (throttled := throttled_requests()) != self._throttled:
            fetched, self._throttled = fetched._replace(throttled=throttled - self._throttled), throttled
        return fetched

    def _fetch(self, task: Task) -> Fetched:
        if task.order is not None and self.dataset.in_parts([number for number, _ in task.places]):
            samples = self._in_parts(task)
            return self._batch(samples) if samples is not None else self._one_by_one(task)
        if self._together is not None:
            try:
                fetched = self._at_once(task, self._together)
            except _NOT_THE_SAMPLE:
                raise
            except Exception:  # which sample it is, and whether it is left out, shows when they are read one by one
                fetched = None
            if fetched is not None:
                return fetched
        return self._one_by_one(task)

    def copies(self, task: Task) -> bool:
        """Whether such a batch, of which there has been one, is made by no more than copying what lies on a local disk."""
        if task.ahead or task.order is not None or self._together is None or self._decoder is None or not self._decoder.copies:
            return False
        return all(isinstance(self.dataset.chunk(number), ClassicChunk) for number, _ in task.places)

    def touch(self, task: Task) -> None:
        """Have the system fetch what a batch is made of, for another process to read it."""
        with suppress(Exception):  # it fails there, too
            for number, slots in task.places:
                chunk: Any = self.dataset.chunk(number)
                pages = np.frombuffer(chunk.buffer, np.uint8)
                for start, end in zip(chunk.offsets[slots].tolist(), chunk.offsets[slots + 1].tolist(), strict=True):
                    pages[start:end:_PAGE].max()

    def _at_once(self, task: Task, together: Together) -> Fetched | None:
        if self._decoder is None:
            self._decoder = self.dataset.batch_decoder(together.collate)
        if not self._decoder.supported:
            self._together = None
            return None
        parts = []
        for number, slots in task.places:
            part = part_of(self.dataset.chunk(number), slots)
            if part is None:
                return None
            parts.append(part)
        return Fetched(together.finish(self._decoder.decode(parts, task.order)), sum(len(slots) for _, slots in task.places))

    def _in_parts(self, task: Task) -> list[Any] | None:
        """Return samples that are fetched by themselves; None if that goes wrong."""
        try:
            return self.dataset.read_places(task.flat())
        except _NOT_THE_SAMPLE:
            raise
        except Exception:  # as above
            return None

    def _one_by_one(self, task: Task) -> Fetched:
        samples: list[Any] = []
        skipped: list[BadSample] = []
        for number, slot in task.flat():
            try:
                samples.append(self._read(number, slot))
            except _NOT_THE_SAMPLE:
                raise
            except Exception as error:
                bad = self._explain(number, slot, error)
                if not self._skip:
                    return Fetched(None, 0, error=bad)
                skipped.append(bad)
        return self._batch(samples, tuple(skipped))

    def _batch(self, samples: list[Any], skipped: tuple[BadSample, ...] = ()) -> Fetched:
        try:
            return Fetched(self._collate(samples) if samples else None, len(samples), skipped)
        except CollateError as error:  # raised by a worker of torch, it would lose its attributes
            return Fetched(None, 0, error=error)

    def _read(self, number: int, slot: int) -> Any:
        dataset = self.dataset
        return transformed(dataset.chunk(number).read(slot), dataset.transforms)

    def _explain(self, number: int, slot: int, error: Exception) -> BadSample:
        try:
            position, key, file = self.dataset.describe_place(number, slot)
        except DatasetError:  # the keys cannot be read either
            position, key, file = -1, None, f"chunk {number}"
        named = f"key {key!r}, " if key is not None else ""
        where = f"slot {slot} of {file}" if isinstance(slot, int) else file  # a row of several datasets
        sample, told = f"the sample at position {position} ({named}{where})", f"{type(error).__name__}: {error}"
        if isinstance(error, Erased):
            text = f"{sample} was erased by a purge, for good: on_error='skip' leaves such samples out, and a newer version has none."
        elif isinstance(error, Corrupt):
            text = (
                f"{sample} cannot be read: {told}\n`liveset verify` finds all that is damaged, `liveset repair` mends it; "
                "on_error='skip' leaves such samples out."
            )
        elif failed_in_transform(error):
            text = f"the transform failed on {sample}: {told}\nMend the transform, or pass on_error='skip' to leave such samples out."
        else:
            text = f"{sample} cannot be read: {told}\nMend or delete it, or pass on_error='skip' to leave such samples out."
        bad = BadSample(
            text,
            position=position,
            key=key,
            chunk=file,
            slot=slot,
        )
        bad.__cause__ = error
        if multiprocessing.parent_process() is not None:  # a cause does not survive the way to another process
            bad.add_note("".join(traceback.format_exception(error)).rstrip())
        return bad


def keep_memory() -> None:
    """Have the C library keep the memory of a batch that is gone for the next one.

    The one of Linux gives what is freed back to the system at once, which then has to clear it again: for large batches that takes longer
    than all else. How much it keeps grows with the largest block that was ever freed, so one is that is never written to.
    """
    np.empty(_BLOCK, np.uint8)
