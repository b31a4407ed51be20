"""The commands for single entities and for keys."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.cli import main
from liveset.cli.values import NOTHING, changes, parse_field, with_fields, with_sample
from liveset.errors import SampleError
from liveset.format.schema import Schema
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset


def play(number: int) -> dict[str, Any]:
    return {
        "id": f"play-{number}",
        "label": number % 3,
        "score": number / 2,
        "meta": {"by": "ann", "seen": [1, None]},
        "box": np.arange(3, dtype=np.float32),
        "raw": bytes([number]),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "plays", map(play, range(10)), key="id")
    return tmp_path / "plays"


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "numbers", [{"id": i - 5, "n": i} for i in range(10)], key="id")
    return tmp_path / "numbers"


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of a command; a message instead of a code means 1."""
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    code = ended.value.code
    return (1, out, err + code) if isinstance(code, str) else (code, out, err)


def words(err: str) -> str:
    """What an error says, without the frame around it."""
    return " ".join(err.replace("│", " ").split())


# --- get ------------------------------------------------------------------------------------------------------------


def test_get(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "get", path, "play-7")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "[play-7]"
    assert ["label", "1"] in [line.split() for line in lines]


def test_get_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "get", path, "play-7", "--json", "--field", "label", "--field", "box")
    assert (code, json.loads(out)) == (0, {"label": 1, "box": [0.0, 1.0, 2.0]})
    assert len(out.splitlines()) == 1


def test_keys_are_read_in_the_type_of_the_store(numbered: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(call(capsys, "get", numbered, "3", "--json")[1]) == {"id": 3, "n": 8}
    assert json.loads(call(capsys, "get", numbered, "--int", "--json", "--", "-5")[1]) == {"id": -5, "n": 0}
    code, _, err = call(capsys, "get", numbered, "three")
    assert code == 2
    assert "'three' is no integer, and the keys of this dataset are integers" in words(err)
    assert call(capsys, "get", numbered, 1 << 63)[0] == 2
    code, _, err = call(capsys, "get", path, "3", "--int")
    assert code == 1
    assert "are text, not int" in err


def test_a_text_key_of_digits_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "ds", [{"id": "007"}], key="id")
    assert json.loads(call(capsys, "get", tmp_path / "ds", "007", "--json")[1]) == {"id": "007"}
    assert call(capsys, "get", tmp_path / "ds", "7")[0] == 1


def test_get_what_is_not_there(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "get", path, "play-10")
    assert (code, out) == (1, "")
    assert "'play-10'" in err
    assert len(err.splitlines()) == 1
    write_dataset(tmp_path / "keyless", [{"n": 1}])
    code, _, err = call(capsys, "get", tmp_path / "keyless", "a")
    assert code == 1
    assert "keys/" in err
    assert call(capsys, "get", tmp_path / "nowhere", "a")[0] == 1
    code, _, err = call(capsys, "get", path, "play-1", "--field", "lable")
    assert code == 2
    assert "'lable'" in err


# --- set ------------------------------------------------------------------------------------------------------------


def test_set_fields(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "set",
        path,
        "play-7",
        "--field",
        "label=9",
        "--field",
        "meta.by=null",
        "--field",
        "score=4",
        "-m",
        "checked",
        "--author",
        "bob",
    )
    code, out, err = call(capsys, *argv)
    assert (code, err) == (1, "liveset: field 'meta.by': the field holds str and never None.")
    code, out, err = call(capsys, *argv[:5], "--field", 'meta.by="bob"', *argv[7:])
    assert (code, err) == (0, "")
    assert [line.split()[:4] for line in out.splitlines()[:2]] == [["label", "1", "->", "9"], ["score", "3.5", "->", "4.0"]]
    assert out.splitlines()[-1].startswith("version 2: 1 key in 1 chunk, ")
    ds = liveset.StreamingDataset(path)
    assert (ds["play-7"]["label"], ds["play-7"]["score"], ds["play-7"]["meta"]) == (9, 4.0, {"by": "bob", "seen": [1, None]})
    assert type(ds["play-7"]["score"]) is float
    assert np.array_equal(ds["play-7"]["box"], play(7)["box"])
    assert [ds[i]["label"] for i in range(10) if i != 7] == [i % 3 for i in range(10) if i != 7]
    newest = liveset.history(path)[0]
    assert (newest.op, newest.message, newest.author) == ("replace", "checked", "bob")


