"""One loop on all ranks: they read the version that rank 0 reads, in the same way; where rank 0 sees that they do not, none begins."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from liveset.errors import StateMismatch

PATIENCE = timedelta(seconds=60)
# How long rank 0 waits for the others, and how long once it has waited in vain: a loader that it reads alone must be no trap.
ANSWERS, LATE_ANSWERS = timedelta(seconds=5), timedelta(milliseconds=500)

# Loaders of each dataset that this process has read, and those datasets of which rank 0 has read one alone, as it seemed.
_loaders: Counter[str] = Counter()
_alone: set[str] = set()

DATASET_ORDER = "that of the dataset"
_SAME = "Read the same loaders in the same order on all ranks, and those of one rank alone with rank=0, world_size=1"


class Agreement:
    """What the passes of one loader are called between the ranks, and what these tell each other when one begins.

    Nothing here is a collective operation: nobody waits for long, so that a loader which only one rank reads, for instance to evaluate, is
    no trap. A loader is known by what it reads, and by how many loaders of that were read before it.
    """

    def __init__(self) -> None:
        self._name = ""
        # The place that ranks tell each other things at keeps them: each pass has a key of its own, also one that is repeated.
        self._passes: Counter[int] = Counter()
        self._key, self._tells = "", 0
        self._told: dict[str, int] = {}
        self._url, self._lost = "", False

    def begin(self, url: str, epoch: int) -> None:
        """Begin a pass of an epoch over what lies there; what follows is about this pass."""
        if not self._name:
            _loaders[url] += 1
            self._name = f"liveset/{url}/{_loaders[url]}"
        self._passes[epoch] += 1
        self._key, self._tells = f"{self._name}/{epoch}/{self._passes[epoch]}", 0
        self._url, self._lost = url, False

    def tell(self, url: str, version: int, version_id: str | None) -> tuple[int, str | None]:
        """Return the version that rank 0 reads of a dataset in this pass; the own one where it does not tell.

        Raises:
            StateMismatch: it is another one than here, and older than what rank 0 read before.
        """
        store, rank, _ = _ranks()
        self._tells += 1
        key = f"{self._key}/version/{self._tells}"
        if rank == 0:
            store.set(key, json.dumps([version, version_id]))
            return version, version_id
        if self._lost or not self._wait(store, key, url):
            return version, version_id
        number, told_id = json.loads(store.get(key))
        # That this rank is ahead is usual: somebody commits while all of them refresh. But rank 0 does not go back.
        before = self._told.get(url, 0)
        if number < before and number != version:
            raise StateMismatch(
                f"rank 0 reads version {number} of {url}, and this rank version {version}, after both read version {before}: these cannot "
                f"be the same loop. {_SAME}; or open the dataset with version= on all ranks."
            )
        self._told[url] = number
        return number, told_id

    def compare(self, terms: Mapping[str, Any], world: int) -> None:
        """Look whether all ranks are going to read in the same way.

        Args:
            terms: what must be the same, by names.
            world: number of ranks that read. Where these are not all of the process group, nobody knows which ones they are: then only
                orders are compared that were given.

        Raises:
            StateMismatch: they are not, or one of them cannot begin: on all ranks. Where rank 0 did not wait for this one, it may be that
                it reads another loader, so that this is a warning.
        """
        store, rank, size = _ranks()
        mine: dict[str, Any] = json.loads(json.dumps(terms, default=_plain))
        size = size if world == size else 1
        if rank == 0:
            if problem := self._decide(store, mine, {0: mine} | self._answers(store, size)):
                raise StateMismatch(problem)
            return
        if size > 1:
            store.set(f"{self._key}/{rank}", json.dumps(mine))
        if self._lost or not self._wait(store, f"{self._key}/decided", self._url):
            return
        first, problem = json.loads(store.get(f"{self._key}/decided"))
        if problem:
            raise StateMismatch(problem)
        if size > 1 and (problem := _compare({0: first, rank: mine})):
            warnings.warn(f"rank 0 has begun without this rank, and {problem}", stacklevel=5)
        given = DATASET_ORDER not in (first.get("order"), mine.get("order"))
        if size == 1 and given and (problem := _compare({0: first, rank: mine}, "order")):
            raise StateMismatch(problem)

    def fail(self, error: Exception, world: int) -> None:
        """Tell the others that this rank cannot begin, so that they do not wait for it."""
        store, rank, size = _ranks()
        failed = {"failed": f"{type(error).__name__}: {error}"}
        with suppress(Exception):  # the error that is raised is more than that nobody can be told
            if rank == 0:
                self._decide(store, failed, {0: failed})
            elif world == size:
                store.set(f"{self._key}/{rank}", json.dumps(failed))

    def _answers(self, store: Any, size: int) -> dict[int, dict[str, Any]]:
        """Return what the others are going to read by."""
        keys = {rank: f"{self._key}/{rank}" for rank in range(1, size)}
        if keys:
            try:
                store.wait(list(keys.values()), LATE_ANSWERS if self._url in _alone else ANSWERS)
                _alone.discard(self._url)
            except Exception:  # those that come later see for themselves
                _alone.add(self._url)
        found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        with suppress(Exception):  # not every kind of store can
            for rank in found:
                store.delete_key(keys[rank])  # nobody else reads them, and there are some for each epoch
        return found

    def _decide(self, store: Any, terms: dict[str, Any], of_ranks: Mapping[int, dict[str, Any]]) -> str:
        problem = _compare(of_ranks)
        store.set(f"{self._key}/decided", json.dumps([terms, problem]))
        return problem

    def _wait(self, store: Any, key: str, url: str) -> bool:
        """Wait for what rank 0 tells, and return whether it did."""
        try:
            store.wait([key], PATIENCE)
        except Exception as error:  # each kind of store has its own
            self._lost = True
            warnings.warn(
                f"rank 0 does not read {url} in the same loop, so that nobody knows whether all ranks read one version of it, in the same "
                f"way. {_SAME}: {error}",
                stacklevel=6,
            )
        return not self._lost


def _plain(value: Any) -> Any:
    """Return what numpy calls a number, or the name of anything else."""
    return value.item() if hasattr(value, "item") else str(value)


def _compare(of_ranks: Mapping[int, dict[str, Any]], only: str | None = None) -> str:
    """Return in what these ranks differ, as text; "" if in nothing."""
    failed = {rank: terms["failed"] for rank, terms in of_ranks.items() if "failed" in terms}
    if failed:
        return "; ".join(f"rank {rank} cannot begin the epoch: {error}" for rank, error in failed.items())
    names = dict.fromkeys(name for terms in of_ranks.values() for name in terms)
    found = []
    for name in names if only is None else [only]:
        ranks: dict[str, list[int]] = {}
        for rank, terms in of_ranks.items():
            ranks.setdefault(repr(terms.get(name)), []).append(rank)
        if len(ranks) > 1:
            found.append(f"{name} is " + ", ".join(f"{value} on {_name_ranks(those)}" for value, those in ranks.items()))
            if name == "order":
                found[-1] += " (they divide one order among themselves, so give all of them the same, seeded by the epoch)"
    if not found:
        return ""
    return f"the ranks do not read in the same way, and would repeat samples and leave others out: {'; '.join(found)}. {_SAME}."


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:5]))}" + (f" and {len(ranks) - 5} others" if len(ranks) > 5 else "")


def has_group() -> bool:
    """Whether this process can tell other ranks anything."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _ranks() -> tuple[Any, int, int]:
    """Return where ranks tell each other things, the number of this one, and how many there are."""
    distributed = sys.modules["torch.distributed"]
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    return store, distributed.get_rank(), distributed.get_world_size()
