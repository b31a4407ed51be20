"""History: what was committed to a dataset, names for versions, and the way back."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from liveset.edit import versions
from liveset.edit.adopt import Adoption, adopt_store, remove_unnamed
from liveset.edit.changes import Change, Restore, Retag, files_of
from liveset.edit.commit import Prepare, commit, landed
from liveset.edit.keyfiles import KEYS
from liveset.edit.publish import publish_keys
from liveset.edit.purge import remains
from liveset.edit.rebase import keeps
from liveset.errors import CommitUnknown, DatasetError, DatasetNotFound, NotFound, SessionExpired, VersionNotFound
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry
from liveset.read.fetch import Job, submit
from liveset.snapshot import Version as Wanted
from liveset.snapshot import archived, known_entries, open_snapshot, redirects_of
from liveset.storage import Store, has_listing, open_store

Path = str | os.PathLike[str]

_AHEAD = 8
"""How many versions are read ahead."""
# A name that looks like a number or a time would be taken for one on the command line.
_TAG = re.compile(r"[^\W\d][\w.+/-]{0,99}")


@dataclass(frozen=True, slots=True)
class Version:
    """One version in the history of a dataset.

    Attributes:
        version: its number; 0 is what another program wrote before the first commit.
        when: when it was committed, with time zone; None for version 0.
        op: what the commit did: append, overwrite, replace, restore, tag, fence (a vacuum), ...
        message: what the caller said about it.
        author: who made it, if the caller said so.
        session: name of the piece of work; random unless the caller gave one.
        tags: its names.
        available: whether it can still be opened.
        samples: how many samples it has; None where it is not available, like what follows.
        chunks: how many chunk files it has.
        size: bytes of the chunk files, before compression of whole files.
        alone: bytes on disk that no other version uses: what would be free if only this one were forgotten; None on a web server, too.
    """

    version: int
    when: datetime | None
    op: str
    message: str = ""
    author: str = ""
    session: str = ""
    tags: tuple[str, ...] = ()
    available: bool = False
    samples: int | None = None
    chunks: int | None = None
    size: int | None = None
    alone: int | None = None


def history(path: Path) -> list[Version]:
    """List the versions of a dataset, newest first, as far back as it is known.

    Versions that a vacuum has forgotten are listed as long as the newest one remembers them, without their facts.

    Args:
        path: of the dataset.

    Raises:
        DatasetNotFound: there is no dataset.

    Example:
        >>> [(version.version, version.op, version.samples) for version in liveset.history(path)]
        [(2, 'append', 120), (1, 'create', 100)]
    """
    store = open_store(path)
    head = open_snapshot(store).index
    tags: dict[int, list[str]] = {}
    for name, number in sorted(head.edit.tags.items()) if head.edit is not None else ():
        tags.setdefault(number, []).append(name)
    found = []
    owner: dict[str, int | None] = {}  # the one version that names a file, or None
    # Few indices at a time: a dataset may have thousands of versions with thousands of chunks each.
    for entry, index in _opened(store, head):
        if index is None and entry.version == 0:
            continue
        for name in files_of(index):
            owner[name] = None if name in owner else entry.version
        found.append(_told(entry, index, tuple(tags.get(entry.version, ()))))
    if not has_listing(store):
        return found
    alone = _alone(store, owner)
    return [replace(version, alone=alone.get(version.version, 0)) if version.available else version for version in found]


def _told(entry: HistoryEntry, index: Index | None, tags: tuple[str, ...]) -> Version:
    return Version(
        version=entry.version,
        when=entry.time if entry.committed_at else None,
        op=entry.op,
        message=entry.message,
        author=entry.author,
        session=entry.session,
        tags=tags,
        available=index is not None,
        samples=None if index is None else index.samples,
        chunks=None if index is None else len(index.chunks),
        size=None if index is None else index.size,
    )


def _opened(store: Store, head: Index) -> Iterator[tuple[HistoryEntry, Index | None]]:
    """Return what is known of each version, and its index; from far away several are fetched at once."""
    waiting: deque[tuple[HistoryEntry, Job[Index | None]]] = deque()
    for entry in known_entries(store, head):
        look = partial(_index, store, head, entry.version)
        waiting.append((entry, submit(look) if store.remote else Job(look)))
        if len(waiting) > (_AHEAD if store.remote else 0):
            known, job = waiting.popleft()
            yield known, job.result()
    while waiting:
        known, job = waiting.popleft()
        yield known, job.result()


def _index(store: Store, head: Index, version: int) -> Index | None:
    if version == head.version:
        return head
    fence = head.edit.fence if head.edit is not None else None
    index = archived(store, version) if fence is None or fence.keeps(version) else None
    return index.redirected(redirects_of(head)) if index is not None else None


def _alone(store: Store, owner: Mapping[str, int | None]) -> dict[int, int]:
    """Return for each version the bytes of the files that only it names."""
    alone: dict[int, int] = {}
    for prefix in ("chunk-", KEYS):
        for entry in store.list(prefix):
            if (version := owner.get(entry.name)) is not None:
                alone[version] = alone.get(version, 0) + entry.size
    return alone


def tag(
    path: Path,
    name: str,
    version: Wanted | None = None,
    *,
    move: bool = False,
    message: str = "",
    author: str = "",
    dry_run: bool = False,
) -> int:
    """Give a version a name, by which it can be opened, and which keeps it from every vacuum. The name is a commit of its own.

    Args:
        path: of the dataset.
        name: begins with a letter; then letters, digits and ``. _ + - /``.
        version: number, other tag or time of the version; None is the newest.
        move: take the name from another version that has it.
        message: what the history says about it.
        author: who does this.
        dry_run: only look whether it can be done.

    Returns:
        The number of the version that has the name now.

    Raises:
        ValueError: the name is not allowed, or another version has it.
        VersionNotFound, VersionExpired: there is no such version.
        Conflict: somebody else gave the name to another version meanwhile.

    Example:
        >>> liveset.tag(path, "paper", 1)
        1
        >>> liveset.StreamingDataset(path, version="paper").version
        1
    """
    if not isinstance(name, str) or not _TAG.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a tag: a tag begins with a letter, and has up to 100 letters, digits and . _ + - / in all.")
    store = open_store(path)
    # A tag is a commit, and a stamp alone would hide the keys of another program.
    base = open_snapshot(store).index if dry_run else adopt_store(store, author=author)
    chosen = open_snapshot(store, version, head=base).version
    now = base.edit.tags.get(name) if base.edit is not None else None
    if now == chosen:
        return chosen
    if now is not None and not move:
        raise ValueError(f"the tag {name!r} names version {now} of {store.url}: move=True gives it to version {chosen}.")
    if not dry_run:
        commit(store, Retag(name, chosen), base, message=message, author=author)
    return chosen


def untag(path: Path, name: str, *, message: str = "", author: str = "", dry_run: bool = False) -> int:
    """Take a name away from a version, and return the number of the version. A vacuum may forget it then.

    Args:
        path: of the dataset.
        name: to remove.
        message: what the history says about it.
        author: who does this.
        dry_run: only look whether it can be done.

    Raises:
        VersionNotFound: there is no such tag.
        Conflict: somebody else gave the name to another version meanwhile.

    Example:
        >>> liveset.tag(path, "paper", 1)
        1
        >>> liveset.untag(path, "paper")
        1
    """
    store = open_store(path)
    base = open_snapshot(store).index
    if base.edit is None or name not in base.edit.tags:
        raise VersionNotFound(f"{store.url} has no tag {name!r}.", tag=name)
    if not dry_run:
        commit(store, Retag(name, None), base, message=message, author=author)
    return base.edit.tags[name]


def restore(path: Path, version: Wanted, *, force: bool = False, message: str = "", author: str = "", session: str | None = None) -> int:
    """Make the content of an earlier version the newest one: its samples, their order, keys, schema and attributes.

    Nothing is rewritten and nothing is lost: this is a commit like any other, and the versions between stay until a vacuum. Tags stay.
    Only samples that a purge has erased from the version do not come back: those behind them move up, and their chunks are written anew.

    Args:
        path: of the dataset.
        version: number, tag or time of the version.
        force: also undo what others committed while this call was at work.
        message: what the history says about it.
        author: who does this.
        session: name of the piece of work, which is never done twice.

    Returns:
        The number of the new version; the newest one, if it has that content already.

    Raises:
        VersionNotFound, VersionExpired: there is no such version, or it is gone.
        OverwriteConflict: others committed meanwhile.
        SessionExpired: a vacuum ran meanwhile and has forgotten the version that was the newest. Nothing was changed; call it again.
        ValueError: it is version 0, and the keys that another program published for it are gone, or some of its samples.

    Example:
        >>> liveset.restore(path, 1, message="the labels of version 2 were wrong")
        3
    """
    store = open_store(path)
    base = open_snapshot(store).index
    try:
        old = open_snapshot(store, version, head=base).index
    except NotFound:  # perhaps forgotten since it was restored
        if session is None or (done := versions.find_session(store, base, session)) is None:
            raise
        return done.version
    told = message or f"version {old.version}"
    if old.edit is None:
        old = _adopted(store) or old
    if (session is None or base.edit is None) and _same(old, base):
        return base.version
    restored = _restore_foreign if old.edit is None else _restore_ours
    index = restored(store, old.version, base, force=force, session=session, message=told, author=author)
    if index.edit is not None and index.edit.key_files is not None:
        publish_keys(store, index)
    return index.version


def _adopted(store: Store) -> Index | None:
    """Return version 1, if it is what the version of another program became without any other change."""
    try:
        first = open_snapshot(store, 1).index
    except NotFound:
        return None
    return first if first.edit is not None and first.edit.op == "adopt" else None


def _restore_ours(store: Store, version: int, base: Index, *, force: bool, session: str | None, message: str, author: str) -> Index:
    """Restore a version of ours, or what purges have left of it."""
    written: list[str] = []

    def prepare(_head: Index | None, _since: Sequence[HistoryEntry]) -> Restore:
        # Opened anew for each head, which may be that of a purge. What is written is younger than what a vacuum before the head has listed.
        snapshot = open_snapshot(store, version)
        if not any(record.erased for record in snapshot.index.chunks):
            return Restore(snapshot.index, force)
        return Restore(remains(store, snapshot, written), force, frozenset(written))

    return _land(store, prepare, lambda: written, base, session=session, message=message, author=author)


def _restore_foreign(store: Store, version: int, base: Index, *, force: bool, session: str | None, message: str, author: str) -> Index:
    """Restore what another program wrote. As when it was adopted, the chunks get names that the other program does not change."""
    adoptions: list[Adoption] = []

    def prepare(_head: Index | None, _since: Sequence[HistoryEntry]) -> Restore:
        snapshot = open_snapshot(store, version)
        old = snapshot.index
        if purged := sum(len(record.erased) for record in old.chunks):
            raise ValueError(f"a purge erased {purged:,} samples of version {version} of {store.url}: export it, or restore a later one.")
        # Made anew for each head, so that no vacuum before it has listed them. They are second names, as old as the files themselves.
        adoptions.append(Adoption(store))
        change = adoptions[-1].change(snapshot)
        if change.key_files is None and old.layout_of_keys:
            raise ValueError(
                f"version {old.version} of {store.url} has keys that another program published, and those are gone: no version tells them "
                "that is still there. Export the version, or restore a later one."
            )
        # The stamp names the tables of the keys, and makes the commit look whether a vacuum has let them go.
        stamp = open_snapshot(store, 1).index.edit if change.key_files is not None else None
        stamp = replace(stamp, key_files=change.key_files) if stamp is not None else None
        return Restore(old.replace(chunks=change.records.values(), edit=stamp), force, frozenset(adoptions[-1].written))

    def written() -> list[str]:
        return [name for adoption in adoptions for name in adoption.written]

    return _land(store, prepare, written, base, session=session, message=message, author=author)


def _land(
    store: Store, prepare: Prepare, written: Callable[[], list[str]], base: Index, *, session: str | None, message: str, author: str
) -> Index:
    """Commit what ``prepare`` makes for each head, and remove the files that no version needs."""
    made: list[Index | None] = [None]

    def noted(head: Index | None, since: Sequence[HistoryEntry]) -> Change | None:
        change = prepare(head, since)
        made.append(head)
        return change

    try:
        while True:
            try:
                index = commit(store, noted, base, session=session, message=message, author=author)
                break
            except SessionExpired:
                # A vacuum has put up a fence, and by their age files may be from before it: second names are as old as the first ones.
                # Where nothing else stood in the way, the work begins again behind the fence.
                head = made[-1]
                if head is None or head.version <= base.version or not keeps(head, base.version):
                    raise
                base = head
    except CommitUnknown:
        raise
    except (DatasetError, OSError, ValueError):
        remove_unnamed(store, written(), None)
        raise
    with landed(store, index):
        remove_unnamed(store, written(), index)
    return index


def _same(a: Index, b: Index) -> bool:
    keys_of_a, keys_of_b = (index.edit.key_files if index.edit is not None else None for index in (a, b))
    return (a.chunks, a.config, a.attributes, keys_of_a) == (b.chunks, b.config, b.attributes, keys_of_b)


def was_committed(path: Path, session: str) -> bool:
    """Tell whether a piece of work is in the history of a dataset: the answer to ``CommitUnknown``, and to a job that was killed.

    Args:
        path: of the dataset.
        session: the name that ``optimize`` or ``dataset_update`` was given, or ``error.session``.

    Raises:
        DatasetNotFound: there is no such folder.
        VersionExpired: what is left of the history after a vacuum does not say.

    Example:
        >>> liveset.was_committed(path, "nightly-118")
        False
    """
    store = open_store(path)
    if not store.exists():  # a folder without a dataset is what a first commit leaves that did not land
        raise DatasetNotFound(f"{store.url} does not exist.", path=store.url)
    return versions.was_committed(store, session)


__all__ = ["Version", "history", "restore", "tag", "untag", "was_committed"]
