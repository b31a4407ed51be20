"""The open chunks of one version: files mapped into memory, a bounded number of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from liveset.errors import Corrupt, Erased, StorageError
from liveset.format import codec
from liveset.format.chunk import Buffer, Chunk, open_chunk
from liveset.format.index import ChunkRecord
from liveset.format.schema import Decoder
from liveset.lease import Lease
from liveset.snapshot import Snapshot

# A map costs a file descriptor and no memory of its own; an inflated file costs its size.
MAX_OPEN = 128
MAX_HELD = 256_000_000


class OpenChunks:
    """Opens the chunks of a snapshot on demand and keeps the latest ones; safe to use from several threads.

    Args:
        snapshot: the version to read.
        decoder: what turns items into samples.
        verify: check the checksum of each file when it is opened, and read it from a private copy afterwards.
        lease: what holds the version; it is kept as long as anything reads from here.
    """

    def __init__(self, snapshot: Snapshot, decoder: Decoder, *, verify: bool = False, lease: Lease | None = None) -> None:
        self._lease, self._closed = lease, False
        self._snapshot, self._decoder, self._verify = snapshot, decoder, verify
        config = snapshot.index.config
        self._compression = codec.Compression.from_config(config) if config is not None else None
        self._open: dict[int, Chunk] = {}
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()
        # The lookup of a chunk that is open: a plain dict read, which needs no lock.
        self.get = self._open.get

    def __getitem__(self, number: int) -> Chunk:
        return self._open.get(number) or self._load(number)

    def close(self) -> None:
        """Let go of all files; what is read already stays good."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._held.clear()

    def _load(self, number: int) -> Chunk:
        if self._closed:
            raise ValueError(f"the dataset object for {self._snapshot.store.url} is closed.")
        try:
            record, buffer = self._file(number)
        except StorageError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
            # Other datasets of this process have files open, too; ours are opened again when they are wanted.
            with self._lock:
                self._open.clear()
                self._held.clear()
            record, buffer = self._file(number)
        chunk = open_chunk(buffer, record, self._decoder, self._compression)
        if record.erased:
            chunk = _Purged(chunk, frozenset(record.erased), partial(self._snapshot.erased, number))
        held = record.size if self._verify or (self._compression is not None and self._compression.level == "chunk") else 0
        with self._lock:
            self._open[number] = chunk
            self._held[number] = held
            while len(self._open) > MAX_OPEN or (len(self._open) > 1 and sum(self._held.values()) > MAX_HELD):
                oldest = next(iter(self._open))
                if oldest == number:  # it was opened twice at once and stands first
                    self._open[number] = self._open.pop(number)
                    continue
                del self._open[oldest], self._held[oldest]
        return chunk

    def _file(self, number: int) -> tuple[ChunkRecord, Buffer]:
        record, _, buffer = self._snapshot.chunk(number)
        if not self._verify:
            return record, buffer
        data = bytes(buffer[:])
        if record.check and codec.checksum(data) != record.check:
            raise Corrupt(f"{record.filename} is damaged: its checksum differs from the index.", file=record.filename)
        return record, data


class _Purged:
    """A chunk with slots that a purge has erased."""

    def __init__(self, chunk: Chunk, erased: frozenset[int], error: Callable[[int], Erased]) -> None:
        self._chunk, self._erased, self._error = chunk, erased, error

    def read(self, slot: int) -> Any:
        if slot in self._erased:
            raise self._error(slot)
        return self._chunk.read(slot)

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        first = min((slot for slot in self._erased if start <= slot < stop), default=None)
        if first is None:
            yield from self._chunk.iterate(start, stop)
        else:
            yield from self._chunk.iterate(start, first)
            raise self._error(first)
