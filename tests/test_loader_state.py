"""States of a training loop: exact from any point, on other grids, on edited datasets; and refused where they do not fit."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import liveset
from liveset.errors import StateMismatch
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from tests.support.writing import write_dataset


def sample(i: int) -> dict[str, Any]:
    return {"i": i, "id": f"k{i}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Twenty-three samples with keys, in chunks of 5."""
    write_dataset(tmp_path / "ds", [sample(i) for i in range(23)], chunk_size=5, key="id")
    return tmp_path / "ds"


def make(path: Path, *, of: Any = LightLoader, version: int | None = None, forced: bool = False, **options: Any) -> Any:
    settings = {"batch_size": 3, "shuffle": True} | options
    return of(liveset.StreamingDataset(path, version=version, force_override_state_dict=forced), **settings)


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def take(loader: Any, count: int) -> list[list[int]]:
    """Begin a pass, and leave it after some batches."""
    batches = iter(loader)
    return ids(next(batches) for _ in range(count))


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes out of a checkpoint."""
    copy: dict[str, Any] = json.loads(json.dumps(state))
    assert copy == state
    return copy


def update(path: Path, *keys: str, value: int = 100) -> None:
    with liveset.dataset_update(path) as edit:
        for number, key in enumerate(keys):
            edit[key] = {"i": value + number, "id": key}
        edit.commit()


# --- exact -------------------------------------------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [{}, {"num_workers": 2}]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_save_point_goes_on_exactly(path: Path, options: dict[str, Any]) -> None:
    loader = make(path, **options)
    points = [loader.state_dict()]  # before anything
    whole: list[list[list[int]]] = []
    for _ in range(3):
        batches = iter(loader)
        points.append(loader.state_dict())  # before the first batch
        whole.append([])
        for batch in batches:
            whole[-1].append(batch["i"].tolist())
            points.append(loader.state_dict())
        points.append(loader.state_dict())  # between two epochs
    assert len(points) == 1 + 3 * (8 + 2)
    for number, state in enumerate(points):
        epoch, done = divmod(number - 1, 10) if number else (0, 0)
        for fresh in (True, False):
            other = make(path, **options) if fresh else loader
            other.load_state_dict(stored(state))
            assert other.state_dict() == state
            if done == 9:  # the epoch is over
                epoch, done = epoch + 1, 0
            if epoch < 3:
                assert ids(other) == whole[epoch][done:]
                assert other.current_epoch == epoch + 1
            if epoch < 2:
                assert ids(other) == whole[epoch + 1]  # later epochs are whole


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}, {}])
def test_with_torch_states_are_exact_however_far_ahead_workers_are(path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    of = liveset.StreamingDataLoader
    one = make(path, num_workers=options.get("num_workers", 0))
    first, second = ids(one), ids(one)
    loader = make(path, of=of, prefetch_factor=4 if options else None, **options)
    for done in (0, 1, 3, 8):
        loader.set_epoch(1)
        assert take(loader, done) == first[:done]
        state = stored(loader.state_dict())
        other = make(path, of=of, **options)
        other.load_state_dict(state)
        assert take(other, 8 - done and 1) == first[done : done + 1]
        other.load_state_dict(other.state_dict())  # of a loop that was left early, into a loader that was used
        assert ids(other) == first[done + 1 :]
        assert ids(other) == second


def test_another_number_of_workers_changes_nothing(path: Path) -> None:
    loader = make(path, num_workers=2)
    before = take(loader, 4)
    state = loader.state_dict()
    rest = ids(iter_rest(make(path, num_workers=2), state))
    for workers in (0, 1, 3):
        assert ids(iter_rest(make(path, num_workers=workers), state)) == rest
    assert sorted(i for batch in before + rest for i in batch) == list(range(23))


def iter_rest(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(stored(state))
    return loader


@given(seed=st.integers(0, 10_000))
def test_a_run_that_is_killed_at_random_is_the_run_that_is_not(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "killed"
    if not path.exists():
        write_dataset(path, [sample(i) for i in range(47)], chunk_size=6)
    choose = random.Random(seed)
    batch, workers, world = choose.randint(1, 5), choose.randint(0, 3), choose.randint(1, 2)
    options: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "rank": choose.randrange(world), "world_size": world}
    options["pad"] = choose.random() < 0.3
    loader = make(path, **options)
    whole = [batch for _ in range(3) for batch in ids(loader)]
    seen: list[list[int]] = []
    loader, state = make(path, **options), None
    while len(seen) < len(whole):
        if choose.random() < 0.5:  # a new process, or the one that is there
            loader = make(path, **options)
        if state is not None:
            loader.load_state_dict(state)
        for each in loader:
            seen.append(each["i"].tolist())
            if choose.random() < 0.2:
                break
        state = stored(loader.state_dict())
    assert seen[: len(whole)] == whole


def test_a_state_is_small_and_does_not_grow(tmp_path: Path) -> None:
    sizes = []
    for count in (10, 3000):
        write_dataset(tmp_path / "ds", [{"i": i} for i in range(count)], chunk_size=2)
        loader = make(tmp_path / "ds")
        take(loader, 2)
        sizes.append(len(json.dumps(loader.state_dict())))
    assert sizes[1] - sizes[0] < 20
    assert sizes[1] < 1500


def test_a_state_has_the_names_of_the_old_tool(path: Path) -> None:
    loader = make(path, num_workers=2)
    take(loader, 3)
    state = loader.state_dict()
    assert state.keys() == {"dataset", "current_epoch", "num_samples_yielded", "latest_worker_idx"}
    assert (state["current_epoch"], state["num_samples_yielded"], state["latest_worker_idx"]) == (1, 9, 0)
    names = (
        "num_samples_yielded num_workers batch_size current_epoch input_dir_path input_dir_url cache_dir_path item_loader drop_last seed"
    )
    names += " item_shuffle_window world_size shuffle subsampled_files region_of_interest state_version sample_in_epoch"
    names += " num_canonical_nodes initial_world_size initial_num_workers initial_batch_size initial_num_nodes"
    assert set(names.split()) <= state["dataset"].keys()
    told = {name: state["dataset"][name] for name in ("num_samples_yielded", "num_workers", "batch_size", "current_epoch", "version")}
    assert told == {"num_samples_yielded": 9, "num_workers": 2, "batch_size": 3, "current_epoch": 1, "version": 1}


def test_length_counts_what_came_before(path: Path) -> None:
    loader = make(path)
    take(loader, 3)
    other = iter_rest(make(path), loader.state_dict())
    assert len(other) == 8
    batches = iter(other)
    assert len(other) == 8
    assert len(list(batches)) == 5
    assert len(other) == 8


def test_an_epoch_that_a_trainer_sets_does_not_undo_a_state(path: Path) -> None:
    loader = make(path)
    whole = ids(loader)
    loader = make(path)
    take(loader, 3)
    other = iter_rest(make(path), loader.state_dict())
    other.set_epoch(1)
    assert ids(other) == whole[3:]
    other.load_state_dict(loader.state_dict())
    other.reset_state_dict()
    other.set_epoch(1)
    assert ids(other) == whole


# --- the dataset itself ------------------------------------------------------------------------------------------------------


def test_a_dataset_goes_on_by_itself(path: Path) -> None:
    ds = liveset.StreamingDataset(path, shuffle=True)
    whole = [row["i"] for row in ds]
    second = [row["i"] for row in ds]
    ds.set_epoch(1)
    other = liveset.StreamingDataset(path, shuffle=True)
    for done in (0, 7, 23):
        other.load_state_dict(stored(ds.state_dict(num_samples_yielded=done)))
        assert [row["i"] for row in other] == whole[done:]
        assert other.current_epoch == 2
        assert [row["i"] for row in other] == second
    other.load_state_dict(ds.state_dict(5))
    other.reset()
    assert [row["i"] for row in other] == whole
    state = ds.state_dict(8, 2, 4)
    other.load_state_dict(state)
    loader = LightLoader(other, batch_size=4, num_workers=2)  # takes what was loaded into the dataset
    assert len(ids(loader)) == len(loader) - 2 == 4
    assert loader.current_epoch == 1
    for wrong in (-1, 5, 24):
        with pytest.raises(ValueError, match="num_samples_yielded"):
            ds.state_dict(wrong, batch_size=3)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterator_of_a_dataset_has_a_state_of_its_own(path: Path, shuffle: bool) -> None:
    ds = liveset.StreamingDataset(path, shuffle=shuffle)
    whole, second = [row["i"] for row in ds], [row["i"] for row in ds]
    update(path, "k3")
    for done in (0, 4, 5, 7, 22, 23):
        ds.set_epoch(1)
        samples = iter(ds)
        for _ in range(done):
            next(samples)
        state = stored(samples.state_dict())
        other = liveset.StreamingDataset(path, shuffle=shuffle)
        again = iter(other)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [row["i"] for row in again] == whole[done:]
        assert again.state_dict()["samples"] == 23
        assert (other.current_epoch, other.version) == (2, 1)
        assert [row["i"] for row in other] == second
    other.set_batch_size(2)
    with pytest.raises(StateMismatch, match="another reader"):
        iter(other).load_state_dict(state)
    with pytest.raises(StateMismatch, match="no state of an iterator"):
        iter(ds).load_state_dict({})
    ds.load_state_dict(ds.state_dict())  # an empty state, as loaders that ask the iterators take it
    assert len(list(ds)) == 23
    ds.load_state_dict(ds.state_dict(3))
    with pytest.raises(RuntimeError, match="rest of an epoch"):
        iter(ds).state_dict()


@pytest.mark.filterwarnings("ignore:.*is deprecated")  # torchdata asks torch for an old name
@pytest.mark.parametrize("workers", [0, 2])
def test_the_stateful_loader_of_torchdata_goes_on(path: Path, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return torchdata.StatefulDataLoader(liveset.StreamingDataset(path, shuffle=True), batch_size=3, num_workers=workers)

    whole = ids(loader())
    for done in (0, 1, 4, len(whole) - 1):
        before = loader()
        assert take(before, done) == whole[:done]
        state = before.state_dict()
        after = loader()
        after.load_state_dict(state)
        assert ids(after) == whole[done:]
        assert len(ids(after)) == len(whole)


def test_loader_workers_of_torch_cannot_share_a_state(path: Path) -> None:
    data = pytest.importorskip("torch.utils.data")
    ds = liveset.StreamingDataset(path)
    ds.load_state_dict(ds.state_dict(5))
    with pytest.raises(RuntimeError, match="StreamingDataLoader"):
        list(data.DataLoader(ds, num_workers=2))
    assert [int(row["i"]) for row in data.DataLoader(ds, batch_size=None)] == list(range(5, 23))


# --- other grids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:drop_last=False", "ignore:rank")
@given(
    grids=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 4), st.integers(0, 4)),
        min_size=2,
        max_size=4,
    ),
    drop_last=st.sampled_from([None, False]),
    shuffle=st.booleans(),
)
@example(grids=[(3, 0, 3, 3), (3, 0, 3, 3), (3, 0, 3, 0), (1, 0, 1, 0)], drop_last=False, shuffle=False)  # one rank has fewer batches
def test_a_run_goes_on_with_other_ranks_workers_and_batches(
    tmp_path_factory: pytest.TempPathFactory, grids: list[tuple[int, int, int, int]], drop_last: bool | None, shuffle: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "elastic"
    if not path.exists():
        write_dataset(path, [sample(i) for i in range(53)], chunk_size=6)
    state, seen = None, []
    last = len(grids) - 1
    for number, (world, workers, batch, steps) in enumerate(grids):
        states, counts = [], []
        for rank in range(world):
            settings: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "shuffle": shuffle, "drop_last": drop_last}
            loader = make(path, rank=rank, world_size=world, **settings)
            if state is not None:
                loader.load_state_dict(state)
            told = len(loader)
            left = told - sum(stretch[-1] for stretch in state["dataset"]["stretches"]) if state is not None else told
            batches = ids(loader) if number == last else []
            if number != last:
                running = iter(loader)
                batches = ids(each for _, each in zip(range(min(steps, left)), running, strict=False))
            else:
                counts.append((len(batches), told))
            seen += [i for each in batches for i in each]
            states.append(stored(loader.state_dict()))
        # All ranks are as far, so that the state of any will do; a rank that has no more batches is behind.
        state = max(states, key=lambda state: state["dataset"]["stretches"][-1][-1])
    assert len(set(seen)) == len(seen)
    world, _, batch, _ = grids[-1]
    if drop_last is False or world == 1:
        assert sorted(seen) == list(range(53))
    else:
        assert len(set(counts)) == 1
        assert 53 - len(seen) < world * batch


@pytest.mark.filterwarnings("ignore:rank")
def test_a_run_of_two_by_two_goes_on_in_other_shapes_and_back(path: Path) -> None:
    shapes = [(2, 2), (1, 4), (4, 1), (1, 0), (2, 2)]
    state, seen = None, []
    for world, workers in shapes:
        for rank in range(world):
            loader = make(path, batch_size=1, num_workers=workers, rank=rank, world_size=world, drop_last=None)
            if state is not None:
                loader.load_state_dict(state)
            seen += [i for batch in take(loader, 1) for i in batch]
        state = stored(loader.state_dict())
        assert state["dataset"].get("resume_mode") == ("elastic" if (world, workers) != (2, 2) or len(seen) > 2 else None)
    for rank in range(2):
        loader = make(path, batch_size=1, num_workers=2, rank=rank, world_size=2)
        loader.load_state_dict(state)
        seen += [i for batch in ids(loader) for i in batch]
        assert len(ids(loader)) == 11
    assert len(seen) == len(set(seen)) == 22  # one of 23 is left out, since two ranks have as many


def test_a_run_that_has_read_nothing_yet_may_begin_on_any_grid(path: Path) -> None:
    loader = make(path)
    take(loader, 0)
    other = iter_rest(make(path, batch_size=5, num_workers=2), loader.state_dict())
    assert ids(other) == ids(make(path, batch_size=5, num_workers=2))
    loader.load_state_dict(stored(other.state_dict()))
    assert loader.state_dict()["dataset"]["stretches"] == [[1, 2, 5, 5]]


def test_the_state_of_another_rank_is_detected(path: Path) -> None:
    loader = make(path, rank=0, world_size=2)
    take(loader, 2)
    other = iter_rest(make(path, rank=1, world_size=2), loader.state_dict())
    with pytest.warns(UserWarning, match="rank 1 goes on from a state of rank 0"):
        rest = ids(other)
    assert rest == ids(make(path, rank=1, world_size=2))[2:]


# --- edited datasets -----------------------------------------------------------------------------------------------------------


def test_an_edited_dataset_goes_on_at_the_version_of_the_state(path: Path) -> None:
    loader = make(path)
    first, second = ids(loader), ids(loader)
    loader = make(path)
    take(loader, 3)
    state = stored(loader.state_dict())
    update(path, "k1", "k2")
    with liveset.dataset_update(path) as edit:
        del edit["k5"]
        edit.insert("new", {"i": 200, "id": "new"})
        edit.commit()
    write_dataset(path, [{"i": 900, "id": "x"}])
    other = iter_rest(make(path), state)
    assert other.dataset.version == 1
    assert ids(other) == first[3:]
    assert ids(other) == second
    assert other.state_dict()["dataset"]["version"] == 1
    assert other.dataset.refresh()
    assert other.state_dict()["dataset"]["version"] == 4  # what the next epoch reads
    assert ids(other) == [[900]]
    assert other.state_dict()["dataset"]["version"] == 4


def test_of_a_state_only_what_a_purge_erased_is_gone(path: Path) -> None:
    loader = make(path)
    first = ids(loader)
    loader = make(path)
    take(loader, 1)
    state = stored(loader.state_dict())
    erased = first[2][0]
    liveset.purge(path, [f"k{erased}"])
    with pytest.raises(liveset.BadSample, match="was erased by a purge"):
        ids(iter_rest(make(path), state))
    other = iter_rest(make(path, on_error="skip"), state)
    assert other.dataset.version == 1
    assert ids(other) == [[i for i in batch if i != erased] for batch in first[1:]]
    assert other.stats().skipped == 1


def test_replaced_samples_go_on_in_place_where_the_version_is_gone_or_another_was_chosen(path: Path) -> None:
    loader = make(path)
    first = ids(loader)
    loader = make(path)
    take(loader, 3)
    state = stored(loader.state_dict())
    replaced = {first[4][0]: 100, first[0][0]: 101}
    update(path, *(f"k{i}" for i in replaced))
    expected = [[replaced.get(i, i) for i in batch] for batch in first[3:]]
    assert expected != first[3:]
    other = make(path, version=2)
    with pytest.warns(UserWarning, match="state is of version 1.*goes on with version 2"):
        other.load_state_dict(state)
    assert ids(other) == expected
    liveset.vacuum(path, keep=1, grace=timedelta(0))
    other = make(path)
    with pytest.warns(UserWarning, match="state is of version 1"):
        other.load_state_dict(state)
    assert ids(other) == expected


@pytest.mark.parametrize("change", ["append", "delete", "overwrite", "compact"])
@pytest.mark.parametrize("gone", [False, True])
def test_data_that_moved_is_refused_with_what_changed(path: Path, change: str, gone: bool) -> None:
    loader = make(path)
    take(loader, 3)
    state = stored(loader.state_dict())
    with liveset.dataset_update(path) as edit:
        if change == "append":
            edit.insert("new", {"i": 200, "id": "new"})
        else:
            del edit["k5"]
        edit.commit()
    if change == "overwrite":
        write_dataset(path, [sample(i) for i in range(23)], chunk_size=5, key="id")
    if change == "compact":
        liveset.compact(path)
    newest = liveset.StreamingDataset(path).version
    if gone:
        liveset.vacuum(path, keep=1, grace=timedelta(0))
    other = make(path) if gone else make(path, version=newest)
    before = other.state_dict()
    way = "That version is gone" if gone else "version=1"
    with pytest.raises(StateMismatch, match=rf"version 1 of .*23 samples.*{way}.*start afresh"):
        other.load_state_dict(state)
    assert other.state_dict() == before
    assert len(ids(other)) == len(other)


def test_a_state_of_another_dataset_is_detected(path: Path, tmp_path: Path) -> None:
    loader = make(path)
    take(loader, 3)
    state = loader.state_dict()
    for other in ("twin", "longer"):
        write_dataset(tmp_path / other, [sample(i) for i in range(23)], chunk_size=5, key="id")
    write_dataset(tmp_path / "longer", [sample(i) for i in range(23)], chunk_size=5, key="id")
    for other in ("twin", "longer"):
        with pytest.raises(StateMismatch, match="another dataset"):
            make(tmp_path / other).load_state_dict(state)
    (tmp_path / "ds").rename(tmp_path / "moved")
    assert len(ids(iter_rest(make(tmp_path / "moved"), state))) == 5  # it is the same wherever it lies


def test_datasets_of_another_program_are_told_apart_by_path_and_shape(path: Path, tmp_path: Path) -> None:
    from tests.support.foreign import make_foreign

    write_dataset(tmp_path / "twin", [sample(i) for i in range(23)], chunk_size=5)
    write_dataset(tmp_path / "foreign", [sample(i) for i in range(23)], chunk_size=5)
    make_foreign(tmp_path / "foreign")
    loader = make(tmp_path / "foreign")
    first = ids(loader)
    take(loader, 3)
    state = loader.state_dict()
    assert state["dataset"]["version_id"] is None
    with pytest.raises(StateMismatch, match="another dataset|cannot go on"):
        make(tmp_path / "twin").load_state_dict(state)
    loader.set_epoch(1)
    take(loader, 3)
    assert ids(iter_rest(make(tmp_path / "foreign"), loader.state_dict())) == first[3:]
    (tmp_path / "foreign").rename(tmp_path / "moved")
    with pytest.raises(StateMismatch, match="The provided `input_dir path` state doesn't match the current one"):
        make(tmp_path / "moved").load_state_dict(state)


def test_other_settings_are_refused_or_overridden(path: Path) -> None:
    loader = make(path)
    first = ids(loader)
    loader = make(path)
    take(loader, 3)
    state = loader.state_dict()
    for name, loader in {
        "shuffle": make(path, shuffle=False),
        "drop_last": make(path, drop_last=True),
        "seed": LightLoader(liveset.StreamingDataset(path, shuffle=True, seed=7), batch_size=3),
        "item_shuffle_window": LightLoader(liveset.StreamingDataset(path, shuffle=True, item_shuffle_window=2), batch_size=3),
    }.items():
        with pytest.raises(StateMismatch, match=f"The provided `{name}` state doesn't match the current one. Found"):
            loader.load_state_dict(state)
    part = LightLoader(liveset.StreamingDataset(path, shuffle=True, subsample=0.5), batch_size=3)
    with pytest.raises(StateMismatch, match="another part of it is read"):
        part.load_state_dict(state)
    forced = make(path, shuffle=False, forced=True)
    with pytest.warns(UserWarning, match="`shuffle`"):
        forced.load_state_dict(state)
    assert ids(forced) == first[3:]  # the epoch ends as it began
    assert ids(forced)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"dataset": {}},
        {"dataset": {"seed": 1}},
        [],
        {"dataset": None},
    ],
)
def test_what_is_no_state_is_refused(path: Path, state: Any) -> None:
    with pytest.raises(StateMismatch, match="this is no state"):
        make(path).load_state_dict(state)


def test_a_damaged_position_is_refused(path: Path) -> None:
    loader = make(path)
    take(loader, 3)
    state = loader.state_dict()
    state["dataset"]["stretches"][-1][-1] = 9
    with pytest.raises(StateMismatch, match="greater than the dataset length"):
        make(path).load_state_dict(state)
    for wrong in ([], [[0, 1, 1, 0]], [[1, 1, 1, -1]], [[1, 1]], 3):
        state["dataset"]["stretches"] = wrong
        with pytest.raises(StateMismatch, match="this is no state"):
            make(path).load_state_dict(state)


def test_parts_go_on_too(path: Path) -> None:
    for part in (range(20, 2, -1), [5, 5, 5, 7, 8, 21]):
        loader = LightLoader(liveset.StreamingDataset(path, shuffle=True).subset(part), batch_size=2)
        whole = ids(loader)
        loader.set_epoch(1)
        take(loader, 1)
        other = LightLoader(liveset.StreamingDataset(path, shuffle=True).subset(part), batch_size=2)
        assert ids(iter_rest(other, loader.state_dict())) == whole[1:]
    loader = LightLoader(liveset.StreamingDataset(path, shuffle=True, subsample=1.5), batch_size=2)
    whole = ids(loader)
    loader.set_epoch(1)
    take(loader, 4)
    update(path, "k3")
    other = LightLoader(liveset.StreamingDataset(path, shuffle=True, subsample=1.5), batch_size=2)
    assert ids(iter_rest(other, loader.state_dict())) == whole[4:]
    assert other.dataset.version == 1
