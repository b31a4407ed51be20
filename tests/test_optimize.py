"""optimize(): what a run leaves in a directory, whatever happens in it."""

from __future__ import annotations

import inspect
import io
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.edit.changes import HISTORY
from liveset.edit.versions import list_versions
from liveset.errors import DatasetExists, OverwriteConflict, PickleRefused, SampleError, SchemaConflict, WorkerError
from liveset.format.index import Index
from liveset.format.media import Image
from liveset.read.dataset import StreamingDataset
from liveset.storage.local import LocalStore
from liveset.write import execution
from liveset.write.optimize import optimize

# Where the work is done must not be seen in the result.
HERE, ONE, TWO = {"num_workers": 1}, {"num_workers": 1, "start_method": "spawn"}, {"num_workers": 2}
EVERYWHERE = pytest.mark.parametrize("where", [HERE, TWO], ids=["here", "two"])


def pair(i: int) -> tuple[int, int]:
    return (i, i**2)


def pairs(*numbers: int) -> list[tuple[int, int]]:
    return [pair(i) for i in range(*numbers)]


def read(path: Path) -> list[Any]:
    return list(StreamingDataset(str(path))[:])


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def index(path: Path) -> Index:
    return Index.parse((path / "index.json").read_bytes())


# The example of the old tool


def test_write_overwrite_append_as_the_old_tool_does(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    optimize(fn=lambda i: (i, i**2), inputs=list(range(100)), output_dir=out, num_workers=1, chunk_bytes="64MB")
    assert len(StreamingDataset(out)) == 100
    assert StreamingDataset(out)[:] == [(i, i**2) for i in range(100)]
    with pytest.raises(RuntimeError, match="HINT: If you want to append/overwrite to the existing dataset"):
        optimize(fn=pair, inputs=range(100), output_dir=out)
    with pytest.raises(ValueError, match="The provided `mode` should be either `append` or `overwrite`"):
        optimize(fn=pair, inputs=range(100), output_dir=out, mode="some-random-mode")  # type: ignore[arg-type]
    optimize(fn=pair, inputs=range(100, 200), output_dir=out, num_workers=3, mode="overwrite")
    assert StreamingDataset(out)[:] == pairs(100, 200)
    optimize(fn=pair, inputs=range(200, 300), output_dir=out, num_workers=os.cpu_count(), mode="append")
    assert StreamingDataset(out)[:] == pairs(100, 300)
    with pytest.raises(Exception, match="The config isn't consistent between chunks"):
        optimize(fn=lambda i: (i, i**2, i**3), inputs=range(3), output_dir=out, mode="append")
    assert StreamingDataset(out)[:] == pairs(100, 300)
    optimize(fn=lambda i: (i, i**2, i**3), inputs=range(5), output_dir=out, mode="overwrite")
    assert StreamingDataset(out)[:] == [(i, i**2, i**3) for i in range(5)]


def test_signature_of_the_old_tool() -> None:
    names = (
        "fn inputs output_dir queue input_dir weights chunk_size chunk_bytes align_chunking compression compression_level "
        "compression_batch_size encryption num_workers fast_dev_run num_nodes machine num_downloaders num_uploaders reorder_files reader "
        "batch_size mode use_checkpoint item_loader start_method optimize_dns storage_options keep_data_ordered verbose broadcast_paths key_fn"
    ).split()
    parameters = inspect.signature(optimize).parameters
    assert list(parameters)[: len(names)] == names
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(parameters)[len(names) :])


