"""What datasets made of several others share: versions, states, and reading through the loader or alone."""

from __future__ import annotations

import copy
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Self

from liveset.errors import StateMismatch
from liveset.read.agreement import Agreement
from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Rules, Run, Stretch
from liveset.read.grid import detect_grid, find_ranks, worker_info
from liveset.read.mixing import MixedEpoch, MixRules
from liveset.read.options import check_seed
from liveset.read.plan import Grid
from liveset.read.resumable import Resumable
from liveset.read.state import Progress, next_stretches, to_state
from liveset.read.training import Training, merged

# How many chunks of each dataset a reader is told of, the one that it reads included.
AHEAD = 9
# Chunks of all datasets together: the number of the dataset, before so many bits of the number of the chunk in it.
CHUNKS = 32
CHUNK = (1 << CHUNKS) - 1


class Mixture(Resumable, ABC):
    """Several datasets as one, to a training loop.

    Args:
        datasets: what it is made of.
        seed: of what is chosen at random.
        force_override_state_dict: only warn where a state that is loaded differs in a setting.
    """

    batch_size: int | Sequence[int] = 1

    _kind: str
    _seen: tuple[Any, ...] = ()
    _warned = False

    def __init__(self, datasets: Sequence[StreamingDataset], seed: int, *, force_override_state_dict: bool) -> None:
        for dataset in datasets:
            if not isinstance(dataset, StreamingDataset):
                raise RuntimeError(f"The provided datasets should be instances of the StreamingDataset. Found {type(dataset).__name__}.")
        if not datasets:
            raise ValueError("there are no datasets: give a list of at least one StreamingDataset.")
        self.datasets = list(datasets)
        self.seed, self._forced = check_seed(seed), force_override_state_dict

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ranks": find_ranks(), "_seen": ()}

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # torch asks for it in isinstance(), and may have been imported after liveset
        data = sys.modules.get("torch.utils.data")
        if data is not None and not issubclass(Mixture, data.IterableDataset):
            data.IterableDataset.register(Mixture)
        return type(self)

    @property
    def samples(self) -> int:
        """Number of samples of all datasets together."""
        return sum(dataset.samples for dataset in self.datasets)

    # --- one pass ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def rules(self, epoch: int, *, pad: bool) -> MixRules:
        """Return what the order of an epoch depends on, besides the readers."""

    def epoch(self, rules: Rules, stretches: Sequence[Stretch]) -> MixedEpoch:
        """Return an epoch as batches of runs."""
        assert isinstance(rules, MixRules)
        self._warn_of_small_ones(rules, stretches[0])
        return MixedEpoch([dataset.sizes for dataset in self.datasets], rules, stretches)

    def _warn_of_small_ones(self, rules: MixRules, grid: Stretch) -> None:
        if self._warned or rules.zipped or not rules.drops(grid.world):
            return
        widths = rules.batches or [grid.batch] * len(self.datasets)
        for number, (dataset, width) in enumerate(zip(self.datasets, widths, strict=True)):
            if 0 < dataset.samples < width * grid.world:
                self._warned = True
                warnings.warn(
                    f"dataset {number}, {dataset.path}, is left out: its {dataset.samples:,} samples are not one batch of {width} for each "
                    f"of {grid.world} ranks. Use a smaller batch size, pad=True (which repeats samples), or drop_last=False.",
                    stacklevel=5,
                )

    @property
    def _width(self) -> int:
        return self.batch_size if isinstance(self.batch_size, int) else max(self.batch_size)

    def __len__(self) -> int:
        """Number of samples that the workers of this rank read in an epoch."""
        return self.get_len(self.num_workers, self._width)

    def get_len(self, num_workers: int, batch_size: int) -> int:
        """Return the length for another number of workers and another batch size."""
        grid = detect_grid(workers=num_workers, batch=batch_size, ranks=self._ranks)
        rules = self.rules(self.current_epoch, pad=False)
        epoch = self.epoch(rules, (Stretch(grid.world, max(num_workers, 1), batch_size, 0),))
        return epoch.samples(grid.rank, epoch.count(grid.rank))

    def __iter__(self) -> MixedSamples:
        """Start a new pass over the samples of this rank and worker; ``current_epoch`` grows when it is exhausted."""
        grid = detect_grid(workers=1, batch=self._width, ranks=self._ranks)
        rest = self._resume(grid.world, grid.rank) if self._resumed is not None else None
        return MixedSamples(self, grid, self.rules(self.current_epoch, pad=False), rest)

    def _resume(self, world: int, rank: int) -> MixedEpoch | None:
        """Take the state that was loaded, and return the rest of its epoch; None if the next epoch begins."""
        progress = self._go_on(world, rank)
        if progress is None:
            return None
        return self.epoch(progress.rules, next_stretches(progress, world, 1, progress.stretches[-1].batch))

    # --- for loaders -------------------------------------------------------------------------------------------------

    @property
    def transforms(self) -> tuple[Callable[[Any], Any], ...]:
        """What is applied to each sample besides what its chunk does."""
        return ()

    def as_of_now(self) -> Self:
        """Return a copy that stays at the versions that are read now; it shares the open chunks."""
        other = copy.copy(self)
        other.datasets = [dataset.as_of_now() for dataset in self.datasets]
        return other

    @property
    def members(self) -> Sequence[Training]:
        """The datasets that it is made of."""
        return self.datasets

    @property
    def opened(self) -> object:
        """The open chunks of the versions that are read, as an identity."""
        now = tuple(dataset.opened for dataset in self.datasets)
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            self._seen = now
        return self._seen

    def following(self, epoch: MixedEpoch, rank: int) -> list[dict[int, int]]:
        """Return for each worker and chunk which one it reads after that of the same dataset, where chunks are worth fetching ahead."""
        return [{a: b for a, b in pairwise(chain) if a >> CHUNKS == b >> CHUNKS} for chain in self.chains(epoch, rank)]

    def chains(self, epoch: MixedEpoch, rank: int) -> list[list[int]]:
        """Return the chunks that each worker of a rank reads, dataset by dataset, where they are worth fetching ahead."""
        if not any(dataset.remote for dataset in self.datasets):
            return []
        chunks = self._chunks_of_regions()
        return [[chunks[region] for region in stream] for stream in epoch.streams(rank)]

    def again(self, windows: Iterator[list[int]]) -> Iterator[tuple[int, ...]]:
        """Yield the chunks of windows, where they are worth fetching ahead."""
        if not any(dataset.remote for dataset in self.datasets):
            return iter(())
        chunks = self._chunks_of_regions()
        return (tuple(dict.fromkeys(chunks[region] for region in window)) for window in windows)

    def windows(self, epoch: MixedEpoch, rank: int, width: int) -> Iterator[tuple[int, ...]]:
        """Yield for each batch the chunks that its worker reads next, where datasets are begun again and chunks are fetched ahead."""
        return self.again(epoch.windows(rank, width))

    def _chunks_of_regions(self) -> list[int]:
        return [number << CHUNKS | region.chunk for number, each in enumerate(self.datasets) for region in each.layout.regions]

    def expect(self, numbers: Sequence[int]) -> None:
        """Tell which chunks will be read next: those of each dataset in their order."""
        for number, each in groupby(numbers, key=lambda chunk: chunk >> CHUNKS):
            self.datasets[number].expect([chunk & CHUNK for chunk in each])

    @abstractmethod
    def ends(self, places: Sequence[Run]) -> list[int]:
        """Return the last chunk of each dataset that these places lead to."""

    def agree(self, agreement: Agreement) -> None:
        """Move all datasets to the versions that rank 0 reads in this pass of its loader."""
        for dataset in self.datasets:
            dataset.agree(agreement)

    def batch_decoder(self, collate: Callable[[Sequence[Any]], Any]) -> Any:
        """Return what decodes whole batches of the samples."""
        return _Unsupported()

    @abstractmethod
    def places(self, runs: Sequence[Run]) -> list[Run]:
        """Return runs as numbers of chunks, and what those are asked for."""

    @abstractmethod
    def chunk(self, number: int) -> Any:
        """Return what reads the samples of a place."""

    @abstractmethod
    def sample_size(self, number: int) -> float:
        """Return the mean stored size of the samples of a place."""

    @abstractmethod
    def describe_place(self, number: int, slot: Any) -> tuple[int, str | int | None, str]:
        """Return position, key and chunk file of a sample."""

    # --- states ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _settings(self, rules: MixRules) -> dict[str, Any]:
        """Return what rules have besides those of the datasets, as plain numbers and text."""

    @abstractmethod
    def _rules_of(self, settings: Mapping[str, Any], epoch: int, members: Sequence[Rules]) -> MixRules:
        """Return the rules that have such settings."""

    def state_dict(
        self, num_samples_yielded: int | None = None, num_workers: int | None = None, batch_size: int | None = None
    ) -> dict[str, Any]:
        """Return the state of a pass that has had so many samples, to be loaded by ``load_state_dict``.

        A ``StreamingDataLoader`` has a ``state_dict`` that counts for itself; this one is for loops over the dataset.

        Args:
            num_samples_yielded: samples that this rank has had in the current epoch: whole batches, or all. None gives an empty state,
                with which nothing changes.
            num_workers: loader workers of the rank.
            batch_size: samples per batch.

        Raises:
            RuntimeError: a loader worker asks.
            ValueError: the number of samples is too large, or not one of whole batches.
        """
        if num_samples_yielded is None:
            return {}
        if worker_info() is not None:
            raise RuntimeError("The method `state_dict` should only be called in the main process.")
        workers = max(self.num_workers if num_workers is None else num_workers, 1)
        batch = self._width if batch_size is None else batch_size
        world, rank = find_ranks()
        rules, stretch = self.rules(self.current_epoch, pad=False), Stretch(world, workers, batch, 0)
        epoch = self.epoch(rules, (stretch,))
        batches = -(-num_samples_yielded // batch)
        while (have := epoch.samples(rank, batches)) < num_samples_yielded and epoch.samples(rank, batches + 1) > have:
            batches += 1
        if have != num_samples_yielded:
            raise ValueError(f"num_samples_yielded={num_samples_yielded} is no number of batches of {batch} in this epoch.")
        return self.state_of(Progress(rules, (stretch._replace(batches=batches),), rank, have, finished=False), workers)

    def state_of(self, progress: Progress, workers: int) -> dict[str, Any]:
        """Return the state of a loop that is so far: one of each dataset, by its number, and what they have in common."""
        mix = progress.rules
        assert isinstance(mix, MixRules)
        now = progress.stretches[-1]._replace(batches=0)
        state: dict[str, Any] = {}
        for number, (dataset, rules) in enumerate(zip(self.datasets, mix.members, strict=True)):
            state[str(number)] = to_state(Progress(rules, (now,), progress.rank, 0, finished=False), dataset.identity, workers)
        common = {
            "kind": self._kind,
            "current_epoch": progress.rules.epoch,
            "num_samples_yielded": progress.samples,
            "rank": progress.rank,
            "stretches": [list(stretch) for stretch in progress.stretches],
            "finished": progress.finished,
        }
        return state | {"mixture": common | self._settings(mix)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was taken: with the same samples, in the same order, of the same versions.

        Args:
            state_dict: what ``state_dict`` returned, on this rank.

        Raises:
            StateMismatch: the state is of other datasets, or of other settings (with ``force_override_state_dict=True`` a warning, and
                the epoch of the state ends as it began); also a ``ValueError``.
        """
        if state_dict:
            self._resumed = self.progress_of(state_dict)

    def progress_of(self, state: Mapping[str, Any]) -> Progress:
        """Check a state, move to its versions, and return how far it is; nothing has changed when this raises ``StateMismatch``."""
        common = state.get("mixture")
        if not isinstance(common, Mapping) or common.get("kind") != self._kind:
            raise StateMismatch(
                f"this is no state of a {type(self).__name__}: give load_state_dict() what state_dict() returned. States of other programs "
                "cannot be read."
            )
        numbers = [str(number) for number in range(len(self.datasets))]
        if len(state) != len(numbers) + 1 or any(number not in state for number in numbers):
            raise StateMismatch(
                f"the state is of {len(state) - 1} datasets, and here are {len(numbers)}: give the same ones, in their order."
            )
        self._check_settings(common)
        moved = [dataset.as_forced(self._forced) for dataset in self.datasets]
        members = []
        for number, dataset in zip(numbers, moved, strict=True):
            try:
                members.append(dataset.progress_of(state[number]).rules)
            except StateMismatch as error:
                raise StateMismatch(f"dataset {number}: {error}") from error
        try:
            rules = self._rules_of(common, int(common["current_epoch"]), members)
            stretches = tuple(Stretch(*map(int, stretch)) for stretch in common["stretches"])
            progress = Progress(rules, stretches, int(common["rank"]), int(common["num_samples_yielded"]), bool(common["finished"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"the state is damaged ({type(error).__name__}: {error}).") from error
        for dataset, other in zip(self.datasets, moved, strict=True):
            dataset.become(other)
        return progress

    def _check_settings(self, common: Mapping[str, Any]) -> None:
        for name, now in self._settings(self.rules(self.current_epoch, pad=False)).items():
            if common.get(name) != now:
                self._differs(name, now, common.get(name))

    # --- settings ----------------------------------------------------------------------------------------------------

    def set_shuffle(self, shuffle: bool) -> None:
        """Turn shuffling on or off, in all datasets, for the next pass."""
        for dataset in self.datasets:
            dataset.set_shuffle(shuffle)

    def set_drop_last(self, drop_last: bool) -> None:
        """Choose whether all ranks get the same number of samples."""
        for dataset in self.datasets:
            dataset.set_drop_last(drop_last)

    def set_batch_size(self, batch_size: int | Sequence[int]) -> None:
        """Set the batch size that the split over workers is made for."""
        self.batch_size = batch_size

    def refresh(self) -> bool:
        """Move all datasets to their newest versions, and return whether any of them is another one than before."""
        moved = [dataset.refresh() for dataset in self.datasets]
        return any(moved)


class MixedSamples(Iterator[Any]):
    """One pass over the samples of several datasets in one process, with a state for the same reader alone."""

    def __init__(self, mixture: Mixture, grid: Grid, rules: MixRules, rest: MixedEpoch | None) -> None:
        self._mixture, self._grid, self._rules, self._rest = mixture, grid, rules, rest
        self._count: int | None = 0 if rest is None else None
        self._samples = self._read()

    def __next__(self) -> Any:
        sample = next(self._samples)
        if self._count is not None:
            self._count += 1
        return sample

    def _stretch(self) -> Stretch:
        return Stretch(self._grid.world, self._grid.workers, self._grid.batch, 0)

    def _read(self, skip: int = 0) -> Iterator[Any]:
        mixture, grid, rest = self._mixture, self._grid, self._rest
        now = mixture.as_of_now()
        if rest is None:
            epoch, worker = mixture.epoch(self._rules, (self._stretch(),)), grid.rank * grid.workers + grid.worker
            batches, windows = epoch.worker(worker), epoch.windows_of(worker, AHEAD)
            chains = now.chains(epoch, grid.rank)[grid.worker : grid.worker + 1]
        else:
            batches, windows, chains = rest.batches(grid.rank), rest.windows(grid.rank, AHEAD), now.chains(rest, grid.rank)
        now.expect(sorted(merged(chains), key=lambda chunk: chunk >> CHUNKS))
        again = now.again(windows)
        told: tuple[int, ...] = ()
        for runs in batches:
            if (coming := next(again, ())) != told:
                now.expect(coming)
                told = coming
            for number, slots in now.places(runs):
                if skip >= len(slots):
                    skip -= len(slots)
                    continue
                yield from map(now.chunk(number).read, slots[skip:].tolist())
                skip = 0
        mixture.set_epoch(mixture.current_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the pass is.

        Raises:
            RuntimeError: the dataset itself went on from a state, so that the samples before it cannot be counted here.
        """
        if self._count is None:
            raise RuntimeError(
                "this pass is the rest of an epoch whose state was loaded into the dataset: ask for dataset.state_dict(samples)."
            )
        progress = Progress(self._rules, (self._stretch(),), self._grid.rank, 0, finished=False)
        state = self._mixture.state_of(progress, self._grid.workers)
        return {"dataset": state, "worker": self._grid.worker, "samples": self._count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, before the first sample of this pass.

        Raises:
            StateMismatch: it is the state of another reader, of other datasets, or of what is not there any more.
        """
        try:
            state, worker, samples = state_dict["dataset"], state_dict["worker"], int(state_dict["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch("this is no state of an iterator of a dataset.") from error
        progress = self._mixture.progress_of(state)
        saved, here = (*progress.stretches, progress.rank, worker), (self._stretch(), self._grid.rank, self._grid.worker)
        if saved != here:
            raise StateMismatch(
                f"the state is of another reader ({saved} then, {here} now): an iterator goes on only where they are the same. A "
                "liveset.StreamingDataLoader can go on with other ones."
            )
        assert isinstance(progress.rules, MixRules)
        self._mixture.set_epoch(progress.rules.epoch)
        self._rules, self._rest, self._count = progress.rules, None, samples
        self._samples = self._read(samples)


class _Unsupported:
    """In place of a decoder of batches: samples are read one by one."""

    supported = False


Training.register(Mixture)  # type: ignore[type-abstract]  # what loaders take
