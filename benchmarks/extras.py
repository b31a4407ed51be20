"""Ours alone: import time, opening a large dataset, a tiny job, and the memory of a write."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

_OPEN = """
import sys, time, liveset
liveset.StreamingDataset(sys.argv[2])   # imports, once
started = time.perf_counter()
assert len(liveset.StreamingDataset(sys.argv[1])) == 20_000 * int(sys.argv[3])
print((time.perf_counter() - started) * 1e3)
"""
_SMALL_JOB = """
import sys, time
from benchmarks.kinds import small
import liveset
started = time.perf_counter()
liveset.optimize(fn=small, inputs=range(1000), output_dir=sys.argv[1], verbose=False)
read = sum(1 for _ in liveset.StreamingDataset(sys.argv[1]))
assert read == 1000
print((time.perf_counter() - started) * 1e3)
"""
_MEMORY = """
import resource, sys
from benchmarks.kinds import blob
import liveset
if __name__ == "__main__":
    scale = 2**20 if sys.platform == "darwin" else 2**10
    liveset.optimize(fn=blob, inputs=range(100), output_dir=sys.argv[1] + "-first", num_workers=1, verbose=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    liveset.optimize(fn=blob, inputs=range(int(sys.argv[2])), output_dir=sys.argv[1], num_workers=int(sys.argv[3]), verbose=False)
    after = [resource.getrusage(who).ru_maxrss / scale for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(max(after[0], after[1]) - before)
"""


def report(scratch: Path) -> None:
    """Print the figures."""
    bare, ours = _seconds("pass"), _seconds("import liveset")
    print(f"\nimport liveset: {(ours - bare) * 1e3:.0f} ms beside the {bare * 1e3:.0f} ms of Python itself")
    large, small, per_chunk = _many_chunks(scratch)
    print(f"open a dataset of 20,000 chunks: {_median(_OPEN, large, small, per_chunk):.0f} ms")
    print(f"optimize and read 1,000 small samples, first call: {_median(_SMALL_JOB, fresh=scratch / 'tiny'):.0f} ms")
    for workers in (1, 2):
        memory = [_run(_MEMORY, scratch / f"memory-{workers}-{count}", count, workers) for count in (5_000, 20_000)]
        told = " and ".join(f"{megabytes:.0f} MB for {size}" for megabytes, size in zip(memory, ("250 MB", "1 GB"), strict=True))
        print(f"peak memory of a write with {workers} workers, largest process above an idle one: {told}")


def _many_chunks(scratch: Path) -> tuple[Path, Path, int]:
    """Return a dataset whose index lists 20,000 chunks (without their files, which opening does not touch), and a small one."""
    import liveset
    from benchmarks.kinds import small
    from liveset.format.index import ChunkRecord, Index

    path = scratch / "one"
    liveset.optimize(fn=small, inputs=range(10), output_dir=path, num_workers=1, verbose=False)
    index = Index.parse((path / "index.json").read_bytes())
    first = index.chunks[0]
    records = tuple(
        ChunkRecord(f"chunk-0-{i}-{i:016x}.bin", first.samples, first.size, id=f"{i:016x}", check=first.check, head_check=first.head_check)
        for i in range(20_000)
    )
    large = scratch / "large"
    large.mkdir()
    (large / "index.json").write_bytes(index.replace(chunks=records).to_bytes())
    assert len(json.loads((large / "index.json").read_bytes())["chunks"]) == len(records)
    return large, path, first.samples


def _seconds(code: str) -> float:
    times = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _median(code: str, *arguments: object, fresh: Path | None = None) -> float:
    return statistics.median(_run(code, *([f"{fresh}-{number}"] if fresh else arguments)) for number in range(5))


def _run(code: str, *arguments: object) -> float:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)
