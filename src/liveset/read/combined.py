"""CombinedStreamingDataset: samples of several datasets, mixed at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from liveset.format.chunk import Chunk
from liveset.read.dataset import StreamingDataset
from liveset.read.epoch import Rules, Run
from liveset.read.mixing import MixRules
from liveset.read.mixture import CHUNK, CHUNKS, Mixture
from liveset.read.options import transformed
from liveset.read.picked import Layout

BatchingMethod = Literal["stratified", "per_stream"]


class CombinedStreamingDataset(Mixture):
    """Samples of several datasets in random turn, each dataset in its own order.

    The turns depend on ``seed`` and the weights alone, and are the same in each epoch; the order inside a dataset is that of its
    ``shuffle`` and ``seed``, and changes with the epoch. States are exact, and with ``batching_method="stratified"`` a run may go on with
    another number of ranks or another batch size.

    Args:
        datasets: what is mixed; one may take part several times.
        seed: of the turns.
        weights: how often a dataset takes its turn, in proportion; by default the lengths. Only with ``iterate_over_all=False``.
        iterate_over_all: read all samples of all datasets. False ends an epoch where the first dataset is exhausted.
        batching_method: "stratified" chooses a dataset for each sample, "per_stream" for each batch: then every batch is of one dataset,
            where that ends it may be short, and ``StreamingDataLoader`` takes a batch size for each dataset, ``batch_size=[64, 16]``.
        force_override_state_dict: only warn where a state that is loaded differs in a setting.

    Raises:
        RuntimeError: something in the list is no ``StreamingDataset``.
        ValueError: an argument is wrong.

    Example:
        >>> web, code = ds.subset(range(90)), ds.subset(range(90, 120))
        >>> mix = liveset.CombinedStreamingDataset([web, code], weights=[1, 1], iterate_over_all=False)
        >>> loader = liveset.StreamingDataLoader(mix, batch_size=16)
        >>> sum(int((batch["square"] >= 90 * 90).sum()) for batch in loader)
        30
    """

    _kind = "combined"

    def __init__(
        self,
        datasets: Sequence[StreamingDataset],
        seed: int = 42,
        weights: Sequence[float] | None = None,
        iterate_over_all: bool = True,
        batching_method: BatchingMethod = "stratified",
        force_override_state_dict: bool = False,
    ) -> None:
        super().__init__(datasets, seed, force_override_state_dict=force_override_state_dict)
        if iterate_over_all and weights is not None:
            raise ValueError(
                "When `iterate_over_all` is set to True, the weights argument shouldn't be provided. All samples are read then, whatever "
                "the weights: pass iterate_over_all=False with weights."
            )
        if weights is not None and (len(weights) != len(datasets) or min(weights) < 0 or not sum(weights) > 0):
            raise ValueError(
                f"weights must be {len(datasets)} numbers, one for each dataset, none negative and not all 0. Found {weights!r}."
            )
        if batching_method not in get_args(BatchingMethod):
            raise ValueError(f'batching_method must be "stratified" or "per_stream". Found {batching_method!r}.')
        self.weights = None if weights is None else tuple(map(float, weights))
        self.iterate_over_all, self.batching_method = iterate_over_all, batching_method
        self._parts: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        return f"CombinedStreamingDataset({self.datasets!r})"

    def rules(self, epoch: int, *, pad: bool) -> MixRules:
        batches = None
        if self.batching_method == "per_stream":
            batches = (self.batch_size,) * len(self.datasets) if isinstance(self.batch_size, int) else tuple(self.batch_size)
        members = [dataset.rules(epoch, pad=pad) for dataset in self.datasets]
        return MixRules.of(self.seed, epoch, members, weights=self.weights, to_the_end=self.iterate_over_all, batches=batches)

    def set_batch_size(self, batch_size: int | Sequence[int]) -> None:
        if not isinstance(batch_size, int):
            if self.batching_method != "per_stream":
                raise ValueError('several batch sizes need batching_method="per_stream": other batches are of all datasets.')
            if len(batch_size) != len(self.datasets) or min(batch_size) < 1:
                raise ValueError(f"batch_size must be a number, or {len(self.datasets)} of them, all at least 1. Found {batch_size!r}.")
        super().set_batch_size(batch_size)

    def places(self, runs: Sequence[Run]) -> list[Run]:
        parts = self._parts
        if parts is None or any(a is not dataset.layout.regions for a, dataset in zip(parts[0], self.datasets, strict=True)):
            parts = self._parts = self._number_regions()
        _, layout, slots = parts
        places = []
        for region, offsets in runs:
            chunk, where = layout.place(region, offsets)
            own = slots[chunk >> CHUNKS]
            places.append((chunk, where if own is None else own[chunk & CHUNK][where].astype(np.int64)))
        return places

    def ends(self, places: Sequence[Run]) -> list[int]:
        return list({number >> CHUNKS: number for number, _ in places}.values())

    def _number_regions(self) -> tuple[Any, ...]:
        """Return the regions of all datasets, and numbered through, with chunks that are numbered through too."""
        of_each = [dataset.layout for dataset in self.datasets]
        regions = [
            region._replace(chunk=number << CHUNKS | region.chunk) for number, layout in enumerate(of_each) for region in layout.regions
        ]
        return [layout.regions for layout in of_each], Layout(regions, None), [layout.slots for layout in of_each]

    def batch_decoder(self, collate: Callable[[Sequence[Any]], Any]) -> Any:
        first, *others = self.datasets
        alike = all(other.decodes_like(first) for other in others) and not any(dataset.transforms for dataset in self.datasets)
        return first.batch_decoder(collate) if alike else super().batch_decoder(collate)

    def chunk(self, number: int) -> Chunk | _Transformed:
        dataset = self.datasets[number >> CHUNKS]
        chunk = dataset.chunk(number & CHUNK)
        return _Transformed(chunk, dataset.transforms) if dataset.transforms else chunk

    def sample_size(self, number: int) -> float:
        return self.datasets[number >> CHUNKS].sample_size(number & CHUNK)

    def describe_place(self, number: int, slot: int) -> tuple[int, str | int | None, str]:
        return self.datasets[number >> CHUNKS].describe_place(number & CHUNK, slot)

    def _settings(self, rules: MixRules) -> dict[str, Any]:
        return {
            "seed": rules.seed,
            "weights": None if rules.weights is None else list(rules.weights),
            "iterate_over_all": rules.to_the_end,
            "batch_sizes": None if rules.batches is None else list(rules.batches),
        }

    def _rules_of(self, settings: Mapping[str, Any], epoch: int, members: Sequence[Rules]) -> MixRules:
        weights, batches = settings["weights"], settings["batch_sizes"]
        return MixRules.of(
            int(settings["seed"]),
            epoch,
            members,
            weights=None if weights is None else tuple(map(float, weights)),
            to_the_end=bool(settings["iterate_over_all"]),
            batches=None if batches is None else tuple(map(int, batches)),
        )


@dataclass(frozen=True, slots=True)
class _Transformed:
    """A chunk of a dataset whose samples are transformed."""

    chunk: Chunk
    transforms: Sequence[Callable[[Any], Any]]

    def read(self, slot: int) -> Any:
        return transformed(self.chunk.read(slot), self.transforms)
