"""Keys of a dataset on a store where whole files cost a transfer: the same places, with parts of large tables."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset import keystore
from liveset.edit.session import dataset_update
from liveset.errors import Corrupt, NotFound
from liveset.format import keyfront, remotetable
from liveset.format.config import make_config
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyColumn
from liveset.format.schema import Schema
from liveset.format.stamp import KeyFiles, Redirects
from liveset.format.tree import Leaf
from liveset.keystore import TableKeys, open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Place, Store, open_store
from liveset.testing import WrappedStore
from tests.support.remote import place_at
from tests.support.stub_server import StubServer
from tests.support.writing import write_dataset
from tests.test_keyfiles import Edited, edit_and_check

CONFIG = make_config(Schema(Leaf("int")), samples=None, size=1, compression=None)
LARGE = 100_000


class FarStore(WrappedStore):
    """A store whose files cost a transfer, but those that were fetched once; it notes what is fetched."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.fetched: list[str] = []
        self.ranges: list[tuple[str, int]] = []

    @property
    def remote(self) -> bool:
        return True

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        if name not in self.fetched:
            self.fetched.append(name)
        return self.store.map(name, size, content, fresh=fresh)

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        return self.store.map(name, size, content) if name in self.fetched else None

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        self.ranges.append((name, len(ranges)))
        return self.store.read_ranges(name, ranges)


