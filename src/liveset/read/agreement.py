"""One version for all ranks: what rank 0 reads is told to the others when an epoch begins."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

from liveset.errors import StateMismatch

PATIENCE = timedelta(seconds=60)

# Loaders of each dataset that this process has read, by their batches.
_loaders: Counter[str] = Counter()


class Agreement:
    """What the passes of one loader are called between the ranks.

    Nothing here is a collective operation: rank 0 never waits, and the others not for long, so that a loader which only one rank reads,
    for instance to evaluate, is no trap. A loader is known by what it reads, by its batches, and by how many such were read before it.

    Args:
        batches: what tells it from other loaders of the same dataset.
    """

    def __init__(self, batches: str) -> None:
        self._batches = batches
        self._names: dict[str, str] = {}
        # The place that ranks tell each other things at keeps them: each pass has a key of its own, also one that is repeated.
        self._passes: Counter[str] = Counter()
        self._told: dict[str, int] = {}

    def tell(self, url: str, epoch: int, version: int, version_id: str | None) -> tuple[int, str | None]:
        """Return the version that rank 0 reads of a dataset in this epoch; the own one without a process group.

        Raises:
            StateMismatch: it is another one than here, and older than what rank 0 read before.
        """
        store, rank = _ranks()
        if store is None:
            return version, version_id
        if url not in self._names:
            loader = f"liveset/{url}/{self._batches}"
            _loaders[loader] += 1
            self._names[url] = f"{loader}/{_loaders[loader]}"
        name = f"{self._names[url]}/{epoch}"
        self._passes[name] += 1
        key = f"{name}/{self._passes[name]}"
        if rank == 0:
            store.set(key, json.dumps([version, version_id]))
            return version, version_id
        try:
            store.wait([key], PATIENCE)
        except Exception as error:  # each kind of store has its own
            warnings.warn(
                f"rank 0 does not read {url} in the same loop, so that nobody knows whether all ranks read one version of it. Read the "
                f"same loaders on all ranks, and those of one rank alone with rank=0, world_size=1: {error}",
                stacklevel=5,
            )
            return version, version_id
        number, told_id = json.loads(store.get(key))
        # That this rank is ahead is usual: somebody commits while all of them refresh. But rank 0 does not go back.
        before = self._told.get(url, 0)
        if number < before and number != version:
            raise StateMismatch(
                f"rank 0 reads version {number} of {url}, and this rank version {version}, after both read version {before}: these cannot "
                "be the same loop. Read the same loaders in the same order on all ranks, and those of one rank alone with rank=0, "
                "world_size=1; or open the dataset with version= on all ranks."
            )
        self._told[url] = number
        return number, told_id

    def same_order(self, url: str, epoch: int, digest: str) -> bool:
        """Return whether rank 0 begins the epoch with the same samples, after ``tell``; True where nobody knows."""
        store, rank = _ranks()
        if store is None:
            return True
        name = f"{self._names[url]}/{epoch}"
        key = f"{name}/{self._passes[name]}/order"
        if rank == 0:
            store.set(key, digest)
            return True
        try:
            store.wait([key], PATIENCE)
        except Exception:  # ``tell`` has warned of a loop that rank 0 does not read
            return True
        return bool(store.get(key) == digest.encode())


def _ranks() -> tuple[Any, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None, 0
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank()  # noqa: SLF001 - there is no public way to it
