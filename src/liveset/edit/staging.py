"""Staged samples: what an update holds until it is committed, in memory first and then in a file that has no name."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, NamedTuple

from liveset.errors import StorageError
from liveset.format.keytable import Key

__all__ = ["Staged", "StagedSamples"]

LIMIT = 64_000_000
"""Bytes of samples that are kept in memory."""


class Staged(NamedTuple):
    """One encoded sample; ``is_row`` when it is an Arrow row and not an item."""

    data: bytes
    is_row: bool


class StagedSamples:
    """Encoded samples by key; the last one for a key counts. Memory holds ``limit`` bytes of them, and a few words for each key.

    What does not fit goes to a temporary file without a name, so the system removes it whatever happens to this process.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._held: dict[Key, Staged] = {}
        self._held_bytes = 0
        self._spilled: dict[Key, tuple[int, int, bool]] = {}
        self._file: IO[bytes] | None = None
        self._end = 0

    def put(self, key: Key, sample: Staged) -> None:
        """Keep a sample instead of an earlier one for the same key; ``StorageError`` when the temporary file cannot be written."""
        if (old := self._held.get(key)) is not None:
            self._held_bytes -= len(old.data)
        self._held[key] = sample
        self._held_bytes += len(sample.data)
        if self._held_bytes > self._limit:
            self._spill()

    def get(self, key: Key) -> Staged:
        """Return the sample of a key; ``KeyError`` when there is none."""
        if (held := self._held.get(key)) is not None:
            return held
        offset, length, is_row = self._spilled[key]
        assert self._file is not None
        return Staged(os.pread(self._file.fileno(), length, offset), is_row)

    def __contains__(self, key: Key) -> bool:
        return key in self._held or key in self._spilled

    def __len__(self) -> int:
        return len(self._held) + len(self._spilled.keys() - self._held.keys())

    def __iter__(self) -> Iterator[Key]:
        return iter({**self._spilled, **self._held})

    def close(self) -> None:
        """Forget everything; the temporary file goes."""
        self._held, self._spilled, self._held_bytes = {}, {}, 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="liveset-update-")  # noqa: SIM115 - closed with this object
                weakref.finalize(self, self._file.close)
            end, places = self._end, {}
            self._file.seek(end)  # what a failed attempt wrote is written over
            for key, (data, is_row) in self._held.items():
                self._file.write(data)
                places[key] = end, len(data), is_row
                end += len(data)
            self._file.flush()
        except OSError as error:
            message = f"cannot keep the staged samples in a temporary file in {tempfile.gettempdir()}: {error.strerror or error}"
            failed = StorageError(f"{message}. TMPDIR chooses another folder.")
            failed.errno = error.errno
            raise failed from error
        self._spilled.update(places)
        self._held, self._held_bytes, self._end = {}, 0, end
