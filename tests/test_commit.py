"""The commit protocol: crashes at every call, lost answers, races, foreign programs, and mutants that the tests must notice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from liveset.edit.changes import Append, Change, Overwrite, SetAttributes
from liveset.edit.commit import Policy, commit
from liveset.edit.versions import was_committed
from liveset.errors import CommitUnknown, ForeignEdit, OverwriteConflict, StorageError, UnsupportedFormat
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry
from liveset.snapshot import open_snapshot
from liveset.storage import HEAD, Head, Store, open_store, version_name
from liveset.storage.local import LocalStore
from liveset.testing import FaultyStore, MemoryStore, SimulatedCrash, WrappedStore
from liveset.testing.disk import FailingFiles
from liveset.testing.faults import When
from liveset.testing.invariants import check_dataset, stage

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}
AT_ONCE = Policy(first_pause=0)
WHENS: tuple[When, ...] = ("before", "after", "torn")


def head_of(store: Store) -> Index | None:
    head = store.read_head()
    return None if head is None else Index.parse(head.data)


def append(store: Store, name: str, *, session: str | None = None, base: Index | None = None) -> Index:
    return commit(store, Append(CONFIG, (stage(store, name),)), base, session=session, policy=AT_ONCE)


def names(index: Index | None) -> list[str]:
    return [record.filename for record in index.chunks] if index else []


# Crashes


@dataclass(frozen=True)
class Case:
    """One operation on a dataset with the chunks ``before``; afterwards it has ``before`` and the new one, or only that."""

    before: tuple[str, ...]
    change: Callable[[Store, str], Change]
    foreign: bool = False
    replaces: bool = False

    def prepare(self, store: Store) -> None:
        records = [stage(store, name) for name in self.before]
        if self.foreign:
            document = {"chunks": [record.to_json() for record in records], "config": CONFIG}
            store.swap_head(json.dumps(document).encode(), None)
        elif records:
            for record in records:
                commit(store, Append(CONFIG, (record,)), None, policy=AT_ONCE)

    def act(self, store: Store, name: str) -> Index:
        return commit(store, self.change(store, name), head_of(store), session="job", policy=AT_ONCE)

    def is_done(self, index: Index | None) -> bool:
        return index is not None and (index.attributes == {"name": "new"} or any(name.startswith("new") for name in names(index)))

    def check(self, store: Store) -> bool:
        """The dataset is the old or the new one, whole; True if it is the new one."""
        check_dataset(store)
        head = head_of(store)
        done = self.is_done(head)
        old = [name for name in names(head) if not name.startswith("new")]
        assert old == ([] if done and self.replaces else list(self.before))
        assert done == was_committed(store, "job")
        return done


def _append(store: Store, name: str) -> Change:
    return Append(CONFIG, (stage(store, name + "-1"), stage(store, name + "-2")))


def _overwrite(store: Store, name: str) -> Change:
    return Overwrite(CONFIG, (stage(store, name),))


CASES = {
    "create": Case((), _append),
    "append": Case(("a", "b"), _append),
    "overwrite": Case(("a", "b"), _overwrite, replaces=True),
    "set attributes": Case(("a", "b"), lambda _store, _name: SetAttributes({"name": "new"})),
    "adopt": Case(("a", "b"), _append, foreign=True),
    "overwrite a foreign one": Case(("a",), _overwrite, foreign=True, replaces=True),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    if request.param == "memory":
        return MemoryStore
    numbers = itertools.count()
    return lambda: LocalStore(tmp_path / str(next(numbers)))


def crashes(case: Case, prepare: Callable[[], Store]) -> Iterator[tuple[int, When]]:
    """Every place where the operation can be cut: call number and how."""
    store = FaultyStore(prepare())
    case.act(store, "new")
    assert len(store.calls) >= 4
    return itertools.product(range(1, len(store.calls) + 1), WHENS)


def recover(case: Case, store: Store, where: object) -> None:
    done = case.check(store)
    version = getattr(head_of(store), "version", 0)
    case.act(store, f"new again {where}")  # the same session: finishes what the crash left, or finds it done
    assert case.check(store)
    assert getattr(head_of(store), "version", 0) == (version if done else version + 1)
    append(store, f"later {where}")
    assert len(check_dataset(store)) >= 1


@each_case
def test_a_crash_at_any_call_leaves_the_old_or_the_new_version(case: Case, new_store: Callable[[], Store]) -> None:
    def prepare() -> Store:
        store = new_store()
        case.prepare(store)
        return store

    outcomes = set()
    for crash_at, when in crashes(case, prepare):
        store = prepare()
        with pytest.raises(SimulatedCrash):
            case.act(FaultyStore(store, crash_at, when), "new")
        outcomes.add(case.check(store))
        recover(case, store, f"{crash_at} {when}")
    assert outcomes == {False, True}


@each_case
def test_two_crashes_in_a_row_do_no_more_harm(case: Case) -> None:
    def prepare() -> Store:
        store = MemoryStore()
        case.prepare(store)
        return store

    places = list(crashes(case, prepare))
    for first, second in itertools.product(places, places):
        store = prepare()
        for number, (crash_at, when) in enumerate((first, second)):
            try:
                case.act(FaultyStore(store, crash_at, when), f"new {number}")
            except SimulatedCrash:
                continue
            assert case.check(store)  # the second found the work of the first, in fewer calls
        recover(case, store, "twice")


@each_case
def test_a_crash_between_any_two_calls_to_the_system(case: Case, tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> Path:
        root = tmp_path / str(next(numbers))
        case.prepare(LocalStore(root))
        return root

    calls = FailingFiles()
    case.act(LocalStore(prepare(), files=calls), "new")
    for crash_at, when in itertools.product(range(1, len(calls.calls) + 1), WHENS):
        root = prepare()
        with pytest.raises(SimulatedCrash):
            case.act(LocalStore(root, files=FailingFiles(crash_at, when)), "new")
        recover(case, LocalStore(root), f"{crash_at} {when}")
        assert not list((root / "_liveset").glob("*.tmp"))


@each_case
def test_an_error_at_any_call_to_the_system_is_honest(case: Case, tmp_path: Path) -> None:
    """A disk that fails once: either the call says that it is done, or nothing was done, or it says that it does not know."""
    numbers = itertools.count()

    def prepare() -> Path:
        root = tmp_path / str(next(numbers))
        case.prepare(LocalStore(root))
        return root

    calls = FailingFiles()
    case.act(LocalStore(prepare(), files=calls), "new")
    for fail_at, when in itertools.product(range(1, len(calls.calls) + 1), ("before", "after")):
        root = prepare()
        error = OSError(5, "Input/output error")
        try:
            case.act(LocalStore(root, files=FailingFiles(fail_at, when, error)), "new")  # type: ignore[arg-type]
            said_done = True
        except CommitUnknown:
            continue
        except StorageError:
            said_done = False
        assert case.check(LocalStore(root)) is said_done, (calls.calls[fail_at - 1], when)


# Foreign programs


@pytest.fixture
def committed() -> MemoryStore:
    store = MemoryStore()
    for name in "abc":
        append(store, name)
    return store


def unstamped(store: Store) -> bytes:
    document = json.loads(store.read(HEAD))
    del document["edit"]
    return json.dumps(document).encode()


def test_a_head_that_another_program_left_is_never_built_upon(committed: MemoryStore) -> None:
    data = committed.read(HEAD)
    for wrong in (unstamped(committed), data.replace(b'"chunk_size": 1', b'"chunk_size": 7'), committed.read(version_name(1)), None):
        committed.foreign_head(wrong)
        before = dict(committed.files)
        for change in (Append(CONFIG, ()), Overwrite(CONFIG, (), force=True), SetAttributes({"name": "x"})):
            with pytest.raises(ForeignEdit, match="index.json") as info:
                commit(committed, change, None, policy=AT_ONCE)
            assert info.value.file.endswith("index.json")
        assert committed.files == before


def test_a_head_put_back_as_told_can_be_built_upon(committed: MemoryStore) -> None:
    committed.foreign_head(unstamped(committed))
    with pytest.raises(ForeignEdit, match="liveset repair"):
        append(committed, "d")
    committed.foreign_head(committed.read(version_name(2)))
    assert names(append(committed, "e")) == ["a", "b", "e"]
    check_dataset(committed)


def test_a_busy_dataset_is_not_taken_for_a_foreign_edit() -> None:
    """Between reading the head and looking for later versions others may commit; that is a race, not a foreign program."""
    store = MemoryStore()
    append(store, "a")

    class Busy(WrappedStore):
        left = 3

        def read_head(self) -> Head | None:
            head = super().read_head()
            if self.left:
                self.left -= 1
                append(store, f"b{self.left}")
                append(store, f"c{self.left}")
            return head

    mine = append(Busy(store), "mine")
    assert names(mine)[-1] == "mine"
    check_dataset(store)


def test_a_needed_feature_of_writers_is_named(committed: MemoryStore) -> None:
    index = head_of(committed)
    assert index is not None
    assert index.edit is not None
    edit = dataclasses.replace(index.edit, requires_write=("overlay",))
    committed.foreign_head(index.replace(edit=edit).to_bytes())
    with pytest.raises(UnsupportedFormat, match="'overlay'"):
        append(committed, "d")


# Time


def test_versions_are_later_than_their_parents_whatever_the_clock_says() -> None:
    store = MemoryStore()
    times = iter([datetime(2030, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)])
    policy = Policy(first_pause=0, now=lambda: next(times))
    for name in "abc":
        commit(store, Append(CONFIG, (stage(store, name),)), None, policy=policy)
    versions = check_dataset(store)  # asserts the order and that updated_at differs
    assert [index.members["updated_at"] for index in versions] == [b'"1893456000.000000"', b'"1893456000.000001"', b'"1893456000.000002"']


def test_updated_at_differs_from_that_of_an_adopted_dataset() -> None:
    store = MemoryStore()
    store.foreign_head(b'{"chunks": [], "config": null, "updated_at": "1893456000.000000"}')
    commit(store, SetAttributes({}), head_of(store), policy=Policy(now=lambda: datetime(2030, 1, 1, tzinfo=UTC)))
    check_dataset(store)


# Processes


def _appends(root: str, number: int, count: int) -> list[str]:
    store = open_store(root)
    done = []
    for turn in range(count):
        base = open_snapshot(store).index
        done.append(f"{number}-{turn}")
        commit(store, Append(CONFIG, (stage(store, done[-1]),)), base)
    return done


def test_appends_of_four_processes_are_all_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    append(store, "first")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        done = pool.starmap(_appends, [(str(tmp_path), number, 20) for number in range(4)])
    versions = check_dataset(store)
    assert len(versions) == 81
    found = names(versions[-1])
    assert sorted(found) == sorted(["first", *itertools.chain(*done)])
    for each in done:  # the order of one writer is kept
        assert [name for name in found if name in each] == each


def _creates(root: str, number: int) -> str:
    store = open_store(root)
    change = Overwrite(CONFIG, (stage(store, f"{number}"),))
    try:
        commit(store, change, None)
    except OverwriteConflict:
        return "refused"
    return f"{number}"


def test_of_several_that_create_a_dataset_one_wins(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        answers = pool.starmap(_creates, [(str(tmp_path), number) for number in range(4)])
    assert answers.count("refused") == 3
    assert [names(index) for index in check_dataset(LocalStore(tmp_path))] == [[answer] for answer in answers if answer != "refused"]


def test_a_slow_writer_gets_its_turn(tmp_path: Path) -> None:
    """Others commit while it prepares; after three lost races they have to wait."""
    quick = LocalStore(tmp_path, lock_timeout=0.01)
    base = commit(quick, Overwrite(CONFIG, (stage(quick, "a"),)), None)
    rivals: list[str] = []

    def rival() -> None:
        try:
            commit(quick, SetAttributes({"n": len(rivals)}), None)
            rivals.append("committed")
        except StorageError as error:
            rivals.append("waits" if "locked by another writer" in str(error) else str(error))

    def prepare(head: Index | None, since: Sequence[HistoryEntry]) -> Append:
        thread = threading.Thread(target=rival)
        thread.start()
        thread.join()
        return Append(CONFIG, (record,))

    slow = LocalStore(tmp_path)
    record = stage(slow, "b")
    index = commit(slow, prepare, base, policy=Policy(sleep=lambda _: None))
    assert rivals == ["committed", "committed", "committed", "waits"]
    assert index.version == 5
    commit(quick, SetAttributes({"after": True}), None)
    check_dataset(slow)
