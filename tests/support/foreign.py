"""Datasets as the old tool leaves them: plain names, no stamp, keys only as Parquet shards."""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liveset.format.codec import Compression
from liveset.format.schema import Schema
from tests.support.writing import write_dataset


def make_foreign(path: Path) -> None:
    """Strip everything that is ours from a dataset."""
    index = json.loads((path / "index.json").read_bytes())
    del index["edit"]
    for number, entry in enumerate(index["chunks"]):
        suffix = entry["filename"].partition(".")[2]
        (path / entry["filename"]).rename(path / f"chunk-0-{number}.{suffix}")
        entry["filename"] = f"chunk-0-{number}.{suffix}"
        for name in ("id", "check", "head_check"):
            entry.pop(name, None)
    (path / "index.json").write_text(json.dumps(index, sort_keys=True))
    shutil.rmtree(path / "_liveset")


def write_foreign(
    path: Path, samples: Sequence[Any], *, key: str = "id", chunk_size: int = 4, compression: Compression | None = None
) -> None:
    """Write a keyed dataset of classic or compressed chunks."""
    write_dataset(path, samples, chunk_size=chunk_size, compression=compression, key=key)
    make_foreign(path)


def write_arrow(path: Path, rows: Sequence[dict[str, Any]], *, key: str = "id", chunk_size: int = 600, codec: str | None = None) -> None:
    """Write a keyed dataset of Arrow chunks; rows need the same fields, and the first one must not hold None."""
    write_foreign(path, rows, key=key, chunk_size=chunk_size)
    index = json.loads((path / "index.json").read_bytes())
    index["config"] |= Schema.of(rows[0]).to_config()  # the old tool takes it from there
    for number, entry in enumerate(index["chunks"]):
        data = arrow_chunk(rows[number * chunk_size : (number + 1) * chunk_size], codec)
        (path / entry["filename"]).write_bytes(data)
        entry["chunk_bytes"] = len(data)
    (path / "index.json").write_text(json.dumps(index, sort_keys=True))


def arrow_chunk(rows: Sequence[dict[str, Any]], codec: str | None = None) -> bytes:
    """Return a chunk file of Arrow rows in batches of 256."""
    import pyarrow as pa

    table = pa.Table.from_pylist(list(rows))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table, max_chunksize=256)
    blob, start = sink.getvalue(), 4 + 4 * (len(rows) + 1)
    head = struct.pack(f"<{len(rows) + 2}I", len(rows), *[start] * (len(rows) + 1))
    return head + blob + struct.pack("<I", len(blob)) + b"LDARW01\0"
