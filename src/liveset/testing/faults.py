"""Faults: stores that crash or lose answers on purpose."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Literal, TypeVar

from liveset.storage import PRIVATE, Buffer, Entry, Head, Store, Swap, Tag, as_buffers

__all__ = ["FaultyStore", "LossyStore", "SimulatedCrash", "When", "WrappedStore"]

T = TypeVar("T")
When = Literal["before", "after", "torn"]


class SimulatedCrash(BaseException):
    """The process ends here; not an ``Exception``, so that nothing takes it for an error that it could handle."""


class WrappedStore:
    """Passes every call on through ``_call``; the base of stores that misbehave."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def remote(self) -> bool:
        return self.store.remote

    def probe(self) -> None:
        self.store.probe()

    def exists(self) -> bool:
        return self.store.exists()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call("read", lambda: self.store.read(name, start, length))

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        def half() -> None:
            joined = b"".join(bytes(memoryview(part)) for part in as_buffers(data))
            self.store.write(name, joined[: len(joined) // 2])

        self._call("write", lambda: self.store.write(name, data), half)

    def copy(self, source: str, name: str) -> None:
        self._call("copy", lambda: self.store.copy(source, name))

    def write_once(self, name: str, data: bytes) -> None:
        # "Creates a file whole" is what the contract promises, so a torn call leaves at most a file under another name.
        self._call("write_once", lambda: self.store.write_once(name, data), lambda: self._leftover("00000000", data))

    def read_head(self) -> Head | None:
        return self._call("read_head", self.store.read_head)

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        def half() -> None:
            self._leftover("index", data)
            self.store.delete(withdraw)

        return self._call("swap_head", lambda: self.store.swap_head(data, expected, withdraw), half)

    def exclusive(self) -> AbstractContextManager[None]:
        return self.store.exclusive()

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        return self._call("publish", lambda: self.store.publish(name, data, head))

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._call("list", lambda: iter(list(self.store.list(prefix))))

    def delete(self, names: Iterable[str]) -> None:
        todo = [*names]
        self._call("delete", lambda: self.store.delete(todo), lambda: self.store.delete(todo[: len(todo) // 2]))

    def now(self) -> datetime:
        return self._call("now", self.store.now)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        return self._call("read_ranges", lambda: self.store.read_ranges(name, ranges))

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        return self._call("map", lambda: self.store.map(name, size, content, fresh=fresh))

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        return self.store.cached(name, size, content)

    def _call(self, name: str, whole: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        return whole()

    def _leftover(self, stem: str, data: bytes) -> None:
        self.store.write(f"{PRIVATE}{stem}.json.{secrets.token_hex(8)}.tmp", data[: len(data) // 2])


class FaultyStore(WrappedStore):
    """Ends the process at its call number ``crash_at`` (from 1): before it, after it, or with half of it done."""

    def __init__(self, store: Store, crash_at: int | None = None, when: When = "before") -> None:
        super().__init__(store)
        self.crash_at, self.when = crash_at, when
        self.calls: list[str] = []

    def _call(self, name: str, whole: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        self.calls.append(name)
        if self.crash_at is not None and len(self.calls) > self.crash_at:
            raise SimulatedCrash("the process has ended already")
        if len(self.calls) != self.crash_at:
            return whole()
        if self.when == "after":
            whole()
        elif self.when == "torn" and torn is not None:
            torn()
        raise SimulatedCrash(f"{name}, call {self.crash_at}, {self.when}")


class LossyStore(WrappedStore):
    """Loses answers of ``swap_head``: each letter of ``plan`` is one send.

    ``a`` arrives and is answered, ``l`` arrives and the answer is lost, ``d`` is delayed until ``deliver`` is called, ``r`` arrives and is
    answered after all delayed ones have arrived, ``x`` never arrives. After the plan all arrive.
    """

    def __init__(self, store: Store, plan: str) -> None:
        super().__init__(store)
        self.plan = list(plan)
        self.delayed: list[tuple[bytes, Tag | None, Sequence[str]]] = []
        self.sent: list[tuple[bytes, Tag | None]] = []
        self.before_lost: Callable[[], object] | None = None

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        self.sent.append((data, expected))
        fate = self.plan.pop(0) if self.plan else "a"
        if fate == "r":
            self.deliver()
        if fate in ("a", "r"):
            return self.store.swap_head(data, expected, withdraw)
        if fate == "l":
            self.store.swap_head(data, expected, withdraw)
        if fate == "d":
            self.delayed.append((data, expected, withdraw))
        if self.before_lost is not None:
            self.before_lost()
        return Swap.UNKNOWN

    def deliver(self) -> list[Swap]:
        """Lets the delayed requests arrive."""
        late, self.delayed = self.delayed, []
        return [self.store.swap_head(*request) for request in late]
