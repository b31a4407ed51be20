"""The old tool reads chunk files from which samples were removed: it divides a slot by the size of a frame or a batch to find a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.splice import splice
from liveset.format.codec import Compression
from liveset.format.index import ChunkRecord, Index
from tests.interop.conftest import OldTool
from tests.interop.kinds import make
from tests.interop.plain import plain

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:.*not writable.*:UserWarning")]

REMOVED = [{0}, {599}, {255, 256}, {3, 300, 301, 599}, set(range(256)), set(range(1, 600)), set(range(0, 600, 2))]


def remove(path: Path, removed: set[int]) -> None:
    """Splice the only chunk of a dataset in its place."""
    index = json.loads((path / "index.json").read_bytes())
    (chunk,) = index["chunks"]
    file = path / chunk["filename"]
    record = ChunkRecord(chunk["filename"], chunk["chunk_size"], chunk["chunk_bytes"])
    spliced = splice(file.read_bytes(), record, Compression.from_config(index["config"]), {}, removed)
    file.write_bytes(b"".join(spliced.buffers))
    chunk |= {"chunk_size": spliced.samples, "chunk_bytes": spliced.size}
    (path / "index.json").write_text(json.dumps(index))
    assert Index.parse((path / "index.json").read_bytes()).samples == spliced.samples


@pytest.mark.parametrize("removed", REMOVED, ids=lambda slots: f"{len(slots)}-from-{min(slots)}")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dict", {}),  # Arrow rows
        ("dict", {"compression": "zstd"}),
        ("dict-of-arrays", {}),
        ("dict-of-arrays", {"compression": "zstd", "compression_level": "batch"}),
        ("dict-of-arrays", {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 7}),
        ("dict-of-arrays", {"compression": "zstd", "compression_level": "sample"}),
        ("dict-of-arrays", {"compression": "zstd", "compression_level": "chunk"}),
    ],
    ids=str,
)
def test_a_chunk_without_some_samples(kind: str, options: dict[str, Any], removed: set[int], old_tool: OldTool, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    old_tool.write(path, kind=kind, count=600, chunk_size=600, **options)
    remove(path, removed)
    expected = [plain(make(kind)(i)) for i in range(600) if i not in removed]
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == expected
    for how in ("iterate",) if options.get("compression_level") == "chunk" else ("position", "slice", "iterate"):
        assert old_tool.read(path, how=how) == expected, how
