"""Datasets that earlier versions of the library wrote: they are read as they were meant, and edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.storage import open_store
from liveset.testing.invariants import check_dataset
from tests.golden.expected import dataset_told, same, told, version_told
from tests.golden.make import GOLDEN, START, make

FOLDER = Path(__file__).parent / "golden"
DATASETS = sorted(file.with_suffix("").relative_to(FOLDER).as_posix() for file in FOLDER.glob("v*/*.json"))


@pytest.fixture(params=DATASETS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Any]:
    """Name, a copy of the dataset, and what is expected of it."""
    name = Path(request.param).name
    needed(name)
    shutil.copytree(FOLDER / request.param, tmp_path / name, symlinks=True)
    return name, tmp_path / name, json.loads((FOLDER / f"{request.param}.json").read_bytes())


def needed(name: str) -> None:
    for package in GOLDEN[name].needs:
        pytest.importorskip(package, exc_type=ImportError)


def listing(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, file.stat().st_mode, file.read_bytes() if file.is_file() else b"")
        for file in [path, *path.rglob("*")]
    }


def test_there_is_one_of_every_kind() -> None:
    assert set(GOLDEN) == {Path(dataset).name for dataset in DATASETS}


def test_every_version_reads_as_it_was_and_reading_changes_nothing(golden: tuple[str, Path, Any]) -> None:
    _, path, expected = golden
    before = listing(path)
    found = dataset_told(path)
    assert found["tags"] == expected["tags"]
    for entry, known in zip(found["history"], expected["history"], strict=True):
        assert entry | known == entry  # a later library may tell more
    assert found["versions"].keys() == expected["versions"].keys()
    for number, version in expected["versions"].items():
        assert same(found["versions"][number], version), f"version {number} reads differently"
        assert same(version_told(path, int(number), verify_reads=True), version)
    assert liveset.verify(path).ok
    assert listing(path) == before


def test_what_is_expected_is_what_was_written(golden: tuple[str, Path, Any]) -> None:
    """The files beside the datasets were read back by the library that wrote them; here they are compared with the samples themselves."""
    name, _, expected = golden
    if name == "media":
        pytest.skip("images read back as arrays")
    first = min(map(int, expected["versions"]))
    if name == "vacuumed":
        samples = [GOLDEN[name].sample(i) for i in range(8)]
        samples[1]["n"] = 100
    else:
        samples = [GOLDEN[name].sample(i) for i in range(len(expected["versions"][str(first)]["samples"]))]
    assert same(expected["versions"][str(first)]["samples"], [told(sample) for sample in samples])


def test_it_can_be_edited(golden: tuple[str, Path, Any]) -> None:
    name, path, expected = golden
    kind = GOLDEN[name]
    newest = max(map(int, expected["versions"]))
    version = expected["versions"][str(newest)]
    samples, keys = list(version["samples"]), version["keys"]
    if keys is not None:
        with liveset.dataset_update(path) as update:
            update[keys[-1]] = {**update[keys[-1]], **other(name)} if name != "function-keys" else (-1, "row 5", 0.5, [])
            samples[-1] = told(update[keys[-1]])
            assert not same(samples[-1], version["samples"][-1])
            newest = update.commit().version
    numbers = (50, 51, 53)  # none with None in "n", which only rows of Arrow chunks hold
    more = [kind.sample(i) for i in numbers]
    liveset.optimize(kind.sample, numbers, path, mode="append", num_workers=1, verbose=False, key_fn=kind.key)
    found = version_told(path, newest + 1, verify_reads=True)
    assert same(found["samples"][: len(samples)], samples)
    if name != "media":
        assert same(found["samples"][len(samples) :], [told(sample) for sample in more])
    if keys is not None:
        assert found["keys"][: len(keys)] == keys
        assert len(set(found["keys"])) == len(keys) + 3
    for number, before in expected["versions"].items():
        assert same(version_told(path, int(number)), before), f"version {number} was changed"
    assert liveset.verify(path).ok
    check_dataset(open_store(path))


def other(name: str) -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {
        "int-keys": {"raw": b"other"},
        "media": {"label": -7, "text": "other"},
        "values": {"large": -(2**80)},
    }
    return changes.get(name, {"n": -7})


@pytest.mark.parametrize("name", GOLDEN)
def test_the_script_makes_the_same_bytes_again(name: str, tmp_path: Path) -> None:
    """So that the next folder can be made when the format changes, and this one can be told to be honest."""
    needed(name)
    contents = []
    for turn in ("a", "b"):
        (tmp_path / turn).mkdir()
        make(tmp_path / turn, name)
        contents.append({file: data for file, (_, _, data) in listing(tmp_path / turn).items()})
    assert contents[0] == contents[1]
    assert str(START.year).encode() in contents[0][f"{name}/index.json"]
