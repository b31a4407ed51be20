"""Lookups by key, building keys and keyed appends, beside LMDB and litData: ``python -m benchmarks.keys [--samples 1000000]``.

Each job runs in a process of its own, over a warm cache; numbers are printed, never asserted. A sample is a dict of a text id, an int and
about 1 KB of bytes; every lookup decodes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.run import ENVIRONMENTS, ROOT

_WORD = struct.Struct("<IIq")


def sample(i: int) -> dict[str, Any]:
    """Return sample number i."""
    return {"id": name(i), "n": i, "raw": i.to_bytes(8, "little") * 125}


def name(i: int) -> str:
    """Return the key of sample number i."""
    return f"entity-{i * 7919 % 1_000_000_007:012d}"


def p50(get: Callable[[str], Any], keys: list[str]) -> float:
    """Return the median of single lookups in microseconds."""
    times = []
    for key in keys:
        started = time.perf_counter_ns()
        get(key)
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3


def chosen(count: int, lookups: int) -> list[str]:
    """Return random keys."""
    return [name(i) for i in random.Random(1).choices(range(count), k=lookups)]


def memory() -> float:
    """Return the memory of this process that is not a mapped file, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- jobs: each prints its figures as JSON -------------------------------------------------------------------------------


def ours_write(path: Path, count: int) -> dict[str, float]:
    """Write the keyed dataset."""
    import liveset

    started = time.perf_counter()
    liveset.optimize(fn=sample, inputs=range(count), output_dir=path, key_fn="id", num_workers=1, verbose=False)
    return {"write keyed, s": time.perf_counter() - started}


def ours_lookup(path: Path, count: int) -> dict[str, float]:
    """Look up single keys and many at once."""
    import liveset

    liveset.StreamingDataset(path).info()  # imports
    before = memory()
    started = time.perf_counter()
    dataset = liveset.StreamingDataset(path)
    dataset[name(1)]
    first = time.perf_counter() - started
    keys = chosen(count, 20_000)
    for key in keys[:2_000]:
        dataset[key]
    single = p50(dataset.get_by_key, keys)
    started = time.perf_counter()
    dataset.get_by_keys(keys[:10_000])
    bulk = (time.perf_counter() - started) / 10_000 * 1e6
    held = memory() - before
    return {"first lookup, ms": first * 1e3, "lookup p50, us": single, "10,000 at once, us per key": bulk, "memory of the handle, MB": held}


def ours_build(path: Path, _: int) -> dict[str, float]:
    """Build the keys of a dataset that has them already, from its samples."""
    import liveset

    started = time.perf_counter()
    liveset.build_keys_index(path, "id", overwrite=True, verbose=False)
    return {"build keys, s": time.perf_counter() - started}


def ours_append(path: Path, count: int) -> dict[str, float]:
    """Append 10,000 samples, with keys."""
    import liveset

    liveset.optimize(fn=sample, inputs=range(count, count + 1), output_dir=path, mode="append", num_workers=1, verbose=False)  # imports
    started = time.perf_counter()
    liveset.optimize(fn=sample, inputs=range(count + 1, count + 10_001), output_dir=path, mode="append", num_workers=1, verbose=False)
    return {"append 10,000, s": time.perf_counter() - started}


def lmdb_write(path: Path, count: int) -> dict[str, float]:
    """Write the samples into LMDB under their keys."""
    import lmdb

    started = time.perf_counter()
    with lmdb.open(str(path), map_size=1 << 34, sync=False) as env, env.begin(write=True) as transaction:
        for i in range(count):
            row = sample(i)
            key = row["id"].encode()
            transaction.put(key, _WORD.pack(len(key), len(row["raw"]), row["n"]) + key + row["raw"])
        env.sync(True)
    return {"write keyed, s": time.perf_counter() - started}


def lmdb_lookup(path: Path, count: int) -> dict[str, float]:
    """Look up single keys; the value is decoded to the same dict."""
    import lmdb

    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin(buffers=True) as transaction:

        def get(key: str) -> dict[str, Any]:
            value = transaction.get(key.encode())
            a, b, n = _WORD.unpack_from(value)
            return {"id": str(value[16 : 16 + a], "utf-8"), "n": n, "raw": bytes(value[16 + a : 16 + a + b])}

        keys = chosen(count, 20_000)
        for key in keys[:2_000]:
            get(key)
        return {"lookup p50, us": p50(get, keys)}


def litdata_lookup(path: Path, count: int) -> dict[str, float]:
    """Look up single keys in the dataset that liveset wrote."""
    import litdata

    dataset = litdata.StreamingDataset(str(path))
    keys = chosen(count, 60)
    dataset[keys[0]]
    return {"lookup p50, us": p50(dataset.get_by_key, keys[1:])}


JOBS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    job.__name__: job for job in (ours_write, ours_lookup, ours_build, ours_append, lmdb_write, lmdb_lookup, litdata_lookup)
}


def run(job: str, path: Path, count: int) -> dict[str, float]:
    """Run a job in a new process of its peer's environment."""
    python = ENVIRONMENTS.get(job.partition("_")[0], Path(sys.executable))
    if not python.exists():
        return {}
    command = [str(python), "-m", "benchmarks.keys", "--job", job, str(path), str(count)]
    done = subprocess.run(command, check=False, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job}\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(count: int) -> Iterator[str]:
    """Yield lines of text as the figures come in."""
    with tempfile.TemporaryDirectory(prefix="liveset-bench-") as folder:
        ours, peer, small = Path(folder) / "ours", Path(folder) / "lmdb", Path(folder) / "small"
        for job, path in [
            ("ours_write", ours),
            ("lmdb_write", peer),
            ("ours_lookup", ours),
            ("lmdb_lookup", peer),
            ("litdata_lookup", ours),
            ("ours_build", ours),
        ]:
            for what, figure in run(job, path, count).items():
                yield f"{job.partition('_')[0]:<8} {what:<28} {figure:>12,.2f}"
        shutil.rmtree(peer, ignore_errors=True)
        run("ours_write", small, count // 10)
        few, many = run("ours_append", small, count // 10), run("ours_append", ours, count)
        for what, figure in few.items():
            yield f"ours     {what} to {count // 10:,}{figure:>14,.2f}"
            yield f"ours     {what} to {count:,}{many[what]:>14,.2f}   {many[what] / figure:.2f}x"


def main() -> None:
    """Run one job, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--job", nargs=3, metavar=("JOB", "PATH", "COUNT"))
    arguments = parser.parse_args()
    if arguments.job:
        job, path, count = arguments.job
        print(json.dumps(JOBS[job](Path(path), int(count))))
        return
    print(f"{arguments.samples:,} keyed samples of about 1 KB, {os.cpu_count()} cores")
    for line in report(arguments.samples):
        print(line, flush=True)


if __name__ == "__main__":
    main()
