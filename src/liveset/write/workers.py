"""The pool of worker processes: starts them, feeds them, notices at once when one fails or dies, and leaves none behind."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, Self

from liveset.write import worker as worker_side
from liveset.write.failures import describe, worker_died
from liveset.write.messages import Batch, Bye, Closed, Done, Failed, Order, Quit, Reply, Stop
from liveset.write.shipping import unpack_all
from liveset.write.spans import ChunkSettings
from liveset.write.spawning import start_process

_log = logging.getLogger("liveset")

# A worker has one batch at work and one that waits, so that it never waits for its parent.
_OUTSTANDING = 2
# Batches should take about this long, so that they are few, and yet little is under way at any time.
_BATCH_SECONDS = 0.05
_BATCH_BYTES = 1_000_000
_BATCH_INPUTS = 10_000
# Something else may hold the pipes of a worker open, so its death is looked for as well.
_LOOK = 1.0
# How long a worker may take to end: when all is done, when it is told to stop, when the system tells it.
_PATIENCE, _GRACE, _TERM = 10.0, 5.0, 2.0


class Feed(Protocol):
    """Decides what each worker does next."""

    @property
    def idle_wait(self) -> float | None:
        """How long to wait for workers when nothing can be handed out; None: until one of them says something."""

    def next(self, slot: int, size: int) -> Order | None:
        """Return the next order for a worker, of about ``size`` inputs; None: nothing now; Quit: nothing more."""

    def done(self, slot: int, batch: Batch, reply: Done) -> None:
        """Take note of a batch that a worker has done."""

    def closed(self, slot: int, reply: Closed) -> None:
        """Take note of a span that is durable."""


class _Worker:
    """A worker as the parent sees it."""

    def __init__(self, slot: int, process: BaseProcess, connection: Connection[Any, Any]) -> None:
        self.slot, self.process, self.connection = slot, process, connection
        self.batches: deque[Batch] = deque()
        self.size = 1
        self.quitting = False
        self.gone = False

    def resize(self, batch: Batch, reply: Done) -> None:
        """Choose the size of the next batch by how long this one took and how many bytes went back and forth."""
        by_time = batch.count * _BATCH_SECONDS / max(reply.seconds, 1e-6)
        by_bytes = batch.count * _BATCH_BYTES / max(len(batch.data), len(reply.data), 1)
        self.size = max(1, min(int(by_time), int(by_bytes), 4 * self.size, _BATCH_INPUTS))


class Pool:
    """Worker processes for one run.

    Args:
        count: how many.
        start_method: of ``multiprocessing``; None means spawn.
        fn: the function, with the settings: as bytes, or as they are for processes that are forked.
        gentle: on a failure, let the others finish the input that they are at and keep what they have.
    """

    def __init__(self, count: int, start_method: str | None, fn: bytes | tuple[Any, ChunkSettings], *, gentle: bool = False) -> None:
        self._context = multiprocessing.get_context(start_method or "spawn")
        self._forks = start_method == "fork"
        self._count, self._fn, self._gentle = count, fn, gentle
        self._workers: list[_Worker] = []
        self._current: ctypes.Array[ctypes.c_int64] = self._context.RawArray(ctypes.c_int64, [-1] * count)

    def __enter__(self) -> Self:
        try:
            for slot in range(self._count):
                self._start(slot)
        except BaseException:
            self._stop(gentle=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._join()
        else:
            self._stop(gentle=self._gentle)

    def run(self, feed: Feed) -> None:
        """Work until the feed has nothing more and all workers are done.

        Raises:
            WorkerError: ``fn`` raised, or a worker died.
            DatasetError: a sample could not be stored.
        """
        while live := [worker for worker in self._workers if not worker.gone]:
            for worker in live:
                self._fill(worker, feed)
            waits = _LOOK if feed.idle_wait is None else feed.idle_wait
            self._hear(live, feed, waits)

    # One worker

    def _start(self, slot: int) -> None:
        ours, theirs = self._context.Pipe()
        inherited = [*(worker.connection for worker in self._workers), ours] if self._forks else []
        # The parent of a process from a fork server is that server.
        parent = None if self._context.get_start_method() == "forkserver" else os.getpid()
        arguments = (theirs, self._current, slot, self._fn, inherited, parent)
        try:
            process = start_process(self._context, worker_side.main, arguments, f"liveset-worker-{slot}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._workers.append(_Worker(slot, process, ours))

    def _fill(self, worker: _Worker, feed: Feed) -> None:
        while not worker.quitting and len(worker.batches) < _OUTSTANDING:
            order = feed.next(worker.slot, worker.size)
            if order is None:
                return
            if isinstance(order, Batch):
                worker.batches.append(order)
            worker.quitting = isinstance(order, Quit)
            try:
                worker.connection.send_bytes(pickle.dumps(order, 5))
            except OSError:
                self._died(worker, feed)
                return

    def _hear(self, live: Sequence[_Worker], feed: Feed, timeout: float) -> None:
        speakers: dict[Any, _Worker] = {worker.connection: worker for worker in live}
        sentinels = {worker.process.sentinel: worker for worker in live}
        ready = wait([*speakers, *sentinels], timeout)
        for thing in ready:
            if thing in speakers:
                self._read(speakers[thing], feed)
        dead = [sentinels[thing] for thing in ready if isinstance(thing, int)] if ready else [w for w in live if not w.process.is_alive()]
        for worker in dead:
            self._died(worker, feed)

    def _read(self, worker: _Worker, feed: Feed) -> None:
        if worker.gone:
            return
        reply = _receive(worker.connection)
        if reply is None:
            self._died(worker, feed)
        else:
            self._take(worker, reply, feed)

    def _take(self, worker: _Worker, reply: Reply, feed: Feed) -> None:
        if isinstance(reply, Done):
            batch = worker.batches.popleft()
            worker.resize(batch, reply)
            feed.done(worker.slot, batch, reply)
        elif isinstance(reply, Closed):
            feed.closed(worker.slot, reply)
        else:
            worker.gone = True
            if isinstance(reply, Failed):
                raise reply.error

    def _died(self, worker: _Worker, feed: Feed) -> None:
        """Take the last words of a worker that is gone; raise if there were none."""
        while not worker.gone and _has_more(worker.connection) and (reply := _receive(worker.connection)) is not None:
            self._take(worker, reply, feed)
        if worker.gone:
            return
        worker.gone = True
        worker.process.join(_TERM)
        index: int | None = self._current[worker.slot]
        item = None
        if index is None or index < 0:
            index = None
        else:
            item = next((_item(batch, index) for batch in worker.batches if batch.first <= index < batch.first + batch.count), None)
        raise worker_died(worker.process.exitcode, index, item)

    # All workers

    def _join(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._stop(gentle=False)

    def _stop(self, *, gentle: bool) -> None:
        """End all processes, whatever they do."""
        try:
            if gentle:
                self._ask_to_stop()
            for worker in self._workers:
                if worker.process.is_alive():
                    worker.process.terminate()
            deadline = time.monotonic() + _TERM
            for worker in self._workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                if worker.process.is_alive():
                    worker.process.kill()
                worker.process.join()
                worker.connection.close()
            self._workers.clear()

    def _ask_to_stop(self) -> None:
        for worker in self._workers:
            try:
                worker.connection.send_bytes(pickle.dumps(Stop(), 5))
            except OSError:
                worker.gone = True
        deadline = time.monotonic() + _GRACE
        while (left := [worker for worker in self._workers if not worker.gone]) and time.monotonic() < deadline:
            for connection in wait([worker.connection for worker in left], max(0.0, deadline - time.monotonic())):
                worker = next(worker for worker in left if worker.connection is connection)
                worker.gone = isinstance(_receive(worker.connection), Bye | Failed | None)
        for worker in self._workers:
            if worker.gone:
                worker.process.join(_TERM)


def _receive(connection: Connection[Any, Any]) -> Reply | None:
    """Return what a worker says, or None if it is gone."""
    try:
        reply: Reply = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    except (EOFError, OSError):
        return None
    return reply


def _has_more(connection: Connection[Any, Any]) -> bool:
    try:
        return connection.poll()
    except (EOFError, OSError):
        return False


def _item(batch: Batch, index: int) -> str:
    """Return how an input of a batch looks."""
    for number, item in enumerate(unpack_all(batch.data), batch.first):
        if number == index:
            return describe(item)
    return "?"
