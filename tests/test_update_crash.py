"""Updates that crash, race, or are not told the outcome: the dataset is whole, and nothing is lost or done twice."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from liveset.edit.changes import files_of
from liveset.edit.commit import Policy
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import CommitUnknown, KeyConflict, OverwriteConflict, SessionClosed
from liveset.format import codec
from liveset.format.chunk import open_chunk
from liveset.format.codec import Compression
from liveset.format.schema import Decoder, Schema
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import HEAD, Store, Swap, open_store
from liveset.storage.local import LocalStore
from liveset.testing import FaultyStore, LossyStore, MemoryStore, SimulatedCrash, WrappedStore
from liveset.testing.faults import When
from liveset.testing.invariants import check_dataset, unneeded_files
from tests.support.foreign import make_foreign
from tests.support.writing import write_dataset

AT_ONCE = Policy(first_pause=0)
COUNT = 10
OLD = [{"id": f"k{i}", "v": i} for i in range(COUNT)]
EDITS = {1: -1, 2: -2, 7: -7}
"""Two chunks of four samples each are touched."""
NEW = [{"id": f"k{i}", "v": EDITS.get(i, i)} for i in range(COUNT)]


def write(path: Path, *, foreign: bool = False, compression: Compression | None = None) -> Path:
    write_dataset(path, OLD, key="id", compression=compression)
    if foreign:
        make_foreign(path)
    return path


def in_memory(path: Path) -> MemoryStore:
    store = MemoryStore()
    for entry in LocalStore(path).list(""):
        if entry.name != HEAD:
            store.write(entry.name, (path / entry.name).read_bytes())
    store.foreign_head((path / HEAD).read_bytes())
    return store


def update_of(store: Store, edits: dict[int, int], session: str | None = None) -> DatasetUpdate:
    update = DatasetUpdate(store, session=session, policy=AT_ONCE)
    for number, value in edits.items():
        update[f"k{number}"] = {"id": f"k{number}", "v": value}
    return update


def samples_of(snapshot: Snapshot) -> list[Any]:
    index = snapshot.index
    assert index.config is not None
    decoder = Decoder(Schema.from_config(index.config), strict=not index.has_foreign_chunks)
    compression = codec.Compression.from_config(index.config)
    found: list[Any] = []
    for number, record in enumerate(index.chunks):
        found += open_chunk(snapshot.chunk_file(number)[1], record, decoder, compression).iterate(0, record.samples)
    return found


def check(store: Store) -> list[Any]:
    """Check every version, its checksums and its keys; return the newest samples."""
    check_dataset(store)
    newest = open_snapshot(store)
    found = samples_of(newest)
    keys = open_keys(newest)
    assert keys is not None
    places = keys.locate_many([sample["id"] for sample in found])
    assert [newest.starts[place[0]] + place[1] for place in places if place is not None] == list(range(len(found)))
    return found


def orphans(store: Store) -> set[str]:
    """Chunk files and key tables that no version names."""
    newest = open_snapshot(store)
    first = 1 if newest.index.edit is None or newest.index.version == 0 else min(entry.version for entry in list_versions(store))
    versions = [open_snapshot(store, version).index for version in range(first, newest.version + 1)]
    known = set[str]().union(*map(files_of, versions))
    names = {entry.name for prefix in ("chunk-", "_liveset/keys/") for entry in store.list(prefix)}
    return {name for name in names - known if name.count("-") > 2 or name.startswith("_liveset")}


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Store]:
    """Makes a fresh store with the ten samples each time."""
    numbers, template = itertools.count(), tmp_path / "template"

    def make(**options: Any) -> Store:
        if not template.exists():
            write(template, **options)
        if request.param == "memory":
            return in_memory(template)
        return LocalStore(shutil.copytree(template, tmp_path / str(next(numbers))))

    return make


# --- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_leaves_the_old_version_or_the_new_one(new_store: Callable[..., Store], when: Any, foreign: bool) -> None:
    if foreign:
        pytest.importorskip("pyarrow", exc_type=ImportError)
    counting = FaultyStore(new_store(foreign=foreign))
    update_of(counting, EDITS).commit()
    assert len(counting.calls) >= 9
    outcomes = set()
    for call in range(1, len(counting.calls) + 1):
        store = new_store(foreign=foreign)
        with pytest.raises(SimulatedCrash):
            update_of(FaultyStore(store, call, when), EDITS, session="job").commit()
        after = samples_of(open_snapshot(store))
        assert after in (OLD, NEW), f"call {call} ({counting.calls[call - 1]}) {when}"
        outcomes.add(after == NEW)
        # The same job again: what it did is not done twice, and what it left behind does no harm.
        version = update_of(store, EDITS, session="job").commit().version
        assert version == (1 if foreign else 2)
        assert check(store) == NEW
        update_of(store, {1: 5}).commit()
        assert check(store)[1]["v"] == 5
    assert outcomes == ({False, True} if when == "after" else {False})


@dataclass(frozen=True)
class Job:
    """Edits by number of key; one that is started again leaves out what it did already."""

    puts: dict[int, int] = field(default_factory=dict)
    patches: dict[int, int] = field(default_factory=dict)
    inserts: dict[int, int] = field(default_factory=dict)
    deletes: tuple[int, ...] = ()

    def run(self, store: Store, session: str | None = None) -> int:
        """Commit, and return the version."""
        with DatasetUpdate(store, session=session, policy=AT_ONCE) as update:
            for number, value in self.inserts.items():
                update.upsert(f"k{number}", {"id": f"k{number}", "v": value})
            for number in self.deletes:
                if f"k{number}" in update:
                    del update[f"k{number}"]
            for number, value in self.puts.items():
                update[f"k{number}"] = {"id": f"k{number}", "v": value}
            for number, value in self.patches.items():
                update.patch(f"k{number}", v=value)
            return update.commit().version

    def result(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what becomes of samples."""
        values = {sample["id"]: sample["v"] for sample in samples}
        values |= {f"k{number}": value for number, value in {**self.puts, **self.patches, **self.inserts}.items()}
        return [{"id": key, "v": value} for key, value in values.items() if int(key[1:]) not in self.deletes]


