"""Damaged files: which files of a dataset are damaged, and where their bytes are that a repair puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from liveset.edit.changes import files_of
from liveset.edit.retention import QUARANTINE
from liveset.errors import Conflict, Corrupt, DatasetError, DatasetNotFound, NotFound, StorageError
from liveset.format import codec
from liveset.format.chunk import Buffer, open_chunk, plain_buffer
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import KeyTable
from liveset.format.schema import Decoder, Schema
from liveset.snapshot import Snapshot, archived, redirects_of
from liveset.storage import Store, version_name
from liveset.tools.verify import Damage, archived_numbers, damaged_files

__all__ = ["DamagedFiles", "Restored", "archives", "kept_name"]

# How often a file is offered to a dataset whose head changes all the time.
_ATTEMPTS = 50


class Restored(NamedTuple):
    """A file that was put right, and the file that its bytes came from."""

    file: str
    source: str


class DamagedFiles:
    """Finds the damaged files of all versions, and puts back those whose bytes are somewhere."""

    def __init__(self, store: Store, other: Store | None, index: Index) -> None:
        self._store, self._index = store, index
        self._places = [place for place in (other, store) if place is not None]
        self._other = other
        self._sums: dict[tuple[str, str], str] = {}
        self._listed: dict[str, dict[str, int]] = {}
        self._sources: dict[str, tuple[Store, str]] = {}

    @property
    def restored(self) -> list[Restored]:
        """The files that get their bytes back."""
        return [Restored(name, f"{place.url}/{source}") for name, (place, source) in self._sources.items()]

    def plan(self) -> tuple[list[Damage], list[Damage]]:
        """Find the bytes of all damaged files; return what will be left of the newest version, and of the earlier ones."""
        archives, older = self._plan_archives()
        left = self._plan_of(Snapshot(self._store, self._index), set())
        seen = files_of(self._index)
        fence = self._index.edit.fence if self._index.edit is not None else None
        for index in archives:
            if fence is None or fence.keeps(index.version):
                # As purges left it: what they erased must not come back.
                snapshot = Snapshot(self._store, index, redirects_of(self._index))
                older += [damage._replace(positions=range(0), keys=()) for damage in self._plan_of(snapshot, seen)]
                seen |= files_of(snapshot.index)
        return left, older

    def restore(self) -> None:
        """Put the bytes in place; the damaged files are kept first, since one may hold what belongs to another."""
        kept = {}
        there = {entry.name for entry in self._store.list(QUARANTINE)}
        for name in self._sources:
            with suppress(NotFound, StorageError):  # of what cannot be read, nothing can be kept
                kept[name] = kept_name(name, self._store.map(name, 0))
            if name in kept and kept[name] not in there:
                self._store.copy(name, kept[name])
                there.add(kept[name])
        for name, (place, source) in self._sources.items():
            self._publish(name, place.map(kept.get(source, source) if place is self._store else source, 0))

    def _plan_of(self, snapshot: Snapshot, seen: set[str]) -> list[Damage]:
        index = snapshot.index
        records = {record.filename: record for record in index.chunks}
        left = []
        for damage in damaged_files(snapshot, skip=seen):
            source = self._chunk(index, records[damage.file]) if damage.file in records else self._table(damage.file)
            if source is None:
                left.append(damage)
                continue
            self._sources[damage.file] = source
        return left

    def _chunk(self, index: Index, record: ChunkRecord) -> tuple[Store, str] | None:
        """Return where the bytes of a chunk are."""
        if record.check is None:
            return (self._other, record.filename) if self._other is not None and _decodes(self._other, index, record) else None
        for place in self._places:
            size = None if index.compressed_files else record.size
            names = [name for name, length in self._sizes(place).items() if size in (None, length)]
            # The file of the same name first: it is the most likely one, and reading others costs time.
            for name in sorted(names, key=lambda name: (name != record.filename, name)):
                if (place is not self._store or name != record.filename) and self._sum(place, name) == record.check:
                    return place, name
        return None

    def _sizes(self, place: Store) -> dict[str, int]:
        if place.url not in self._listed:
            self._listed[place.url] = {entry.name: entry.size for entry in place.list("") if entry.name.endswith(".bin")}
        return self._listed[place.url]

    def _sum(self, place: Store, name: str) -> str:
        if (place.url, name) not in self._sums:
            try:
                self._sums[place.url, name] = codec.checksum(place.map(name, 0))
            except DatasetError:
                self._sums[place.url, name] = ""
        return self._sums[place.url, name]

    def _table(self, name: str) -> tuple[Store, str] | None:
        """Return where the bytes of a key table are; its name is its own, and it carries its checksum."""
        with suppress(NotFound, Corrupt):
            if self._other is not None:
                KeyTable(self._other.map(name, 0), name).check()
                return self._other, name
        return None

    def _plan_archives(self) -> tuple[list[Index], list[Damage]]:
        """Return the archived versions as they will be, newest first, and those that stay damaged."""
        found, left = [], []
        edit = self._index.edit
        known = {entry.version: entry.id for entry in (edit.history if edit is not None else ())}
        for number in sorted(archived_numbers(self._store), reverse=True):
            name = version_name(number)
            try:
                index = archived(self._store, number)
            except Corrupt as error:
                index = None
                with suppress(Corrupt):
                    index = archived(self._other, number) if self._other is not None else None
                if self._other is not None and index is not None and known.get(number, index.id) == index.id:
                    self._sources[name] = self._other, name
                else:
                    index = None
                    left.append(Damage(name, str(error)))
            found += [index] if index is not None else []
        return found, left

    def _publish(self, name: str, data: memoryview) -> None:
        """Put bytes under a name, in one step."""
        for _ in range(_ATTEMPTS):
            head = self._store.read_head()
            if head is None:
                raise DatasetNotFound(f"{self._store.url} was removed while it was being repaired.", path=self._store.url)
            if self._store.publish(name, data, head.tag):
                return
        raise Conflict(f"{self._store.url} is changed all the time, so that {name} could not be put in place. Repair again.")


def _decodes(place: Store, index: Index, record: ChunkRecord) -> bool:
    """Whether a file with the name of a chunk holds samples of the schema, as many as it should."""
    config = index.config or {}
    try:
        data: Buffer = plain_buffer(place.map(record.filename, 0 if index.compressed_files else record.size))
        decoder = Decoder(Schema.from_config(config, index.file), strict=False)
        for _ in open_chunk(data, record, decoder, codec.Compression.from_config(config)).iterate(0, record.samples):
            pass
    except DatasetError:
        return False
    return True


def kept_name(name: str, data: bytes | memoryview) -> str:
    """Return the name under which a damaged file is kept."""
    stem, dot, suffix = name.rpartition("/")[2].partition(".")
    return f"{QUARANTINE}{stem}-{codec.checksum(data).removeprefix('xxh3:')}{dot}{suffix}"


def archives(store: Store) -> Iterator[Index]:
    """Yield the archived versions that can be read, newest first."""
    for number in sorted(archived_numbers(store), reverse=True):
        with suppress(Corrupt):
            if (index := archived(store, number)) is not None:
                yield index
