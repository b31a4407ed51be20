"""What the parent process and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from liveset.write.plan import Span
from liveset.write.spans import SpanResult


@dataclass(frozen=True, slots=True)
class Open:
    """To a worker: the inputs that follow belong to this span and go into chunk files."""

    span: Span
    rank: int


@dataclass(frozen=True, slots=True)
class Batch:
    """To a worker: inputs, from position ``first`` on, as ``shipping.pack_inputs`` gives them."""

    first: int
    count: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """To a worker: the span ends before this input."""

    stop: int


@dataclass(frozen=True, slots=True)
class Quit:
    """To a worker: there is no more work."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: give up after the input that is worked on."""


@dataclass(frozen=True, slots=True)
class Done:
    """From a worker: the oldest batch is done.

    Attributes:
        seconds: how long it took.
        samples: how many samples it gave.
        skipped: how many inputs gave none.
        data: the samples, as a ``shipping.Packer`` gives them, where no span is open.
        owners: the input that each of them belongs to.
    """

    seconds: float
    samples: int
    skipped: int
    data: bytes = b""
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """From a worker: the open span is durable."""

    result: SpanResult


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker, its last word: what went wrong."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Bye:
    """From a worker, its last word: it has done everything, or stopped as told."""


Order: TypeAlias = Open | Batch | Close | Quit | Stop
Reply: TypeAlias = Done | Closed | Failed | Bye
