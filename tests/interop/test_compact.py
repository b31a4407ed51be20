"""After deletes, inserts and a compaction the old tool reads by position and by key again."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

import liveset
from tests.interop.conftest import OldTool, OldToolError
from tests.interop.kinds import make
from tests.interop.plain import Plain, plain

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:.*not writable.*:UserWarning")]

COMPRESSED: dict[str, dict[str, Any]] = {
    "none": {},
    "batch": {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 3},
    "sample": {"compression": "zstd", "compression_level": "sample"},
    "chunk": {"compression": "zstd", "compression_level": "chunk"},
}


def edit(path: Path, kind: str) -> list[int]:
    """Remove some of twenty samples and add five, one by one; return the numbers of those that are there."""
    for number in (3, 8, 19):
        with liveset.dataset_update(path) as update:
            del update[make(kind)(number)["id"]]
            update.commit()
    for number in range(20, 25):
        with liveset.dataset_update(path) as update:
            update.insert(make(kind)(number)["id"], make(kind)(number))
            update.commit()
    return [number for number in range(25) if number not in (3, 8, 19)]


def check(tool: OldTool, path: Path, kind: str, numbers: list[int]) -> None:
    samples: list[Plain] = [plain(make(kind)(number)) for number in numbers]
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == samples
    for how in ("position", "slice", "iterate", "loader"):
        assert tool.read(path, how=how) == samples, how
    for position, number in enumerate(numbers):
        assert tool.key(path, key=make(kind)(number)["id"]) == samples[position]
    with pytest.raises(OldToolError):
        tool.key(path, key=make(kind)(3)["id"])


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("kind", ["dict", "dict-of-arrays"])
def test_our_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    options = {"key_fn": "id", "num_workers": 1, "chunk_size": 8, "verbose": False, **COMPRESSED[compression]}
    liveset.optimize(fn=make(kind), inputs=range(20), output_dir=path, **options)
    numbers = edit(path, kind)
    with pytest.raises(OldToolError):  # the published keys were withdrawn
        old_tool.key(path, key=make(kind)(4)["id"])
    report = liveset.compact(path, small=1.0)
    assert report.chunks_after < report.chunks_before
    if compression == "chunk":  # reading them in place, the old tool replaces such files
        assert old_tool.read(path, how="iterate") == [plain(make(kind)(number)) for number in numbers]
    else:
        check(old_tool, path, kind, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("kind", ["dict", "dict-of-arrays"])
def test_its_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    """Arrow chunks (for plain dicts) and classic ones; a compaction alone adopts the dataset, too."""
    path = tmp_path / "ds"
    old_tool.optimize(path, kind=kind, key_fn=operator.itemgetter("id"), **COMPRESSED[compression])
    numbers = edit(path, kind)
    liveset.compact(path, small=1.0)
    if compression == "chunk":
        assert old_tool.read(path, how="iterate") == [plain(make(kind)(number)) for number in numbers]
    else:
        check(old_tool, path, kind, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSED)
def test_small_chunks_that_it_wrote(compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    path, kind = tmp_path / "ds", "dict-of-arrays"
    options = {"kind": kind, **COMPRESSED[compression]}
    old_tool.optimize(path, stop=2, **options)
    for start in (2, 4, 6):
        old_tool.optimize(path, start=start, stop=start + 2, mode="append", **options)
    samples = [plain(make(kind)(number)) for number in range(8)]
    report = liveset.compact(path)
    assert (report.version, report.chunks_before, report.chunks_after) == (2, 4, 1)
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == samples
    if compression != "chunk":
        assert old_tool.read(path, how="position") == samples
    assert old_tool.read(path, how="iterate") == samples
