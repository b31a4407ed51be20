"""Places for whole datasets in tests: the public functions work on them, they can crash at any call, and time passes at will."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from liveset.storage import HEAD, Entry, Store
from liveset.storage.files import Files
from liveset.storage.local import LocalStore
from liveset.testing import FaultyStore, MemoryStore
from liveset.testing.faults import When


class Gate(FaultyStore):
    """Where all calls to a place go through; the process may be told to end at one of the next of them."""

    def arm(self, crash: tuple[int, When] | None) -> None:
        self.calls.clear()
        self.crash_at, self.when = crash or (None, "before")


class Unsynced(Files):
    """Does not wait for the disk: these tests are not about power loss."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class Place:
    """One dataset, and what a test needs beside the library to look at it and to disturb it."""

    late = False
    """Whether an archived head is dated by when it was replaced."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="liveset-test-"))
        self.path = str(self.folder / "dataset")
        self.store: Store = self.make()
        self.gate = Gate(self.store)
        self._patch = mock.patch("liveset.storage.local.LocalStore", self._open)
        self._patch.start()

    def make(self) -> Store:
        raise NotImplementedError

    def _open(self, path: str, **options: Any) -> Any:
        return self.gate if os.path.abspath(path) == self.path else LocalStore(path, **options)

    def close(self) -> None:
        self._patch.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What is there

    def entries(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.store.list("")}

    def read(self, name: str) -> bytes:
        return self.store.read(name)

    def has_dataset(self) -> bool:
        return HEAD in self.entries()

    # What others do

    def put_foreign(self, make: Callable[[Path], object]) -> None:
        """Let another program write a dataset."""
        raise NotImplementedError

    def put(self, name: str, data: bytes | None) -> None:
        """Put a file in place, or remove it (None), behind the library's back."""
        self.store.delete([name])
        if data is not None:
            self.store.write(name, data)

    def pass_time(self, hours: int) -> None:
        raise NotImplementedError


class LocalPlace(Place):
    def make(self) -> Store:
        return LocalStore(self.path, files=Unsynced())

    def put_foreign(self, make: Callable[[Path], object]) -> None:
        make(Path(self.path))

    def pass_time(self, hours: int) -> None:
        """Everything that is there gets older."""
        seen = set()
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                facts = os.stat(path)
                if facts.st_ino not in seen:  # an archived head is another name of the same file
                    seen.add(facts.st_ino)
                    back = hours * 3_600 * 10**9
                    os.utime(path, ns=(facts.st_atime_ns - back, facts.st_mtime_ns - back))


class MemoryPlace(Place):
    late = True

    def make(self) -> Store:
        return MemoryStore(self.path)

    def has_dataset(self) -> bool:
        return HEAD in self.memory.files

    @property
    def memory(self) -> MemoryStore:
        assert isinstance(self.store, MemoryStore)
        return self.store

    def put_foreign(self, make: Callable[[Path], object]) -> None:
        folder = self.folder / "elsewhere"
        make(folder)
        for entry in LocalStore(folder).list(""):
            data = (folder / entry.name).read_bytes()
            if entry.name == HEAD:
                self.memory.foreign_head(data)
            else:
                self.memory.write(entry.name, data)

    def pass_time(self, hours: int) -> None:
        self.memory._time += timedelta(hours=hours)


def parquet_rows(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of a published shard, as any other program reads them."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows
