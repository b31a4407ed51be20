"""train_test_split: parts that share no sample, by position and by key."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from itertools import islice, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset.errors import KeyNotFound, StateMismatch
from liveset.read.dataset import StreamingDataset
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from liveset.read.plan import Region
from liveset.read.split import _cut
from tests.support.foreign import make_foreign
from tests.support.writing import write_dataset


def row(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "i": i}


def make(path: Path, count: int = 20, chunk_size: int = 4, key: str | None = "id") -> Path:
    write_dataset(path, map(row, range(count)), chunk_size=chunk_size, key=key)
    return path


def ids(samples: Any) -> list[int]:
    return [sample["i"] for sample in samples]


def parts_of(path: Path, splits: list[float], seed: int = 42, **options: Any) -> list[StreamingDataset]:
    return liveset.train_test_split(StreamingDataset(path, **options), splits, seed, by="key")


# --- by position -----------------------------------------------------------------------------------------------------------


def test_parts_are_those_of_the_old_tool(tmp_path: Path) -> None:
    ds = StreamingDataset(make(tmp_path))
    first, second = liveset.train_test_split(ds, [0.5, 0.3])
    assert ids(first) == ids(first[:]) == [16, 17, 18, 19, 8, 9, 10, 11, 0, 1]
    assert ids(second) == [2, 3, 12, 13, 14, 15]
    assert [ids(part) for part in liveset.train_test_split(ds, [0.25, 0.75], shuffle=False)] == [[*range(5)], [*range(5, 20)]]
    assert ids(liveset.train_test_split(ds, [0.5], seed=1)[0]) != ids(first)
    assert first["k9"] == row(9)
    with pytest.raises(KeyNotFound):
        first["k2"]


@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    splits=st.lists(st.floats(0, 1), min_size=1, max_size=4).map(lambda s: [x / max(sum(s), 1) for x in s]),
)
def test_parts_share_nothing(sizes: list[int], splits: list[float]) -> None:
    regions = [Region(number, 2, 2 + size) for number, size in enumerate(sizes)]
    wanted = [int(sum(sizes) * size) for size in splits]
    parts = _cut(regions, wanted)
    assert [sum(stop - start for _, start, stop in part) for part in parts] == wanted
    slots = [(chunk, slot) for part in parts for chunk, start, stop in part for slot in range(start, stop)]
    assert slots == [(chunk, slot) for chunk, start, stop in regions for slot in range(start, stop)][: sum(wanted)]


def test_all_orders_of_fractions(tmp_path: Path) -> None:
    ds = StreamingDataset(make(tmp_path, count=100))
    for splits in permutations([0.1, 0.2, 0.7]):
        parts = liveset.train_test_split(ds, list(splits))
        assert [len(part) for part in parts] == [round(100 * size) for size in splits]
        assert sorted(i for part in parts for i in ids(part)) == list(range(100))


def test_many_chunks_take_no_time(tmp_path: Path) -> None:
    regions = [Region(number, 0, 100) for number in range(200_000)]
    began = time.process_time()
    parts = _cut(regions, [2_000_000, 4_000_000, 14_000_000])
    assert [len(part) for part in parts] == [20_000, 40_000, 140_000]
    assert time.process_time() - began < 5


def test_arguments_are_checked(tmp_path: Path) -> None:
    ds = StreamingDataset(make(tmp_path))
    for splits, phrase in [
        ([1], "Each split should be a float."),
        (["a"], "Each split should be a float."),
        ([1.5], r"Each Split should be a float with each value in \[0,1\]."),
        ([float("nan")], r"Each Split should be a float with each value in \[0,1\]."),
        ([0.5, 0.6], "Splits' sum must be less than 1."),
    ]:
        for by in ("position", "key"):
            with pytest.raises(ValueError, match=phrase):
                liveset.train_test_split(ds, splits, by=by)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='by must be "position" or "key"'):
        liveset.train_test_split(ds, [0.5], by="hash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="splits a StreamingDataset"):
        liveset.train_test_split([1, 2], [0.5])  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="part 0, of the size 0.01, has no samples"):
        (empty,) = liveset.train_test_split(ds, [0.01])
    assert list(empty) == []
    make(tmp_path / "plain", key=None)
    with pytest.raises(KeyNotFound, match="has no keys"):
        parts_of(tmp_path / "plain", [0.5])


# --- by key ----------------------------------------------------------------------------------------------------------------


def test_keys_decide(tmp_path: Path) -> None:
    path = make(tmp_path / "a", count=2000, chunk_size=300)
    train, test = parts_of(path, [0.8, 0.2])
    assert 1500 < len(train) < 1700
    assert sorted(ids(train) + ids(test)) == list(range(2000))
    assert ids(train) == ids(train[:]) == sorted(ids(train))
    again = make(tmp_path / "b", count=2000, chunk_size=7)
    assert ids(parts_of(again, [0.8, 0.2])[0]) == ids(train)
    assert ids(parts_of(path, [0.8, 0.2], seed=1)[0]) != ids(train)
    # Other fractions move as little as can be.
    assert set(ids(parts_of(path, [0.9, 0.1])[0])) > set(ids(train))
    assert ids(parts_of(path, [0.8, 0.1, 0.1])[0]) == ids(train)
    assert sum(map(len, parts_of(path, [0.3, 0.2]))) < 1200


def test_parts_are_stable(tmp_path: Path) -> None:
    """Whatever happens to the dataset, no key moves from one part to another."""
    path = make(tmp_path, count=300, chunk_size=40)
    parts = parts_of(path, [0.6, 0.3, 0.1])
    part_of = {key: number for number, part in enumerate(parts) for key in part.keys}

    def check() -> None:
        fresh = parts_of(path, [0.6, 0.3, 0.1])
        for part in parts:
            part.refresh()
        assert [ids(part) for part in parts] == [ids(part) for part in fresh]
        assert sorted(i for part in parts for i in ids(part)) == sorted(ids(StreamingDataset(path)))
        for number, part in enumerate(parts):
            assert [f"k{i % 1000}" for i in ids(part)] == list(part.keys)
            assert all(part_of.setdefault(key, number) == number for key in part.keys)

    with liveset.dataset_update(path) as update:
        for i in range(0, 300, 3):
            update[f"k{i}"] = {"id": f"k{i}", "i": i + 1000}
        update.commit()
    check()
    liveset.optimize(row, range(300, 350), path, mode="append", num_workers=1, key_fn="id")
    check()
    with liveset.dataset_update(path) as update:
        for i in range(20, 200, 7):
            del update[f"k{i}"]
        update.insert("k999", row(999))
        update.commit()
    check()
    liveset.compact(path)
    check()
    liveset.purge(path, ["k50", "k60"])
    check()


def test_a_part_is_a_dataset(tmp_path: Path) -> None:
    path = make(tmp_path, count=60, chunk_size=7)
    ds = StreamingDataset(path, transform=lambda r: r | {"seen": True})
    train, test = liveset.train_test_split(ds, [0.7, 0.3], by="key")
    mine = ids(train)
    assert train[3] == {**row(mine[3]), "seen": True}
    assert train[-1]["i"] == mine[-1]
    assert ids(train[2:9:3]) == mine[2:9:3]
    assert ids(train.subset([5, 1, 1])) == [mine[5], mine[1], mine[1]]
    assert list(train.keys) == [f"k{i}" for i in mine]
    assert len(train.keys) == len(mine)
    assert train.keys.at(4) == f"k{mine[4]}"
    assert train[f"k{mine[4]}"]["i"] == mine[4]
    other = ids(test)[0]
    assert f"k{other}" not in train.keys
    with pytest.raises(KeyNotFound):
        train[f"k{other}"]
    with pytest.raises(KeyNotFound, match=f"k{other}"):
        train.get_by_keys([f"k{mine[0]}", f"k{other}"])
    part = train.subset([5, 1])
    assert f"k{mine[5]}" in part.keys
    assert f"k{mine[4]}" not in part.keys
    for twin in (copy.copy(train), copy.deepcopy(train), pickle.loads(pickle.dumps(StreamingDataset(path)))):
        if twin.samples == train.samples:
            assert ids(twin) == mine
    assert ids(train.as_map()[i] for i in range(3)) == mine[:3]


def test_keys_of_parts_as_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    train, _ = parts_of(make(tmp_path, count=60, chunk_size=7), [0.7, 0.3])
    table = train.keys.to_arrow().to_pydict()
    mine = ids(train)
    assert table["key"] == [f"k{i}" for i in mine]
    assert table["index"] == list(range(len(mine)))
    assert table["chunk_index"] == [i // 7 for i in mine]
    assert table["chunk_offset"] == [i % 7 for i in mine]


def test_parts_of_parts(tmp_path: Path) -> None:
    path = make(tmp_path, count=2000, chunk_size=70)
    train, _ = parts_of(path, [0.5, 0.5])
    inner = liveset.train_test_split(train, [0.5, 0.5], by="key")
    assert all(430 < len(part) < 570 for part in inner)
    assert sorted(ids(inner[0]) + ids(inner[1])) == ids(train)
    assert list(inner[1].keys) == [f"k{i}" for i in ids(inner[1])]
    halves = liveset.train_test_split(train, [0.5, 0.5])
    assert sorted(ids(halves[0]) + ids(halves[1])) == sorted(ids(train)[: 2 * (len(train) // 2)]) or len(train) % 2
    some = StreamingDataset(path).subset(range(100, 300))
    first, second = liveset.train_test_split(some, [0.5, 0.5], by="key")
    assert sorted(ids(first) + ids(second)) == list(range(100, 300))
    assert set(ids(first)) <= set(ids(train))
    liveset.optimize(row, range(2000, 2100), path, mode="append", num_workers=1, key_fn="id")
    assert inner[0].refresh()
    assert set(ids(inner[0])) <= set(ids(parts_of(path, [0.5, 0.5])[0]))
    with pytest.raises(ValueError, match="stays at its version"):
        first.refresh()


@given(
    count=st.integers(1, 60),
    chunk_size=st.integers(1, 20),
    world=st.integers(1, 3),
    workers=st.integers(0, 3),
    batch=st.integers(1, 5),
    window=st.sampled_from([None, 0, 3]),
    stop=st.integers(0, 5),
)
def test_parts_are_shuffled_and_resumed(
    tmp_path_factory: pytest.TempPathFactory, count: int, chunk_size: int, world: int, workers: int, batch: int, window: Any, stop: int
) -> None:
    path = make(tmp_path_factory.mktemp("split"), count, chunk_size)
    (train,) = parts_of(path, [0.7], shuffle=True, item_shuffle_window=window)
    seen: list[int] = []
    for rank in range(world):

        def fresh(rank: int = rank) -> LightLoader:
            (part,) = parts_of(path, [0.7], shuffle=True, item_shuffle_window=window)
            return LightLoader(part, batch_size=batch, num_workers=workers, rank=rank, world_size=world, pad=True)

        loader = fresh()
        expected = [b["i"].tolist() for b in loader]
        loader = fresh()
        had = [b["i"].tolist() for b in islice(loader, stop)]
        state = loader.state_dict()
        loader = fresh()
        loader.load_state_dict(state)
        assert (had + [b["i"].tolist() for b in loader])[: len(expected)] == expected
        seen += [i for b in expected for i in b]
    assert set(seen) == set(ids(train[:]))


def test_states_name_the_part(tmp_path: Path) -> None:
    path = make(tmp_path, count=100)
    train, test = parts_of(path, [0.5, 0.5])
    state = train.state_dict(0)
    for other in (test, *parts_of(path, [0.6, 0.4]), *parts_of(path, [0.5, 0.5], seed=1), StreamingDataset(path)):
        with pytest.raises(StateMismatch, match="another part of it is read"):
            other.load_state_dict(state)
    make(tmp_path / "one", count=40, chunk_size=40)
    equal = next(parts for parts in (parts_of(tmp_path / "one", [0.5, 0.5], seed=seed) for seed in range(99)) if len(parts[0]) == 20)
    with pytest.raises(StateMismatch, match="another part of it is read"):
        equal[1].load_state_dict(equal[0].state_dict(0))
    liveset.optimize(row, range(100, 150), path, mode="append", num_workers=1, key_fn="id")
    grown, _ = parts_of(path, [0.5, 0.5])
    assert len(grown) > len(train)
    grown.load_state_dict(state)
    assert ids(grown) == ids(train)


def test_chunks_stay_together_when_parts_are_shuffled(tmp_path: Path) -> None:
    """A part is read chunk by chunk, as the whole is: on an object store each chunk is fetched once."""
    (train,) = parts_of(make(tmp_path, count=200, chunk_size=20), [0.8], shuffle=True)
    chunks = [i // 20 for i in ids(train)]
    assert sum(a != b for a, b in pairwise(chunks)) == 9
    assert ids(train) != sorted(ids(train))


def test_datasets_of_the_old_tool(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    before = [list(part.keys) for part in parts_of(make(tmp_path, count=50), [0.5, 0.5])]
    make_foreign(tmp_path)
    assert [list(part.keys) for part in parts_of(tmp_path, [0.5, 0.5])] == before


@pytest.mark.slow
def test_workers_that_are_not_forked(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (train,) = parts_of(make(tmp_path, count=60, chunk_size=7), [0.7])
    loader: Callable[..., Any] = liveset.StreamingDataLoader
    batches = loader(train, batch_size=5, num_workers=1, multiprocessing_context="spawn")
    assert [i for b in batches for i in b["i"].tolist()] == ids(train)
    from torch.utils.data import DataLoader

    plain: Any = DataLoader(train, batch_size=None, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    assert ids(plain) == ids(train)
