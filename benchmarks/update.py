"""Replacing samples by key, beside copying the touched chunk files: ``python -m benchmarks.update [--samples 1000000]``.

The copy writes each chunk file that an update touches to a new, synced file beside it: the least that an update of immutable files can
cost. Both run in turn over a warm cache, and medians are printed; nothing is asserted. A sample is a dict of a text id, an int and about
1 KB of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.keys import memory, name, ours_write, sample


def copy(path: Path, names: list[str]) -> float:
    """Copy chunk files as an update would have to, and return the seconds that it took."""
    started = time.perf_counter()
    copies = []
    for old in names:
        copies.append(path / f"{old}.copy")
        # Written, not copied inside the kernel: some file systems only share the blocks then, and no byte reaches the disk
        copies[-1].write_bytes((path / old).read_bytes())
        with copies[-1].open("rb+") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    for done in copies:
        done.unlink()
    return seconds


def update(path: Path, numbers: list[int], turn: int) -> tuple[float, float, list[str]]:
    """Replace samples; return the seconds of the whole update, of its commit, and the files that were touched."""
    from liveset.edit.session import dataset_update
    from liveset.snapshot import open_snapshot
    from liveset.storage import open_store

    store = open_store(path)
    before = open_snapshot(store).index.chunks
    started = time.perf_counter()
    with dataset_update(path) as changes:
        for i in numbers:
            changes[name(i)] = {**sample(i), "n": -turn}
        result = changes.commit()
    seconds = time.perf_counter() - started
    after = open_snapshot(store).index.chunks
    touched = [old.filename for old, new in zip(before, after, strict=True) if old != new]
    return seconds, result.seconds, touched


def run(path: Path, count: int, keys: int, rounds: int) -> dict[str, float]:
    """Return the medians of some rounds."""
    dice, updates, commits, copies, chunks = random.Random(keys), [], [], [], 0
    update(path, [0], 0)  # imports, and whatever else happens once
    idle = memory()
    peak = idle
    for turn in range(1, rounds + 1):
        seconds, commit, touched = update(path, dice.sample(range(count), keys), turn)
        peak = max(peak, memory())
        updates.append(seconds)
        commits.append(commit)
        copies.append(copy(path, touched))
        for file in touched:
            (path / file).unlink()  # what a vacuum would do, so that the disk does not fill
        chunks = len(touched)
    figures = {"update, s": statistics.median(updates), "commit, s": statistics.median(commits), "copy, s": statistics.median(copies)}
    return {
        "chunks": chunks,
        **figures,
        "commit / copy": figures["commit, s"] / figures["copy, s"],
        "update / copy": figures["update, s"] / figures["copy, s"],
        "memory after, MB": peak - idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.update", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(run(Path(arguments.job[0]), arguments.samples, int(arguments.job[1]), arguments.rounds)))
        return
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        path = Path(folder) / "ds"
        ours_write(path, arguments.samples)
        for keys in (1, 1_000):
            command = [sys.executable, "-m", "benchmarks.update", "--samples", str(arguments.samples), "--rounds", str(arguments.rounds)]
            done = subprocess.run([*command, "--job", str(path), str(keys)], check=True, capture_output=True, text=True)
            figures = json.loads(done.stdout)
            print(f"replace {keys:,} of {arguments.samples:,}: " + ", ".join(f"{what} {value:.3g}" for what, value in figures.items()))


if __name__ == "__main__":
    main()
