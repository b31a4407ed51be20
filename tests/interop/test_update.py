"""After an update the old tool reads our dataset, and its own, by position and by key; its writers refuse both."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.session import dataset_update
from tests.interop.conftest import OldTool, OldToolError
from tests.interop.kinds import make
from tests.interop.plain import Plain, plain

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:.*not writable.*:UserWarning")]

COUNT = 20
COMPRESSED: dict[str, dict[str, Any]] = {
    "none": {},
    "batch": {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 3},
    "sample": {"compression": "zstd", "compression_level": "sample"},
    "chunk": {"compression": "zstd", "compression_level": "chunk"},
}


def other(kind: str, i: int) -> Any:
    """Another sample for the key of sample i, mostly of another size."""
    return {**make(kind)(i + 7), "id": make(kind)(i)["id"]}


def update(path: Path, kind: str, *numbers: int) -> list[Plain]:
    """Replace some samples; return all samples as they must be now."""
    with dataset_update(path) as changes:
        for i in numbers:
            changes[make(kind)(i)["id"]] = other(kind, i)
        changes.commit()
    return [plain(other(kind, i) if i in numbers else make(kind)(i)) for i in range(COUNT)]


def check(tool: OldTool, path: Path, kind: str, samples: list[Plain]) -> None:
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == samples
    for how in ("position", "slice", "iterate", "loader"):
        assert tool.read(path, how=how) == samples, how
    for i in (0, 3, 8, COUNT - 1):
        assert tool.key(path, key=make(kind)(i)["id"]) == samples[i]
        assert plain(liveset.StreamingDataset(path)[make(kind)(i)["id"]]) == samples[i]


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("kind", ["dict", "dict-of-arrays", "dict-with-bytes"])
def test_our_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    options = {"key_fn": "id", "num_workers": 1, "chunk_size": 8, "verbose": False, **COMPRESSED[compression]}
    liveset.optimize(fn=make(kind), inputs=range(COUNT), output_dir=tmp_path / "ds", **options)
    samples = update(tmp_path / "ds", kind, 3, 8, 9)
    if compression == "chunk":  # reading them in place, the old tool replaces such files
        assert old_tool.read(tmp_path / "ds", how="iterate") == samples
    else:
        check(old_tool, tmp_path / "ds", kind, samples)
    samples = update(tmp_path / "ds", kind, 3, 8, 9)
    assert old_tool.read(tmp_path / "ds", how="iterate") == samples


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("kind", ["dict", "dict-of-arrays"])
def test_its_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    """Arrow chunks (for plain dicts) and classic ones; the first update adopts the dataset."""
    path = tmp_path / "ds"
    old_tool.optimize(path, kind=kind, key_fn=operator.itemgetter("id"), **COMPRESSED[compression])
    samples = update(path, kind, 3, 8, 9)
    if compression == "chunk":
        assert old_tool.read(path, how="iterate") == samples
    else:
        check(old_tool, path, kind, samples)
    assert update(path, kind, 3, 8, 9) == [plain(sample) for sample in liveset.StreamingDataset(path)]
    assert old_tool.read(path, how="iterate") == samples
    with pytest.raises(OldToolError):
        old_tool.update(path, key=make(kind)(3)["id"], kind=kind, position=30)
    with pytest.raises(OldToolError):
        old_tool.optimize(path, kind=kind, start=COUNT, stop=25, mode="append", **COMPRESSED[compression])
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == samples


def test_what_only_arrow_rows_hold(old_tool: OldTool, tmp_path: Path) -> None:
    path, kind = tmp_path / "ds", "dict-with-none"
    old_tool.write(path, kind=kind, chunk_size=600)
    liveset.build_keys_index(path, "id", verbose=False)
    changed = {"id": make(kind)(4)["id"], "x": 1.0, "s": "text"}
    with dataset_update(path) as changes:
        changes[changed["id"]] = changed
        changes[make(kind)(5)["id"]] = {**make(kind)(5), "x": None, "s": None}
        changes.commit()
    expected = [plain(make(kind)(i)) for i in range(COUNT)]
    expected[4], expected[5] = plain(changed), plain({**make(kind)(5), "x": None, "s": None})
    assert [plain(sample) for sample in liveset.StreamingDataset(path)] == expected
    assert old_tool.read(path, how="iterate") == expected
