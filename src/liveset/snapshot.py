"""The snapshot: one version of a dataset, pinned."""

from __future__ import annotations

import posixpath
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

from liveset.errors import Corrupt, DatasetNotFound, ForeignEdit, NotFound, PositionOutOfRange, VersionExpired, VersionNotFound
from liveset.format.index import Index
from liveset.storage import HEAD, Store, version_name

__all__ = ["Snapshot", "open_snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a dataset: its index and the store that holds its chunks. It never changes, whatever is committed later."""

    store: Store
    index: Index
    starts: list[int] = field(init=False, repr=False, compare=False)
    """Position of the first sample of each chunk, and at the end the number of samples; one longer than ``index.chunks``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", list(accumulate([record.samples for record in self.index.chunks], initial=0)))

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def version(self) -> int:
        """Number of the version; 0 when another program wrote the dataset."""
        return self.index.version

    def locate(self, position: int) -> tuple[int, int]:
        """Chunk and slot of the sample at ``position``, which counts from 0."""
        starts = self.starts
        if not 0 <= position < starts[-1]:
            raise PositionOutOfRange(f"no sample at position {position}: the dataset has {starts[-1]} samples.")
        chunk = bisect_right(starts, position) - 1
        return chunk, position - starts[chunk]

    def chunk_buffer(self, chunk: int) -> memoryview:
        """Read-only view of the file of one chunk, as it lies on the store."""
        record = self.index.chunks[chunk]
        try:
            return self.store.map(record.filename, 0 if self.index.compressed_files else record.size)
        except NotFound as error:
            path = posixpath.join(self.store.url, record.filename)
            raise VersionExpired(
                f"{path} does not exist, but version {self.version} of the dataset needs it: it was deleted, or expired.",
                file=path,
                version=self.version,
            ) from error


def open_snapshot(store: Store, version: int | None = None) -> Snapshot:
    """Pins the newest version of a dataset, or the one with the given number."""
    if version is None:
        return Snapshot(store, _head(store))
    if version < 0:
        raise VersionNotFound(f"{store.url} has no version {version}: versions count from 0.", version=version)
    if (index := _archived(store, version)) is None:
        head = _head(store)
        if head.version == version:
            if not head.digest_matches():
                path = posixpath.join(store.url, HEAD)
                raise ForeignEdit(f"{path} was changed by another program since version {version} was committed.", file=path)
            index = head
        elif head.version < version:
            raise VersionNotFound(f"{store.url} has no version {version}: the newest is {head.version}.", version=version)
        # Between the two looks it may have become an earlier version; then it has been archived before the head was replaced.
        elif (index := _archived(store, version)) is None:
            if version == 0 and _began_stamped(store, head):
                raise VersionNotFound(f"{store.url} has no version 0: the first is 1.", version=version)
            raise VersionExpired(f"version {version} of {store.url} has been removed; the newest is {head.version}.", version=version)
    return Snapshot(store, index)


def _head(store: Store) -> Index:
    head = store.read_head()
    if head is None:
        if not store.exists():
            raise DatasetNotFound(f"{store.url} does not exist.", path=store.url)
        raise DatasetNotFound(f"{store.url} doesn't contain any index.json file.", path=store.url)
    return Index.parse(head.data, posixpath.join(store.url, HEAD))


def _archived(store: Store, version: int) -> Index | None:
    name = version_name(version)
    path = posixpath.join(store.url, name)
    try:
        data = store.read(name)
    except NotFound:
        return None
    index = Index.parse(data, path)
    if index.version != version:
        raise Corrupt(f"{path} is damaged: it holds version {index.version}.", file=path)
    if not index.digest_matches():
        raise Corrupt(f"{path} is damaged: its members do not fit the digest of its stamp.", file=path)
    return index


def _began_stamped(store: Store, head: Index) -> bool:
    """Whether liveset wrote the first version, so that there was no version 0."""
    first = head if head.version == 1 else _archived(store, 1)
    return first is not None and first.edit is not None and first.edit.parent is None
