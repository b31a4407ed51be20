"""Epochs as batches: every sample once, from any point on, whichever grids read it one after another."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.read.epoch import Epoch, Rules, Run, Stretch, taken
from liveset.read.plan import Grid, positions, region_order, shares

SIZES = st.lists(st.integers(0, 9), max_size=6)
RULES = st.builds(
    Rules,
    st.just(42),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 2, 256]),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
STRETCH = st.builds(Stretch, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 6))


def numbers(sizes: list[int], batches: list[list[Run]]) -> list[list[int]]:
    starts = [0, *accumulate(sizes)]
    return [[starts[region] + offset for region, offsets in batch for offset in offsets.tolist()] for batch in batches]


def read(sizes: list[int], rules: Rules, stretches: tuple[Stretch, ...]) -> list[list[list[int]]]:
    """What each rank reads on the last grid: batches of numbers of samples."""
    epoch = Epoch(sizes, rules, stretches)
    return [numbers(sizes, list(epoch.batches(rank))) for rank in range(stretches[-1].world)]


def in_turn(sizes: list[int], rules: Rules, world: int, workers: int, batch: int, rank: int) -> list[list[int]]:
    """The batches of a rank as torch's loader interleaves those of its workers."""
    starts = [0, *accumulate(sizes)]
    order = region_order(len(sizes), shuffle=rules.shuffle, seed=rules.seed, epoch=rules.epoch)
    queues = []
    for worker in range(workers):
        mine: list[int] = []
        for share in shares(sizes, order, Grid(world, rank, workers, worker, batch), rules.drops(world)):
            offsets = (
                positions(share, len(sizes), seed=rules.seed, epoch=rules.epoch, window=rules.window).tolist()
                if rules.shuffle
                else range(share.start, share.stop)
            )
            mine += [starts[share.region] + offset for offset in offsets]
        queues.append([mine[at : at + batch] for at in range(0, len(mine), batch)])
    result = []
    while any(queues):
        result += [queue.pop(0) for queue in queues if queue]
    return result


@given(sizes=SIZES, rules=RULES.filter(lambda rules: not rules.pad), grid=STRETCH)
def test_batches_are_those_of_workers_in_turn(sizes: list[int], rules: Rules, grid: Stretch) -> None:
    world, workers, batch, _ = grid
    assert read(sizes, rules, (grid._replace(batches=0),)) == [in_turn(sizes, rules, world, workers, batch, rank) for rank in range(world)]


@given(sizes=SIZES, rules=RULES, grids=st.lists(STRETCH, min_size=1, max_size=4))
def test_each_sample_is_read_once_whichever_grids_read_the_epoch(sizes: list[int], rules: Rules, grids: list[Stretch]) -> None:
    total = sum(sizes)
    delivered: list[int] = []
    before: tuple[Stretch, ...] = ()
    for grid in grids:
        ranks = read(sizes, rules, (*before, grid._replace(batches=0)))
        epoch = Epoch(sizes, rules, (*before, grid._replace(batches=0)))
        for rank, batches in enumerate(ranks):
            assert len(batches) == epoch.count(rank)
            assert [sum(map(len, batches[:n])) for n in range(len(batches) + 1)] == [
                epoch.samples(rank, n) for n in range(len(batches) + 1)
            ]
        if rules.pad or rules.drops(grid.world):
            assert len({len(batches) for batches in ranks}) == 1
        if rules.pad:
            assert all(len(batch) == grid.batch for batches in ranks for batch in batches)
        seen = delivered + [number for batches in ranks for batch in batches for number in batch]
        if rules.pad:
            assert set(seen) == set(range(total))
        elif rules.drops(grid.world):
            assert len(set(seen)) == len(seen)
            assert total - len(seen) < grid.world * grid.batch
        else:
            assert sorted(seen) == list(range(total))
        # The run stops here, and another grid goes on.
        stop = min(grid.batches, max(map(len, ranks)))
        delivered += [number for batches in ranks for batch in batches[:stop] for number in batch]
        before = (*before, grid._replace(batches=stop))


@given(sizes=SIZES, rules=RULES, grids=st.lists(STRETCH, min_size=1, max_size=3))
def test_an_epoch_goes_on_from_any_batch(sizes: list[int], rules: Rules, grids: list[Stretch]) -> None:
    *before, now = grids
    whole = read(sizes, rules, (*before, now._replace(batches=0)))
    assert read(sizes, rules, (*before, now)) == [batches[now.batches :] for batches in whole]


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), done=st.integers(0, 40))
def test_batches_that_workers_gave_are_counted(counts: list[int], done: int) -> None:
    given_ = [0] * len(counts)
    left = min(done, sum(counts))
    while left:
        for worker in [worker for worker, count in enumerate(counts) if given_[worker] < count]:
            given_[worker] += left > 0
            left -= left > 0
    assert taken(counts, done) == given_


@pytest.mark.parametrize("shuffle", [False, True])
def test_padding_repeats_no_more_than_fills_the_batches(shuffle: bool) -> None:
    rules = Rules(42, 1, shuffle, 256, None, True)
    ranks = read([4, 3], rules, (Stretch(3, 2, 4, 0),))
    seen = [number for batches in ranks for batch in batches for number in batch]
    assert len(seen) == 12
    assert max(map(seen.count, seen)) == 2
    assert set(seen) == set(range(7))
