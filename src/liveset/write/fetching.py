"""Inputs that lie in a bucket: ``fn`` gets paths of local copies, which are fetched ahead and deleted when its samples are stored."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from liveset.errors import DatasetError, StorageError
from liveset.storage import Place, open_store
from liveset.storage.held import HeldFile, Unusable, reason
from liveset.storage.sink import DiskSink, fetched, resize

__all__ = ["AHEAD", "Fetching", "fetching"]

AHEAD = 8
"""How many files each process fetches at once, and has at most beside those that ``fn`` is at."""


@contextmanager
def fetching(fn: Callable[[Any], Any], place: str | os.PathLike[str] | None) -> Iterator[Callable[[Any], Any]]:
    """Yield ``fn`` for inputs that lie in a place, and remove what was fetched at the end; ``fn`` itself where they are local."""
    if place is None or not _is_remote(place):
        yield fn
        return
    with tempfile.TemporaryDirectory(prefix="liveset-inputs-", ignore_cleanup_errors=True) as folder:
        fetched_for = Fetching(fn, place, folder)
        try:
            yield fetched_for
        finally:
            fetched_for.close()


def _is_remote(place: str | os.PathLike[str]) -> bool:
    text = os.fspath(place)
    return "://" in text and not text.startswith("file://")


class Fetching:
    """Calls ``func`` with inputs whose URLs below a place are replaced by paths. Used by one thread; another one may say what comes next.

    Args:
        func: what the user wrote.
        place: the URL that the inputs begin with, and how to reach it.
        folder: where the copies go.
    """

    def __init__(self, func: Callable[[Any], Any], place: str | os.PathLike[str], folder: str) -> None:
        self.func, self._place, self._folder = func, place, folder
        self._root = os.fspath(place).rstrip("/") + "/"
        self._held: list[str] = []  # copies that the last call was given: its samples are stored only when it has returned
        self._known = 0  # the position of the first input that nobody has announced
        self._waiting: deque[str] = deque()
        self._under_way: deque[tuple[str, Future[str]]] = deque()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return Fetching, (self.func, self._place, self._folder)

    def __call__(self, item: Any) -> Any:
        held, self._held = self._held, []
        for folder in held:
            shutil.rmtree(folder, ignore_errors=True)
        return self.func(self._replaced(item, self._take))

    def ahead(self, first: int, items: Sequence[Any]) -> None:
        """Say which inputs come next, from position ``first`` on; those that were said before are left out."""
        new = items[max(self._known - first, 0) :]
        self._known = max(self._known, first + len(items))
        with self._lock:
            for item in new:
                self._replaced(item, self._waiting.append)
            self._fill()

    def close(self) -> None:
        """Wait for what is under way, and fetch nothing more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _replaced(self, item: Any, local: Callable[[str], Any]) -> Any:
        """Return an input with its URLs replaced, in the order in which they stand."""
        if type(item) is str:
            return local(item) if item.startswith(self._root) else item
        if type(item) in (list, tuple):
            return type(item)([self._replaced(part, local) for part in item])
        return {name: self._replaced(part, local) for name, part in item.items()} if type(item) is dict else item

    def _take(self, url: str) -> str:
        with self._lock:
            if not self._under_way:
                self._fill()
            if self._under_way and self._under_way[0][0] == url:
                _, future = self._under_way.popleft()
            else:  # nobody has said so
                self._waiting.clear()
                self._under_way.clear()
                future = self._begin(url)
            self._fill()
        path = future.result()
        self._held.append(os.path.dirname(path))
        return path

    def _fill(self) -> None:
        while self._waiting and len(self._under_way) < AHEAD:
            url = self._waiting.popleft()
            self._under_way.append((url, self._begin(url)))

    def _begin(self, url: str) -> Future[str]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="liveset input")
            self._store: Any = open_store(Place.of(self._place, cache_dir=False))
        return self._pool.submit(self._fetch, url)

    def _fetch(self, url: str) -> str:
        name = url.removeprefix(self._root)
        url = f"{self._store.url}/{name}"  # without a password
        # A folder for each, since the end of a name may matter to whoever opens the file, and two may have the same one.
        folder = os.path.join(self._folder, f"{os.getpid()}-{next(self._numbers)}")
        path = os.path.join(folder, name.rpartition("/")[2])
        if name.endswith("/"):
            raise StorageError(f"{url} has no name: leave what ends with / out of the inputs, it stands for a folder.", file=url)
        try:
            os.makedirs(folder)
            with HeldFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                fetched(lambda: DiskSink(file, 0, resize), url, 0, "", partial(self._store.download, name)).release()
        except (Unusable, OSError) as error:
            if isinstance(error, DatasetError):
                raise
            raise StorageError(
                f"{url} cannot be kept in {self._folder} ({reason(error)}); TMPDIR names another folder.", file=url
            ) from error
        return path
