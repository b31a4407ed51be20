"""Schedules: several actors on one store, whose calls happen in an order that the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from liveset.storage import Store
from liveset.testing.faults import WrappedStore

__all__ = ["in_turn", "run_interleaved"]

T = TypeVar("T")
Actor = Callable[[Store], Any]


class _Ended(BaseException):
    """The test is over: an actor that still waits ends, too."""


class _Turns(WrappedStore):
    """Waits for its turn before each call; a call of a thread that is no actor is let through."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.go, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.ending = False
        self.calls: list[str] = []

    def _call(self, name: str, whole: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        if threading.current_thread() is self.thread and not self.ending:
            self.pause()
            self.calls.append(name)
        return whole()

    def pause(self) -> None:
        self.paused.release()
        self.go.acquire()
        if self.ending:
            raise _Ended


def run_interleaved(store: Store, actors: Mapping[str, Actor], choose: Callable[[list[str]], str]) -> dict[str, Any]:
    """Runs the actors, one call to the store at a time, and returns what each of them returned or raised.

    Args:
        store: what they share.
        actors: by name; each is given the store.
        choose: is asked before each call who makes it, among those that have not ended.
    """
    results: dict[str, Any] = {}
    turns = {name: _Turns(store) for name in actors}

    def play(name: str) -> None:
        mine = turns[name]
        try:
            mine.pause()
            results[name] = actors[name](mine)
        except _Ended:
            pass
        except Exception as error:  # the test looks at it
            results[name] = error
        finally:
            mine.thread = None
            mine.paused.release()

    for name, mine in turns.items():
        mine.thread = threading.Thread(target=play, args=(name,), daemon=True)
        mine.thread.start()
        mine.paused.acquire()
    try:
        while live := [name for name in actors if turns[name].thread is not None]:
            mine = turns[choose(live)]
            mine.go.release()
            mine.paused.acquire()
    finally:
        for mine in turns.values():
            if (thread := mine.thread) is not None:
                mine.ending = True
                mine.go.release()
                thread.join()
    return results


def in_turn(order: Iterator[str]) -> Callable[[list[str]], str]:
    """Makes a choice that follows a list of names, as far as it goes."""

    def choose(live: list[str]) -> str:
        return next((name for name in order if name in live), live[0])

    return choose
