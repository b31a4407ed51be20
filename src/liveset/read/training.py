"""The samples of a dataset in training order: one pass per epoch, split over ranks and workers, and states to go on from."""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, compress, count, pairwise, repeat, zip_longest
from typing import Any, Self

import numpy as np

from liveset.errors import NotFound, StateMismatch, VersionExpired, VersionNotFound
from liveset.format.batch import BatchDecoder
from liveset.format.chunk import Chunk
from liveset.keystore import open_keys
from liveset.lease import Lease
from liveset.read.agreement import Agreement
from liveset.read.chunks import OpenChunks
from liveset.read.epoch import Epoch, Rules, Run, Stretch
from liveset.read.grid import detect_grid, find_ranks, worker_info
from liveset.read.opened import Opened, open_version
from liveset.read.options import check_drop_last
from liveset.read.picked import Layout, Picked, Slots
from liveset.read.plan import Grid, Region, Share, positions, rank_length, region_order, shares
from liveset.read.resumable import Resumable
from liveset.read.state import Identity, Progress, from_state, next_stretches, to_state
from liveset.snapshot import Snapshot, entries, open_snapshot


class Training(Opened, Resumable):
    """What a dataset object is to a training loop."""

    shuffle: bool
    drop_last: bool | None
    seed: int
    batch_size: int

    _window: int
    _transforms: tuple[Callable[[Any], Any], ...]
    _regions: list[Region]
    # Which part of the samples it is by their keys, and the slots of that part in each chunk, which its regions count.
    _picked: Picked | None = None
    _slots: Sequence[Slots] | None = None
    _sizes: list[int]
    _length: int
    # Whether load_state_dict() may open the version of the state.
    _stays: bool
    _identity: Identity | None = None

    def _choose(self, snapshot: Snapshot) -> list[Region]:
        """Return the samples of a version that this dataset reads, where it may move to that version."""
        raise NotImplementedError

    def _arrange(self, regions: list[Region]) -> None:
        raise NotImplementedError

    # --- one pass ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of samples that the workers of this rank read in an epoch."""
        return self.get_len(self.num_workers, self.batch_size)

    def get_len(self, num_workers: int, batch_size: int) -> int:
        """Return the length for another number of workers and another batch size."""
        grid = detect_grid(workers=num_workers, batch=batch_size, ranks=self._ranks)
        return rank_length(self._length, Grid(grid.world, grid.rank, max(num_workers, 1), 0, batch_size), self._drops_last(grid))

    def __iter__(self) -> Samples:
        """Start a new pass over the samples of this rank and worker; ``current_epoch`` grows when it is exhausted."""
        grid = detect_grid(workers=1, batch=self.batch_size, ranks=self._ranks)
        parts = self._resume(grid, self._chunks, self.layout) if self._resumed is not None else None
        rules = self.rules(self.current_epoch, pad=False)
        return Samples(self, grid, rules, self._parts(grid, rules) if parts is None else parts, whole=parts is None)

    def _parts(self, grid: Grid, rules: Rules, skip: int = 0) -> Iterator[Iterator[Any]]:
        """Return the samples of a reader, but for the first few, part by part."""
        chunks, layout = self._chunks, self.layout  # those of now, whatever is opened before the pass ends
        regions = layout.regions
        order = region_order(len(regions), shuffle=rules.shuffle, seed=rules.seed, epoch=rules.epoch)
        mine = shares(self._sizes, order, grid, rules.drops(grid.world))
        ends = list(accumulate(share.stop - share.start for share in mine))
        first = bisect_right(ends, skip)
        skips = chain([skip - (ends[first - 1] if first else 0)], repeat(0))
        if chunks is not None:
            chunks.expect([regions[share.region].chunk for share in mine[first:]])
        return map(partial(self._read_share, chunks, layout, rules), mine[first:], skips)

    @staticmethod
    def _read_share(chunks: OpenChunks | None, layout: Layout, rules: Rules, share: Share, skip: int) -> Iterator[Any]:
        assert chunks is not None
        number, first, _ = layout.regions[share.region]
        chunk = chunks.whole(number)
        if not rules.shuffle and layout.slots is None:
            return chunk.iterate(first + share.start + skip, first + share.stop)
        order = np.arange(share.start, share.stop)
        if rules.shuffle:
            order = positions(share, len(layout.regions), seed=rules.seed, epoch=rules.epoch, window=rules.window)
        return map(chunk.read, layout.place(share.region, order[skip:])[1].tolist())

    def _resume(self, grid: Grid, chunks: OpenChunks | None, layout: Layout) -> Iterator[Iterator[Any]] | None:
        """Take the state that was loaded, and return the rest of its epoch; None if the next epoch begins."""
        progress = self._go_on(grid.world, grid.rank)
        if progress is None:
            return None
        stretches = next_stretches(progress, grid.world, 1, progress.stretches[-1].batch)
        epoch = Epoch(self._sizes, progress.rules, stretches)
        if chunks is not None and self.remote:
            chunks.expect([layout.regions[region].chunk for region in merged(epoch.streams(grid.rank))])
        batches = epoch.batches(grid.rank)
        return (self._read_run(chunks, layout, run) for batch in batches for run in batch)

    @staticmethod
    def _read_run(chunks: OpenChunks | None, layout: Layout, run: Run) -> Iterator[Any]:
        assert chunks is not None
        number, slots = layout.place(*run)
        return map(chunks.whole(number).read, slots.tolist())

    def _drops_last(self, grid: Grid) -> bool:
        return grid.world > 1 if self.drop_last is None else self.drop_last

    # --- for loaders -------------------------------------------------------------------------------------------------

    @property
    def transforms(self) -> tuple[Callable[[Any], Any], ...]:
        """What is applied to each sample in turn."""
        return self._transforms

    def as_of_now(self) -> Self:
        """Return a copy that stays at the version that is read now; it shares the open chunks."""
        return copy.copy(self)

    def as_forced(self, forced: bool) -> Self:
        """Return a copy that, if this is so, only warns where a state differs in a setting."""
        other = copy.copy(self)
        other._forced = self._forced or forced  # noqa: SLF001 - another object of this class
        return other

    def become(self, other: Self) -> None:
        """Read what a copy of this dataset reads, which may have moved to another version."""
        self.__dict__.update(other.__dict__ | {"_forced": self._forced})

    def rules(self, epoch: int, *, pad: bool) -> Rules:
        """Return what the order of an epoch depends on, besides the readers."""
        return Rules(self.seed, epoch, self.shuffle, self._window, self.drop_last, pad)

    def epoch(self, rules: Rules, stretches: Sequence[Stretch]) -> Epoch:
        """Return an epoch as batches of runs."""
        return Epoch(self._sizes, rules, stretches)

    def places(self, runs: Iterable[Run]) -> list[Run]:
        """Return runs of samples with numbers of chunks and slots, instead of regions and offsets."""
        layout = self.layout
        return [layout.place(number, offsets) for number, offsets in runs]

    @property
    def layout(self) -> Layout:
        """Where the samples are, region by region."""
        return Layout(self._regions, self._slots)

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of the regions."""
        return self._sizes

    @property
    def chosen_fields(self) -> tuple[str, ...] | None:
        """Names of the fields that are decoded; None for all."""
        return self._settings.fields

    def decodes_like(self, other: Training) -> bool:
        """Whether the samples of both can be decoded together."""
        foreign = [dataset._snapshot.index.has_foreign_chunks for dataset in (self, other)]  # noqa: SLF001 - another object of this class
        return self._schema == other._schema and self._settings == other._settings and foreign[0] == foreign[1]

    @property
    def members(self) -> Sequence[Training]:
        """The datasets that it is made of: itself."""
        return [self]

    @property
    def opened(self) -> object:
        """The open chunks of the version that is read, as an identity."""
        return self._chunks

    def chunk(self, number: int, *, whole: bool = True) -> Chunk:
        """Return the open chunk with a number, of which much is going to be read, or (not ``whole``) single samples."""
        assert self._chunks is not None
        return self._chunks.whole(number) if whole else self._chunks[number]

    def following(self, epoch: Epoch, rank: int) -> list[dict[int, int]]:
        """Return for each worker and chunk which one it reads after that, where chunks are worth fetching ahead.

        A chunk that is cut between two workers is the last of one and the first of the other: the one must not go on as the other does.
        """
        if not self._snapshot.store.remote:
            return []
        streams = ([self._regions[region].chunk for region in stream] for stream in epoch.streams(rank))
        return [dict(pairwise(stream)) for stream in streams]

    def windows(self, epoch: Epoch, rank: int, width: int) -> Iterator[tuple[int, ...]]:
        """Yield what a mixture tells that begins its datasets again; ``following`` tells of all others."""
        return iter(())

    def in_parts(self, numbers: Sequence[int]) -> bool:
        """Whether single samples of these chunks are fetched from afar better than all of each."""
        chunks = self._chunks
        return self._snapshot.store.remote and not (isinstance(chunks, OpenChunks) and all(map(chunks.holds, numbers)))

    def read_places(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples in these slots of chunks, in their order."""
        samples = self._chunks.read_many(places) if self._chunks is not None else []
        for transform in self._transforms:
            samples = list(map(transform, samples))
        return samples

    @property
    def remote(self) -> bool:
        """Whether chunks are fetched from afar."""
        return self._snapshot.store.remote

    @staticmethod
    def ends(places: Sequence[Run]) -> list[int]:
        """Return the chunk that these places end in."""
        return [places[-1][0]]

    def expect(self, numbers: Sequence[int]) -> None:
        """Tell which chunks will be read next."""
        if self._chunks is not None:
            self._chunks.expect(numbers)

    def batch_decoder(self, collate: Callable[[Sequence[Any]], Any]) -> BatchDecoder:
        """Return what decodes whole batches of the samples, without transforms."""
        assert self._schema is not None
        settings = self._settings
        return BatchDecoder(
            self._schema,
            fields=settings.fields,
            allow_pickle=settings.allow_pickle,
            serializers=settings.serializers,
            strict=not self._snapshot.index.has_foreign_chunks,
            collate=collate,
        )

    @property
    def mean_size(self) -> float:
        """Mean stored size of all samples of the version."""
        return self._snapshot.index.size / max(self._snapshot.index.samples, 1)

    def sample_size(self, number: int) -> float:
        """Return the mean stored size of the samples of a chunk."""
        record = self._snapshot.index.chunks[number]
        return record.size / max(record.samples, 1)

    def describe_place(self, number: int, slot: int) -> tuple[int, str | int | None, str]:
        """Return position in the version, key and chunk file of a place; the key is None where there is none."""
        position = self._snapshot.starts[number] + slot
        keys = open_keys(self._snapshot)
        key = keys.key_at(number, slot) if keys is not None else None
        return position, key, self._snapshot.index.chunks[number].filename

    # --- states ------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """The version that is read, and which of its samples."""
        if self._identity is None:
            self._identity = Identity.of(self._snapshot, self._regions, self._picked)
        return self._identity

    def state_dict(
        self, num_samples_yielded: int | None = None, num_workers: int | None = None, batch_size: int | None = None
    ) -> dict[str, Any]:
        """Return the state of a pass that has had so many samples, to be loaded by ``load_state_dict``.

        A ``StreamingDataLoader`` has a ``state_dict`` that counts for itself, and so has an iterator of the dataset, which torchdata's
        ``StatefulDataLoader`` asks for it; this one is for loops over the dataset that count for themselves.

        Args:
            num_samples_yielded: samples that this rank has had in the current epoch: whole batches, or all. None gives an empty state,
                with which nothing changes.
            num_workers: loader workers of the rank.
            batch_size: samples per batch.

        Raises:
            RuntimeError: a loader worker asks.
            ValueError: the number of samples is too large, or not one of whole batches.

        Example:
            >>> state = ds.state_dict(num_samples_yielded=7)
            >>> ds.load_state_dict(state)
            >>> len(list(ds))
            113
        """
        if num_samples_yielded is None:
            return {}
        if worker_info() is not None:
            raise RuntimeError("The method `state_dict` should only be called in the main process.")
        workers = max(self.num_workers if num_workers is None else num_workers, 1)
        batch = self.batch_size if batch_size is None else batch_size
        world, rank = find_ranks()
        rules, stretches = self.rules(self.current_epoch, pad=False), (Stretch(world, workers, batch, 0),)
        have = Epoch(self._sizes, rules, stretches).samples(rank, -(-self._length // batch))
        if num_samples_yielded != have and (num_samples_yielded % batch or not 0 <= num_samples_yielded <= have):
            raise ValueError(f"num_samples_yielded={num_samples_yielded} is no number of batches of {batch}, of {have:,} samples in all.")
        stretches = (stretches[0]._replace(batches=-(-num_samples_yielded // batch)),)
        return self.state_of(Progress(rules, stretches, rank, num_samples_yielded, finished=False), workers)

    def state_of(self, progress: Progress, workers: int) -> dict[str, Any]:
        """Return the state of a loop that is so far."""
        return to_state(progress, self.identity, workers)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was taken: with the same samples, in the same order, of the same version.

        The dataset moves to the version of the state. Where that version is gone, or where ``version=`` chose another one, it goes on
        only if samples have merely been replaced since, each by a new value in its place. The number of ranks and the batch size may
        differ: then the samples that are left are dealt out again, each once.

        Args:
            state_dict: what ``state_dict`` returned, on this rank.

        Raises:
            StateMismatch: the state is of another dataset, of other settings (with ``force_override_state_dict=True`` a warning, and
                the epoch of the state ends as it began), or samples were added, deleted or moved; also a ``ValueError``.
        """
        if state_dict:
            self._resumed = self.progress_of(state_dict)

    def progress_of(self, state: Mapping[str, Any]) -> Progress:
        """Check a state, move to its version, and return how far it is; nothing has changed when this raises ``StateMismatch``."""
        progress, saved = from_state(state)
        self._check_settings(state)
        snapshot, lease = self._version_of(saved)
        here = snapshot is None
        regions = self._regions if snapshot is None else self._choose(snapshot)
        identity = Identity.of(snapshot or self._snapshot, regions, self._picked)
        if identity.layout != saved.layout:
            raise StateMismatch(self._moved(saved, identity))
        if saved.version_id is None and identity.path != saved.path:
            self._differs("input_dir path", identity.path, saved.path)
        if here and (identity.version, identity.version_id) != (saved.version, saved.version_id):
            warnings.warn(
                f"the state is of version {saved.version} of {identity.path}, and goes on with version {identity.version}: samples that "
                "were replaced since have their new values.",
                stacklevel=3,
            )
        if progress.order is None:
            epoch = Epoch([stop - start for _, start, stop in regions], progress.rules, progress.stretches)
            have = max(map(epoch.count, range(progress.stretches[-1].world)))  # a rank that has fewer may go on from the state of another
            if progress.stretches[-1].batches > have:
                raise StateMismatch(
                    f"the state has had {progress.stretches[-1].batches:,} batches, which is greater than the dataset length of {have:,}."
                )
        if snapshot is not None:
            self._open(snapshot, lease)
            self._arrange(regions)
        return progress

    def agree(self, agreement: Agreement) -> None:
        """Move to the version that rank 0 reads in this pass of its loader.

        Raises:
            StateMismatch: this dataset was opened at another one, or is a part of one; or rank 0 seems to read another loop.
        """
        index = self._snapshot.index
        version, version_id = agreement.tell(self._snapshot.store.url, index.version, index.id)
        if (version, version_id) == (index.version, index.id):
            return
        if self._stays:
            raise StateMismatch(
                f"rank 0 reads version {version} of {self._snapshot.store.url}, and this rank version {index.version}, which cannot move, "
                "since it is a part or was opened so: open the same version on all ranks with version=."
            )
        snapshot, lease = open_version(self._snapshot.store, version, held=self._settings.pin)
        if snapshot.index.id != version_id:
            raise StateMismatch(f"rank 0 reads a dataset at {self._snapshot.store.url} that this rank does not find there.")
        self._open(snapshot, lease)
        self._arrange(self._choose(snapshot))

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        settings = {"shuffle": self.shuffle, "seed": self.seed, "item_loader": None}
        for name, now in (settings | {"item_shuffle_window": self._window, "drop_last": self.drop_last}).items():
            if state.get(name) != now:
                self._differs(name, now, state.get(name))

    def _version_of(self, saved: Identity) -> tuple[Snapshot | None, Lease | None]:
        """Open the version of a state; None where the one that is open is read on."""
        current = self._snapshot
        if self._stays or (current.version, current.index.id) == (saved.version, saved.version_id):
            return None, None
        try:
            snapshot, lease = open_version(current.store, saved.version, held=self._settings.pin)
        except VersionExpired:
            return None, None
        except VersionNotFound as error:
            raise StateMismatch(self._foreign(saved)) from error
        if snapshot.index.id != saved.version_id:
            if lease is not None:
                lease.release()
            raise StateMismatch(self._foreign(saved))
        return snapshot, lease

    def _foreign(self, saved: Identity) -> str:
        return (
            f"the state is of another dataset: of version {saved.version} of {saved.path} ({saved.samples:,} samples), a commit that "
            f"{self.path} never had. Open that dataset, or start afresh without load_state_dict()."
        )

    def _moved(self, saved: Identity, now: Identity) -> str:
        """Return what to say about a state whose places hold other samples now."""
        if saved.files == now.files:
            what = "another part of it is read (subset, subsample, or their seed)"
        else:
            what = f"{saved.samples:,} samples in {saved.chunks:,} chunks then, {now.samples:,} in {now.chunks:,} now"
            since = self._since(saved, now)
            what = f"{since}; {what}" if since else what
        expired = self._expired(saved.version)
        way = "That version is gone." if expired else f"Open it with version={saved.version} to go on exactly."
        return (
            f"the state is of version {saved.version} of {saved.path}, but version {now.version} of {now.path} is read, and it cannot go "
            f"on there: {what}. {way} To start afresh, leave load_state_dict() out, or call reset_state_dict()."
        )

    def _since(self, saved: Identity, now: Identity) -> str:
        if saved.version_id is None or now.version <= saved.version:
            return ""
        try:
            commits = list(entries(self._snapshot.store, self._snapshot.index, above=saved.version))
        except NotFound:
            return ""
        return "since then: " + ", ".join(f"{entry.op} (version {entry.version})" for entry in reversed(commits[-5:]))

    def _expired(self, version: int) -> bool:
        try:
            open_snapshot(self._snapshot.store, version)
        except NotFound:
            return True
        return False

    # --- settings ----------------------------------------------------------------------------------------------------

    def set_shuffle(self, shuffle: bool) -> None:
        """Turn shuffling on or off for the next pass."""
        self.shuffle = shuffle

    def set_drop_last(self, drop_last: bool) -> None:
        """Choose whether all ranks get the same number of samples."""
        self.drop_last = check_drop_last(drop_last)

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size that the split over workers is made for."""
        self.batch_size = batch_size


def merged(streams: Sequence[Sequence[int]]) -> list[int]:
    """Return what several streams have in the order of one reader who takes from each in turn."""
    return [value for tier in zip_longest(*streams) for value in tier if value is not None]


class Samples(compress):  # type: ignore[type-arg]
    """One pass over the samples of a dataset in one process; a ``compress`` by numbers from 1, since nothing else counts as quickly.

    Its state is for the same reader alone: the same rank of as many, and the same loader worker of as many.
    """

    _dataset: Training
    _grid: Grid
    _source: list[Iterator[Any]]
    _counter: count[int]
    _rules: Rules
    _began: int | None

    def __new__(cls, dataset: Training, grid: Grid, rules: Rules, parts: Iterator[Iterator[Any]], *, whole: bool) -> Self:
        """Begin a pass: a whole one, or the rest of one."""
        source, counter = [parts], count(1)
        samples: Iterator[Any] = chain.from_iterable(_from(source, dataset))
        for transform in dataset.transforms:
            samples = map(transform, samples)
        self = super().__new__(cls, samples, counter)
        self._dataset, self._grid, self._rules, self._source, self._counter = dataset, grid, rules, source, counter
        self._began = 0 if whole else None
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        """Everything is done before."""

    def state_dict(self) -> dict[str, Any]:
        """Return how far the pass is.

        Raises:
            RuntimeError: the dataset itself went on from a state, so that the samples before it cannot be counted here.
        """
        if self._began is None:
            raise RuntimeError(
                "this pass is the rest of an epoch whose state was loaded into the dataset: ask for dataset.state_dict(samples)."
            )
        dataset, grid = self._dataset, self._grid
        stretch = Stretch(grid.world, grid.workers, grid.batch, 0)
        state = dataset.state_of(Progress(self._rules, (stretch,), grid.rank, 0, finished=False), grid.workers)
        return {"dataset": state, "worker": grid.worker, "samples": self._began + int(repr(self._counter)[6:-1]) - 1}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, before the first sample of this pass.

        Raises:
            StateMismatch: it is the state of another reader, of another dataset, or of what is not there any more.
        """
        dataset, grid = self._dataset, self._grid
        try:
            state, worker, samples = state_dict["dataset"], state_dict["worker"], int(state_dict["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch("this is no state of an iterator of a dataset.") from error
        progress = dataset.progress_of(state)
        (then,) = progress.stretches
        saved, here = (then.world, progress.rank, then.workers, worker), (grid.world, grid.rank, grid.workers, grid.worker)
        if saved != here or then.batch != grid.batch:
            raise StateMismatch(
                f"the state is of another reader (ranks, rank, workers, worker: {saved} then, {here} now): an iterator goes on only where "
                "they are the same. A liveset.StreamingDataLoader can go on with any others."
            )
        dataset.set_epoch(progress.rules.epoch)
        self._rules, self._began = progress.rules, samples
        self._source[:] = [dataset._parts(grid, progress.rules, samples)]  # noqa: SLF001 - the iterator of this class


def _from(source: list[Iterator[Any]], dataset: Training) -> Iterator[Iterator[Any]]:
    """Yield what the source holds when it is first asked, and count the epoch at the end."""
    yield from source[0]
    dataset.set_epoch(dataset.current_epoch + 1)
