"""Write a dataset without worker processes or progress: what most tests of reading need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from liveset.edit.changes import Keys, Overwrite
from liveset.edit.chunkfiles import ChunkLimit
from liveset.edit.commit import commit, new_token
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.publish import layout, publish_keys
from liveset.format.codec import Compression
from liveset.format.config import make_config
from liveset.format.index import Index
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.write.chunker import ChunkWriter
from liveset.write.keying import KeyRule
from liveset.write.unify import unify


def write_dataset(
    path: Path,
    samples: Iterable[Any],
    *,
    chunk_size: int = 4,
    compression: Compression | None = None,
    key: str | Callable[[Any], Any] | None = None,
) -> Index:
    """Replace what is at ``path`` by these samples, in chunks of ``chunk_size``; ``key`` gives them keys, as ``key_fn`` does."""
    store = open_store(path)
    base = open_snapshot(store).index if (path / "index.json").exists() else None
    token = new_token()
    rule = KeyRule.of(key) if key is not None else None
    writer = ChunkWriter(store, token=token, limit=ChunkLimit(chunk_size, None), compression=compression, key=rule)
    for sample in samples:
        writer.add(sample)
    writer.finish()
    unified = unify(store, writer.staged, compression=compression)
    config = None
    if unified.schema is not None:
        config = make_config(unified.schema, samples=chunk_size, size=None, compression=compression)
    keys = None
    if rule is not None:
        columns = [(chunk.record.id or "", chunk.keys) for chunk in unified.chunks if chunk.keys is not None]
        keys = Keys(KeyWriter(store, token).fresh(columns), layout(1, rule.field))
    index = commit(store, Overwrite(config, tuple(chunk.record for chunk in unified.chunks), keys=keys), base)
    store.delete(unified.replaced)
    if keys is not None:
        publish_keys(store, index)
    return index
