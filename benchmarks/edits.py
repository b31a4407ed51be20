"""Deletes, upserts and a patch of one column by key, and a diff: ``python -m benchmarks.edits [--samples 1000000]``.

Ours beside copying the chunk files that hold the samples, Lance (with and without an index of the keys) and LMDB. Delete 1,000 samples;
upsert 10,000 of which half are new; set the label of a tenth of the samples from a Parquet file; list what differs between two versions of
which one replaced 1,000 samples. Numbers are printed, never asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.jobs import Bench, installed, parser, print_table, scratch


def main() -> None:
    options = parser("edits", __doc__, rounds=3)
    options.add_argument("--jobs", default="delete,upsert,patch,diff", help="comma-separated")
    arguments = options.parse_args()
    count, dice = arguments.samples, random.Random(1)
    few, half = min(1_000, count // 10), min(5_000, count // 10)
    jobs: dict[str, tuple[str, Callable[[], list[int]]]] = {
        "delete": (f"delete {few:,}", lambda: dice.sample(range(count), few)),
        "upsert": (f"upsert {2 * half:,}, half of them new,", lambda: [*dice.sample(range(count), half), *range(count, count + half)]),
        "patch": (f"set the label of {count // 10:,}", lambda: dice.sample(range(count), count // 10)),
        "diff": (f"list the {few:,} that differ", lambda: dice.sample(range(count), few)),
    }
    with scratch(arguments) as folder:
        bench = Bench(folder, count)
        for job in arguments.jobs.split(","):
            what, choose = jobs[job]
            peers = ["ours"] if job == "diff" else [peer for peer in ("copy", "ours", "lance", "lance, index", "lmdb") if installed(peer)]
            taken = bench.rounds(job, peers, [choose() for _ in range(arguments.rounds)])
            print_table(f"{what} of {count:,} samples of 1 KB", taken)


if __name__ == "__main__":
    main()
