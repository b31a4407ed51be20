"""Versions: the history of a dataset, from its head and the heads archived before."""

from __future__ import annotations

from contextlib import suppress

from liveset.errors import VersionExpired
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry
from liveset.snapshot import entries, known_entries, open_snapshot
from liveset.storage import Store

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
    if not isinstance(session, str):
        raise TypeError(f"session= must be text, not {type(session).__name__}.")
    head = store.read_head()
    if head is None:
        return False
    index = Index.parse(head.data)
    try:
        return any(entry.session == session for entry in entries(store, index))
    except VersionExpired:  # what is cut off may hold it, unless a version behind the cut was kept that knows
        if any(entry.version and entry.session == session for entry in known_entries(store, index)):
            return True
        raise


def find_session(store: Store, head: Index, session: str, *, above: int = 0) -> HistoryEntry | None:
    """The commit of a session, among the versions above a number.

    Where a vacuum has cut the history and the session is not in what is left of it, the answer is None, too: a writer that asks whether it
    did its work already must be able to go on after a vacuum.
    """
    fence = head.edit.fence if head.edit is not None else None
    try:
        for entry in entries(store, head, above=above):
            if entry.session == session:
                return entry
    except VersionExpired as error:
        if fence is None or fence.keeps(getattr(error, "version", 0)):
            raise
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
