"""Verify: is every byte that a version needs there, and as it was written?"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from liveset.errors import DatasetError, MissingDependency, PickleRefused, UnsupportedFormat
from liveset.format import codec
from liveset.format.index import ChunkRecord
from liveset.format.keytable import KeyTable
from liveset.format.schema import Decoder, Schema
from liveset.read.chunks import OpenChunks
from liveset.snapshot import Snapshot, Version, open_snapshot
from liveset.storage import open_store


class Damage(NamedTuple):
    """A file that is not as it should be, and what is wrong with it."""

    file: str
    problem: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: of the dataset.
        version: that was checked.
        chunks: number of chunk files looked at.
        samples: number of samples in them.
        unchecked: chunk files without a checksum (another program wrote them); they were decoded instead.
        damaged: the files that are missing, cut short or changed.
    """

    path: str
    version: int
    chunks: int
    samples: int
    unchecked: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


def verify(
    path: str | os.PathLike[str], *, version: Version | None = None, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read every chunk and key table of a version and compare it with its checksum; a chunk without one is decoded instead.

    Args:
        path: of the dataset.
        version: to check: number, tag or time; None is the newest.
        progress: called with the number of chunks done and their total.

    Raises:
        DatasetNotFound, VersionNotFound, VersionExpired: there is nothing to check.
        Corrupt: the index itself cannot be read.

    Example:
        >>> liveset.verify(path).ok
        True
    """
    snapshot = open_snapshot(open_store(path), version)
    index = snapshot.index
    damaged = []
    if index.edit is not None and not index.digest_matches():
        damaged.append(Damage("index.json", "another program changed it after its last commit"))
    chunks = _open(snapshot)
    unchecked = 0
    for number, record in enumerate(index.chunks):
        unchecked += record.check is None
        try:
            _check(snapshot, chunks, number, record)
        except (MissingDependency, PickleRefused, UnsupportedFormat):
            pass  # nothing says that the bytes are wrong: they cannot be decoded here
        except DatasetError as error:
            damaged.append(Damage(record.filename, str(error)))
        if progress is not None:
            progress(number + 1, len(index.chunks))
    damaged += _damaged_keys(snapshot)
    return VerifyReport(snapshot.store.url, index.version, len(index.chunks), len(snapshot), unchecked, tuple(damaged))


def _damaged_keys(snapshot: Snapshot) -> list[Damage]:
    files = snapshot.index.edit.key_files if snapshot.index.edit is not None else None
    found = []
    for name in files.tables if files is not None else ():
        try:
            KeyTable(snapshot.store.map(name, 0), name).check()
        except DatasetError as error:
            found.append(Damage(name, str(error)))
    return found


def _open(snapshot: Snapshot) -> OpenChunks | None:
    config = snapshot.index.config
    if config is None:
        return None
    schema = Schema.from_config(config, snapshot.index.file)
    return OpenChunks(snapshot, Decoder(schema, strict=not snapshot.index.has_foreign_chunks))


def _check(snapshot: Snapshot, chunks: OpenChunks | None, number: int, record: ChunkRecord) -> None:
    assert chunks is not None  # an index without a config has no chunks
    if record.check is not None:
        # Checked before anything is taken from the file, so that the message is about the file and not about a consequence.
        name, buffer = snapshot.chunk_file(number)
        if name == record.filename and not codec.verify(buffer, record.check):
            header = _header_problem(chunks, number)
            raise DatasetError(header or "the bytes differ from the checksum in the index")
        chunks[number]
        if name == record.filename:
            return
    for _ in chunks[number].iterate(0, record.samples):
        pass


def _header_problem(chunks: OpenChunks, number: int) -> str:
    try:
        chunks[number]
    except DatasetError as error:
        return str(error)
    return ""
