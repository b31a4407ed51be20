"""Reading a version by its number, its tag or a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.edit.changes import HISTORY, Append, Retag
from liveset.edit.commit import Policy, commit
from liveset.errors import Corrupt, NotFound, VersionExpired, VersionNotFound
from liveset.snapshot import open_snapshot
from liveset.storage import version_name
from liveset.testing import MemoryStore
from tests.support.racing import sweep
from tests.support.writing import write_dataset

START = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly(versions: int) -> MemoryStore:
    """A dataset whose version n was committed n hours after the start."""
    store = MemoryStore()
    for number in range(1, versions + 1):
        policy = Policy(now=lambda number=number: START + number * HOUR)  # type: ignore[misc]
        commit(store, Append({"compression": None, "data_format": ["int"], "data_spec": "s"}, ()), None, policy=policy)
    return store


def test_the_newest_version_committed_by_then() -> None:
    store = hourly(2 * HISTORY + 5)
    for hours, version in ((1, 1), (1.5, 1), (2, 2), (70.9, 70), (2 * HISTORY + 5, 2 * HISTORY + 5), (10_000, 2 * HISTORY + 5)):
        assert open_snapshot(store, START + hours * HOUR).version == version
    east = timezone(timedelta(hours=5))
    assert open_snapshot(store, (START + 3 * HOUR).astimezone(east)).version == 3
    with pytest.raises(VersionNotFound, match=r"version 1, the first, was committed at 2030-01-01T01"):
        open_snapshot(store, START)


def test_a_time_without_a_zone_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"has no time zone.*astimezone\(\)"):
        open_snapshot(hourly(1), datetime(2030, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("version", [1.0, b"paper", [1], START.date()])
def test_other_types_are_refused(version: Any) -> None:
    with pytest.raises(TypeError):
        open_snapshot(hourly(1), version)


def test_numbers_of_numpy_are_numbers() -> None:
    assert open_snapshot(hourly(3), np.int64(2)).version == 2  # type: ignore[arg-type]


def test_a_time_whose_version_has_expired() -> None:
    store = hourly(3)
    sweep(store)
    with pytest.raises(VersionExpired, match="vacuum of version 4"):
        open_snapshot(store, START + 2 * HOUR)
    assert open_snapshot(store, START + 3 * HOUR).version == 3


def test_a_time_before_the_history_was_cut() -> None:
    store = hourly(2 * HISTORY)
    store.delete([version_name(HISTORY)])
    with pytest.raises(VersionExpired, match=f"removed those before {HISTORY}"):
        open_snapshot(store, START + 2 * HOUR)


def test_times_of_what_a_tag_has_saved_behind_the_cut() -> None:
    store = hourly(2 * HISTORY)
    commit(store, Retag("paper", 3), open_snapshot(store).index, policy=Policy(now=lambda: START + 1000 * HOUR))
    sweep(store)
    assert open_snapshot(store, START + 3 * HOUR).version == 3
    with pytest.raises(VersionExpired, match=r"is forgotten: a vacuum removed those between 3 and \d+"):
        open_snapshot(store, START + 3.5 * HOUR)  # it may have been 3, were there no later ones that nobody knows
    with pytest.raises(VersionExpired):
        open_snapshot(store, START + 2 * HOUR)


def test_a_dataset_of_another_program_has_no_times() -> None:
    store = MemoryStore()
    store.foreign_head(b'{"chunks": [], "config": null}')
    with pytest.raises(VersionNotFound, match="another program wrote it"):
        open_snapshot(store, START)


def test_the_way_back_from_a_damaged_head() -> None:
    store = hourly(3)
    for wrong in (b"{", None):
        store.foreign_head(wrong)
        assert open_snapshot(store, 2).version == 2
        with pytest.raises((Corrupt, liveset.DatasetNotFound)):
            open_snapshot(store, 3)


def test_a_dataset_is_opened_as_it_was(tmp_path: Path) -> None:
    times = []
    for number in range(3):
        index = write_dataset(tmp_path / "ds", [number])
        assert index.edit is not None
        times.append(index.edit.time)
    for number, time in enumerate(times):
        dataset = liveset.StreamingDataset(tmp_path / "ds", version=time)
        assert (dataset.version, dataset[:]) == (number + 1, [number])
        assert dataset.info().version == number + 1


def test_verify_and_export_take_any_name_of_a_version(tmp_path: Path) -> None:
    for number in range(2):
        write_dataset(tmp_path / "ds", [number])
    liveset.tag(tmp_path / "ds", "paper", 1)
    assert liveset.verify(tmp_path / "ds", version="paper").version == 1
    liveset.export(tmp_path / "ds", tmp_path / "plain", version="paper")
    assert liveset.StreamingDataset(tmp_path / "plain")[:] == [0]


def test_the_reason_is_told_when_files_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, range(8))
    old = liveset.StreamingDataset(path)
    write_dataset(path, range(3))
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    with pytest.raises(VersionExpired, match=r"a vacuum \(version 3\) removed.*pin=True or a tag"):
        list(old)
    new = liveset.StreamingDataset(path)
    for file in path.glob("chunk-*"):
        file.unlink()
    with pytest.raises(NotFound, match=r"it was deleted, and not by a vacuum.*`liveset repair`") as info:
        list(new)
    assert not isinstance(info.value, VersionExpired), "no newer version has what is missing"
    (path / "index.json").unlink()
    with pytest.raises(VersionExpired, match="the dataset was removed"):
        list(new)
