"""Training loops over a local disk with a warm cache: ``python -m benchmarks.loader [--quick] [--kinds numbers,blobs] [--workers 0,2]``.

Each job runs in a process of its own; a round takes all of them in turn, each time another one first. Printed are medians over the rounds,
and of the ratios within a round, so that a busy minute meets all of them alike. Numbers are printed, never asserted.

A job reads a pass, and then passes for at least half a second, each with a new loader and timed from its first batch to its last one. One
byte of every page of each tensor is looked at. The floor is torch's ``DataLoader`` over one numpy memmap, whose sampler yields the
numbers of the rows of a batch; of images it is a loop that decodes and does nothing else, in as many processes as there are workers.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.run import ENVIRONMENTS, ROOT

Figures = dict[str, float]
_LITDATA = ENVIRONMENTS["litdata"]
_MOSAIC = Path(os.environ.get("LIVESET_MOSAIC_PYTHON") or ROOT / ".venv-mosaic/bin/python")
_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix jolly potions".split()
_BLOBS = [np.random.default_rng(i).bytes(50_000) for i in range(8)]
_SIDE = 256
_SECONDS = 0.5
# Of the processes of the jobs, which inherit it.
SHUFFLE = bool(os.environ.get("BENCH_SHUFFLE"))


# --- samples ------------------------------------------------------------------------------------------------------------------------------


def numbers(i: int) -> dict[str, Any]:
    return {"x": np.arange(i, i + 16, dtype=np.float32), "y": i % 10, "id": i}


def text(i: int) -> dict[str, Any]:
    return {**numbers(i), "text": " ".join(_WORDS[(i * k) % len(_WORDS)] for k in range(2, 4 + i % 5))}


def blobs(i: int) -> dict[str, Any]:
    return {"id": i, "raw": _BLOBS[i % 8]}


def jpeg(i: int) -> dict[str, Any]:
    """Return a JPEG of a few smooth colours with some noise, about 17 KB."""
    from PIL import Image

    rng = np.random.default_rng(i % 64)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    pixels = np.clip(np.asarray(smooth) + rng.normal(0, 12, (_SIDE, _SIDE, 3)), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=80)
    return {"id": i, "image": stream.getvalue()}


@dataclass(frozen=True, slots=True)
class Kind:
    """Samples: how they are made, how many are in a batch, how many there are and are with ``--quick``, and as columns of MosaicML."""

    make: Callable[[int], dict[str, Any]]
    batch: int
    count: int
    quick: int
    columns: dict[str, str]


_NUMBERS = {"x": "ndarray:float32:16", "y": "int", "id": "int"}
KINDS = {
    "numbers": Kind(numbers, 256, 100_000, 20_000, _NUMBERS),
    "text": Kind(text, 256, 100_000, 20_000, {**_NUMBERS, "text": "str"}),
    "blobs": Kind(blobs, 64, 8_000, 2_000, {"id": "int", "raw": "bytes"}),
    "jpeg": Kind(jpeg, 64, 1_536, 256, {"id": "int", "image": "bytes"}),
}


def write(folder: Path, kind: str, count: int) -> None:
    """Write what ours and litData read, and the rows of the memmap."""
    import liveset

    make = KINDS[kind].make
    if kind == "jpeg":
        liveset.optimize(_jpeg, range(count), folder / "ours", num_workers=2, chunk_bytes="8MB", verbose=False)
        return
    liveset.optimize(make, range(count), folder / "ours", num_workers=1, chunk_bytes="8MB", verbose=False)
    samples = [make(i) for i in range(min(count, 1_000))]
    fields: list[Any] = []
    for name, value in samples[0].items():
        if isinstance(value, str | bytes):
            width = max(len(value.encode() if isinstance(value, str) else value) for value in (sample[name] for sample in samples))
            fields.append((name, f"{'S' if isinstance(value, str) else 'V'}{width}"))
        else:
            array = np.asarray(value)
            fields.append((name, array.dtype, array.shape))
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.dtype(fields), (count,))
    for i in range(count):
        rows[i] = tuple(value.encode() if isinstance(value, str) else value for value in make(i).values())
    rows.flush()


def _jpeg(i: int) -> dict[str, Any]:
    import liveset

    return {"id": i, "image": liveset.Jpeg(bytes=jpeg(i)["image"])}


def write_mosaic(folder: Path, kind: str, count: int) -> None:
    """Write what MosaicML streaming reads."""
    with _streaming().MDSWriter(out=str(folder / "mosaic"), columns=KINDS[kind].columns, size_limit=8_000_000) as out:
        for i in range(count):
            out.write(KINDS[kind].make(i))


# --- loaders ------------------------------------------------------------------------------------------------------------------------------


def ours(folder: Path, kind: str, workers: int) -> Iterable[Any]:
    import liveset

    dataset = liveset.StreamingDataset(folder / "ours")
    return liveset.StreamingDataLoader(dataset, batch_size=KINDS[kind].batch, num_workers=workers, shuffle=SHUFFLE)


def litdata(folder: Path, kind: str, workers: int) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "ours"), shuffle=SHUFFLE, **({"batch_decode": 0} if SHUFFLE else {}))
    options = {"collate_fn": COLLATES[kind]} if kind in COLLATES else {}
    loader: Iterable[Any] = StreamingDataLoader(dataset, batch_size=KINDS[kind].batch, num_workers=workers, **options)
    return loader


def mosaic(folder: Path, kind: str, workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    batch = KINDS[kind].batch
    dataset = _streaming().StreamingDataset(local=str(folder / "mosaic"), shuffle=SHUFFLE, batch_size=batch)
    return DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=COLLATES.get(kind))


def _streaming() -> Any:
    """Import MosaicML streaming without torchvision, which has no build for every torch and of which nothing is used here."""
    import importlib
    import types

    importlib.import_module("transformers")  # looks for torchvision, too

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module: Any = sys.modules.setdefault(name, types.ModuleType(name))
        module.VisionDataset, module.to_tensor = object, None
    return importlib.import_module("streaming")


def floor(folder: Path, kind: str, workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    rows = np.load(folder / "rows.npy", mmap_mode="r")
    sampler = Batches(len(rows), KINDS[kind].batch, SHUFFLE)
    return DataLoader(Rows(rows), batch_size=None, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


class Rows:
    """Gathers the rows of a batch; texts become a list of str and blobs a list of bytes, as a training loop has them."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self._rows = rows

    def __getitem__(self, index: np.ndarray[Any, Any]) -> Any:
        import torch

        found = self._rows[index]
        batch: dict[str, Any] = {}
        for name in found.dtype.names or ():
            column = found[name]
            if column.dtype.kind == "S":
                batch[name] = [value.decode() for value in column.tolist()]
            elif column.dtype.kind == "V":
                batch[name] = column.tolist()
            else:
                batch[name] = torch.from_numpy(np.ascontiguousarray(column))
        return batch


