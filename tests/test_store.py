"""The stores: the contract that all keep, and what is special to a directory."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

import liveset
from liveset.errors import Corrupt, DatasetNotFound, ForeignEdit, NotFound, StorageError, UnsafeStore
from liveset.storage import Buffer, Store, Swap, open_store, version_name
from liveset.storage.files import Files
from liveset.storage.local import LocalStore
from liveset.storage.lock import locked
from liveset.testing import MemoryStore
from liveset.testing.conformance import StoreTests
from liveset.testing.disk import FailingFiles


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "dataset")


class TestLocalStoreWithoutLinks(StoreTests):
    """File systems without hard links archive by copy."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "dataset", files=NoLinks())


class NoLinks(Files):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")


class ShortWrites(Files):
    """Takes at most 700 bytes at a time, in the middle of buffers too, as a system may."""

    def write(self, fd: int, data: Sequence[Buffer]) -> int:
        taken = 0
        for part in data[:20]:
            view = memoryview(part)[: 700 - taken]
            taken += os.write(fd, view)
            if taken == 700:
                break
        return taken


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "absent")
    assert not store.exists()
    assert store.read_head() is None
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        store.read("a")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).write("a.bin", b"abc")
    LocalStore(tmp_path).swap_head(b"head", None)
    plain_open = os.open

    def only_reading(path: str, flags: int, mode: int = 0o777) -> int:  # the super-user may write anywhere, so the mode alone shows nothing
        assert flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) == 0, path
        return plain_open(path, flags, mode)

    store = LocalStore(tmp_path)
    for folder in (tmp_path, tmp_path / "_liveset"):
        folder.chmod(0o555)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", only_reading)
            head = store.read_head()
            assert head is not None
            assert head.data == b"head"
            assert bytes(store.map("a.bin", 3)) == store.read("a.bin") == b"abc"
            assert {entry.name for entry in store.list("")} == {"a.bin", "index.json"}
        if os.geteuid() != 0:
            with pytest.raises(StorageError):
                store.swap_head(b"x", head.tag)
    finally:
        for folder in (tmp_path, tmp_path / "_liveset"):
            folder.chmod(0o755)


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    for umask, file_mode, folder_mode in ((0o002, 0o664, 0o775), (0o077, 0o600, 0o700)):
        root = tmp_path / str(umask)
        before = os.umask(umask)
        try:
            store = LocalStore(root)
            store.write("a.bin", b"1")
            store.swap_head(b"one", None)
            store.write_once(version_name(1), b"one")
            store.write_once(version_name(2), b"other")
        finally:
            os.umask(before)
        for path in [root, *root.rglob("*")]:
            wanted = folder_mode if path.is_dir() else file_mode
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_the_archive_is_a_link_and_outlives_the_swap(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.swap_head(b"one", None)
    head = store.read_head()
    assert head is not None
    store.write_once(version_name(1), b"one")
    assert (tmp_path / version_name(1)).samefile(tmp_path / "index.json")
    store.swap_head(b"two", head.tag)
    assert (tmp_path / version_name(1)).read_bytes() == b"one"


def test_short_writes_are_continued(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=ShortWrites())
    parts = [os.urandom(i % 301) for i in range(200)]
    store.write("a.bin", parts)
    assert store.read("a.bin") == b"".join(parts)


@pytest.mark.parametrize("call", ["create", "write", "sync"])
def test_a_full_disk_names_the_file_and_leaves_none(tmp_path: Path, call: str) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    store = LocalStore(tmp_path, files=FailingFiles(1, "before", full, only=call))
    with pytest.raises(StorageError, match=r"a\.bin.*No space left") as info:
        store.write("a.bin", b"abc")
    assert info.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_on_file_size_leaves_no_file(tmp_path: Path) -> None:
    script = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from liveset.storage import open_store\n"
        f"store = open_store({str(tmp_path / 'd')!r})\n"
        "try: store.write('big.bin', [b'x' * 60_000] * 5)\n"
        "except OSError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("StorageError"), done.stderr
    assert "big.bin" in done.stdout
    assert [path.name for path in (tmp_path / "d").rglob("*")] == []


@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_directory", "rename"])
def test_a_full_disk_at_the_swap_keeps_the_old_head(tmp_path: Path, call: str) -> None:
    LocalStore(tmp_path).swap_head(b"one", None)
    store = LocalStore(tmp_path, files=FailingFiles(1, "before", OSError(errno.ENOSPC, "No space left on device"), only=call))
    head = store.read_head()
    assert head is not None
    with pytest.raises(StorageError, match="No space left"):
        store.swap_head(b"two", head.tag)
    assert (tmp_path / "index.json").read_bytes() == b"one"
    assert sorted(os.listdir(tmp_path / "_liveset")) == ["lock"]


def test_a_failing_sync_after_the_rename_is_unknown(tmp_path: Path) -> None:
    LocalStore(tmp_path).swap_head(b"one", None)
    calls = FailingFiles()
    LocalStore(tmp_path, files=calls).swap_head(b"two", LocalStore(tmp_path).read_head().tag)  # type: ignore[union-attr]
    last = calls.calls.count("sync_directory")
    store = LocalStore(tmp_path, files=FailingFiles(last, "before", OSError(errno.EIO, "broken"), only="sync_directory"))
    head = store.read_head()
    assert head is not None
    assert store.swap_head(b"three", head.tag) is Swap.UNKNOWN


def test_a_rename_that_answers_with_an_error_but_happened_is_unknown(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, files=FailingFiles(1, "after", OSError(errno.EIO, "broken"), only="rename"))
    assert store.swap_head(b"one", None) is Swap.UNKNOWN
    assert (tmp_path / "index.json").read_bytes() == b"one"


def test_leftovers_of_dead_writers_go_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.swap_head(b"one", None)
    for name in ("index.json.0123456789abcdef.tmp", "00000001.json.0123456789abcdef.tmp", "mine.tmp", "index.json.bak"):
        (tmp_path / "_liveset" / name).write_bytes(b"half")
    (tmp_path / "index.json.tmp").write_bytes(b"of another tool")
    head = store.read_head()
    assert head is not None
    store.swap_head(b"two", head.tag)
    assert sorted(os.listdir(tmp_path / "_liveset")) == ["index.json.bak", "lock", "mine.tmp"]
    assert (tmp_path / "index.json.tmp").exists()


def test_what_is_not_a_file_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(Corrupt, match="not a regular file"):
        LocalStore(tmp_path).map("folder", 0)


def test_no_locks_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnsafeStore, match="no file locks"):
        LocalStore(tmp_path).swap_head(b"one", None)
    assert not (tmp_path / "index.json").exists()


