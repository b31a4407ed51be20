"""The examples: the commands of their page run, and what was killed goes on as if it had not been."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

pytestmark = pytest.mark.slow


def run(command: list[str], folder: Path) -> str:
    # The commands are given from the folder of the repository, and write into another one here
    program, script, *arguments = command
    done = subprocess.run(
        [program.replace("python", sys.executable), ROOT / script, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def need(*packages: str) -> None:
    for package in ("torch", "sklearn", *packages):
        pytest.importorskip(package)


def commands(script: str) -> list[list[str]]:
    """Return what the page says about one example."""
    lines = [line.split() for block in COMMANDS for line in block.splitlines()]
    assert all(line[:1] == ["python"] for line in lines), lines
    return [line for line in lines if line[1] == f"examples/{script}"]


def test_every_example_is_on_the_page() -> None:
    for script in (ROOT / "examples").glob("*.py"):
        assert commands(script.name), script.name


def test_digits(tmp_path: Path) -> None:
    need()
    first, more = (run(command, tmp_path) for command in commands("digits.py"))
    assert "epoch 2 step 94 " in first
    assert "goes on after step 94, in epoch 3" in more
    assert "epoch 3 step 141 " in more
    right = re.search(r"([\d.]+)% of 297 unseen digits are told right", more)
    assert right is not None
    assert float(right[1]) > 85


def test_relabel(tmp_path: Path) -> None:
    need()
    (command,) = commands("relabel.py")
    told = run(command, tmp_path)
    assert "100 labels set, 1 of 8 chunks written anew" in told
    assert "epoch 1: version 1, 100 wrong labels" in told
    assert "epoch 2: version 2, 0 wrong labels" in told


def test_lightning_digits(tmp_path: Path) -> None:
    """The last checkpoint is of step 110 of 114: what comes after it is done again, and is the same."""
    need("lightning")
    first, more = (steps(run(command, tmp_path)) for command in commands("lightning_digits.py"))
    assert [number for number, _ in first] == list(range(1, 115))
    assert [number for number, _ in more] == list(range(111, 172))
    assert more[:4] == first[110:]
    assert len({loss for _, loss in first + more[4:]}) == 171


def steps(told: str) -> list[tuple[int, str]]:
    """Return number and loss, with the first sample, of each step."""
    return [(int(number), rest) for number, rest in re.findall(r"^epoch .* step (\d+) (loss .*)$", told, re.MULTILINE)]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_digits_killed_at_a_random_batch_go_on_with_the_same_losses(tmp_path: Path, workers: str) -> None:
    need()
    command = ["python", "examples/digits.py"]
    options = ["--epochs", "2", "--workers", workers, "--every", "7"]
    run([*command, "whole", *options], tmp_path)
    step = random.randrange(48, 93)
    process = subprocess.Popen(
        [sys.executable, ROOT / command[1], "killed", *options], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if f" step {step} " in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "losses.json").exists()
    told = run([*command, "killed", *options], tmp_path)
    went_on = re.search(r"goes on after step (\d+), in epoch (\d)", told)
    assert went_on is not None
    assert step - 7 <= int(went_on[1]) <= 93, step
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("whole", "killed")]
    assert len(losses[0]) == 94
    assert losses[0] == losses[1], step