JOBS = {
    "insert": Job(inserts={20: 1, 21: 2, 22: 3, 23: 4, 24: 5}),
    "delete": Job(deletes=(1, 2, 8)),
    "delete a chunk": Job(deletes=(4, 5, 6, 7)),
    "delete all": Job(deletes=tuple(range(COUNT))),
    "patch": Job(patches={1: -1, 7: -7}),
    "mixed": Job(puts={0: 50}, patches={3: 53}, inserts={20: 1, 21: 2}, deletes=(1, 4, 5, 6, 7)),
}


def crash_everywhere(new_store: Callable[[], Store], job: Job, when: When) -> int:
    """Crash at every call of a commit; then the job is started again, others go on, and a vacuum cleans up. Returns the number of calls."""
    counting = FaultyStore(new_store())
    first = job.run(counting)
    done, outcomes = job.result(OLD), set()
    for call in range(1, len(counting.calls) + 1):
        store = new_store()
        with pytest.raises(SimulatedCrash):
            job.run(FaultyStore(store, call, when), "job")
        after = samples_of(open_snapshot(store))
        assert after in (OLD, done), f"call {call} ({counting.calls[call - 1]}) {when}"
        outcomes.add(after == done)
        check_dataset(store)
        # The same job again: what it did is not done twice, and what it left behind does no harm.
        assert job.run(store, "job") in (first, first - (after == done))
        assert check(store) == done
        assert open_snapshot(store).version == first
        more = Job(inserts={30: 1}, deletes=(9,))
        more.run(store)
        assert check(store) == more.result(done)
        vacuum_store(store, keep=0, grace=timedelta(0), policy=AT_ONCE)
        assert check(store) == more.result(done)
        assert unneeded_files(store) == set()
    assert outcomes == ({False, True} if when == "after" else {False})
    return len(counting.calls)


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_of_any_kind_of_edit(tmp_path: Path, kind: str, when: When) -> None:
    write(tmp_path / "ds")
    assert crash_everywhere(lambda: in_memory(tmp_path / "ds"), JOBS[kind], when) >= 6


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_of_an_edit_on_a_disk(tmp_path: Path, when: When) -> None:
    write(tmp_path / "ds")
    numbers = itertools.count()

    def make() -> Store:
        return LocalStore(shutil.copytree(tmp_path / "ds", tmp_path / str(next(numbers))))

    assert crash_everywhere(make, JOBS["mixed"], when) >= 10


@pytest.mark.parametrize("when", ["before", "after", "torn"])
@pytest.mark.parametrize("kind", ["insert", pytest.param("delete a chunk", marks=pytest.mark.nightly), "mixed"])
def test_a_crash_at_any_call_of_the_edit_that_adopts(tmp_path: Path, kind: str, when: When) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    write(tmp_path / "ds", foreign=True)
    assert crash_everywhere(lambda: in_memory(tmp_path / "ds"), JOBS[kind], when) >= 10


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["sample", "batch", "chunk"])
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_of_any_kind_of_edit_of_compressed_chunks(tmp_path: Path, kind: str, level: Any, when: When) -> None:
    write(tmp_path / "ds", compression=Compression("zstd", level))
    crash_everywhere(lambda: in_memory(tmp_path / "ds"), JOBS[kind], when)


