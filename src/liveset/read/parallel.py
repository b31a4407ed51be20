"""ParallelStreamingDataset: one sample of each of several datasets at a time."""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash

from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Rules, Run
from liveset.read.mixing import ROW, MixRules
from liveset.read.mixture import CHUNKS, Mixture
from liveset.read.options import transformed
from liveset.read.plan import Offsets


class ParallelStreamingDataset(Mixture):
    """Tuples of samples, one of each dataset, each dataset in its own order.

    Args:
        datasets: what is read together; one may take part several times.
        length: tuples per rank in an epoch, for which shorter datasets begin again, in the order of their next epoch; ``float("inf")``
            never ends. By default as many as the shortest dataset has samples.
        force_override_state_dict: only warn where a state that is loaded differs in a setting.
        transform: called with each tuple, its result is the sample. If it takes two arguments, the second is a mapping with seeded random
            generators, ``random`` (of Python), ``numpy`` and ``torch``. They are new for each tuple, a function of ``seed``, epoch,
            worker and the number of the tuple there, so that a run that goes on from a state has the same random numbers as one that never
            stopped.
        seed: of these generators.
        resume: with ``length``, an epoch begins where the one before ended or was left, in each dataset. False begins each with the first
            samples again.
        reset_rngs: the generators are the same in each epoch.

    Raises:
        RuntimeError: something in the list is no ``StreamingDataset``.
        ValueError: an argument is wrong.

    Example:
        >>> images, texts = ds.subset(range(100)), ds.subset(range(100, 120))
        >>> pairs = liveset.ParallelStreamingDataset([images, texts], length=100, transform=lambda pair: (pair[0]["id"], pair[1]["id"]))
        >>> list(pairs)[20]
        ('play-20', 'play-100')
    """

    _kind = "parallel"

    def __init__(
        self,
        datasets: Sequence[StreamingDataset],
        length: float | None = None,
        force_override_state_dict: bool = False,
        transform: Callable[..., Any] | None = None,
        seed: int = 42,
        resume: bool = True,
        reset_rngs: bool = False,
    ) -> None:
        super().__init__(datasets, seed, force_override_state_dict=force_override_state_dict)
        if length is not None and length != float("inf") and (type(length) is not int or length < 1):
            raise ValueError(f"`length` must be `None`, an integer, or `float('inf')`, got {length!r}. An integer must be at least 1.")
        self.length = length
        self.transform, self._takes_rngs = transform, transform is not None and _arguments(transform) == 2
        self.resume, self.reset_rngs = resume, reset_rngs
        self.goes_on = resume and length is not None
        self._finders: dict[int, tuple[Any, ...]] = {}

    def __repr__(self) -> str:
        return f"ParallelStreamingDataset({self.datasets!r}, length={self.length})"

    def rules(self, epoch: int, *, pad: bool) -> MixRules:
        empty = [dataset for dataset in self.datasets if not dataset.samples]
        if self.length is not None and empty:
            raise ValueError(f"{empty[0].path} has no samples, and cannot be begun again until there are {self.length}.")
        members = [dataset.rules(epoch, pad=pad) for dataset in self.datasets]
        length = self.length if self.length is None else -1 if self.length == float("inf") else int(self.length)
        return MixRules.of(self.seed, epoch, members, zipped=True, length=length, go_on=self.resume)

    def places(self, runs: Sequence[Run]) -> list[Run]:
        found: list[Run] = []
        for _, rows in runs:
            columns = [rows[:, :ROW]]
            base = 0
            for column, dataset in enumerate(self.datasets, ROW):
                columns.append(self._find(dataset, rows[:, column] - base))
                base += dataset.samples
            found.append((0, np.concatenate(columns, axis=1)))
        return found

    def _find(self, dataset: StreamingDataset, positions: Offsets) -> Offsets:
        """Return numbers of chunks, and slots in them, as two columns."""
        regions, slots = dataset.layout
        known = self._finders.get(id(regions))
        if known is None or known[0] is not regions:
            chunks, starts, stops = np.array(regions, np.int64).reshape(-1, 3).T
            bounds = np.cumsum(stops - starts)
            self._finders = self._finders | {id(regions): (regions, bounds, chunks, stops - bounds)}
        _, bounds, chunks, shifts = self._finders[id(regions)]
        numbers = np.searchsorted(bounds, positions, "right")
        found, places = chunks[numbers], positions + shifts[numbers]
        if slots is not None:
            places = np.array([slots[chunk][place] for chunk, place in zip(found.tolist(), places.tolist(), strict=True)], np.int64)
        return np.stack([found, places], axis=1)

    def ends(self, places: Sequence[Run]) -> list[int]:
        last = places[-1][1][-1, ROW::2].tolist()
        return [number << CHUNKS | chunk for number, chunk in enumerate(last)]

    def chunk(self, number: int) -> _Rows:
        return _Rows(self)

    def sample_size(self, number: int) -> float:
        return sum(dataset.mean_size for dataset in self.datasets)

    def describe_place(self, number: int, slot: Sequence[int]) -> tuple[int, str | int | None, str]:
        chunks, slots = slot[ROW::2], slot[ROW + 1 :: 2]
        found = [dataset.describe_place(*place) for dataset, *place in zip(self.datasets, chunks, slots, strict=True)]
        return found[0][0], found[0][1], " with ".join(file for _, _, file in found)

    def read_row(self, row: Sequence[int]) -> Any:
        """Return the sample that a row of places makes."""
        samples = []
        for number, dataset in enumerate(self.datasets):
            at = ROW + 2 * number
            samples.append(transformed(dataset.chunk(row[at]).read(row[at + 1]), dataset.transforms))
        if self.transform is None:
            return tuple(samples)
        if not self._takes_rngs:
            return transformed(tuple(samples), (self.transform,))
        rngs = Generators(self.seed, 0 if self.reset_rngs else row[0], row[1])
        return transformed(tuple(samples), (partial(_with, rngs, self.transform),))

    def _settings(self, rules: MixRules) -> dict[str, Any]:
        return {"seed": rules.seed, "length": rules.length, "resume": rules.go_on}

    def _rules_of(self, settings: Mapping[str, Any], epoch: int, members: Sequence[Rules]) -> MixRules:
        length = settings["length"]
        return MixRules.of(
            int(settings["seed"]),
            epoch,
            members,
            zipped=True,
            length=None if length is None else int(length),
            go_on=bool(settings["resume"]),
        )


