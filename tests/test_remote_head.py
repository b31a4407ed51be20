"""A large index is fetched once by the processes of a machine, and none of them sees an old one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.storage import HEAD, Head, Place, Tag, open_store
from liveset.storage.cache import ChunkCache
from liveset.storage.cached import CachedStore
from liveset.storage.held import HeldFile
from liveset.storage.location import Location, parse_location
from liveset.storage.remote import RemoteStore
from tests.support.remote import place_at
from tests.support.services import RemoteFolder
from tests.support.stub_server import StubServer

pytestmark = pytest.mark.timeout(120)
LARGE = "x" * 500_000
START = 300.0  # seconds in which eight processes start on a busy machine


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def _location(place: Place) -> Location:
    return parse_location(os.fspath(place), place.storage_options, place.session_options)


def make(number: int) -> dict[str, Any]:
    return {"x": number}


def write(place: Place, note: str = LARGE) -> None:
    liveset.optimize(make, range(6), place, chunk_size=4, num_workers=1, verbose=False)
    liveset.set_attributes(place, {"note": note})


def read_at_once(place: Place, barrier: Any, found: Any) -> None:
    barrier.wait(START)
    found.put(liveset.StreamingDataset(place).version)


@pytest.mark.timeout(2 * START)
def test_eight_processes_fetch_a_large_index_once(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    place = place_at(folder, tmp_path)
    size = len(stub.objects["plays/index.json"].data)
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(8), context.Queue()
    stub.forget()
    processes = [context.Process(target=read_at_once, args=(place, barrier, found)) for _ in range(8)]
    for process in processes:
        process.start()
    assert [found.get(timeout=START + 20) for _ in processes] == [2] * 8
    for process in processes:
        process.join(START)
    assert stub.count("GET", "plays/index.json") == stub.count() == 8
    assert stub.bytes_sent == size


def test_while_one_fetches_a_head_the_others_wait(tmp_path: Path) -> None:
    head, barrier, fetches, again = Head(b"head", Tag("tag")), threading.Barrier(8), [0], threading.Event()

    def ask(known: Head | None) -> Head:
        if known is not None:
            return known
        fetches[0] += 1
        if fetches[0] > 1:
            again.set()
        again.wait(0.3)  # as long as the answer takes
        return head

    def read(_: int) -> Head | None:
        cache = ChunkCache(tmp_path)
        barrier.wait(20)
        return cache.newest_head("s3://bkt/plays", ask)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [head] * 8
    assert fetches == [1]


@pytest.mark.parametrize("note", [LARGE, "small"])
def test_each_opening_is_one_request_and_sends_only_what_is_new(stub: StubServer, tmp_path: Path, note: str) -> None:
    folder = stub.root / "plays"
    write(place_at(folder), note)
    place = place_at(folder, tmp_path)

    def opened() -> tuple[int, int, int]:
        stub.forget()
        version = liveset.StreamingDataset(place).version
        return version, stub.count(), stub.bytes_sent

    def size() -> int:
        return len(stub.objects["plays/index.json"].data)

    assert opened() == (2, 1, size())
    assert opened() == opened() == (2, 1, 0)
    for version in (3, 4):
        liveset.set_attributes(place_at(folder), {"note": note, "number": version})
        assert opened() == (version, 1, size())
        assert opened() == (version, 1, 0)
        (kept,) = (file for file in tmp_path.glob("*/*.cached*"))
        assert size() < kept.stat().st_size < size() + 300
        assert (tmp_path / "usage").read_bytes().split()[0] == str(kept.stat().st_size).encode()
    assert ChunkCache(tmp_path).clear().files == 1
    assert opened() == (4, 1, size())
    assert opened() == (4, 1, 0)
    stub.forget()
    liveset.StreamingDataset(place_at(folder))
    assert (stub.count(), stub.bytes_sent) == (1, size())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("harm", [lambda data: flipped(data, -2), lambda data: flipped(data, 10), lambda data: data[:-9], lambda _: b"",
                                  lambda data: bytes(len(data)), lambda _: b"{}\n", lambda _: b"[1, 2]\n"])  # fmt: skip
def test_a_kept_head_that_is_damaged_is_fetched_again(stub: StubServer, tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    store = open_store(place_at(folder, tmp_path))
    head = store.read_head()
    (kept,) = tmp_path.glob("*/*.cached")
    kept.write_bytes(harm(kept.read_bytes()))
    stub.forget()
    assert store.read_head() == head
    assert stub.bytes_sent == len(stub.objects["plays/index.json"].data)
    assert store.read_head() == head
    assert (stub.count(), stub.bytes_sent) == (2, len(stub.objects["plays/index.json"].data))


def test_who_fetches_a_head_may_die_or_be_stuck(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    place = place_at(folder, tmp_path)
    assert liveset.StreamingDataset(place).version == 2
    (kept,) = tmp_path.glob("*/*.cached")
    kept.unlink()
    part = kept.with_name(f"{kept.name}.part")
    part.write_bytes(b"what a killed process left")
    assert liveset.StreamingDataset(place).version == 2
    assert list(kept.parent.glob("*.cached*")) == [kept]
    kept.unlink()
    stuck = HeldFile(str(part), os.O_RDWR | os.O_CREAT)
    with stuck:
        assert stuck.lock()
        stub.forget()
        store = CachedStore(RemoteStore(_location(place)), ChunkCache(tmp_path, patience=0.2), _location(place).place)
        assert store.read_head() is not None
        assert (stub.count(), kept.exists()) == (1, False)


def test_where_nothing_can_be_kept_the_head_is_fetched(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    (tmp_path / "file").write_bytes(b"")
    for cache, limit in ((tmp_path / "file", None), (tmp_path / "small", 1000)):
        store = open_store(Place(folder.url, storage_options=folder.options, cache_dir=cache, max_cache_size=limit))
        for _ in range(2):
            stub.forget()
            head = store.read_head()
            assert head is not None
            assert (stub.count(), head.data) == (1, stub.objects["plays/index.json"].data)
    assert list(tmp_path.glob("small/*/*.cached*")) == []


def test_a_cache_that_is_too_small_is_told_once(
    stub: StubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error where no chunk fits into it, and of the head where only that does not."""
    monkeypatch.setattr("liveset.storage.cache._told", False)
    folder = stub.root / "plays"
    write(place_at(folder))
    place = Place(folder.url, storage_options=folder.options, cache_dir=tmp_path, max_cache_size=50)
    with pytest.raises(ValueError, match="a cache of 50 bytes cannot hold the largest chunk"):
        liveset.StreamingDataset(place)[0]
    assert caplog.text == ""
    assert len(list(liveset.StreamingDataset(Place.of(place, max_cache_size=1000)))) == 6
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["index.json is kept in memory and not in the cache"]


