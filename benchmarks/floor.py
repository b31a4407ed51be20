"""The floor: the least code that reads and writes the same bytes as liveset, by hand, for one known kind of sample.

No schema, no checks, no versions. Arrays are owned (copied out of the file) and writable, as ours are.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kinds import Kind, Sample

Buffer = bytes | mmap.mmap
Decode = Callable[[Buffer, int], Sample]
Encode = Callable[[Sample], bytes]

CHUNK = 64_000_000
_TWO, _THREE, _INT = struct.Struct("<II"), struct.Struct("<III"), struct.Struct("<q")


def decode_small(data: Buffer, start: int) -> Sample:
    a, b, _ = _THREE.unpack_from(data, start)
    p = start + 12 + a
    q = p + b
    return {"id": data[start + 12 : p].decode(), "x": np.frombuffer(bytearray(data[p:q]), "f4"), "n": _INT.unpack_from(data, q)[0]}


def decode_blob(data: Buffer, start: int) -> Sample:
    a, b = _TWO.unpack_from(data, start)
    p = start + 8 + a
    return {"id": data[start + 8 : p].decode(), "raw": data[p : p + b]}


def decode_array(data: Buffer, start: int) -> Sample:
    a, _ = _TWO.unpack_from(data, start)
    p = start + 8 + a
    rows, columns = _TWO.unpack_from(data, p + 8)
    return {"id": data[start + 8 : p].decode(), "x": np.frombuffer(data, "f4", rows * columns, p + 16).reshape(rows, columns).copy()}


def encode_small(sample: Sample) -> bytes:
    text, raw = sample["id"].encode(), sample["x"].tobytes()
    return b"".join((_THREE.pack(len(text), len(raw), 8), text, raw, _INT.pack(sample["n"])))


def encode_blob(sample: Sample) -> bytes:
    text, raw = sample["id"].encode(), sample["raw"]
    return b"".join((_TWO.pack(len(text), len(raw)), text, raw))


def encode_array(sample: Sample) -> bytes:
    text, x = sample["id"].encode(), sample["x"]
    return b"".join((_TWO.pack(len(text), 16 + x.nbytes), text, struct.pack("<4I", 9, 2, *x.shape), x.tobytes()))


CODECS: dict[str, tuple[Encode, Decode]] = {
    "small": (encode_small, decode_small),
    "blobs": (encode_blob, decode_blob),
    "arrays": (encode_array, decode_array),
}


def _chunks(path: Path) -> list[tuple[Path, int]]:
    index = json.loads((path / "index.json").read_bytes())
    return [(path / chunk["filename"], chunk["chunk_size"]) for chunk in index["chunks"]]


def iterate(path: Path, kind: Kind) -> Iterator[Sample]:
    """Yield the samples of a dataset that liveset wrote."""
    _, decode = CODECS[kind.name]
    for file, count in _chunks(path):
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start in struct.unpack_from(f"<{count}I", data, 4):
                yield decode(data, start)


def opened(path: Path, kind: Kind) -> Callable[[int], Sample]:
    """Return a function from position to sample, with all chunks mapped."""
    _, decode = CODECS[kind.name]
    places: list[tuple[mmap.mmap, int]] = []
    for file, count in _chunks(path):
        with file.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        places += [(data, start) for start in struct.unpack_from(f"<{count}I", data, 4)]
    return lambda position: decode(*places[position])


def write(path: Path, kind: Kind, count: int) -> None:
    """Write chunk files and an index, each synced to the disk."""
    encode, _ = CODECS[kind.name]
    path.mkdir(parents=True)
    items: list[bytes] = []
    entries: list[dict[str, Any]] = []
    size = 0
    for position in range(count):
        item = encode(kind.make(position))
        if items and size + len(item) > CHUNK:
            entries.append(_flush(path, len(entries), items))
            items, size = [], 0
        items.append(item)
        size += len(item)
    entries.append(_flush(path, len(entries), items))
    _write_synced(path / "index.json.tmp", [json.dumps({"chunks": entries}).encode()])
    (path / "index.json.tmp").rename(path / "index.json")
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _flush(path: Path, number: int, items: list[bytes]) -> dict[str, Any]:
    name = f"chunk-0-{number}.bin"
    sizes = np.fromiter(map(len, items), "u4", len(items))
    offsets = np.concatenate([[0], np.cumsum(sizes)]) + 4 * (len(items) + 2)
    header = struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes()
    _write_synced(path / name, [header, *items])
    return {"filename": name, "chunk_size": len(items), "chunk_bytes": int(offsets[-1])}


def _write_synced(path: Path, parts: list[bytes]) -> None:
    with path.open("wb", buffering=0) as stream:
        stream.write(b"".join(parts))
        os.fsync(stream.fileno())
