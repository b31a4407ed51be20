"""The published key store of a dataset that another program wrote: Parquet shards, searched row group by row group."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from liveset.errors import Corrupt, MissingDependency, NotFound
from liveset.format.keytable import Key, KeyColumn, shard_of
from liveset.snapshot import Snapshot

# Decoded row groups are kept up to about this many bytes.
MAX_HELD = 64_000_000


def open_published(snapshot: Snapshot) -> ParquetKeys | None:
    """Return the keys that are published now, or None when there are none; the shards are opened, and not read."""
    names = sorted(
        entry.name for entry in snapshot.store.list("keys/") if entry.name.startswith("keys/shard-") and entry.name.endswith(".parquet")
    )
    if "keys/shard-00000.parquet" not in names:
        names = [entry.name for entry in snapshot.store.list("keys.parquet") if entry.name == "keys.parquet"]
    if not names:
        return None
    try:
        files = [snapshot.store.map(name, 0) for name in names]
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
        self._lock = threading.Lock()

    @cached_property
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

    @cached_property
    def kind(self) -> type:
        """``str`` or ``int``."""
        import pyarrow as pa

        field = self._shards[0].schema_arrow.field("key")
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

    @cached_property
    def _by_position(self) -> list[Key]:
        """All keys in the order of the samples; loaded when somebody asks for the key of a position."""
        keys: list[Any] = []
        positions: list[int] = []
        for shard in self._shards:
            table = shard.read(columns=["key", "index"])
            keys += table.column("key").to_pylist()
            positions += table.column("index").to_pylist()
        if sorted(positions) != list(range(len(self._snapshot))):
            raise Corrupt(
                f"the key store of {self._snapshot.store.url} does not fit its samples: "
                "rebuild it with build_keys_index(..., overwrite=True).",
                file=self._names[0],
            )
        ordered: list[Any] = [None] * len(keys)
        for key, position in zip(keys, positions, strict=True):
            ordered[position] = key
        return ordered

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
        table = self._shards[shard].read_row_group(group, columns=["key", "index"])
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
