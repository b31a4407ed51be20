"""The snapshot: one version of a dataset, pinned."""

from __future__ import annotations

import operator
import posixpath
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from liveset.errors import (
    Corrupt,
    DatasetError,
    DatasetNotFound,
    Erased,
    ForeignEdit,
    NotFound,
    PositionOutOfRange,
    VersionExpired,
    VersionNotFound,
)
from liveset.format import codec
from liveset.format.chunk import Buffer, plain_buffer
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import HistoryEntry, Redirects
from liveset.storage import HEAD, Store, version_name

__all__ = ["Snapshot", "StoredFile", "Version", "archived", "entries", "open_snapshot", "redirects_of"]

Version: TypeAlias = int | str | datetime
"""What names a version: its number, a tag, or a time (then the newest version committed by then)."""


class StoredFile(NamedTuple):
    """The file of a chunk: the record that describes it, the name under which it was found, and its bytes."""

    record: ChunkRecord
    name: str
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a dataset: its index and the store that holds its chunks. It never changes, whatever is committed later.

    Only a purge changes what earlier versions consist of: their index lists the files that it left, and those slots without bytes.
    """

    store: Store
    index: Index
    redirects: Redirects = field(default_factory=Redirects, repr=False, compare=False)
    """What purges did to the files that the index names."""
    named: Index = field(init=False, repr=False, compare=False)
    """The index as it was committed."""
    edition: str = field(init=False, repr=False, compare=False)
    """What tells the files of this version from those of others, where another program wrote it and it is fetched."""
    starts: list[int] = field(init=False, repr=False, compare=False)
    """Position of the first sample of each chunk, and at the end the number of samples; one longer than ``index.chunks``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", self.index)
        foreign = self.store.remote and self.index.edit is None
        object.__setattr__(self, "edition", codec.checksum([self.index.source]).replace(":", "-") if foreign else "")
        if self.redirects:
            object.__setattr__(self, "index", self.index.redirected(self.redirects))
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
        return memoryview(self._stored(chunk).buffer)

    def chunk_file(self, chunk: int) -> tuple[str, Buffer]:
        """Name and bytes of the file that the index names for a chunk; for those who have looked at its record already."""
        _, name, buffer = self._stored(chunk)
        return name, buffer

    def chunk(self, number: int, *, fresh: bool = False) -> StoredFile:
        """The file of one chunk; slicing its bytes gives bytes. A purge may have replaced it since the version was opened."""
        while True:
            record = self.index.chunks[number]
            try:
                return self._stored(number, fresh=fresh)
            except NotFound:
                if not self.follow() and self.index.chunks[number] == record:  # or another thread has followed meanwhile
                    raise

    def _stored(self, number: int, *, fresh: bool = False) -> StoredFile:
        record = self.index.chunks[number]
        try:
            buffer = self.store.map(record.filename, 0 if self.index.compressed_files else record.size, self.content(record), fresh=fresh)
            return StoredFile(record, record.filename, plain_buffer(buffer))
        except NotFound as error:
            # The old tool inflates chunks that are compressed as a whole where they lie, and deletes the originals.
            inflated = record.filename.replace(f".{(self.index.config or {}).get('compression')}", "")
            if not self.index.compressed_files or inflated == record.filename:
                raise self.gone(record.filename) from error
        try:
            return StoredFile(record, inflated, plain_buffer(self.store.map(inflated, record.size, self.edition, fresh=fresh)))
        except NotFound as error:
            raise self.gone(record.filename) from error

    def content(self, record: ChunkRecord) -> str:
        """What tells the file of a chunk from others that had its name: other programs use names again."""
        return record.check or self.edition

    def follow(self) -> bool:
        """Look whether a purge has replaced files of this version since it was opened, and read from the new ones then."""
        try:
            redirects = redirects_of(_head(self.store))
        except DatasetError:
            return False
        index = self.named.redirected(redirects)
        before, files = (i.edit.key_files if i.edit is not None else None for i in (self.index, index))
        if (index.chunks, files) == (self.index.chunks, before):
            return False
        object.__setattr__(self, "redirects", redirects)
        object.__setattr__(self, "index", index)
        return True

    def erased(self, chunk: int, slot: int) -> Erased:
        """The error for a sample of this version that a purge erased."""
        position = self.starts[chunk] + slot
        gone = tuple(start + slot for start, record in zip(self.starts, self.index.chunks, strict=False) for slot in record.erased)
        return Erased(
            f"the sample at position {position} of version {self.version} of {self.store.url} was erased by a purge: its bytes are gone "
            f"for good. Read a newer version, or leave out the {len(gone):,} positions in `positions` of this error.",
            version=self.version,
            position=position,
            positions=gone,
        )

    def gone(self, name: str) -> NotFound:
        """The error for a file of this version that is not there any more; it looks for the reason."""
        path = posixpath.join(self.store.url, name)
        kind, reason = _why_gone(self)
        text = f"{path} does not exist, but version {self.version} of the dataset needs it: {reason}"
        return kind(text, file=path, version=self.version)


