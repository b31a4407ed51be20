"""The local store: a directory on a file system with working ``flock`` and ``rename``."""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import xxhash

from liveset.errors import Corrupt, DatasetError, DatasetNotFound, NotFound, StorageError, UnsafeStore
from liveset.storage.files import Files
from liveset.storage.lock import locked
from liveset.storage.store import HEAD, PRIVATE, VERSIONS, Ask, Buffer, Entry, Head, Sink, Swap, Tag, as_buffers, check_name, foreign_bytes

__all__ = ["LocalSource", "LocalStore"]

_LOCK = PRIVATE + "lock"
_BATCH = 1024  # buffers in one writev; POSIX lets a system refuse more
_STEP = 1 << 30  # bytes in one read; Linux never moves more than 2 GiB at once
_LEFTOVER = re.compile(r"((index|[0-9]{8}|clock)\.json|published)\.[0-9a-f]{16}\.tmp")
_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # the latter for Windows, where reading works


class LocalStore:
    """A dataset in a directory of this machine; reading never creates anything."""

    def __init__(self, root: str | os.PathLike[str], *, lock_timeout: float = 300.0, files: Files | None = None) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._lock_timeout = lock_timeout
        self._files = Files() if files is None else files
        self._unsynced: set[str] = set()
        self._holder: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """The directory."""
        return self._root

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._root,)

    @property
    def remote(self) -> bool:
        """False: a file is mapped where it lies."""
        return False

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def probe(self) -> None:
        """Nothing to do: locks are tried with the first commit, and files are written without them."""

    def exists(self) -> bool:
        """Whether the directory is there; ``DatasetNotFound`` where a file is."""
        if os.path.isfile(self._root):
            raise DatasetNotFound(f"{self._root} is a file, and a dataset is a folder: the one that holds {HEAD}.", path=self._root)
        return os.path.isdir(self._root)

    # Reading

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from ``start``; fewer than ``length`` where the file ends earlier."""
        path = self._path(name)
        with _named(path, "read"):
            fd = os.open(path, _READ)
            try:
                if length is None:
                    length = max(os.fstat(fd).st_size - start, 0)
                return _read(fd, start, length)
            finally:
                os.close(fd)

    def read_head(self) -> Head | None:
        """The head and its tag; None where no ``index.json`` is."""
        path = os.path.join(self._root, HEAD)
        for pause in (0.01, 0.02, 0.05, None):
            try:
                data = self.read(HEAD)
                return Head(data, _tag(data))
            except NotFound:
                # On network mounts a file that was just replaced can seem to be missing; elsewhere no dataset of ours is ever without it.
                if pause is None or not os.path.isdir(os.path.join(self._root, VERSIONS)):
                    return None
            except StorageError as error:
                if pause is None or error.errno != errno.ESTALE:
                    raise
            time.sleep(pause)
        raise AssertionError(path)  # the last round always leaves

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Parts of a file, each given by its start and length; ``Corrupt`` where the file ends earlier."""
        view = self.map(name, max((start + length for start, length in ranges), default=0))
        return [bytes(view[start : start + length]) for start, length in ranges]

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        """The file, which is here."""
        return self.map(name, size)

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        """Read-only view of a whole file; ``Corrupt`` when it is shorter than ``size`` bytes."""
        path = self._path(name)
        with _named(path, "map"):
            fd = os.open(path, _READ)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise Corrupt(f"{path} is not a regular file.", file=path)
                if found.st_size < size:
                    raise Corrupt(f"{path} is truncated: it has {found.st_size} of {size} bytes.", file=path)
                return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ)) if found.st_size else memoryview(b"")
            finally:
                os.close(fd)

    def list(self, prefix: str) -> Iterator[Entry]:
        """All files whose names begin with ``prefix``, sorted; not the lock, which is no data."""
        folder = prefix[: prefix.rfind("/") + 1]
        if folder:
            check_name(folder[:-1])
        return (entry for entry in self._walk(folder, prefix) if entry.name != _LOCK)

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        path = os.path.join(self._root, folder)
        with _named(path, "list"):
            try:
                with os.scandir(path) as found:
                    items = sorted((item for item in found if (folder + item.name).startswith(prefix)), key=lambda item: item.name)
            except (FileNotFoundError, NotADirectoryError):
                return
        for item in items:
            try:
                if item.is_dir(follow_symlinks=False):
                    yield from self._walk(folder + item.name + "/", "")
                elif item.is_file():
                    facts = item.stat()
                    yield Entry(folder + item.name, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))
            except FileNotFoundError:  # removed since it was listed
                continue

    # Writing

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        """Creates a file that must not exist and syncs its bytes; a failure leaves no file."""
        path = self._path(name)
        with self._changing(path):
            self._make_directories(os.path.dirname(path))
            self._create(path, as_buffers(data))
        self._unsynced.add(os.path.dirname(path))

    def copy(self, source: str, name: str) -> None:
        """Gives a file a second name; makes a copy where the file system has no hard links."""
        path = self._path(name)
        with self._changing(path):
            self._make_directories(os.path.dirname(path))
            # A symbolic link would be linked itself, and may be one that another program removes.
            if os.path.islink(self._path(source)) or not self._link(self._path(source), path):
                self._create(path, [self.map(source, 0)])
        self._unsynced.add(os.path.dirname(path))

    def write_once(self, name: str, data: bytes) -> None:
        """Creates a file whole; equal bytes under the name are fine, others are ``ForeignEdit``."""
        path = self._path(name)
        with self._lock(), self._changing(path):
            self._make_directories(os.path.dirname(path))
            if os.path.lexists(path):
                if self.read(name) != data:
                    raise foreign_bytes(path)
            elif not self._link_head(path, data):
                temporary = self._temporary(os.path.basename(path))
                try:
                    self._create(temporary, [data])
                    self._files.rename(temporary, path)  # under the lock, nobody else can have put a file there meanwhile
                except BaseException:
                    self._discard(temporary)
                    raise
            self._unsynced.add(os.path.dirname(path))

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        """Puts a derived file under a fixed name, if the head is still the given one."""
        path = self._path(name)
        with self._lock(), self._changing(path):
            now = self.read_head()
            if now is None or now.tag != head:
                return False
            self._make_directories(os.path.dirname(path))
            temporary = self._temporary("published")
            try:
                self._create(temporary, as_buffers(data))
                self._files.rename(temporary, path)
            except BaseException:
                self._discard(temporary)
                raise
        return True

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        """Replaces ``index.json`` under the lock, after everything that it names is durable."""
        path = os.path.join(self._root, HEAD)
        with self._lock(), self._changing(path):
            self._remove_leftovers()
            head = self.read_head()
            if (head.tag if head else None) != expected:
                return Swap.LOST
            temporary = self._temporary(HEAD)
            try:
                self._create(temporary, [data])
                self._withdraw(withdraw)
                self._sync_directories()
                self._files.rename(temporary, path)
            except BaseException as error:
                if isinstance(error, OSError) and self._stands(data):
                    return Swap.UNKNOWN  # a network mount may answer an error for a rename that it did
                self._discard(temporary)
                raise
            try:
                self._files.sync_directory(self._root)
            except OSError:
                return Swap.UNKNOWN  # the new head is seen by all, but may not survive a power loss
        return Swap.SWAPPED

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock, so that nobody else swaps the head meanwhile; what this thread does under it does not wait for it again."""
        with self._lock():
            before, self._holder = self._holder, (os.getpid(), threading.get_ident())
            try:
                yield
            finally:
                self._holder = before

    def delete(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are fine."""
        for name in names:
            path = self._path(name)
            with self._changing(path), suppress(FileNotFoundError):
                self._files.remove(path)

    def now(self) -> datetime:
        """The time on the clock of the file system, which is another machine's on a network mount."""
        lock = self._path(_LOCK)
        with self._lock(), self._changing(lock):
            try:
                # Takes no space, so that a vacuum can begin on a full disk; to nobody does it mean anything when the lock was changed.
                os.utime(lock)
                return datetime.fromtimestamp(os.stat(lock).st_mtime, UTC)
            except PermissionError:
                pass  # a colleague's lock file in a shared folder
            path = self._temporary("clock.json")
            self._create(path, [b"."])
            try:
                return datetime.fromtimestamp(os.stat(path).st_mtime, UTC)
            finally:
                self._discard(path)

    # Parts

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))

    def _temporary(self, name: str) -> str:
        # In our own folder, so that finding leftovers does not mean listing all chunks. Written under the lock only.
        return os.path.join(self._root, PRIVATE, f"{name}.{os.urandom(8).hex()}.tmp")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if self._holder == (os.getpid(), threading.get_ident()):  # a forked child has threads of the same number
            yield
            return
        path = self._path(_LOCK)
        with self._changing(path):
            self._make_directories(os.path.dirname(path))
        with ExitStack() as stack:
            with _named(path, "lock"):
                stack.enter_context(locked(path, self._lock_timeout))
            yield

    @contextmanager
    def _changing(self, path: str) -> Iterator[None]:
        if sys.platform == "win32":
            raise UnsafeStore("liveset cannot write on Windows yet: its file locks have not been tested there. Reading works.")
        with _named(path, "write"):
            yield

    def _create(self, path: str, buffers: Sequence[Buffer]) -> None:
        fd = self._files.create(path)
        try:
            try:
                self._write(fd, _views(buffers))
                self._files.sync(fd)
            finally:
                self._files.close(fd)
        except BaseException:
            self._discard(path)
            raise

    def _write(self, fd: int, views: MutableSequence[memoryview]) -> None:
        first = 0
        while first < len(views):
            taken = self._files.write(fd, views[first : first + _BATCH])
            while first < len(views) and taken >= len(views[first]):
                taken -= len(views[first])
                first += 1
            if taken:
                views[first] = views[first][taken:]

    def _discard(self, path: str) -> None:
        with suppress(OSError):
            self._files.remove(path)

    def _withdraw(self, names: Sequence[str]) -> None:
        for path in map(self._path, names):
            with suppress(FileNotFoundError):
                self._files.remove(path)
                self._unsynced.add(os.path.dirname(path))

    def _make_directories(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with suppress(FileExistsError):
                self._files.make_directory(path)
            self._unsynced.add(os.path.dirname(path))

    def _sync_directories(self) -> None:
        """Makes names durable: those that this store wrote, and those of the folders that other processes of the same commit write to."""
        shared = [self._root, *(os.path.join(self._root, folder) for folder in (PRIVATE[:-1], VERSIONS[:-1]))]
        for path in sorted({*shared, *self._unsynced}, key=len, reverse=True):
            if os.path.isdir(path):
                self._files.sync_directory(path)
            self._unsynced.discard(path)

    def _link_head(self, path: str, data: bytes) -> bool:
        """Archives the head as a second name of its file, which is never written again; False where that cannot be done."""
        return self._stands(data) and self._link(os.path.join(self._root, HEAD), path)

    def _link(self, source: str, path: str) -> bool:
        """Gives a file a second name; False where that cannot be done."""
        try:
            fd = os.open(source, _READ)
            try:
                self._files.sync(fd)  # another program may have written it without
            finally:
                os.close(fd)
            self._files.link(source, path)
        except OSError:
            return False
        return True

    def _stands(self, data: bytes) -> bool:
        try:
            head = self.read_head()
        except DatasetError:
            return False
        return head is not None and head.data == data

    def _remove_leftovers(self) -> None:
        """Removes the temporary files of writers that died; under the lock nobody alive has one."""
        folder = os.path.join(self._root, PRIVATE)
        for name in os.listdir(folder):
            if _LEFTOVER.fullmatch(name):
                self._discard(os.path.join(folder, name))


class LocalSource(LocalStore):
    """A folder of this machine as the source of a cache: what ``local:PATH`` names."""

    @property
    def url(self) -> str:
        """The folder, so marked."""
        return f"local:{self._root}"

    @property
    def remote(self) -> bool:
        """True: files are copied before they are read, as from a network mount."""
        return True

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        """None: nothing is kept here."""
        return None

    def read_shared_head(self, keep: Callable[[Ask], Head | None]) -> Head | None:
        """The head: it is at hand."""
        return self.read_head()

    def download(self, name: str, sink: Sink, size: int = 0) -> None:
        """Hands out a whole file piece by piece."""
        path = self._path(name)
        at = 0
        with _named(path, "read"), open(path, "rb") as source:
            while part := source.read(1 << 20):
                sink.write(part, at)
                at += len(part)


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def _tag(data: bytes) -> Tag:
    return Tag(xxhash.xxh3_128_hexdigest(data))


def _read(fd: int, start: int, length: int) -> bytes:
    os.lseek(fd, start, os.SEEK_SET)
    parts = []
    while length > 0 and (part := os.read(fd, min(length, _STEP))):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def _named(path: str, action: str) -> Iterator[None]:
    """Turns errors of the operating system into ours, which name the file and keep the number of the error."""
    try:
        yield
    except DatasetError:
        raise
    except OSError as error:
        new: DatasetError
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and action != "write":
            new = NotFound(f"{path} does not exist.", file=path)
        else:
            new = StorageError(f"cannot {action} {path}: {error.strerror or error}", file=path)
        new.errno = error.errno
        raise new from error
