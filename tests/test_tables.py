"""Tables of edits: every source gives the same rows, and what does not fit is named."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.edit import sources
from liveset.edit.tables import Batch, Table, open_table
from liveset.errors import DuplicateKeys, MissingDependency, NotFound, SampleError, StorageError
from liveset.format.schema import Schema

SAMPLE = {"id": "a", "label": 1, "score": 0.5, "good": True, "note": "", "maybe": None, "meta": {"author": "x", "year": 1}}
SCHEMA = Schema.of(SAMPLE)
DAY = datetime.datetime.fromisoformat("2030-01-01")
KEYS = ["a", "b", "c"]
COLUMNS: dict[str, list[Any]] = {
    "label": [1, -2, 3],
    "score": [0.5, -1.0, 1e300],
    "good": [True, False, True],
    "note": ["plain", 'with "quotes", commas\nand lines', "ünïcode"],
    "maybe": [None, "text", 7],
    "meta.author": ["x", "", "z"],
}
ROWS = [{"id": key, **{name: values[i] for name, values in COLUMNS.items()}} for i, key in enumerate(KEYS)]


def open_text(table: Any, schema: Schema = SCHEMA, kind: type = str, key: str | None = None, field: str | None = "id") -> Table:
    return open_table(table, schema=schema, kind=kind, key=key, field=field)


def read(table: Any, **options: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """All rows of a table whose batches have the same columns."""
    keys: list[Any] = []
    columns: dict[str, list[Any]] = {}
    for batch in open_text(table, **options).batches():
        keys += batch.keys
        for name, values in batch.columns.items():
            columns.setdefault(name, []).extend(values)
    return keys, columns


def write_csv(path: Path, rows: list[dict[str, Any]], terminator: str = "\r\n") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        # The writer forgets to quote a carriage return when lines end otherwise.
        quoting: Any = csv.QUOTE_MINIMAL if terminator == "\r\n" else csv.QUOTE_ALL
        writer = csv.DictWriter(file, list(rows[0]), lineterminator=terminator, quoting=quoting)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def arrow_of(rows: list[dict[str, Any]]) -> Any:
    pa = pytest.importorskip("pyarrow")
    return pa.Table.from_pylist(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = arrow_of(rows)
    import pyarrow.parquet as pq

    pq.write_table(table, path, row_group_size=2)
    return path


def write_ipc(path: Path, rows: list[dict[str, Any]], stream: bool = False) -> Path:
    table = arrow_of(rows)
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def frame_of(rows: list[dict[str, Any]], library: str) -> Any:
    return pytest.importorskip(library).DataFrame(rows)


SOURCES: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "mapping": lambda _, rows: {row["id"]: {name: value for name, value in row.items() if name != "id"} for row in rows},
    "list": lambda _, rows: rows,
    "generator": lambda _, rows: (row for row in rows),
    "csv": lambda folder, rows: write_csv(folder / "t.csv", rows),
    "csv with line feeds": lambda folder, rows: str(write_csv(folder / "t.CSV", rows, "\n")),
    "jsonl": lambda folder, rows: write_lines(folder / "t.jsonl", rows),
    "ndjson": lambda folder, rows: write_lines(folder / "t.ndjson", rows),
    "json": lambda folder, rows: write_json(folder / "t.json", rows),
    "parquet": lambda folder, rows: write_parquet(folder / "t.parquet", rows),
    "arrow file": lambda folder, rows: write_ipc(folder / "t.arrow", rows),
    "arrow stream": lambda folder, rows: write_ipc(folder / "t.arrow", rows, stream=True),
    "pyarrow table": lambda _, rows: arrow_of(rows),
    "pyarrow batch": lambda _, rows: arrow_of(rows).to_batches()[0],
    "pyarrow reader": lambda _, rows: arrow_of(rows).to_reader(max_chunksize=2),
    "polars": lambda _, rows: frame_of(rows, "polars"),
    "polars lazy": lambda _, rows: frame_of(rows, "polars").lazy(),
    "pandas": lambda _, rows: frame_of(rows, "pandas"),
    "pandas index": lambda _, rows: frame_of(rows, "pandas").set_index("id"),
}
TYPED = {"pyarrow", "polars", "parquet", "arrow"}  # a column has one type


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_rows(source: str, tmp_path: Path) -> None:
    expected = {name: list(values) for name, values in COLUMNS.items()}
    if source.split(maxsplit=1)[0] in TYPED:
        expected["maybe"][2] = "7 more"
    rows = [{**row, "maybe": expected["maybe"][i]} for i, row in enumerate(ROWS)]
    table = open_text(SOURCES[source](tmp_path, rows))
    assert (table.key, table.columns) == ("id", tuple(COLUMNS))
    keys: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for batch in table.batches():
        keys += batch.keys
        for name, values in batch.columns.items():
            columns[name] += values
    assert keys == KEYS
    assert columns == expected
    assert [list(map(type, values)) for values in columns.values()] == [list(map(type, values)) for values in expected.values()]


# --- which column holds the keys -------------------------------------------------------------------------------------------


def test_the_key_column_is_the_one_asked_for_else_that_of_the_dataset_else_key() -> None:
    row = {"mine": "m", "id": "i", "key": "k"}
    schema = Schema.of({"mine": "", "id": "", "key": ""})
    for key, field, expected in (("mine", "id", "mine"), (None, "id", "id"), (None, "uid", "key"), (None, None, "key")):
        table = open_text([row], schema=schema, key=key, field=field)
        assert table.key == expected
        assert [batch.keys for batch in table.batches()] == [[row[expected]]]
        assert set(table.columns) == set(row) - {expected}


def test_without_a_key_column_the_columns_are_listed(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", [{"name": "a", "label": 1}])
    with pytest.raises(
        SampleError, match=re.escape(f"{path}: no column 'id' or 'key' holds the keys; the columns are 'name', 'label'. Name it with key=.")
    ):
        open_text(path)
    with pytest.raises(SampleError, match="no column 'idd' holds the keys; the columns are 'name', 'label'"):
        open_text(path, key="idd")


def test_a_key_may_stand_inside_another_column(tmp_path: Path) -> None:
    rows = [{"meta": {"author": "x", "year": 1}}, {"meta": {"author": "y", "year": 2}}]
    for table in (rows, write_lines(tmp_path / "t.jsonl", rows), write_parquet(tmp_path / "t.parquet", rows)):
        assert read(table, field="meta.author") == (["x", "y"], {"meta": [row["meta"] for row in rows]})
    with pytest.raises(SampleError, match="row 1: there is no key in 'meta.author'"):
        read([{"meta": {"year": 1}}], field="meta.author")


def test_text_keys_become_integers_where_the_keys_are_integers(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", [{"key": key, "label": 1} for key in ("0", "-7", "9223372036854775807")])
    assert read(path, kind=int)[0] == [0, -7, (1 << 63) - 1]
    assert read(path)[0] == ["0", "-7", "9223372036854775807"]
    for key in ("007", "-0", "1.0", "+1", " 1", "x", "9223372036854775808"):
        with pytest.raises(SampleError, match="row 1: ") as caught:
            read(write_csv(tmp_path / "t.csv", [{"key": key, "label": 1}]), kind=int)
        assert caught.value.field == "key"
    with pytest.raises(SampleError, match="row 1: the key 7 is an integer, and the keys of the dataset are text"):
        read([{"key": 7, "label": 1}])


def test_keys_are_normalized() -> None:
    assert read([{"key": b"a", "label": 1}, {"key": np.str_("b"), "label": 1}])[0] == ["a", "b"]
    assert read({np.int64(3): {"label": 1}}, kind=int)[0] == [3]
    for key in (None, 1.0, True, ("a",), b"\xff"):
        with pytest.raises(SampleError, match="row 2: "):
            read([{"key": "a", "label": 1}, {"key": key, "label": 1}])


def test_an_empty_key_of_a_csv_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="row 1: the row has no key"):
        read(write_csv(tmp_path / "t.csv", [{"key": "", "label": 1}]))


@pytest.mark.parametrize("far", [False, True])
def test_a_key_with_two_rows_is_refused(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 2 if far else 100)
    rows = [{"key": key, "label": 1} for key in ("a", "b", "c", "a", "c", "d")]
    with pytest.raises(DuplicateKeys, match="the table: the key.* more than once") as caught:
        read(rows)
    assert set(caught.value.keys) == ({"a"} if far else {"a", "c"})
    assert "('a' in rows 1 and 4)" in str(caught.value)
    with pytest.raises(DuplicateKeys):
        read([{"key": "1", "label": 1}, {"key": 1, "label": 2}], kind=int)
    with pytest.raises(DuplicateKeys):
        read([{"key": "a", "label": 1}, {"key": "a", "score": 2.0}])


def test_a_pandas_index_is_the_key_where_no_column_is() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"label": [1, 2]})
    assert read(frame.set_axis(["a", "b"]))[0] == ["a", "b"]
    assert read(frame.set_axis(["a", "b"]), key="uid")[0] == ["a", "b"]
    assert read(frame.set_axis(pd.Index(["a", "b"], name="uid")))[0] == ["a", "b"]
    assert read(frame.assign(key=["c", "d"]).set_axis(["a", "b"]))[0] == ["c", "d"]
    with pytest.raises(SampleError, match="no column 'uid' holds the keys"):
        read(frame.set_axis(pd.Index(["a", "b"], name="name")), key="uid")
    with pytest.raises(SampleError, match="no column 'id' or 'key' holds the keys; the columns are 'label'"):
        read(frame, kind=int)  # rows that are merely numbered have no keys


# --- columns ---------------------------------------------------------------------------------------------------------------


def test_an_unknown_column_is_refused_before_the_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"id,lable\na,1\n" + b"\n" * 100_000 + b"\xff")
    with pytest.raises(
        SampleError,
        match=re.escape(
            "the samples have no field 'lable'; they have the fields id, label, score, good, note, maybe, meta.author, meta.year."
        ),
    ) as caught:
        open_text(path)
    assert caught.value.field == "lable"

    def rows() -> Iterator[dict[str, Any]]:
        yield {"id": "a", "label": 1}
        yield {"id": "b", "lable": 1}

    with pytest.raises(SampleError, match="the table, row 2: the samples have no field 'lable'"):
        read(rows())


def test_columns_of_one_name_or_one_place_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,label,label\na,1,2\n")
    with pytest.raises(SampleError, match="has two columns 'label'"):
        open_text(path)
    with pytest.raises(SampleError, match="'meta' and 'meta.year' both say what 'meta.year' is"):
        open_text([{"id": "a", "meta": {}, "meta.year": 1}])


def test_rows_with_different_fields_come_in_batches_of_the_same_columns() -> None:
    rows = {"a": {"label": 1}, "b": {"note": "x", "label": 2}, "c": {"label": 3}, "d": {}}
    table = open_text(rows)
    assert table.columns == ("label",)
    assert list(table.batches()) == [Batch(["a", "c"], {"label": [1, 3]}), Batch(["b"], {"note": ["x"], "label": [2]}), Batch(["d"], {})]


def test_a_container_is_left_as_it_is(tmp_path: Path) -> None:
    rows = [{"id": "a", "meta": {"author": 1, "more": [None]}}]
    for table in (rows, write_lines(tmp_path / "t.jsonl", rows)):
        assert read(table) == (["a"], {"meta": [rows[0]["meta"]]})
    path = write_csv(tmp_path / "t.csv", [{"id": "a", "meta": '{"author": "x"}'}])
    assert read(path) == (["a"], {"meta": [{"author": "x"}]})
    for cell in ("x", "3", ""):
        with pytest.raises(SampleError, match="column 'meta'"):
            read(write_csv(tmp_path / "t.csv", [{"id": "a", "meta": cell}]))


def test_the_columns_of_a_whole_sample_cover_the_schema() -> None:
    schema = Schema.of({"id": "", "label": 1, "meta": {"author": "", "year": 1}, "pair": (1, 2)})
    whole = {"id": "a", "label": 1, "meta.author": "x", "meta.year": 1, "pair[0]": 1, "pair[1]": 2}
    assert open_text([whole], schema=schema).covers(schema)
    assert open_text([{"id": "a", "label": 1, "meta": {}, "pair": [1, 2]}], schema=schema).covers(schema)
    for name in set(whole) - {"id"}:
        assert not open_text([{key: value for key, value in whole.items() if key != name}], schema=schema).covers(schema)
    named = {"uid" if name == "id" else name: value for name, value in whole.items()}
    assert open_text([named], schema=schema, key="uid", field="id").covers(schema)  # the key is known, so the field is
    assert not open_text([named], schema=schema, key="uid", field=None).covers(schema)
    assert open_text([whole], schema=schema, key="id", field=None).covers(schema)
    table = open_text([{"id": "a", "label": 1}], schema=schema)
    assert table.covers(schema, ["label", "meta", "pair"])


def test_a_table_knows_the_row_of_each_key(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"id": "a", "label": 1}, {"id": "b", "note": ""}, {"id": "c", "label": 1}])
    table = open_text(path)
    assert [key for batch in table.batches() for key in batch.keys] == ["a", "c", "b"]
    assert [table.where(key) for key in KEYS] == [f"{path}, row {row} (key {key!r})" for row, key in enumerate(KEYS, 1)]


def test_a_table_is_read_once() -> None:
    table = open_text([{"id": "a", "label": 1}])
    assert len(list(table.batches())) == 1
    with pytest.raises(RuntimeError, match="open it again"):
        list(table.batches())


def test_a_column_with_a_dot_is_the_field_of_that_name_first() -> None:
    schema = Schema.of({"id": "", "a.b": 1, "a": {"b": "", "c": 1}, "": 1.0})
    rows = [{"id": "k", "a.b": 1, "['a']['b']": "x", "a['c']": 2, "": 3}]
    assert read(rows, schema=schema) == (["k"], {"a.b": [1], "['a']['b']": ["x"], "a['c']": [2], "": [3.0]})
    assert open_text([{**rows[0], "id": "k"}], schema=schema).covers(schema)
    assert read([{"id": "k", "a.b": 1, "a": {"b": "x"}}], schema=schema)[1] == {"a.b": [1], "a": [{"b": "x"}]}
    with pytest.raises(SampleError, match="column 'a.b': 'x' does not fit: the field holds int"):
        read([{"id": "k", "a.b": "x"}], schema=schema)
    for other in ("['a']", "a.c", "a['c']"):
        with pytest.raises(SampleError, match="both say what .* is"):
            read([{"id": "k", "a": {}, "['a']['c']": 1, other: 1}], schema=schema)
    with pytest.raises(SampleError, match="the columns .*a.c.* both say what 'a.c' is") as caught:
        read([{"id": "k", "a.c": 1, "a['c']": 2}], schema=schema)
    assert caught.value.field == "a.c"


def test_the_key_may_stand_in_a_field_with_a_dot() -> None:
    schema = Schema.of({"a.id": "", "a": {"id": "", "n": 1}})
    rows = [{"a.id": "flat", "a": {"id": "nested", "n": 1}}]
    assert read(rows, schema=schema, field="a.id") == (["flat"], {"a": [rows[0]["a"]]})
    assert read([{"a": rows[0]["a"]}], schema=schema, field="['a']['id']") == (["nested"], {"a": [rows[0]["a"]]})


# --- values ----------------------------------------------------------------------------------------------------------------


def one(value: Any, like: Any, folder: Path | None = None, *, nullable: bool = False, library: str = "") -> Any:
    """What a cell becomes for a field that holds such values; from a CSV where there is a folder."""
    schema = Schema.of({"id": "a", "x": like})
    if nullable:
        schema = schema.nullable(["x"])
    rows: Any = [{"id": "a", "x": value}]
    if folder is not None:
        rows = write_csv(folder / "t.csv", rows)
    elif library:
        rows = arrow_of(rows) if library == "pyarrow" else frame_of(rows, library)
    (value,) = read(rows, schema=schema)[1]["x"]
    return value


@pytest.mark.parametrize(
    ("cell", "like", "expected"),
    [
        ("7", 1, 7),
        ("+7", 1, 7),
        ("-0", 1, 0),
        ("3.0", 1, 3),  # columns with gaps, of other tools
        ("9007199254740993.0", 1, (1 << 53) + 1),
        ("-9223372036854775808.0", 1, -1 << 63),
        ("9.007199254740993e15", 1, (1 << 53) + 1),
        ("7", 1.0, 7.0),
        (".5", 1.0, 0.5),
        ("1e3", 1.0, 1000.0),
        ("-inf", 1.0, float("-inf")),
        ("TRUE", True, True),
        ("false", True, False),
        ("1", True, True),
        ("0", True, False),
        ("", "", ""),
        ("7", "", "7"),
        ("null", "", "null"),
        (" 7 ", "", " 7 "),
        ("", None, None),
        ("null", None, None),
        ("7", None, 7),
        ("seven", None, "seven"),
        ('"7"', None, "7"),
        ("[1, null]", None, [1, None]),
    ],
)
def test_text_of_a_csv_becomes_what_the_field_holds(cell: str, like: Any, expected: Any, tmp_path: Path) -> None:
    found = one(cell, like, tmp_path)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("cell", "like"),
    [
        *((cell, 1) for cell in ("", "x", "1.5", "1_000", " 7", "true", "9223372036854775808", "1e400", "9" * 5000)),
        *((cell, 1) for cell in ("9223372036854775808.0", "1e-400", "1e999999999", "1e-999999999", "9007199254740992.5", "nan")),
        *((cell, 1.0) for cell in ("", "x", "1,5", "1_0", "1e400", "0x10")),
        *((cell, True) for cell in ("", "yes", "2", " true")),
        *((cell, b"") for cell in ("", "x")),
        *((cell, DAY) for cell in ("2030-01-01", "7")),
        *((cell, np.zeros(2, np.int8)) for cell in ("", "x", "7", "[300]", "[1.5]", "[[1]]", "[true]", "[null]", '["1"]', '{"a": 1}')),
    ],
)
def test_text_that_does_not_fit_is_refused_with_row_column_and_value(cell: str, like: Any, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=re.escape("t.csv, row 1 (key 'a'), column 'x': ")) as caught:
        one(cell, like, tmp_path)
    assert caught.value.field == "x"
    assert vars(caught.value)["row"] == 1
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("value", "like", "expected"),
    [
        (np.int8(7), 1, 7),
        (3.0, 1, 3),
        (7, 1.0, 7.0),
        (np.float32(0.5), 1.0, 0.5),
        (np.bool_(True), True, True),
        (np.str_("a"), "", "a"),
        (bytearray(b"a"), b"", b"a"),
        (np.float64(0.5), None, 0.5),
        (np.array([1, 2]), None, [1, 2]),
        ([np.int64(1), {"a": np.float64(2)}], None, [1, {"a": 2.0}]),
        (DAY, DAY + datetime.timedelta(365), DAY),
        ((1, 2), {1}, (1, 2)),  # Python objects stay what they are
    ],
)
def test_scalars_become_plain_values(value: Any, like: Any, expected: Any) -> None:
    found = one(value, like)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "like"),
    [
        *((value, 1) for value in (None, "7", True, 1.5, 2.0**60, float("nan"), 1 << 63, [1])),
        *((value, 1.0) for value in (None, "7", True, (1 << 53) + 1, 10**400)),
        *((value, True) for value in (None, 1, "true")),
        *((value, "") for value in (None, 7, b"a", float("nan"))),
        *((value, b"") for value in (None, "a", 7)),
        *((value, np.zeros(2, np.float32)) for value in (None, 1.0, "[1]", [1e300], [[1.0]], [1j], ["1"], [None], [[1], [1, 2]])),
        *((value, np.zeros(2, bool)) for value in ([1], [0.0])),
        # Integers that the dtype does not hold exactly, and floats that may stand for another integer.
        (2.0**53, 1),
        *((value, np.zeros(2, np.float32)) for value in ([16777217], [16777217, 0.5], [-16777217, 1], np.array([16777217]))),
        *((value, np.zeros(2, np.float16)) for value in ([2049], [70000], np.array([2049], np.uint16))),
        *((value, np.zeros(2)) for value in ([(1 << 53) + 1], [(1 << 53) + 1, 0.5], [-1, (1 << 63) + 1], np.array([(1 << 53) + 1]))),
        *((value, np.zeros(2, np.int64)) for value in ([2.0**53], [2.0**63], [(1 << 53) + 1, 1.0], np.array([2.0**63]), [(1 << 63) + 1])),
        *((value, np.zeros(2, np.uint64)) for value in ([-1], [1 << 64], np.array([-1]))),
        ([[(1 << 53) + 1, 0.5]], np.zeros((1, 2))),
        # An array has a dtype, so what it holds is not rounded.
        *((np.array([value]), np.zeros(2, np.float32)) for value in (0.1, 1e-300, 1e300)),
        (np.array([0.1j]), np.zeros(2, np.complex64)),
    ],
)
def test_values_that_do_not_fit_are_refused(value: Any, like: Any) -> None:
    with pytest.raises(SampleError, match=re.escape("the table, row 1 (key 'a'), column 'x': ")):
        one(value, like)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool"])
@pytest.mark.parametrize("source", ["list", "tuple", "array", "csv"])
def test_lists_become_arrays_of_the_dtype_of_the_field(dtype: str, source: str, tmp_path: Path) -> None:
    like = np.array([0, 1, 1], dtype)
    if source == "csv" and dtype.startswith("complex"):
        pytest.skip("JSON has no complex numbers")
    value = {"list": like.tolist(), "tuple": tuple(like.tolist()), "array": like, "csv": json.dumps(np.real(like).tolist())}[source]
    found = one(value, like, tmp_path if source == "csv" else None)
    assert found.dtype == like.dtype
    np.testing.assert_array_equal(found, like)


def test_numbers_that_an_array_holds_are_taken_and_decimals_are_rounded(tmp_path: Path) -> None:
    single = np.zeros(2, np.float32)
    rounded = np.array([0.1, 1e-3, 16777216], np.float32)
    np.testing.assert_array_equal(one([0.1, 1e-3, 16777216], single), rounded)
    np.testing.assert_array_equal(one("[0.1, 1e-3, 16777216]", single, tmp_path), rounded)
    np.testing.assert_array_equal(one([np.float64(0.1)], single), rounded[:1])
    kept = np.array([0.5, np.nan, np.inf, -0.0])
    np.testing.assert_array_equal(one(kept, single), kept.astype(np.float32))
    np.testing.assert_array_equal(one(np.array([1 << 62, -1]), single), np.array([1 << 62, -1], np.float32))
    np.testing.assert_array_equal(one(np.array([2.0**53, -1]), np.zeros(1, np.int64)), [1 << 53, -1])
    np.testing.assert_array_equal(one([2.0, (1 << 53) - 1], np.zeros(1, np.int64)), [2, (1 << 53) - 1])
    with pytest.raises(SampleError, match=re.escape("t.csv, row 1 (key 'a'), column 'x': [16777217] does not fit: the field holds array")):
        one("[16777217]", single, tmp_path)


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False), min_size=1, max_size=3), st.sampled_from("bBeflqQd"))
def test_no_integer_is_changed_on_its_way_into_an_array(values: list[Any], code: str) -> None:
    with contextlib.suppress(SampleError):
        found = one(values, np.zeros(1, np.dtype(code))).tolist()
        assert [a for a in values if type(a) is int] == [b for a, b in zip(values, found, strict=True) if type(a) is int]


def test_arrays_without_a_fixed_dtype_keep_theirs() -> None:
    like = np.zeros((2, 2), np.float32)
    assert one(like, like).dtype == np.float32
    assert one([[1, 2]], like).dtype == np.int64
    assert one([], np.zeros(1, np.float32)).shape == (0,)


def test_lists_become_tensors_of_the_dtype_of_the_field() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
        like = torch.tensor([0, 1], dtype=dtype)
        found = one(like.tolist(), like)
        assert found.dtype == dtype
        assert torch.equal(found, like)
    assert one([[1.0]], torch.zeros(1, 1)).shape == (1, 1)
    with pytest.raises(SampleError):
        one([1.5], torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("library", ["pyarrow", "polars", "pandas"])
def test_frames_give_plain_values(library: str) -> None:
    time = datetime.datetime.fromisoformat("2030-01-02T03:04:05.678901")
    for value, like in (
        (7, 1),
        (0.5, 1.0),
        (True, True),
        ("a", ""),
        (b"a", b""),
        (time, time),
        (datetime.timedelta(1), datetime.timedelta(1)),
    ):
        found = one(value, like, library=library)
        assert (found, type(found)) == (value, type(value))
    np.testing.assert_array_equal(one([0.5, 1.5], np.zeros(1, np.float32), library=library), np.array([0.5, 1.5], np.float32))
    with pytest.raises(SampleError, match="never None"):
        one(None, 1, library=library)
    with pytest.raises(SampleError, match="which only Python can give"):
        one("2030-01-01", time, library=library)  # would quietly replace a datetime by text
    assert one(None, 1, nullable=True, library=library) is None


def test_pandas_says_nan_where_it_means_none() -> None:
    pd = pytest.importorskip("pandas")
    schema = Schema.of({"id": "", "x": 1, "y": 1.0, "z": "", "t": DAY}).nullable(["x", "z", "t"])
    frame = pd.DataFrame(
        {
            "id": ["a", "b"],
            "x": pd.array([1, None], "Int64"),
            "y": [1.0, float("nan")],
            "z": ["a", None],
            "t": [pd.Timestamp("2030-01-01"), pd.NaT],
        }
    )
    _, columns = read(frame, schema=schema)
    assert (columns["x"], columns["z"], columns["t"]) == ([1, None], ["a", None], [DAY, None])
    assert columns["y"][0] == 1.0
    assert np.isnan(columns["y"][1])
    gaps = pd.DataFrame({"id": ["a", "b"], "label": [1, float("nan")]})
    with pytest.raises(SampleError, match=re.escape("row 2 (key 'b'), column 'label': the field holds int and never None")):
        read(gaps)
    assert read(gaps.iloc[:1])[1]["label"] == [1]


@pytest.mark.parametrize("library", ["numpy", "pyarrow", "pandas"])
def test_nanoseconds_are_not_dropped(library: str) -> None:
    module = pytest.importorskip(library)
    for nanoseconds in (0, 1):
        time = np.datetime64("2030-01-01", "ns") + np.timedelta64(nanoseconds, "ns")
        rows: Any = {"id": ["a"], "x": [time]}
        table = module.DataFrame(rows) if library == "pandas" else module.table(rows) if library == "pyarrow" else [{"id": "a", "x": time}]
        schema = Schema.of({"id": "", "x": DAY}) if library != "numpy" else Schema.of({"id": "", "x": None})
        if nanoseconds:
            with pytest.raises(SampleError, match="column 'x'"):
                read(table, schema=schema)
        else:
            assert read(table, schema=schema)[1]["x"] == [DAY]


# --- files -----------------------------------------------------------------------------------------------------------------


def raw(folder: Path, data: bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        b"id,label\na,1\nb,2\n",
        b"id,label\na,1\nb,2",
        b"id,label\r\na,1\r\nb,2\r\n",
        b"id,label\ra,1\rb,2\r",
        b"\xef\xbb\xbfid,label\na,1\nb,2\n",
        b'\xef\xbb\xbf"id","label"\n"a","1"\n"b","2"\n',
        b"id,label\n\na,1\n\n\nb,2\n\n",
        b"label,id\n1,a\n2,b\n",
    ],
)
def test_spellings_of_a_csv(data: bytes, tmp_path: Path) -> None:
    assert read(raw(tmp_path, data)) == (["a", "b"], {"label": [1, 2]})


def test_quotes_and_lines_in_a_csv(tmp_path: Path) -> None:
    assert read(raw(tmp_path, b'id,note\r\na,"x, ""y""\r\nz"\r\nb,it\'s 5" wide\r\n')) == (
        ["a", "b"],
        {"note": ['x, "y"\r\nz', "it's 5\" wide"]},
    )


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"", "t.csv", "is empty; its first line should name the columns"),
        (b"id,label\na,1\nb\n", "t.csv", "row 2: it has 1 cells, and the first line names 2 columns"),
        (b"id,label\na,1,2\n", "t.csv", "row 1: it has 3 cells"),
        (b'id,note\na,"x\nb,y\n', "t.csv", "line 3: unexpected end of data"),
        (b'id,note\na,"x"y\n', "t.csv", "line 2: "),
        (b"id,note\na," + b"x" * 200_000, "t.csv", "line 2: .*limit.*; use .jsonl or .parquet"),
        (b"id,note\na,\xff\n", "t.csv", "cannot read .*Save it as UTF-8"),
        ("id,label\na,1\n".encode("utf-16"), "t.csv", "cannot read .*Save it as UTF-8"),
        (b"id;label\na;1\n", "t.csv", "names one column, 'id;label'. Separate the cells by commas, not by ';'"),
        (b"\xef\xbb\xbfid\tlabel\na\t1\n", "t.csv", "Separate the cells by commas, not by '.t'"),
        (b"id,label\na,\n", "t.csv", "column 'label': the cell is empty, and the field holds int and never None"),
        (b'{"id": "a", "label": 1}\n{"id"\n', "t.jsonl", "line 2: "),
        (b'{"id": "a", "note": "\xff"}\n', "t.jsonl", "line 1: "),
        (b'{"id": "a", "label": 1}\n[1]\n', "t.jsonl", "row 2: a list instead of fields and values"),
        (b'{"id": "a", "label": 1}\n{"label": 1}\n', "t.jsonl", "row 2: no column 'id' or 'key'"),
        (b'{"id": "a"}', "t.json", "holds dict, not a list of objects"),
        (b"", "t.json", "t.json: "),
        (b"[" * 100_000, "t.json", "t.json: "),
        (b"PAR1", "t.parquet", "cannot read "),
        (b"", "t.arrow", "cannot read "),
        (b"ARROW1xxxxxxxxxxxx", "t.arrow", "cannot read "),
    ],
)
def test_files_that_are_no_tables(data: bytes, name: str, message: str, tmp_path: Path) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    with pytest.raises((SampleError, StorageError), match=message) as caught:
        read(raw(tmp_path, data, name))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.json", "t.parquet", "t.arrow"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    with pytest.raises(NotFound, match=re.escape(f"{tmp_path / name} does not exist")):
        open_text(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises((StorageError, SampleError), match="cannot read"):
        open_text(tmp_path / name)


@pytest.mark.parametrize(("data", "name"), [(b"id,label\n", "t.csv"), (b"", "t.jsonl"), (b"\n\n", "t.jsonl"), (b"[]", "t.json")])
def test_tables_without_rows(data: bytes, name: str, tmp_path: Path) -> None:
    table = open_text(raw(tmp_path, data, name))
    assert table.key == "id"
    assert list(table.batches()) == []


@pytest.mark.parametrize("table", [{}, [], iter(())])
def test_nothing_to_edit(table: Any) -> None:
    assert list(open_text(table).batches()) == []


@pytest.mark.parametrize("table", [None, 7, b"t.csv", "t.txt", "folder"])
def test_what_is_no_table(table: Any) -> None:
    with pytest.raises(TypeError, match="a table of edits is"):
        open_text(table)


@pytest.mark.parametrize("table", [[1], ["a"], {"a": 1}, "id,label", {"label": [1, 2]}])
def test_rows_that_are_no_dicts(table: Any) -> None:
    with pytest.raises(TypeError if isinstance(table, str) else SampleError):
        read(table)


def test_without_pyarrow_its_files_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("t.parquet", "t.arrow"):
        with pytest.raises(MissingDependency, match=r"t\..* needs pyarrow: pip install 'liveset\[arrow\]'"):
            open_text(raw(tmp_path, b"", name))
    assert read(raw(tmp_path, b"id,label\na,1\n"))[0] == ["a"]


def test_importing_needs_no_frames() -> None:
    code = "import sys, liveset.edit.tables; print({'pandas', 'polars', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "set()"


# --- sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [name for name in SOURCES if "lazy" not in name])
def test_batches_are_bounded(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 4)
    rows: list[dict[str, Any]] = [{"id": f"k{number}", "label": number} for number in range(11)]
    batches = list(open_text(SOURCES[source](tmp_path, rows)).batches())
    assert max(len(batch.keys) for batch in batches) <= 4
    assert [key for batch in batches for key in batch.keys] == [row["id"] for row in rows]
    assert [value for batch in batches for value in batch.columns["label"]] == list(range(11))
    bad = [*rows[:9], {"id": "k9", "label": 1 << 62}, {"id": 7 if source == "mapping" else None, "label": 1}]
    with pytest.raises(SampleError, match="row 11: "):
        read(SOURCES[source](tmp_path, bad))


@pytest.mark.parametrize("source", ["csv", "jsonl", "parquet", "pyarrow table"])
def test_batches_of_long_rows_have_fewer_of_them(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SIZE", 10_000)
    rows = [{"id": f"k{number}", "note": f"{number}" * 1000} for number in range(100)]
    batches = list(open_text(SOURCES[source](tmp_path, rows)).batches())
    assert max(len(batch.keys) for batch in batches) <= 12
    assert [value for batch in batches for value in batch.columns["note"]] == [row["note"] for row in rows]


MEASURE = """
import resource, sys
import liveset.edit.tables as tables
from liveset.format.schema import Schema

