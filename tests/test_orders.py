"""Loaders that read in a given order: samplers and batch samplers, buckets, ranks, states, edited and remote datasets."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset.errors import BadSample, KeyNotFound, PositionOutOfRange, StateMismatch
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from tests.support.remote import place_at
from tests.support.stub_server import StubServer
from tests.support.writing import write_dataset

COUNT = 47

Loaders = Callable[..., Any]
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(params=["torch", "light"])
def loader_of(request: pytest.FixtureRequest) -> Loaders:
    if request.param == "light":
        return LightLoader
    pytest.importorskip("torch")
    return liveset.StreamingDataLoader


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with keys, in chunks of 6, which no test changes."""
    return make(tmp_path_factory.mktemp("orders") / "ds")


@pytest.fixture
def ds(path: Path) -> liveset.StreamingDataset:
    return liveset.StreamingDataset(path)


def make(path: Path) -> Path:
    write_dataset(path, [{"i": i, "id": f"k{i}"} for i in range(COUNT)], chunk_size=6, key="id")
    return path


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def take(loader: Any, count: int) -> list[list[int]]:
    """Begin a pass, and leave it after some batches."""
    batches = iter(loader)
    return ids(next(batches) for _ in range(count))


def stored(state: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(state))
    assert copy == state
    return copy


