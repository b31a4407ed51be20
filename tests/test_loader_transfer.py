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
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert re.search("RuntimeError.*worker", done.stdout + done.stderr), done


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
    SENDERS.append(sender)
    return through(sender, batch)


SENDERS: list[Any] = []  # that live as long as their workers would


@linux
@pytest.mark.parametrize("seen", [True, False])
def test_slots_arrive_where_processes_see_each_other_and_where_not(monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    if not seen:
        monkeypatch.setattr("os.getppid", lambda: 1 << 30)
    receiver = transfer.Receiver()
    packed = send({"x": torch.arange(100_000)}, receiver=receiver)
    assert int(packed.unpack()["x"][-1]) == 99_999
    sender = transfer.Sender(receiver.number, 1, pin=False)
    packed = through(sender, {"x": torch.arange(100_000)})
    del sender
    gc.collect()
    if seen:
        with pytest.raises(RuntimeError, match="ended before its batch was read"):
            packed.unpack()


def through(sender: Any, *batches: Any) -> Any:
    sent, _ = sender([Fetched(batch, 1) for batch in batches])
    found = [fetched.batch for fetched in pickle.loads(bytes(ForkingPickler.dumps(sent)))]
    return found if len(found) > 1 else found[0]


@linux
def test_what_nobody_unpacks_gives_its_slot_back() -> None:
    receiver = transfer.Receiver()
    sender = transfer.Sender(receiver.number, 1, pin=False)
    batch = {"x": torch.arange(100_000)}

    for _ in range(3):
        packed = through(sender, batch)
        assert type(packed) is transfer.Packed
        del packed
    found = through(sender, batch).unpack()
    assert torch.equal(found["x"], batch["x"])
    assert type(through(sender, {"x": torch.arange(5_000)})) is transfer.Packed  # the slot is taken, and the pipe does for this one
    assert type(through(sender, batch)) is dict  # this one is left to torch
    del found
    larger = through(sender, {"x": torch.arange(200_000)}).unpack()  # in place of a slot that is too small
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
        for made in (transfer.stack(values), transfer.stacked(transfer.hold(values))):
            tensor = torch.as_tensor(made)
            assert torch.equal(tensor, wanted)
            assert tensor.dtype == wanted.dtype


# --- several batches at once --------------------------------------------------------------------------------------------------------------


def small(i: int) -> dict[str, Any]:
    return {"i": i, "x": np.full(4, i, np.float32), "text": f"t{i}"}


@pytest.fixture
def many(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "many", [small(i) for i in range(1_203)], chunk_size=100)
    return tmp_path / "many"


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_parcels_change_neither_batches_nor_states(many: Path, workers: int) -> None:
    def made(number: int) -> Any:
        return liveset.StreamingDataLoader(liveset.StreamingDataset(many, shuffle=True), batch_size=4, num_workers=number)

    loader = made(workers)
    batches, states = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(loader.state_dict())
    assert loader._pace.batches > 1  # they did come several at a time
    assert len(batches) == 301
    assert sorted(i for batch in batches for i in batch["i"][2]) == list(range(1_203))
    again = made(workers)
    assert [plain(batch) for batch in again] == batches
    for at in (0, 3, 40, 41, 42, 43, 150, 299, 300):
        again.load_state_dict(states[at])
        assert [plain(batch) for batch in again] == batches[at + 1 :]
    alone = made(0)
    alone.load_state_dict(states[200])  # what the workers had read ahead is not part of a state
    rest = [i for batch in alone for i in batch["i"].tolist()]
    assert sorted(rest) == sorted(i for batch in batches[201:] for i in batch["i"][2])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_was_left_in_a_parcel_leaves_nothing_behind(many: Path, persistent: bool) -> None:
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(many), batch_size=4, num_workers=2, persistent_workers=persistent)
    wanted = [batch["i"].tolist() for batch in loader]
    for left in (1, 70, 71, 190):
        for number, batch in enumerate(loader):
            assert batch["i"].tolist() == wanted[number]
            if number == left:
                break
        loader.reset_state_dict()
    assert [batch["i"].tolist() for batch in loader] == wanted


def test_errors_come_at_their_batch(many: Path) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [({"collate_fn": _refuse}, FileNotFoundError), ({}, liveset.BadSample)]
    for options, kind in wrong:
        dataset = liveset.StreamingDataset(many, transform=None if options else _fail)
        loader = liveset.StreamingDataLoader(dataset, batch_size=4, num_workers=2, **options)
        wanted = [batch["i"].tolist() for batch in liveset.StreamingDataLoader(liveset.StreamingDataset(many), batch_size=4, num_workers=2)]
        place = next(number for number, batch in enumerate(wanted) if 1_001 in batch)
        seen: list[Any] = []
        with pytest.raises(kind, match="no 1001"):
            seen.extend(batch["i"].tolist() for batch in loader)
        assert seen == wanted[:place]
        assert loader._pace.batches > 1
    dataset = liveset.StreamingDataset(many, transform=_fail)
    skipping = liveset.StreamingDataLoader(dataset, batch_size=4, num_workers=2, on_error="skip")
    assert [batch["i"].tolist() for batch in skipping] == [[i for i in batch if i != 1_001] for batch in wanted]


def _fail(sample: Any) -> Any:
    if sample["i"] == 1_001:
        raise ValueError("no 1001")
    return sample


