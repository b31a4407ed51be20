"""The lock: one writer at a time on a local disk, by ``flock``, which the kernel drops when its holder dies."""

from __future__ import annotations

import errno
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from liveset.errors import StorageError, UnsafeStore

__all__ = ["locked"]

_log = logging.getLogger("liveset")
_PATIENCE = 5.0  # seconds until somebody who waits is told why
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(path: str, timeout: float) -> Iterator[None]:
    """Holds the lock file at ``path``; the file is never removed, so that all writers lock the same one.

    Only this function opens the file: where the kernel turns ``flock`` into POSIX locks (NFS), closing another descriptor would drop them.
    """
    if sys.platform == "win32":
        raise UnsafeStore("liveset cannot write on Windows yet: its file locks have not been tested there. Reading works.")
    import fcntl

    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_RDWR, 0o666)
    except PermissionError:
        # A colleague's lock file in a shared folder: reading it is enough to lock it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        started = time.monotonic()
        pause, told = 0.0005, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited >= _PATIENCE and not told:
                    told = True
                    _log.warning("waiting for %s, which another writer holds; up to %g seconds.", path, timeout)
                if waited >= timeout:
                    raise StorageError(f"{path} has been locked by another writer for {timeout:g} seconds.", file=path) from None
                time.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, 0.02)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    raise UnsafeStore(
                        f"{path}: this file system has no file locks ({error.strerror}), so a commit here could lose another one."
                    ) from error
                raise
        try:
            yield
        finally:
            # Said aloud, not left to close(): a child forked meanwhile holds the same open file and would keep the lock. An error here must
            # not look like one of what was done under the lock, which may have been a commit.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        with suppress(OSError):
            os.close(fd)
