"""What our optimize writes, the old tool reads equal: by position, by slice, by iteration and through its data loader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import liveset
from tests.interop.conftest import OldTool, OldToolError
from tests.interop.kinds import ALTERED, BOTH, OURS, make
from tests.interop.plain import Plain, plain

pytestmark = pytest.mark.interop


def write(path: Path, kind: str, start: int = 0, stop: int = 20, **options: Any) -> Path:
    settings = {"num_workers": 1, "chunk_size": 8, "verbose": False} | options
    liveset.optimize(fn=make(kind), inputs=range(start, stop), output_dir=path, **settings)
    return path


def expected(kind: str, start: int = 0, stop: int = 20) -> list[Plain]:
    return [plain(make(kind)(position)) for position in range(start, stop)]


def check(tool: OldTool, path: Path, samples: list[Plain]) -> None:
    for how in ("position", "slice", "iterate", "loader"):
        assert tool.read(path, how=how) == samples, how
    assert tool.read(path, how="iterate", batch_decode=0) == samples
    assert sorted(map(repr, tool.read(path, how="iterate", shuffle=True))) == sorted(map(repr, samples))


@pytest.mark.parametrize("kind", [*BOTH, *OURS])
def test_every_kind(kind: str, old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", kind)
    check(old_tool, tmp_path / "ds", expected(kind))


@pytest.mark.parametrize("kind", ["dict", "none-mixes", "json-lists", "dict-of-arrays"])
def test_without_pyarrow_it_reads_the_same(kind: str, old_tool_without_pyarrow: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", kind)
    check(old_tool_without_pyarrow, tmp_path / "ds", expected(kind))


@pytest.mark.parametrize("kind", ALTERED)
def test_jpeg_files_are_the_same_to_both(kind: str, old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", kind)
    dataset = liveset.StreamingDataset(tmp_path / "ds")
    assert old_tool.read(tmp_path / "ds", how="iterate") == [plain(sample) for sample in dataset]


@pytest.mark.parametrize("compression", ["zstd", "zstd:9"])
@pytest.mark.parametrize("level", ["batch", "sample", "chunk"])
@pytest.mark.parametrize("kind", ["dict", "tuple", "dict-of-arrays", "none-mixes"])
def test_compressed(kind: str, level: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", kind, compression=compression, compression_level=level)
    check(old_tool, tmp_path / "ds", expected(kind))


def test_after_append_and_overwrite(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict-of-arrays")
    write(tmp_path / "ds", "dict-of-arrays", 20, 33, mode="append")
    check(old_tool, tmp_path / "ds", expected("dict-of-arrays", 0, 33))
    write(tmp_path / "ds", "tuple", 5, 12, mode="overwrite")
    check(old_tool, tmp_path / "ds", expected("tuple", 5, 12))


def test_several_workers_and_chunks(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict", 0, 700, num_workers=2, chunk_size=300)
    check(old_tool, tmp_path / "ds", expected("dict", 0, 700))


def test_attributes_change_nothing_for_it(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict")
    liveset.set_attributes(tmp_path / "ds", name="rows", licence="CC0")
    check(old_tool, tmp_path / "ds", expected("dict"))


def snapshot_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.slow
def test_its_append_refuses_and_leaves_our_files_alone(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict-of-arrays")
    before = snapshot_of(tmp_path / "ds")
    with pytest.raises(OldToolError):
        old_tool.optimize(tmp_path / "ds", kind="dict-of-arrays", start=20, stop=25, mode="append")
    assert {name: data for name, data in snapshot_of(tmp_path / "ds").items() if name in before} == before
    check(old_tool, tmp_path / "ds", expected("dict-of-arrays"))
    assert liveset.verify(tmp_path / "ds").ok


def test_its_update_refuses_and_leaves_our_files_alone(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict-of-arrays")
    before = snapshot_of(tmp_path / "ds")
    with pytest.raises(OldToolError):
        old_tool.update(tmp_path / "ds", key="row-3", kind="dict-of-arrays", position=30)
    assert {name: data for name, data in snapshot_of(tmp_path / "ds").items() if name in before} == before


@pytest.mark.slow
def test_it_can_edit_an_exported_copy(old_tool: OldTool, tmp_path: Path) -> None:
    write(tmp_path / "ds", "dict-of-arrays")
    liveset.export(tmp_path / "ds", tmp_path / "plain")
    check(old_tool, tmp_path / "plain", expected("dict-of-arrays"))
    old_tool.optimize(tmp_path / "plain", kind="dict-of-arrays", start=20, stop=25, mode="append")
    check(old_tool, tmp_path / "plain", expected("dict-of-arrays", 0, 25))


def test_an_earlier_version_through_its_archived_index(old_tool: OldTool, tmp_path: Path) -> None:
    """Archived heads are plain indexes: put in the place of index.json in a copy, the old tool reads the earlier version."""
    write(tmp_path / "ds", "dict")
    write(tmp_path / "ds", "dict", 20, 30, mode="append")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tmp_path / "ds").glob("chunk-*"):
        os.link(file, copy / file.name)
    (first,) = (tmp_path / "ds" / "_liveset" / "versions").iterdir()
    os.link(first, copy / "index.json")
    check(old_tool, copy, expected("dict"))
