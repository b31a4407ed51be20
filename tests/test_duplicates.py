"""Keys that occur twice in what is appended: a dict of samples in order says what the dataset must be, for every rule."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveset
from liveset.edit.changes import Append
from liveset.edit.commit import Policy, commit
from liveset.edit.session import DatasetUpdate
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import (
    Conflict,
    DatasetError,
    DuplicateKeys,
    KeyConflict,
    OverwriteConflict,
    SchemaConflict,
    SessionExpired,
    VersionExpired,
    WorkerError,
)
from liveset.format import codec
from liveset.format.chunk import open_chunk
from liveset.format.codec import Compression
from liveset.format.keytable import KeyColumn
from liveset.format.schema import Decoder, Schema
from liveset.keystore import TableKeys, open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store, Swap, open_store
from liveset.testing import FaultyStore, MemoryStore, SimulatedCrash, WrappedStore
from liveset.testing.invariants import check_dataset, unneeded_files
from liveset.testing.schedule import run_interleaved
from liveset.write import duplicates
from liveset.write.duplicates import OnDuplicate
from liveset.write.execution import Job
from liveset.write.inputs import open_inputs
from liveset.write.landing import CommitWishes
from liveset.write.optimize import optimize
from liveset.write.options import Sizes, Workers
from liveset.write.run import Run, Wishes
from liveset.write.target import Asked, Target
from tests.support.foreign import write_arrow, write_foreign
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

SAMPLE, BATCH, CHUNK = (Compression("zstd", level, 3) for level in ("sample", "batch", "chunk"))
LAYOUTS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "classic": lambda path, samples: write_dataset(path, samples, key="id"),
    "int keys": lambda path, samples: write_dataset(path, samples, key="n"),
    "sample": lambda path, samples: write_dataset(path, samples, key="id", compression=SAMPLE),
    "batch": lambda path, samples: write_dataset(path, samples, key="id", compression=BATCH),
    "chunk": lambda path, samples: write_dataset(path, samples, key="id", compression=CHUNK),
    "foreign": write_foreign,
    "foreign chunk": lambda path, samples: write_foreign(path, samples, compression=CHUNK),
    "arrow": lambda path, samples: write_arrow(path, samples, chunk_size=4),
}
RULES: tuple[OnDuplicate, ...] = ("error", "replace", "skip")
OTHER_RULES: tuple[OnDuplicate, ...] = ("replace", "skip")
Content = dict[str, str]
New = list[tuple[str, str]]
"""Keys and texts of the samples of a run."""


def sample(key: str, text: str) -> dict[str, Any]:
    return {"id": key, "n": int(key[1:]), "text": text}


def plain(before: Content, new: Iterable[tuple[str, str]], rule: OnDuplicate) -> Content:
    """Return what a dataset must hold after a run."""
    new = list(new)
    if rule == "skip":
        after = dict(before)
        for key, text in new:
            after.setdefault(key, text)
        return after
    last: Content = {}
    for key, text in new:
        last.pop(key, None)  # the last one with a key counts, where it stands
        last[key] = text
    return before | last


def content(snapshot: Snapshot) -> Content:
    """Read all samples of a version, by position and by key, which must agree."""
    index = snapshot.index
    assert index.config is not None
    decoder = Decoder(Schema.from_config(index.config), strict=not index.has_foreign_chunks)
    compression = codec.Compression.from_config(index.config)
    keys = open_keys(snapshot)
    assert keys is not None
    by_number = keys.kind is int
    found: Content = {}
    for number, record in enumerate(index.chunks):
        chunk = open_chunk(snapshot.chunk_file(number)[1], record, decoder, compression)
        names = keys.keys_of(number)
        for slot, item in enumerate(chunk.iterate(0, record.samples)):
            key = item["n"] if by_number else item["id"]
            assert names[slot] == key
            assert keys.locate(key) == (number, slot)
            assert item["id"] not in found
            found[item["id"]] = item["text"]
    assert len(keys) == len(found)
    return found


def check(store: Store, expected: Content) -> None:
    """The newest version is what it should be, every version is whole, and no file is left that none of them needs."""
    check_dataset(store)
    newest = content(open_snapshot(store))
    assert list(newest.items()) == list(expected.items())
    if open_snapshot(store).index.edit is not None:
        assert {name for name in unneeded_files(store) if name.count("-") > 2 or name.startswith("_liveset")} == set()


def play(pair: tuple[str, str]) -> dict[str, Any]:
    return sample(*pair)


def run(store: Store, new: New, rule: OnDuplicate, *, mode: str | None = "append", session: str | None = None) -> None:
    """Do what optimize does, on any store."""
    target = Target(store, mode, session)
    keys = target.key_rule("id" if target.base is None or mode != "append" else None)
    job = Job(
        fn=play,
        inputs=open_inputs(new, None, batch_size=None, limit=None),
        settings=target.settings(Asked(Sizes(4, None), None, None, None, ()), allow_pickle=False, whole=False, keys=keys),
        workers=Workers(1, None),
        ordered=True,
    )
    Run(job, target, Wishes(verbose=False, commit=CommitWishes(session, on_duplicate=rule)))()


OLD = {f"k{i}": "old" for i in range(10)}
NEW = [("k1", "mine"), ("k20", "mine"), ("k5", "mine"), ("k21", "mine"), ("k6", "mine"), ("k22", "mine")]


def dataset(samples: Content = OLD) -> MemoryStore:
    """Ten samples in chunks of four."""
    store = MemoryStore()
    run(store, list(samples.items()), "error", mode=None)
    return store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", [sample(*pair) for pair in OLD.items()], key="id")
    return tmp_path / "ds"


# --- what becomes of a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=20)
def test_a_dataset_is_what_its_runs_made_of_it(layout: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        expected = dict(OLD)
        LAYOUTS[layout](path, [sample(*pair) for pair in expected.items()])
        for step in range(data.draw(st.integers(1, 3))):
            numbers = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=12))
            rule = data.draw(st.sampled_from(RULES))
            new = [(f"k{number}", f"{step}.{place}") for place, number in enumerate(numbers)]
            clash = len(set(numbers)) < len(numbers) or any(key in expected for key, _ in new)
            before = open_snapshot(open_store(path)).version
            with pytest.raises((DuplicateKeys, KeyConflict)) if rule == "error" and clash else nullcontext():
                optimize(play, new, path, mode="append", on_duplicate=rule, chunk_size=3, num_workers=1)
            after = expected if rule == "error" and clash else plain(expected, new, rule)
            if before and after == expected:
                assert open_snapshot(open_store(path)).version == before
            expected = after
            check(open_store(path), expected)


@pytest.mark.parametrize("mode", [None, "append", "overwrite"])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_first_write_follows_the_same_rule(path: Path, tmp_path: Path, rule: OnDuplicate, mode: Any) -> None:
    new = [("k3", "a"), ("k1", "b"), ("k3", "c"), ("k2", "d"), ("k1", "e"), ("k3", "f")]
    for place in [path] if mode == "overwrite" else [tmp_path / "new"]:
        optimize(play, new, place, mode=mode, key_fn="id", on_duplicate=rule, chunk_size=2, num_workers=1)
        expected = {"k3": "a", "k1": "b", "k2": "d"} if rule == "skip" else {"k2": "d", "k1": "e", "k3": "f"}
        check(open_store(place), expected)
        assert plain({}, new, rule) == expected
        assert sorted(table_of(place / "keys")) == ["k1", "k2", "k3"]


def table_of(folder: Path) -> list[str]:
    import pyarrow.parquet as pq

    return [key for file in sorted(folder.glob("*.parquet")) for key in pq.read_table(file)["key"].to_pylist()]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_workers(path: Path, rule: OnDuplicate, ordered: bool, workers: int) -> None:
    new = [(f"k{number}", "new") for number in range(5, 60)]
    optimize(play, new, path, mode="append", on_duplicate=rule, chunk_size=7, num_workers=workers, keep_data_ordered=ordered)
    found, expected = content(open_snapshot(open_store(path))), plain(OLD, new, rule)
    assert found == expected
    if ordered:
        assert list(found) == list(expected)
    check(open_store(path), found)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_chunks_that_widen(tmp_path: Path, rule: OnDuplicate, workers: int) -> None:
    def fn(i: int) -> dict[str, Any]:
        return {"id": i % 40, "score": None if i == 45 else (i if i < 30 else i + 0.5), **({"late": "x"} if i > 50 else {})}

    optimize(fn, range(60), tmp_path, key_fn="id", on_duplicate=rule, chunk_size=7, num_workers=workers)
    numbers = range(40) if rule == "skip" else range(20, 60)
    ds = liveset.StreamingDataset(tmp_path)
    assert list(ds) == [fn(i) for i in numbers]
    assert {file.name for file in tmp_path.glob("chunk-*")} == {
        record.filename for record in open_snapshot(open_store(tmp_path)).index.chunks
    }
    optimize(fn, range(15, 25), tmp_path, mode="append", on_duplicate=rule, num_workers=workers)
    assert [ds.get_by_key(i)["id"] for i in range(40)] == list(range(40))
    assert [sample["score"] for sample in liveset.StreamingDataset(tmp_path).get_by_keys(range(15, 20))] == list(range(15, 20))


def test_what_does_not_fit_is_refused_before_anything_is_replaced(path: Path) -> None:
    before = sorted(path.rglob("*"))
    with pytest.raises(SchemaConflict):
        optimize(lambda pair: sample(*pair) | {"text": 7}, NEW, path, mode="append", on_duplicate="replace", num_workers=1)
    with pytest.raises(SchemaConflict):
        optimize(lambda pair: {"other": 1, **sample(*pair)}, NEW, path, mode="append", on_duplicate="replace", num_workers=1)
    assert sorted(path.rglob("*")) == before


def test_an_arrow_chunk_that_cannot_hold_a_sample_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_arrow(path, [{"id": f"k{i}", "n": i} for i in range(8)], chunk_size=4)
    before = {file.name for file in path.glob("chunk-*")}
    with pytest.raises(DatasetError) as caught:
        optimize(lambda i: {"id": f"k{i}", "n": 1 << 70}, [1, 30], path, mode="append", on_duplicate="replace", num_workers=1)
    assert not isinstance(caught.value, Conflict) or isinstance(caught.value, SchemaConflict)
    assert list(liveset.StreamingDataset(path)) == [{"id": f"k{i}", "n": i} for i in range(8)]
    assert len({file.name for file in path.glob("chunk-*")} - before) <= 2  # the second names of an adopted dataset


def test_only_touched_chunks_are_written(path: Path) -> None:
    before = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    optimize(play, NEW[:2], path, mode="append", on_duplicate="replace", chunk_size=4, num_workers=1)
    after = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    assert before.items() <= after.items()
    assert len(after.keys() - before.keys()) == 2
    assert [entry.op for entry in liveset.history(path)] == ["edit", "create"]


def test_where_nothing_is_new_only_samples_are_replaced(path: Path) -> None:
    tables = open_snapshot(open_store(path)).index.edit.key_files  # type: ignore[union-attr]
    optimize(play, [("k9", "new"), ("k2", "new")], path, mode="append", on_duplicate="replace", num_workers=1)
    check(open_store(path), OLD | {"k9": "new", "k2": "new"})
    head = open_snapshot(open_store(path)).index
    assert head.edit is not None
    assert head.edit.key_files == tables
    assert head.edit.op == "replace"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_where_everything_is_left_out_there_is_no_version(path: Path, checkpoint: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = sorted(path.rglob("*"))
    new = [("k9", "new"), ("k2", "new"), ("k2", "newer")]
    with caplog.at_level("INFO", "liveset"):
        optimize(play, new, path, mode="append", on_duplicate="skip", num_workers=1, use_checkpoint=checkpoint)
    assert sorted(path.rglob("*")) == before
    assert open_snapshot(open_store(path)).version == 1
    (text,) = [record.getMessage() for record in caplog.records if "samples of" in record.getMessage()]
    assert "0 samples of 3 inputs in 0 chunks" in text
    assert "2 samples were left out, since the dataset has their keys" in text
    assert "1 samples were left out, since others of the same run" in text
    assert "no new version" in text


def test_deleted_keys_are_new_again(path: Path) -> None:
    with liveset.dataset_update(path) as update:
        del update["k1"], update["k4"], update["k5"], update["k6"], update["k7"]
        update.commit()
    expected = {key: text for key, text in OLD.items() if key not in ("k1", "k4", "k5", "k6", "k7")}
    new = [("k1", "new"), ("k5", "new"), ("k2", "new"), ("k9", "new")]
    for rule in OTHER_RULES:
        optimize(play, new, path, mode="append", on_duplicate=rule, num_workers=1)
        expected = plain(expected, new, rule)
        check(open_store(path), expected)


def test_arguments_without_a_meaning(path: Path, tmp_path: Path) -> None:
    for wrong in ("Error", "", None, "overwrite"):
        with pytest.raises(ValueError, match="'error', 'replace' or 'skip'"):
            optimize(play, NEW, path, mode="append", on_duplicate=wrong)  # type: ignore[arg-type]
    for rule in OTHER_RULES:
        with pytest.raises(ValueError, match="key_fn="):
            optimize(play, NEW, tmp_path / "new", on_duplicate=rule)
        with pytest.raises(ValueError, match="key_fn="):
            optimize(play, NEW, path, mode="overwrite", on_duplicate=rule)
    assert not (tmp_path / "new").exists()
    check(open_store(path), OLD)


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_keys_of_the_other_type(path: Path, rule: OnDuplicate) -> None:
    liveset.build_keys_index(path, lambda s: s["id"], overwrite=True, verbose=False)  # nothing says where the next ones are
    with pytest.raises(TypeError, match="text.*integers"):
        optimize(play, NEW, path, mode="append", key_fn=lambda s: s["n"], on_duplicate=rule, num_workers=1)
    assert content(open_snapshot(open_store(path))) == OLD


def test_an_error_names_the_way_out(path: Path) -> None:
    with pytest.raises(KeyConflict) as conflict:
        optimize(play, NEW, path, mode="append", num_workers=1)
    with pytest.raises(DuplicateKeys) as duplicate:
        optimize(play, [("k30", "a"), ("k30", "b")], path, mode="append", num_workers=1)
    for caught in (conflict, duplicate):
        assert any("on_duplicate=" in note for note in caught.value.__notes__)
    check(open_store(path), OLD)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_resumed_run(path: Path, rule: OnDuplicate, workers: int) -> None:
    new = [(f"k{number % 30}", f"{number}") for number in range(5, 60)]
    broken = [*new[:40], ("broken", ""), *new[41:]]

    with pytest.raises(WorkerError):
        optimize(lambda i: play(broken[i]), range(55), path, mode="append", use_checkpoint=True, chunk_size=3, num_workers=workers)
    kept = {file.name for file in path.glob("chunk-*")}
    optimize(
        lambda i: play(new[i]), range(55), path, mode="append", on_duplicate=rule, use_checkpoint=True, chunk_size=3, num_workers=workers
    )
    check(open_store(path), plain(OLD, new, rule))
    assert len(kept) > 3
    assert not (path / "_liveset" / "staged").exists()


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_after_a_conflict_a_run_goes_on_with_another_rule(path: Path, rule: OnDuplicate) -> None:
    calls: list[int] = []

    def fn(i: int) -> dict[str, Any]:
        calls.append(i)
        return play(NEW[i])

    with pytest.raises(KeyConflict):
        optimize(fn, range(6), path, mode="append", use_checkpoint=True, chunk_size=2, num_workers=1)
    optimize(fn, range(6), path, mode="append", use_checkpoint=True, chunk_size=2, num_workers=1, on_duplicate=rule)
    assert calls == list(range(6))
    check(open_store(path), plain(OLD, NEW, rule))


# --- races ------------------------------------------------------------------------------------------------------------

AT_ONCE = Policy(first_pause=0)


class Rival(WrappedStore):
    """Somebody else commits just before our swaps; each act is for one swap."""

    def __init__(self, store: Store, *acts: Callable[[], object]) -> None:
        super().__init__(store)
        self.acts, self.written = list(acts), list[str]()

    def write(self, name: str, data: Any) -> None:
        self.written.append(name)
        super().write(name, data)

    def swap_head(self, data: bytes, expected: Any, withdraw: Any = ()) -> Swap:
        if self.acts:
            self.acts.pop(0)()
        return super().swap_head(data, expected, withdraw)


def edit(store: Store, edits: dict[str, str | None], session: str | None = None) -> None:
    """Put samples in, or take them out (None)."""
    with DatasetUpdate(store, session=session, policy=AT_ONCE) as update:
        for key, text in edits.items():
            if text is None:
                del update[key]
            else:
                update.upsert(key, sample(key, text))
        update.commit()


def edited(before: Content, edits: dict[str, str | None]) -> Content:
    after = {key: edits.get(key, text) for key, text in before.items()} | {key: text for key, text in edits.items() if key not in before}
    return {key: text for key, text in after.items() if text is not None}


@pytest.mark.parametrize("rule", OTHER_RULES)
@pytest.mark.parametrize(
    "theirs",
    [
        {"k1": "theirs"},
        {"k1": None},
        {"k0": None, "k4": None},
        {"k4": None, "k5": None, "k6": None, "k7": None},
        {"k20": "theirs"},
        {"k20": "theirs", "k21": "theirs", "k22": "theirs"},
        {"k3": "theirs", "k30": "theirs"},
        dict.fromkeys(OLD),
    ],
)
def test_what_others_commit_meanwhile_is_treated_alike(rule: OnDuplicate, theirs: dict[str, str | None]) -> None:
    store = dataset()
    run(Rival(store, lambda: edit(store, theirs)), NEW, rule)
    check(store, plain(edited(OLD, theirs), NEW, rule))


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_many_lost_races(rule: OnDuplicate) -> None:
    store = dataset()
    turns: list[dict[str, str | None]] = [{"k20": "a"}, {"k1": None}, {"k20": None, "k21": "b"}, {"k1": "c", "k5": "d"}, {"k6": None}]
    run(Rival(store, *(lambda turn=turn: edit(store, turn) for turn in turns)), NEW, rule)
    expected = dict(OLD)
    for turn in turns:
        expected = edited(expected, turn)
    check(store, plain(expected, NEW, rule))


def test_a_lost_race_writes_only_what_it_touched() -> None:
    store = dataset()
    rival = Rival(store, *(lambda turn=turn: edit(store, {"k9": f"{turn}"}) for turn in range(3)))
    run(rival, NEW, "replace")
    chunks = [name for name in rival.written if name.startswith("chunk-")]
    assert len(chunks) == 2 + 2 + 2, "two chunks of the run, both without duplicates, and two that hold them"
    check(store, plain(OLD | {"k9": "2"}, NEW, "replace"))


def test_a_run_that_others_made_needless_commits_nothing() -> None:
    store = dataset()
    run(Rival(store, lambda: edit(store, {"k20": "a", "k21": "b", "k22": "c"})), NEW, "skip")
    assert open_snapshot(store).version == 2
    check(store, OLD | {"k20": "a", "k21": "b", "k22": "c"})


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_two_first_appends(rule: OnDuplicate) -> None:
    store = MemoryStore()
    run(Rival(store, lambda: run(store, list(OLD.items()), "error")), NEW, rule)
    check(store, plain(OLD, NEW, rule))


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_dataset_of_another_program_appears_meanwhile(tmp_path: Path, rule: OnDuplicate) -> None:
    store = open_store(tmp_path / "ds")
    run(Rival(store, lambda: write_foreign(tmp_path / "ds", [sample(*pair) for pair in OLD.items()])), NEW, rule)
    check_dataset(store)
    assert content(open_snapshot(store)) == plain(OLD, NEW, rule)
    if rule == "replace":  # the other program must not write over chunks of which some are new
        assert [entry.op for entry in list_versions(store)][:2] == ["edit", "adopt"]


def test_a_dataset_without_keys_appears_meanwhile() -> None:
    store = MemoryStore()

    def theirs() -> None:
        bare = dataset()
        head = open_snapshot(bare).index
        for record in head.chunks:
            store.write(record.filename, bare.read(record.filename))
        commit(store, Append(head.config, head.chunks), None, policy=AT_ONCE)

    with pytest.raises(Conflict, match="no keys|keys"):
        run(Rival(store, theirs), NEW, "replace")
    assert open_snapshot(store).version == 1


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_run_whose_dataset_was_replaced_leaves_nothing(rule: OnDuplicate) -> None:
    store = dataset()
    with pytest.raises(OverwriteConflict):
        run(Rival(store, lambda: run(store, [("k1", "theirs")], "error", mode="overwrite")), NEW, rule)
    check(store, {"k1": "theirs"})


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_vacuum_that_deleted_our_chunks(rule: OnDuplicate) -> None:
    store = dataset()

    def theirs() -> None:
        edit(store, {"k5": "theirs", "k30": "new"})
        vacuum_store(store, keep=20, grace=timedelta(0), policy=AT_ONCE)

    with pytest.raises(SessionExpired, match="vacuum"):
        run(Rival(store, theirs), NEW, rule)
    assert content(open_snapshot(store)) == OLD | {"k5": "theirs", "k30": "new"}


def test_other_keys_with_the_same_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows whose hashes are equal are compared by what they hold, so these must be compared at all."""
    column = KeyColumn.of(["a", "b", "a", "c", "b", "a"])
    for hashes in (column.hashes, np.zeros(6, np.uint64)):
        same = KeyColumn(str, hashes, column.bounds, column.heap)
        assert duplicates._repeated(same, last=False) == [2, 4, 5]
        assert duplicates._repeated(same, last=True) == [0, 1, 2]


