"""Purge: what is erased is in no file any more, and everything else is as it was in every version."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import liveset
from liveset.edit.adopt import Adoption
from liveset.edit.changes import Restore, files_of
from liveset.edit.commit import Policy, commit
from liveset.edit.purge import purge_store
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.edit.vacuum import vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import (
    CommitUnknown,
    Conflict,
    Corrupt,
    Erased,
    KeyConflict,
    KeyNotFound,
    NotFound,
    OverwriteConflict,
    SessionExpired,
    StorageError,
    VersionExpired,
)
from liveset.format.index import Index
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import Redirects
from liveset.keystore import TableKeys, open_keys
from liveset.lease import Lease, pin
from liveset.read.chunks import OpenChunks
from liveset.read.dataset import StreamingDataset
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import HEAD, VERSIONS, Entry, Store, Swap, open_store, version_name
from liveset.storage.local import LocalStore
from liveset.testing import FaultyStore, LossyStore, MemoryStore, SimulatedCrash, WrappedStore
from liveset.testing.invariants import check_dataset, unneeded_files
from liveset.testing.schedule import in_turn, run_interleaved
from liveset.tools.search import search
from tests.support.foreign import make_foreign
from tests.support.writing import write_dataset
from tests.test_edits import LAYOUTS

pytest.importorskip("pyarrow", exc_type=ImportError)

AT_ONCE = Policy(first_pause=0)
DAY = timedelta(days=1)
ZERO = timedelta(0)
ERASED = "erased"
Content = list[Any]
"""The samples of a version; ERASED where there was one."""


def sample(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"k{number}", "n": number, "text": text or f"secret{number}s"}


def content(path: Path, version: int | str | None = None) -> Content:
    dataset = StreamingDataset(path, version=version)
    found: Content = []
    for position in range(dataset.samples):
        try:
            found.append(dataset[position])
        except Erased as error:
            found.append(ERASED if (error.version, error.position) == (dataset.version, position) else error)
    return found


def check(path: Path, versions: dict[int, Content], absent: set[str]) -> None:
    """Every version is as expected, by position, in order and by key; what was purged is in no file."""
    for version, expected in versions.items():
        dataset = StreamingDataset(path, version=version, verify_reads=True)
        assert content(path, version) == expected
        if version == 0 and 1 not in versions and open_keys(open_snapshot(open_store(path), 0)) is None:
            continue  # its keys were known through version 1, which is gone
        assert list(dataset.keys) == [value["id"] for value in expected if value != ERASED]
        assert len(dataset.keys) == len(list(dataset.keys))
        for position, value in enumerate(expected):
            if value == ERASED:
                for read in (dataset.key_at, dataset.__getitem__):
                    with pytest.raises(Erased):
                        read(position)
            else:
                assert dataset.key_at(position) == value["id"]
                assert dataset[value["id"]] == value
        for key in absent & {f"k{number}" for number in range(100)} - {value["id"] for value in expected if value != ERASED}:
            assert key not in dataset.keys
        assert liveset.verify(path, version=version).ok
    check_dataset(open_store(path))
    if absent:
        report = liveset.verify(path, absent=absent)
        assert report.ok, report.found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Version 1 has ten samples, version 2 other texts for k1 and k2, version 3 neither k2 nor k9."""
    write_dataset(tmp_path / "ds", map(sample, range(10)), key="id")
    history(tmp_path / "ds")
    return tmp_path / "ds"


def history(path: Path) -> None:
    with dataset_update(path) as update:
        update["k1"], update["k2"] = sample(1, "secret1x"), sample(2, "secret2x")
        update.commit()
    with dataset_update(path) as update:
        del update["k2"], update["k9"]
        update.commit()


ORIGINAL = [sample(number) for number in range(10)]
SECOND = [sample(0), sample(1, "secret1x"), sample(2, "secret2x"), *ORIGINAL[3:]]
THIRD = [value for value in SECOND if value["id"] not in ("k2", "k9")]


def without(versions: dict[int, Content], *keys: str) -> dict[int, Content]:
    return {v: [ERASED if value != ERASED and value["id"] in keys else value for value in values] for v, values in versions.items()}


def words(*numbers: int) -> set[str]:
    return {word for number in numbers for word in (f"k{number}", f"secret{number}s", f"secret{number}x")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_erased_samples_are_nowhere_and_all_others_stay(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, ORIGINAL)
    history(path)
    first = 0 if "foreign" in layout or layout == "arrow" else 1
    liveset.tag(path, "paper", first)
    head = first + 3
    report = liveset.purge(path, ["k1", "k2", "k5"], message="a request")
    versions = {first: ORIGINAL, first + 1: SECOND, first + 2: THIRD, head: THIRD}
    assert (report.version, report.keys, report.missing, report.versions) == (head + 1, 3, (), tuple(versions))
    versions = without(versions, "k1", "k2", "k5") | {head + 1: [v for v in THIRD if v["id"] not in ("k1", "k5")]}
    check(path, versions, words(1, 2, 5))
    assert content(path, "paper") == versions[first]
    assert next(entry.op for entry in liveset.history(path)) == "purge"
    assert unneeded_files(open_store(path)) - redirected(path) == set()
    # Once more, in chunks that have erased samples already, and in one that loses its last samples.
    liveset.purge(path, ["k0", "k3", "k9"])
    versions = without(versions, "k0", "k3", "k9") | {head + 2: [v for v in THIRD if v["id"] not in ("k0", "k1", "k3", "k5")]}
    check(path, versions, words(0, 1, 2, 3, 5, 9))
    with dataset_update(path) as update:
        update.insert("k1", sample(1, "back again"))
        update["k7"] = sample(7, "later")
        update.commit()
    check(path, {**versions, head + 3: [ORIGINAL[4], ORIGINAL[6], sample(7, "later"), ORIGINAL[8], sample(1, "back again")]}, words(0, 5))


def redirected(path: Path) -> set[str]:
    edit = open_snapshot(open_store(path)).index.edit
    assert edit is not None
    return {*(new.file for new in edit.redirects.chunks.values()), *edit.redirects.tables.values()}


class Machine:
    """A dataset and what each of its versions must hold."""

    def __init__(self, path: Path, write: Callable[..., object]) -> None:
        self.path, self.count = path, 8
        write(path, [self.fresh(f"k{number}") for number in range(8)])
        self.version = StreamingDataset(path).version
        self.versions: dict[int, Content] = {self.version: content(path)}
        self.purged: set[str] = set()

    def fresh(self, key: str) -> dict[str, Any]:
        """A sample with a text that no other ever had."""
        self.count += 1
        return {"id": key, "n": self.count, "text": f"secret{self.count}s"}

    def commits(self, expected: Content) -> None:
        version = StreamingDataset(self.path).version
        if self.version == 0:  # adopted by a tag or a purge, in a commit of its own
            for between in range(1, version):
                self.versions[between] = self.versions[0]
        self.version = version
        self.versions[version] = expected

    def edit(self, data: st.DataObject) -> None:
        now = {value["id"]: value for value in self.versions[self.version]}
        with dataset_update(self.path) as update:
            for key in data.draw(st.lists(st.sampled_from([f"k{number}" for number in range(11)]), min_size=1, max_size=4, unique=True)):
                if key in now and data.draw(st.booleans()):
                    del update[key], now[key]
                else:
                    now[key] = self.fresh(key)
                    update.upsert(key, now[key])
            update.commit()
        self.commits(list(now.values()))

    def purge(self, data: st.DataObject) -> None:
        known = sorted({value["id"] for values in self.versions.values() for value in values if value != ERASED})
        if not known:
            return
        keys = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        gone = [value["text"] for values in self.versions.values() for value in values if value != ERASED and value["id"] in keys]
        expected = [value for value in self.versions[self.version] if value["id"] not in keys]
        touched = tuple(v for v, values in self.versions.items() if any(value != ERASED and value["id"] in keys for value in values))
        try:
            report = liveset.purge(self.path, keys)
        except NotFound as error:
            # The keys of version 0 were known through version 1 alone.
            if "version 0 " in str(error) and 0 in self.versions and 1 not in self.versions:
                return
            raise
        assert set(report.versions) >= set(touched)
        self.commits(expected)
        self.versions = without(self.versions, *keys)
        self.purged |= {*gone}
        found = liveset.verify(self.path, absent=[*keys, *gone]).found
        assert not found

    def restore(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.versions)))
        expected = [value for value in self.versions[version] if value != ERASED]
        try:
            liveset.restore(self.path, version)
        except ValueError:
            assert version == 0
            return
        self.commits(expected)

    def tag(self, data: st.DataObject) -> None:
        liveset.tag(self.path, f"t{self.count}", data.draw(st.sampled_from(sorted(self.versions))))
        self.count += 1
        self.commits(self.versions[self.version])

    def vacuum(self, data: st.DataObject) -> None:
        report = liveset.vacuum(self.path, keep=data.draw(st.integers(0, 3)), grace=data.draw(st.sampled_from([ZERO, DAY])))
        self.versions = {version: values for version, values in self.versions.items() if version in report.kept}
        self.commits(self.versions.get(self.version, []) or content(self.path))

    def check(self) -> None:
        check(self.path, self.versions, set(self.purged))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, phases=set(Phase) - {Phase.shrink})
