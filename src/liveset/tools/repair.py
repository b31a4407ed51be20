"""Repair: a lost or damaged index, chunks and key tables are put right from what is there and from another copy of the dataset."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from liveset.edit.adopt import remove_unnamed
from liveset.edit.changes import Change, Overwrite, Replace, Restore, Stamp, apply, files_of
from liveset.edit.commit import check_texts, commit, interrupted_after, landed, new_token
from liveset.edit.keyfiles import KEYS, KeyWriter, ids_of
from liveset.edit.publish import layout, publish_keys
from liveset.errors import (
    CommitUnknown,
    Conflict,
    Corrupt,
    DatasetError,
    DatasetNotFound,
    ForeignEdit,
    NotFound,
    VersionExpired,
)
from liveset.format import codec
from liveset.format.chunk import open_chunk, plain_buffer
from liveset.format.framed import FramedItems, is_framed
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import KeyColumn, KeyTable
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import TableKeys, open_keys
from liveset.snapshot import Snapshot, entries, redirects_of
from liveset.storage import HEAD, VERSIONS, Head, Place, Store, Swap, is_inside, open_store, version_name
from liveset.tools.damagedfiles import DamagedFiles, Restored, archives, kept_name
from liveset.tools.verify import Damage, archived_numbers

__all__ = ["RepairReport", "Restored", "repair"]

OP = "repair"
"""What the history says of a commit that this makes."""

_CHUNK = re.compile(r"chunk-(\d+)-(\d+)(?:-([0-9a-f]{16}))?(?:\.[^./]+)?\.bin")


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did, or would do.

    Attributes:
        path: of the dataset.
        dry_run: whether nothing was done.
        version: of the newest version afterwards; with ``dry_run`` the one that it would have.
        index: what was wrong with ``index.json`` and what was taken in its place; empty when nothing was.
        unlisted: chunk files that no version names, where the index was rebuilt: they may hold what a lost version had.
        restored: chunks, key tables and archived versions that have their bytes again.
        quarantined: chunks that were taken out of the newest version, with the positions and keys that they had.
        left: what is still wrong with the newest version.
        older: files that are still wrong and that only earlier versions need.
    """

    path: str
    dry_run: bool
    version: int
    index: str
    unlisted: tuple[str, ...]
    restored: tuple[Restored, ...]
    quarantined: tuple[Damage, ...]
    left: tuple[Damage, ...]
    older: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether the newest version is whole."""
        return not self.left

    @property
    def done(self) -> bool:
        """Whether anything was changed, or would be."""
        return bool(self.index or self.restored or self.quarantined)


def repair(
    path: str | os.PathLike[str],
    *,
    copy: str | os.PathLike[str] | None = None,
    quarantine: bool = False,
    message: str = "",
    author: str = "",
    dry_run: bool = False,
) -> RepairReport:
    """Put right what is damaged in a dataset, as far as that is possible without guessing; doing it again changes nothing more.

    * An ``index.json`` that is missing, damaged or older than an archived version is replaced by the newest version that is known: of the
      archived ones, or of ``copy`` if that continues them. It becomes a new version. What only the lost version had is not in it;
      ``unlisted`` names the chunk files that may hold it. One that was put back from just the version before is replaced where ``copy``
      has a later one whose files are here: without, it looks like a commit that did not land. Where no version is known at all, the chunk
      files are listed by the order in their names with the schema of ``copy``.
    * Damaged and missing chunks, key tables and archived versions, those of earlier versions too, get their bytes back from any file in the
      dataset or in ``copy`` that has the right ones: the checksum decides, and where there is none, the name and that all samples decode.
    * Whatever is replaced is kept in ``_liveset/quarantine/``, under a name with its checksum, until a purge or you delete it.
    * With ``quarantine`` the chunks that remain damaged leave the dataset in one commit; the other samples keep their order and keys. The
      damaged files stay, since earlier versions name them, until a vacuum forgets those.

    Args:
        path: of the dataset.
        copy: another copy of the dataset, of any version of it; it is only read.
        quarantine: take chunks that cannot be restored out of the newest version.
        message: what the history says about the versions that this makes; empty tells what was wrong.
        author: who does this.
        dry_run: only tell what would be done.

    Returns:
        What was done, and what is still wrong.

    Raises:
        DatasetNotFound: there is no dataset, nor anything left of one; or there is none at ``copy``.
        Corrupt: the index cannot be rebuilt; the message says what is missing for it.
        ForeignEdit: another program put an index of its own in place of ours.
        Conflict: somebody else changed the dataset meanwhile; nothing is half done, call it again.
        ValueError: ``quarantine`` for a dataset of another program.

    Example:
        >>> report = liveset.repair(path, copy=backup)
        >>> report.ok, len(report.restored)
        (True, 1)
    """
    check_texts(message=message, author=author)
    store = open_store(Place.of(path, cache_dir=False))  # what the cache holds says nothing about the files where they lie
    other = _open_copy(copy, store) if copy is not None else None
    found = _Head(store, other, message, author).find()
    index = found.new
    anew = (version_name(found.base.version),) if found.problem else ()  # is archived anew
    files = DamagedFiles(store, other, index, skip=anew)
    # Everything is looked at before anything is replaced, so that a dry run tells just what is done otherwise.
    left, older = files.plan()
    bad = [damage for damage in left if damage.file in {record.filename for record in index.chunks}] if quarantine else []
    left = [damage for damage in left if damage not in bad]
    if bad:
        _check_quarantine(store, index, left)
    version = index.version + bool(bad)
    told = f"{found.problem}: {found.source}" if found.problem else ""
    unlisted = tuple(_unlisted(store, [index, *files.archives])) if found.problem else ()
    if not dry_run:
        if found.problem:
            _put(store, found)
        files.restore()
        if found.problem and index.edit is not None and index.edit.key_files is not None:
            publish_keys(store, index)
        if bad:
            version = _quarantine(store, index, bad, message, author).version
    return RepairReport(store.url, dry_run, version, told, unlisted, tuple(files.restored), tuple(bad), tuple(left), tuple(older))


def _open_copy(path: str | os.PathLike[str], store: Store) -> Store:
    """Return the store of the copy; a wrong path must not pass for a copy that has nothing to give."""
    other = open_store(Place.of(path, cache_dir=False))
    if is_inside(other.url, store.url) and is_inside(store.url, other.url):
        raise ValueError("copy= is the dataset itself: give the path of another copy.")
    if not other.exists():
        raise DatasetNotFound(f"{other.url}, which should be the copy, does not exist. Nothing was changed.", path=other.url)
    if other.read_head() is None and not archived_numbers(other):
        raise DatasetNotFound(
            f"{other.url}, which should be the copy, holds no dataset: it has no {HEAD}. Nothing was changed.", path=other.url
        )
    return other


# --- the index --------------------------------------------------------------------------------------------------------


class _Verdict(NamedTuple):
    """The head as it is, what is wrong with it, and what should be in its place."""

    head: Head | None
    problem: str
    source: str
    base: Index
    """The version that is known."""
    new: Index
    """The head that follows it; the same where nothing is wrong, or where no commit can follow."""


class _Head:
    """Finds out what the head of a dataset should be."""

    def __init__(self, store: Store, other: Store | None, message: str, author: str) -> None:
        self._store, self._other = store, other
        self._message, self._author = message, author
        self._newest = _newest_archived(store)
        self._copied = _newest(other) if other is not None else None
        self._rebuilt: Index | None = None

    def find(self) -> _Verdict:
        head = self._store.read_head()
        problem, index = self._judged(head)
        if index is not None:
            return _Verdict(head, "", "", index, index)
        base, source = self._replacement(problem)
        if base.edit is None or base is self._rebuilt:  # another program's is put back as it was
            return _Verdict(head, problem, source, base, base)
        new = apply(base, Restore(base), self._stamp(f"index.json was {problem}"))
        assert new.edit is not None
        # The lost head was at most one version after the last archived one, and its number is not used again.
        number = max(new.version, max(archived_numbers(self._store), default=-1) + 2)
        return _Verdict(head, problem, source, base, new.replace(edit=replace(new.edit, op=OP, version=number)))

    def _stamp(self, reason: str) -> Stamp:
        token = new_token()
        return Stamp(f"{token}.0", token, datetime.now(UTC), self._message or reason, self._author)

    def _judged(self, head: Head | None) -> tuple[str, Index | None]:
        """Return what is wrong with a head, and else the index in it."""
        path = f"{self._store.url}/{HEAD}"
        if head is None:
            if not self._store.exists():
                raise DatasetNotFound(f"{self._store.url} does not exist.", path=self._store.url)
            return "missing", None
        try:
            index = Index.parse(head.data, path)
        except Corrupt as error:
            return str(error).removeprefix(f"{path} is ").rstrip("."), None
        if index.edit is None and self._newest is not None and self._newest.version > 0:
            raise ForeignEdit(
                f"{path} was written by another program, but versions of ours are archived. Nothing says which data you want: to go back "
                f"to version {self._newest.version} move it away and repair again; to go on with it, remove {VERSIONS}.",
                file=path,
            )
        if not index.digest_matches():
            return "damaged (its members do not fit the digest of its stamp)", None
        newest = self._newest
        if newest is not None and newest.version > index.version:
            return f"older (version {index.version}) than version {newest.version}, which is archived", None
        if newest is not None and newest.version == index.version and index.edit is not None:
            if newest.source != index.source:
                return f"another version {index.version} than the one that is archived", None
            if (later := self._landed(index)) is not None:
                return f"older (version {index.version}) than version {later.version}, whose files are here", None
        return "", index

    def _landed(self, index: Index) -> Index | None:
        """Return the version of the copy, if it was committed here after a head that is archived.

        The archive alone does not say so, since a commit makes it before it lands. But nobody else gives files the same names.
        """
        later = self._copied
        if self._other is None or later is None or later.version <= index.version or not self._continues(self._other, later):
            return None
        new = files_of(later) - files_of(index)
        return later if any(entry.name in new for prefix in ("chunk-", KEYS) for entry in self._store.list(prefix)) else None

    def _replacement(self, problem: str) -> tuple[Index, str]:
        newest, other = self._newest, self._copied
        if self._other is not None and other is not None and self._continues(self._other, other):
            return other, f"version {other.version} of the copy"
        if newest is not None:
            return newest, f"version {newest.version}, the newest that is archived"
        names = sorted(entry.name for entry in self._store.list("chunk-"))
        if not names:
            raise DatasetNotFound(f"{self._store.url} doesn't contain any index.json file, nor chunks of a dataset.", path=self._store.url)
        if other is None or other.config is None:
            raise Corrupt(
                f"{self._store.url}/{HEAD} is {problem}, and no earlier version is archived. The {len(names)} chunk files do not say which "
                "schema their samples have: give another copy of the dataset, or one with samples of the same schema, as copy=.",
                file=HEAD,
            )
        self._rebuilt = self._from_headers(names, other.config)
        return self._rebuilt, f"{len(names)} chunk files, with the schema of the copy"

    def _continues(self, store: Store, index: Index) -> bool:
        """Whether an index of the copy is of our line, and newer than what is archived here."""
        newest = self._newest
        if newest is None or newest.edit is None:
            ours = {entry.name for entry in self._store.list("chunk-")}
            return not ours.isdisjoint(files_of(index))
        if index.version <= newest.version:
            return False
        with suppress(VersionExpired):
            return any(entry.id == newest.id for entry in entries(store, index, above=newest.version - 1))
        return False

    def _from_headers(self, names: Sequence[str], config: Mapping[str, Any]) -> Index:
        """Return an index of all chunk files, in the order that their names give."""
        places: dict[tuple[int, int], str] = {}
        for name in names:
            match = _CHUNK.fullmatch(name)
            place = (int(match[1]), int(match[2])) if match is not None else None
            if place is None or place in places:
                twin = f"{places[place]} and {name} have the same place" if place is not None else f"{name} does not say where it belongs"
                raise Corrupt(
                    f"the index of {self._store.url} cannot be rebuilt from its chunk files: {twin}, and nothing says which belong to one "
                    "version. Give another copy of the dataset as copy=.",
                    file=name,
                )
            places[place] = name
        records = tuple(_record(self._store, places[place], config) for place in sorted(places))
        index = apply(None, Overwrite(config, records), self._stamp("rebuilt from chunk files"))
        assert index.edit is not None
        keys = _key_files(self._store, records)
        members = dict(index.members)
        if keys is not None:
            members["keys"] = msgspec.json.encode(layout(1, None))
        return index.replace(edit=replace(index.edit, op=OP, key_files=keys), members=members)


def _newest_archived(store: Store) -> Index | None:
    """Return the newest archived version that can be read."""
    return next(archives(store), None)


def _newest(store: Store) -> Index | None:
    """Return the newest version that can be read, the head's or an archived one."""
    newest = _newest_archived(store)
    head = store.read_head()
    if head is not None:
        with suppress(Corrupt):
            index = Index.parse(head.data, f"{store.url}/{HEAD}")
            if index.digest_matches() and (newest is None or index.version > newest.version):
                return index
    return newest


