"""The room of the cache: what is held under its root, how much, and what goes when more is wanted.

How much is held stands in one small file. It is raised before a file grows and lowered after one is gone, both under the lock of the root,
so that it is never too low; what a killed process leaves too high is put right by counting again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from liveset.storage.held import HeldFile, Unusable, before_boot, remove_unused, usable
from liveset.storage.lock import locked

__all__ = ["PART", "Entry", "Room", "folder_name"]

PART = ".part"
"""What the name of a file ends with that is being fetched."""
SHARE = 0.75
"""Of what is free and what is held: the limit where none is given."""

_LOCK, _USAGE, _PLACE = "lock", "usage", "place.json"
_FOLDER = re.compile(r".+-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{32}\.cached(\.part)?")
_RECOUNT = 3600.0  # seconds for which a count of all files is trusted
_BATCH = 64  # files that are removed under one hold of the lock, beyond those that must go


class Entry(NamedTuple):
    """A file of the cache."""

    path: str
    size: int
    modified: float


class _Account(NamedTuple):
    used: int
    counted: float


class Room:
    """The root folder with a folder for each dataset; only files that the cache has named itself are ever counted or removed.

    Args:
        root: the folder.
        limit: bytes; a fraction of the disk; or None for a share of what is free and held.
        lock_timeout: seconds to wait for the lock of the root.
    """

    def __init__(self, root: str, limit: float | None, lock_timeout: float) -> None:
        self.root, self._lock_timeout = root, lock_timeout
        self._limit: int | float | None = limit

    def lock(self) -> AbstractContextManager[None]:
        """The lock of the root; whoever holds it alone makes room."""
        return locked(os.path.join(self.root, _LOCK), self._lock_timeout)

    def limit(self) -> int:
        """Bytes that may be held, as things stand."""
        account = self._account()
        return self._bytes(sum(file.size for file in self.files()) if account is None else account.used)

    # What is there

    def places(self) -> Iterator[tuple[str, str]]:
        """The folders that are ours, with the address of the dataset that they hold files of."""
        with suppress(OSError), os.scandir(self.root) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    with suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(entry.path, _PLACE), "rb") as file:
                        url = json.load(file)["url"]
                        if entry.name == folder_name(url):
                            yield entry.path, url

    def files(self, folder: str | None = None) -> Iterator[Entry]:
        """The files that are ours, in one folder or in all."""
        for each in [path for path, _ in self.places()] if folder is None else [folder]:
            with suppress(OSError), os.scandir(each) as found:
                for entry in found:
                    if _FILE.fullmatch(entry.name):
                        with suppress(FileNotFoundError):
                            info = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(info.st_mode):
                                yield Entry(entry.path, info.st_size, info.st_mtime)

    # Growing

    def create(self, part: str, url: str) -> HeldFile:
        """Opens a part file, which is made if it is not there, with its folders."""
        folder = os.path.dirname(part)
        for _ in range(3):  # a clear may remove the folder meanwhile
            with suppress(FileNotFoundError):
                self._describe(folder, url)
                return HeldFile(part, os.O_RDWR | os.O_CREAT)
            os.makedirs(self.root, 0o700, exist_ok=True)
            os.makedirs(folder, exist_ok=True)
        raise Unusable(f"{folder} disappears")

    def resize(self, part: HeldFile, size: int, empty: bool = False) -> None:
        """Gives a part file its size, once there is room for it.

        Raises:
            Unusable: there is none.
        """
        with usable(), self.lock():
            have = os.fstat(part.fd).st_size  # also what a killed process left, which is counted
            need = size - have
            account = self._make_room(need, size)
            changed = _Account(max(account.used + need, 0), account.counted)
            if need > 0:
                self._record(changed)
            if empty:
                os.ftruncate(part.fd, 0)
            os.ftruncate(part.fd, size)
            if need <= 0:
                self._record(changed)

    def publish(self, part: HeldFile, path: str) -> None:
        """Gives a part file its name, under the shared lock of a reader."""
        # One lock does not become the other in one step, so that nobody may make room in between.
        with self.lock():
            os.rename(path + PART, path)
            part.share()

    def replace(self, part: HeldFile, path: str) -> None:
        """Gives a part file a name that an older one may have, which nobody keeps open for long."""
        with self.lock():
            before = os.stat(path).st_size if os.path.exists(path) else 0
            os.rename(path + PART, path)
            if before and (account := self._account()) is not None:
                self._record(_Account(max(account.used - before, 0), account.counted))

    # Shrinking

    def remove(self, files: Sequence[Entry]) -> list[Entry]:
        """Removes those that nobody uses, and returns them."""
        removed: list[Entry] = []
        for start in range(0, len(files), _BATCH):
            with self.lock():
                gone = [file for file in files[start : start + _BATCH] if remove_unused(file.path)]
                account = self._account()
                if account is not None:
                    self._record(_Account(max(account.used - sum(file.size for file in gone), 0), account.counted))
            removed += gone
        return removed

    def remove_folder(self, folder: str, url: str) -> None:
        """Removes the folder of a dataset, if no file of it is left."""
        with self.lock(), suppress(FileNotFoundError):
            if os.listdir(folder) == [_PLACE]:
                os.unlink(os.path.join(folder, _PLACE))
                try:
                    os.rmdir(folder)
                except OSError:  # somebody has begun to fetch
                    self._describe(folder, url)

    def recount(self) -> None:
        """Removes what killed processes left, and counts again."""
        with self.lock():
            self._record(_count(self._survey()))

    # Parts

    def _make_room(self, need: int, size: int) -> _Account:
        account, files = self._account(), None
        if account is None:
            files = self._survey()
            account = _count(files)
        limit = self._bytes(account.used)
        if need <= 0 or account.used + need <= limit:
            return account
        if size <= limit:
            files = self._survey() if files is None else files
            account = _count(files)
            freed = self._evict(files, account.used + need - limit, limit // 20)
            account = _Account(account.used - freed, account.counted)
            self._record(account)
        if account.used + need > limit:
            raise Unusable(f"{size:,} bytes find no room: the limit is {limit:,}, and {account.used:,} are in use")
        return account

    def _evict(self, files: Sequence[Entry], over: int, slack: int) -> int:
        """Removes what was not used for longest, somewhat more than must be, so that not every file costs a survey."""
        freed, more = 0, _BATCH
        for file in sorted(files, key=lambda file: file.modified):
            if freed >= over:
                more -= 1
                if more < 0 or freed - over + file.size > slack:
                    break
            if remove_unused(file.path):
                freed += file.size
        return freed

    def _survey(self) -> list[Entry]:
        """All files that are ours, without the part files of the dead, which are removed."""
        return [file for file in self.files() if not (file.path.endswith(PART) and remove_unused(file.path))]

    def _bytes(self, used: int) -> int:
        if isinstance(self._limit, int):
            return self._limit
        folder = self.root
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        disk = os.statvfs(folder)
        if self._limit is not None:
            return int(self._limit * disk.f_blocks * disk.f_frsize)
        return int(SHARE * (disk.f_bavail * disk.f_frsize + used))

    def _account(self) -> _Account | None:
        """How much is held; None where that must be counted again."""
        try:
            with open(os.path.join(self.root, _USAGE), "rb") as file:
                used, counted = file.read().split()
                account = _Account(int(used), float(counted))
                if before_boot(os.fstat(file.fileno()).st_mtime):
                    return None
        except (OSError, ValueError):
            return None
        return account if 0 <= time.time() - account.counted < _RECOUNT else None

    def _record(self, account: _Account) -> None:
        # One write of a fixed length, which a killed process has done or not.
        with HeldFile(os.path.join(self.root, _USAGE), os.O_RDWR | os.O_CREAT) as file:
            os.pwrite(file.fd, f"{account.used:20d} {account.counted:20.3f}\n".encode(), 0)

    def _describe(self, folder: str, url: str) -> None:
        """Leaves the file that makes a folder one of ours; all that write it write the same bytes."""
        path, text = os.path.join(folder, _PLACE), json.dumps({"url": url}).encode()
        with suppress(FileNotFoundError), open(path, "rb") as file:
            if file.read() == text:
                return
        with HeldFile(path, os.O_RDWR | os.O_CREAT) as mine:
            os.pwrite(mine.fd, text, 0)
            os.ftruncate(mine.fd, len(text))


def folder_name(url: str) -> str:
    """The name of the folder of a dataset: some of its address to read, and a hash of all of it."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", url.partition("://")[2] or url)[-60:].strip("-.")
    return f"{slug or 'dataset'}-{hashlib.blake2b(url.encode(), digest_size=8).hexdigest()}"


def _count(files: Sequence[Entry]) -> _Account:
    return _Account(sum(file.size for file in files), time.time())