def test_any_edits_with_purges_between(layout: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder) / "ds", LAYOUTS[layout])
        for step in data.draw(st.lists(st.sampled_from(["edit", "purge", "restore", "tag", "vacuum"]), min_size=2, max_size=6)):
            getattr(machine, step)(data)
        machine.purge(data)
        machine.check()


# --- keys -----------------------------------------------------------------------------------------------------------


def test_integer_keys(tmp_path: Path) -> None:
    samples = [{"id": 1000 + number, "text": f"secret{number}s"} for number in range(10)]
    write_dataset(tmp_path, samples, key="id")
    with dataset_update(tmp_path) as update:
        del update[1003]
        update.commit()
    report = liveset.purge(tmp_path, [1003, 1005])
    assert report.versions == (1, 2)
    old = StreamingDataset(tmp_path, version=1)
    assert [old.get_by_key(key) for key in old.keys] == [samples[i] for i in range(10) if i not in (3, 5)]
    assert liveset.verify(tmp_path, absent=[1003, 1005, "secret3s", "secret5s"]).ok
    assert len(list(StreamingDataset(tmp_path).keys)) == 8


def test_a_key_that_only_tombstones_know_leaves_the_tables(path: Path) -> None:
    liveset.vacuum(path, keep=0, grace=ZERO)
    assert liveset.verify(path, absent=["k2"]).found, "the tables still tell that it is gone"
    report = liveset.purge(path, ["k2"])
    assert (report.keys, report.chunks, report.versions) == (1, 0, ())
    assert liveset.verify(path, absent=["k2"]).ok
    check(path, {report.version: THIRD}, {"k2"})


def test_missing_keys(path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(KeyNotFound, match=r"'nobody' occurs in no version .* Nothing was changed. .*on_missing=\"skip\"") as caught:
        liveset.purge(path, ["k1", "nobody"])
    assert vars(caught.value)["keys"] == ("nobody",)
    report = liveset.purge(path, ["nobody"], on_missing="skip")
    assert (report.version, report.keys, report.missing) == (3, 0, ("nobody",))
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file() and file.name != "lock"} == before
    assert liveset.purge(path, ["k1", "nobody", "k1"], on_missing="skip").keys == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keys": "k1"}, TypeError),
        ({"keys": bytearray(b"k1")}, TypeError),
        ({"keys": memoryview(b"k1")}, TypeError),
        ({"keys": [1.5]}, TypeError),
        ({"keys": ["k1"], "on_missing": "ignore"}, ValueError),
        ({"keys": ["k1"], "message": 7}, TypeError),
        ({"keys": [7]}, KeyNotFound),
    ],
)
def test_bad_arguments_change_nothing(path: Path, arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        liveset.purge(path, **arguments)
    assert StreamingDataset(path).version == 3


@pytest.mark.parametrize("key", ["k\ud800", b"k\xff"])
def test_a_key_that_is_no_unicode_is_named(path: Path, key: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported key type") as caught:
        liveset.purge(path, ["k1", key], on_missing="skip")
    assert repr(key) in str(caught.value)
    assert StreamingDataset(path).version == 3


@pytest.mark.parametrize("foreign", [False, True])
def test_a_dry_run_changes_nothing(path: Path, tmp_path: Path, foreign: bool) -> None:
    if foreign:
        path = tmp_path / "foreign"
        LAYOUTS["foreign"](path, ORIGINAL)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "lock" not in file.name}
    report = liveset.purge(path, ["k1"], dry_run=True)
    assert report.dry_run
    assert (report.version, report.keys, report.versions) == ((0, 1, (0,)) if foreign else (3, 1, (1, 2, 3)))
    assert report.bytes_freed > 0
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "lock" not in file.name} == before


def test_a_missing_key_does_not_adopt(tmp_path: Path) -> None:
    LAYOUTS["foreign"](tmp_path / "ds", ORIGINAL)
    with pytest.raises(KeyNotFound):
        liveset.purge(tmp_path / "ds", ["nobody"])
    assert StreamingDataset(tmp_path / "ds").version == 0


def test_a_version_without_keys_shares_the_files_of_one_that_has_them(tmp_path: Path) -> None:
    write_dataset(tmp_path, ORIGINAL)
    liveset.build_keys_index(tmp_path, lambda value: value["id"], verbose=False)
    assert liveset.purge(tmp_path, ["k4"]).versions == (1, 2)
    assert content(tmp_path, 1) == content(tmp_path, 2) == without({1: ORIGINAL}, "k4")[1]
    assert liveset.verify(tmp_path, absent=["k4", "secret4s"]).ok


def test_adopted_without_keys(tmp_path: Path) -> None:
    write_dataset(tmp_path, ORIGINAL)
    make_foreign(tmp_path)
    liveset.adopt(tmp_path)
    liveset.build_keys_index(tmp_path, lambda value: value["id"], verbose=False)
    assert liveset.purge(tmp_path, ["k4"]).versions == (0, 1, 2)
    assert liveset.verify(tmp_path, absent=["k4", "secret4s"]).ok
    assert content(tmp_path, 0) == without({0: ORIGINAL}, "k4")[0]


