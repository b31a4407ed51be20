"""Which reader this process is: rank and world from torch.distributed or the launcher's variables, worker from torch's data loader."""

from __future__ import annotations

import os
import sys

from liveset.read.plan import Grid


def detect_grid(*, workers: int = 1, batch: int = 1) -> Grid:
    """Return the grid as it is now; asked at each iteration, since readers are often made before the process group.

    Args:
        workers: loader workers per rank, used where torch's loader does not say.
        batch: samples per batch.
    """
    world, rank = _ranks()
    loader = sys.modules.get("torch.utils.data")
    info = loader.get_worker_info() if loader is not None else None
    if info is not None:
        return Grid(world, rank, info.num_workers, info.id, batch)
    return Grid(world, rank, max(workers, 1), 0, batch)


def _ranks() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("GLOBAL_RANK") or os.environ.get("RANK") or "0")
    if not 0 <= rank < world:
        raise ValueError(f"the environment says rank {rank} of {world} ranks (RANK or GLOBAL_RANK, WORLD_SIZE).")
    return world, rank