def _refuse(samples: list[Any]) -> Any:
    numbers = torch.tensor([sample["i"] for sample in samples])
    if 1_001 in numbers:
        raise FileNotFoundError("no 1001")
    return {"i": numbers}


def test_an_error_of_the_plan_comes_after_what_was_planned() -> None:
    torchloader = pytest.importorskip("liveset.read.torchloader")

    def plan() -> Any:
        yield from range(5)
        raise KeyError("no such key")

    pace = torchloader._Pace(32)
    pace.batches = 2
    parcels = torchloader._Parcels(plan(), 2, pace)
    assert list(parcels) == [[0], [1], [2, 4], [3]]
    assert list(parcels.rounds) == [2, 2]
    with pytest.raises(KeyError, match="no such key"):
        parcels.check()


def test_how_many_batches_are_in_a_parcel() -> None:
    pace = pytest.importorskip("liveset.read.torchloader")._Pace(32)
    parcels = [(1, 0.5, 1_000, 1), (1, 1e-4, 1_000, 32), (4, 4e-4, 1 << 20, 4), (2, 0.0164, 0, 4), (2, 2.0, 0, 1), (1, 0, 0, 32)]
    for count, seconds, size, wanted in parcels:
        pace.note(transfer.Parcel([None] * count, seconds, size))
        assert pace.batches == wanted


@linux
def test_batches_of_one_parcel_share_a_slot() -> None:
    receiver = transfer.Receiver()
    sender = transfer.Sender(receiver.number, 1, pin=False)
    batches = [{"x": torch.full((3_000,), i), "y": [f"{i}"]} for i in range(4)]
    found = [packed.unpack() for packed in through(sender, *batches)]
    assert [plain(batch) for batch in found] == [plain(batch) for batch in batches]
    slot = next(iter(receiver._slots.values()))
    del found[:3]
    assert slot[0] == 1
    found.clear()
    assert slot[0] == 0
    through(sender, *batches)
    gc.collect()
    assert slot[0] == 0  # nobody wanted them
    parts = through(sender, *batches)
    held = [parts.pop().unpack()]
    del parts
    more = [packed.unpack() for packed in through(sender, *batches)]  # there is no slot: through the pipe, each by itself
    assert [plain(batch) for batch in more] == [plain(batch) for batch in batches]
    assert plain(held[0]) == plain(batches[3])


# --- bytes that the loop copies itself ----------------------------------------------------------------------------------------------------


def blob(i: int) -> dict[str, Any]:
    return {"i": i, "raw": bytes([i % 256]) * (50_000 + i)}


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "blobs", [blob(i) for i in range(200)], chunk_size=30)
    return tmp_path / "blobs"


def test_a_worker_leaves_bytes_where_they_are(blobs: Path) -> None:
    reader = _reader(blobs)
    worker = transfer.Worker(reader, transfer.Sender(-1, 4, pin=False))
    parcel = worker[_tasks()]
    assert [fetched.batch for fetched in parcel.batches] == [transfer.Here] * 3
    for pinned in (True, False):
        worker = transfer.Worker(_reader(blobs, transform=None if pinned else dict), transfer.Sender(-1, 4, pin=pinned))
        assert transfer.Here not in [fetched.batch for fetched in worker[_tasks()].batches]


def test_batches_that_a_worker_sends_are_laid_out_once(blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(transfer._Layout):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(transfer, "_Layout", Counted)
    worker = transfer.Worker(_reader(blobs, transform=dict), transfer.Sender(-1, 4, pin=False))
    assert len(worker[_tasks()].batches) == 3
    assert len(made) == 3


def _tasks() -> list[Any]:
    from liveset.read.reader import Task

    return [Task([(number, np.arange(10))]) for number in range(3)]


def _reader(path: Path, **options: Any) -> Any:
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(path, **options), batch_size=10, num_workers=1)
    from liveset.read.reader import BatchReader

    return BatchReader(loader.dataset, loader._collate(), "raise", loader._together())


def test_bytes_are_the_same(blobs: Path) -> None:
    wanted = [plain(batch) for batch in liveset.StreamingDataLoader(liveset.StreamingDataset(blobs), batch_size=10)]
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(blobs), batch_size=10, num_workers=1)
    assert [plain(batch) for batch in loader] == wanted


def test_damaged_bytes_are_told_and_skipped(blobs: Path) -> None:
    file = next(file for file in sorted(blobs.glob("chunk-*")) if bytes([77]) * 50_000 in file.read_bytes())
    data = bytearray(file.read_bytes())
    at = data.index(bytes([77]) * 50_000)
    data[at - 12 : at - 8] = b"\xff\xff\xff\xff"  # its size, before the number
    file.write_bytes(data)
    for workers in (0, 1):
        loader = liveset.StreamingDataLoader(liveset.StreamingDataset(blobs), batch_size=10, num_workers=workers)
        seen: list[int] = []
        with pytest.raises(liveset.BadSample, match="position 77"):
            seen.extend(i for batch in loader for i in batch["i"].tolist())
        assert seen == list(range(70))
        skipping = liveset.StreamingDataLoader(liveset.StreamingDataset(blobs), batch_size=10, num_workers=workers, on_error="skip")
        assert [i for batch in skipping for i in batch["i"].tolist()] == [i for i in range(200) if i != 77]
        assert skipping.stats().skipped == 1
