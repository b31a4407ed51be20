"""The training loop over an object store: batches, workers, states, and chunks that are fetched ahead."""

from __future__ import annotations

import json
from collections import Counter, deque
from itertools import groupby
from typing import Any

import pytest

import liveset
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from liveset.storage import Place
from tests.support.remote import place_at
from tests.support.services import RemoteFolder
from tests.support.stub_server import StubServer

pytestmark = pytest.mark.timeout(120)


def make(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "i": number, "data": bytes([number]) * 2_000}


@pytest.fixture(scope="module")
def place(seaweedfs: Any) -> Place:
    folder: RemoteFolder = seaweedfs.fresh()
    liveset.optimize(make, range(60), place_at(folder), chunk_size=8, key_fn="id", num_workers=1, verbose=False)
    return place_at(folder)


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loop_over_a_bucket_stops_and_goes_on(place: Place, options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(place, shuffle=True), batch_size=7, **options)
    whole, second = ids(loader), ids(loader)
    assert sorted(i for batch in whole for i in batch) == list(range(60))
    loader.set_epoch(1)
    for number, batch in enumerate(loader):
        assert batch["i"].tolist() == whole[number]
        if number == 3:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["dataset"]["input_dir_path"], state["dataset"]["input_dir_url"]) == (None, loader.dataset.path)
    other = liveset.StreamingDataLoader(liveset.StreamingDataset(place, shuffle=True), batch_size=7, **options)
    other.load_state_dict(state)
    assert ids(other) == whole[4:]
    assert ids(other) == second


