"""The state of a training loop: where in an epoch it is, and of which version of which dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from liveset.errors import StateMismatch
from liveset.format import codec
from liveset.read.epoch import Rules, Stretch
from liveset.read.plan import Region
from liveset.snapshot import Snapshot

# The layout of the old tool whose names are used here.
STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class Identity:
    """What is read: a version, and which of its samples.

    Attributes:
        path: of the dataset.
        version: its number; 0 when another program wrote it.
        version_id: of the commit that wrote it, unlike all others; None when another program wrote it.
        samples: how many are read, over all ranks.
        chunks: how many chunks the version has.
        files: digest of the ids and sample counts of all chunks: equal as long as samples are only replaced.
        regions: digest of the parts of chunks that are read.
    """

    path: str
    version: int
    version_id: str | None
    samples: int
    chunks: int
    files: str
    regions: str

    @classmethod
    def of(cls, snapshot: Snapshot, regions: Sequence[Region], part: object = None) -> Identity:
        """Tell what the regions of a version are; ``part`` is what they count only a part of the samples by."""
        records = snapshot.index.chunks
        listed = "\n".join(f"{record.id or record.filename} {record.samples}" for record in records)
        numbers = np.array(regions, "<i8").reshape(-1, 3)
        return cls(
            snapshot.store.url,
            snapshot.version,
            snapshot.index.id,
            int((numbers[:, 2] - numbers[:, 1]).sum()),
            len(records),
            codec.checksum(listed.encode()),
            codec.checksum(numbers.tobytes() + (repr(part).encode() if part is not None else b"")),
        )

    @property
    def layout(self) -> tuple[str, str]:
        """Equal where each place holds the same sample, or what replaced it."""
        return self.files, self.regions


class Mark(NamedTuple):
    """How far a sampler is that gives the order.

    Attributes:
        by: the argument of the loader that it was given as.
        digest: of what it has yielded, of everything that goes before included.
        sampler: its own state, if it has one.
    """

    by: str
    digest: str
    sampler: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is.

    Attributes:
        rules: of the order of its epoch.
        stretches: the grids that read the epoch up to here.
        rank: the one that this was said about.
        samples: how many it has had in the epoch.
        finished: the loop has seen the end of the epoch: the next pass is the next epoch.
        order: where the sampler is that gives the order, if one does.
    """

    rules: Rules
    stretches: tuple[Stretch, ...]
    rank: int
    samples: int
    finished: bool
    order: Mark | None = None


def to_state(progress: Progress, identity: Identity, workers: int) -> dict[str, Any]:
    """Return a state as plain numbers and text, under the old tool's names where it has one for them."""
    rules, first, now = progress.rules, progress.stretches[0], progress.stretches[-1]
    remote = "://" in identity.path
    state: dict[str, Any] = {
        "num_samples_yielded": progress.samples,
        "num_workers": max(workers, 1),
        "batch_size": now.batch,
        "current_epoch": rules.epoch,
        "input_dir_path": None if remote else identity.path,
        "input_dir_url": identity.path if remote else None,
        "cache_dir_path": None,
        "item_loader": None,
        "drop_last": rules.drop_last,
        "seed": rules.seed,
        "item_shuffle_window": rules.window,
        "world_size": now.world,
        "shuffle": rules.shuffle,
        "subsampled_files": identity.files,
        "region_of_interest": identity.regions,
        "state_version": STATE_VERSION,
        "sample_in_epoch": sum(stretch.world * stretch.batch * stretch.batches for stretch in progress.stretches),
        "num_canonical_nodes": None,
        "initial_world_size": first.world,
        "initial_num_workers": first.workers,
        "initial_batch_size": first.batch,
        "initial_num_nodes": 1,
        "rank": progress.rank,
        "version": identity.version,
        "version_id": identity.version_id,
        "samples": identity.samples,
        "chunks": identity.chunks,
        "pad": rules.pad,
        "stretches": [list(stretch) for stretch in progress.stretches],
        "finished": progress.finished,
    }
    if progress.order is not None:
        state["order"] = progress.order._asdict()
    return state | {"resume_mode": "elastic"} if len(progress.stretches) > 1 else state


def from_state(state: Mapping[str, Any]) -> tuple[Progress, Identity]:
    """Return what a state says.

    Raises:
        StateMismatch: it is none of ours, or damaged.
    """
    try:
        rules = Rules(
            int(state["seed"]),
            int(state["current_epoch"]),
            bool(state["shuffle"]),
            int(state["item_shuffle_window"]),
            state["drop_last"],
            bool(state["pad"]),
        )
        stretches = tuple(Stretch(*map(int, stretch)) for stretch in state["stretches"])
        if not stretches or any(min(world, workers, batch) < 1 or batches < 0 for world, workers, batch, batches in stretches):
            raise ValueError("no readers")
        order = Mark(**state["order"]) if state.get("order") is not None else None
        progress = Progress(rules, stretches, int(state["rank"]), int(state["num_samples_yielded"]), bool(state["finished"]), order)
        if not 0 <= progress.rank < stretches[-1].world:
            raise ValueError("no such rank")
        identity = Identity(
            state["input_dir_url"] or state["input_dir_path"],
            int(state["version"]),
            state["version_id"],
            int(state["samples"]),
            int(state["chunks"]),
            state["subsampled_files"],
            state["region_of_interest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(
            f"this is no state of a liveset dataset or loader ({type(error).__name__}: {error}): give load_state_dict() what state_dict() "
            "returned. States of other programs cannot be read."
        ) from error
    return progress, identity


def next_stretches(progress: Progress, world: int, workers: int, batch: int) -> tuple[Stretch, ...]:
    """Return the stretches with which a grid goes on.

    Another number of workers changes nothing: they are given the batches that those before them would have had.
    """
    *before, now = progress.stretches
    if (world, batch) == (now.world, now.batch):
        return progress.stretches
    if now.batches:
        before.append(now)
    return (*before, Stretch(world, workers, batch, 0))
