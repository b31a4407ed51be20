"""The commands that edit: what they do, what they cost, and that wrong input and dry runs change nothing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.cli import main
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset

PLAY_3 = '{"id": "play-3", "label": 9, "pair": [1, 2], "box": [3, 4], "meta": {"by": "bob", "seen": null}}'
COUNTS = ("keys", "inserted", "deleted", "chunks")


def play(number: int) -> dict[str, Any]:
    box = np.arange(number, number + 3, dtype=np.int16)
    return {"id": f"play-{number}", "label": number % 3, "pair": (number, 0.5), "box": box, "meta": {"by": "ann", "seen": [1, None]}}


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


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    """What a command prints as JSON."""
    code, out, err = call(capsys, argv[0], "--as-json" if argv[0] in ("set", "insert") else "--json", *argv[1:])
    assert (code, err) == (0, "")
    return json.loads(out)


def words(err: str) -> str:
    """What an error says, without the frame around it."""
    return " ".join(err.replace("│", " ").split())


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def files(path: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")}


def write(path: Path, name: str, text: str) -> Path:
    file = path.parent / name
    file.write_text(text, encoding="utf-8")
    return file


def ids(path: Path) -> list[Any]:
    return list(liveset.StreamingDataset(path).keys)


# --- patch, set and insert ------------------------------------------------------------------------------------------


def test_patch(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys, "patch", path, "play-7", "label=9", 'meta.by="bob"', "pair[1]=4", "box=[5, 6]", "-m", "checked", "--author", "bob"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["label", "1", "->", "9"]
    assert lines[-1].startswith("version 2: 1 key in 1 chunk, ")
    ds = liveset.StreamingDataset(path)
    new = ds["play-7"]
    assert (new["label"], new["pair"], new["meta"]) == (9, (7, 4.0), {"by": "bob", "seen": [1, None]})
    assert (type(new["pair"]), type(new["pair"][1])) == (tuple, float)
    assert (new["box"].dtype, new["box"].tolist()) == (np.int16, [5, 6])
    assert [ds[i]["label"] for i in range(10) if i != 7] == [i % 3 for i in range(10) if i != 7]
    newest = liveset.history(path)[0]
    assert (newest.message, newest.author) == ("checked", "bob")
    assert call(capsys, "patch", path, "play-7", "label=9", "box=[5, 6]")[:2] == (0, "nothing to change in version 2\n")


def test_set_field_is_patch(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = told(capsys, "patch", path, "play-7", "label=9", "--dry-run")
    other = told(capsys, "set", path, "play-7", "--field", "label=9", "--dry-run")
    assert one == other
    assert one["key"] == "play-7"


def test_patch_of_samples_that_are_no_dicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "pairs", [(f"k{i}", i) for i in range(4)], key=lambda pair: str(pair[0]))
    assert call(capsys, "patch", tmp_path / "pairs", "k2", "[1]=20")[0] == 0
    assert liveset.StreamingDataset(tmp_path / "pairs")["k2"] == ("k2", 20)
    write_dataset(tmp_path / "whole", [{"id": "a", "x": 1}, {"id": "b", "y": [1]}], key="id")
    assert call(capsys, "patch", tmp_path / "whole", "b", "y=[2, 3]")[0] == 0
    assert liveset.StreamingDataset(tmp_path / "whole")["b"]["y"] == [2, 3]


def test_patch_of_a_field_with_values_of_several_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "ds", [{"id": "a", "v": "x"}, {"id": "b", "v": b"y"}], key="id")
    assert call(capsys, "patch", tmp_path / "ds", "a", 'v="z"')[0] == 0
    assert [sample["v"] for sample in liveset.StreamingDataset(tmp_path / "ds")] == ["z", b"y"]
    for key, value in (("a", "1"), ("b", '"y"')):
        code, _, err = call(capsys, "patch", tmp_path / "ds", key, f"v={value}")
        assert code == 1
        assert "field 'v' holds what JSON cannot express" in err


def test_patch_by_integer_key(numbered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "patch", numbered, "3", "n=80")["key"] == 3
    assert call(capsys, "patch", numbered, "--int", "--", "-5", "n=81")[0] == 0
    ds = liveset.StreamingDataset(numbered)
    assert (ds.get_by_key(3), ds.get_by_key(-5)) == ({"id": 3, "n": 80}, {"id": -5, "n": 81})


def test_insert(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sample = PLAY_3.replace("play-3", "play-99")
    answer = told(capsys, "insert", path, "play-99", "--json", sample)
    assert answer.pop("bytes") > 0
    assert answer.pop("milliseconds") > 0
    assert answer == {"key": "play-99", "dry_run": False, "version": 2, "keys": 1, "inserted": 1, "deleted": 0, "chunks": 0}
    new = liveset.StreamingDataset(path)[-1]
    assert (new["id"], new["pair"], new["box"].dtype, new["meta"]["seen"]) == ("play-99", (1, 2.0), np.int16, None)

    code, out, err = call(capsys, "insert", path, "play-99", "--json", sample)
    assert (code, out) == (1, "")
    assert err.endswith("has the key 'play-99' already; --replace replaces its sample.")
    stdin(monkeypatch, sample.replace("9,", "8,"))
    assert call(capsys, "insert", path, "play-99", "--json", "-", "--replace")[1].startswith("version 3: 1 key in 1 chunk, ")
    assert liveset.StreamingDataset(path)["play-99"]["label"] == 8
    assert len(ids(path)) == 11


def test_insert_where_nothing_is_left(numbered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "delete", numbered, "--", *range(-5, 5))["deleted"] == 10
    assert told(capsys, "insert", numbered, 7, "--json", '{"id": 7, "n": 1}')["inserted"] == 1
    assert list(liveset.StreamingDataset(numbered)) == [{"id": 7, "n": 1}]


# --- delete -----------------------------------------------------------------------------------------------------------


def test_delete(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "delete", path, "play-1", "play-8", "play-1", "-m", "twice")
    assert (code, err) == (0, "")
    assert out.startswith("version 2: 2 keys (2 deleted) in 2 chunks, ")
    assert ids(path) == [f"play-{i}" for i in range(10) if i not in (1, 8)]
    assert (liveset.history(path)[0].op, liveset.history(path)[0].message) == ("delete", "twice")
    assert call(capsys, "restore", path, 1, "--yes")[0] == 0
    assert len(ids(path)) == 10


def test_delete_keys_from_a_file_and_stdin(
    path: Path, numbered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = write(path, "bad.txt", "play-1\r\n\nplay-2\nplay-1")
    answer = told(capsys, "delete", path, "play-3", "--keys-from", listed)
    assert [answer[name] for name in COUNTS] == [3, 0, 3, 1]
    assert told(capsys, "delete", path, "--keys-from", write(path, "bom.txt", "\ufeffplay-4\n"))["deleted"] == 1
    with pytest.raises(SystemExit, match="' play-5 '"):
        main(["delete", str(path), "--keys-from", str(write(path, "spaces.txt", " play-5 \n"))])
    stdin(monkeypatch, "-5\n4\n")
    assert told(capsys, "delete", numbered, "--keys-from", "-")["deleted"] == 2
    assert ids(numbered) == list(range(-4, 4))
    assert call(capsys, "delete", path, "--keys-from", write(path, "empty.txt", ""))[:2] == (0, "nothing to change in version 3\n")


def test_delete_of_unknown_keys(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "delete", path, "play-1", *(f"play-{i}" for i in range(10, 22)))
    assert (code, out) == (1, "")
    assert "has no samples with the keys 'play-10', 'play-11', " in err
    assert err.endswith("'play-19' and 2 more; nothing was changed.")
    assert call(capsys, "delete", path, "play-77")[2].endswith("has no sample with the key 'play-77'; nothing was changed.")
    assert liveset.StreamingDataset(path).version == 1
    assert told(capsys, "delete", path, "play-1", "play-77", "--skip-missing")["deleted"] == 1


# --- apply ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.ndjson", "t.json", "t.parquet", "t.arrow"])
def test_apply(name: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rows = tmp_path / name, [{"id": "play-1", "label": 7}, {"id": "play-9", "label": 8}]
    if file.suffix == ".csv":
        file.write_text("id,label\nplay-1,7\nplay-9,8\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif "json" in file.suffix:
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pa.Table.from_pylist(rows)
        if file.suffix == ".parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
    code, out, err = call(capsys, "apply", path, file, "-m", "second annotator")
    assert (code, err) == (0, "")
    assert out.startswith("version 2: 2 keys in 2 chunks, ")
    assert [sample["label"] for sample in liveset.StreamingDataset(path)] == [0, 7, 2, 0, 1, 2, 0, 1, 2, 8]


def test_apply_from_stdin(numbered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "who,n\n-5,50\n3,30\n")
    answer = told(capsys, "apply", numbered, "-", "--format", "csv", "--key", "who")
    assert [answer[name] for name in COUNTS] == [2, 0, 0, 2]
    stdin(monkeypatch, '{"id": -5, "n": 51}\n')
    assert call(capsys, "apply", numbered, "-", "--format", "jsonl")[0] == 0
    named = write(numbered, "changes.txt", '[{"id": -4, "n": 52}]')
    assert call(capsys, "apply", numbered, named, "--format", "json")[0] == 0
    assert [liveset.StreamingDataset(numbered).get_by_key(key)["n"] for key in (-5, -4, 3)] == [51, 52, 30]
    stdin(monkeypatch, "id,n\n-5,50\n3,many\n")
    code, out, err = call(capsys, "apply", numbered, "-", "--format", "csv")
    assert (code, out) == (1, "")
    assert err == "liveset: stdin, row 2 (key 3), column 'n': 'many' does not fit: the field holds int."


def test_apply_keys_that_are_not_there(numbered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(numbered, "t.csv", "id,n\n3,30\n77,1\n78,2\n")
    code, _, err = call(capsys, "apply", numbered, table)
    assert code == 1
    assert "77, 78" in err
    assert liveset.StreamingDataset(numbered).version == 1
    for choice, counts in (("skip", [1, 0, 0, 1]), ("insert", [3, 2, 0, 0])):  # the first sample is what it should be by then
        answer = told(capsys, "apply", numbered, table, "--on-missing", choice)
        assert [answer[name] for name in COUNTS] == counts
    assert ids(numbered)[-2:] == [77, 78]


# --- what all of them have ------------------------------------------------------------------------------------------


EDITS: dict[str, list[str]] = {
    "set": ["set", "PATH", "play-3", "--json", PLAY_3],
    "patch": ["patch", "PATH", "play-3", "label=9"],
    "insert": ["insert", "PATH", "play-10", "--json", PLAY_3.replace("play-3", "play-10")],
    "delete": ["delete", "PATH", "play-3"],
    "apply": ["apply", "PATH", "labels.csv"],
}


@pytest.fixture
def labels(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, "labels.csv", "id,label\nplay-3,9\n")
    monkeypatch.chdir(path.parent)


def command(name: str, path: Path) -> list[str]:
    return [str(path) if part == "PATH" else part for part in EDITS[name]]


@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize("name", EDITS)
def test_a_dry_run_tells_the_cost_and_changes_nothing(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(path)
    preview = told(capsys, *command(name, path), "--dry-run")
    code, out, err = call(capsys, *command(name, path), "--dry-run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("would change 1 key")
    assert out.splitlines()[-1].endswith(f" {preview['bytes']:,} bytes to rewrite")
    assert files(path) == before
    assert (preview["dry_run"], preview["version"], preview["milliseconds"]) == (True, None, None)
    chunks = liveset.StreamingDataset(path).info().chunks
    done = told(capsys, *command(name, path))
    assert (done["dry_run"], done["version"]) == (False, 2)
    assert [done[count] for count in COUNTS] == [preview[count] for count in COUNTS]
    assert (preview["bytes"] > 0) == (name != "insert")
    assert liveset.StreamingDataset(path).info().chunks == chunks + (name == "insert")


@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize("name", EDITS)
def test_a_session_is_done_once(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = told(capsys, *command(name, path), "--session", "job-1")
    assert (first["version"], liveset.history(path)[0].session) == (2, "job-1")
    again = told(capsys, *command(name, path), "--session", "job-1")
    assert (again["version"], again["keys"]) == (2, 0)
    assert again.keys() == first.keys()
    assert call(capsys, *command(name, path), "--session", "job-1")[1] == "the session job-1 was committed already, as version 2\n"
    assert liveset.StreamingDataset(path).version == 2
    assert call(capsys, *command(name, path), "--session", "")[0] == 2


@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize("name", EDITS)
def test_the_first_edit_adopts_a_dataset_of_the_old_tool(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    write_foreign(old, [{"id": f"play-{i}", "label": i} for i in range(10)])
    argv = [part if not part.startswith("{") else json.dumps({"id": EDITS[name][2], "label": 9}) for part in command(name, old)]
    assert told(capsys, *argv)["keys"] == 1
    # Where samples move, the published keys are withdrawn: it is adopted in a commit of its own before that.
    moves = name in ("delete", "insert")
    assert [version.op for version in liveset.history(old)][-2:] == (["adopt", "foreign"] if moves else ["replace", "foreign"])
    assert liveset.StreamingDataset(old).version == 1 + moves


@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["patch", "PATH", "play-77", "label=1"], 1, "no sample with the key 'play-77'"),
        (["patch", "PATH", "play-7", "--int", "label=1"], 2, "'play-7' is no integer"),
        (["patch", "PATH", "7", "--int", "label=1"], 1, "are text, not int"),
        (["patch", "PATH", "play-7"], 2, "Missing argument"),
        (["patch", "PATH", "play-7", "label=1", "label=2"], 2, "the field 'label' is given twice."),
        (["patch", "PATH", "play-7", "label=1", "['label']=1"], 2, """the field "['label']" is given twice."""),
        (["patch", "PATH", "play-7", "label"], 2, "'label' is not of the form name=value"),
        (["patch", "PATH", "play-7", "=1"], 2, "'=1' is not of the form name=value"),
        (["patch", "PATH", "play-7", "label=x"], 2, """the value of 'label' is not JSON"""),
        (["patch", "PATH", "play-7", "meta.by=bob"], 2, """text is written with quotes: 'meta.by="bob"'"""),
        (["patch", "PATH", "play-7", 'label="x"'], 1, "field 'label': 'x' does not fit: the field holds int"),
        (["patch", "PATH", "play-7", "label=null"], 1, "field 'label': the field holds int and never None"),
        (["patch", "PATH", "play-7", "label=9223372036854775808"], 1, "field 'label': 9223372036854775808 does not fit"),
        (["patch", "PATH", "play-7", "box=[0.5]"], 1, "field 'box': [0.5] does not fit: the field holds array[int16, 1-d]"),
        (["patch", "PATH", "play-7", "box[0]=1"], 1, "no field 'box[0]'"),
        (["patch", "PATH", "play-7", "pair=[1]"], 1, "'pair'"),
        (["patch", "PATH", "play-7", "lable=1"], 1, "there is no field 'lable': the samples have the fields id, label"),
        (["patch", "PATH", "play-7", 'id="play-8"'], 1, "field 'id' says 'play-8'"),
        (["patch", "nowhere", "play-7", "label=1"], 1, "nowhere"),
        (["insert", "PATH", "play-10"], 2, "Missing option '--json'"),
        (["insert", "PATH", "play-10", "--json", "{"], 2, "the sample is not JSON"),
        (["insert", "PATH", "play-10", "--json", '{"id": "play-10"}'], 1, "'label' is missing here"),
        (["insert", "PATH", "play-10", "--json", PLAY_3], 1, "field 'id' says 'play-3'"),
        (["insert", "PATH", "10", "--int", "--json", "{}"], 1, "are text, not int"),
        (["insert", "nowhere", "a", "--json", "{}"], 1, "nowhere"),
        (["delete", "PATH"], 2, "name the keys, or a file that holds them with --keys-from"),
        (["delete", "PATH", "--keys-from", "nothing.txt"], 1, "nothing.txt: No such file or directory"),
        (["delete", "PATH", "7", "--int"], 1, "are text, not int"),
        (["delete", "nowhere", "a"], 1, "nowhere"),
        (["apply", "PATH"], 2, "Missing argument 'TABLE'"),
        (["apply", "PATH", "nothing.csv"], 1, "nothing.csv does not exist"),
        (["apply", "PATH", "nothing", "--format", "csv"], 1, "nothing: No such file or directory"),
        (["apply", "PATH", "labels.txt"], 2, "labels.txt does not say what it holds: add --format"),
        (["apply", "PATH", "-"], 2, "stdin does not say what it holds: add --format csv|jsonl"),
        (["apply", "PATH", "labels.csv", "--format", "xlsx"], 2, "'xlsx' is not one of"),
        (["apply", "PATH", "labels.csv", "--format", "json"], 1, "labels.csv: JSON is malformed"),
        (["apply", "PATH", "labels.csv", "--on-missing", "add"], 2, "'add' is not one of"),
        (
            ["apply", "PATH", "labels.csv", "--key", "who"],
            1,
            "no column 'who' holds the keys; the columns are 'id', 'label'. Name it with --key.",
        ),
        (["apply", "PATH", "lables.csv"], 1, "no field 'lable'"),
        (["apply", "PATH", "twice.csv"], 1, "'play-3' occurs more than once"),
        (["apply", "PATH", "new.csv", "--on-missing", "insert"], 1, "new.csv, row 1 (key 'play-10'): the fields pair[0]"),
        (["apply", "nowhere", "labels.csv"], 1, "nowhere"),
    ],
    ids=lambda part: " ".join(part[:1] + part[2:]) if isinstance(part, list) else "",
)
def test_wrong_input_is_told_and_changes_nothing(
    argv: list[str], code: int, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, "lables.csv", "id,lable\nplay-3,1\n")
    write(path, "twice.csv", "id,label\nplay-3,1\nplay-3,2\n")
    write(path, "new.csv", "id,label\nplay-10,1\n")
    before = files(path)
    got, out, err = call(capsys, *(path if part == "PATH" else part for part in argv))
    assert (got, out) == (code, ""), err
    assert said in words(err)
    if code == 1:
        assert err.startswith("liveset: ")
        assert len(err.splitlines()) == 1
    assert files(path) == before


def test_keys_of_the_other_type(numbered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(numbered, "t.csv", "id,n\nthree,1\n")
    listed = write(numbered, "keys.txt", "1\nthree\n")
    before = files(numbered)
    for argv in (
        ("patch", numbered, "three", "n=1"),
        ("insert", numbered, "three", "--json", '{"id": 3, "n": 1}'),
        ("delete", numbered, "three"),
        ("delete", numbered, "--keys-from", listed),
    ):
        code, _, err = call(capsys, *argv)
        assert code == 2
        assert "'three' is no integer, and the keys of this dataset are integers" in words(err)
    code, _, err = call(capsys, "apply", numbered, table)
    assert code == 1
    assert "the key 'three' is text, and the keys of the dataset are integers" in err
    assert files(numbered) == before


def test_a_dataset_without_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "keyless", [{"n": 1}])
    table = write(tmp_path / "keyless", "t.csv", "key,n\na,1\n")
    for argv in (["patch", "a", "n=1"], ["insert", "a", "--json", "{}"], ["delete", "a"], ["apply", table]):
        code, _, err = call(capsys, argv[0], tmp_path / "keyless", *argv[1:])
        assert code == 1
        assert "keys/" in err
        said = (
            "call liveset keys build PATH --field NAME first."
            if argv[0] == "apply"
            else "build it with liveset keys build PATH --field NAME, or"
        )
        assert said in err
        assert len(err.splitlines()) == 1


def test_pickles_are_loaded_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    liveset.optimize(
        lambda i: {"id": f"k{i}", "n": i, "any": Path},
        range(3),
        tmp_path / "ds",
        key_fn="id",
        allow_pickle=True,
        num_workers=1,
        verbose=False,
    )
    code, _, err = call(capsys, "patch", tmp_path / "ds", "k1", "n=5")
    assert code == 1
    assert "pickle" in err
    assert call(capsys, "patch", tmp_path / "ds", "k1", "n=5", "--allow-pickle")[0] == 0
    assert liveset.StreamingDataset(tmp_path / "ds", allow_pickle=True)["k1"] == {"id": "k1", "n": 5, "any": Path}
    assert call(capsys, "apply", tmp_path / "ds", write(tmp_path / "ds", "t.csv", "id,n\nk1,6\n"))[0] == 0, "nothing is decoded for a patch"


# --- compact ----------------------------------------------------------------------------------------------------------


def test_compact(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10, 13):
        call(capsys, "insert", path, f"play-{number}", "--json", PLAY_3.replace("play-3", f"play-{number}"))
    before = files(path)
    plan = told(capsys, "compact", path, "--dry-run")
    out = call(capsys, "compact", path, "--dry-run")[1]
    assert out.startswith("would make 6 chunks -> ")
    assert f" ({plan['key_bytes']:,} of them keys) to write" in out
    assert told(capsys, "compact", path, "--dry-run", "--no-keys")["key_bytes"] == 0
    assert files(path) == before
    done = told(capsys, "compact", path, "-m", "tidy", "--author", "bob")
    assert done.keys() == plan.keys()
    assert (done["chunks"], done["key_tables"]) == (plan["chunks"], plan["key_tables"])
    assert done["chunks"][1] < done["chunks"][0] == 6
    assert (plan["dry_run"], plan["version"], done["dry_run"], done["version"]) == (True, None, False, 5)
    assert done["bytes"] > done["key_bytes"] > 0
    newest = liveset.history(path)[0]
    assert (newest.op, newest.message, newest.author) == ("compact", "tidy", "bob")
    assert ids(path) == [f"play-{i}" for i in range(13)]
    assert call(capsys, "compact", path)[:2] == (0, "nothing to compact\n")
    assert told(capsys, "compact", path)["version"] is None


def test_compact_with_wrong_input(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for small in ("2", "-1", "half", "nan"):
        assert call(capsys, "compact", path, "--small", small)[0] == 2
    code, _, err = call(capsys, "compact", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere" in err


# --- purge ------------------------------------------------------------------------------------------------------------


def test_purge(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "patch", path, "play-3", "label=9")
    before = files(path)
    plan = told(capsys, "purge", path, "play-3", "play-8", "--dry-run")
    assert call(capsys, "purge", path, "play-3", "play-8", "--dry-run")[1].startswith(
        "would erase 2 keys from versions 1, 2, in 3 chunk files; "
    )
    assert files(path) == before
    listed = write(path, "withdrawn.txt", "play-3\nplay-8\n")
    done = told(capsys, "purge", path, "--keys-from", listed, "--yes", "-m", "request 4711", "--session", "r4711")
    assert done.keys() == plan.keys()
    assert (plan["dry_run"], plan["milliseconds"], done["dry_run"]) == (True, None, False)
    assert [done[name] for name in ("version", "keys", "missing", "versions", "chunks")] == [3, 2, [], [1, 2], 3]
    assert done["bytes_freed"] > 0
    assert ids(path) == [f"play-{i}" for i in range(10) if i not in (3, 8)]
    assert call(capsys, "verify", path, "--absent", "play-3", "--absent", "play-8")[0] == 0
    assert liveset.history(path)[0].message == "request 4711"
    again = ("purge", path, "--keys-from", listed, "--session", "r4711")
    assert call(capsys, *again)[:2] == (0, "the session r4711 was committed already, as version 3\n")
    assert call(capsys, *again, "--dry-run")[0] == 1
    assert call(capsys, "insert", path, "play-3", "--json", PLAY_3)[0] == 0
    assert call(capsys, *again)[:2] == (0, "the session r4711 was committed already, as version 3\n"), "it does not ask"
    assert "play-3" in ids(path)


def test_purge_tells_of_what_repairs_have_kept(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = path / "_liveset/quarantine/chunk-0-0-0123456789abcdef.bin"
    kept.parent.mkdir()
    kept.write_bytes(b"?")
    told_of = "1 damaged file in quarantine (chunk-0-0-0123456789abcdef.bin)"
    assert told(capsys, "purge", path, "play-3", "--dry-run")["quarantined"] == [f"_liveset/quarantine/{kept.name}"]
    for keys, said in ((["play-3"], f"1 key from version 1, in 1 chunk file and {told_of}"), (["play-77", "--skip-missing"], told_of)):
        stdin(monkeypatch, "no\n")
        assert f"Erase {said}, for good?" in call(capsys, "purge", path, *keys)[2]
        assert kept.exists()
    assert "Nothing was changed" in call(capsys, "purge", path, "play-77", "--yes")[2]
    assert kept.exists()
    assert f"would erase {told_of}; " in call(capsys, "purge", path, "play-77", "--skip-missing", "--dry-run")[1]
    assert f" and {told_of}; " in call(capsys, "purge", path, "play-3", "--yes")[1]
    assert not kept.exists()


def test_purge_asks_first(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(path)
    for answer in ("", "no\n"):
        stdin(monkeypatch, answer)
        code, out, err = call(capsys, "purge", path, "play-3")
        assert (code, out) == (1, "")
        assert err == (
            "Erase 1 key from version 1, in 1 chunk file, for good? [y/N] liveset: nothing was done; --yes does it without asking."
        )
        assert files(path) == before
    stdin(monkeypatch, "y\n")
    code, out, _ = call(capsys, "purge", path, "play-3")
    assert code == 0
    assert out.startswith("version 2: erased 1 key from version 1, in 1 chunk file; ")


def test_purge_with_wrong_input(path: Path, numbered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(path)
    for argv, code, said in (
        (["purge", path, "play-3", "play-77"], 1, "the key 'play-77' occurs in no version"),
        (["purge", path], 2, "name the keys"),
        (["purge", path, "--keys-from", "nothing.txt"], 1, "nothing.txt: No such file"),
        (["purge", path, "7", "--int", "--yes"], 1, "are text, not int"),
        (["purge", numbered, "three", "--yes"], 2, "'three' is no integer"),
        (["purge", tmp_path / "nowhere", "a", "--yes"], 1, "nowhere"),
    ):
        got, out, err = call(capsys, *argv)
        assert (got, out) == (code, "")
        assert said in words(err)
    assert files(path) == before
    assert call(capsys, "purge", path, "play-77", "--skip-missing")[:2] == (0, "nothing to purge\n")
    answer = told(capsys, "purge", path, "play-77", "play-3", "--skip-missing", "--yes")
    assert (answer["keys"], answer["missing"]) == (1, ["play-77"])


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set", "patch", "insert", "delete", "apply", "compact", "purge"])
def test_help_has_examples_and_tells_the_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"Examples: liveset {name} ./" in words(out)
    assert "As JSON: " in words(out)
    assert "--dry-run" in out
    assert ("--yes " in out.partition("Options")[2]) == (name == "purge")


def test_commands_are_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "--help")[1]
    places = [out.index(f"─ {title} ─") for title in ("Commands", "Samples and keys", "Edits", "Versions", "Upkeep", "Checks")]
    assert places == sorted(places)
    assert places[2] < out.index("│ patch ") < out.index("│ apply ") < places[3] < out.index("│ log ") < places[4]
