"""Write a dataset without worker processes or progress: what most tests of reading need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liveset.edit.changes import Overwrite
from liveset.edit.commit import commit, new_token
from liveset.format.codec import Compression
from liveset.format.config import make_config
from liveset.format.index import Index
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.write.chunker import ChunkLimit, ChunkWriter
from liveset.write.unify import unify


def write_dataset(path: Path, samples: Iterable[Any], *, chunk_size: int = 4, compression: Compression | None = None) -> Index:
    """Replace what is at ``path`` by these samples, in chunks of ``chunk_size``."""
    store = open_store(path)
    base = open_snapshot(store).index if (path / "index.json").exists() else None
    writer = ChunkWriter(store, token=new_token(), limit=ChunkLimit(chunk_size, None), compression=compression)
    for sample in samples:
        writer.add(sample)
    writer.finish()
    unified = unify(store, writer.staged, compression=compression)
    config = None
    if unified.schema is not None:
        config = make_config(unified.schema, samples=chunk_size, size=None, compression=compression)
    index = commit(store, Overwrite(config, tuple(chunk.record for chunk in unified.chunks)), base)
    store.delete(unified.replaced)
    return index
