"""A dataset beside its model: how one step is done to both, and what holds after each."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

import liveset
from liveset.edit.session import DatasetUpdate
from liveset.errors import DatasetError, VersionExpired
from liveset.format.keytable import Key
from liveset.storage import HEAD
from liveset.testing import SimulatedCrash
from liveset.testing.faults import When
from liveset.testing.invariants import check_dataset
from liveset.testing.model import DatasetModel, ModelVersion, UpdateModel
from tests.support import checks
from tests.support.places import Place

Crash = tuple[int, When] | None
Change = Callable[[DatasetModel], object]
Row = dict[str, Any]


def hours(number: int) -> timedelta:
    return timedelta(hours=number)


def shout(sample: Row) -> str:
    """Return a key that no field holds."""
    return f"{sample['id']}!"


KEY_FNS: dict[str, Any] = {"id": "id", "alt": "alt", "none": shout}
"""By the field that holds the keys; ``none`` where only a function finds them."""


def keys_of(rows: Sequence[Row], by: str) -> list[Key]:
    return [shout(row) if by == "none" else row[by] for row in rows]


def remembered(by: str) -> str | None:
    return None if by == "none" else by


# Few entities and few values, so that everything meets everything.
numbers = st.integers(0, 11)
rows = st.builds(
    lambda number, alt, value, length: {"id": f"k{number}", "alt": 100 + (number if alt is None else alt), "v": value, "t": "x" * length},
    numbers,
    st.none() | st.none() | st.none() | numbers,
    st.integers(0, 3),
    st.integers(0, 9),
)
row_lists = st.lists(rows, max_size=7, unique_by=lambda row: row["id"]) | st.lists(rows, min_size=1, max_size=4)
bys = st.sampled_from(["id", "id", "alt", "none"])
crashes: st.SearchStrategy[Crash] = st.one_of(
    st.none(), st.none(), st.none(), st.tuples(st.integers(1, 24), st.sampled_from(("before", "after", "torn")))
)
layouts = st.fixed_dictionaries(
    {"chunk_size": st.integers(1, 4), "level": st.sampled_from([None, None, "chunk", "sample", "batch"])},
)
wanted = st.integers(0, 60)
"""Stands for a version: the machine takes it modulo what there is."""
slots = st.sampled_from("AB")
EDITS = ("replace", "insert", "upsert", "delete", "patch", "apply", "apply new")
edits = st.tuples(st.sampled_from(EDITS), rows)


@dataclass
class Session:
    """An update that is open, and what the model knows of it."""

    update: DatasetUpdate
    model: UpdateModel

    @property
    def base(self) -> ModelVersion:
        return self.model.base


def stage_edit(it: Any, what: str, key: Key, row: Row, by: str | None) -> None:
    """Stage one edit in an update, or in the model of one: both take the same calls."""
    sample = row if by is None else {**row, by: key}
    if what == "delete":
        del it[key]
    elif what == "patch":
        it.patch(key, {"v": row["v"], "t": row["t"]})
    elif what == "apply":
        it.apply({key: {"v": row["v"]}}, on_missing="error" if row["v"] else "skip")
    elif what == "apply new":
        it.apply({key: sample}, on_missing="insert")
    else:
        getattr(it, what)(key, sample)


@dataclass
class Reader:
    """A dataset that is open."""

    ds: liveset.StreamingDataset
    version: ModelVersion
    pinned_at: int | None


class ComparingMachine(RuleBasedStateMachine):
    """Does calls of the library to a dataset and to its model; both must agree, in results and in errors."""

    make_place: Callable[[], Place]

    def __init__(self) -> None:
        super().__init__()
        self.place = type(self).make_place()
        self.path = self.place.path
        self.model = DatasetModel()
        self.sessions: dict[str, Session] = {}
        self.open_readers: list[Reader] = []
        self.leftovers: set[str] = set()
        """Files that nobody needs, and that only a vacuum may remove."""
        self.turn = 0

    def teardown(self) -> None:
        try:
            if self.model.versions:
                checks.every_version(self.path, self.model)
                if self.model.newest.number:
                    check_dataset(self.place.store)
        finally:
            for reader in self.open_readers:
                reader.ds.close()
            self.place.close()

    # --- one step ----------------------------------------------------------------------------------------------------

    def perform(self, act: Callable[[], Any], change: Change, crash: Crash = None, *, also: tuple[type[Exception], ...] = ()) -> Any:
        """Do something to the dataset and to the model; errors must be of the same kind and name the same keys.

        Args:
            act: the call of the library.
            change: the call of the model.
            crash: where the process ends.
            also: other errors that are as good as what the model says; nothing was changed then.
        """
        after, expected = self.model.copy(), None
        try:
            change(after)
        except (DatasetError, ValueError) as error:
            after, expected = self.model, error
        result, actual, crashed = None, None, False
        self.place.gate.arm(crash)
        try:
            result = act()
        except SimulatedCrash:
            crashed = True
        except (DatasetError, ValueError, TypeError) as error:
            actual = error
        finally:
            self.place.gate.arm(None)
        if crashed:
            self.settle_crash(after)
        elif actual is not None and isinstance(actual, also):
            self.settle_adoption()
        else:
            checks.same_outcome(expected, actual)
            self.model = after
            self.settle_adoption()
        return result

    def stage_both(self, update: DatasetUpdate, model: UpdateModel, what: str, key: Key, row: Row) -> None:
        """Stage one edit in an update and in its model; what is read from the update is what the model says."""
        by, gone = model.base.key_field, model.base.number not in self.model.readable
        expected, actual = None, None
        try:
            stage_edit(update, what, key, row, by)
        except VersionExpired:
            assert gone, "the version is there"
            return
        except (DatasetError, ValueError, TypeError) as error:
            actual = error
        try:
            stage_edit(model, what, key, row, by)
        except (DatasetError, ValueError) as error:
            expected = error
        checks.same_outcome(expected, actual)
        assert list(update) == list(model.staged)
        if not gone:
            assert (key in update) == (key in model)
            if key in model:
                assert update[key] == model[key]

    def settle_crash(self, after: DatasetModel) -> None:
        """Whoever comes next sees the version before or the one after."""
        gc.collect()
        self.settle_adoption()
        number = self.number_on_disk()
        assert number in (self.model.number, after.number), f"a crash made version {number}"
        if number == after.number:
            self.model = after
        self.note_leftovers()

    def number_on_disk(self) -> int | None:
        return json.loads(self.place.read(HEAD)).get("edit", {}).get("version", 0) if self.place.has_dataset() else None

    def settle_adoption(self) -> None:
        """The first edit of a dataset of another program adopts it, in a commit of its own, and may fail after that."""
        if self.model.number == 0 and self.number_on_disk() == 1 and json.loads(self.place.read(HEAD))["edit"]["op"] == "adopt":
            self.model.adopt()

    def note_leftovers(self) -> None:
        self.leftovers = set(self.place.entries()) - checks.needed_files(self.place, self.model)

    def pick(self, number: int, *, readable: bool = True) -> int:
        known = sorted(self.model.readable if readable else self.model.versions)
        return known[number % len(known)]

    @property
    def leased(self) -> set[int]:
        """Versions that readers hold as far as a vacuum can tell: none does for longer than an hour, since time passes in jumps."""
        return {reader.version.number for reader in self.open_readers if reader.pinned_at == self.model.hour}

    @property
    def by(self) -> str | None:
        """What holds the keys of the newest version."""
        newest = self.model.newest
        return None if newest.keys is None else newest.key_field or "none"

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def newest_equals_the_model(self) -> None:
        if self.model.versions:
            with liveset.StreamingDataset(self.path) as ds:
                assert ds.version == self.model.number
                checks.version_equals(ds, self.model.newest)

    @invariant()
    def an_earlier_version_equals_the_model(self) -> None:
        if self.model.versions:
            self.turn += 1
            checks.one_version(self.path, self.model, self.pick(self.turn))

    @invariant()
    def history_is_gap_free(self) -> None:
        if self.model.versions:
            checks.history(self.path, self.model)

    @invariant()
    def the_old_tool_sees_the_same(self) -> None:
        if self.model.versions:
            checks.old_view(self.place, self.model)

    @invariant()
    def no_file_is_missing_or_too_many(self) -> None:
        if self.model.versions:
            checks.files(self.place, self.model, self.leftovers, self.leased_ever)

    @property
    def leased_ever(self) -> set[int]:
        return {reader.version.number for reader in self.open_readers if reader.pinned_at is not None}

    @invariant()
    def verify_finds_no_damage(self) -> None:
        if self.model.versions:
            assert liveset.verify(self.path).ok
