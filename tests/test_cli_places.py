"""The command line on URLs: every command does there what it does with a folder, and the options that it takes stay secret."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.cli import main
from tests.support.services import RemoteFolder
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of a command run in this process."""
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plays"
    write_dataset(path, [{"id": f"k{number}", "n": number} for number in range(10)], chunk_size=4, key="id")
    with liveset.dataset_update(path) as update:
        update["k3"] = {"id": "k3", "n": -3}
        update.commit()
    (tmp_path / "table.csv").write_text("id,n\nk5,50\nk6,60\n")
    return path


COMMANDS = [
    'info PATH --json',
    'head PATH -n 2 --json',
    'get PATH k3 --json',
    'keys stats PATH --json',
    'keys list PATH',
    'log PATH --json',
    'tag PATH first 1 --json',
    'set PATH k1 --as-json --json {"id":"k1","n":11}',
    'patch PATH k2 n=22 --json',
    'insert PATH k10 --as-json --json {"id":"k10","n":10}',
    'delete PATH k4 --json',
    'apply PATH TABLE --json',
    'diff PATH 1 --json',
    'verify PATH --json',
    'repair PATH --copy COPY --yes --json',
    'purge PATH k7 --yes --json',
    'compact PATH --json',
    'restore PATH 2 --yes --json',
    'tag PATH first --delete --yes --json',
    'vacuum PATH --keep 2 --grace 0s --yes --json',
    'keys build PATH --field n --overwrite --yes --json',
    'verify PATH --absent k7 --json',
    'cp PATH NEW --json',
]  # fmt: skip


def told(capsys: pytest.CaptureFixture[str], before: list[object], places: dict[str, object]) -> Iterator[tuple[str, Any]]:
    """Run all commands, one after another, and yield what each says, without what is of the place or of the time."""
    for command in COMMANDS:
        words = [str(places.get(word, word)) for word in command.split()]
        code, out, err = call(capsys, *before, *words)
        assert (command, code, err) == (command, 0, "")
        assert out
        yield command, _plain(out)


def _plain(out: str) -> Any:
    try:
        return _without(json.loads(out))
    except ValueError:
        return out


def _without(value: Any) -> Any:
    # Sizes too: an index tells times and random names; and a bucket tells whole seconds, so that a vacuum leaves what is of the last one.
    varying = {"path", "committed_at", "milliseconds", "source", "target", "session", "bytes", "bytes_freed", "deleted", "published_bytes"}
    varying |= {"files", "searched"}
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name not in varying}
    return [_without(item) for item in value] if isinstance(value, list) else value


def on_folder(path: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, Any]]:
    twin = path.parent / "twin"
    shutil.copytree(path, twin)
    places: dict[str, object] = {"PATH": twin, "TABLE": path.parent / "table.csv", "COPY": path, "NEW": path.parent / "new-twin"}
    return list(told(capsys, [], places))


