"""Batched decoding beside one sample at a time, and rows of one numpy memmap: ``python -m benchmarks.batches``.

Each kind of sample is read in random batches out of a window of neighbouring chunks, as a shuffled epoch does it, from a warm page cache.
Before each turn the caches of the processor are filled with something else, as a training step does: the quick ways take no longer than it
takes to fetch the bytes. The ways take turns, and of each batch the quickest turn counts, averaged over the batches. Numbers are printed,
never asserted.

The memmap is what somebody writes by hand for samples that are all alike: one structured row per sample, gathered by ``rows[index]``;
``take`` is the same with a contiguous copy of each field. Texts stand in it as ``S`` of the longest one and are decoded to a list of str.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import liveset
from liveset.format.batch import BatchDecoder, Part, part_of
from liveset.format.collate import collate, to_tensors
from liveset.format.schema import Decoder, Schema
from liveset.read.chunks import OpenChunks
from liveset.snapshot import open_snapshot
from liveset.storage import open_store

_SIZE = 256
_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix jolly potions".split()


def numbers(i: int) -> dict[str, Any]:
    return {"x": np.arange(i, i + 16, dtype=np.float32), "y": i % 10, "id": i}


def text(i: int) -> dict[str, Any]:
    return {**numbers(i), "text": " ".join(_WORDS[(i * k) % len(_WORDS)] for k in range(2, 4 + i % 5))}


def image(i: int) -> dict[str, Any]:
    return {"pixels": np.full((3, 64, 64), i % 256, np.uint8), "y": i % 10}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {"numbers": numbers, "text": text, "image": image}


def batches(path: Path, chunks: int, rng: np.random.Generator) -> list[tuple[list[tuple[int, Any]], Any, Any]]:
    """Return random batches out of windows of chunks: slots by chunk, the order of them, and the numbers of the samples."""
    records = open_snapshot(open_store(path)).index.chunks
    starts = np.cumsum([0, *(record.samples for record in records)])
    found = []
    for first in range(0, len(records) - chunks + 1, chunks):
        mixed = rng.permutation(np.arange(starts[first], starts[first + chunks]))
        for at in range(0, len(mixed) - _SIZE + 1, _SIZE):
            chosen = mixed[at : at + _SIZE]
            places = np.searchsorted(starts, chosen, "right") - 1
            inside = [(int(number), np.flatnonzero(places == number)) for number in np.unique(places)]
            slots = [(number, chosen[rows] - starts[number]) for number, rows in inside]
            order = None if len(inside) == 1 else np.concatenate([rows for _, rows in inside])
            found.append((slots, order, chosen))
    return found


def ways(path: Path, kind: Callable[[int], dict[str, Any]], samples: int) -> dict[str, Callable[[Any], Any]]:
    """Return the ways to make a batch."""
    snapshot = open_snapshot(open_store(path))
    assert snapshot.index.config is not None
    schema = Schema.from_config(snapshot.index.config)
    chunks, batched = OpenChunks(snapshot, Decoder(schema)), BatchDecoder(schema)
    rows = memmap(path / "rows.npy", kind, samples)

    def decode(batch: Any) -> Any:
        parts: list[Part] = [part for number, slots in batch[0] if (part := part_of(chunks[number], slots)) is not None]
        return batched.decode(parts, batch[1])

    def one_by_one(batch: Any) -> list[Any]:
        read = [chunks[number].read(slot) for number, slots in batch[0] for slot in slots.tolist()]
        return read if batch[1] is None else [read[i] for i in np.argsort(batch[1])]

    def gather(batch: Any) -> Any:
        found = rows[batch[2]]
        return {name: column(found[name]) if found[name].dtype.kind == "S" else found[name] for name in found.dtype.names or ()}

    def take(batch: Any) -> Any:
        found = np.asarray(rows).take(batch[2])
        return {name: column(found[name]) if found[name].dtype.kind == "S" else found[name].copy() for name in found.dtype.names or ()}

    made: dict[str, Callable[[Any], Any]] = {
        "memmap rows[index]": gather,
        "memmap take": take,
        "batched": decode,
        "one by one + collate": lambda batch: collate(one_by_one(batch)),
    }
    try:
        from torch.utils.data import default_collate
    except ImportError:
        return made
    return {
        **made,
        "batched, tensors": lambda batch: to_tensors(decode(batch)),
        "one by one + torch": lambda b: default_collate(one_by_one(b)),
    }


def column(found: Any) -> list[str]:
    return [value.decode() for value in found.tolist()]


def memmap(file: Path, kind: Callable[[int], dict[str, Any]], samples: int) -> np.memmap[Any, Any]:
    """Write the samples as rows of one file, and map it."""
    values = [kind(i) for i in range(samples)]
    fields: list[Any] = []
    for name, value in values[0].items():
        if isinstance(value, str):
            fields.append((name, f"S{max(len(each[name].encode()) for each in values)}"))
        else:
            array = np.asarray(value)
            fields.append((name, array.dtype, array.shape))
    table = np.empty(samples, np.dtype(fields))
    for name in values[0]:
        table[name] = [each[name].encode() if isinstance(each[name], str) else each[name] for each in values]
    table.tofile(file)
    return np.memmap(file, table.dtype, "r")


def measure(name: str, samples: int, chunks: int, rounds: int) -> None:
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        liveset.optimize(kind, range(samples), path, num_workers=1, chunk_size=1024)
        asked, made = batches(path, chunks, np.random.default_rng(0)), ways(path, kind, samples)
        other = np.zeros(64_000_000, np.uint8)
        quickest = {way: [float("inf")] * len(asked) for way in made}
        for _ in range(rounds):
            for way, make in made.items():
                other += 1
                for i, batch in enumerate(asked):
                    started = time.perf_counter()
                    make(batch)
                    quickest[way][i] = min(quickest[way][i], time.perf_counter() - started)
        best = {way: sum(taken) / len(asked) for way, taken in quickest.items()}
        floor = best["memmap rows[index]"]
        print(f"{name}, batches of {_SIZE} out of {chunks} chunk{'s' if chunks > 1 else ''} of 1,024:")
        for way, taken in best.items():
            print(f"  {way:22} {taken * 1e6:9.1f} us  {_SIZE / taken / 1e3:9,.0f} k samples/s  {taken / floor:6.2f} x memmap")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 4], help="of how many chunks a batch is mixed")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for name in options.kinds:
        for chunks in options.chunks:
            measure(name, options.samples, chunks, options.rounds)


if __name__ == "__main__":
    main()
