"""Export: the way out, a plain copy that needs nothing of liveset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from liveset.errors import DatasetExists
from liveset.format.index import ChunkRecord
from liveset.snapshot import Version, open_snapshot
from liveset.storage import open_store


def export(
    path: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    version: Version | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy one version of a dataset to a new folder in the plain layout of the old tool, without history or anything else of ours.

    Chunk files keep their bytes and get the names ``chunk-0-<n>.bin``, so that the old tool can append to the copy and edit it.

    Args:
        path: of the dataset.
        dst: a folder that does not exist yet, or is empty.
        version: to copy: number, tag or time; None is the newest.
        progress: called with the number of chunks done and their total.

    Raises:
        DatasetExists: ``dst`` holds files already.
        DatasetNotFound, VersionNotFound, VersionExpired: there is nothing to copy.

    Example:
        >>> liveset.export(path, tmp / "plain")
    """
    snapshot = open_snapshot(open_store(path), version)
    target = open_store(dst)
    if next(iter(target.list("")), None) is not None:
        raise DatasetExists(f"{target.url} holds files already: export to a folder that is new or empty.", path=target.url)
    index = snapshot.index
    entries = []
    for number, record in enumerate(index.chunks):
        name = _plain_name(number, record)
        target.write(name, snapshot.chunk_buffer(number))
        entries.append({"chunk_bytes": record.size, "chunk_size": record.samples, "dim": record.dim, "filename": name})
        if progress is not None:
            progress(number + 1, len(index.chunks))
    plain = {"chunks": entries, "config": None if index.config is None else dict(index.config), "updated_at": repr(time.time())}
    target.write_once("index.json", msgspec.json.encode(plain))


def _plain_name(number: int, record: ChunkRecord) -> str:
    """Return ``chunk-0-<number>`` with the compression suffix that the old name has."""
    _, _, suffix = record.filename.rpartition("/")[2].partition(".")
    return f"chunk-0-{number}.{suffix or 'bin'}"
