"""All ranks of a process group read the version of rank 0, however the dataset changes while they start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import liveset

pytest.importorskip("torch")

SCRIPT = """
import sys, warnings
import torch.distributed as dist
import liveset
warnings.simplefilter("error")
path, store, rank, version = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ds = liveset.StreamingDataset(path)
loader = liveset.StreamingDataLoader(ds, batch_size=2)
if rank == 0:
    liveset.optimize(lambda i: {"n": i}, range(8, 16), path, mode="append", num_workers=1, verbose=False)  # after this rank opened it
dist.barrier()
if rank == 1:
    if version == "pinned":
        ds = liveset.StreamingDataset(path, version=2)
        loader = liveset.StreamingDataLoader(ds, batch_size=2)
    else:
        assert ds.refresh() or ds.version == 2
        assert ds.version == 2
try:
    mine = [n for batch in loader for n in batch["n"].tolist()]
    print(ds.version, *mine)
    if rank == 0:
        assert ds.refresh()
    mine = [n for batch in loader for n in batch["n"].tolist()]
    print(ds.version, *mine)
except liveset.StateMismatch as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


def run(path: Path, store: Path, version: str) -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, path, store, str(rank), version], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    return [out.strip() for out, _ in told]


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    liveset.optimize(lambda i: {"n": i}, range(8), tmp_path / "eight", num_workers=1, verbose=False)
    return tmp_path / "eight"


@pytest.mark.slow
def test_all_ranks_read_what_rank_0_reads(eight: Path, tmp_path: Path) -> None:
    first, second = (lines.splitlines() for lines in run(eight, tmp_path / "store", "newest"))
    assert first[0].split()[0] == second[0].split()[0] == "1"
    assert sorted(first[0].split()[1:] + second[0].split()[1:], key=int) == list(map(str, range(8)))
    assert first[1].split()[0] == second[1].split()[0] == "2"
    assert sorted(first[1].split()[1:] + second[1].split()[1:], key=int) == list(map(str, range(16)))


@pytest.mark.slow
def test_a_rank_that_was_opened_at_another_version_says_so(eight: Path, tmp_path: Path) -> None:
    first, second = run(eight, tmp_path / "store", "pinned")
    assert "rank 0 reads version 1 of" in second
    assert "and this rank version 2, which cannot move" in second
    assert first.startswith("1 ")
