"""Staged edits: what an update holds until it is committed, in memory first and then in a file that has no name."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from enum import IntEnum
from typing import IO, NamedTuple

from liveset.errors import StorageError
from liveset.format.keytable import Key

__all__ = ["Kind", "Staged", "StagedEdits"]

LIMIT = 64_000_000
"""Bytes of samples that are kept in memory."""
_STEP = 1 << 30  # bytes in one read; Linux never moves more than 2 GiB at once


class Kind(IntEnum):
    """What a staged edit does with the sample of its key."""

    REPLACE = 0
    """Puts the item ``data`` in its place; the dataset must have the key."""
    ROW = 1
    """The same with an Arrow row."""
    PATCH = 2
    """Changes some leaves of it, which ``data`` holds (see ``edit.patch``)."""
    UPSERT = 3
    """Puts the item in its place, or adds it where the dataset does not have the key."""
    DELETE = 4
    """Removes it; there is no data."""


class Staged(NamedTuple):
    """One staged edit."""

    data: bytes
    kind: Kind


class StagedEdits:
    """Edits by key; the last one for a key counts. Memory holds ``limit`` bytes of them, and a few words for each key.

    What does not fit goes to a temporary file without a name, so the system removes it whatever happens to this process.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._held: dict[Key, Staged] = {}
        self._held_bytes = 0
        self._spilled: dict[Key, tuple[int, int, Kind]] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._count = 0

    def put(self, key: Key, edit: Staged) -> None:
        """Keep an edit instead of an earlier one for the same key; ``StorageError`` when the temporary file cannot be written."""
        if (old := self._held.get(key)) is not None:
            self._held_bytes -= len(old.data)
        elif key not in self._spilled:
            self._count += 1
        self._held[key] = edit
        self._held_bytes += len(edit.data)
        if self._held_bytes > self._limit:
            self._spill()

    def get(self, key: Key) -> Staged:
        """Return the edit of a key; ``KeyError`` when there is none."""
        if (held := self._held.get(key)) is not None:
            return held
        offset, length, kind = self._spilled[key]
        assert self._file is not None
        parts = []
        while length > 0:
            part = os.pread(self._file.fileno(), min(length, _STEP), offset)
            if not part:
                raise StorageError("the temporary file with the staged samples was cut short by another program.")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return Staged(parts[0] if len(parts) == 1 else b"".join(parts), kind)

    def kind(self, key: Key) -> Kind | None:
        """Return what the edit of a key does; None when there is none."""
        if (held := self._held.get(key)) is not None:
            return held.kind
        spilled = self._spilled.get(key)
        return None if spilled is None else spilled[2]

    def discard(self, key: Key) -> None:
        """Forget the edit of a key."""
        self._count -= key in self
        if (held := self._held.pop(key, None)) is not None:
            self._held_bytes -= len(held.data)
        self._spilled.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._held or key in self._spilled

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys in the order in which each was staged first."""
        return iter({**self._spilled, **self._held})

    def close(self) -> None:
        """Forget everything; the temporary file goes."""
        self._held, self._spilled, self._held_bytes, self._count = {}, {}, 0, 0
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
            for key, (data, kind) in self._held.items():
                self._file.write(data)
                places[key] = end, len(data), kind
                end += len(data)
            self._file.flush()
        except OSError as error:
            message = f"cannot keep the staged samples in a temporary file in {tempfile.gettempdir()}: {error.strerror or error}"
            failed = StorageError(f"{message}. TMPDIR chooses another folder.")
            failed.errno = error.errno
            raise failed from error
        self._spilled.update(places)
        self._held, self._held_bytes, self._end = {}, 0, end
