"""A dataset on an object store: ``python -m benchmarks.remote [--samples 40000] [--delay 20]``.

SeaweedFS runs on this machine; with ``--delay`` a proxy adds milliseconds to each round trip (and limits the throughput, so compare only
within one run). Samples hold 50 KB of bytes that do not compress, in chunks of 64 MB. Each job runs in a process of its own, a round takes
all of them in turn, each time another one first. Printed are medians over the rounds, and ratios to the floor of the same round: a bare
loop of parallel GETs of the same chunks through obstore that keeps nothing. Numbers are printed, never asserted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOB = 50_000
OLD = Path(os.environ.get("LIVESET_LITDATA_PYTHON", ".venv-litdata/bin/python"))


def sample(number: int) -> dict[str, Any]:
    import numpy as np

    return {"id": f"play-{number}", "label": number % 10, "blob": np.random.default_rng(number).bytes(BLOB)}


def floor(url: str, options: dict[str, Any], _cache: str) -> dict[str, float]:
    """Fetch all chunks with as many requests at once as liveset makes."""
    import obstore
    from obstore.store import from_url

    store: Any = from_url(url, **options)
    begun = time.perf_counter()
    index = json.loads(bytes(obstore.get(store, "index.json").bytes()))
    names = [chunk["filename"] for chunk in index["chunks"]]
    first = time.perf_counter()
    size = len(obstore.get(store, names[0]).bytes())
    one = time.perf_counter() - first
    with ThreadPoolExecutor(5) as pool:
        size += sum(pool.map(lambda name: len(obstore.get(store, name).bytes()), names[1:]))
    return {"all, s": time.perf_counter() - begun, "first, s": one, "MB": size / 1e6}


def ours(url: str, options: dict[str, Any], cache: str) -> dict[str, float]:
    """Iterate with a cold cache, and again."""
    return _iterate(url, options, cache)


def ours_with_small_cache(url: str, options: dict[str, Any], cache: str) -> dict[str, float]:
    """The same where the cache has room for a fifth of 2 GB: most of the time it is full."""
    return _iterate(url, options, cache, max_cache_size="400MB")


def ours_without_cache(url: str, options: dict[str, Any], _cache: str) -> dict[str, float]:
    """Iterate without a cache on disk."""
    return _iterate(url, options, False)


def _iterate(url: str, options: dict[str, Any], cache: str | bool, **limit: Any) -> dict[str, float]:
    import liveset

    _import()
    begun = time.perf_counter()
    dataset = liveset.StreamingDataset(url, storage_options=options, cache_dir=cache, **limit)
    opened = time.perf_counter() - begun
    size, first = 0, 0.0
    for found in dataset:
        size += len(found["blob"])
        first = first or time.perf_counter() - begun
    taken = time.perf_counter() - begun
    result = {"all, s": taken, "first, s": first, "open, s": opened, "MB": size / 1e6}
    if cache:
        begun = time.perf_counter()
        for found in dataset:
            size += len(found["blob"])
        result["again, s"] = time.perf_counter() - begun
    return result


def _import() -> None:
    """Load what takes part, which nobody counts as reading."""
    for name in ("liveset.read.dataset", "liveset.storage.cached", "liveset.storage.remote", "obstore.store"):
        importlib.import_module(name)


def litdata(url: str, options: dict[str, Any], cache: str) -> dict[str, float]:
    """The old tool, which reads the same files; its client is told that an address without TLS is meant."""
    import obstore.store as stores

    made: Any = stores.S3Store

    def make(*arguments: Any, client_options: Any = None, **others: Any) -> Any:
        return made(*arguments, client_options={**(client_options or {}), "allow_http": True}, **others)

    stores.S3Store = make  # type: ignore[misc, assignment]
    import litdata as old

    names = {"endpoint": "endpoint_url", "access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key"}
    client = {names[name]: value for name, value in options.items() if name in names}
    begun = time.perf_counter()
    dataset = old.StreamingDataset(url, storage_options=client, cache_dir=cache, max_pre_download=5)
    size, first = 0, 0.0
    for found in dataset:
        size += len(found["blob"])
        first = first or time.perf_counter() - begun
    return {"all, s": time.perf_counter() - begun, "first, s": first, "MB": size / 1e6}


def lookups(url: str, options: dict[str, Any], cache: str) -> dict[str, float]:
    """Single samples by key, each from another chunk at first, then anywhere."""
    import liveset

    _import()
    begun = time.perf_counter()
    dataset = liveset.StreamingDataset(url, storage_options=options, cache_dir=cache)
    opened = time.perf_counter() - begun
    taken = []
    for number in [7, 8, 9, len(dataset) - 1, len(dataset) - 2]:
        begun = time.perf_counter()
        assert dataset[f"play-{number}"]["label"] == number % 10
        taken.append(time.perf_counter() - begun)
    return {"open, s": opened, "first key, s": taken[0], "next, s": min(taken[1:3]), "other chunk, s": taken[3]}


def commit(url: str, options: dict[str, Any], cache: str) -> dict[str, float]:
    """One key at a time, in one process that has committed before."""
    import liveset

    place = liveset.Place(url, storage_options=options, cache_dir=cache)
    taken = []
    for number in (11, 12, 13):
        begun = time.perf_counter()
        with liveset.dataset_update(place) as update:
            update[f"play-{number}"] = sample(number)
            update.patch(f"play-{number}", label=-number)
            update.commit()
        taken.append(time.perf_counter() - begun)
    return {"first commit, s": taken[0], "next commit, s": taken[-1]}


JOBS: dict[str, Callable[[str, dict[str, Any], str], dict[str, float]]] = {
    "floor": floor,
    "ours": ours,
    "full cache": ours_with_small_cache,
    "uncached": ours_without_cache,
    "litdata": litdata,
    "lookups": lookups,
    "commit": commit,
}


def run(job: str, url: str, options: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run a job in a process of its own."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    python = str(OLD) if job == "litdata" else sys.executable
    command = [python, "-m", "benchmarks.remote", "--job", job, "--url", url, "--options", json.dumps(options), "--dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{job}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=40_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--delay", type=float, default=0, help="milliseconds that are added to each round trip")
    options.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    options.add_argument("--jobs", default=",".join(JOBS))
    options.add_argument("--job", help=argparse.SUPPRESS)
    options.add_argument("--url", help=argparse.SUPPRESS)
    options.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.job:
        print(json.dumps(JOBS[given.job](given.url, given.options, str(given.dir))))
        return

    from tests.support import services

    import liveset

    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        server = services.start_seaweedfs(folder / "server")
        proxy = services.start_proxy(folder / "proxy", server.root.endpoint) if given.delay else None
        try:
            place = server.fresh()
            target = liveset.Place(place.url, storage_options=place.options, cache_dir=str(folder / "write"))
            liveset.optimize(sample, range(given.samples), target, key_fn="id", verbose=False, num_workers=2)
            if proxy is not None:
                proxy.set(delay_ms=given.delay)
                place = place.at(proxy.endpoint)
            jobs = [job for job in given.jobs.split(",") if job != "litdata" or OLD.exists()]
            found: dict[str, list[dict[str, float]]] = {job: [] for job in jobs}
            for turn in range(given.rounds):
                for job in jobs[turn % len(jobs) :] + jobs[: turn % len(jobs)]:
                    found[job].append(run(job, place.url, place.options, folder))
        finally:
            if proxy is not None:
                proxy.stop()
            server.stop()
    print(f"\n{given.samples:,} samples of 50 KB on SeaweedFS, {given.delay:g} ms added, medians of {given.rounds} rounds")
    for job, results in found.items():
        told = [f"{what} {statistics.median(result[what] for result in results):.3g}" for what in results[0]]
        if "floor" in found and "all, s" in results[0]:
            ratios = [mark["all, s"] / result["all, s"] for mark, result in zip(found["floor"], results, strict=True)]
            told.append(f"{statistics.median(ratios):.2f} of the floor's speed")
        print(f"{job:16} {'  '.join(told)}")


if __name__ == "__main__":
    main()
