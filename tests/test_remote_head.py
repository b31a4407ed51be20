"""A large index is fetched once by the processes of a machine, and none of them sees an old one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.storage import HEAD, Place, open_store
from liveset.storage.remote import SMALL_HEAD, RemoteStore
from tests.support.remote import place_at
from tests.support.services import RemoteFolder
from tests.support.stub_server import StubServer

pytestmark = pytest.mark.timeout(120)
LARGE = "x" * (8 * SMALL_HEAD)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def make(number: int) -> dict[str, Any]:
    return {"x": number}


def write(place: Place, note: str = LARGE) -> None:
    liveset.optimize(make, range(6), place, chunk_size=4, num_workers=1, verbose=False)
    liveset.set_attributes(place, {"note": note})


def read_at_once(place: Place, barrier: Any, found: Any) -> None:
    barrier.wait(60)
    found.put(liveset.StreamingDataset(place).version)


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
    assert [found.get(timeout=60) for _ in processes] == [2] * 8
    for process in processes:
        process.join(20)
    asked = [request for request in stub.requests if request.name == "plays/index.json"]
    assert len([request for request in asked if not request.range]) == 1
    assert len(asked) == 9
    assert stub.bytes_sent < 8 * (SMALL_HEAD + 20_000) + size


def test_opening_again_fetches_the_beginning_alone(stub: StubServer, tmp_path: Path) -> None:
    folder = stub.root / "plays"
    write(place_at(folder))
    place = place_at(folder, tmp_path)
    for _ in range(3):
        assert liveset.StreamingDataset(place).version == 2
    assert [request for request in stub.requests if not request.range and (request.method, request.name) == ("GET", "plays/index.json")]
    stub.forget()
    assert liveset.StreamingDataset(place).version == 2
    assert {request.range for request in stub.requests if request.name == "plays/index.json"} == {f"bytes=0-{SMALL_HEAD - 1}"}


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
