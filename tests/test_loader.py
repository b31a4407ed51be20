"""StreamingDataLoader: batches, epochs, workers, ranks, bad samples, with torch and without."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset.errors import BadSample, CollateError, Corrupt, Erased, NotFound
from liveset.format.codec import Compression
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from tests.support.writing import write_dataset

EPOCHS = [[8, 9, 4, 5, 6, 7, 1, 3, 0, 2], [7, 4, 5, 6, 3, 2, 1, 0, 8, 9], [8, 9, 0, 1, 2, 3, 4, 7, 5, 6]]

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]

Loaders = Callable[..., Any]


@pytest.fixture(params=["torch", "light"])
def loader_of(request: pytest.FixtureRequest) -> Loaders:
    if request.param == "light":
        return LightLoader
    pytest.importorskip("torch")
    return liveset.StreamingDataLoader


@pytest.fixture
def torch_loader() -> Loaders:
    pytest.importorskip("torch")
    return liveset.StreamingDataLoader


def make(path: Path, count: int = 10, chunk_size: int = 4, key: str | None = None) -> Path:
    rows = [{"i": i, "text": f"t{i}", "vec": np.full(3, i, np.float32)} for i in range(count)]
    write_dataset(path, rows, chunk_size=chunk_size, key=key)
    return path


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten samples in chunks of 4, 4 and 2."""
    return make(tmp_path / "ten")


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [i for batch in ids(batches) for i in batch]


# --- batches and epochs ----------------------------------------------------------------------------------------------------


def test_batches_have_the_order_of_the_old_tool(ten: Path, loader_of: Loaders) -> None:
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=4, shuffle=True)
    assert len(loader) == 3
    assert loader.current_epoch == 0
    for number, order in enumerate(EPOCHS, 1):
        assert ids(loader) == [order[:4], order[4:8], order[8:]]
        assert loader.current_epoch == number
    loader.set_epoch(2)
    assert flat(loader) == EPOCHS[1]


def test_it_is_a_loader_of_torch(ten: Path, torch_loader: Loaders) -> None:
    import torch
    from torch.utils.data import DataLoader

    ds = liveset.StreamingDataset(ten)
    loader = torch_loader(ds, batch_size=4)
    assert isinstance(loader, DataLoader)
    assert id(loader.dataset) == id(ds)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (4, 0, False)
    (first, *_) = loader
    assert first["vec"].dtype == torch.float32
    assert first["vec"].shape == (4, 3)
    assert first["text"] == ["t0", "t1", "t2", "t3"]


def test_without_torch_batches_are_numpy_arrays(ten: Path) -> None:
    script = """
import sys
sys.modules["torch"] = None
import liveset
loader = liveset.StreamingDataLoader(liveset.StreamingDataset(sys.argv[1]), batch_size=4, num_workers=2)
(first, *_) = loader
assert first["i"].tolist() == [0, 1, 2, 3] and first["text"] == ["t0", "t1", "t2", "t3"], first
assert type(first["vec"]).__name__ == "ndarray" and first["vec"].shape == (4, 3)
print(liveset.StreamingDataLoader)
"""
    done = subprocess.run([sys.executable, "-c", script, ten], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "liveset.StreamingDataLoader" in done.stdout


def test_batches_are_those_of_the_old_tool_without_batches(ten: Path, loader_of: Loaders) -> None:
    loader = loader_of(liveset.StreamingDataset(ten, transform=lambda row: row["i"]), batch_size=None)
    assert list(loader) == list(range(10))
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=4, collate_fn=len)
    assert list(loader) == [4, 4, 2]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}])
def test_workers_read_in_turn(ten: Path, loader_of: Loaders, options: dict[str, Any]) -> None:
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=2, shuffle=True, **options)
    one = LightLoader(liveset.StreamingDataset(ten), batch_size=2, shuffle=True, num_workers=2)
    assert len(loader) == 5
    for _ in range(3):
        assert ids(loader) == ids(one)
    assert sorted(flat(loader)) == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(ten: Path, torch_loader: Loaders, method: str) -> None:
    options = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": method, "persistent_workers": True}
    loader = torch_loader(liveset.StreamingDataset(ten), shuffle=True, **options)
    assert [flat(loader) for _ in EPOCHS] == EPOCHS


