"""MemoryStore: a store in the memory of this process, for tests."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta

from liveset.errors import Corrupt, ForeignEdit, NotFound, StorageError
from liveset.storage import HEAD, Buffer, Entry, Head, Swap, Tag, as_buffers, check_name

__all__ = ["MemoryStore"]


class MemoryStore:
    """A store that lives as long as the object; its tags count the swaps, so that nobody can take them for digests."""

    def __init__(self, url: str = "memory://dataset") -> None:
        self.url = url
        self.files: dict[str, tuple[bytes, datetime]] = {}
        self._generation = 0
        self._time = datetime(2030, 1, 1, tzinfo=UTC)
        self._lock = threading.RLock()

    @property
    def remote(self) -> bool:
        return False

    def probe(self) -> None:
        pass

    def exists(self) -> bool:
        return True

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._get(check_name(name))
        return data[start:] if length is None else data[start : start + length]

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        joined = b"".join(bytes(memoryview(part)) for part in as_buffers(data))
        with self._lock:
            if check_name(name) in self.files:
                raise StorageError(f"cannot write {self._path(name)}: the file exists", file=self._path(name))
            self._put(name, joined)

    def copy(self, source: str, name: str) -> None:
        self.write(name, self._get(check_name(source)))

    def write_once(self, name: str, data: bytes) -> None:
        with self._lock:
            if check_name(name) not in self.files:
                self._put(name, bytes(data))
            elif self._get(name) != data:
                raise ForeignEdit(f"{self._path(name)} holds other bytes", file=self._path(name))

    def read_head(self) -> Head | None:
        with self._lock:
            return Head(self._get(HEAD), self._tag()) if HEAD in self.files else None

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        with self._lock:
            if HEAD not in self.files or self._tag() != head:
                return False
            self._put(check_name(name), b"".join(bytes(memoryview(part)) for part in as_buffers(data)))
            return True

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        with self._lock:
            if (self._tag() if HEAD in self.files else None) != expected:
                return Swap.LOST
            self.delete(withdraw)
            self._generation += 1
            self._put(HEAD, bytes(data))
            return Swap.SWAPPED

    def list(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            found = [Entry(name, len(data), time) for name, (data, time) in sorted(self.files.items()) if name.startswith(prefix)]
        return iter(found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.files.pop(check_name(name), None)

    def now(self) -> datetime:
        with self._lock:
            self._time += timedelta(seconds=1)
            return self._time

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        view = self.map(name, max((start + length for start, length in ranges), default=0))
        return [bytes(view[start : start + length]) for start, length in ranges]

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        return self.map(name, size)

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        data = self._get(check_name(name))
        if len(data) < size:
            raise Corrupt(f"{self._path(name)} is truncated: it has {len(data)} of {size} bytes.", file=self._path(name))
        return memoryview(data)

    def foreign_head(self, data: bytes | None) -> None:
        """What another program does: puts any bytes where the head is, or removes it."""
        with self._lock:
            self._generation += 1
            if data is None:
                self.files.pop(HEAD, None)
            else:
                self._put(HEAD, data)

    def _get(self, name: str) -> bytes:
        try:
            return self.files[name][0]
        except KeyError:
            raise NotFound(f"{self._path(name)} does not exist.", file=self._path(name)) from None

    def _put(self, name: str, data: bytes) -> None:
        self.files[name] = (data, self.now())

    def _tag(self) -> Tag:
        return Tag(f'"generation-{self._generation}"')

    def _path(self, name: str) -> str:
        return posixpath.join(self.url, name)
