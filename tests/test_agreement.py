"""All ranks of a process group read the version of rank 0, however the dataset changes while they start, and in the same way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
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


def run(script: str, path: Path, store: Path, *options: str) -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, path, store, str(rank), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    first, second = (lines.splitlines() for lines in run(SCRIPT, eight, tmp_path / "store", "newest"))
    assert first[0].split()[0] == second[0].split()[0] == "1"
    assert sorted(first[0].split()[1:] + second[0].split()[1:], key=int) == list(map(str, range(8)))
    assert first[1].split()[0] == second[1].split()[0] == "2"
    assert sorted(first[1].split()[1:] + second[1].split()[1:], key=int) == list(map(str, range(16)))


@pytest.mark.slow
def test_where_one_rank_was_opened_at_another_version_both_say_so(eight: Path, tmp_path: Path) -> None:
    first, second = run(SCRIPT, eight, tmp_path / "store", "pinned")
    for told in (first, second):
        assert "rank 0 reads version 1 of" in told
        assert "and this rank version 2, which cannot move" in told
    assert first.startswith("rank 1 cannot begin the epoch: StateMismatch:")


DIFFERENT = """
import sys, time
import torch.distributed as dist
import liveset
path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


class Failing:
    def __iter__(self):
        raise OSError("no such list")


def look(ds={}, sampler=None, **options):
    dataset = liveset.StreamingDataset(path, **ds)
    if "subset" in options:
        dataset = dataset.subset(options.pop("subset"))
    if sampler is not None:
        options["sampler"] = sampler
    began = time.monotonic()
    try:
        loader = liveset.StreamingDataLoader(dataset, **options)
        print(sorted(n for batch in loader for n in batch["n"].tolist()))
    except (liveset.StateMismatch, OSError) as error:
        print(f"{type(error).__name__}: {error}")
    assert time.monotonic() - began < 20
    dist.barrier()


look({"seed": rank, "shuffle": True}, batch_size=2)
look({"shuffle": rank == 1}, batch_size=2)
look(batch_size=1 + rank, pad=True)
look(batch_size=2, num_workers=2 * rank, drop_last=rank == 0)
look(subset=range(rank, 7 + rank), batch_size=1)
look(sampler=[0, 1, 2, 3] if rank else None, batch_size=1)
look(sampler=[0, 1 + rank, 3, 4], batch_size=1)
look(sampler=[0, 1, 2, 3] if rank else Failing(), batch_size=1)
look(sampler=[0, 1, 2, 3] if not rank else Failing(), batch_size=1)
look({"seed": 3, "shuffle": True}, batch_size=2)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_do_not_read_in_the_same_way_are_all_told_in_what_they_differ(eight: Path, tmp_path: Path) -> None:
    first, second = (out.splitlines() for out in run(DIFFERENT, eight, tmp_path / "store"))
    assert first[:7] == second[:7]
    for line, differ in zip(
        first,
        [
            "seed is 0 on rank 0, 1 on rank 1",
            "shuffle is False on rank 0, True on rank 1",
            "batch_size is 1 on rank 0, 2 on rank 1",
            "num_workers is 1 on rank 0, 2 on rank 1; drop_last is True on rank 0, False on rank 1",
            "samples is '7 of a StreamingDataset (",
            "order is 'that of the dataset' on rank 0, 'that of sampler= (",
            "order is 'that of sampler= (",
        ],
        strict=False,
    ):
        assert line.startswith(
            f"StateMismatch: the ranks do not read in the same way, and would repeat samples and leave others out: {differ}"
        )
    assert (first[7], second[7]) == ("OSError: no such list", "StateMismatch: rank 0 cannot begin the epoch: OSError: no such list")
    assert (first[8], second[8]) == ("StateMismatch: rank 1 cannot begin the epoch: OSError: no such list", "OSError: no such list")
    assert sorted(json.loads(first[9]) + json.loads(second[9])) == list(range(8))


