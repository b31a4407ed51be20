"""Datasets on a plain web server: everything that reads works there, with and without ranges; whatever writes says that it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset import keystore
from liveset.cli import main
from tests.support.foreign import write_foreign
from tests.support.services import WebServer
from tests.support.writing import write_dataset

pytest.importorskip("obstore")
pytest.importorskip("pyarrow", exc_type=ImportError)


def row(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "n": number}


@pytest.fixture(params=["", "/norange"], ids=["ranges", "no ranges"])
def at(request: pytest.FixtureRequest, web: tuple[WebServer, Path], tmp_path: Path) -> Callable[[str], liveset.Place]:
    """The place of a folder that the server serves."""
    return lambda name: liveset.Place(f"{web[0].url}{request.param}/{name}", cache_dir=tmp_path / "cache")


@pytest.fixture
def docs(web: tuple[WebServer, Path], request: pytest.FixtureRequest) -> Path:
    name: str = request.node.name.translate(str.maketrans("[] ", "---"))
    folder: Path = web[1] / name
    write_dataset(folder, [row(number) for number in range(20)], chunk_size=6, key="id")
    with liveset.dataset_update(folder) as update:
        update["k3"] = row(-3) | {"id": "k3"}
        del update["k5"]
        update.commit()
    liveset.tag(folder, "first", 1)
    return folder


@pytest.fixture
def place(at: Callable[[str], liveset.Place], docs: Path) -> liveset.Place:
    return at(docs.name)


def test_reading(place: liveset.Place, docs: Path) -> None:
    ds, local = liveset.StreamingDataset(place), liveset.StreamingDataset(docs)
    assert (ds.version, len(ds)) == (3, 19)
    assert ds[7] == local[7]
    assert ds["k3"] == {"id": "k3", "n": -3}
    assert ds[2:5] == local[2:5]
    assert list(ds) == list(local)
    assert list(ds.keys) == list(local.keys)
    assert ds.get_by_keys(["k9", "k1"]) == [row(9), row(1)]
    assert "k5" not in ds.keys
    with pytest.raises(liveset.KeyNotFound):
        ds["k5"]
    assert sorted(sample["id"] for sample in liveset.StreamingDataset(place, shuffle=True)) == sorted(local.keys)


def test_earlier_versions(place: liveset.Place, docs: Path) -> None:
    for version in (1, 2, "first"):
        assert list(liveset.StreamingDataset(place, version=version)) == list(liveset.StreamingDataset(docs, version=version))
    with pytest.raises(liveset.VersionNotFound):
        liveset.StreamingDataset(place, version=9)
    here, there = liveset.history(place), liveset.history(docs)
    assert [(v.version, v.available, v.samples, v.tags) for v in here] == [(v.version, v.available, v.samples, v.tags) for v in there]
    assert {version.alone for version in here} == {None}
    diff = liveset.diff(place, 1, 2)
    assert (diff.changed, diff.removed) == (1, 1)


def test_a_purge_and_a_vacuum_are_seen(place: liveset.Place, docs: Path) -> None:
    ds = liveset.StreamingDataset(place)
    assert ds[0] == row(0)
    liveset.purge(docs, ["k7"])
    liveset.vacuum(docs, keep=1, grace=timedelta(0))
    assert ds.refresh()
    assert list(ds) == list(liveset.StreamingDataset(docs))
    with pytest.raises(liveset.VersionExpired):
        liveset.StreamingDataset(place, version=2)
    with pytest.raises(liveset.Erased):
        list(liveset.StreamingDataset(place, version="first"))


def test_facts_and_checks(place: liveset.Place, docs: Path) -> None:
    info = liveset.StreamingDataset(place).info()
    assert (info.samples, info.version, info.versions) == (19, 3, (3,))
    assert liveset.verify(place).ok
    victim = max(docs.glob("chunk-*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    fresh = liveset.Place(place.url, cache_dir=False)
    assert [damage.file for damage in liveset.verify(fresh).damaged] == [victim.name]


def test_a_large_key_table_is_fetched_once_where_no_parts_can_be_had(
    at: Callable[[str], liveset.Place], docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keystore, "_REQUEST", 1)
    monkeypatch.setattr(keystore, "_BYTES_PER_KEY", 1)
    place = at(docs.name)
    ds = liveset.StreamingDataset(place)
    assert ds["k7"]["n"] == 7
    held = [file for file in (tmp_path / "cache").rglob("*.cached") if file.read_bytes().startswith(b"LSKEYS")]
    assert len(held) == (2 if "norange" in str(place) else 0)
    shutil.rmtree(docs / "_liveset" / "keys")
    if held:
        assert [ds[f"k{number}"]["n"] for number in (3, 8, 7)] == [-3, 8, 7]
        assert ds.keys.find("k5") is None


def test_a_dataset_of_another_program(at: Callable[[str], liveset.Place], web: tuple[WebServer, Path], tmp_path: Path) -> None:
    write_foreign(web[1] / tmp_path.name, [row(number) for number in range(10)])
    ds = liveset.StreamingDataset(at(tmp_path.name))
    assert list(ds) == [row(number) for number in range(10)]
    assert ds["k4"] == row(4)
    shutil.rmtree(web[1] / tmp_path.name / "keys")
    with pytest.raises(liveset.KeyNotFound, match="has none"):
        liveset.StreamingDataset(at(tmp_path.name), cache_dir=False)["k4"]


def test_where_there_is_no_dataset(at: Callable[[str], liveset.Place]) -> None:
    with pytest.raises(liveset.DatasetNotFound, match="nothing-here"):
        liveset.StreamingDataset(at("nothing-here"))


def edit(place: liveset.Place) -> None:
    with liveset.dataset_update(place) as update:
        update["k1"] = row(-1) | {"id": "k1"}
        update.commit()


WRITES: dict[str, Callable[[liveset.Place], object]] = {
    "optimize": lambda place: liveset.optimize(row, range(3), place, num_workers=1, mode="append"),
    "update": edit,
    "transform": lambda place: liveset.transform(place, lambda sample: sample | {"n": 0}, num_workers=1),
    "tag": lambda place: liveset.tag(place, "x"),
    "restore": lambda place: liveset.restore(place, 1),
    "purge": lambda place: liveset.purge(place, ["k1"]),
    "compact": lambda place: liveset.compact(place, small=1),
    "vacuum": liveset.vacuum,
    "keys": lambda place: liveset.build_keys_index(place, "n", overwrite=True),
    "attributes": lambda place: liveset.set_attributes(place, name="x"),
    "repair": liveset.repair,
    "pin": lambda place: liveset.StreamingDataset(place, pin=True),
    "search": lambda place: liveset.verify(place, absent=["k1"]),
    "export": lambda place: liveset.export(place, f"{place.url}-copy"),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_is_refused(place: liveset.Place, docs: Path, write: str) -> None:
    before = {file: file.read_bytes() for file in docs.rglob("*") if file.is_file()}
    with pytest.raises((liveset.StorageError, ValueError), match="can only be read|only names"):
        WRITES[write](place)
    assert {file: file.read_bytes() for file in docs.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("command", ["info", "head", "log", "keys list", "keys stats", "verify", "get k3", "diff 1"])
def test_commands(place: liveset.Place, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    verb, *more = command.split()
    words = [verb, more.pop(0)] if verb == "keys" else [verb]
    with pytest.raises(SystemExit) as done:
        main(["--cache-dir", str(tmp_path / "cache"), *words, place.url, *more])
    out, err = capsys.readouterr()
    assert (done.value.code, err) == (0, "")
    assert out


def test_the_certificate_is_checked(web: tuple[WebServer, Path], docs: Path) -> None:
    url = f"{web[0].tls_url}/{docs.name}"
    with pytest.raises(liveset.StorageError):
        liveset.StreamingDataset(url, storage_options={"retry_timeout": 0}, cache_dir=False)
    assert liveset.StreamingDataset(url, storage_options={"verify": str(web[0].ca)}, cache_dir=False)["k3"]["n"] == -3