class Batches:
    """A sampler of batches of any size, by position and by key, which is another one in each epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batches(self, epoch: int) -> list[list[int]]:
        choose = random.Random(f"{self.seed} {epoch}")
        return [choose.sample(range(COUNT), choose.randint(1, 7)) for _ in range(11)]

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches(self.epoch)):
            yield [f"k{i}" if (i + number) % 3 == 0 else i for i in batch]


# --- what is read ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WORKERS)
def test_batches_are_those_of_the_sampler_in_each_epoch(ds: liveset.StreamingDataset, loader_of: Loaders, options: dict[str, Any]) -> None:
    sampler = Batches()
    loader = loader_of(ds, batch_sampler=sampler, **options)
    assert len(loader) == 11
    for epoch in range(3):
        assert ids(loader) == sampler.batches(epoch)
        assert (loader.current_epoch, loader.stats().batches) == (epoch + 1, 11)
    loader.set_epoch(2)
    assert ids(loader) == sampler.batches(1)
    assert loader.batch_sampler is sampler
    assert loader.batch_size is None


@pytest.mark.parametrize("options", WORKERS)
def test_samples_come_in_the_order_of_a_list(ds: liveset.StreamingDataset, loader_of: Loaders, options: dict[str, Any]) -> None:
    loader = loader_of(ds, sampler=["k7", 1, b"k7", -1, np.int64(3)], batch_size=2, **options)
    assert len(loader) == 3
    for _ in range(2):
        assert ids(loader) == [[7, 1], [7, COUNT - 1], [3]]
    loader = loader_of(ds, sampler=np.arange(COUNT)[::-1], batch_size=None, shuffle=False, **options)
    assert [int(row["i"]) for row in loader] == list(range(COUNT))[::-1]
    loader = loader_of(ds, sampler=ds.keys, batch_size=20, drop_last=True, **options)
    assert ids(loader) == [list(range(20)), list(range(20, 40))]
    assert len(loader) == 2
    assert ids(loader_of(ds, batch_sampler=[np.array([3, 1]), (2,), range(5, 3, -1)], **options)) == [[3, 1], [2], [5, 4]]


def test_samplers_of_torch_give_the_order(ds: liveset.StreamingDataset) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

    of = liveset.StreamingDataLoader
    assert ids(of(ds, batch_sampler=BatchSampler(SequentialSampler(range(COUNT)), 40, False))) == [list(range(40)), list(range(40, COUNT))]
    assert ids(of(ds, sampler=WeightedRandomSampler([0, 0, 1], 5), batch_size=4)) == [[2] * 4, [2]]
    assert ids(of(ds, sampler=torch.tensor([4, 2]))) == [[4], [2]]
    assert ids(of(ds, batch_sampler=[torch.tensor([4, 2])])) == [[4, 2]]
    drawn = [RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert flat(ids(of(ds, sampler=drawn[0], batch_size=9))) == list(drawn[1])


def test_batches_are_decoded_as_any_others(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    sampler = [[3, 1, 40], ["k9"] * 5]
    at_once = loader_of(ds, batch_sampler=sampler)
    single = loader_of(ds, batch_sampler=sampler, collate_fn=lambda rows: rows)
    for batch, rows in zip(at_once, single, strict=True):
        assert batch["id"] == [row["id"] for row in rows]
        assert batch["i"].tolist() == [int(row["i"]) for row in rows]
    assert [list(batch) for batch in loader_of(liveset.StreamingDataset(ds.path, fields=["i"]), batch_sampler=[[1]])] == [["i"]]


def test_parts_and_joined_datasets_are_read_by_their_own_positions(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    part = ds.subset([5, 30, 31, 2])
    assert ids(loader_of(part, batch_sampler=[[0, 3], ["k31", 1]])) == [[5, 2], [31, 30]]
    with pytest.raises(KeyNotFound, match="'k6'"):
        loader_of(part, sampler=["k5", "k6"])
    one, two = liveset.train_test_split(ds, [0.5, 0.5], by="key")
    assert ids(loader_of(one, sampler=range(one.samples), batch_size=COUNT)) == [[int(row["i"]) for row in one]]
    assert ids(loader_of(two, sampler=[-1, two.key_at(0)], batch_size=2)) == [[int(two[-1]["i"]), int(two[0]["i"])]]
    joined = liveset.JoinedStreamingDataset(ds, liveset.StreamingDataset(ds.path))
    assert ids(loader_of(joined, sampler=["k7", 3], batch_size=2)) == [[7, 3]]


def test_integer_keys_are_read_by_their_positions(tmp_path: Path, loader_of: Loaders) -> None:
    write_dataset(tmp_path / "ds", [{"i": 100 - i} for i in range(20)], chunk_size=6, key="i")
    ds = liveset.StreamingDataset(tmp_path / "ds")
    wanted = [95, 83, 95, 100]
    assert ids(loader_of(ds, sampler=ds.keys.positions(wanted), batch_size=4)) == [wanted]
    part = ds.subset([17, 3, 5, 4])
    assert part.keys.positions([95, 83]) == [2, 0]
    with pytest.raises(KeyNotFound, match="93"):
        part.keys.positions([95, 93])
    for half in liveset.train_test_split(ds, [0.5, 0.5], by="key"):
        assert half.keys.positions(list(half.keys)) == list(range(half.samples))


def test_a_dataset_that_shuffles_and_transforms_is_read_in_the_given_order(path: Path, loader_of: Loaders) -> None:
    ds = liveset.StreamingDataset(path, shuffle=True, transform=lambda row: {"i": row["i"] + 100})
    assert ids(loader_of(ds, sampler=[4, 2, 0], batch_size=2)) == [[104, 102], [100]]


def test_a_plain_loader_of_torch_takes_a_batch_sampler_over_the_map_view(ds: liveset.StreamingDataset) -> None:
    data = pytest.importorskip("torch.utils.data")
    asked: list[list[int]] = []

    class View(type(ds.as_map())):  # type: ignore[misc]
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            found: list[Any] = super().__getitems__(indices)
            return found

    sampler = [[1, 40, 2], [7]]
    assert ids(data.DataLoader(View(ds), batch_sampler=sampler)) == asked == sampler


# --- ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:drop_last=False")
@given(
    world=st.integers(1, 4),
    workers=st.integers(0, 3),
    units=st.integers(0, 30),
    batch=st.integers(1, 4),
    batched=st.booleans(),
    rule=st.sampled_from([{}, {"pad": True}, {"drop_last": False}]),
    seed=st.integers(0, 1000),
)
def test_ranks_read_all_that_the_sampler_yields_between_them(
    path: Path, world: int, workers: int, units: int, batch: int, batched: bool, rule: dict[str, Any], seed: int
) -> None:
    choose = random.Random(seed)
    batches = [choose.sample(range(COUNT), choose.randint(1, 5)) for _ in range(units)]
    order = choose.choices(range(COUNT), k=units)
    how: dict[str, Any] = {"batch_sampler": batches} if batched else {"sampler": order, "batch_size": batch}
    expected = batches if batched else [order[at : at + batch] for at in range(0, units, batch)]
    if not batched and (rule.get("pad") or (not rule and world > 1)):
        whole = units // (world * batch) * world  # batches before the last step
        tail = order[whole * batch :]
        tail = [tail[at % len(tail)] for at in range(world * batch)] if tail and rule else []
        expected = expected[:whole] + [tail[at : at + batch] for at in range(0, len(tail), batch)]
    elif batched and not rule:
        expected = expected[: units // world * world]
    elif batched and rule.get("pad") and units % world:
        last = expected[units // world * world :]
        expected = expected[: units // world * world] + [last[at % len(last)] for at in range(world)]
    found = []
    for rank in range(world):
        loader = LightLoader(liveset.StreamingDataset(path), num_workers=workers, rank=rank, world_size=world, **how, **rule)
        if units and not expected:
            with pytest.raises(ValueError, match="one batch for each of"):
                iter(loader)
            return
        found.append(ids(loader))
        assert len(loader) == len(found[-1])
    assert found == [expected[rank::world] for rank in range(world)]


def test_a_sampler_that_divides_among_ranks_itself_is_not_divided_again(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    data = pytest.importorskip("torch.utils.data")
    from torch.utils.data.distributed import DistributedSampler

    part: Any = DistributedSampler(ds.as_map(), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    for how in ({"sampler": part}, {"batch_sampler": data.BatchSampler(part, 4, False)}):
        loader = loader_of(ds, rank=1, world_size=2, **how)
        with pytest.raises(ValueError, match=r"num_replicas of DistributedSampler.*rank=0, world_size=1"):
            iter(loader)
        assert flat(ids(loader_of(ds, rank=0, world_size=1, **how))) == list(part)


def test_uneven_ranks_are_warned_of(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    with pytest.warns(UserWarning, match="drop_last=False"):
        assert ids(loader_of(ds, batch_sampler=[[1], [2], [3]], drop_last=False, rank=0, world_size=2)) == [[1], [3]]


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import RandomSampler
import liveset
path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ds = liveset.StreamingDataset(path)
torch.manual_seed(5)
loader = liveset.StreamingDataLoader(ds, sampler=RandomSampler(range(46)), batch_size=1, num_workers=1)
mine = torch.cat([batch["i"] for batch in loader])
both = [torch.zeros(23, dtype=torch.int64) for _ in range(2)]
dist.all_gather(both, mine)
assert sorted(torch.cat(both).tolist()) == list(range(46)), both
torch.manual_seed(rank)
try:
    print(len(list(loader)))
except ValueError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_with_different_orders_are_told_so(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, path, tmp_path / "store", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    for out, _ in told:
        assert "order is 'that of sampler= (" in out
        assert "so give all of them the same, seeded by the epoch" in out


# --- states ------------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
def test_a_run_that_is_killed_at_random_is_the_run_that_is_not(path: Path, seed: int) -> None:
    choose = random.Random(seed)
    world = choose.randint(1, 3)
    settings: dict[str, Any] = {"rank": choose.randrange(world), "world_size": world, "pad": choose.random() < 0.5}
    if choose.random() < 0.5:
        settings |= {"sampler": choose.sample(range(COUNT), 40), "batch_size": choose.randint(1, 5)}

    def new() -> Any:
        how = settings if "sampler" in settings else settings | {"batch_sampler": Batches(seed)}
        return LightLoader(liveset.StreamingDataset(path), num_workers=choose.randint(0, 3), **how)

    loader = new()
    whole = [batch for _ in range(3) for batch in ids(loader)]
    each = len(loader)
    assert len(whole) == 3 * each
    seen: list[list[int]] = []
    state = None
    while len(seen) < len(whole):
        loader = new()
        if state is not None:
            loader.load_state_dict(stored(state))
            assert loader.state_dict()["dataset"]["order"] == state["dataset"]["order"]
        for _ in range(choose.randint(0, 2)):  # this many epochs, or what is left of one, before it is killed
            seen += ids(loader)
        steps = choose.randint(0, each - 1)
        for _, batch in zip(range(steps), loader, strict=False):
            seen += ids([batch])
        state = loader.state_dict()
    assert seen[: len(whole)] == whole


@pytest.mark.parametrize("options", WORKERS)
def test_every_save_point_goes_on_exactly(ds: liveset.StreamingDataset, loader_of: Loaders, options: dict[str, Any]) -> None:
    sampler = Batches()
    loader = loader_of(ds, batch_sampler=sampler, **options)
    points = [loader.state_dict()]
    for batch in loader:
        points.append(loader.state_dict())
        assert points[-1]["num_samples_yielded"] == points[-2]["num_samples_yielded"] + len(batch["i"])
    after = loader.state_dict()
    for done in (0, 1, 5, 11):
        other = loader_of(ds, batch_sampler=Batches(), num_workers=0 if options else 2)
        other.load_state_dict(stored(points[done]))
        assert len(other) == 11
        assert ids(other) == sampler.batches(0)[done:]
        assert ids(other) == sampler.batches(1)
    loader.load_state_dict(after)
    assert ids(loader) == sampler.batches(1)


@pytest.mark.filterwarnings("ignore:rank")
@given(
    grids=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=4),
    batched=st.booleans(),
    stateful=st.booleans(),
)
def test_a_run_goes_on_with_other_ranks_and_batch_sizes(
    path: Path, grids: list[tuple[int, int, int]], batched: bool, stateful: bool
) -> None:
    state, seen = None, []
    units = list(range(COUNT)) if not batched else Batches().batches(0)
    for world, batch, steps in [*grids, (1, 2, 100)]:
        states = []
        read: list[list[list[int]]] = []
        for rank in range(world):
            how: dict[str, Any] = {"batch_sampler": Batches()} if batched else {"sampler": list(range(COUNT)), "batch_size": batch}
            if stateful:
                how = {name: Remembering(units) if name != "batch_size" else value for name, value in how.items()}
            loader = LightLoader(liveset.StreamingDataset(path), rank=rank, world_size=world, **how)
            if state is not None:
                loader.load_state_dict(state)
            left = len(loader) - (sum(stretch[-1] for stretch in state["dataset"]["stretches"]) if state is not None else 0)
            read.append(take(loader, min(steps, left)))
            states.append(loader.state_dict())
        assert len({len(each) for each in read}) == 1
        seen += [each for step in zip(*read, strict=True) for each in step]
        assert all(each["dataset"]["order"] == states[0]["dataset"]["order"] for each in states)
        state = stored(states[0])
    assert seen == units if batched else flat(seen) == units


class Remembering:
    """A sampler with a state of its own; it cannot begin anew."""

    def __init__(self, units: list[Any]) -> None:
        self.units, self.at, self.drawn = units, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.units):
            self.at += 1
            self.drawn += 1
            yield self.units[self.at - 1]


def test_the_state_of_a_sampler_is_that_of_the_batches_that_were_had(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    loader = loader_of(ds, sampler=Remembering(list(range(40))), batch_size=4, num_workers=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = stored(loader.state_dict())
    assert state["dataset"]["order"]["sampler"] == {"at": 8}
    sampler = Remembering(list(range(40)))
    other = loader_of(ds, sampler=sampler, batch_size=4)
    other.load_state_dict(state)
    assert ids(other) == [list(range(at, at + 4)) for at in range(8, 40, 4)]
    assert sampler.drawn == 32  # nothing was drawn again


def test_samplers_of_torchdata_go_on_from_their_state(ds: liveset.StreamingDataset) -> None:
    torch = pytest.importorskip("torch")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def loader(seed: int, *, batched: bool) -> Any:
        chosen = samplers.RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(seed))
        how = {"batch_sampler": samplers.BatchSampler(chosen, 5, False)} if batched else {"sampler": chosen, "batch_size": 5}
        return liveset.StreamingDataLoader(ds, num_workers=1, **how)

    for batched in (False, True):
        whole = ids(loader(1, batched=batched))
        first = loader(1, batched=batched)
        assert take(first, 4) == whole[:4]
        other = loader(2, batched=batched)  # its own order would be another one
        other.load_state_dict(first.state_dict())
        assert ids(other) == whole[4:]


def test_a_sampler_that_yields_something_else_is_detected(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    loader = loader_of(ds, batch_sampler=Batches(1))
    take(loader, 3)
    state = loader.state_dict()
    for other in (Batches(2), [[1, 2]], Batches(1).batches(0)):
        wrong = loader_of(ds, batch_sampler=other)
        wrong.load_state_dict(state)
        with pytest.raises(StateMismatch, match="batch_sampler does not yield what it did in epoch 1"):
            iter(wrong)
    unseeded = loader_of(ds, sampler=Shuffled(), batch_size=4)
    take(unseeded, 2)
    unseeded.load_state_dict(unseeded.state_dict())
    with pytest.raises(StateMismatch, match="must do so whenever its set_epoch"):
        iter(unseeded)


class Shuffled:
    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(COUNT), COUNT)


def test_states_of_other_kinds_of_loaders_are_refused(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    kinds: list[dict[str, Any]] = [{}, {"sampler": list(range(9))}, {"batch_sampler": [[1], [2], [3]]}]
    for kind in kinds:
        loader = loader_of(ds, **kind)
        take(loader, 2)
        state = loader.state_dict()
        for other in kinds:
            if other is not kind:
                loader = loader_of(ds, **other)
                with pytest.raises(StateMismatch, match="another kind of loader: of one with"):
                    loader.load_state_dict(state)
                loader.dataset.load_state_dict(state["dataset"])
                with pytest.raises(StateMismatch, match="another kind of loader: of one with"):
                    iter(loader)
        if kind:
            ds.load_state_dict(state["dataset"])
            with pytest.raises(StateMismatch, match="load it into such a liveset.StreamingDataLoader"):
                iter(ds)
    # An epoch that is over says nothing of the next one.
    loader = loader_of(ds)
    list(loader)
    ordered = loader_of(ds, sampler=[1])
    ordered.load_state_dict(loader.state_dict())
    assert (ids(ordered), ordered.current_epoch) == ([[1]], 2)


def test_a_damaged_mark_is_no_state(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    loader = loader_of(ds, sampler=[1, 2])
    take(loader, 1)
    state = stored(loader.state_dict())
    del state["dataset"]["order"]["digest"]
    with pytest.raises(StateMismatch, match="no state of a liveset"):
        loader_of(ds, sampler=[1, 2]).load_state_dict(state)


@pytest.mark.parametrize("how", [{"batch_sampler": [[3, 1], ["k5"]]}, {"sampler": [3, 1, "k5"], "batch_size": 2}])
def test_lightning_predicts_in_the_given_order(ds: liveset.StreamingDataset, tmp_path: Path, how: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    lightning: Any = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def predict_step(self, batch: Any) -> Any:
            return batch["i"].tolist()

    trainer = lightning.Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path
    )
    with warnings.catch_warnings(action="ignore"):
        # Lightning makes another loader for this.
        assert trainer.predict(Model(), liveset.StreamingDataLoader(ds, **how)) == [[3, 1], [5]]


# --- edited datasets ---------------------------------------------------------------------------------------------------------


def test_positions_are_those_of_the_version_that_is_read(tmp_path: Path, loader_of: Loaders) -> None:
    path = make(tmp_path / "ds")
    old = liveset.StreamingDataset(path)
    loader = loader_of(old, sampler=[9, "k10", 11, "k12"], batch_size=1)
    batches = iter(loader)
    first = ids([next(batches)])
    state = stored(loader.state_dict())
    with liveset.dataset_update(path) as edit:
        del edit["k0"], edit["k12"]
        edit["k11"] = {"i": 1100, "id": "k11"}
        edit.commit()
    assert first + ids(batches) == [[9], [10], [11], [12]]
    new = liveset.StreamingDataset(path)
    assert ids(loader_of(new, sampler=[9, "k10", "k11"], batch_size=3)) == [[10, 10, 1100]]
    with pytest.raises(KeyNotFound, match="'k12'"):
        loader_of(new, sampler=["k10", "k12"])
    other = loader_of(liveset.StreamingDataset(path), sampler=Yielding([9, "k10", 11, "k12"]), batch_size=1)
    other.load_state_dict(state)  # back to its version
    assert ids(other) == [[10], [11], [12]]
    loader.dataset.refresh()
    with pytest.raises(KeyNotFound, match="'k12'"):
        iter(loader)


class Yielding:
    """Yields what a list holds, without being one."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units

    def __iter__(self) -> Iterator[Any]:
        yield from self.units