def test_a_version_whose_samples_nothing_names_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, ORIGINAL)
    write_dataset(tmp_path, ORIGINAL[:4], key="id")
    with pytest.raises(NotFound, match="version 1 of .* has no keys"):
        liveset.purge(tmp_path, ["k1"])
    assert StreamingDataset(tmp_path).version == 2
    liveset.vacuum(tmp_path, keep=0, grace=ZERO)
    liveset.purge(tmp_path, ["k1"])
    assert liveset.verify(tmp_path, absent=words(1)).ok


@pytest.mark.parametrize("foreign", [False, True])
def test_a_dataset_without_keys(tmp_path: Path, foreign: bool) -> None:
    write_dataset(tmp_path, ORIGINAL)
    if foreign:
        make_foreign(tmp_path)
    with pytest.raises(NotFound, match="call build_keys_index"):
        liveset.purge(tmp_path, ["k1"])
    assert StreamingDataset(tmp_path).version == (0 if foreign else 1)


def test_the_last_sample(tmp_path: Path) -> None:
    write_dataset(tmp_path, ORIGINAL[:2], key="id")
    liveset.purge(tmp_path, ["k0", "k1"])
    assert content(tmp_path) == []
    assert content(tmp_path, 1) == [ERASED] * 2
    assert liveset.verify(tmp_path, absent=words(0, 1)).ok
    with dataset_update(tmp_path) as update:
        update.insert("k0", sample(0, "new"))
        update.commit()
    assert content(tmp_path) == [sample(0, "new")]


def test_a_damaged_file_is_told_and_nothing_changes(path: Path) -> None:
    file = next(path / record.filename for record in open_snapshot(open_store(path), 1).index.chunks)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Corrupt, match=file.name) as info:
        liveset.purge(path, ["k0"])
    assert vars(info.value)["versions"] == (1,)
    assert StreamingDataset(path).version == 3
    assert unneeded_files(open_store(path)) == set()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(("key", "versions"), [("k2", (2,)), ("k5", (1, 2, 3))])
def test_the_commands_that_the_error_of_a_damaged_file_names_lead_to_the_end(
    path: Path, key: str, versions: tuple[int, ...], damage: str
) -> None:
    main = pytest.importorskip("liveset.cli").main
    liveset.tag(path, "paper", 2)
    version = open_snapshot(open_store(path), 2)
    file = path / version.index.chunks[version.locate(int(key[1:]))[0]].filename
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flipped" else data[:20])
    if damage == "missing":
        file.unlink()
    versions = (*versions, 4) if 3 in versions else versions
    before = StreamingDataset(path).version
    with pytest.raises((Corrupt, NotFound), match=f"{file.name} .*No sample was erased.*once the tag paper") as info:
        liveset.purge(path, [key])
    assert (vars(info.value)["versions"], StreamingDataset(path).version) == (versions, before)
    liveset.untag(path, "paper")
    copy, *commands = re.findall("`(liveset [^`]*)`", str(info.value).partition("No sample was erased")[2])
    assert "--copy COPY" in copy
    assert [command.split()[1] for command in commands] == (["repair", "vacuum"] if 4 in versions else ["vacuum"])
    for command in commands:
        with suppress(SystemExit):
            main(shlex.split(command)[1:])
    liveset.purge(path, [key], on_missing="skip")
    assert liveset.verify(path, absent=words(int(key[1:]))).ok


def test_version_0_has_its_keys_when_the_first_edit_took_some_away(tmp_path: Path) -> None:
    LAYOUTS["foreign"](tmp_path, ORIGINAL)
    with dataset_update(tmp_path) as update:
        del update["k2"]
        update.insert("new", sample(99) | {"id": "new"})
        update.commit()
    assert list(StreamingDataset(tmp_path, version=0).keys) == [f"k{number}" for number in range(10)]
    version = liveset.restore(tmp_path, 0)
    check(tmp_path, {version: ORIGINAL}, set())
    liveset.purge(tmp_path, ["k2"])
    check(tmp_path, without({0: ORIGINAL, version: ORIGINAL}, "k2"), words(2))


# --- reading --------------------------------------------------------------------------------------------------------


def test_every_way_to_read_tells_of_an_erased_sample(path: Path) -> None:
    untouched = StreamingDataset(path, version=1)
    liveset.purge(path, ["k5"])
    old = StreamingDataset(path, version=1)
    reads: list[Callable[[], Any]] = [
        lambda: old[5],
        lambda: old[-5],
        lambda: old[4:7],
        lambda: list(old),
        lambda: old.as_map()[5],
        lambda: old.as_map().__getitems__([0, 5]),
        lambda: old.subset([5])[0],
        lambda: list(old.subset([0, 5])),
        lambda: old.key_at(5),
        lambda: old.subset([5]).key_at(0),
        lambda: pickle.loads(pickle.dumps(old))[5],
        lambda: pickle.loads(pickle.dumps(old)).key_at(5),
        lambda: untouched.key_at(5),
    ]
    for read in reads:
        with pytest.raises(Erased, match="position 5 of version 1 .* gone for good") as caught:
            read()
        assert caught.value.positions == (5,)
        assert isinstance(caught.value, LookupError)
        assert pickle.loads(pickle.dumps(caught.value)).position == 5
    with pytest.raises(KeyNotFound):
        old["k5"]
    seen = iter(old)
    assert [next(seen) for _ in range(5)] == ORIGINAL[:5]
    rest = old.subset([position for position in range(10) if position not in caught.value.positions])
    assert list(rest) == [value for value in ORIGINAL if value["id"] != "k5"]
    shuffled = StreamingDataset(path, version=1, shuffle=True)
    with pytest.raises(Erased):
        list(shuffled)
    left = [position for position in range(10) if position != 5]
    table = old.keys.to_arrow()
    assert table["key"].to_pylist() == list(old.keys) == [f"k{position}" for position in left]
    assert table["index"].to_pylist() == left
    part = old.subset([6, 5, 0])
    assert part.keys.to_arrow()["index"].to_pylist() == [0, 2]
    assert (list(part.keys), len(part.keys), len(old.keys)) == (["k6", "k0"], 2, 9)
    keys = open_keys(old._snapshot)
    assert keys is not None
    stand_in = keys.key_at(*old._snapshot.locate(5))
    assert stand_in not in old.keys, "what stands for it leads nowhere"
    for read in (lambda: old[stand_in], lambda: old.get_by_keys([stand_in])):
        with pytest.raises(KeyNotFound):
            read()
    assert StreamingDataset(path, version=1, fields=["n"])[4] == {"n": 4}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_that_was_there_before_goes_on(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, ORIGINAL)
    mapped, fresh, keyed, sent = (StreamingDataset(path) for _ in range(4))
    assert mapped[5] == ORIGINAL[5]
    assert "k5" in keyed.keys
    state = pickle.dumps(sent)
    liveset.purge(path, ["k5"])
    assert mapped[5] == ORIGINAL[5], "the file that it has open holds it"
    for reader in (fresh, pickle.loads(state), keyed):
        with pytest.raises(Erased):
            reader[5]
        assert [reader[position] for position in range(10) if position != 5] == ORIGINAL[:5] + ORIGINAL[6:]
        assert reader["k7"] == ORIGINAL[7]
    if layout not in ("foreign", "foreign chunk", "arrow"):  # those have their keys in memory
        assert "k5" not in fresh.keys
    liveset.purge(path, ["k6", "k0"])
    for reader in (fresh, pickle.loads(state)):
        assert reader.refresh() or True
    late = pickle.loads(state)
    for position in (0, 5, 6):
        with pytest.raises(Erased):
            late[position]
    assert late["k7"] == late[7] == ORIGINAL[7]