@pytest.mark.usefixtures("_as_actors")
@given(data=st.data())
@settings(max_examples=60)
def test_every_version_is_what_its_run_made_of_the_one_before(data: st.DataObject) -> None:
    """Two runs, an update and a vacuum, their calls to the store in any order."""
    store = dataset()
    first = [("k1", "first"), ("k20", "first"), ("k8", "first"), ("k21", "first"), ("k9", "first")]
    then = [("k20", "then"), ("k1", "then"), ("k22", "then"), ("k20", "later")]
    theirs: dict[str, str | None] = {"k1": "theirs", "k0": None, "k22": "theirs"}
    effects: dict[str, Callable[[Content], Content]] = {"update": lambda before: edited(before, theirs)}

    def runner(session: str, new: New, rule: OnDuplicate) -> Callable[[Store], str]:
        effects[session] = lambda before: plain(before, new, rule)

        def act(mine: Store) -> str:
            try:
                run(mine, new, rule, session=session)
            except SessionExpired:
                return "expired"
            return "done"

        return act

    def updater(mine: Store) -> str:
        try:
            edit(mine, theirs, "update")
        except KeyConflict:
            return "conflict"
        except (SessionExpired, VersionExpired):
            return "expired"
        return "done"

    def vacuumer(mine: Store) -> str:
        try:
            vacuum_store(mine, keep=20, grace=timedelta(0), policy=AT_ONCE)
        except Conflict:
            return "conflict"
        return "done"

    rules = data.draw(st.sampled_from([(a, b) for a in OTHER_RULES for b in OTHER_RULES]))
    actors = {"first": runner("first", first, rules[0]), "then": runner("then", then, rules[1]), "update": updater}
    if data.draw(st.booleans()):
        actors["vacuum"] = vacuumer
    results = run_interleaved(store, actors, lambda live: data.draw(st.sampled_from(live)))
    for name, result in results.items():
        assert result in ("done", "conflict", "expired"), f"{name}: {result!r}"
    check_dataset(store)
    before: Content = dict(OLD)
    seen = set()
    for entry in reversed(list_versions(store)[:-1]):
        now = content(open_snapshot(store, entry.version))
        if entry.op != "fence":
            before = effects[entry.session](before)
            seen.add(entry.session)
        assert list(now.items()) == list(before.items()), f"version {entry.version} ({entry.session})"
    for name in ("first", "then", "update"):
        if results[name] != "done":
            assert name not in seen
        elif name not in seen:
            assert name != "update"
            assert effects[name](before) == before, "a run that had something to add made no version"


