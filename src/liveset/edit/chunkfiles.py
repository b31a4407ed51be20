"""Chunk files: items in, one durable file and its index entry out."""

from __future__ import annotations

from dataclasses import dataclass

from liveset.errors import SampleError
from liveset.format import codec
from liveset.format.chunk import MAX_CHUNK_SIZE, pack_classic
from liveset.format.framed import pack_framed, pack_sample_compressed
from liveset.format.index import ChunkRecord
from liveset.storage import Store

__all__ = ["DEFAULT_CHUNK_SIZE", "ChunkLimit", "write_chunk"]

DEFAULT_CHUNK_SIZE = 64_000_000


@dataclass(frozen=True, slots=True)
class ChunkLimit:
    """When a chunk is full: at so many samples, or before its items exceed so many bytes."""

    samples: int | None = None
    size: int | None = DEFAULT_CHUNK_SIZE


def write_chunk(store: Store, name: str, chunk_id: str, items: list[bytes], compression: codec.Compression | None) -> ChunkRecord:
    """Write one chunk file and return its index entry; ``name`` lacks the suffix."""
    count, plain_size, head_check = len(items), None, None
    if compression is None:
        buffers = _merged(pack_classic(items))
        head_check = codec.checksum(buffers[0])
    elif compression.level == "batch":
        buffers = pack_framed(items, compression)
    elif compression.level == "sample":
        buffers = pack_sample_compressed(items, compression)
        head_check = codec.checksum(buffers[0])
    else:
        plain = b"".join(pack_classic(items))
        plain_size = len(plain)
        buffers = [codec.compress(plain, compression)]
        name += f".{compression.name}"
    size = sum(map(len, buffers))
    if size > MAX_CHUNK_SIZE:
        raise SampleError(f"a chunk of {size:,} bytes cannot be written: the format ends at 4 GiB per chunk. Use a smaller chunk_size.")
    record = ChunkRecord(
        filename=f"{name}.bin",
        samples=count,
        size=size if plain_size is None else plain_size,
        id=chunk_id,
        check=codec.checksum(buffers),
        head_check=head_check,
    )
    store.write(record.filename, buffers)
    return record


def _merged(buffers: list[bytes]) -> list[bytes]:
    """Return a header and its items with small items joined: one call for each buffer would cost more than the copy."""
    header, *items = buffers
    return [header, b"".join(items)] if sum(map(len, items)) < (len(items) << 16) else buffers
