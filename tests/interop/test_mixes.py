"""Datasets that are mixed, read side by side or split: in the order of the old tool."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.read.lightloader import StreamingDataLoader
from tests.interop.conftest import OldTool
from tests.interop.plain import plain
from tests.support.writing import write_dataset

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:part .* has no samples:UserWarning")]

SIZES = {"a": 24, "b": 12, "c": 36}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("mixes") / name for name in SIZES}
    for name, path in found.items():
        write_dataset(path, [f"{name}{i}" for i in range(SIZES[name])], chunk_size=5)
    return found


def ours(make: Any, grid: dict[str, Any], epochs: int = 2) -> Any:
    mix = make([liveset.StreamingDataset(path, **grid["dataset"]) for path in grid["directories"]], **grid["mix"])
    loader = StreamingDataLoader(
        mix, batch_size=grid["batch"], num_workers=grid["workers"], rank=grid["rank"], world_size=grid["world"], collate_fn=list
    )
    return [[[plain(sample) for sample in batch] for batch in loader] for _ in range(epochs)]


def grids(paths: dict[str, Path], mixes: list[dict[str, Any]], names: list[str], batches: list[int]) -> list[dict[str, Any]]:
    worlds = [(1, 0), (2, 0), (2, 1)]
    return [
        {
            "world": world, "rank": rank, "workers": workers, "batch": batch, "mix": mix, "dataset": {"shuffle": shuffle, "seed": 7},
            "directories": [str(paths[name]) for name in chosen],
        }
        for (world, rank), workers, batch, mix, shuffle, chosen in itertools.product(worlds, [0, 2], batches, mixes, [False, True], names)
    ]  # fmt: skip


def test_stratified_mixes(old_tool: OldTool, paths: dict[str, Path]) -> None:
    weighted = {"iterate_over_all": False, "weights": [0.2, 0.5, 0.3]}
    wanted = grids(paths, [{}], ["abc"], [1, 5]) + grids(paths, [{"seed": 3}], ["ca"], [5]) + grids(paths, [weighted], ["abc"], [4])
    for grid, theirs in zip(wanted, old_tool.each("mix", wanted, kind="combined"), strict=True):
        told = ours(liveset.CombinedStreamingDataset, grid)
        if grid["mix"] == weighted and grid["world"] > 1:  # where we leave out what is no whole batch
            theirs = [[batch for batch in epoch if len(batch) == grid["batch"]] for epoch in theirs]
        assert told == theirs, grid


def test_batches_of_one_dataset_each(old_tool: OldTool, paths: dict[str, Path]) -> None:
    """Of whole batches only: where a dataset ends, the old tool fills a batch with samples of another one."""
    wanted = grids(paths, [{"batching_method": "per_stream"}], ["abc"], [3, 6])
    for grid, theirs in zip(wanted, old_tool.each("mix", wanted, kind="combined"), strict=True):
        assert ours(liveset.CombinedStreamingDataset, grid) == theirs, grid


def test_side_by_side(old_tool: OldTool, paths: dict[str, Path]) -> None:
    lengths = [{}, {"length": 12}, {"length": 40}, {"length": 40, "resume": False}]
    wanted = grids(paths, lengths, ["abc"], [2])  # the old tool reads nothing where a worker has no sample of a dataset
    equal = 0
    for grid, theirs in zip(wanted, old_tool.each("mix", wanted, kind="parallel"), strict=True):
        told = ours(liveset.ParallelStreamingDataset, grid)
        if theirs is not None:
            equal += told == theirs
            assert told[0] == theirs[0], grid
    # In later epochs the old tool loses samples where its workers have different numbers of them.
    assert equal > 0.8 * len(wanted), equal


@pytest.mark.parametrize("shuffle", [True, False])
def test_splits(old_tool: OldTool, paths: dict[str, Path], shuffle: bool) -> None:
    for path, splits, options in itertools.product(
        paths.values(),
        [*map(list, itertools.permutations([0.1, 0.2, 0.7])), [0.5, 0.3], [0.33, 0.33, 0.34], [0.01, 0.5], [1.0], [0.25] * 4],
        [{}, {"subsample": 0.7}],
    ):
        parts = liveset.train_test_split(liveset.StreamingDataset(path, **options), splits, shuffle=shuffle)  # type: ignore[arg-type]
        theirs = old_tool.splits(path, splits=splits, mixed=shuffle, **options)
        assert [[plain(sample) for sample in part] for part in parts] == theirs, (path, splits, options)
