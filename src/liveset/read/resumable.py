"""What one dataset and several as one have in common for a training loop: epochs, and states that were loaded."""

from __future__ import annotations

import warnings

from liveset.errors import StateMismatch
from liveset.read.grid import worker_info
from liveset.read.options import check_epoch
from liveset.read.state import Progress


class Resumable:
    """A dataset object whose next pass may be the rest of another one."""

    current_epoch: int = 1
    num_workers: int = 1
    goes_on = False
    """Whether a pass goes on where the one before was left."""

    # Whether load_state_dict() only warns where the state differs in a setting.
    _forced: bool
    _resumed: Progress | None = None
    _ranks: tuple[int, int] | None = None

    def reset_state_dict(self) -> None:
        """Forget a state that was loaded: the next pass is a whole one."""
        self._resumed = None

    def reset(self) -> None:
        """Begin again with epoch 1."""
        self.reset_state_dict()
        self.current_epoch = 1

    def set_epoch(self, current_epoch: int) -> None:
        """Choose the epoch (from 1) of the next pass."""
        self.current_epoch = check_epoch(current_epoch)

    def set_num_workers(self, num_workers: int) -> None:
        """Set the number of loader workers that the length is told for."""
        self.num_workers = max(num_workers, 1)

    def take_resumed(self) -> Progress | None:
        """Return the state that was loaded, once."""
        progress, self._resumed = self._resumed, None
        return progress

    def _go_on(self, world: int, rank: int) -> Progress | None:
        """Take the state that was loaded, for a pass over the dataset itself; None if the next epoch begins."""
        if worker_info() is not None:
            raise RuntimeError(
                "a state was loaded into this dataset, and several loader workers would each go on with it, in every epoch anew: load it "
                "into a liveset.StreamingDataLoader, or use num_workers=0."
            )
        progress = self.take_resumed()
        assert progress is not None
        self.current_epoch = progress.rules.epoch + progress.finished
        if progress.finished:
            return None
        if progress.order is not None:
            raise StateMismatch(
                f"the state is of a loader with {progress.order.by}=: load it into such a liveset.StreamingDataLoader, since the dataset "
                "itself does not know the order."
            )
        check_rank(progress, world, rank)
        return progress

    def _differs(self, name: str, now: object, saved: object) -> None:
        """Refuse a state that differs in a setting, or warn of it."""
        text = f"The provided `{name}` state doesn't match the current one. Found `{now}` instead of `{saved}`."
        if not self._forced:
            raise StateMismatch(f"{text} Give the dataset the value of the state, or force_override_state_dict=True.")
        warnings.warn(f"{text} The epoch of the state ends as it began.", stacklevel=5)


def check_rank(progress: Progress, world: int, rank: int) -> None:
    """Warn if a rank goes on from the state of another one."""
    if world == progress.stretches[-1].world and rank != progress.rank:
        warnings.warn(
            f"rank {rank} goes on from a state of rank {progress.rank}: after as many batches of its own, which is right only where all "
            "ranks had as many when the state was taken.",
            stacklevel=4,
        )
