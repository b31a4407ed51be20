"""How many requests a process has in flight at a store: as many as it is asked for, until the store says that these are too many."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Flight", "Throttle", "add_told", "throttle_of", "throttled_requests"]

_TELL = 10.0
"""Seconds until anybody is told again that a store does not answer."""
_GROWTH = 4.0
"""By how many requests the limit rises in a second without refusals, beside one for each round of answers."""


@dataclass(slots=True)
class Flight:
    """A request that is under way."""

    busy: bool = False
    """Whether the store said that it has too many requests."""


class Throttle:
    """The limit of a store, shared by the threads of a process.

    It is halved when the store is too busy for a request, once for all that were in flight then, and rises by one with each round of
    answers. There is none before, nor once it has come back to what was in flight when it fell.

    A request has its place until its answer has come whole, since some stores count what they are still sending. That may take minutes, so
    the limit also rises with the time for which others wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._changed = threading.Condition(threading.Lock())
        self.limit = math.inf
        self.flying = 0
        self.refused = 0
        """How many answers said that the store is too busy."""
        self._most, self._falls, self._rose = 0, 0, 0.0
        self._told = -math.inf

    @contextmanager
    def flight(self) -> Iterator[Flight]:
        """One request, which waits for its turn."""
        with self._changed:
            while self.flying + 1 > self.limit:
                self._changed.wait(1 / _GROWTH)
                self._rise(0)
            self.flying += 1
            falls = self._falls
        flight, answered = Flight(), False
        try:
            yield flight
            answered = True
        finally:
            with self._changed:
                if flight.busy:
                    self._fall(falls)
                elif answered and self.limit < math.inf:
                    self._rise(1)
                self.flying -= 1
                self._changed.notify_all()

    def may_tell(self) -> bool:
        """Whether it is time to tell that the store does not answer, which counts as told then."""
        with self._changed:
            now = time.monotonic()
            if due := now - self._told >= _TELL:
                self._told = now
            return due

    def _fall(self, falls: int) -> None:
        self.refused += 1
        if falls == self._falls:  # one from before the last fall says nothing about what that has brought
            if self.limit == math.inf:
                self._most = self.flying
            self.limit = max(1.0, min(self.limit, self.flying) / 2)
            self._falls += 1
        self._rose = self.clock()

    def _rise(self, answers: int) -> None:
        now = self.clock()
        self.limit += answers / self.limit + _GROWTH * (now - self._rose)
        self._rose = now
        if self.limit >= self._most:
            self.limit = math.inf


_throttles: dict[str, Throttle] = {}
_told: dict[object, int] = {}


def throttle_of(server: str) -> Throttle:
    """The limit of this process for a store."""
    return _throttles.get(server) or _throttles.setdefault(server, Throttle())


def throttled_requests() -> int:
    """How many answers said that a store is too busy, to this process or to those that have sent its requests."""
    return sum(list(_told.values())) + sum(throttle.refused for throttle in list(_throttles.values()))


def add_told(helper: object, refused: int) -> None:
    """Notes how many such answers a process has had so far that sends the requests of this one."""
    _told[helper] = max(_told.get(helper, 0), refused)


def _after_fork() -> None:
    # What is in flight in the parent is not in flight here, and the locks may be held.
    _told.clear()
    _throttles.clear()


os.register_at_fork(after_in_child=_after_fork)
