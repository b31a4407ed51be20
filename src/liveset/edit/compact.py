"""Compaction: small chunks become larger ones where they stand, and the key tables become one.

Nothing that a reader sees is changed: every sample keeps its position and its key. So a compaction yields to everyone: chunks that somebody
else touched meanwhile are left out, key tables that came meanwhile stay on top, and where nothing is left to do it gives up silently.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from liveset.edit.adopt import adopt_store, remove_unnamed
from liveset.edit.changes import Replace
from liveset.edit.chunkfiles import DEFAULT_CHUNK_SIZE
from liveset.edit.commit import Policy, check_texts, commit, landed, new_token
from liveset.edit.editable import check_editable, check_intact
from liveset.edit.keyfiles import KeyWriter, ids_of
from liveset.edit.meter import Meter
from liveset.edit.publish import publish_keys
from liveset.edit.rebase import check_rebase
from liveset.edit.splice import fresh_name
from liveset.errors import CommitInterrupted, CommitUnknown, Conflict, DatasetError, SampleError, SessionExpired
from liveset.format import codec
from liveset.format.arrow import end_mark, is_arrow
from liveset.format.chunk import MAX_CHUNK_SIZE, Buffer, read_offsets
from liveset.format.config import stored_limits
from liveset.format.framed import FramedItems, is_framed, pack_framed, sample_item
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import KeyColumn
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.parquetkeys import open_published
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Buffer as Bytes
from liveset.storage import Store, open_store

__all__ = ["CompactReport", "choose_runs", "compact", "compact_store"]

_PROBED = 32  # samples that tell how well those of a chunk are compressed
_COPIED = 1 << 20  # smaller files are not kept mapped: a system allows some ten thousand mappings


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did, or would do.

    Attributes:
        version: that has the larger chunks and the one key table; None when there was nothing to do, or with ``dry_run``.
        chunks_before: number of chunks.
        chunks_after: the same afterwards.
        key_tables_before: number of key tables.
        key_tables_after: the same afterwards; with ``dry_run`` and ``keys=False`` at most so many.
        bytes_written: size of all chunk files and key tables that were written for it; with ``dry_run`` an estimate.
        key_bytes: that part of it which key tables take: with ``keys`` all keys of the dataset, where there is more than one table
            or one of an earlier form.
        seconds: that it took.
    """

    version: int | None
    chunks_before: int
    chunks_after: int
    key_tables_before: int
    key_tables_after: int
    bytes_written: int
    key_bytes: int
    seconds: float


