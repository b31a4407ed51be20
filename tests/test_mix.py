"""CombinedStreamingDataset and ParallelStreamingDataset: orders, lengths, ranks, states."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import liveset
from liveset.errors import BadSample, StateMismatch
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from liveset.read.mixing import choices
from tests.support.writing import write_dataset

Loaders = Callable[..., Any]


@pytest.fixture(params=["torch", "light"])
def loader_of(request: pytest.FixtureRequest) -> Loaders:
    if request.param == "light":
        return LightLoader
    pytest.importorskip("torch")
    return liveset.StreamingDataLoader


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Datasets by their number of samples; sample i of the one with n has the number 1000 * n + i."""
    found = {}
    for count in (1, 2, 3, 5, 7, 10, 13, 24):
        found[count] = tmp_path_factory.mktemp("mix") / f"d{count}"
        write_dataset(found[count], [{"i": 1000 * count + i} for i in range(count)], chunk_size=3)
    return found


def open_all(paths: dict[int, Path], *counts: int, **options: Any) -> list[liveset.StreamingDataset]:
    return [liveset.StreamingDataset(paths[count], **options) for count in counts]


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def flat(batches: Any) -> list[Any]:
    return [i for batch in batches for i in batch]


def pairs(batches: Any) -> list[list[tuple[int, ...]]]:
    return [list(zip(*(part["i"].tolist() for part in batch), strict=True)) for batch in batches]


def everything(*counts: int) -> list[int]:
    return [1000 * count + i for count in counts for i in range(count)]


# --- mixed at random -------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
    seed=st.integers(0, 5),
    to_the_end=st.booleans(),
)
def test_choices_are_those_of_python(sizes: list[int], weights: list[float], seed: int, to_the_end: bool) -> None:
    drawn = [int(i) for block in choices(sizes, weights[: len(sizes)], seed, to_the_end=to_the_end) for i in block]
    generator, left, expected = random.Random(seed), list(sizes), []
    alive = list(range(len(sizes)))
    while alive:
        number = alive[0] if len(alive) == 1 else generator.choices(alive, [weights[i] for i in alive])[0]
        if left[number]:
            left[number] -= 1
            expected.append(number)
        elif to_the_end:
            alive.remove(number)
        else:
            break
    assert drawn == expected


def test_choices_go_on_over_many_blocks() -> None:
    drawn = np.concatenate(list(choices([30_000, 100_000], [3, 7], 42, to_the_end=False)))
    generator = random.Random(42)
    expected = [generator.choices([0, 1], [3, 7])[0] for _ in range(len(drawn))]
    assert drawn.tolist() == expected
    assert 95_000 < len(drawn) < 105_000


def test_samples_are_mixed_in_the_proportions_of_the_lengths(paths: dict[int, Path], loader_of: Loaders) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 10, 24))
    assert (len(mix), mix.samples) == (34, 34)
    loader = loader_of(mix, batch_size=4)
    assert len(loader) == 9
    seen = flat(ids(loader))
    assert sorted(seen) == everything(10, 24)
    assert [i for i in seen if i < 20_000] == everything(10)
    generator = random.Random(42)
    drawn = [generator.choices([0, 1], [10, 24])[0] for _ in range(20)]
    assert [i >= 20_000 for i in seen[:20]] == [number == 1 for number in drawn]


def test_weights_end_with_the_first_dataset(paths: dict[int, Path], loader_of: Loaders) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 10, 24), weights=[9, 1], iterate_over_all=False)
    seen = flat(ids(loader_of(mix, batch_size=4)))
    assert [i for i in seen if i < 20_000] == everything(10)
    assert len([i for i in seen if i >= 20_000]) < 5
    assert len(mix) == len(seen)
    none = liveset.CombinedStreamingDataset(open_all(paths, 10, 24), weights=[1, 0], iterate_over_all=False)
    assert flat(ids(loader_of(none, batch_size=4))) == everything(10)


