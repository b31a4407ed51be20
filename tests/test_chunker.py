"""ChunkWriter and unify: sizes, bytes, widening over chunks, and what a failing disk leaves behind."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.edit.chunkfiles import ChunkLimit
from liveset.errors import SampleError, StorageError
from liveset.format.chunk import pack_classic
from liveset.format.codec import Compression, checksum
from liveset.format.schema import Schema
from liveset.read.dataset import StreamingDataset
from liveset.storage import open_store
from liveset.testing.memory import MemoryStore
from liveset.testing.strategies import same
from liveset.write.chunker import ChunkWriter, StagedChunk
from liveset.write.unify import unify
from tests.support.writing import write_dataset


def writer(store: Any, **options: Any) -> ChunkWriter:
    return ChunkWriter(store, token="0123456789abcdef", **options)


def test_vector_chunk_of_int_lists() -> None:
    store = MemoryStore()
    chunks = writer(store)
    for row in ([1, 2], [3, 4], [5, 6]):
        chunks.add(row)
    chunks.finish()
    (staged,) = chunks.staged
    data = store.read(staged.record.filename)
    assert data == bytes.fromhex(
        "03000000 14000000 2c000000 44000000 5c000000"
        "08000000 08000000 0100000000000000 0200000000000000"
        "08000000 08000000 0300000000000000 0400000000000000"
        "08000000 08000000 0500000000000000 0600000000000000"
    )
    record = staged.record
    assert (record.filename, record.samples, record.size) == ("chunk-0-0-0123456789abcdef.bin", 3, 92)
    assert record.check == checksum(data)
    assert record.head_check == checksum(data[:20])
    assert record.id == "0123456789abcdef.0.0"


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=30), limit=st.integers(1, 100))
def test_chunks_fill_up_to_their_limit_and_larger_samples_stand_alone(sizes: list[int], limit: int) -> None:
    chunks = writer(MemoryStore(), limit=ChunkLimit(None, limit))
    for size in sizes:
        chunks.add(bytes(size))
    chunks.finish()
    found = [staged.record.samples for staged in chunks.staged]
    expected, filled, count = [], 0, 0
    for size in (size + 4 for size in sizes):
        if count and filled + size > limit:
            expected.append(count)
            filled = count = 0
        filled, count = filled + size, count + 1
    assert found == [*expected, count]
    assert [staged.end for staged in chunks.staged] == [sum(found[: i + 1]) for i in range(len(found))]


def test_chunk_size_counts_samples() -> None:
    seen: list[StagedChunk] = []
    chunks = writer(MemoryStore(), limit=ChunkLimit(4, None), rank=3, first_number=7, on_chunk=seen.append)
    for i in range(10):
        chunks.add(i)
    chunks.finish()
    assert [staged.record.samples for staged in chunks.staged] == [4, 4, 2]
    assert [staged.record.filename[:9] for staged in chunks.staged] == ["chunk-3-7", "chunk-3-8", "chunk-3-9"]
    assert seen == chunks.staged


def test_a_chunk_beyond_the_format_is_refused_up_front() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 31

    with pytest.raises(SampleError, match="4 GiB"):
        pack_classic([Huge(), Huge()])


@pytest.mark.parametrize(
    "compression", [None, Compression("zstd", "batch", 2), Compression("zstd", "sample"), Compression("zstd", "chunk")]
)
def test_chunks_of_a_narrower_schema_are_rewritten(tmp_path: Path, compression: Compression | None) -> None:
    rows = [{"n": 1, "v": np.zeros(2)}, {"n": 2, "v": np.zeros(2)}, {"n": None, "v": np.zeros((1, 2))}, {"n": 2.5, "v": np.zeros(0)}]
    write_dataset(tmp_path, rows, chunk_size=1, compression=compression)
    ds = StreamingDataset(tmp_path)
    assert ds.schema is not None
    assert ds.schema.fields == {"n": "json", "v": "numpy"}
    assert all(map(same, ds, rows))
    assert len(list(tmp_path.glob("chunk-*"))) == 4


def test_unify_widens_again_when_a_stored_value_needs_it() -> None:
    store = MemoryStore()
    staged = []
    ranks: list[list[dict[str, Any]]] = [[{"n": [1]}], [{"n": {"a": math.nan}}], [{"n": [2]}, {"n": "text"}]]
    for rank, rows in enumerate(ranks):
        chunks = writer(store, rank=rank)
        for row in rows:
            chunks.add(row)
        chunks.finish()
        staged += chunks.staged
    unified = unify(store, staged)
    assert unified.schema is not None
    assert unified.schema.fields == {"n": "pickle"}
    assert {chunk.schema for chunk in unified.chunks} == {unified.schema}
    names = {chunk.record.filename for chunk in unified.chunks}
    assert not names & set(unified.replaced)
    assert len(names) == 3


def test_chunks_that_nothing_can_hold_together_are_an_error_that_names_the_field(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    store = open_store(tmp_path)
    staged = []
    for rank, row in enumerate([{"x": image.new("L", (2, 2))}, {"x": 3}]):
        chunks = writer(store, rank=rank)
        chunks.add(row)
        chunks.finish()
        staged += chunks.staged
    with pytest.raises(SampleError, match="field 'x' is pil in some samples and .*pil, then int.*placeholder"):
        unify(store, staged)


def test_nothing_to_unify() -> None:
    assert unify(MemoryStore(), []).schema is None


def test_a_fixed_schema_is_kept() -> None:
    chunks = writer(MemoryStore(), schema=Schema.of({"n": 1}))
    chunks.add({"n": 2})
    with pytest.raises(SampleError, match="'n'"):
        chunks.add({"n": None})
    chunks.add({"n": 3})
    chunks.finish()
    assert chunks.samples == 2


def test_memory_holds_about_two_chunks() -> None:
    class Null(MemoryStore):
        """Forgets what it is given."""

        def write(self, name: str, data: Any) -> None:
            pass

    chunks = writer(Null(), limit=ChunkLimit(None, 4_000_000))
    block = bytes(100_000)
    tracemalloc.start()
    for _ in range(1000):  # 100 MB in all
        chunks.add(bytes(bytearray(block)))
    chunks.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000


def test_a_failing_disk_is_an_error_of_the_next_call() -> None:
    class Full(MemoryStore):
        """Has no room."""

        def write(self, name: str, data: Any) -> None:
            raise StorageError(f"{name}: No space left on device")

    chunks = writer(Full(), limit=ChunkLimit(1, None))

    def add_some() -> None:  # one of the next calls tells, not always the same
        for i in range(3):
            chunks.add(i)

    with pytest.raises(StorageError, match="No space left"):
        add_some()
    chunks.abort()
    assert chunks.staged == []
    assert chunks.names == ["chunk-0-0-0123456789abcdef"]
