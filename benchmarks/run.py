"""Runs the peers side by side and prints one table per kind; numbers are printed, never asserted.

``python -m benchmarks.run --kinds small,blobs,arrays --peers ours,floor,litdata,lance,lmdb``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import extras
from benchmarks.kinds import KINDS
from benchmarks.peers import PEERS

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {
    "litdata": Path(os.environ.get("LIVESET_LITDATA_PYTHON") or ROOT / ".venv-litdata/bin/python"),
    "litdata-item": Path(os.environ.get("LIVESET_LITDATA_PYTHON") or ROOT / ".venv-litdata/bin/python"),
    "lance": ROOT / ".venv-bench/bin/python",
    "lmdb": ROOT / ".venv-bench/bin/python",
}
JOBS = ["iterate", "lookup", "write 1", "write 2"]
Figures = dict[str, dict[str, float]]


def measure(job: str, peer: str, kind: str, path: Path, count: int) -> float:
    """Run one job in a new process of the peer's environment."""
    name, _, workers = job.partition(" ")
    python = ENVIRONMENTS.get(peer, Path(sys.executable))
    command = [str(python), "-m", "benchmarks.measure", name, peer, kind, str(path), str(count), *([workers] if workers else [])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def run_kind(kind: str, peers: list[str], rounds: int, count: int, scratch: Path) -> Figures:
    """Return medians over rounds in which the peers take turns, so that a busy minute of the machine meets all of them."""
    taken: dict[str, dict[str, list[float]]] = {peer: {} for peer in peers}
    # Written once before, in an order that lets the floor and the per-item reader use what is there
    places = {peer: scratch / kind / {"floor": "ours", "litdata-item": "litdata"}.get(peer, peer) for peer in peers}
    for peer in sorted({place.name for place in places.values()}):
        measure("write 1", peer, kind, scratch / kind / peer, count)
    for _ in range(rounds):
        for job in JOBS:
            for peer in peers:
                _, _, workers = job.partition(" ")
                if workers and (int(workers) not in PEERS[peer].workers or peer == "litdata-item"):
                    continue
                place = scratch / kind / f"{peer}-written" if workers else places[peer]
                taken[peer].setdefault(job, []).append(measure(job, peer, kind, place, count))
                if workers:
                    shutil.rmtree(place, ignore_errors=True)
    return {peer: {job: statistics.median(times) for job, times in jobs.items()} for peer, jobs in taken.items()}


def print_table(kind: str, count: int, figures: Figures) -> None:
    """Print microseconds per sample, and in brackets how many times as long as the floor (with one worker) it takes."""
    base = figures.get("floor", {})
    print(f"\n{kind}: {count:,} samples, microseconds per sample (times the floor; for two workers, the floor's one)")
    print(f"{'':<14}" + "".join(f"{job:>20}" for job in JOBS))
    for peer, jobs in figures.items():
        cells = []
        for job in JOBS:
            floor = base.get("write 1" if job.startswith("write") else job)
            ratio = f" ({jobs[job] / floor:.2f}x)" if job in jobs and floor else ""
            cells.append(f"{jobs[job]:.1f}{ratio}" if job in jobs else "-")
        print(f"{peer:<14}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated: small, blobs, arrays")
    parser.add_argument(
        "--peers", default="ours,floor,litdata,litdata-item,lance,lmdb", help="those whose environment is missing are left out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="medians are taken over this many rounds")
    parser.add_argument("--count", type=int, help="samples of each kind, instead of the usual number")
    parser.add_argument("--dir", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--no-extras", action="store_true", help="without import time, opening, small jobs and memory")
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if ENVIRONMENTS.get(peer, Path(sys.executable)).exists()]
    peers = ["ours", *(peer for peer in peers if peer != "ours")]
    print("peers:", ", ".join(peers), "| left out:", ", ".join(sorted(set(arguments.peers.split(",")) - set(peers))) or "none", flush=True)
    with tempfile.TemporaryDirectory(prefix="liveset-bench-", dir=arguments.dir) as folder:
        for kind in filter(None, arguments.kinds.split(",")):
            count = arguments.count or KINDS[kind].count
            print_table(kind, count, run_kind(kind, peers, arguments.rounds, count, Path(folder)))
            shutil.rmtree(Path(folder) / kind)
        if not arguments.no_extras:
            extras.report(Path(folder))


if __name__ == "__main__":
    main()