def test_iterators_are_independent(ten: Path, loader_of: Loaders) -> None:
    for options in WORKERS:
        loader = loader_of(liveset.StreamingDataset(ten), batch_size=2, **options)
        first = iter(loader)
        assert next(first)["i"].tolist() == [0, 1]
        second = iter(loader)
        both = [ids([a, b]) for a, b in zip(first, second, strict=False)]
        assert len(both) == 4
        assert flat(second)
        assert list(first) == []
        with pytest.raises(StopIteration):
            next(first)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_may_be_left_early(ten: Path, torch_loader: Loaders, persistent: bool) -> None:
    import multiprocessing

    loader = torch_loader(liveset.StreamingDataset(ten), batch_size=1, num_workers=2, persistent_workers=persistent)
    workers = set()
    for _ in range(4):
        for batch in loader:
            assert batch["i"].tolist() == [0]
            break
        workers |= {process.pid for process in multiprocessing.active_children()}
    assert sorted(flat(loader)) == list(range(10))
    assert len(workers) == (2 if persistent else 0)
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_pass_stays_at_its_version_and_the_next_one_moves(ten: Path, loader_of: Loaders) -> None:
    for options in WORKERS[::2]:
        make(ten)
        ds = liveset.StreamingDataset(ten)
        loader = loader_of(ds, batch_size=2, **options)
        running = iter(loader)
        seen = ids([next(running)])
        write_dataset(ten, [{"i": i} for i in range(70, 74)])
        assert ds.refresh()
        assert sorted(i for batch in [*seen, *ids(running)] for i in batch) == list(range(10))
        assert len(loader) == 2
        assert sorted(flat(loader)) == [70, 71, 72, 73]
        del loader, running  # frames that an error refers to would keep them, and torch is slow to end workers of garbage


def test_length_has_no_side_effects(ten: Path, loader_of: Loaders) -> None:
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=3, num_workers=2)
    before = loader.state_dict()
    assert [len(loader), len(loader)] == [4, 4]
    assert loader.state_dict() == before
    assert len(list(loader)) == 4


def test_arguments_are_checked(ten: Path, loader_of: Loaders) -> None:
    ds = liveset.StreamingDataset(ten)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"shuffle": "x"}, "shuffle must be"),
        ({"drop_last": "x"}, "drop_last must be"),
        ({"pad": "x"}, "pad must be"),
        ({"rank": 1}, "go together"),
        ({"rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
        ({"rank": float("inf"), "world_size": 2}, "rank=inf of world_size=2"),
        ({"rank": 0, "world_size": 2.5}, "rank=0 of world_size=2.5"),
        ({"prefetch_factor": "x", "num_workers": 1}, "prefetch_factor must be"),
        ({"prefetch_factor": -1, "num_workers": 1}, "prefetch_factor must be"),
        ({"persistent_workers": "x"}, "persistent_workers must be"),
        ({"pin_memory": 1}, "pin_memory must be"),
        ({"collate_fn": "x"}, "collate_fn must be"),
        ({"worker_init_fn": 1}, "worker_init_fn must be"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"timeout": "x"}, "timeout must be"),
    ]
    for wrong, phrase in cases:
        with pytest.raises(ValueError, match=phrase):
            loader_of(ds, **wrong)
    with pytest.raises(RuntimeError, match="The provided dataset should be either an instance of"):
        loader_of([1, 2, 3])
    with pytest.raises(ValueError, match="an epoch is a number from 1 on"):
        loader_of(ds).set_epoch(0)
    with pytest.raises(NotImplementedError, match="profile_batches="):
        loader_of(ds, profile_batches=True)


def test_arguments_that_would_change_the_order_or_are_unknown_are_refused(ten: Path, loader_of: Loaders) -> None:
    ds = liveset.StreamingDataset(ten)
    with pytest.raises(ValueError, match="in_order"):
        loader_of(ds, in_order=False)
    with pytest.raises(TypeError, match="batchsize"):
        loader_of(ds, batchsize=4)
    assert flat(loader_of(ds, timeout=0, generator=None, in_order=True)) == list(range(10))


