"""Files: the calls to the operating system that a local store makes, gathered so that tests can record, fail or forget them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from liveset.storage.store import Buffer

__all__ = ["Files"]

_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)


class Files:
    """Every call that changes something on the disk; modes follow the umask."""

    def create(self, path: str) -> int:
        """Creates a file that must not exist, and opens it for writing."""
        return os.open(path, _FLAGS, 0o666)

    def write(self, fd: int, data: Sequence[Buffer]) -> int:
        """Writes from the first byte of ``data``; returns how many bytes were taken."""
        return os.writev(fd, data)

    def sync(self, fd: int) -> None:
        """Returns when the bytes of the file are on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes a file."""
        os.close(fd)

    def sync_directory(self, path: str) -> None:
        """Returns when the names in the directory are on the disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        """Creates a directory."""
        os.mkdir(path, 0o777)

    def rename(self, source: str, target: str) -> None:
        """Moves a file over another one, in one step."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Gives a file a second name, which must be free."""
        os.link(source, target, follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Removes a name."""
        os.unlink(path)
