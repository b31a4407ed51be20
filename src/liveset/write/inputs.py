"""What the inputs are: something that is read by position, or something that comes one after another."""

from __future__ import annotations

import queue as queues
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

NOT_A_SEQUENCE = "The provided inputs should be a non-empty sequence or a streaming dataloader."
EMPTY = "The provided inputs should be non empty."

# The string that ends a queue.
ALL_DONE = "ALL_DONE"


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


# What Stream.poll answers when there is no input.
PENDING: Final = _Mark("PENDING")
END: Final = _Mark("END")


class Indexed:
    """Inputs that are read by position; with a batch size, each input is a list of that many items."""

    def __init__(self, items: Any, batch_size: int | None = None, limit: int | None = None) -> None:
        self._items = items
        self.items = len(items)
        self._count = self.items if limit is None else min(limit, self.items)
        self._batch_size = batch_size
        # Slices of these are cheap and hold what indexing would give.
        self._sliceable = type(items) in (list, tuple, range, str) or type(items).__module__ == "numpy"

    def __len__(self) -> int:
        return -(-self._count // self._batch_size) if self._batch_size else self._count

    @property
    def stable(self) -> bool:
        """Whether items that were taken stay as they are while others are taken."""
        return self._sliceable

    def take(self, start: int, stop: int) -> Sequence[Any]:
        """Return the inputs from ``start`` up to ``stop``."""
        if self._batch_size is None:
            return self._slice(start, stop)
        width = self._batch_size
        return [list(self._slice(at * width, min((at + 1) * width, self._count))) for at in range(start, stop)]

    def each(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the inputs from ``start`` up to ``stop``, each read when it is asked for."""
        if self._sliceable:
            yield from self.take(start, stop)
        else:
            for at in range(start, stop):
                yield from self.take(at, at + 1)

    def _slice(self, start: int, stop: int) -> Sequence[Any]:
        if self._sliceable:
            part: Sequence[Any] = self._items[start:stop]
            return part
        return [self._items[at] for at in range(start, stop)]


class Stream:
    """Inputs that come one after another, from an iterator or a queue."""

    def __init__(
        self, source: Iterator[Any] | Any, length: int | None = None, batch_size: int | None = None, limit: int | None = None
    ) -> None:
        self._queue: Any = source if hasattr(source, "get_nowait") else None
        self._iterator = iter(()) if self._queue is not None else source
        self._left = limit
        self._batch_size = batch_size
        self._group: list[Any] = []
        self._ended = False
        length = length if limit is None or length is None else min(length, limit)
        self.length = length if length is None or batch_size is None else -(-length // batch_size)

    @property
    def waits(self) -> bool:
        """Whether ``poll`` may answer ``PENDING``."""
        return self._queue is not None

    def poll(self, timeout: float | None) -> Any:
        """Return the next input, or ``END``, or ``PENDING`` when the queue stays empty for ``timeout`` seconds (None waits for ever)."""
        if self._batch_size is None:
            return self._next(timeout)
        while len(self._group) < self._batch_size:
            item = self._next(timeout)
            if item is PENDING:
                return PENDING
            if item is END:
                break
            self._group.append(item)
        group, self._group = self._group, []
        return group or END

    def __iter__(self) -> Iterator[Any]:
        while (item := self.poll(None)) is not END:
            yield item

    def _next(self, timeout: float | None) -> Any:
        if self._ended or self._left == 0:
            return END
        item = next(self._iterator, END) if self._queue is None else self._get(timeout)
        if item is END:
            self._ended = True
        elif item is not PENDING and self._left is not None:
            self._left -= 1
        return item

    def _get(self, timeout: float | None) -> Any:
        assert self._queue is not None
        try:
            item = self._queue.get_nowait() if timeout == 0 else self._queue.get(timeout=timeout)
        except queues.Empty:
            return PENDING
        return END if isinstance(item, str) and item == ALL_DONE else item


Inputs = Indexed | Stream


def open_inputs(inputs: Any, queue: Any, *, batch_size: int | None, limit: int | None) -> Inputs:
    """Return the inputs in one of two forms.

    Args:
        inputs: a sequence, an iterable or an iterator.
        queue: a multiprocessing queue instead.
        batch_size: how many items make one input.
        limit: how many items to take at most.

    Raises:
        ValueError: neither, both, empty, or not a thing that can be iterated.
    """
    if inputs is not None and queue is not None:
        raise ValueError("You can either provide `inputs` or `queue`, not both.")
    if queue is not None:
        if not _is_queue(queue):
            raise ValueError(f"The provided `queue` should be a multiprocessing queue. Found {type(queue).__name__}.")
        return Stream(queue, None, batch_size, limit)
    if inputs is None:
        raise ValueError("At least one of `inputs` or `queue` must be provided.")
    if _is_loader(inputs) and batch_size is not None:
        raise ValueError("`batch_size` groups the inputs; pass the batch_size to the dataloader directly.")
    inputs = _plain(inputs)
    length = _length(inputs)
    if length == 0:
        raise ValueError(EMPTY)
    if length is not None and _is_indexed(inputs):
        return Indexed(inputs, batch_size, limit)
    if not isinstance(inputs, Iterable):
        raise ValueError(f"{NOT_A_SEQUENCE} Found {type(inputs).__name__}.")
    return Stream(iter(inputs), length, batch_size, limit)


def _plain(inputs: Any) -> Any:
    """Turn small containers that cannot be read by position into lists."""
    if type(inputs).__module__.partition(".")[0] == "pandas" and hasattr(inputs, "iloc"):
        if getattr(inputs, "ndim", 1) != 1:
            raise ValueError(f"{NOT_A_SEQUENCE} For a table, pass df.to_dict('records') or df.itertuples().")
        return list(inputs)
    if isinstance(inputs, AbstractSet | MappingView | Mapping | deque):
        values: Iterable[Any] = inputs  # type: ignore[assignment]
        return list(values)
    return inputs


def _length(inputs: Any) -> int | None:
    """Return the number of inputs, or None where it is not known."""
    try:
        return len(inputs)
    except TypeError:
        return None


def _bases(value: Any) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}


def _is_loader(inputs: Any) -> bool:
    return "torch.utils.data.dataloader.DataLoader" in _bases(inputs)


def _is_indexed(inputs: Any) -> bool:
    # An IterableDataset has a __getitem__ that it inherits and does not mean.
    return hasattr(inputs, "__getitem__") and "torch.utils.data.dataset.IterableDataset" not in _bases(inputs)


def _is_queue(value: Any) -> bool:
    from multiprocessing.managers import BaseProxy
    from multiprocessing.queues import Queue

    return isinstance(value, Queue) or (isinstance(value, BaseProxy) and hasattr(value, "get_nowait"))
