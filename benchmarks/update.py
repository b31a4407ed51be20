"""Replacing 1 and 1,000 scattered samples by key: ``python -m benchmarks.update [--samples 1000000]``.

Ours beside copying the chunk files that it touches, Lance's ``merge_insert`` (with and without an index of the keys) and litData's
``dataset_update``, which is slow and so has a smaller dataset. Numbers are printed, never asserted.
"""

from __future__ import annotations

import random

from benchmarks.jobs import Bench, installed, parser, print_table, scratch


def main() -> None:
    options = parser("update", __doc__, rounds=5)
    options.add_argument("--litdata", type=int, default=100_000, help="samples of litData's dataset; 0 leaves it out")
    arguments = options.parse_args()
    with scratch(arguments) as folder:
        bench = Bench(folder, arguments.samples)
        slow = Bench(folder, min(arguments.litdata, arguments.samples)) if arguments.litdata and installed("litdata") else None
        for keys in (1, 1_000):
            dice = random.Random(keys)
            peers = [peer for peer in ("copy", "ours", "lance", "lance, index") if installed(peer)]
            taken = bench.rounds("replace", peers, [dice.sample(range(bench.samples), keys) for _ in range(arguments.rounds)])
            print_table(f"replace {keys:,} of {bench.samples:,} samples of 1 KB", taken)
            if slow is not None:
                # Few rounds are enough for what differs by orders of magnitude
                again = slow.rounds("replace", ["copy", "ours", "litdata"], [dice.sample(range(slow.samples), keys) for _ in range(2)])
                print_table(f"replace {keys:,} of {slow.samples:,} samples of 1 KB, 2 rounds", again)


if __name__ == "__main__":
    main()