class Ranks:
    """Ranks of a process group in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        self._patch, self.store, self._size = monkeypatch, HashStore(), size
        self._loaders = [Counter[str]() for _ in range(size)]
        monkeypatch.setattr(agreement, "PATIENCE", timedelta(milliseconds=50))
        monkeypatch.setattr(agreement, "ANSWERS", timedelta(milliseconds=50))
        monkeypatch.setattr(agreement, "_alone", set())

    def become(self, rank: int) -> None:
        self._patch.setattr(agreement, "_loaders", self._loaders[rank])
        self._patch.setattr(agreement, "_ranks", lambda: (self.store, rank, self._size))

    def tell(self, rank: int, of: Agreement, epoch: int, version: int) -> int:
        self.become(rank)
        of.begin("data", epoch)
        return of.tell("data", version, f"id{version}")[0]


def test_the_others_follow_rank_0_but_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Ranks(monkeypatch, 2).tell
    lead, evaluation = Agreement(), Agreement()
    assert [tell(0, lead, 1, 2), tell(0, lead, 2, 4), tell(0, lead, 2, 5), tell(0, lead, 3, 3)] == [2, 4, 5, 3]
    assert tell(0, evaluation, 1, 1) == 1
    other = Agreement()
    # It opened the dataset, or refreshed it, after somebody has committed again; and an epoch may be read twice.
    assert [tell(1, other, 1, 3), tell(1, other, 2, 9), tell(1, other, 2, 5)] == [2, 4, 5]
    with pytest.raises(StateMismatch, match="rank 0 reads version 3 of data, and this rank version 5, after both read version 5"):
        tell(1, other, 3, 5)
    with pytest.warns(UserWarning, match="rank 0 does not read data in the same loop"):
        assert tell(1, other, 4, 5) == 5


def test_ranks_that_come_late_see_for_themselves_and_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lead, others = Ranks(monkeypatch, 3), Agreement(), [Agreement(), Agreement()]
    ranks.tell(0, lead, 1, 1)
    lead.compare({"seed": 1}, 3)
    for rank, (other, seed) in enumerate(zip(others, (1, 2), strict=True), 1):
        ranks.tell(rank, other, 1, 1)
        if seed == 1:
            other.compare({"seed": seed}, 3)
            continue
        with pytest.warns(UserWarning, match=r"rank 0 has begun without this rank.*seed is 1 on rank 0, 2 on rank 2"):
            other.compare({"seed": seed}, 3)  # it may be another loader: rank 0 has not seen this one, and reads on
    monkeypatch.setattr(agreement, "ANSWERS", timedelta(hours=1))
    ranks.tell(0, lead, 2, 1)
    lead.compare({"seed": 1}, 3)


def test_once_the_ranks_are_together_again_they_are_told_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lead, other = Ranks(monkeypatch, 2), Agreement(), Agreement()
    ranks.tell(0, lead, 1, 1)
    lead.compare({"seed": 1}, 2)  # rank 1 is late
    ranks.tell(1, other, 1, 1)
    other.compare({"seed": 1}, 2)
    monkeypatch.setattr(agreement, "LATE_ANSWERS", timedelta(seconds=30))
    for epoch, terms in ((2, {"seed": 1}), (3, None)):
        ranks.become(1)
        other.begin("data", epoch)
        if terms is None:
            other.fail(OSError("lost file"), 2)
        else:
            ranks.store.set(f"{other._key}/1", '{"seed": 1}')
        ranks.tell(0, lead, epoch, 1)
        if terms is None:
            with pytest.raises(StateMismatch, match="rank 1 cannot begin the epoch: OSError: lost file"):
                lead.compare({"seed": 1}, 2)
        else:
            lead.compare({"seed": 1}, 2)
            assert not agreement._alone


def test_numbers_of_numpy_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lead, other = Ranks(monkeypatch, 2), Agreement(), Agreement()
    ranks.tell(0, lead, 1, 1)
    lead.compare({"num_workers": np.int64(2)}, 2)
    ranks.tell(1, other, 1, 1)
    other.compare({"num_workers": 2}, 2)


def test_what_the_others_told_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lead, other = Ranks(monkeypatch, 2), Agreement(), Agreement()
    for epoch in range(1, 4):
        ranks.tell(0, lead, epoch, 1)
        ranks.tell(1, other, epoch, 1)
        with pytest.warns(UserWarning, match="rank 0 does not read data in the same loop"):
            other.compare({"seed": 1}, 2)
        ranks.become(0)
        count = ranks.store.num_keys()
        lead.compare({"seed": 1}, 2)
        assert ranks.store.num_keys() == count


def test_of_a_part_of_the_process_group_only_the_order_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lead, other = Ranks(monkeypatch, 4), Agreement(), Agreement()
    monkeypatch.setattr(agreement, "ANSWERS", timedelta(hours=1))
    ranks.tell(0, lead, 1, 1)
    lead.compare({"seed": 1, "order": "a"}, 2)
    ranks.tell(1, other, 1, 1)
    other.compare({"seed": 2, "order": "a"}, 2)
    other.compare({"seed": 1, "order": agreement.DATASET_ORDER}, 2)  # another loader
    with pytest.raises(StateMismatch, match="order is 'a' on rank 0, 'b' on rank 1"):
        other.compare({"seed": 1, "order": "b"}, 2)
