"""ds.keys: which sample has which key, for all samples of a dataset or for those of a part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from liveset.errors import KeyNotFound, PositionOutOfRange, name_some
from liveset.format.keytable import Key, normalize_key
from liveset.keystore import KeyStore, missing_key
from liveset.read.plan import Region


class KeyView:
    """The keys of a dataset: membership, length, the key of a position, iteration in the order of the samples.

    A part of a dataset (``subset``, ``subsample``, a split) answers only for its own samples.

    Example:
        >>> "play-3" in ds.keys, len(ds.keys), ds.keys.at(0)
        (True, 1000, 'play-0')
    """

    def __init__(self, store: KeyStore, regions: Sequence[Region], path: str, *, whole: bool) -> None:
        self._store, self._regions, self._path, self._whole = store, regions, path, whole

    @property
    def kind(self) -> type:
        """``str`` or ``int``."""
        return self._store.kind

    def __len__(self) -> int:
        return len(self._store) if self._whole else sum(stop - start for _, start, stop in self._regions)

    def __contains__(self, key: object) -> bool:
        return self.find(normalize_key(key)) is not None

    def __iter__(self) -> Iterator[Key]:
        for chunk, start, stop in self._regions:
            yield from self._store.keys_of(chunk)[start:stop]

    def at(self, position: int) -> Key:
        """Return the key of the sample at a position; ``PositionOutOfRange`` when there is none."""
        length = self._starts[-1]
        place = position + length if position < 0 else position
        if not 0 <= place < length:
            raise PositionOutOfRange(f"no sample at position {position} of {self._path}, which has {length}.")
        number = bisect_right(self._starts, place) - 1
        chunk, start, _ = self._regions[number]
        return self._store.key_at(chunk, place - self._starts[number] + start)

    def find(self, key: Key) -> tuple[int, int] | None:
        """Return chunk number and slot of a normalized key, or None when no sample here has it."""
        place = self._store.locate(key)
        return place if self._whole or place is None or self._holds(*place) else None

    def place(self, key: Any) -> tuple[int, int]:
        """Return chunk number and slot of a key; ``KeyNotFound`` or ``TypeError`` otherwise."""
        plain = normalize_key(key)
        found = self.find(plain)
        if found is None:
            raise missing_key(self._store, plain, self._path)
        return found

    def places(self, keys: Sequence[Any]) -> list[tuple[int, int]]:
        """Return the places of many keys; ``KeyNotFound`` names all that are missing."""
        plain = [normalize_key(key) for key in keys]
        found = self._store.locate_many(plain)
        missing = [key for key, place in zip(plain, found, strict=True) if place is None or not (self._whole or self._holds(*place))]
        if missing:
            if type(missing[0]) is not self.kind:
                raise missing_key(self._store, missing[0], self._path)
            raise KeyNotFound(f"{name_some(missing)} nowhere in {self._path}.", keys=tuple(missing))
        return [place for place in found if place is not None]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((stop - start for _, start, stop in self._regions), initial=0))

    @cached_property
    def _by_chunk(self) -> dict[int, list[tuple[int, int]]]:
        parts: dict[int, list[tuple[int, int]]] = {}
        for chunk, start, stop in self._regions:
            parts.setdefault(chunk, []).append((start, stop))
        return parts

    def _holds(self, chunk: int, slot: int) -> bool:
        return any(start <= slot < stop for start, stop in self._by_chunk.get(chunk, ()))
