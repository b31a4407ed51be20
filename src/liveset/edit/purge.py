"""Purge: the bytes of some samples leave every version that is kept, and all other samples of these versions stay readable.

Chunk files that hold the samples are written again without their bytes, key tables that know their keys with random keys in the place of
theirs, and the head says which file stands for which (``Redirects``). The same commit deletes the samples from the newest version, and puts
up a fence without grace, so that nobody can commit what he made from the old files. Then the old files are deleted, and what was listed
before the commit and no version needs: who came after the fence may trust it, whatever the age of his files. What repairs have kept of
damaged files goes before the commit, so that a version without the samples never stands beside it; what they put there later stays.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from liveset.edit.adopt import adopt_store, remove_unnamed
from liveset.edit.changes import Purge, files_of
from liveset.edit.commit import Policy, check_texts, commit, landed, new_token
from liveset.edit.keyfiles import KeyWriter, ids_of
from liveset.edit.publish import publish_keys
from liveset.edit.rebase import keeps
from liveset.edit.retention import QUARANTINE, survey
from liveset.edit.splice import fresh_name, open_stored
from liveset.edit.vacuum import DAY, spoils, vacuum_store
from liveset.errors import (
    CommitInterrupted,
    CommitUnknown,
    Conflict,
    Corrupt,
    DatasetError,
    DatasetNotFound,
    KeyNotFound,
    NotFound,
    OverwriteConflict,
    SessionExpired,
    name_some,
)
from liveset.format import codec
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyColumn, KeyTable, normalize_key
from liveset.format.stamp import Fence, HistoryEntry, KeyFiles, Redirect, Redirects
from liveset.keystore import KeyStore, TableKeys, open_keys
from liveset.lease import LEASES, leased_versions
from liveset.snapshot import Snapshot, archived, open_snapshot, redirects_of
from liveset.storage import VERSIONS, Store, forget_cached, open_store, version_name

__all__ = ["PurgeReport", "purge", "purge_store", "remains"]


_LEFT = 'files that hold the samples may be left: purge again with on_missing="skip", or vacuum'
"""What to do about a purge that has committed, and did not come to its end."""


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge did, or would do.

    Attributes:
        path: of the dataset.
        dry_run: whether nothing was done; the bytes are estimates then.
        version: of the commit; the one that was the newest when there was nothing to purge, or with ``dry_run``.
        keys: number of the keys that were found.
        missing: the keys that no kept version has, with ``on_missing="skip"``.
        versions: numbers of the kept versions that lost samples, oldest first.
        chunks: number of chunk files that held them.
        quarantined: names of the damaged files in ``_liveset/quarantine/`` that were deleted, whatever they held.
        bytes_written: bytes of the files that were written.
        bytes_freed: bytes of the files that were deleted.
        seconds: time that it took.
    """

    path: str
    dry_run: bool
    version: int
    keys: int
    missing: tuple[Key, ...]
    versions: tuple[int, ...]
    chunks: int
    quarantined: tuple[str, ...]
    bytes_written: int
    bytes_freed: int
    seconds: float


