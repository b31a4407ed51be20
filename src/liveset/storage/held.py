"""The files of the cache and their locks, which the kernel drops when the last process that has the file open is gone."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from liveset.errors import StorageError, UnsafeStore

if sys.platform != "win32":
    import fcntl

__all__ = ["HeldFile", "MemoryFile", "Unusable", "before_boot", "in_use", "reason", "remove_unused", "usable"]


class Unusable(Exception):
    """The cache cannot keep this file just now, and why."""


@contextmanager
def usable() -> Iterator[None]:
    """Turns what the disk or a lock refuses into ``Unusable``; too many open files are the caller's to close."""
    try:
        yield
    except (OSError, UnsafeStore) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            new = StorageError(f"cannot open a file for what is fetched: {error.strerror}", file=str(error.filename or ""))
            new.errno = error.errno
            raise new from error
        raise Unusable(reason(error)) from error


def reason(error: Exception) -> str:
    """What an error says, with the file."""
    return f"{error.filename or 'a write'}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


class HeldFile:
    """An open file; a forked child lets go of it at once, and with it of the lock, which is the parent's."""

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        _opened.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        _opened.discard(self)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def lock(self) -> bool:
        """Takes the lock for us alone, if nobody has it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> bool:
        """Shares the lock with other readers; False if somebody keeps it alone, which is for a moment only."""
        for pause in [0.0005] * 20 + [0.01] * 50:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
            else:
                return True
        return False

    def is_at(self, path: str) -> bool:
        """Whether the name still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def map(self) -> memoryview:
        return memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ))


class MemoryFile(HeldFile):
    """A file of Linux that is on no disk: filling it costs less than filling memory, whose pages are cleared first."""

    def __init__(self) -> None:
        self.fd = -1
        with usable():
            self.fd = os.memfd_create("liveset")
        _in_memory.add(self)

    def __del__(self) -> None:
        self.close()


_opened: set[HeldFile] = set()
_in_memory: weakref.WeakSet[MemoryFile] = weakref.WeakSet()


def _forget_files() -> None:
    for file in [*_opened, *_in_memory]:
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_files)


def remove_unused(path: str) -> bool:
    """Removes a file that nobody uses; False for any other."""
    try:
        # NFS locks for writing only what is opened for writing.
        with HeldFile(path, os.O_RDWR) as file:
            if file.lock() and file.is_at(path):
                os.unlink(path)
                return True
    except OSError:
        pass
    return False


def in_use(path: str) -> bool:
    """Whether somebody reads or fetches the file."""
    try:
        with HeldFile(path, os.O_RDWR) as file:
            return not file.lock()
    except OSError:
        return False


def before_boot(modified: float) -> bool:
    """Whether a time lies before the machine was started (or in the future, where it says nothing)."""
    age = time.time() - modified
    return age > time.monotonic() or age < -60
