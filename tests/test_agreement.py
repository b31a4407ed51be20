"""All ranks of a process group read the version of rank 0, however the dataset changes while they start."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

import liveset
from liveset.errors import StateMismatch
from liveset.read import agreement
from liveset.read.agreement import Agreement

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
    if rank == 0:  # evaluates alone, in a loop like the other one, at the version of before
        list(liveset.StreamingDataLoader(liveset.StreamingDataset(path, version=1), batch_size=2))
        assert ds.refresh()
    if rank == 1:
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


def test_the_others_follow_rank_0_but_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()
    monkeypatch.setattr(agreement, "PATIENCE", timedelta(milliseconds=50))
    monkeypatch.setattr(agreement, "_loaders", Counter())

    def of_rank(rank: int, of: Agreement, epoch: int, version: int) -> int:
        monkeypatch.setattr(agreement, "_ranks", lambda: (store, rank))
        return of.tell("data", epoch, version, f"id{version}")[0]

    lead, evaluation = Agreement("0x2"), Agreement("0x2")
    assert [of_rank(0, lead, 1, 2), of_rank(0, lead, 2, 4), of_rank(0, lead, 2, 5), of_rank(0, lead, 3, 3)] == [2, 4, 5, 3]
    assert of_rank(0, evaluation, 1, 1) == 1
    monkeypatch.setattr(agreement, "_loaders", Counter())  # those of another process
    other = Agreement("0x2")
    # It opened the dataset, or refreshed it, after somebody has committed again; and an epoch may be read twice.
    assert [of_rank(1, other, 1, 3), of_rank(1, other, 2, 9), of_rank(1, other, 2, 5)] == [2, 4, 5]
    with pytest.raises(StateMismatch, match="rank 0 reads version 3 of data, and this rank version 5, after both read version 5"):
        of_rank(1, other, 3, 5)
    with pytest.warns(UserWarning, match="rank 0 does not read data in the same loop"):
        assert of_rank(1, Agreement("0x3"), 1, 5) == 5
