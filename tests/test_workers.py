"""Worker processes: scripts of every kind, deaths, Ctrl-C, a full disk, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from liveset.errors import SchemaConflict, StorageError, WorkerError
from liveset.read.dataset import StreamingDataset
from liveset.write.optimize import optimize

# Newer Pythons warn of forking where there are threads; whoever asks for start_method="fork" has decided that.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")

HERE, TWO = {"num_workers": 1}, {"num_workers": 2}


def read(path: Path) -> list[Any]:
    return list(StreamingDataset(str(path))[:])


def run(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    text = [str(argument) for argument in arguments]
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *text], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    yield
    assert multiprocessing.active_children() == []


# Where functions come from

SCRIPT = """
import os, sys
from liveset.write.optimize import optimize
from liveset.read.dataset import StreamingDataset

print("started")
FACTOR = 3

class Play:
    def __init__(self, number):
        self.number = number

def helper(play):
    return play.number * FACTOR

def fn(play):
    return (play.number, helper(play), os.getpid())

optimize(fn, [Play(i) for i in range(40)], sys.argv[1], num_workers=2, start_method=sys.argv[2])
found = StreamingDataset(sys.argv[1])[:]
assert [(a, b) for a, b, _ in found] == [(i, 3 * i) for i in range(40)]
assert os.getpid() not in {pid for *_, pid in found}
print("ended")
"""
METHODS = pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())


@METHODS
def test_script_without_a_main_guard(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "out"), method], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("started\nended\n", "", 0)


@METHODS
@pytest.mark.parametrize("way", ["-c", "stdin", "-m"])
def test_other_ways_to_start_python(tmp_path: Path, method: str, way: str) -> None:
    arguments, options = [sys.executable], {}
    if way == "-c":
        arguments += ["-c", SCRIPT]
    elif way == "-m":
        (tmp_path / "job.py").write_text(SCRIPT)
        arguments += ["-m", "job"]
    else:
        arguments += ["-"]
        options = {"input": SCRIPT}
    arguments += [str(tmp_path / "out"), method]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, cwd=tmp_path, **options)  # type: ignore[call-overload]
    assert (done.stdout, done.stderr, done.returncode) == ("started\nended\n", "", 0)


def test_function_of_a_notebook_cell(tmp_path: Path) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("import math\ndef root(x):\n    return math.sqrt(x)\ndef fn(x):\n    return root(x) + offset\noffset = 1", cell)
    optimize(cell["fn"], range(10), tmp_path, num_workers=2)
    assert read(tmp_path) == [i**0.5 + 1 for i in range(10)]


def test_function_of_a_module_that_workers_cannot_find(tmp_path: Path) -> None:
    import importlib.util

    (tmp_path / "hidden_module.py").write_text("K = 5\ndef fn(x):\n    return x * K\n")
    spec = importlib.util.spec_from_file_location("hidden_module", tmp_path / "hidden_module.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hidden_module"] = module
    try:
        spec.loader.exec_module(module)
        optimize(module.fn, range(10), tmp_path / "out", num_workers=2)
    finally:
        del sys.modules["hidden_module"]
    assert read(tmp_path / "out") == [5 * i for i in range(10)]


def test_closures_and_lambdas(tmp_path: Path) -> None:
    table = {i: str(i) for i in range(10)}
    for number, method in enumerate(["spawn", "fork", "forkserver"]):
        if method in multiprocessing.get_all_start_methods():
            optimize(lambda i: table[i], range(10), tmp_path / str(number), start_method=method)
            assert read(tmp_path / str(number)) == [str(i) for i in range(10)]


def test_main_is_left_as_it_was(tmp_path: Path) -> None:
    before = dict(vars(sys.modules["__main__"]))
    optimize(lambda i: i, range(10), tmp_path, num_workers=2)
    assert vars(sys.modules["__main__"]) == before


def test_forked_workers_take_what_cannot_be_pickled(tmp_path: Path) -> None:
    lock = threading.Lock()

    def fn(i: int) -> int:
        with lock:
            return i

    optimize(fn, range(10), tmp_path, num_workers=2, start_method="fork")
    assert read(tmp_path) == list(range(10))


def test_large_closures_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = np.zeros(2_000_000)
    optimize(lambda i: float(table[i]), range(10), tmp_path, num_workers=2)
    assert "16.0 MB" in caplog.text
    assert len(read(tmp_path)) == 10


def test_large_inputs_and_samples_go_through(tmp_path: Path) -> None:
    arrays = [np.full(400_000, i, np.int32) for i in range(12)]
    for number, inputs in enumerate([arrays, iter(arrays)]):
        optimize(lambda array: array + 1, inputs, tmp_path / str(number), num_workers=2)
        assert [int(sample[-1]) for sample in read(tmp_path / str(number))] == list(range(1, 13))


def test_starting_does_not_take_longer_with_more_inputs(tmp_path: Path) -> None:
    def first_call(count: int) -> float:
        began = time.perf_counter()

        def fn(i: int) -> None:
            raise StopIteration  # the first input ends the run

        with pytest.raises(WorkerError):
            optimize(fn, range(count), tmp_path / "out", num_workers=2)
        return time.perf_counter() - began

    first_call(10)
    assert first_call(10**9) < 10 * first_call(10) + 1


def test_no_worker_is_alive_afterwards(tmp_path: Path) -> None:
    optimize(lambda i: (i, os.getpid()), range(100), tmp_path, num_workers=2)
    pids = {pid for _, pid in read(tmp_path)}
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# Deaths


@METHODS
@pytest.mark.parametrize("kind", [range, lambda n: iter(range(n))], ids=["range", "iterator"])
def test_a_killed_worker_is_noticed_and_its_input_named(tmp_path: Path, method: str, kind: Any) -> None:
    def fn(i: int) -> int:
        if i == 80:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    with pytest.raises(WorkerError, match=r"killed by SIGKILL.*while working on input 80 \(80\)") as caught:
        optimize(fn, kind(100), tmp_path / "out", num_workers=2, start_method=method, chunk_size=3)
    assert caught.value.exit_code == -signal.SIGKILL  # type: ignore[attr-defined]
    assert "We found the following error" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_leaves_is_noticed(tmp_path: Path) -> None:
    for leave, text in ((lambda: os._exit(0), "exit code 0"), (lambda: os._exit(3), "exit code 3")):

        def fn(name: str, leave: Any = leave) -> str:
            if name == "c":
                leave()
            return name

        with pytest.raises(WorkerError, match=rf"{text} while working on input 2 \('c'\)"):
            optimize(fn, ["a", "b", "c"], tmp_path / "out", start_method="spawn", num_workers=1)
    with pytest.raises(WorkerError, match=r"Failed processing item \d \(\d\): SystemExit: 5"):
        optimize(lambda i: sys.exit(5), range(3), tmp_path / "out", num_workers=2)


def test_a_worker_killed_from_outside_while_it_is_busy(tmp_path: Path) -> None:
    """As the system does it when memory runs out; the old dataset stays whole."""
    optimize(lambda i: i, range(10), tmp_path / "out", chunk_size=3)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").glob("*.*")}
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    def fn(i: int) -> int:
        if i == 60:
            with open(pipe, "w") as file:
                file.write(str(os.getpid()))
            signal.pause()
        return i

    def kill() -> None:
        with open(pipe) as file:
            os.kill(int(file.read()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match="SIGKILL.*input 60"):
        optimize(fn, range(100), tmp_path / "out", mode="append", num_workers=2, chunk_size=3)
    killer.join()
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").glob("*.*")} == before
    optimize(lambda i: i, range(5), tmp_path / "out", mode="overwrite", num_workers=2)
    assert read(tmp_path / "out") == list(range(5))


@METHODS
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, method: str) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    code = """
    import os, signal, sys
    from liveset.write.optimize import optimize
    def fn(i):
        held = os.open(sys.argv[2], os.O_WRONLY)   # open until this process ends
        os.write(held, f"{os.getpid()} ".encode())
        signal.pause()
    optimize(fn, range(2), sys.argv[1], num_workers=2, start_method=sys.argv[3])
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "out"), pipe, method])
    with open(pipe) as file:
        heard = ""
        while heard.count(" ") < 2:
            heard += file.read(1)
        parent.kill()
        parent.wait()
        assert file.read() == ""  # comes back when no process holds the pipe
    assert not (tmp_path / "out").exists()