def _why_gone(snapshot: Snapshot) -> tuple[type[NotFound], str]:
    try:
        head = _head(snapshot.store)
    except DatasetError:
        return VersionExpired, "the dataset was removed."
    if snapshot.named.redirected(redirects_of(head)).chunks != snapshot.index.chunks:
        return VersionExpired, "a purge has replaced it meanwhile. Open the version again."
    fence = head.edit.fence if head.edit is not None else None
    if fence is None or fence.keeps(snapshot.version):
        return (
            NotFound,
            "it was deleted, and not by a vacuum of liveset. `liveset repair` brings it back from another copy, if there is one.",
        )
    return VersionExpired, (
        f"a vacuum (version {fence.version}) removed what only versions before {fence.expired_before} needed. Open a newer version; "
        "pin=True or a tag keeps one for longer than the vacuum does."
    )


def open_snapshot(store: Store, version: Version | None = None, *, head: Index | None = None) -> Snapshot:
    """Pins the newest version of a dataset (None), or the one with a number, the one with a tag, or the newest one at a time.

    Whoever has just read the head passes it; it is read otherwise.
    """
    if version is None:
        return Snapshot(store, head or _head(store))
    if isinstance(version, str | datetime):
        head = head or _head(store)
        number = _tagged(store, head, version) if isinstance(version, str) else _version_at(store, head, version)
        return _open_number(store, number, head)
    if isinstance(version, bool):
        raise ValueError(f"version={version} is neither a number, a tag nor a time.")
    return _open_number(store, operator.index(version), head)


def _open_number(store: Store, version: int, head: Index | None) -> Snapshot:
    if version < 0:
        raise VersionNotFound(f"{store.url} has no version {version}: versions count from 0.", version=version)
    try:
        head = head or _head(store)
    except (Corrupt, DatasetNotFound):
        # What is wrong with the head says nothing about the versions before it: they are the way back.
        if (index := archived(store, version)) is not None:
            return Snapshot(store, index)
        raise
    if head.version == version:
        if not head.digest_matches():
            path = posixpath.join(store.url, HEAD)
            raise ForeignEdit(f"{path} was changed by another program since version {version} was committed.", file=path)
        return Snapshot(store, head)
    if head.edit is not None and head.edit.fence is not None and not head.edit.fence.keeps(version):
        raise VersionExpired(
            f"version {version} of {store.url} has expired: the vacuum of version {head.edit.fence.version} kept nothing before version "
            f"{head.edit.fence.expired_before} but what was tagged or pinned.",
            version=version,
        )
    # The head that came after a version was put in place only when the version had been archived.
    if (index := archived(store, version, _id_of(head, version))) is not None:
        return Snapshot(store, index, redirects_of(head))
    if head.version < version:
        raise VersionNotFound(f"{store.url} has no version {version}: the newest is {head.version}.", version=version)
    if version == 0 and _began_stamped(store, head):
        raise VersionNotFound(f"{store.url} has no version 0: the first is 1.", version=version)
    raise VersionExpired(f"version {version} of {store.url} has been removed; the newest is {head.version}.", version=version)


def _tagged(store: Store, head: Index, tag: str) -> int:
    tags = head.edit.tags if head.edit is not None else {}
    if tag not in tags:
        known = f"its tags are {', '.join(sorted(tags))}" if tags else "it has no tags"
        hint = f" (version {tag} is asked for by the number, version={tag})" if tag.isdecimal() else ""
        raise VersionNotFound(f"{store.url} has no tag {tag!r}: {known}{hint}.", tag=tag)
    return tags[tag]