def test_set_a_whole_sample(numbered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capsys, "set", numbered, 3, "--json", '{"id": 3, "n": 80}', "--as-json")
    told = json.loads(out)
    assert code == 0
    assert told.pop("milliseconds") > 0
    assert told.pop("bytes") > 0
    assert told == {"key": 3, "dry_run": False, "version": 2, "keys": 1, "inserted": 0, "deleted": 0, "chunks": 1}
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"id": 3, "n": 81}\n'))
    assert call(capsys, "set", numbered, 3, "--json", "-")[0] == 0
    assert liveset.StreamingDataset(numbered).get_by_key(3) == {"id": 3, "n": 81}


def test_a_dry_run_tells_what_it_would_cost(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    code, out, _ = call(capsys, "set", path, "play-7", "--field", "label=9", "--dry-run")
    with liveset.dataset_update(path) as update:
        update["play-7"] = update["play-7"]
        size = update.preview().bytes_to_rewrite
    assert code == 0
    assert out.splitlines() == ["label  1 -> 9", f"would change 1 key in 1 chunk, {size:,} bytes to rewrite"]
    told = json.loads(call(capsys, "set", path, "play-7", "--field", "label=9", "--dry-run", "--as-json")[1])
    assert told == {
        "key": "play-7",
        "dry_run": True,
        "version": None,
        "keys": 1,
        "inserted": 0,
        "deleted": 0,
        "chunks": 1,
        "bytes": size,
        "milliseconds": None,
    }
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_the_same_again_makes_no_version(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "set", path, "play-7", "--field", "label=1")[:2] == (0, "nothing to change in version 1\n")
    told = json.loads(call(capsys, "set", path, "play-7", "--field", "label=1", "--as-json")[1])
    assert (told["version"], told["keys"], told["chunks"], told["bytes"]) == (1, 0, 0, 0)
    assert liveset.StreamingDataset(path).version == 1


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "give the whole new sample with --json; liveset patch PATH KEY NAME=VALUE changes some fields"),
        (["--json", "{}", "--field", "label=1"], 2, "give the whole new sample with --json"),
        (["--json", "{"], 2, "the sample is not JSON"),
        (["--field", "label"], 2, "'label' is not of the form name=value"),
        (["--field", "meta.by=bob"], 2, """text is written with quotes: 'meta.by="bob"'"""),
        (["--field", "raw=1"], 1, "field 'raw' holds what JSON cannot express (bytes): use liveset.dataset_update in Python"),
        (["--field", 'box="1, 2"'], 1, "field 'box': '1, 2' does not fit: the field holds array[float32, 1-d]: give a list"),
        (["--field", 'label="x"'], 1, "field 'label': 'x' does not fit: the field holds int"),
        (["--field", "lable=1"], 1, "'lable'"),
        (["--field", "meta.at.x=1"], 1, "the sample has no field 'meta.at.x'"),
        (["--field", 'id="play-8"'], 1, "field 'id' says 'play-8'"),
        (["--json", '{"id": "play-7", "label": 1}'], 1, "is missing here"),
        (["--json", '{"id": "play-7", "raw": "x"}'], 1, "field 'raw' holds what JSON cannot express"),
        (["--json", "7"], 1, "field 'id' holds the key"),
    ],
)
def test_what_cannot_be_set_is_told(path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str) -> None:
    got, out, err = call(capsys, "set", path, "play-7", *argv)
    assert (got, out) == (code, "")
    assert said in words(err)
    assert liveset.StreamingDataset(path).version == 1


def test_an_unknown_key_is_not_made(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "set", path, "play-77", "--field", "label=1")
    assert code == 1
    assert "'play-77'" in err


def test_the_first_set_adopts_a_dataset_of_the_old_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_foreign(tmp_path / "old", [{"id": f"k{i}", "n": i} for i in range(10)])
    assert call(capsys, "set", tmp_path / "old", "k3", "--field", "n=30")[0] == 0
    assert json.loads(call(capsys, "get", tmp_path / "old", "k3", "--json")[1]) == {"id": "k3", "n": 30}
    assert json.loads(call(capsys, "get", tmp_path / "old", "k4", "--json")[1]) == {"id": "k4", "n": 4}


# --- edits, apart from the command ----------------------------------------------------------------------------------


