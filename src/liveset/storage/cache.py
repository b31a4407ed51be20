"""The cache: files of remote stores on the local disk, fetched once per machine and shared by all processes.

A file is fetched into ``<file>.part`` by whoever holds the lock of that file, checked, and renamed; nothing under its own name is ever
incomplete. A reader shares the lock of the cached file as long as its map lives: mmap keeps a duplicate of the descriptor, and ``flock``
belongs to what all duplicates have in common, also those of forked children. Whoever makes room wants that lock for itself, so what is in
use stays. The kernel drops the locks of the dead, so no leftover stands in anybody's way.

The cache never fails: a file that cannot be kept, for lack of room or because of the disk, is fetched into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from liveset.errors import StorageError, UnsafeStore, UnsupportedFormat
from liveset.format import codec
from liveset.format.config import parse_size
from liveset.storage.held import HeldFile, Unusable, before_boot, in_use, usable
from liveset.storage.room import PART, Entry, Room, folder_name
from liveset.storage.sink import DiskSink, Download, fetched, fetched_in_memory, matches
from liveset.storage.store import HEAD, Ask, Head

__all__ = ["CacheInfo", "ChunkCache", "Cleared", "Download", "PlaceInfo", "cache_root", "check_limit", "check_root", "parse_limit"]

_TOUCH = 30.0  # seconds between two notes that a file is used

_log = logging.getLogger("liveset")
_told = False


def cache_root(root: str | os.PathLike[str] | None = None) -> str:
    """The folder of the cache: the given one, else ``LIVESET_CACHE_DIR``, else ``liveset`` in the user's folder for caches."""
    if root is not None:
        return os.path.abspath(os.path.expanduser(root))
    if named := os.environ.get("LIVESET_CACHE_DIR"):
        return os.path.abspath(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.abspath(os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "liveset"))


