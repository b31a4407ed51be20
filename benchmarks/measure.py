"""One job of one peer in a process of its own: ``python -m benchmarks.measure JOB PEER KIND PATH COUNT [WORKERS]`` prints JSON."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.kinds import KINDS, Kind
from benchmarks.peers import PEERS, Peer


def write(peer: Peer, kind: Kind, path: Path, count: int, workers: int) -> float:
    """Microseconds per sample, start of the tool and its workers included, imports not."""
    shutil.rmtree(path, ignore_errors=True)
    peer.write(path, kind, 1, 1)  # imports, and whatever else happens once
    shutil.rmtree(path)
    started = time.perf_counter()
    peer.write(path, kind, count, workers)
    return (time.perf_counter() - started) / count * 1e6


def iterate(peer: Peer, kind: Kind, path: Path, count: int) -> float:
    """Median of three passes over a warm cache; microseconds per sample."""
    use, passes = kind.use, []
    for _ in range(4):
        started, seen = time.perf_counter(), 0
        for sample in peer.iterate(path, kind):
            use(sample)
            seen += 1
        passes.append((time.perf_counter() - started) / count * 1e6)
        assert seen == count, f"{seen} samples of {count}"
    return statistics.median(passes[1:])


def lookup(peer: Peer, kind: Kind, path: Path, count: int) -> float:
    """Median of single lookups at random positions; microseconds."""
    get, use = peer.opened(path, kind), kind.use
    positions = np.random.default_rng(1).integers(0, count, kind.lookups).tolist()
    for position in positions[:200]:
        use(get(position))
    clock, times, limit = time.perf_counter_ns, [], time.perf_counter() + 10
    for position in positions:
        started = clock()
        use(get(position))
        times.append(clock() - started)
        if time.perf_counter() > limit:
            break
    return statistics.median(times) / 1e3


def main() -> None:
    job, peer_name, kind_name, path, count, *more = sys.argv[1:]
    peer, kind = PEERS[peer_name](), KINDS[kind_name]
    if job == "write":
        figure = write(peer, kind, Path(path), int(count), int(more[0]))
    else:
        figure = {"iterate": iterate, "lookup": lookup}[job](peer, kind, Path(path), int(count))
    print(json.dumps(figure))


if __name__ == "__main__":
    main()
