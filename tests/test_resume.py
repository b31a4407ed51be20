"""Checkpoints: a broken run goes on where it was, whatever broke it, and never gives wrong data."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.edit.vacuum import vacuum_store
from liveset.errors import DatasetExists, KeyConflict, WorkerError
from liveset.format.index import Index
from liveset.read.dataset import StreamingDataset
from liveset.snapshot import open_snapshot
from liveset.storage.local import LocalStore
from liveset.tools.history import tag
from liveset.write.checkpoint import Chain, cover, fingerprint
from liveset.write.inputs import Indexed
from liveset.write.optimize import optimize

EVERYWHERE = pytest.mark.parametrize("workers", [1, 2])


class Work:
    """A function that counts its calls in a file, since workers share no memory, and fails at chosen inputs."""

    def __init__(self, log: Path, fail: tuple[int, ...] = (), how: str = "raise") -> None:
        self.log, self.fail, self.how = str(log), fail, how

    def __call__(self, i: int) -> dict[str, int]:
        if i in self.fail:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"bad input {i}")
        with open(self.log, "a") as file:
            file.write(f"{i}\n")
        return {"id": i, "square": i * i}

    def calls(self) -> Counter[int]:
        return Counter(map(int, Path(self.log).read_text().split())) if Path(self.log).exists() else Counter()


def samples(*numbers: int) -> list[dict[str, int]]:
    return [{"id": i, "square": i * i} for i in range(*numbers)]


def read(path: Path) -> list[Any]:
    return list(StreamingDataset(str(path))[:])


def chunks(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("chunk-*")}


def listed(path: Path) -> list[str]:
    return [record.filename for record in Index.parse((path / "index.json").read_bytes()).chunks]


def staged(path: Path) -> list[Path]:
    return sorted((path / "_liveset" / "staged").rglob("*.json"))


def clean(path: Path) -> bool:
    """Whether nothing is left of a checkpoint, and every chunk file belongs to the dataset."""
    return not (path / "_liveset" / "staged").exists() and set(chunks(path)) <= set(listed(path))


@EVERYWHERE
@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_failing_fn(tmp_path: Path, workers: int, again: int) -> None:
    out, work = tmp_path / "out", Work(tmp_path / "calls", fail=(70,))
    with pytest.raises(WorkerError, match="Failed processing item 70") as caught:
        optimize(work, range(100), out, use_checkpoint=True, chunk_size=10, num_workers=workers)
    assert "use_checkpoint=True" in "".join(caught.value.__notes__)
    kept = chunks(out)
    assert kept
    before = work.calls()
    repaired = Work(tmp_path / "calls")
    optimize(repaired, range(100), out, use_checkpoint=True, chunk_size=10, num_workers=again)
    assert read(out) == samples(100)
    assert kept.items() <= chunks(out).items()
    # Whatever was done before the failure is not done again: all that a run does until it stops is flushed.
    assert work.calls() == Counter(range(100))
    assert before.total() < 100
    assert clean(out)


@pytest.mark.parametrize("again", [1, 2])
def test_a_killed_worker(tmp_path: Path, again: int) -> None:
    out, work = tmp_path / "out", Work(tmp_path / "calls", fail=(90,), how="kill")
    with pytest.raises(WorkerError, match="SIGKILL.*input 90"):
        optimize(work, range(100), out, use_checkpoint=True, chunk_size=5, num_workers=2)
    kept = chunks(out)
    optimize(Work(tmp_path / "calls"), range(100), out, use_checkpoint=True, chunk_size=5, num_workers=again)
    assert read(out) == samples(100)
    assert all(chunks(out).get(name, data) == data for name, data in kept.items())
    calls = work.calls()
    assert set(calls) == set(range(100))
    # But for the chunk that was being filled, and the one before it, which was being written.
    assert all(count == 1 for i, count in calls.items() if i < 80)
    assert clean(out)


KILLED = """
import os, signal, sys, time
from liveset.write.optimize import optimize

def fn(i):
    with open(sys.argv[2], "a") as file:
        file.write(f"{i}\\n")
    if i == 60 and sys.argv[3] == "die":
        parent = os.getpid() if sys.argv[4] == "1" else os.getppid()
        os.kill(parent, signal.SIGKILL)
        signal.pause()
    return {"id": i, "square": i * i}