class Batches:
    """A sampler whose items are the numbers of a batch."""

    def __init__(self, count: int, batch: int, shuffle: bool) -> None:
        self._count, self._batch, self._shuffle = count, batch, shuffle

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        order = np.random.default_rng(0).permutation(self._count) if self._shuffle else np.arange(self._count)
        return (order[at : at + self._batch] for at in range(0, self._count, self._batch))


def _collate_images(samples: list[Any]) -> Any:
    """Decode where that is left to the user, in the very way of the bare loop."""
    import torch

    images = [sample["image"] for sample in samples]
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "image": torch.stack([image if isinstance(image, torch.Tensor) else torch.from_numpy(_pixels(image)) for image in images]),
    }


def _collate_blobs(samples: list[Any]) -> Any:
    """Copy views of a file, of which torch would make a column for each byte."""
    import torch

    return {"id": torch.tensor([sample["id"] for sample in samples]), "raw": [bytes(sample["raw"]) for sample in samples]}


def _pixels(image: Any) -> Any:
    from PIL import Image

    opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    return np.asarray(opened).transpose(2, 0, 1).copy()


COLLATES: dict[str, Callable[[list[Any]], Any]] = {"blobs": _collate_blobs, "jpeg": _collate_images}
LOADERS = {"ours": ours, "litdata": litdata, "mosaic": mosaic, "floor": floor}


