"""Vacuum: what it deletes and what it never does, crashes at every call, races in every order, and mutants that must be noticed."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset import lease
from liveset.edit import vacuum as vacuum_module
from liveset.edit.changes import HISTORY, Append, Keys, Overwrite, Retag
from liveset.edit.commit import _Commit, commit
from liveset.edit.retention import Kind, kind_of
from liveset.edit.versions import was_committed
from liveset.errors import Conflict, DatasetNotFound, SessionExpired, StorageError, UnsupportedFormat, VersionExpired
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import KeyFiles
from liveset.lease import LIFE, leased_versions, pin
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import VERSIONS, Buffer, Entry, Store, open_store, version_name
from liveset.storage.files import Files
from liveset.storage.local import LocalStore
from liveset.testing import FaultyStore, MemoryStore, SimulatedCrash, WrappedStore
from liveset.testing.faults import When
from liveset.testing.invariants import check_dataset, stage, unneeded_files
from liveset.testing.schedule import in_turn, run_interleaved
from tests.support.foreign import write_foreign
from tests.support.racing import (
    CONFIG,
    append,
    appender,
    check_after,
    chunk,
    content,
    overwrite,
    overwriter,
    pinned_reader,
    plain_reader,
    restore,
    restorer,
    sweep,
    tag,
    tagger,
    vacuumer,
)

DAY = timedelta(days=1)
WHENS: tuple[When, ...] = ("before", "after", "torn")


def dataset(store: Store) -> Store:
    """Versions 1 to 4, of which each names another file, and one file that nothing names."""
    append(store)
    overwrite(store)
    overwrite(store)
    append(store)
    chunk(store)
    return store


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    if request.param == "memory":
        return MemoryStore
    numbers = itertools.count()
    return lambda: LocalStore(tmp_path / str(next(numbers)))


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    dataset(store)
    return store


def names(store: Store, kind: Kind) -> list[str]:
    return sorted(entry.name for entry in store.list("") if kind_of(entry.name) is kind)


# What goes and what stays


def test_it_keeps_the_newest_version_and_deletes_what_only_others_need(new_store: Callable[[], Store]) -> None:
    store = dataset(new_store())
    newest = content(store)
    report = sweep(store)
    assert content(store) == newest
    assert (report.version, report.expired, report.kept) == (5, (1, 2, 3), (4, 5))
    assert {kind: len(found) for kind, found in report.deleted.items()} == {"chunk": 3, "version": 3}
    assert report.files == 6
    assert names(store, Kind.CHUNK) == sorted(record.filename for record in open_snapshot(store).index.chunks)
    assert unneeded_files(store) == set()
    check_dataset(store)
    for version in (1, 2, 3):
        with pytest.raises(VersionExpired, match="vacuum of version 5"):
            open_snapshot(store, version)


def test_the_report_counts_the_bytes_that_are_free_afterwards(new_store: Callable[[], Store]) -> None:
    store = dataset(new_store())
    planned = sweep(store, dry_run=True)
    before = {entry.name: entry.size for entry in store.list("")}
    report = sweep(store)
    gone = before.keys() - {entry.name for entry in store.list("")}
    assert {name for found in report.deleted.values() for name in found} == gone
    assert report.freed == planned.freed == sum(before[name] for name in gone)
    assert planned.deleted == report.deleted
    assert (planned.version, planned.dry_run, planned.expired) == (None, True, (1, 2, 3))


def test_a_dry_run_changes_nothing(store: MemoryStore) -> None:
    before = dict(store.files)
    assert sweep(store, dry_run=True).files == 6
    assert store.files == before


def test_nothing_to_do_makes_no_version_however_often(store: MemoryStore) -> None:
    sweep(store)
    head = store.read_head()
    for _ in range(3):
        report = sweep(store)
        assert (report.version, report.files, report.expired, report.kept) == (None, 0, (), (4, 5))
    assert store.read_head() == head


@pytest.mark.parametrize(("keep", "first"), [(0, 4), (1, 4), (2, 3), (3, 2), (4, 1), (9, 1)])
def test_so_many_versions_that_changed_the_content_are_kept(store: MemoryStore, keep: int, first: int) -> None:
    tag(store, "newest", 4)  # version 5, which changes no content
    report = sweep(store, keep)
    assert min(report.kept) == (first if keep else 4)
    assert [len(content(store, version)) for version in report.kept] == [{1: 1, 2: 1, 3: 1}.get(version, 2) for version in report.kept]


def test_a_version_is_as_old_as_its_replacement(store: MemoryStore) -> None:
    # Version 4 has been there for a year, but was the newest one until an hour ago.
    store._time += timedelta(days=365)
    append(store)
    store._time += timedelta(hours=1)
    # This store dates an archive by when it was made, which is when the version was replaced; so its parent looks younger than it is.
    assert sweep(store, DAY).expired == (1, 2)
    store._time += DAY
    assert 4 in sweep(store, timedelta(days=2)).kept
    assert sweep(store, DAY).expired == (3, 4, 5)


def test_a_version_that_was_replaced_within_the_time_is_kept_however_old(tmp_path: Path) -> None:
    store = dataset(LocalStore(tmp_path))
    now = store.now().timestamp()
    ages = {version_name(1): 400, version_name(2): 300, version_name(3): 10, "index.json": 1}
    for name, days in ages.items():
        os.utime(tmp_path / name, (now - days * 86_400,) * 2)
    assert sweep(store, 11 * DAY, DAY).expired == (1,)  # version 2 was the newest one until ten days ago
    assert sweep(store, 9 * DAY, DAY).expired == (2,)


def test_what_is_younger_than_the_grace_stays(store: MemoryStore) -> None:
    unnamed = names(store, Kind.CHUNK)[-1]
    assert "chunk" not in sweep(store, grace=DAY).deleted
    assert unnamed in names(store, Kind.CHUNK)
    store._time += DAY
    assert unnamed in sweep(store, grace=DAY).deleted["chunk"]
    assert unneeded_files(store) == set()


def test_a_stamp_of_whole_seconds_may_be_a_second_early() -> None:
    class Whole(MemoryStore):
        """Lists times cut to the second."""

        fine = datetime(2030, 1, 1, tzinfo=UTC)

        def now(self) -> datetime:
            return self.fine

        def list(self, prefix: str) -> Iterator[Entry]:
            for entry in super().list(prefix):
                yield Entry(entry.name, entry.size, entry.modified.replace(microsecond=0))

    store = Whole()
    store.fine += timedelta(milliseconds=100)
    append(store)
    store.fine += timedelta(milliseconds=800)
    late = chunk(store)  # at .9, listed as .0
    store.fine += timedelta(milliseconds=300)  # 0.3 s later; by its stamp it would be 1.2 s old
    assert sweep(store, grace=timedelta(seconds=1)).files == 0
    store.fine += timedelta(seconds=1)
    assert sweep(store, grace=timedelta(seconds=1)).deleted == {"chunk": (late.filename,)}


def test_tagged_versions_stay_and_go_when_the_tag_goes(store: MemoryStore) -> None:
    old = content(store, 2)
    tag(store, "paper", 2)
    assert sweep(store).kept == (2, 5, 6)
    assert content(store, 2) == old
    check_dataset(store)
    assert sweep(store).files == 0
    commit(store, Retag("paper", None), open_snapshot(store).index)
    assert content(store, 2) == old  # until a vacuum looks
    assert 2 in sweep(store).expired
    with pytest.raises(VersionExpired):
        tag(store, "paper", 2)


def test_a_restored_version_lives_on_without_its_number(store: MemoryStore) -> None:
    old = content(store, 2)
    restore(store, 2)
    assert 2 in sweep(store).expired
    assert content(store) == old
    with pytest.raises(VersionExpired):
        restore(store, 2)


def test_key_tables_go_with_the_versions_that_name_them(store: MemoryStore) -> None:
    def keyed(name: str) -> Index:
        store.write(f"_liveset/keys/{name}", b"table")
        keys = Keys(KeyFiles("text", 1, (f"_liveset/keys/{name}",)), {"version": 1})
        return commit(store, Overwrite(CONFIG, (chunk(store),), force=True, keys=keys), None)

    keyed("base-1.keys")
    kept = keyed("base-2.keys").version
    store.write("_liveset/keys/base-3.keys", b"of a commit that lost its race")
    store.write("keys/shard-00000.parquet", b"published")
    tag(store, "keyed", kept)
    overwrite(store)
    report = sweep(store)
    assert report.deleted["key table"] == ("_liveset/keys/base-1.keys", "_liveset/keys/base-3.keys")
    assert {entry.name for entry in store.list("_liveset/keys/")} == {"_liveset/keys/base-2.keys"}
    assert not report.unknown


def test_published_keys_and_unknown_names_are_left_alone(store: MemoryStore) -> None:
    unknown = ["README.md", "_liveset/new/kind.bin", "_liveset/versions/notes.txt", "chunk-notes.txt", "part-0.bin", "sub/chunk-0-0.bin"]
    for name in [*unknown, "keys/shard-00000.parquet", "keys.parquet"]:
        store.write(name, b"x")
    report = sweep(store)
    assert report.unknown == tuple(sorted(unknown))
    assert {*unknown, "keys/shard-00000.parquet", "keys.parquet"} <= set(store.files)


def test_temporary_files_of_dead_writers_go(store: MemoryStore) -> None:
    name = f"_liveset/index.json.{'a' * 16}.tmp"
    store.write(name, b"half a head")
    assert sweep(store).deleted["temporary file"] == (name,)


def test_files_that_the_old_tool_inflated_in_place_stay() -> None:
    store = MemoryStore()
    record = ChunkRecord("chunk-0-0.zstd.bin", 1, 5)
    commit(store, Append(CONFIG | {"compression": "zstd"}, (record,)), None)
    store.write("chunk-0-0.bin", b"plain")
    store.write("chunk-0-1-0123456789abcdef.bin", b"left by a run")
    store.write("chunk-0-1.bin", b"nothing says whose this is")
    report = sweep(store)
    assert report.deleted == {"chunk": ("chunk-0-1-0123456789abcdef.bin",)}
    assert report.unknown == ("chunk-0-1.bin",)


def test_a_dataset_of_another_program_is_left_as_it_is() -> None:
    store = MemoryStore()
    store.foreign_head(b'{"chunks": [], "config": null}')
    store.write("chunk-0-0.bin", b"x")
    before = dict(store.files)
    report = sweep(store)
    assert (report.files, report.version, report.kept) == (0, None, (0,))
    assert store.files == before


def test_bad_arguments_and_places(store: MemoryStore, tmp_path: Path) -> None:
    for keep, error in ((-1, ValueError), (True, TypeError), ("7d", TypeError), (timedelta(-1), ValueError)):
        with pytest.raises(error, match="keep must"):
            sweep(store, keep)  # type: ignore[arg-type]
    for grace, error in ((timedelta(-1), ValueError), (7, TypeError)):
        with pytest.raises(error, match="grace must"):
            sweep(store, grace=grace)  # type: ignore[arg-type]
    with pytest.raises(DatasetNotFound):
        liveset.vacuum(tmp_path / "absent")


def test_a_head_that_needs_a_newer_writer_is_left_alone(store: MemoryStore) -> None:
    head = open_snapshot(store).index
    assert head.edit is not None
    data = head.to_bytes().replace(b'"write": []', b'"write": ["overlay"]')
    store.foreign_head(data)
    before = dict(store.files)
    for dry_run in (True, False):
        with pytest.raises(UnsupportedFormat, match="'overlay'"):
            sweep(store, dry_run=dry_run)
    assert store.files == before


def test_writers_that_know_no_fence_are_kept_out(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(store)
    monkeypatch.setattr("liveset.edit.commit.WRITE_FEATURES", frozenset())
    with pytest.raises(UnsupportedFormat, match="'fence'"):
        append(store)


def test_cost_follows_what_is_there_and_not_what_was() -> None:
    """10,000 chunks and three orphans: two listings, and no file of a version is read more than once."""

    class Counting(WrappedStore):
        def __init__(self, store: Store) -> None:
            super().__init__(store)
            self.calls: Counter[str] = Counter()

        def _call(self, name: str, whole: Callable[[], Any], torn: Callable[[], object] | None = None) -> Any:
            self.calls[name] += 1
            return whole()

    store = MemoryStore()
    records = tuple(ChunkRecord(f"chunk-0-{i}-{i:016x}.bin", 1, 1) for i in range(10_000))
    for record in records:
        store.files[record.filename] = (b"x", store._time)
    commit(store, Append(CONFIG, records), None)
    for _ in range(5):
        append(store)
    orphans = {chunk(store).filename for _ in range(3)}
    counting = Counting(store)
    report = sweep(counting, timedelta(days=7))
    assert set(report.deleted["chunk"]) == orphans
    assert counting.calls["list"] == 2
    assert counting.calls["read"] <= 7  # one per kept version, and the look for a later head
    assert counting.calls["delete"] == 2
    counting.calls.clear()
    assert sweep(counting, timedelta(days=7)).files == 0
    assert (counting.calls["list"], counting.calls["read"]) == (1, 0)


# Sessions and runs


def test_a_session_that_a_vacuum_ran_over_starts_again(new_store: Callable[[], Store]) -> None:
    store = dataset(new_store())
    base = open_snapshot(store).index
    staged = chunk(store)
    sweep(store)
    before = open_snapshot(store).index
    with pytest.raises(SessionExpired, match="a vacuum ran over this session") as info:
        commit(store, Append(CONFIG, (staged,)), base)
    assert isinstance(info.value, RuntimeError)
    assert open_snapshot(store).index == before
    # Files that are younger than the cutoff are good, whatever the base.
    commit(store, Append(CONFIG, (chunk(store),)), before)
    check_dataset(store)


def test_files_within_the_grace_survive_a_vacuum_and_are_committed(store: MemoryStore) -> None:
    store._time += 2 * DAY
    base = open_snapshot(store).index
    staged = chunk(store)
    assert sweep(store, DAY, DAY).version is not None
    commit(store, Append(CONFIG, (staged,)), base)
    check_dataset(store)


@pytest.mark.parametrize("keep", [0, 1, timedelta(0)])
def test_the_version_that_a_writer_began_with_stays_for_the_grace_however_few_are_kept(store: MemoryStore, keep: Any) -> None:
    store._time += timedelta(days=365)  # the base is a year old
    base = open_snapshot(store).index
    staged = chunk(store)
    for _ in range(3):
        store._time += timedelta(hours=5)
        append(store)
        sweep(store, keep, DAY)
    commit(store, Append(CONFIG, (staged,)), base)
    check_dataset(store)
    store._time += 2 * DAY
    append(store)
    store._time += 2 * DAY
    assert sweep(store, keep, DAY).kept[0] > base.version
    with pytest.raises(SessionExpired, match=f"version {base.version}"):
        commit(store, Append(CONFIG, (chunk(store),)), base)


def test_a_base_that_expired_is_never_skipped_over(store: MemoryStore) -> None:
    base = open_snapshot(store, 2).index
    sweep(store)
    for change in (Append(CONFIG, ()), Overwrite(CONFIG, ())):
        with pytest.raises(SessionExpired, match="version 2"):
            commit(store, change, base)
    # The history between may be cut where the head does not remember it.
    base = append(store)
    for _ in range(70):
        append(store)
    store.delete([version_name(open_snapshot(store).version - HISTORY)])
    with pytest.raises(SessionExpired, match="cut at version"):
        commit(store, Append(CONFIG, ()), base)
    commit(store, Overwrite(CONFIG, (), force=True), None)


def test_named_work_goes_on_after_the_history_was_cut() -> None:
    store = MemoryStore()
    for number in range(80):
        append(store, session=f"job {number}")
    sweep(store)
    index = append(store, session="new job")
    assert append(store, session="new job").version == index.version
    assert append(store, session="job 79").version == 80
    with pytest.raises(VersionExpired, match="cut"):
        was_committed(store, "never")


def test_a_run_with_a_checkpoint_keeps_its_files_as_long_as_it_works(store: MemoryStore) -> None:
    token, run = "a" * 16, "_liveset/staged/0123456789abcdef/"
    base = open_snapshot(store).index
    record = stage(store, f"chunk-0-7-{token}.bin")
    store.write(f"_liveset/keys/delta-{token}-0.keys", b"table")
    for name in ("manifest.json", f"attempt-{token}.json", f"span-0-0-{token}-000000.json"):
        store.write(run + name, b"{}")
    store._time += 3 * DAY
    store.write(f"{run}span-0-0-{token}-000001.json", b"{}")  # it still works
    sweep(store, grace=DAY)
    edit = open_snapshot(store).index.edit
    assert edit is not None
    assert edit.fence is not None
    assert edit.fence.spared == (token,)
    assert {name for name in store.files if token in name} >= {record.filename, f"_liveset/keys/delta-{token}-0.keys"}
    # So what it commits is there, though older than the cutoff.
    commit(store, Append(CONFIG, (record,)), base, resumed=True)
    check_dataset(store)


def test_a_run_that_rests_for_longer_than_the_grace_is_removed_whole(store: MemoryStore) -> None:
    token, run = "a" * 16, "_liveset/staged/0123456789abcdef/"
    record = stage(store, f"chunk-0-7-{token}.bin")
    for name in ("manifest.json", f"attempt-{token}.json", f"span-0-0-{token}-000000.json"):
        store.write(run + name, b"{}")
    store._time += 3 * DAY
    report = sweep(store, grace=DAY)
    assert len(report.deleted["checkpoint"]) == 3
    assert record.filename in report.deleted["chunk"]
    # Resumed from what another process remembers, with the newest version as its base: its files are older than the cutoff.
    with pytest.raises(SessionExpired):
        commit(store, Append(CONFIG, (record,)), open_snapshot(store).index, resumed=True)


def test_a_run_that_was_not_spared_once_is_not_whole_later(store: MemoryStore) -> None:
    token, run = "a" * 16, "_liveset/staged/0123456789abcdef/"
    record = stage(store, f"chunk-0-7-{token}.bin")
    store.write(f"{run}attempt-{token}.json", b"{}")
    store._time += 3 * DAY

    class Slow(WrappedStore):
        """Never gets round to deleting."""

        def delete(self, names: Any) -> None:
            pass

    sweep(Slow(store), grace=DAY)
    store.write(f"{run}span-0-0-{token}-000000.json", b"{}")  # it wakes up
    overwrite(store)
    sweep(store, grace=DAY)
    with pytest.raises(SessionExpired):
        commit(store, Append(CONFIG, (record,)), open_snapshot(store).index, resumed=True)


# Crashes


def places(act: Callable[[Store], object], prepare: Callable[[], Store]) -> Iterator[tuple[int, When]]:
    store = FaultyStore(prepare())
    act(store)
    return itertools.product(range(1, len(store.calls) + 1), WHENS)


def test_a_crash_at_any_call_of_a_vacuum_is_made_good_by_the_next(new_store: Callable[[], Store]) -> None:
    def prepare() -> Store:
        store = dataset(new_store())
        tag(store, "paper", 2)
        return store

    torn_apart = set()
    for crash_at, when in places(sweep, prepare):
        store = prepare()
        old = content(store), content(store, 2)
        with pytest.raises(SimulatedCrash):
            sweep(FaultyStore(store, crash_at, when))
        check_dataset(store)
        torn_apart.add(len(unneeded_files(store)))
        assert (content(store), content(store, 2)) == old
        sweep(store)
        assert unneeded_files(store) == set()
        check_dataset(store)
        append(store)
        check_dataset(store)
    assert len(torn_apart) > 1  # some crashes came in the middle of deleting


def test_two_crashes_in_a_row_are_made_good_too() -> None:
    def prepare() -> Store:
        return dataset(MemoryStore())

    at = list(places(sweep, prepare))
    for first, second in itertools.product(at, at):
        store = prepare()
        for crash_at, when in (first, second):
            try:
                sweep(FaultyStore(store, crash_at, when))
            except SimulatedCrash:
                check_dataset(store)
        sweep(store)
        assert unneeded_files(store) == set()


WRITERS = {"append": appender, "overwrite": overwriter, "restore": restorer, "tag": tagger}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_what_a_crashed_writer_left_is_removed(writer: Callable[[Store], object], new_store: Callable[[], Store]) -> None:
    def prepare() -> Store:
        return dataset(new_store())

    for crash_at, when in places(writer, prepare):
        store = prepare()
        with pytest.raises(SimulatedCrash):
            writer(FaultyStore(store, crash_at, when))
        check_after(store, {})


class Meets(WrappedStore):
    """Lets something else happen, whole, before its call with a number."""

    def __init__(self, store: Store, at: int, act: Callable[[Store], object]) -> None:
        super().__init__(store)
        self.left, self.act = at, act

    def _call(self, name: str, whole: Callable[[], Any], torn: Callable[[], object] | None = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.act(self.store)
        return whole()


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_a_vacuum_between_any_two_calls_of_a_writer(writer: Callable[[Store], Any], new_store: Callable[[], Store]) -> None:
    answers = set()
    for at in itertools.count(1):
        store = dataset(new_store())
        meets = Meets(store, at, sweep)
        answers.add(answer := writer(meets))
        check_after(store, {answer: answer} if answer in ("append", "overwrite") else {"tag": answer} if isinstance(answer, int) else {})
        if meets.left > 0:
            break
    assert len(answers) > (writer is not overwriter), answers  # the vacuum came too early or too late, and in between
    assert at > 3


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_a_writer_between_any_two_calls_of_a_vacuum(writer: Callable[[Store], Any], new_store: Callable[[], Store]) -> None:
    for at in itertools.count(1):
        store = dataset(new_store())
        answers: list[Any] = []

        def act(store: Store, answers: list[Any] = answers) -> None:
            answers.append(writer(store))

        meets = Meets(store, at, act)
        sweep(meets)
        check_after(store, {"tag": answers[0]} if answers and isinstance(answers[0], int) else {})
        if meets.left > 0:
            break
    assert at > 5


def test_two_vacuums_between_each_other(new_store: Callable[[], Store]) -> None:
    for at in itertools.count(1):
        store = dataset(new_store())
        meets = Meets(store, at, sweep)
        sweep(meets)
        check_after(store, {})
        if meets.left > 0:
            break


def test_a_dataset_that_never_rests_is_not_vacuumed() -> None:
    store = dataset(MemoryStore())

    class Busy(WrappedStore):
        def list(self, prefix: str) -> Iterator[Entry]:
            found = super().list(prefix)
            append(self.store)
            return found

    before = {entry.name for entry in store.list("")}
    with pytest.raises(Conflict, match="all the time"):
        sweep(Busy(store))
    assert before <= {entry.name for entry in store.list("")}


# Every order


def race(order: Callable[[list[str]], str]) -> dict[str, Any]:
    """All actors at once on a dataset of four versions; what each of them says."""
    store = dataset(MemoryStore())
    second, newest = content(store, 2), content(store, 4)
    actors = {
        "append": appender,
        "overwrite": overwriter,
        "tag": tagger,
        "vacuum": vacuumer,
        "pinned": pinned_reader(second),
        "newest": pinned_reader(newest, version=4),
        "plain": plain_reader(second),
    }
    results = run_interleaved(store, actors, order)
    assert results.keys() == actors.keys()
    check_after(store, results)
    return results


@given(st.data())
def test_any_order_of_writers_readers_and_a_vacuum(data: st.DataObject) -> None:
    race(lambda live: data.draw(st.sampled_from(live)))


def race_in_pairs() -> None:
    """The vacuum against each other actor: every place of a switch there and of one back."""
    for other in ("append", "overwrite", "tag", "pinned", "newest", "plain"):
        for here, there in itertools.product(range(14), range(14)):
            race(in_turn(iter([other] * here + ["vacuum"] * there + [other] * 100 + ["vacuum"] * 100)))


@pytest.mark.slow
def test_every_two_switches_between_a_vacuum_and_another() -> None:
    race_in_pairs()


# Leases and the vacuum


def test_a_lapsed_lease_holds_nothing(store: MemoryStore) -> None:
    held = pin(store, open_snapshot(store, 2))
    assert 2 in sweep(store).kept
    store._time += LIFE + timedelta(seconds=5)
    report = sweep(store)
    assert 2 in report.expired
    assert len(report.deleted["lease"]) == 1
    held.release()


def test_a_lease_does_not_bring_an_expired_version_back(store: MemoryStore) -> None:
    sweep(store)
    with pytest.raises(VersionExpired, match="version 2"):
        pin(store, Snapshot(store, open_snapshot(store).index.replace(edit=_of_version(store, 2))))
    assert list(store.list(lease.LEASES)) == []


def _of_version(store: Store, version: int) -> Any:
    import dataclasses

    edit = open_snapshot(store).index.edit
    assert edit is not None
    return dataclasses.replace(edit, version=version)


# Mutants: each rule that is taken away must be noticed


class _NoFence:
    """Deletes without having committed anything."""

    def __call__(self, store: Store, change: Any, base: Index, **_: Any) -> Index:
        return base


def crash_free_races() -> None:
    for writer in WRITERS.values():
        for at in range(1, 12):
            store = dataset(MemoryStore())
            answer = writer(Meets(store, at, sweep))
            check_after(store, {answer: answer} if answer in ("append", "overwrite") else {})


def late_leases() -> None:
    """A reader that pins the second version between any two calls of a vacuum."""
    for at in range(1, 12):
        store = dataset(MemoryStore())
        second = content(store, 2)
        held: list[Any] = []

        def reader(store: Store, held: list[Any] = held) -> None:
            with suppress(VersionExpired):
                held.append((snapshot := open_snapshot(store, 2), pin(store, snapshot)))

        sweep(Meets(store, at, reader))
        for snapshot, lease_ in held:
            assert [bytes(snapshot.chunk_buffer(number)) for number in range(len(second))] == second
            lease_.release()


def early_leases() -> None:
    """A vacuum between any two calls of a reader that pins the second version."""
    for at in range(1, 8):
        store = dataset(MemoryStore())
        second = content(store, 2)
        answer = pinned_reader(second)(Meets(store, at, sweep))
        assert answer in ("read", "VersionExpired")


def grace_by_the_store() -> None:
    store = MemoryStore()
    dataset(store)
    sweep(store, grace=DAY)
    assert names(store, Kind.CHUNK)[-1] not in {record.filename for record in open_snapshot(store).index.chunks}
    store._time += 2 * DAY
    sweep(store, grace=DAY)
    assert unneeded_files(store) == set()


def test_the_races_pass_without_a_mutant() -> None:
    for campaign in (crash_free_races, late_leases, early_leases, grace_by_the_store):
        campaign()


def _no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Commit, "archive", lambda *_: None)


def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum_module, "commit", _NoFence())


def _writers_ignore_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Commit, "check_staged", lambda *_: None)


def _leases_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum_module, "leased_versions", lambda *_: leased_versions([], datetime.now(UTC)))


def _readers_ignore_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.racing.pin", lambda store, snapshot: lease.Lease(store, snapshot.version))


def _fence_rebases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for one head is used for another."""
    monkeypatch.setattr("liveset.edit.commit.check_rebase", lambda *_: None)
    monkeypatch.setattr(vacuum_module, "_once", lambda policy: policy)