optimize(fn, range(100), sys.argv[1], mode="append", use_checkpoint=True, chunk_size=5, num_workers=int(sys.argv[4]))
"""


@EVERYWHERE
def test_the_whole_run_is_killed(tmp_path: Path, workers: int) -> None:
    out, log = tmp_path / "out", tmp_path / "calls"
    optimize(Work(tmp_path / "other"), range(20), out, chunk_size=5)
    old = chunks(out)
    arguments = [sys.executable, "-c", KILLED, str(out), str(log)]
    assert subprocess.run([*arguments, "die", str(workers)], timeout=60).returncode == -signal.SIGKILL
    assert read(out) == samples(20)
    kept = chunks(out)
    subprocess.run([*arguments, "live", str(3 - workers)], timeout=60, check=True)
    assert read(out) == samples(20) + samples(100)
    after = chunks(out)
    assert all(after[name] == data for name, data in old.items())
    assert all(after[name] == data for name, data in kept.items() if name in after)
    calls = Counter(map(int, log.read_text().split()))
    assert sorted(calls) == list(range(100))
    assert calls.total() <= 100 + workers * (2 * 5 + 1)  # in each a chunk was being filled, one being written, one input at work
    assert not (out / "_liveset" / "staged").exists()


@EVERYWHERE
def test_ctrl_c(tmp_path: Path, workers: int) -> None:
    out, log, pipe = tmp_path / "out", tmp_path / "calls", str(tmp_path / "pipe")
    code = """
import sys, signal
from liveset.write.optimize import optimize
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
def fn(i):
    if i == 75:
        with open(sys.argv[3], "w") as file: file.write("busy")
        for _ in range(10**9): pass
    with open(sys.argv[2], "a") as file: file.write(f"{i}\\n")
    return {"id": i, "square": i * i}