@pytest.mark.parametrize("options", WORKERS)
def test_what_is_not_there_is_named(ds: liveset.StreamingDataset, loader_of: Loaders, options: dict[str, Any]) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (KeyNotFound, "'nobody'", {"sampler": [1, "nobody"]}),
        (KeyNotFound, "'nobody'", {"batch_sampler": [["k1"], [1, "nobody"]]}),
        (PositionOutOfRange, "position 47 of", {"sampler": [1, 47]}),
        (PositionOutOfRange, "position -48 of", {"batch_sampler": [[1, -48]]}),
        (PositionOutOfRange, "position 1000000000000000000000", {"sampler": [10**21]}),
        (TypeError, "1.5 is neither the position of a sample nor a key", {"sampler": [1, 1.5]}),
        (TypeError, "give lists of samples as batch_sampler=", {"sampler": [[1, 2]]}),
        (TypeError, "give single positions or keys as sampler=", {"batch_sampler": [1, 2]}),
        (TypeError, "'k1', which is no list", {"batch_sampler": ["k1", "k2"]}),
        (ValueError, "a batch without samples", {"batch_sampler": [[1], []]}),
    ]
    for error, text, how in cases:
        with pytest.raises(error, match=text):
            loader_of(ds, **how, **options)
        ((name, units),) = how.items()
        loader = loader_of(ds, **{name: Yielding(units)}, **options)  # what is no list is looked at when it is read
        with pytest.raises(error, match=text):
            list(loader)


