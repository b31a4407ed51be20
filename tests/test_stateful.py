"""The stateful model: whatever users do to a dataset in whatever order, it is what plain Python says it should be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import liveset
from liveset.edit.commit import _Commit
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.retention import Survey
from liveset.edit.rewrite import Rewrite, Splicer
from liveset.format.keytable import KeyColumn
from liveset.keystore import TableKeys
from liveset.snapshot import open_snapshot
from liveset.storage import version_name
from liveset.write.staging import Staging
from tests.support.comparing import Row
from tests.support.machine import DatasetMachine
from tests.support.places import LocalPlace, MemoryPlace

pytest.importorskip("pyarrow", exc_type=ImportError)

# Sequences and steps of each, by the profile of the run.
_SIZES = {"dev": (20, 20), "ci": (25, 25), "nightly": (60, 40)}
_EXAMPLES, _STEPS = _SIZES.get(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"), _SIZES["dev"])


def _sized(examples: int, steps: int) -> settings:
    return settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class LocalMachine(DatasetMachine):
    make_place = LocalPlace


class MemoryMachine(DatasetMachine):
    make_place = MemoryPlace


class TestLocal(LocalMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = _sized(_EXAMPLES // 3, _STEPS)


class TestMemory(MemoryMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = _sized(_EXAMPLES, _STEPS)


@pytest.mark.nightly
class TestLocalLong(LocalMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = _sized(300, 120)


@pytest.mark.nightly
class TestMemoryLong(MemoryMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = _sized(1000, 120)


# Each check can fail: what it is for is done behind the library's back

ROWS: list[Row] = [{"id": f"k{i}", "alt": 100 + i, "v": i % 4, "t": "x" * i} for i in range(6)]
NEW: Row = {"id": "k9", "alt": 109, "v": 1, "t": "new"}
PLAIN = {"chunk_size": 2, "level": None}
CHECKS = (
    "newest_equals_the_model",
    "an_earlier_version_equals_the_model",
    "history_is_gap_free",
    "the_old_tool_sees_the_same",
    "no_file_is_missing_or_too_many",
    "verify_finds_no_damage",
)


@pytest.fixture(params=[LocalMachine, MemoryMachine])
def machine(request: pytest.FixtureRequest) -> Iterator[DatasetMachine]:
    """A dataset of three versions with published keys."""
    machine: DatasetMachine = request.param()
    machine.begin(ROWS[:4], "id", PLAIN, 1, False)
    machine.append(ROWS[4:], False, 2, None)
    machine.replace_at_once([{**ROWS[1], "v": 3}], None)
    try:
        yield machine
    finally:
        machine.place.close()


def failing(machine: DatasetMachine) -> set[str]:
    """Return the checks that fail; all earlier versions are looked at."""
    failed = set()
    for name in CHECKS:
        try:
            for _ in machine.model.versions:
                getattr(machine, name)()
        except (AssertionError, liveset.DatasetError, KeyError):
            failed.add(name)
    return failed


def test_no_check_fails_for_nothing(machine: DatasetMachine) -> None:
    assert failing(machine) == set()
    machine.vacuum(0, 0, True, None)
    assert failing(machine) == set()


def chunk_of(machine: DatasetMachine, version: int, number: int) -> str:
    return open_snapshot(machine.place.store, version).index.chunks[number].filename


def _lose_a_chunk(machine: DatasetMachine) -> None:
    machine.place.put(chunk_of(machine, 3, 1), None)


def _lose_an_old_chunk(machine: DatasetMachine) -> None:
    machine.place.put(chunk_of(machine, 1, 0), None)


def _lose_a_version(machine: DatasetMachine) -> None:
    machine.place.put(version_name(2), None)


def _damage(machine: DatasetMachine) -> None:
    name = chunk_of(machine, 3, 2)
    data = bytearray(machine.place.read(name))
    data[-1] ^= 1
    machine.place.put(name, bytes(data))


def _leave_a_file(machine: DatasetMachine) -> None:
    machine.place.put("chunk-0-9-0123456789abcdef.bin", b"x")


def _publish_other_keys(machine: DatasetMachine) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(machine.place.read("keys/shard-00000.parquet")))
    sink = io.BytesIO()
    pq.write_table(table.set_column(0, "key", pa.array([f"k{3 - i}" for i in range(4)])), sink)
    machine.place.put("keys/shard-00000.parquet", sink.getvalue())


def _forget_a_sample(machine: DatasetMachine) -> None:
    machine.model.versions[3] = machine.model.versions[2]


def _take_another_tag(machine: DatasetMachine) -> None:
    machine.model.tags["x"] = 1


DAMAGES: dict[Callable[[DatasetMachine], None], set[str]] = {
    _lose_a_chunk: set(CHECKS) - {"history_is_gap_free"},
    _lose_an_old_chunk: {"an_earlier_version_equals_the_model", "no_file_is_missing_or_too_many"},
    _lose_a_version: {"an_earlier_version_equals_the_model", "no_file_is_missing_or_too_many", "history_is_gap_free"},
    _damage: {"newest_equals_the_model", "an_earlier_version_equals_the_model", "the_old_tool_sees_the_same", "verify_finds_no_damage"},
    _leave_a_file: {"no_file_is_missing_or_too_many"},
    _publish_other_keys: {"the_old_tool_sees_the_same"},
    _forget_a_sample: {"newest_equals_the_model", "an_earlier_version_equals_the_model", "the_old_tool_sees_the_same"},
    _take_another_tag: {"history_is_gap_free"},
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_each_check_can_fail(machine: DatasetMachine, damage: Callable[[DatasetMachine], None]) -> None:
    damage(machine)
    assert failing(machine) >= DAMAGES[damage]


# Each rule of the library that is taken away is noticed

Steps = Callable[[DatasetMachine], object]


def _conflicting_sessions(machine: DatasetMachine) -> None:
    for slot in "AB":
        machine.open_session(slot)
        machine.stage(slot, "replace", {**ROWS[0], "v": 1 if slot == "A" else 2}, 6, True)
    machine.commit_session("A", None)
    machine.commit_session("B", None)


def _rebuilt_keys(machine: DatasetMachine) -> None:
    machine.overwrite(ROWS[::-1], "id", PLAIN, 1, (1, "before"))
    machine.overwrite(ROWS[::-1], None, PLAIN, 1, None)
    failed = failing(machine)
    assert not failed, failed


def _crashed_overwrite(machine: DatasetMachine) -> None:
    for call in range(1, 20):
        machine.overwrite(ROWS[: call % 5], "id", PLAIN, 1, (call, "after"))
        failed = failing(machine)
        assert not failed, failed


def _edited(machine: DatasetMachine) -> None:
    todo = [("delete", ROWS[0]), ("patch", {**ROWS[1], "v": 2}), ("insert", NEW), ("delete", ROWS[4]), ("delete", ROWS[5])]
    machine.edit_at_once(todo, None)
    _and_check(machine)


def _mixed_sessions(machine: DatasetMachine) -> None:
    """Both delete the same sample, in the chunk of others that they change."""
    for slot, row in (("A", NEW), ("B", {**NEW, "id": "k10"})):
        machine.open_session(slot)
        machine.stage(slot, "insert", row, 1, False)
        machine.stage(slot, "delete", ROWS[0], 1, False)
    machine.stage("A", "patch", {**ROWS[1], "v": 1}, 1, False)
    machine.stage("B", "delete", ROWS[2], 1, False)
    machine.stage("B", "replace", {**ROWS[3], "v": 1}, 1, False)
    machine.commit_session("B", None)
    machine.commit_session("A", None)
    _and_check(machine)


def _clashing_sessions(machine: DatasetMachine) -> None:
    """The first one who inserts a key has it, and what was deleted cannot be changed."""
    for first, second, row in (("insert", "insert", NEW), ("delete", "patch", ROWS[0]), ("patch", "delete", {**ROWS[1], "v": 2})):
        for slot, what in (("A", first), ("B", second)):
            machine.open_session(slot)
            machine.stage(slot, what, row, 1, False)
        machine.commit_session("A", None)
        machine.commit_session("B", None)
    _and_check(machine)


def _crashed_edit(machine: DatasetMachine) -> None:
    for call in range(1, 26):
        row = {**NEW, "id": f"k{6 + call % 4}"}
        machine.edit_at_once(
            [("upsert", row), ("delete", ROWS[call % 6]), ("patch", {**ROWS[(call + 1) % 6], "v": call % 4})], (call, "after")
        )
        machine.newest_equals_the_model()
    _and_check(machine)


def _changed_to_the_same(machine: DatasetMachine) -> None:
    """Makes no version, but for a job with a name; a sample that is like before beside others is none that changed."""
    for what in ("replace", "patch", "upsert"):
        machine.open_session("A")
        machine.stage("A", what, ROWS[0], 6, True)
        machine.commit_session("A", None)
    machine.edit_at_once([("replace", ROWS[0]), ("patch", ROWS[5])], None)
    machine.edit_at_once([("replace", ROWS[0]), ("patch", {**ROWS[5], "v": 2})], None)
    _and_check(machine)


def _twice_appended(machine: DatasetMachine) -> None:
    machine.append(ROWS[:1], False, 2, None)


def _lost_append(machine: DatasetMachine) -> None:
    machine.append_meanwhile([{**ROWS[0], "id": "k9"}], ROWS[:1], "overwrite", "id", 0, True)


def _tagged_and_vacuumed(machine: DatasetMachine) -> None:
    machine.tag("x", 1, False, None)
    machine.overwrite(ROWS[:2], "id", PLAIN, 1, None)
    machine.let_time_pass()
    machine.vacuum(0, 0, False, None)


def _pinned_and_vacuumed(machine: DatasetMachine) -> None:
    machine.open_reader(2, True, False, None)
    machine.overwrite(ROWS[:2], "id", PLAIN, 1, None)
    machine.vacuum(0, 0, False, None)


def _without_tombstones(edited: Any) -> Any:
    return lambda self, *given, **parts: edited(self, *given, **{**parts, "deleted": KeyColumn.of([])})


MUTANTS: dict[str, tuple[Any, str, Any, Steps]] = {
    "no archive": (_Commit, "archive", lambda *_: None, lambda machine: _and_check(machine, _twice_appended, _rebuilt_keys)),
    "wrong keys stay published": (_Commit, "outdated", lambda *_: [], _rebuilt_keys),
    "the last writer wins": (Rewrite, "_check_contents", lambda *_: None, _conflicting_sessions),
    "the last one who deletes wins": (Rewrite, "_check_contents", lambda *_: None, _clashing_sessions),
    "patches are lost": (Splicer, "_contents", lambda *_: ({}, []), _edited),
    "equal samples are new ones": ("liveset.edit.splice._Items", "holds", lambda *_: False, _changed_to_the_same),
    "all samples are equal": ("liveset.edit.splice._Items", "holds", lambda *_: True, _changed_to_the_same),
    "keys stay published after a delete": ("liveset.edit.commit", "keeps_places", lambda *_: True, _edited),
    "deleted keys get no tombstone": (KeyWriter, "edited", _without_tombstones(KeyWriter.edited), _edited),
    "samples do not move down": (TableKeys, "_moved", lambda _, place, known: place, _mixed_sessions),
    "places are not looked up again": ("liveset.edit.rewrite", "_MOVES_KEYS", frozenset(), _mixed_sessions),
    "a job that is done is done again": (_Commit, "find_done", lambda *_: None, _crashed_edit),
    "new keys are not looked up": (TableKeys, "locate_column", lambda _, keys: [None] * len(keys), _twice_appended),
    "failed appends leave files": (Staging, "discard", lambda *_: None, lambda machine: _and_check(machine, _lost_append)),
    "vacuum forgets everything": (Survey, "_keeps", lambda *_: False, _tagged_and_vacuumed),
    "vacuum does not see readers": ("liveset.edit.retention", "leased_versions", lambda *_: _nobody(), _pinned_and_vacuumed),
    "vacuum deletes nothing": ("liveset.edit.retention", "age_of", lambda entry: entry.modified + timedelta(days=9), _tagged_and_vacuumed),
}


def _nobody() -> Any:
    from liveset.lease import LeasedVersions

    return LeasedVersions(frozenset(), ())


def _and_check(machine: DatasetMachine, *steps: Steps) -> None:
    for step in steps:
        step(machine)
    failed = failing(machine)
    assert not failed, failed


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_missing_is_noticed(machine: DatasetMachine, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, steps = MUTANTS[mutant]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", instead)
    else:
        monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, LookupError, liveset.DatasetError)):
        steps(machine)


@pytest.mark.parametrize(
    "steps",
    [
        _conflicting_sessions,
        _edited,
        _mixed_sessions,
        _clashing_sessions,
        _changed_to_the_same,
        _crashed_edit,
        _rebuilt_keys,
        _crashed_overwrite,
        _lost_append,
        _twice_appended,
        _tagged_and_vacuumed,
        _pinned_and_vacuumed,
    ],
)
def test_the_same_steps_pass_without_a_mutant(machine: DatasetMachine, steps: Steps) -> None:
    _and_check(machine, steps)
    assert json.loads(machine.place.read("index.json"))["edit"]["version"] == machine.model.number
