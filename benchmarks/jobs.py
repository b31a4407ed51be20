"""Runs the jobs of ``benchmarks.keyed``: each in a process of its own, on a fresh copy of the same dataset, with a warm cache."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.keyed import NEW, PEERS, NotAvailableError, edited, name
from benchmarks.run import ENVIRONMENTS, ROOT

Figures = dict[str, float]
COLUMNS = ("call, s", "synced, s", "times copy", "written, MB", "peak, MB")
_WARM = 100  # samples of the small dataset on which each process does its job once before


def installed(peer: str) -> Path | None:
    """Return the Python that runs a peer, if there is one."""
    python = ENVIRONMENTS.get(peer.partition(",")[0], Path(sys.executable))
    return python if python.exists() else None


class Bench:
    """Datasets of a size, and the jobs on copies of them."""

    def __init__(self, scratch: Path, samples: int) -> None:
        self.scratch, self.samples = scratch / str(samples), samples
        self.scratch.mkdir(parents=True, exist_ok=True)

    def measure(self, job: str, peer: str, numbers: Sequence[int]) -> Figures | None:
        """Run a job once; None when this version of the peer cannot do it."""
        copies = [self.scratch / "copy", self.scratch / "warm"]
        for source, copy in zip(self._datasets(peer), copies, strict=True):
            clone(source, copy, share=PEERS[peer].shares)
        try:
            return _run(job, peer, copies, numbers)
        finally:
            for copy in copies:
                shutil.rmtree(copy)

    def rounds(self, job: str, peers: Sequence[str], numbers: Sequence[Sequence[int]]) -> dict[str, list[Figures]]:
        """Run a job once for each list of samples; peers take turns, each round another one first, so that a busy minute meets all."""
        taken: dict[str, list[Figures]] = {peer: [] for peer in peers}
        for peer in peers:
            self._datasets(peer)
        for turn, chosen in enumerate(numbers):
            for peer in [*peers[turn % len(peers) :], *peers[: turn % len(peers)]]:
                if (figures := self.measure(job, peer, chosen)) is not None:
                    taken[peer].append(figures)
        return taken

    def _datasets(self, peer: str) -> list[Path]:
        """Return the dataset that a peer works on copies of, and a small one; written once."""
        owner = "ours" if peer == "copy" else peer
        paths = []
        for count in (self.samples, _WARM):
            paths.append(self.scratch / f"{owner}-{count}")
            if not paths[-1].exists():
                _run("write", owner, paths[-1:], range(count))
        return paths


def clone(source: Path, target: Path, *, share: bool) -> None:
    """Copy a dataset; what is copied byte for byte is synced, so that nobody has to wait for it later."""
    shutil.copytree(source, target, copy_function=os.link if share else shutil.copyfile)
    if not share:
        _sync(file for file in target.rglob("*") if file.is_file())


def _run(job: str, peer: str, paths: Sequence[Path], numbers: Sequence[int]) -> Figures | None:
    python = installed(peer)
    assert python is not None
    command = [str(python), "-m", "benchmarks.jobs", job, peer, *map(str, paths)]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, input=json.dumps(list(numbers)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job}: {peer}\n{done.stderr[-2000:]}")
    figures: Figures | None = json.loads(done.stdout.splitlines()[-1])
    return figures


# --- in the process of a job ---------------------------------------------------------------------------------------------


def _job(job: str, peer: str, path: Path, warm: Path | None, numbers: list[int]) -> Figures | None:
    tool = PEERS[peer]
    if warm is None:
        tool.write(path, numbers)
        _sync(_files(path).values())
        return {}
    try:
        few = {"append": [_WARM], "upsert": [1, _WARM]}.get(job, [1])
        _call(job, peer, warm, few, **_prepared(job, peer, warm, few))  # imports, and whatever else happens once
    except NotAvailableError:
        return None
    ready = _prepared(job, peer, path, numbers)
    idle, before, wrote = peak(anew=True), _files(path), _written_bytes()
    started = time.perf_counter()
    more = _call(job, peer, path, numbers, **ready)
    called = time.perf_counter()
    new = [file for number, file in _files(path).items() if number not in before]
    # What a tool leaves to the operating system is paid here
    _sync(new if tool.shares else _files(path).values())
    synced = time.perf_counter() - started
    written = sum(file.stat().st_size for file in new) if tool.shares else _written_bytes() - wrote
    figures = {"call, s": called - started, "synced, s": synced, "written, MB": written / 1e6, "peak, MB": peak() - idle, **(more or {})}
    _check(job, peer, path, numbers)
    return figures


def _call(job: str, peer: str, path: Path, numbers: list[int], **ready: Path) -> dict[str, float] | None:
    result: dict[str, float] | None = getattr(PEERS[peer], job)(path, numbers, **ready)
    return result


def _prepared(job: str, peer: str, path: Path, numbers: list[int]) -> dict[str, Path]:
    """Make what a job needs beside its dataset, and return it as arguments."""
    if job == "diff":
        PEERS[peer].replace(path, numbers)
    if job != "patch":
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = path.with_suffix(".parquet")
    pq.write_table(pa.table({"id": [name(i) for i in numbers], "label": [NEW] * len(numbers)}), table)
    return {"table": table}


def _check(job: str, peer: str, path: Path, numbers: list[int]) -> None:
    """Raise when an edit did not happen."""
    for i in (numbers[0], numbers[-1]) if peer != "copy" else ():
        try:
            found = PEERS[peer].read(path, i)
        except NotAvailableError:
            return
        if found != (None if job == "delete" else edited(i)):
            raise RuntimeError(f"after {job} of {peer}: {found!r:.200} under {name(i)}")


def _files(path: Path) -> dict[int, Path]:
    return {file.stat().st_ino: file for file in path.rglob("*") if file.is_file()}


def _sync(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def peak(*, anew: bool = False) -> float:
    """Return the most memory that this process or a worker of it had, mapped files included, in MB; ``anew``: from now on, where it can."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    own, workers = (resource.getrusage(who).ru_maxrss / scale for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status = Path("/proc/self/status")
    if status.exists():  # there the figure above begins with that of the process that started this one
        if anew:
            Path("/proc/self/clear_refs").write_text("5")
        own = next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return max(own, workers)