def alike(a: Any, b: Any) -> bool:
    """Whether two batches are the same down to types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all()) if hasattr(a, "dtype") else bool(a == b)


@pytest.mark.parametrize("compression", [None, Compression("zstd", "sample"), Compression("zstd", "batch", 3)])
def test_batches_that_are_decoded_at_once_are_those_of_single_samples(
    tmp_path: Path, loader_of: Loaders, compression: Compression | None
) -> None:
    rows = [
        {"i": i, "x": i / 3, "ok": i % 2 == 0, "t": "x" * i, "b": bytes(i), "v": np.full((2, 3), i, np.int16), "n": [i, (i, {"d": 2 * i})]}
        for i in range(17)
    ]
    write_dataset(tmp_path / "ds", rows, compression=compression)
    for fields in (None, ["i", "n"]):
        ds = liveset.StreamingDataset(tmp_path / "ds", shuffle=True, fields=fields)
        at_once = loader_of(ds, batch_size=5)
        collate = at_once.collate_fn
        single = loader_of(ds, batch_size=5, collate_fn=lambda samples, collate=collate: collate(samples))
        assert all(map(alike, at_once, single))
        at_once.set_epoch(1)
        in_worker = loader_of(ds, batch_size=5, num_workers=1)
        assert all(map(alike, in_worker, at_once))


def mixed(samples: list[Any]) -> Any:
    import torch

    numbers = torch.tensor([sample["i"] for sample in samples])
    return {
        "i": numbers,
        "half": numbers.bfloat16(),
        "large": numbers.repeat(100_000),
        "turned": torch.zeros(2, 3).T,
        "pair": (numbers, [numbers + 1, "text", None]),
        "empty": [],
        "texts": ["a", "b"],
        "sparse": numbers.to_sparse(),
    }


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_a_collate_function_returns_comes_from_workers_as_it_is(ten: Path, torch_loader: Loaders) -> None:
    import torch

    for options in ({"num_workers": 0}, {"num_workers": 1}):
        (batch,) = torch_loader(liveset.StreamingDataset(ten), batch_size=10, collate_fn=mixed, **options)
        assert batch.keys() == mixed([{"i": 1}]).keys()
        assert batch["half"].dtype == torch.bfloat16
        assert len(batch["large"]) == 1_000_000
        assert batch["turned"].tolist() == [[0, 0]] * 3
        assert type(batch["pair"]) is tuple
        assert batch["pair"][1][0].tolist() == list(range(1, 11))
        assert (batch["pair"][1][1:], batch["empty"], batch["texts"]) == (["text", None], [], ["a", "b"])
        assert batch["sparse"].is_sparse
        batch["i"] += 1  # is its own
        assert batch["i"].tolist() == list(range(1, 11))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("rows", "field", "phrase"),
    [
        ([{"i": 1, "v": 2**70}] * 2, "v", "an int beyond 64 bits"),
        ([{"v": 1}, {"v": None}], "v", "a number in some samples and None in others"),
        ([{"v": {"at": datetime(2020, 1, 1)}}] * 2, "v.at", "a datetime.datetime"),  # noqa: DTZ001
        ([{"v": [1]}, {"v": [1, 2]}], "v", "sequences of different lengths"),
        ([{"v": {"w": 1}}, {"v": {}}], "v.w", "values in some samples, and is missing in others"),
        ([{"v": {"w": 1}}, {"v": None}], "v", "a mapping in some samples and None in others"),
    ],
)
def test_what_cannot_be_in_a_batch_is_named(ten: Path, loader_of: Loaders, workers: int, rows: list[Any], field: str, phrase: str) -> None:
    ds = liveset.StreamingDataset(ten, transform=lambda row: rows[row["i"] % 2])
    loader = iter(loader_of(ds, batch_size=2, num_workers=workers))
    with pytest.raises(CollateError, match=f"^field '{field}' cannot be in a batch: it holds {phrase}") as caught:
        next(loader)
    assert caught.value.field == field
    del loader, caught


def test_arrays_that_torch_does_not_know_are_named(ten: Path, torch_loader: Loaders) -> None:
    times = np.zeros(2, "M8[s]")
    ds = liveset.StreamingDataset(ten, transform=lambda row: {"v": {"at": times}})
    with pytest.raises(CollateError, match=r"field 'v.at' .* datetime64\[s\], for which torch has no dtype"):
        list(torch_loader(ds, batch_size=2))
    assert LightLoader(ds, batch_size=2).__iter__().__next__()["v"]["at"].shape == (2, 2)


def test_mixtures_of_different_fields_are_no_batch(tmp_path: Path, loader_of: Loaders) -> None:
    for name in ("v", "w"):
        write_dataset(tmp_path / name, [{"i": i, name: i} for i in range(10)])
    mix = liveset.CombinedStreamingDataset([liveset.StreamingDataset(tmp_path / name) for name in ("v", "w")])
    with pytest.raises(CollateError, match="field '[vw]' .* is missing in others"):
        list(loader_of(mix, batch_size=20))
    assert len(list(mix)) == 20


def test_samples_that_do_not_fit_into_a_batch_are_an_error_of_the_collate_function(tmp_path: Path, loader_of: Loaders) -> None:
    write_dataset(tmp_path / "ds", [{"v": np.zeros(1 + i % 2)} for i in range(4)])
    with pytest.raises(RuntimeError, match=r"equal size|different shapes"):
        list(loader_of(liveset.StreamingDataset(tmp_path / "ds"), batch_size=4))
    assert len(list(loader_of(liveset.StreamingDataset(tmp_path / "ds"), batch_size=1))) == 4


# --- ranks -----------------------------------------------------------------------------------------------------------------


LAUNCHERS = [
    {"WORLD_SIZE": "2", "RANK": "1"},
    {"WORLD_SIZE": "2", "GLOBAL_RANK": "1"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"},
]


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_ranks_are_read_when_an_epoch_begins(
    ten: Path, loader_of: Loaders, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    loader = loader_of(liveset.StreamingDataset(ten, shuffle=True))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert len(loader) == 5
    assert flat(loader) == [7, 1, 3, 0, 2]
    assert flat(loader_of(liveset.StreamingDataset(ten, shuffle=True), rank=0, world_size=2)) == [8, 9, 4, 5, 6]


def test_a_batch_script_of_slurm_is_one_process(ten: Path, loader_of: Loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert flat(loader_of(liveset.StreamingDataset(ten))) == list(range(10))


def test_wrong_variables_are_an_error(ten: Path, loader_of: Loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="rank two of 2 ranks"):
        iter(loader_of(liveset.StreamingDataset(ten)))


def test_uneven_ranks_are_warned_of_and_read_everything(ten: Path, loader_of: Loaders) -> None:
    seen = []
    for rank in range(3):
        loader = loader_of(liveset.StreamingDataset(ten), batch_size=2, drop_last=False, rank=rank, world_size=3)
        with pytest.warns(UserWarning, match="pad=True"):
            mine = ids(loader)
        assert len(mine) == len(loader)
        ids(loader)  # one warning is enough
        seen += [i for batch in mine for i in batch]
    assert sorted(seen) == list(range(10))


def test_padding_makes_ranks_equal(ten: Path, loader_of: Loaders) -> None:
    ranks = [ids(loader_of(liveset.StreamingDataset(ten), batch_size=3, pad=True, rank=rank, world_size=2)) for rank in range(2)]
    assert [[len(batch) for batch in batches] for batches in ranks] == [[3, 3], [3, 3]]
    assert {i for batches in ranks for batch in batches for i in batch} == set(range(10))


def test_too_few_samples_for_all_ranks_are_one_error_on_each(tmp_path: Path, loader_of: Loaders) -> None:
    write_dataset(tmp_path / "ds", [{"i": i} for i in range(3)])
    for rank in range(2):
        loader = loader_of(liveset.StreamingDataset(tmp_path / "ds"), batch_size=2, num_workers=2, rank=rank, world_size=2)
        assert len(loader) == 0
        with pytest.raises(ValueError, match="3 samples are not one batch of 2 for each of 2 ranks"):
            iter(loader)
        loader = LightLoader(liveset.StreamingDataset(tmp_path / "ds"), batch_size=1, num_workers=4, rank=rank, world_size=2)
        assert len(flat(loader)) == 1


def check_grid(path: Path, total: int, world: int, workers: int, batch: int, drop_last: bool | None, shuffle: bool) -> None:
    """Equal batches, the length that is told, no sample twice, and no loss but that of drop_last."""
    ranks: list[list[list[int]]] = []
    for rank in range(world):
        ds = liveset.StreamingDataset(path, shuffle=shuffle, drop_last=drop_last)
        loader = LightLoader(ds, batch_size=batch, num_workers=workers, rank=rank, world_size=world)
        told = len(loader)
        if drop_last is not False and world > 1 and total < world * batch:
            with pytest.raises(ValueError, match="not one batch"):
                iter(loader)
            ranks.append([])
        else:
            ranks.append(ids(loader))
        assert len(ranks[-1]) == told == len(loader)
    seen = [i for batches in ranks for batch in batches for i in batch]
    assert len(set(seen)) == len(seen)
    if drop_last is False or (drop_last is None and world == 1):
        assert sorted(seen) == list(range(total))
    else:
        assert len({len(batches) for batches in ranks}) == 1
        assert total - len(seen) < world * batch


@pytest.mark.filterwarnings("ignore:drop_last=False")
@given(
    total=st.integers(1, 101),
    chunk=st.sampled_from([3, 7, 40, 101]),
    world=st.integers(1, 4),
    workers=st.integers(0, 3),
    batch=st.integers(1, 8),
    drop_last=st.sampled_from([None, True, False]),
    shuffle=st.booleans(),
)
def test_counts_and_lengths_tell_the_truth(
    tmp_path_factory: pytest.TempPathFactory,
    total: int,
    chunk: int,
    world: int,
    workers: int,
    batch: int,
    drop_last: bool | None,
    shuffle: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"grid-{total}-{chunk}"
    if not path.exists():
        write_dataset(path, [{"i": i} for i in range(total)], chunk_size=chunk)
    check_grid(path, total, world, workers, batch, drop_last, shuffle)


def row(i: int) -> dict[str, Any]:
    return {"i": i, "id": f"k{i}"}


@pytest.mark.filterwarnings("ignore:drop_last=False")
def test_counts_and_lengths_tell_the_truth_after_edits(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    liveset.optimize(row, range(20), path, num_workers=1, chunk_size=6, key_fn="id")
    liveset.optimize(row, range(20, 33), path, num_workers=1, chunk_size=5, key_fn="id", mode="append")
    grids = list(product([1, 3], [0, 2], [1, 4], [None, False], [True, False]))
    for world, workers, batch, drop_last, shuffle in grids:
        check_grid(path, 33, world, workers, batch, drop_last, shuffle)
    with liveset.dataset_update(path) as update:
        update["k7"] = {"i": 32, "id": "k7"}
        update["k32"] = {"i": 7, "id": "k32"}
        update.commit()
    for world, workers, batch, drop_last, shuffle in grids:
        check_grid(path, 33, world, workers, batch, drop_last, shuffle)
    with liveset.dataset_update(path) as update:
        for key in ("k30", "k31", "k7"):  # k7 is number 32 by now
            del update[key]
        update["k32"] = {"i": 7, "id": "k32"}
        update.commit()
    for world, workers, batch, drop_last, shuffle in grids:
        check_grid(path, 30, world, workers, batch, drop_last, shuffle)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore:drop_last=False")
@pytest.mark.parametrize("total", range(1, 102))
def test_counts_and_lengths_tell_the_truth_in_the_whole_grid(total: int, tmp_path: Path) -> None:
    """Every third dataset as it was made, every third grown by an append, and every third edited as well."""
    path, made = tmp_path / "ds", total if total % 3 == 0 else (total + 1) // 2
    liveset.optimize(row, range(made), path, num_workers=1, chunk_size=1 + total % 13, key_fn="id")
    if made < total:
        liveset.optimize(row, range(made, total), path, num_workers=1, chunk_size=1 + total % 5, key_fn="id", mode="append")
    if total % 3 == 2:
        first, last = 0, total - 1
        with liveset.dataset_update(path) as update:
            update[f"k{first}"], update[f"k{last}"] = {"i": last, "id": f"k{first}"}, {"i": first, "id": f"k{last}"}
            update.commit()
    choices = product(range(1, 5), range(4), range(1, 9), [None, True, False], [True, False])
    for world, workers, batch, drop_last, shuffle in choices:
        check_grid(path, total, world, workers, batch, drop_last, shuffle)


def test_two_processes_with_a_process_group(ten: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = """
import sys, liveset, torch, torch.distributed as dist
from torch.utils.data import DataLoader
path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
ds = liveset.StreamingDataset(path, shuffle=True)
loader = liveset.StreamingDataLoader(ds, batch_size=1, num_workers=1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
steps = 0
for epoch in range(2):
    mine = [batch["i"] for batch in loader]
    assert len(mine) == len(loader) == 5
    both = [torch.zeros(5, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(both, torch.cat(mine))
    assert sorted(torch.cat(both).tolist()) == list(range(10)), both
    state = loader.state_dict()["dataset"]
    assert (state["rank"], state["world_size"]) == (rank, 2)
plain = DataLoader(liveset.StreamingDataset(path), num_workers=1, multiprocessing_context="spawn")  # workers without a process group
plain = [int(batch["i"]) for batch in plain]
assert plain == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]][rank], plain
dist.barrier()
dist.destroy_process_group()
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, ten, tmp_path / "store", str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told


# --- bad samples -------------------------------------------------------------------------------------------------------------


def fail_at(row: dict[str, Any], bad: tuple[int, ...]) -> dict[str, Any]:
    if row["i"] in bad:
        raise ZeroDivisionError("no such luck")
    return row


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named(tmp_path: Path, loader_of: Loaders, workers: int) -> None:
    path = make(tmp_path / "keyed", key="text")
    ds = liveset.StreamingDataset(path, transform=lambda row: fail_at(row, (5,)))
    batches = iter(loader_of(ds, batch_size=2, num_workers=workers))
    told = r"^the transform failed on the sample at position 5 \(key 't5', slot 1 of chunk-.*ZeroDivisionError: no such luck"
    with pytest.raises(BadSample, match=told) as caught:
        list(batches)
    assert (caught.value.position, caught.value.key, caught.value.slot) == (5, "t5", 1)
    assert caught.value.chunk.startswith("chunk-")
    shown = f"{caught.value.__cause__!r} {getattr(caught.value, '__notes__', '')}"
    assert "ZeroDivisionError" in shown
    del batches, caught  # which refer to each other through this frame, and torch is slow to end workers of garbage


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_can_be_skipped_and_are_counted(ten: Path, loader_of: Loaders, workers: int) -> None:
    ds = liveset.StreamingDataset(ten, transform=lambda row: fail_at(row, (2, 4, 5)))
    loader = loader_of(ds, batch_size=2, num_workers=workers, on_error="skip")
    assert sorted(flat(loader)) == [0, 1, 3, 6, 7, 8, 9]
    stats = loader.stats()
    assert (stats.skipped, stats.samples, stats.batches, stats.epoch) == (3, 7, 4, 1)
    ds = liveset.StreamingDataset(ten, transform=lambda row: fail_at(row, (4, 5, 6, 7)))
    with pytest.raises(BadSample, match="one batch less than the others"):
        list(loader_of(ds, batch_size=2, on_error="skip", rank=1, world_size=2))


def test_damage_is_a_bad_sample_and_a_lost_file_is_not(ten: Path, loader_of: Loaders) -> None:
    first, *_ = sorted(ten.glob("chunk-*"))
    whole = first.read_bytes()
    first.write_bytes(whole[:30])
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=2)
    with pytest.raises(BadSample, match="position 0") as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, Corrupt)
    assert "liveset repair" in str(caught.value)
    assert "delete" not in str(caught.value)
    first.unlink()
    with pytest.raises(NotFound, match=first.name):
        list(loader_of(liveset.StreamingDataset(ten), batch_size=2, on_error="skip"))