def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "now", lambda self: datetime.now(UTC) if _called_by_vacuum() else _plain_now(self))


def _fast_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "now", lambda self: datetime(2040, 1, 1, tzinfo=UTC) if _called_by_vacuum() else _plain_now(self))


_plain_now = MemoryStore.now


def _called_by_vacuum() -> bool:
    import sys

    return sys._getframe(2).f_code.co_name == "vacuum_store"


def _writers_between() -> None:
    for writer in WRITERS.values():
        for at in range(1, 12):
            store = dataset(MemoryStore())
            sweep(Meets(store, at, writer))
            check_after(store, {})


MUTANTS = {
    "vacuum without a fence": (_no_fence, crash_free_races),
    "writers ignore the fence": (_writers_ignore_the_fence, crash_free_races),
    "the fence is rebased": (_fence_rebases, _writers_between),
    "leases listed once": (_leases_listed_once, late_leases),
    "readers ignore the fence": (_readers_ignore_the_fence, early_leases),
    "host clock, slow": (_host_clock, grace_by_the_store),
    "host clock, fast": (_fast_host_clock, grace_by_the_store),
    "no archive": (_no_archive, crash_free_races),
}


@pytest.mark.parametrize(("mutate", "campaign"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_rule_that_is_missing_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, liveset.DatasetError)):
        campaign()