def test_windows_is_refused_for_writing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).write("a.bin", b"abc")
    monkeypatch.setattr("liveset.storage.local.sys.platform", "win32")
    store = LocalStore(tmp_path)
    assert store.read("a.bin") == b"abc"
    for act in (lambda: store.write("b.bin", b""), lambda: store.swap_head(b"", None), lambda: store.write_once("c", b"")):
        with pytest.raises(UnsafeStore, match="Windows"):
            act()


def test_a_lock_that_is_held_times_out_and_says_so(tmp_path: Path) -> None:
    LocalStore(tmp_path).swap_head(b"one", None)
    with open(tmp_path / "_liveset/lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"lock has been locked.*0\.05 seconds"):
            LocalStore(tmp_path, lock_timeout=0.05).swap_head(b"two", None)
    assert LocalStore(tmp_path, lock_timeout=0.05).swap_head(b"two", None) is Swap.LOST


def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    path, (ear, mouth) = str(tmp_path / "lock"), os.pipe()
    with locked(path, 1):
        child = os.fork()
        if child == 0:
            os.close(mouth)
            os.read(ear, 1)  # until the parent closes its end
            os._exit(0)
    try:
        with locked(path, 0):
            pass
    finally:
        os.close(mouth)
        os.waitpid(child, 0)
        os.close(ear)


def test_a_head_that_vanishes_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.swap_head(b"one", None)
    store.write_once(version_name(1), b"one")
    os.rename(tmp_path / "index.json", tmp_path / "away")
    monkeypatch.setattr("liveset.storage.local.time.sleep", lambda _: os.rename(tmp_path / "away", tmp_path / "index.json"))
    head = store.read_head()
    assert head is not None
    assert head.data == b"one"


def test_a_file_where_the_directory_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    assert store.read_head() is None
    with pytest.raises(DatasetNotFound, match="is a file, and a dataset is a folder"):
        store.exists()
    with pytest.raises(StorageError, match="file"):
        store.write("a.bin", b"")


def test_the_clock_needs_no_space(tmp_path: Path) -> None:
    LocalStore(tmp_path).swap_head(b"one", None)
    full = FailingFiles()
    before = LocalStore(tmp_path, files=full).now()
    LocalStore(tmp_path).write("a.bin", b"1")
    (entry,) = LocalStore(tmp_path).list("a.bin")
    assert before <= entry.modified <= LocalStore(tmp_path, files=full).now()
    assert full.calls == []


def test_the_clock_where_the_lock_file_is_a_colleagues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.utime", refuse)
        now = store.now()
    assert timedelta(0) <= store.now() - now < timedelta(seconds=30)
    assert sorted(os.listdir(tmp_path / "_liveset")) == ["lock"]


def test_a_dataset_in_a_place_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    store = LocalStore(tmp_path)
    store.swap_head(b"one", None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_errors_survive_pickling(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as info:
        LocalStore(tmp_path).read("absent")
    copy = pickle.loads(pickle.dumps(info.value))
    assert (str(copy), copy.file) == (str(info.value), str(tmp_path / "absent"))


URL = "ftp://host/dataset"


@pytest.mark.parametrize(
    "call",
    [
        lambda: open_store(URL),
        lambda: liveset.dataset_update(URL),
        lambda: liveset.transform(URL, str),
        lambda: liveset.compact(URL),
        lambda: liveset.purge(URL, ["k"]),
        lambda: liveset.adopt(URL),
        lambda: liveset.build_keys_index(URL, "id"),
        lambda: liveset.StreamingDataset(URL),
    ],
)
def test_places_of_other_kinds_cannot_be_opened(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"'ftp://host/dataset': ftp:// is not supported\. Use a path, s3://"):
        call()


def _race(root: str, number: int, turns: int) -> int:
    store, won = LocalStore(root), 0
    while won < turns:
        head = store.read_head()
        assert head is not None
        count = int(head.data.split()[0])
        store.write_once(version_name(count), head.data)
        won += store.swap_head(b"%d of %d" % (count + 1, number), head.tag) is Swap.SWAPPED
    return won


def test_processes_that_race_never_lose_a_swap(tmp_path: Path) -> None:
    LocalStore(tmp_path).swap_head(b"0 of nobody", None)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert sum(pool.starmap(_race, [(str(tmp_path), number, 15) for number in range(4)])) == 60
    assert (tmp_path / "index.json").read_bytes().split()[0] == b"60"
    for count in range(60):
        assert (tmp_path / version_name(count)).read_bytes().split()[0] == b"%d" % count


def test_archives_are_never_replaced_in_a_race(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.swap_head(b"one", None)
    (tmp_path / "_liveset/versions").mkdir()
    (tmp_path / version_name(1)).write_bytes(b"other")
    with pytest.raises(ForeignEdit, match="copied back by hand"):
        store.write_once(version_name(1), b"one")
    assert (tmp_path / version_name(1)).read_bytes() == b"other"


def test_who_waits_for_the_lock_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("liveset.storage.lock._PATIENCE", 0)
    store = LocalStore(tmp_path, lock_timeout=0.05)
    with LocalStore(tmp_path).exclusive(), pytest.raises(StorageError, match="locked by another writer"):
        store.now()
    assert [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()] != []


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, lock_timeout=0.05)
    with store.exclusive():
        store.now()  # whoever holds it does not wait for itself
        if (child := os.fork()) == 0:
            try:
                store.now()
            except StorageError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
