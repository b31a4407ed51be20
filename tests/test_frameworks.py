"""The loader in the frameworks that people train with: each stops in the middle of an epoch, and goes on as if it had not."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import liveset
from tests.support.writing import write_dataset

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what the frameworks warn about among themselves is up to them

COUNT, BATCH, EPOCHS = 41, 4, 3
STEPS = -(-COUNT // BATCH)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", [{"i": i, "x": float(i)} for i in range(COUNT)], chunk_size=7)
    return tmp_path / "ds"


def open_loader(path: Path, **options: Any) -> Any:
    return liveset.StreamingDataLoader(liveset.StreamingDataset(path, shuffle=True), batch_size=BATCH, **options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def uninterrupted(path: Path, workers: int = 0) -> list[list[int]]:
    loader = open_loader(path, num_workers=workers)
    return [batch for _ in range(EPOCHS) for batch in ids(loader)]


# --- Lightning -------------------------------------------------------------------------------------------------------------


def fit(path: Path, checkpoints: Path, resume: Path | None = None, *, workers: int = 0, **when: Any) -> list[tuple[int, int, list[int]]]:
    """Train with checkpoints; return epoch, number and samples of each batch."""
    torch, lightning = pytest.importorskip("torch"), pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[tuple[int, int, list[int]]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            seen.append((self.current_epoch, number, batch["i"].tolist()))
            return self.layer(batch["x"].float()[:, None]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saver = ModelCheckpoint(checkpoints, save_top_k=-1, filename="{step}", **when)
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[saver], **quiet)
    trainer.fit(Model(), open_loader(path, num_workers=workers), ckpt_path=resume)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lightning_trainer_goes_on_from_any_batch(path: Path, tmp_path: Path, workers: int) -> None:
    whole = fit(path, tmp_path / "all", workers=workers, every_n_train_steps=1)
    assert [batch for _, _, batch in whole] == uninterrupted(path, workers)
    assert [(epoch, number) for epoch, number, _ in whole] == [(epoch, number) for epoch in range(EPOCHS) for number in range(STEPS)]
    chosen = {1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS, 3 * STEPS - 1, random.randrange(2, 3 * STEPS - 1)}
    for step in sorted(chosen) if not workers else [STEPS - 1, STEPS]:
        rest = fit(path, tmp_path / f"from-{step}", tmp_path / "all" / f"step={step}.ckpt", workers=workers, every_n_train_steps=1000)
        assert rest == whole[step:], step


def test_a_lightning_trainer_goes_on_from_the_end_of_an_epoch(path: Path, tmp_path: Path) -> None:
    whole = fit(path, tmp_path / "all", every_n_epochs=1, save_on_train_epoch_end=True)
    assert len(whole) == EPOCHS * STEPS
    for epoch in (1, 2):
        rest = fit(path, tmp_path / f"from-{epoch}", tmp_path / "all" / f"step={epoch * STEPS}.ckpt", every_n_epochs=1)
        assert rest == whole[epoch * STEPS :]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_an_epoch_that_a_trainer_begins_is_never_an_earlier_one(path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    whole, loader = open_loader(path), open_loader(path, **options)
    epochs = [ids(whole) for _ in range(6)]
    begun = iter(loader)
    loader.sampler.set_epoch(0)
    loader.sampler.set_epoch(2)  # Lightning counts from 0
    assert loader.current_epoch == 3
    assert loader.stats().epoch == 3
    seen = ids([next(begun)])
    loader.sampler.set_epoch(1)
    loader.sampler.set_epoch(4)  # that of the next pass: this one is read by now
    state = loader.state_dict()
    assert seen + ids(begun) == epochs[2]
    assert ids(loader) == epochs[4]
    loader.load_state_dict(state)
    loader.sampler.set_epoch(5)  # a state says where to go on
    assert ids(loader) == epochs[2][1:]


LIGHTNING_SPAWNED = """
    import json, sys
    import lightning, torch
    import liveset

    class Model(lightning.LightningModule):
        def __init__(self, out):
            super().__init__()
            self.layer, self.out, self.seen = torch.nn.Linear(1, 1), out, []

        def training_step(self, batch, number):
            self.seen.append((self.current_epoch, batch["i"].tolist()))
            return self.layer(batch["x"].float()[:, None]).mean()

        def on_train_end(self):
            with open(f"{self.out}-{self.global_rank}.json", "w") as file:
                json.dump(self.seen, file)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    if __name__ == "__main__":
        path, out, workers = sys.argv[1:]
        ds = liveset.StreamingDataset(path, shuffle=True)
        loader = liveset.StreamingDataLoader(ds, batch_size=4, num_workers=int(workers))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_spawn", **quiet)
        trainer.fit(Model(out), loader)
