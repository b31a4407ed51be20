"""Lookups by key and building keys, beside LMDB and litData: ``python -m benchmarks.keys [--samples 1000000 | --keys 10000000]``.

Each job runs in a process of its own, over a warm cache; numbers are printed, never asserted. With ``--samples`` a sample is a dict of a
text id, an int and about 1 KB of bytes; with ``--keys`` it has nothing but its id, so that very many fit the disk. Every lookup decodes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.jobs import peak
from benchmarks.keyed import Sample, name, pack, sample, tiny, unpack
from benchmarks.run import ENVIRONMENTS, ROOT

Make = Callable[[int], Sample]
_MAKES: dict[str, Make] = {"sample": sample, "tiny": tiny}


def times(get: Callable[[str], Any], keys: list[str]) -> dict[str, float]:
    """Return the median and the 99th percentile of single lookups."""
    taken = []
    for key in keys:
        started = time.perf_counter_ns()
        get(key)
        taken.append((time.perf_counter_ns() - started) / 1e3)
    return {"lookup p50, us": statistics.median(taken), "lookup p99, us": statistics.quantiles(taken, n=100)[98]}


def chosen(count: int, lookups: int) -> list[str]:
    """Return keys of which each is equally likely."""
    return [name(i) for i in random.Random(1).choices(range(count), k=lookups)]


def memory(of: str = "RssAnon") -> float:
    """Return the memory of this process that is not a mapped file (or ``RssFile``: that is one), in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(of))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# --- jobs: each prints its figures as JSON -------------------------------------------------------------------------------


def ours_write(path: Path, count: int, make: Make) -> dict[str, float]:
    """Write the keyed dataset."""
    import liveset

    started = time.perf_counter()
    liveset.optimize(fn=make, inputs=range(count), output_dir=path, key_fn="id", num_workers=1, verbose=False)
    return {"write keyed, s": time.perf_counter() - started}


def ours_open(path: Path, _count: int, _make: Make) -> dict[str, float]:
    """Open the dataset and look up one key, after the imports."""
    import liveset

    liveset.StreamingDataset(path).info()
    started = time.perf_counter()
    liveset.StreamingDataset(path).get_by_key(name(1))
    return {"first lookup, ms": (time.perf_counter() - started) * 1e3}


def ours_lookup(path: Path, count: int, _make: Make) -> dict[str, float]:
    """Look up single keys and many at once."""
    import liveset

    liveset.StreamingDataset(path).info()  # imports
    keys = chosen(count, 20_000)
    before, mapped = memory(), memory("RssFile")
    dataset = liveset.StreamingDataset(path)
    for key in keys[:2_000]:
        dataset[key]
    figures = times(dataset.get_by_key, keys)
    figures["memory of the handle, MB"] = memory() - before
    figures["files that it has mapped, MB"] = memory("RssFile") - mapped
    started = time.perf_counter()
    found = dataset.get_by_keys(keys[:10_000])
    figures["10,000 at once, us per key"] = (time.perf_counter() - started) / 10_000 * 1e6
    assert found[0]["id"] == keys[0]
    return figures


def ours_build(path: Path, _count: int, make: Make) -> dict[str, float]:
    """Build the keys of a dataset that has them already, from its samples."""
    import liveset

    warm = path.with_name("warm")
    ours_write(warm, 10, make)  # imports
    liveset.build_keys_index(warm, "id", overwrite=True, verbose=False)
    before, started = peak(anew=True), time.perf_counter()
    liveset.build_keys_index(path, "id", overwrite=True, verbose=False)
    seconds = time.perf_counter() - started
    return {"build keys, s": seconds, "build keys, peak MB": peak() - before}


def lmdb_write(path: Path, count: int, make: Make) -> dict[str, float]:
    """Write the samples into LMDB under their keys."""
    import lmdb

    started = time.perf_counter()
    with lmdb.open(str(path), map_size=1 << 36, sync=False) as env, env.begin(write=True) as transaction:
        for i in range(count):
            row = make(i)
            transaction.put(row["id"].encode(), pack(row))
    with lmdb.open(str(path), map_size=1 << 36) as env:
        env.sync(True)
    return {"write keyed, s": time.perf_counter() - started}


def lmdb_lookup(path: Path, count: int, _make: Make) -> dict[str, float]:
    """Look up single keys; the value is decoded to the same dict."""
    import lmdb

    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin(buffers=True) as transaction:

        def get(key: str) -> Sample:
            return unpack(transaction.get(key.encode()))

        keys = chosen(count, 20_000)
        for key in keys[:2_000]:
            get(key)
        return times(get, keys)


def litdata_lookup(path: Path, count: int, _make: Make) -> dict[str, float]:
    """Look up single keys in the dataset that liveset wrote."""
    import litdata

    dataset = litdata.StreamingDataset(str(path))
    keys = chosen(count, 60)
    dataset[keys[0]]
    return times(dataset.get_by_key, keys[1:])


JOBS = {job.__name__: job for job in (ours_write, ours_open, ours_lookup, ours_build, lmdb_write, lmdb_lookup, litdata_lookup)}


def run(job: str, path: Path, count: int, make: str, rounds: int = 1) -> dict[str, float]:
    """Run a job in new processes of its peer's environment, and return the medians."""
    python = ENVIRONMENTS.get(job.partition("_")[0], Path(sys.executable))
    if not python.exists():
        return {}
    command = [str(python), "-m", "benchmarks.keys", "--job", job, str(path), str(count), make]
    taken: list[dict[str, float]] = []
    for _ in range(rounds):
        done = subprocess.run(command, check=False, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{job}\n{done.stderr[-2000:]}")
        taken.append(json.loads(done.stdout.splitlines()[-1]))
    return {what: statistics.median(figures[what] for figures in taken) for what in taken[0]}


def report(folder: Path, count: int, make: str, rounds: int) -> Iterator[str]:
    """Yield lines of text as the figures come in."""
    ours, peer = folder / "ours", folder / "lmdb"
    jobs = [("ours_write", ours, 1), ("lmdb_write", peer, 1), ("ours_open", ours, rounds), ("ours_lookup", ours, rounds)]
    jobs += [("lmdb_lookup", peer, rounds), ("ours_build", ours, 1)]
    if make == "sample":  # of many keys it reads a whole file for each lookup
        jobs.insert(-1, ("litdata_lookup", ours, 1))
    for job, path, times_run in jobs:
        for what, figure in run(job, path, count, make, times_run).items():
            yield f"{job.partition('_')[0]:<8} {what:<28} {figure:>12,.2f}"


def main() -> None:
    """Run one job, or all of them."""
    parser = argparse.ArgumentParser(prog="benchmarks.keys", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, help="so many samples that hold their id alone, instead")
    parser.add_argument("--rounds", type=int, default=3, help="medians of reading are taken over this many processes")
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job, path, count, make = arguments.job
        print(json.dumps(JOBS[job](Path(path), int(count), _MAKES[make])))
        return
    count, make = (arguments.keys, "tiny") if arguments.keys else (arguments.samples, "sample")
    print(f"{count:,} keyed samples {'of an id alone' if arguments.keys else 'of about 1 KB'}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        for line in report(Path(folder), count, make, arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