def _record(store: Store, name: str, config: Mapping[str, Any]) -> ChunkRecord:
    """Return the index entry of a chunk file, as far as the file tells it."""
    data = plain_buffer(store.map(name, 0))
    compression = codec.Compression.from_config(config)
    plain = codec.decompress(data, file=name) if codec.is_frame(data) else data
    count = int.from_bytes(plain[12:16] if is_framed(plain) else plain[:4], "little")
    match = _CHUNK.fullmatch(name)
    chunk = f"{match[3]}.{match[1]}.{match[2]}" if match is not None and match[3] else None
    record = ChunkRecord(name, count, len(plain), id=chunk, check=codec.checksum(data) if chunk else None)
    if is_framed(plain):
        FramedItems(plain, count, name)  # which checks the tables
    # That it opens with the schema is the best proof that there is.
    opened = open_chunk(data, record, Decoder(Schema.from_config(config), strict=False), compression)
    for _ in islice(opened.iterate(0, count), 1):
        pass
    return record


def _key_files(store: Store, records: Sequence[ChunkRecord]) -> KeyFiles | None:
    """Return the one key table that holds the keys of just these chunks."""
    wanted = sorted((record.id, record.samples) for record in records if record.id is not None)
    for entry in store.list(KEYS):
        with suppress(Corrupt):
            table = KeyTable(store.map(entry.name, 0), entry.name)
            if sorted(table.directory) == wanted and len(wanted) == len(records) and table.live == table.rows and not table.removed:
                return KeyFiles("int" if table.kind is int else "text", table.rows, (entry.name,), sizes={entry.name: entry.size})
    return None