def purge(
    path: str | os.PathLike[str],
    keys: Iterable[Any],
    *,
    message: str = "",
    author: str = "",
    dry_run: bool = False,
    session: str | None = None,
    on_missing: Literal["error", "skip"] = "error",
) -> PurgeReport:
    """Erase samples from the newest version and from every other version that is kept, keys included; nothing brings them back.

    The newest version loses the samples as if they had been deleted. In earlier versions all other samples keep their bytes and positions,
    and reading an erased one is ``Erased``. Each version is asked for the keys that it has itself. Readers of these versions go on, pinned
    or not; one that has a file open keeps it until it closes the dataset. What runs at the same time and has not committed yet gets
    ``SessionExpired``, but for runs with a checkpoint: a purge grants no grace.

    Files that no kept version needs go as well, whatever they hold: nothing says which samples were in those of a forgotten version. So do
    the damaged files that ``repair`` has kept in ``_liveset/quarantine/``: no checksum says what is in them, and the right bytes of each
    are in the dataset again. Copy what you want to look at before. With ``on_missing="skip"`` all of these go even when no version has any
    of the keys.

    A purge that was interrupted is finished by the same call with the same ``session``, or with ``on_missing="skip"``, by the next purge,
    or by ``vacuum``; else it may find that no version has the keys any more, and changes nothing. ``verify(path, absent=[...])`` proves
    that nothing is left. Look once more when all that was running has ended: a writer that read before the purge and dies after it leaves a
    file, which a purge of the same keys with ``on_missing="skip"`` deletes.
    Attributes of the dataset and messages in its history are your texts: they are searched by ``verify``, and not changed. Exports, backups
    and copies elsewhere are not known.

    Args:
        path: of the dataset.
        keys: of the samples; without any, nothing happens.
        message: what the history says about it; it should not name the keys.
        author: who does this.
        dry_run: only tell what would be done.
        session: name of the piece of work, which is never done twice.
        on_missing: what to do with keys that no kept version has: raise, or leave them out, and delete what may be left of them.

    Returns:
        What was erased, and from which versions.

    Raises:
        DatasetNotFound: there is no dataset.
        TypeError: these cannot be keys.
        KeyNotFound: no kept version has some of the keys; ``keys`` names all of them. Nothing was changed.
        NotFound: the dataset has no keys, or a version that is kept has none, so that nothing says which of its samples these are.
            Nothing was changed.
        Corrupt: a file that holds the samples is damaged (``file``): ``repair`` it first, or have those forgotten that need it
            (``versions``).
        Conflict: others committed all the time; no sample was erased, but the files in quarantine may be gone.
        StorageError: a file could not be written or deleted; call it again.
        CommitUnknown: the store did not say whether the commit landed: call it again with ``session=error.session``.

    Example:
        >>> report = liveset.purge(path, ["play-7"], message="request 4711")
        >>> report.versions, "play-7" in liveset.StreamingDataset(path).keys
        ((1, 2), False)
        >>> liveset.verify(path, absent=["play-7"]).ok
        True
    """
    store = open_store(path)
    report = purge_store(store, keys, message=message, author=author, dry_run=dry_run, session=session, on_missing=on_missing)
    if not dry_run:
        forget_cached(store)  # what other machines hold is theirs to empty
    return report


def purge_store(
    store: Store,
    keys: Iterable[Any],
    *,
    message: str = "",
    author: str = "",
    dry_run: bool = False,
    session: str | None = None,
    on_missing: Literal["error", "skip"] = "error",
    policy: Policy | None = None,
) -> PurgeReport:
    """Do what ``purge`` does, in any store."""
    check_texts(message=message, author=author, session=session)
    if on_missing not in ("error", "skip"):
        raise ValueError(f"on_missing= is 'error' or 'skip', not {on_missing!r}.")
    if isinstance(keys, str | bytes | bytearray | memoryview | int):
        raise TypeError("keys= takes a list of keys, not one of them alone.")
    work = _Work(store, list(dict.fromkeys(map(normalize_key, keys))), skip=on_missing == "skip")
    if dry_run or not work.wanted:
        head = open_snapshot(store).index
        work.find(head)
        size = work.size_of_old()
        return work.report(head.version, written=size, freed=size + work.look_at_quarantine(), dry_run=dry_run)
    try:
        index = _commit(work, store, session=session, message=message, author=author, policy=policy or Policy())
    except CommitUnknown:
        raise
    except CommitInterrupted as error:
        error.add_note(f"Where it has landed, {_LEFT}.")
        raise
    except (DatasetError, OSError) as error:
        work.settle(None)
        if work.quarantined:
            error.add_note(f"No sample was erased, but the damaged files in {QUARANTINE} were deleted.")
        raise
    with landed(store, index, _LEFT):
        work.settle(index)
        try:
            if index.edit is not None and index.edit.op == "purge" and keeps(index, index.version):
                # Nothing else tells which file stands for which. Were the head lost, earlier versions would be lost with it.
                store.write_once(version_name(index.version), index.to_bytes())
            # Else no version has the keys, or it was another call that erased them, and may have been interrupted.
            freed = work.delete(index) if work.made(index) else _clean(store, author=author, policy=policy)
        except (DatasetError, OSError) as error:
            error.add_note(f"Version {index.version} is without the samples, but {_LEFT}.")
            raise
        if index.edit is not None and index.edit.op == "purge" and index.edit.key_files is not None:
            publish_keys(store, index)
    return work.report(index.version, freed=freed + sum(work.quarantined.values()))


def _commit(work: _Work, store: Store, *, session: str | None, message: str, author: str, policy: Policy) -> Index:
    for attempt in range(policy.attempts):
        if attempt:
            policy.pause(attempt)
        base = open_snapshot(store).index
        if base.edit is None:
            work.find(base)  # before anything is changed
            base = adopt_store(store, author=author, policy=policy)
        try:
            return commit(store, work.prepare, base, session=session, message=message, author=author, policy=policy)
        except (SessionExpired, OverwriteConflict):
            # Nothing that others commit stands in the way of a purge; it begins again from what they made, and behind their fences.
            continue
    raise Conflict(f"gave up after {policy.attempts} attempts: others commit to {store.url} all the time. No sample was erased.")