@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_error_a_pass_is_over_and_goes_on_with_what_failed(ten: Path, loader_of: Loaders, workers: int) -> None:
    lost = sorted(ten.glob("chunk-*"))[1]
    whole = ids(loader_of(liveset.StreamingDataset(ten), batch_size=2, num_workers=workers))
    away = lost.rename(ten / "away")
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=2, num_workers=workers)
    batches = iter(loader)
    for _ in range(3):
        with pytest.raises(NotFound, match=lost.name):
            list(batches)
    del batches
    away.rename(lost)
    state = loader.state_dict()
    assert 0 < state["num_samples_yielded"] < 10
    assert loader.stats().batches == state["num_samples_yielded"] // 2
    other = loader_of(liveset.StreamingDataset(ten), batch_size=2, num_workers=workers)
    other.load_state_dict(state)
    assert ids(other) == whole[loader.stats().batches :]


STUCK = """
import os, sys, threading
import liveset
from liveset.read.lightloader import StreamingDataLoader

def wait(sample):
    os.write(1, b"begun\\n")  # in one piece, from both threads
    threading.Event().wait(60)

list(StreamingDataLoader(liveset.StreamingDataset(sys.argv[1], transform=wait), num_workers=2))
"""


def test_an_interrupt_does_not_wait_for_what_threads_read(ten: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, ten], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2  # one of them at least in a thread
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == -signal.SIGINT
        finally:
            process.kill()


