"""Key tables of earlier forms: read as they are, and written in the present one by a compaction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import liveset
from liveset.format.keyfront import MAGIC
from liveset.storage import open_store
from liveset.testing.invariants import check_dataset
from tests.support.writing import write_dataset

GOLDEN = Path(__file__).parent / "golden"


def forms(path: Path) -> list[bytes]:
    """Return how the key tables of the newest version begin."""
    files = json.loads((path / "index.json").read_bytes())["edit"]["key_files"]
    return [(path / name).read_bytes()[:8] for name in (*files["base"], *files["deltas"])]


def old(path: Path) -> Path:
    """Return a copy of a dataset of an earlier version with one key table."""
    return Path(shutil.copytree(GOLDEN / "v1" / "function-keys", path / "old"))


def test_a_compaction_writes_a_single_old_table_again(tmp_path: Path) -> None:
    path = old(tmp_path)
    assert forms(path) == [b"LSKEYS02"]
    before = liveset.StreamingDataset(path)
    keys, version, samples = list(before.keys), before.version, list(before)
    planned = liveset.compact(path, small=0, dry_run=True)
    assert (planned.key_tables_before, planned.key_tables_after) == (1, 1)
    assert planned.key_bytes > 0
    report = liveset.compact(path, small=0)
    assert (report.version, report.chunks_after) == (version + 1, report.chunks_before)
    assert (report.key_tables_before, report.key_tables_after) == (1, 1)
    assert report.bytes_written == report.key_bytes > 0
    assert forms(path) == [MAGIC]
    with liveset.StreamingDataset(path) as dataset:
        assert list(dataset.keys) == keys
        assert [dataset[key] for key in keys] == samples
    assert liveset.compact(path, small=0).version is None
    assert liveset.compact(path, small=0, dry_run=True).key_bytes == 0
    check_dataset(open_store(path))
    assert liveset.verify(path).ok
    assert list(liveset.StreamingDataset(path, version=version).keys) == keys


def test_without_keys_a_single_old_table_stays(tmp_path: Path) -> None:
    path = old(tmp_path)
    assert liveset.compact(path, small=0, keys=False).version is None
    assert liveset.compact(path, small=0, keys=False, dry_run=True).key_bytes == 0
    assert forms(path) == [b"LSKEYS02"]


def test_a_single_table_of_the_present_form_stays(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": f"k{number}", "n": number} for number in range(20)], key="id", chunk_size=10)
    assert forms(tmp_path) == [MAGIC]
    assert liveset.compact(tmp_path, small=0, dry_run=True).bytes_written == 0
    assert liveset.compact(tmp_path, small=0).version is None