def _clean(store: Store, *, author: str, policy: Policy | None) -> int:
    """Delete what no kept version needs behind a fence of its own, if there is such a file; return how many bytes that are."""
    return vacuum_store(store, keep=sys.maxsize, grace=timedelta(0), spare=DAY, author=author, policy=policy).freed


def remains(store: Store, snapshot: Snapshot, written: list[str]) -> Index:
    """Write what is left of a version from which samples were erased, as files that a later version can name; return its index."""
    work = _Work(store, (), skip=True)
    index = snapshot.index
    removed = {number: frozenset(record.erased) for number, record in enumerate(index.chunks) if record.erased}
    try:
        records = work.without(snapshot, removed)
        edit = index.edit
        if edit is not None and edit.key_files is not None:
            edit = replace(edit, key_files=work.keys_without(snapshot, edit.key_files, records, removed))
    finally:
        written += work.names
    chunks = (records.get(name, record) for name, record in zip(ids_of(index), index.chunks, strict=True))
    return index.replace(chunks=[record for record in chunks if record is not None], edit=edit)


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the samples are, and the keys: by names of files, whichever versions name them."""

    names: dict[Key, Key] = field(default_factory=dict)
    """What takes the place of each key that was found."""
    tables: dict[str, KeyTable] = field(default_factory=dict)
    """The key tables that know one of the keys, be it as one that is gone."""
    slots: dict[str, set[int]] = field(default_factory=dict)
    holders: dict[str, tuple[Snapshot, int]] = field(default_factory=dict)
    """A version and number of a chunk, for each file in ``slots``."""
    versions: list[int] = field(default_factory=list)


class _Work:
    """The files and the change of one purge.

    Args:
        store: where the dataset is.
        wanted: the keys.
        skip: whether keys that no version has are left out.
    """

    def __init__(self, store: Store, wanted: Sequence[Key], *, skip: bool) -> None:
        self._store, self.wanted, self._skip = store, wanted, skip
        self._started = time.perf_counter()
        self._keys = KeyWriter(store, new_token())
        self._written: list[str] = []
        self._made: dict[tuple[str, int], ChunkRecord] = {}
        self._found = _Found()
        self._size = 0
        self._spoils: frozenset[str] = frozenset()
        self.quarantined: dict[str, int] = {}
        """Files in quarantine that were deleted, or would be, and their bytes."""
        self._redirects = Redirects()

    def prepare(self, head: Index | None, _since: Sequence[HistoryEntry]) -> Purge | None:
        """Return the change for a head, or None when there is nothing to purge; see ``Prepare``."""
        if head is None:
            raise DatasetNotFound(f"{self._store.url} was removed meanwhile.", path=self._store.url)
        try:
            return self._change(head)
        except SessionExpired as error:
            # Somebody has put up a fence meanwhile and deleted files of ours. Like any file that is missing then, they are made anew.
            raise NotFound(str(error)) from error

    def _change(self, head: Index) -> Purge | None:
        self.settle(None)  # of an attempt that lost a race
        self._size, self._redirects = 0, Redirects()
        found = self.find(head)
        if not found.tables:
            self._empty_quarantine()  # they may be in there for all that, and they, too, were asked for
            return None
        assert head.edit is not None
        fence = self._plan(head)
        chunks = {file: self._erased(*found.holders[file], slots) for file, slots in found.slots.items()}
        tables = {name: self._keys.renamed(table, found.names) for name, table in found.tables.items()}
        redirects = self._redirects = _joined(head.edit.redirects, Redirects(chunks, tables, dict(self._keys.sizes)))
        removed = {n: found.slots[record.filename] for n, record in enumerate(head.chunks) if record.filename in found.slots}
        snapshot = Snapshot(self._store, head)
        records = self.without(snapshot, removed)
        files = head.edit.key_files
        if files is not None:
            # They know nothing of the keys, not even that they are gone.
            files = self.keys_without(snapshot, redirects.key_files(files), records, removed)
        expects = {name: head.chunks[number].filename for number, name in enumerate(ids_of(head)) if name in records}
        staged = frozenset((*(new.file for new in chunks.values()), *tables.values()))
        self._size += sum(self._keys.sizes.values())
        self._empty_quarantine()
        return Purge(records, expects, files, redirects=redirects, staged=staged, fence=fence)

    def without(self, snapshot: Snapshot, removed: Mapping[int, AbstractSet[int]]) -> dict[str, ChunkRecord | None]:
        """Write some chunks of a version without some of their slots; return their records by id, None where nothing is left."""
        records: dict[str, ChunkRecord | None] = {}
        for number, slots in removed.items():
            record = snapshot.index.chunks[number]
            left = len(slots) < record.samples
            records[record.id or record.filename] = self._write(snapshot, number, removed=slots) if left else None
        return records

    def keys_without(
        self, snapshot: Snapshot, files: KeyFiles, records: Mapping[str, ChunkRecord | None], removed: Mapping[int, AbstractSet[int]]
    ) -> KeyFiles:
        """Write what becomes of the keys of a version when these slots go; ``files`` are its tables, perhaps with other keys."""
        keys, ids = open_keys(snapshot), ids_of(snapshot.index)
        if not removed:
            return files
        assert keys is not None
        deleted = [keys.key_at(number, slot) for number, slots in removed.items() for slot in sorted(slots)]
        return self._keys.edited(
            files,
            {name for name in ids if records.get(name, True) is not None},
            snapshot.index.samples - len(deleted),
            deleted=KeyColumn.of([self._found.names.get(key, key) for key in deleted]),
            removed={ids[number]: sorted(slots) for number, slots in removed.items() if records[ids[number]] is not None},
            added=(),
        )

    @property
    def names(self) -> list[str]:
        """Names of the files that were written."""
        return self._written + self._keys.written

    def settle(self, index: Index | None) -> None:
        """Remove the files that the committed version (None: no version) does not need."""
        redirects = redirects_of(index) if index is not None else Redirects()
        stay = {*(new.file for new in redirects.chunks.values()), *redirects.tables.values()}
        remove_unnamed(self._store, set(self.names) - stay, index)
        self._keys = KeyWriter(self._store, new_token())
        self._written.clear()
        self._made.clear()

    def made(self, index: Index) -> bool:
        """Whether a version was committed by this purge: the names of the files that it wrote are nobody else's."""
        return bool(self._redirects) and redirects_of(index) == self._redirects

    def delete(self, index: Index) -> int:
        """Delete what a version that this purge committed gives up; return how many bytes that are."""
        # Nobody makes files anew whose names redirects know, but for the old tool, which inflates them.
        gone = self._spoils | (redirects_of(index).old - files_of(index))
        sizes = {entry.name: entry.size for entry in self._store.list("") if entry.name in gone}
        self._store.delete(sorted(sizes))
        return sum(sizes.values())

    def look_at_quarantine(self) -> int:
        """Note the files in quarantine that a purge of these keys deletes; return how many bytes all are that it has met."""
        if self.wanted:
            self.quarantined.update((entry.name, entry.size) for entry in self._store.list(QUARANTINE))
        return sum(self.quarantined.values())

    def _empty_quarantine(self) -> None:
        self.look_at_quarantine()
        if self.quarantined:
            self._store.delete(sorted(self.quarantined))

    def report(self, version: int, *, freed: int, written: int | None = None, dry_run: bool = False) -> PurgeReport:
        """Return what was done, or would be."""
        found = self._found
        return PurgeReport(
            path=self._store.url,
            dry_run=dry_run,
            version=version,
            keys=len(found.names),
            missing=tuple(key for key in self.wanted if key not in found.names),
            versions=tuple(sorted(found.versions)),
            chunks=len(found.slots),
            quarantined=tuple(sorted(self.quarantined)),
            bytes_written=self._size if written is None else written,
            bytes_freed=freed,
            seconds=time.perf_counter() - self._started,
        )

    def size_of_old(self) -> int:
        """Return the bytes of the files that hold the samples and their keys."""
        files = {*self._found.slots, *self._found.tables}
        return sum(entry.size for entry in self._store.list("") if entry.name in files)

    # --- where the samples are ----------------------------------------------------------------------------------------

    def find(self, head: Index) -> _Found:
        """Look for the keys in every version that is kept.

        Raises:
            KeyNotFound: no version has some of them.
            NotFound: a version has no keys.
        """
        found = self._found = _Found()
        opened: dict[str, tuple[KeyTable, list[Key]]] = {}
        known: set[str] = set()
        keyed, keyless = False, list[Snapshot]()
        adopted: dict[tuple[str, int], set[str]] = {}
        for snapshot in self._kept(head):
            if (keys := open_keys(snapshot)) is None:
                keyless.append(snapshot)
                continue
            keyed = True
            for record in snapshot.index.chunks:
                known.add(record.filename)
                adopted.setdefault((record.id or record.filename, record.samples), set()).add(record.filename)
            here = self._known(keys, opened)
            for key, place in zip(here, keys.locate_many(here), strict=True):
                if isinstance(keys, TableKeys) or place is not None:
                    found.names.setdefault(key, _unused(key, opened))
                if place is not None:
                    _add(found, snapshot, *place)
        if len(keyless) and not keyed:
            raise NotFound(f"{self._store.url} has no keys: call build_keys_index({self._store.url!r}, key_fn) first.")
        found.tables.update({name: table for name, (table, hits) in opened.items() if hits})
        if not self._skip and (missing := [key for key in self.wanted if key not in found.names]):
            raise KeyNotFound(
                f"{name_some(missing)} in no version of {self._store.url} that is kept. Nothing was changed. What a purge that was "
                'interrupted may have left of them goes with on_missing="skip" (`liveset purge --skip-missing`).',
                keys=tuple(missing),
            )
        if found.names:
            self._cover(found, keyless, known, adopted)
        if found.slots:
            named = (snapshot for snapshot in self._kept(head) if any(r.filename in found.slots for r in snapshot.index.chunks))
            found.versions.extend(snapshot.version for snapshot in named)
        return found

    def _kept(self, head: Index) -> Iterator[Snapshot]:
        """Yield the versions that somebody can read, newest first, one at a time: there may be thousands of them."""
        yield Snapshot(self._store, head)
        fence = head.edit.fence if head.edit is not None else None
        # A reader may hold a version that has expired.
        leased = leased_versions(self._store.list(LEASES), self._store.now()).live if fence is not None else frozenset()
        names = (entry.name.removeprefix(VERSIONS).removesuffix(".json") for entry in self._store.list(VERSIONS))
        for number in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
            if number < head.version and (fence is None or fence.keeps(number) or number in leased):
                index = archived(self._store, number)
                if index is not None:
                    yield Snapshot(self._store, index, redirects_of(head))

    def _known(self, keys: KeyStore, opened: dict[str, tuple[KeyTable, list[Key]]]) -> list[Key]:
        """Return those of the keys that a version may have; opens each table once, however many versions name it."""
        if not isinstance(keys, TableKeys):
            return list(self.wanted)
        names = list(reversed(keys.files.tables))
        if any(name not in opened for name in names):
            for table in keys.tables:
                if table.file not in opened:
                    opened[table.file] = table, [key for key in self.wanted if table.find(key) is not None]
            names = list(reversed(keys.files.tables))
        else:
            keys.tables = [opened[name][0] for name in names]
        return list(dict.fromkeys(key for name in names for key in opened[name][1]))

    def _cover(self, found: _Found, keyless: Sequence[Snapshot], known: set[str], adopted: Mapping[tuple[str, int], set[str]]) -> None:
        """Look at the versions without keys: their files are known through other versions, or nothing can be said."""
        for snapshot in keyless:
            for number, record in enumerate(snapshot.index.chunks):
                if record.filename in known:
                    continue
                # When a dataset was adopted its files got other names, and the old ones became ids. As long as such a chunk has all its
                # samples, they stand where they stood.
                same = adopted.get((record.id or record.filename, record.samples), set()) if snapshot.index.edit is None else set()
                if not same:
                    raise NotFound(
                        f"version {snapshot.version} of {self._store.url} has no keys, so nothing says which of its samples these are. "
                        "Nothing was changed. Let a vacuum forget that version first (`vacuum(path, keep=...)`), or give it keys."
                    )
                for slot in set().union(*(found.slots.get(name, set()) for name in same)):
                    _add(found, snapshot, number, slot)

    # --- files --------------------------------------------------------------------------------------------------------

    def _erased(self, snapshot: Snapshot, number: int, slots: AbstractSet[int]) -> Redirect:
        new = self._write(snapshot, number, erased=slots)
        before = snapshot.index.chunks[number].erased
        return Redirect(new.filename, new.size, new.check, new.head_check, tuple(sorted({*before, *slots})))

    def _write(
        self, snapshot: Snapshot, number: int, *, removed: AbstractSet[int] = frozenset(), erased: AbstractSet[int] = frozenset()
    ) -> ChunkRecord:
        """Write a chunk file without some samples, and return its record."""
        compression = codec.Compression.from_config(snapshot.index.config or {})
        try:
            record, name, buffer = snapshot.chunk(number)
            if record.check is not None and name == record.filename and not codec.verify(buffer, record.check):
                # What is copied gets a new checksum, which must not vouch for damaged bytes.
                raise Corrupt(f"{self._store.url}/{name} is damaged: its checksum differs from the index.", file=name)
            spliced = open_stored(buffer, record, compression).splice({}, removed, erased)
        except (Corrupt, NotFound) as error:
            if self.wanted and type(error) in (Corrupt, NotFound):
                raise self._blocked(snapshot.index.chunks[number].filename, error) from error
            raise
        check = codec.checksum(spliced.buffers)
        # The second name of a file whose bytes are the same already.
        if (made := self._made.get((check, spliced.size))) is None:
            new = fresh_name(record.filename, number, new_token(), compression)
            self._written.append(new)
            self._store.write(new, spliced.buffers)
            self._size += sum(memoryview(part).nbytes for part in spliced.buffers)
            made = self._made[check, spliced.size] = record.replace(
                filename=new, samples=spliced.samples, size=spliced.size, check=check, head_check=spliced.head_check, erased=()
            )
        return made.replace(id=record.id or record.filename, extra=record.extra)

    def _blocked(self, name: str, error: Corrupt | NotFound) -> DatasetError:
        """Return the error for a chunk file that cannot be read, and so not be written again without the samples."""
        head = open_snapshot(self._store).index
        versions = [found.version for found in self._kept(head) if any(record.filename == name for record in found.index.chunks)]
        if not versions:  # others have deleted it meanwhile
            return error
        path, newest = self._store.url, versions[0] == head.version
        tags = [tag for tag, number in sorted(head.edit.tags.items()) if number in versions] if head.edit is not None else []
        listed = f"version{'s' * (len(versions) > 1)} {', '.join(map(str, reversed(versions)))}"
        out = f"`liveset repair {path} --quarantine --yes` takes it out of the newest version, then " if newest else ""
        held = f", once the tag{'s' * (len(tags) > 1)} {', '.join(tags)} and readers with pin=True are gone" if tags else ""
        return type(error)(
            f"{str(error).rstrip('.')}. It holds samples to be erased, and {listed} need{'s' * (len(versions) == 1)} it. No sample was "
            f"erased. `liveset repair {path} --copy COPY --yes` restores it from a copy of the dataset. Where no copy has its bytes, {out}"
            f'`liveset vacuum {path} --keep 0 --grace 0d --yes` forgets earlier ones{held}. Then purge again, with on_missing="skip".',
            file=name,
            versions=tuple(reversed(versions)),
        )

    def _plan(self, head: Index) -> Fence:
        """Choose what goes, and return the fence of a vacuum that has no grace and forgets no version; checkpoints are spared."""
        for _ in range(20):
            now = self._store.now()
            found = survey(head, self._store.list(""), now, timedelta(0), spare=DAY)
            plan = found.plan(0)
            try:
                self._spoils = frozenset(spoils(self._store, found, plan)[0])
            except NotFound:
                continue  # a vacuum has removed a version that was listed
            return plan.fence
        raise Conflict(f"a vacuum of {self._store.url} is deleting versions all the time. No sample was erased; purge again.")


def _add(found: _Found, snapshot: Snapshot, number: int, slot: int) -> None:
    record = snapshot.index.chunks[number]
    if slot not in record.erased:
        found.slots.setdefault(record.filename, set()).add(slot)
        found.holders.setdefault(record.filename, (snapshot, number))


def _unused(key: Key, opened: dict[str, tuple[KeyTable, list[Key]]]) -> Key:
    """Return a key that tells nothing of the one that it stands for, and that nothing has."""
    while True:
        new: Key = f"erased-{secrets.token_hex(8)}" if isinstance(key, str) else -secrets.randbits(62) - 1
        if all(table.find(new) is None for table, _ in opened.values()):
            return new


def _joined(before: Redirects, new: Redirects) -> Redirects:
    """Return the redirects of a head and those of this purge; none leads to a file that is gone.

    What replaced a file before, and is replaced now, gets a redirect of its own: by that it is known as a file that must go.
    """
    return Redirects(
        {**{name: new.chunks.get(known.file, known) for name, known in before.chunks.items()}, **new.chunks},
        {**{name: new.tables.get(known, known) for name, known in before.tables.items()}, **new.tables},
        {**before.sizes, **new.sizes},
    )
