"""Processes: forks after use, workers of a data loader, helpers that die or are left, and an end that does not wait."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import StorageError
from liveset.storage import Place, Store, helper
from tests.support.remote import place_at, store_at
from tests.support.services import RemoteFolder
from tests.support.stores import Behind

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(120),
    # Forking with threads is what is tested
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
COUNT = 60
MARK = "LIVESET_TEST_PROCESSES"


def make(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number, "data": bytes([number]) * 2_000}


@pytest.fixture(scope="module")
def written(seaweedfs: Any) -> RemoteFolder:
    folder: RemoteFolder = seaweedfs.fresh()
    liveset.optimize(make, range(COUNT), place_at(folder), chunk_size=8, key_fn="id", num_workers=1, verbose=False)
    return folder


@pytest.fixture
def place(written: RemoteFolder) -> Place:
    return place_at(written)


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Is in the environment of all processes that a test starts."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def started(mark: str) -> list[int]:
    """The helper processes of this test that live."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            ours = folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if ours and b"liveset.storage.helper" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def child(act: Callable[[], object]) -> Iterator[int]:
    """A forked process that does this and ends; its id."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(60)
            act()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        try:
            _, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            if not status:
                os.kill(pid, signal.SIGKILL)


def run(act: Callable[[], object]) -> None:
    with child(act) as pid:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def use(dataset: liveset.StreamingDataset, number: int = 0) -> None:
    """Read a sample by position and one by key; of chunks that have not been read yet where ``number`` is another one."""
    assert len(dataset) == COUNT
    for position in (number, (number + 8) % COUNT):
        assert dataset[position] == make(position)
        assert dataset[f"k{position}"] == make(position)


# --- the data loader --------------------------------------------------------------------------------------------------


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["x"] for sample in samples]


def epoch(dataset: liveset.StreamingDataset, workers: int, method: str | None) -> None:
    from torch.utils.data import DataLoader

    data: Any = dataset
    loader: Any = DataLoader(
        data,
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        collate_fn=numbers,
        timeout=60 * bool(workers),
    )
    assert sorted(number for batch in loader for number in batch) == list(range(COUNT))


@pytest.mark.parametrize(
    ("method", "cached"),
    [
        ("fork", False),
        ("fork", True),
        ("spawn", True),
        ("forkserver", False),
        pytest.param("spawn", False, marks=pytest.mark.nightly),
        pytest.param("forkserver", True, marks=pytest.mark.nightly),
    ],
)
def test_workers_after_use_in_the_parent(place: Place, method: str, cached: bool, mark: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if cached:
        place = Place(place.url, storage_options=place.storage_options, cache_dir=tmp_path / "cache")
    dataset = liveset.StreamingDataset(place)
    use(dataset)
    for workers in (0, 2, 0, 4) if method == "fork" else (2, 0):
        epoch(dataset, workers, method)
        use(dataset)
    wait_until(lambda: not started(mark))


def test_access_by_index_in_workers(place: Place, mark: str) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    class ByIndex(torch_data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, number: int) -> int:
            return int(dataset[f"k{number}"]["x"])

    loader = torch_data.DataLoader(ByIndex(), batch_size=5, num_workers=2, multiprocessing_context="fork", shuffle=True, timeout=60)
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(COUNT))
    wait_until(lambda: not started(mark))


# --- plain forks ------------------------------------------------------------------------------------------------------


def test_twenty_forks(place: Place, mark: str) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)
    begun = time.monotonic()
    for number in range(20):
        run(partial(use, dataset, 16 + number))
    assert time.monotonic() - begun < 60
    use(dataset)
    wait_until(lambda: not started(mark))


def test_a_fork_of_a_fork(place: Place, mark: str) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    def act() -> None:
        use(dataset, 16)
        run(lambda: use(dataset, 32))
        use(dataset, 48)

    run(act)
    wait_until(lambda: not started(mark))


def test_all_requests_work_in_a_fork(written: RemoteFolder) -> None:
    store = store_at(written / "inner")
    large = bytes(range(256)) * 40_000  # more than is sent or fetched at once

    def act(store: Store = store) -> None:
        store.write("large.bin", [large, b"end"])
        assert bytes(store.map("large.bin", len(large) + 3)) == large + b"end"
        assert store.read_ranges("large.bin", [(1, 2), (len(large), 3)]) == [b"\1\2", b"end"]
        store.copy("large.bin", "copy.bin")
        assert {entry.name for entry in store.list("")} == {"large.bin", "copy.bin"}
        store.write_once("once.bin", b"1")
        with pytest.raises(liveset.ForeignEdit):
            store.write_once("once.bin", b"2")
        with pytest.raises(liveset.NotFound, match=f"{written.url}/inner/absent"):
            store.read("absent.bin")
        store.swap_head(b"head", None)
        head = store.read_head()
        assert head is not None
        store.swap_head(b"head 2", head.tag)
        assert store.now() is not None
        store.delete([entry.name for entry in store.list("")])

    assert list(store.list("")) == []  # the parent has sent a request
    run(act)
    assert list(store.list("")) == []


def test_threads_of_a_fork_share_a_helper(place: Place, mark: str) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    def act() -> None:
        threads = [threading.Thread(target=use, args=(dataset, 16 + 4 * number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (first,) = started(mark)
        os.kill(first, signal.SIGKILL)  # all have connections to it
        use(dataset, 50)
        (second,) = started(mark)
        assert second != first

    run(act)


def test_a_helper_ends_with_a_killed_worker(place: Place, mark: str) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    def act() -> None:
        use(dataset, 16)
        signal.pause()

    with child(act) as pid:
        wait_until(lambda: len(started(mark)) == 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: not started(mark))


def test_a_killed_helper_is_replaced(written: RemoteFolder, behind_proxy: Behind, mark: str) -> None:
    folder, proxy = behind_proxy(written)
    store_at(written).write("large.bin", [bytes(1 << 20)] * 4)
    store = store_at(folder)
    assert store.read("large.bin", 0, 1) == b"\0"
    proxy.set(rate=8 << 20)

    def act() -> None:
        store.read("large.bin", 0, 1)
        (first,) = started(mark)

        def kill() -> None:
            before = proxy.stats()["bytes_down"]
            wait_until(lambda: proxy.stats()["bytes_down"] > before + (1 << 20))
            os.kill(first, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        assert store.read("large.bin") == bytes(4 << 20)
        thread.join()
        (second,) = started(mark)
        assert second != first
        os.kill(second, signal.SIGKILL)  # between two reads
        assert store.read("large.bin", 0, 1) == b"\0"

    run(act)
    wait_until(lambda: not started(mark))


def test_a_commit_whose_helper_is_killed_is_read_back(written: RemoteFolder, behind_proxy: Behind, mark: str) -> None:
    """Its put is under way then: only the head can tell what became of it."""
    folder, proxy = behind_proxy(written / "edited")
    place = place_at(folder)
    liveset.optimize(make, range(8), place, chunk_size=8, key_fn="id", num_workers=1, verbose=False)
    use_before = liveset.StreamingDataset(place)
    assert len(use_before) == 8

    def act() -> None:
        with liveset.dataset_update(place, session="job") as update:
            update["k1"] = {**make(1), "x": -1}
            (first,) = started(mark)
            proxy.set(p_stall=1.0, stall_s=1.0, match="PUT .*index.json", max_faults=1)

            def kill() -> None:
                wait_until(lambda: bool(proxy.stats()["faults"]))
                os.kill(first, signal.SIGKILL)

            thread = threading.Thread(target=kill)
            thread.start()
            update.commit()
            thread.join()

    run(act)
    assert [version.session for version in liveset.history(place)].count("job") == 1
    assert liveset.StreamingDataset(place)["k1"]["x"] == -1


def test_a_helper_that_cannot_start_is_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    def act() -> None:
        monkeypatch.setattr(helper, "_START", "raise SystemExit(3)")
        with pytest.raises(StorageError, match=r"s3://.*the process that sends the requests has ended"):
            dataset[40]

    run(act)


def test_a_helper_finds_the_modules_of_its_parent(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But what lies in the current folder is not taken for a module of Python."""
    name = f"provider_{uuid.uuid4().hex}"
    options = dict(place.storage_options or {})
    keys = {"access_key_id": options.pop("access_key_id"), "secret_access_key": options.pop("secret_access_key")}
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{name}.py").write_text(
        f"class Provider:\n    def __call__(self):\n        return {dict(keys, token=None, expires_at=None)!r}\n"
    )
    (tmp_path / "queue.py").write_text("raise SystemExit('this is no module of Python')")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    provider = importlib.import_module(name).Provider()
    dataset = liveset.StreamingDataset(Place(place.url, storage_options={**options, "credential_provider": provider}, cache_dir=False))
    use(dataset)
    run(lambda: use(dataset, 20))


