"""The cache of remote files: fetched once per machine, never beyond its limit, and nobody is ever stopped by what others leave."""

from __future__ import annotations

import json
import logging
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.cli import main
from liveset.errors import Corrupt, StorageError
from liveset.format.codec import checksum
from liveset.storage import cache as module
from liveset.storage.cache import ChunkCache, cache_root, check_limit, check_root, parse_limit
from liveset.storage.held import HeldFile
from liveset.storage.store import Sink

URL = "s3://bucket/plays"
SIZE = 40_000


def content(name: str, size: int = SIZE) -> bytes:
    return random.Random(name).randbytes(size)


class Source:
    """A remote store that notes every download in a file, for all processes."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def get(self, cache: ChunkCache, name: str, *, size: int = SIZE, before: Callable[[], object] = bool, **options: Any) -> memoryview:
        data = content(name, size)

        def download(sink: Sink) -> None:
            with open(self.log, "a") as log:
                log.write(f"{name}\n")
            before()
            half = len(data) // 2
            sink.write(data[half:], half)
            sink.write(memoryview(data)[:half], 0)

        return cache.open(URL, name, size, checksum(data), "", download, **options)

    def downloads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "downloads")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_told", False)


def cached_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.cached"))


def parts(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.part"))


def sizes(root: Path) -> dict[int, int]:
    """Bytes of each file, by its number on the disk."""
    found = {}
    for file in [*root.glob("*/*.cached"), *root.glob("*/*.part")]:
        with suppress(FileNotFoundError):
            info = file.stat()
            found[info.st_ino] = info.st_size
    return found


def held(root: Path) -> int:
    return sum(sizes(root).values())


def is_cached(view: memoryview) -> bool:
    """Whether it is a map of a file that has a name."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split(maxsplit=5)[5:] != [] and not line.split(maxsplit=5)[5].startswith(("/memfd:", "/dev/zero", "["))
    raise AssertionError("mapped nowhere")


def fresh() -> tuple[str, int, str, str]:
    data = content("a")
    return "a", SIZE, checksum(data), ""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("no file systems can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# --- one process --------------------------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_once(root: Path, source: Source) -> None:
    cache = ChunkCache(root)
    assert cache.peek(URL, *fresh()) is None
    view = source.get(cache, "a")
    assert is_cached(view)
    assert view.readonly
    assert view == content("a")
    for again in (source.get(pickle.loads(pickle.dumps(cache)), "a"), cache.peek(URL, *fresh())):
        assert again == view
    assert source.downloads() == ["a"]
    assert not parts(root)


@pytest.mark.parametrize("size", [1, 100, 300_000, 2_000_000])
def test_a_size_that_is_unknown_or_the_least(root: Path, size: int) -> None:
    cache, data = ChunkCache(root, 3_000_000), content("x", size)

    def download(sink: Sink) -> None:
        for start in range(0, size, 70_000):
            sink.write(data[start : start + 70_000], start)

    for name, told in (("unknown", 0), ("least", size // 2)):
        view = cache.open(URL, name, told, "", "", download)
        assert view == data
        assert is_cached(view)
        del view
    assert held(root) == sum(file.stat().st_size for file in cached_files(root)) <= 3_000_000
    assert int((root / "usage").read_text().split()[0]) == held(root)


def test_an_empty_file(root: Path) -> None:
    cache = ChunkCache(root)
    assert len(cache.open(URL, "empty", 0, "", "", lambda sink: None)) == 0
    assert len(cache.open(URL, "empty", 0, checksum(b""), "", lambda sink: sink.write(b"", 0))) == 0
    assert held(root) == 0
    assert not parts(root)


texts = st.sampled_from(["", "a", "b", "a/b", "../b", "/etc/x", "..", ".", "\0", 'a", "b', "ü" * 300, "_liveset/keys/base-1.keys"])


@given(
    st.lists(st.tuples(st.sampled_from(["s3://b/a", "s3://b/a/b", "gs://b/a", "/x/../y"]), texts, texts, texts), unique=True, max_size=8)
)
def test_no_name_gives_the_content_of_another(tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[str, str, str, str]]) -> None:
    folder = tmp_path_factory.mktemp("names")
    cache = ChunkCache(folder / "cache", 10**9)
    for number, (url, name, check, edition) in enumerate(wanted):
        data = bytes([number]) * 10

        def download(sink: Sink, data: bytes = data) -> None:
            sink.write(data, 0)

        # A checksum of a kind that is not known is part of the name, and not compared
        assert cache.open(url, name, 10, check, edition, download) == data
    for number, (url, name, check, edition) in enumerate(wanted):
        found = cache.peek(url, name, 10, check, edition)
        assert found is not None
        assert bytes(found) == bytes([number]) * 10
    assert os.listdir(folder) == ["cache"] if wanted else True


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_file_is_fetched_again(root: Path, source: Source, damage: str) -> None:
    cache = ChunkCache(root)
    source.get(cache, "a").release()
    (file,) = cached_files(root)
    good = file.read_bytes()
    file.write_bytes({"truncated": good[:-1], "empty": b"", "flipped": bytes([good[0] ^ 1]) + good[1:]}[damage])
    assert source.get(cache, "a", verify=damage == "flipped") == good
    assert source.downloads() == ["a", "a"]
    assert cached_files(root) == [file]


def test_a_file_from_before_the_start_of_the_machine_is_checked(root: Path, source: Source) -> None:
    """A power loss leaves files of the right size without their bytes, since nothing is synced that can be checked."""
    cache = ChunkCache(root)
    source.get(cache, "a").release()
    (file,) = cached_files(root)
    file.write_bytes(bytes(SIZE))
    os.utime(file, (1e9, 1e9))
    assert cache.peek(URL, *fresh()) is None
    assert source.get(cache, "a") == content("a")
    os.utime(file, (1e9, 1e9))
    source.get(cache, "a").release()
    assert abs(file.stat().st_mtime - time.time()) < 60
    assert source.downloads() == ["a", "a"]


@pytest.mark.parametrize("limit", [10**9, 0])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("wrong", [b"", content("a")[:-1], content("b")])
def test_what_arrives_damaged_is_fetched_again_once(root: Path, wrong: bytes, check: bool, limit: int) -> None:
    if not check and len(wrong) == SIZE:
        return  # nothing tells
    name, size, sum_, _ = fresh()
    facts = (name, size, sum_ if check else "", "")
    cache, good = ChunkCache(root, limit), content("a")
    answers = [wrong, good, wrong, wrong]

    def download(sink: Sink) -> None:
        sink.write(answers.pop(0), 0)

    assert cache.open(URL, *facts, download) == good
    cache.clear()
    with pytest.raises(Corrupt, match="a is damaged where it is stored") as raised:
        cache.open(URL, *facts, download)
    assert raised.value.file == "a"
    assert answers == []
    assert held(root) == 0
    assert not parts(root)


class Lost(Exception):
    pass


@pytest.mark.parametrize("error", [Lost("gone"), StorageError("the network failed"), OSError("x"), KeyboardInterrupt()])
def test_errors_of_a_download_come_through(root: Path, source: Source, error: BaseException) -> None:
    cache = ChunkCache(root)

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        source.get(cache, "a", before=fail)
    assert not parts(root)
    assert int((root / "usage").read_text().split()[0]) == 0
    assert source.get(cache, "a") == content("a")
    assert source.downloads() == ["a", "a"]


def test_too_many_open_files_is_an_error(root: Path, source: Source) -> None:
    """Who has files open can close some; without a word every file would be fetched again and again."""
    program = f"""
import resource, errno, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.test_cache import *
cache, source = ChunkCache({str(root)!r}), Source(Path({str(source.log)!r}))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
views = []
try:
    for number in range(50):
        views.append(source.get(cache, str(number)))
except StorageError as error:
    assert error.errno == errno.EMFILE
    views.clear()
    assert is_cached(source.get(cache, "0"))
    print("good", len(source.downloads()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("good"), done.stdout + done.stderr


# --- the limit ----------------------------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first(root: Path, source: Source) -> None:
    cache = ChunkCache(root, 3 * SIZE)
    for age, name in enumerate(["a", "b", "c"]):
        before = set(cached_files(root))
        source.get(cache, name).release()
        (file,) = set(cached_files(root)) - before
        os.utime(file, (time.time() - 1000 + age, time.time() - 1000 + age))
    source.get(cache, "a").release()  # is noted
    source.get(cache, "d").release()
    assert source.downloads() == ["a", "b", "c", "d"]
    source.get(cache, "a").release()
    source.get(cache, "c").release()
    assert source.downloads() == ["a", "b", "c", "d"]
    source.get(cache, "b").release()
    assert source.downloads() == ["a", "b", "c", "d", "b"]
    assert held(root) == 3 * SIZE


def test_a_file_in_use_stays(root: Path, source: Source) -> None:
    cache = ChunkCache(root, 2 * SIZE)
    some = source.get(cache, "a")[5:10]  # any part of it will do
    for name in ("b", "c", "d"):
        assert is_cached(source.get(cache, name))
    other = source.get(cache, "d")
    assert not is_cached(source.get(cache, "e"))
    assert source.get(cache, "a") == content("a")
    assert source.downloads() == ["a", "b", "c", "d", "e"]
    assert held(root) == 2 * SIZE
    del some, other
    assert is_cached(source.get(cache, "e"))


def test_a_forked_child_uses_a_file_as_its_parent_does(root: Path, source: Source) -> None:
    cache = ChunkCache(root, SIZE)
    view = source.get(cache, "a")
    here, there = multiprocessing.Pipe()

    def hold() -> None:
        there.recv()

    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    del view
    assert not is_cached(source.get(cache, "b"))
    here.send(None)
    child.join()
    assert is_cached(source.get(cache, "b"))


@pytest.mark.parametrize("limit", [0, SIZE - 1])
@pytest.mark.parametrize("size", [0, SIZE])
def test_a_file_larger_than_the_limit_is_kept_in_memory(
    root: Path, source: Source, limit: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache, data = ChunkCache(root, limit), content("a")
    with caplog.at_level(logging.WARNING, logger="liveset"):
        for _ in range(3):
            view = cache.open(URL, "a", size, checksum(data), "", lambda sink: sink.write(data, 0))
            assert view == data
            assert view.readonly
            assert isinstance(view.obj, bytes | mmap.mmap)  # of which slices are bytes
            assert not is_cached(view)
    assert len(caplog.records) == 1
    assert "find no room" in caplog.text
    assert held(root) == 0


def test_only_its_own_files_are_removed_and_counted(root: Path, source: Source) -> None:
    cache = ChunkCache(root, SIZE)
    source.get(cache, "a").release()
    (own,) = cached_files(root)
    foreign = [
        root / "thesis.pdf",
        root / own.name,
        own.parent / "chunk-0-0.bin",
        own.parent / f"{own.name}.bak",
        root / "photos-0123456789abcdef" / own.name,  # without what makes a folder one of ours
    ]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(3 * SIZE))
    (root / "copy-0123456789abcdef").mkdir()
    (root / "copy-0123456789abcdef" / "place.json").write_bytes((own.parent / "place.json").read_bytes())
    foreign.append(root / "copy-0123456789abcdef" / own.name)
    foreign[-1].write_bytes(bytes(3 * SIZE))
    (own.parent / ("0" * 32 + ".cached")).symlink_to(foreign[0])
    cache.sweep()
    assert is_cached(source.get(cache, "b"))
    assert cache.info().size == SIZE
    cache.clear()
    assert [file.stat().st_size for file in foreign] == [3 * SIZE] * 6


def test_a_survey_is_not_needed_for_every_file(root: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache removes some more than it must, and knows how much it holds."""
    cache = ChunkCache(root, 200 * SIZE)
    for number in range(200):
        source.get(cache, str(number)).release()
    surveys: list[int] = []
    survey = cache._room._survey

    def counting() -> Any:
        surveys.append(1)
        return survey()

    monkeypatch.setattr(cache._room, "_survey", counting)
    for number in range(200, 240):
        source.get(cache, str(number)).release()
        assert held(root) <= 200 * SIZE
    assert 1 <= len(surveys) <= 6
    assert held(root) >= 185 * SIZE


def test_what_the_limit_may_be(root: Path) -> None:
    assert [parse_limit(limit) for limit in (None, 0, 10, 0.5, 1.0, "10GB", "64 mb", "1000")] == [
        None, 0, 10, 0.5, 1.0, 10 * 10**9, 64 * 10**6, 1000,
    ]  # fmt: skip
    wrong: Any
    for wrong in (-1, 0.0, 1.5, -0.1, True, "much", "0.5", [], float("nan")):
        with pytest.raises(ValueError, match=r"limit|size"):
            parse_limit(wrong)
    check_limit(10, 10)
    with pytest.raises(ValueError, match="at least 64,000,000 bytes"):
        check_limit(0, 64_000_000)
    disk = os.statvfs(root.parent)
    assert ChunkCache(root, 0.5).limit == int(0.5 * disk.f_blocks * disk.f_frsize)
    assert 0 < ChunkCache(root).limit <= 0.8 * disk.f_bavail * disk.f_frsize
    assert not root.exists()


# --- where it is --------------------------------------------------------------------------------------------------------------------------


def test_each_user_has_a_folder(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIVESET_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for user in ("ann", "bob"):
        monkeypatch.setenv("HOME", str(tmp_path / user))
        cache = ChunkCache()
        assert Path(cache.root) == tmp_path / user / ".cache" / "liveset"
        source.get(cache, "a").release()
        assert stat.S_IMODE(os.stat(cache.root).st_mode) == 0o700
    assert source.downloads() == ["a", "a"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert Path(cache_root()) == tmp_path / "bob" / ".cache" / "liveset"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Path(cache_root()) == tmp_path / "xdg" / "liveset"
    monkeypatch.setenv("LIVESET_CACHE_DIR", str(tmp_path / "named"))
    assert Path(cache_root()) == tmp_path / "named"
    assert Path(cache_root(tmp_path / "given")) == tmp_path / "given"


def test_the_cache_and_a_dataset_keep_apart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "plays").mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    for root in (data, data / "plays", data / "plays" / "cache", tmp_path, tmp_path / "link" / "plays"):
        with pytest.raises(ValueError, match="choose another folder"):
            check_root(root, data / "plays")
    for root in (data / "plays-cache", data / "cache", tmp_path / "absent"):
        check_root(root, data / "plays")


def test_passwords_are_not_stored(root: Path, source: Source) -> None:
    cache, data = ChunkCache(root), content("a")
    for url in ("https://ann:secret@host/plays/", "https://host/plays"):
        assert cache.open(url, *fresh(), lambda sink: sink.write(data, 0)) == data
    assert [place.url for place in cache.info().places] == ["https://host/plays"]
    assert not [file for file in root.rglob("*") if file.is_file() and b"secret" in file.read_bytes()]
    assert cache.clear("https://bob@host/plays/").files == 1


def test_a_root_that_cannot_be_made(tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"mine")
    cache = ChunkCache(root)
    for _ in range(2):
        assert source.get(cache, "a") == content("a")
    assert cache.peek(URL, *fresh()) is None
    assert root.read_bytes() == b"mine"
    assert cache.limit > 0
    assert cache.info().places == ()
    assert len(caplog.records) == 1


def test_a_root_that_is_read_only(disk: Path, source: Source) -> None:
    cache = ChunkCache(disk / "cache")
    source.get(cache, "a").release()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert is_cached(source.get(cache, "a"))
    assert not is_cached(source.get(cache, "b"))
    assert source.get(cache, "b") == content("b")
    assert source.downloads() == ["a", "b", "b"]
    with pytest.raises(StorageError, match="cannot empty the cache.*Read-only"):
        cache.clear()


@pytest.mark.parametrize("size", [0, 700_000])
def test_a_full_disk(disk: Path, source: Source, size: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = ChunkCache(disk / "cache", "10MB")
    first = source.get(cache, "a", size=700_000)
    data = content("b", 700_000)

    def download(sink: Sink) -> None:
        try:
            for start in range(0, 700_000, 50_000):
                sink.write(data[start : start + 50_000], start)
        except Exception as error:
            raise Lost("as clients do") from error

    view = cache.open(URL, "b", size, checksum(data), "", download)
    assert view == data
    assert not is_cached(view)
    assert "No space left" in caplog.text
    assert not parts(disk / "cache")
    assert first == content("a", 700_000)


# --- many processes -----------------------------------------------------------------------------------------------------------------------


def fetch_together(root: Path, source: Source, begun: Any, count: int) -> None:
    begun.release()

    def wait_for_all() -> None:
        for _ in range(count):
            begun.acquire()

    view = source.get(ChunkCache(root), "a", before=wait_for_all)
    assert view == content("a")
    assert is_cached(view)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_fetch_a_file_once(root: Path, source: Source, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    begun = context.Semaphore(0)
    processes = [context.Process(target=fetch_together, args=(root, source, begun, 6)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert source.downloads() == ["a"]
    assert not parts(root)


def test_threads_fetch_a_file_once(root: Path, source: Source) -> None:
    begun = threading.Semaphore(0)
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            fetch_together(root, source, begun, 8)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert source.downloads() == ["a"]


def test_a_lock_that_comes_after_another_process_is_done_is_given_up(root: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = HeldFile.lock

    def late(part: HeldFile) -> bool:
        monkeypatch.setattr(HeldFile, "lock", lock)
        source.get(ChunkCache(root), "a").release()  # gives the very file that is open here its name
        return lock(part)

    monkeypatch.setattr(HeldFile, "lock", late)
    view = source.get(ChunkCache(root), "a")
    assert view == content("a")
    assert is_cached(view)
    assert source.downloads() == ["a"]
    assert not parts(root)


def fetch_and_stop(root: Path, source: Source, pipe: Any) -> None:
    """Tell each step, and then go on at once: the kill comes whenever it comes."""
    data = content("a")

    def download(sink: Sink) -> None:
        for start in range(0, SIZE, 1000):
            pipe.send_bytes(b".")
            sink.write(data[start : start + 1000], start)

    pipe.send_bytes(b".")
    view = ChunkCache(root, 3 * SIZE).open(URL, *fresh(), download)
    pipe.send_bytes(b"!")
    signal.pause()
    del view


def test_a_killed_fetcher_leaves_nothing_in_the_way(root: Path, source: Source) -> None:
    context = multiprocessing.get_context("fork")
    cache = ChunkCache(root, 3 * SIZE, patience=1000)
    chance = random.Random(4)
    for number in range(20):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=fetch_and_stop, args=(root, source, there))
        child.start()
        for _ in range(chance.randrange(1, 43)):
            if here.recv_bytes() == b"!":  # it has the file
                break
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        started = time.monotonic()
        if number % 3:  # else the next one meets what is left
            assert source.get(cache, "a") == content("a")
            assert not parts(root)
            assert is_cached(source.get(cache, f"other-{number}"))
            cache.clear()
        assert time.monotonic() - started < 10
        assert held(root) <= int((root / "usage").read_text().split()[0] if (root / "usage").exists() else 0)
        assert held(root) <= 3 * SIZE
    cache.sweep()
    assert not parts(root)
    assert held(root) == int((root / "usage").read_text().split()[0])


def stall(root: Path, source: Source, ready: Any, go: Any) -> None:
    def wait() -> None:
        ready.set()
        go.wait()

    assert is_cached(source.get(ChunkCache(root), "a", before=wait))


def test_nobody_waits_for_a_process_that_hangs(root: Path, source: Source) -> None:
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    child = context.Process(target=stall, args=(root, source, ready, go))
    child.start()
    ready.wait()
    view = source.get(ChunkCache(root, patience=0.1), "a")
    assert view == content("a")
    assert not is_cached(view)
    go.set()
    child.join()
    assert child.exitcode == 0
    assert is_cached(source.get(ChunkCache(root), "a"))
    assert source.downloads() == ["a", "a"]


def fork_and_hang(root: Path, source: Source, pids: Any) -> None:
    """Fork a child while a thread is fetching."""
    ready = threading.Event()

    def wait() -> None:
        ready.set()
        signal.pause()

    threading.Thread(target=lambda: source.get(ChunkCache(root), "a", before=wait), daemon=True).start()
    ready.wait()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    pids.send(child)
    signal.pause()


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(root: Path, source: Source) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    parent = context.Process(target=fork_and_hang, args=(root, source, there))
    parent.start()
    child = here.recv()
    try:
        parent.kill()
        parent.join()
        started = time.monotonic()
        assert is_cached(source.get(ChunkCache(root, patience=20), "a"))
        assert time.monotonic() - started < 10
    finally:
        os.kill(child, signal.SIGKILL)


def use_some(root: Path, source: Source, seed: int) -> None:
    cache, chance, kept = ChunkCache(root, 2 * SIZE), random.Random(seed), memoryview(b"")
    for _ in range(60):
        name = f"chunk-{chance.randrange(12)}"
        view = source.get(cache, name)
        assert view == content(name)
        if sys.platform == "linux":  # what is unlinked and mapped counts for the disk
            assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{root}/" in line and "(deleted)" in line]
        if chance.random() < 0.5:
            kept = view
        assert len(kept) in (0, SIZE)
        del view


def watch(root: Path, stop: Any, largest: Any) -> None:
    before: dict[int, int] = {}
    while not stop.is_set():
        # Files come and go while they are looked at; those of two looks were there together in between.
        now = sizes(root)
        largest.value = max(largest.value, sum(min(size, before.get(number, 0)) for number, size in now.items()))
        before = now


@pytest.mark.slow
def test_the_limit_holds_at_every_moment(root: Path, source: Source) -> None:
    context = multiprocessing.get_context("fork")
    stop, largest = context.Event(), context.Value("q", 0)
    watcher = context.Process(target=watch, args=(root, stop, largest), daemon=True)
    watcher.start()
    workers = [context.Process(target=use_some, args=(root, source, seed)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    stop.set()
    watcher.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert 0 < largest.value <= 2 * SIZE
    assert held(root) <= int((root / "usage").read_text().split()[0]) <= 2 * SIZE
    assert not parts(root)


def test_clearing_while_others_read(root: Path, source: Source) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=use_some, args=(root, source, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    cache = ChunkCache(root, 2 * SIZE)
    while any(worker.is_alive() for worker in workers):
        cache.clear()
        cache.info()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert cache.clear().kept_files == 0
    assert sorted(file.name for file in root.iterdir()) == ["lock", "usage"]


# --- info and clear -----------------------------------------------------------------------------------------------------------------------


def test_info_and_clear(root: Path, source: Source) -> None:
    cache, data = ChunkCache(root, 10**9), content("x")
    assert cache.info().places == ()
    assert cache.clear().files == 0
    assert not root.exists()
    view = source.get(cache, "a")
    source.get(cache, "b").release()
    cache.open("gs://other/set", "x", 0, "", "", lambda sink: sink.write(data, 0)).release()
    found = {place.url: place for place in cache.info().places}
    assert (found[URL].files, found[URL].size, found[URL].in_use) == (2, 2 * SIZE, 1)
    assert (found["gs://other/set"].files, found["gs://other/set"].in_use) == (1, 0)
    last = found[URL].last_used
    assert last is not None
    assert abs(last.timestamp() - time.time()) < 60
    assert cache.info().size == held(root) == 3 * SIZE
    done = cache.clear(URL + "/")
    assert (done.files, done.size, done.kept_files, done.kept_size) == (1, SIZE, 1, SIZE)
    assert view == content("a")
    assert cache.holds("gs://other/set")
    assert not cache.holds("gs://other")
    cache.open("gs://other/set at http://localhost:9000", "x", 0, "", "", lambda sink: sink.write(data, 0)).release()
    assert cache.clear("gs://other/set").files == 2
    assert not cache.holds("gs://other/set")
    del view
    assert cache.clear().files == 1
    assert sorted(file.name for file in root.iterdir()) == ["lock", "usage"]
    assert int((root / "usage").read_text().split()[0]) == 0


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_the_command_line(root: Path, source: Source, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVESET_CACHE_DIR", str(root))
    assert call(capsys, "cache", "path") == (0, f"{root}\n", "")
    assert json.loads(call(capsys, "--cache-dir", "/x", "cache", "path", "--json")[1]) == {"path": "/x"}
    view = source.get(ChunkCache(root), "a")
    source.get(ChunkCache(root), "b").release()
    code, out, _ = call(capsys, "cache", "info")
    assert code == 0
    assert f"{URL}  2 files, 80,000 bytes, 1 in use, last used 20" in out
    told = json.loads(call(capsys, "cache", "info", "--json")[1])
    assert (told["path"], told["bytes"]) == (str(root), 2 * SIZE)
    (place,) = told["datasets"]
    assert (place["url"], place["files"], place["bytes"], place["in_use"]) == (URL, 2, 2 * SIZE, 1)
    would = "would remove 1 file, 40,000 bytes; 1 in use would stay (40,000 bytes)\n"
    assert call(capsys, "cache", "clear", "--dry-run") == (0, would, "")
    assert ChunkCache(root).info().size == 2 * SIZE
    assert call(capsys, "cache", "clear", URL)[1] == "removed 1 file, 40,000 bytes; 1 in use stay (40,000 bytes)\n"
    code, _, _ = call(capsys, "cache", "clear", "s3://else")
    assert code == "liveset: nothing of s3://else is cached; liveset cache info names the datasets."
    del view
    told = json.loads(call(capsys, "cache", "clear", "S3://bucket//plays/", "--json")[1])
    assert told == {"dry_run": False, "files": 1, "bytes": SIZE, "kept_files": 0, "kept_bytes": 0}