def compact(
    path: str | os.PathLike[str],
    *,
    small: float = 0.5,
    keys: bool = True,
    message: str = "",
    author: str = "",
    session: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> CompactReport:
    """Merge small chunks that stand side by side, and the key tables, in one commit; samples keep their positions and keys.

    For datasets that many small commits have filled: reading, opening and looking up keys are as quick afterwards as in a dataset that was
    written at once. Samples are copied as they are stored, never decoded. A chunk is written again only together with at least as much from
    its neighbours, so compacting often costs little, and not every small chunk goes each time. Keys that commits have withdrawn from other
    tools, or not told them yet, are published again.

    Others may read, append and update meanwhile. What they change is left out. A dataset that another program wrote is adopted first (see
    ``adopt``), and its Arrow chunks stay as they are. The old files go with the next ``vacuum``.

    Args:
        path: of the dataset.
        small: chunks below this part of the dataset's chunk size are merged.
        keys: also make one table of all key tables, which writes all keys of the dataset again, however little has changed (some 30 bytes
            and its text for each, ``key_bytes`` of a dry run); a single table is only written again if it has an earlier form, which is
            slow to open. Without it only the keys of merged chunks are written.
        message: what the history says about it.
        author: who does this.
        session: a name for the work (a job id): a commit of the same session happens once, also when it is tried again later.
        dry_run: only tell what would be done.
        on_progress: called with the number of chunks written and their total; by default long commits show a bar on a terminal.

    Raises:
        DatasetNotFound: there is no dataset.
        UnsupportedFormat: it is encrypted, or needs another loader.
        Corrupt: a chunk or a key table is damaged. Nothing was changed.
        StorageError: a file could not be written. Nothing was changed.
        CommitUnknown: the store did not say whether the commit landed.

    Example:
        >>> for number in range(120, 124):
        ...     with liveset.dataset_update(path) as update:
        ...         update.insert(f"play-{number}", {"id": f"play-{number}", "square": number**2})
        ...         result = update.commit()
        >>> report = liveset.compact(path)
        >>> report.chunks_before, report.chunks_after, report.key_tables_after
        (6, 3, 1)
        >>> liveset.StreamingDataset(path)["play-121"]["square"]
        14641
    """
    return compact_store(
        open_store(path),
        small=small,
        keys=keys,
        message=message,
        author=author,
        session=session,
        dry_run=dry_run,
        on_progress=on_progress,
    )


def compact_store(
    store: Store,
    *,
    small: float = 0.5,
    keys: bool = True,
    message: str = "",
    author: str = "",
    session: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
    policy: Policy | None = None,
) -> CompactReport:
    """Do what ``compact`` does, in any store."""
    started = time.perf_counter()
    if isinstance(small, bool) or not isinstance(small, int | float):
        raise TypeError(f"small must be a number, not {small!r}.")
    if not 0 <= small <= 1:
        raise ValueError(f"small must be between 0 and 1, a part of the chunk size of the dataset: {small!r}.")
    check_texts(session=session, message=message, author=author)
    base = open_snapshot(store)
    check_editable(base.index.config or {}, store.url, "compacted")
    published = open_published(base) is not None
    if dry_run or base.index.edit is None:
        work = _Compaction(base, small, keys=keys)
        if dry_run or not work.runs:
            return work.planned(time.perf_counter() - started)
        base = Snapshot(store, adopt_store(store, author=author, policy=policy))
    with closing(Meter("compact: chunks")) as meter:
        work = _Compaction(base, small, keys=keys, on_progress=on_progress or meter)
        index = _commit(work, message, author, session, policy)
    edit = index.edit if index is not None else None
    committed = edit is not None and (work.made is not None or (session is not None and edit.session == session))
    if index is not None and (keys or published):
        with landed(store, index):
            _publish(store, index)
    before = work.head if work.made is not None and committed else index or base.index
    after = index or before
    return CompactReport(
        version=after.version if committed else None,
        chunks_before=len(before.chunks),
        chunks_after=len(after.chunks),
        key_tables_before=_tables(before),
        key_tables_after=_tables(after),
        bytes_written=work.size if committed else 0,
        key_bytes=work.key_size if committed else 0,
        seconds=time.perf_counter() - started,
    )


def choose_runs(chunks: Sequence[tuple[int, int]], size: int, samples: int | None) -> list[tuple[int, int]]:
    """Return the runs of neighbours, as start and stop, that are worth to be merged.

    No chunk makes up more than half of its run: so each sample is written again only when its chunk at least doubles, and however often
    somebody compacts, the cost of n samples that came in small commits grows like n log n.

    Args:
        chunks: bytes and samples of chunks that stand side by side.
        size: most bytes of a run.
        samples: most samples of a run, or None.
    """
    found: list[tuple[int, int]] = []
    todo = [(0, len(chunks))]
    while todo:
        start, stop = todo.pop()
        end, total, count = start, 0, 0
        while end < stop and total + chunks[end][0] <= size and (samples is None or count + chunks[end][1] <= samples):
            total, count, end = total + chunks[end][0], count + chunks[end][1], end + 1
        if start == stop:
            continue
        largest = max(range(start, end), key=lambda number: chunks[number][0], default=start)
        if end - start > 1 and 2 * chunks[largest][0] <= total:
            found.append((start, end))
            todo.append((end, stop))
        else:  # the large one is not written again for the little before it, but perhaps with what stands behind it, or it stays
            todo += [(start, largest), (max(largest, start + 1), stop)]
    return sorted(found)


def _commit(work: _Compaction, message: str, author: str, session: str | None, policy: Policy | None) -> Index | None:
    """Commit, and remove our files when it is certain that no version will name them; None when others stood in the way."""
    try:
        index = commit(work.store, work.prepare, work.base.index, session=session, message=message, author=author, policy=policy)
    except (CommitUnknown, CommitInterrupted):
        raise
    except (Conflict, SessionExpired):  # the dataset was replaced, or a vacuum ran over this: there will be another compaction
        work.settle(None)
        return None
    except BaseException as error:
        known = isinstance(error, DatasetError | OSError) or work.made is None
        if known and isinstance(error, Exception | KeyboardInterrupt):
            work.settle(None)
        raise
    with landed(work.store, index):
        work.settle(index)
    return index


@dataclass(frozen=True, slots=True)
class _Small:
    """A chunk that may be merged."""

    id: str
    filename: str
    samples: int
    size: int
    """Of its samples before compression, which is what the chunk size of a dataset limits."""
    stored: int
    framed: bool


_Run = Sequence[_Small]


@dataclass(frozen=True, slots=True)
class _MadeKeys:
    """Key tables that were written, and what for."""

    tables: tuple[str, ...]
    runs: Sequence[_Run]
    files: KeyFiles


class _Compaction:
    """Makes the change that compacts a dataset, for whatever version is the newest; see ``Prepare``.

    Args:
        base: the version in which runs of small chunks are looked for.
        small, keys, on_progress: as for ``compact``.

    Attributes:
        runs: the chunks to be merged.
        head: the version that the last change was made for.
        made: the last change that was made; None when there was nothing to do.
        size: bytes of all files that were written.
        key_size: those of key tables among them.
    """

    def __init__(
        self, base: Snapshot, small: float, *, keys: bool, on_progress: Callable[[int, int], object] = lambda _done, _total: None
    ) -> None:
        self.base, self.store, self.head = base, base.store, base.index
        self._small, self._keys, self._on_progress = small, keys, on_progress
        config = base.index.config or {}
        self._compression = codec.Compression.from_config(config)
        self._samples, size = stored_limits(config)
        self._size = min(size or (MAX_CHUNK_SIZE if self._samples else DEFAULT_CHUNK_SIZE), MAX_CHUNK_SIZE)
        self._token = new_token()
        self._writer = KeyWriter(base.store, self._token)
        self._merged: dict[tuple[str, ...], ChunkRecord | None] = {}
        self._made_keys: _MadeKeys | None = None
        self._written: list[str] = []
        self.made: Replace | None = None
        self.size = self.key_size = 0
        self.runs: list[_Run] = [
            near[start:stop]
            for near in self._neighbours()
            for start, stop in choose_runs([(chunk.size, chunk.samples) for chunk in near], self._size, self._samples)
        ]

    def planned(self, seconds: float) -> CompactReport:
        """Return what would be done to the base."""
        index = self.base.index
        before = len(index.chunks), _tables(index)
        after, tables, key_size = before[0] - sum(len(run) - 1 for run in self.runs), before[1], 0
        keyed = open_keys(self.base) is not None if index.edit is None else tables > 0
        files = _key_files(index)
        if keyed and (self.runs or self._joins(files)):
            tables = 1 if self._keys else max(tables, 1) + 1
            names = files.tables if self._keys else ()
            key_size = sum(files.sizes.get(name) or self.store.map(name, 0).nbytes for name in names) if index.edit is not None else 0
        size = key_size + sum(chunk.stored for run in self.runs for chunk in run)
        return CompactReport(None, before[0], after, before[1], tables, size, key_size, seconds)

    def prepare(self, head: Index | None, since: Sequence[HistoryEntry]) -> Replace | None:
        """Return the change for a head, or None when nothing is left to do; writes the files that are missing for it.

        Raises:
            OverwriteConflict: the dataset was replaced since.
            Corrupt: a chunk or a key table is damaged.
        """
        check_rebase(Replace({}, {}), self.base.index, head, since)  # before any work is done
        assert head is not None
        current = Snapshot(self.store, head)
        records: dict[str, ChunkRecord | None] = {}
        expects: dict[str, str] = {}
        done: list[tuple[ChunkRecord, _Run]] = []
        numbers = {record.filename: number for number, record in enumerate(head.chunks)}
        left = [*self._untouched(numbers)]
        for number, run in enumerate(left):
            if (record := self._merge(current, run, numbers)) is not None:
                done.append((record, run))
                records.update({chunk.id: record if chunk is run[0] else None for chunk in run})
                expects.update({chunk.id: chunk.filename for chunk in run})
            self._on_progress(number + 1, len(left))
        files = self._key_files(current, done, numbers)
        self.head = head
        self.made = Replace(records, expects, files, op="compact") if records or files is not None else None
        return self.made

    def settle(self, index: Index | None) -> None:
        """Remove the files that the committed version (None: no version) does not name; only for outcomes that are known."""
        remove_unnamed(self.store, self._written + self._writer.written, index)

    # --- which chunks ------------------------------------------------------------------------------------------------

    def _neighbours(self) -> Iterator[list[_Small]]:
        """Yield the small chunks of the base, those together that stand side by side and can be merged."""
        near: list[_Small] = []
        for number in range(len(self.base.index.chunks)):
            chunk = self._look(number)
            if near and (chunk is None or chunk.framed != near[-1].framed):
                yield near
                near = []
            if chunk is not None:
                near.append(chunk)
        if near:
            yield near

    def _look(self, number: int) -> _Small | None:
        """Return a chunk if it can be merged and is small; opens its file only where the index does not tell."""
        record = self.base.index.chunks[number]
        if record.dim is not None or record.extra or not self._is_small(record.size, record.samples):
            return None  # facts that we do not know cannot be merged
        level = self._compression.level if self._compression is not None else None
        size, framed = record.size, False
        if level in ("sample", "batch") or _is_foreign(record):
            buffer = self._plain(self.base.chunk_file(number)[1], record)
            if is_framed(buffer):
                framed = True
                end = 24 + 4 * record.samples  # the last offset in the table of plain items; the table is checked when it is merged
                size = max(size, int.from_bytes(buffer[end : end + 4], "little"))
            elif is_arrow(buffer):
                return None
            elif level == "sample":
                size = max(size, _inflated(buffer, record))
        chunk = _Small(record.id or record.filename, record.filename, record.samples, size, record.size, framed)
        return chunk if self._is_small(size, record.samples) else None

    def _is_small(self, size: int, samples: int) -> bool:
        return size < self._small * self._size and (self._samples is None or samples < self._small * self._samples)

    def _untouched(self, numbers: Mapping[str, int]) -> Iterator[_Run]:
        """Yield what a head with these files still has of the runs: they are cut where a chunk stands that somebody else touched."""
        for run in self.runs:
            left = [chunk for chunk in run if chunk.filename in numbers]
            cuts = [at for at in range(1, len(left)) if numbers[left[at].filename] != numbers[left[at - 1].filename] + 1]
            for start, stop in pairwise([0, *cuts, len(left)]):
                if stop - start > 1:
                    yield left[start:stop]

    # --- files -------------------------------------------------------------------------------------------------------

    def _merge(self, current: Snapshot, run: _Run, numbers: Mapping[str, int]) -> ChunkRecord | None:
        """Write one chunk with the samples of a run, once, and return its record; None when they cannot stand in one file."""
        files = tuple(chunk.filename for chunk in run)
        if files in self._merged:
            return self._merged[files]
        records = [current.index.chunks[numbers[name]] for name in files]
        opened = (self._open(current, numbers[name]) for name in files)
        try:
            buffers, size, head_check = self._framed(opened, records) if run[0].framed else self._items(opened, records)
        except SampleError:  # samples that were erased would fill a frame
            self._merged[files] = None
            return None
        name = fresh_name(files[0], numbers[files[0]], new_token(), self._compression)
        # By such an id readers know that another program wrote the samples, which may be padded.
        own = name if any(map(_is_foreign, records)) else f"{self._token}.{len(self._merged)}"
        self._written.append(name)
        self.store.write(name, buffers)
        self.size += sum(memoryview(part).nbytes for part in buffers)
        samples = sum(record.samples for record in records)
        made = ChunkRecord(name, samples, size, id=own, check=codec.checksum(buffers), head_check=head_check)
        self._merged[files] = made
        return made

    def _open(self, current: Snapshot, number: int) -> Buffer:
        record = current.index.chunks[number]
        name, buffer = current.chunk_file(number)
        check_intact(record, name, buffer)
        return self._plain(buffer, record)

    def _plain(self, buffer: Buffer, record: ChunkRecord) -> Buffer:
        if self._compression is not None and self._compression.level == "chunk" and codec.is_frame(buffer):
            return codec.inflate(buffer, file=record.filename, size=record.size)
        return buffer

    def _items(self, opened: Iterator[Buffer], records: Sequence[ChunkRecord]) -> tuple[list[Bytes], int, str | None]:
        """Return the buffers of a file of items as they are stored, its size before compression, and the checksum of its head."""
        bodies: list[Bytes] = []
        sizes = []
        for buffer, record in zip(opened, records, strict=True):
            offsets = read_offsets(buffer, record).astype(np.int64)
            start, end = int(offsets[0]), int(offsets[-1])  # gaps before and behind the items are not kept
            bodies.append(memoryview(buffer)[start:end] if end - start >= _COPIED else buffer[start:end])
            sizes.append(np.diff(offsets))
        count = sum(map(len, sizes))
        offsets = np.cumsum(np.concatenate([[4 + 4 * (count + 1)], *sizes]))
        if int(offsets[-1]) > MAX_CHUNK_SIZE:
            raise SampleError(f"{records[0].filename} and those behind it would fill {offsets[-1]:,} bytes: the format ends at 4 GiB.")
        head = struct.pack("<I", count) + offsets.astype("<u4").tobytes()
        buffers = [head, *bodies, *end_mark(bodies)]
        size = sum(memoryview(part).nbytes for part in buffers)
        if self._compression is not None and self._compression.level == "chunk":
            return [codec.compress(b"".join(buffers), self._compression)], size, None
        return buffers, size, codec.checksum(head)

    def _framed(self, opened: Iterator[Buffer], records: Sequence[ChunkRecord]) -> tuple[list[Bytes], int, str | None]:
        """Return the same for a file of frames."""
        items: list[bytes] = []
        for buffer, record in zip(opened, records, strict=True):
            stored = FramedItems(buffer, record.samples, record.filename)
            items += map(stored.item, range(record.samples))
        buffers: list[Bytes] = [*pack_framed(items, self._compression or codec.Compression())]
        return buffers, sum(memoryview(part).nbytes for part in buffers), None

    def _joins(self, files: KeyFiles) -> bool:
        """Whether one table is made of those of a version, also where no chunk is merged."""
        return self._keys and bool(files.deltas or self._writer.outdated(files))

    def _key_files(self, current: Snapshot, done: Sequence[tuple[ChunkRecord, _Run]], numbers: Mapping[str, int]) -> KeyFiles | None:
        """Write the keys of merged chunks, or all of them as one table; None where the tables stay as they are."""
        head = current.index
        if head.edit is None or (files := head.edit.key_files) is None or not (done or self._joins(files)):
            return None
        runs = [run for _, run in done]
        if (made := self._made_keys) is not None and made.runs == runs and files.tables[: len(made.tables)] == made.tables:
            # Whatever came since is about other chunks, and newer.
            newer = files.tables[len(made.tables) :]
            sizes = {**files.sizes, **made.files.sizes}
            return KeyFiles(files.kind, head.samples, made.files.base, made.files.deltas + newer, sizes)
        new, before = files, len(self._writer.written)
        gone = {chunk.id for run in runs for chunk in run}
        listed = {*ids_of(head), *(record.id or "" for record, _ in done)} - gone
        if done:
            store = open_keys(current)
            assert store is not None
            moved = [
                (record.id or "", KeyColumn.of([*chain.from_iterable(store.keys_of(numbers[chunk.filename]) for chunk in run)]))
                for record, run in done
            ]
            new = self._writer.edited(new, listed, head.samples, deleted=KeyColumn.of([]), removed={}, added=moved)
        if self._keys:
            new = self._writer.merged(new, listed, head.samples)
        size = sum(self._writer.sizes[name] for name in self._writer.written[before:])
        self.size += size
        self.key_size += size
        self._made_keys = _MadeKeys(files.tables, runs, new)
        return new


def _inflated(buffer: Buffer, record: ChunkRecord) -> int:
    """Return about how many bytes the items of a chunk have that are compressed one by one."""
    offsets = read_offsets(buffer, record).astype(np.int64)
    slots = np.unique(np.linspace(0, record.samples - 1, min(record.samples, _PROBED)).astype(np.int64))
    plain = sum(len(sample_item(buffer[offsets[slot] : offsets[slot + 1]], record.filename)) for slot in slots)
    stored = int(np.diff(offsets)[slots].sum())
    return int(offsets[-1] - offsets[0]) * plain // max(stored, 1)


def _is_foreign(record: ChunkRecord) -> bool:
    """Whether another program wrote the samples of a chunk, or some of them."""
    return record.id is None or record.id.endswith(".bin")


def _key_files(index: Index) -> KeyFiles:
    files = index.edit.key_files if index.edit is not None else None
    return files or KeyFiles("text", 0, ())


def _tables(index: Index) -> int:
    return len(_key_files(index).tables)


def _publish(store: Store, index: Index) -> None:
    """Write the published keys again where some are missing, which they tell themselves: what is published of a version is never wrong."""
    if _tables(index) == 0:
        return
    try:
        published = open_published(Snapshot(store, index))
        complete = published is not None and len(published) == index.samples
    except DatasetError:
        complete = False
    if not complete:
        publish_keys(store, index)
