"""Lost answers, sessions, and mutants: what a commit does when it is not told the outcome, and that the tests notice each missing rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from liveset.edit import commit as protocol
from liveset.edit.changes import Append, SetAttributes
from liveset.edit.commit import Outcome, Policy, commit
from liveset.edit.versions import was_committed
from liveset.errors import CommitUnknown, Conflict, DatasetError, ForeignEdit, StorageError
from liveset.format.index import Index
from liveset.storage import Head, Store, Swap, Tag, version_name
from liveset.storage.local import LocalStore
from liveset.testing import LossyStore, MemoryStore, WrappedStore
from liveset.testing.invariants import check_dataset, stage

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}
AT_ONCE = Policy(first_pause=0)


def head_of(store: Store) -> Index | None:
    head = store.read_head()
    return None if head is None else Index.parse(head.data)


def append(store: Store, name: str, *, session: str | None = None, base: Index | None = None) -> Index:
    return commit(store, Append(CONFIG, (stage(store, name),)), base, session=session, policy=AT_ONCE)


def names(index: Index | None) -> list[str]:
    return [record.filename for record in index.chunks] if index else []


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    if request.param == "memory":
        return MemoryStore
    numbers = itertools.count()
    return lambda: LocalStore(tmp_path / str(next(numbers)))


def test_a_session_is_applied_once(new_store: Callable[[], Store]) -> None:
    store = new_store()
    first = append(store, "a", session="job")
    append(store, "b")
    assert append(store, "c", session="job") == first
    assert names(head_of(store)) == ["a", "b"]
    assert was_committed(store, "job")
    assert not was_committed(store, "other job")


class Rival(WrappedStore):
    """Somebody else commits just before our swap, ``times`` times."""

    def __init__(self, store: Store, times: int, act: Callable[[int], object]) -> None:
        super().__init__(store)
        self.left, self.act = times, act

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        if self.left:
            self.left -= 1
            self.act(self.left)
        return super().swap_head(data, expected, withdraw)


def test_two_runs_of_one_session_at_once_commit_once(new_store: Callable[[], Store]) -> None:
    store = new_store()
    append(store, "a")
    theirs: list[Index] = []
    rival = Rival(store, 1, lambda _: theirs.append(append(store, "theirs", session="job")))
    assert append(rival, "mine", session="job") == theirs[0]
    assert names(head_of(store)) == ["a", "theirs"]


def test_lost_races_are_rebased(new_store: Callable[[], Store]) -> None:
    store = new_store()
    append(store, "a")
    mine = append(Rival(store, 5, lambda n: append(store, f"b{n}")), "mine")
    assert mine.version == 7
    assert names(mine) == ["a", "b4", "b3", "b2", "b1", "b0", "mine"]
    check_dataset(store)


def test_giving_up_is_a_conflict_and_commits_nothing() -> None:
    store = MemoryStore()
    rival = Rival(store, 100, lambda n: append(store, f"b{n}"))
    with pytest.raises(Conflict, match="3 races"):
        commit(rival, Append(CONFIG, ()), None, session="job", policy=Policy(attempts=3, first_pause=0))
    assert not was_committed(store, "job")
    assert len(check_dataset(store)) == 3


@pytest.mark.parametrize("plan", ["".join(plan) for plan in itertools.product("aldxr", repeat=3)])
@pytest.mark.parametrize("rivals", [0, 1])
def test_lost_answers_never_commit_twice_or_lie(plan: str, rivals: int) -> None:
    store = MemoryStore()
    append(store, "a")
    left = [rivals]
    lossy = LossyStore(store, plan)

    def rival() -> None:
        if left[0]:
            left[0] -= 1
            append(store, "rival")

    lossy.before_lost = rival
    policy = Policy(first_pause=0, sends=3)
    told = True
    try:
        index = commit(lossy, SetAttributes({"name": "new"}), head_of(store), session="job", policy=policy)
        assert index.attributes == {"name": "new"}
    except CommitUnknown:
        told = False
    lossy.deliver()  # what was under way arrives in the end
    versions = check_dataset(store)
    if told:
        assert was_committed(store, "job")
    # The same call with the same session settles it, and requests that arrive later still change nothing.
    commit(store, SetAttributes({"name": "new"}), head_of(store), session="job", policy=policy)
    lossy.deliver()
    assert len(check_dataset(store)) == len(versions) + (0 if told or len(versions) == 2 + rivals else 1)
    # As long as the outcome is open, it is the same request that is sent again.
    assert all(len({data for data, tag in lossy.sent if tag == expected}) == 1 for _, expected in lossy.sent)


def test_an_unknown_outcome_keeps_the_files_and_is_settled_by_the_session() -> None:
    store = MemoryStore()
    append(store, "a")
    lossy = LossyStore(store, "dddd")
    with pytest.raises(CommitUnknown, match="job") as info:
        append(lossy, "b", session="job")
    assert info.value.session == "job"
    assert store.read("b")
    assert not was_committed(store, "job")
    assert lossy.deliver()[0] is Swap.SWAPPED
    assert was_committed(store, "job")


class Mute(WrappedStore):
    """Answers UNKNOWN, and then the head cannot be read."""

    sent = False

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        self.sent = True
        super().swap_head(data, expected, withdraw)
        return Swap.UNKNOWN

    def read_head(self) -> Head | None:
        if self.sent:
            raise StorageError("the network is down")
        return super().read_head()


def test_an_outcome_that_cannot_be_read_back_is_unknown() -> None:
    with pytest.raises(CommitUnknown):
        append(Mute(MemoryStore()), "a", session="job")


class FailsLater(LossyStore):
    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        if not self.plan:
            raise StorageError("the disk is full")
        return super().swap_head(data, expected, withdraw)


def test_a_failure_of_a_second_send_says_nothing_about_the_first() -> None:
    with pytest.raises(StorageError):
        append(FailsLater(MemoryStore(), ""), "a")
    with pytest.raises(CommitUnknown):
        append(FailsLater(MemoryStore(), "d"), "a")


# Mutants: one for each rule of the protocol. Each is run by a check that the real commit passes.


class SkipsArchive(protocol._Commit):
    def archive(self, head: Head, parent: Index) -> None:
        pass


class TakesUnknownForLost(protocol._Commit):
    def outcome(self, head: Head | None, parent: Index | None, new: Index) -> Outcome:
        return Outcome.LOST


class NewIdWhileOpen(protocol._Commit):
    def outcome(self, head: Head | None, parent: Index | None, new: Index) -> Outcome:
        found = super().outcome(head, parent, new)
        return Outcome.LOST if found is Outcome.OPEN else found


class TrustsAnyHead(protocol._Commit):
    def later_than(self, parent: Index | None) -> bool:
        return False


class ForgetsSessions(protocol._Commit):
    def find_done(self, parent: Index | None) -> Index | None:
        return None


def set_name(make: Any, store: Store, session: str | None = "job") -> Index:
    change = SetAttributes({"name": session})
    result: Index = make(store, change, head_of(store), session=session, message="", author="", resumed=False, policy=AT_ONCE).run()
    return result


def check_versions_kept(make: Any) -> None:
    store = MemoryStore()
    append(store, "a")
    set_name(make, store)
    check_dataset(store)


def check_answer_lost(make: Any) -> None:
    store = MemoryStore()
    append(store, "a")
    set_name(make, LossyStore(store, "l"), None)
    assert len(check_dataset(store)) == 2


def check_answer_late(make: Any) -> None:
    store = MemoryStore()
    append(store, "a")
    set_name(make, LossyStore(store, "dr"), None)
    assert len(check_dataset(store)) == 2


def check_old_head_put_back(make: Any) -> None:
    store = MemoryStore()
    for name in "abc":
        append(store, name)
    store.foreign_head(store.read(version_name(1)))
    with pytest.raises(ForeignEdit):
        set_name(make, store)


def check_same_session(make: Any) -> None:
    store = MemoryStore()
    append(store, "a", session="job")
    set_name(make, store, "job")
    check_dataset(store)


CHECKS = {
    SkipsArchive: check_versions_kept,
    TakesUnknownForLost: check_answer_lost,
    NewIdWhileOpen: check_answer_late,
    TrustsAnyHead: check_old_head_put_back,
    ForgetsSessions: check_same_session,
}


@pytest.mark.parametrize(("mutant", "check"), CHECKS.items(), ids=[mutant.__name__ for mutant in CHECKS])
def test_each_missing_rule_is_noticed(mutant: Any, check: Callable[[Any], None]) -> None:
    check(protocol._Commit)
    with pytest.raises((AssertionError, DatasetError, pytest.fail.Exception)):
        check(mutant)