def test_parts_keep_their_types() -> None:
    stored: dict[str, Any] = {
        "pair": (1, 0.5),
        "od": OrderedDict(a=1.0),
        "dd": defaultdict(int, a=1),
        "dq": deque([1, 2], 5),
        "when": {date(2020, 1, 1)},
        "json": [1, 2.5],
        "meta.id": 3,
        "arr": np.zeros(2),
    }
    root = Schema.of(stored).root
    new = with_fields(
        root,
        stored,
        [*map(parse_field, ("pair=[2, 1]", 'od={"a": 2}', 'dd={"a": 5}', "dq=[3, 4]", "json[0]=7", "meta.id=4", "od.a=3", "pair[1]=2"))],
    )
    assert new["pair"] == (2, 2.0)
    assert type(new["pair"][1]) is float
    assert new["od"] == OrderedDict(a=3.0)
    assert type(new["od"]) is OrderedDict
    assert new["dd"] == {"a": 5}
    assert type(new["dd"]) is defaultdict
    assert new["dq"] == deque([3, 4], 5)
    assert new["dq"].maxlen == 5
    assert new["json"] == [7, 2.5]
    assert new["meta.id"] == 4
    assert new["arr"] is stored["arr"]
    assert stored["pair"] == (1, 0.5), "the stored sample is not touched"
    assert Schema.of(new) == Schema.of(stored)
    with pytest.raises(SampleError, match="'when' holds what JSON cannot express"):
        with_fields(root, stored, [("when", "2020-01-02")])
    array = with_fields(root, stored, [("arr", [1, 2, 3])])["arr"]
    assert (array.dtype, array.tolist()) == (np.float64, [1.0, 2.0, 3.0])


def test_whole_samples_that_are_no_dicts() -> None:
    stored = (1, [2.0, "x"])
    new = with_sample(Schema.of(stored).root, stored, [3, [4, "y"]])
    assert new == (3, [4.0, "y"])
    assert Schema.of(new) == Schema.of(stored)


def test_changes_are_told_by_field() -> None:
    same = np.zeros(2)
    old, new = {"a": 1, "b": same, "c": 1, "d": 1}, {"a": 1.0, "b": same, "c": 1, "e": None}
    assert [tuple(change) for change in changes(old, new)] == [("a", 1, 1.0), ("d", 1, NOTHING), ("e", NOTHING, None)]
    assert [tuple(change) for change in changes(1, 2)] == [("", 1, 2)]
    assert list(changes([1], [1])) == []


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyless(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "keyless", [{"id": f"k{i}", "meta": {"no": i}, "twice": i // 2, "x": i / 2} for i in range(10)])
    return tmp_path / "keyless"


def test_keys_build(keyless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "keys", "build", keyless, "--field", "id", "--dry-run")[:2] == (0, "would build 10 keys (text) from the field id\n")
    assert liveset.StreamingDataset(keyless).version == 1
    assert call(capsys, "keys", "build", keyless, "--field", "id")[:2] == (0, "version 2: 10 keys (text) from the field id\n")
    assert liveset.StreamingDataset(keyless)["k3"]["twice"] == 1
    for more in ((), ("--dry-run",)):
        code, _, err = call(capsys, "keys", "build", keyless, "--field", "meta.no", *more)
        assert code == 1
        assert "has keys already; --overwrite builds them again" in err
    code, out, _ = call(capsys, "keys", "build", keyless, "--field", "meta.no", "--overwrite", "--yes", "--shards", "2", "--json")
    assert (code, json.loads(out)) == (0, {"field": "meta.no", "keys": 10, "type": "int", "version": 3, "dry_run": False})
    assert len(list((keyless / "keys").glob("shard-*.parquet"))) == 2
    assert liveset.StreamingDataset(keyless).get_by_key(3)["id"] == "k3"


def test_keys_are_replaced_only_after_a_yes(keyless: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build = ("keys", "build", keyless, "--overwrite", "--field")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call(capsys, *build, "id", "-m", "by name", "--author", "bob")[0] == 0  # there is nothing to replace yet
    newest = liveset.history(keyless)[0]
    assert (newest.op, newest.message, newest.author) == ("keys", "by name", "bob")
    code, out, err = call(capsys, *build, "meta.no")
    assert (code, out) == (1, "")
    assert err.startswith(f"Replace the keys of {keyless} by the field meta.no? [y/N] ")
    assert "nothing was done; --yes does it" in err
    assert call(capsys, *build, "meta.no", "--dry-run")[:2] == (0, "would build 10 keys (int) from the field meta.no\n")
    assert liveset.StreamingDataset(keyless).version == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert call(capsys, *build, "meta.no")[:2] == (0, "version 3: 10 keys (int) from the field meta.no\n")


def test_a_dry_run_leaves_a_dataset_of_the_old_tool_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_foreign(tmp_path / "old", [{"id": i, "no": i + 1} for i in range(10)])
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "old").rglob("*")}
    told = call(capsys, "keys", "build", tmp_path / "old", "--field", "no", "--overwrite", "--dry-run", "--json")[1]
    assert json.loads(told) == {"field": "no", "keys": 10, "type": "int", "version": None, "dry_run": True}
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "old").rglob("*")} == before


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(("field", "said"), [("twice", "occur more than once"), ("x", "float"), ("nothing", "no field 'nothing'")])
def test_keys_that_cannot_be_built(keyless: Path, capsys: pytest.CaptureFixture[str], field: str, said: str, more: tuple[str, ...]) -> None:
    code, out, err = call(capsys, "keys", "build", keyless, "--field", field, *more)
    assert (code, out) == (1, "")
    assert said in err
    assert liveset.StreamingDataset(keyless).version == 1


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_keys_of_mixed_types_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    write_dataset(tmp_path / "mixed", [{"id": 1}, {"id": "one"}])
    code, _, err = call(capsys, "keys", "build", tmp_path / "mixed", "--field", "id", *more)
    assert code == 1
    assert "mixed" in err


