"""Publish the keys of a version as Parquet shards, the form that other tools read.

The shards are derived: nothing of ours reads them back, and a commit that would make them wrong withdraws them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from liveset.errors import DatasetError, MissingDependency
from liveset.format.index import Index
from liveset.format.keytable import Key, shard_of
from liveset.keystore import TableKeys
from liveset.snapshot import Snapshot
from liveset.storage import Store

__all__ = ["layout", "publish_keys", "published_shards", "require_parquet"]

_log = logging.getLogger("liveset")

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


def publish_keys(store: Store, index: Index) -> bool:
    """Write the shards of the keys of a version, if it still is the newest; False when it is not, or when something failed (logged)."""
    head = store.read_head()
    if head is None or head.data != index.source:
        return False
    try:
        shards = published_shards(Snapshot(store, index), int(index.layout_of_keys.get("num_shards", 1)))
        return all(store.publish(f"keys/shard-{number:05d}.parquet", data, head.tag) for number, data in shards)
    except DatasetError as error:
        _log.warning("the keys of %s are committed, but could not be published for other tools: %s", store.url, error)
        return False


def published_shards(snapshot: Snapshot, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and Parquet bytes of each shard of the keys of a version."""
    pq = require_parquet()
    import pyarrow as pa

    edit = snapshot.index.edit
    assert edit is not None
    assert edit.key_files is not None
    store = TableKeys(snapshot, edit.key_files)
    keys: list[Key] = [key for chunk in range(len(snapshot.index.chunks)) for key in store.keys_of(chunk)]
    sizes = [record.samples for record in snapshot.index.chunks]
    chunks = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    column = pa.array(keys, pa.int64() if store.kind is int else pa.string())
    shards = np.fromiter((shard_of(key, count) for key in keys), np.int32, len(keys)) if count > 1 else np.zeros(len(keys), np.int32)
    for number in range(count):
        rows = np.flatnonzero(shards == number)
        table = pa.table(
            {
                "key": column.take(pa.array(rows)),
                "index": pa.array(rows, pa.int64()),
                "chunk_index": pa.array(chunks[rows]),
                "chunk_offset": pa.array(rows.astype(np.int32)) if len(keys) <= _MOST else pa.nulls(len(rows), pa.int32()),
            }
        ).sort_by("key")
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
        yield number, sink.getvalue()
