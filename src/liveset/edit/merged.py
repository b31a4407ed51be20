"""Merged chunks: which chunks a compaction made others of, for who works on a version from before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from liveset.edit.keyfiles import ids_of
from liveset.errors import OverwriteConflict
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry
from liveset.snapshot import archived
from liveset.storage import Store

__all__ = ["Merged", "merged_since", "slots_from"]

Merged = Mapping[str, Sequence[tuple[str, int]]]
"""For the id of a merged chunk, those of the chunks that it was made of, in order, with the number of samples that they had then."""


def merged_since(store: Store, head: Index, since: Sequence[HistoryEntry]) -> dict[str, list[tuple[str, int]]]:
    """Return what the compactions among the commits before a head have merged.

    Raises:
        OverwriteConflict: a version that tells it is gone.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for entry in since:
        if entry.op == "compact":
            before, after = (head if number == head.version else archived(store, number) for number in (entry.version - 1, entry.version))
            if before is None or after is None:
                raise OverwriteConflict(
                    f"version {entry.version} arranged the samples in other chunks meanwhile, and a vacuum has removed what tells how. "
                    "Nothing was changed. Start again."
                )
            found.update(_merged(before, after))
    return found


def _merged(before: Index, after: Index) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield what became of the chunks that a compaction merged: it keeps the positions of all samples."""
    there, known = set(ids_of(after)), set(ids_of(before))
    gone = ((name, record.samples) for name, record in zip(ids_of(before), before.chunks, strict=True) if name not in there)
    for name, record in zip(ids_of(after), after.chunks, strict=True):
        if name not in known:
            parts: list[tuple[str, int]] = []
            while sum(count for _, count in parts) < record.samples:
                parts.append(next(gone))
            yield name, parts


def slots_from(chunks: frozenset[str], name: str, count: int, merged: Merged) -> frozenset[int]:
    """Return the slots of a chunk, which has ``count`` samples now, whose samples stood in some chunks before compactions.

    Raises:
        OverwriteConflict: samples left a merged chunk that had others, too, so that the slots tell nothing.
    """
    runs = _runs(chunks, name, count, merged)
    slots, start = set[int](), 0
    for theirs, length in runs:
        slots.update(range(start, start + length) if theirs else ())
        start += length
    return frozenset(slots)


def _runs(chunks: frozenset[str], name: str, count: int, merged: Merged) -> list[tuple[bool, int]]:
    """Return whether samples stood in the chunks, for runs of neighbours with their lengths."""
    if name in chunks or name not in merged:
        return [(name in chunks, count)]
    parts = [run for part, length in merged[name] for run in _runs(chunks, part, length, merged)]
    runs = [(known, sum(length for _, length in some)) for known, some in groupby(parts, key=lambda run: run[0])]
    if len(runs) == 1:
        return [(runs[0][0], count)]
    if sum(length for _, length in runs) != count:
        raise OverwriteConflict(
            "a compaction put samples of this version and later ones into one chunk meanwhile, and some were deleted from it since. "
            "Nothing was changed. Start again."
        )
    return runs
