"""Which reader this process is: rank and world from torch.distributed or the launcher's variables, worker from torch's data loader."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, SupportsIndex

from liveset.read.plan import Grid

# Number of ranks and number of this one, as launchers tell them: torchrun and the old tool, Open MPI, Slurm. Slurm's are those of a step,
# since a batch script that starts one process has SLURM_NTASKS and SLURM_PROCID, too.
LAUNCHERS = [
    ("WORLD_SIZE", ("GLOBAL_RANK", "RANK")),
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",)),
]


def detect_grid(*, workers: int = 1, batch: int = 1, ranks: tuple[int, int] | None = None) -> Grid:
    """Return the grid as it is now; asked at each iteration, since readers are often made before the process group.

    Args:
        workers: loader workers per rank, used where torch's loader does not say.
        batch: samples per batch.
        ranks: world size and rank that a loader worker was given on its way, since a process that is not forked has no process group.
    """
    info = worker_info()
    world, rank = find_ranks()
    if info is not None:
        if world == 1 and ranks is not None:
            world, rank = ranks
        return Grid(world, rank, info.num_workers, info.id, batch)
    return Grid(world, rank, max(workers, 1), 0, batch)


def worker_info() -> Any:
    """Return what torch's data loader says about the worker that this process is; None in any other process."""
    loader = sys.modules.get("torch.utils.data")
    return loader.get_worker_info() if loader is not None else None


def find_ranks() -> tuple[int, int]:
    """Return the number of ranks and the number of this one: of torch.distributed where it is initialized, or as the launcher says."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    for size, numbers in LAUNCHERS:
        if os.environ.get(size):
            known = [(name, os.environ[name]) for name in numbers if os.environ.get(name)]
            name, number = known[0] if known else (" or ".join(numbers), "0")
            return check_ranks(os.environ[size], number, f"the environment says rank {number} of {os.environ[size]} ranks ({name}, {size})")
    return 1, 0


def check_ranks(world: str | int, rank: str | int, told: str) -> tuple[int, int]:
    """Return the two as numbers; ``ValueError`` if there is no such rank."""
    with suppress(ValueError):
        if all(isinstance(number, str | SupportsIndex) for number in (world, rank)) and 0 <= int(rank) < int(world):
            return int(world), int(rank)
    raise ValueError(f"{told}: ranks count from 0 to one less than their number.")
