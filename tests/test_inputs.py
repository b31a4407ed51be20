"""What the inputs may be, how they are shared out, and what the arguments of optimize() mean."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.format.config import parse_size
from liveset.write import options
from liveset.write.inputs import ALL_DONE, END, PENDING, Indexed, Stream, open_inputs
from liveset.write.plan import Span, share
from liveset.write.shipping import Packer, pack_inputs, unpack_all


def opened(inputs: Any = None, queue: Any = None, batch_size: int | None = None, limit: int | None = None) -> Indexed | Stream:
    return open_inputs(inputs, queue, batch_size=batch_size, limit=limit)


class Squares:
    """Something with a length and positions, and no iteration of its own."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: int) -> int:
        if not 0 <= at < 5:
            raise IndexError(at)
        return at * at


class Sized:
    """Something with a length that can only be iterated."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter("abc")


@pytest.mark.parametrize(
    ("inputs", "items"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ((1, 2, 3), [1, 2, 3]),
        (range(0, 10, 3), [0, 3, 6, 9]),
        ("abc", ["a", "b", "c"]),
        (np.arange(3), [0, 1, 2]),
        (Squares(), [0, 1, 4, 9, 16]),
        ({"a": 1, "b": 2}, ["a", "b"]),
        ({"a": 1, "b": 2}.items(), [("a", 1), ("b", 2)]),
        ({7}, [7]),
        (deque([1, 2]), [1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_that_are_read_by_position(inputs: Any, items: list[Any]) -> None:
    found = opened(inputs)
    assert isinstance(found, Indexed)
    assert len(found) == len(items)
    assert list(found.take(0, len(found))) == items
    assert list(found.each(1, 2)) == items[1:2]


@pytest.mark.parametrize(
    ("inputs", "length"), [((i for i in range(3)), None), (Sized(), 3), (iter([1, 2, 3]), None), (map(str, [1, 2, 3]), None)]
)
def test_inputs_that_come_one_after_another(inputs: Any, length: int | None) -> None:
    found = opened(inputs)
    assert isinstance(found, Stream)
    assert found.length == length
    assert len(list(found)) == 3


def test_torch_datasets_and_loaders() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Map(data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, at: int) -> int:
            return at

    class Flow(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    assert isinstance(opened(Map()), Indexed)
    assert list(opened(Flow())) == [0, 1, 2, 3]  # type: ignore[arg-type]
    loader = opened(data.DataLoader(Map(), batch_size=2))
    assert isinstance(loader, Stream)
    assert loader.length == 2
    with pytest.raises(ValueError, match="pass the batch_size to the dataloader directly"):
        opened(data.DataLoader(Map(), batch_size=2), batch_size=2)


@pytest.mark.parametrize("inputs", [[], (), range(0), np.empty(0), "", {}, set()], ids=lambda value: type(value).__name__)
def test_no_inputs(inputs: Any) -> None:
    with pytest.raises(ValueError, match="The provided inputs should be non empty"):
        opened(inputs)


@pytest.mark.parametrize("inputs", [1, 1.5, object(), np.float32(1)], ids=str)
def test_things_that_are_no_inputs(inputs: Any) -> None:
    with pytest.raises(ValueError, match="should be a non-empty sequence or a streaming dataloader"):
        opened(inputs)


def test_inputs_or_queue() -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(ValueError, match="You can either provide `inputs` or `queue`, not both"):
        opened([1], queue)
    with pytest.raises(ValueError, match="At least one of `inputs` or `queue` must be provided"):
        opened()
    import queue as threads

    with pytest.raises(ValueError, match="The provided `queue` should be a multiprocessing queue"):
        opened(None, threads.Queue())
    queue.close()


def test_queue_ends_with_its_sentinel() -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    stream = opened(None, queue, batch_size=2)
    assert isinstance(stream, Stream)
    assert stream.poll(0) is PENDING
    for item in (1, 2, np.zeros(2), ALL_DONE, 5):
        queue.put(item)
    assert stream.poll(None) == [1, 2]
    assert len(stream.poll(None)) == 1
    assert stream.poll(None) is END
    assert stream.poll(None) is END
    assert queue.get() == 5
    queue.close()


def test_groups_and_limits() -> None:
    found = opened(range(10), batch_size=4)
    assert isinstance(found, Indexed)
    assert len(found) == 3
    assert found.take(1, 3) == [[4, 5, 6, 7], [8, 9]]
    assert list(opened(range(10), batch_size=4, limit=5).take(0, 2)) == [[0, 1, 2, 3], [4]]  # type: ignore[union-attr]
    assert list(opened((i for i in range(10)), batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]  # type: ignore[arg-type]
    assert list(opened((i for i in range(10)), limit=3)) == [0, 1, 2]  # type: ignore[arg-type]
    stream = opened(Sized(), batch_size=2)
    assert isinstance(stream, Stream)
    assert stream.length == 2


def test_positions_are_read_when_they_are_asked_for() -> None:
    read = []

    class Watched(Squares):
        def __getitem__(self, at: int) -> int:
            read.append(at)
            return at

    found = opened(Watched())
    assert isinstance(found, Indexed)
    items = found.each(0, 5)
    assert next(items) == 0
    assert read == [0]


def test_packed_inputs_do_not_change_with_their_source() -> None:
    buffer = np.zeros(2)

    def reused() -> Iterator[Any]:
        for number in range(3):
            buffer[:] = number
            yield buffer

    data = pack_inputs(Packer(), reused(), whole=False)
    assert [item.tolist() for item in unpack_all(data)] == [[0, 0], [1, 1], [2, 2]]


# Sharing out


def flat(parts: list[list[Span]]) -> list[int]:
    return [at for part in parts for span in part for at in range(span.start, span.stop)]


@given(st.integers(1, 60), st.integers(1, 9))
def test_shares_are_contiguous_and_equal(count: int, workers: int) -> None:
    parts = share([Span(0, 0, count)], workers)
    assert flat(parts) == list(range(count))
    sizes = [sum(map(len, part)) for part in parts]
    assert len(sizes) == min(workers, count)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)  # the last ones get more, as in the old tool


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 10))
def test_aligned_shares_hold_whole_chunks(count: int, workers: int, chunk: int) -> None:
    parts = share([Span(0, 0, count)], workers, align=chunk)
    assert flat(parts) == list(range(count))
    assert all(sum(map(len, part)) % chunk == 0 for part in parts[:-1])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.integers(1, 6))
def test_weights_balance_and_keep_the_order(weights: list[float], workers: int) -> None:
    parts = share([Span(0, 0, len(weights))], workers, weights=weights)
    assert flat(parts) == list(range(len(weights)))
    assert len(parts) <= workers
    heaviest = max(sum(weights[at] for at in flat([part])) for part in parts)
    assert heaviest <= sum(weights) / workers + 2 * max(weights) + 1e-6


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 5))
def test_spans_with_gaps_are_shared_in_order(shapes: list[tuple[int, int, int]], workers: int) -> None:
    spans, at = [], 0
    for gap, length, skip in shapes:
        spans.append(Span(at + gap, skip, at + gap + length))
        at += gap + length
    parts = share(spans, workers)
    assert flat(parts) == [at for span in spans for at in range(span.start, span.stop)]
    # What was written of the first input of a span is skipped once, where that input went.
    assert [(span.start, span.skip) for part in parts for span in part if span.skip] == [(s.start, s.skip) for s in spans if s.skip]


# Arguments


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64_000_000), ("1.5kb", 1500), ("2 gb", 2_000_000_000), ("1t", 10**12), ("3b", 3), ("10M", 10_000_000), (77, 77)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["64", "MB", "64 XB", "-1kb", "1e3kb", "", None, True, 1.5])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported value/suffix.*The supported units are"):
        parse_size(text)


@pytest.mark.parametrize("size", ["4.3GB", 1 << 32, "1tb"])
def test_chunks_of_4_gib_are_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="below 4 GiB"):
        options.check_sizes(None, size, align=False)


def test_one_size_only() -> None:
    with pytest.raises(ValueError, match="Either one of the `chunk_size` or the `chunk_bytes` need to be provided"):
        options.check_sizes(10, "1MB", align=False)
    with pytest.raises(ValueError, match="When `align_chunking` is set to True, `chunk_size` needs to be defined"):
        options.check_sizes(None, "1MB", align=True)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="chunk_size"):
            options.check_sizes(wrong, None, align=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_bytes"):
        options.check_sizes(None, 0, align=False)


def test_combinations_that_have_no_meaning() -> None:
    with pytest.raises(ValueError, match="align_chunking requires keep_data_ordered=True"):
        options.check_order(False, align_chunking=True, use_checkpoint=False)
    with pytest.raises(ValueError, match="Checkpoint feature is not supported for Queue based data processing, yet"):
        options.check_order(False, align_chunking=False, use_checkpoint=True)
    assert options.check_order(None, align_chunking=True, use_checkpoint=True)


@pytest.mark.parametrize("count", [-1, 1.5, "2", True])
def test_numbers_of_workers_that_are_none(count: Any) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        options.check_workers(count, None)


def test_unknown_start_method() -> None:
    with pytest.raises(ValueError, match="start_method"):
        options.check_workers(None, "threads")


def test_output_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.output_path("data") == str(tmp_path / "data")
    assert options.output_path(tmp_path / "data-{%Y}") == str(tmp_path / f"data-{datetime.now().astimezone():%Y}")
    assert options.output_path("a{b}c") == str(tmp_path / "a{b}c")
    for url in ("https://host/data", "hf://datasets/x"):
        with pytest.raises(ValueError, match="Cannot write optimized data to"):
            options.output_path(url)
    for url in ("s3://bucket/data", "azure://box/a b", "local:data"):
        assert options.output_path(url) == url
    assert options.output_path("gs://bucket/{%Y}") == f"gs://bucket/{datetime.now().astimezone():%Y}"
    with pytest.raises(ValueError, match="output_dir"):
        options.output_path("")


def test_weights_fit_the_inputs() -> None:
    assert options.check_weights(None, 3, None) is None
    assert options.check_weights([1, 2, 3], 3, 2) == [3, 3]
    with pytest.raises(ValueError, match="one number for each of the 3 inputs"):
        options.check_weights([1], 3, None)
    with pytest.raises(ValueError, match="finite"):
        options.check_weights([1, float("nan"), -1], 3, None)


def test_usable_cpus() -> None:
    assert 1 <= options.usable_cpus() <= (os.cpu_count() or 1)