def test_keys_list(path: Path, numbered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "keys", "list", path)[1].split() == [f"play-{i}" for i in range(10)]
    assert call(capsys, "keys", "list", path, "-n", 2, "--json")[1] == '"play-0"\n"play-1"\n'
    assert call(capsys, "keys", "list", numbered, "-n", 2, "--json")[1] == "-5\n-4\n"


def test_keys_stats(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = list((path / "_liveset" / "keys").iterdir())
    shards = list((path / "keys").iterdir())
    told = json.loads(call(capsys, "keys", "stats", path, "--json")[1])
    assert told == {
        "version": 1,
        "keys": 10,
        "type": "text",
        "field": "id",
        "tables": 1,
        "bytes": sum(file.stat().st_size for file in tables),
        "published": 1,
        "published_bytes": sum(file.stat().st_size for file in shards),
    }
    out = call(capsys, "keys", "stats", path)[1]
    assert ["keys", "10"] in [line.split() for line in out.splitlines()]


def test_keys_of_the_old_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_foreign(tmp_path / "old", [{"id": i} for i in range(10)])
    told = json.loads(call(capsys, "keys", "stats", tmp_path / "old", "--json")[1])
    assert (told["version"], told["keys"], told["type"], told["tables"], told["published"]) == (0, 10, "int", 0, 1)
    assert call(capsys, "keys", "list", tmp_path / "old", "-n", 3)[1].split() == ["0", "1", "2"]
    assert "another program" in call(capsys, "keys", "stats", tmp_path / "old")[1]


def test_earlier_versions_are_asked_by_number_and_tag(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    liveset.tag(path, "first")
    call(capsys, "set", path, "play-7", "--field", "label=9")
    for version in ("first", "1"):
        assert json.loads(call(capsys, "get", path, "play-7", "--version", version, "--json")[1])["label"] == 1
        assert json.loads(call(capsys, "head", path, "-n", 8, "--version", version, "--json")[1].splitlines()[7])["label"] == 1
        assert json.loads(call(capsys, "info", path, "--version", version, "--json")[1])["version"] == 1
        assert json.loads(call(capsys, "keys", "stats", path, "--version", version, "--json")[1])["version"] == 1
    assert json.loads(call(capsys, "get", path, "play-7", "--json")[1])["label"] == 9


# --- help and completion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["get"], ["set"], ["keys", "build"], ["keys", "list"], ["keys", "stats"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"liveset {' '.join(command)}" in words(out)


def test_completion() -> None:
    program = [sys.executable, "-m", "liveset"]
    asked = {**os.environ, "_LIVESET_COMPLETE": "complete_bash", "COMP_WORDS": "liveset ke", "COMP_CWORD": "1"}
    done = subprocess.run(program, env=asked, capture_output=True, text=True)
    assert done.stdout.split() == ["keys"]
    asked |= {"COMP_WORDS": "liveset keys b", "COMP_CWORD": "2"}
    assert subprocess.run(program, env=asked, capture_output=True, text=True).stdout.split() == ["build"]
    asked |= {"COMP_WORDS": "liveset p", "COMP_CWORD": "1"}
    assert subprocess.run(program, env=asked, capture_output=True, text=True).stdout.split() == ["patch", "purge"]
    asked |= {"COMP_WORDS": "liveset apply ds table --on-missing ", "COMP_CWORD": "5"}
    assert subprocess.run(program, env=asked, capture_output=True, text=True).stdout.split() == ["error", "skip", "insert"]
    script = {**os.environ, "_LIVESET_COMPLETE": "source_bash"}
    assert "complete -o default" in subprocess.run(program, env=script, capture_output=True, text=True).stdout
    assert "--install-completion" in subprocess.run([*program, "--help"], capture_output=True, text=True).stdout