def _put(store: Store, found: _Verdict) -> None:
    """Put an index in place of the damaged one, which is kept."""
    head, new = found.head, found.new
    if head is not None:
        store.write_once(kept_name(HEAD, head.data), head.data)
    if new.version > found.base.version:
        name, data = version_name(found.base.version), found.base.to_bytes()
        with suppress(NotFound):
            if (damaged := store.read(name)) != data:  # or that version would have been found here
                store.write_once(kept_name(name, damaged), damaged)
                store.delete([name])
        store.write_once(name, data)
    published = [entry.name for entry in store.list("keys") if entry.name == "keys.parquet" or entry.name.startswith("keys/shard-")]
    withdrawn = published if new.edit is not None else []
    try:
        outcome = store.swap_head(new.to_bytes(), head.tag if head is not None else None, withdrawn)
    except KeyboardInterrupt as error:
        now = None
        with suppress(DatasetError, OSError):  # then nobody knows; the same repair tells
            now = store.read_head()
        if now is None or now.data != new.to_bytes():
            raise
        raise interrupted_after(store, new) from error
    if outcome is Swap.LOST:
        raise Conflict(f"{store.url}/{HEAD} was replaced while it was being repaired; nothing was changed. Look at it again.")
    with landed(store, new) if outcome is Swap.SWAPPED else nullcontext():
        _finish_put(store, found, outcome)


