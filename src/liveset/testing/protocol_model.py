"""Protocol model: every order in which two writers, a vacuum and a network can act, searched to the end.

A request may arrive at once, late, or never, and its answer may be lost. A process that crashes is one that takes no further step, so
crashes need no step of their own. ``Rules`` switches single rules of the protocol off, to show that the search notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Result", "Rules", "search"]


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol that the model can break."""

    reads_back: bool = True
    """A refusal is not believed before the head was looked at: the writer's own earlier request may have caused it."""
    resends_same: bool = True
    """While the outcome is open, only the very same request is sent again."""
    fences: bool = True
    """Vacuum commits a cutoff before it deletes, and writers give up files older than the cutoff."""


class Result(NamedTuple):
    """What a search found: the broken promise (None if none is), the number of states, and the steps that lead there."""

    broken: str | None
    states: int
    steps: tuple[str, ...]


class _File(NamedTuple):
    name: str
    time: int


class _Head(NamedTuple):
    id: str
    history: tuple[str, ...]
    files: tuple[str, ...]
    cutoff: int


class _Request(NamedTuple):
    writer: int
    parent: str
    head: _Head
    number: int


_Step = Literal["stage", "read", "send", "wait", "refused", "look", "end"]


class _Writer(NamedTuple):
    step: _Step = "stage"
    file: _File | None = None
    attempt: int = 0
    staged: int = 0
    parent: str = ""
    head: _Head | None = None
    sends: int = 0
    answer: bool | None = None


class _Vacuum(NamedTuple):
    step: Literal["list", "fence", "delete", "off"]
    seen: frozenset[_File] = frozenset()
    cutoff: int = 0


class _State(NamedTuple):
    clock: int
    files: frozenset[_File]
    head: _Head
    writers: tuple[_Writer, ...]
    network: frozenset[_Request]
    vacuum: _Vacuum
    promises: frozenset[tuple[str, bool]]
    """Commit ids and whether their writer was told that they landed (True) or never will (False)."""


def search(rules: Rules = Rules(), *, writers: int = 2, vacuum: bool = False, attempts: int = 2, limit: int = 10_000_000) -> Result:
    """Visits all states, nearest first, until a promise is broken or none is left."""
    origin = _File("origin", 0)
    begin = _State(
        clock=1,
        files=frozenset((origin,)),
        head=_Head("first", ("first",), (origin.name,), 0),
        writers=(_Writer(),) * writers,
        network=frozenset(),
        vacuum=_Vacuum("list" if vacuum else "off"),
        promises=frozenset(),
    )
    # Each state remembers how it was reached, which costs less than carrying the whole path along.
    came_from: dict[_State, tuple[_State, str] | None] = {begin: None}
    queue = deque((begin,))
    while queue:
        state = queue.popleft()
        if (broken := _broken(state)) is not None:
            return Result(broken, len(came_from), _path(state, came_from))
        for step, after in _steps(state, rules, attempts):
            if after not in came_from:
                came_from[after] = (state, step)
                queue.append(after)
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Result(None, len(came_from), ())


def _path(state: _State, came_from: dict[_State, tuple[_State, str] | None]) -> tuple[str, ...]:
    steps = []
    while (link := came_from[state]) is not None:
        state, step = link
        steps.append(step)
    return tuple(reversed(steps))


def _broken(state: _State) -> str | None:
    there = {file.name for file in state.files}
    if not there.issuperset(state.head.files):
        return "the head names a file that was deleted"
    sessions = [name.partition("/")[0] for name in state.head.files]
    if len(set(sessions)) < len(sessions):
        return "one session was applied twice"
    for commit, landed in state.promises:
        if landed and commit not in state.head.history:
            return "an acknowledged commit is not in the history"
        if not landed and commit in state.head.history:
            return "a commit that was reported lost is in the history"
    return None


def _steps(state: _State, rules: Rules, attempts: int) -> Iterator[tuple[str, _State]]:
    for number, writer in enumerate(state.writers):
        for step, after in _writer_steps(state, number, writer, rules, attempts):
            yield f"writer {number} {step}", after
    for request in state.network:
        yield from _deliveries(state, request)
    yield from _vacuum_steps(state, rules)


