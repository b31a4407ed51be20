"""JoinedStreamingDataset: two keyed datasets read together, key by key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Literal, TypeAlias, get_args

from liveset.errors import KeyNotFound, SampleError, StateMismatch, name_some
from liveset.format.chunk import Chunk
from liveset.format.infer import JSON, join
from liveset.format.schema import Schema
from liveset.format.tree import Branch
from liveset.keystore import KeyStore, open_keys
from liveset.lease import Lease
from liveset.read.agreement import Agreement
from liveset.read.chunks import OpenChunks
from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Stretch
from liveset.read.options import check_dataset_options, transformed
from liveset.read.picked import Layout
from liveset.read.plan import DEFAULT_WINDOW, Region
from liveset.read.state import Progress, to_state
from liveset.snapshot import Snapshot

Missing: TypeAlias = Literal["raise", "drop", "none"]
_Place: TypeAlias = tuple[int, int] | None

# Chunks whose samples' places in the other dataset are kept.
_MATCHED = 64
# Chunks whose halves in the other dataset are fetched ahead, where each has them in this many chunks at most.
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class _Side:
    """What is read beside each sample.

    Attributes:
        dataset: where its key is looked up.
        before: what is applied to the sample first.
        combine: what makes one sample of two.
        missing: what is done where the key is not there.
    """

    dataset: StreamingDataset
    before: tuple[Callable[[Any], Any], ...]
    combine: Callable[[Any, Any], Any] | None
    missing: Missing

    def join(self, sample: Any, place: _Place, *, whole: bool = True) -> Any:
        other = None
        if place is not None:
            other = transformed(self.dataset.chunk(place[0], whole=whole).read(place[1]), self.dataset.transforms)
        return self.put_together(sample, other)

    def put_together(self, sample: Any, other: Any) -> Any:
        sample = transformed(sample, self.before)
        if self.combine is not None:
            return self.combine(sample, other)
        if isinstance(sample, dict) and (isinstance(other, dict) or (other is None and self._names() is not None)):
            return sample | (other if other is not None else {name: None for name in self._names() or () if name not in sample})
        return sample, other

    def join_schema(self, base: Schema | None) -> Schema | None:
        """Return the schema of the joined samples; None if nobody knows it."""
        other, names = self.dataset.schema, self._names()
        if base is None or other is None or self.combine is not None:
            return None
        mine, theirs = base.root, other.root
        if names is None or not isinstance(mine, Branch) or not isinstance(theirs, Branch) or mine.keys is None or theirs.keys is None:
            return Schema(Branch("tuple", (mine, theirs)))
        fields = dict(zip(mine.keys, mine.children, strict=True))
        added = {name: child for name, child in zip(theirs.keys, theirs.children, strict=True) if name in names}
        if self.missing == "none":
            for name, node in added.items():
                with suppress(SampleError):  # no schema has both
                    added[name] = join(node, fields.get(name, JSON))
        fields |= added
        return Schema(Branch(mine.kind, tuple(fields.values()), tuple(fields), mine.option))

    def _names(self) -> list[Any] | None:
        """Return the names that its samples have; None if they are no dictionaries."""
        schema, chosen = self.dataset.schema, self.dataset.chosen_fields
        if schema is None or not isinstance(schema.root, Branch) or schema.root.keys is None:
            return None
        names = schema.root.keys
        return [name for name in names if chosen is None or any(f == name or f.startswith((f"{name}.", f"{name}[")) for f in chosen)]


class JoinedStreamingDataset(StreamingDataset):
    """The samples of a dataset, each with the sample of another dataset that has the same key.

    It is a ``StreamingDataset`` in all respects: order, length, shuffling, positions and keys are those of ``base``. So fields can be added
    to a large dataset, or labels be replaced, without writing it again. Each of the two stays at its version, and states name both.

    Samples that are dictionaries become one dictionary, in which the fields of ``side`` replace fields of the same name; others become a
    tuple. ``combine`` does otherwise. Transforms of the two datasets are applied before.

    Args:
        base: what is read, in its order; a joined dataset may be joined again.
        side: where the other half of each sample is looked up; only its keys, its version and its transforms matter.
        missing: what is done with samples whose keys ``side`` lacks: "raise" refuses to begin, and names some of them; "drop" leaves them
            out; "none" joins them with None: in a dictionary the fields that ``side`` alone has are None then.
        combine: makes a sample of the two samples.
        transform: a callable, or a list of them, applied to each joined sample in turn.

    Raises:
        KeyNotFound: one of the two has no keys, or ``missing="raise"`` and ``side`` lacks some; also a ``KeyError``.
        ValueError: an argument is wrong, or one dataset has text for keys and the other has integers.

    Example:
        >>> liveset.optimize(lambda i: {"id": f"play-{i}", "odd": i % 2}, range(120), tmp / "labels", num_workers=1, key_fn="id")
        >>> joined = liveset.JoinedStreamingDataset(ds, liveset.StreamingDataset(tmp / "labels"))
        >>> joined["play-7"]
        {'id': 'play-7', 'square': 49, 'odd': 1}
    """

    def __init__(
        self,
        base: StreamingDataset,
        side: StreamingDataset,
        *,
        missing: Missing = "raise",
        combine: Callable[[Any, Any], Any] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    ) -> None:
        for dataset in (base, side):
            if not isinstance(dataset, StreamingDataset):
                raise ValueError(f"base and side must be StreamingDatasets. Found {type(dataset).__name__}.")
        if missing not in get_args(Missing):
            raise ValueError(f'missing must be "raise", "drop" or "none". Found {missing!r}.')
        if base.keys.kind is not side.keys.kind:
            kinds = " and ".join(f"{each.path} has keys of type {each.keys.kind.__name__}" for each in (base, side))
            raise ValueError(f"{kinds}: no sample of one can be found in the other.")
        self.__dict__.update(base.__dict__)
        self._transforms = check_dataset_options(shuffle=False, subsample=1.0, transform=transform, later={})
        added = _Side(_plain(side), base.transforms, combine, missing)
        self._sides: tuple[_Side, ...] = (*getattr(base, "_sides", ()), added)
        self._resumed = None
        self._wrap()
        self._arrange(_kept(self.layout, self._snapshot, [added]), self._slots)

    def _open(self, snapshot: Snapshot, lease: Lease | None = None) -> None:
        super()._open(snapshot, lease)
        self._wrap()

    def _wrap(self) -> None:
        chunks: Any = self._chunks
        while isinstance(chunks, _JoinedChunks):
            chunks = chunks.inner
        if chunks is not None and (keys := open_keys(self._snapshot)) is not None:
            for side in self._sides:
                chunks = _JoinedChunks(chunks, keys, side)
        self._chunks = chunks

    def _choose(self, snapshot: Snapshot) -> list[Region]:
        slots = self._picked.slots(snapshot) if self._picked is not None else None
        return _kept(Layout(super()._choose(snapshot), slots), snapshot, self._sides)

    def chunk(self, number: int, *, whole: bool = True) -> Chunk:
        chunks: Any = self._chunks
        chunk: Chunk = chunks.whole(number) if whole else chunks[number]
        return chunk

    def refresh(self) -> bool:
        """Move both datasets to their newest versions, and return whether one of them is another one than before."""
        self._check_refresh()
        before = self.__dict__.copy()
        sides = [replace(side, dataset=copy.copy(side.dataset)) for side in self._sides]
        moved = [side.dataset.refresh() for side in sides]
        if any(moved):
            self._sides = tuple(sides)
        try:
            if not super().refresh():
                if not any(moved):
                    return False
                self._wrap()
                self._arrange_all()
        except BaseException:
            self.__dict__ = before
            raise
        return True

    @property
    def schema(self) -> Schema | None:
        """Fields and leaf types of the joined samples, as the datasets store them; None where ``combine`` makes the samples."""
        schema = super().schema
        for side in self._sides:
            schema = side.join_schema(schema)
        return schema

    def agree(self, agreement: Agreement) -> None:
        """Move both datasets to the versions that rank 0 reads."""
        sides = tuple(replace(side, dataset=copy.copy(side.dataset)) for side in self._sides)
        for side in sides:
            side.dataset.agree(agreement)
        if any(a.dataset.opened is not b.dataset.opened for a, b in zip(sides, self._sides, strict=True)):
            self._sides = sides
            self._wrap()
        super().agree(agreement)

    def state_of(self, progress: Progress, workers: int) -> dict[str, Any]:
        sides = [side.dataset for side in self._sides]
        none = Stretch(1, 1, 1, 0)
        states = [to_state(Progress(side.rules(1, pad=False), (none,), 0, 0, finished=False), side.identity, 1) for side in sides]
        return super().state_of(progress, workers) | {"sides": states}

    def progress_of(self, state: Mapping[str, Any]) -> Progress:
        states = state.get("sides")
        if not isinstance(states, Sequence) or len(states) != len(self._sides):
            raise StateMismatch(f"this is no state of a dataset that is joined with {len(self._sides)} others in this way.")
        before, sides = self.__dict__.copy(), []
        for side, of_side in zip(self._sides, states, strict=True):
            dataset = copy.copy(side.dataset)
            dataset.progress_of(of_side)
            sides.append(replace(side, dataset=dataset))
        self._sides = tuple(sides)
        try:
            progress = super().progress_of(state)
        except BaseException:
            self.__dict__ = before
            raise
        if self._chunks is before["_chunks"]:
            self._wrap()
        return progress


def _plain(side: StreamingDataset) -> StreamingDataset:
    """Return a copy that nothing moves, without the settings that only matter where it is read by itself."""
    other = copy.copy(side)
    other.shuffle, other.drop_last, other.seed, other._window = False, None, 0, DEFAULT_WINDOW  # noqa: SLF001 - a dataset, too
    other.reset_state_dict()
    return other


def _kept(layout: Layout, snapshot: Snapshot, sides: Sequence[_Side]) -> list[Region]:
    """Return the samples that are read.

    Raises:
        KeyNotFound: a sample has no other half, and is not to be left out.
    """
    kept = list(layout.regions)
    keys = open_keys(snapshot)
    if keys is None:
        raise KeyNotFound(f"version {snapshot.version} of {snapshot.store.url} has no keys.")
    for side in sides:
        if side.missing == "none":
            continue
        found, lost = [], []
        for chunk, start, stop in kept:
            known = keys.keys_of(chunk)
            slots = range(start, stop) if layout.slots is None else layout.slots[chunk][start:stop].tolist()
            places = side.dataset.keys.find_many([known[slot] for slot in slots])
            erased = snapshot.index.chunks[chunk].erased
            lost += [known[slot] for slot, place in zip(slots, places, strict=True) if place is None and slot not in erased]
            begin = start
            for there, row in groupby(places, key=lambda place: place is not None):
                end = begin + len(list(row))
                if there:
                    found.append(Region(chunk, begin, end))
                begin = end
        if lost and side.missing == "raise":
            raise KeyNotFound(
                f"{name_some(lost)} in {snapshot.store.url}, and not in {side.dataset.path}: add these samples, or pass missing='drop' to "
                "leave them out, or missing='none' to read them alone.",
                keys=tuple(lost),
            )
        if lost:
            kept = found
    return kept


class _JoinedChunks:
    """In place of the open chunks of a dataset: their samples are joined with those of another one."""

    def __init__(self, inner: OpenChunks | _JoinedChunks, keys: KeyStore, side: _Side) -> None:
        self.inner, self._keys, self._side = inner, keys, side
        self._known: dict[int, list[_Place]] = {}
        self._next: dict[int, int] = {}
        # Chunks that the other dataset was told about, with those that follow.
        self._told: dict[int, int] = {}

    def expect(self, numbers: Sequence[int]) -> None:
        """Tell which chunks will be read next."""
        self.inner.expect(numbers)
        if self._side.dataset.remote:
            self._next.update(pairwise(numbers))

    def close(self) -> None:
        """Let go of all files."""
        self.inner.close()

    def get(self, number: int) -> None:
        return None

    def __getitem__(self, number: int) -> Chunk:
        return _JoinedChunk(self.inner[number], self._side, lambda slot: self._find([(number, slot)])[0], whole=False)

    def whole(self, number: int) -> Chunk:
        chunk = _JoinedChunk(self.inner.whole(number), self._side, self._places(number).__getitem__)
        following = self._next.get(number)
        if following is not None and self._told.get(number) != following:
            self._told[number] = following
            self._expect_halves(number)
        return chunk

    def _expect_halves(self, number: int) -> None:
        coming: dict[int, None] = {}
        for _ in range(_AHEAD + 1):
            there = dict.fromkeys(place[0] for place in self._places(number) if place is not None)
            if len(there) > _AHEAD:
                break  # they lie all over the other dataset: there is no order in which its chunks are read
            coming |= there
            if (following := self._next.get(number)) is None:
                break
            number = following
        self._side.dataset.expect(list(coming))

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples at these places."""
        side = self._side
        samples, found = self.inner.read_many(places), self._find(places)
        others = iter(side.dataset.read_places([place for place in found if place is not None]))
        halves = [next(others) if place is not None else None for place in found]
        return list(map(side.put_together, samples, halves))

    def _find(self, places: Sequence[tuple[int, int]]) -> list[_Place]:
        return self._side.dataset.keys.find_many([self._keys.key_at(chunk, slot) for chunk, slot in places])

    def _places(self, number: int) -> list[_Place]:
        found = self._known.get(number)
        if found is None:
            found = self._side.dataset.keys.find_many(self._keys.keys_of(number))
            while len(self._known) >= _MATCHED:
                self._known.pop(next(iter(self._known)), None)
            self._known[number] = found
        return found


@dataclass(frozen=True, slots=True)
class _JoinedChunk:
    chunk: Chunk
    side: _Side
    find: Callable[[int], _Place]
    whole: bool = True

    def read(self, slot: int) -> Any:
        return self.side.join(self.chunk.read(slot), self.find(slot), whole=self.whole)

    def iterate(self, start: int, stop: int) -> Iterator[Any]:
        return map(self.side.join, self.chunk.iterate(start, stop), map(self.find, range(start, stop)))
