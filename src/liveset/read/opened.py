"""The version that a dataset object reads: opening it, holding it, and moving on to a newer one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from liveset.errors import DatasetNotFound, VersionExpired
from liveset.format.index import Index
from liveset.format.schema import Decoder, Schema
from liveset.lease import Lease, pin
from liveset.read.chunks import OpenChunks
from liveset.read.info import DatasetInfo, describe
from liveset.snapshot import Snapshot, Version, open_snapshot
from liveset.storage import Store, check_room, open_store

# How often the newest version is looked up again when a vacuum has been quicker.
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """How samples are decoded, whether their version is held, and how many chunks are fetched ahead."""

    fields: tuple[str, ...] | None
    allow_pickle: bool
    serializers: Mapping[str, Any] | None
    verify: bool
    pin: bool
    ahead: int


class Opened(ABC):
    """What a dataset object is besides its samples: one version of a dataset, open for reading."""

    _settings: Settings
    _snapshot: Snapshot
    _schema: Schema | None
    _chunks: OpenChunks | None
    _lease: Lease | None

    def _open(self, snapshot: Snapshot, lease: Lease | None = None) -> None:
        settings, config = self._settings, snapshot.index.config
        schema = Schema.from_config(config, snapshot.index.file) if config is not None else None
        chunks = None
        if schema is not None:
            decoder = Decoder(
                schema,
                fields=settings.fields,
                allow_pickle=settings.allow_pickle,
                serializers=settings.serializers,
                strict=not snapshot.index.has_foreign_chunks,
            )
            chunks = OpenChunks(snapshot, decoder, verify=settings.verify, lease=lease, ahead=settings.ahead)
        self._snapshot, self._schema, self._chunks, self._lease = snapshot, schema, chunks, lease

    @abstractmethod
    def _check_refresh(self) -> None:
        """Raise ``ValueError`` if this object cannot move to another version."""

    @abstractmethod
    def _arrange_all(self) -> None:
        """Choose the samples to read anew, after another version was opened."""

    @property
    def path(self) -> str:
        """Where the dataset is."""
        return self._snapshot.store.url

    @property
    def version(self) -> int:
        """The version that is read; 0 for a dataset that another program wrote."""
        return self._snapshot.version

    @property
    def schema(self) -> Schema | None:
        """Fields and leaf types of the samples; None for a dataset that never had one."""
        return self._schema

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What ``liveset.set_attributes`` recorded: name, licence, free text."""
        return self._snapshot.index.attributes

    def info(self) -> DatasetInfo:
        """Return samples, chunks, bytes, schema and versions of the dataset."""
        return describe(self._snapshot)

    def refresh(self) -> bool:
        """Move to the newest version, and return whether it is another one than before. For the time between two epochs.

        Iterators that are under way, subsets and loader workers that run already stay at the version that they began with.

        Raises:
            ValueError: this is a subset, whose positions were chosen in one version, or it was opened with ``index_path``.
            DatasetNotFound: the dataset was removed.

        Example:
            >>> ds.refresh(), ds.version
            (False, 2)
        """
        self._check_refresh()
        store = self._snapshot.store
        newest = open_snapshot(store)
        if newest.index == self._snapshot.index:
            return False
        # The lease of the version before is not released but let go: what still reads that version holds it.
        self._open(*open_version(store, None, held=self._settings.pin))
        self._arrange_all()
        return True

    def close(self) -> None:
        """Close the files and give up the pin, if there is one; reading from it, or from a subset of it, is a ``ValueError`` afterwards."""
        if self._chunks is not None:
            self._chunks.close()
        if self._lease is not None:
            self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_version(store: Store, version: Version | None, *, held: bool) -> tuple[Snapshot, Lease | None]:
    """Open a version, and hold it against every vacuum where that is wanted."""
    if not held:
        return open_snapshot(store, version), None
    for _ in range(ATTEMPTS):
        snapshot = open_snapshot(store, version)
        try:
            return snapshot, pin(store, snapshot)
        except VersionExpired:
            if version is not None:
                raise
    raise VersionExpired(f"{store.url} is changed and vacuumed faster than its newest version can be pinned.")


def open_input(
    input_dir: str | os.PathLike[str], index_path: str | os.PathLike[str] | None, version: Version | None, *, held: bool
) -> tuple[Snapshot, Lease | None]:
    """Open what the arguments of a dataset name."""
    store = open_store(input_dir)
    if index_path is None:
        snapshot, lease = open_version(store, version, held=held)
        check_room(store, max((record.size for record in snapshot.index.chunks), default=0))
        return snapshot, lease
    if version is not None or held:
        raise ValueError("index_path= and version= both choose what is read, and pin= holds a version: give one of them.")
    file = Path(index_path)
    file = file / "index.json" if file.is_dir() else file
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise DatasetNotFound(f"index_path= names {file}, which does not exist.", path=os.fspath(file)) from error
    return Snapshot(store, Index.parse(data, os.fspath(file))), None