def test_no_folder_is_left_behind_that_was_not_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dataset(store)
    before = {name for name in os.listdir(tmp_path) if not name.startswith("chunk-")}
    sweep(store)
    assert {name for name in os.listdir(tmp_path) if not name.startswith("chunk-")} == before


# With real runs


def fails_at(bad: int) -> Callable[[int], dict[str, int]]:
    def make(number: int) -> dict[str, int]:
        if number == bad:
            raise ValueError("bad")
        return {"n": number}

    return make


@pytest.mark.parametrize(("grace", "resumes"), [(DAY, True), (timedelta(0), False)])
def test_a_broken_run_is_resumed_unless_a_vacuum_thought_it_dead(tmp_path: Path, grace: timedelta, resumes: bool) -> None:
    path, calls = tmp_path / "ds", []
    liveset.optimize(lambda n: {"n": n}, range(3), path, num_workers=1, verbose=False)
    more: dict[str, Any] = dict(num_workers=1, mode="append", chunk_size=2, use_checkpoint=True, verbose=False)  # noqa: C408
    with pytest.raises(liveset.WorkerError):
        liveset.optimize(fails_at(7), range(10), path, **more)
    store = open_store(path)
    staged = {entry.name for entry in store.list("chunk-")}
    if resumes:
        # Another vacuum's fence is between the files and their commit, and they are older than its cutoff.
        orphan = chunk(store)
        for name in (*staged, orphan.filename):
            old = store.now().timestamp() - 3 * 86_400
            os.utime(path / name, (old, old))
    report = liveset.vacuum(path, keep=0, grace=grace)
    assert report.version is not None
    assert ("checkpoint" in report.deleted) == (not resumes)

    def count(number: int) -> dict[str, int]:
        calls.append(number)
        return {"n": number}

    liveset.optimize(count, range(10), path, **more)
    assert calls == (list(range(7, 10)) if resumes else list(range(10)))
    assert [sample["n"] for sample in liveset.StreamingDataset(path)] == [*range(3), *range(10)]
    assert liveset.verify(path).ok
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    assert unneeded_files(store) == set()


