"""Bring all chunks of a run to one schema before they are committed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from liveset.edit.chunkfiles import write_chunk
from liveset.format import codec
from liveset.format.chunk import Chunk, items_of, open_chunk, plain_buffer
from liveset.format.keytable import KeyColumn
from liveset.format.schema import Decoder, Schema
from liveset.storage import Store
from liveset.write.chunker import StagedChunk, recode
from liveset.write.spans import ChunkSettings


@dataclass(frozen=True, slots=True)
class Unified:
    """Chunks of one schema (None when there are none), and the files that they replace: delete those after the commit."""

    schema: Schema | None
    chunks: list[StagedChunk]
    replaced: list[str]


def unify(
    store: Store,
    staged: Sequence[StagedChunk],
    *,
    compression: codec.Compression | None = None,
    allow_pickle: bool = False,
    on_write: Callable[[str], None] | None = None,
) -> Unified:
    """Return the schema that holds all chunks, and the chunks with those of a narrower schema written again.

    A run that did not widen costs nothing here.

    Args:
        store: where the chunks are.
        staged: durable chunks that no version names, in their final order.
        compression: of the chunks.
        allow_pickle: as in the run that wrote them.
        on_write: called with the name of each file that is about to be written, so that a failing run can clean up.

    Raises:
        SampleError: no leaf type holds what two chunks have in one field.
    """
    schema: Schema | None = None
    for chunk in staged:
        schema = chunk.schema if schema is None or schema == chunk.schema else schema.join(chunk.schema)
    if schema is None:
        return Unified(None, [], [])
    result = list(staged)
    replaced: list[str] = []
    again = True
    while again:
        again = False
        for number, chunk in enumerate(result):
            if chunk.schema == schema:
                continue
            result[number] = wide = _rewrite(store, chunk, schema, compression, allow_pickle, on_write)
            replaced.append(chunk.record.filename)
            if wide.schema != schema:  # a value needed more than its type said: chunks before this one are narrow now
                schema, again = wide.schema, True
    return Unified(schema, result, replaced)


def with_keys(store: Store, chunk: StagedChunk, settings: ChunkSettings) -> StagedChunk:
    """Return a chunk with the keys of its samples: those of a chunk that an earlier attempt wrote are found by reading it."""
    rule = settings.keys
    if rule is None or chunk.keys is not None:
        return chunk
    reader = _open(store, chunk, settings.compression, settings.allow_pickle)
    return replace(chunk, keys=KeyColumn.of([rule(sample) for sample in reader.iterate(0, chunk.record.samples)]))


def _open(store: Store, chunk: StagedChunk, compression: codec.Compression | None, allow_pickle: bool) -> Chunk:
    size = 0 if compression is not None and compression.level == "chunk" else chunk.record.size
    buffer = plain_buffer(store.map(chunk.record.filename, size))
    return open_chunk(buffer, chunk.record, Decoder(chunk.schema, allow_pickle=allow_pickle), compression)


def _rewrite(
    store: Store,
    chunk: StagedChunk,
    schema: Schema,
    compression: codec.Compression | None,
    allow_pickle: bool,
    on_write: Callable[[str], None] | None,
) -> StagedChunk:
    record = chunk.record
    reader = _open(store, chunk, compression, allow_pickle)
    items, widest = recode(items_of(reader, record.samples), chunk.schema, schema, allow_pickle=allow_pickle)
    name = "-".join(record.filename.split("-")[:3]) + f"-{secrets.token_hex(8)}"
    if on_write is not None:
        on_write(name)
    written = write_chunk(store, name, record.id or name, items, compression)
    return StagedChunk(written, widest, chunk.end, chunk.keys)