optimize(fn, range(100), sys.argv[1], use_checkpoint=True, chunk_size=10, num_workers=int(sys.argv[4]))
"""
    os.mkfifo(pipe)
    arguments = [sys.executable, "-c", code, str(out), str(log), pipe, str(workers)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with open(pipe) as file:
        assert file.read() == "busy"
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    work = Work(log)
    optimize(work, range(100), out, use_checkpoint=True, chunk_size=10)
    assert read(out) == samples(100)
    calls = work.calls()
    assert set(calls) == set(range(100))
    assert all(calls[i] == 1 for i in range(50 if workers == 2 else 70))
    assert clean(out)


def test_many_breaks(tmp_path: Path) -> None:
    """A run that breaks again and again, with other numbers of workers each time, and ends."""
    out, log, dice = tmp_path / "out", tmp_path / "calls", random.Random(7)

    def fn(i: int) -> Iterator[dict[str, int]]:
        with open(log, "a") as file:
            file.write(f"{i}\n")
        for part in range(i % 4):
            yield {"id": i, "part": part}

    def broken(bad: set[int]) -> Callable[[int], Any]:
        def wrapped(i: int) -> Iterator[dict[str, int]]:
            for number, sample in enumerate(fn(i)):
                if i in bad and number == 1:
                    raise ValueError("broken")
                yield sample

        return wrapped

    bad = {11, 23, 50, 75, 78, 90, 95}
    while bad:
        with pytest.raises(WorkerError, match="Failed processing item"):
            optimize(broken(bad), range(100), out, use_checkpoint=True, chunk_size=7, num_workers=dice.choice([1, 2, 3]))
        bad.remove(dice.choice(sorted(bad)))
    optimize(fn, range(100), out, use_checkpoint=True, chunk_size=7, num_workers=2)
    assert read(out) == [{"id": i, "part": part} for i in range(100) for part in range(i % 4)]
    assert clean(out)


def test_skipped_inputs_are_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "calls"

    def fn(i: int, fail: bool) -> Any:
        if fail and i == 80:
            raise ValueError
        with open(log, "a") as file:
            file.write(f"{i}\n")
        return i if i % 3 == 0 else None

    with pytest.raises(WorkerError):
        optimize(lambda i: fn(i, True), range(100), tmp_path / "out", use_checkpoint=True, chunk_size=5, num_workers=1)
    with caplog.at_level("INFO", "liveset"):
        optimize(lambda i: fn(i, False), range(100), tmp_path / "out", use_checkpoint=True, chunk_size=5, num_workers=1)
    assert read(tmp_path / "out") == list(range(0, 100, 3))
    assert Counter(map(int, log.read_text().split())) == Counter(range(100))
    assert "34 samples of 100 inputs" in caplog.text
    assert "66 inputs were skipped" in caplog.text


def test_widening_survives_a_break(tmp_path: Path) -> None:
    def fn(i: int, fail: bool) -> dict[str, Any]:
        if fail and i == 60:
            raise ValueError
        return {"id": i, "x": None if i > 50 else i}

    with pytest.raises(WorkerError):
        optimize(lambda i: fn(i, True), range(100), tmp_path, use_checkpoint=True, chunk_size=9, num_workers=2)
    optimize(lambda i: fn(i, False), range(100), tmp_path, use_checkpoint=True, chunk_size=9, num_workers=2)
    assert read(tmp_path) == [fn(i, False) for i in range(100)]
    assert clean(tmp_path)


def test_aligned_chunks_stay_aligned(tmp_path: Path) -> None:
    work = Work(tmp_path / "calls", fail=(33, 71))
    arguments: dict[str, Any] = {"use_checkpoint": True, "align_chunking": True, "chunk_size": 8}
    with pytest.raises(WorkerError):
        optimize(work, range(100), tmp_path / "out", num_workers=2, **arguments)
    optimize(Work(tmp_path / "calls"), range(100), tmp_path / "out", num_workers=3, **arguments)
    assert [record.samples for record in Index.parse((tmp_path / "out" / "index.json").read_bytes()).chunks] == [8] * 12 + [4]
    assert read(tmp_path / "out") == samples(100)


def test_compressed_chunks(tmp_path: Path) -> None:
    for level in ("batch", "sample", "chunk"):
        out = tmp_path / level
        arguments: dict[str, Any] = {"use_checkpoint": True, "compression": "zstd", "compression_level": level, "chunk_size": 8}
        with pytest.raises(WorkerError):
            optimize(Work(tmp_path / f"{level}-calls", fail=(50,)), range(60), out, num_workers=1, **arguments)
        work = Work(tmp_path / f"{level}-calls")
        optimize(work, range(60), out, num_workers=1, **arguments)
        assert read(out) == samples(60)
        assert work.calls() == Counter(range(60))


# What does not fit


def break_at_50(out: Path, log: Path, inputs: Any = range(60), **arguments: Any) -> None:
    with pytest.raises(WorkerError):
        optimize(Work(log, fail=(50,)), inputs, out, **{"use_checkpoint": True, "chunk_size": 10, "num_workers": 1, **arguments})


@pytest.mark.parametrize(
    "other",
    [
        {"inputs": range(61)},
        {"inputs": range(1, 61)},
        {"inputs": list(map(float, range(60)))},
        {"chunk_size": 11},
        {"compression": "zstd"},
        {"mode": "append"},
    ],
    ids=str,
)
def test_other_inputs_or_arguments_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    out = tmp_path / "out"
    break_at_50(out, tmp_path / "calls")
    before = {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    arguments = {"inputs": range(60), "chunk_size": 10, "num_workers": 1, **other}
    with pytest.raises(ValueError, match="Existing checkpoints are not compatible with the current configuration") as caught:
        optimize(Work(tmp_path / "calls"), output_dir=out, use_checkpoint=True, **arguments)
    assert next(iter(other)) in str(caught.value)
    assert {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    optimize(Work(tmp_path / "calls"), range(60), out, use_checkpoint=True, chunk_size=10)
    assert read(out) == samples(60)


def test_equal_inputs_of_another_kind_are_accepted(tmp_path: Path) -> None:
    break_at_50(tmp_path / "out", tmp_path / "calls", inputs=list(range(60)))
    optimize(Work(tmp_path / "calls"), range(60), tmp_path / "out", use_checkpoint=True, chunk_size=10)
    assert read(tmp_path / "out") == samples(60)


def test_without_use_checkpoint_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    break_at_50(out, tmp_path / "calls")
    before = staged(out)
    optimize(Work(tmp_path / "more"), range(5), out)
    assert read(out) == samples(5)
    assert staged(out) == before
    with pytest.raises(DatasetExists):
        optimize(Work(tmp_path / "calls"), range(60), out, use_checkpoint=True, chunk_size=10)


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    import multiprocessing

    with pytest.raises(ValueError, match="Checkpoint feature is not supported for generators, yet"):
        optimize(str, iter("abc"), tmp_path, use_checkpoint=True)
    queue = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(ValueError, match="Checkpoint feature is not supported for Queue based data processing, yet"):
        optimize(str, queue=queue, output_dir=tmp_path, use_checkpoint=True)
    queue.close()
    with pytest.raises(ValueError, match="Checkpoint feature is not supported for Queue based data processing, yet"):
        optimize(str, "abc", tmp_path, use_checkpoint=True, keep_data_ordered=False)


def test_a_run_that_fails_before_its_first_chunk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        optimize(Work(tmp_path / "calls", fail=(0,)), range(5), tmp_path / "out", use_checkpoint=True, num_workers=1)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_in_use(tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = Work(tmp_path / "calls")

    def fn(i: int) -> dict[str, int]:
        if i == 40:
            code = "import sys; from liveset.write.optimize import optimize; optimize(lambda i: 1, range(60), sys.argv[1], use_checkpoint=True, chunk_size=10)"
            done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
            assert "ValueError: Another run" in done.stderr, done.stderr
            assert str(os.getpid()) in done.stderr
        return work(i)

    optimize(fn, range(60), out, use_checkpoint=True, chunk_size=10, num_workers=1)
    assert read(out) == samples(60)
    assert clean(out)


# Killed after the commit

KILLED_LATE = """
import os, signal, sys
from liveset.storage.local import LocalStore
from liveset.write import checkpoint, landing
from liveset.write.optimize import optimize