"""


def test_lightning_spawns_ranks_that_share_the_loader_of_the_parent(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("lightning")
    told = run_spawned(LIGHTNING_SPAWNED, tmp_path, path, tmp_path / "rank", 0)
    assert told == [[[epoch, batch] for epoch, batches in enumerate(rank) for batch in batches] for rank in of_ranks(path, 0)]


def test_a_loader_can_be_sent_to_processes_that_are_spawned(path: Path) -> None:
    pytest.importorskip("torch")
    loader = open_loader(path)
    epochs = [ids(loader), ids(loader)]
    copied = pickle.loads(pickle.dumps(open_loader(path)))
    assert ids(copied) == epochs[0]
    running = iter(copied)
    assert ids([next(running)]) == epochs[1][:1]
    again = pickle.loads(pickle.dumps(copied))
    again.load_state_dict(again.state_dict())
    assert ids(again) == epochs[1][1:]
    again.sampler.set_epoch(1)
    assert again.current_epoch == 2


def test_fabric_saves_and_loads_the_loader(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu")
    whole = uninterrupted(path)
    loader = fabric.setup_dataloaders(open_loader(path))
    assert len(loader) == STEPS
    seen = ids(loader)
    for batch in loader:
        seen += ids([batch])
        if len(seen) == STEPS + 3:
            fabric.save(tmp_path / "state.ckpt", {"loader": loader})
            break
    fresh = fabric.setup_dataloaders(open_loader(path))
    fabric.load(tmp_path / "state.ckpt", {"loader": fresh})
    seen += ids(fresh)
    seen += ids(fresh)
    assert seen == whole


# --- Accelerate ------------------------------------------------------------------------------------------------------------


def test_accelerate_saves_and_loads_the_loader(path: Path, tmp_path: Path) -> None:
    torch, accelerate = pytest.importorskip("torch"), pytest.importorskip("accelerate")
    whole = uninterrupted(path)
    seen: list[list[int]] = []

    def train(stop: int | None, accelerator: Any, loader: Any, model: Any, optimizer: Any) -> None:
        while loader.current_epoch < EPOCHS or stop is not None:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"].float()[:, None]).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(batch["i"].tolist())
                if len(seen) == stop:
                    accelerator.save_state(tmp_path / "state")
                    return

    def prepare() -> tuple[Any, Any, Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), open_loader(path))
        return accelerator, loader, model, optimizer

    train(STEPS + 4, *prepare())
    accelerator, *prepared = prepare()
    accelerator.load_state(tmp_path / "state")
    train(None, accelerator, *prepared)
    assert seen[: STEPS + 4] == whole[: STEPS + 4]
    assert seen == whole


ACCELERATED = """
    import json, sys, liveset
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    ds = liveset.StreamingDataset(sys.argv[1], shuffle=True)
    loader = accelerator.prepare(liveset.StreamingDataLoader(ds, batch_size=4, pad=True))
    mine = [batch["i"].tolist() for batch in loader]
    print(json.dumps(mine))
    accelerator.end_training()
