"""Who gets which inputs: the three ways to hand them out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from liveset.edit.meter import Progress
from liveset.write.failures import describe, sample_refused
from liveset.write.inputs import END, PENDING, Indexed, Stream
from liveset.write.messages import Batch, Close, Closed, Done, Open, Order, Quit
from liveset.write.plan import Span
from liveset.write.shipping import Packer, pack_inputs, unpack, unpack_all
from liveset.write.spans import SpanResult, SpanWriter

# Inputs that come one after another are collected no longer and no larger than this before they are sent.
_GATHER_SECONDS, _GATHER_BYTES = 0.05, 1_000_000
# How long to wait for an empty queue before looking after the workers again.
_QUEUE_WAIT = 0.05


class SpanFeed:
    """Each worker has spans of its own: the samples keep the order of the inputs.

    Args:
        inputs: all inputs.
        parts: the spans of each worker.
        first_rank: number of the first span; each gets a number of its own.
        progress: what to tell.
    """

    idle_wait: float | None = None

    def __init__(self, inputs: Indexed, parts: Sequence[Sequence[Span]], first_rank: int, progress: Progress) -> None:
        self._inputs, self._progress, self._packer = inputs, progress, Packer()
        self.results: list[SpanResult] = []
        rank = first_rank
        self._orders: list[deque[Open]] = []
        for part in parts:
            self._orders.append(deque(Open(span, rank + number) for number, span in enumerate(part)))
            rank += len(part)
        self._open: list[Span | None] = [None] * len(parts)
        self._at = [0] * len(parts)

    def next(self, slot: int, size: int) -> Order | None:
        span = self._open[slot]
        if span is None:
            if not self._orders[slot]:
                return Quit()
            order = self._orders[slot].popleft()
            self._open[slot], self._at[slot] = order.span, order.span.start
            return order
        start = self._at[slot]
        if start == span.stop:
            self._open[slot] = None
            return Close(span.stop)
        self._at[slot] = stop = min(start + size, span.stop)
        return _batch(self._packer, self._inputs, start, stop)

    def done(self, slot: int, batch: Batch, reply: Done) -> None:
        self._progress.add(batch.count, reply.samples)

    def closed(self, slot: int, reply: Closed) -> None:
        self.results.append(reply.result)


class SharedFeed:
    """Whoever is free takes the next inputs: the samples come in any order.

    Args:
        inputs: the inputs.
        start: position of the first one that is left.
        first_rank: number of the first worker's chunks.
        progress: what to tell.
    """

    def __init__(self, inputs: Indexed | Stream, start: int, first_rank: int, progress: Progress) -> None:
        self._inputs, self._first_rank, self._progress = inputs, first_rank, progress
        self._gatherer = Gatherer(inputs, start) if isinstance(inputs, Stream) else None
        self._at, self._packer = start, Packer()
        self._opened: set[int] = set()
        self._closed: set[int] = set()
        self.results: list[SpanResult] = []

    @property
    def idle_wait(self) -> float | None:
        return self._gatherer.idle_wait if self._gatherer is not None else None

    @property
    def taken(self) -> int:
        """The position after the last input that was handed out."""
        return self._gatherer.at if self._gatherer is not None else self._at

    def next(self, slot: int, size: int) -> Order | None:
        if slot in self._closed:
            return Quit()
        if slot not in self._opened:
            self._opened.add(slot)
            return Open(Span(0, 0, 0), self._first_rank + slot)
        batch = self._gatherer.take(size) if self._gatherer is not None else self._slice(size)
        if batch is END:
            self._closed.add(slot)
            return Close(0)
        return None if batch is PENDING else batch

    def _slice(self, size: int) -> Any:
        assert isinstance(self._inputs, Indexed)
        start = self._at
        self._at = stop = min(start + size, len(self._inputs))
        return END if start == stop else _batch(self._packer, self._inputs, start, stop)

    def done(self, slot: int, batch: Batch, reply: Done) -> None:
        self._progress.add(batch.count, reply.samples)

    def closed(self, slot: int, reply: Closed) -> None:
        self.results.append(reply.result)


class OrderedFeed:
    """Workers call ``fn``, the parent writes what they send back in the order of the inputs.

    For inputs that come one after another nobody knows beforehand where a worker's part would begin.

    Args:
        inputs: the inputs.
        start: position of the first one that is left.
        writer: takes the samples.
        workers: how many there are.
        progress: what to tell.
    """

    def __init__(self, inputs: Stream, start: int, writer: SpanWriter, workers: int, progress: Progress) -> None:
        self._gatherer, self._writer, self._progress = Gatherer(inputs, start), writer, progress
        self._turn = start
        self._waiting: dict[int, tuple[Batch, Done]] = {}
        self._under_way = 0
        # Results that come before their turn wait in memory, so only so many batches may be under way.
        self._window = 4 * workers

    @property
    def idle_wait(self) -> float | None:
        return self._gatherer.idle_wait

    @property
    def taken(self) -> int:
        """The position after the last input that was handed out."""
        return self._gatherer.at

    def next(self, slot: int, size: int) -> Order | None:
        if self._under_way >= self._window:
            return None
        batch = self._gatherer.take(size)
        if batch is END:
            return Quit()
        if batch is PENDING:
            return None
        self._under_way += 1
        return batch  # type: ignore[no-any-return]

    def done(self, slot: int, batch: Batch, reply: Done) -> None:
        self._waiting[batch.first] = (batch, reply)
        while (pair := self._waiting.pop(self._turn, None)) is not None:
            self._write(*pair)
            self._turn += pair[0].count
            self._under_way -= 1

    def closed(self, slot: int, reply: Closed) -> None:
        raise AssertionError("no worker writes here")

    def _write(self, batch: Batch, reply: Done) -> None:
        for owner, sample in zip(reply.owners, unpack(reply.data), strict=True):
            try:
                self._writer.add(sample)
            except Exception as error:
                item = next(item for number, item in enumerate(unpack_all(batch.data), batch.first) if number == owner)
                raise sample_refused(owner, item, error, fixed=self._writer.fixed) from error
        self._writer.skipped += reply.skipped
        self._progress.add(batch.count, reply.samples)


class Gatherer:
    """Makes batches of inputs that come one after another; each is pickled before the next is asked for, which may change it."""

    def __init__(self, stream: Stream, start: int) -> None:
        self._stream, self._packer = stream, Packer()
        self.at = start
        self._ended = False
        self._pending = False

    @property
    def idle_wait(self) -> float | None:
        """Nothing tells when a queue has got something, so it is asked again and again."""
        return 0.0 if self._pending else None

    def take(self, size: int) -> Any:
        """Return a Batch of up to ``size`` inputs, ``END`` or ``PENDING``."""
        if self._ended:
            return END
        until = time.monotonic() + _GATHER_SECONDS
        count = 0
        while count < size and self._packer.size < _GATHER_BYTES and (count == 0 or time.monotonic() < until):
            item = self._stream.poll(_QUEUE_WAIT if count == 0 else 0)
            if item is END or item is PENDING:
                self._ended = item is END
                break
            self._packer.add((item,))
            count += 1
        self._pending = count == 0 and not self._ended
        if count == 0:
            return END if self._ended else PENDING
        batch = Batch(self.at, count, self._packer.take())
        self.at += count
        return batch


def _batch(packer: Packer, inputs: Indexed, start: int, stop: int) -> Batch:
    items = inputs.take(start, stop) if inputs.stable else inputs.each(start, stop)
    try:
        data = pack_inputs(packer, items, whole=inputs.stable)
    except Exception as error:
        shown = describe(inputs.take(start, start + 1)[0])
        error.add_note(f"The inputs from {start} on ({shown}, ...) cannot be sent to a worker process; num_workers=1 runs in this one.")
        raise
    return Batch(start, stop - start, data)
