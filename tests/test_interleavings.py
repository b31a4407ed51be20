"""Writers, a reader and a vacuum on one dataset, in every order of their calls to the store that a test may choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveset.edit.adopt import remove_unnamed
from liveset.edit.chunkfiles import ChunkLimit
from liveset.edit.commit import Policy
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.rewrite import Rewrite
from liveset.edit.session import DatasetUpdate
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import Conflict, DatasetError, KeyConflict, SessionExpired, VersionExpired
from liveset.format.chunk import open_chunk
from liveset.format.keytable import KeyColumn
from liveset.format.schema import Decoder, Schema
from liveset.keystore import TableKeys, open_keys
from liveset.lease import pin
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store
from liveset.testing import MemoryStore
from liveset.testing.invariants import check_dataset, unneeded_files
from liveset.testing.schedule import in_turn, run_interleaved
from liveset.tools.keys import build_keys
from liveset.write.chunker import ChunkWriter
from liveset.write.landing import CommitWishes, Landing
from liveset.write.options import Sizes
from liveset.write.target import Asked, Target

AT_ONCE = Policy(first_pause=0)
ZERO = timedelta(0)
OLD = {f"k{i}": i for i in range(6)}
"""In two chunks, of k0 to k3 and of k4 and k5."""
Content = dict[str, int]
Effect = Mapping[str, int | None]
"""New values by key; None deletes the sample."""
Actor = Callable[[Store], str]


def sample(key: str, value: int) -> dict[str, Any]:
    return {"id": key, "v": value}


@pytest.fixture(autouse=True)
def _as_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "pause", lambda *_: None)
    # Up to Python 3.11 a cached property is computed under a lock of its class, in which an actor must not wait for its turn.
    if hasattr(tables := vars(TableKeys)["tables"], "lock"):
        monkeypatch.setattr(tables, "lock", nullcontext())


def write(store: Store, values: Mapping[str, int | None], mode: str | None, session: str | None = None) -> None:
    """Do what optimize does, in one thread."""
    target = Target(store, mode)
    rule = target.key_rule(None if mode == "append" else "id")
    token = AT_ONCE.token()
    schema = target.schema(())
    writer = ChunkWriter(store, token=token, limit=ChunkLimit(4, None), schema=schema, key=rule)
    for key, value in values.items():
        assert value is not None
        writer.add(sample(key, value))
    # The background thread is no actor: its writes happen within this call.
    writer.finish()
    asked = Asked(Sizes(4, None), None, None, None, ())
    chosen = replace(target.settings(asked, allow_pickle=False, whole=False, keys=rule), token=token)
    try:
        Landing(target, CommitWishes(session)).commit(writer.staged, writer.schema, chosen)
    except (Conflict, SessionExpired):
        tables = [entry.name for entry in store.list("_liveset/keys/") if token in entry.name]
        remove_unnamed(store, [*tables, *(chunk.record.filename for chunk in writer.staged)], None)
        raise


def dataset() -> MemoryStore:
    store = MemoryStore()
    write(store, OLD, None)
    return store


def content(snapshot: Snapshot) -> Content:
    """Read all samples, by position and by key, which must agree."""
    keys = open_keys(snapshot)
    assert keys is not None
    found = content_by_id(snapshot)
    places = [(number, slot) for number, record in enumerate(snapshot.index.chunks) for slot in range(record.samples)]
    assert [keys.key_at(*place) for place in places] == list(found)
    assert [keys.locate(key) for key in found] == places
    assert len(keys) == len(found)
    return found


def content_by_id(snapshot: Snapshot) -> Content:
    """Read all samples by position."""
    index = snapshot.index
    assert index.config is not None
    decoder = Decoder(Schema.from_config(index.config))
    found: Content = {}
    for number, record in enumerate(index.chunks):
        chunk = open_chunk(snapshot.chunk_file(number)[1], record, decoder, None)
        for item in chunk.iterate(0, record.samples):
            assert item["id"] not in found
            found[item["id"]] = item["v"]
    return found


# Actors: each says what became of it, and notes the version that it saw, and of the keys that it inserts


@dataclass
class Seen:
    """What a writer saw when it began."""

    version: int
    inserts: frozenset[str] = frozenset()


def replacer(session: str, edits: Effect, seen: dict[str, Seen]) -> Actor:
    def act(store: Store) -> str:
        try:
            with DatasetUpdate(store, session=session, policy=AT_ONCE) as update:
                seen[session] = Seen(update.version)
                for key, value in edits.items():
                    assert value is not None
                    assert update[key]["id"] == key
                    update[key] = sample(key, value)
                update.commit()
        except KeyConflict as error:
            refused = set(error.keys)
        except (SessionExpired, VersionExpired):
            return "expired"
        else:
            return "done"
        assert refused <= set(edits)
        return "conflict"

    return act


def editor(session: str, edits: Effect, seen: dict[str, Seen]) -> Actor:
    """Patches what is there, inserts what is not, and deletes what has no new value."""

    def act(store: Store) -> str:
        try:
            with DatasetUpdate(store, session=session, policy=AT_ONCE) as update:
                seen[session] = Seen(update.version, frozenset(key for key in edits if key not in update))
                for key, value in edits.items():
                    if value is not None and key not in update:
                        update.insert(key, sample(key, value))
                    elif value is not None:
                        update.patch(key, v=value)
                    elif key in update:
                        del update[key]
                update.commit()
        except KeyConflict as error:
            refused = set(error.keys)
        except (SessionExpired, VersionExpired):
            return "expired"
        else:
            return "done"
        assert refused <= set(edits)
        return "conflict"

    return act


def appender(session: str, values: Effect, seen: dict[str, Seen]) -> Actor:
    def act(store: Store) -> str:
        seen[session] = Seen(0, frozenset(values))
        try:
            write(store, values, "append", session)
        except KeyConflict as error:
            refused = set(error.keys)
        except SessionExpired:
            return "expired"
        else:
            return "done"
        assert refused <= set(values)
        return "conflict"

    return act


def vacuumer(store: Store) -> str:
    try:
        vacuum_store(store, keep=0, grace=ZERO, policy=AT_ONCE)
    except Conflict:
        return "conflict"
    return "done"


def reader(*, pinned: bool) -> Actor:
    """Reads the first version twice; once it is pinned it must all be there."""

    def act(store: Store) -> str:
        lease = None
        try:
            snapshot = open_snapshot(store, 1)
            lease = pin(store, snapshot) if pinned else None
        except VersionExpired:
            return "expired"
        try:
            for _ in range(2):
                assert content(snapshot) == OLD
        except VersionExpired:
            assert not pinned, "a pinned version lost a file"
            return "expired"
        finally:
            if lease is not None:
                lease.release()
        return "done"

    return act


# What must come of it


def check(store: Store, results: Mapping[str, Any], effects: Mapping[str, Effect], seen: Mapping[str, Seen]) -> None:
    """Whoever succeeded is in the newest version, whoever did not is nowhere, and nobody lost anything."""
    for name, result in results.items():
        assert not isinstance(result, BaseException), f"{name}: {result!r}"
    check_dataset(store)
    order = [entry for entry in reversed(list_versions(store)) if entry.op in ("replace", "append", "insert", "delete", "edit")]
    assert sorted(entry.session for entry in order) == sorted(name for name in effects if results[name] == "done")
    expected, changed = dict(OLD), dict.fromkeys(OLD, 1)
    for entry in order:
        base = seen[entry.session]
        for key, value in effects[entry.session].items():
            if key in base.inserts:
                assert key not in expected, f"{key} was added twice: {results}"
            elif value is not None or key in expected:
                assert key in expected, f"{entry.session} has changed {key}, which was gone"
                assert changed[key] <= base.version, f"{entry.session} has changed {key} without having seen what it replaced"
            if value is not None:
                expected[key] = value
            else:
                expected.pop(key, None)
            changed[key] = entry.version
    ordered = [*expected.items()]
    assert [*content(open_snapshot(store)).items()] == ordered
    if "vacuum" in results:
        vacuumer(store)
        check_dataset(store)
        assert [*content(open_snapshot(store)).items()] == ordered
    assert unneeded_files(store) == set()


READER, PINNED = reader(pinned=False), reader(pinned=True)
LEFT, RIGHT, FAR, CLASH = {"k0": 10, "k4": 14}, {"k1": 21, "k5": 25}, {"k5": 35}, {"k0": 40, "k3": 43}
NEW, OTHERS, TAKEN = {"n0": 1, "n1": 2}, {"n2": 3}, {"n1": 4, "n3": 5}
MIXED, OTHER_MIXED = {"k0": None, "k1": 11, "k4": None, "n0": 1}, {"k2": None, "k3": 23, "k5": 25, "n2": 2, "n3": 3}
CLASHING, EMPTYING, LAST = {"n0": 4, "k1": None, "k5": 45}, {"k4": None, "k5": None, "k0": 10}, {"k1": None, "k5": None, "n0": 3}
SHIFTING, SAME = {"k0": None, "k1": 11}, {"k1": 41, "k2": None, "n0": 3}
Writer = tuple[Callable[[str, Effect, dict[str, Seen]], Actor], Effect]
RACES: dict[str, tuple[dict[str, Writer], dict[str, Actor]]] = {
    "replace, replace: other keys of the same chunks": ({"a": (replacer, LEFT), "b": (replacer, RIGHT)}, {}),
    "replace, replace: the same key": ({"a": (replacer, LEFT), "b": (replacer, CLASH)}, {}),
    "replace, append": ({"a": (replacer, LEFT), "b": (appender, NEW)}, {}),
    "append, append": ({"a": (appender, NEW), "b": (appender, OTHERS)}, {}),
    "append, append: the same key": ({"a": (appender, NEW), "b": (appender, TAKEN)}, {}),
    "replace, vacuum": ({"a": (replacer, LEFT)}, {"vacuum": vacuumer}),
    "append, vacuum": ({"a": (appender, NEW)}, {"vacuum": vacuumer}),
    "pinned reader, replace, vacuum": ({"a": (replacer, LEFT)}, {"reader": PINNED, "vacuum": vacuumer}),
    "two replaces, a reader, a vacuum": ({"a": (replacer, LEFT), "b": (replacer, FAR)}, {"reader": READER, "vacuum": vacuumer}),
    "edit, edit: other keys of the same chunks": ({"a": (editor, MIXED), "b": (editor, OTHER_MIXED)}, {}),
    "edit, edit: the same keys": ({"a": (editor, MIXED), "b": (editor, CLASHING)}, {}),
    "edit, edit: the same sample": ({"a": (editor, SHIFTING), "b": (editor, SAME)}, {}),
    "edit, edit: both empty a chunk": ({"a": (editor, EMPTYING), "b": (editor, LAST)}, {}),
    "edit, replace": ({"a": (editor, MIXED), "b": (replacer, RIGHT)}, {}),
    "edit, append": ({"a": (editor, MIXED), "b": (appender, OTHERS)}, {}),
    "edit, append: the same key": ({"a": (editor, MIXED), "b": (appender, NEW)}, {}),
    "edit, vacuum": ({"a": (editor, MIXED)}, {"vacuum": vacuumer}),
    "pinned reader, edit, vacuum": ({"a": (editor, EMPTYING)}, {"reader": PINNED, "vacuum": vacuumer}),
    "two edits, an append, a vacuum": (
        {"a": (editor, MIXED), "b": (editor, OTHER_MIXED), "c": (appender, {"n1": 2})},
        {"vacuum": vacuumer},
    ),
    "two edits that clash, an append, a vacuum": (
        {"a": (editor, MIXED), "b": (editor, CLASHING), "c": (appender, NEW)},
        {"vacuum": vacuumer},
    ),
    "all at once": (
        {"a": (replacer, LEFT), "b": (replacer, CLASH), "c": (appender, NEW)},
        {"reader": PINNED, "vacuum": vacuumer},
    ),
}


def play(race: str, choose: Callable[[list[str]], str]) -> dict[str, Any]:
    writers, others = RACES[race]
    seen: dict[str, Seen] = {}
    store = dataset()
    actors = {name: make(name, effect, seen) for name, (make, effect) in writers.items()}
    results = run_interleaved(store, {**actors, **others}, choose)
    assert len(results) == len(writers) + len(others)
    check(store, results, {name: effect for name, (_, effect) in writers.items()}, seen)
    return results


@pytest.mark.parametrize("race", RACES)
@settings(max_examples=20)
@given(data=st.data())
def test_any_order(race: str, data: st.DataObject) -> None:
    play(race, lambda live: data.draw(st.sampled_from(live)))


@pytest.mark.nightly
@pytest.mark.parametrize("race", RACES)
@given(data=st.data())
def test_many_orders(race: str, data: st.DataObject) -> None:
    play(race, lambda live: data.draw(st.sampled_from(live)))


ALWAYS_BOTH = {
    "replace, replace: other keys of the same chunks",
    "replace, append",
    "append, append",
    "edit, edit: other keys of the same chunks",
    "edit, edit: both empty a chunk",
    "edit, append",
}
PAIRS = [race for race, (writers, others) in RACES.items() if len(writers) + len(others) == 2]


@pytest.mark.parametrize("race", PAIRS)
def test_one_between_any_two_calls_of_the_other(race: str) -> None:
    outcomes = set()
    for first, second in itertools.permutations([*RACES[race][0], *RACES[race][1]]):
        for calls in range(30):
            results = play(race, in_turn(iter([first] * calls + [second] * 200 + [first] * 200)))
            outcomes.add(tuple(sorted(results.items())))
    good = {outcome for outcome in outcomes if all(result == "done" for _, result in outcome)}
    if race in ALWAYS_BOTH:
        assert outcomes == good, "these can always be merged"
    elif race == "append, append: the same key":
        assert outcomes == {(("a", "done"), ("b", "conflict")), (("a", "conflict"), ("b", "done"))}
    else:
        assert good, "it never went well"
        assert outcomes - good, "they never met"


def test_keys_that_are_made_anew_between_any_two_calls_of_an_edit() -> None:
    """A key may get another sample of the same chunk: what was staged for the one that it had is never stored in the other."""
    swapped = {"k0": "k1", "k1": "k0"}
    outcomes = set()
    for calls in range(40):
        store = dataset()
        seen: list[str] = []

        def edit(store: Store, seen: list[str] = seen) -> str:
            try:
                with DatasetUpdate(store, policy=AT_ONCE) as update:
                    seen.append(update["k0"]["id"])
                    update.patch("k0", v=10)
                    update.commit()
            except KeyConflict:
                return "conflict"
            return "done"

        def rebuild(store: Store) -> None:
            build_keys(
                store, lambda it: swapped.get(it["id"], it["id"]), True, 1, False, verbose=False, message="", author="", dry_run=False
            )

        results = run_interleaved(store, {"edit": edit, "keys": rebuild}, in_turn(iter(["edit"] * calls + ["keys"] * 200 + ["edit"] * 200)))
        assert results["keys"] is None, results
        found = content_by_id(open_snapshot(store))
        assert found == ({**OLD, seen[0]: 10} if results["edit"] == "done" else OLD), results
        outcomes.add(results["edit"])
    assert outcomes == {"done", "conflict"}


# Mutants: each rule that is taken away must be noticed


def _all_pairs() -> None:
    for race in PAIRS:
        test_one_between_any_two_calls_of_the_other(race)


def _without(patch: pytest.MonkeyPatch, part: str, nothing: Any) -> None:
    """Leave a part out of what an edit writes about keys."""
    edited = KeyWriter.edited
    patch.setattr(KeyWriter, "edited", lambda self, *given, **parts: edited(self, *given, **{**parts, part: nothing}))


MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "stored samples are not compared": (
        "replace, replace: the same key",
        lambda patch: patch.setattr("liveset.edit.rewrite.Rewrite._check_contents", lambda *_: None),
    ),
    "new keys are not looked up": (
        "append, append: the same key",
        lambda patch: patch.setattr(TableKeys, "locate_column", lambda _, keys: [None] * len(keys)),
    ),
    "stored samples are not compared where they moved": (
        "edit, edit: the same sample",
        lambda patch: patch.setattr("liveset.edit.rewrite.Rewrite._check_contents", lambda *_: None),
    ),
    "samples do not move down": (
        "edit, edit: other keys of the same chunks",
        lambda patch: patch.setattr(TableKeys, "_moved", lambda _, place, known: place),
    ),
    "samples do not move up": (
        "edit, edit: other keys of the same chunks",
        lambda patch: patch.setattr("liveset.keystore.moved_up", lambda slots, _: slots),
    ),
    "deleted keys get no tombstone": ("edit, edit: both empty a chunk", lambda patch: _without(patch, "deleted", KeyColumn.of([]))),
    "slots that became free are not named": ("edit, append", lambda patch: _without(patch, "removed", {})),
    "keys are not looked up again": (
        "edit, edit: other keys of the same chunks",
        lambda patch: patch.setattr("liveset.edit.rewrite._MOVES_KEYS", frozenset()),
    ),
    "a key that somebody else added is added again": (
        "edit, append: the same key",
        lambda patch: patch.setattr("liveset.edit.rewrite.Rewrite._places_now", Rewrite._same_places),
    ),
    "edits ignore the fence": ("edit, vacuum", lambda patch: patch.setattr("liveset.edit.commit._Commit.check_staged", lambda *_: None)),
    "any head is swapped": ("replace, append", lambda patch: patch.setattr(MemoryStore, "_tag", lambda _: "always")),
    "writers ignore the fence": (
        "append, vacuum",
        lambda patch: patch.setattr("liveset.edit.commit._Commit.check_staged", lambda *_: None),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_missing_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    race, mutate = MUTANTS[mutant]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, DatasetError)):
        test_one_between_any_two_calls_of_the_other(race)
