"""Leases: how a reader tells every vacuum that a version is in use.

A lease is a small file that is written anew now and then; by its age, on the clock of the store, a vacuum knows whether the reader still
lives. The reader looks at the fence *after* its lease is there, and a vacuum lists leases *after* its fence is there: one of the two always
sees the other.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from liveset.errors import DatasetError, NotFound
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import PRIVATE, Entry, Store

__all__ = ["LEASES", "LIFE", "Lease", "leased_versions", "pin"]

LEASES = PRIVATE + "leases/"
"""Where the leases lie."""
LIFE = timedelta(hours=1)
"""How long a lease that is not renewed holds."""
RENEWAL = timedelta(minutes=10)

_NAME = re.compile(re.escape(LEASES) + r"[0-9a-f]{16}-v(\d+)-\d{6,}\.json")
_log = logging.getLogger("liveset")


class _Files:
    """The files of one lease, which never changes a file: each renewal writes another one."""

    def __init__(self, store: Store, version: int) -> None:
        self._store, self._version = store, version
        self._token = secrets.token_hex(8)
        self._number = 0
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._closed = False

    def renew(self) -> None:
        with self._lock:
            if self._closed:
                return
            # The version stands in the name, so that a listing tells everything.
            name = f"{LEASES}{self._token}-v{self._version}-{self._number:06d}.json"
            self._number += 1
            self._names.append(name)
            self._store.write(name, json.dumps({"version": self._version, "process": os.getpid()}).encode())
            # Two are left, since a listing that is under way may miss the new one, and must not find the old one gone.
            self._store.delete(self._names[:-2])
            del self._names[:-2]

    def remove(self) -> None:
        with self._lock:
            self._closed = True
            self._store.delete(self._names)
            self._names = []


class Lease:
    """Holds a version until it is released, collected or the process ends; made by ``pin``.

    Args:
        store: where the dataset is.
        version: to hold.
        renewal: time between two renewals.
    """

    def __init__(self, store: Store, version: int, renewal: timedelta = RENEWAL) -> None:
        self.version = version
        files = _Files(store, version)
        files.renew()
        stopping = threading.Event()
        # The thread knows the files and not the lease, so that a lease that nobody holds any more is collected and ends the thread.
        self._thread = threading.Thread(target=_keep, args=(files, stopping, renewal), name=f"liveset lease {version}", daemon=True)
        self._finalize = weakref.finalize(self, _end, files, stopping, os.getpid())
        self._thread.start()

    @property
    def released(self) -> bool:
        """Whether the version is no longer held."""
        return not self._finalize.alive

    def release(self) -> None:
        """Give the version up; once is enough."""
        self._finalize()


def pin(store: Store, snapshot: Snapshot) -> Lease:
    """Hold the version of a snapshot against every vacuum.

    Raises:
        VersionExpired: a vacuum came first.
    """
    lease = Lease(store, snapshot.version)
    try:
        # Looked at only now that the lease is there: a vacuum that did not see it had put up its fence before.
        head = open_snapshot(store).index
        if head.version != snapshot.version:
            open_snapshot(store, snapshot.version)
    except BaseException:
        lease.release()
        raise
    return lease


class LeasedVersions(NamedTuple):
    """What a listing of the leases tells."""

    live: frozenset[int]
    lapsed: tuple[str, ...]
    """Names of files of readers that are gone, or have renewed their lease since."""


def leased_versions(entries: Iterable[Entry], now: datetime) -> LeasedVersions:
    """Return which versions are held at a time of the store's clock, judged by a listing; pure."""
    live, lapsed = set(), []
    for entry in entries:
        found = _NAME.fullmatch(entry.name)
        if found is None:
            continue
        if entry.modified + LIFE >= now:
            live.add(int(found[1]))
        else:
            lapsed.append(entry.name)
    return LeasedVersions(frozenset(live), tuple(lapsed))


def _keep(files: _Files, stopping: threading.Event, renewal: timedelta) -> None:
    while not stopping.wait(renewal.total_seconds()):
        try:
            files.renew()
        except (DatasetError, OSError) as error:
            _log.warning("a pinned version could not be renewed, and is tried again: %s", error)


def _end(files: _Files, stopping: threading.Event, process: int) -> None:
    # A forked child has a copy of the object, and the lease is its parent's.
    if os.getpid() != process:
        return
    stopping.set()
    try:
        files.remove()
    except (NotFound, DatasetError, OSError) as error:
        _log.warning("the lease of a pinned version could not be removed; it lapses within %s: %s", LIFE, error)
