"""Versions: the history of a dataset, from its head and the heads archived before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from liveset.errors import NotFound, VersionExpired
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry
from liveset.snapshot import open_snapshot
from liveset.storage import Store, version_name

__all__ = ["entries", "entries_since", "find_session", "list_versions", "was_committed"]


def list_versions(store: Store) -> list[HistoryEntry]:
    """Every version of a dataset that liveset committed, newest first, as far back as its history is kept."""
    found: list[HistoryEntry] = []
    with suppress(VersionExpired):
        for entry in entries(store, open_snapshot(store).index):
            found.append(entry)  # noqa: PERF402 - what came before the cut is wanted
    return found


def was_committed(store: Store, session: str) -> bool:
    """Whether a commit of this session is in the history of the dataset; also the answer to ``CommitUnknown``."""
    head = store.read_head()
    return head is not None and find_session(store, Index.parse(head.data), session) is not None


def find_session(store: Store, head: Index, session: str, *, above: int = 0) -> HistoryEntry | None:
    """The commit of a session, among the versions above a number."""
    for entry in entries(store, head, above=above):
        if entry.session == session:
            return entry
    return None


def entries_since(store: Store, head: Index | None, base: Index | None) -> list[HistoryEntry]:
    """The commits after ``base`` up to and including the head, newest first; empty where the head does not stem from the base."""
    if head is None or (base is not None and head.version <= base.version):
        return []
    if base is None:
        return []  # nothing can conflict with a change that was made for no version
    found = list(entries(store, head, above=base.version - 1))
    if base.edit is None:
        return [entry for entry in found if entry.version > 0]
    # The last one is the base itself, if the head stems from it.
    if not found or (found[-1].version, found[-1].id) != (base.version, base.id):
        return []
    return found[:-1]


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
        index = _archive(store, listed[-1])


def _archive(store: Store, entry: HistoryEntry) -> Index:
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