class _Rows:
    """What reads tuples, in place of a chunk."""

    def __init__(self, dataset: ParallelStreamingDataset) -> None:
        self.read = dataset.read_row


class Generators(Mapping[str, Any]):
    """Seeded random generators for one sample, made when they are asked for."""

    def __init__(self, seed: int, epoch: int, row: int) -> None:
        self._seed = xxhash.xxh3_64_intdigest(f"{seed} {epoch} {row}".encode())
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        if name == "random":
            return random.Random(self._seed)
        if name == "numpy":
            return np.random.default_rng(self._seed)
        if name == "torch":
            import torch

            return torch.Generator().manual_seed(self._seed >> 1)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("random", "numpy", "torch") if importlib.util.find_spec("torch") else ("random", "numpy"))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _with(rngs: Generators, transform: Callable[..., Any], samples: Any) -> Any:
    return transform(samples, rngs)


def _arguments(transform: Callable[..., Any]) -> int:
    """Return how many arguments a transform takes: 1 or 2."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(transform).parameters.values()
    except ValueError:  # of a builtin
        return 1
    needed = sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)
    named = any(parameter.name == "rngs" for parameter in parameters)
    taken = 2 if named else needed or 1
    if taken > 2:
        raise ValueError(f"transform function must take 1 or 2 arguments, got {taken} instead: the tuple, and perhaps the generators.")
    return taken
