"""Keys as Arrow columns: for those who ask for a table, and in the Parquet shards through which programs tell each other of keys.

The shards of a dataset that another program wrote are searched row group by row group; those of ours are made from the key tables, which
answer for them. Only a compaction opens them, to see whether some keys are missing there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from liveset.errors import Corrupt, MissingDependency, NotFound
from liveset.format.index import ChunkRecord
from liveset.format.keytable import DELETED, Key, KeyColumn, KeyTable, shard_of
from liveset.format.lazy import lazy
from liveset.format.locks import ForkLock
from liveset.snapshot import Snapshot
from liveset.storage import has_listing

__all__ = ["ParquetKeys", "layout", "open_published", "ordered_keys", "require_parquet", "rows_of_chunks", "shards_of"]

# Decoded row groups are kept up to about this many bytes.
MAX_HELD = 64_000_000
# A reader decodes a whole row group for one key: 3 ms in Polars at this size, 95 ms at a million rows.
ROW_GROUP = 16_384
# Chunk columns are 32-bit in this format.
_MOST = (1 << 31) - 1


def require_parquet() -> Any:
    """Return pyarrow, or raise ``MissingDependency``: asked before any work is done."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        text = "Keys are published as Parquet, which needs pyarrow: pip install 'liveset[keys]'"
        raise MissingDependency(text, package="pyarrow") from error
    return pq


def layout(num_shards: int, field: str | None) -> dict[str, Any]:
    """Return the member ``keys`` of an index."""
    described = {"version": 1, "num_shards": num_shards, "sharding": "hash" if num_shards > 1 else "none"}
    return described if field is None else {**described, "field": field}