def test_a_store_that_knows_no_condition_sends_the_head_each_time(on_gcs: RemoteFolder, tmp_path: Path) -> None:
    write(place_at(on_gcs))
    store, direct = open_store(place_at(on_gcs, tmp_path)), open_store(place_at(on_gcs))
    assert store.read_head() == store.read_head() == direct.read_head()


def test_a_head_that_was_put_back_can_be_built_upon_where_writing_goes_by_generations(gcs_stub: StubServer, tmp_path: Path) -> None:
    folder = gcs_stub.root / "plays"
    place = place_at(folder, tmp_path)
    write(place)
    assert liveset.StreamingDataset(place).version == 2
    before = gcs_stub.objects["plays/index.json"].data
    with gcs_stub.lock:
        gcs_stub.put("plays/index.json", b"{}")
        gcs_stub.put("plays/index.json", before)
    assert liveset.set_attributes(place, {"note": "new"}) == 3
    assert liveset.StreamingDataset(place).version == 3


def test_an_earlier_version_is_fetched_once(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    place = place_at(folder, tmp_path)
    stub.forget()
    for _ in range(2):
        assert liveset.StreamingDataset(place, version=1).version == 1
    assert stub.count("GET", "versions/00000001") == 1
    stub.forget()
    liveset.set_attributes(place_at(folder), {"note": ""})
    assert liveset.StreamingDataset(place, version=2).info().attributes == {"note": LARGE}
    for name in list(stub.objects):
        del stub.objects[name]
    write(place_at(folder), "another line")  # under the same names
    liveset.set_attributes(place_at(folder), {"note": ""})
    assert liveset.StreamingDataset(place, version=2).info().attributes == {"note": "another line"}


@pytest.mark.parametrize("note", [LARGE, "small"])
def test_a_commit_is_seen_by_whoever_looks_after_it(remote_folder: RemoteFolder, tmp_path: Path, note: str) -> None:
    """Also one that puts back the bytes of an earlier head, and by a writer who goes on from what it read."""
    place = place_at(remote_folder, tmp_path)
    write(place, note)
    store, direct = open_store(place), open_store(place_at(remote_folder))
    assert isinstance(direct, RemoteStore)
    for number in range(3, 6):
        version = liveset.set_attributes(place, {"note": note, "number": number})
        assert liveset.StreamingDataset(place).version == version
        assert store.read_head() == direct.read_head()
        liveset.set_attributes(place_at(remote_folder), {"note": note, "other": number})
        assert store.read_head() == direct.read_head()
    before = store.read_head()
    assert before is not None
    store.swap_head(b"{}" + b" " * len(note), before.tag)
    between = store.read_head()
    assert between is not None
    assert between.data[:2] == b"{}"
    store.swap_head(before.data, between.tag)
    again = store.read_head()
    assert again == direct.read_head()
    assert again is not None
    assert again.data == before.data
    liveset.set_attributes(place, {"note": note, "number": 9})
    assert liveset.StreamingDataset(place).info().attributes["number"] == 9


def test_readers_never_see_an_older_head_than_was_committed_before_they_asked(on_seaweedfs: RemoteFolder, tmp_path: Path) -> None:
    place = place_at(on_seaweedfs, tmp_path)
    write(place)
    committed, done = [2], threading.Event()

    def look() -> int:
        looks = 0
        while not done.is_set() or not looks:
            least = committed[0]
            assert liveset.StreamingDataset(place).version >= least
            looks += 1
        return looks

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(look) for _ in range(4)]
        try:
            for number in range(3, 9):
                liveset.set_attributes(place, {"note": LARGE, "number": number})
                committed[0] = number
        finally:
            done.set()
        assert all(reader.result() for reader in readers)


