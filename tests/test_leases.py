"""Leases: what holds a version while it is read, and what no longer does; and readers at work while others change everything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import StorageError, VersionExpired
from liveset.lease import LEASES, LIFE, Lease, leased_versions, pin
from liveset.snapshot import open_snapshot
from liveset.storage import Entry, Store, open_store
from liveset.testing import MemoryStore, WrappedStore
from tests.support.racing import append, content, overwrite, sweep
from tests.support.writing import write_dataset

ZERO = timedelta(0)


def leases(store: Store) -> list[str]:
    return [entry.name for entry in store.list(LEASES)]


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    append(store)
    overwrite(store)
    return store


def test_a_pinned_version_survives_every_vacuum_until_it_is_released(store: MemoryStore) -> None:
    old = content(store, 1)
    lease = pin(store, open_snapshot(store, 1))
    for _ in range(3):
        overwrite(store)
        assert 1 in sweep(store).pinned
        assert content(store, 1) == old
    lease.release()
    lease.release()
    assert lease.released
    assert leases(store) == []
    assert 1 in sweep(store).expired


def test_an_expired_version_cannot_be_pinned_and_leaves_no_lease(store: MemoryStore) -> None:
    snapshot = open_snapshot(store, 1)
    sweep(store)
    with pytest.raises(VersionExpired, match="version 1"):
        pin(store, snapshot)
    assert leases(store) == []


def test_leases_are_judged_by_the_clock_of_the_store() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)

    def entry(version: int, age: timedelta) -> Entry:
        return Entry(f"{LEASES}{version:016x}-v{version}-000000.json", 1, now - age)

    found = leased_versions(
        [entry(1, ZERO), entry(2, LIFE), entry(3, LIFE + timedelta(seconds=1)), Entry(LEASES + "notes.txt", 1, now), entry(4, -LIFE)], now
    )
    assert found.live == {1, 2, 4}
    assert found.lapsed == (f"{LEASES}{3:016x}-v3-000000.json",)


def test_a_lease_is_renewed_and_never_missing_meanwhile() -> None:
    seen: list[int] = []
    enough = threading.Event()

    class Watched(WrappedStore):
        """A listing at any moment shows the lease; even one that was under way during a renewal does, since two files are left."""

        def _call(self, name: str, whole: Any, torn: Any = None) -> Any:
            result = whole()
            if name in ("write", "delete"):
                seen.append(len(leases(self.store)))
                if len(seen) > 8:
                    enough.set()
            return result

    store = MemoryStore()
    append(store)
    lease = Lease(Watched(store), 1, renewal=timedelta(milliseconds=1))
    assert enough.wait(30)
    lease.release()
    assert min(seen[2:-1]) >= 2
    assert leases(store) == []
    lease._thread.join(30)
    assert not lease._thread.is_alive()
    assert leases(store) == []


def test_a_renewal_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    again = threading.Event()

    class Full(WrappedStore):
        left = 2

        def write(self, name: str, data: Any) -> None:
            self.left -= 1
            if self.left in (0, -1):
                raise StorageError("no space left on the device")
            super().write(name, data)
            if self.left < -1:
                again.set()

    store = MemoryStore()
    append(store)
    lease = Lease(Full(store), 1, renewal=timedelta(milliseconds=1))
    assert again.wait(30)
    lease.release()
    assert leases(store) == []
    assert "no space left" in caplog.text


# Through a dataset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", range(40))
    return tmp_path / "ds"


def change_everything(path: Path) -> liveset.VacuumReport:
    """Overwrite, append and forget all that may be forgotten."""
    write_dataset(path, range(1000, 1010))
    return liveset.vacuum(path, keep=0, grace=ZERO)


def test_a_pinned_dataset_is_whole_and_an_unpinned_one_says_why_it_is_not(path: Path) -> None:
    plain, pinned = liveset.StreamingDataset(path), liveset.StreamingDataset(path, pin=True)
    subset = pinned.subset(range(5, 25))
    report = change_everything(path)
    assert report.pinned == (1,)
    assert list(pinned) == list(plain) == list(range(40))
    assert subset[:] == list(range(5, 25))
    pinned.close()
    liveset.vacuum(path, keep=0, grace=ZERO)
    assert plain[0] == 0  # open already
    with pytest.raises(VersionExpired, match="pin=True"):
        list(_reopened(plain))


def _reopened(dataset: liveset.StreamingDataset) -> liveset.StreamingDataset:
    copy = pickle.loads(pickle.dumps(dataset))
    assert isinstance(copy, liveset.StreamingDataset)
    return copy


def test_closing_ends_reading_and_the_pin(path: Path) -> None:
    with liveset.StreamingDataset(path, pin=True) as dataset:
        assert leases(open_store(path))
        iterator = iter(dataset)
        assert next(iterator) == 0
    assert leases(open_store(path)) == []
    dataset.close()
    for read in (lambda: dataset[3], lambda: list(dataset), lambda: list(iterator)):
        with pytest.raises(ValueError, match="is closed"):
            read()
    assert dataset.version == 1
    with liveset.StreamingDataset(path) as plain:
        assert plain[0] == 0


def test_a_dataset_that_nobody_holds_gives_its_pin_up(path: Path) -> None:
    threads = threading.active_count()
    dataset = liveset.StreamingDataset(path, pin=True)
    iterator = iter(dataset)
    thread = dataset._lease._thread  # type: ignore[union-attr]
    del dataset
    gc.collect()
    assert leases(open_store(path))  # the iterator still reads
    assert list(iterator) == list(range(40))
    del iterator
    gc.collect()
    assert leases(open_store(path)) == []
    thread.join(30)
    assert threading.active_count() == threads


def test_the_end_of_the_process_ends_the_pin(path: Path) -> None:
    code = f"import liveset; ds = liveset.StreamingDataset({str(path)!r}, pin=True); print(len(ds))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "40\n"
    assert leases(open_store(path)) == []


def _child(dataset: liveset.StreamingDataset, queue: Any) -> None:
    queue.put(sum(dataset))
    del dataset
    gc.collect()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_leaves_the_pin_to_its_parent(path: Path, method: str) -> None:
    dataset = liveset.StreamingDataset(path, pin=True)
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_child, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=60) == sum(range(40))
    child.join(60)
    assert leases(open_store(path))
    assert 1 in change_everything(path).pinned
    assert list(dataset) == list(range(40))
    dataset.close()


def test_a_pin_needs_permission_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("cannot write: permission denied")

    monkeypatch.setattr("liveset.storage.local.LocalStore.write", refuse)
    with pytest.raises(StorageError, match="permission denied"):
        liveset.StreamingDataset(path, pin=True)
    assert len(liveset.StreamingDataset(path)) == 40


def test_the_newest_version_is_looked_up_again_when_a_vacuum_is_quicker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]

    def late(store: Store, snapshot: Any) -> Lease:
        if left[0]:
            left[0] -= 1
            change_everything(path)
            change_everything(path)
        return pin(store, snapshot)

    monkeypatch.setattr("liveset.read.opened.pin", late)
    dataset = liveset.StreamingDataset(path, pin=True)
    assert left == [0]
    assert dataset[:] == list(range(1000, 1010))
    dataset.close()
    old = liveset.StreamingDataset(path).version
    left[0] = 1
    with pytest.raises(VersionExpired):
        liveset.StreamingDataset(path, version=old, pin=True)
    assert leases(open_store(path)) == []


# Moving on


def test_refresh_moves_on_between_epochs(path: Path) -> None:
    dataset = liveset.StreamingDataset(path, shuffle=True, subsample=0.5)
    assert not dataset.refresh()
    view, subset, running = dataset.as_map(), dataset.subset([0, 1]), iter(dataset)
    first = [next(running)]
    write_dataset(path, range(100, 120))
    assert dataset.refresh()
    assert (dataset.version, dataset.samples, len(view)) == (2, 10, 10)
    assert set(dataset) <= set(range(100, 120))
    assert len(set(first + list(running))) == 20  # the pass that was under way
    assert max(subset[:]) < 40
    assert not dataset.refresh()
    with pytest.raises(ValueError, match="a subset"):
        subset.refresh()
    with pytest.raises(ValueError, match="index_path"):
        liveset.StreamingDataset(path, index_path=path / "index.json").refresh()


def test_refresh_moves_the_pin_when_what_began_before_has_ended(path: Path) -> None:
    dataset = liveset.StreamingDataset(path, pin=True)
    running = iter(dataset)
    next(running)
    write_dataset(path, range(100, 120))
    assert dataset.refresh()
    assert liveset.vacuum(path, keep=0, grace=ZERO).pinned == (1, 2)
    assert list(running) == list(range(1, 40))
    del running
    gc.collect()
    write_dataset(path, [0])
    report = liveset.vacuum(path, keep=0, grace=ZERO)
    assert (report.pinned, 1 in report.expired) == ((2,), True)
    assert dataset[:] == list(range(100, 120))
    dataset.close()


def test_refresh_follows_a_new_schema(path: Path) -> None:
    dataset = liveset.StreamingDataset(path)
    old = dataset.schema
    write_dataset(path, [{"text": "a"}])
    dataset.refresh()
    assert dataset[0] == {"text": "a"}
    assert dataset.schema != old
    named = liveset.StreamingDataset(path, fields=["text"])
    write_dataset(path, [{"other": 1}])
    with pytest.raises((KeyError, ValueError)):
        named.refresh()
    assert (named.version, named[0]) == (2, {"text": "a"})  # as it was


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_epoch_with_workers_reads_its_version_to_the_end(path: Path, method: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = liveset.StreamingDataset(path, pin=True, shuffle=True)
    loader = data.DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=1, multiprocessing_context=method, collate_fn=list)
    read: list[int] = []
    reports = []
    for number, batch in enumerate(loader):
        read += batch
        if number < 4:
            reports.append(change_everything(path))
            liveset.optimize(_twice, range(3), path, num_workers=1, mode="append", verbose=False)
    assert sorted(read) == list(range(40))
    assert all(1 in report.pinned for report in reports)
    assert dataset.refresh()
    later = [sample for batch in loader for sample in batch]
    assert sorted(later) == sorted([*range(1000, 1010), 0, 2, 4])
    dataset.close()
    assert os.listdir(path / "_liveset" / "leases") == []


def _twice(number: int) -> int:
    return 2 * number
