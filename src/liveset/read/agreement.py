"""One version for all ranks: what rank 0 reads is told to the others when an epoch begins."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

# The place that ranks tell each other things at keeps them: each pass over a dataset has a key of its own.
_passes: Counter[str] = Counter()
PATIENCE = timedelta(seconds=60)


def tell_version(path: str, version: int, version_id: str | None) -> tuple[int, str | None]:
    """Return the version that rank 0 reads of a dataset in its pass with the same number; the own one without a process group.

    Nothing here is a collective operation: rank 0 never waits, and the others not for long, so that a loader which only one rank reads,
    for instance to evaluate, is no trap.
    """
    store, rank = _ranks()
    if store is None:
        return version, version_id
    _passes[path] += 1
    key = f"liveset/{path}/{_passes[path]}"
    if rank == 0:
        store.set(key, json.dumps([version, version_id]))
        return version, version_id
    try:
        store.wait([key], PATIENCE)
    except Exception as error:  # each kind of store has its own
        warnings.warn(f"rank 0 does not read {path}, so that nobody knows whether all ranks read one version of it: {error}", stacklevel=5)
        return version, version_id
    number, name = json.loads(store.get(key))
    return number, name


def _ranks() -> tuple[Any, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None, 0
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank()  # noqa: SLF001 - there is no public way to it
