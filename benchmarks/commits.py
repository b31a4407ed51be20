"""Commits per second of processes that update one dataset at the same time: ``python -m benchmarks.commits [--processes 1,2,8]``.

Each process replaces one sample per commit, each time another one, scattered over the dataset. Afterwards every sample is read back:
*lost* counts those that a commit reported as done and that are not there. A commit writes a whole chunk, so chunks are small here (100
samples of 1 KB), and what is measured is the protocol: archive, lock, rebase, swap. Numbers are printed, never asserted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.keyed import edited, name, sample


def work(path: Path, numbers: list[int], start: Barrier, done: Any) -> None:
    """Replace the samples, each in a commit of its own, and tell how often it failed and when it began and ended."""
    import liveset

    committed, errors = [], []
    with liveset.dataset_update(path) as update:  # imports
        update[name(numbers[0])]
    start.wait()
    began = time.monotonic()
    for i in numbers:
        try:
            with liveset.dataset_update(path) as update:
                update[name(i)] = edited(i)
                update.commit()
            committed.append(i)
        except liveset.DatasetError as error:
            errors.append(type(error).__name__)
    done.put((began, time.monotonic(), committed, errors))


def run(path: Path, samples: int, processes: int, commits: int) -> str:
    """Let processes commit, and return a line of the table."""
    import liveset

    liveset.optimize(fn=sample, inputs=range(samples), output_dir=path, key_fn="id", chunk_size=100, num_workers=1, verbose=False)
    chosen = random.Random(processes).sample(range(samples), processes * commits)
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=work, args=(path, chosen[rank::processes], start, done)) for rank in range(processes)]
    for worker in workers:
        worker.start()
    results = [done.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(ended for _, ended, _, _ in results) - min(began for began, _, _, _ in results)
    committed = [i for _, _, numbers, _ in results for i in numbers]
    errors = [error for _, _, _, names in results for error in names]
    dataset = liveset.StreamingDataset(path)
    lost = sum(dataset[name(i)] != edited(i) for i in committed)
    lost += dataset.info().version - 1 != len(committed)  # no two of them made the same version
    told = ", ".join(sorted(set(errors)))
    return f"{processes:>9} {len(committed):>9,} {seconds:>9.2f} {len(committed) / seconds:>12.1f} {lost:>6} {len(errors):>7} {told}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.commits", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--processes", default="1,2,8", help="comma-separated")
    parser.add_argument("--commits", type=int, default=400, help="in total, shared among the processes")
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        print(f"{arguments.samples:,} samples of 1 KB in chunks of 100; each commit replaces one sample")
        print("processes   commits   seconds    commits/s   lost  failed")
        for processes in map(int, arguments.processes.split(",")):
            each = arguments.commits // processes
            print(run(Path(folder) / str(processes), arguments.samples, processes, each).rstrip(), flush=True)


if __name__ == "__main__":
    main()
