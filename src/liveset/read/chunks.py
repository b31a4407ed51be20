"""The open chunks of one version: files mapped into memory, a bounded number of them."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from liveset.errors import Corrupt, Erased, StorageError
from liveset.format import codec
from liveset.format.chunk import Buffer, Chunk, ItemRanges, open_chunk, open_ranges, ranged_head
from liveset.format.index import ChunkRecord
from liveset.format.locks import ForkLock
from liveset.format.schema import Decoder
from liveset.lease import Lease
from liveset.read.fetch import Job, run_all, submit
from liveset.snapshot import Snapshot
from liveset.storage import cache_limit, has_ranges

# A map costs a file descriptor and no memory of its own; an inflated file costs its size.
MAX_OPEN = 128
MAX_HELD = 256_000_000
# A request costs about as much as fetching this many bytes; a chunk is fetched whole when its parts have cost as much.
REQUEST = 1_000_000
# Bytes that are fetched ahead of an iteration, at most; of all that go on at the same time, and how many files those are.
AHEAD = 256_000_000
AHEAD_OF_ALL = 2 * AHEAD
MAX_COMING = 32


class OpenChunks:
    """Opens the chunks of a snapshot on demand and keeps the latest ones; safe to use from several threads.

    Of a chunk that lies on a remote store and is not in the cache, single samples are fetched by themselves (``chunks[number]``); who reads
    on from there asks for the whole of it (``chunks.whole(number)``).

    Args:
        snapshot: the version to read.
        decoder: what turns items into samples.
        verify: check the checksum of each file when it is opened, and read it from a private copy afterwards.
        lease: what holds the version; it is kept as long as anything reads from here.
        ahead: how many chunks of a remote store are fetched before they are needed.
    """

    def __init__(self, snapshot: Snapshot, decoder: Decoder, *, verify: bool = False, lease: Lease | None = None, ahead: int = 4) -> None:
        self._lease, self._closed = lease, False
        self._snapshot, self._decoder, self._verify = snapshot, decoder, verify
        config = snapshot.index.config
        self._compression = codec.Compression.from_config(config) if config is not None else None
        self._open: dict[int, Chunk] = {}
        self._damaged: dict[int, Corrupt] = {}
        self._held: dict[int, int] = {}
        self._coming: dict[int, Job[tuple[ChunkRecord, Buffer]]] = {}
        self._next: dict[int, int] = {}
        self._ahead_of: int | None = None
        self._ahead, self._room, self._room_of_all = ahead, AHEAD, AHEAD_OF_ALL
        if (limit := cache_limit(snapshot.store)) is not None:  # the chunk that is read and the one before must stay, too
            self._room_of_all = limit - 2 * max((record.size for record in snapshot.index.chunks), default=0)
            self._room = min(AHEAD, self._room_of_all)
        self._lock = ForkLock()
        # The lookup of a chunk that is open: a plain dict read, which needs no lock.
        self.get = self._open.get

    def __getitem__(self, number: int) -> Chunk:
        return self._open.get(number) or self._load(number, whole=False)

    def whole(self, number: int) -> Chunk:
        """Return a chunk of which much is going to be read."""
        found = self._open.get(number)
        if found is None or isinstance(found, _Ranged):
            found = self._load(number, whole=True)
        if number in self._next and number != self._ahead_of:
            self._ahead_of = number
            self._fetch_ahead(number)
        return found

    def holds(self, number: int) -> bool:
        """Whether all of a chunk is here and open."""
        found = self._open.get(number)
        return found is not None and not isinstance(found, _Ranged)

    def expect(self, numbers: Sequence[int]) -> None:
        """Tell in which order chunks will be read whole, so that the next ones are fetched ahead."""
        if self._snapshot.store.remote and self._ahead:
            self._next.update(pairwise(numbers))

    def close(self) -> None:
        """Let go of all files; what is read already stays good."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._held.clear()
            self._coming.clear()

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples at these places (chunk, slot), in their order; those of one chunk are fetched together."""
        slots: dict[int, list[int]] = {}
        for number, slot in places:
            slots.setdefault(number, []).append(slot)
        if not self._snapshot.store.remote or len(slots) == 1:
            found = [self._read_slots(number, wanted) for number, wanted in slots.items()]
        else:
            found = run_all([partial(self._read_slots, number, wanted) for number, wanted in slots.items()])
        of_chunk = {number: iter(samples) for number, samples in zip(slots, found, strict=True)}
        return [next(of_chunk[number]) for number, _ in places]

    def _read_slots(self, number: int, slots: Sequence[int]) -> list[Any]:
        chunk = self[number]
        return chunk.read_many(slots) if isinstance(chunk, _Ranged) else [chunk.read(slot) for slot in slots]

    def _load(self, number: int, *, whole: bool) -> Chunk:
        if self._closed:
            raise ValueError(f"the dataset object for {self._snapshot.store.url} is closed.")
        if (damage := self._damaged.get(number)) is not None:
            raise copy.copy(damage)  # fetching it for each of its samples would take for ever
        if not whole and self._snapshot.store.remote and (ranged := self._ranged(number)) is not None:
            return self._keep(number, ranged, 0)
        try:
            return self._open_whole(number)
        finally:
            self._arrived(number)

    def _open_whole(self, number: int) -> Chunk:
        found = self._open.get(number)
        if found is not None and not isinstance(found, _Ranged):
            return found  # another thread was quicker
        try:
            record, chunk = self._opened(number)
        except Corrupt as error:
            if self._snapshot.store.remote:
                self._damaged[number] = error
            raise
        if record.erased:
            chunk = _Purged(chunk, frozenset(record.erased), partial(self._snapshot.erased, number))
        # What was fetched counts too: it is in memory, or cannot leave the cache as long as it is open.
        inflated = self._verify or (self._compression is not None and self._compression.level == "chunk")
        return self._keep(number, chunk, record.size if inflated or self._snapshot.store.remote else 0)

    def _opened(self, number: int) -> tuple[ChunkRecord, Chunk]:
        try:
            record, buffer = self._file(number)
        except StorageError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Other datasets of this process have files open, too; ours are opened again when they are wanted.
            with self._lock:
                self._open.clear()
                self._held.clear()
                self._coming.clear()
            record, buffer = self._file(number)
        try:
            return record, open_chunk(buffer, record, self._decoder, self._compression)
        except Corrupt:
            if not self._snapshot.store.remote:
                raise
        record, buffer = self._fetch(number, fresh=True)
        return record, open_chunk(buffer, record, self._decoder, self._compression)

    def _keep(self, number: int, chunk: Chunk, held: int) -> Chunk:
        with self._lock:
            self._open.pop(number, None)
            self._open[number] = chunk
            self._held[number] = held
            while len(self._open) > MAX_OPEN or (len(self._open) > 1 and sum(self._held.values()) > MAX_HELD):
                oldest = next(iter(self._open))
                self._open.pop(oldest, None)
                self._held.pop(oldest, None)
        return chunk

    def _file(self, number: int) -> tuple[ChunkRecord, Buffer]:
        with self._lock:
            job = self._coming.get(number)
            if job is None:
                job = self._coming[number] = Job(partial(self._fetch, number))  # for all threads that want it now
        record, buffer = job.result()
        if not self._verify:
            return record, buffer
        data = bytes(buffer[:])
        if record.check and codec.checksum(data) != record.check and self._snapshot.store.remote:
            record, buffer = self._fetch(number, fresh=True)
            data = bytes(buffer[:])
        if record.check and codec.checksum(data) != record.check:
            raise Corrupt(f"{record.filename} is damaged: its checksum differs from the index.", file=record.filename)
        return record, data

    def _arrived(self, number: int) -> None:
        with self._lock:
            self._coming.pop(number, None)

    def _fetch(self, number: int, *, fresh: bool = False) -> tuple[ChunkRecord, Buffer]:
        record, _, buffer = self._snapshot.chunk(number, fresh=fresh)
        return record, buffer

    def _fetch_ahead(self, number: int) -> None:
        records, room = self._snapshot.index.chunks, self._room
        for _ in range(self._ahead):
            following = self._next.get(number)
            if following is None or (room := room - records[following].size) < 0:
                return
            number = following
            with self._lock:
                if number in self._coming or ((found := self._open.get(number)) is not None and not isinstance(found, _Ranged)):
                    continue
                self._coming[number] = submit(partial(self._fetch, number))
                while len(self._coming) > 1 and self._too_many_come():
                    del self._coming[next(iter(self._coming))]  # of an iteration that was left, most likely

    def _too_many_come(self) -> bool:
        records = self._snapshot.index.chunks
        return len(self._coming) > MAX_COMING or sum(records[number].size for number in self._coming) > self._room_of_all

    def _ranged(self, number: int) -> Chunk | None:
        """Return a chunk of which single items are fetched; None where the whole file is here, or is the only way."""
        record, store = self._snapshot.index.chunks[number], self._snapshot.store
        if number in self._coming or self._verify or record.erased or self._snapshot.index.compressed_files:
            return None
        if store.cached(record.filename, record.size, self._snapshot.content(record)) is not None:
            return None
        if record.size <= 2 * REQUEST or (size := ranged_head(record)) > record.size // 2 or not has_ranges(store):
            return None
        try:
            # Only other programs hide Arrow rows in a chunk; the end tells.
            tail = 8 if self._snapshot.index.has_foreign_chunks else 0
            head, end = store.read_ranges(record.filename, [(0, size), (record.size - tail, tail)])
        except FileNotFoundError:
            return None  # a purge may have replaced it: who maps it looks
        items = open_ranges(head, end, record, self._decoder, self._compression)
        return _Ranged(self, number, record, items) if items is not None else None

    def fetch_items(self, record: ChunkRecord, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Return parts of a chunk file."""
        return self._snapshot.store.read_ranges(record.filename, ranges)


class _Ranged:
    """A chunk on a remote store, of which samples are fetched one by one until fetching all of it is cheaper."""

    def __init__(self, chunks: OpenChunks, number: int, record: ChunkRecord, items: ItemRanges) -> None:
        self._chunks, self._number, self._record, self._items = chunks, number, record, items
        self._cost = 0

    def read(self, slot: int) -> Any:
        return self.read_many([slot])[0]

    def read_many(self, slots: Sequence[int]) -> list[Any]:
        ranges = [self._items.range(slot) for slot in slots]
        self._cost += REQUEST + sum(length for _, length in ranges)
        if self._cost > self._record.size:
            chunk = self._chunks.whole(self._number)
            return [chunk.read(slot) for slot in slots]
        try:
            items = self._chunks.fetch_items(self._record, ranges)
        except FileNotFoundError:  # who maps the file follows a purge, and knows why it is gone
            chunk = self._chunks.whole(self._number)
            return [chunk.read(slot) for slot in slots]
        return [self._items.decode(item, slot) for item, slot in zip(items, slots, strict=True)]

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        return self._chunks.whole(self._number).iterate(start, stop)


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