def test_each_dataset_has_its_own_order_transform_and_epochs(paths: dict[int, Path], loader_of: Loaders) -> None:
    plain, shuffled = open_all(paths, 7, shuffle=False)[0], open_all(paths, 24, shuffle=True, transform=lambda row: {"i": -row["i"]})[0]
    loader = loader_of(liveset.CombinedStreamingDataset([plain, shuffled]), batch_size=4)
    alone = loader_of(shuffled, batch_size=4)
    for _ in range(2):
        seen = flat(ids(loader))
        assert [i for i in seen if i > 0] == everything(7)
        assert [i for i in seen if i < 0] == flat(ids(alone))


def test_batches_of_one_dataset_each(paths: dict[int, Path], loader_of: Loaders) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 7, 10, 24), batching_method="per_stream")
    batches = ids(loader_of(mix, batch_size=4))
    owners = [{i // 1000 for i in batch} for batch in batches]
    assert all(len(owner) == 1 for owner in owners)
    assert sorted(flat(batches)) == everything(7, 10, 24)
    assert Counter(len(batch) for batch in batches) == {4: 9, 3: 1, 2: 1}
    most = owners[: max(i for i, owner in enumerate(owners) if owner == {10}) + 1]
    assert all(a != b for a, b in pairwise(most))


def test_batch_sizes_of_each_dataset(paths: dict[int, Path], loader_of: Loaders) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 10, 24), batching_method="per_stream")
    loader = loader_of(mix, batch_size=[2, 6], num_workers=2)
    batches = ids(loader)
    assert len(loader) == len(batches) == 9
    assert {(batch[0] // 1000, len(batch)) for batch in batches} == {(10, 2), (24, 6)}
    assert sorted(flat(batches)) == everything(10, 24)


def test_one_dataset_may_take_part_twice(paths: dict[int, Path], loader_of: Loaders) -> None:
    (dataset,) = open_all(paths, 7)
    assert sorted(flat(ids(loader_of(liveset.CombinedStreamingDataset([dataset, dataset]))))) == sorted(everything(7, 7))


@pytest.mark.filterwarnings("ignore:dataset .*left out:UserWarning")
@given(
    counts=st.lists(st.sampled_from([1, 3, 7, 13, 24]), min_size=1, max_size=3),
    world=st.integers(1, 3),
    workers=st.integers(0, 3),
    batch=st.integers(1, 5),
    drop_last=st.sampled_from([None, True, False]),
    shuffle=st.booleans(),
    method=st.sampled_from(["stratified", "per_stream"]),
    to_the_end=st.booleans(),
    pad=st.booleans(),
)
def test_ranks_share_the_samples(
    paths: dict[int, Path],
    counts: list[int],
    world: int,
    workers: int,
    batch: int,
    drop_last: bool | None,
    shuffle: bool,
    method: Any,
    to_the_end: bool,
    pad: bool,
) -> None:
    ranks = []
    for rank in range(world):
        mix = liveset.CombinedStreamingDataset(
            open_all(paths, *counts, shuffle=shuffle, drop_last=drop_last), batching_method=method, iterate_over_all=to_the_end
        )
        loader = LightLoader(mix, batch_size=batch, num_workers=workers, rank=rank, world_size=world, pad=pad)
        loader._warned = True
        if all(count < world * batch for count in counts) and not pad and (world > 1 if drop_last is None else drop_last and world > 1):
            with pytest.raises(ValueError, match="nothing to read"):
                iter(loader)
            return
        length = len(loader)
        ranks.append(ids(loader))
        assert length == len(ranks[-1])
    seen, expected = Counter(i for batches in ranks for i in flat(batches)), Counter(everything(*counts))
    drops = not pad and (world > 1 if drop_last is None else drop_last)
    if pad or drops:
        assert len({len(batches) for batches in ranks}) == 1
        if drops or to_the_end:
            assert all(len(b) == batch for batches in ranks for b in batches)
    if not pad:
        assert not seen - expected
    if to_the_end and not drops:
        assert not expected - seen


def test_a_dataset_that_is_too_small_for_all_ranks_is_told(paths: dict[int, Path]) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 3, 24))
    with pytest.warns(UserWarning, match="dataset 0, .*d3, is left out: its 3 samples are not one batch of 2 for each of 2 ranks"):
        first = ids(LightLoader(mix, batch_size=2, rank=0, world_size=2))
    assert first == ids(LightLoader(mix, batch_size=2, rank=0, world_size=2))
    assert {i // 1000 for i in flat(first)} == {24}


def test_arguments_are_checked(paths: dict[int, Path], loader_of: Loaders) -> None:
    two = open_all(paths, 7, 10)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"weights": [1, 1]}, "When `iterate_over_all` is set to True, the weights argument shouldn't be provided."),
        ({"weights": [1], "iterate_over_all": False}, "weights must be 2 numbers"),
        ({"weights": [0, 0], "iterate_over_all": False}, "weights must be 2 numbers"),
        ({"batching_method": "mixed"}, "batching_method must be"),
    ]
    for wrong, phrase in refused:
        with pytest.raises(ValueError, match=phrase):
            liveset.CombinedStreamingDataset(two, **wrong)
    with pytest.raises(RuntimeError, match="should be instances of the StreamingDataset"):
        liveset.CombinedStreamingDataset([[1, 2]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="there are no datasets"):
        liveset.CombinedStreamingDataset([])
    with pytest.raises(ValueError, match="per_stream"):
        loader_of(liveset.CombinedStreamingDataset(two), batch_size=[1, 2])
    with pytest.raises(ValueError, match="batch_size must be a number, or 2"):
        loader_of(liveset.CombinedStreamingDataset(two, batching_method="per_stream"), batch_size=[1, 2, 3])
    for wrong_seed in (-1, 2**32, 1.5, True, "x", None):
        for kind in (liveset.CombinedStreamingDataset, liveset.ParallelStreamingDataset):
            with pytest.raises(ValueError, match="seed must be an integer, at least 0"):
                kind(two, seed=wrong_seed)  # type: ignore[arg-type]
    assert type(liveset.CombinedStreamingDataset(two, seed=np.int64(3)).seed) is int  # type: ignore[arg-type]
    for wrong_length in (0, -1, 2.5, True, "x"):
        with pytest.raises(ValueError, match="`length` must be"):
            liveset.ParallelStreamingDataset(two, length=wrong_length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must take 1 or 2 arguments"):
        liveset.ParallelStreamingDataset(two, transform=lambda a, b, c: (a, b, c))


# --- side by side ----------------------------------------------------------------------------------------------------------


def test_pairs_end_with_the_shortest(paths: dict[int, Path], loader_of: Loaders) -> None:
    both = liveset.ParallelStreamingDataset(open_all(paths, 7, 24))
    assert len(both) == 7
    assert [tuple(row["i"] for row in pair) for pair in both] == list(zip(everything(7), everything(24), strict=False))
    for workers in (0, 2):
        loader = loader_of(both, batch_size=2, num_workers=workers)
        assert len(loader) == 4
        seen = flat(pairs(loader))
        assert sorted(a for a, _ in seen) == everything(7)
        assert len({b for _, b in seen}) == 7


def test_shorter_datasets_begin_again(paths: dict[int, Path], loader_of: Loaders) -> None:
    both = liveset.ParallelStreamingDataset(open_all(paths, 7, 5), length=12)
    expected = list(islice(zip(cycle(everything(7)), cycle(everything(5)), strict=False), 36))
    assert [tuple(row["i"] for row in pair) for epoch in range(3) for pair in both] == expected
    loader = loader_of(both, batch_size=4)
    assert len(loader) == 3
    assert [flat(pairs(loader)) for _ in range(3)] == [expected[:12], expected[12:24], expected[24:]]
    again = liveset.ParallelStreamingDataset(open_all(paths, 7, 5), length=12, resume=False)
    loader = loader_of(again, batch_size=4)
    assert [flat(pairs(loader)) for _ in range(2)] == [expected[:12], expected[:12]]


def test_a_pass_goes_on_where_the_one_before_was_left(paths: dict[int, Path], loader_of: Loaders) -> None:
    expected = list(islice(zip(cycle(everything(7)), cycle(everything(5)), strict=False), 60))
    for length in (12, float("inf")):
        loader = loader_of(liveset.ParallelStreamingDataset(open_all(paths, 7, 5), length=length), batch_size=2)
        seen: list[tuple[int, ...]] = []
        for _ in range(5):
            seen += flat(pairs(islice(loader, 4)))
        assert seen == expected[: len(seen)]
        assert len(seen) == (8 + 4 + 8 + 4 + 8 if length == 12 else 40)


def test_without_end_there_is_no_length(paths: dict[int, Path], loader_of: Loaders) -> None:
    both = liveset.ParallelStreamingDataset(open_all(paths, 7, 5), length=float("inf"))
    loader = loader_of(both, batch_size=4, num_workers=1)
    for each in (both, loader):
        with pytest.raises(TypeError, match="never ends"):
            len(each)
    assert len(flat(pairs(islice(loader, 20)))) == 80


def test_fewer_samples_than_workers_are_begun_again_too(paths: dict[int, Path]) -> None:
    loader = LightLoader(liveset.ParallelStreamingDataset(open_all(paths, 1, 24), length=24), batch_size=4, num_workers=3)
    seen = flat(pairs(loader))
    assert {a for a, _ in seen} == {1000}
    assert len({b for _, b in seen}) == 24


def draw(pair: tuple[Any, Any], rngs: Any) -> dict[str, Any]:
    drawn = [rngs["random"].random(), rngs["numpy"].random()]
    return {"i": pair[0]["i"], "drawn": np.array(drawn)}


def test_random_numbers_do_not_depend_on_the_workers(paths: dict[int, Path], loader_of: Loaders) -> None:
    def epochs(**options: Any) -> list[dict[int, list[float]]]:
        both = liveset.ParallelStreamingDataset(open_all(paths, 24, 24), transform=draw, **options)
        loader = loader_of(both, batch_size=4)
        return [{i: d for b in loader for i, d in zip(b["i"].tolist(), b["drawn"].tolist(), strict=True)} for _ in range(2)]

    first, second = epochs()
    assert epochs() == [first, second]
    assert first != second
    assert len({number for drawn in first.values() for number in drawn}) == 48
    assert epochs(seed=1)[0] != first
    once, again = epochs(reset_rngs=True)
    assert once == again


def test_generators_of_torch(paths: dict[int, Path]) -> None:
    torch = pytest.importorskip("torch")

    def use(pair: Any, rngs: Any) -> Any:
        assert list(rngs) == ["random", "numpy", "torch"]
        return torch.rand(1, generator=rngs["torch"]).item()

    both = liveset.ParallelStreamingDataset(open_all(paths, 7, 10), transform=use)
    first = list(both)
    assert len(set(first)) == 7
    both.reset()
    assert list(both) == first


@given(
    counts=st.lists(st.sampled_from([3, 7, 13, 24]), min_size=1, max_size=3),
    world=st.integers(1, 3),
    workers=st.integers(0, 3),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    length=st.sampled_from([None, 1, 6, 25]),
)
def test_ranks_of_pairs_are_equal(
    paths: dict[int, Path], counts: list[int], world: int, workers: int, batch: int, shuffle: bool, length: int | None
) -> None:
    ranks = []
    for rank in range(world):
        both = liveset.ParallelStreamingDataset(open_all(paths, *counts, shuffle=shuffle), length=length)
        loader = LightLoader(both, batch_size=batch, num_workers=workers, rank=rank, world_size=world)
        if length is None and min(counts) < world * batch and world > 1:
            with pytest.raises(ValueError, match="nothing to read"):
                iter(loader)
            return
        ranks.append([pairs(loader), pairs(loader)])
        assert [len(batches) for batches in ranks[-1]] == [len(loader)] * 2
    assert len({len(batches) for of_rank in ranks for batches in of_rank}) == 1
    first = [pair for of_rank in ranks for pair in flat(of_rank[0])]
    if length is None:
        for number in range(len(counts)):
            assert max(Counter(pair[number] for pair in first).values()) == 1
        if world == 1:
            assert len(first) == min(counts)
    else:
        assert len(first) == world * length


# --- states ----------------------------------------------------------------------------------------------------------------

MIXES: dict[str, Callable[[list[liveset.StreamingDataset]], Any]] = {
    "all": liveset.CombinedStreamingDataset,
    "first": lambda d: liveset.CombinedStreamingDataset(d, weights=range(1, len(d) + 1), iterate_over_all=False),
    "per_stream": lambda d: liveset.CombinedStreamingDataset(d, batching_method="per_stream"),
    "parallel": liveset.ParallelStreamingDataset,
    "cycles": lambda d: liveset.ParallelStreamingDataset(d, length=17),
}


def read(kind: str, batches: Any) -> list[Any]:
    return list(ids(batches) if kind in ("all", "first", "per_stream") else pairs(batches))


@pytest.mark.filterwarnings("ignore:dataset .*left out:UserWarning")
@given(
    kind=st.sampled_from(list(MIXES)),
    counts=st.lists(st.sampled_from([7, 13, 24]), min_size=1, max_size=3),
    world=st.integers(1, 2),
    workers=st.integers(0, 3),
    batch=st.integers(1, 4),
    shuffle=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_states_are_exact(
    paths: dict[int, Path],
    kind: str,
    counts: list[int],
    world: int,
    workers: int,
    batch: int,
    shuffle: bool,
    steps: list[tuple[int, int]],
) -> None:
    """Killed after any number of batches, any number of times, it reads what a run reads that never stopped."""

    def fresh() -> Any:
        mix = MIXES[kind](open_all(paths, *counts, shuffle=shuffle))
        return LightLoader(mix, batch_size=batch, num_workers=workers, rank=world - 1, world_size=world)

    whole = fresh()
    assume(kind == "cycles" or max(counts) >= world * batch)
    if kind in ("parallel", "first"):
        assume(min(counts) >= world * batch)  # else the one that is left out ends it all before it begins
    expected = [read(kind, whole) for _ in range(3)]
    seen: list[Any] = []
    loader = fresh()
    for stop, more in steps:
        batches = iter(loader)
        seen += read(kind, islice(batches, stop))
        state = loader.state_dict()
        read(kind, islice(batches, more))
        assert len(str(state)) < 1000 + 2000 * len(counts)
        loader = fresh()
        loader.load_state_dict(state)
    seen += read(kind, loader)
    for _ in range(2):
        seen += read(kind, loader)
    flattened = [batch for epoch in expected for batch in epoch]
    # Whether an epoch ended just where a run was killed shows in nothing but the number of the next one.
    assert seen[: len(flattened)] == flattened[: len(seen)]


@pytest.mark.parametrize("kind", ["all", "first", "parallel"])
@given(
    counts=st.lists(st.sampled_from([7, 13, 24]), min_size=1, max_size=3),
    grids=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=4),
    shuffle=st.booleans(),
    done=st.integers(0, 3),
)
def test_elastic_states_read_the_rest_once(
    paths: dict[int, Path], kind: str, counts: list[int], grids: list[tuple[int, int, int]], shuffle: bool, done: int
) -> None:
    seen: list[Any] = []
    states: list[Any] = []
    for number, (world, workers, batch) in enumerate(grids):
        after = []
        for rank in range(world):
            mix = MIXES[kind](open_all(paths, *counts, shuffle=shuffle, drop_last=False))
            loader = LightLoader(mix, batch_size=batch, num_workers=workers, rank=rank, world_size=world)
            loader._warned = True
            if states:
                loader.load_state_dict(states[min(rank, len(states) - 1)])
            if number == len(grids) - 1:
                seen += flat(read(kind, loader))
                continue
            seen += flat(read(kind, islice(loader, done)))
            after.append(loader.state_dict())
            if after[-1]["dataset"]["mixture"]["stretches"][-1][-1] < done or after[-1]["dataset"]["mixture"]["finished"]:
                return  # this rank was through before the others
        states = after
    expected = Counter(everything(*counts))
    found = Counter(seen if kind != "parallel" else [pair[0] for pair in seen])
    assert not found - (expected if kind != "parallel" else Counter(everything(counts[0])))
    if kind == "all":
        assert found == expected


def test_elastic_states_that_are_refused(paths: dict[int, Path], loader_of: Loaders) -> None:
    for kind in ("per_stream", "cycles"):
        loader = loader_of(MIXES[kind](open_all(paths, 7, 13)), batch_size=2, num_workers=2)
        expected = read(kind, loader)
        loader.reset_state_dict()
        loader.set_epoch(1)
        first = read(kind, islice(loader, 3))
        state = loader.state_dict()
        more = loader_of(MIXES[kind](open_all(paths, 7, 13)), batch_size=2, num_workers=0)
        more.load_state_dict(state)
        assert first + read(kind, more) == expected
        other = loader_of(MIXES[kind](open_all(paths, 7, 13)), batch_size=2, rank=0, world_size=2)
        other.load_state_dict(state)
        with pytest.raises(StateMismatch, match="go on with these instead of 2 ranks"):
            next(iter(other))


def test_states_of_other_mixtures_are_refused(paths: dict[int, Path]) -> None:
    mix = liveset.CombinedStreamingDataset(open_all(paths, 7, 13))
    state = mix.state_dict(0)
    assert sorted(state) == ["0", "1", "mixture"]
    for other, phrase in [
        (liveset.CombinedStreamingDataset(open_all(paths, 7)), "the state is of 2 datasets, and here are 1"),
        (liveset.CombinedStreamingDataset(open_all(paths, 7, 13), seed=1), "The provided `seed` state doesn't match"),
        (liveset.CombinedStreamingDataset(open_all(paths, 7, 13), iterate_over_all=False), "`iterate_over_all` state doesn't match"),
        (liveset.CombinedStreamingDataset(open_all(paths, 7, 13), batching_method="per_stream"), "`batch_sizes` state doesn't match"),
        (liveset.CombinedStreamingDataset(open_all(paths, 13, 7)), "dataset 0: the state is of another dataset: of version 1 of"),
        (liveset.CombinedStreamingDataset(open_all(paths, 7, 13, shuffle=True)), "dataset 0: The provided `shuffle` state"),
        (liveset.ParallelStreamingDataset(open_all(paths, 7, 13)), "no state of a ParallelStreamingDataset"),
    ]:
        with pytest.raises(StateMismatch, match=phrase):
            other.load_state_dict(state)
    forced = liveset.CombinedStreamingDataset(open_all(paths, 7, 13), seed=1, force_override_state_dict=True)
    with pytest.warns(UserWarning, match="`seed` state doesn't match"):
        forced.load_state_dict(state)
    assert [row["i"] for row in forced] == [row["i"] for row in mix]


def test_states_of_plain_loops(paths: dict[int, Path]) -> None:
    for make in MIXES.values():
        whole = list(make(open_all(paths, 7, 13, shuffle=True)))
        mix = make(open_all(paths, 7, 13, shuffle=True))
        state = mix.state_dict(num_samples_yielded=5)
        mix.load_state_dict(state)
        assert list(mix) == whole[5:]
        assert mix.current_epoch == 2
        with pytest.raises(ValueError, match="is no number of batches"):
            mix.state_dict(num_samples_yielded=1000)


def test_states_pin_versions(tmp_path: Path, loader_of: Loaders) -> None:
    rows = [{"i": i, "key": f"k{i}"} for i in range(10)]
    for name in "ab":
        write_dataset(tmp_path / name, rows, chunk_size=3, key="key")

    def make() -> Any:
        return loader_of(liveset.CombinedStreamingDataset([liveset.StreamingDataset(tmp_path / name) for name in "ab"]), batch_size=3)

    expected = ids(make())
    loader = make()
    seen = ids(islice(loader, 2))
    state = loader.state_dict()
    liveset.optimize(_row, range(10, 15), tmp_path / "b", mode="append", num_workers=1, key_fn="key")
    loader = make()
    assert loader.dataset.samples == 25
    loader.load_state_dict(state)
    assert loader.dataset.samples == 20
    assert seen + ids(loader) == expected
    assert loader.dataset.refresh()
    assert sorted(flat(ids(loader))) == sorted([*range(10), *range(15)])


def _row(i: int) -> dict[str, Any]:
    return {"i": i, "key": f"k{i}"}


def test_parts_and_joins_take_part(tmp_path: Path, loader_of: Loaders) -> None:
    write_dataset(tmp_path / "a", map(_row, range(40)), chunk_size=7, key="key")
    write_dataset(tmp_path / "b", [{"key": f"k{i}", "more": -i} for i in range(40)], chunk_size=9, key="key")
    whole = liveset.StreamingDataset(tmp_path / "a", shuffle=True)
    first, second = liveset.train_test_split(whole, [0.6, 0.4], by="key")
    expected = [[row["i"] for row in part[:]] for part in (first, second)]
    mix = liveset.CombinedStreamingDataset([second, first])
    assert sorted(flat(ids(loader_of(mix, batch_size=3)))) == list(range(40))
    both = flat(pairs(loader_of(liveset.ParallelStreamingDataset([first, second], length=24), batch_size=3)))
    assert {a for a, _ in both} == set(expected[0])
    assert {b for _, b in both} == set(expected[1])
    joined = liveset.JoinedStreamingDataset(first, liveset.StreamingDataset(tmp_path / "b"))
    assert [(row["i"], row["more"]) for row in joined[:]] == [(i, -i) for i in expected[0]]
    for batch in loader_of(liveset.CombinedStreamingDataset([joined, joined]), batch_size=3):
        assert (batch["more"] == -batch["i"]).all()


# --- loaders of torch ------------------------------------------------------------------------------------------------------


def test_workers_read_what_one_process_reads(paths: dict[int, Path]) -> None:
    pytest.importorskip("torch")
    for kind, make in MIXES.items():
        loader = liveset.StreamingDataLoader(
            make(open_all(paths, 7, 13, shuffle=True)), batch_size=2, num_workers=2, persistent_workers=True
        )
        one = LightLoader(make(open_all(paths, 7, 13, shuffle=True)), batch_size=2, num_workers=2)
        for _ in range(2):
            assert read(kind, loader) == read(kind, one)
        del loader


@pytest.mark.slow
def test_workers_that_are_not_forked(paths: dict[int, Path]) -> None:
    pytest.importorskip("torch")
    for kind in ("all", "parallel"):
        options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "spawn"}
        loader = liveset.StreamingDataLoader(MIXES[kind](open_all(paths, 7, 13)), **options)
        assert read(kind, loader) == read(kind, LightLoader(MIXES[kind](open_all(paths, 7, 13)), batch_size=2))


def test_loaders_of_torch_itself(paths: dict[int, Path]) -> None:
    data = pytest.importorskip("torch.utils.data")
    mix = liveset.CombinedStreamingDataset(open_all(paths, 7, 13, shuffle=True))
    assert isinstance(mix, data.IterableDataset)
    for workers in (0, 2):
        seen = flat(ids(data.DataLoader(mix, batch_size=2, num_workers=workers)))
        assert sorted(seen) == everything(7, 13)


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")
def test_the_stateful_loader_of_torchdata(paths: dict[int, Path]) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    for kind, make in MIXES.items():
        for workers in (0, 2):

            def fresh() -> Any:
                return stateful.StatefulDataLoader(make(open_all(paths, 7, 13, shuffle=True)), batch_size=2, num_workers=workers)  # noqa: B023

            expected = read(kind, fresh())
            loader = fresh()
            seen = read(kind, islice(loader, 3))
            state = loader.state_dict()
            loader = fresh()
            loader.load_state_dict(state)
            assert seen + read(kind, loader) == expected
            del loader


def fail(row: dict[str, Any]) -> dict[str, Any]:
    if row["i"] == 7003:
        raise ArithmeticError("no")
    return row


def test_bad_samples_are_named(paths: dict[int, Path], loader_of: Loaders) -> None:
    bad, good = open_all(paths, 7, transform=fail)[0], open_all(paths, 13)[0]
    for mix in (liveset.CombinedStreamingDataset([bad, good]), liveset.ParallelStreamingDataset([bad, good])):
        with pytest.raises(BadSample, match=r"^the transform failed on the sample at position 3 \((slot 0 of )?chunk-"):
            list(loader_of(mix))
        loader = loader_of(mix, on_error="skip")
        assert len(list(loader)) == (19 if isinstance(mix, liveset.CombinedStreamingDataset) else 6)
        assert loader.stats().skipped == 1
