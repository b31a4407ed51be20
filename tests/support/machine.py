"""A machine that does to a dataset whatever its users can do, in any order, beside a model that says what should come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, multiple, precondition, rule

import liveset
from liveset.edit.adopt import adopt
from liveset.edit.session import dataset_update
from liveset.errors import DatasetError, NotFound, SampleError, SessionExpired, VersionExpired
from liveset.format.codec import Compression
from liveset.storage import HEAD
from liveset.testing import SimulatedCrash
from liveset.testing.model import DatasetModel, UpdateModel
from tests.support import checks
from tests.support.comparing import (
    EDITS,
    KEY_FNS,
    ComparingMachine,
    Crash,
    Reader,
    Row,
    Session,
    bys,
    crashes,
    edits,
    hours,
    keys_of,
    layouts,
    remembered,
    row_lists,
    rows,
    slots,
    stage_edit,
    wanted,
)
from tests.support.foreign import make_foreign
from tests.support.writing import write_dataset


class DatasetMachine(ComparingMachine):
    """The rules: what users do."""

    readers = Bundle("readers")

    # --- the dataset as a whole --------------------------------------------------------------------------------------

    @initialize(rows=row_lists, by=st.none() | bys, layout=layouts, shards=st.sampled_from([1, 3]), foreign=st.booleans())
    def begin(self, rows: list[Row], by: str | None, layout: dict[str, Any], shards: int, foreign: bool) -> None:
        if not foreign:
            self.overwrite(rows, by, layout, shards, None)
            return
        rows = list({row["alt"]: row for row in {row["id"]: row for row in rows}.values()}.values()) or [
            {"id": "k0", "alt": 100, "v": 0, "t": ""}
        ]
        compression = Compression("zstd", layout["level"]) if layout["level"] else None

        def make(path: Any) -> None:
            key = None if by is None else KEY_FNS[by]
            write_dataset(path, rows, chunk_size=layout["chunk_size"], compression=compression, key=key)
            make_foreign(path)

        self.place.put_foreign(make)
        self.model.foreign(rows, None if by is None else keys_of(rows, by), None if by is None else remembered(by))

    @rule(rows=row_lists, by=st.none() | bys, layout=layouts, shards=st.sampled_from([1, 3]), crash=crashes)
    def overwrite(self, rows: list[Row], by: str | None, layout: dict[str, Any], shards: int, crash: Crash) -> None:
        def act() -> None:
            packed = {"compression": "zstd", "compression_level": layout["level"]} if layout["level"] else {}
            self.write(rows, by, mode="overwrite", num_shards=shards, chunk_size=layout["chunk_size"], **packed)

        keys = None if by is None else keys_of(rows, by)
        self.perform(act, lambda model: model.overwrite(rows, keys, None if by is None else remembered(by)), crash)

    def write(
        self, rows: Sequence[Row], by: str | None, *, meanwhile: Callable[[], object] | None = None, late: bool = False, **more: Any
    ) -> None:
        """Call optimize; ``meanwhile`` happens while it is at work, before the first or before the last sample."""
        stops = [*rows, None]  # so that there is an input without samples, too

        def fn(number: int) -> Row | None:
            if meanwhile is not None and number == (len(stops) - 1 if late else 0):
                meanwhile()
            return stops[number]

        key_fn = None if by is None else KEY_FNS[by]
        liveset.optimize(fn, range(len(stops)), self.path, num_workers=1, verbose=False, key_fn=key_fn, **more)

    @precondition(lambda self: self.model.versions)
    @rule(rows=row_lists, named=st.booleans(), size=st.integers(1, 4), crash=crashes)
    def append(self, rows: list[Row], named: bool, size: int, crash: Crash) -> None:
        by = self.by
        given = by if by == "none" or named else None
        keys = None if by is None else keys_of(rows, by)
        field = None if by is None else remembered(by)
        self.perform(lambda: self.write(rows, given, mode="append", chunk_size=size), lambda model: model.append(rows, keys, field), crash)

    @precondition(lambda self: self.model.versions and self.model.newest.samples and self.by in (None, "none"))
    @rule(rows=row_lists)
    def append_without_knowing_the_keys(self, rows: list[Row]) -> None:
        """Keys where the samples have none, and none where no field holds those that they have."""

        def refuse(model: DatasetModel) -> None:
            raise ValueError

        self.perform(lambda: self.write(rows, "id" if self.by is None else None, mode="append"), refuse)

    @precondition(lambda self: self.model.versions)
    @rule(
        rows=st.lists(rows, min_size=1, max_size=4, unique_by=lambda row: row["id"]),
        theirs=row_lists,
        what=st.sampled_from(["append", "edit", "overwrite", "keys", "attributes", "restore", "tag", "vacuum"]),
        by=bys,
        number=wanted,
        late=st.booleans(),
    )
    def append_meanwhile(self, rows: list[Row], theirs: list[Row], what: str, by: str, number: int, late: bool) -> None:
        """Somebody else commits while an append is at work."""
        base, mine = self.model.newest, self.by
        keys = None if mine is None else keys_of(rows, mine)

        def rival() -> None:
            if what == "append":
                self.append(theirs, False, 2, None)
            elif what == "edit":
                self.edit_at_once([(EDITS[(number + i) % len(EDITS)], row) for i, row in enumerate(theirs)], None)
            elif what == "overwrite":
                self.overwrite(theirs, by, {"chunk_size": 2, "level": None}, 1, None)
            elif what == "keys":
                self.build_keys(by, True, 1, None)
            elif what == "attributes":
                self.set_attributes({"a": number}, None)
            elif what == "restore":
                self.restore(number, None)
            elif what == "tag":
                self.tag("x", number, True, None)
            elif base.number:
                self.vacuum(0, 0, False, None)

        try:
            self.write(rows, mine, mode="append", meanwhile=rival, late=late)
        except (DatasetError, ValueError, TypeError) as error:
            actual: Exception | None = error
        else:
            actual = None
        # Files from before a vacuum count as gone, whether they were written already or not.
        if what == "vacuum" and late and isinstance(actual, SessionExpired):
            return
        self.perform(
            lambda: checks.again(actual), lambda model: model.append(rows, keys, None if mine is None else remembered(mine), base=base)
        )

    @precondition(lambda self: self.model.versions)
    @rule(by=bys, overwrite=st.booleans(), shards=st.sampled_from([1, 3]), crash=crashes)
    def build_keys(self, by: str, overwrite: bool, shards: int, crash: Crash) -> None:
        keys = keys_of(self.model.newest.samples, by)
        self.perform(
            lambda: liveset.build_keys_index(self.path, KEY_FNS[by], overwrite=overwrite, num_shards=shards, verbose=False),
            lambda model: model.set_keys(keys, remembered(by), overwrite=overwrite),
            crash,
        )

    @precondition(lambda self: self.model.versions)
    @rule(values=st.dictionaries(st.sampled_from("ab"), st.none() | st.integers(0, 2)), crash=crashes)
    def set_attributes(self, values: dict[str, Any], crash: Crash) -> None:
        self.perform(lambda: liveset.set_attributes(self.path, values), lambda model: model.set_attributes(values), crash)

    @precondition(lambda self: self.model.versions)
    @rule(crash=crashes)
    def adopt(self, crash: Crash) -> None:
        self.perform(lambda: adopt(self.path), lambda model: model.adopt(), crash)

    # --- updates -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.versions)
    @rule(slot=slots)
    def open_session(self, slot: str) -> None:
        self.leave_session(slot)
        base = self.model.newest
        try:
            update = dataset_update(self.path)
        except NotFound:
            assert base.keys is None or not base.samples, "the dataset has keys"
            return
        assert base.keys is not None
        self.sessions[slot] = Session(update, UpdateModel(base))

    @precondition(lambda self: self.sessions)
    @rule(slot=slots, what=st.sampled_from(EDITS), row=rows, number=wanted, known=st.booleans())
    def stage(self, slot: str, what: str, row: Row, number: int, known: bool) -> None:
        session = self.sessions.get(slot)
        if session is None:
            return
        keys, by = session.base.keys or (), session.base.key_field
        key = keys[number % len(keys)] if known and keys else keys_of([row], by or "none")[0]
        if by is not None and number % 7 == 0:
            with checks.raises(SampleError):
                session.update[key] = {**row, by: "another"} if by == "id" else {**row, by: -1}
        self.stage_both(session.update, session.model, what, key, row)
        if session.base.number in self.model.readable:
            preview = session.update.preview()
            assert (preview.inserted, preview.deleted) == (session.model.inserted, session.model.deleted)
            assert set(preview.missing) == session.model.missing
            assert preview.keys == len(session.model.staged) - len(preview.missing)

    @precondition(lambda self: self.sessions)
    @rule(slot=slots, crash=crashes)
    def commit_session(self, slot: str, crash: Crash) -> None:
        session = self.sessions.pop(slot, None)
        if session is None:
            return

        def act() -> Any:
            with session.update as update:
                return update.commit(message="edited")

        gone = session.base.number not in self.model.readable
        result = self.perform(act, lambda model: model.edit(session.model), crash, also=(SessionExpired, VersionExpired) if gone else ())
        if result is not None:
            model = session.model
            assert result.version == (self.model.number if model.staged else session.base.number)
            assert (result.keys, result.inserted, result.deleted) == (len(model.staged), model.inserted, model.deleted)

    @precondition(lambda self: self.sessions)
    @rule(slot=slots)
    def leave_session(self, slot: str) -> None:
        if (session := self.sessions.pop(slot, None)) is not None:
            with session.update:
                pass

    @precondition(lambda self: self.model.versions and self.model.newest.samples and self.model.newest.keys)
    @rule(edits=st.lists(edits, min_size=1, max_size=5), crash=crashes)
    def edit_at_once(self, edits: Sequence[tuple[str, Row]], crash: Crash) -> None:
        """A job that edits in one go, and is started again where it crashed: what it did is not done twice."""
        newest = self.model.newest
        if not newest.keys or self.by is None:
            return
        todo = [(what, key, row) for (what, row), key in zip(edits, keys_of([row for _, row in edits], self.by), strict=True)]
        staged, job = UpdateModel(newest), f"job {len(self.model.versions)}"
        todo = [(what, key, row) for what, key, row in todo if what != "replace" or key in newest.by_key]
        for what, key, row in todo:
            with suppress(DatasetError):
                stage_edit(staged, what, key, row, newest.key_field)

        def act() -> None:
            with dataset_update(self.path, session=job) as update:
                model = UpdateModel(newest)
                for what, key, row in todo:
                    self.stage_both(update, model, what, key, row)
                assert all(update[key] == newest.by_key[key] for key in newest.keys or () if key not in staged.staged)
                update.commit()

        def again() -> None:
            with dataset_update(self.path, session=job) as update:
                for key, edit in staged.staged.items():
                    if edit.what == "upsert":
                        update.upsert(key, edit.value)
                    elif key in update and edit.what == "delete":
                        del update[key]
                    elif key in update:
                        (update.replace if edit.what == "replace" else update.patch)(key, edit.value)
                update.commit()

        self.perform(act, lambda model: model.edit(staged, named=True), crash)
        if crash is not None:
            landed = self.model.newest != newest and self.model.newest.op != "adopt"
            self.perform(again, lambda model: None if landed else model.edit(staged, named=True))

    def replace_at_once(self, rows: Sequence[Row], crash: Crash) -> None:
        """Other samples for keys that are there, as far as the rows name some."""
        self.edit_at_once([("replace", row) for row in rows], crash)

    # --- versions ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.versions)
    @rule(number=wanted, crash=crashes)
    def restore(self, number: int, crash: Crash) -> None:
        version = self.pick(number, readable=number % 4 > 0)
        self.perform(lambda: liveset.restore(self.path, version), lambda model: model.restore(version), crash)

    @precondition(lambda self: self.model.versions)
    @rule(name=st.sampled_from(["x", "y"]), number=wanted, move=st.booleans(), crash=crashes)
    def tag(self, name: str, number: int, move: bool, crash: Crash) -> None:
        version = self.pick(number, readable=number % 4 > 0)
        self.perform(lambda: liveset.tag(self.path, name, version, move=move), lambda model: model.tag(name, version, move=move), crash)

    @precondition(lambda self: self.model.tags)
    @rule(name=st.sampled_from(["x", "y"]), crash=crashes)
    def untag(self, name: str, crash: Crash) -> None:
        self.perform(lambda: liveset.untag(self.path, name), lambda model: model.untag(name), crash)

    @rule()
    def let_time_pass(self) -> None:
        """Two hours: longer than a lease lasts, and than the grace."""
        self.place.pass_time(2)
        self.model.hour += 2

    @precondition(lambda self: self.model.versions and self.model.newest.number)
    @rule(keep=st.sampled_from([0, 0, 1, 2, 5, *map(hours, (0, 1, 3))]), grace=st.sampled_from([0, 0, 1]), dry=st.booleans(), crash=crashes)
    def vacuum(self, keep: int | timedelta, grace: int, dry: bool, crash: Crash) -> None:
        options: dict[str, Any] = {"keep": keep, "grace": timedelta(hours=grace)}
        if dry:
            before = self.place.entries().keys()
            planned = liveset.vacuum(self.path, **options, dry_run=True)
            assert self.place.entries().keys() == before
        cutoff = self.place.store.now() - timedelta(hours=grace, seconds=1)
        leased = self.leased | checks.ghosts(self.place, self.leased)
        allowed = self.model.retained(keep, leased, grace=options["grace"], at_most=True, late=self.place.late)
        needed = self.model.retained(keep, self.leased, grace=options["grace"])
        self.place.gate.arm(crash)
        report = None
        try:
            report = liveset.vacuum(self.path, **options)
        except SimulatedCrash:
            pass
        finally:
            self.place.gate.arm(None)
        stamp = json.loads(self.place.read(HEAD))["edit"]
        if stamp["version"] == self.model.number:
            assert report is None or report.version is None
            if report is not None:
                last = {number - 1 for number in self.model.fences[-1:]}
                assert self.model.readable - allowed <= last, "there was something to forget"
        else:
            fence = stamp["fence"]
            kept = {number for number in self.model.readable if number >= fence["expired_before"] or number in fence["kept"]}
            assert needed <= kept <= allowed, f"{sorted(kept)} were kept, at least {sorted(needed)} and at most {sorted(allowed)} should be"
            self.model.expire(kept)
        self.note_leftovers()
        if report is not None:
            assert set(report.kept) == self.model.readable
            assert set(report.unknown) <= checks.plain_chunks(self.place)
            checks.nothing_old_is_left(self.place, self.model, cutoff)
            if dry and not self.place.late:  # the clock of this host is not that of a store in memory
                assert planned.deleted == report.deleted
        checks.every_version(self.path, self.model)

    # --- readers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.versions)
    @rule(target=readers, number=wanted, pin=st.booleans(), tag=st.booleans(), crash=crashes)
    def open_reader(self, number: int, pin: bool, tag: bool, crash: Crash) -> Any:
        name: int | str | None = None
        if tag and self.model.tags:
            name = sorted(self.model.tags)[number % len(self.model.tags)]
        elif number % 4:
            name = self.pick(number, readable=number % 4 > 1)
        ds = self.perform(
            lambda: liveset.StreamingDataset(self.path, version=name, pin=pin), lambda model: model.open(name), crash if pin else None
        )
        if ds is None:
            return multiple()
        reader = Reader(ds, self.model.open(name), self.model.hour if pin else None)
        self.open_readers.append(reader)
        return reader

    @rule(reader=readers)
    def read(self, reader: Reader) -> None:
        try:
            checks.version_equals(reader.ds, reader.version)
        except VersionExpired:
            assert reader.version.number not in self.model.readable

    @rule(reader=readers, crash=crashes)
    def refresh(self, reader: Reader, crash: Crash) -> None:
        moved = reader.version != self.model.newest
        held = reader.ds._lease  # else it ends within the call, in a finalizer, where a crash goes unnoticed
        result = self.perform(reader.ds.refresh, lambda model: None, crash if reader.pinned_at is not None else None)
        del held
        if result is not None:
            assert result == moved
            if moved and reader.pinned_at is not None:
                reader.pinned_at = self.model.hour
            reader.version = self.model.newest

    @rule(reader=consumes(readers))
    def close_reader(self, reader: Reader) -> None:
        self.open_readers.remove(reader)
        reader.ds.close()
