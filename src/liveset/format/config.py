"""The ``config`` member of an index: what all chunks of a dataset share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from liveset.format.codec import Compression
from liveset.format.schema import Schema

_UNITS = {"tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3, "t": 10**12, "g": 10**9, "m": 10**6, "k": 10**3, "b": 1}


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


def stored_limits(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the limits of a chunk in samples and in bytes that a config names; None for what it does not."""
    samples, size = config.get("chunk_size"), config.get("chunk_bytes")
    if isinstance(size, str):
        size = parse_size(size)
    return samples if isinstance(samples, int) and samples > 0 else None, size if isinstance(size, int) and size > 0 else None


def parse_size(text: int | str) -> int:
    """Return a number of bytes from ``64_000_000`` or ``"64MB"`` (decimal; tb, gb, mb, kb, t, g, m, k, b).

    Raises:
        ValueError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text.lower()) if isinstance(text, str) else None
    if found and found[2] in _UNITS and re.fullmatch(r"\d+\.?\d*|\.\d+", found[1]):
        return round(float(found[1]) * _UNITS[found[2]])
    raise ValueError(f"Unsupported value/suffix {text!r} for a size. The supported units are {', '.join(_UNITS)}, as in '64MB'.")