def test_a_dataset_without_keys_has_no_sample_with_one(tmp_path: Path, loader_of: Loaders) -> None:
    write_dataset(tmp_path / "plain", [{"i": i} for i in range(5)])
    with pytest.raises(KeyNotFound, match="build_keys_index"):
        loader_of(liveset.StreamingDataset(tmp_path / "plain"), sampler=["k1"])
    assert ids(loader_of(liveset.StreamingDataset(tmp_path / "plain"), sampler=[3])) == [[3]]


def test_samples_that_fail_are_bad_samples_here_too(path: Path, loader_of: Loaders) -> None:
    def fail(row: Any) -> Any:
        if row["i"] == 8:
            raise RuntimeError("no")
        return row

    ds = liveset.StreamingDataset(path, transform=fail)
    loader = loader_of(ds, batch_sampler=[[1, 2], [3, "k8", 4], [8], [5]])
    with pytest.raises(BadSample, match="position 8"):
        list(loader)
    take(loader, 1)
    state = loader.state_dict()
    loader = loader_of(ds, batch_sampler=[[1, 2], [3, "k8", 4], [8], [5]], on_error="skip")
    loader.load_state_dict(state)
    assert ids(loader) == [[3, 4], [5]]


def test_workers_end_with_a_loop_that_is_left_or_fails(ds: liveset.StreamingDataset) -> None:
    pytest.importorskip("torch")
    loader = liveset.StreamingDataLoader(ds, sampler=Yielding([*range(20), "nobody"]), batch_size=1, num_workers=2)
    for _ in loader:
        break
    assert multiprocessing.active_children() == []
    batches = iter(loader)
    assert flat(ids(next(batches) for _ in range(20))) == list(range(20))
    with pytest.raises(KeyNotFound, match="'nobody'"):
        next(batches)
    assert multiprocessing.active_children() == []
    assert loader.state_dict()["num_samples_yielded"] == 20