@pytest.fixture
def _as_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "pause", lambda *_: None)
    # Up to Python 3.11 a cached property is computed under a lock of its class, in which an actor must not wait for its turn.
    if hasattr(tables := vars(TableKeys)["tables"], "lock"):
        monkeypatch.setattr(tables, "lock", nullcontext())


@pytest.mark.parametrize("rule", OTHER_RULES)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_runs_that_were_open_together(rule: OnDuplicate, order: tuple[int, ...]) -> None:
    """Each commits while the next one is about to swap."""
    store = dataset()
    runs = [[("k1", f"{i}"), ("k30", f"{i}"), (f"k{40 + i}", f"{i}")] for i in range(3)]
    inner: Callable[[], object] = lambda: run(store, runs[order[0]], rule)  # noqa: E731 - built up in the loop
    for number in order[1:]:
        inner = lambda number=number, inner=inner: run(Rival(store, inner), runs[number], rule)  # type: ignore[misc]  # noqa: E731
    inner()
    expected = dict(OLD)
    for number in order:
        expected = plain(expected, runs[number], rule)
    check(store, expected)


def append_all(path: str, worker: int, rule: OnDuplicate) -> None:
    for turn in range(3):
        new = [(f"k{number}", f"{worker}") for number in range(turn * 10, turn * 10 + 30)]
        optimize(play, new, path, mode="append", on_duplicate=rule, chunk_size=8, num_workers=1, verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_processes_that_append_the_same_keys(path: Path, rule: OnDuplicate) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=append_all, args=(str(path), worker, rule)) for worker in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    found = content(open_snapshot(open_store(path)))
    assert found.keys() == {f"k{number}" for number in range(50)}
    assert all((text == "old") == (rule == "skip" and key in OLD) for key, text in found.items())
    check(open_store(path), found)


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "torn"])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_crash_at_any_call_leaves_the_old_version_or_the_new_one(rule: OnDuplicate, when: Any) -> None:
    counting = FaultyStore(dataset())
    run(counting, NEW, rule)
    expected = plain(OLD, NEW, rule)
    outcomes = set()
    for call in range(1, len(counting.calls) + 1):
        store = dataset()
        with pytest.raises(SimulatedCrash):
            run(FaultyStore(store, call, when), NEW, rule, session="job")
        after = content(open_snapshot(store))
        assert after in (OLD, expected), f"call {call} ({counting.calls[call - 1]}) {when}"
        outcomes.add(after == expected)
        # The same run again, also without its session: it finds its own samples, and changes nothing but their values.
        run(store, NEW, rule)
        check_dataset(store)
        assert list(content(open_snapshot(store)).items()) == list(expected.items())
        vacuum_store(store, keep=20, grace=timedelta(0), policy=AT_ONCE)
        check(store, expected)
    assert outcomes == {False, True}
