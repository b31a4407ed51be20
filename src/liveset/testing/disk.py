"""Disk doubles: what is left of a directory when the process or the power ends between two calls to the operating system."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from liveset.storage import Buffer
from liveset.storage.files import Files
from liveset.testing.faults import SimulatedCrash, When

__all__ = ["DiskLog", "FailingFiles"]

T = TypeVar("T")


class FailingFiles(Files):
    """Ends the process at its call number ``crash_at`` (from 1), or raises ``error`` there and goes on."""

    def __init__(self, crash_at: int | None = None, when: When = "before", error: OSError | None = None, only: str | None = None) -> None:
        self.crash_at, self.when, self.error, self.only = crash_at, when, error, only
        self.calls: list[str] = []

    def create(self, path: str) -> int:
        return self._call("create", lambda: super(FailingFiles, self).create(path))

    def write(self, fd: int, data: Sequence[Buffer]) -> int:
        first = memoryview(data[0])
        taken = self._call(
            "write",
            lambda: super(FailingFiles, self).write(fd, data),
            lambda: super(FailingFiles, self).write(fd, [first[: len(first) // 2]]),
        )
        return taken

    def sync(self, fd: int) -> None:
        self._call("sync", lambda: super(FailingFiles, self).sync(fd))

    def close(self, fd: int) -> None:
        super().close(fd)  # the kernel does it after a crash, too

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory", lambda: super(FailingFiles, self).sync_directory(path))

    def make_directory(self, path: str) -> None:
        self._call("make_directory", lambda: super(FailingFiles, self).make_directory(path))

    def rename(self, source: str, target: str) -> None:
        self._call("rename", lambda: super(FailingFiles, self).rename(source, target))

    def link(self, source: str, target: str) -> None:
        self._call("link", lambda: super(FailingFiles, self).link(source, target))

    def remove(self, path: str) -> None:
        self._call("remove", lambda: super(FailingFiles, self).remove(path))

    def _call(self, name: str, whole: Callable[[], T], torn: Callable[[], object] | None = None) -> T:
        if self.only not in (None, name):
            return whole()
        self.calls.append(name)
        if self.crash_at is None or len(self.calls) < self.crash_at:
            return whole()
        if self.error is not None:
            if len(self.calls) == self.crash_at:
                if self.when == "after":
                    whole()
                raise self.error
            return whole()
        if len(self.calls) == self.crash_at:
            if self.when == "after":
                whole()
            elif self.when == "torn" and torn is not None:
                torn()
        raise SimulatedCrash(f"{name}, call {self.crash_at}, {self.when}")


@dataclass
class _Inode:
    written: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None


_DIRECTORY = _Inode()


class DiskLog(FailingFiles):
    """Remembers what has been synced, and makes the directories that a power loss could leave.

    A file that was not synced is empty, cut or whole. Names that were not synced with their directory are there or not, each by itself and
    in any order. ``forget`` lists calls or folders whose sync does nothing, for showing that a missing sync is noticed.
    """

    def __init__(self, root: str | os.PathLike[str], forget: Sequence[str] = ()) -> None:
        super().__init__()
        self.root = os.path.abspath(os.fspath(root))
        self.forget = frozenset(forget)
        self._inodes: dict[int, _Inode] = {}
        self._live: dict[str, _Inode] = {}
        self._kept: dict[str, list[_Inode | None]] = {}  # by name: what is on the disk, then what it may have become since

    def create(self, path: str) -> int:
        fd = super().create(path)
        self._inodes[os.fstat(fd).st_ino] = inode = _Inode()
        self._enter(path, inode)
        return fd

    def write(self, fd: int, data: Sequence[Buffer]) -> int:
        taken = super().write(fd, data)
        self._inodes[os.fstat(fd).st_ino].written += b"".join(bytes(memoryview(part)) for part in data)[:taken]
        return taken

    def sync(self, fd: int) -> None:
        if "sync" not in self.forget:
            super().sync(fd)
            inode = self._inodes[os.fstat(fd).st_ino]
            inode.synced = bytes(inode.written)

    def sync_directory(self, path: str) -> None:
        if "sync_directory" not in self.forget and os.path.basename(path) not in self.forget:
            super().sync_directory(path)
            for name, states in self._kept.items():
                if os.path.dirname(name) == path:
                    del states[:-1]

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._enter(path, _DIRECTORY)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        inode = self._live[source]
        self._enter(source, None)
        self._enter(target, inode)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._enter(target, self._live[source])

    def remove(self, path: str) -> None:
        super().remove(path)
        self._enter(path, None)

    def _enter(self, path: str, inode: _Inode | None) -> None:
        self._kept.setdefault(path, [None]).append(inode)
        if inode is None:
            self._live.pop(path, None)
        else:
            self._live[path] = inode

    def images(self, count: int, seed: int = 0) -> Iterator[dict[str, bytes]]:
        """What the disk may hold after a power loss now, as names below the root and bytes: the least, the most, and ``count`` between."""
        dice = random.Random(seed)
        picks: list[Callable[[int], int]] = [lambda _: 0, lambda n: n - 1, *([dice.randrange] * count)]
        for pick in picks:
            chosen = {path: states[pick(len(states))] for path, states in self._kept.items()}
            image = {}
            for path, inode in chosen.items():
                if inode is None or inode is _DIRECTORY or not self._reachable(path, chosen):
                    continue
                whole = bytes(inode.written)
                texts = [b"", whole[: len(whole) // 2], whole] if inode.synced is None else [inode.synced]
                image[os.path.relpath(path, self.root)] = texts[pick(len(texts))]
            yield image

    def _reachable(self, path: str, chosen: dict[str, _Inode | None]) -> bool:
        parent = os.path.dirname(path)
        while len(parent) >= len(self.root):
            if parent in self._kept and chosen[parent] is None:
                return False
            parent = os.path.dirname(parent)
        return True
