"""The ``config`` member of an index: what all chunks of a dataset share."""

from __future__ import annotations

from typing import Any

from liveset.format.codec import Compression
from liveset.format.schema import Schema


def make_config(schema: Schema, *, samples: int | None, size: int | None, compression: Compression | None) -> dict[str, Any]:
    """Return a complete config, with every member that the old tool writes.

    Args:
        schema: of the samples.
        samples: the limit of a chunk in samples, or None.
        size: the limit of a chunk in bytes, or None.
        compression: of the chunks, or None.
    """
    packed = compression.to_config() if compression is not None else {}
    return {
        "chunk_bytes": size,
        "chunk_size": samples,
        "compression": None,
        "compression_batch_size": None,
        "compression_level": None,
        **packed,
        **schema.to_config(),
        "encryption": None,
        "ipc_compression": None,
        "item_loader": "PyTreeLoader",
        "types": None,
    }