def test_too_many_files_for_a_helper(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = liveset.StreamingDataset(place)
    use(dataset)

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises(StorageError, match=r"cannot reach s3://.* cannot be started or reached"):
            dataset[40]

    run(act)


# --- what is left -----------------------------------------------------------------------------------------------------


def test_many_datasets_leave_no_threads_and_files(place: Place, tmp_path: Path) -> None:
    cached = Place(place.url, storage_options=place.storage_options, cache_dir=tmp_path / "cache")

    def look(turns: int) -> tuple[int, int]:
        for turn in range(turns):
            dataset = liveset.StreamingDataset(cached if turn % 2 else place)
            use(dataset)
            next(iter(dataset))
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    threads, files = look(20)
    more_threads, more_files = look(200)
    assert more_threads <= threads + 4
    assert more_files <= files + 8


def test_many_places_in_a_bucket_share_connections(written: RemoteFolder) -> None:
    assert store_at(written).read_head() is not None
    before = len(list(Path("/proc/self/fd").iterdir()))
    stores = [store_at(written / f"other-{number}") for number in range(100)]
    assert [store.read_head() for store in stores] == [None] * 100
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 10


ENDS = """
import json, os, sys, time
import liveset

place = liveset.Place({url!r}, storage_options={options!r}, cache_dir={cache!r})
dataset = liveset.StreamingDataset(place)
if {forked}:
    len(dataset), dataset[0]
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        raise SystemExit(os.waitstatus_to_exitcode(status))
iterator = iter(dataset)
print(next(iterator)["x"], time.time(), flush=True)
"""


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_process_ends_while_it_fetches(
    written: RemoteFolder, behind_proxy: Behind, tmp_path: Path, forked: bool, cached: bool, mark: str
) -> None:
    folder, proxy = behind_proxy(written)
    proxy.set(rate=8_000)  # a chunk takes two seconds
    script = textwrap.dedent(ENDS).format(
        url=folder.url, options=folder.options, cache=str(tmp_path / "cache") if cached else False, forked=forked
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    first, when = done.stdout.split()
    assert first == "0"
    assert ended - float(when) < 2
    assert done.stderr == ""
    wait_until(lambda: not started(mark))