def _written_bytes() -> int:
    """Return the bytes that this process had the kernel write to the disk, where it counts them."""
    counters = Path("/proc/self/io")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), 0)


# --- tables --------------------------------------------------------------------------------------------------------------


@contextmanager
def scratch(arguments: Namespace) -> Iterator[Path]:
    """Yield a directory for the datasets, and say what is measured on."""
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        print(f"{os.cpu_count()} cores, medians of {arguments.rounds} rounds", flush=True)
        yield Path(folder)


def parser(name: str, doc: str | None, *, rounds: int, samples: int = 1_000_000) -> ArgumentParser:
    """Return a parser with the options of all these benchmarks."""
    made = ArgumentParser(prog=f"benchmarks.{name}", description=doc)
    made.add_argument("--samples", type=int, default=samples)
    made.add_argument("--rounds", type=int, default=rounds, help="medians are taken over this many rounds")
    made.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    return made


def print_table(title: str, taken: Mapping[str, list[Figures]], base: str = "copy", first: Sequence[str] = COLUMNS) -> None:
    """Print the medians of each peer, and of the seconds with the lowest and the highest."""
    others = dict.fromkeys(what for rounds in taken.values() for figures in rounds for what in figures if what not in first)
    columns = [column for column in [*first, *others] if column != f"times {base}" or taken.get(base)]
    lines = [["", *columns]]
    for peer, rounds in taken.items():
        cells = []
        for column in columns:
            values = [figures[column] for figures in rounds if column in figures]
            if column == f"times {base}" and rounds:
                floor = statistics.median(figures[first[1]] for figures in taken[base])
                cells.append(f"{statistics.median(figures[first[1]] for figures in rounds) / floor:.2f}x")
            elif not values:
                cells.append("-" if rounds else "not available")
            else:
                spread = f" ({_told(min(values))}..{_told(max(values))})" if column in first[:2] and len(values) > 1 else ""
                cells.append(f"{_told(statistics.median(values))}{spread}")
        lines.append([peer, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]), flush=True)


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def main() -> None:
    job, peer, path, *warm = sys.argv[1:]
    print(json.dumps(_job(job, peer, Path(path), Path(warm[0]) if warm else None, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
