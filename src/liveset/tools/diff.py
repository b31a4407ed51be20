"""Diff: which samples two versions of a dataset do not share, and which fields of the others changed."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from liveset.errors import Corrupt, KeyNotFound
from liveset.format import codec
from liveset.format.index import ChunkRecord
from liveset.format.keytable import Key
from liveset.format.lazy import lazy
from liveset.format.schema import Schema
from liveset.keystore import KeyStore, TableKeys, open_keys
from liveset.snapshot import Snapshot, Version, open_snapshot
from liveset.storage import open_store
from liveset.tools.compare import FieldNames, Items, Rows, differing, open_samples

__all__ = ["Change", "Diff", "diff"]

_Array: TypeAlias = np.ndarray[Any, Any]

# Chunk files that are kept open on each side.
_KEPT = 4


class Change(NamedTuple):
    """A sample that both versions have, with other content.

    Attributes:
        key: of the sample; its position in the newer version where the dataset has no keys.
        fields: names of the fields whose stored values differ, such as ``("label", "meta.id")``.
    """

    key: Key
    fields: tuple[str, ...]


class _Loose(NamedTuple):
    """Samples of a chunk that have no place of their own in the other version."""

    chunk: int
    slots: _Array


class _Pairs(NamedTuple):
    """Samples of two chunk files that are to be compared."""

    a: int
    b: int
    mine: _Array
    theirs: _Array


class _Plan(NamedTuple):
    removed: list[_Loose]
    added: list[_Loose]
    pairs: list[_Pairs]


def diff(path: str | os.PathLike[str], a: Version | None, b: Version | None = None) -> Diff:
    """Compare two versions of a dataset; what they share is not read.

    Args:
        path: of the dataset.
        a: the version before: number, tag or time; None is the newest.
        b: the version after.

    Returns:
        A ``Diff``, which looks at keys and samples when it is asked for them.

    Raises:
        DatasetNotFound, VersionNotFound, VersionExpired: there is no such version, or it is gone.

    Example:
        >>> with liveset.dataset_update(path) as update:
        ...     update.patch("play-7", square=-49)
        ...     result = update.commit()
        >>> diff = liveset.diff(path, 1)
        >>> diff.added, diff.removed, diff.changed
        (20, 0, 1)
        >>> list(diff.changes())
        [Change(key='play-7', fields=('square',))]
    """
    store = open_store(path)
    return Diff(open_snapshot(store, a), open_snapshot(store, b))


class Diff:
    """What is different between two versions of a dataset: counts, then keys and fields as they are asked for.

    Samples belong together by their keys, wherever they stand. Where one of the versions has no keys they do by their places in chunks, and
    positions stand for the keys: in the version after for what was added or changed, in the one before for what was removed. Field names
    tell about fields that both schemas have; a field that only one has makes no sample a changed one.

    Attributes:
        path: of the dataset.
        a: number of the version before.
        b: number of the version after.
        by: ``key`` or ``position``: what names the samples.
    """

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self.path, self.a, self.b = a.store.url, a.version, b.version
        keys = open_keys(a), open_keys(b)
        self._keyed = None not in keys
        self.by = "key" if self._keyed else "position"
        self._old, self._new = (_Side(snapshot, store if self._keyed else None) for snapshot, store in zip((a, b), keys, strict=True))

    def __repr__(self) -> str:
        return f"Diff({self.path!r}, {self.a}, {self.b})"

    # --- counts ------------------------------------------------------------------------------------------------------

    @lazy
    def added(self) -> int:
        """Number of samples that only the version after has."""
        return sum(len(loose.slots) for loose in self._plan.added)

    @lazy
    def removed(self) -> int:
        """Number of samples that only the version before has."""
        return sum(len(loose.slots) for loose in self._plan.removed)

    @property
    def changed(self) -> int:
        """Number of samples that both have, with other content."""
        return len(self._changed)

    @property
    def fields_added(self) -> tuple[str, ...]:
        """Fields that only the schema after has."""
        return self._names.added if self._names is not None else ()

    @property
    def fields_dropped(self) -> tuple[str, ...]:
        """Fields that only the schema before has."""
        return self._names.dropped if self._names is not None else ()

    @property
    def fields_retyped(self) -> tuple[str, ...]:
        """Fields that both schemas have and store as other types; values count as changed only where they are not equal."""
        return self._names.retyped if self._names is not None else ()

    def __bool__(self) -> bool:
        """Whether anything differs: samples or fields."""
        return bool(self.added or self.removed or self.fields_added or self.fields_dropped or self.fields_retyped or self.changed)

    # --- details -----------------------------------------------------------------------------------------------------

    def added_keys(self) -> Iterator[Key]:
        """Yield the keys of the added samples, in the order of the version after."""
        for loose in self._plan.added:
            yield from self._new.names(loose)

    def removed_keys(self) -> Iterator[Key]:
        """Yield the keys of the removed samples, in the order of the version before."""
        for loose in self._plan.removed:
            yield from self._old.names(loose)

    def changes(self) -> Iterator[Change]:
        """Yield the changed samples, in the order of the version after, each with the fields that differ."""
        for chunk, slot, other, place in self._changed.tolist():
            (key,) = self._new.names(_Loose(chunk, np.array([slot])))
            yield Change(key, self._fields(other, place, chunk, slot))

    # --- parts -------------------------------------------------------------------------------------------------------

    @lazy
    def _names(self) -> FieldNames | None:
        return FieldNames(self._old.schema, self._new.schema) if self._old.schema is not None and self._new.schema is not None else None

    @lazy
    def _plan(self) -> _Plan:
        plan = self._by_chunk()
        for side, every in ((self._old, plan.removed), (self._new, plan.added)):
            every[:] = [loose for loose in map(side.there, every) if len(loose.slots)]
        if self._keyed and plan.removed and plan.added:
            _match(self._old, self._new, plan)
        return plan

    def _by_chunk(self) -> _Plan:
        """Pair the samples of chunks that both versions have."""
        plan = _Plan([], [], [])
        old, new = self._old, self._new
        numbers = {_id(record): number for number, record in enumerate(old.chunks)}
        for b, record in enumerate(new.chunks):
            a = numbers.pop(_id(record), None)
            if a is None:
                plan.added.append(_Loose(b, np.arange(record.samples)))
                continue
            before = old.chunks[a]
            frames = old.frame(a), new.frame(b)
            if frames[0] == frames[1] and before.samples == record.samples:
                every = np.arange(record.samples)
                plan.pairs.extend(_unlike(old, new, _Pairs(a, b, every, every)))
            elif not self._keyed:
                raise KeyNotFound(
                    f"the chunk {record.filename} of {self.path} has {record.samples} samples in version {self.b} and {before.samples} in "
                    f"version {self.a}, and without keys nothing says which these are: build_keys_index gives a dataset keys before it is "
                    "edited."
                )
            elif frames[0].table != frames[1].table:
                plan.removed.append(_Loose(a, np.arange(before.samples)))
                plan.added.append(_Loose(b, np.arange(record.samples)))
            else:
                # One table names the keys of both: samples belong together that stood in the same slot when it was written.
                _, mine, theirs = np.intersect1d(old.origins(a), new.origins(b), assume_unique=True, return_indices=True)
                plan.pairs.extend(_unlike(old, new, _Pairs(a, b, mine, theirs)))
                for loose, number, count, paired in ((plan.removed, a, before.samples, mine), (plan.added, b, record.samples, theirs)):
                    if len(paired) < count:
                        loose.append(_Loose(number, np.delete(np.arange(count), paired)))
        plan.removed.extend(_Loose(a, np.arange(old.chunks[a].samples)) for a in numbers.values())
        plan.removed.sort(key=lambda loose: loose.chunk)
        return plan

    @lazy
    def _changed(self) -> _Array:
        """Rows of chunk and slot after, chunk and slot before."""
        found = [np.zeros((0, 4), np.int64)]
        for pairs in self._plan.pairs:
            at = self._differing(pairs)
            columns = (np.full(len(at), pairs.b), pairs.theirs[at], np.full(len(at), pairs.a), pairs.mine[at])
            found.append(np.stack(columns, axis=1))
        changed = np.concatenate(found)
        return changed[np.lexsort((changed[:, 1], changed[:, 0]))]

    def _differing(self, pairs: _Pairs) -> _Array:
        old, new = self._old.samples(pairs.a), self._new.samples(pairs.b)
        alike = self._old.schema == self._new.schema and type(old) is type(new)
        at = np.flatnonzero(differing(old, new, pairs.mine, pairs.theirs)) if alike else np.arange(len(pairs.mine))
        if alike and not (self._old.padded or self._new.padded):
            return at
        places = ((pairs.mine[i], pairs.theirs[i]) for i in at.tolist())
        return at[[bool(self._fields(pairs.a, int(mine), pairs.b, int(theirs))) for mine, theirs in places]] if len(at) else at

    def _fields(self, a: int, mine: int, b: int, theirs: int) -> tuple[str, ...]:
        assert self._names is not None  # a version with samples has a schema
        return self._names.differing(self._old.samples(a)[mine], self._new.samples(b)[theirs])


class _Frame(NamedTuple):
    """What says which keys a chunk holds: a table, and how many samples have gone since."""

    table: str
    removed: tuple[bytes, ...]


class _Side:
    """One of the two versions; ``keys`` is None where its samples are named by position."""

    def __init__(self, snapshot: Snapshot, keys: KeyStore | None) -> None:
        self.snapshot, self.keys, self.chunks = snapshot, keys, snapshot.index.chunks
        config = snapshot.index.config
        self.schema = Schema.from_config(config, snapshot.index.file) if config is not None else None
        self.padded = snapshot.index.has_foreign_chunks
        self._compression = codec.Compression.from_config(config) if config is not None else None
        self._open: OrderedDict[int, Items | Rows] = OrderedDict()

    @lazy
    def _owners(self) -> Mapping[str, tuple[str, list[_Array]]]:
        """The table that holds the keys of each chunk, and the slots that newer ones say became free in it, oldest first."""
        owners: dict[str, tuple[str, list[_Array]]] = {}
        removed: dict[str, list[_Array]] = {}
        for table in self.keys.tables if isinstance(self.keys, TableKeys) else ():
            for chunk, _ in table.directory:
                owners.setdefault(chunk, (table.file, removed.get(chunk, [])[::-1]))
            for chunk, free in table.removed.items():
                removed.setdefault(chunk, []).append(free)
        return owners

    def frame(self, chunk: int) -> _Frame:
        """Return what the keys of a chunk follow from: equal frames, equal keys."""
        if not isinstance(self.keys, TableKeys):
            return _Frame("", ())
        if (owner := self._owners.get(_id(self.chunks[chunk]))) is None:
            raise Corrupt(f"no key table of version {self.snapshot.version} knows the chunk {_id(self.chunks[chunk])!r}.")
        return _Frame(owner[0], tuple(free.tobytes() for free in owner[1]))

    def origins(self, chunk: int) -> _Array:
        """Return where the samples of a chunk stood when the table with their keys was written."""
        free = self._owners[_id(self.chunks[chunk])][1]
        slots = np.arange(self.chunks[chunk].samples + sum(map(len, free)))
        for gone in free:
            slots = np.delete(slots, gone)
        return slots

    def there(self, loose: _Loose) -> _Loose:
        """Return samples without those that a purge erased: of them nothing is left to tell."""
        erased = self.snapshot.index.chunks[loose.chunk].erased
        return _Loose(loose.chunk, loose.slots[~np.isin(loose.slots, erased)]) if erased else loose

    def names(self, loose: _Loose) -> Sequence[Key]:
        """Return the keys, or the positions, of samples."""
        chunk, slots = loose
        if self.keys is None:
            return [self.snapshot.starts[chunk] + slot for slot in slots.tolist()]
        if len(slots) * 8 < self.chunks[chunk].samples:
            return [self.keys.key_at(chunk, slot) for slot in slots.tolist()]
        keys = self.keys.keys_of(chunk)
        return keys if len(slots) == len(keys) else [keys[slot] for slot in slots.tolist()]

    def samples(self, chunk: int) -> Items | Rows:
        """Return the stored samples of a chunk."""
        if chunk not in self._open:
            record, _, buffer = self.snapshot.chunk(chunk)
            self._open[chunk] = open_samples(buffer, record, self._compression)
            if len(self._open) > _KEPT:
                self._open.popitem(last=False)
        self._open.move_to_end(chunk)
        return self._open[chunk]


def _match(old: _Side, new: _Side, plan: _Plan) -> None:
    """Pair the loose samples that have the same key: they moved."""
    mine = [(key, loose.chunk, slot) for loose in plan.removed for key, slot in zip(old.names(loose), loose.slots.tolist(), strict=True)]
    places = {key: number for number, (key, _, _) in enumerate(mine)}
    left: list[_Loose] = []
    found: list[tuple[int, int, int, int]] = []
    for loose in plan.added:
        at = [places.pop(key, -1) for key in new.names(loose)]
        found += [(loose.chunk, slot, *mine[i][1:]) for slot, i in zip(loose.slots.tolist(), at, strict=True) if i >= 0]
        slots = loose.slots[np.array(at, np.int64) < 0]
        left += [_Loose(loose.chunk, slots)] if len(slots) else []
    plan.added[:] = left
    stay = np.zeros(len(mine), bool)
    stay[list(places.values())] = True
    plan.removed[:] = [_Loose(loose.chunk, loose.slots[kept]) for loose, kept in _split(plan.removed, stay) if kept.any()]
    if not found:
        return
    moved = np.array(found, np.int64)
    moved = moved[np.lexsort((moved[:, 1], moved[:, 2], moved[:, 0]))]
    edges = [0, *(np.flatnonzero(np.diff(moved[:, [0, 2]], axis=0).any(axis=1)) + 1).tolist(), len(moved)]
    for start, stop in pairwise(edges):
        b, a = int(moved[start, 0]), int(moved[start, 2])
        plan.pairs.extend(_unlike(old, new, _Pairs(a, b, moved[start:stop, 3], moved[start:stop, 1])))


def _unlike(old: _Side, new: _Side, pairs: _Pairs) -> list[_Pairs]:
    """Return the pairs without those that are one and the same place of one file, in a list that may be empty."""
    if old.chunks[pairs.a].filename != new.chunks[pairs.b].filename:
        return [pairs]
    apart = pairs.mine != pairs.theirs
    return [_Pairs(pairs.a, pairs.b, pairs.mine[apart], pairs.theirs[apart])] if apart.any() else []


def _split(loose: Sequence[_Loose], column: _Array) -> Iterator[tuple[_Loose, _Array]]:
    start = 0
    for part in loose:
        yield part, column[start : start + len(part.slots)]
        start += len(part.slots)


def _id(record: ChunkRecord) -> str:
    return record.id or record.filename