def test_a_run_that_a_vacuum_without_grace_ran_over_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    liveset.optimize(lambda n: {"n": n}, range(3), path, num_workers=1, verbose=False)

    def make(number: int) -> dict[str, int]:
        if number == 8:
            assert liveset.vacuum(path, keep=0, grace=timedelta(0)).files > 0
        return {"n": number}

    with pytest.raises(SessionExpired, match="start again"):
        liveset.optimize(make, range(10), path, num_workers=1, mode="append", chunk_size=2, verbose=False)
    assert len(liveset.StreamingDataset(path)) == 3
    assert unneeded_files(open_store(path)) == set()


@pytest.mark.parametrize("writer", ["append", "transform", "update"])
def test_a_vacuum_that_keeps_one_version_lets_everybody_end_who_began_within_the_grace(tmp_path: Path, writer: str) -> None:
    path, options = tmp_path / "ds", dict[str, Any](num_workers=1, verbose=False)
    liveset.optimize(lambda n: {"n": n, "id": f"k{n}"}, range(4), path, chunk_size=2, key_fn="id", **options)

    def others(sample: Any) -> Any:
        if sample["n"] in (3, 13):
            for number in range(2):
                liveset.optimize(lambda n: {"n": n, "id": f"k{n}"}, [20 + number], path, mode="append", key_fn="id", **options)
                liveset.vacuum(path, keep=1)
        return {**sample, "n": -sample["n"]}

    if writer == "append":
        new = (others({"n": n, "id": f"k{n}"}) for n in range(10, 15))
        liveset.optimize(lambda sample: sample, new, path, mode="append", key_fn="id", **options)
    elif writer == "transform":
        liveset.transform(path, others, num_workers=1, verbose=False)
    else:
        with liveset.dataset_update(path) as update:
            update["k3"] = others({"n": 3, "id": "k3"})
            update.commit()
    found = [sample["n"] for sample in liveset.StreamingDataset(path)]
    first = [0, -1, -2, -3] if writer == "transform" else [0, 1, 2, -3 if writer == "update" else 3]
    assert found == [*first, 20, 21, *([-n for n in range(10, 15)] if writer == "append" else [])]
    assert liveset.verify(path).ok


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("tags", []),
        ("tags", {"a": "1"}),
        ("tags", {"a": -1}),
        ("tags", {"a": True}),
        ("fence", 1),
        ("fence", {}),
        ("fence", {"version": 1, "expired_before": 1, "cutoff": "yesterday"}),
        ("fence", {"version": 1, "expired_before": 1, "cutoff": "2030-01-01T00:00:00"}),
        ("fence", {"version": 1, "cutoff": "2030-01-01T00:00:00Z"}),
        ("fence", {"version": 1, "expired_before": 1, "cutoff": "2030-01-01T00:00:00Z", "kept": ["1"]}),
        ("fence", {"version": 1, "expired_before": 1, "cutoff": "2030-01-01T00:00:00Z", "kept": 1}),
        ("fence", {"version": 1, "expired_before": 1, "cutoff": "2030-01-01T00:00:00Z", "spared": [1]}),
        ("author", 1),
    ],
)
def test_damaged_facts_of_the_dataset_are_named(store: MemoryStore, member: str, value: Any) -> None:
    document = json.loads(store.read("index.json"))
    document["edit"][member] = value
    with pytest.raises(liveset.Corrupt, match=rf"edit\..*{member}"):
        Index.parse(json.dumps(document).encode())