# --- jobs ---------------------------------------------------------------------------------------------------------------------------------


def epochs(folder: Path, kind: str, peer: str, workers: int) -> Figures:
    """Read passes, and return samples per second."""
    if (kind, peer) == ("jpeg", "floor"):
        return {"rate": _decode_only(workers)}
    _pass(LOADERS[peer](folder, kind, workers))
    until = time.perf_counter() + _SECONDS
    taken: list[float] = []
    while not taken or time.perf_counter() < until:
        taken.append(_pass(LOADERS[peer](folder, kind, workers)))
    return {"rate": statistics.median(taken)}


def _pass(loader: Iterable[Any]) -> float:
    began, count = 0.0, 0
    for batch in loader:
        touch(batch)
        if began:
            count += len(batch["id"])
        else:
            began = time.perf_counter()
    return count / (time.perf_counter() - began)


def touch(batch: dict[str, Any]) -> None:
    """Look at each page of each tensor, as whoever computes with it does."""
    for value in batch.values():
        if hasattr(value, "numpy"):
            value.numpy().reshape(-1).view(np.uint8)[::4096].max()


def _decode_only(workers: int) -> float:
    files = [jpeg(i)["image"] for i in range(64)] * 4
    if not workers:
        return _decode(files)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return sum(pool.map(_decode, [files] * workers, chunksize=1))


def _decode(files: list[bytes]) -> float:
    for file in files[:64]:
        _pixels(file)
    began = time.perf_counter()
    for file in files:
        _pixels(file)
    return len(files) / (time.perf_counter() - began)


def first(folder: Path, kind: str, peer: str, workers: int) -> Figures:
    """Return the seconds from ``iter`` to the first batch, of the third pass and later ones."""
    loader = LOADERS[peer](folder, kind, workers)
    taken: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        taken.append(time.perf_counter() - began)
        del batches
    return {"ms": statistics.median(taken[2:]) * 1e3}


def state(folder: Path, kind: str, _peer: str, workers: int) -> Figures:
    """Ask for a state after each batch, and return what part of the loop that took."""
    loader: Any = ours(folder, kind, workers)
    spent = calls = 0.0
    _pass(loader)
    began = time.perf_counter()
    for batch in loader:
        touch(batch)
        asked = time.perf_counter()
        loader.state_dict()
        spent += time.perf_counter() - asked
        calls += 1
    whole = time.perf_counter() - began
    return {"us": spent / calls * 1e6, "percent": spent / whole * 100}


JOBS = {"epochs": epochs, "first": first, "state": state}