# --- arguments ---------------------------------------------------------------------------------------------------------------


def test_what_leaves_the_order_open_is_refused(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    for more in ({"batch_size": 2}, {"batch_size": None}, {"shuffle": True}, {"sampler": [1]}, {"drop_last": True}):
        with pytest.raises(ValueError, match="it excludes batch_size=, shuffle=, sampler= and drop_last="):
            loader_of(ds, batch_sampler=[[1]], **more)
    with pytest.raises(ValueError, match="it excludes shuffle="):
        loader_of(ds, sampler=[1], shuffle=True)
    for name in ("sampler", "batch_sampler"):
        for mixture in (liveset.CombinedStreamingDataset([ds]), liveset.ParallelStreamingDataset([ds])):
            with pytest.raises(ValueError, match=f"a {type(mixture).__name__} mixes several"):
                loader_of(mixture, **{name: []})
        for wrong in (iter([1]), (i for i in [1])):
            with pytest.raises(ValueError, match=f"{name}= is an iterator"):
                loader_of(ds, **{name: wrong})
        for nothing in (5, "k1"):
            with pytest.raises(TypeError, match=f"{name}= must yield"):
                loader_of(ds, **{name: nothing})


def test_without_a_length_there_is_none(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    loader = loader_of(ds, sampler=Yielding([1, 2, 3]), batch_size=2, rank=1, world_size=2, pad=True)
    with pytest.raises(TypeError, match="the sampler has no length"):
        len(loader)
    assert ids(loader) == [[3, 1]]
    loader.load_state_dict(loader.state_dict())
    assert ids(loader) == [[3, 1]]
    data = pytest.importorskip("torch.utils.data")
    loader = loader_of(ds, batch_sampler=data.BatchSampler(Yielding([1, 2, 3]), 2, False), rank=1, world_size=2)
    with pytest.raises(TypeError, match="the batch_sampler has no length"):
        len(loader)
    assert ids(loader) == [[3]]


# --- buckets -----------------------------------------------------------------------------------------------------------------


def spread(lengths: Any, batches: list[list[int]]) -> Any:
    """How much of the batches would be padding."""
    whole = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1 - sum(lengths[i] for batch in batches for i in batch) / whole


@given(
    lengths=st.lists(st.integers(0, 50), max_size=200),
    batch=st.one_of(st.none(), st.integers(1, 9)),
    tokens=st.one_of(st.none(), st.integers(50, 200)),
    boundaries=st.one_of(st.none(), st.lists(st.integers(0, 60), unique=True, max_size=5).map(sorted)),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_buckets_hold_every_sample_once(
    lengths: list[int], batch: int | None, tokens: int | None, boundaries: list[int] | None, shuffle: bool, drop: bool, epoch: int
) -> None:
    if batch is None and tokens is None:
        return
    sampler = liveset.BucketBatchSampler(lengths, batch, max_tokens=tokens, boundaries=boundaries, shuffle=shuffle, seed=3, drop_last=drop)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert batches == list(sampler)
    assert len(batches) == len(sampler)
    seen = sorted(i for each in batches for i in each)
    assert len(set(seen)) == len(seen)
    assert drop or seen == list(range(len(lengths)))
    for each in batches:
        assert batch is None or len(each) <= batch
        assert tokens is None or len(each) * max(lengths[i] for i in each) <= tokens
        if boundaries is not None:
            assert len(set(np.searchsorted(boundaries, [lengths[i] for i in each], "right"))) == 1
    if drop and batch and tokens is None:
        assert {len(each) for each in batches} <= {batch}


def test_buckets_are_shuffled_and_leave_little_to_pad() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 10_000).astype(int)
    sampler = liveset.BucketBatchSampler(lengths, 32, seed=1)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] != epochs[1]
    assert not {tuple(sorted(batch)) for batch in epochs[0]} & {tuple(sorted(batch)) for batch in epochs[1]}
    middles = [float(np.mean(lengths[batch])) for batch in epochs[0]]
    assert abs(np.corrcoef(middles[:-1], middles[1:])[0, 1]) < 0.2  # long and short ones in turn
    order = np.random.default_rng(0).permutation(10_000).tolist()
    assert spread(lengths, epochs[0]) < 0.15
    assert spread(lengths, [order[at : at + 32] for at in range(0, 10_000, 32)]) > 0.5
    assert list(liveset.BucketBatchSampler(lengths, 32, seed=2)) != epochs[0]
    in_order = list(liveset.BucketBatchSampler(lengths, 32, shuffle=False))
    assert [max(lengths[batch]) for batch in in_order] == sorted(max(lengths[batch]) for batch in in_order)
    wide = liveset.BucketBatchSampler(lengths, max_tokens=4_000)
    assert spread(lengths, list(wide)) < 0.1
    assert len(wide) < 1.2 * lengths.sum() / 4_000
    assert len(liveset.BucketBatchSampler(lengths, max_tokens=4_000, boundaries=[50])) < 1.2 * lengths.sum() / 4_000


def test_buckets_are_read_on_all_ranks_and_go_on(ds: liveset.StreamingDataset, loader_of: Loaders) -> None:
    lengths = [i % 10 for i in range(COUNT)]
    seen = []
    for rank in range(2):
        loader = loader_of(ds, batch_sampler=liveset.BucketBatchSampler(lengths, 4), rank=rank, world_size=2, pad=True, num_workers=2)
        whole = [ids(loader) for _ in range(2)]
        loader.set_epoch(2)
        assert take(loader, 3) == whole[1][:3]
        other = loader_of(ds, batch_sampler=liveset.BucketBatchSampler(lengths, 4), rank=rank, world_size=2, pad=True)
        other.load_state_dict(stored(loader.state_dict()))
        assert ids(other) == whole[1][3:]
        seen += flat(whole[0])
    assert set(seen) == set(range(COUNT))


def test_wrong_arguments_of_buckets_are_refused() -> None:
    of: Any = liveset.BucketBatchSampler
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("lengths must be a list of numbers", lambda: of("text", 4)),
        ("lengths must be a list of numbers", lambda: of(["a"], 4)),
        ("lengths must be a list of numbers", lambda: of([[1, 2]], 4)),
        ("Found -1 for the sample at position 1", lambda: of([1, -1], 4)),
        ("Found nan for the sample at position 0", lambda: of([float("nan")], 4)),
        ("batch_size= or max_tokens= must say", lambda: of([1])),
        ("batch_size must be", lambda: of([1], 0)),
        ("batch_size must be", lambda: of([1], "x")),
        ("max_tokens must be", lambda: of([1], max_tokens=-1)),
        ("the sample at position 1 has the length 9, more than max_tokens=8", lambda: of([1, 9], max_tokens=8)),
        ("boundaries must be ascending", lambda: of([1], 4, boundaries=[2, 1])),
        ("boundaries must be ascending", lambda: of([1], 4, boundaries=["x"])),
        ("shuffle must be", lambda: of([1], 4, shuffle=1)),
        ("drop_last must be", lambda: of([1], 4, drop_last="x")),
        ("seed must be", lambda: of([1], 4, seed=-1)),
    ]
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()


