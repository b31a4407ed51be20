"""Publish the keys of a version as Parquet shards, the form that other tools read.

The shards are derived: no key of ours is looked up in them, and a commit that would make them wrong withdraws them. A compaction alone
looks whether they are complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from liveset.edit.commit import landed
from liveset.errors import DatasetError
from liveset.format.index import Index
from liveset.keystore import TableKeys
from liveset.parquetkeys import layout, ordered_keys, require_parquet, shards_of
from liveset.snapshot import Snapshot
from liveset.storage import Store

__all__ = ["layout", "publish_keys", "published_shards", "require_parquet"]

_log = logging.getLogger("liveset")


def publish_keys(store: Store, index: Index) -> bool:
    """Write the shards of the keys of a version, if it still is the newest; False when it is not, or when something failed (logged)."""
    with landed(store, index, "other tools may not see its keys before `liveset compact` has published them"):
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
    """Return number and Parquet bytes of each shard of the keys of a version, as if it did not have the samples that a purge erased."""
    require_parquet()
    import pyarrow as pa

    edit = snapshot.index.edit
    assert edit is not None
    assert edit.key_files is not None
    keys = TableKeys(snapshot, edit.key_files)
    chunks = snapshot.index.chunks
    ordered = ordered_keys(keys.tables, chunks, keys.kind)
    if erased := [start + slot for start, record in zip(snapshot.starts, chunks, strict=False) for slot in record.erased]:
        ordered = ordered.take(pa.array(np.delete(np.arange(len(ordered)), erased)))
    left = [record for record in chunks if len(record.erased) < record.samples or not record.erased]
    return shards_of(ordered, [record.samples - len(record.erased) for record in left], count)