def test_every_command_on_a_folder_that_is_read_through_the_cache(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = on_folder(path, capsys)
    cache = path.parent / "cache"
    shutil.copytree(path, path.parent / "backup")
    places: dict[str, object] = {
        "PATH": f"local:{path}",
        "TABLE": path.parent / "table.csv",
        "COPY": f"local:{path.parent / 'backup'}",
        "NEW": f"local:{path.parent / 'new'}",
    }
    assert list(told(capsys, ["--cache-dir", cache], places)) == expected
    assert any(file.is_file() for file in cache.rglob("*"))


def test_every_command_on_a_bucket(path: Path, on_seaweedfs: RemoteFolder, capsys: pytest.CaptureFixture[str]) -> None:
    expected = on_folder(path, capsys)
    options = path.parent / "options.json"
    options.write_text(json.dumps(on_seaweedfs.options))
    before: list[object] = ["--storage-options", options, "--cache-dir", path.parent / "cache"]
    url = (on_seaweedfs / "plays").url
    assert call(capsys, *before, "cp", path, url)[0] == 0
    places: dict[str, object] = {"PATH": url, "TABLE": path.parent / "table.csv", "COPY": path, "NEW": (on_seaweedfs / "new").url}
    assert list(told(capsys, before, places)) == expected


def test_cp(path: Path, on_seaweedfs: RemoteFolder, on_gcs: RemoteFolder, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = json.dumps(on_seaweedfs.options), json.dumps(on_gcs.options)
    code, out, _ = call(capsys, "--storage-options", here, "cp", path, on_seaweedfs.url, "--json")
    report = json.loads(out)
    assert (code, report["versions"], report["skipped"], report["left"]) == (0, [1, 2], 0, [])
    assert (report["source"], report["target"]) == (str(path), on_seaweedfs.url)
    code, out, _ = call(capsys, "--storage-options", here, "cp", on_seaweedfs.url, on_gcs.url, "--dst-storage-options", there)
    assert code == 0
    assert out.startswith(f"copied version 2 and 1 earlier ones: {report['files']} files, {report['bytes']:,} bytes in ")
    (path / "notes.txt").write_text("mine")
    code, out, _ = call(capsys, "cp", path, path.parent / "newest", "--newest")
    assert code == 0
    assert "and 0 earlier ones" in out
    assert "notes.txt" in out
    assert call(capsys, "cp", path, path.parent / "newest")[0] == 0  # it is the same version: what was left out is sent
    assert len(liveset.StreamingDataset(path.parent / "newest", version=1)) == 10
    code, _, _ = call(capsys, "cp", path, path.parent)
    assert f"{path.parent} holds files already" in str(code)
    code, _, err = call(capsys, "cp", path, path / "inside")
    assert (code, "in it" in err) == (2, True)


SECRET = "c2VjcmV0"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (f'{{"secret_access_key": "{SECRET}"', "is not a JSON object"),
        (f'["{SECRET}"]', "neither a JSON object nor the name of a file"),
        (f"secret_access_key={SECRET}", "neither a JSON object nor the name of a file"),
        (f'{{"nonsense": "{SECRET}"}}', "nonsense"),
        (f'{{"retry_timeout": -1, "secret_access_key": "{SECRET}"}}', "retry_timeout"),
        (f'{{"region": "x", "secret_access_key": ["{SECRET}"]}}', "not understood"),
    ],
)
def test_wrong_options_are_told_without_them(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--storage-options", options, "info", "s3://bucket/plays")
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())
    assert SECRET not in err


def test_refused_credentials_are_not_told(on_seaweedfs: RemoteFolder, capsys: pytest.CaptureFixture[str]) -> None:
    options = on_seaweedfs.options | {"access_key_id": "nobody", "secret_access_key": SECRET}
    code, out, err = call(capsys, "--storage-options", json.dumps(options), "info", on_seaweedfs.url)
    assert isinstance(code, str)
    assert "the store refuses it" in code
    assert """--storage-options '{"skip_signature": true}'""" in code
    assert SECRET not in code + out + err
    assert "\n" not in code


def test_options_without_a_url_change_nothing(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = call(capsys, "info", path, "--json")
    assert call(capsys, "--storage-options", '{"endpoint_url": "http://localhost:1"}', "info", path, "--json") == plain
    assert call(capsys, "info", f"file://{path}", "--json") == plain
    monkeypatch.chdir(path.parent)
    assert call(capsys, "info", "plays", "--json") == plain


@pytest.mark.parametrize(
    "words", [["info", "s3:/bucket/plays"], ["info", "s3://"], ["cp", "PATH", "gs:bucket"], ["--cache-dir", "PATH", "info", "local:PATH"]]
)
def test_places_that_make_no_sense_are_told_as_wrong_use(path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *[word.replace("PATH", str(path)) for word in words])
    assert (code, out) == (2, "")
    assert "Invalid value" in err
    assert "Traceback" not in err
