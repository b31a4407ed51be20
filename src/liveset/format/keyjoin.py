"""Several key tables as one: what the newest says of each key and each chunk, and how samples move when others leave their chunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from liveset.format.keytable import DELETED, KeyColumn, KeyTable, Rows

__all__ = ["join_tables", "moved_down", "moved_up"]

_Array: TypeAlias = np.ndarray[Any, Any]


def moved_down(slots: Any, free: _Array) -> Any:
    """Return where samples stand once the slots in ``free`` (ascending) have gone; for those in ``free`` it means nothing."""
    return slots - np.searchsorted(free, slots)


def moved_up(slots: Any, free: _Array) -> Any:
    """Return where samples stood before the slots in ``free`` (ascending) went: the reverse of ``moved_down``."""
    return slots + np.searchsorted(free.astype(np.int64) - np.arange(len(free)), slots, side="right")


def join_tables(tables: Sequence[KeyTable], listed: Collection[str], *, whole: bool = False) -> Rows:
    """Return the rows of one table that says what several do.

    Args:
        tables: oldest first; a later one is right where two know the same key or chunk.
        listed: ids of the chunks of the version; what is said of others is left out.
        whole: no table is older than these, so nothing needs to be said of what is gone.
    """
    numbers: dict[str, int] = {}
    columns: list[KeyColumn] = []
    chunks, slots = np.zeros(0, np.int64), np.zeros(0, np.int64)
    removed: dict[str, _Array] = {}
    for table in tables:
        rows = table.to_rows()
        for chunk, free in rows.removed.items():
            if (number := numbers.get(chunk)) is not None:
                at = np.flatnonzero(chunks == number)
                slots[at] = moved_down(slots[at], free)  # the rows of what stood in free slots are superseded
            elif (before := removed.get(chunk)) is not None:
                removed[chunk] = np.union1d(before, moved_up(free.astype(np.int64), before))
            else:
                removed[chunk] = free
        owned = np.array([numbers.setdefault(chunk, len(numbers)) for chunk, _ in rows.directory], np.int64)
        live = rows.chunks != DELETED
        here = np.full(len(rows.chunks), -1, np.int64)
        here[live] = owned[rows.chunks[live]]
        columns.append(rows.keys)
        chunks, slots = np.concatenate([chunks, here]), np.concatenate([slots, rows.slots.astype(np.int64)])
    keys = KeyColumn.join(columns)
    gone = _superseded(keys)
    if whole:
        gone |= chunks < 0
    keep = np.flatnonzero(~gone)
    chunks, slots = chunks[keep], slots[keep]
    names = list(numbers)
    counts = np.bincount(chunks[chunks >= 0], minlength=len(names))
    filled = [number for number in range(len(names)) if counts[number]]
    renumbered = np.full(len(names) + 1, DELETED, np.int64)  # the last one is for -1
    renumbered[filled] = np.arange(len(filled))
    directory = [(names[number], int(counts[number])) for number in filled]
    free_slots = {chunk: free for chunk, free in removed.items() if chunk in listed and not whole}
    return Rows(keys.take(keep), renumbered[chunks].astype(np.uint32), slots.astype(np.uint32), directory, free_slots)


def _superseded(keys: KeyColumn) -> _Array:
    """Return which keys of a column stand in a later row again."""
    found = np.zeros(len(keys), bool)
    by_hash = np.argsort(keys.hashes, kind="stable")
    hashes = keys.hashes[by_hash]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    last: dict[bytes, int] = {}
    for row in by_hash[np.union1d(same, same + 1)].tolist():
        if (before := last.get(key := keys.stored(row))) is not None:
            found[min(before, row)] = True
        last[key] = max(row, before) if before is not None else row
    return found