def run(job: str, folder: Path, kind: str, peer: str, workers: int, count: int = 0) -> Figures:
    """Run a job in a process of its own."""
    python = {"litdata": _LITDATA, "mosaic": _MOSAIC}.get(peer, Path(sys.executable))
    command = [str(python), "-m", "benchmarks.loader", "--job", job, "--dir", str(folder), "--kinds", kind, "--peers", peer]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    given = [*command, "--workers", str(workers), "--count", str(count)]
    done = subprocess.run(given, check=False, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)}\n{done.stderr[-2000:]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _work(job: str, folder: Path, kind: str, peer: str, workers: int, count: int) -> Figures:
    if job == "write":
        (write_mosaic if peer == "mosaic" else write)(folder, kind, count)
        return {}
    return JOBS[job](folder, kind, peer, workers)


# --- tables -------------------------------------------------------------------------------------------------------------------------------


def rounds(job: str, folder: Path, kind: str, peers: list[str], workers: int, turns: int) -> dict[str, list[Figures]]:
    """Run a job of several peers, who take turns."""
    taken: dict[str, list[Figures]] = {peer: [] for peer in peers}
    for turn in range(turns):
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            taken[peer].append(run(job, folder, kind, peer, workers))
    return taken


def table(folder: Path, kind: str, peers: list[str], workers: list[int], turns: int) -> None:
    """Print samples per second, and how many times as fast ours is."""
    alone: list[Figures] = []
    for number in workers:
        taken = rounds("epochs", folder, kind, peers, number, turns)
        mine = taken["ours"]
        print(f"{kind}, batches of {KINDS[kind].batch}, {number} workers:")
        for peer, figures in taken.items():
            ratios = [own["rate"] / other["rate"] for own, other in zip(mine, figures, strict=True)]
            more = f"   ours is {statistics.median(ratios):.2f} times as fast" if peer != "ours" else ""
            if peer == "ours" and alone:
                gained = statistics.median(own["rate"] / other["rate"] for own, other in zip(mine, alone, strict=True))
                more = f"   {gained:.2f} times its speed with {workers[0]} workers"
            print(f"  {peer:<8} {statistics.median(figure['rate'] for figure in figures):12,.0f} samples/s{more}", flush=True)
        alone = alone or mine
        if number:
            starts = rounds("first", folder, kind, [peer for peer in peers if (kind, peer) != ("jpeg", "floor")], number, turns)
            told = [f"{peer} {statistics.median(figure['ms'] for figure in figures):.1f} ms" for peer, figures in starts.items()]
            print(f"  first batch: {', '.join(told)}", flush=True)
        states = [run("state", folder, kind, "ours", number) for _ in range(turns)]
        told = [f"{statistics.median(figure[what] for figure in states):.2f} {unit}" for what, unit in (("us", "us"), ("percent", "%"))]
        print(f"  state_dict() after each batch: {told[0]}, {told[1]} of the loop", flush=True)


def _has_torchvision() -> bool:
    """Tell whether litData can decode images."""
    return subprocess.run([_LITDATA, "-c", "import torchvision"], check=False, capture_output=True).returncode == 0


def main() -> None:
    """Measure and print, or do one job."""
    parser = argparse.ArgumentParser(prog="benchmarks.loader", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--peers", default=",".join(LOADERS), help="comma-separated; those that are not installed are left out")
    parser.add_argument("--workers", default="0,2", help="comma-separated")
    parser.add_argument("--shuffle", action="store_true", help="read in random order; litData then decodes sample by sample, as is faster")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small datasets and two rounds, to try it")
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shuffle:
        os.environ["BENCH_SHUFFLE"] = "1"
    workers = [int(number) for number in given.workers.split(",")]
    if given.job:
        print(json.dumps(_work(given.job, given.dir, given.kinds, given.peers, workers[0], given.count)))
        return
    missing = {peer for peer, python in (("litdata", _LITDATA), ("mosaic", _MOSAIC)) if not python.exists()}
    undecoded = {"litdata"} if "litdata" not in missing and not _has_torchvision() else set()
    peers = ["ours", *(peer for peer in given.peers.split(",") if peer != "ours" and peer not in missing)]
    turns = 2 if given.quick else given.rounds
    print(f"{os.cpu_count()} cores, medians of {turns} rounds", f"| left out: {', '.join(sorted(missing))}" if missing else "", flush=True)
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=given.dir) as name:
        for kind in given.kinds.split(","):
            folder = Path(name) / kind
            folder.mkdir()
            count = KINDS[kind].quick if given.quick else KINDS[kind].count
            for peer in {"ours", "mosaic"} & set(peers):
                run("write", folder, kind, peer, 0, count)
            table(folder, kind, [peer for peer in peers if kind != "jpeg" or peer not in undecoded], workers, turns)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
