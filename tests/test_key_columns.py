"""Keys as tables: for those who want all of them at once, whatever files they are in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset import StreamingDataset, adopt, build_keys_index, dataset_update, optimize
from liveset.errors import Corrupt, MissingDependency
from liveset.format.index import ChunkRecord
from liveset.format.keytable import DELETED, KeyColumn, KeyTable, Rows, pack_table
from liveset.parquetkeys import ordered_keys
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset

pa = pytest.importorskip("pyarrow")

COLUMNS = ["key", "index", "chunk_index", "chunk_offset"]


def play(i: int) -> dict[str, Any]:
    return {"id": f"play-{i}", "n": i}


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Ten plays in chunks of four, keyed by their id."""
    write_dataset(tmp_path / "plays", map(play, range(10)), key="id")
    return tmp_path / "plays"


def check(dataset: StreamingDataset) -> None:
    """The table says what lookups one by one say."""
    told = dataset.keys.to_arrow()
    assert told.column_names == COLUMNS
    rows = told.to_pylist()
    assert [row["key"] for row in rows] == list(dataset.keys) == [dataset.key_at(i) for i in range(len(dataset))]
    assert [row["index"] for row in rows] == list(range(len(dataset)))
    assert [(row["chunk_index"], row["chunk_offset"]) for row in rows] == [dataset.keys.place(row["key"]) for row in rows]