def _finish_put(store: Store, found: _Verdict, outcome: Swap) -> None:
    new = found.new
    now = store.read_head()
    if outcome is Swap.UNKNOWN and (now is None or now.data != new.to_bytes()):
        raise CommitUnknown(f"nobody knows whether {store.url}/{HEAD} was replaced: the store did not answer. Repair again.")
    if new.edit is not None:
        # Archived at once, so that its number is known to be taken if this head is lost, too.
        store.write_once(version_name(new.version), new.to_bytes())


def _unlisted(store: Store, versions: Sequence[Index]) -> Iterator[str]:
    """Yield the chunk files that no version names, of which the first is the newest."""
    redirects = redirects_of(versions[0])
    named = {name for index in versions for name in files_of(index) | files_of(index.redirected(redirects))}
    yield from sorted(entry.name for entry in store.list("chunk-") if entry.name not in named)


# --- quarantine -------------------------------------------------------------------------------------------------------


def _check_quarantine(store: Store, index: Index, left: Sequence[Damage]) -> None:
    """Raise the error for a dataset that chunks cannot be taken out of."""
    if index.edit is None:
        raise ValueError(f"{store.url} was written by another program: adopt it (liveset.adopt) before chunks are taken out of it.")
    tables = index.edit.key_files.tables if index.edit.key_files is not None else ()
    for damage in left:
        if damage.file in tables:
            raise Corrupt(
                f"{store.url}/{damage.file} is damaged, too, so that nothing says which keys the damaged chunks have. Give another copy of "
                "the dataset as copy=. Nothing was changed.",
                file=damage.file,
            )


