"""Single samples by key on an object store: ``python -m benchmarks.remotekeys [--keys 40000 1000000 10000000] [--delay 20]``.

SeaweedFS runs on this machine, behind a proxy that counts requests and adds ``--delay`` milliseconds to each round trip. Samples hold an id
and some bytes, 100 together, in chunks of 16 MB. Each job runs in a process of its own with an empty cache, and its figures are those after
opening the dataset. Numbers are printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.keyed import name
from benchmarks.run import ROOT

Counts = Callable[[], tuple[int, int]]


def sample(number: int) -> dict[str, Any]:
    return {"id": name(number), "raw": number.to_bytes(8, "little") * 9}


def look(url: str, options: dict[str, Any], cache: Any, count: int, counts: Counts) -> list[tuple[str, int, int, float]]:
    """Look up keys in an open dataset; return what was done, its requests, bytes and seconds."""
    import liveset

    dataset = liveset.StreamingDataset(url, storage_options=options, cache_dir=cache)
    step = count // 7
    jobs: list[tuple[str, Callable[[], Any]]] = [
        ("first key", lambda: dataset[name(step)]),
        ("key in another chunk", lambda: dataset[name(3 * step)]),
        ("key in the same chunk", lambda: dataset[name(3 * step + 9)]),
        ("the same key", lambda: dataset[name(3 * step)]),
        ("8 keys in one chunk", lambda: dataset.get_by_keys([name(3 * step + i) for i in range(10, 18)])),
    ]
    found = []
    for what, job in jobs:
        requests, size = counts()
        begun = time.perf_counter()
        job()
        taken = time.perf_counter() - begun
        now = counts()
        found.append((what, now[0] - requests, now[1] - size, taken))
    return found


def run(url: str, options: dict[str, Any], admin: str, cache: Path, count: int) -> None:
    from tests.support.services import ask

    def counts() -> tuple[int, int]:
        stats = json.loads(ask(f"{admin}/stats"))
        return stats["requests"], stats["bytes_down"]

    import liveset

    liveset.StreamingDataset(url, storage_options=options, cache_dir=False)[0]  # imports
    for kept in (False, str(cache)):
        for what, requests, size, seconds in look(url, options, kept, count, counts):
            print(f"{'cache' if kept else 'no cache':9}{what:24}{requests:4} requests {size / 1e3:10,.1f} KB {1e3 * seconds:9,.1f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="benchmarks.remotekeys", description=__doc__)
    options.add_argument("--keys", type=int, nargs="+", default=[40_000, 1_000_000])
    options.add_argument("--delay", type=float, nargs="+", default=[0, 20], help="milliseconds that are added to each round trip")
    options.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    options.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.job:
        url, access, admin, cache, count = given.job
        run(url, json.loads(access), admin, Path(cache), int(count))
        return

    from tests.support import services

    import liveset

    with tempfile.TemporaryDirectory(dir=given.dir) as made:
        folder = Path(made)
        server = services.start_seaweedfs(folder / "server")
        proxy = services.start_proxy(folder / "proxy", server.root.endpoint)
        try:
            for count in given.keys:
                place = server.fresh()
                target = liveset.Place(place.url, storage_options=place.options, cache_dir=False)
                liveset.optimize(sample, range(count), target, key_fn="id", chunk_bytes="16MB", num_workers=2, verbose=False)
                for delay in given.delay:
                    proxy.reset()
                    proxy.set(delay_ms=delay)
                    print(f"\n{count:,} keys, {delay:g} ms added", flush=True)
                    far = place.at(proxy.endpoint)
                    job = [far.url, json.dumps(far.options), proxy.admin, str(folder / "cache"), str(count)]
                    subprocess.run([sys.executable, "-m", "benchmarks.remotekeys", "--job", *job], cwd=ROOT, check=True)
                    shutil.rmtree(folder / "cache", ignore_errors=True)
        finally:
            proxy.stop()
            server.stop()


if __name__ == "__main__":
    main()
