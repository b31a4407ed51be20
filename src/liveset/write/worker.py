"""What runs in a worker process."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from liveset.errors import DatasetError, WorkerError
from liveset.storage import Store
from liveset.write.failures import FOUND
from liveset.write.fetching import Fetching
from liveset.write.messages import Batch, Bye, Close, Closed, Done, Failed, Open, Order, Quit, Reply, Stop
from liveset.write.runner import Cell, Runner, Stopped
from liveset.write.shipping import Packer, unpack_all
from liveset.write.spans import ChunkSettings, SpanWriter
from liveset.write.spawning import leave_signals

# How often a worker looks whether its parent is still the one that started it.
_LOOK = 1.0


def main(
    connection: Connection[Any, Any],
    current: ctypes.Array[ctypes.c_int64],
    slot: int,
    payload: bytes | tuple[Any, ChunkSettings],
    inherited: Sequence[Connection[Any, Any]],
    parent: int | None,
) -> None:
    """Run a worker until it is told to end, or its parent is gone.

    Args:
        connection: to the parent.
        current: shared between all processes: the input that each worker is at.
        slot: where in ``current`` this worker writes.
        payload: the function and the settings, pickled unless the process was forked.
        inherited: ends of pipes that a forked process must close, or nobody would notice that the parent is gone.
        parent: process number of the parent, where it is the one that the system knows.
    """
    leave_signals()
    for other in inherited:
        other.close()
    worker = _Worker(connection, current, slot)
    threading.Thread(target=worker.listen, args=(parent,), daemon=True, name="liveset-listen").start()
    try:
        worker.serve(payload)
        last: Reply = Bye()
    except Stopped:
        last = Bye()
    except BaseException as error:
        last = Failed(_portable(error))
    worker.give_up()
    worker.say(last)


class _Worker:
    def __init__(self, connection: Connection[Any, Any], current: ctypes.Array[ctypes.c_int64], slot: int) -> None:
        self._connection = connection
        # One number in shared memory, where it can be read when this process is gone.
        self._current = (ctypes.c_int64 * 1).from_buffer(current, 8 * slot)
        self._inbox: SimpleQueue[Order] = SimpleQueue()
        self._runner: Runner | None = None
        self._writer: SpanWriter | None = None
        self._stopping = False
        self._announced: list[Batch] | None = []
        self._fetching: Fetching | None = None
        self._lock = threading.Lock()

    def listen(self, parent: int | None) -> None:
        """Take orders as they come, so that the parent never waits for a busy worker; end the process when the parent is gone."""
        while True:
            try:
                # Some child of the parent may hold the other end of the pipe, too: then there is no end of file.
                if not wait([self._connection], _LOOK):
                    if parent is not None and os.getppid() != parent:
                        os._exit(1)
                    continue
                order = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own process
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(order, Stop):
                self._stopping = True
                if self._runner is not None:
                    self._runner.stopping = True
            elif isinstance(order, Batch):
                self._announce(order)
            self._inbox.put(order)

    def _announce(self, *batches: Batch) -> None:
        """Let the inputs of batches that have come be fetched, as soon as it is known whether they are."""
        with self._lock:
            if self._announced is None:
                return
            self._announced += batches
            if self._fetching is not None:
                for batch in self._announced:
                    self._fetching.ahead(batch.first, list(unpack_all(batch.data)))
                self._announced.clear()

    def serve(self, payload: bytes | tuple[Any, ChunkSettings]) -> None:
        """Carry out orders until there are no more."""
        fn, settings = _load(payload)
        with self._lock:
            self._fetching = fn if isinstance(fn, Fetching) else None
            self._announced = self._announced if isinstance(fn, Fetching) else None
        self._announce()
        store = settings.store
        while not isinstance(order := self._inbox.get(), Quit | Stop):
            if isinstance(order, Open):
                self._open(store, fn, settings, order)
            elif isinstance(order, Close):
                assert self._writer is not None
                writer, self._runner = self._writer, None
                result = writer.finish(order.stop)
                self._writer = None
                self.say(Closed(result))
            elif self._writer is not None:
                self._write(order, self._writer)
            else:
                self._send(fn, order)
        if isinstance(order, Stop):
            raise Stopped

    def give_up(self) -> None:
        """Keep what a checkpoint can keep of an open span, and end it."""
        if self._writer is not None:
            self._writer.stop()

    def say(self, reply: Reply) -> None:
        """Answer the parent; if it is gone, so is the reason to go on."""
        try:
            self._connection.send_bytes(pickle.dumps(reply, 5))
        except OSError:
            os._exit(1)

    def _open(self, store: Store, fn: Any, settings: ChunkSettings, order: Open) -> None:
        self._writer = SpanWriter(store, settings, order.span, order.rank)
        self._set_runner(Runner(fn, self._writer, self._current, skip=order.span.skip, remote=True))

    def _set_runner(self, runner: Runner) -> None:
        self._runner = runner
        runner.stopping = self._stopping

    def _write(self, order: Batch, writer: SpanWriter) -> None:
        assert self._runner is not None
        began, samples, skipped = time.perf_counter(), writer.samples, writer.skipped
        self._runner.run(order.first, unpack_all(order.data))
        self.say(Done(time.perf_counter() - began, writer.samples - samples, writer.skipped - skipped))

    def _send(self, fn: Any, order: Batch) -> None:
        sink = _Collected(self._current)
        began = time.perf_counter()
        self._set_runner(Runner(fn, sink, self._current, remote=True))
        assert self._runner is not None
        self._runner.run(order.first, unpack_all(order.data))
        self.say(Done(time.perf_counter() - began, len(sink.owners), sink.skipped, sink.packer.take(), tuple(sink.owners)))


class _Collected:
    """Takes samples that the parent will write; each is pickled at once, since ``fn`` may use the same object again."""

    logged = False
    fixed = False

    def __init__(self, current: Cell) -> None:
        self.packer = Packer()
        self.owners: list[int] = []
        self.skipped = 0
        self._current = current

    def add(self, sample: Any) -> None:
        self.packer.add(sample)
        self.owners.append(self._current[0])

    def mark(self, inputs_done: int, pending: int = 0) -> None:
        """Nothing to note: the parent writes."""


def _load(payload: bytes | tuple[Any, ChunkSettings]) -> tuple[Any, ChunkSettings]:
    if isinstance(payload, tuple):
        return payload
    try:
        loaded: tuple[Any, ChunkSettings] = pickle.loads(payload)  # noqa: S301 - from our own process
    except Exception as error:
        raise WorkerError(
            f"{FOUND}. Nothing was committed.\nA worker process cannot load fn: {type(error).__name__}: {error}. "
            "Modules that fn needs must be importable there; or run in the calling process with num_workers=1."
        ) from error
    return loaded


def _portable(error: BaseException) -> Exception:
    """Return an error that the parent can load, whatever was raised here."""
    if isinstance(error, DatasetError):
        plain = type(error)(str(error), **{name: value for name, value in error.__dict__.items() if name != "__notes__"})
        try:
            pickle.dumps(plain)
            return plain
        except Exception:
            return type(error)(str(error))
    text = "".join(traceback.format_exception(error)).rstrip()
    return WorkerError(f"{FOUND}. Nothing was committed.\nA worker process failed:\n\n{text}")
