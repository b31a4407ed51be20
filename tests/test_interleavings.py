"""Writers, a reader and a vacuum on one dataset, in every order of their calls to the store that a test may choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveset.edit.adopt import remove_unnamed
from liveset.edit.commit import Policy
from liveset.edit.session import DatasetUpdate
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import Conflict, KeyConflict, SessionExpired, VersionExpired
from liveset.format.chunk import open_chunk
from liveset.format.schema import Decoder, Schema
from liveset.keystore import open_keys
from liveset.lease import pin
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store
from liveset.testing import MemoryStore
from liveset.testing.invariants import check_dataset, unneeded_files
from liveset.testing.schedule import in_turn, run_interleaved
from liveset.write.chunker import ChunkLimit, ChunkWriter
from liveset.write.keying import KeyRule
from liveset.write.options import Sizes
from liveset.write.target import Asked, CommitWishes, Target

AT_ONCE = Policy(first_pause=0)
ZERO = timedelta(0)
OLD = {f"k{i}": i for i in range(6)}
"""In two chunks, of k0 to k3 and of k4 and k5."""
Content = dict[str, int]
Actor = Callable[[Store], str]


def sample(key: str, value: int) -> dict[str, Any]:
    return {"id": key, "v": value}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "pause", lambda *_: None)


def write(store: Store, values: Mapping[str, int], mode: str | None) -> None:
    """Do what optimize does, in one thread."""
    target = Target(store, mode)
    rule = target.key_rule(None if mode == "append" else "id")
    token = AT_ONCE.token()
    schema = target.schema(())
    writer = ChunkWriter(store, token=token, limit=ChunkLimit(4, None), schema=schema, key=rule)
    for key, value in values.items():
        writer.add(sample(key, value))
    # The background thread is no actor: its writes happen within this call.
    writer.finish()
    asked = Asked(Sizes(4, None), None, None, None, ())
    chosen = replace(target.settings(asked, allow_pickle=False, whole=False, keys=rule), token=token)
    try:
        target.commit(writer.staged, writer.schema, chosen, CommitWishes())
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
    index = snapshot.index
    assert index.config is not None
    decoder = Decoder(Schema.from_config(index.config))
    keys = open_keys(snapshot)
    assert keys is not None
    found: Content = {}
    for number, record in enumerate(index.chunks):
        chunk = open_chunk(snapshot.chunk_file(number)[1], record, decoder, None)
        for slot, item in enumerate(chunk.iterate(0, record.samples)):
            assert keys.key_at(number, slot) == item["id"]
            assert keys.locate(item["id"]) == (number, slot)
            assert item["id"] not in found
            found[item["id"]] = item["v"]
    assert len(keys) == len(found)
    return found


# Actors: each says what became of it


def replacer(edits: Content) -> Actor:
    def act(store: Store) -> str:
        try:
            with DatasetUpdate(store, policy=AT_ONCE) as update:
                for key, value in edits.items():
                    assert update[key]["id"] == key
                    update[key] = sample(key, value)
                update.commit()
        except KeyConflict as error:
            assert set(error.keys) <= set(edits)
            return "conflict"
        except (SessionExpired, VersionExpired):
            return "expired"
        return "done"

    return act


def appender(values: Content) -> Actor:
    def act(store: Store) -> str:
        try:
            write(store, values, "append")
        except KeyConflict as error:
            assert set(error.keys) <= set(values)
            return "conflict"
        except SessionExpired:
            return "expired"
        return "done"

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


def check(store: Store, results: Mapping[str, Any], effects: Mapping[str, Content]) -> None:
    """Whoever succeeded is in the newest version, whoever did not is nowhere, and nobody lost anything."""
    for name, result in results.items():
        assert not isinstance(result, BaseException), f"{name}: {result!r}"
    check_dataset(store)
    expected = dict(OLD)
    for name, effect in effects.items():
        if results[name] == "done":
            expected |= effect
    found = content(open_snapshot(store))
    winners = [effect for name, effect in effects.items() if results[name] == "done"]
    claimed = [key for effect in winners for key in effect]
    assert len(claimed) == len(set(claimed)), f"a key was changed twice, by writers who did not know of each other: {results}"
    assert found == expected
    assert list(found)[: len(OLD)] == list(OLD)
    assert sum(entry.op in ("replace", "append") for entry in list_versions(store)) == len(winners)
    if "vacuum" in results:
        vacuumer(store)
        assert unneeded_files(store) == set()
        assert content(open_snapshot(store)) == expected
    else:
        assert unneeded_files(store) == set(), "a writer left files behind"


def play(actors: Mapping[str, Actor], effects: Mapping[str, Content], choose: Callable[[list[str]], str]) -> dict[str, Any]:
    store = dataset()
    results = run_interleaved(store, actors, choose)
    assert results.keys() == actors.keys()
    check(store, results, effects)
    return results


LEFT, RIGHT, FAR, CLASH = {"k0": 10, "k4": 14}, {"k1": 21, "k5": 25}, {"k5": 35}, {"k0": 40, "k3": 43}
NEW, OTHERS, TAKEN = {"n0": 1, "n1": 2}, {"n2": 3}, {"n1": 4, "n3": 5}
RACES: dict[str, tuple[dict[str, Actor], dict[str, Content]]] = {
    "replace, replace: other keys of the same chunks": ({"a": replacer(LEFT), "b": replacer(RIGHT)}, {"a": LEFT, "b": RIGHT}),
    "replace, replace: the same key": ({"a": replacer(LEFT), "b": replacer(CLASH)}, {"a": LEFT, "b": CLASH}),
    "replace, append": ({"a": replacer(LEFT), "b": appender(NEW)}, {"a": LEFT, "b": NEW}),
    "append, append": ({"a": appender(NEW), "b": appender(OTHERS)}, {"a": NEW, "b": OTHERS}),
    "append, append: the same key": ({"a": appender(NEW), "b": appender(TAKEN)}, {"a": NEW, "b": TAKEN}),
    "replace, vacuum": ({"a": replacer(LEFT), "vacuum": vacuumer}, {"a": LEFT}),
    "append, vacuum": ({"a": appender(NEW), "vacuum": vacuumer}, {"a": NEW}),
    "pinned reader, replace, vacuum": (
        {"a": replacer(LEFT), "reader": reader(pinned=True), "vacuum": vacuumer},
        {"a": LEFT},
    ),
    "two replaces, a reader, a vacuum": (
        {"a": replacer(LEFT), "b": replacer(FAR), "reader": reader(pinned=False), "vacuum": vacuumer},
        {"a": LEFT, "b": FAR},
    ),
    "all at once": (
        {"a": replacer(LEFT), "b": replacer(CLASH), "c": appender(NEW), "reader": reader(pinned=True), "vacuum": vacuumer},
        {"a": LEFT, "b": CLASH, "c": NEW},
    ),
}


@pytest.mark.parametrize("race", RACES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_order(race: str, data: st.DataObject) -> None:
    play(*RACES[race], lambda live: data.draw(st.sampled_from(live)))


@pytest.mark.nightly
@pytest.mark.parametrize("race", RACES)
@given(data=st.data())
def test_many_orders(race: str, data: st.DataObject) -> None:
    play(*RACES[race], lambda live: data.draw(st.sampled_from(live)))


ALWAYS_BOTH = {"replace, replace: other keys of the same chunks", "replace, append", "append, append"}
PAIRS = [race for race, (actors, _) in RACES.items() if len(actors) == 2]


@pytest.mark.parametrize("race", PAIRS)
def test_one_between_any_two_calls_of_the_other(race: str) -> None:
    outcomes = set()
    for first, second in itertools.permutations(RACES[race][0]):
        for calls in range(30):
            results = play(*RACES[race], in_turn(iter([first] * calls + [second] * 200 + [first] * 200)))
            outcomes.add(tuple(sorted(results.items())))
    good = {outcome for outcome in outcomes if all(result == "done" for _, result in outcome)}
    assert good, "it never went well"
    if race in ALWAYS_BOTH:
        assert outcomes == good, "these can always be merged"
    elif "same key" in race:
        assert outcomes - good, "they never met"


# Mutants: each rule that is taken away must be noticed


def _all_pairs() -> None:
    for race in PAIRS:
        test_one_between_any_two_calls_of_the_other(race)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "spliced from the first look": lambda patch: patch.setattr("liveset.edit.replacement.Replacement._check_slots", lambda *_: None),
    "keys are not looked up again": lambda patch: patch.setattr(
        "liveset.edit.keyfiles.TableKeys.locate_column", lambda _, keys: [None] * len(keys.hashes if hasattr(keys, "hashes") else keys)
    ),
    "any head is swapped": lambda patch: patch.setattr(MemoryStore, "_tag", lambda _: "always"),
    "the fence is ignored": lambda patch: patch.setattr("liveset.edit.commit._Commit.check_staged", lambda *_: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_missing_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, Exception)):
        _all_pairs()
