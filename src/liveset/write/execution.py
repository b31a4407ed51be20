"""Carrying out a run: in the calling process, in workers, or first here and then there."""

from __future__ import annotations

import logging
import multiprocessing
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from liveset.edit.meter import Progress
from liveset.errors import WorkerError
from liveset.storage import Store
from liveset.write.failures import FOUND
from liveset.write.feeds import OrderedFeed, SharedFeed, SpanFeed
from liveset.write.fetching import AHEAD, Fetching
from liveset.write.inputs import EMPTY, Indexed, Inputs, Stream
from liveset.write.options import Workers
from liveset.write.plan import Span, share
from liveset.write.runner import Runner
from liveset.write.shipping import dump_function, warn_if_large
from liveset.write.spans import ChunkSettings, SpanResult, SpanWriter, in_order
from liveset.write.workers import Feed, Pool

_log = logging.getLogger("liveset")

# Inputs are done in slices of about this long, after which progress is shown and the clock is read.
_SLICE_SECONDS, _SLICE_INPUTS = 0.02, 50_000
# A run moves to worker processes when it has taken so long already, and so much is left.
_TINY, _WORTHWHILE = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done.

    Attributes:
        fn: what the user wrote.
        inputs: what it is called with.
        settings: how chunks are written.
        workers: where the work is done.
        ordered: whether the samples keep the order of the inputs.
        weights: how much work each input is.
        align: size of the whole chunks that all blocks but the last hold.
        spans: the inputs that are left to do, where they can be counted.
    """

    fn: Callable[[Any], Any]
    inputs: Inputs
    settings: ChunkSettings
    workers: Workers
    ordered: bool
    weights: Sequence[float] | None = None
    align: int | None = None
    spans: tuple[Span, ...] = ()


class Execution:
    """One run of a job."""

    def __init__(self, store: Store, job: Job, progress: Progress) -> None:
        self._store, self._job, self._progress = store, job, progress
        self._results: list[SpanResult] = []
        self._current = array("q", [-1])
        self._began = time.perf_counter()
        self._may_move = job.workers.count is None and job.workers.most > 1 and not multiprocessing.current_process().daemon
        self._payload: bytes | None = None

    def run(self) -> list[SpanResult]:
        """Do all inputs; the chunks are durable afterwards.

        Returns:
            What became of each span, in the order in which the samples belong.

        Raises:
            WorkerError: ``fn`` raised, or a worker died.
            DatasetError: a sample could not be stored.
            ValueError: there were no inputs.
        """
        inputs = self._job.inputs
        try:
            if isinstance(inputs, Stream):
                self._stream(inputs)
            elif self._job.workers.forced:
                self._pool_spans(inputs, list(self._job.spans))
            else:
                left = self._spans_here(inputs)
                if left:
                    self._pool_spans(inputs, left)
        finally:
            self._progress.close()
        return in_order(self._results, by_input=self._job.ordered)

    # In the calling process

    def _spans_here(self, inputs: Indexed) -> list[Span]:
        """Do the spans one after another; return those that are better done by workers."""
        left = deque(self._job.spans)
        total = sum(map(len, left))
        while left:
            span = left.popleft()
            writer = self._writer(span)
            with _ended(writer):
                stop = self._span_here(inputs, span, writer, total)
                self._results.append(writer.finish(stop))
            if stop < span.stop:
                left.appendleft(Span(stop, 0, span.stop))
                return list(left)
        return []

    def _span_here(self, inputs: Indexed, span: Span, writer: SpanWriter, total: int) -> int:
        """Do the inputs of a span; return before which one this ended."""
        runner = Runner(self._job.fn, writer, self._current, skip=span.skip)
        at, size = span.start, 1
        while at < span.stop:
            stop = min(at + size, span.stop)
            if isinstance(self._job.fn, Fetching) and inputs.stable:
                self._job.fn.ahead(at, inputs.take(at, min(stop + AHEAD, span.stop)))
            samples, began = writer.samples, time.perf_counter()
            runner.run(at, inputs.take(at, stop) if inputs.stable else inputs.each(at, stop))
            self._progress.add(stop - at, writer.samples - samples)
            size = _resized(size, stop - at, time.perf_counter() - began)
            at = stop
            aligned = self._job.align is None or (at - span.start) % self._job.align == 0
            if self._may_move and aligned and at < span.stop and self._worth_moving(total):
                break
        return at

    def _stream(self, inputs: Stream) -> None:
        """Do inputs that come one after another."""
        writer = self._writer(Span(0, 0, 0))
        with _ended(writer):
            count = self._stream_all(inputs, writer)
            if count == 0:
                raise ValueError(EMPTY)
            self._results.append(writer.finish(count))

    def _stream_all(self, inputs: Stream, writer: SpanWriter) -> int:
        count, ended = 0, False
        if not self._job.workers.forced:
            count, ended = self._stream_here(inputs, writer)
        if ended:
            return count
        workers = self._job.workers.most if inputs.length is None else min(self._job.workers.most, max(inputs.length, 1))
        feed = (
            OrderedFeed(inputs, count, writer, workers, self._progress)
            if self._job.ordered
            else SharedFeed(inputs, count, 1, self._progress)
        )
        self._pool(workers, feed)
        if isinstance(feed, SharedFeed):
            self._results += feed.results
        return feed.taken

    def _stream_here(self, inputs: Stream, writer: SpanWriter) -> tuple[int, bool]:
        """Do inputs until they end or are better done by workers; return how many, and whether they ended."""
        runner = Runner(self._job.fn, writer, self._current)
        source = _Timed(iter(inputs))
        at, size = 0, 1
        while True:
            samples, began = writer.samples, time.perf_counter()
            count = runner.run(at, islice(source, size))
            at += count
            self._progress.add(count, writer.samples - samples)
            if count < size:
                return at, True
            size = _resized(size, count, time.perf_counter() - began)
            # Workers help with fn alone: where the inputs take most of the time there is nothing to gain.
            if self._may_move and source.seconds < 0.5 * self._seconds() and self._worth_moving(inputs.length):
                return at, False

    def _writer(self, span: Span) -> SpanWriter:
        return SpanWriter(self._store, self._job.settings, span, len(self._results))

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _worth_moving(self, total: int | None) -> bool:
        """Return whether so much is left that starting processes pays off, and whether it can be done."""
        seconds, done = self._seconds(), self._progress.inputs
        if seconds < _TINY or (total is None and seconds < _WORTHWHILE):
            return False
        if total is not None and seconds / done * (total - done) < _WORTHWHILE:
            return False
        try:
            self._payload = dump_function(self._job.fn, self._job.settings)
        except Exception as error:
            _log.debug("fn cannot be sent to worker processes, so the run stays in this one: %s", error)
            self._may_move = False
            return False
        return True

    # In worker processes

    def _pool_spans(self, inputs: Indexed, spans: list[Span]) -> None:
        left = sum(map(len, spans))
        count = min(self._job.workers.most, left)
        if count == 0:
            return
        rank = len(self._results)
        feed: SpanFeed | SharedFeed
        if self._job.ordered:
            parts = share(spans, count, weights=self._job.weights, align=self._job.align)
            count, feed = len(parts), SpanFeed(inputs, parts, rank, self._progress)
        else:
            feed = SharedFeed(inputs, spans[0].start, rank, self._progress)
        self._pool(count, feed)
        self._results += feed.results

    def _pool(self, count: int, feed: Feed) -> None:
        job = self._job
        fn: bytes | tuple[Any, ChunkSettings] = (job.fn, job.settings)
        if job.workers.start_method != "fork":
            fn = self._payload if self._payload is not None else _shipped(job)
            warn_if_large(fn)
        with Pool(count, job.workers.start_method, fn, gentle=job.settings.log is not None) as pool:
            pool.run(feed)


@contextmanager
def _ended(writer: SpanWriter) -> Iterator[None]:
    """End a writer whatever happens: its background thread must not write a file after the clean-up."""
    try:
        yield
    except BaseException:
        writer.stop()
        raise


class _Timed:
    """An iterator that measures how long its items take to come."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.seconds += time.perf_counter() - began


def _resized(size: int, count: int, seconds: float) -> int:
    return max(1, min(int(count * _SLICE_SECONDS / max(seconds, 1e-6)), 4 * size, _SLICE_INPUTS))


def _shipped(job: Job) -> bytes:
    try:
        return dump_function(job.fn, job.settings)
    except Exception as error:
        raise WorkerError(
            f"{FOUND}. Nothing was committed.\nfn cannot be sent to worker processes: {type(error).__name__}: {error}. "
            "Make what it needs inside fn, or run in the calling process with num_workers=1."
        ) from error
