"""ds.keys: which sample has which key, for all samples of a dataset or for those of a part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from liveset.errors import KeyNotFound, MissingDependency, PositionOutOfRange, name_some
from liveset.format.keytable import Key, normalize_key
from liveset.format.lazy import lazy
from liveset.keystore import KeyStore, TableKeys, missing_key
from liveset.parquetkeys import ParquetKeys, ordered_keys
from liveset.read.options import check_position
from liveset.read.picked import Slots
from liveset.read.plan import Region
from liveset.snapshot import Snapshot

if TYPE_CHECKING:
    import polars


class KeyView:
    """The keys of a dataset: membership, length, the key of a position, iteration in the order of the samples.

    A part of a dataset (``subset``, ``subsample``, a split) answers only for its own samples. Samples that a purge erased from an earlier
    version keep their positions and have no keys: length, iteration and tables leave them out, and ``at`` raises ``Erased`` there.

    Example:
        >>> "play-3" in ds.keys, len(ds.keys), ds.keys.at(0)
        (True, 120, 'play-0')
    """

    def __init__(
        self,
        store: KeyStore,
        snapshot: Snapshot,
        regions: Sequence[Region],
        path: str,
        *,
        whole: bool,
        slots: Sequence[Slots] | None = None,
    ) -> None:
        self._store, self._snapshot, self._regions, self._whole = store, snapshot, regions, whole
        self._path = path if whole else f"this part of {path}"
        # Where regions do not count all samples of a chunk, but those in these slots.
        self._slots = slots

    @property
    def kind(self) -> type:
        """``str`` or ``int``."""
        return self._store.kind

    def __len__(self) -> int:
        chunks = self._snapshot.index.chunks
        if self._whole:
            return len(self._store) - sum(len(record.erased) for record in chunks)
        gone = (sum(slot in self._slots_of(region) for slot in chunks[region.chunk].erased) for region in self._regions)
        return sum(stop - start for _, start, stop in self._regions) - sum(gone)

    def __contains__(self, key: object) -> bool:
        return self.find(normalize_key(key)) is not None

    def __iter__(self) -> Iterator[Key]:
        """Yield the key of every sample, in order."""
        for region in self._regions:
            keys = self._store.keys_of(region.chunk)
            gone = frozenset(
                self._snapshot.index.chunks[region.chunk].erased
            )  # asked afterwards: opening the tables may have told of a purge
            yield from (keys[slot] for slot in self._slots_of(region) if slot not in gone)

    def _slots_of(self, region: Region) -> Sequence[int]:
        chunk, start, stop = region
        return range(start, stop) if self._slots is None else self._slots[chunk][start:stop].tolist()

    def at(self, position: int) -> Key:
        """Return the key of the sample at a position; ``PositionOutOfRange`` when there is none, ``Erased`` when a purge erased it."""
        position, length = check_position(position), self._starts[-1]
        place = position + length if position < 0 else position
        if not 0 <= place < length:
            raise PositionOutOfRange(f"no sample at position {position} of {self._path}, which has {length}.")
        number = bisect_right(self._starts, place) - 1
        chunk, start, _ = self._regions[number]
        slot = place - self._starts[number] + start
        slot = slot if self._slots is None else int(self._slots[chunk][slot])
        key = self._store.key_at(chunk, slot)
        if slot in self._snapshot.index.chunks[chunk].erased:  # asked afterwards: opening the tables may have told of a purge
            raise self._snapshot.erased(chunk, slot)
        return key

    def positions(self, keys: Sequence[Any]) -> list[int]:
        """Return the positions of the samples with these keys, in their order; ``KeyNotFound`` names all that are missing.

        Example:
            >>> ds.keys.positions(["play-7", "play-3"])
            [7, 3]
        """
        found = []
        for chunk, slot in self.places(keys):
            at = slot if self._slots is None else int(np.searchsorted(self._slots[chunk], slot))
            found.append(next(first + at - start for start, stop, first in self._by_chunk[chunk] if start <= at < stop))
        return found

    def to_polars(self) -> polars.DataFrame:
        """Return the keys as a Polars table, sorted by position, with the columns of ``to_arrow``.

        Polars runs threads of its own, which a forked process does not have: where a ``DataLoader`` forks its workers, ask for the table in
        the parent or in the workers, not in both.

        Raises:
            MissingDependency: Polars or pyarrow is not installed.

        Example:
            >>> import polars
            >>> ds.keys.to_polars().filter(polars.col("key").str.ends_with("99"))["index"].to_list()
            [99]
        """
        try:
            import polars
        except ImportError as error:
            raise _missing("polars") from error
        table = polars.from_arrow(self.to_arrow())
        assert isinstance(table, polars.DataFrame)
        return table

    def to_arrow(self) -> Any:
        """Return the keys as a ``pyarrow.Table``, sorted by position.

        Its columns are ``key``; ``index``, the position in this dataset or part; ``chunk_index`` and ``chunk_offset``, the number of the
        chunk in the whole version and the slot of the sample in it. Samples that a purge erased have no row.

        Raises:
            MissingDependency: pyarrow is not installed.

        Example:
            >>> ds.keys.to_arrow().slice(0, 1).to_pylist()
            [{'key': 'play-0', 'index': 0, 'chunk_index': 0, 'chunk_offset': 0}]
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise _missing("pyarrow") from error
        chunks, starts, stops = np.array(self._regions, np.int64).reshape(-1, 3).T
        sizes = stops - starts
        length = int(sizes.sum())
        numbers = np.repeat(chunks, sizes)
        slots = np.arange(length) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        if self._slots is not None:
            slots = np.concatenate([slots[:0], *(self._slots[chunk][start:stop] for chunk, start, stop in self._regions)])
        keys = self._ordered()
        if not self._whole:
            keys = keys.take(pa.array(np.array(self._snapshot.starts)[numbers] + slots))
        columns = [keys, pa.array(np.arange(length)), pa.array(numbers.astype(np.int32)), pa.array(slots.astype(np.int32))]
        table = pa.table(columns, names=["key", "index", "chunk_index", "chunk_offset"])
        records = self._snapshot.index.chunks
        gone = [np.flatnonzero((numbers == n) & np.isin(slots, record.erased)) for n, record in enumerate(records) if record.erased]
        return table.take(pa.array(np.delete(np.arange(length), np.concatenate(gone)))) if gone else table

    def _ordered(self) -> Any:
        """Return the keys of the whole version as an Arrow array in the order of its samples."""
        if isinstance(self._store, ParquetKeys):
            return self._store.ordered()
        assert isinstance(self._store, TableKeys)
        return ordered_keys(self._store.tables, self._snapshot.index.chunks, self._store.kind)

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
        found = self.find_many(plain)
        missing = [key for key, place in zip(plain, found, strict=True) if place is None]
        if missing:
            if type(missing[0]) is not self.kind:
                raise missing_key(self._store, missing[0], self._path)
            raise KeyNotFound(f"{name_some(missing)} nowhere in {self._path}.", keys=tuple(missing))
        return [place for place in found if place is not None]

    def find_many(self, keys: Sequence[Key]) -> list[tuple[int, int] | None]:
        """Return chunk number and slot of normalized keys, None for each that no sample here has."""
        found = self._store.locate_many(keys)
        return found if self._whole else [place if place is not None and self._holds(*place) else None for place in found]

    @lazy
    def _starts(self) -> list[int]:
        return list(accumulate((stop - start for _, start, stop in self._regions), initial=0))

    @lazy
    def _by_chunk(self) -> dict[int, list[tuple[int, int, int]]]:
        """For each chunk where the regions in it begin and end, and the position of the first sample."""
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for (chunk, start, stop), first in zip(self._regions, self._starts, strict=False):
            parts.setdefault(chunk, []).append((start, stop, first))
        return parts

    def _holds(self, chunk: int, slot: int) -> bool:
        if self._slots is not None:
            slots = self._slots[chunk]
            number = int(np.searchsorted(slots, slot))
            if number == len(slots) or slots[number] != slot:
                return False
            slot = number
        return any(start <= slot < stop for start, stop, _ in self._by_chunk.get(chunk, ()))


def _missing(package: str) -> MissingDependency:
    return MissingDependency(f"A table of keys needs {package}: pip install 'liveset[tables]'", package=package)
