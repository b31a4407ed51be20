"""The command line: what it prints, and that errors are one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import liveset
from liveset.cli import main


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "liveset", *map(str, argv)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of a command run in this process."""
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def make(index: int) -> dict[str, object]:
    return {
        "id": f"item-{index}",
        "n": index,
        "raw": bytes([index]) * 20,
        "text": "one [bold]line[/bold]",
        "none": None if index % 2 else 1.5,
    }


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "ds"
    liveset.optimize(fn=make, inputs=range(10), output_dir=path, num_workers=1, chunk_size=4, verbose=False)
    liveset.optimize(fn=make, inputs=range(10, 13), output_dir=path, num_workers=1, chunk_size=4, mode="append", verbose=False)
    return path


def test_version_and_help() -> None:
    assert run("--version").stdout == f"liveset {liveset.__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    reading, editing = ("demo", "info", "head", "get", "keys"), ("set", "patch", "insert", "delete", "apply")
    commands = (*reading, *editing, "log", "tag", "restore", "vacuum", "compact", "purge", "cp", "diff", "verify", "repair")
    assert all(f" {command} " in shown.stdout for command in commands)
    for command in ("demo", "info", "head", "verify"):
        assert "Example" in run(command, "--help").stdout


def test_without_a_command_it_shows_help() -> None:
    assert "Usage" in run().stdout + run().stderr


def test_info(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "info", dataset)
    assert (code, err) == (0, "")
    assert "13" in out
    assert "id" in out
    assert "str" in out


def test_info_json(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "info", dataset, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["samples"], told["chunks"], told["version"], told["compression"]) == (13, 4, 2, None)
    assert told["bytes"] == sum(file.stat().st_size for file in dataset.glob("chunk-*"))
    assert list(told["schema"]) == ["id", "n", "raw", "text", "none"]
    assert Path(told["path"]).resolve() == dataset.resolve()


def test_info_of_an_earlier_version(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(call(capsys, "info", dataset, "--version", 1, "--json")[1])["samples"] == 10


def test_head(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "head", dataset, "-n", 2)
    assert code == 0
    assert "item-0" in out
    assert "item-1" in out
    assert "item-2" not in out
    assert "20 bytes" in out
    assert "one [bold]line[/bold]" in out


def test_head_json_is_one_line_per_sample(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "head", dataset, "-n", 50, "--json")
    samples = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [sample["n"] for sample in samples] == list(range(13))
    assert samples[1] == {
        "id": "item-1",
        "n": 1,
        "raw": {"bytes": 20, "hex": "01" * 20},
        "text": "one [bold]line[/bold]",
        "none": None,
    }


def test_head_of_chosen_fields(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(call(capsys, "head", dataset, "-n", 1, "--field", "n", "--field", "id", "--json")[1]) == {"id": "item-0", "n": 0}


def test_verify(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "verify", dataset)[0] == 0
    code, out, _ = call(capsys, "verify", dataset, "--json")
    assert code == 0
    assert json.loads(out) == {"ok": True, "chunks": 4, "samples": 13, "damaged": []}


def test_verify_names_the_damaged_file(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = sorted(dataset.glob("chunk-*"))[1]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    code, out, _ = call(capsys, "verify", dataset)
    assert code == 1
    assert victim.name in out
    code, out, _ = call(capsys, "verify", dataset, "--json")
    told = json.loads(out)
    assert (code, told["ok"], [entry["file"] for entry in told["damaged"]]) == (1, False, [victim.name])


@pytest.mark.parametrize("command", ["info", "head", "verify"])
def test_errors_are_one_line_without_a_traceback(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path / "nothing-here")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("liveset: ")
    assert "nothing-here" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_version_is_told(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = call(capsys, "info", dataset, "--version", 99)
    assert isinstance(code, str)
    assert "99" in code


def test_wrong_arguments_are_told_without_a_traceback(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("head", dataset, "--field", "nonsense"), ("tag", dataset, "3rd"), ("info", dataset, "--version", "2020-99-99")):
        code, out, err = call(capsys, *argv)
        assert (code, out) == (2, "")
        assert str(argv[-1]) in err


def test_output_into_a_closed_pipe_is_quiet(dataset: Path) -> None:
    """It ends as a program does that the signal kills, such as ``cat``."""
    program = [sys.executable, "-m", "liveset", "head", str(dataset), "-n", "13"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = run("demo", tmp_path / "digits")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    steps = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert steps == "optimize train find fix train look append read overwrite verify log done".split()
    for words in ("1,500 samples", "75 of the labels", "6 chunks", "digit-1500", "1,797 samples", "version 4 has", "version 3 still has"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140
    ds = liveset.StreamingDataset(tmp_path / "digits")
    assert (len(ds), len(ds.keys), ds.version) == (1797, 1797, 4)
    again = run("demo", tmp_path / "digits")
    assert again.returncode == 1
    assert len(again.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_demo_fixes_wrong_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    from liveset import demo

    said: list[str] = []
    figures = demo.run(tmp_path / "digits", workers=1, say=said.append)
    assert 60 <= figures["fixed"] <= demo.WRONG
    assert figures["fixed"] <= figures["doubtful"] <= 2 * demo.WRONG
    assert figures["accuracy"] > figures["accuracy_before"] + 0.02
    assert f"{figures['accuracy']:.1%}" in "\n".join(said)
    assert figures["chunks_rewritten"] <= 6

    truth = datasets.load_digits().target
    before, fixed, grown, last = (liveset.StreamingDataset(tmp_path / "digits", version=version) for version in (1, 2, 3, 4))
    assert sum(before[demo.name_of(i)]["label"] != truth[i] for i in range(demo.FIRST)) == demo.WRONG
    wrong = [i for i in range(demo.FIRST) if fixed[demo.name_of(i)]["label"] != truth[i]]
    assert len(wrong) == demo.WRONG - figures["fixed"]
    for ds in (grown, last):
        assert [i for i in range(len(truth)) if ds[demo.name_of(i)]["label"] != truth[i]] == wrong
    assert [version.op for version in liveset.history(tmp_path / "digits")] == ["overwrite", "append", "replace", "create"]
    assert "wrong labels" in liveset.history(tmp_path / "digits")[2].message
