"""Damaged files: which files of a dataset are damaged, and where their bytes are that a repair puts back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from liveset.edit.changes import files_of
from liveset.edit.keyfiles import KEYS
from liveset.edit.retention import QUARANTINE
from liveset.errors import Conflict, Corrupt, DatasetError, DatasetNotFound, NotFound, StorageError, VersionExpired
from liveset.format import codec
from liveset.format.chunk import Buffer, open_chunk, plain_buffer
from liveset.format.index import ChunkRecord, Index
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import HistoryEntry
from liveset.snapshot import Snapshot, archived, entries, redirects_of
from liveset.storage import HEAD, Store, version_name
from liveset.tools.verify import Damage, archived_numbers, check_table, damaged_files

__all__ = ["DamagedFiles", "Restored", "archives", "kept_name"]

# How often a file is offered to a dataset whose head changes all the time.
_ATTEMPTS = 50


class Restored(NamedTuple):
    """A file that was put right, and the file that its bytes came from."""

    file: str
    source: str


class DamagedFiles:
    """Finds the damaged files of all versions, and puts back those whose bytes are somewhere."""

    def __init__(self, store: Store, other: Store | None, index: Index, skip: Collection[str] = ()) -> None:
        self._store, self._index, self._skip = store, index, skip
        self._places = [place for place in (other, store) if place is not None]
        self._other = other
        self._sums: dict[tuple[str, str], str] = {}
        self._listed: dict[str, dict[str, int]] = {}
        self._sources: dict[str, tuple[Store, str]] = {}
        self.archives: list[Index] = []
        """The archived versions as they will be."""

    @property
    def restored(self) -> list[Restored]:
        """The files that get their bytes back."""
        return [Restored(name, f"{place.url}/{source}") for name, (place, source) in self._sources.items()]

    def plan(self) -> tuple[list[Damage], list[Damage]]:
        """Find the bytes of all damaged files; return what will be left of the newest version, and of the earlier ones."""
        line = self._line()
        missing, doubtful = self._missing(line)
        self.archives, older = self._plan_archives(missing, {entry.version: entry.id for entry in line})
        left = self._plan_of(Snapshot(self._store, self._index), set())
        seen = files_of(self._index)
        for index in self.archives:
            older += self._plan_earlier(index, seen)
        files = {file.name for prefix in ("chunk-", KEYS) for file in self._store.list(prefix)} if doubtful else set()
        files |= self._sources.keys()
        for entry in doubtful:
            copy = self._version(entry.version, entry.id)
            if copy is not None and self._is_whole(copy[0], files):
                self.archives.append(copy[0])
                self._sources[version_name(entry.version)] = copy[1]
                older += self._plan_earlier(copy[0], seen)
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
            source = self._chunk(index, records[damage.file]) if damage.file in records else self._table(index, damage.file)
            if source is None:
                left.append(damage)
                continue
            self._sources[damage.file] = source
        return left

    def _plan_earlier(self, index: Index, seen: set[str]) -> list[Damage]:
        """Find the bytes of the damaged files of an earlier version but those in ``seen``; return what will be left."""
        fence = self._index.edit.fence if self._index.edit is not None else None
        if fence is not None and not fence.keeps(index.version):
            return []
        # As purges left it: what they erased must not come back.
        snapshot = Snapshot(self._store, index, redirects_of(self._index))
        left = [damage._replace(positions=range(0), keys=()) for damage in self._plan_of(snapshot, seen)]
        seen |= files_of(snapshot.index)
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

    def _table(self, index: Index, name: str) -> tuple[Store, str] | None:
        """Return where the bytes of a key table are; its name is its own, and it carries its checksum."""
        with suppress(NotFound, Corrupt):
            if self._other is not None:
                check_table(self._other, index, name)
                return self._other, name
        return None

    def _missing(self, line: Sequence[HistoryEntry]) -> tuple[list[int], list[HistoryEntry]]:
        """Return the versions that should be archived and are not, and those of which it is not sure that they should."""
        there = set(archived_numbers(self._store))
        fence = self._index.edit.fence if self._index.edit is not None else None
        lost = [entry for entry in line[1:] if entry.version not in there and (fence is None or fence.keeps(entry.version))]
        lost = [entry for entry in lost if version_name(entry.version) not in self._skip]
        # Earlier ones may not have been copied along; and from those that a purge did not see, it has not erased its samples.
        sure = max([entry.version for entry in line if entry.op == "purge"] + [min(there, default=self._index.version)])
        return [entry.version for entry in lost if entry.version >= sure], [entry for entry in lost if entry.version < sure]

    def _plan_archives(self, missing: Collection[int], known: Mapping[int, str]) -> tuple[list[Index], list[Damage]]:
        """Return the archived versions as they will be, newest first, and those that stay damaged."""
        found, left = [], []
        for number in sorted({*archived_numbers(self._store), *missing}, reverse=True):
            name = version_name(number)
            if name in self._skip:
                continue
            index, problem = None, "does not exist, and no vacuum has removed it"
            try:
                index = archived(self._store, number)
            except Corrupt as error:
                problem = str(error).removeprefix(f"{self._store.url}/{name} ")
            if index is None and number == self._index.version:
                index, self._sources[name] = self._index, (self._store, HEAD)
            elif index is None and (copy := self._version(number, known.get(number, ""))) is not None:
                index, self._sources[name] = copy
            if index is None:
                left.append(Damage(name, problem))
            else:
                found.append(index)
        return found, left

    def _is_whole(self, index: Index, files: Collection[str]) -> bool:
        """Whether an earlier version has all its files, as purges left it."""
        index = index.redirected(redirects_of(self._index))
        tables = index.edit.key_files.tables if index.edit is not None and index.edit.key_files is not None else ()
        return all(name in files for name in (*tables, *(record.filename for record in index.chunks)))

    def _line(self) -> list[HistoryEntry]:
        """Return the commits that led to the newest version, newest first, as far back as they are known without a gap."""
        line: list[HistoryEntry] = []
        with suppress(VersionExpired, Corrupt):
            line.extend(entries(self._store, self._index))
        return line

    def _version(self, number: int, known: str) -> tuple[Index, tuple[Store, str]] | None:
        """Return an earlier version from the copy, and the file that it is in there; one whose id is known may be the newest there."""
        for name in (version_name(number), HEAD) if known else (version_name(number),):
            if self._other is None:
                break
            with suppress(NotFound, Corrupt):
                index = Index.parse(self._other.read(name), name)
                if index.version == number and index.digest_matches() and index.id == (known or index.id):
                    return index, (self._other, name)
        return None

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