def check_root(root: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Refuses a cache in, around or at a dataset of this machine, whose files are the only copy; ``ValueError``."""
    cache, dataset = os.path.realpath(root), os.path.realpath(source)
    if os.path.commonpath([cache, dataset]) in (cache, dataset):
        raise ValueError(f"the cache folder {cache} and the dataset {dataset} lie in one another: choose another folder for the cache.")


def parse_limit(limit: float | str | None) -> float | None:
    """What limits the cache: bytes, an integer or ``"10GB"``, or a fraction of the disk in (0, 1]; ``ValueError`` for anything else."""
    if isinstance(limit, str):
        limit = int(limit) if limit.strip().isdecimal() else parse_size(limit)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise ValueError(f"the limit of the cache is a number of bytes, a text as '10GB' or a fraction of the disk, not {limit!r}.")
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ValueError(f"the limit of the cache as a fraction must be in (0, 1], not {limit!r}; in bytes it is an integer or '10GB'.")
    if isinstance(limit, int) and limit < 0:
        raise ValueError(f"the limit of the cache cannot be negative: {limit}.")
    return limit


def check_limit(limit: int, largest: int) -> None:
    """Refuses a limit that the largest file of a dataset does not fit into; ``ValueError`` with the smallest that works."""
    if limit < largest:
        raise ValueError(
            f"a cache of {limit:,} bytes cannot hold the largest chunk: the limit must be at least {largest:,} bytes, "
            "and should be twice that for each worker."
        )


@dataclass(frozen=True, slots=True)
class PlaceInfo:
    """What the cache holds of one dataset.

    Attributes:
        url: where the dataset is.
        folder: of the cached files.
        files: how many are held.
        size: their bytes, with those of files that are being fetched.
        in_use: how many files somebody reads or fetches.
        last_used: the latest use of one of them, to about half a minute.
    """

    url: str
    folder: str
    files: int
    size: int
    in_use: int
    last_used: datetime | None


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the cache holds.

    Attributes:
        root: the folder of the cache.
        limit: bytes that it may hold.
        size: bytes that it holds.
        places: the datasets, the last used one first.
    """

    root: str
    limit: int
    size: int
    places: tuple[PlaceInfo, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `ChunkCache.clear` removed, and what it left since somebody uses it."""

    files: int = 0
    size: int = 0
    kept_files: int = 0
    kept_size: int = 0


class ChunkCache:
    """The files that are held under one root; from any thread and process, also forked ones, at the same time.

    Args:
        root: the folder; None for the user's (`cache_root`).
        limit: what `parse_limit` takes; None for three quarters of what is free and held.
        patience: seconds without progress after which nobody waits any longer for another process that fetches the same file.
        lock_timeout: seconds to wait for the lock of the root; then the file is not kept.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        limit: float | str | None = None,
        *,
        patience: float = 30.0,
        lock_timeout: float = 4.0,
    ) -> None:
        self._room = Room(cache_root(root), parse_limit(limit), lock_timeout)
        self._patience = patience
        # Why the head was not kept: told when a file is opened, since a limit that no chunk fits into is an error before.
        self._untold: Unusable | None = None

    @property
    def root(self) -> str:
        """The folder."""
        return self._room.root

    @property
    def limit(self) -> int:
        """Bytes that may be held, as things stand."""
        return self._room.limit()

    def open(
        self, place_url: str, name: str, size: int, check: str, edition: str, download: Download, *, verify: bool = False
    ) -> memoryview:
        """A read-only view of a file, cached or fetched now; ``.obj`` is a map of the whole file, or of its bytes in memory.

        Args:
            place_url: names the dataset, with the endpoint where there is one; a user and password in it are left out.
            name: of the file in the dataset.
            size: its bytes, or the least that it must have; 0 if unknown.
            check: its checksum, as in an index; empty if unknown.
            edition: what tells contents apart where names are not unique; may be empty.
            download: fetches the file; its errors come through.
            verify: also check the checksum of a file that is there; without one it is fetched again.

        Raises:
            Corrupt: what was fetched has another size or checksum, also the second time.
        """
        if self._untold is not None:
            _tell_once(HEAD, self._untold)
            self._untold = None
        try:
            return self._open(_bare(place_url), name, size, check, edition, download, verify)
        except Unusable as error:
            _tell_once(name, error)
        return fetched_in_memory(name, size, check, download)

    def peek(self, place_url: str, name: str, size: int, check: str, edition: str) -> memoryview | None:
        """The same view of a file that is cached; None if it is not."""
        try:
            with usable():
                return self._look(self._path(_bare(place_url), name, check, edition), size, check)
        except Unusable:
            return None

    def newest_head(self, place_url: str, ask: Ask) -> Head | None:
        """The head of a dataset as it is now.

        As long as none is kept, one of those that want it fetches it, for which the others wait; they then ask whether it has changed. One
        copy is kept, which the next one replaces.
        """
        url = _bare(place_url)
        path = self._path(url, HEAD, "", "newest")
        known, part = self._kept_head(path), None
        try:
            with usable():
                if sys.platform == "win32":
                    raise Unusable("file locks have not been tested on Windows")
                if known is None:
                    part = self._claim(path, url)
        except Unusable as error:
            self._untold = error
            return ask(None)
        if part is None:
            known = known or self._kept_head(path)  # of the one that has been waited for
            if (found := ask(known)) is not None and found is not known:
                self._keep_head(path, url, found)
            return found
        with part:
            try:
                known = self._kept_head(path)  # it may have come between the look and the lock
                if (found := ask(known)) is not None and found is not known:
                    self._put_head(part, path, found)
                return found
            finally:
                self._abandon(part, path)

    def drop_head(self, place_url: str) -> None:
        """Forgets the head of a dataset, so that it is fetched again."""
        path = self._path(_bare(place_url), HEAD, "", "newest")
        with suppress(OSError, UnsafeStore):
            self._room.remove([Entry(path, os.stat(path).st_size, 0.0)])

    def info(self) -> CacheInfo:
        """What is held, for each dataset."""
        places = []
        for folder, url in self._room.places():
            files = list(self._room.files(folder))
            whole = [file.modified for file in files if not file.path.endswith(PART)]
            when = datetime.fromtimestamp(max(whole), UTC) if whole else None
            busy = sum(in_use(file.path) for file in files)
            places.append(PlaceInfo(url, folder, len(whole), sum(file.size for file in files), busy, when))
        places.sort(key=lambda place: place.last_used.timestamp() if place.last_used else 0, reverse=True)
        return CacheInfo(self.root, self.limit, sum(place.size for place in places), tuple(places))

    def holds(self, url: str) -> bool:
        """Whether anything of a dataset is held."""
        return any(_names(url, place) for _, place in self._room.places())

    def clear(self, url: str | None = None, *, dry_run: bool = False) -> Cleared:
        """Removes what is not in use, of one dataset or of all; ``StorageError`` where that cannot be done. A dry run only tells of it."""
        done = Cleared()
        for folder, place in self._room.places():
            if url is None or _names(url, place):
                files = list(self._room.files(folder))
                try:
                    with usable():
                        gone = [file for file in files if not in_use(file.path)] if dry_run else self._room.remove(files)
                        if not dry_run:
                            self._room.remove_folder(folder, place)
                except Unusable as error:
                    raise StorageError(f"cannot empty the cache: {error}", file=folder) from error
                kept = [file for file in set(files).difference(gone) if os.path.exists(file.path)]
                done = Cleared(
                    done.files + sum(not file.path.endswith(PART) for file in gone),
                    done.size + sum(file.size for file in gone),
                    done.kept_files + len(kept),
                    done.kept_size + sum(file.size for file in kept),
                )
        return done

    def erase(self, url: str) -> None:
        """Removes the files of a dataset, also those that somebody reads: who has one open keeps it until he closes it."""
        for folder, place in self._room.places():
            if _names(url, place):
                for file in self._room.files(folder):
                    if not file.path.endswith(PART):
                        with suppress(OSError):
                            os.unlink(file.path)
        self.sweep()

    def sweep(self) -> None:
        """Removes what killed processes left; done now and then in any case."""
        if os.path.isdir(self.root):
            self._room.recount()

    # Parts

    def _path(self, url: str, name: str, check: str, edition: str) -> str:
        key = json.dumps([name, check, edition]).encode()
        return os.path.join(self.root, folder_name(url), hashlib.blake2b(key, digest_size=16).hexdigest() + ".cached")

    def _open(self, url: str, name: str, size: int, check: str, edition: str, download: Download, verify: bool) -> memoryview:
        path = self._path(url, name, check, edition)
        for _ in range(100):
            with usable():
                view = self._look(path, size, check, verify)
                if view is not None:
                    return view
                part = self._claim(path, url)
            if part is None:
                continue  # somebody else is done with it
            with part:
                with usable():
                    # Again, since it may have come between the look and the lock.
                    view = self._look(path, size, check, verify)
                    if view is not None:
                        os.unlink(path + PART)
                        return view
                return self._fetch(part, path, name, size, check, download)
        raise Unusable("other processes fetch and remove it all the time")

    def _look(self, path: str, size: int, check: str, verify: bool = False) -> memoryview | None:
        """The view of a cached file; None if it is not there, or was damaged."""
        if sys.platform == "win32":
            raise Unusable("file locks have not been tested on Windows")
        try:
            file = HeldFile(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with file:
            if not file.share():
                return None
            found = os.fstat(file.fd)
            if found.st_nlink == 0:
                return None  # removed before the lock was ours
            if found.st_size >= max(size, 1):
                view = file.map()
                # A power loss may leave a file with the right size, and without bytes that were not on the disk yet.
                if not (verify or before_boot(found.st_mtime)) or ((check or not verify) and matches(view, check)):
                    if abs(time.time() - found.st_mtime) > _TOUCH:
                        with suppress(OSError):  # a colleague's file in a shared folder
                            os.utime(file.fd)
                    return view
                view.release()
            _log.warning("%s in the cache is damaged: it is fetched again.", path)
            with self._room.lock():
                if file.is_at(path):
                    os.unlink(path)
        return None

    def _claim(self, path: str, url: str) -> HeldFile | None:
        """The part file, locked by us; None as soon as another process is done with it."""
        part = self._room.create(path + PART, url)
        pause, seen, since = 0.0005, None, time.monotonic()
        while True:
            with ExitStack() as closing:  # also before it sleeps: what is open uses the disk, even when it has been removed
                closing.enter_context(part)
                mine = part.lock()
                if not part.is_at(path + PART):
                    return None
                if mine:
                    closing.pop_all()
                    return part
                now = os.fstat(part.fd)
            progress = (now.st_ino, now.st_mtime_ns, now.st_blocks, now.st_size)
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise Unusable(f"another process that fetches it has not come any further for {self._patience:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            try:
                part = HeldFile(path + PART, os.O_RDWR)
            except FileNotFoundError:
                return None

    def _fetch(self, part: HeldFile, path: str, name: str, size: int, check: str, download: Download) -> memoryview:
        def sink() -> DiskSink:
            self._room.resize(part, size, empty=True)
            return DiskSink(part, size, self._room.resize)

        try:
            view = fetched(sink, name, size, check, download)
            if len(view):  # an empty file is not worth a place
                with usable():
                    if not check:
                        os.fsync(part.fd)  # nothing else would tell after a power loss
                    self._room.publish(part, path)
            return view
        finally:
            self._abandon(part, path)

    def _abandon(self, part: HeldFile, path: str) -> None:
        """Removes a part file that has not got its name."""
        with suppress(OSError):
            if part.fd >= 0 and part.is_at(path + PART):
                with suppress(OSError, Unusable, UnsafeStore):
                    self._room.resize(part, 0)
                os.unlink(path + PART)

    # Heads: one line with the tag and a checksum of both, and the bytes

    def _kept_head(self, path: str) -> Head | None:
        """The head that is kept; None if there is none, or a damaged one."""
        try:
            with open(path, "rb") as file:
                line, data = file.readline(), file.read()
                modified = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        try:
            tag, check = json.loads(line)
            whole = codec.verify([tag.encode(), data], check)
        except (ValueError, TypeError, AttributeError, UnsupportedFormat):
            whole = False
        if not whole:
            _log.warning("%s in the cache is damaged: it is fetched again.", path)
            return None
        if abs(time.time() - modified) > _TOUCH:
            with suppress(OSError):
                os.utime(path)
        return Head(data, tag)

    def _keep_head(self, path: str, url: str, head: Head) -> None:
        """Puts a head in the place of the kept one, unless another process does so just now."""
        try:
            with usable(), self._room.create(path + PART, url) as part:
                if part.lock() and part.is_at(path + PART):
                    try:
                        self._put_head(part, path, head)
                    finally:
                        self._abandon(part, path)
        except Unusable as error:
            self._untold = error

    def _put_head(self, part: HeldFile, path: str, head: Head) -> None:
        line = json.dumps([head.tag, codec.checksum([head.tag.encode(), head.data])]).encode() + b"\n"
        size = len(line) + len(head.data)
        try:
            self._room.resize(part, size, empty=True)
            sink = DiskSink(part, size, self._room.resize)
            sink.write(line, 0)
            sink.write(head.data, len(line))
            with usable():
                self._room.replace(part, path)
        except Unusable as error:
            self._untold = error


def _tell_once(name: str, why: Unusable) -> None:
    global _told
    if not _told:
        _told = True
        _log.warning("%s is kept in memory and not in the cache: %s. Others may be, too; this is said once.", name, why)


def _bare(url: str) -> str:
    """The address without user and password, and without a slash at the end."""
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/@]*@", r"\1", url).rstrip("/")


def _names(url: str, place: str) -> bool:
    """Whether an address means a place, which may have an endpoint: ``s3://bucket/plays at http://localhost:9000``."""
    return place == _bare(url) or place.startswith(f"{_bare(url)} at ")