def _version_at(store: Store, head: Index, time: datetime) -> int:
    if time.tzinfo is None:
        raise ValueError(
            f"version={time!r} has no time zone, so it could be meant for any: give it one, such as .astimezone() for local time "
            "or .replace(tzinfo=datetime.UTC)."
        )
    later = None
    for entry in known_entries(store, head):
        if entry.committed_at and entry.time <= time:
            if later is not None and entry.version < later.version - 1 and entry.time < time:
                raise VersionExpired(
                    f"the version of {store.url} of {time.isoformat()} is forgotten: a vacuum removed those between {entry.version} and "
                    f"{later.version}.",
                    version=later.version - 1,
                )
            return entry.version
        later = entry if entry.committed_at else later
    if later is not None and later.version > 1:
        raise VersionExpired(
            f"the version of {store.url} of {time.isoformat()} is forgotten: a vacuum removed those before {later.version}.",
            version=later.version - 1,
        )
    known = f"version {later.version}, the first, was committed at {later.committed_at}" if later else "another program wrote it"
    raise VersionNotFound(f"{store.url} has no version of {time.isoformat()}: {known}.", time=time)


def entries(store: Store, head: Index, *, above: int = 0) -> Iterator[HistoryEntry]:
    """The commits of a head's line above a number, newest first; ``VersionExpired`` where the line is cut before it ends."""
    index = head
    while index.edit is not None:
        listed = (index.edit.entry, *index.edit.history) if index is head else index.edit.history
        for entry in listed:
            if entry.version <= above:
                return
            yield entry
        if not listed or listed[-1].version <= max(above + 1, 1):
            return
        # A head remembers only its newest ancestors; the oldest of these remembers older ones.
        index = _ancestor(store, listed[-1])


def known_entries(store: Store, head: Index) -> Iterator[HistoryEntry]:
    """All commits of a head's line that are still known, newest first; where a vacuum has cut the line there may be gaps."""
    last = head.version + 1
    try:
        for entry in entries(store, head):
            yield entry
            last = entry.version
        yield HistoryEntry(0, "", "foreign", "")  # reached only where the history is not cut
    except VersionExpired:
        # Behind the cut only versions that a tag or a reader has saved are known, and what these remember.
        fence = head.edit.fence if head.edit is not None else None
        for number in sorted(fence.kept if fence is not None else (), reverse=True):
            if number >= last or (index := archived(store, number)) is None:
                continue
            before = [index.edit.entry, *index.edit.history] if index.edit is not None else [HistoryEntry(0, "", "foreign", "")]
            for entry in before:
                if entry.version < last:
                    yield entry
                    last = entry.version


def _ancestor(store: Store, entry: HistoryEntry) -> Index:
    name = version_name(entry.version)
    try:
        index = Index.parse(store.read(name), f"{store.url}/{name}")
    except NotFound as error:
        raise VersionExpired(
            f"the history of {store.url} is cut at version {entry.version}: {name} has been removed.", version=entry.version
        ) from error
    if index.id != entry.id:
        raise VersionExpired(
            f"the history of {store.url} is cut at version {entry.version}: {name} is of another line.", version=entry.version
        )
    return index


def _head(store: Store) -> Index:
    head = store.read_head()
    if head is None:
        if not store.exists():
            raise DatasetNotFound(f"{store.url} does not exist.", path=store.url)
        raise DatasetNotFound(f"{store.url} doesn't contain any index.json file.", path=store.url)
    return Index.parse(head.data, posixpath.join(store.url, HEAD))


def redirects_of(head: Index) -> Redirects:
    """What purges did to the files of the versions before a head."""
    return head.edit.redirects if head.edit is not None else Redirects()


def _id_of(head: Index, version: int) -> str:
    """The id of an ancestor that a head remembers; empty for others."""
    listed = head.edit.history if head.edit is not None else ()
    return next((entry.id for entry in listed if entry.version == version), "")


def archived(store: Store, version: int, known: str = "") -> Index | None:
    """The index of an earlier version as it was archived, whether or not its files are still there; None where it is gone.

    Where its id is ``known``, so that no other one is taken for it, a remote one comes from the cache.
    """
    name = version_name(version)
    path = posixpath.join(store.url, name)
    try:
        data = bytes(store.map(name, 0, known)) if known and store.remote else store.read(name)
    except NotFound:
        return None
    try:
        index = _checked(Index.parse(data, path), version, path)
        if index.id == known or not known:
            return index
    except Corrupt:
        if not known:
            raise
    return archived(store, version)  # what the cache holds is damaged, or of another line that took the place of this one


def _checked(index: Index, version: int, path: str) -> Index:
    if index.version != version:
        raise Corrupt(f"{path} is damaged: it holds version {index.version}.", file=path)
    if not index.digest_matches():
        raise Corrupt(f"{path} is damaged: its members do not fit the digest of its stamp.", file=path)
    return index


def _began_stamped(store: Store, head: Index) -> bool:
    """Whether liveset wrote the first version, so that there was no version 0."""
    first = head if head.version == 1 else archived(store, 1)
    return first is not None and first.edit is not None and first.edit.parent is None
