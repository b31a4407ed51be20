"""How the old tool sees a dataset: a plain parse of ``index.json`` and a small decoder that shares nothing with ours."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import zstandard

from tests.support.places import parquet_rows

_KINDS: dict[str, Callable[[bytes], Any]] = {"str": bytes.decode, "int": lambda data: int.from_bytes(data, "little", signed=True)}


def _inflate(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def _items(data: bytes, config: dict[str, Any]) -> Iterator[bytes]:
    """Yield the items of a chunk file: classic, compressed whole or by sample, or framed."""
    if data[:8] == b"LDFZ01\0\0":
        _, _, count, _, frames = struct.unpack_from("<HHIII", data, 8)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 24)
        table = [struct.unpack_from("<IIQII", data, 28 + 4 * count + 24 * i) for i in range(frames)]
        plain = b"".join(_inflate(data[start : start + packed]) for _, _, start, packed, _ in table)
    else:
        plain = _inflate(data) if config["compression"] and config["compression_level"] is None else data
        (count,) = struct.unpack_from("<I", plain)
        offsets = struct.unpack_from(f"<{count + 1}I", plain, 4)
    for start, end in pairwise(offsets):
        item = plain[start:end]
        yield _inflate(item) if config["compression_level"] == "sample" else item


def old_samples(read: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """Return all samples by position; they are flat dicts of text and integers here."""
    index = json.loads(read("index.json"))
    found: list[dict[str, Any]] = []
    for chunk in index["chunks"]:
        config = index["config"]
        kinds, names = config["data_format"], json.loads(json.loads(config["data_spec"])[1]["context"])
        items = list(_items(read(chunk["filename"]), config))
        assert len(items) == chunk["chunk_size"]
        for item in items:
            sizes, at, sample = struct.unpack_from(f"<{len(kinds)}I", item), 4 * len(kinds), {}
            for name, kind, size in zip(names, kinds, sizes, strict=True):
                sample[name] = _KINDS[kind](item[at : at + size])
                at += size
            found.append(sample)
    return found


def old_keys(read: Callable[[str], bytes], names: list[str]) -> dict[str | int, int]:
    """Return the position that the old tool takes for each key, from the published shards."""
    found: dict[str | int, int] = {}
    index = json.loads(read("index.json"))
    sizes = [chunk["chunk_size"] for chunk in index["chunks"]]
    chunk_of = [number for number, size in enumerate(sizes) for _ in range(size)]
    shards = index.get("keys", {}).get("num_shards", 1)
    for name in names:
        for row in parquet_rows(read(name)):
            key, position = row["key"], row["index"]
            digest = int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little")
            assert name == f"keys/shard-{digest % shards:05d}.parquet", f"{key!r} stands in {name}, of {shards}"
            assert key not in found, f"{key!r} is published twice"
            assert chunk_of[position] == row["chunk_index"], f"{key!r} names another chunk"
            found[key] = position
    return found
