"""The cached store: a store whose files are kept in a folder of this machine once they were fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Protocol

from liveset.errors import Corrupt
from liveset.storage.cache import ChunkCache
from liveset.storage.store import Ask, Buffer, Entry, Head, Sink, Store, Swap, Tag, check_name, checksum_in

__all__ = ["CachedStore", "Source"]


class Source(Store, Protocol):
    """A store that hands out whole files piece by piece."""

    def download(self, name: str, sink: Sink, size: int = 0) -> None:
        """Fetches a whole file; ``size`` is what is expected, 0 if nothing is."""

    def read_shared_head(self, keep: Callable[[Ask], Head | None]) -> Head | None:
        """The head as it is now, through ``keep`` where that saves fetching it."""


class CachedStore:
    """Passes everything on to a store, but keeps in a cache the newest head, and whole files that were read; these never change."""

    def __init__(self, source: Source, cache: ChunkCache, place: str) -> None:
        self.source, self.cache, self._place = source, cache, place

    @property
    def url(self) -> str:
        return self.source.url

    @property
    def remote(self) -> bool:
        """True: what is not in the cache costs a transfer."""
        return True

    def __repr__(self) -> str:
        return f"CachedStore({self.source!r})"

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        """Read-only view of a whole file, fetched if it is not in the cache; ``Corrupt`` when it is shorter than ``size`` bytes.

        With ``fresh``, what is in the cache is fetched again unless it has its checksum.
        """
        check = checksum_in(content)
        path = f"{self.url}/{check_name(name)}"

        def download(sink: Sink) -> None:
            self.source.download(name, sink, size)

        try:
            view = self.cache.open(self._place, name, size, check, "" if check else content, download, verify=fresh)
        except Corrupt as error:
            if error.file != name:
                raise
            raise Corrupt(str(error).replace(name, path, 1), file=path) from error
        if len(view) < size:
            raise Corrupt(f"{path} is truncated: it has {len(view)} of {size} bytes.", file=path)
        return view

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        """The file if it is in the cache."""
        check = checksum_in(content)
        return self.cache.peek(self._place, check_name(name), size, check, "" if check else content)

    def read_head(self) -> Head | None:
        """The head as it is now; the store is always asked, but sends it only if the cache holds another one."""
        return self.source.read_shared_head(partial(self.cache.newest_head, self._place))

    def forget(self) -> None:
        """Removes the cached files of this place."""
        self.cache.erase(self._place)

    # What is passed on

    def probe(self) -> None:
        self.source.probe()

    def exists(self) -> bool:
        return self.source.exists()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return self.source.read(name, start, length)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        return self.source.read_ranges(name, ranges)

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        self.source.write(name, data)

    def copy(self, source: str, name: str) -> None:
        self.source.copy(source, name)

    def write_once(self, name: str, data: bytes) -> None:
        self.source.write_once(name, data)

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        done = self.source.swap_head(data, expected, withdraw)
        if done is not Swap.SWAPPED:
            self._doubt_head()
        return done

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        done = self.source.publish(name, data, head)
        if not done:
            self._doubt_head()
        return done

    def _doubt_head(self) -> None:
        # One that was put back has its old ETag again, which reading goes by, but on GCS a new generation, which writing goes by.
        self.cache.drop_head(self._place)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.source.list(prefix)

    def exclusive(self) -> AbstractContextManager[None]:
        return self.source.exclusive()

    def delete(self, names: Iterable[str]) -> None:
        self.source.delete(names)

    def now(self) -> datetime:
        return self.source.now()