def test_a_polars_table(plays: Path) -> None:
    pl = pytest.importorskip("polars")
    table = StreamingDataset(plays).keys.to_polars()
    assert table.schema == {"key": pl.String, "index": pl.Int64, "chunk_index": pl.Int32, "chunk_offset": pl.Int32}
    assert table.rows() == [(f"play-{i}", i, i // 4, i % 4) for i in range(10)]
    part = StreamingDataset(plays).subset([7, 1, 2, 9]).keys.to_polars()
    assert part.rows() == [("play-7", 0, 1, 3), ("play-1", 1, 0, 1), ("play-2", 2, 0, 2), ("play-9", 3, 2, 1)]


@pytest.mark.parametrize("kind", ["text", "int"])
def test_parts_tell_their_own_samples(tmp_path: Path, kind: str) -> None:
    write_dataset(tmp_path, [{"id": f"käy-{i}" if kind == "text" else i * 7 - 20} for i in range(23)], key="id")
    dataset = StreamingDataset(tmp_path)
    check(dataset)
    for part in (dataset.subset(range(3, 15)), dataset.subset([22, 0, 5, 4]), dataset.subset([])):
        check(part)
    check(StreamingDataset(tmp_path, subsample=0.5, shuffle=True))
    twice = StreamingDataset(tmp_path, subsample=2.0).keys.to_arrow()
    assert twice.column("key").to_pylist() == 2 * list(dataset.keys)
    assert dataset.subset([]).keys.to_arrow().schema.field("key").type == (pa.large_string() if kind == "text" else pa.int64())


def test_tables_of_appends_and_updates(plays: Path) -> None:
    for first, count in ((10, 3), (13, 1), (14, 9)):
        optimize(play, range(first, first + count), plays, mode="append", num_workers=1, verbose=False)
    with dataset_update(plays) as update:
        update["play-4"] = {"id": "play-4", "n": 40}
        update.commit()
    check(StreamingDataset(plays))
    check(StreamingDataset(plays, version=2))
    assert len(StreamingDataset(plays).keys.to_arrow()) == 23


def test_keys_that_came_to_an_empty_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path, [], key="id")
    optimize(lambda i: {"id": i}, range(5), tmp_path, mode="append", num_workers=1, key_fn="id", verbose=False)
    check(StreamingDataset(tmp_path))


@pytest.mark.parametrize("kind", ["text", "int"])
def test_keys_of_another_program(tmp_path: Path, kind: str) -> None:
    write_foreign(tmp_path, [{"id": f"k{i}" if kind == "text" else -i} for i in range(10)])
    dataset = StreamingDataset(tmp_path)
    check(dataset)
    check(dataset.subset([7, 1, 2, 9]))
    adopt(tmp_path)
    check(StreamingDataset(tmp_path))
    check(StreamingDataset(tmp_path, version=0))


def test_keys_in_several_shards_of_another_program(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ours", map(play, range(50)))
    build_keys_index(tmp_path / "ours", "id", num_shards=3, verbose=False)
    write_foreign(tmp_path / "theirs", [play(i) for i in range(50)])
    for file in (tmp_path / "ours" / "keys").iterdir():
        (tmp_path / "theirs" / "keys" / file.name).write_bytes(file.read_bytes())
    check(StreamingDataset(tmp_path / "theirs"))


@pytest.mark.parametrize("package", ["polars", "pyarrow"])
def test_what_is_missing_is_named(plays: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    pytest.importorskip("polars")
    monkeypatch.setitem(sys.modules, package, None)
    keys = StreamingDataset(plays).keys
    with pytest.raises(MissingDependency, match=rf"{package}: pip install 'liveset\[tables\]'"):
        keys.to_polars()
    assert keys.place("play-3") == (0, 3)


def test_lookups_in_keys_of_another_program_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_foreign(tmp_path, [play(i) for i in range(10)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for ask in (lambda keys: keys.at(0), lambda keys: keys.kind, lambda keys: "play-1" in keys):
        with pytest.raises(MissingDependency, match=r"pip install 'liveset\[keys\]'"):
            ask(StreamingDataset(tmp_path).keys)


def test_only_who_asks_for_a_table_loads_polars(plays: Path) -> None:
    code = f"import liveset, sys; ds = liveset.StreamingDataset({str(plays)!r}); ds.keys.to_arrow(); ds['play-3']; print('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


# Many tables, in the newest of which a chunk counts


def table(chunks: dict[str, list[str]], removed: dict[str, list[int]] | None = None, gone: Sequence[str] = ()) -> KeyTable:
    rows = Rows.of_chunks([(chunk, KeyColumn.of(keys)) for chunk, keys in chunks.items()])
    column = KeyColumn.join([rows.keys, KeyColumn.of(gone)])
    chunk_numbers = np.concatenate([rows.chunks, np.full(len(gone), DELETED, np.uint32)])
    slots = np.concatenate([rows.slots, np.zeros(len(gone), np.uint32)])
    free = {chunk: np.array(slots_, np.uint32) for chunk, slots_ in (removed or {}).items()}
    return KeyTable(b"".join(pack_table(Rows(column, chunk_numbers, slots, rows.directory, free))), "a table")


@given(data=st.data())
def test_the_newest_table_that_knows_a_chunk_is_right_less_what_newer_ones_removed(data: st.DataObject) -> None:
    now: dict[str, list[str]] = {}
    tables: list[KeyTable] = []
    for step in range(data.draw(st.integers(1, 5))):
        names = data.draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
        fresh = {chunk: [f"{chunk}{step}.{i}" for i in range(data.draw(st.integers(1, 5)))] for chunk in names}
        removed: dict[str, list[int]] = {}
        for chunk in sorted(now.keys() - fresh.keys()):
            if free := sorted(data.draw(st.sets(st.integers(0, len(now[chunk]) - 1), max_size=len(now[chunk]) - 1))):
                removed[chunk] = free
        gone = [now[chunk][slot] for chunk, free in removed.items() for slot in free]
        tables.insert(0, table(fresh, removed, gone))
        for chunk, free in removed.items():
            now[chunk] = [key for slot, key in enumerate(now[chunk]) if slot not in free]
        now |= fresh
    chunks = data.draw(st.permutations(sorted(now)))
    records = [ChunkRecord(f"{chunk}.bin", len(now[chunk]), 1, id=chunk) for chunk in chunks]
    assert ordered_keys(tables, records, str).to_pylist() == [key for chunk in chunks for key in now[chunk]]


def test_slots_that_became_free_count_from_what_was_there_then() -> None:
    tables = [table({}, {"a": [1]}, "c"), table({}, {"a": [0, 3]}, "ad"), table({"a": list("abcde")})]
    assert ordered_keys(tables, [ChunkRecord("a", 2, 1)], str).to_pylist() == ["b", "e"]


def test_a_chunk_that_no_table_knows_is_damage() -> None:
    with pytest.raises(Corrupt, match="no key table knows the chunk 'b'"):
        ordered_keys([table({"a": ["x"]})], [ChunkRecord("a", 1, 1), ChunkRecord("b", 1, 1)], str)