def test_a_pinned_reader_does_not_keep_the_bytes(path: Path) -> None:
    with StreamingDataset(path, version=1, pin=True) as pinned:
        liveset.purge(path, ["k5"])
        assert liveset.verify(path, absent=["secret5s"]).ok
        assert pinned[4] == ORIGINAL[4]
        with pytest.raises(Erased):
            pinned[5]
        liveset.vacuum(path, keep=0, grace=ZERO)
        assert content(path, 1)[4] == ORIGINAL[4]
        assert [pinned[position] for position in range(10) if position != 5] == ORIGINAL[:5] + ORIGINAL[6:]


def test_a_reader_that_came_between_two_purges(path: Path) -> None:
    liveset.purge(path, ["k5"])
    with StreamingDataset(path, version=1, pin=True) as pinned:
        liveset.purge(path, ["k4"])
        for _ in range(3):  # the first one forgets what replaced the file that this reader would open
            liveset.vacuum(path, keep=0, grace=ZERO)
        assert [pinned[position] for position in range(10) if position not in (4, 5)] == ORIGINAL[:4] + ORIGINAL[6:]
        assert list(pinned.keys) == [f"k{n}" for n in range(10) if n not in (4, 5)]
        with pytest.raises(Erased):
            pinned[4]


def test_a_reader_that_a_vacuum_saw_late_goes_on(path: Path) -> None:
    store = in_memory(path)
    leases: list[Lease] = []
    vacuum_store(Rival(store, lambda: leases.append(pin(store, open_snapshot(store, 1)))), keep=0, grace=ZERO, policy=AT_ONCE)
    snapshot = Snapshot(store, Index.parse(store.read(version_name(1))))
    with pytest.raises(VersionExpired):
        open_snapshot(store, 1)
    assert "secret1s" in {found.what for found in absent(store)}, "its files were spared"
    erase(store)
    assert absent(store) == []
    for number in range(len(snapshot.index.chunks)):
        snapshot.chunk(number)
    leases[0].release()


def test_a_reader_by_an_old_index_file(path: Path) -> None:
    liveset.purge(path, ["k5"])
    old = StreamingDataset(path, index_path=path / "_liveset/versions/00000001.json")
    assert old[0] == ORIGINAL[0]
    with pytest.raises(Erased):
        old[5]


# --- tools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_restore_brings_back_what_is_left(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, ORIGINAL)
    history(path)
    first = 0 if StreamingDataset(path).version == 2 else 1
    liveset.purge(path, [f"k{number}" for number in (2, 4, 5, 6, 7)])
    left = [value for value in ORIGINAL if value["id"] in ("k0", "k1", "k3", "k8", "k9")]
    if first == 0:
        with pytest.raises(ValueError, match="a purge erased 5 samples of version 0"):
            liveset.restore(path, 0)
        first, left = 1, [value for value in SECOND if value["id"] in ("k0", "k1", "k3", "k8", "k9")]
    version = liveset.restore(path, first)
    check(path, {version: left}, words(2, 4, 5, 6, 7))
    assert unneeded_files(open_store(path)) - redirected(path) == set()


