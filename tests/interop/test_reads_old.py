"""What the old tool writes, our StreamingDataset reads equal: to the samples that went in, and to what the old tool itself reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import liveset
from tests.interop.conftest import OldTool, OldToolError
from tests.interop.kinds import ALTERED, BOTH, THEIRS, make
from tests.interop.plain import Plain, plain

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:.*not writable.*:UserWarning")]

WRITERS = ["old_tool", "old_tool_without_pyarrow"]


def ours(path: Path, **options: Any) -> list[Plain]:
    """Our reading by position; by slice and by iteration it must be the same."""
    dataset = liveset.StreamingDataset(path, **options)
    by_position = [plain(dataset[position]) for position in range(len(dataset))]
    assert [plain(sample) for sample in dataset[:]] == by_position
    assert [plain(sample) for sample in dataset] == by_position
    return by_position


def expected(kind: str, count: int = 20) -> list[Plain]:
    return [plain(make(kind)(position)) for position in range(count)]


def is_arrow(path: Path) -> bool:
    return all(file.read_bytes().endswith(b"LDARW01\0") for file in path.glob("*.bin"))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", BOTH)
def test_every_kind(kind: str, writer: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    request.getfixturevalue(writer).write(tmp_path / "ds", kind=kind)
    assert ours(tmp_path / "ds") == expected(kind)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", [*THEIRS, *ALTERED])
def test_what_the_old_tool_changes_is_read_as_it_reads_it(kind: str, writer: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tool: OldTool = request.getfixturevalue(writer)
    tool.write(tmp_path / "ds", kind=kind)
    assert ours(tmp_path / "ds") == tool.read(tmp_path / "ds")


def test_nulls_of_arrow_chunks_survive(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="dict-with-none")
    assert is_arrow(tmp_path / "ds")
    assert ours(tmp_path / "ds") == expected("dict-with-none")


def test_pyarrow_decides_the_form_of_the_chunks(old_tool: OldTool, old_tool_without_pyarrow: OldTool, tmp_path: Path) -> None:
    assert old_tool.has_pyarrow()
    assert not old_tool_without_pyarrow.has_pyarrow()
    old_tool.write(tmp_path / "with", kind="dict")
    old_tool_without_pyarrow.write(tmp_path / "without", kind="dict")
    assert is_arrow(tmp_path / "with")
    assert not is_arrow(tmp_path / "without")


def test_arrow_chunks_of_several_record_batches(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="dict", count=1000, chunk_size=600)
    assert ours(tmp_path / "ds") == expected("dict", 1000)


COMPRESSED: dict[str, dict[str, Any]] = {
    "batch": {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 3},
    "batch-default": {"compression": "zstd:7"},
    "sample": {"compression": "zstd", "compression_level": "sample"},
    "chunk": {"compression": "zstd:2", "compression_level": "chunk"},
}


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("kind", ["dict-of-arrays", "array-2d", "tensor-1d", "dict", "str"])
def test_compressed(kind: str, compression: str, old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind=kind, **COMPRESSED[compression])
    assert ours(tmp_path / "ds") == expected(kind)


@pytest.mark.parametrize("compression", ["batch", "sample"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_compressed_by_name_only(kind: str, compression: str, old_tool_without_pyarrow: OldTool, tmp_path: Path) -> None:
    """The old tool says "compressed" about some chunks that it does not compress, and then cannot read them itself; we can."""
    old_tool_without_pyarrow.write(tmp_path / "ds", kind=kind, **COMPRESSED[compression])
    assert ours(tmp_path / "ds") == expected(kind)


def test_whole_file_compression_that_the_old_tool_undid_in_place(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="tuple", **COMPRESSED["chunk"])
    assert ours(tmp_path / "ds") == expected("tuple")
    assert old_tool.read(tmp_path / "ds", how="iterate") == expected("tuple")
    assert not list((tmp_path / "ds").glob("*.zstd:2.bin"))
    assert ours(tmp_path / "ds") == expected("tuple")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dict", "dict-of-arrays"])
def test_its_optimize_with_workers_append_and_overwrite(kind: str, old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.optimize(tmp_path / "ds", kind=kind, num_workers=2)
    assert ours(tmp_path / "ds") == expected(kind)
    old_tool.optimize(tmp_path / "ds", kind=kind, start=20, stop=27, mode="append")
    assert ours(tmp_path / "ds") == expected(kind, 27)
    old_tool.optimize(tmp_path / "ds", kind="tuple", mode="overwrite")
    assert ours(tmp_path / "ds") == expected("tuple")


@pytest.mark.slow
def test_we_append_to_what_it_wrote(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.optimize(tmp_path / "ds", kind="dict-of-arrays")
    made = make("dict-of-arrays")
    liveset.optimize(fn=made, inputs=range(20, 30), output_dir=tmp_path / "ds", num_workers=1, chunk_size=8, mode="append", verbose=False)
    assert ours(tmp_path / "ds") == expected("dict-of-arrays", 30)
    assert old_tool.read(tmp_path / "ds", how="iterate") == expected("dict-of-arrays", 30)


def test_only_some_fields(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="dict-of-arrays")
    assert ours(tmp_path / "ds", fields=["label"]) == [plain({"label": position}) for position in range(20)]


def test_an_index_of_the_old_tool_has_no_version(old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="dict")
    dataset = liveset.StreamingDataset(tmp_path / "ds")
    assert dataset.info().version == 0
    assert "edit" not in json.loads((tmp_path / "ds" / "index.json").read_text())
    assert liveset.verify(tmp_path / "ds").ok


def test_an_old_reader_failure_is_seen_as_one(old_tool: OldTool, tmp_path: Path) -> None:
    """The fixture itself: errors of the old tool arrive as errors."""
    with pytest.raises(OldToolError):
        old_tool.read(tmp_path / "nothing")
