from __future__ import annotations

import io
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, MissingDependency
from liveset.format.arrow import ArrowChunk, is_arrow

pa = pytest.importorskip("pyarrow", exc_type=ImportError)


def pack(table: Any, *, batch: int = 256, codec: str | None = None, stream: bool = False, schema: Any = None) -> bytes:
    """Return a chunk file as the old tool lays it out."""
    table = pa.Table.from_pylist(table, schema=schema) if isinstance(table, list) else table
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch)
    return wrap(sink.getvalue(), len(table))


def wrap(blob: bytes, count: int) -> bytes:
    start = 4 + 4 * (count + 1)
    return struct.pack(f"<{count + 2}I", count, *[start] * (count + 1)) + blob + struct.pack("<I", len(blob)) + b"LDARW01\0"


ROWS = [
    {
        "id": f"r{i}",
        "n": i if i % 3 else None,
        "f": i / 2,
        "b": i % 2 == 0,
        "raw": bytes([i % 256, 0]),
        "l": [[i], []],
        "s": {"x": i, "y": [None, "é"]},
        "none": None,
    }
    for i in range(600)
]
FORMS = [{"stream": s, "codec": c, "batch": b} for s in (False, True) for c in (None, "zstd", "lz4") for b in (256, 100)]


def test_vector() -> None:
    data = pack([{"a": 1}, {"a": 2}])
    assert data[:16] == bytes.fromhex("02000000 10000000 10000000 10000000")
    assert data[16:24] == b"ARROW1\0\0"
    assert data[-8:] == bytes.fromhex("4c44415257303100")
    assert is_arrow(data)
    assert not is_arrow(data[:-1])
    assert not is_arrow(b"LDARW01\0")
    assert list(ArrowChunk(data, 2).iterate(0, 2)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_read_back_equal(form: dict[str, Any]) -> None:
    chunk = ArrowChunk(pack(ROWS, **form), len(ROWS), "f")
    assert list(chunk.iterate(0, 600)) == ROWS
    assert list(chunk.iterate(250, 515)) == ROWS[250:515]
    assert list(chunk.iterate(599, 600)) == ROWS[599:]
    assert list(chunk.iterate(5, 5)) == []
    assert [chunk.read(i) for i in (0, 255, 256, 599, 99, 100)] == [ROWS[i] for i in (0, 255, 256, 599, 99, 100)]
    assert type(chunk.read(1)["raw"]) is bytes
    for slot in (-1, 600):
        with pytest.raises(IndexError):
            chunk.read(slot)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.booleans(), st.data())
def test_batches_of_any_size(sizes: list[int], stream: bool, source: st.DataObject) -> None:
    rows = [{"i": i, "t": str(i)} for i in range(sum(sizes))]
    schema = pa.schema([("i", pa.int64()), ("t", pa.string())])
    sink = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, schema) as writer:
        start = 0
        for size in sizes:
            writer.write_batch(pa.RecordBatch.from_pylist(rows[start : start + size], schema=schema))
            start += size
    chunk = ArrowChunk(wrap(sink.getvalue(), len(rows)), len(rows))
    assert list(chunk.iterate(0, len(rows))) == rows
    assert [chunk.read(i) for i in range(len(rows))] == rows
    start = source.draw(st.integers(0, len(rows)))
    stop = source.draw(st.integers(start, len(rows)))
    assert list(chunk.iterate(start, stop)) == rows[start:stop]


@pytest.mark.parametrize("form", FORMS[:3] + FORMS[6:8], ids=str)
def test_only_some_fields(form: dict[str, Any]) -> None:
    chunk = ArrowChunk(pack(ROWS, **form), 600, "f", fields=["s", "id", "absent"])
    assert chunk.columns == ["id", "s"]
    assert chunk.read(300) == {"id": "r300", "s": ROWS[300]["s"]}
    assert list(chunk.iterate(0, 600)) == [{"id": r["id"], "s": r["s"]} for r in ROWS]
    nothing = ArrowChunk(pack(ROWS, **form), 600, "f", fields=["absent"])
    assert nothing.columns == []
    assert nothing.read(5) == {}
    assert list(nothing.iterate(254, 258)) == [{}] * 4
    assert list(ArrowChunk(pack(ROWS, **form), 600, "f", fields=[]).iterate(0, 2)) == [{}, {}]