def test_a_bad_sample_ends_a_pass_too(ten: Path, loader_of: Loaders) -> None:
    bad = [5]
    ds = liveset.StreamingDataset(ten, transform=lambda row: fail_at(row, tuple(bad)))
    loader = loader_of(ds, batch_size=2)
    batches = iter(loader)
    assert ids([next(batches), next(batches)]) == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(BadSample, match="position 5"):
            next(batches)
    bad.clear()
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert ids(loader) == [[4, 5], [6, 7], [8, 9]]


def test_erased_samples_are_told_as_such(tmp_path: Path, loader_of: Loaders) -> None:
    path = make(tmp_path / "keyed", key="text")
    before = liveset.StreamingDataset(path, version=1)
    liveset.purge(path, ["t3"])
    with pytest.raises(BadSample, match=r"position 3 \(.*\) was erased by a purge, for good: on_error='skip'") as caught:
        list(loader_of(before, batch_size=2))
    assert isinstance(caught.value.__cause__, Erased)
    assert sorted(flat(loader_of(before, batch_size=2, on_error="skip"))) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


# --- rates, leaks, other loaders ---------------------------------------------------------------------------------------------


def test_stats_tell_rates(ten: Path, loader_of: Loaders) -> None:
    loader = loader_of(liveset.StreamingDataset(ten), batch_size=4)
    assert loader.stats().samples == 0
    batches = iter(loader)
    next(batches)
    assert (loader.stats().samples, loader.stats().batches) == (4, 1)
    list(batches)
    stats = loader.stats()
    size = sum(file.stat().st_size for file in ten.glob("chunk-*"))
    assert stats.samples == 10
    assert stats.bytes == size
    assert 0 < stats.waited <= stats.seconds
    assert stats.samples_per_second == 10 / stats.seconds
    assert loader.stats().seconds == stats.seconds