def test_a_crash_leaves_the_chunk_that_another_edit_needs(tmp_path: Path) -> None:
    """Sessions that were open together, one of which crashes: the other one goes on as if it had not been there, or had committed."""
    write(tmp_path / "ds")
    counting = FaultyStore(in_memory(tmp_path / "ds"))
    JOBS["mixed"].run(counting)
    for call in range(1, len(counting.calls) + 1):
        store = in_memory(tmp_path / "ds")
        other = update_of(store, {2: 70, 8: 80})
        with pytest.raises(SimulatedCrash):
            JOBS["mixed"].run(FaultyStore(store, call, "after"))
        before = samples_of(open_snapshot(store))
        other.commit()
        assert check(store) == Job(puts={2: 70, 8: 80}).result(before)


def test_two_crashes_in_a_row(tmp_path: Path) -> None:
    count = len((counting := FaultyStore(in_memory(write(tmp_path / "ds")))).calls)
    update_of(counting, EDITS).commit()
    for first, second in itertools.product(range(count + 4, len(counting.calls) + 1), repeat=2):
        store = in_memory(tmp_path / "ds")
        for call in (first, second):
            try:
                update_of(FaultyStore(store, call, "after"), EDITS, session="job").commit()
            except SimulatedCrash:
                continue
        assert samples_of(open_snapshot(store)) in (OLD, NEW)
        update_of(store, EDITS, session="job").commit()
        assert check(store) == NEW
        assert open_snapshot(store).version == 2


# --- races ----------------------------------------------------------------------------------------------------------


class Rival(WrappedStore):
    """Somebody else commits just before our swaps; each act is for one swap."""

    def __init__(self, store: Store, *acts: Callable[[], object]) -> None:
        super().__init__(store)
        self.acts, self.writes = list(acts), 0

    def write(self, name: str, data: Any) -> None:
        self.writes += 1
        super().write(name, data)

    def swap_head(self, data: bytes, expected: Any, withdraw: Any = ()) -> Swap:
        if self.acts:
            self.acts.pop(0)()
        return super().swap_head(data, expected, withdraw)


@pytest.mark.parametrize("level", [None, "sample", "batch", "chunk"])
def test_other_keys_of_the_same_chunk_are_merged(new_store: Callable[..., Store], level: str | None) -> None:
    store = new_store(compression=Compression("zstd", level) if level else None)
    rival = Rival(store, *(lambda turn=turn: update_of(store, {0: turn, 3: turn}).commit() for turn in range(3)))
    update = update_of(rival, EDITS)
    result = update.commit()
    assert result.version == 5
    assert [sample["v"] for sample in samples_of(open_snapshot(store))] == [2, -1, -2, 2, 4, 5, 6, -7, 8, 9]
    assert rival.writes == 1 + 4, "the chunk that only we touched was written once"
    assert orphans(store) == set()
    if level != "chunk":
        check(store)


def test_the_same_key_is_a_conflict(new_store: Callable[..., Store]) -> None:
    store = new_store()
    rival = Rival(store, lambda: update_of(store, {0: 9}).commit(), lambda: update_of(store, {2: 9, 7: 9}).commit())
    update = update_of(rival, EDITS)
    with pytest.raises(KeyConflict, match="'k2', 'k7'") as caught:
        update.commit()
    assert set(caught.value.keys) == {"k2", "k7"}
    assert [sample["v"] for sample in check(store)] == [9, 1, 9, 3, 4, 5, 6, 9, 8, 9]
    assert orphans(store) == set()


def test_an_overwrite_wins_against_an_update(tmp_path: Path) -> None:
    path = write(tmp_path / "ds")
    store = LocalStore(path)
    rival = Rival(store, lambda: write_dataset(path, OLD[:3], key="id"))
    with pytest.raises(OverwriteConflict):
        update_of(rival, EDITS).commit()
    assert check(store) == OLD[:3]
    assert orphans(store) == set()


def test_an_update_writes_nothing_again_for_commits_elsewhere(new_store: Callable[..., Store]) -> None:
    store = new_store()
    rival = Rival(store, *(lambda turn=turn: update_of(store, {8: turn}).commit() for turn in range(5)))
    update_of(rival, EDITS).commit()
    assert rival.writes == 2
    assert [sample["v"] for sample in check(store)] == [0, -1, -2, 3, 4, 5, 6, -7, 4, 9]


