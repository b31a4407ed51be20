"""After an update the old tool reads our dataset, and its own, by position and by key; its writers refuse both."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.storage import open_store
from liveset.testing.invariants import check_dataset
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


Expected = dict[int, Plain]
"""What each sample must be, by its number, in their order."""


def _insert(changes: DatasetUpdate, kind: str, expected: Expected) -> None:
    for i in range(COUNT, COUNT + 10):
        changes.insert(make(kind)(i)["id"], make(kind)(i))
        expected[i] = plain(make(kind)(i))


def _delete(changes: DatasetUpdate, kind: str, expected: Expected) -> None:
    for i in (0, 3, 9):
        del changes[make(kind)(i)["id"]]
        del expected[i]


def _delete_a_chunk(changes: DatasetUpdate, kind: str, expected: Expected) -> None:
    for i in range(8, 16):
        if i in expected:
            del changes[make(kind)(i)["id"]]
            del expected[i]


def _patch(changes: DatasetUpdate, kind: str, expected: Expected) -> None:
    for i in (1, 5, 17):
        changes.patch(make(kind)(i)["id"], {name: value for name, value in other(kind, i).items() if name != "id"})
        expected[i] = plain(other(kind, i))


def _mixed(changes: DatasetUpdate, kind: str, expected: Expected) -> None:
    del changes[make(kind)(2)["id"]], expected[2]
    changes.upsert(make(kind)(4)["id"], other(kind, 4))
    changes.upsert(make(kind)(40)["id"], make(kind)(40))
    changes.patch(make(kind)(6)["id"], {name: value for name, value in other(kind, 6).items() if name != "id"})
    expected |= {4: plain(other(kind, 4)), 6: plain(other(kind, 6)), 40: plain(make(kind)(40))}


EDITS = (_patch, _insert, _delete, _delete_a_chunk, _mixed)


def edit_and_check(tool: OldTool, path: Path, kind: str, compression: str) -> None:
    """After each kind of edit the old tool reads all by position; by key it may find nothing, but never a wrong or a deleted sample."""
    expected = {i: plain(make(kind)(i)) for i in range(COUNT)}
    for edit in EDITS:
        with dataset_update(path) as changes:
            edit(changes, kind, expected)
            changes.commit()
        assert [plain(sample) for sample in liveset.StreamingDataset(path)] == [*expected.values()], edit
        # Reading them in place, the old tool inflates files that are compressed as a whole, and then it can only iterate.
        hows = ("iterate",) if compression == "chunk" else ("position", "slice", "iterate", "loader") if edit is _mixed else ("position",)
        for how in hows:
            assert tool.read(path, how=how) == [*expected.values()], (edit, how)
        if compression != "chunk":
            found = 0
            for i in (2, 3, 8, 17, COUNT + 3):
                try:
                    sample = tool.key(path, key=make(kind)(i)["id"])
                except OldToolError:
                    continue
                assert sample == expected.get(i), (edit, i)
                found += 1
            assert found or edit not in EDITS[:2], "the published keys could have stayed"
        check_dataset(open_store(path))


@pytest.mark.parametrize(
    ("kind", "compression"), [("dict", "none"), ("dict", "chunk"), ("dict-of-arrays", "batch"), ("dict-of-arrays", "sample")]
)
def test_every_kind_of_edit_of_our_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    options = {"key_fn": "id", "num_workers": 1, "chunk_size": 8, "verbose": False, **COMPRESSED[compression]}
    liveset.optimize(fn=make(kind), inputs=range(COUNT), output_dir=tmp_path / "ds", **options)
    edit_and_check(old_tool, tmp_path / "ds", kind, compression)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "compression"), [("dict", "batch"), ("dict-of-arrays", "none")])
def test_every_kind_of_edit_of_its_dataset(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.optimize(tmp_path / "ds", kind=kind, key_fn=operator.itemgetter("id"), **COMPRESSED[compression])
    edit_and_check(old_tool, tmp_path / "ds", kind, compression)


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
