"""Batches come in the order in which the old tool's loader yields them, on every rank, with its workers, in every epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import liveset
from tests.interop.conftest import OldTool

pytestmark = pytest.mark.interop

# Numbers of samples and of samples per chunk.
SHAPES = [(1, 4), (10, 4), (47, 7), (600, 290)]


def grids(seed: int, count: int, *, workers: tuple[int, ...]) -> list[dict[str, Any]]:
    choose = random.Random(seed)
    made = []
    for _ in range(count):
        world = choose.randint(1, 3)
        window: Any = choose.choice([None, 0, 5])
        dataset = {"shuffle": choose.random() < 0.7, "seed": choose.choice([42, 7]), "item_shuffle_window": window}
        dataset["drop_last"] = choose.choice([None, True, False])
        ranks = {"world": world, "rank": choose.randrange(world)}
        made.append({**ranks, "workers": choose.choice(workers), "batch": choose.randint(1, 5), "dataset": dataset})
    return made


def ours(path: Path, grid: dict[str, Any]) -> list[list[list[int]]]:
    """Our batches of two epochs; none where too few samples for all ranks are an error of ours."""
    from liveset.read.lightloader import StreamingDataLoader  # threads are quicker to begin than processes, and read the same

    loader = StreamingDataLoader(
        liveset.StreamingDataset(path, **grid["dataset"]),
        batch_size=grid["batch"],
        num_workers=grid["workers"],
        rank=grid["rank"],
        world_size=grid["world"],
        collate_fn=list,
    )
    if not len(loader) and grid["dataset"]["drop_last"] is not False:
        return [[], []]
    return [list(loader) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:drop_last=False")
@pytest.mark.parametrize(("count", "chunk_size"), SHAPES)
def test_the_order_of_batches(count: int, chunk_size: int, old_tool: OldTool, tmp_path: Path) -> None:
    old_tool.write(tmp_path / "ds", kind="int", count=count, chunk_size=chunk_size)
    chosen = grids(count, 12, workers=(0,)) + grids(count + 1, 8, workers=(1, 2))
    theirs = old_tool.each("order", chosen, directory=str(tmp_path / "ds"))
    for grid, expected in zip(chosen, theirs, strict=True):
        assert ours(tmp_path / "ds", grid) == expected, grid


def test_the_order_of_batches_of_what_we_wrote(old_tool: OldTool, tmp_path: Path) -> None:
    from tests.interop.kinds import make

    liveset.optimize(fn=make("int"), inputs=range(31), output_dir=tmp_path / "ds", num_workers=1, chunk_size=8, verbose=False)
    liveset.optimize(fn=make("int"), inputs=range(31, 40), output_dir=tmp_path / "ds", num_workers=1, chunk_size=3, mode="append")
    chosen = [grid for grid in grids(5, 16, workers=(0,)) if grid["dataset"]["drop_last"] is not False]
    assert [ours(tmp_path / "ds", grid) for grid in chosen] == old_tool.each("order", chosen, directory=str(tmp_path / "ds"))