def test_the_chunks_that_a_worker_reads_next_are_fetched_ahead(place: Place) -> None:
    ds = liveset.StreamingDataset(place, shuffle=True)
    loader = LightLoader(ds, batch_size=4, num_workers=0)
    batches = iter(loader)
    order = [batch["i"][0] // 8 for batch in batches]
    read = [chunk for place, chunk in enumerate(order) if place == 0 or order[place - 1] != chunk]
    assert sorted(read) == list(range(8))
    loader.set_epoch(1)
    before = ds.as_of_now()
    next(iter(loader))
    chunks: Any = before._chunks
    assert [chunks._next.get(chunk) for chunk in read[:-1]] == read[1:]
    assert chunks._coming or all(chunks.get(chunk) for chunk in read[1:3])


@pytest.mark.parametrize("done", [0, 3])
def test_no_worker_fetches_ahead_what_only_another_one_reads(place: Place, done: int) -> None:
    ds = liveset.StreamingDataset(place)
    loader = LightLoader(ds, batch_size=5, num_workers=2)  # of 60 samples in chunks of 8: chunk 3 is cut
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    tasks = list(loader._begin().tasks(deque()))
    assert len(tasks) == 12 - done
    parts = [{0, 1, 2, 3}, {3, 4, 5, 6, 7}]
    for number, task in enumerate(tasks, done):
        part = parts[number % 2]
        assert {chunk for chunk, _ in task.places} <= part
        assert task.ahead == tuple(range(task.places[-1][0], max(part) + 1))


def mixed(kind: str, place: Place) -> Any:
    parts = [liveset.StreamingDataset(place, shuffle=True, seed=seed) for seed in (1, 2)]
    if kind == "single":
        return parts[0]
    if kind in ("parallel", "again"):
        return liveset.ParallelStreamingDataset(parts, length=150 if kind == "again" else None)
    return liveset.CombinedStreamingDataset(parts, batching_method=kind)  # type: ignore[arg-type]


def chunks_of(kind: str, task: Any, member: int) -> list[int]:
    """The chunks of one of the datasets that a task reads, in this order."""
    if kind in ("parallel", "again"):
        return [int(chunk) for _, rows in task.places for chunk in rows[:, 2 + 2 * member]]
    return [number & 0xFFFF for number, _ in task.places if number >> 32 == member]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stratified", "per_stream", "parallel", "again"])
def test_mixtures_tell_of_the_next_chunks_of_each_dataset(place: Place, kind: str, workers: int) -> None:
    loader = LightLoader(mixed(kind, place), batch_size=5, num_workers=workers)
    tasks = list(loader._begin().tasks(deque()))
    assert len(tasks) == len(loader)
    check_told(kind, tasks, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_that_are_begun_again_tell_of_the_order_that_comes(place: Place, workers: int) -> None:
    loader = LightLoader(mixed("again", place), batch_size=5, num_workers=workers)
    for _ in range(2):
        list(loader)  # the third epoch begins in the middle of the datasets
    tasks = list(loader._begin().tasks(deque()))
    for first in range(max(workers, 1)):
        for member in range(2):
            mine = tasks[first :: max(workers, 1)]
            read = [chunk for chunk, _ in groupby(chunk for task in mine for chunk in chunks_of("again", task, member))]
            assert len(read) > 9
            at = 0
            for task in mine:
                told = [number & 0xFFFF for number in task.ahead if number >> 32 == member]
                at = read.index(told[0], at)
                assert told[0] == chunks_of("again", task, member)[-1]
                coming = list(dict.fromkeys(read[at : at + 9]))
                assert told == coming[: len(told)]
                assert len(told) >= min(len(coming), 5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["single", "stratified", "parallel"])
def test_the_rest_of_an_epoch_on_another_grid_is_fetched_ahead(place: Place, kind: str, workers: int, world: int) -> None:
    loader = LightLoader(mixed(kind, place), batch_size=5, num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    other = LightLoader(mixed(kind, place), batch_size=3, num_workers=workers, rank=0, world_size=world)
    other.load_state_dict(loader.state_dict())
    tasks = list(other._begin().tasks(deque()))
    assert len(tasks) > 5
    check_told(kind, tasks, workers)


def check_told(kind: str, tasks: list[Any], workers: int) -> None:
    """Look whether each worker was told of each chunk, but for the first ones, before it reads it, and of no others."""
    for first in range(max(workers, 1)):
        mine = tasks[first :: max(workers, 1)]
        for member in range(1 if kind == "single" else 2):
            told: set[int] = set()
            read: set[int] = set()
            for task in mine:
                now = chunks_of(kind, task, member)
                if read and now:
                    assert set(now) - read <= told, "a chunk that nobody was told of"
                read.update(now)
                told.update(number & 0xFFFF for number in task.ahead if number >> 32 == member)
            assert len(read) > 2
            assert told <= read


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", ["single", "stratified", "parallel", "again"])
def test_loops_over_datasets_fetch_ahead(place: Place, kind: str, resumed: bool) -> None:
    mix = mixed(kind, place)
    if resumed:
        mix.load_state_dict(mixed(kind, place).state_dict(num_samples_yielded=2, batch_size=1))
    samples = iter(mix)
    for _ in range(3):
        next(samples)
    for dataset in mix.members:
        assert len(dataset._chunks._next) == 7
        assert dataset._chunks._coming or len(dataset._chunks._open) > 1


@pytest.mark.parametrize("kind", ["single", "stratified", "parallel", "again"])
def test_one_reader_of_what_many_workers_read_fetches_each_chunk_once(kind: str) -> None:
    with StubServer() as server:
        place = place_at(server.root / "set")
        liveset.optimize(make, range(60), place, chunk_size=2, key_fn="id", num_workers=1, verbose=False)
        state = LightLoader(mixed(kind, place), batch_size=2, num_workers=5).state_dict()
        other = LightLoader(mixed(kind, place), batch_size=2, num_workers=0)
        other.load_state_dict(state)
        told = [task.ahead for task in other._begin().tasks(deque(), readers=1)]
        assert all(len({number & 0xFFFF for number in ahead if number >> 32 == 0}) >= 5 for ahead in told[1 : len(told) // 2])
        other.load_state_dict(state)
        server.forget()
        assert len(list(other)) == len(told)
        read = Counter(request.name for request in server.requests if request.name.endswith(".bin"))
        assert len(read) == 30
        assert max(read.values()) <= (1 if kind == "single" else 2)  # of two datasets at the same place


def test_a_joined_sample_fetches_no_whole_chunk() -> None:
    with StubServer() as server:
        parts = [place_at(server.root / name) for name in ("base", "side")]
        for name, part in zip(("a", "b"), parts, strict=True):
            rows = [{"id": f"k{i}", name: bytes([i]) * 200_000} for i in range(40)]
            liveset.optimize(rows.__getitem__, range(40), part, chunk_size=20, key_fn="id", num_workers=1, verbose=False)
        joined = liveset.JoinedStreamingDataset(*map(liveset.StreamingDataset, parts))
        server.forget()
        assert (joined["k7"]["a"][:1], joined["k7"]["b"][:1]) == (b"\x07", b"\x07")
        read = [request.range for request in server.requests if request.name.endswith(".bin")]
        assert read
        assert all(read), "a whole chunk was fetched"


@pytest.mark.parametrize("looped", ["loader", "plain"])
def test_joined_datasets_fetch_the_next_chunks_of_both_ahead_and_each_once(looped: str) -> None:
    with StubServer() as server:
        parts = [place_at(server.root / name) for name in ("base", "side")]
        for name, part in zip(("a", "b"), parts, strict=True):
            rows = [{"id": f"k{i}", name: bytes([i]) * 300_000} for i in range(60)]  # so large that single samples would be fetched
            liveset.optimize(rows.__getitem__, range(60), part, chunk_size=10, key_fn="id", num_workers=1, verbose=False)
        base, side = (liveset.StreamingDataset(part, shuffle=True) for part in parts)
        joined: Any = liveset.JoinedStreamingDataset(base, side)
        server.forget()
        samples = iter(LightLoader(joined, batch_size=1, num_workers=0) if looped == "loader" else joined)
        next(samples)
        there: Any = joined._sides[0].dataset._chunks
        assert len(joined._chunks.inner._next) == 5
        assert len(there._next) >= 4
        assert len(there._coming) + len(there._open) == 5, "the one that is read, and four ahead"
        assert len(list(samples)) == 59
        read = [request.name for request in server.requests if request.name.endswith(".bin")]
        assert len(read) == len(set(read)) == 12