def test_names_of_both_hints(tmp_path: Path) -> None:
    optimize(pair, range(3), tmp_path)
    with pytest.raises(DatasetExists) as caught:
        optimize(pair, range(3), tmp_path)
    first, second, third = str(caught.value).splitlines()
    assert "already contains an optimized immutable datasets." in first
    assert second == "HINT: Did you consider changing the `output_dir` with your own versioning as a suffix?"
    assert third == "HINT: If you want to append/overwrite to the existing dataset, use `mode='append | overwrite'`."


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("encryption", object()),
        ("reader", object()),
        ("item_loader", object()),
    ],
)
def test_arguments_of_later_versions_are_refused(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        optimize(pair, range(3), tmp_path / "out", **{argument: value})
    assert not (tmp_path / "out").exists()


def test_arguments_that_need_a_platform(tmp_path: Path) -> None:
    for name in ("num_nodes", "machine"):
        with pytest.raises(ValueError, match="Only https://lightning.ai/ supports multiple nodes or selecting a machine"):
            optimize(pair, range(3), tmp_path / "out", **{name: 2})  # type: ignore[arg-type]


def test_arguments_without_effect(tmp_path: Path) -> None:
    optimize(pair, [1, 2], tmp_path, num_downloaders=3, num_uploaders=3, reorder_files=False, optimize_dns=True, broadcast_paths=True)
    assert read(tmp_path) == [pair(1), pair(2)]


# Modes


@pytest.mark.parametrize("mode", [None, "append", "overwrite"])
@pytest.mark.parametrize("start", ["missing", "empty", "foreign"])
def test_every_mode_writes_where_no_dataset_is(tmp_path: Path, mode: Any, start: str) -> None:
    out = tmp_path / "deep" / "out"
    foreign: dict[str, bytes] = {}
    if start != "missing":
        out.mkdir(parents=True)
    if start == "foreign":
        for name in ("chunk-0-0.bin", "0.index.json", "chunk-mine.bin", "keys/a.parquet", "sub/chunk-0-0-0123456789abcdef.bin"):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(name.encode())
        foreign = files(out)
    optimize(pair, range(10), out, mode=mode)
    assert read(out) == pairs(10)
    assert foreign.items() <= files(out).items()


@EVERYWHERE
@pytest.mark.parametrize("mode", [None, "append", "overwrite"])
def test_a_failing_run_leaves_foreign_files_and_nothing_of_its_own(tmp_path: Path, mode: Any, where: Any) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    for name in ("chunk-0-0.bin", "deep/chunk-0-1.bin", "0.index.json"):
        (tmp_path / "out" / name).write_bytes(b"theirs")
    before = files(tmp_path)
    with pytest.raises(WorkerError):
        optimize(lambda i: 1 // (i - 90), range(100), tmp_path / "out", mode=mode, chunk_size=5, **where)
    assert files(tmp_path) == before
    assert not (tmp_path / "out" / "_liveset").exists()


@EVERYWHERE
def test_a_failing_run_removes_the_folders_that_it_made(tmp_path: Path, where: Any) -> None:
    with pytest.raises(WorkerError):
        optimize(lambda i: 1 // (i - 90), range(100), tmp_path / "a" / "b", chunk_size=5, **where)
    assert list(tmp_path.iterdir()) == []


@EVERYWHERE
def test_a_failed_append_changes_nothing_and_the_next_run_does_not_notice(tmp_path: Path, where: Any) -> None:
    optimize(pair, range(20), tmp_path, chunk_size=5)
    before = files(tmp_path)
    with pytest.raises(WorkerError):
        optimize(lambda i: (i, 1 // (i - 90)), range(100), tmp_path, mode="append", chunk_size=5, **where)
    assert files(tmp_path) == before
    optimize(pair, range(7), tmp_path, mode="overwrite")
    assert read(tmp_path) == pairs(7)


def test_versions_are_kept(tmp_path: Path) -> None:
    optimize(pair, range(5), tmp_path, message="first")
    optimize(pair, range(5, 9), tmp_path, mode="append", message="second")
    optimize(pair, range(2), tmp_path, mode="overwrite")
    assert StreamingDataset(str(tmp_path), version=1)[:] == pairs(5)
    assert StreamingDataset(str(tmp_path), version=2)[:] == pairs(9)
    assert read(tmp_path) == pairs(2)


def test_a_dataset_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def fn(i: int) -> tuple[int, int]:
        if i == 5:
            optimize(pair, range(3), tmp_path)
        return pair(i)

    with pytest.raises(DatasetExists, match="already contains an optimized immutable datasets"):
        optimize(fn, range(10), tmp_path, num_workers=1)
    assert read(tmp_path) == pairs(3)
    assert len(list(tmp_path.glob("chunk-*"))) == 1


def test_overwrite_does_not_take_away_what_was_committed_meanwhile(tmp_path: Path) -> None:
    optimize(pair, range(3), tmp_path)

    def fn(i: int) -> tuple[int, int]:
        if i == 5:
            optimize(pair, range(3, 6), tmp_path, mode="append")
        return pair(i)

    with pytest.raises(OverwriteConflict):
        optimize(fn, range(10), tmp_path, num_workers=1, mode="overwrite")
    assert read(tmp_path) == pairs(6)
    assert len(list(tmp_path.glob("chunk-*"))) == 2


def _overwrite(path: str, start: int, arrived: Any, go: Any, force: bool) -> str:
    def fn(i: int) -> tuple[int, int]:
        if i == start + 5:
            arrived.release()
            go.wait(30)
        return pair(i)

    try:
        optimize(fn, range(start, start + 10), path, mode="overwrite", num_workers=1, force=force)
    except OverwriteConflict as error:
        return f"{error} {error.__notes__}"
    return "done"


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("force", [False, True])
def test_racing_overwrites(tmp_path: Path, before: int, force: bool) -> None:
    if before:
        optimize(pair, range(before), tmp_path)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(3) as pool:
        arrived, go = manager.Semaphore(0), manager.Event()
        waiting = pool.starmap_async(_overwrite, [(str(tmp_path), start, arrived, go, force) for start in (100, 200, 300)])
        for _ in range(3):
            assert arrived.acquire(timeout=30)
        go.set()
        results = waiting.get(60)
    assert read(tmp_path) in [pairs(start, start + 10) for start in (100, 200, 300)]
    history = list_versions(LocalStore(tmp_path))
    if force:
        assert results == ["done"] * 3
        assert len(history) == 3 + bool(before)
    else:
        assert sorted(result == "done" for result in results) == [False, False, True]
        assert all("meanwhile" in text and "force=True" in text for text in results if text != "done")
        assert len(history) == 1 + bool(before)
        assert len(list(tmp_path.glob("chunk-*"))) == len(history)


def test_force_replaces_keys_too(tmp_path: Path) -> None:
    optimize(lambda i: {"id": i}, range(3), tmp_path, key_fn="id")

    def fn(i: int) -> dict[str, int]:
        if i == 5:
            optimize(lambda i: {"id": i}, range(100, 103), tmp_path, mode="append")
        return {"id": i}

    optimize(fn, range(10), tmp_path, num_workers=1, mode="overwrite", key_fn="id", force=True)
    dataset = StreamingDataset(str(tmp_path))
    assert list(dataset.keys) == list(range(10))
    assert dataset[7] == {"id": 7}
    with pytest.raises(ValueError, match=r"`force` .*needs mode='overwrite'"):
        optimize(fn, range(10), tmp_path, mode="append", force=True)


def test_nullable_fields_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`nullable` is a list of names of fields, as in nullable=\['id'\]"):
        optimize(lambda i: {"id": i}, range(3), tmp_path / "new", nullable="id")
    assert not (tmp_path / "new").exists()


def test_the_history_says_who_and_why(tmp_path: Path) -> None:
    optimize(pair, range(3), tmp_path, message="first", author="Ada")
    optimize(pair, range(3), tmp_path, mode="append")
    assert [(entry.message, entry.author) for entry in list_versions(LocalStore(tmp_path))] == [("", ""), ("first", "Ada")]
    with pytest.raises(TypeError, match="author"):
        optimize(pair, range(3), tmp_path, mode="append", author=5)  # type: ignore[arg-type]


def test_two_appends_at_once_lose_nothing(tmp_path: Path) -> None:
    optimize(pair, range(10), tmp_path)
    errors: list[Exception] = []

    def append(start: int) -> None:
        try:
            optimize(pair, range(start, start + 50), tmp_path, mode="append", chunk_size=7, num_workers=2 if start == 100 else 1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=append, args=(start,)) for start in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = read(tmp_path)
    assert found[:10] == pairs(10)
    assert sorted(found) == pairs(10) + pairs(100, 150) + pairs(200, 250) + pairs(300, 350)


def test_session_is_committed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []
    for _ in range(2):
        optimize(lambda i: calls.append(i) or pair(i), range(3), tmp_path, session="job-7")  # type: ignore[func-returns-value]
    assert read(tmp_path) == pairs(3)
    assert len(calls) == 3
    optimize(pair, range(3), tmp_path, session="job-8", mode="append")
    optimize(pair, range(3), tmp_path, session="job-8", mode="append")
    assert len(read(tmp_path)) == 6


def test_sessions_go_on_after_the_history_was_cut(tmp_path: Path) -> None:
    optimize(pair, range(3), tmp_path)
    for number in range(HISTORY + 2):
        liveset.set_attributes(tmp_path, number=number)
    liveset.vacuum(tmp_path, keep=1, grace=timedelta(0))
    for _ in range(2):
        optimize(pair, range(3), tmp_path, session="job-9", mode="append")
    assert len(read(tmp_path)) == 6


# Where the work is done


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_any_number_of_workers_gives_the_same_order(tmp_path: Path, count: int) -> None:
    optimize(pair, range(97), tmp_path, num_workers=count, chunk_size=10)
    assert read(tmp_path) == pairs(97)


def test_three_inputs_on_eight_workers(tmp_path: Path) -> None:
    optimize(pair, [4, 5, 6], tmp_path, num_workers=8)
    assert read(tmp_path) == pairs(4, 7)


def test_unordered_gives_the_same_samples(tmp_path: Path) -> None:
    optimize(pair, range(300), tmp_path, num_workers=2, keep_data_ordered=False, chunk_size=9)
    assert sorted(read(tmp_path)) == pairs(300)
    optimize(pair, iter(range(300)), tmp_path, num_workers=2, keep_data_ordered=False, mode="overwrite")
    assert sorted(read(tmp_path)) == pairs(300)


def test_a_long_run_moves_to_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_TINY", 0.02)
    monkeypatch.setattr(execution, "_WORTHWHILE", 0.02)
    monkeypatch.setattr("liveset.write.options.usable_cpus", lambda: 2)

    def fn(i: int) -> tuple[int, int]:
        time.sleep(0.005)
        return (i, os.getpid())

    optimize(fn, range(100), tmp_path / "a")
    found = read(tmp_path / "a")
    assert [i for i, _ in found] == list(range(100))
    pids = [pid for _, pid in found]
    assert pids[0] == os.getpid()
    assert len(set(pids)) == 3
    optimize(fn, iter(range(100)), tmp_path / "b")
    assert [i for i, _ in read(tmp_path / "b")] == list(range(100))
    assert len({pid for _, pid in read(tmp_path / "b")}) == 3
    optimize(fn, range(100), tmp_path / "c", keep_data_ordered=False)
    assert sorted(i for i, _ in read(tmp_path / "c")) == list(range(100))


def test_a_long_run_stays_here_if_fn_cannot_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_TINY", 0.0)
    monkeypatch.setattr(execution, "_WORTHWHILE", 0.0)
    lock = threading.Lock()

    def fn(i: int) -> int:
        with lock:
            return i

    optimize(fn, range(50), tmp_path)
    assert read(tmp_path) == list(range(50))
    with pytest.raises(WorkerError, match=r"fn cannot be sent to worker processes.*num_workers=1"):
        optimize(fn, range(50), tmp_path / "b", num_workers=2)


def test_small_runs_are_quick(tmp_path: Path) -> None:
    optimize(pair, range(10), tmp_path / "warm")
    best = 1.0
    for attempt in range(3):
        began = time.perf_counter()
        optimize(lambda i: {"id": f"play-{i}", "label": i}, range(1000), tmp_path / str(attempt))
        best = min(best, time.perf_counter() - began)
    assert best < 0.1


# What fn returns


def several(i: int) -> Iterator[tuple[int, int] | None]:
    for j in range(i):
        yield (i, j)
        yield None


@EVERYWHERE
def test_generator_functions(tmp_path: Path, where: Any) -> None:
    optimize(several, range(6), tmp_path, **where)
    assert read(tmp_path) == [(i, j) for i in range(6) for j in range(i)]


@EVERYWHERE
def test_functions_that_return_generators(tmp_path: Path, where: Any) -> None:
    optimize(lambda i: several(i) if i % 2 else None, iter(range(6)), tmp_path, **where)
    assert read(tmp_path) == [(i, j) for i in range(6) if i % 2 for j in range(i)]


@EVERYWHERE
@pytest.mark.parametrize("kind", [list, iter], ids=["list", "iterator"])
def test_none_means_skip_and_is_counted(tmp_path: Path, where: Any, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "liveset"):
        optimize(lambda i: None if i % 3 else pair(i), kind(range(30)), tmp_path, **where)
    assert read(tmp_path) == [pair(i) for i in range(0, 30, 3)]
    assert "10 samples of 30 inputs" in caplog.text
    assert "20 inputs were skipped" in caplog.text


@EVERYWHERE
def test_nothing_but_none_is_an_empty_dataset(tmp_path: Path, where: Any) -> None:
    optimize(lambda i: None, range(10), tmp_path, **where)
    assert len(StreamingDataset(str(tmp_path))) == 0
    assert index(tmp_path).chunks == ()
    optimize(pair, range(4), tmp_path, mode="append", **where)
    assert read(tmp_path) == pairs(4)
    version = index(tmp_path).version
    optimize(lambda i: None, range(10), tmp_path, mode="append", **where)
    assert index(tmp_path).version == version
    assert read(tmp_path) == pairs(4)
    optimize(lambda i: None, range(10), tmp_path, mode="overwrite", **where)
    assert len(StreamingDataset(str(tmp_path))) == 0


def test_one_worker_without_samples(tmp_path: Path) -> None:
    optimize(lambda i: pair(i) if i < 50 else None, range(100), tmp_path, num_workers=2)
    assert read(tmp_path) == pairs(50)


@EVERYWHERE
def test_batches(tmp_path: Path, where: Any) -> None:
    optimize(lambda batch: [sum(batch), len(batch)], range(10), tmp_path, batch_size=4, **where)
    assert read(tmp_path) == [[6, 4], [22, 4], [17, 2]]


def test_fast_dev_run(tmp_path: Path) -> None:
    optimize(pair, range(100), tmp_path / "a", fast_dev_run=True)
    assert read(tmp_path / "a") == pairs(1)
    optimize(pair, range(100), tmp_path / "b", fast_dev_run=5, num_workers=2)
    assert read(tmp_path / "b") == pairs(10)
    optimize(pair, iter(range(100)), tmp_path / "c", fast_dev_run=5)
    assert read(tmp_path / "c") == pairs(5)
    with pytest.raises(ValueError, match="fast_dev_run"):
        optimize(pair, range(100), tmp_path / "d", fast_dev_run=-1)


@EVERYWHERE
@pytest.mark.parametrize("kind", [range, lambda n: iter(range(n))], ids=["range", "iterator"])
def test_fn_may_use_its_sample_again(tmp_path: Path, where: Any, kind: Any) -> None:
    buffer = np.zeros(3)

    def fn(i: int) -> np.ndarray[Any, Any]:
        buffer[:] = i
        return buffer

    optimize(fn, kind(20), tmp_path, **where)
    assert [sample.tolist() for sample in read(tmp_path)] == [[i] * 3 for i in range(20)]


@EVERYWHERE
def test_inputs_of_every_kind(tmp_path: Path, where: Any) -> None:
    kinds: list[tuple[Any, list[Any]]] = [
        ((1, 2, 3), [1, 2, 3]),
        (np.arange(5), [0, 1, 2, 3, 4]),
        ((i for i in range(4)), [0, 1, 2, 3]),
        ({"a": 1, "b": 2}.values(), [1, 2]),
        (["x", "y"], ["x", "y"]),
        ([Path("a"), Path("b")], ["a", "b"]),
    ]
    for number, (inputs, expected) in enumerate(kinds):
        optimize(str, inputs, tmp_path / str(number), **where)
        assert read(tmp_path / str(number)) == [str(item) for item in expected]


def test_inputs_that_end_at_once(tmp_path: Path) -> None:
    for where in (HERE, TWO):
        with pytest.raises(ValueError, match="The provided inputs should be non empty"):
            optimize(pair, iter(()), tmp_path / "out", **where)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@EVERYWHERE
def test_an_error_of_the_inputs_is_passed_on(tmp_path: Path, where: Any) -> None:
    def inputs() -> Iterator[int]:
        yield from range(10)
        raise KeyError("the database went away")

    with pytest.raises(KeyError, match="the database went away"):
        optimize(pair, inputs(), tmp_path / "out", chunk_size=2, **where)
    assert not (tmp_path / "out").exists()


@EVERYWHERE
def test_queue(tmp_path: Path, where: Any) -> None:
    queue = multiprocessing.get_context("spawn").Queue()

    def fill() -> None:
        for item in [*range(50), "ALL_DONE"]:
            queue.put(item)

    feeder = threading.Thread(target=fill)
    feeder.start()
    optimize(pair, queue=queue, output_dir=tmp_path, **where)
    feeder.join()
    assert read(tmp_path) == pairs(50)
    queue.close()


# Chunks


def test_sizes_of_chunks(tmp_path: Path) -> None:
    optimize(pair, range(25), tmp_path / "a", chunk_size=10)
    assert [chunk.samples for chunk in index(tmp_path / "a").chunks] == [10, 10, 5]
    assert index(tmp_path / "a").config["chunk_size"] == 10  # type: ignore[index]
    optimize(lambda i: bytes(100), range(25), tmp_path / "b", chunk_bytes="1kb")
    assert all(chunk.size <= 1100 for chunk in index(tmp_path / "b").chunks)
    optimize(pair, range(25), tmp_path / "c")
    assert index(tmp_path / "c").config["chunk_bytes"] == 64_000_000  # type: ignore[index]


def test_append_inherits_size_and_compression(tmp_path: Path) -> None:
    optimize(pair, range(20), tmp_path, chunk_size=10, compression="zstd", compression_level="sample")
    optimize(pair, range(20, 45), tmp_path, mode="append", num_workers=1)
    assert [chunk.samples for chunk in index(tmp_path).chunks] == [10, 10, 10, 10, 5]
    optimize(pair, range(45, 50), tmp_path, mode="append", chunk_size=2, compression="zstd", compression_level="sample")
    assert read(tmp_path) == pairs(50)
    before = files(tmp_path)
    for other in ({"compression": "zstd:7"}, {"compression_level": "batch"}, {"compression": "zstd", "compression_level": "chunk"}):
        with pytest.raises(ValueError, match="compression"):
            optimize(pair, range(3), tmp_path, mode="append", **other)  # type: ignore[arg-type]
    assert files(tmp_path) == before
    numbers = [int(re.match(r"chunk-\d+-(\d+)-", chunk.filename)[1]) for chunk in index(tmp_path).chunks]  # type: ignore[index]
    assert numbers == list(range(8))


def test_compressed_append_onto_plain_is_refused(tmp_path: Path) -> None:
    optimize(pair, range(3), tmp_path)
    with pytest.raises(ValueError, match="compression"):
        optimize(pair, range(3), tmp_path, mode="append", compression="zstd")


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"compression": "lz4"}, "isn't available in"),
        ({"compression": "zstd_framed"}, "is not a codec"),
        ({"compression": "zstd", "compression_level": 3}, "is granularity, not a zstd numeric level"),
        ({"compression": "zstd", "compression_level": "row"}, "compression_level must be 'chunk', 'batch', or 'sample'"),
        ({"chunk_size": 3, "chunk_bytes": 3}, "Either one of the"),
        ({"chunk_bytes": "4.3gb"}, "4 GiB"),
        ({"fn": 3}, "fn"),
    ],
)
def test_bad_arguments_leave_no_trace(tmp_path: Path, arguments: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        optimize(**{"fn": pair, "inputs": range(3), "output_dir": tmp_path / "out", **arguments})
    assert not (tmp_path / "out").exists()


def test_align_chunking(tmp_path: Path) -> None:
    optimize(pair, range(50), tmp_path, num_workers=3, chunk_size=7, align_chunking=True)
    assert [chunk.samples for chunk in index(tmp_path).chunks] == [7] * 7 + [1]
    assert read(tmp_path) == pairs(50)


def test_weights(tmp_path: Path) -> None:
    weights = [9.0] * 10 + [1.0] * 90
    optimize(lambda i: (i, os.getpid()), range(100), tmp_path, num_workers=2, weights=weights)
    found = read(tmp_path)
    assert [i for i, _ in found] == list(range(100))
    assert [pid for _, pid in found].count(found[0][1]) == 10
    with pytest.raises(ValueError, match="weights isn't supported"):
        optimize(pair, iter(range(3)), tmp_path / "b", weights=[1, 1, 1])


def test_output_dir_with_the_date(tmp_path: Path) -> None:
    optimize(pair, range(3), str(tmp_path / "run-{%Y}"))
    (made,) = tmp_path.iterdir()
    assert re.fullmatch(r"run-\d{4}", made.name)


# Samples


@EVERYWHERE
def test_widening_over_blocks(tmp_path: Path, where: Any) -> None:
    def fn(i: int) -> dict[str, Any]:
        return {"id": i, "score": None if i == 70 else (i if i < 50 else i + 0.5), **({"late": "x"} if i > 90 else {})}

    optimize(fn, range(100), tmp_path, chunk_size=9, **where)
    assert read(tmp_path) == [fn(i) for i in range(100)]
    names = {chunk.filename for chunk in index(tmp_path).chunks}
    assert {file.name for file in tmp_path.glob("chunk-*")} == names


@EVERYWHERE
@pytest.mark.parametrize("kind", [range, lambda n: iter(range(n))], ids=["range", "iterator"])
def test_append_of_other_samples_names_input_and_field(tmp_path: Path, where: Any, kind: Any) -> None:
    optimize(lambda i: {"id": str(i), "x": i}, range(10), tmp_path)
    before = files(tmp_path)
    with pytest.raises(SchemaConflict) as caught:
        optimize(lambda i: {"id": str(i), "x": "?" if i == 8 else i}, kind(10), tmp_path, mode="append", **where)
    assert "The config isn't consistent between chunks. This shouldn't have happened." in str(caught.value)
    assert "input 8 (8)" in str(caught.value)
    assert "'x'" in str(caught.value)
    assert caught.value.field == "x"
    assert files(tmp_path) == before


@EVERYWHERE
@pytest.mark.parametrize("kind", [range, lambda n: iter(range(n))], ids=["range", "iterator"])
def test_a_sample_that_cannot_be_stored_names_its_input(tmp_path: Path, where: Any, kind: Any) -> None:
    class Odd:
        pass

    with pytest.raises(PickleRefused, match=r"input 7 \(7\)") as caught:
        optimize(lambda i: {"id": i, "thing": Odd() if i == 7 else 1}, kind(10), tmp_path / "out", **where)
    assert caught.value.input_index == 7  # type: ignore[attr-defined]
    with pytest.raises(SampleError, match=r"input 3 \(3\)"):
        optimize(lambda i: "\ud800" if i == 3 else "x", kind(10), tmp_path / "out", **where)
    assert not (tmp_path / "out").exists()


def test_nullable_and_allow_pickle(tmp_path: Path) -> None:
    optimize(lambda i: {"id": i, "label": i}, range(3), tmp_path, nullable=["label"])
    optimize(lambda i: {"id": i, "label": None}, range(3), tmp_path, mode="append", nullable=["label"])
    assert read(tmp_path)[3:] == [{"id": i, "label": None} for i in range(3)]
    with pytest.raises(SchemaConflict, match="nullable"):
        optimize(lambda i: {"id": i, "label": i}, range(3), tmp_path, mode="append", nullable=["id"])


def test_one_large_sample_gets_its_own_chunk(tmp_path: Path) -> None:
    optimize(lambda i: bytes(10_000 if i == 5 else 10), range(10), tmp_path, chunk_bytes="1kb")
    assert [chunk.samples for chunk in index(tmp_path).chunks] == [5, 1, 4]
    assert [len(sample) for sample in read(tmp_path)] == [10] * 5 + [10_000] + [10] * 4


# Errors of fn


@EVERYWHERE
@pytest.mark.parametrize("kind", [range, lambda n: iter(range(n))], ids=["range", "iterator"])
def test_a_failing_fn_names_its_input(tmp_path: Path, where: Any, kind: Any) -> None:
    def fn(i: int) -> int:
        if i == 77:
            raise KeyError("no such play")
        return i

    with pytest.raises(RuntimeError) as caught:
        optimize(fn, kind(100), tmp_path / "out", **where)
    text = str(caught.value)
    assert "We found the following error" in text
    assert "Failed processing item 77 (77): KeyError: 'no such play'" in text
    assert caught.value.input_index == 77  # type: ignore[attr-defined]
    if where == HERE:
        assert isinstance(caught.value.__cause__, KeyError)
    else:
        assert "Traceback" in text
        assert "in fn" in text
    assert not (tmp_path / "out").exists()


@EVERYWHERE
def test_a_generator_that_fails_half_way(tmp_path: Path, where: Any) -> None:
    def fn(i: int) -> Iterator[int]:
        yield i
        if i == 5:
            raise OSError("disk of the source is gone")

    with pytest.raises(WorkerError, match=r"Failed processing item 5 \(5\): OSError"):
        optimize(fn, range(10), tmp_path / "out", **where)


def test_errors_with_odd_reprs(tmp_path: Path) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def __str__(self) -> str:
            raise ValueError

    class Item:
        def __repr__(self) -> str:
            raise ValueError

    def fn(item: Any) -> None:
        raise Odd(1, 2)

    for where in (HERE, TWO):
        with pytest.raises(WorkerError, match="Odd, whose text fails"):
            optimize(fn, [Item()], tmp_path / "out", **where)  # type: ignore[arg-type]
    with pytest.raises(WorkerError) as caught:
        optimize(fn, ["x" * 100_000], tmp_path / "out")
    assert len(str(caught.value)) < 2000


# Progress, memory, other processes


def test_silent_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    optimize(pair, range(10), tmp_path)
    optimize(pair, range(10), tmp_path, mode="append", num_workers=2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("verbose", [True, False])
def test_progress_on_a_terminal(tmp_path: Path, verbose: bool) -> None:
    import pty

    script = f"""
import time
from liveset.write.optimize import optimize
optimize(lambda i: time.sleep(0.1) if i % 2 else i, range(16), {str(tmp_path)!r}, num_workers=1, verbose={verbose})
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0
    if verbose:
        assert b"8 inputs were skipped" in shown
        assert re.search(rb"\d+/16", shown)
    else:
        assert shown == b""


def test_memory_does_not_grow_with_the_inputs(tmp_path: Path) -> None:
    script = """
import resource, sys
from liveset.write.optimize import optimize
count, workers = int(sys.argv[2]), int(sys.argv[3])
optimize(lambda i: bytes(100_000), (i for i in range(count)) if workers == 2 else range(count), sys.argv[1], chunk_bytes="4MB", num_workers=workers)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    for workers in ("1", "2"):
        peaks = []
        for count in ("50", "2000"):
            out = str(tmp_path / f"{workers}-{count}")
            done = subprocess.run([sys.executable, "-c", script, out, count, workers], capture_output=True, text=True, check=True)
            peaks.append(int(done.stdout) * (1 if sys.platform == "darwin" else 1024))
        assert peaks[1] - peaks[0] < 60_000_000  # of 200 MB written


def test_light_imports() -> None:
    script = "import sys, liveset.write.worker; print(sorted({'torch', 'typer', 'rich', 'pyarrow', 'PIL', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_media_that_is_not_always_there(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    pillow.new("RGB", (2, 2)).save(stream, "PNG")
    png = stream.getvalue()
    picture = Image(bytes=png)
    hint = r"field '{}' is image:jpg in some samples and missing, None or of another kind in others .*path\.read_bytes\(\)"
    for first, second, name in (
        ({"a": picture}, {"a": None}, "a"),
        ({"a": None}, {"a": picture}, "a"),
        ({"a": picture, "b": 1}, {"b": 1}, "a"),
        ({"x": {"a": picture}}, {"x": {"a": 3}}, "x.a"),
    ):
        with pytest.raises(SampleError, match="input 1 .*" + hint.format(name)) as caught:
            optimize([first, second].__getitem__, range(2), tmp_path / "out", num_workers=1)
        assert caught.value.field == name
    with pytest.raises(SampleError, match="nullable= names the field 'a', but image:jpg cannot be None"):
        optimize(lambda _: {"a": picture}, range(2), tmp_path / "out", num_workers=1, nullable=["a"])
    assert not (tmp_path / "out").exists()
    # The way out that the message names.
    optimize(lambda i: {"a": png if i else None}, range(2), tmp_path / "out", num_workers=1)
    assert read(tmp_path / "out") == [{"a": None}, {"a": png}]