def test_other_fields_are_not_decoded() -> None:
    # Two columns, compressed; the frames of the second one are destroyed.
    table = pa.table({"good": pa.array(range(300)), "bad": pa.array(["x" * 500 + str(i) for i in range(300)])})
    data = bytearray(pack(table, codec="zstd"))
    frames = [i for i in range(len(data) - 4) if data[i : i + 4] == b"\x28\xb5\x2f\xfd"]
    for at in frames[2:3]:  # the first batch: offsets of good, then of bad, text of bad
        data[at : at + 8] = b"\xff" * 8
    chunk = ArrowChunk(bytes(data), 300, "f", fields=["good"])
    assert [row["good"] for row in chunk.iterate(0, 300)] == list(range(300))
    with pytest.raises(Corrupt, match="f"):
        list(ArrowChunk(bytes(data), 300, "f").iterate(0, 300))


def test_types_that_the_old_tool_does_not_write() -> None:
    schema = pa.schema([("m", pa.map_(pa.string(), pa.int32())), ("lb", pa.large_binary()), ("d", pa.dictionary(pa.int8(), pa.string()))])
    rows = [{"m": {"a": 1, "b": None}, "lb": b"x", "d": "k"}, {"m": None, "lb": None, "d": None}, {"m": {}, "lb": b"", "d": "k"}]
    for stream in (False, True):
        chunk = ArrowChunk(pack(pa.Table.from_pylist(rows, schema=schema), stream=stream), 3)
        assert list(chunk.iterate(0, 3)) == rows
    twice = pa.table({"m": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))})
    assert ArrowChunk(pack(twice), 1).read(0) == {"m": [("a", 1), ("a", 2)]}


def test_a_body_before_the_rows_is_ignored() -> None:
    data = pack(ROWS[:2])
    body = struct.pack("<4I", 2, 16, 17, 18) + b"xy" + data[16:]
    assert ArrowChunk(body, 2).read(1) == ROWS[1]


def test_any_buffer(tmp_path: Path) -> None:
    data = pack(ROWS[:3])
    for buffer in (bytearray(data), memoryview(data)):
        assert is_arrow(buffer)
        assert ArrowChunk(buffer, 3).read(2) == ROWS[2]


GOOD = pack(ROWS)
TAIL = len(GOOD) - 12


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (GOOD, 599),
        (GOOD, 601),
        (GOOD[:-12], 600),
        (GOOD[:TAIL] + struct.pack("<I", 0) + GOOD[-8:], 600),
        (GOOD[:TAIL] + struct.pack("<I", 10) + GOOD[-8:], 600),
        (GOOD[:TAIL] + struct.pack("<I", len(GOOD)) + GOOD[-8:], 600),
        (GOOD[: TAIL - 40] + bytes(40) + GOOD[TAIL:], 600),
        (wrap(b"ARROW1\0\0", 600), 600),
        (wrap(b"garbage that is no stream at all", 600), 600),
        (wrap(b"", 0), 0),
    ],
    ids=range(10),
)
def test_damaged_chunks(data: bytes, count: int) -> None:
    with pytest.raises(Corrupt, match=r"chunk-0-0\.bin") as caught:
        ArrowChunk(data, count, "chunk-0-0.bin").read(0)
    assert caught.value.file == "chunk-0-0.bin"


SMALL = pack([{"i": i, "t": "x" * i, "l": [i] * i} for i in range(6)])


@given(st.integers(0, len(SMALL) - 1), st.integers(0, 255))
def test_any_byte_changed_gives_rows_or_corrupt(at: int, value: int) -> None:
    data = bytearray(SMALL)
    data[at] = value
    try:
        rows = list(ArrowChunk(bytes(data), 6, "f").iterate(0, 6))
    except Corrupt:
        return
    assert len(rows) == 6


def test_threads_read_at_once() -> None:
    chunk = ArrowChunk(pack(ROWS, codec="zstd", batch=50), 600)
    failures: list[int] = []

    def work(start: int) -> None:
        for i in range(200):
            slot = (start + i * 37) % 600
            if chunk.read(slot) != ROWS[slot]:
                failures.append(slot)

    threads = [threading.Thread(target=work, args=(i * 150,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert is_arrow(GOOD)
    with pytest.raises(MissingDependency, match="pip install pyarrow"):
        ArrowChunk(GOOD, 600)