def _put(state: _State, number: int, writer: _Writer) -> _State:
    return state._replace(writers=(*state.writers[:number], writer, *state.writers[number + 1 :]))


def _promise(state: _State, commit: str, landed: bool) -> _State:
    return state._replace(promises=state.promises | {(commit, landed)})


def _writer_steps(state: _State, number: int, me: _Writer, rules: Rules, attempts: int) -> Iterator[tuple[str, _State]]:
    again = me._replace(step="read", attempt=me.attempt + 1, parent="", head=None, sends=0, answer=None)
    end = _Writer("end")  # nothing else matters any more, and states that differ in it need not be told apart
    match me.step:
        case "stage":
            file = _File(f"session {number}/{me.staged}", state.clock)
            after = state._replace(clock=state.clock + 1, files=state.files | {file})
            yield "stages", _put(after, number, me._replace(step="read", file=file, staged=me.staged + 1))
        case "read":
            assert me.file is not None
            if rules.fences and me.file.time <= state.head.cutoff:
                yield "finds its file fenced", _put(state, number, me._replace(step="stage") if me.staged < 2 else end)
            elif me.attempt >= attempts:
                yield "gives up", _put(state, number, end)
            else:
                commit = f"commit {number}.{me.attempt}"
                old = state.head
                new = _Head(commit, (*old.history, commit), (*old.files, me.file.name), old.cutoff)
                yield "reads the head", _put(state, number, me._replace(step="send", parent=old.id, head=new))
        case "send":
            assert me.head is not None
            request = _Request(number, me.parent, me.head, me.sends)
            after = state._replace(network=state.network | {request})
            yield "sends", _put(after, number, me._replace(step="wait", sends=me.sends + 1, answer=None))
        case "wait":
            assert me.head is not None
            if me.answer is True:
                yield "hears yes", _put(_promise(state, me.head.id, True), number, end)
            elif me.answer is False:
                yield "hears no", _put(state, number, me._replace(step="refused", answer=None))
            yield "hears nothing", _put(state, number, me._replace(step="look", answer=None))
        case "refused" | "look":
            assert me.head is not None
            if me.step == "refused" and not rules.reads_back:
                yield "believes the refusal", _put(state, number, again)
            elif me.head.id in state.head.history:
                yield "finds its commit", _put(_promise(state, me.head.id, True), number, end)
            elif state.head.id != me.parent:
                yield "finds another commit", _put(_promise(state, me.head.id, False), number, again)
            elif not rules.resends_same:
                yield "takes a new id", _put(state, number, again)
            else:
                if me.sends < 2:
                    yield "sends the same again", _put(state, number, me._replace(step="send"))
                yield "reports unknown", _put(state, number, end)


def _deliveries(state: _State, request: _Request) -> Iterator[tuple[str, _State]]:
    fits = state.head.id == request.parent
    after = state._replace(network=state.network - {request}, head=request.head if fits else state.head)
    what = f"{request.head.id} {'lands' if fits else 'is refused'}"
    yield f"{what}, unheard", after
    writer = state.writers[request.writer]
    if writer.step == "wait" and writer.answer is None and writer.head is not None and writer.head.id == request.head.id:
        yield what, _put(after, request.writer, writer._replace(answer=fits))


def _vacuum_steps(state: _State, rules: Rules) -> Iterator[tuple[str, _State]]:
    vacuum = state.vacuum
    match vacuum.step:
        case "list":
            yield "vacuum lists", state._replace(vacuum=_Vacuum("fence", state.files, state.clock - 1))
        case "fence":
            doomed = frozenset(file for file in vacuum.seen if file.name not in state.head.files and file.time <= vacuum.cutoff)
            head = state.head
            if rules.fences:
                head = _Head("fence", (*head.history, "fence"), head.files, max(head.cutoff, vacuum.cutoff))
            yield "vacuum fences", state._replace(head=head, vacuum=_Vacuum("delete", doomed))
        case "delete":
            for file in vacuum.seen:
                left = vacuum._replace(seen=vacuum.seen - {file})
                yield f"vacuum deletes {file.name}", state._replace(files=state.files - {file}, vacuum=left)
