"""StreamingDataset: one version of a dataset, read by position, by slice and in training order."""

from __future__ import annotations

import copy
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, SupportsIndex, overload

from liveset.errors import KeyNotFound, PositionOutOfRange
from liveset.format.fields import check_names
from liveset.format.index import Index
from liveset.keystore import open_keys
from liveset.read.grid import find_ranks
from liveset.read.keys import KeyView
from liveset.read.opened import Settings, open_input
from liveset.read.options import (
    check_ahead,
    check_dataset_options,
    check_drop_last,
    check_opening_options,
    check_position,
    check_positions,
    check_seed,
    resolve_window,
)
from liveset.read.picked import KeySplit, Picked, Slots, recount
from liveset.read.plan import Region, subsample_regions
from liveset.read.training import Training
from liveset.read.view import MapView
from liveset.snapshot import Snapshot, Version
from liveset.storage import Place


class StreamingDataset(Training):
    """A dataset written by ``optimize``, read by position, by slice and by iteration.

    The version is resolved once, when the object is made: later commits do not change what it reads. Where torch is installed it is a
    ``torch.utils.data.IterableDataset``. Reads are safe from several threads, and iterators are independent of each other.

    Args:
        input_dir: path of the dataset, or the URL of an object store; see ``Place``.
        cache_dir: where files of a remote dataset are kept; by default the folder of the user. False keeps none.
        shuffle: iterate in a new random order each epoch, a pure function of ``seed`` and epoch.
        drop_last: give each rank the same number of samples; by default only with several ranks.
        seed: of the shuffle.
        serializers: readers for leaf types by name: objects with ``deserialize(bytes)``.
        max_cache_size: how much may be kept there: bytes, text such as "10GB", or a part of the disk such as 0.5.
        storage_options: how to reach an object store: names of boto3's client or of obstore; see ``Place``.
        session_options: the same for boto3's session.
        max_pre_download: chunks of a remote dataset that are fetched ahead, at least 4; 0 fetches none.
        subsample: part of the dataset to read: 0.1 is a tenth, 2.0 is everything twice.
        index_path: an index file (or its folder) to use instead of the dataset's own.
        transform: a callable, or a list of them, applied to each sample in turn.
        item_shuffle_window: samples inside a chunk are shuffled in blocks of this many; "full" shuffles whole chunks. Default 256.
        version: the version to read: its number, a tag, or a time (``datetime`` with time zone: the newest version committed by then).
            None is the newest.
        pin: hold the version, so that no vacuum removes it as long as this object lives; needs permission to write to the dataset.
        fields: names of the fields to decode, such as ``["label", "meta.id"]``; the others are left out of the samples.
        verify_reads: check the checksum of every chunk before its samples are used.
        allow_pickle: let samples create objects of any type. Only for datasets whose origin you trust.

    The other arguments of the old tool's signature are accepted where they only tune (``batch_decode``, ``num_canonical_nodes``,
    ``window_direct_io``, ``force_override_state_dict``) and refused where they would change results.

    Raises:
        DatasetNotFound: there is no dataset (also a ``FileNotFoundError`` and a ``ValueError``).
        VersionNotFound, VersionExpired: the version never existed, or a vacuum has removed it.
        Corrupt, UnsupportedFormat: the index is damaged, or was written by a newer liveset.

    Example:
        >>> import liveset
        >>> liveset.optimize(lambda i: {"id": i, "square": i * i}, inputs=range(100), output_dir=tmp / "squares")
        >>> ds = liveset.StreamingDataset(tmp / "squares")
        >>> len(ds), ds[7], ds[-1]["id"]
        (100, {'id': 7, 'square': 49}, 99)
    """

    def __init__(
        self,
        input_dir: str | os.PathLike[str],
        cache_dir: str | os.PathLike[str] | bool | None = None,
        item_loader: Any = None,
        shuffle: bool = False,
        drop_last: bool | None = None,
        seed: int = 42,
        serializers: Mapping[str, Any] | None = None,
        max_cache_size: float | str | None = None,
        subsample: float = 1.0,
        encryption: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        session_options: Mapping[str, Any] | None = None,
        max_pre_download: int = 2,
        index_path: str | os.PathLike[str] | None = None,
        force_override_state_dict: bool = False,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        num_canonical_nodes: int | None = None,
        batch_decode: str | int = "auto",
        item_shuffle_window: str | int | None = None,
        window_direct_io: bool = False,
        *,
        version: Version | None = None,
        pin: bool = False,
        fields: Iterable[str] | None = None,
        verify_reads: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._transforms = check_dataset_options(
            shuffle=shuffle,
            subsample=subsample,
            transform=transform,
            later={
                "item_loader": item_loader,
                "encryption": encryption,
            },
        )
        self._window = resolve_window(item_shuffle_window)
        self.shuffle, self.drop_last, self.seed = shuffle, check_drop_last(drop_last), check_seed(seed)
        self.batch_size, self.num_workers, self.current_epoch = 1, 1, 1
        check_opening_options(
            cache_dir=cache_dir,
            max_cache_size=max_cache_size,
            index_path=index_path,
            version=version,
            serializers=serializers,
            pin=pin,
            verify_reads=verify_reads,
            allow_pickle=allow_pickle,
            force_override_state_dict=force_override_state_dict,
        )
        names = None if fields is None else check_names("fields", fields)
        self._settings = Settings(names, allow_pickle, serializers, verify_reads, pin, check_ahead(max_pre_download))
        # None in a dataset that cannot move to another version.
        self._subsampled: tuple[float, bool, int] | None = (subsample, shuffle, self.seed)
        place = Place.of(
            input_dir,
            storage_options=storage_options,
            session_options=session_options,
            cache_dir=cache_dir,
            max_cache_size=max_cache_size,
        )
        self._open(*open_input(place, index_path, version, held=pin))
        self._arrange_all()
        if index_path is not None:
            self._subsampled = None
        self._stays, self._forced = version is not None or index_path is not None, force_override_state_dict

    # --- opening -----------------------------------------------------------------------------------------------------

    def _check_refresh(self) -> None:
        if self._subsampled is None:
            raise ValueError("a subset, or a dataset opened with index_path=, stays at its version: refresh the dataset it was taken from.")

    def _arrange_all(self) -> None:
        self._arrange(self._choose(self._snapshot))

    def _choose(self, snapshot: Snapshot) -> list[Region]:
        factor, shuffle, seed = self._subsampled or (1.0, False, 0)
        regions = [Region(number, 0, record.samples) for number, record in enumerate(snapshot.index.chunks)]
        chosen = subsample_regions(regions, factor, shuffle=shuffle, seed=seed)
        return chosen if self._picked is None else recount(chosen, None, self._picked.slots(snapshot))

    def _arrange(self, regions: list[Region], slots: Sequence[Slots] | None = None) -> None:
        self._regions, self._slots = regions, slots
        if slots is None and self._picked is not None:
            self._slots = self._picked.slots(self._snapshot)
        self._sizes = [stop - start for _, start, stop in regions]
        self._starts = list(accumulate(self._sizes, initial=0))
        self._length = self._starts[-1]
        self._keys: KeyView | None = None
        self._identity = None

    def __copy__(self) -> StreamingDataset:
        """Share the open chunks instead of opening the dataset again."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy() | {"_ranks": find_ranks()}
        del state["_chunks"], state["_lease"], state["_schema"], state["_starts"], state["_sizes"], state["_keys"]
        state["_snapshot"] = (self._snapshot.store, self._snapshot.index.source, self._snapshot.index.file, self._snapshot.redirects)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        store, source, file, redirects = state["_snapshot"]
        self._open(Snapshot(store, Index.parse(source, file), redirects))
        self._arrange(self._regions, self._slots)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # torch asks for it in isinstance(), and may have been imported after liveset
        _register_with_torch()
        return type(self)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Number of samples, over all ranks and workers."""
        return self._length

    def __repr__(self) -> str:
        return f"StreamingDataset({self.path!r}, version={self.version}, samples={self._length})"

    # --- by position -------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @overload
    def __getitem__(self, index: str) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        """Return the sample at a position (negative ones count from the end), or the list of samples of a slice."""
        if type(index) is not int:
            if isinstance(index, slice):
                return self.read_many(range(*index.indices(self._length)))
            if isinstance(index, str | bytes):
                return self.get_by_key(index)
            index = check_position(index)
        if not (0 <= index < self._length and self._slots is None):
            return self._read_place(self._place(index))
        # The same without a call for each step: this is what samplers do all day.
        number = bisect_right(self._starts, index) - 1
        chunk, start, _ = self._regions[number]
        chunks = self._chunks
        sample = (chunks.get(chunk) or chunks[chunk]).read(index - self._starts[number] + start)  # type: ignore[union-attr, index]
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._length:
            if -self._length <= index < 0:
                index += self._length
            else:
                raise PositionOutOfRange(
                    f"no sample at position {index} of {self.path}, which has {self._length}: "
                    "it didn't find a match within the chunk intervals."
                )
        number = bisect_right(self._starts, index) - 1
        chunk, start, _ = self._regions[number]
        slot = index - self._starts[number] + start
        return chunk, slot if self._slots is None else int(self._slots[chunk][slot])

    def read_many(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at these positions, in their order; from a remote store they are fetched together."""
        return self.read_places(list(map(self._place, check_positions(positions))))

    # --- by key ------------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> KeyView:
        """The keys of the samples; ``KeyNotFound`` when the dataset has none."""
        if self._keys is None:
            store = open_keys(self._snapshot)
            if store is None:
                raise KeyNotFound(
                    f"Keyed access requires a keys/ index next to the dataset. {self.path} has none: build it with "
                    "liveset.build_keys_index(path, key_fn), or write the dataset with optimize(..., key_fn=...)."
                )
            records = self._snapshot.index.chunks
            whole = self._slots is None and self._regions == [Region(number, 0, record.samples) for number, record in enumerate(records)]
            self._keys = KeyView(store, self._snapshot, self._regions, self.path, whole=whole, slots=self._slots)
        return self._keys

    def key_at(self, position: int) -> str | int:
        """Return the key of the sample at a position."""
        position = check_position(position)  # told also where there are no keys
        return self.keys.at(position)

    def get_by_key(self, key: Any) -> Any:
        """Return the sample with a key.

        Args:
            key: text, bytes (UTF-8) or an integer, as the dataset has them.

        Raises:
            KeyNotFound: no sample of this dataset (or of this part of it) has the key; also a ``KeyError``.
            TypeError: this cannot be a key.
        """
        return self._read_place(self.keys.place(key))

    def get_by_keys(self, keys: Sequence[Any]) -> list[Any]:
        """Return the samples with these keys, in their order; ``KeyNotFound`` names all that are missing."""
        return self.read_places(self.keys.places(keys))

    def _read_place(self, place: tuple[int, int]) -> Any:
        chunks = self._chunks
        sample = (chunks.get(place[0]) or chunks[place[0]]).read(place[1])  # type: ignore[union-attr, index]
        for transform in self._transforms:
            sample = transform(sample)
        return sample

    def as_map(self) -> MapView:
        """Return a map-style view: length and positions, without iteration order, for samplers and plain data loaders."""
        return MapView(self)

    def subset(self, indices: Iterable[SupportsIndex] | slice) -> StreamingDataset:
        """Return a dataset of the samples at these positions (negative ones count from the end); order and repetitions are kept.

        Raises:
            PositionOutOfRange: there is no such position; also a ``ValueError``.
            TypeError: something is no position. A mask is none: give ``numpy.flatnonzero(mask)``.
        """
        length = self._length
        chosen = range(*indices.indices(length)) if isinstance(indices, slice) else check_positions(indices)
        if min(chosen, default=0) < 0:
            chosen = [index if index >= 0 else index + length for index in chosen]
        if chosen and not 0 <= min(chosen) <= max(chosen) < length:
            raise PositionOutOfRange(f"Subset indices must be in [-{length}, {length}), the positions of {self.path}.")
        regions: list[Region] = []
        for index in chosen:
            number = bisect_right(self._starts, index) - 1
            slot = index - self._starts[number] + self._regions[number].start
            if regions and regions[-1].chunk == self._regions[number].chunk and regions[-1].stop == slot:
                regions[-1] = Region(regions[-1].chunk, regions[-1].start, slot + 1)
            else:
                regions.append(Region(self._regions[number].chunk, slot, slot + 1))
        return self.part(regions)

    def part(self, regions: list[Region]) -> StreamingDataset:
        """Return a dataset of the samples in these regions, which count as those of this dataset do."""
        other = copy.copy(self)
        other._subsampled, other._stays, other._resumed = None, True, None  # noqa: SLF001 - another object of this class
        other._arrange(regions, self._slots)  # noqa: SLF001 - same
        return other

    def parts_by_key(self, ends: Sequence[float], seed: int) -> list[StreamingDataset]:
        """Return the parts that a hash of the keys makes, which end at these fractions of all hashes."""
        split = KeySplit(ends, seed, self._picked)
        parts = []
        for number, slots in enumerate(split.parts(self._snapshot)):
            other = copy.copy(self)
            other._picked, other._resumed = Picked(split, number), None  # noqa: SLF001 - another object of this class
            other._arrange(recount(self._regions, self._slots, slots), slots)  # noqa: SLF001 - same
            parts.append(other)
        return parts


def _register_with_torch() -> None:
    """Make every StreamingDataset an ``IterableDataset``, once torch's data package is there."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and not issubclass(StreamingDataset, data.IterableDataset):
        data.IterableDataset.register(StreamingDataset)
