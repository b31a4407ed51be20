"""Parts of a dataset that are chosen by key: which samples of each chunk belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from liveset.errors import KeyNotFound
from liveset.format.keytable import KeyColumn
from liveset.keystore import TableKeys, open_keys
from liveset.parquetkeys import rows_of_chunks
from liveset.read.plan import Offsets, Region
from liveset.snapshot import Snapshot

Slots: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
"""The slots of a chunk that belong to a part, ascending."""


class Layout(NamedTuple):
    """What a dataset reads: regions, and the slots that they count where these are not all of a chunk."""

    regions: Sequence[Region]
    slots: Sequence[Slots] | None

    def place(self, region: int, offsets: Offsets) -> tuple[int, Offsets]:
        """Return the chunk of samples of a region, and their slots in it."""
        chunk, start, _ = self.regions[region]
        places = offsets + start
        return chunk, places if self.slots is None else self.slots[chunk][places].astype(np.int64)


class KeySplit:
    """A hash of each key, and the seed, decide which part a sample belongs to.

    Args:
        ends: where the parts end, as fractions of all hashes, ascending.
        seed: of the hash.
        whole: what is split, if that is a part itself.
    """

    def __init__(self, ends: Sequence[float], seed: int, whole: Picked | None) -> None:
        self._ends, self._seed, self._whole = tuple(ends), seed, whole
        # Parts of a part must not be cut by the same numbers as that one.
        self.depth: int = whole.split.depth + 1 if whole is not None else 0
        self._known: tuple[Snapshot, list[list[Slots]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None}

    def describe(self, number: int) -> str:
        """Return what decides about a part, as text."""
        begin, end = (0.0, *self._ends)[number : number + 2]
        return f"{begin} to {end}, {self._seed}, {self._whole}"

    def parts(self, snapshot: Snapshot) -> list[list[Slots]]:
        """Return for each part the slots of each chunk."""
        known = self._known
        if known is None or known[0].index != snapshot.index:
            known = self._known = (snapshot, self._divide(snapshot))
        return known[1]

    def _divide(self, snapshot: Snapshot) -> list[list[Slots]]:
        inside = self._whole.slots(snapshot) if self._whole is not None else None
        found: list[list[Slots]] = [[] for _ in self._ends]
        for chunk, hashes in enumerate(_hashes(snapshot)):
            slots = np.arange(len(hashes), dtype=np.int32) if inside is None else inside[chunk]
            part = np.searchsorted(np.array(self._ends), _fractions(hashes[slots], self._seed, self.depth), "right")
            for number, slots_of in enumerate(found):
                slots_of.append(slots[part == number])
        return found


@dataclass(frozen=True, slots=True, repr=False)
class Picked:
    """One part of a split."""

    split: KeySplit
    number: int

    def __repr__(self) -> str:
        return f"Picked({self.split.describe(self.number)})"

    def slots(self, snapshot: Snapshot) -> list[Slots]:
        """Return its slots in each chunk of a version."""
        return self.split.parts(snapshot)[self.number]


def _hashes(snapshot: Snapshot) -> list[np.ndarray[Any, Any]]:
    """Return the hash of each key, chunk by chunk; key tables have them, so that no key is looked at."""
    keys, chunks = open_keys(snapshot), snapshot.index.chunks
    if keys is None:
        raise KeyNotFound(f"version {snapshot.version} of {snapshot.store.url} has no keys: there is nothing to split it by.")
    if not isinstance(keys, TableKeys):
        return [KeyColumn.of(keys.keys_of(number)).hashes for number in range(len(chunks))]
    columns, rows = rows_of_chunks(keys.tables, chunks)
    hashes = np.concatenate([np.empty(0, np.uint64), *(column.hashes for column, _ in columns)])
    each = iter(rows)
    return [hashes[next(each)] if record.samples else hashes[:0] for record in chunks]


def _fractions(hashes: np.ndarray[Any, Any], seed: int, depth: int) -> np.ndarray[Any, Any]:
    """Return hashes as numbers from 0 to 1, mixed with a seed (by the finalizer of MurmurHash3, "splitmix")."""
    mixed = hashes ^ np.uint64((seed * 0x9E3779B97F4A7C15 + depth * 0xD1B54A32D192ED03) % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def recount(regions: Sequence[Region], before: Sequence[Slots] | None, slots: Sequence[Slots]) -> list[Region]:
    """Return the regions of a part, whose numbers count among the slots that belong to it.

    Args:
        regions: of what it is a part of.
        before: the slots that those count among, if that is a part itself.
        slots: those of the part.
    """
    found = []
    for chunk, start, stop in regions:
        ends = [start, stop] if before is None or start == stop else [before[chunk][start], before[chunk][stop - 1] + 1]
        first, last = np.searchsorted(slots[chunk], ends).tolist()
        found.append(Region(chunk, first, last))
    return found
