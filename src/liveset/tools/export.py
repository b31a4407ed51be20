"""Export: the way out, a plain copy that needs nothing of liveset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from liveset.edit.publish import published_shards
from liveset.edit.splice import open_stored
from liveset.errors import DatasetExists
from liveset.format import codec
from liveset.format.index import ChunkRecord
from liveset.snapshot import Snapshot, Version, open_snapshot
from liveset.storage import Buffer, Store, is_inside, open_store


def export(
    path: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    version: Version | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy one version of a dataset to a new folder in the plain layout of the old tool, without history or anything else of ours.

    Chunk files keep their bytes and get the names ``chunk-0-<n>.bin``, so that the old tool can append to the copy and edit it. Keys are
    copied as ``keys/shard-*.parquet``. Samples that a purge erased from the version are left out.

    Args:
        path: of the dataset.
        dst: a folder that does not exist yet, or is empty.
        version: to copy: number, tag or time; None is the newest.
        progress: called with the number of chunks done and their total.

    Raises:
        DatasetExists: ``dst`` holds files already.
        ValueError: ``dst`` is in the dataset itself.
        DatasetNotFound, VersionNotFound, VersionExpired: there is nothing to copy.

    Example:
        >>> liveset.export(path, tmp / "plain")
    """
    snapshot = open_snapshot(open_store(path), version)
    target = open_store(dst)
    if is_inside(target.url, snapshot.store.url):
        raise ValueError(f"{target.url} is in the dataset itself: export to a folder elsewhere.")
    if next(iter(target.list("")), None) is not None:
        raise DatasetExists(f"{target.url} holds files already: export to a folder that is new or empty.", path=target.url)
    written: list[str] = []
    try:
        _copy(snapshot, target, written, progress)
    except BaseException:
        target.delete(written)
        raise


def _copy(snapshot: Snapshot, target: Store, written: list[str], progress: Callable[[int, int], None] | None) -> None:
    index = snapshot.index
    entries: list[dict[str, Any]] = []

    def write(name: str, data: Buffer) -> None:
        written.append(name)
        target.write(name, data)

    compression = codec.Compression.from_config(index.config or {})
    for number in range(len(index.chunks)):
        record, found, buffer = snapshot.chunk(number)
        name = _plain_name(len(entries), record)
        if record.erased:
            if len(record.erased) == record.samples:
                continue
            left = open_stored(buffer, record, compression).splice({}, frozenset(record.erased))
            record = record.replace(samples=left.samples, size=left.size)
            buffer = b"".join(map(bytes, left.buffers))
        # What the old tool has inflated where it lies stays so, under the name that it looks for first.
        write(name if found == snapshot.index.chunks[number].filename else f"chunk-0-{len(entries)}.bin", buffer)
        entries.append({"chunk_bytes": record.size, "chunk_size": record.samples, "dim": record.dim, "filename": name})
        if progress is not None:
            progress(number + 1, len(index.chunks))
    plain: dict[str, Any] = {"chunks": entries, "config": None if index.config is None else dict(index.config)}
    if index.edit is not None and index.edit.key_files is not None:
        layout = {name: value for name, value in index.layout_of_keys.items() if name != "field"}
        for number, data in published_shards(snapshot, int(layout.get("num_shards", 1))):
            write(f"keys/shard-{number:05d}.parquet", data)
        plain["keys"] = layout
    # Last, so that nobody takes a copy that is not whole for a dataset.
    write("index.json", msgspec.json.encode({**plain, "updated_at": repr(time.time())}))


def _plain_name(number: int, record: ChunkRecord) -> str:
    """Return ``chunk-0-<number>`` with the compression suffix that the old name has."""
    _, _, suffix = record.filename.rpartition("/")[2].partition(".")
    return f"chunk-0-{number}.{suffix or 'bin'}"
