"""The grid of samples, ranks, workers and batches as a plan, padded ones included, and some of it with processes that read."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.read.epoch import Epoch, Rules, Stretch
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from tests.test_epoch import numbers

ENDS: list[dict[str, Any]] = [{}, {"drop_last": True}, {"drop_last": False}, {"pad": True}, {"pad": True, "drop_last": True}]
GRIDS = list(product(range(1, 102), range(1, 5), range(4), range(1, 9), ENDS, [True, False]))


def check_plan(chunk: int, total: int, world: int, workers: int, batch: int, end: dict[str, Any], shuffle: bool) -> None:
    sizes = [min(chunk, total - first) for first in range(0, total, chunk)]
    epoch = Epoch(sizes, Rules(42, 1, shuffle, 256, **end), [Stretch(world, max(workers, 1), batch, 0)])
    ranks = [numbers(sizes, list(epoch.batches(rank))) for rank in range(world)]
    assert [len(batches) for batches in ranks] == [epoch.count(rank) for rank in range(world)]
    assert [sum(map(len, batches)) for batches in ranks] == [epoch.samples(rank, epoch.count(rank)) for rank in range(world)]
    seen = Counter(number for batches in ranks for taken in batches for number in taken)
    drop_last, pad = end.get("drop_last", world > 1), end.get("pad", False)
    if drop_last or pad:
        assert {len(taken) for batches in ranks for taken in batches} <= {batch}
        assert len({len(batches) for batches in ranks}) == 1
    if pad:
        assert set(seen) == set(range(total))
        assert seen.total() - total < world * batch
        assert max(seen.values()) - min(seen.values()) <= 1
    elif drop_last:
        assert set(seen.values()) <= {1}
        assert set(seen) <= set(range(total))
        assert seen.total() == total // (world * batch) * world * batch
    else:
        assert seen == Counter(range(total))


def test_some_thousand_plans_keep_what_is_promised() -> None:
    for number, grid in enumerate(random.Random(1).sample(GRIDS, 4_000)):
        check_plan(1 + number % 37, *grid)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("total", range(1, 102))
def test_all_plans_keep_what_is_promised(total: int) -> None:
    for number, grid in enumerate(grid for grid in GRIDS if grid[0] == total):
        check_plan(1 + number % 37, *grid)


def row(number: int) -> dict[str, Any]:
    return {"i": number, "id": f"k{number}"}


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 samples, after an append and an update."""
    path = tmp_path_factory.mktemp("grid") / "ds"
    liveset.optimize(row, range(60), path, num_workers=1, chunk_size=9, key_fn="id", verbose=False)
    liveset.optimize(row, range(60, 102), path, num_workers=1, chunk_size=5, key_fn="id", mode="append", verbose=False)
    with liveset.dataset_update(path) as update:
        del update["k101"]
        update["k3"], update["k70"] = {"i": 70, "id": "k3"}, {"i": 3, "id": "k70"}
        update.commit()
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:drop_last=False", "ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("number", range(20))
def test_processes_read_what_is_planned(edited: Path, number: int) -> None:
    pytest.importorskip("torch")
    chosen = random.Random(number)
    world, workers, batch = chosen.randint(1, 4), 1 + number % 3, chosen.randint(1, 8)
    end, shuffle = ENDS[number % len(ENDS)], chosen.random() < 0.5
    options = {"batch_size": batch, "num_workers": workers, "world_size": world, "shuffle": shuffle, **end}
    seen: list[int] = []
    counts = []
    for rank in range(world):
        loader = liveset.StreamingDataLoader(liveset.StreamingDataset(edited), rank=rank, **options)
        told = [len(loader), len(loader)]
        mine = ids(loader)
        assert [*told, len(loader)] == [len(mine)] * 3
        assert mine == ids(LightLoader(liveset.StreamingDataset(edited), rank=rank, **options))
        seen += [i for taken in mine for i in taken]
        counts.append(len(mine))
    if end.get("drop_last", world > 1) or end.get("pad"):
        assert len(set(counts)) == 1
    if end.get("pad"):
        assert set(seen) == set(range(101))
    elif end.get("drop_last", world > 1):
        assert len(set(seen)) == len(seen) == 101 // (world * batch) * world * batch
    else:
        assert sorted(seen) == list(range(101))