class FarEdited(Edited):
    """The same with keys that are looked up on a far store."""

    def check(self, files: KeyFiles, gone: set[Key]) -> None:
        near, self.store = self.store, FarStore(self.store)
        super().check(files, gone)
        assert self.store.fetched == []
        self.store = near


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are large from the first byte, and never fetched because of their lookups; little of them is kept."""
    monkeypatch.setattr(keystore, "_REQUEST", 1e-9)
    monkeypatch.setattr(keystore, "_BYTES_PER_KEY", 1)
    monkeypatch.setattr(keyfront, "_PAGE", 64)
    monkeypatch.setattr(remotetable, "_KEPT", 200)


@pytest.mark.usefixtures("parts")
@given(st.data(), st.sampled_from([str, int]))
def test_keys_in_parts_are_right_after_any_edits(data: st.DataObject, kind: type[str | int]) -> None:
    edit_and_check(data, kind, FarEdited)


def far_keys(count: int = LARGE) -> tuple[FarStore, TableKeys, list[str]]:
    keys = [f"play-{number:07d}" for number in range(count)]
    edited = Edited({f"c{start}": list(keys[start : start + 1000]) for start in range(0, count, 1000)})
    store = FarStore(edited.store)
    records = [ChunkRecord(filename=f"{chunk}.bin", samples=1000, size=1, id=chunk) for chunk in edited.chunks]
    return store, TableKeys(Snapshot(store, Index.build(chunks=records, config=CONFIG)), edited.files), keys


def test_a_few_lookups_in_a_large_table_read_parts_and_more_fetch_it() -> None:
    store, table, keys = far_keys()
    (name,) = table.files.tables
    few = table.files.sizes[name] // 1_000_000
    assert few >= 4
    for number in range(few):
        assert table.locate(keys[number * 10_000]) == (number * 10, 0)
    assert store.fetched == []
    assert sum(count for _, count in store.ranges) == 1 + few
    store.ranges.clear()
    for number in range(0, LARGE, 9_999):
        assert table.locate(keys[number]) == divmod(number, 1000)
        assert table.locate(f"{number}") is None
    assert (store.fetched, store.ranges) == ([name], [])


class TogetherStore(FarStore):
    """Answers for tables only once several have been asked for at the same time."""

    def __init__(self, store: Store, together: int) -> None:
        super().__init__(store)
        self.barrier = threading.Barrier(together)

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        if name.endswith(".keys"):
            self.barrier.wait(20)
        return super().map(name, size, content, fresh=fresh)


@pytest.mark.parametrize(
    ("look", "found"),
    [
        (lambda keys: keys.locate("k7"), (0, 6)),
        (lambda keys: keys.locate("k3"), None),
        (lambda keys: keys.locate_many(["k29", "k4"]), [(2, 7), (0, 3)]),
        (lambda keys: keys.key_at(2, 0), "k20"),
        (lambda keys: keys.keys_of(2)[-1], "k29"),
        (lambda keys: len(keys.tables), 3),
    ],
)
def test_small_tables_are_fetched_together_and_once(tmp_path: Path, look: Callable[[TableKeys], Any], found: Any) -> None:
    write_dataset(tmp_path, [play(number) for number in range(30)], key="id", chunk_size=10)
    for key in ("k3", "k22", "k25"):
        with dataset_update(tmp_path) as update:
            del update[key]
            update.commit()
    store = TogetherStore(open_store(tmp_path), 3)
    keys = open_keys(open_snapshot(store))
    assert isinstance(keys, TableKeys)
    assert look(keys) == found
    tables = sorted(keys.files.tables)
    assert sorted(store.fetched) == tables
    assert look(keys) == found
    assert sorted(store.fetched) == tables


def test_many_keys_at_once_fetch_a_large_table() -> None:
    store, table, keys = far_keys()
    assert table.locate_many(keys[5:10]) == [(0, slot) for slot in range(5, 10)]
    assert store.fetched == []
    assert table.locate_many(keys[::1000]) == [(chunk, 0) for chunk in range(LARGE // 1000)]
    assert store.fetched == list(table.files.tables)


def test_the_keys_of_a_chunk_and_all_keys_fetch_a_large_table() -> None:
    store, table, keys = far_keys()
    assert table.key_at(7, 3) == keys[7003]
    assert store.fetched == []
    assert table.keys_of(7) == keys[7000:8000]
    assert store.fetched == list(table.files.tables)
    store, table, keys = far_keys()
    assert sorted(str(key) for key, _ in table.tables[0]) == keys
    assert table.locate(keys[0]) == (0, 0)
    assert (store.fetched, store.ranges) == (list(table.files.tables), [])


def test_tables_that_are_small_or_cached_or_of_unknown_size_are_not_read_in_parts() -> None:
    store, table, keys = far_keys(1000)
    assert table.locate(keys[3]) == (0, 3)
    assert (store.fetched, store.ranges) == (list(table.files.tables), [])
    store, table, keys = far_keys()
    table.files = replace(table.files, sizes={})
    assert table.locate(keys[3]) == (0, 3)
    assert (store.fetched, store.ranges) == (list(table.files.tables), [])
    store, table, keys = far_keys()
    (name,) = table.files.tables
    store.map(name, 0)
    assert table.locate(keys[3]) == (0, 3)
    assert (store.fetched, store.ranges) == ([name], [])


def test_a_wrong_size_is_damage_that_names_the_table() -> None:
    for wrong in (-8, 8):
        _, table, keys = far_keys()
        (name,) = table.files.tables
        table.files = replace(table.files, sizes={name: table.files.sizes[name] + wrong})
        with pytest.raises(Corrupt, match=name):
            table.locate(keys[0])


def play(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "n": number}


def far(path: Path, version: int | None = None) -> tuple[FarStore, TableKeys]:
    store = FarStore(open_store(path))
    keys = open_keys(open_snapshot(store, version))
    assert isinstance(keys, TableKeys)
    return store, keys


def places(keys: TableKeys, *numbers: int) -> list[tuple[int, int] | None]:
    return [keys.locate(f"k{number}") for number in numbers]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("looked", [False, True])
def test_a_purge_that_replaces_tables_meanwhile_is_followed(looked: bool, tmp_path: Path) -> None:
    write_dataset(tmp_path, [play(number) for number in range(30)], key="id", chunk_size=10)
    with dataset_update(tmp_path) as update:
        del update["k3"]
        update.commit()
    stores = [far(tmp_path, version) for version in (1, 2)]
    if looked:
        for _, keys in stores:
            assert keys.locate("k7") is not None
    liveset.purge(tmp_path, ["k5"])
    for (store, keys), slot in zip(stores, (7, 6), strict=True):
        assert places(keys, 12, 7, 5) == [(1, 2), (0, slot), None]
        assert keys.key_at(0, slot) == "k7"
        assert keys.keys_of(1) == [f"k{number}" for number in range(10, 20)]
        # The head knows the sizes of what replaced the tables.
        assert [name for name in store.fetched if name.endswith(".keys")] == []
        assert "/renamed-" in store.ranges[-1][0]


class DamagedStore(FarStore):
    """Some bits of one byte of a file are wrong in all that is read."""

    def __init__(self, store: Store, name: str, at: int, *, remote: bool) -> None:
        super().__init__(store)
        self.name, self.at, self.far = name, at, remote

    @property
    def remote(self) -> bool:
        return self.far

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        data = bytearray(super().map(name, size, content, fresh=fresh))
        if name == self.name:
            data[self.at] ^= 0x55
        return memoryview(bytes(data))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        self.ranges.append((name, len(ranges)))
        view = self.map(name, 0)
        return [bytes(view[start : start + length]) for start, length in ranges]

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        return None


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("remote", [True, False])
def test_a_wrong_byte_in_any_table_is_an_error_or_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    monkeypatch.setattr(keystore, "CHECKED_SIZE", 0)  # as if the tables were too large to be checked as a whole
    write_dataset(tmp_path, [play(number) for number in range(12)], key="id", chunk_size=6)
    with dataset_update(tmp_path) as update:
        del update["k1"], update["k4"], update["k9"]
        update.insert("k20", play(20))
        update.commit()
    store = open_store(tmp_path)
    snapshot = open_snapshot(store)
    every = ["k0", "k3", "k4", "k11", "k20"]

    def questions(store: Store) -> list[Callable[[], Any]]:
        def keys() -> TableKeys:
            found = open_keys(Snapshot(store, snapshot.index))
            assert isinstance(found, TableKeys)
            return found

        return [
            *(lambda key=key: keys().locate(key) for key in every),
            lambda: keys().locate_many(every),
            *(lambda number=number: keys().key_at(number, 2) for number in range(2)),
            *(lambda number=number: keys().keys_of(number) for number in range(2)),
        ]

    right = [question() for question in questions(store)]
    assert right[:5] == [(0, 0), (0, 2), None, (1, 4), (2, 0)]
    tables = TableKeys(snapshot, snapshot.index.edit.key_files).files.tables  # type: ignore[union-attr, arg-type]
    assert len(tables) == 2
    for name in tables:
        errors = 0
        for at in range(store.map(name, 0).nbytes):
            damaged = DamagedStore(store, name, at, remote=remote)
            for question, answer in zip(questions(damaged), right, strict=True):
                try:
                    assert question() == answer
                except Corrupt as error:
                    assert error.file == name  # noqa: PT017
                    errors += 1
            assert (damaged.ranges != []) == remote
        assert errors > 500


@pytest.mark.usefixtures("parts")
def test_a_table_that_is_gone_for_good_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [play(number) for number in range(30)], key="id", chunk_size=10)
    store, keys = far(tmp_path)
    (name,) = keys.files.tables
    store.delete([name])
    with pytest.raises(NotFound, match=name):
        keys.locate("k1")


def test_heads_tell_the_sizes_of_their_tables(tmp_path: Path) -> None:
    write_dataset(tmp_path, [play(number) for number in range(30)], key="id", chunk_size=10)
    for change in range(4):
        with dataset_update(tmp_path) as update:
            del update[f"k{change}"]
            update.insert(f"new{change}", {"id": f"new{change}", "n": 0})
            update.commit()
    liveset.purge(tmp_path, ["k7", "k1"])
    liveset.set_attributes(tmp_path, {"a": 1})
    liveset.compact(tmp_path)
    liveset.purge(tmp_path, ["k8"])
    with dataset_update(tmp_path) as update:
        del update["k20"]
        update.commit()
    store = open_store(tmp_path)
    newest = open_snapshot(store).version
    assert newest > 6
    for version in range(1, newest + 1):
        files = open_snapshot(store, version).index.edit.key_files  # type: ignore[union-attr]
        assert files is not None
        assert {name: files.sizes[name] for name in files.tables} == {name: store.map(name, 0).nbytes for name in files.tables}
    head = json.loads((tmp_path / "index.json").read_bytes())["edit"]
    assert set(head["key_files"]["sizes"]) == {*head["key_files"]["base"], *head["key_files"]["deltas"]}
    assert set(head["redirects"]["sizes"]) == set(head["redirects"]["tables"].values())


def stamped(key_files: dict[str, Any], **more: Any) -> bytes:
    edit = {
        "format": 1,
        "version": 1,
        "id": "x",
        "op": "write",
        "committed_at": "2030-01-01T00:00:00+00:00",
        "key_files": key_files,
        **more,
    }
    return json.dumps({"chunks": [], "config": CONFIG, "edit": edit}).encode()


FILES: dict[str, Any] = {"kind": "text", "count": 1, "base": ["a.keys"], "deltas": ["b.keys"]}


def test_sizes_and_unknown_members_survive_and_make_no_difference() -> None:
    plain, sized = (Index.parse(stamped(files)).edit for files in (FILES, {**FILES, "sizes": {"a.keys": 5, "c.keys": 6}, "later": [1]}))
    assert plain is not None
    assert sized is not None
    assert plain.key_files == sized.key_files
    assert plain.to_json()["key_files"] == FILES
    assert sized.to_json()["key_files"] == {**FILES, "sizes": {"a.keys": 5}, "later": [1]}
    redirects = Redirects({}, {"b.keys": "d.keys"}, {"d.keys": 7})
    assert sized.key_files is not None
    moved = redirects.key_files(sized.key_files)
    assert moved.to_json() == {**FILES, "deltas": ["d.keys"], "sizes": {"a.keys": 5, "d.keys": 7}, "later": [1]}
    assert redirects.only(["b.keys"]).to_json() == redirects.to_json()


@pytest.mark.parametrize("sizes", [[], {"a.keys": -1}, {"a.keys": True}, {"a.keys": "5"}, None])
def test_sizes_that_are_none_are_damage(sizes: Any) -> None:
    with pytest.raises(Corrupt, match=r"edit\.key_files\.sizes"):
        Index.parse(stamped({**FILES, "sizes": sizes}))
    with pytest.raises(Corrupt, match=r"edit\.redirects\.sizes"):
        Index.parse(stamped(FILES, redirects={"sizes": sizes}))


@pytest.mark.usefixtures("parts")
def test_a_commit_does_not_fetch_large_tables_that_it_leaves_alone() -> None:
    edited = Edited({"c": [f"k{number}" for number in range(3000)]})
    edited.edit([f"k{number}" for number in range(1000)], {})
    large = edited.files.tables
    store = edited.store = FarStore(edited.store)
    edited.edit(["k2000"], {})
    assert store.fetched == []
    edited.edit(["k2001"], {})  # of the size of the one before, so they are joined
    assert len(edited.files.tables) == 3
    assert set(store.fetched).isdisjoint(large)
    edited.check(edited.files, {"k0", "k2000"})


def test_columns_are_looked_up_in_parts_too() -> None:
    store, table, keys = far_keys()
    assert table.locate_column(KeyColumn.of(["none", keys[5]])) == [None, (0, 5)]
    assert store.fetched == []


def test_tables_of_earlier_versions_are_fetched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keystore, "_REQUEST", 1)
    monkeypatch.setattr(keystore, "_BYTES_PER_KEY", 1)
    store, keys = far(Path(__file__).parent / "golden" / "v1" / "zstd-chunk")
    names = list(keys.files.tables)
    keys.files = replace(keys.files, sizes={name: store.store.map(name, 0).nbytes for name in names})  # as liveset told them later
    assert places(keys, 1, 9, 11) == [(0, 1), (2, 1), None]
    assert sorted(store.fetched) == sorted(names)
    assert len(store.ranges) == len(names)  # their beginnings, once


@pytest.fixture
def plays(stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Large enough to read the table and the chunks in parts, on a server that counts."""
    monkeypatch.setattr(keystore, "_REQUEST", 1)
    monkeypatch.setattr(keystore, "_BYTES_PER_KEY", 1)
    monkeypatch.setattr(keyfront, "_PAGE", 256)
    folder = stub.root / "plays"
    liveset.optimize(large, range(200), place_at(folder), chunk_bytes=4_000_000, key_fn="id", num_workers=1, verbose=False)
    stub.forget()
    return place_at(folder)


