"""Lease model: every order in which readers that pin a version and vacuums that expire it can act, searched to the end.

The version in question is an old one: nobody but the readers needs it. ``LeaseRules`` switches single rules off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["LeaseResult", "LeaseRules", "search_leases"]


@dataclass(frozen=True)
class LeaseRules:
    """The rules that the model can break."""

    lists_again: bool = True
    """A vacuum lists the leases once more when its fence is up."""
    looks_at_fence: bool = True
    """A reader looks at the fence after it has written its lease."""
    lease_first: bool = True
    """A reader writes its lease before it looks, and not after."""


class LeaseResult(NamedTuple):
    """What a search found: the broken promise (None if none is), the number of states, and the steps that lead there."""

    broken: str | None
    states: int
    steps: tuple[str, ...]


_Reader = Literal["start", "leased", "looked", "reading", "refused", "done"]


class _Vacuum(NamedTuple):
    step: Literal["list", "fence", "again", "delete", "end"] = "list"
    head: int = 0
    spares: bool = False


class _State(NamedTuple):
    there: bool
    """Whether the files of the version are all there."""
    head: int
    expired: bool
    """Whether the fence of the head says that the version has expired."""
    leases: tuple[bool, ...]
    readers: tuple[_Reader, ...]
    vacuums: tuple[_Vacuum, ...]


def search_leases(rules: LeaseRules = LeaseRules(), *, readers: int = 2, vacuums: int = 2) -> LeaseResult:
    """Visits all states, nearest first, until a promise is broken or none is left."""
    start: _Reader = "start"
    begin = _State(True, 0, False, (False,) * readers, (start,) * readers, (_Vacuum(),) * vacuums)
    paths: dict[_State, tuple[str, ...]] = {begin: ()}
    queue = deque((begin,))
    while queue:
        state = queue.popleft()
        if "reading" in state.readers and not state.there:
            return LeaseResult("a pinned reader lost its files", len(paths), paths[state])
        for step, after in (*_reader_steps(state, rules), *_vacuum_steps(state, rules)):
            if after not in paths:
                paths[after] = (*paths[state], step)
                queue.append(after)
    return LeaseResult(None, len(paths), ())


def _reader_steps(state: _State, rules: LeaseRules) -> Iterator[tuple[str, _State]]:
    def to(number: int, step: _Reader, lease: bool) -> _State:
        return state._replace(
            readers=(*state.readers[:number], step, *state.readers[number + 1 :]),
            leases=(*state.leases[:number], lease, *state.leases[number + 1 :]),
        )

    for number, step in enumerate(state.readers):
        lease = state.leases[number]
        after_look: _Reader = "refused" if state.expired and rules.looks_at_fence else "reading" if lease else "looked"
        if step == "start" and rules.lease_first:
            yield f"reader {number} writes its lease", to(number, "leased", True)
        elif step in ("start", "leased"):
            yield f"reader {number} looks at the fence", to(number, after_look, lease and after_look != "refused")
        elif step == "looked":
            yield f"reader {number} writes its lease", to(number, "reading", True)
        elif step == "reading":
            yield f"reader {number} has read all", to(number, "done", False)


def _vacuum_steps(state: _State, rules: LeaseRules) -> Iterator[tuple[str, _State]]:
    def to(number: int, vacuum: _Vacuum, **more: object) -> _State:
        return state._replace(vacuums=(*state.vacuums[:number], vacuum, *state.vacuums[number + 1 :]), **more)  # type: ignore[arg-type]

    for number, vacuum in enumerate(state.vacuums):
        match vacuum.step:
            case "list":
                yield f"vacuum {number} lists", to(number, _Vacuum("fence", state.head, any(state.leases)))
            case "fence" if state.head != vacuum.head:
                yield f"vacuum {number} begins anew", to(number, _Vacuum())
            case "fence":
                # What has expired stays so, whatever a later vacuum sees.
                after = _Vacuum("again" if rules.lists_again else "delete", 0, vacuum.spares)
                yield f"vacuum {number} fences", to(number, after, head=state.head + 1, expired=state.expired or not vacuum.spares)
            case "again":
                yield f"vacuum {number} lists again", to(number, vacuum._replace(step="delete", spares=vacuum.spares or any(state.leases)))
            case "delete":
                yield f"vacuum {number} deletes", to(number, _Vacuum("end"), there=state.there and vacuum.spares)
