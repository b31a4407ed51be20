"""The loop that calls ``fn`` for one input after another, the same in the calling process and in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any, Protocol

from liveset.write.failures import fn_failed, sample_refused


class Sink(Protocol):
    """Where samples go."""

    skipped: int

    def add(self, sample: Any, /) -> None:
        """Take a sample."""

    @property
    def logged(self) -> bool:
        """Whether ``mark`` must be called."""

    @property
    def fixed(self) -> bool:
        """Whether the samples must fit the schema of a dataset that stands already."""

    def mark(self, inputs_done: int, pending: int = 0) -> None:
        """Note how many inputs are done."""


_END = object()


class Cell(Protocol):
    """A place for one number: a list or array of length 1."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the number."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Change the number."""


class Stopped(Exception):
    """The end of a run: somebody set ``Runner.stopping``."""


class Runner:
    """Calls ``fn`` for inputs and gives the samples to a sink.

    Args:
        fn: what the user wrote: returns a sample, None, or a generator of samples.
        sink: where the samples go.
        current: its only member is set to the position of the input that is worked on.
        skip: so many samples of the first input are in the dataset already.
        remote: in a worker: errors must carry their traceback as text, and ``sys.exit`` in ``fn`` is a failure.
    """

    def __init__(self, fn: Callable[[Any], Any], sink: Sink, current: Cell, *, skip: int = 0, remote: bool = False) -> None:
        self._fn, self._sink, self._current, self._skip, self._remote = fn, sink, current, skip, remote
        self._failures: tuple[type[BaseException], ...] = (Exception, SystemExit) if remote else (Exception,)
        self.stopping = False

    def run(self, first: int, items: Iterable[Any]) -> int:
        """Do the inputs from position ``first`` on; return how many there were."""
        fn, add, current, failures, sink = self._fn, self._sink.add, self._current, self._failures, self._sink
        mark = sink.mark if sink.logged else None
        index = first - 1
        for index, item in enumerate(items, first):
            if self.stopping:
                raise Stopped
            current[0] = index
            try:
                result = fn(item)
            except failures as error:
                raise self._failed(index, item, error) from error
            if result is None:
                sink.skipped += 1
                if mark is not None:
                    mark(index + 1)
            elif type(result) is GeneratorType or self._skip:
                self._several(index, item, result)
            else:
                if mark is not None:
                    mark(index + 1, 1)
                try:
                    add(result)
                except Exception as error:
                    raise sample_refused(index, item, error, fixed=sink.fixed) from error
        current[0] = -1
        return index + 1 - first

    def _several(self, index: int, item: Any, result: Any) -> None:
        """Add what a generator yields, but for the samples that are in the dataset already."""
        samples = result if type(result) is GeneratorType else iter((result,))
        count, skip, self._skip = 0, self._skip, 0
        while True:
            try:
                sample = next(samples, _END)
            except self._failures as error:
                raise self._failed(index, item, error) from error
            if sample is _END:
                break
            if sample is None:
                continue
            count += 1
            if count <= skip:
                continue
            try:
                self._sink.add(sample)
            except Exception as error:
                raise sample_refused(index, item, error, fixed=self._sink.fixed) from error
        if count == 0:
            self._sink.skipped += 1
        if self._sink.logged:
            self._sink.mark(index + 1)

    def _failed(self, index: int, item: Any, error: BaseException) -> Exception:
        return fn_failed(index, item, error, with_traceback=self._remote)
