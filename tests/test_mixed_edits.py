"""Edits of different kinds one after another, or at once: each of these was wrong before."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.changes import Change, SetAttributes
from liveset.edit.commit import commit
from liveset.edit.session import dataset_update
from liveset.errors import Conflict, DuplicateKeys, KeyNotFound, NotFound, OverwriteConflict, VersionExpired
from liveset.format.codec import Compression
from liveset.format.index import Index
from liveset.testing import MemoryStore
from tests.support import racing
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

SAMPLES = [{"id": f"k{i}", "number": 100 + i, "v": i} for i in range(6)]
DAY = timedelta(days=1)


def name(sample: dict[str, Any]) -> str:
    return f"{sample['id']}!"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", SAMPLES, key="id")
    return tmp_path / "ds"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    write_foreign(tmp_path / "foreign", SAMPLES)
    return tmp_path / "foreign"


def append(path: Path, samples: list[dict[str, Any]], *, meanwhile: Any = None, **more: Any) -> None:
    def fn(number: int) -> dict[str, Any]:
        if number == 0 and meanwhile is not None:
            meanwhile()
        return samples[number]

    liveset.optimize(fn, range(len(samples)), path, num_workers=1, verbose=False, mode="append", **more)


def chunks(path: Path) -> set[str]:
    return {file.name for file in path.glob("chunk-*")}


# Datasets of another program


def test_attributes_leave_the_keys_of_another_program(foreign: Path) -> None:
    liveset.set_attributes(foreign, name="plays")
    ds = liveset.StreamingDataset(foreign)
    assert (ds["k3"], ds.attributes) == (SAMPLES[3], {"name": "plays"})


def test_a_tag_leaves_the_keys_of_another_program(foreign: Path) -> None:
    assert liveset.tag(foreign, "paper") == 1
    assert liveset.StreamingDataset(foreign)["k3"] == SAMPLES[3]
    assert liveset.StreamingDataset(foreign, version="paper")["k3"] == SAMPLES[3]


def test_the_keys_of_version_0_are_never_those_of_a_later_one(foreign: Path) -> None:
    early = liveset.StreamingDataset(foreign)
    keys = early.keys
    write_dataset(foreign, SAMPLES[::-1], key="id")
    assert early["k1"] == SAMPLES[1]
    assert "k1" in keys
    with pytest.raises(KeyNotFound, match="build"):
        liveset.StreamingDataset(foreign, version=0)["k1"]


def test_version_0_is_read_by_key_after_an_update(foreign: Path) -> None:
    with dataset_update(foreign) as update:
        update["k1"] = {**SAMPLES[1], "v": -1}
        update.commit()
    write_dataset(foreign, SAMPLES[::-1], key="id")
    old = liveset.StreamingDataset(foreign, version=0)
    assert [old[f"k{i}"] for i in range(6)] == SAMPLES
    assert list(old.keys) == [f"k{i}" for i in range(6)]


def test_an_append_to_a_dataset_of_another_program_that_was_replaced_meanwhile_is_a_conflict(foreign: Path) -> None:
    with pytest.raises(OverwriteConflict, match="replaced meanwhile"):
        append(foreign, [{"id": "new", "number": 7, "v": 7}], meanwhile=lambda: write_dataset(foreign, SAMPLES[:2], key="id"))
    assert list(liveset.StreamingDataset(foreign)) == SAMPLES[:2]


def test_keys_that_could_not_be_made_anew_leave_those_of_another_program(foreign: Path) -> None:
    with pytest.raises(DuplicateKeys):
        liveset.build_keys_index(foreign, lambda sample: sample["v"] % 2, overwrite=True, verbose=False)
    assert liveset.StreamingDataset(foreign)["k3"] == SAMPLES[3]


def test_chunks_of_another_program_that_a_vacuum_has_removed_say_so(tmp_path: Path) -> None:
    write_foreign(tmp_path, SAMPLES, compression=Compression("zstd", "chunk"))
    ds = liveset.StreamingDataset(tmp_path)
    liveset.adopt(tmp_path)
    liveset.vacuum(tmp_path, keep=0, grace=timedelta(0))
    with pytest.raises(VersionExpired, match="a vacuum"):
        ds[0]


# Appends beside other commits


def test_an_append_to_a_dataset_that_was_replaced_by_one_with_other_keys_is_a_conflict(path: Path) -> None:
    def replace() -> None:
        write_dataset(path, SAMPLES, key="number")

    with pytest.raises(OverwriteConflict, match="replaced meanwhile"):
        append(path, [{"id": "new", "number": 7, "v": 7}], meanwhile=replace)
    assert list(liveset.StreamingDataset(path)) == SAMPLES


@pytest.mark.parametrize("key", [name, "number"])
def test_an_append_while_other_keys_are_made_is_a_conflict(path: Path, key: Any) -> None:
    def rebuild() -> None:
        liveset.build_keys_index(path, key, overwrite=True, verbose=False)

    with pytest.raises(Conflict, match="other keys meanwhile"):
        append(path, [{"id": "new", "number": 7, "v": 7}], meanwhile=rebuild)
    assert len(liveset.StreamingDataset(path).keys) == 6


def test_an_append_while_the_same_keys_are_made_again_goes_on(path: Path) -> None:
    append(
        path, [{"id": "new", "number": 7, "v": 7}], meanwhile=lambda: liveset.build_keys_index(path, "id", overwrite=True, verbose=False)
    )
    assert liveset.StreamingDataset(path)["new"]["v"] == 7


def test_an_append_without_keys_while_keys_are_made_is_a_conflict(tmp_path: Path) -> None:
    write_dataset(tmp_path, SAMPLES)
    with pytest.raises(Conflict, match="meanwhile"):
        append(tmp_path, SAMPLES[:1], meanwhile=lambda: liveset.build_keys_index(tmp_path, "id", verbose=False))


def test_a_dataset_that_lost_all_samples_remembers_the_field_of_its_keys(tmp_path: Path) -> None:
    write_dataset(tmp_path, [], key="id")
    append(tmp_path, SAMPLES)
    assert liveset.StreamingDataset(tmp_path)["k3"] == SAMPLES[3]


def test_duplicates_in_an_append_leave_no_file_whoever_commits_meanwhile(path: Path) -> None:
    before = chunks(path)
    new = {"id": "new", "number": 7, "v": 7}
    with pytest.raises(DuplicateKeys):
        append(path, [new, new], meanwhile=lambda: liveset.set_attributes(path, a=1))
    assert chunks(path) == before


# Vacuum


def test_a_dry_run_says_that_nothing_goes_where_nothing_would_go(path: Path) -> None:
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    liveset.set_attributes(path, a=1)
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    planned = liveset.vacuum(path, keep=0, grace=timedelta(0), dry_run=True)
    assert (planned.files, planned.expired, planned.freed) == (0, (), 0)
    assert liveset.vacuum(path, keep=0, grace=timedelta(0)).kept == planned.kept


def test_a_dry_run_knows_how_long_nothing_was_changed(path: Path) -> None:
    write_dataset(path, SAMPLES[:2], key="id")
    for file in path.rglob("*"):
        os.utime(file, (0, 0))
    planned = liveset.vacuum(path, dry_run=True)
    assert planned.expired == (1,)
    assert liveset.vacuum(path).deleted == planned.deleted


def test_a_version_that_a_tag_has_saved_is_kept_for_its_age_when_the_tag_goes(path: Path) -> None:
    liveset.set_attributes(path, a=1)
    liveset.tag(path, "paper", 1)
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    liveset.untag(path, "paper")
    write_dataset(path, SAMPLES[:2], key="id")
    liveset.vacuum(path, keep=DAY, grace=timedelta(0))
    assert list(liveset.StreamingDataset(path, version=1)) == SAMPLES
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    with pytest.raises(VersionExpired):
        liveset.StreamingDataset(path, version=1)


def test_keys_of_a_version_that_a_vacuum_has_removed_say_so(path: Path) -> None:
    ds = liveset.StreamingDataset(path)
    liveset.build_keys_index(path, "id", overwrite=True, verbose=False)
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    with pytest.raises(VersionExpired, match="vacuum"):
        ds["k1"]


# The commit


def test_files_that_went_with_a_replaced_head_are_not_missed() -> None:
    """A vacuum may remove what a change is being made from, once another version has taken its place."""
    store = MemoryStore()
    base = racing.append(store)
    attempts = []

    def prepare(head: Index | None, _: object) -> Change:
        attempts.append(head)
        if len(attempts) == 1:
            racing.append(store)
            raise NotFound("a key table of the first version")
        return SetAttributes({"a": 1})

    assert commit(store, prepare, base, policy=racing.at_once()).version == 3

    def fail(*_: object) -> Change:
        raise NotFound("what the newest version needs")

    with pytest.raises(NotFound, match="needs"):
        commit(store, fail, base, policy=racing.at_once())
