"""One span of inputs on its way into chunk files."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from liveset.edit.chunkfiles import ChunkLimit
from liveset.format.codec import Compression
from liveset.format.schema import Schema
from liveset.storage import Store
from liveset.write.checkpoint import SpanLog
from liveset.write.chunker import ChunkWriter, StagedChunk
from liveset.write.failures import storing_failed
from liveset.write.keying import KeyRule
from liveset.write.plan import Span

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """How a run writes its chunks, the same in all of its processes.

    Attributes:
        store: where the dataset is.
        token: random part of the names of this run's files.
        limit: when a chunk is full.
        compression: of the chunks.
        schema: that of the dataset which is appended to; samples that do not fit are refused.
        nullable: fields that may be None from the start.
        allow_pickle: store objects of any type with pickle.
        first_number: where the counter in the file names starts.
        log: folder of the checkpoint, when one is kept.
        whole: nothing but whole chunks is written before the inputs end.
        keys: how the keys of samples are found, for a dataset with keys.
    """

    store: Store
    token: str
    limit: ChunkLimit
    compression: Compression | None = None
    schema: Schema | None = None
    nullable: tuple[str, ...] = ()
    allow_pickle: bool = False
    first_number: int = 0
    log: str | None = None
    whole: bool = False
    keys: KeyRule | None = None


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What became of a span.

    Attributes:
        span: the inputs.
        rank: number of the writer.
        inputs: how many inputs were done.
        skipped: how many of them gave no sample.
        chunks: the files.
    """

    span: Span
    rank: int
    inputs: int
    skipped: int
    chunks: list[StagedChunk]

    @property
    def samples(self) -> int:
        """How many samples are in the chunks."""
        return sum(chunk.record.samples for chunk in self.chunks)


@dataclass(slots=True)
class _Mark:
    """After ``samples`` samples of the span, the inputs before ``input`` were done, and ``skipped`` of them gave nothing.

    The ``run`` inputs after it gave one sample each: most often one mark stands for all inputs of a chunk.
    """

    samples: int
    input: int
    skipped: int
    run: int = 0


class SpanWriter:
    """Takes the samples of a span, keeps the checkpoint if there is one, and ends in a SpanResult."""

    def __init__(self, store: Store, settings: ChunkSettings, span: Span, rank: int) -> None:
        self.span, self._rank, self._settings = span, rank, settings
        self.skipped = 0
        self._log = SpanLog(store, settings.log, span, settings.token) if settings.log is not None else None
        self._marks: deque[_Mark] = deque()
        self._reached = _Mark(0, span.start, 0)
        self._chunks = ChunkWriter(
            store,
            token=settings.token,
            rank=rank,
            limit=settings.limit,
            compression=settings.compression,
            schema=settings.schema,
            nullable=settings.nullable,
            allow_pickle=settings.allow_pickle,
            first_number=settings.first_number,
            key=settings.keys,
            on_chunk=self._flushed if self._log is not None else None,
        )
        self.add = self._chunks.add

    @property
    def logged(self) -> bool:
        """Whether a checkpoint is kept, so that ``mark`` must be called."""
        return self._log is not None

    @property
    def fixed(self) -> bool:
        """Whether the samples must fit the schema of a dataset that stands already."""
        return self._settings.schema is not None

    @property
    def samples(self) -> int:
        """How many samples were added."""
        return self._chunks.samples

    def mark(self, inputs_done: int, pending: int = 0) -> None:
        """Note that the inputs before ``inputs_done`` are done with the samples added so far, and ``pending`` more.

        For an input of one sample this is said before the sample is added: adding it may write the chunk that ends with it.
        """
        samples = self._chunks.samples + pending
        last = self._marks[-1] if self._marks else None
        if last is not None and last.samples + last.run == samples:  # the input gave nothing
            if last.run == 0:
                last.input, last.skipped = inputs_done, self.skipped
                return
            last.run -= 1
        elif last is not None and last.samples + last.run + 1 == samples and last.input + last.run + 1 == inputs_done:
            last.run += 1
            return
        self._marks.append(_Mark(samples, inputs_done, self.skipped))

    def finish(self, inputs_done: int) -> SpanResult:
        """Write what is left; everything is durable afterwards."""
        try:
            self._chunks.finish()
        except Exception as error:
            raise storing_failed(error, inputs_done - 1) from error
        if self._log is not None:
            self._log.close(inputs_done, 0, self.skipped)
        return SpanResult(self.span, self._rank, inputs_done - self.span.start, self.skipped, self._chunks.staged)

    def stop(self) -> None:
        """Give up before the end: with a checkpoint the samples so far are kept, else they are forgotten."""
        if self._log is not None and not self._settings.whole:
            try:
                self._chunks.finish()
                self._log.close(*self._passed(self._chunks.samples))
                return
            except Exception as error:  # the disk that is full was the reason to stop; what the log holds already is kept
                _log.debug("The last samples before the stop could not be kept: %s", error)
        self._chunks.abort()

    def _flushed(self, chunk: StagedChunk) -> None:
        assert self._log is not None
        self._log.chunk(chunk, *self._passed(chunk.end))

    def _passed(self, samples: int) -> tuple[int, int, int]:
        """Return, for so many samples: the next input, how many samples of it there are, how many inputs gave nothing."""
        while self._marks and self._marks[0].samples <= samples:
            mark = self._marks[0]
            step = min(mark.run, samples - mark.samples)
            self._reached = _Mark(mark.samples + step, mark.input + step, mark.skipped)
            if step < mark.run:
                break
            self._marks.popleft()
        return self._reached.input, samples - self._reached.samples, self._reached.skipped


def in_order(results: Iterable[SpanResult], *, by_input: bool) -> list[SpanResult]:
    """Return results in the order of their inputs, or of their writers."""
    if by_input:
        return sorted(results, key=lambda result: result.span)
    return sorted(results, key=lambda result: result.rank)
