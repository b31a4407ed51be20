"""Reading a dataset that was edited often, beside one that was not: ``python -m benchmarks.reading [--edits 10,1000]``.

An edit replaces eight scattered samples, deletes one and adds one (or replaces ten: ``--replace-only``, and where this version cannot do
the others), in one commit. All datasets are read in turn by one process, each round in another order; what is printed are medians over the
rounds, and of the ratios to the fresh dataset within a round, with the quartiles: a busy minute meets all of them alike. Chunks are
of 1 MB, so that a thousand edits write gigabytes and not terabytes. Numbers are printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.keyed import edited, name, sample

_LOOKUPS = 5_000
_WHATS = {"iterate": "iterate, us per sample", "lookup": "lookup p50, us"}


def edit(path: Path, samples: int, edits: int, *, replace_only: bool) -> list[int]:
    """Edit a dataset, and return the numbers of the samples that it has then."""
    import liveset

    dice, numbers, added = random.Random(edits), list(range(samples)), samples
    all_kinds = not replace_only and all(hasattr(liveset.DatasetUpdate, kind) for kind in ("__delitem__", "upsert"))
    for _ in range(edits):
        before = _files(path)
        with liveset.dataset_update(path) as opened:
            update: Any = opened
            if all_kinds:
                at = dice.randrange(len(numbers))
                gone = numbers.pop(at)
                del update[name(gone)]
                update.upsert(name(added), edited(added))
            for i in dice.sample(numbers, 8 if all_kinds else 10):
                update[name(i)] = edited(i)
            update.commit()
        if all_kinds:
            numbers.append(added)
            added += 1
        for file in before - _files(path):
            (path / file).unlink()  # what a vacuum would do, so that the disk does not fill
    return numbers


def _files(path: Path) -> set[str]:
    return {chunk["filename"] for chunk in json.loads((path / "index.json").read_bytes())["chunks"]}


def read(path: Path, numbers: list[int], seed: int) -> dict[str, float]:
    """Read the whole dataset in order, and single samples by key."""
    import liveset

    dataset = liveset.StreamingDataset(path)
    assert len(dataset) == len(numbers)
    keys = [name(i) for i in random.Random(seed).choices(numbers, k=_LOOKUPS)]
    started = time.perf_counter()
    deque(dataset, maxlen=0)
    iterate = (time.perf_counter() - started) / len(numbers) * 1e6
    taken = []
    get = dataset.get_by_key
    for key in keys:
        begun = time.perf_counter_ns()
        get(key)
        taken.append(time.perf_counter_ns() - begun)
    return {"iterate": iterate, "lookup": statistics.median(taken) / 1e3}


def make(folder: Path, samples: int, edits: list[int], *, replace_only: bool) -> dict[str, tuple[Path, list[int]]]:
    """Return the datasets, and the numbers of the samples that each has."""
    import liveset

    places: dict[str, tuple[Path, list[int]]] = {}
    wanted = {f"after {count:,} edits" if count else "fresh": count for count in (0, *edits)}
    if hasattr(liveset, "compact"):
        wanted["after compaction"] = edits[-1]
    for what, count in wanted.items():
        path = folder / what
        liveset.optimize(fn=sample, inputs=range(samples), output_dir=path, key_fn="id", chunk_bytes="1MB", num_workers=1, verbose=False)
        places[what] = path, edit(path, samples, count, replace_only=replace_only)
        if what == "after compaction":
            liveset.compact(path)
    return places


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reading", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--edits", default="10,1000", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=41, help="passes over each dataset")
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--replace-only", action="store_true", help="each edit replaces ten samples, and neither deletes nor adds")
    arguments = parser.parse_args()
    edits = [int(count) for count in arguments.edits.split(",")]
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        places = make(Path(folder), arguments.samples, edits, replace_only=arguments.replace_only)
        taken: dict[str, list[dict[str, float]]] = {what: [] for what in places}
        for turn in range(-1, arguments.rounds):
            order = [*places]
            for what in order[turn % len(order) :] + order[: turn % len(order)]:
                figures = read(*places[what], turn)
                if turn >= 0:  # the first pass warms the cache
                    taken[what].append(figures)
    print(f"{arguments.samples:,} samples of 1 KB in chunks of 1 MB, medians of {arguments.rounds} rounds (quartiles)")
    print(f"{'':<20}" + "".join(f"{title:>26}{'times fresh':>22}" for title in _WHATS.values()))
    for what, rounds in taken.items():
        cells = ""
        for job in _WHATS:
            ratios = [figures[job] / fresh[job] for figures, fresh in zip(rounds, taken["fresh"], strict=True)]
            cells += f"{told([figures[job] for figures in rounds], 2):>26}{told(ratios, 3):>22}"
        print(f"{what:<20}{cells}")


def told(values: list[float], digits: int) -> str:
    """Return the median and the quartiles as text."""
    low, middle, high = (f"{value:.{digits}f}" for value in statistics.quantiles(values, n=4))
    return f"{middle} ({low}..{high})"


if __name__ == "__main__":
    main()