def test_an_empty_head_and_none(remote_folder: RemoteFolder, tmp_path: Path) -> None:
    store = open_store(place_at(remote_folder, tmp_path))
    assert store.read_head() is None
    remote_folder.store().put(HEAD, b"")
    head = store.read_head()
    assert head is not None
    assert head.data == b""


def test_how_often_the_head_is_read(stub: StubServer) -> None:
    place = place_at(stub.root / "plays")
    write(place, "small")
    for act, most in (
        (lambda: liveset.tag(place, "paper", 1), 3),  # before the commit, in it, and its read of what it stands on
        (lambda: liveset.StreamingDataset(place, version="paper"), 1),
        (lambda: liveset.restore(place, 1), 3),
    ):
        stub.forget()
        act()
        assert stub.count("GET", "^plays/index") <= most


class TogetherStore:
    """Far away, and answers for archived versions only once several have been asked for at the same time."""

    def __init__(self, store: Any, together: int) -> None:
        self._store, self.remote, self._barrier = store, True, threading.Barrier(together)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if "versions/" in name:
            self._barrier.wait(20)
        data: bytes = self._store.read(name, start, length)
        return data


def test_the_history_reads_several_versions_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plays"
    liveset.optimize(make, range(6), path, chunk_size=4, num_workers=1, verbose=False)
    for number in range(2, 6):
        liveset.set_attributes(path, {"number": number})
    wanted = liveset.history(path)
    # Version 0, which is not there, is the fifth one.
    monkeypatch.setattr("liveset.tools.history.open_store", lambda path: TogetherStore(open_store(path), 5))
    assert liveset.history(path) == wanted
    assert [version.version for version in wanted] == [5, 4, 3, 2, 1]
