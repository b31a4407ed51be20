"""Feeding chunks to a function: how a transform hands its chunks out, here or to workers, and takes what became of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from liveset.edit.meter import Progress
from liveset.write.chunktask import Part
from liveset.write.messages import Batch, Closed, Done, Order, Quit
from liveset.write.plan import Span, share
from liveset.write.shipping import Packer, unpack

__all__ = ["Feed", "Sink", "items_of", "shares_of"]

_TOLD_SECONDS = 0.1
"""How often the progress is told of samples that are done in this process."""


class Sink:
    """Takes what became of parts that are done in this process."""

    logged = False
    fixed = False

    def __init__(self) -> None:
        self.skipped = 0
        self.results: list[Any] = []
        self.add = self.results.append

    def mark(self, inputs_done: int, pending: int = 0) -> None:
        """Nothing to note."""


class Feed:
    """Hands out chunks; a worker gets the positions of one in several batches.

    Args:
        queues: the chunks that each worker takes from; it may be the same queue for all.
        take: called with what became of each.
        progress: what to tell.
    """

    idle_wait: float | None = None

    def __init__(self, queues: Sequence[deque[Part]], take: Callable[[Any], None], progress: Progress) -> None:
        self._queues, self._take, self._progress, self._packer = queues, take, progress, Packer()
        self._left = [range(0)] * len(queues)

    def next(self, slot: int, size: int) -> Order | None:
        left, part = self._left[slot], None
        if not left:
            if not self._queues[slot]:
                return Quit()
            part = self._queues[slot].popleft()
            left = range(part.first, part.first + part.record.samples)
        batch, self._left[slot] = left[:size], left[size:]
        self._packer.add(batch if part is None else (part, *batch[1:]))
        return Batch(batch.start, len(batch), self._packer.take())

    def done(self, slot: int, batch: Batch, reply: Done) -> None:
        self._progress.add(batch.count)
        for result in unpack(reply.data):
            self._take(result)

    def closed(self, slot: int, reply: Closed) -> None:
        raise AssertionError("no spans are open here")


def items_of(part: Part, progress: Progress | None) -> Iterator[Part | int]:
    """Yield a part and the positions behind its first sample, and tell the progress now and then."""
    told, due = 0, time.monotonic() + _TOLD_SECONDS
    yield part
    for done in range(1, part.record.samples):
        yield part.first + done
        if progress is not None and time.monotonic() >= due:
            progress.add(done - told)
            told, due = done, time.monotonic() + _TOLD_SECONDS
    if progress is not None:
        progress.add(part.record.samples - told)


def shares_of(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Share out chunks among writers, in order; each knows its last one."""
    weights = [part.record.samples for part in parts]
    shares = [parts[span.start : span.stop] for (span,) in share([Span(0, 0, len(parts))], count, weights=weights)]
    return [[replace(part, rank=rank, last=part is some[-1]) for part in some] for rank, some in enumerate(shares)]