out, mode, key, point = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(call):
    return lambda *args, **named: (call(*args, **named), die())

if point.startswith("committed"):
    landing.commit = then_die(landing.commit)
elif point == "published":
    checkpoint.Checkpoint.remove = die
elif point == "half removed":
    delete = LocalStore.delete
    def half(self, names):
        names = list(names)
        if names and "staged" in names[0]:
            delete(self, names[:-1])
            die()
        delete(self, names)
    LocalStore.delete = half

optimize(
    lambda i: {"id": i, "square": i * i, "late": None if i > 30 else i}, range(60), out,
    mode=mode or None, key_fn=key or None, use_checkpoint=True, chunk_size=10, num_workers=1, session="mine" if "mine" in point else None,
)
die()
"""


def late(i: int) -> dict[str, Any]:
    return {"id": i, "square": i * i, "late": None if i > 30 else i}


def kill_late(out: Path, mode: str | None, key: str | None, point: str) -> None:
    arguments = [sys.executable, "-c", KILLED_LATE, str(out), mode or "", key or "", point]
    assert subprocess.run(arguments, timeout=60).returncode == -signal.SIGKILL
    assert staged(out)


def again(out: Path, mode: Any, key: str | None = None, fn: Callable[[int], Any] | None = None, **more: Any) -> None:
    def no(i: int) -> Any:
        raise AssertionError("done again")

    arguments = {"mode": mode, "key_fn": key, "use_checkpoint": True, "chunk_size": 10, "num_workers": 1, **more}
    optimize(fn or no, range(60), out, **arguments)


@pytest.mark.parametrize("key", [None, "id"])
@pytest.mark.parametrize(("mode", "before"), [(None, 0), ("append", 0), ("append", 20), ("overwrite", 0), ("overwrite", 20)])
@pytest.mark.parametrize("point", ["committed", "published", "half removed"])
def test_a_run_killed_after_its_commit_is_done(tmp_path: Path, mode: Any, before: int, key: str | None, point: str) -> None:
    out = tmp_path / "out"
    old = [late(i) for i in range(100, 100 + before)]
    if before:
        optimize(late, range(100, 100 + before), out, key_fn=key, chunk_size=10, nullable=["late"])
    kill_late(out, mode, key, point)
    wanted = (old if mode == "append" else []) + [late(i) for i in range(60)]
    version = Index.parse((out / "index.json").read_bytes()).version
    again(out, mode, key)
    assert read(out) == wanted
    assert Index.parse((out / "index.json").read_bytes()).version == version
    assert not (out / "_liveset" / "staged").exists()
    named = {record.filename for number in range(1, version + 1) for record in open_snapshot(LocalStore(out), number).index.chunks}
    assert set(chunks(out)) == named
    if key is not None:
        assert StreamingDataset(str(out)).get_by_keys([59]) == [late(59)]
        assert list((out / "keys").iterdir())
    # The same call once more is another run: it is not taken for the one that is done.
    if mode is None:
        with pytest.raises(DatasetExists):
            again(out, mode, key)
    elif mode == "append" and key is not None:
        with pytest.raises(KeyConflict):
            again(out, mode, key, late)
    else:
        again(out, mode, key, late)
        assert read(out) == (wanted if mode == "append" else []) + [late(i) for i in range(60)]
        assert Index.parse((out / "index.json").read_bytes()).version == version + 1


def test_a_run_killed_after_its_commit_does_not_undo_later_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_late(out, "overwrite", None, "committed")
    optimize(late, range(3), out, mode="overwrite", compression="zstd")
    again(out, "overwrite")
    assert read(out) == [late(i) for i in range(3)]
    assert not (out / "_liveset" / "staged").exists()
    assert list(StreamingDataset(str(out), version=1)[:]) == [late(i) for i in range(60)]


def test_a_run_killed_after_its_commit_whose_version_was_vacuumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_late(out, "append", None, "published")
    optimize(late, range(3), out, mode="append", nullable=["late"])
    tag(str(out), "both")
    optimize(late, range(5), out, mode="overwrite")
    report = vacuum_store(LocalStore(out), keep=1, grace=timedelta(0), spare=timedelta(days=1))
    assert report.expired == (1, 3)
    assert "checkpoint" not in report.deleted
    again(out, "append")
    assert read(out) == [late(i) for i in range(5)]
    assert not (out / "_liveset" / "staged").exists()
    assert list(StreamingDataset(str(out), version="both")[:]) == [late(i) for i in [*range(60), *range(3)]]


def test_a_run_killed_after_its_commit_is_in_nobodys_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_late(out, None, None, "committed")
    optimize(late, range(5), out, mode="append", use_checkpoint=True, nullable=["late"])
    assert read(out) == [late(i) for i in [*range(60), *range(5)]]
    assert clean(out)


def test_a_run_with_a_session_killed_after_its_commit(tmp_path: Path) -> None:
    for point in ("committed", "half removed"):
        for session in (None, "mine"):
            out = tmp_path / f"{point}-{session}"
            kill_late(out, "append", None, f"{point} mine" if point == "committed" else point)
            again(out, "append", session=session)
            assert read(out) == [late(i) for i in range(60)]
            assert clean(out)


# Damage


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "gone", "json"])
def test_damaged_checkpoint_files(tmp_path: Path, damage: str) -> None:
    """Whichever file is damaged, the result is right."""
    pattern = tmp_path / "pattern"
    break_at_50(pattern, tmp_path / "calls")
    for number in range(len(staged(pattern))):
        out = tmp_path / f"{damage}-{number}"
        break_at_50(out, tmp_path / "calls")
        file = staged(out)[number]
        data = file.read_bytes()
        if damage == "gone":
            file.unlink()
        elif damage == "json":
            file.write_bytes(json.dumps({"format": 1}).encode())
        else:
            file.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flip": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]}[damage])
        optimize(Work(tmp_path / "calls"), range(60), out, use_checkpoint=True, chunk_size=10, num_workers=1)
        assert read(out) == samples(60)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_chunks_are_made_again(tmp_path: Path, damage: str) -> None:
    for number in range(5):
        out = tmp_path / str(number)
        break_at_50(out, tmp_path / "calls")
        file = sorted(out.glob("chunk-*"))[number]
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-3])
        optimize(Work(tmp_path / "calls"), range(60), out, use_checkpoint=True, chunk_size=10)
        assert read(out) == samples(60)
        assert clean(out)


# The parts


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 12), st.integers(0, 2)), max_size=8), st.integers(1, 12))
def test_cover_takes_every_input_once(shapes: list[tuple[int, int, int, int]], count: int) -> None:
    chains = [Chain((a, k), (b, m), 0, []) for a, k, b, m in shapes if (a, k) < (b, m) <= (count, 0)]
    done, left = cover(chains, count)
    pieces = sorted([(chain.begin, chain.end) for chain in done] + [((span.start, span.skip), (span.stop, 0)) for span in left])
    assert pieces[0][0] == (0, 0)
    assert pieces[-1][1] == (count, 0)
    assert all(before[1] == after[0] for before, after in pairwise(pieces))


def test_fingerprints() -> None:
    class Play:
        def __init__(self, number: int) -> None:
            self.number = number

    def of(items: Any) -> str:
        return fingerprint(Indexed(items))

    assert of([1, 2]) == of((1, 2)) == of([1, 2]) != of([2, 1])
    assert of(["a" * 3, "aaa"]) == of(["aaa", "".join("aaa")])
    assert of([{"a": [1, None]}]) == of([{"a": [1, None]}]) != of([{"a": [1, 0]}])
    assert of([Play(1)]) == of([Play(1)]) != of([Play(2)])
    assert of([Path("a"), Path("b")]) != of([Path("a"), Path("c")])
    assert of([np.arange(3)]) == of([np.arange(3)]) != of([np.arange(4)])
    assert of(np.arange(6).reshape(2, 3)) != of(np.zeros((2, 3)))
    assert of(list(range(10_000))) != of([*range(9_999), 0])
    code = "from liveset.write.checkpoint import fingerprint; from liveset.write.inputs import Indexed; print(fingerprint(Indexed(['x', ('y', 2.5)])))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == of(["x", ("y", 2.5)])