def large(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "n": number, "blob": bytes(40_000)}


def gets(stub: StubServer) -> list[str]:
    """Folder and kind of the files that were asked for, each with a range."""
    assert all(request.range for request in stub.requests if not request.name.endswith("index.json"))
    found = [request.name.split("plays/")[1].split("-")[0] for request in stub.requests]
    stub.forget()
    return found


def test_a_sample_by_key_is_five_requests_with_that_for_the_head(stub: StubServer, plays: Place) -> None:
    dataset = liveset.StreamingDataset(plays)
    assert dataset["k7"]["n"] == 7
    assert gets(stub) == ["index.json", "_liveset/keys/base", "_liveset/keys/base", "chunk", "chunk"]
    assert dataset["k150"]["n"] == 150  # a chunk that was not read before
    assert gets(stub) == ["_liveset/keys/base", "chunk", "chunk"]
    assert dataset["k151"]["n"] == 151
    assert gets(stub) == ["_liveset/keys/base", "chunk"]
    assert dataset["k7"]["n"] == 7  # its page is known
    assert gets(stub) == ["chunk"]
    assert "none" not in dataset.keys
    assert gets(stub) == ["_liveset/keys/base"]


def test_a_cached_table_that_is_damaged_is_fetched_again(
    stub: StubServer, plays: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keystore, "_REQUEST", 1 << 40)
    cached = Place(plays.url, storage_options=plays.storage_options, cache_dir=tmp_path / "cache")
    (name,) = liveset.StreamingDataset(cached).keys._store.files.tables  # type: ignore[attr-defined]
    stub.forget()
    assert [liveset.StreamingDataset(cached).keys.place(f"k{number}") for number in range(0, 200, 99)] == [(0, 0), (1, 0), (2, 0)]
    assert stub.count("GET", r"\.keys$") == 1
    (file,) = (file for file in (tmp_path / "cache").rglob("*.cached") if file.read_bytes()[:6] == keyfront.MAGIC[:6])
    data = bytearray(file.read_bytes())
    monkeypatch.setattr(keystore, "CHECKED_SIZE", 0)  # whatever is not checked when a table of our own disk is opened
    for at in (3, len(data) // 2):
        damaged = data.copy()
        damaged[at] ^= 0x55
        file.write_bytes(damaged)
        stub.forget()
        assert [liveset.StreamingDataset(cached).keys.place(f"k{number}") for number in (0, 99)] == [(0, 0), (1, 0)]
        assert stub.count("GET", r"\.keys$") == 1
        assert file.read_bytes() == data
    store = open_store(plays)
    store.delete([name])
    store.write(name, bytes(damaged))
    file.unlink()
    with pytest.raises(Corrupt, match="checksum differs"):
        liveset.StreamingDataset(cached).keys.place("k0")
