"""Work that goes on in the background: a few threads for all datasets of a process, started when they are first needed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Job", "run_all", "submit"]

T = TypeVar("T")
THREADS = 16


class Job(Generic[T]):
    """A call that is made by another thread, or by the first one that cannot wait for it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._owner = call, os.getpid()
        self._begun = threading.Lock()
        self._done = threading.Event()
        self._value: T
        self._error: Exception | None = None
        self._left = False

    def run(self) -> None:
        """Make the call, unless somebody does already; what is no ``Exception``, such as Ctrl-C, is raised here and is nobody else's."""
        begun = False
        try:
            begun = self._begun.acquire(blocking=False)
            if begun:
                self._value = self._call()
        except Exception as error:
            self._error = error
        except BaseException:
            self._left = True
            raise
        finally:
            if begun:
                self._done.set()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; a call that nobody has begun is made here."""
        self.run()
        if self._owner != os.getpid() and not self._done.is_set():
            return self._call()  # a thread of the parent process is at it, which does not exist here
        self._done.wait()
        if self._left:
            return self._call()
        if self._error is not None:
            raise self._error
        return self._value


class _Pool:
    """Threads that take jobs in the order in which they came; they never keep the process from ending."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._waiting: deque[Job[object]] = deque()
        self._changed = threading.Condition()
        self._idle = self._threads = 0

    def submit(self, job: Job[object]) -> None:
        with self._changed:
            self._waiting.append(job)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="liveset-fetch", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting:
                    if not self._changed.wait(10):  # a process that has nothing to fetch keeps no threads
                        self._idle -= 1
                        self._threads -= 1
                        return
                self._idle -= 1
                job = self._waiting.popleft()
            job.run()
            del job


_pool = _Pool()


def submit(call: Callable[[], T]) -> Job[T]:
    """Let a call be made in the background."""
    global _pool
    if _pool.owner != os.getpid():
        _pool = _Pool()  # the threads of a parent do not exist in a forked child
    job = Job(call)
    _pool.submit(job)  # type: ignore[arg-type]
    return job


def run_all(calls: list[Callable[[], T]]) -> list[T]:
    """Return the results of several calls that are made at the same time, in their order."""
    if len(calls) == 1:
        return [calls[0]()]
    jobs = [submit(call) for call in calls]
    return [job.result() for job in jobs]