def test_members_of_a_fence_that_are_not_known_survive(store: MemoryStore) -> None:
    sweep(store)
    document = json.loads(store.read("index.json"))
    document["edit"]["fence"]["theirs"] = [1]
    document["edit"]["theirs"] = 2
    store.foreign_head(json.dumps(document).encode())
    edit = append(store).edit
    assert edit is not None
    assert edit.fence is not None
    assert (edit.fence.extra, edit.extra["theirs"]) == ({"theirs": [1]}, 2)
    assert (edit.fence.version, edit.fence.expired_before, edit.requires_write) == (5, 4, ("fence",))
    assert edit.fence.keeps(4)
    assert not edit.fence.keeps(3)


# Version 0: what another program wrote, in files that only its index says are ours

HEADS = ("index.json", f"{VERSIONS}*")


def ages(path: Path, days: float, *patterns: str) -> None:
    """Make files look so many days older: all chunks and versions, if not told which."""
    for file in (file for pattern in patterns or ("chunk-*", *HEADS) for file in path.glob(pattern)):
        old = file.stat().st_mtime - days * 86_400
        os.utime(file, (old, old))


def test_files_of_another_program_go_when_they_are_old_enough_whenever_their_version_went(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_foreign(path, [{"id": f"k{i}", "n": i} for i in range(10)])
    plain = {file.name for file in path.glob("chunk-*")}
    liveset.adopt(path)
    assert liveset.vacuum(path, keep=0).expired == (), "it was the newest version within the grace"
    ages(path, 2, *HEADS)
    report = liveset.vacuum(path, keep=0)
    assert (report.expired, report.kept, report.files, report.unknown) == ((0,), (1, 2), 0, ())
    with pytest.raises(VersionExpired):
        liveset.StreamingDataset(path, version=0)
    assert [version.version for version in liveset.history(path)] == [2, 1]
    # Every night until they are old enough: they are known, and no version is made for them.
    for _ in range(2):
        again = liveset.vacuum(path, keep=0)
        assert (again.version, again.files, again.expired, again.unknown) == (None, 0, (), ())
    assert plain <= {file.name for file in path.glob("chunk-*")}
    ages(path, 2)
    planned = liveset.vacuum(path, keep=0, dry_run=True)
    last = liveset.vacuum(path, keep=0)
    assert set(last.deleted["chunk"]) == plain
    assert (last.deleted["version"], last.unknown) == ((version_name(0), version_name(1)), ())
    assert (planned.deleted, planned.freed) == (last.deleted, last.freed)
    check_dataset(open_store(path))
    assert unneeded_files(open_store(path)) == set()
    assert [sample["n"] for sample in liveset.StreamingDataset(path)] == list(range(10))


def test_files_of_another_program_stay_as_long_as_a_version_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_foreign(path, [{"id": f"k{i}", "n": i} for i in range(10)])
    plain = {file.name for file in path.glob("chunk-*")}
    liveset.adopt(path)
    liveset.tag(path, "first", 0)
    ages(path, 2)
    assert "chunk" not in liveset.vacuum(path, keep=0).deleted
    assert [sample["n"] for sample in liveset.StreamingDataset(path, version="first")] == list(range(10))
    liveset.untag(path, "first")
    ages(path, 2)
    assert set(liveset.vacuum(path, keep=0).deleted["chunk"]) == plain


# Full disks


class Full(Files):
    """A disk with so many bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: Sequence[Buffer]) -> int:
        self.room -= sum(memoryview(part).nbytes for part in data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


def test_a_full_disk_is_emptied_by_a_vacuum_that_needs_room_for_its_commit_alone(tmp_path: Path) -> None:
    dataset(LocalStore(tmp_path))
    size = (tmp_path / "index.json").stat().st_size
    before = names(LocalStore(tmp_path), Kind.CHUNK)
    with pytest.raises(StorageError, match=r"No space left.*about \d[\d,]* bytes: nothing was deleted") as raised:
        sweep(LocalStore(tmp_path, files=Full(0)))
    assert raised.value.errno == errno.ENOSPC
    assert names(LocalStore(tmp_path), Kind.CHUNK) == before
    report = sweep(LocalStore(tmp_path, files=Full(2 * size)))
    assert (report.version, report.files) == (5, 6)
    check_dataset(LocalStore(tmp_path))


def test_a_vacuum_says_who_and_why(tmp_path: Path) -> None:
    dataset(LocalStore(tmp_path))
    liveset.vacuum(tmp_path, keep=2, grace=timedelta(0), author="ann")
    newest = liveset.history(tmp_path)[0]
    assert (newest.op, newest.author, newest.message) == ("fence", "ann", "3 files and 2 versions")
    liveset.vacuum(tmp_path, keep=1, grace=timedelta(0), message="room for spring")
    assert liveset.history(tmp_path)[0].message == "room for spring"
    with pytest.raises(TypeError, match="author= must be text"):
        liveset.vacuum(tmp_path, author=7)  # type: ignore[arg-type]
