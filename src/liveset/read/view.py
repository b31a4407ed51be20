"""A map-style view of a dataset: length and positions only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Positions(Protocol):
    """A dataset that answers for positions."""

    @property
    def samples(self) -> int:
        """Number of samples, over all ranks."""

    def __getitem__(self, index: int, /) -> Any: ...

    def read_many(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at these positions."""


class MapView:
    """The samples of a dataset as a map-style dataset, for samplers and plain data loaders.

    Example:
        >>> import torch
        >>> loader = torch.utils.data.DataLoader(ds.as_map(), batch_size=32, shuffle=True)
    """

    def __init__(self, dataset: Positions) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.samples

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; torch's loader asks for a batch this way."""
        return self._dataset.read_many(indices)