@pytest.mark.parametrize("foreign", [False, True])
def test_two_first_updates_of_a_dataset(new_store: Callable[..., Store], foreign: bool) -> None:
    if foreign:
        pytest.importorskip("pyarrow", exc_type=ImportError)
    store = new_store(foreign=foreign)
    rival = Rival(store, lambda: update_of(store, {0: 50, 9: 90}).commit())
    update_of(rival, EDITS).commit()
    assert [sample["v"] for sample in check(store)] == [50, -1, -2, 3, 4, 5, 6, -7, 8, 90]
    assert orphans(store) == set()


def test_sessions_that_were_open_together_in_any_order(new_store: Callable[..., Store]) -> None:
    for order in itertools.permutations(range(3)):
        store = new_store()
        sessions = [update_of(store, {number: -number - 1, number + 4: -number - 5}) for number in range(3)]
        for number in order:
            sessions[number].commit()
        assert [sample["v"] for sample in check(store)] == [-1, -2, -3, 3, -5, -6, -7, 7, 8, 9]
        assert open_snapshot(store).version == 4


# --- lost answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["".join(plan) for length in (1, 2, 3) for plan in itertools.product("aldrx", repeat=length)])
def test_lost_answers(tmp_path_factory: pytest.TempPathFactory, plan: str) -> None:
    """Case 22: success means that it is in, and trying again after CommitUnknown settles it, once."""
    store = in_memory(write(tmp_path_factory.mktemp("lost") / "ds"))
    lossy = LossyStore(store, plan + "x" * (4 - len(plan)))
    update = update_of(lossy, EDITS)
    unknown: CommitUnknown | None = None
    try:
        update.commit()
    except CommitUnknown as error:
        unknown = error
    if unknown is not None:
        with pytest.raises(SessionClosed, match="not known"):
            update["k0"] = OLD[0]
        assert update.commit().version == 2
        assert list_versions(store)[0].session == unknown.session
    lossy.deliver()
    assert check(store) == NEW
    assert open_snapshot(store).version == 2
    assert orphans(store) == set()


def test_an_unknown_outcome_and_then_a_rival(tmp_path: Path) -> None:
    store = in_memory(write(tmp_path / "ds"))
    lossy = LossyStore(store, "xxxx")
    update = update_of(lossy, EDITS)
    with pytest.raises(CommitUnknown):
        update.commit()
    update_of(store, {0: 50}).commit()
    assert update.commit().version == 3
    assert check(store) == [{"id": "k0", "v": 50}, *NEW[1:]]


# --- processes ------------------------------------------------------------------------------------------------------


def add_up(path: str, worker: int, turns: int) -> None:
    """Count a key of one's own up to ``turns``, one commit for each step."""
    for turn in range(turns):
        with dataset_update(path) as update:
            assert update[f"k{worker}"]["v"] == worker + turn, "an acknowledged commit is lost"
            update[f"k{worker}"] = {"id": f"k{worker}", "v": worker + turn + 1}
            update.commit()


@pytest.mark.slow
def test_eight_processes_lose_no_update(tmp_path: Path) -> None:
    """Case 24: all in three chunks, so that most commits meet others in theirs."""
    path, turns = write(tmp_path / "ds"), 6
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=add_up, args=(str(path), worker, turns)) for worker in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    store = open_store(path)
    assert [sample["v"] for sample in check(store)] == [i + turns if i < 8 else i for i in range(COUNT)]
    assert open_snapshot(store).version == 1 + 8 * turns
    assert orphans(store) == set()


def set_all(path: str) -> None:
    """Set all samples to one value, again and again."""
    while True:
        value = random.randrange(1 << 40)
        with dataset_update(path) as update:
            for number in range(COUNT):
                update[f"k{number}"] = {"id": f"k{number}", "v": value}
            try:
                update.commit()
            except KeyConflict:
                continue


def kill_updates(path: Path, seconds: float, seed: int) -> int:
    dice, killed = random.Random(seed), 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        processes = [context.Process(target=set_all, args=(str(path),), daemon=True) for _ in range(2)]
        for process in processes:
            process.start()
        time.sleep(dice.uniform(0.1, 0.4))
        for process in processes:
            process.kill()
            process.join()
            killed += 1
        values = {sample["v"] for sample in check(open_store(path))}
        assert len(values) == 1 or open_snapshot(open_store(path)).version == 1, "half an update is seen"
        update_of(open_store(path), dict.fromkeys(range(COUNT), killed)).commit()  # no lock is left behind
    return killed


@pytest.mark.slow
def test_killed_updates_are_whole_or_not_there(tmp_path: Path) -> None:
    """Case 35."""
    assert kill_updates(write(tmp_path / "ds"), 4, seed=1) >= 4


@pytest.mark.nightly
def test_killed_updates_for_long(tmp_path: Path) -> None:
    for seed in range(8):
        kill_updates(write(tmp_path / str(seed)), 10, seed=seed)
