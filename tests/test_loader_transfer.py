"""Batches on their way from workers: the same as without workers, in memory that is used again and that nothing is left of."""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.read.reader import Fetched
from tests.support.writing import write_dataset

torch = pytest.importorskip("torch")
transfer = pytest.importorskip("liveset.read.transfer")
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memory without a name")
COUNT = 24


def row(i: int) -> dict[str, Any]:
    return {
        "i": i,
        "raw": bytes([i]) * (20_000 + i),
        "vec": np.full(3_000, i, np.float32),
        "ten": torch.full((50, 40), i, dtype=torch.int16),
        "text": f"é{i}" * 2_000,
        "short": f"s{i}",
        "few": b"x" * i,
        "pair": [i, f"p{i}"],
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "set", [row(i) for i in range(COUNT)], chunk_size=5)
    return tmp_path / "set"


def plain(value: Any) -> Any:
    """Return a value of a batch as something that can be compared."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.tolist()
    return (type(value), value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value


def mapped() -> int:
    """Return how many slots this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:liveset-batch")


def expected(path: Path, **options: Any) -> list[Any]:
    return [plain(batch) for batch in liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=4, **options)]


WORKERS = [{}, {"persistent_workers": True}, {"prefetch_factor": 1}, {"pin_memory": True}]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_batches_are_those_without_workers(path: Path, options: dict[str, Any]) -> None:
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=4, num_workers=2, **options)
    wanted = expected(path)
    for _ in range(2):
        batches = sorted(loader, key=lambda batch: int(batch["i"][0]))
        assert [plain(batch) for batch in batches] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(path: Path, method: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method}
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=4, **options)
    assert [plain(batch) for batch in loader] == expected(path)


@linux
def test_batches_that_are_kept_stay_as_they_are_and_no_memory_stays(path: Path) -> None:
    gc.collect()
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=1, num_workers=1)
    kept = list(loader)
    assert before < mapped() <= before + 8  # those of further batches went through the pipe
    assert [plain(batch) for batch in kept] == [
        plain(batch) for batch in liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=1)
    ]
    part = kept[0]["vec"][0, :2]
    part += 1  # it is the loop's own
    del kept, loader
    gc.collect()
    assert part.tolist() == [1, 1]
    assert mapped() == before + 1
    del part
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) <= files


@linux
@pytest.mark.parametrize("persistent", [False, True])
def test_slots_are_used_again_also_after_loops_that_were_left(path: Path, persistent: bool) -> None:
    gc.collect()
    before = mapped()
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path), batch_size=2, num_workers=1, persistent_workers=persistent)
    for _ in range(20):
        for batch in loader:
            assert batch["i"].tolist() == [0, 1]
            assert type(batch["vec"]) is torch.Tensor
            assert mapped() <= before + 6
            break
    for number, batch in enumerate(loader):
        assert batch["vec"][:, 0].tolist() == [2 * number, 2 * number + 1]
        assert any(type(found) is transfer._Loan for found in gc.get_objects())  # slots that nobody gave back would be missing now
    del batch, loader
    gc.collect()
    assert mapped() == before


@linux
def test_a_worker_that_dies_is_an_error(path: Path) -> None:
    # In a process of its own: torch raises its error from a signal handler, wherever the program is at that moment.
    script = f"""
import os, signal, liveset
from collections import deque
def die(sample):
    if sample["i"] == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
try:
    deque(liveset.StreamingDataLoader(liveset.StreamingDataset({str(path)!r}, transform=die), batch_size=2, num_workers=1), maxlen=1)
except (RuntimeError, ConnectionError) as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert re.search("worker|Connection", done.stdout + done.stderr), done


def test_other_types_pass_unchanged(path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": _odd}
    wanted = [plain(batch) for batch in liveset.StreamingDataLoader(liveset.StreamingDataset(path), **options)]
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path), num_workers=1, **options)
    batches = list(loader)
    assert [plain(batch) for batch in batches] == wanted
    assert batches[0]["across"].stride() == (1, 1_000)
    assert batches[0]["grad"].requires_grad


def _odd(samples: list[Any]) -> Any:
    return {
        "array": np.arange(40_000.0).reshape(200, 200),
        "across": torch.arange(100_000).reshape(100, 1_000).T,
        "grad": torch.ones(20_000, requires_grad=True),
        "objects": np.array([None, "a"], object),
        "empty": [],
        "none": None,
        "mixed": ["a" * 5_000, 7, torch.arange(10_000)],
        "tuple": (tuple(sample["raw"] for sample in samples), [sample["text"] for sample in samples]),
        "lone": ["\ud800" * 3_000],
        "nothing": torch.empty(0, 5),
    }


def send(batch: Any, slots: int = 4, receiver: Any = None, *, pin: bool = False) -> Any:
    """Return what comes out of the queue."""
    sender = transfer.Sender(receiver.number if receiver is not None else -1, slots, pin=pin)
    return pickle.loads(bytes(ForkingPickler.dumps(sender(Fetched(batch, 1))))).batch


@linux
def test_what_nobody_unpacks_gives_its_slot_back() -> None:
    receiver = transfer.Receiver()
    sender = transfer.Sender(receiver.number, 1, pin=False)
    batch = {"x": torch.arange(100_000)}

    def through(value: Any) -> Any:
        return pickle.loads(bytes(ForkingPickler.dumps(sender(Fetched(value, 1))))).batch

    for _ in range(3):
        packed = through(batch)
        assert type(packed) is transfer.Packed
        del packed
    found = through(batch).unpack()
    assert torch.equal(found["x"], batch["x"])
    assert type(through({"x": torch.arange(5_000)})) is transfer.Packed  # the slot is taken, and the pipe does for this one
    assert type(through(batch)) is dict  # this one is left to torch
    del found
    larger = through({"x": torch.arange(200_000)}).unpack()  # in place of a slot that is too small
    assert int(larger["x"][-1]) == 199_999


def test_batches_of_a_loop_that_is_over_are_nothing() -> None:
    receiver = transfer.Receiver()
    packed = send({"x": torch.arange(100_000)}, receiver=receiver)
    del receiver
    assert type(packed) is not transfer.Packed or packed.unpack() is None


def test_pinning_goes_through_torch_where_it_must() -> None:
    receiver = transfer.Receiver()
    blobs = {"raw": [b"x" * 50_000, b"y" * 50_000]}
    assert send(blobs, receiver=receiver, pin=True).pin_memory() == blobs
    other = {"x": torch.arange(100), "y": OrderedDict(z=torch.arange(5))}
    assert type(send(other, receiver=receiver, pin=True)) is dict


@linux
def test_a_forked_process_gives_nothing_back() -> None:
    receiver = transfer.Receiver()
    found = send({"x": torch.arange(100_000)}, receiver=receiver).unpack()
    slot = next(iter(receiver._slots.values()))
    assert slot[0] == 1
    child = os.fork()
    if not child:
        del found
        os._exit(slot[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert slot[0] == 1
    del found
    assert slot[0] == 0


def test_images_are_stacked_as_by_torch() -> None:
    from torch.utils.data import default_collate

    for values in ([np.full((40, 30), i, np.uint8) for i in range(3)], [torch.full((40, 30), float(i)) for i in range(3)]):
        wanted = default_collate(values)
        for made in (transfer.stack(values), transfer._stacked(transfer.hold(values))):
            tensor = torch.as_tensor(made)
            assert torch.equal(tensor, wanted)
            assert tensor.dtype == wanted.dtype
