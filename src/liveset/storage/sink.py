"""Sinks: where a download puts its bytes, and how the cache finds out whether all of them came."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable

from liveset.errors import Corrupt, StorageError, UnsupportedFormat
from liveset.format import codec
from liveset.storage.held import HeldFile, MemoryFile, Unusable, reason, usable
from liveset.storage.store import Buffer, Sink

__all__ = ["DiskSink", "Download", "MemorySink", "fetched", "fetched_in_memory", "matches", "resize"]

_STEP = 8_000_000  # bytes by which a file of unknown size grows at most, beyond what is there
_SMALL = 100_000  # bytes of a file that is not worth a descriptor

_log = logging.getLogger("liveset")


Download = Callable[[Sink], object]
"""Fetches one whole file into a sink. It may be called again, with another sink."""


class _Filling:
    """Counts what is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = self._end = 0
        self.failure: Unusable | None = None

    def write(self, data: Buffer, offset: int) -> None:
        view = memoryview(data).cast("B")
        end = offset + len(view)
        try:
            with self._lock:
                self._grow(end)
            self._put(view, offset)
        except OSError as error:
            # Not an OSError: a client would take it for one of the network, and try again.
            self.failure = Unusable(reason(error))
            raise self.failure from error
        except Unusable as error:
            self.failure = error
            raise
        with self._lock:
            self._written += len(view)
            self._end = max(self._end, end)

    def arrived(self) -> int:
        """How many bytes came, as far as that can be known: places that were left out are seen, if no others came twice."""
        return min(self._written, self._end)

    def whole(self, size: int) -> bool:
        return self._written >= self._end >= size

    def _grow(self, end: int) -> None:
        raise NotImplementedError

    def _put(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError

    def view(self) -> memoryview:
        raise NotImplementedError


class DiskSink(_Filling):
    """Writes into a part file, which grows with what comes where its size is unknown."""

    def __init__(self, part: HeldFile, size: int, resize: Callable[[HeldFile, int], None]) -> None:
        super().__init__()
        self._part, self._room, self._resize = part, size, resize

    def _grow(self, end: int) -> None:
        if end > self._room:
            room = end + min(end // 4, _STEP)
            try:
                self._resize(self._part, room)
            except Unusable:
                room = end
                self._resize(self._part, room)
            self._room = room

    def _put(self, view: memoryview, offset: int) -> None:
        while len(view):
            taken = os.pwrite(self._part.fd, view, offset)
            view, offset = view[taken:], offset + taken

    def view(self) -> memoryview:
        if self._end != self._room:
            self._resize(self._part, self._end)
        with usable():
            return self._part.map() if self._end else memoryview(b"")


class MemorySink(_Filling):
    """Keeps a file in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Pages of its own: slicing a map gives bytes, as reading needs, and what a download has not reached costs nothing.
        self._data: mmap.mmap | bytearray = mmap.mmap(-1, size) if size else bytearray()

    def _grow(self, end: int) -> None:
        if end > len(self._data):
            if isinstance(self._data, mmap.mmap):
                self._data = bytearray(self._data)
            self._data.extend(bytes(end - len(self._data)))

    def _put(self, view: memoryview, offset: int) -> None:
        with self._lock:
            self._data[offset : offset + len(view)] = view

    def view(self) -> memoryview:
        return memoryview(self._data if isinstance(self._data, mmap.mmap) else bytes(self._data)).toreadonly()


def resize(part: HeldFile, size: int) -> None:
    """Makes a file longer or shorter, for a sink that nobody limits."""
    with usable():
        os.ftruncate(part.fd, size)


def fetched(new: Callable[[], DiskSink | MemorySink], name: str, size: int, check: str, download: Download) -> memoryview:
    """Fetches a file into a new sink, twice if what comes is wrong.

    Raises:
        Corrupt: it has fewer bytes than ``size`` or another checksum, also the second time.
        Unusable: the sink failed, and not the download.
    """
    wrong = ""
    for _ in range(2):
        sink = new()
        try:
            download(sink)
        except BaseException as error:
            if sink.failure is None or not isinstance(error, Exception):
                raise
        if sink.failure is not None:  # a client may wrap the error, or swallow it
            raise sink.failure
        if sink.whole(size):
            view = sink.view()
            if matches(view, check):
                return view
            view.release()
            wrong = "its checksum differs from the index"
        else:
            wrong = f"{sink.arrived():,} of {size:,} bytes came"
        _log.warning("%s did not arrive as it should: %s.", name, wrong)
    raise Corrupt(f"{name} is damaged where it is stored: {wrong}, also when it was fetched again.", file=name)


def fetched_in_memory(name: str, size: int, check: str, download: Download) -> memoryview:
    """Fetches a file into memory, twice if what comes is wrong; raises as ``fetched``, and ``StorageError`` where memory is short."""
    small = size < _SMALL or not hasattr(os, "memfd_create")
    try:
        return fetched(lambda: MemorySink(size) if small else DiskSink(MemoryFile(), size, resize), name, size, check, download)
    except Unusable as error:
        raise StorageError(f"cannot keep {name} in memory ({size:,} bytes): {error}", file=name) from error


def matches(view: memoryview, check: str) -> bool:
    """Whether a file has its checksum, where one is known."""
    try:
        return not check or codec.verify(view, check)
    except UnsupportedFormat:
        return True  # of a newer liveset; it has the right size