def shards_of(keys: Any, sizes: Sequence[int], count: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and Parquet bytes of each shard of keys, which are an Arrow array in the order of the samples; chunks have ``sizes``."""
    pq = require_parquet()
    import pyarrow as pa

    chunks = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    shards = np.zeros(len(keys), np.int32)
    if count > 1:
        shards = np.fromiter((shard_of(key, count) for key in keys.to_pylist()), np.int32, len(keys))
    for number in range(count):
        rows = np.flatnonzero(shards == number)
        column = keys.take(pa.array(rows))
        table = pa.table(
            {
                "key": column if pa.types.is_integer(keys.type) else column.cast(pa.string()),
                "index": pa.array(rows, pa.int64()),
                "chunk_index": pa.array(chunks[rows]),
                "chunk_offset": pa.array(rows.astype(np.int32)) if len(keys) <= _MOST else pa.nulls(len(rows), pa.int32()),
            }
        ).sort_by("key")
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
        yield number, sink.getvalue().to_pybytes()


def ordered_keys(tables: Sequence[KeyTable], chunks: Sequence[ChunkRecord], kind: type) -> Any:
    """Return the keys of chunks as an Arrow array in the order of the samples; ``tables`` are the newest first."""
    import pyarrow as pa

    columns, rows = rows_of_chunks(tables, chunks)
    if not columns:
        return pa.array([], pa.int64() if kind is int else pa.large_string())
    return pa.concat_arrays([_arrow(keys, file) for keys, file in columns]).take(pa.array(np.concatenate(rows)))


def rows_of_chunks(tables: Sequence[KeyTable], chunks: Sequence[ChunkRecord]) -> tuple[list[tuple[KeyColumn, str]], list[Any]]:
    """Return the keys of tables (the newest first) with the names of their files, and for each chunk with samples the rows of its keys.

    Rows are counted over all columns, and stand in the order of the samples.
    """
    filled = {record.id or record.filename: record.samples for record in chunks if record.samples}
    left = set(filled)
    columns: list[tuple[KeyColumn, str]] = []
    rows: dict[str, Any] = {}
    removed: dict[str, list[Any]] = {}
    first = 0
    for table in tables:
        # The newest table that knows a chunk is right about it, but for the samples that newer ones say have gone.
        known = [chunk in left for chunk, _ in table.directory]
        if any(known):
            parts = table.to_rows()
            live = np.flatnonzero(parts.chunks != DELETED)
            by_place = first + live[np.lexsort((parts.slots[live], parts.chunks[live]))]
            stop = 0
            for (chunk, samples), wanted in zip(table.directory, known, strict=True):
                stop += samples
                if wanted:
                    rows[chunk] = by_place[stop - samples : stop]
                    for free in reversed(removed.get(chunk, ())):
                        rows[chunk] = np.delete(rows[chunk], free[free < len(rows[chunk])])
                    if len(rows[chunk]) != filled[chunk]:
                        raise Corrupt(f"{table.file} has other samples of the chunk {chunk!r} than the index lists.", file=table.file)
            columns.append((parts.keys, table.file))
            first += len(parts.keys)
            left -= rows.keys()
        for chunk, free in table.removed.items():
            removed.setdefault(chunk, []).append(free)
    if left:
        raise Corrupt(f"no key table knows the chunk {min(left)!r}.", file=min(left))
    return columns, [rows[chunk] for chunk in filled]


def _arrow(keys: KeyColumn, file: str) -> Any:
    import pyarrow as pa

    if keys.kind is int:
        return pa.Array.from_buffers(pa.int64(), len(keys), [None, pa.py_buffer(keys.heap)])
    bounds = keys.bounds.astype(np.int64)
    column = pa.Array.from_buffers(pa.large_string(), len(keys), [None, pa.py_buffer(bounds), pa.py_buffer(keys.heap)])
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Corrupt(f"{file}: the key table is damaged.", file=file) from error
    return column


def open_published(snapshot: Snapshot) -> ParquetKeys | None:
    """Return the keys that are published now, or None when there are none; the shards are opened, and not read."""
    listed = snapshot.store.list("keys/") if has_listing(snapshot.store) else ()
    names = sorted(entry.name for entry in listed if entry.name.startswith("keys/shard-") and entry.name.endswith(".parquet"))
    if not has_listing(snapshot.store):
        names = [f"keys/shard-{number:05d}.parquet" for number in range(int(snapshot.index.layout_of_keys.get("num_shards", 0)))]
    elif "keys/shard-00000.parquet" not in names:
        names = ["keys.parquet"]  # to look for it in a listing would list everything
    if not names:
        return None
    try:
        files = [snapshot.store.map(name, 0, snapshot.edition) for name in names]
    except NotFound:
        return None  # a commit has withdrawn them since they were listed
    layout = snapshot.index.layout_of_keys
    hashed = layout.get("sharding", "hash" if len(names) > 1 else "none") == "hash"
    return ParquetKeys(snapshot, names, files, hashed=hashed)


class ParquetKeys:
    """Keys in Parquet shards with the columns ``key`` and ``index``; safe to use from several threads and after a fork."""

    def __init__(self, snapshot: Snapshot, names: Sequence[str], files: Sequence[memoryview], *, hashed: bool) -> None:
        self._snapshot, self._names, self._files, self._hashed = snapshot, names, files, hashed
        self._groups: OrderedDict[tuple[int, int], tuple[Any, Any, int]] = OrderedDict()
        self._held = 0
        self._lock = ForkLock()

    @lazy
    def _shards(self) -> list[Any]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingDependency(
                "Reading a published key store needs pyarrow: pip install 'liveset[keys]'", package="pyarrow"
            ) from error
        shards = []
        for name, file in zip(self._names, self._files, strict=True):
            try:
                shards.append(pq.ParquetFile(pa.BufferReader(file)))
            except pa.ArrowInvalid as error:
                raise Corrupt(f"{name} is damaged: {error}", file=name) from error
        return shards

    @lazy
    def kind(self) -> type:
        """``str`` or ``int``."""
        field = self._shards[0].schema_arrow.field("key")
        import pyarrow as pa

        return int if pa.types.is_integer(field.type) else str

    def __len__(self) -> int:
        return sum(shard.metadata.num_rows for shard in self._shards)

    def locate(self, key: Key) -> tuple[int, int] | None:
        if type(key) is not self.kind:
            return None
        shards = [shard_of(key, len(self._names))] if self._hashed else range(len(self._names))
        for shard in shards:
            metadata = self._shards[shard].metadata
            column = self._shards[shard].schema_arrow.get_field_index("key")
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(column).statistics
                if statistics is not None and statistics.has_min_max and not statistics.min <= key <= statistics.max:
                    continue
                if (position := self._search(shard, group, key)) is not None:
                    return self._place(position)
        return None

    def locate_many(self, keys: Sequence[Key]) -> list[tuple[int, int] | None]:
        return [self.locate(key) for key in keys]

    def locate_column(self, keys: KeyColumn) -> list[tuple[int, int] | None]:
        return [self.locate(key) for key in keys]

    def key_at(self, chunk: int, slot: int) -> Key:
        return self._by_position[self._snapshot.starts[chunk] + slot]

    def keys_of(self, chunk: int) -> list[Key]:
        return self._by_position[self._snapshot.starts[chunk] : self._snapshot.starts[chunk + 1]]

    def ordered(self) -> Any:
        """Return all keys as an Arrow array in the order of the samples."""
        tables = [shard.read(columns=["key", "index"], use_threads=False) for shard in self._shards]
        import pyarrow as pa

        positions = np.concatenate([table.column("index").to_numpy() for table in tables])
        if not np.array_equal(np.sort(positions), np.arange(len(self._snapshot))):
            raise Corrupt(
                f"the key store of {self._snapshot.store.url} does not fit its samples: "
                "rebuild it with build_keys_index(..., overwrite=True).",
                file=self._names[0],
            )
        kind = pa.int64() if self.kind is int else pa.large_string()
        column = pa.concat_arrays([part.cast(kind) for table in tables for part in table.column("key").chunks] or [pa.array([], kind)])
        return column.take(pa.array(np.argsort(positions)))

    @lazy
    def _by_position(self) -> list[Key]:
        """All keys in the order of the samples; loaded when somebody asks for the key of a position."""
        return self.ordered().to_pylist()  # type: ignore[no-any-return]

    def _search(self, shard: int, group: int, key: Key) -> int | None:
        import pyarrow.compute as pc

        column, index = self._group(shard, group)
        row = pc.index(column, key).as_py()
        return None if row < 0 else int(index[row])

    def _group(self, shard: int, group: int) -> tuple[Any, Any]:
        with self._lock:
            if (kept := self._groups.get((shard, group))) is not None:
                self._groups.move_to_end((shard, group))
                return kept[0], kept[1]
        table = self._shards[shard].read_row_group(group, columns=["key", "index"], use_threads=False)
        column = table.column("key").combine_chunks()
        index = np.asarray(table.column("index").to_numpy())
        with self._lock:
            if (shard, group) not in self._groups:
                self._groups[shard, group] = column, index, table.nbytes
                self._held += table.nbytes
            while self._held > MAX_HELD and len(self._groups) > 1:
                self._held -= self._groups.popitem(last=False)[1][2]
        return column, index

    def _place(self, position: int) -> tuple[int, int]:
        starts = self._snapshot.starts
        if not 0 <= position < starts[-1]:
            raise Corrupt(
                f"the key store of {self._snapshot.store.url} names position {position} of {starts[-1]}: it is stale. "
                "Rebuild it with build_keys_index(..., overwrite=True).",
                file=self._names[0],
            )
        chunk = bisect_right(starts, position) - 1
        return chunk, position - starts[chunk]
