"""Appending 10,000 samples to a small and a large dataset, without and with keys: ``python -m benchmarks.append [--sizes 100000,1000000]``.

Ours beside Lance, LMDB (which always has keys) and, with ``--litdata``, litData (whose append loses keys, so only without them). With
keys, ours refuses a key that is there already, and Lance takes the new rows into its index. Numbers are printed, never asserted.
"""

from __future__ import annotations

from benchmarks.jobs import COLUMNS, Bench, installed, parser, print_table, scratch


def main() -> None:
    options = parser("append", __doc__, rounds=5, samples=10_000)
    options.add_argument("--sizes", default="100000,1000000", help="comma-separated: samples that are there before")
    options.add_argument("--litdata", action="store_true")
    arguments = options.parse_args()
    old = ["litdata, no keys"] if arguments.litdata else []
    with scratch(arguments) as folder:
        for size in map(int, arguments.sizes.split(",")):
            bench = Bench(folder, size)
            for what, peers in {"without keys": ["ours, no keys", "lance", *old], "with keys": ["ours", "lance, index", "lmdb"]}.items():
                numbers = range(size, size + arguments.samples)
                taken = bench.rounds("append", [peer for peer in peers if installed(peer)], [numbers] * arguments.rounds)
                columns = [column.replace("copy", peers[0]) for column in COLUMNS]
                print_table(f"append {arguments.samples:,} samples of 1 KB to {size:,}, {what}", taken, peers[0], columns)


if __name__ == "__main__":
    main()