def test_a_helper_process_of_fn_does_not_hide_a_death(tmp_path: Path) -> None:
    """A child of a worker keeps its pipes open."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    def fn(i: int) -> int:
        if i == 3:
            if os.fork() == 0:
                with open(pipe) as file:
                    file.read()
                os._exit(0)
            os._exit(9)
        return i

    with pytest.raises(WorkerError, match="exit code 9 while working on input 3"):
        optimize(fn, range(10), tmp_path / "out", start_method="spawn", num_workers=1)
    os.close(os.open(pipe, os.O_WRONLY))


def test_two_failures_at_once(tmp_path: Path) -> None:
    def fn(i: int) -> None:
        raise ValueError(i)

    with pytest.raises(WorkerError, match="ValueError"):
        optimize(fn, range(100), tmp_path / "out", num_workers=2)


def test_the_second_worker_fails(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"item 99 \(99\): ZeroDivisionError"):
        optimize(lambda i: 1 / (i - 99), range(100), tmp_path / "out", num_workers=2, chunk_size=4)
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_does_not_fit_in_the_second_worker(tmp_path: Path) -> None:
    optimize(lambda i: [i], range(10), tmp_path)
    with pytest.raises(SchemaConflict, match=r"input 99 \(99\)"):
        optimize(lambda i: [i] if i < 99 else [i, i], range(100), tmp_path, mode="append", num_workers=2)
    assert len(read(tmp_path)) == 10


def test_a_queue_that_stays_empty_does_not_hide_a_death(tmp_path: Path) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    queue.put(1)
    with pytest.raises(WorkerError, match="exit code 4"):
        optimize(lambda i: os._exit(4), queue=queue, output_dir=tmp_path / "out", num_workers=2)
    queue.close()


def test_unpicklable_inputs_are_told(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pickle") as caught:
        optimize(lambda i: 1, [threading.Lock()], tmp_path / "out", start_method="spawn")
    assert "num_workers=1" in "".join(caught.value.__notes__)


# Ctrl-C

INTERRUPTED = """
import os, signal, sys, threading
from liveset.write.optimize import optimize

signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored

def fn(i):
    if i == 40:
        with open(sys.argv[2], "w") as file:
            file.write("busy")
        if int(sys.argv[3]) > 1:
            threading.Event().wait()
        signal.pause()
    return i

try:
    optimize(fn, range(50), sys.argv[1], mode="append", num_workers=int(sys.argv[3]), chunk_size=3, use_checkpoint=sys.argv[4] == "yes")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c(tmp_path: Path, workers: int) -> None:
    out, pipe = tmp_path / "out", str(tmp_path / "pipe")
    optimize(lambda i: i, range(10), out)
    before = {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    os.mkfifo(pipe)
    arguments = [sys.executable, "-c", INTERRUPTED, str(out), pipe, str(workers), "no"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with open(pipe) as file:
        assert file.read() == "busy"
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
    shown, errors = process.communicate(timeout=60)
    assert (shown, errors, process.returncode) == ("interrupted\n", "", 0)
    assert {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert read(out) == list(range(10))


# SIGTERM, which a scheduler sends

TERMINATED = """
import os, signal, sys, threading
from liveset.write.optimize import optimize

out, pipe, workers, method, kind = sys.argv[1:]

def fn(i):
    if i == 40:
        try:
            with open(pipe, "w") as file:
                file.write("busy")  # from here on it may come at any moment
            threading.Event().wait()
        except BaseException:
            if kind != "swallowed":
                raise
    return i

def run():
    optimize(
        fn, range(50), out, mode="append", num_workers=int(workers), start_method=method or None, chunk_size=3,
        use_checkpoint=kind == "checkpoint", verbose=False,
    )

if kind == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    run()
elif kind == "other thread":
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
"""


def terminate(out: Path, pipe: str, workers: int, method: str, kind: str, *, group: bool = False) -> subprocess.CompletedProcess[str]:
    os.mkfifo(pipe)
    arguments = [sys.executable, "-c", TERMINATED, str(out), pipe, str(workers), method, kind]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with open(pipe) as file:
        assert file.read() == "busy"
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)  # which waits for all that hold the pipes: workers, too
    return subprocess.CompletedProcess(arguments, process.returncode, shown, errors)


@pytest.mark.parametrize("group", [False, True], ids=["parent", "group"])
@pytest.mark.parametrize(("workers", "method"), [(1, ""), (2, "spawn"), (2, "fork")])
def test_sigterm_leaves_no_files(tmp_path: Path, workers: int, method: str, group: bool) -> None:
    out = tmp_path / "out"
    optimize(lambda i: i, range(10), out)
    before = {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    done = terminate(out, str(tmp_path / "pipe"), workers, method, "plain", group=group)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
    assert {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_keeps_a_checkpoint(tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    done = terminate(out, str(tmp_path / "pipe"), workers, "", "checkpoint")
    assert done.returncode == -signal.SIGTERM
    calls: list[int] = []

    def fn(i: int) -> int:
        calls.append(i)
        return i

    optimize(fn, range(50), out, mode="append", num_workers=1, chunk_size=3, use_checkpoint=True)
    assert read(out) == list(range(50))
    assert len(calls) < 45
    assert not (out / "_liveset" / "staged").exists()


AWKWARD = """
import os, signal, sys
from liveset.write.optimize import optimize
from liveset.write.staging import Staging

terminate = lambda: os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[2] == "fork":
    os.register_at_fork(after_in_parent=terminate)
else:
    discard = Staging.discard
    Staging.discard = lambda *args: (terminate(), discard(*args))

def fn(i):
    if i == 40:
        raise ValueError
    return i

workers, method = (2, "fork") if sys.argv[2] == "fork" else (1, None)
optimize(fn, range(50), sys.argv[1], num_workers=workers, start_method=method, chunk_size=3, verbose=False)
"""


@pytest.mark.parametrize("when", ["fork", "clean-up"])
def test_sigterm_at_an_awkward_time(tmp_path: Path, when: str) -> None:
    done = run(AWKWARD, tmp_path / "out", when)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert not (tmp_path / "out").exists()


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = terminate(out, str(tmp_path / "pipe"), 1, "", "own handler")
    assert (done.returncode, done.stderr) == (7, "")
    assert not out.exists()  # since sys.exit() unwinds


def test_sigterm_that_fn_swallows_comes_at_the_end(tmp_path: Path) -> None:
    done = terminate(tmp_path / "out", str(tmp_path / "pipe"), 1, "", "swallowed")
    assert done.returncode == -signal.SIGTERM
    assert read(tmp_path / "out") == list(range(50))


def test_sigterm_is_not_touched_outside_the_main_thread(tmp_path: Path) -> None:
    done = terminate(tmp_path / "out", str(tmp_path / "pipe"), 1, "", "other thread")
    assert done.returncode == -signal.SIGTERM
    before = signal.getsignal(signal.SIGTERM)
    optimize(lambda i: i, range(10), tmp_path / "other", num_workers=1)
    assert signal.getsignal(signal.SIGTERM) is before


# A full disk

FULL = """
import resource, signal, sys
from liveset.write.optimize import optimize
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
optimize(lambda i: bytes(1000 if i < 80 else 60_000), range(100), sys.argv[1], num_workers=int(sys.argv[2]), chunk_bytes=20_000, mode="append")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_cannot_be_written(tmp_path: Path, workers: int) -> None:
    optimize(lambda i: bytes(10), range(10), tmp_path)
    before = {file.name for file in tmp_path.rglob("*")}
    done = run(FULL, tmp_path, workers)
    assert done.returncode == 1
    assert "StorageError" in done.stderr.splitlines()[-1]
    assert "input" in done.stderr.splitlines()[-1]
    assert {file.name for file in tmp_path.rglob("*")} == before
    assert len(read(tmp_path)) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(tmp_path: Path, workers: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        optimize(lambda i: bytes(10), range(10), disk / "out")
        before = {file.name for file in disk.rglob("*")}
        with pytest.raises(StorageError, match=r"input \d+.*No space left on device"):
            optimize(lambda i: bytes(10_000), range(300), disk / "out", mode="append", chunk_bytes=50_000, num_workers=workers)
        assert {file.name for file in disk.rglob("*")} == before
        assert len(read(disk / "out")) == 10
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
