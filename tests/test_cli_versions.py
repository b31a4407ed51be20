"""The commands log, tag, restore and vacuum: for people, for programs, and before anything is destroyed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

import liveset
from liveset.cli import main
from liveset.cli.versions import parse_keep, parse_version
from tests.support.writing import write_dataset


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of a command run in this process."""
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    code, out, err = call(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ds"
    for number in (1, 2, 3):
        write_dataset(path, [{"n": number}] * number)
    return path


def files(path: Path) -> set[str]:
    return {str(file) for file in path.rglob("*")}


@pytest.mark.parametrize("command", ["log", "tag", "restore", "vacuum"])
def test_help_has_examples_and_errors_are_one_line(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "[[" not in out
    assert "Example" in out
    assert "--json" in out
    assert ("--dry-run" in out) == (command != "log")
    more = {"tag": ["paper"], "restore": ["1", "--yes"]}.get(command, [])
    code, out, _ = call(capsys, command, tmp_path / "absent", *more)
    assert isinstance(code, str)
    assert code.startswith("liveset: ")
    assert "absent" in code
    assert "\n" not in code
    assert out == ""


def test_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    liveset.tag(path, "paper", 2, message="as [printed]", author="ann")
    code, out, err = call(capsys, "log", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0].isdecimal()] == ["4", "3", "2", "1"]
    for word in ("overwrite", "tag", "[paper]", "as [printed]", "(ann)"):
        assert word in out
    assert len(call(capsys, "log", path, "-n", 2)[1].splitlines()) == 3


def test_log_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    liveset.tag(path, "paper", 2)
    found = told(capsys, "log", path)
    assert [entry["version"] for entry in found] == [4, 3, 2, 1]
    assert (found[2]["tags"], found[2]["samples"], found[2]["available"]) == (["paper"], 2, True)
    assert found[2]["bytes"] == found[2]["bytes_alone"] > 0
    assert datetime.fromisoformat(found[0]["committed_at"]).tzinfo is not None
    assert [entry["version"] for entry in told(capsys, "log", path, "-n", 1)] == [4]


def test_tag(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "tag", path, "paper", 1)[1] == "version 1 is tagged paper\n"
    assert liveset.StreamingDataset(path, version="paper").version == 1
    taken = f"liveset: the tag 'paper' names version 1 of {path}: --move gives it to version 2."
    for more in ([], ["--dry-run"]):
        assert call(capsys, "tag", path, "paper", 2, *more) == (taken, "", "")
    assert told(capsys, "tag", path, "paper", 2, "--move", "--yes") == {"tag": "paper", "version": 2, "dry_run": False}
    newest = liveset.StreamingDataset(path).version
    assert call(capsys, "tag", path, "x", "--dry-run")[1] == f"version {newest} would be tagged x\n"
    assert call(capsys, "tag", path, "paper", "--delete", "--dry-run")[1] == "version 2 would lose the tag paper\n"
    assert liveset.StreamingDataset(path).version == newest
    assert call(capsys, "tag", path, "paper", "-d", "-y")[1] == "version 2 lost the tag paper\n"
    assert call(capsys, "tag", path, "paper", "-d")[0] == f"liveset: {path} has no tag 'paper'."
    assert call(capsys, "tag", path, "5")[0] == 2
    assert call(capsys, "tag", path, "paper", 1, "--delete")[0] == 2


def test_taking_a_name_away_asks_first(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    liveset.tag(path, "paper", 1)
    before = files(path)
    for more in (["2", "--move"], ["--delete"]):
        program = [sys.executable, "-m", "liveset", "tag", str(path), "paper", *more]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert "--yes does it without asking" in done.stderr
        assert files(path) == before
    monkeypatch.setattr("sys.stdin", io.StringIO("n\ny\ny\n"))
    code, _, err = call(capsys, "tag", path, "paper", 2, "--move")
    assert "nothing was done" in str(code)
    assert err == "Take the tag paper away from version 1 and give it to version 2? [y/N] "
    assert files(path) == before
    assert call(capsys, "tag", path, "paper", 2, "--move", "-m", "the errata")[:2] == (0, "version 2 is tagged paper\n")
    code, out, err = call(capsys, "tag", path, "paper", "--delete", "--author", "ann")
    assert (code, out, err) == (0, "version 2 lost the tag paper\n", "Take the tag paper away from version 2? [y/N] ")
    assert [(entry.message, entry.author) for entry in liveset.history(path)[:2]] == [("", "ann"), ("the errata", "")]


def test_only_what_takes_something_away_asks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["new"], ["new", 3, "--move"], ["other", "--move"]):
        code, _, err = call(capsys, "tag", path, *argv)
        assert (code, err) == (0, "")


def test_a_file_is_no_dataset(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = path / "index.json"
    commands = ["info", "head", "verify", "log", "vacuum", "tag x", "restore 1", "get a", "keys list", "keys stats", "keys build --field n"]
    for command in (*commands, "set a --field n=1"):
        verb, *more = command.split()
        words = [verb, more.pop(0), file] if verb == "keys" else [verb, file]
        code, out, _ = call(capsys, *words, *more)
        assert (command, code) == (command, f"liveset: {file} is a file, and a dataset is a folder: the one that holds index.json.")
        assert out == ""


@pytest.mark.parametrize("command", ["info", "verify", "log", "restore 1", "keys list", "delete a", "compact", "repair", "demo"])
def test_urls_are_not_taken_for_paths(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *more = command.split()
    words = [verb, more.pop(0)] if verb == "keys" else [verb]
    code, out, err = call(capsys, *words, "ftp://bucket/plays", *more)
    assert (code, out) == (2, "")
    assert "ftp:// is not supported" in err
    assert not Path("ftp:").exists()


def test_urls_of_files_are_paths(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "info", f"file://{path}") == call(capsys, "info", path)


def test_restore_asks_first(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(path)
    assert call(capsys, "restore", path, 1, "--dry-run")[1] == ("would put version 1 (1 samples) in the place of version 3 (3 samples)\n")
    done = subprocess.run(
        [sys.executable, "-m", "liveset", "restore", str(path), "1"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--yes" in done.stderr
    assert files(path) == before
    monkeypatch.setattr("sys.stdin", io.StringIO("n\ny\n"))
    assert "--yes" in str(call(capsys, "restore", path, 1)[0])
    assert files(path) == before
    assert call(capsys, "restore", path, 1, "-m", "the labels were wrong")[1] == "version 4 has the content of version 1: 1 samples\n"
    assert liveset.history(path)[0].message == "the labels were wrong"
    assert told(capsys, "restore", path, 2, "--yes") == {"restored": 2, "version": 5, "samples": 2, "dry_run": False}
    assert told(capsys, "restore", path, 1, "--dry-run")["version"] is None
    assert call(capsys, "restore", path, 9, "--yes")[0] == f"liveset: {path} has no version 9: the newest is 5."


def test_vacuum_tells_first_and_does_it_with_yes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "notes.txt").write_text("mine")
    before = files(path)
    code, out, err = call(capsys, "vacuum", path, "--keep", 1, "--grace", "0d")
    assert (code, err) == (0, "")
    for words in ("would delete 4 files", "2 of kind 'chunk'", "would forget 2 versions; 1 would stay", "notes.txt", "--yes does it"):
        assert words in out
    assert files(path) == before
    assert call(capsys, "vacuum", path, "--keep", 1, "--grace", "0d", "--dry-run")[1] == out
    found = told(capsys, "vacuum", path, "--keep", 1, "--grace", "0s", "--yes", "-m", "room", "--author", "ann")
    newest = liveset.history(path)[0]
    assert (newest.op, newest.message, newest.author) == ("fence", "room", "ann")
    assert told(capsys, "log", path)[0]["op"] == "vacuum"
    assert [line.split()[3] for line in call(capsys, "log", path)[1].splitlines()[1:]][:2] == ["vacuum", "overwrite"]
    assert (found["version"], found["expired"], found["kept"], found["files"]) == (4, [1, 2], [3, 4], 4)
    assert found["unknown"] == ["notes.txt"]
    gone = {str(path / name) for names in found["deleted"].values() for name in names}
    assert before - files(path) == gone
    assert liveset.StreamingDataset(path)[:] == [{"n": 3}] * 3
    out = call(capsys, "vacuum", path, "--yes")[1]
    assert "deleted 0 files" in out
    assert "--yes" not in out
    assert call(capsys, "vacuum", path, "--yes", "--dry-run")[0] == 2


def test_vacuum_names_what_readers_hold(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with liveset.StreamingDataset(path, version=1, pin=True):
        assert "pinned by readers: 1" in call(capsys, "vacuum", path, "--keep", 1)[1]


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        ("30m", timedelta(minutes=30)),
        ("2w", timedelta(weeks=2)),
        ("10", 10),
        ("0", 0),
        ("9999999d", timedelta(days=100_000)),
        ("99999999999999w", timedelta(days=100_000)),
    ],
)
def test_what_to_keep(text: str, keep: timedelta | int) -> None:
    assert parse_keep(text) == keep


@pytest.mark.parametrize("text", ["", "7", "x", "7 days", "-1d", "d", "1.5d"])
def test_what_is_no_time_is_a_usage_error(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "vacuum", path, f"--grace={text}")[0] == 2


def test_names_of_versions() -> None:
    assert parse_version("12") == 12
    assert parse_version("paper") == "paper"
    assert parse_version("2030-01-02T03:04+00:00") == datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
    local = parse_version("2030-01-02")
    assert isinstance(local, datetime)
    assert local.tzinfo is not None
    assert (local.year, local.month, local.day, local.hour) == (2030, 1, 2, 0)
    with pytest.raises(typer.BadParameter, match="is no time"):
        parse_version("2030-13-01")