def _quarantine(store: Store, index: Index, bad: Sequence[Damage], message: str, author: str) -> Index:
    """Take chunks out of the newest version, and return the new one."""
    files = {damage.file for damage in bad}
    writer = KeyWriter(store, new_token())

    def prepare(head: Index | None, _: Sequence[HistoryEntry]) -> Change | None:
        if head is None:
            raise DatasetNotFound(f"{store.url} was removed while it was being repaired.", path=store.url)
        gone = [number for number, record in enumerate(head.chunks) if record.filename in files]
        return _without(store, head, gone, writer) if gone else None

    samples = sum(len(damage.positions) for damage in bad)
    try:
        told = message or f"{len(bad)} damaged chunks with {samples} samples taken out"
        new = commit(store, prepare, index, message=told, author=author)
    except CommitUnknown:
        raise
    except (DatasetError, OSError):
        remove_unnamed(store, writer.written, None)
        raise
    with landed(store, new):
        remove_unnamed(store, writer.written, new)
        if new.edit is not None and new.edit.key_files is not None:
            publish_keys(store, new)
    return new


def _without(store: Store, head: Index, gone: Sequence[int], writer: KeyWriter) -> Change:
    """Return the change that takes chunks away, and their keys with them."""
    records = [head.chunks[number] for number in gone]
    listed = [name for name in ids_of(head) if name not in {record.id or record.filename for record in records}]
    snapshot = Snapshot(store, head)
    files = None
    keys = open_keys(snapshot)
    if isinstance(keys, TableKeys):
        deleted = KeyColumn.join([KeyColumn.of(keys.keys_of(number)) for number in gone])
        count = head.samples - sum(record.samples for record in records)
        files = writer.edited(keys.files, listed, count, deleted=deleted, removed={}, added=[])
    names = {record.id or record.filename: record.filename for record in records}
    return Replace(dict.fromkeys(names), names, files, op=OP)