def rows():
    table = tables.open_table(sys.argv[1], schema=Schema.of({"id": 1, "note": ""}), kind=int, field="id")
    return sum(len(batch.keys) for batch in table.batches())

print(rows(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_memory_does_not_grow_with_a_file(suffix: str, tmp_path: Path) -> None:
    def measure(count: int) -> int:
        path = tmp_path / f"{count}{suffix}"
        note = "n" * 200
        with path.open("w") as file:
            file.write("id,note\n" if suffix == ".csv" else "")
            line = f"%d,{note}\n" if suffix == ".csv" else f'{{"id": %d, "note": "{note}"}}\n'
            file.writelines(line % number for number in range(count))
        done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True)
        rows, peak = map(int, done.stdout.split())
        assert rows == count
        return peak

    # Of each row only its key is kept, to find a second one: the number of its row and its place in a dict.
    assert measure(1_000_000) - measure(20_000) < 120 * 1_000_000


# --- round trips -----------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_ROW = st.fixed_dictionaries(
    {
        "id": _TEXT.filter(bool),
        "label": st.integers(-(1 << 63), (1 << 63) - 1),
        "score": st.floats(allow_nan=False, allow_infinity=False),
        "good": st.booleans(),
        "note": _TEXT,
    }
)
_TABLE = st.lists(_ROW, min_size=1, max_size=6, unique_by=lambda row: row["id"])


@given(rows=_TABLE, source=st.sampled_from(["csv", "csv with line feeds", "jsonl", "json", "parquet", "arrow file", "list", "mapping"]))
def test_what_is_written_is_read(rows: list[dict[str, Any]], source: str, tmp_path: Path) -> None:
    keys, columns = read(SOURCES[source](tmp_path, rows))
    assert [{"id": key, **{name: columns[name][i] for name in columns}} for i, key in enumerate(keys)] == rows
    kinds = {"label": int, "score": float, "good": bool, "note": str}
    assert {name: set(map(type, values)) for name, values in columns.items()} == {name: {kind} for name, kind in kinds.items()}


@given(data=st.binary(max_size=60), suffix=st.sampled_from([".csv", ".jsonl", ".json"]), header=st.booleans())
def test_any_bytes_are_rows_or_a_clear_error(data: bytes, suffix: str, header: bool, tmp_path: Path) -> None:
    path = raw(tmp_path, (b"id,note\n" if header else b"") + data, f"t{suffix}")
    with contextlib.suppress(SampleError, DuplicateKeys):
        keys, columns = read(path)
        assert all(len(values) == len(keys) for values in columns.values())
