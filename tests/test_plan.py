"""Who reads what in which order: the rules of the old tool, and what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.read.plan import Grid, Region, budgets, positions, rank_length, region_order, shares, subsample_regions


def epoch(sizes: list[int], number: int, grid: Grid, *, drop_last: bool = False, shuffle: bool = True, window: int = 256) -> list[int]:
    """Global positions in the order in which one worker reads them."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    order = region_order(len(sizes), shuffle=shuffle, seed=42, epoch=number)
    read = []
    for share in shares(sizes, order, grid, drop_last):
        places = positions(share, len(sizes), seed=42, epoch=number, window=window).tolist() if shuffle else range(share.start, share.stop)
        read += [starts[share.region] + place for place in places]
    return read


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, [8, 9, 4, 5, 6, 7, 1, 3, 0, 2]),
        (2, [7, 4, 5, 6, 3, 2, 1, 0, 8, 9]),
        (3, [8, 9, 0, 1, 2, 3, 4, 7, 5, 6]),
    ],
)
def test_shuffled_epochs_have_the_order_of_the_old_tool(number: int, expected: list[int]) -> None:
    assert epoch([4, 4, 2], number, Grid()) == expected


def test_two_ranks_have_the_order_of_the_old_tool() -> None:
    assert epoch([4, 4, 2], 1, Grid(world=2, rank=0), drop_last=True) == [8, 9, 4, 5, 6]
    assert epoch([4, 4, 2], 1, Grid(world=2, rank=1), drop_last=True) == [7, 1, 3, 0, 2]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    world=st.integers(1, 3),
    workers=st.integers(1, 3),
    batch=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    window=st.sampled_from([0, 2, 256]),
)
def test_readers_share_the_samples_without_overlap(
    sizes: list[int], world: int, workers: int, batch: int, drop_last: bool, shuffle: bool, window: int
) -> None:
    total = sum(sizes)
    read: list[int] = []
    for rank in range(world):
        of_rank = []
        for worker in range(workers):
            grid = Grid(world, rank, workers, worker, batch)
            of_rank += epoch(sizes, 1, grid, drop_last=drop_last, shuffle=shuffle, window=window)
        assert len(of_rank) == rank_length(total, Grid(world, rank, workers, 0, batch), drop_last)
        read += of_rank
    assert len(set(read)) == len(read)
    counts = budgets(total, Grid(world, 0, workers, 0, batch), drop_last)
    if drop_last:
        assert len({sum(counts[rank * workers : (rank + 1) * workers]) for rank in range(world)}) == 1
        assert total - len(read) < world * batch
    else:
        assert sorted(read) == list(range(total))


# Read off the old tool: six chunks of 4, 4, 4, 4, 4 and 2 samples, seed 7.
@pytest.mark.parametrize(
    ("fraction", "shuffle", "chunks", "last"),
    [
        (0.3, False, [0, 1], 2),
        (0.77, False, [0, 1, 2, 3], 4),
        (1.5, False, [0, 1, 2, 3, 4, 5, 0, 1, 2], 3),
        (0.5, True, [1, 5, 2, 3], 1),
        (1.5, True, [1, 5, 2, 3, 4, 0, 2, 4, 5, 0], 1),
        (2.3, True, [1, 5, 2, 3, 4, 0, 2, 4, 5, 0, 3, 1, 0, 5], 2),
    ],
)
def test_subsamples_are_those_of_the_old_tool(fraction: float, shuffle: bool, chunks: list[int], last: int) -> None:
    regions = [Region(i, 0, size) for i, size in enumerate([4, 4, 4, 4, 4, 2])]
    chosen = subsample_regions(regions, fraction, shuffle=shuffle, seed=7)
    assert [region.chunk for region in chosen] == chunks
    assert chosen[-1].stop == last
    assert sum(region.stop - region.start for region in chosen) == int(22 * fraction)


def test_a_subsample_of_nothing_is_nothing() -> None:
    assert subsample_regions([], 0.5, shuffle=False, seed=1) == []
    assert subsample_regions([], 2.5, shuffle=True, seed=1) == []