def test_restore_of_an_adopted_dataset(tmp_path: Path) -> None:
    LAYOUTS["foreign"](tmp_path, ORIGINAL)
    liveset.purge(tmp_path, ["k4"])
    version = liveset.restore(tmp_path, 0)
    check(tmp_path, {version: [value for value in ORIGINAL if value["id"] != "k4"]}, words(4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_leaves_erased_samples_out(layout: str, tmp_path: Path) -> None:
    path, copy = tmp_path / "ds", tmp_path / "copy"
    LAYOUTS[layout](path, ORIGINAL)
    liveset.adopt(path)
    liveset.purge(path, [f"k{number}" for number in (2, 4, 5, 6, 7)])
    liveset.export(path, copy, version=1)
    exported = StreamingDataset(copy)
    left = [value for value in ORIGINAL if value["id"] in ("k0", "k1", "k3", "k8", "k9")]
    assert list(exported) == left
    assert [exported[key] for key in exported.keys] == left
    assert liveset.verify(copy, absent=words(2, 4, 5, 6, 7)).ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diff(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, ORIGINAL)
    liveset.adopt(path)
    history(path)
    liveset.purge(path, ["k1", "k5"])
    versions = liveset.diff(path, 1, 2)
    assert (versions.added, versions.removed, [change.key for change in versions.changes()]) == (0, 0, ["k2"])
    newest = liveset.diff(path, 1)
    assert (newest.added, newest.changed, list(newest.removed_keys())) == (0, 0, ["k2", "k9"])
    back = liveset.diff(path, None, 1)
    assert (list(back.added_keys()), back.removed, back.changed) == (["k2", "k9"], 0, 0)


def test_history_knows_the_sizes_of_what_replaced_the_files(path: Path) -> None:
    liveset.purge(path, ["k1"])
    told = {version.version: version for version in liveset.history(path)}
    assert [told[version].samples for version in (1, 2, 3, 4)] == [10, 10, 8, 7]
    assert told[1].alone == sum(
        (path / name).stat().st_size
        for name in files_of(open_snapshot(open_store(path), 1).index)
        - files_of(open_snapshot(open_store(path), 2).index)
        - files_of(open_snapshot(open_store(path), 3).index)
    )


def test_repair_after_the_head_was_lost(path: Path) -> None:
    version = liveset.purge(path, ["k1", "k5"]).version
    (path / "index.json").unlink()
    liveset.repair(path)
    versions = without({1: ORIGINAL, 2: SECOND, 3: THIRD}, "k1", "k5") | {version: [v for v in THIRD if v["id"] not in ("k1", "k5")]}
    assert {number: content(path, number) for number in versions} == versions
    assert content(path) == versions[version]
    assert liveset.verify(path, absent=words(1, 5)).ok


def test_a_chunk_that_the_old_tool_has_inflated(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS["foreign chunk"](path, ORIGINAL)
    for file in path.glob("chunk-*.zstd.bin"):
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())
        (path / file.name.replace(".zstd", "")).write_bytes(plain)
        file.unlink()
    assert liveset.purge(path, ["k1"]).versions == (0, 1)
    check(path, without({0: ORIGINAL, 1: ORIGINAL}, "k1"), words(1))


# --- vacuum ---------------------------------------------------------------------------------------------------------


def redirects(store: Store) -> Redirects:
    edit = open_snapshot(store).index.edit
    assert edit is not None
    return edit.redirects


def test_a_vacuum_keeps_what_replaced_files_of_kept_versions_and_forgets_the_rest(path: Path) -> None:
    liveset.tag(path, "paper", 1)
    liveset.purge(path, ["k1", "k5"])
    store = open_store(path)
    assert liveset.vacuum(path, keep=10, grace=ZERO).files == 0
    report = liveset.vacuum(path, keep=0, grace=ZERO)
    assert 1 in report.kept
    assert content(path, "paper") == without({1: ORIGINAL}, "k1", "k5")[1]
    liveset.vacuum(path, keep=0, grace=ZERO)
    assert redirects(store)
    liveset.untag(path, "paper")
    for _ in range(2):
        liveset.vacuum(path, keep=0, grace=ZERO)
    assert redirects(store) == Redirects()
    assert unneeded_files(store) == set()
    assert liveset.vacuum(path, keep=0, grace=ZERO).version is None
    assert content(path) == [value for value in THIRD if value["id"] not in ("k1", "k5")]


def test_a_vacuum_finishes_a_purge_whatever_its_grace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", lambda *_: (_ for _ in ()).throw(StorageError("no")))
        with pytest.raises(StorageError) as caught:
            liveset.purge(path, ["k1"])
    assert "purge again" in caught.value.__notes__[0]
    assert liveset.verify(path, absent=words(1)).found
    liveset.vacuum(path, grace=DAY)
    assert not [found for found in liveset.verify(path, absent=words(1)).found if not found.file.startswith("keys/")]
    assert content(path, 1) == without({1: ORIGINAL}, "k1")[1]


def forget(path: Path) -> None:
    """Have all versions but the newest forgotten, whose files are as young as the grace allows."""
    for file in (path / HEAD, *(path / VERSIONS).glob("*")):
        os.utime(file, (file.stat().st_mtime - 2 * DAY.total_seconds(),) * 2)
    assert liveset.vacuum(path, keep=0, grace=DAY).expired[:2] == (1, 2)


def test_files_that_no_version_names_go_as_well(path: Path) -> None:
    forget(path)
    assert liveset.verify(path, absent=["secret1s"]).found, "they are as young as the grace allows"
    liveset.purge(path, ["k1"])
    assert liveset.verify(path, absent=words(1)).ok


def test_files_of_a_forgotten_version_go_when_no_version_has_the_key_and_that_is_fine(path: Path) -> None:
    liveset.compact(path, keys=True)
    forget(path)
    assert liveset.verify(path, absent=words(2)).found
    before = content(path)
    assert liveset.purge(path, ["k2"], on_missing="skip").bytes_freed > 0
    assert liveset.verify(path, absent=words(2)).ok
    assert content(path) == before
    assert next(entry.op for entry in liveset.history(path)) == "fence"
    version = StreamingDataset(path).version
    assert liveset.purge(path, ["k2"], on_missing="skip").version == version == StreamingDataset(path).version


def test_what_writers_left_who_died_after_a_purge_goes_with_the_next(path: Path) -> None:
    held = next(file.read_bytes() for file in path.glob("chunk-*") if b"secret5s" in file.read_bytes())
    liveset.purge(path, ["k5"])
    (path / "chunk-0-0-00112233445566aa.bin").write_bytes(held)
    assert liveset.verify(path, absent=words(5)).found
    liveset.purge(path, ["k5"], on_missing="skip")
    assert liveset.verify(path, absent=words(5)).ok


# --- quarantine -----------------------------------------------------------------------------------------------------


def quarantined(path: Path) -> list[str]:
    return sorted(f"_liveset/quarantine/{file.name}" for file in (path / "_liveset/quarantine").glob("*"))


@pytest.fixture
def repaired(path: Path, tmp_path: Path) -> Path:
    """A dataset that has kept a chunk with k0 and k1 whose last byte was another, and one of which only the head is left."""
    shutil.copytree(path, tmp_path / "copy")
    first, second = (record.filename for record in open_snapshot(open_store(path), 1).index.chunks[:2])
    data = (path / first).read_bytes()
    (path / first).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (path / second).write_bytes((path / second).read_bytes()[:20])
    assert len(liveset.repair(path, copy=tmp_path / "copy").restored) == 2
    assert len(quarantined(path)) == 2
    return path


def test_what_repairs_have_kept_goes_as_well(repaired: Path) -> None:
    path, kept = repaired, quarantined(repaired)
    assert [found.file for found in liveset.verify(path, absent=["secret0s"]).found if "quarantine" in found.file], "or nothing is shown"
    plan = liveset.purge(path, ["k0"], dry_run=True)
    assert (list(plan.quarantined), quarantined(path)) == (kept, kept)
    report = liveset.purge(path, ["k0"])
    assert (list(report.quarantined), quarantined(path)) == (kept, [])
    assert plan.bytes_freed > plan.bytes_written
    check(path, without({1: ORIGINAL, 2: SECOND, 3: THIRD}, "k0"), words(0))
    assert liveset.purge(path, ["k3"]).quarantined == ()


def test_what_repairs_have_kept_goes_when_no_version_has_the_key_and_that_is_fine(repaired: Path) -> None:
    assert len(liveset.purge(repaired, ["forgotten"], on_missing="skip").quarantined) == 2
    assert quarantined(repaired) == []
    assert content(repaired) == THIRD


@pytest.mark.parametrize("keys", [["forgotten"], ["k1", "forgotten"], []])
def test_a_purge_of_keys_that_nobody_has_leaves_every_file(repaired: Path, keys: list[str]) -> None:
    (repaired / "chunk-0-0-00112233445566aa.bin").write_bytes(b"of a run that has not committed")
    before = {file: file.read_bytes() for file in repaired.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(KeyNotFound, match="Nothing was changed") if keys else nullcontext():
        report = liveset.purge(repaired, keys)
        assert (report.keys, report.quarantined, report.bytes_freed, report.dry_run) == (0, (), 0, False)
    assert {file: file.read_bytes() for file in repaired.rglob("*") if file.is_file() and file.name != "lock"} == before


def test_a_purge_that_cannot_be_done_leaves_what_repairs_have_kept(repaired: Path) -> None:
    kept = quarantined(repaired)
    file = open_snapshot(open_store(repaired)).index.chunks[0].filename
    (repaired / file).write_bytes((repaired / file).read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt, match=r"liveset repair .*--copy.*--quarantine") as info:
        liveset.purge(repaired, ["k0"])
    assert not hasattr(info.value, "__notes__")
    assert quarantined(repaired) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_a_purge_that_gives_up_says_that_what_repairs_have_kept_is_gone(repaired: Path, kept: bool) -> None:
    store = in_memory(repaired)
    if not kept:
        store.delete(quarantined(repaired))
    rival = Rival(store, *[partial(vacuum_store, store, keep=1, grace=ZERO, policy=AT_ONCE)] * 3)
    with pytest.raises(Conflict, match="gave up after") as info:
        purge_store(rival, ["k0"], policy=Policy(attempts=3, first_pause=0))
    said = ["No sample was erased, but the damaged files in _liveset/quarantine/ were deleted."] if kept else []
    assert getattr(info.value, "__notes__", []) == said
    assert "othing was changed" not in str(info.value)
    assert list(store.list("_liveset/quarantine/")) == []
    assert "k0" in keys_of(store, open_snapshot(store).version)


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_after_a_crash_nothing_that_repairs_have_kept_is_beside_a_version_without_the_samples(repaired: Path, when: Any) -> None:
    counting = FaultyStore(in_memory(repaired))
    purge_store(counting, ["k0"], policy=AT_ONCE)
    outcomes = set()
    for call in range(1, len(counting.calls) + 1):
        store = in_memory(repaired)
        with pytest.raises(SimulatedCrash):
            purge_store(FaultyStore(store, call, when), ["k0"], session="job", policy=AT_ONCE)
        check_dataset(store)
        edit = open_snapshot(store).index.edit
        assert edit is not None
        left = len(list(store.list("_liveset/quarantine/")))
        outcomes.add((edit.op == "purge", left))
        report = purge_store(store, ["k0"], session="job", policy=AT_ONCE)
        assert len(report.quarantined) == left
        assert [found for found in search(store, words(0))[0] if "keys/shard" not in found.file] == []
    assert {done for done, left in outcomes if left == 2} == {False}
    assert (True, 0) in outcomes


@pytest.mark.parametrize("session", [None, "job"])
def test_what_a_repair_keeps_after_the_commit_of_a_purge_stays(repaired: Path, session: str | None) -> None:
    store = in_memory(repaired)
    late = "_liveset/quarantine/chunk-0-0-00112233445566aa.bin"
    kept = quarantined(repaired)
    report = purge_store(AfterSwap(store, lambda: store.write(late, b"of a repair")), ["k0"], session=session, policy=AT_ONCE)
    assert list(report.quarantined) == kept
    if session is not None:
        assert purge_store(store, ["k0"], session=session, policy=AT_ONCE).quarantined == ()
    assert [entry.name for entry in store.list("_liveset/quarantine/")] == [late]


# --- crashes and races ----------------------------------------------------------------------------------------------


def in_memory(path: Path) -> MemoryStore:
    store = MemoryStore()
    for entry in LocalStore(path).list(""):
        if entry.name != HEAD:
            store.write(entry.name, (path / entry.name).read_bytes())
    store.foreign_head((path / HEAD).read_bytes())
    return store


def erase(store: Store, **more: Any) -> Any:
    return purge_store(store, ["k1", "k2"], policy=AT_ONCE, **more)


def absent(store: Store) -> list[Any]:
    return search(store, [*words(1, 2), b"secret1", b"secret2"])[0]


def keys_of(store: Store, version: int) -> list[Any]:
    snapshot = open_snapshot(store, version)
    keys = open_keys(snapshot)
    assert keys is not None
    return [key for number in range(len(snapshot.index.chunks)) for key in keys.keys_of(number)]


@pytest.fixture(params=["ours", "foreign"])
def template(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "template"
    write_dataset(path, ORIGINAL, key="id")
    if request.param == "foreign":
        make_foreign(path)
    else:
        history(path)
    return path


@pytest.mark.parametrize("when", ["before", "after", "torn"])
@pytest.mark.parametrize("again", ["session", "skip", "vacuum"])
def test_a_crash_at_any_call_leaves_all_versions_whole_and_the_next_one_finishes(template: Path, when: Any, again: str) -> None:
    foreign = open_snapshot(LocalStore(template)).version == 0
    keys = ["k1"] if foreign else ["k1", "k2"]
    counting = FaultyStore(in_memory(template))
    purge_store(counting, keys, policy=AT_ONCE)
    calls = counting.calls
    outcomes = set()
    for call in range(1, len(calls) + 1):
        store = in_memory(template)
        with pytest.raises(SimulatedCrash):
            purge_store(FaultyStore(store, call, when), keys, session="job", policy=AT_ONCE)
        check_dataset(store)
        edit = open_snapshot(store).index.edit
        done = edit is not None and edit.op == "purge"
        outcomes.add(done)
        if again == "vacuum":
            if not done:
                continue
            vacuum_store(store, grace=DAY, policy=AT_ONCE)
        else:
            session = "job" if again == "session" else None
            purge_store(store, keys, policy=AT_ONCE, session=session, on_missing="skip" if again == "skip" else "error")
        check_dataset(store)
        assert [f for f in search(store, [*keys, *(f"secret{key[1:]}s" for key in keys)])[0] if "keys/shard" not in f.file] == [], (
            f"call {call} {calls[call - 1]}"
        )
        for version in (0, 1) if foreign else (1, 2):
            assert [key for key in keys_of(store, version) if not str(key).startswith("erased-")] == [
                f"k{number}" for number in range(10) if f"k{number}" not in keys
            ]
    assert outcomes == {False, True}


@pytest.mark.parametrize("again", ["session", "skip", "vacuum"])
def test_a_purge_that_never_came_to_delete_is_finished_also_for_versions_that_had_been_forgotten(path: Path, again: str) -> None:
    forget(path)
    store = in_memory(path)

    def die() -> None:
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        purge_store(AfterSwap(store, die), ["k1"], session="job", policy=AT_ONCE)
    assert "secret1s" in {found.what for found in search(store, words(1))[0]}
    if again == "vacuum":
        vacuum_store(store, grace=DAY, policy=AT_ONCE)
    else:
        session = "job" if again == "session" else None
        purge_store(store, ["k1"], policy=AT_ONCE, session=session, on_missing="skip" if again == "skip" else "error")
    assert search(store, words(1))[0] == []
    check_dataset(store)


@pytest.mark.parametrize("again", ["session", "vacuum"])
def test_files_with_the_names_of_another_program_are_deleted_after_an_interruption(tmp_path: Path, again: str) -> None:
    write_dataset(tmp_path, ORIGINAL, key="id")
    make_foreign(tmp_path)
    index = tmp_path / "index.json"
    for chunk in tmp_path.glob("chunk-*"):
        index.write_text(index.read_text().replace(chunk.name, f"train{chunk.name[5:]}"))
        chunk.rename(tmp_path / f"train{chunk.name[5:]}")
    store = in_memory(tmp_path)

    def die() -> None:
        edit = open_snapshot(store).index.edit
        if edit is not None and edit.op == "purge":
            raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        purge_store(AfterSwap(store, die), ["k1"], session="job", policy=AT_ONCE)
    assert any(found.file.startswith("train-") for found in search(store, words(1))[0])
    if again == "vacuum":
        deleted = vacuum_store(store, grace=DAY, policy=AT_ONCE).deleted["chunk"]
        assert any(name.startswith("train-") for name in deleted)
    else:
        purge_store(store, ["k1"], session="job", policy=AT_ONCE)
    assert [found for found in search(store, words(1))[0] if not found.file.startswith("keys/")] == []
    check_dataset(store)


class Coarse(WrappedStore):
    """The clock of the store stands still."""

    def now(self) -> datetime:
        return WHEN

    def list(self, prefix: str) -> Iterator[Entry]:
        return (replace(entry, modified=WHEN) for entry in super().list(prefix))


WHEN = datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)


def test_two_purges_within_one_tick_of_the_clock(path: Path) -> None:
    store = Coarse(in_memory(path))
    assert [purge_store(store, [key], policy=AT_ONCE).version for key in ("k1", "k2", "k5")] == [4, 5, 6]
    assert search(store, words(1, 2, 5))[0] == []
    check_dataset(store)


def test_a_purge_within_the_tick_of_another_that_is_quicker(path: Path) -> None:
    store = Coarse(in_memory(path))
    rival = Rival(store, lambda: purge_store(store, ["k5"], policy=AT_ONCE))
    assert erase(rival).version == 5
    assert search(store, words(1, 2, 5))[0] == []
    check_dataset(store)


def test_a_dataset_that_is_replaced_meanwhile_is_purged_too(path: Path) -> None:
    store = in_memory(path)
    old = open_snapshot(store, 1).index
    rival = Rival(store, lambda: commit(store, Restore(old, force=True), open_snapshot(store).index, policy=AT_ONCE))
    assert erase(rival).version == 5
    assert absent(store) == []
    check_dataset(store)


def test_a_session_is_done_once(path: Path) -> None:
    first = liveset.purge(path, ["k1"], session="request 7")
    again = liveset.purge(path, ["k1"], session="request 7")
    assert again.version == first.version == StreamingDataset(path).version
    for number in range(3):
        liveset.set_attributes(path, number=number)
    liveset.vacuum(path, keep=1, grace=timedelta(0))
    assert liveset.purge(path, ["k1"], session="request 7").version == first.version
    with pytest.raises(VersionExpired):  # and nothing stands in its place
        StreamingDataset(path, version=first.version)
    assert not (path / version_name(first.version)).exists()


@pytest.mark.parametrize("plan", ["al", "axl", "aadr", "lr", "aadddd", "adddd"])
def test_an_answer_that_is_lost(template: Path, plan: str) -> None:
    store = in_memory(template)
    lossy = LossyStore(store, plan)
    try:
        purge_store(lossy, ["k1"], session="job", policy=AT_ONCE)
    except CommitUnknown:
        lossy.deliver()
        purge_store(store, ["k1"], session="job", policy=AT_ONCE)
    assert search(store, ["k1", "secret1s"])[0] == []
    check_dataset(store)
    assert [entry.op for entry in list_versions(store)].count("purge") == 1


class Rival(WrappedStore):
    """Somebody else commits just before our swaps; each act is for one swap."""

    def __init__(self, store: Store, *acts: Callable[[], object]) -> None:
        super().__init__(store)
        self.acts = list(acts)

    def swap_head(self, data: bytes, expected: Any, withdraw: Any = ()) -> Swap:
        if self.acts:
            self.acts.pop(0)()
        return super().swap_head(data, expected, withdraw)


def change(store: Store, key: str, text: str) -> None:
    update = DatasetUpdate(store, policy=AT_ONCE)
    update.upsert(key, sample(int(key[1:]), text))
    update.commit()


def test_a_purge_takes_what_is_committed_meanwhile_into_account(path: Path) -> None:
    store = in_memory(path)

    def vacuum() -> None:
        vacuum_store(store, keep=1, grace=ZERO, policy=AT_ONCE)

    rival = Rival(store, lambda: change(store, "k1", "secret1y"), vacuum, lambda: change(store, "k2", "secret2y"))
    report = erase(rival)
    assert report.version == 7
    assert absent(store) == []
    check_dataset(store)
    assert "k2" not in keys_of(store, 7)
    assert unneeded_files(store) - {*(n.file for n in redirects(store).chunks.values()), *redirects(store).tables.values()} == set()


@pytest.mark.parametrize("key", ["k0", "k1", "k3", "k8"])
@pytest.mark.parametrize("moment", ["open", "swap"])
def test_an_update_that_began_before_brings_nothing_back(path: Path, key: str, moment: str) -> None:
    """The chunk of k0 and k3 holds k1 too, that of k8 does not."""
    store = in_memory(path)
    rival = Rival(store, lambda: erase(store))
    update = DatasetUpdate(rival if moment == "swap" else store, policy=AT_ONCE)
    update.patch(key, text="patched")
    if moment == "open":
        erase(store)
    try:
        update.commit()
    except KeyConflict:
        assert key == "k1"
    except SessionExpired:
        assert moment == "swap"
        assert key == "k8", "made for the file that there was before, whose place nothing has taken"
    else:
        assert key != "k1"
        assert "k1" not in keys_of(store, open_snapshot(store).version)
    check_dataset(store)
    assert absent(store) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_that_was_open_reads_and_lands(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, ORIGINAL)
    with dataset_update(path) as update:
        update["k0"], update["k2"], update["k7"] = sample(0, "new0"), sample(2, "new2"), sample(7, "new7")
        liveset.purge(path, ["k1"])
        with pytest.raises(LookupError) as caught:
            update["k1"]
        assert isinstance(caught.value, KeyNotFound | Erased), "it is not known, unless the keys were looked at before"
        with pytest.raises((KeyNotFound, Erased)):
            update.patch("k1", text="patched")
        assert update["k3"] == ORIGINAL[3]
        update.commit()
    expected = [sample(0, "new0"), sample(2, "new2"), *ORIGINAL[3:7], sample(7, "new7"), *ORIGINAL[8:]]
    check(path, {StreamingDataset(path).version: expected}, words(1))


def test_one_who_puts_a_new_sample_in_the_place_of_one_that_was_erased_is_no_friend_of_an_open_update(path: Path) -> None:
    with dataset_update(path) as update:
        update["k1"] = sample(1, "mine")
        assert "k0" in update
        liveset.purge(path, ["k1"])
        with dataset_update(path) as other:
            other.insert("k1", sample(1, "theirs"))
            other.commit()
        with pytest.raises(KeyConflict, match="'k1'"):
            update.commit()


def test_an_append_that_began_before_is_told_or_lands_whole(path: Path) -> None:
    def fn(number: int) -> dict[str, Any]:
        if number == 21:
            liveset.purge(path, ["k1"])
        return sample(number)

    try:
        liveset.optimize(fn, range(20, 24), path, num_workers=1, verbose=False, mode="append", chunk_size=1)
    except (SessionExpired, Conflict):
        assert len(content(path)) == 7
    else:
        assert [value["id"] for value in content(path)][-4:] == ["k20", "k21", "k22", "k23"]
    assert liveset.verify(path, absent=words(1)).ok
    check_dataset(open_store(path))


def test_a_run_with_a_checkpoint_is_spared(path: Path) -> None:
    def fn(number: int) -> dict[str, Any]:
        if number == 22:
            liveset.purge(path, ["k1"])
        return sample(number)

    liveset.optimize(fn, range(20, 24), path, num_workers=1, verbose=False, mode="append", chunk_size=1, use_checkpoint=True)
    assert [value["id"] for value in content(path)][-4:] == ["k20", "k21", "k22", "k23"]
    assert liveset.verify(path, absent=words(1)).ok


@pytest.mark.parametrize("force", [False, True])
def test_a_restore_that_began_before_brings_nothing_back(path: Path, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from liveset.tools import history as module

    def late(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        liveset.purge(path, ["k1"])
        return commit(*arguments, **more)

    monkeypatch.setattr(module, "commit", late)
    if force:
        assert liveset.restore(path, 1, force=True) == 5
        check(path, {5: [value for value in ORIGINAL if value["id"] != "k1"]}, words(1))
    else:
        with pytest.raises(OverwriteConflict):
            liveset.restore(path, 1)
    assert liveset.verify(path, absent=words(1)).ok


def test_a_restore_that_began_before_a_purge_names_no_key_tables_that_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3 has no sample of k2 or k9, but tables that know them."""
    from liveset.tools import history as module

    with dataset_update(path) as update:
        update["k7"] = sample(7, "later")
        update.commit()

    def late(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        liveset.vacuum(path, keep=2, grace=ZERO)
        liveset.purge(path, ["k2", "k9"])
        return commit(*arguments, **more)

    monkeypatch.setattr(module, "commit", late)
    version = liveset.restore(path, 3, force=True)
    check(path, {version: THIRD}, words(2, 9))
    with dataset_update(path) as update:
        update["k8"] = sample(8, "later")
        update.commit()


def test_a_restore_of_tables_that_a_purge_has_replaced_is_refused(path: Path) -> None:
    store = in_memory(path)
    old, base = open_snapshot(store, 3).index, open_snapshot(store).index
    change(store, "k7", "secret7x")
    purge_store(store, ["k2", "k9"], policy=AT_ONCE)
    new = open_snapshot(store, 3).index
    assert [record.filename for record in old.chunks] == [record.filename for record in new.chunks]
    with pytest.raises(OverwriteConflict, match="were purged meanwhile"):
        commit(store, Restore(old, force=True), base, policy=AT_ONCE)


class AfterSwap(WrappedStore):
    """Somebody else acts when our commit has landed."""

    def __init__(self, store: Store, act: Callable[[], object]) -> None:
        super().__init__(store)
        self.act = act

    def swap_head(self, data: bytes, expected: Any, withdraw: Any = ()) -> Swap:
        swap = super().swap_head(data, expected, withdraw)
        self.act()
        return swap


def test_files_of_one_who_came_after_the_fence_stay_however_old_they_are(tmp_path: Path) -> None:
    """Restoring version 0 gives its files second names, which are as old as the files."""
    LAYOUTS["foreign"](tmp_path, ORIGINAL)
    with dataset_update(tmp_path) as update:
        update["k3"] = sample(3, "later")
        update.insert("new", sample(99) | {"id": "new"})
        update.commit()
    store = LocalStore(tmp_path)
    changes: list[tuple[Index, Restore]] = []

    def stage() -> None:
        old = open_snapshot(store, 0)
        adoption = Adoption(store)
        records = adoption.records(old)
        index = open_snapshot(store, 1).index.replace(chunks=records.values())
        changes.append((open_snapshot(store).index, Restore(index, staged=frozenset(adoption.written))))

    purge_store(AfterSwap(store, stage), ["new"], policy=AT_ONCE)
    ((base, restore),) = changes
    assert len(restore.staged) == len(restore.index.chunks)
    commit(store, restore, base)
    assert content(tmp_path) == ORIGINAL


def test_a_restore_whose_second_names_may_be_gone_is_refused(tmp_path: Path) -> None:
    LAYOUTS["foreign"](tmp_path, ORIGINAL)
    with dataset_update(tmp_path) as update:
        update.insert("new", sample(99) | {"id": "new"})
        update.commit()
    store = LocalStore(tmp_path)
    base = open_snapshot(store).index
    adoption = Adoption(store)
    index = open_snapshot(store, 1).index.replace(chunks=adoption.records(open_snapshot(store, 0)).values())
    liveset.purge(tmp_path, ["new"])
    with pytest.raises(SessionExpired, match="a vacuum ran over this session"):
        commit(store, Restore(index, force=True, staged=frozenset(adoption.written)), base)


def test_two_purges_at_once(path: Path) -> None:
    store = in_memory(path)
    rival = Rival(store, lambda: purge_store(store, ["k5", "k0"], policy=AT_ONCE))
    assert erase(rival).version == 5
    assert absent(store) == []
    assert search(store, words(0, 5))[0] == []
    check_dataset(store)
    assert [str(key).startswith("erased-") for key in keys_of(store, 1)] == [number in (0, 1, 2, 5) for number in range(10)]


def test_a_vacuum_that_listed_before_a_purge_does_not_delete_what_it_made(path: Path) -> None:
    store = in_memory(path)
    vacuum_store(Rival(store, lambda: erase(store)), keep=2, grace=ZERO, policy=AT_ONCE)
    check_dataset(store)
    assert absent(store) == []


def editor(store: Store) -> str:
    try:
        update = DatasetUpdate(store, policy=AT_ONCE)
        update["k0"] = sample(0, "mine")
        update["k8"] = sample(8, "mine")
        update.commit()
    except SessionExpired:
        return "expired"
    return "done"


def eraser(store: Store) -> str:
    purge_store(store, ["k5", "k0"], policy=AT_ONCE)
    return "done"


def cleaner(store: Store) -> str:
    vacuum_store(store, keep=2, grace=ZERO, policy=AT_ONCE)
    return "done"


def reader(store: Store) -> str:
    """Reads version 1, key by key: each sample is as it was, or is known to be erased."""
    snapshot = open_snapshot(store, 1)
    assert snapshot.index.config is not None
    chunks = OpenChunks(snapshot, Decoder(Schema.from_config(snapshot.index.config)))
    keys = open_keys(snapshot)
    assert keys is not None
    for number, record in enumerate(snapshot.index.chunks):
        for slot in range(record.samples):
            expected = ORIGINAL[snapshot.starts[number] + slot]
            try:
                assert chunks[number].read(slot) == expected
                assert keys.key_at(number, slot) == expected["id"] or expected["id"] in ("k1", "k2")
            except Erased:
                assert expected["id"] in ("k1", "k2")
    return "done"


@pytest.mark.parametrize("other", [editor, eraser, cleaner, reader])
@pytest.mark.parametrize("order", [("purge", "other"), ("other", "purge")])
def test_another_between_any_two_calls_of_a_purge(
    path: Path, other: Callable[[Store], str], order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(tables := vars(TableKeys)["tables"], "lock"):  # before Python 3.12 all objects share it
        monkeypatch.setattr(tables, "lock", nullcontext())
    for calls in range(60):
        store = in_memory(path)
        turns = in_turn(iter([order[0]] * calls + [order[1]] * 300 + [order[0]] * 300))
        results = run_interleaved(store, {"purge": lambda store: erase(store).keys, "other": other}, turns)
        assert results["purge"] == 2, results
        assert results["other"] in ("done", "expired"), results
        check_dataset(store)
        found = absent(store)
        assert found == [], (calls, results)
        if other is editor:
            snapshot = open_snapshot(store)
            assert "k0" in keys_of(store, snapshot.version)
            assert "k1" not in keys_of(store, snapshot.version)


def test_the_cache_of_this_machine_is_emptied(tmp_path: Path) -> None:
    place = liveset.Place(f"local:{tmp_path / 'plays'}", cache_dir=tmp_path / "cache")
    secret = b"nobody may know this"
    liveset.optimize(lambda i: {"id": f"play-{i}", "text": secret if i == 3 else b"-"}, range(20), place, key_fn="id", verbose=False)
    assert liveset.StreamingDataset(place)["play-3"]["text"] == secret
    held = [file.read_bytes() for file in (tmp_path / "cache").rglob("*.cached")]
    assert any(secret in data for data in held)
    assert any(b"play-3" in data for data in held)
    liveset.purge(place, ["play-3"])
    held = [file.read_bytes() for file in (tmp_path / "cache").rglob("*.cached")]
    assert not any(secret in data or b"play-3" in data for data in held)
    assert liveset.verify(place, absent=["play-3"]).ok
    assert "play-3" not in liveset.StreamingDataset(place).keys
