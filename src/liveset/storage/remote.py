"""The remote store: a folder in a bucket of an object store with conditional writes, or on a web server, which can only be read."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from typing import Any

from liveset.errors import Corrupt, DatasetError, NotFound, StorageError, UnsafeStore
from liveset.storage.clients import connect
from liveset.storage.location import Location
from liveset.storage.requests import CREATE, Requests
from liveset.storage.sink import fetched_in_memory
from liveset.storage.store import (
    HEAD,
    PRIVATE,
    Ask,
    Buffer,
    Entry,
    Head,
    Sink,
    Swap,
    Tag,
    as_buffers,
    check_name,
    checksum_in,
    foreign_bytes,
)

__all__ = ["RemoteStore"]

# With a random part between: what is left of them is a temporary file to a vacuum.
_PROBE = PRIVATE + "probe."
_CLOCK = PRIVATE + "clock."
_safe: set[str] = set()
"""Buckets that kept their conditions when they were probed by this process."""

_ranges: dict[str, bool] = {}
"""Places on web servers, and whether they hand out parts of files."""


class RemoteStore:
    """A dataset in a bucket; reading fetches what is asked for and keeps nothing. Safe to use from several threads, after a fork, pickled.

    The outcome of a swap is never taken from an error, because a client repeats requests whose answers were lost: it is read back.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return self.location.url

    @property
    def remote(self) -> bool:
        """True: every read is a request."""
        return True

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    @property
    def _requests(self) -> Requests:
        return connect(self.location)

    def _key(self, name: str) -> str:
        return self.location.key(check_name(name))

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def exists(self) -> bool:
        """True: object stores have no folders."""
        return True

    # Reading

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from ``start``; fewer than ``length`` where the file ends earlier."""
        return self._requests.get(self._key(name), start, length)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Parts of a file, each given by its start and length, in parallel; ``Corrupt`` where the file ends earlier."""
        found = self._requests.get_ranges(self._key(name), ranges)
        for data, (start, length) in zip(found, ranges, strict=True):
            if len(data) != length:
                raise Corrupt(f"{self._path(name)} is truncated: it ends at {start + len(data)}.", file=self._path(name))
        return found

    def read_head(self) -> Head | None:
        """The head and its tag; None where no ``index.json`` is."""
        try:
            data, tag = self._requests.get_tagged(self._key(HEAD))
        except NotFound:
            return None
        return Head(data, Tag(tag))

    def read_shared_head(self, keep: Callable[[Ask], Head | None]) -> Head | None:
        """The head and its tag, by ``keep``, which knows the one that was fetched before."""
        if self.location.kind == "http":  # tags of web servers may be as coarse as seconds
            return self.read_head()
        return keep(self._head_since)

    def _head_since(self, known: Head | None) -> Head | None:
        if known is None:
            return self.read_head()
        try:
            found = self._requests.get_changed(self._key(HEAD), known.tag)
        except NotFound:
            return None
        return known if found is None else Head(found[0], Tag(found[1]))

    def has_ranges(self) -> bool:
        """Tell whether the server hands out parts of files; asks once in a process, for a byte of the head."""
        found = _ranges.get(self.url)
        if found is None:
            found = _ranges[self.url] = self._requests.has_ranges(self._key(HEAD))
        return found

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        """The whole file, in memory; ``Corrupt`` when it is shorter than ``size`` bytes."""
        download = partial(self.download, name, size=size)
        return fetched_in_memory(self._path(name), size, checksum_in(content), download)

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        """None: nothing is kept here."""
        return None

    def download(self, name: str, sink: Sink, size: int = 0) -> None:
        """Fetches a whole file piece by piece; ``size`` is what is expected, 0 if nothing is."""
        self._requests.download(self._key(name), sink, size)

    def list(self, prefix: str) -> Iterator[Entry]:
        """All files whose names begin with ``prefix``, in any order."""
        if self.location.kind == "http":
            raise StorageError(f"{self.url} does not list its files, and can only be read: it is on a web server.", file=self.url)
        folder = prefix[: prefix.rfind("/") + 1]
        if folder:
            check_name(folder[:-1])
        cut = len(self.location.key("x")) - 1
        for found in self._requests.list(self.location.key(folder).rstrip("/")):
            name = found.key[cut:]
            if name.startswith(prefix):
                yield Entry(name, found.size, found.modified)

    def now(self) -> datetime:
        """The time on the clock of the store."""
        key = self.location.key(f"{_CLOCK}{secrets.token_hex(8)}.tmp")
        self._writable.put(key, [b"."])
        try:
            return self._requests.facts(key).modified
        finally:
            with suppress(DatasetError):
                self._requests.delete([key])

    # Writing

    @property
    def _writable(self) -> Requests:
        if self.location.kind == "http":
            raise StorageError(f"{self.url} can only be read: it is on a web server.", file=self.url)
        return self._requests

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        """Writes a file; the names are unique, so that a request that is repeated does no harm."""
        self._writable.put(self._key(name), as_buffers(data))

    def copy(self, source: str, name: str) -> None:
        """Copies a file inside the store."""
        self._writable.copy(self._key(source), self._key(name))

    def write_once(self, name: str, data: bytes) -> None:
        """Creates a file whole; equal bytes under the name are fine, others are ``ForeignEdit``."""
        self.probe()
        key = self._key(name)
        failure: StorageError | None = None
        for _ in range(_SENDS):
            try:
                if self._writable.put(key, [data], CREATE) is not None:
                    return
            except PermissionError:
                raise
            except StorageError as error:
                failure = error
            # It is there already, or was written and the answer lost, or a store that was asked twice at once did neither.
            with suppress(NotFound):
                if self._requests.get(key) == data:
                    return
                raise foreign_bytes(self._path(name))
            time.sleep(random.uniform(0.05, 0.2))
        raise failure or StorageError(
            f"cannot write {self._path(name)}: the store refuses it, and says that there is none.", file=self._path(name)
        )

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        """Replaces ``index.json`` by a conditional put; every answer but a plain yes leaves the outcome open."""
        self.probe()
        if withdraw:
            head = self.read_head()
            if (head.tag if head else None) != expected:
                return Swap.LOST
            self.delete(withdraw)
        try:
            done = self._writable.put(self._key(HEAD), [data], CREATE if expected is None else expected)
        except PermissionError:
            # Of a request that was repeated, an earlier one may have been allowed: only the head that was expected tells that none was.
            try:
                head = self.read_head()
            except DatasetError:
                return Swap.UNKNOWN
            if (head and head.tag) == expected:
                raise
            return Swap.UNKNOWN
        except StorageError:
            return Swap.UNKNOWN
        return Swap.SWAPPED if done is not None else Swap.UNKNOWN

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        """Puts a derived file under a fixed name, if the head is still the given one."""
        self.probe()
        key = self._key(name)
        whole = [b"".join(as_buffers(data))]
        for _ in range(_SENDS):
            try:
                condition = self._requests.facts(key).tag
            except NotFound:
                condition = CREATE
            if (now := self.read_head()) is None or now.tag != head:
                return False
            if self._writable.put(key, whole, condition) is None:
                continue
            # Whoever replaced the head in between may have found nothing to withdraw.
            if (now := self.read_head()) is None or now.tag != head:
                self.delete([name])
                return False
            return True
        return False

    def exclusive(self) -> AbstractContextManager[None]:
        """Does nothing: an object store keeps nobody waiting."""
        return nullcontext()

    def delete(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are fine."""
        if keys := [self._key(name) for name in names]:
            self._writable.delete(keys)

    def probe(self) -> None:
        """Makes sure, once in a process, that the store keeps the conditions that commits depend on."""
        if self.location.server in _safe:
            return
        for left in reversed(range(_PROBES)):
            try:
                safe = self._keeps_conditions()
                break
            except PermissionError:
                raise
            except (StorageError, NotFound):  # answers that were lost say nothing
                if not left:
                    raise
                self.read_head()  # waits for a store that does not answer now
        if not safe:
            raise UnsafeStore(
                f"{self.url}: this store overwrites an object although the request says not to, so two writers could lose each other's "
                "commits. Nothing was committed. Write the dataset to a folder, and copy it there with `liveset cp`; reading works."
            )
        _safe.add(self.location.server)

    def _keeps_conditions(self) -> bool:
        requests, key = self._writable, self.location.key(f"{_PROBE}{secrets.token_hex(8)}.tmp")
        try:
            tag = requests.put(key, [b"1"], CREATE)
            if tag is None:
                tag = requests.facts(key).tag  # its answer was lost
            refused = requests.put(key, [b"2"], CREATE) is None
            wrong = requests.put(key, [b"3"], _other(tag)) is None
            return refused and wrong and requests.get(key) == b"1"
        finally:
            with suppress(DatasetError):
                requests.delete([key])


_SENDS = 6
"""How often a file is put under a condition while the store says neither that it is there nor that it is not."""
_PROBES = 20
"""How often a probe is begun anew whose answers were lost; each time the store is waited for."""


def _other(tag: str) -> str:
    """A tag of the same form that no object has."""
    import msgspec

    meta: dict[str, Any] = msgspec.json.decode(tag)
    other = {"e_tag": '"00000000000000000000000000000000"'}
    if str(meta.get("version", "")).isdigit():  # a generation, which a condition names then; or a number of a store that goes by ETags
        other["version"] = str(int(meta["version"]) + 1)
    return msgspec.json.encode(other).decode()