# --- remote ------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_of_a_remote_dataset_only_the_samples_are_fetched(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    blob = 40_000

    def play(number: int) -> dict[str, Any]:
        return {"i": number, "blob": number.to_bytes(2, "little") * (blob // 2)}

    liveset.optimize(play, range(400), place_at(folder), chunk_bytes=4_000_000, num_workers=1, verbose=False)
    place = place_at(folder, tmp_path / "cache")
    stub.forget()
    loader = LightLoader(liveset.StreamingDataset(place), batch_sampler=[[0, 399, 150], [151, 250, 1]])
    assert ids(loader) == [[0, 399, 150], [151, 250, 1]]
    assert stub.bytes_sent < 30 * blob  # of 400
    # What is read often is fetched whole, once.
    order = [*range(90), *range(90)]
    loader = LightLoader(liveset.StreamingDataset(place), sampler=order, batch_size=10)
    stub.forget()
    assert ids(loader) == [order[at : at + 10] for at in range(0, 180, 10)]
    assert stub.bytes_sent < 230 * blob
    stub.forget()
    assert ids(loader) == [order[at : at + 10] for at in range(0, 180, 10)]
    assert stub.bytes_sent == 0


@pytest.mark.parametrize("yielded", [False, True])
@pytest.mark.parametrize("kind", ["bools", "array", "numpy", "tensor", "tensors"])
def test_a_mask_is_no_order(tmp_path: Path, loader_of: Loaders, kind: str, yielded: bool) -> None:
    write_dataset(tmp_path / "ds", [{"i": i} for i in range(4)])
    mask: Any = [True, False, True, False]
    if kind != "bools":
        mask = pytest.importorskip("torch").tensor(mask) if kind.startswith("tensor") else np.array(mask)
    mask = list(mask) if kind in ("numpy", "tensors") else mask
    ds = liveset.StreamingDataset(tmp_path / "ds")
    orders: list[dict[str, Any]] = [{"sampler": mask, "batch_size": 2}, {"batch_sampler": [mask]}, {"batch_sampler": mask}]
    for order in orders:
        given = {name: Yielding(value) if yielded and name != "batch_size" else value for name, value in order.items()}
        with pytest.raises(TypeError, match="flatnonzero"):
            list(loader_of(ds, **given))
