"""Reading from a store where every request counts: parts of chunks, whole ones, what is fetched ahead, and what the cache spares."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import Corrupt, VersionExpired
from liveset.format.locks import ForkLock
from liveset.read import chunks
from liveset.read.fetch import Job, run_all, submit
from liveset.storage import Place
from tests.support.remote import place_at
from tests.support.stub_server import StubServer

CHUNK = 4_000_000
BLOB = 40_000
COUNT = 400


def play(number: int) -> dict[str, Any]:
    return {"id": f"play-{number}", "n": number, "blob": number.to_bytes(2, "little") * (BLOB // 2)}


@pytest.fixture
def plays(stub: StubServer, tmp_path: Path) -> Place:
    """Four chunks of 4 MB, keyed, which no cache knows."""
    folder = stub.root / "plays"
    liveset.optimize(play, range(COUNT), place_at(folder), chunk_bytes=CHUNK, key_fn="id", num_workers=1, verbose=False)
    stub.forget()
    return place_at(folder, tmp_path / "cache")


def gets(stub: StubServer, match: str = "chunk-") -> list[tuple[str, str]]:
    return [
        (request.name.rpartition("/")[2], request.range) for request in stub.requests if request.method == "GET" and match in request.name
    ]


def test_opening_takes_one_request_and_reads_no_chunk(stub: StubServer, plays: Place) -> None:
    assert len(liveset.StreamingDataset(plays)) == COUNT
    assert [(request.method, request.name.rpartition("/")[2]) for request in stub.requests] == [("GET", "index.json")]


def test_one_sample_takes_the_offsets_and_its_own_bytes(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    stub.forget()
    assert dataset[250]["n"] == 250
    assert dataset["play-251"]["n"] == 251
    found = gets(stub)
    assert len(found) == 3  # offsets, two samples
    assert all(text for _, text in found)
    assert stub.bytes_sent < 5 * BLOB
    stub.forget()
    assert dataset["play-252"]["n"] == 252
    assert len(stub.requests) == 1  # warm: the sample alone


def test_a_sample_by_key_takes_at_most_five_requests(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    stub.forget()
    assert dataset["play-7"]["n"] == 7
    assert len(stub.requests) <= 5, stub.requests


def test_many_samples_of_a_chunk_come_with_one_request_each_chunk(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    wanted = [0, 1, 350, 2, 351]
    assert [sample["n"] for sample in dataset.read_many(wanted)] == wanted
    assert len(gets(stub)) == 4  # offsets and neighbouring samples, of two chunks
    keys = [f"play-{number}" for number in (352, 3, 353)]
    assert [sample["id"] for sample in dataset.get_by_keys(keys)] == keys
    assert [sample["n"] for sample in dataset[200:203]] == [200, 201, 202]
    assert stub.bytes_sent < 40 * BLOB


def test_a_chunk_whose_parts_cost_as_much_is_fetched_whole(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    for number in range(90):
        assert dataset[number]["n"] == number
    found = gets(stub)
    assert len({name for name, _ in found}) == 1
    assert len(found) <= 2 + CHUNK // chunks.REQUEST
    assert not found[-1][1]  # the whole file, and nothing after it


def test_an_iteration_fetches_each_chunk_once_and_whole(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    assert [sample["n"] for sample in dataset] == list(range(COUNT))
    names = [name for name, _ in gets(stub)]
    assert len(names) == len(set(names)) == 5
    stub.forget()
    assert sum(1 for _ in dataset) == COUNT
    assert sum(1 for _ in liveset.StreamingDataset(plays)) == COUNT
    assert gets(stub) == []  # all of them are in the cache


def test_without_a_cache_nothing_is_written(stub: StubServer, plays: Place, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    dataset = liveset.StreamingDataset(plays.url, storage_options=plays.storage_options, cache_dir=False)
    assert [sample["n"] for sample in dataset] == list(range(COUNT))
    assert sorted(tmp_path.rglob("*")) == before
    assert len(gets(stub)) == 5


def test_chunks_are_fetched_ahead_and_the_first_one_alone(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    first = iter(dataset)
    assert next(first)["n"] == 0
    order = [name for name, _ in gets(stub)]
    assert order[0].startswith("chunk-0-0-")
    ahead = dataset._chunks
    assert ahead is not None
    for job in list(ahead._coming.values()):
        job.result()
    stub.forget()
    assert [sample["n"] for sample in first] == list(range(1, COUNT))
    assert gets(stub) == []  # all of it was there, or on its way, with the first sample


@pytest.mark.parametrize("number", range(5))
def test_threads_that_want_a_chunk_at_once_fetch_it_once(stub: StubServer, plays: Place, number: int) -> None:
    dataset = liveset.StreamingDataset(plays.url, storage_options=plays.storage_options, cache_dir=False, max_pre_download=0)
    there: Any = dataset._chunks
    begin = threading.Barrier(8)

    def want() -> None:
        begin.wait()
        there.whole(number)

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(want) for _ in range(8)]:
            job.result()
    assert len(gets(stub)) == 1
    assert there.holds(number)
    assert not there._coming


def test_what_was_fetched_ahead_and_left_is_bounded() -> None:
    with StubServer() as server:
        place = place_at(server.root / "set")
        liveset.optimize(lambda n: {"n": n}, range(100), place, chunk_size=1, num_workers=1, verbose=False)
        dataset = liveset.StreamingDataset(place.url, storage_options=place.storage_options, cache_dir=False)
        ahead: Any = dataset._chunks
        for start in range(0, 100, 2):
            assert next(iter(dataset.subset(range(start, 100))))["n"] == start
            for number in range(start, 100, 4):
                ahead.expect(range(number, 100))
                ahead.whole(number)
        assert 0 < len(ahead._coming) <= chunks.MAX_COMING


def test_ctrl_c_in_one_thread_is_no_error_of_others() -> None:
    calls: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def call() -> str:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            begun.set()
            go_on.wait(30)
            raise KeyboardInterrupt
        return "good"

    job = Job(call)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job.result)
        begun.wait(30)
        second = pool.submit(job.result)
        go_on.set()
        assert second.result(30) == "good"
        with pytest.raises(KeyboardInterrupt):
            first.result(30)
    assert len(calls) == 2


def test_nothing_is_fetched_ahead_on_request(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays, max_pre_download=0)
    assert next(iter(dataset))["n"] == 0
    assert len(gets(stub)) == 1


def test_shuffled_iterations_and_loaders_read_the_same(plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays, shuffle=True, seed=3)
    numbers = [sample["n"] for sample in dataset]
    assert sorted(numbers) == list(range(COUNT))
    again = liveset.StreamingDataset(plays, shuffle=True, seed=3)
    assert [number for batch in liveset.StreamingDataLoader(again, batch_size=16) for number in batch["n"].tolist()] == numbers


def test_after_an_edit_only_the_changed_chunk_is_fetched(stub: StubServer, plays: Place) -> None:
    old = liveset.StreamingDataset(plays)
    assert sum(1 for _ in old) == COUNT
    with liveset.dataset_update(plays) as update:
        update["play-150"] = {**play(150), "n": -150}
        update.commit()
    stub.forget()
    new = liveset.StreamingDataset(plays)
    assert [sample["n"] for sample in new] == [*range(150), -150, *range(151, COUNT)]
    assert len(gets(stub)) == 1
    assert [sample["n"] for sample in old] == list(range(COUNT))  # the old version goes on from the same cache


def test_an_epoch_ends_at_its_version_whatever_is_committed_meanwhile(plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays, max_pre_download=0)
    samples = iter(dataset)
    found = [next(samples)["n"]]
    with liveset.dataset_update(plays) as update:
        update.patch("play-399", n=-399)
        update.commit()
    found += [sample["n"] for sample in samples]
    assert found == list(range(COUNT))
    assert dataset.refresh()
    assert dataset["play-399"]["n"] == -399


def test_a_version_that_a_vacuum_removed_is_named(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays.url, storage_options=plays.storage_options, cache_dir=False)
    with liveset.dataset_update(plays) as update:
        update.patch("play-399", n=-399)
        update.commit()
    for name, stored in stub.objects.items():  # the store tells whole seconds
        stub.objects[name] = replace(stored, time=stored.time - 5)
    liveset.vacuum(plays, keep=1, grace=timedelta(0))
    with pytest.raises(VersionExpired, match="chunk-"):
        list(dataset)


def test_a_file_that_is_damaged_on_the_store_is_named(stub: StubServer, plays: Place) -> None:
    name = next(name for name in stub.objects if re.search(r"chunk-0-1-", name))
    data = bytearray(stub.objects[name].data)
    data[-5] ^= 1
    stub.put(name, bytes(data))
    dataset = liveset.StreamingDataset(plays)
    assert sum(1 for _ in zip(range(90), dataset, strict=False)) == 90
    with pytest.raises(Corrupt, match=r"chunk-0-1-"):
        list(dataset)


def test_damage_in_the_offsets_is_named(stub: StubServer, plays: Place) -> None:
    name = next(name for name in stub.objects if re.search(r"chunk-0-1-", name))
    data = bytearray(stub.objects[name].data)
    data[9] ^= 1
    stub.put(name, bytes(data))
    with pytest.raises(Corrupt, match=r"chunk-0-1-"):
        liveset.StreamingDataset(plays)[150]


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"compression": "zstd", "compression_level": "sample"}, {}])
@pytest.mark.parametrize("cached", [True, False])
def test_every_layout_is_read_by_parts_and_whole(stub: StubServer, tmp_path: Path, options: dict[str, Any], cached: bool) -> None:
    folder = stub.root / "layout"
    place = place_at(folder, tmp_path / "cache" if cached else False)
    blobs = [random.Random(number).randbytes(BLOB) for number in range(120)]
    liveset.optimize(
        lambda number: {"n": number, "blob": blobs[number]}, range(120), place_at(folder), chunk_bytes=3_000_000, verbose=False, **options
    )
    dataset = liveset.StreamingDataset(place)
    assert dataset[100] == {"n": 100, "blob": blobs[100]}
    assert [sample["n"] for sample in dataset[50:60]] == list(range(50, 60))
    assert [sample["blob"] for sample in dataset] == blobs


def test_too_small_a_cache_is_refused_with_the_size_that_works(plays: Place) -> None:
    with pytest.raises(ValueError, match=r"at least 3,9[0-9]{2},[0-9]{3} bytes|at least 4,0"):
        liveset.StreamingDataset(plays, max_cache_size="1MB")


def test_a_cache_of_two_chunks_is_enough(stub: StubServer, plays: Place, tmp_path: Path) -> None:
    dataset = liveset.StreamingDataset(plays, max_cache_size=9_000_000)
    for _ in range(2):
        assert [sample["n"] for sample in dataset] == list(range(COUNT))
    held = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.cached"))
    assert 0 < held <= 9_000_000


def test_leaving_an_iteration_does_no_harm(plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    for _ in range(20):
        assert next(iter(dataset))["n"] == 0
    assert [sample["n"] for sample in dataset] == list(range(COUNT))


# Work in the background


def test_results_come_in_order_and_errors_where_they_are_asked_for() -> None:
    assert run_all([lambda n=n: n * n for n in range(50)]) == [n * n for n in range(50)]  # type: ignore[misc]
    job = submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        job.result()


def test_who_cannot_wait_does_the_work() -> None:
    started = threading.Event()
    job: Job[int] = Job(lambda: started.set() or 7)  # type: ignore[func-returns-value]
    assert job.result() == 7
    assert started.is_set()
    job.run()  # a thread that comes later finds it done
    assert job.result() == 7


def test_the_threads_are_few() -> None:
    gate = threading.Event()
    jobs = [submit(gate.wait) for _ in range(100)]
    busy = sum(thread.name == "liveset-fetch" for thread in threading.enumerate())
    gate.set()
    assert all(job.result() for job in jobs)
    assert busy <= 16


# Purges and vacuums under an open dataset


def test_a_purge_is_followed_by_who_reads_parts_of_chunks(plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    assert dataset["play-250"]["n"] == 250
    liveset.purge(plays, ["play-260"])
    assert dataset["play-251"]["n"] == 251
    with pytest.raises(liveset.Erased):
        dataset[260]


def test_a_purge_is_followed_by_all_threads(plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays.url, storage_options=plays.storage_options, cache_dir=False)
    liveset.purge(plays, [f"play-{number}" for number in range(50, COUNT, 100)])
    wanted = [number for number in range(COUNT) if number % 100 != 50]
    assert [sample["n"] for sample in dataset.read_many(wanted)] == wanted


# After a fork


def in_a_child(call: Callable[[], object]) -> int:
    """Run a call in a forked process, which gets ten seconds, and return how it ended."""
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_does_not_wait_for_what_its_parent_fetches() -> None:
    gate, begun = threading.Event(), threading.Event()
    parent = os.getpid()

    def fetch() -> int:
        begun.set()
        if os.getpid() == parent:
            gate.wait(60)
        return 7

    job = submit(fetch)
    begun.wait(10)
    try:
        assert in_a_child(lambda: None if job.result() == 7 else 1 // 0) == 0
    finally:
        gate.set()
    assert job.result() == 7


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_finds_locks_free_that_threads_of_its_parent_hold() -> None:
    lock, held, gate = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            gate.wait(60)

    def take() -> None:
        with lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert in_a_child(take) == 0
    finally:
        gate.set()
        thread.join()


@pytest.mark.parametrize("place", [-1, 9])
def test_a_damaged_chunk_is_not_fetched_for_each_of_its_samples(stub: StubServer, plays: Place, place: int) -> None:
    name = next(name for name in stub.objects if "chunk-0-1-" in name)
    data = bytearray(stub.objects[name].data)
    data[place] ^= 255  # the last sample, or the offsets
    stub.put(name, bytes(data))
    dataset = liveset.StreamingDataset(plays)
    loader = liveset.StreamingDataLoader(dataset, batch_size=10, on_error="skip")
    samples = sum(len(batch["n"]) for batch in loader)
    assert 200 < samples < COUNT
    assert loader.stats().skipped == COUNT - samples
    assert len([None for found, _ in gets(stub) if "chunk-0-1-" in found]) <= 4


@pytest.mark.parametrize("path", ["s3:/bkt/plays", "s3:bkt/plays", "https:/host/plays"])
def test_a_url_that_lacks_a_slash_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="two slashes"):
        liveset.StreamingDataset(path)


def test_a_cache_does_not_lie_in_a_dataset(plays: Place, tmp_path: Path) -> None:
    local = tmp_path / "local"
    liveset.optimize(play, range(3), local, num_workers=1, verbose=False)
    with pytest.raises(ValueError, match="lie in one another"):
        liveset.StreamingDataset(f"local:{local}", cache_dir=local / "cache")
    with pytest.raises(ValueError, match="is a dataset"):
        liveset.StreamingDataset(plays, cache_dir=local)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_damaged_in_the_cache_is_fetched_again(stub: StubServer, plays: Place, tmp_path: Path, verify: bool) -> None:
    assert sum(1 for _ in liveset.StreamingDataset(plays)) == COUNT
    files = list((tmp_path / "cache").rglob("*.cached"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[-9 if verify else 9] ^= 255
        file.write_bytes(data)
    stub.forget()
    dataset = liveset.StreamingDataset(plays, verify_reads=verify)
    assert [sample["n"] for sample in dataset] == list(range(COUNT))
    assert len(gets(stub)) == 5