def test_iterators_leave_no_threads_and_files_behind(ten: Path) -> None:
    ds = liveset.StreamingDataset(ten)
    list(ds)
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    loader = LightLoader(ds, batch_size=2, num_workers=2)
    for _ in range(300):
        next(iter(loader))
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("liveset-loader"):
            thread.join(10)
    assert threading.active_count() <= threads  # those of other tests may end meanwhile
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("code", ["next(iter(loader)); raise SystemExit(7)", "for _ in loader: raise SystemExit(7)"])
def test_the_program_ends_in_the_middle_of_a_pass(ten: Path, loader_of: Loaders, code: str) -> None:
    where = "liveset.read.lightloader" if loader_of is LightLoader else "liveset"
    script = f"""
import sys, liveset
from {where} import StreamingDataLoader
loader = StreamingDataLoader(liveset.StreamingDataset(sys.argv[1]), batch_size=1, num_workers=2)
{code}
"""
    done = subprocess.run([sys.executable, "-c", script, ten], capture_output=True, text=True, timeout=100)
    assert done.returncode == 7, done.stderr
    assert done.stderr == ""


def test_a_plain_loader_of_torch_reads_each_sample_once(ten: Path) -> None:
    data = pytest.importorskip("torch.utils.data")
    for workers in (0, 1, 2):
        ds = liveset.StreamingDataset(ten, shuffle=True)
        ds.set_batch_size(4)
        ds.set_num_workers(workers)
        loader = data.DataLoader(ds, batch_size=4, num_workers=workers)
        batches = ids(loader)
        assert sorted(i for batch in batches for i in batch) == list(range(10))
        assert len(batches) == len(loader)
        one = LightLoader(liveset.StreamingDataset(ten, shuffle=True), batch_size=4, num_workers=workers)
        assert batches == ids(one)


def test_samples_are_their_own(ten: Path) -> None:
    """Batches outlive the dataset, and may be written to."""

    def kept() -> Iterator[Any]:
        ds = liveset.StreamingDataset(ten)
        yield from LightLoader(ds, batch_size=5)
        ds.close()

    batches = list(kept())
    gc.collect()
    for number, batch in enumerate(batches):
        batch["vec"] += 1
        assert batch["vec"][:, 0].tolist() == [5 * number + i + 1 for i in range(5)]