"""


def test_accelerate_with_two_processes_reads_each_sample(path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    mine = [json.loads(text) for text in run_ranks(ACCELERATED, 2, path)]
    assert len(mine[0]) == len(mine[1]) == 6
    assert {i for rank in mine for batch in rank for i in batch} == set(range(COUNT))


ACCELERATED_STATE = """
    import json, sys, torch, liveset
    from accelerate import Accelerator
    path, state, action = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    ds = liveset.StreamingDataset(path, shuffle=True)
    model = torch.nn.Linear(1, 1)
    made = liveset.StreamingDataLoader(ds, batch_size=4, pad=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), made)
    if action == "load":
        accelerator.load_state(state)
    mine = []
    while loader.current_epoch < 2 or action == "load" and not mine:
        for batch in loader:
            accelerator.backward(model(batch["x"].float()[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
            mine.append(batch["i"].tolist())
            if action == "save" and len(mine) == 8:
                accelerator.save_state(state)
    print(json.dumps(mine))
    accelerator.end_training()
"""


def test_accelerate_with_two_processes_goes_on(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    whole = [json.loads(text) for text in run_ranks(ACCELERATED_STATE, 2, path, tmp_path / "state", "save")]
    assert [len(rank) for rank in whole] == [12, 12]
    rest = [json.loads(text) for text in run_ranks(ACCELERATED_STATE, 2, path, tmp_path / "state", "load")]
    assert rest == [rank[8:] for rank in whole]


# --- torch -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_goes_on_from_any_batch(path: Path, workers: int) -> None:
    pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> tuple[Any, Any]:
        ds = liveset.StreamingDataset(path, shuffle=True)
        return ds, loaders.StatefulDataLoader(ds, batch_size=BATCH, num_workers=workers)

    ds, whole = loader()
    states, batches = [whole.state_dict()], []
    for batch in whole:
        batches += ids([batch])
        states.append(whole.state_dict())
    assert sorted(i for batch in batches for i in batch) == list(range(COUNT))
    ds.set_epoch(2)
    second = ids(whole)
    assert second != batches
    for step in range(len(states)) if not workers else (0, 1, 2, 5, len(batches)):
        ds, resumed = loader()
        resumed.load_state_dict(json.loads(json.dumps(states[step])) if not workers else states[step])
        assert ids(resumed) == batches[step:]
        ds.set_epoch(2)
        assert ids(resumed) == second


DISTRIBUTED = """
    import json, sys, liveset
    import torch, torch.distributed as dist
    path, state, action = sys.argv[1:]
    ds = liveset.StreamingDataset(path, shuffle=True)
    loader = liveset.StreamingDataLoader(ds, batch_size=2, num_workers=1)
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []
    if action == "load":
        loader.load_state_dict(torch.load(f"{state}-{rank}.pt"))
    for batch in loader:
        dist.all_reduce(torch.tensor(1))  # hangs where ranks have different numbers of batches
        seen.append(batch["i"].tolist())
        if action == "save" and len(seen) == 2:
            torch.save(loader.state_dict(), f"{state}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(seen))
"""


def test_ranks_of_a_process_group_read_disjoint_samples_and_go_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path, state = tmp_path / "ds", tmp_path / "state"
    write_dataset(path, [{"i": i} for i in range(48)], chunk_size=7)
    whole = [json.loads(told) for told in run_ranks(DISTRIBUTED, 2, path, state, "save")]
    assert [len(rank) for rank in whole] == [12, 12]
    assert sorted(i for rank in whole for batch in rank for i in batch) == list(range(48))
    rest = [json.loads(told) for told in run_ranks(DISTRIBUTED, 2, path, state, "load")]
    assert rest == [rank[2:] for rank in whole]
    rest = []
    for rank in range(4):  # two ranks become four
        ds = liveset.StreamingDataset(path, shuffle=True)
        loader = liveset.StreamingDataLoader(ds, batch_size=2, rank=rank, world_size=4)
        loader.load_state_dict(torch.load(f"{state}-1.pt") if rank else torch.load(f"{state}-0.pt"))
        rest.append(ids(loader))
    assert [len(rank) for rank in rest] == [5, 5, 5, 5]
    assert sorted(i for rank in [*rest, whole[0][:2], whole[1][:2]] for batch in rank for i in batch) == list(range(48))


SPAWNED = """
    import json, sys
    import torch, torch.distributed as dist
    import liveset

    def train(rank, loader, store, out):
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        seen = []
        for epoch in range(2):
            seen.append([])
            for batch in loader:
                dist.all_reduce(torch.tensor(1))
                seen[-1].append(batch["i"].tolist())
            assert len(seen[-1]) == len(loader)
        with open(f"{out}-{rank}.json", "w") as file:
            json.dump(seen, file)
        dist.destroy_process_group()

    if __name__ == "__main__":
        path, store, out, workers = sys.argv[1:]
        ds = liveset.StreamingDataset(path, shuffle=True)
        loader = liveset.StreamingDataLoader(ds, batch_size=4, num_workers=int(workers))
        assert len(loader) == 11  # of one process, so far
        torch.multiprocessing.spawn(train, (loader, store, out), nprocs=2)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_the_parent_is_right_in_processes_that_torch_spawns(path: Path, tmp_path: Path, workers: int) -> None:
    pytest.importorskip("torch")
    assert run_spawned(SPAWNED, tmp_path, path, tmp_path / "group", tmp_path / "rank", workers) == of_ranks(path, workers)


def of_ranks(path: Path, workers: int) -> list[list[list[list[int]]]]:
    """What each of two ranks reads in two epochs."""
    loaders = [open_loader(path, num_workers=workers, rank=rank, world_size=2) for rank in range(2)]
    epochs = [[ids(loader), ids(loader)] for loader in loaders]
    for both in zip(*epochs, strict=True):
        assert len({i for rank in both for batch in rank for i in batch}) == COUNT // (2 * BATCH) * 2 * BATCH
    return epochs


def run_spawned(script: str, folder: Path, *arguments: object) -> list[Any]:
    """Run a script that starts its ranks itself, and return what they write to ``rank-0.json`` and ``rank-1.json``."""
    file = folder / "script.py"  # what it spawns imports it
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, *map(str, [file, *arguments])]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, env=alone | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def run_ranks(script: str, world: int, *arguments: object) -> list[str]:
    """Run a script as torchrun would, and return what its ranks print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=200) for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, told
    return [out for out, _ in told]


# --- without torch ---------------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None
    import json
    import numpy as np
    import liveset

    def loader():
        return liveset.StreamingDataLoader(liveset.StreamingDataset(sys.argv[1], shuffle=True), batch_size=4, num_workers=2)

    def train(batches, weight, bias, seen, stop=None):
        for batch in batches:
            error = weight * batch["x"] + bias - (2 * batch["x"] + 1)
            weight, bias = weight - 1e-4 * float((error * batch["x"]).mean()), bias - 1e-2 * float(error.mean())
            assert isinstance(batch["x"], np.ndarray)
            seen.append((batch["i"].tolist(), weight, bias))
            if len(seen) == stop:
                break
        return weight, bias

    whole, parts = [], []
    train(loader(), 0.0, 0.0, whole)
    first = loader()
    weight, bias = train(first, 0.0, 0.0, parts, stop=5)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    train(second, weight, bias, parts)
    assert parts == whole and len(whole) == 11, (parts, whole)
"""


def test_a_numpy_loop_without_torch_goes_on(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
