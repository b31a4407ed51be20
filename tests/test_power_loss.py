"""Power loss on a local disk: whatever was not synced may be gone, and still every dataset is the old or the new one, whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from liveset.edit.changes import Append, Change, Overwrite, SetAttributes
from liveset.edit.commit import Policy, commit
from liveset.edit.session import DatasetUpdate
from liveset.errors import CommitUnknown
from liveset.format.index import Index
from liveset.snapshot import open_snapshot
from liveset.storage import HEAD, Store
from liveset.storage.files import Files
from liveset.storage.local import LocalStore
from liveset.testing import SimulatedCrash
from liveset.testing.disk import DiskLog
from liveset.testing.invariants import check_dataset, stage
from tests.support.writing import write_dataset

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}
AT_ONCE = Policy(first_pause=0)


class NoLinks(DiskLog):
    def link(self, source: str, target: str) -> None:
        raise OSError(1, "no links here")


def _run(store: Store, change: Callable[[Store], Change], session: str) -> Index:
    head = store.read_head()
    return commit(store, change(store), Index.parse(head.data) if head else None, session=session, policy=AT_ONCE)


def _two_chunks(store: Store) -> Change:
    return Append(CONFIG, (stage(store, "c"), stage(store, "d")))


CHANGES: dict[str, Callable[[Store], Change]] = {
    "append": _two_chunks,
    "overwrite": lambda store: Overwrite(CONFIG, (stage(store, "c"),)),
    "attributes": lambda store: SetAttributes({"name": "new"}),
}


def lose_power_everywhere(tmp_path: Path, make: Callable[[Path], DiskLog], change: Callable[[Store], Change], existing: int) -> int:
    """Runs a change with the power failing at every call; returns how many disks were looked at."""

    def begin(store: Store) -> None:
        for number in range(existing):
            _run(store, lambda store, name=f"old{number}": Append(CONFIG, (stage(store, name),)), f"old {number}")  # type: ignore[misc]

    def check(survivor: Store, acknowledged: bool) -> None:
        versions = check_dataset(survivor)
        assert len(versions) == existing + 1 if acknowledged else len(versions) in (existing, existing + 1)
        # What is left can be built upon.
        commit(survivor, Append(None, ()), None, policy=AT_ONCE)
        check_dataset(survivor)

    return _everywhere(tmp_path, make, begin, lambda store: _run(store, change, "new"), check, 12)


def _everywhere(
    tmp_path: Path,
    make: Callable[[Path], DiskLog],
    begin: Callable[[Store], object],
    act: Callable[[Store], object],
    check: Callable[[Store, bool], object],
    images: int,
) -> int:
    seen = 0
    crash_at: int | None = None
    for run in range(300):
        root = tmp_path / f"run {run}" / "dataset"
        root.parent.mkdir(parents=True)
        log = make(root)
        store = LocalStore(root, files=log)
        begin(store)
        log.crash_at = crash_at = len(log.calls) + run + 1
        try:
            act(store)
            acknowledged = True
        except SimulatedCrash:
            acknowledged = False
        for number, image in enumerate(log.images(images, seed=run)):
            after = tmp_path / f"run {run}" / f"image {number}"
            after.mkdir()
            for name, data in image.items():
                (after / name).parent.mkdir(parents=True, exist_ok=True)
                (after / name).write_bytes(data)
            check(LocalStore(after), acknowledged)
            seen += 1
        if acknowledged:
            return seen
    raise AssertionError(f"still not through after {crash_at} calls")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("existing", [1, 2])
def test_power_loss_at_any_call_leaves_the_old_or_the_new_version(tmp_path: Path, change: Callable[[Store], Change], existing: int) -> None:
    assert lose_power_everywhere(tmp_path, DiskLog, change, existing) > 100


SAMPLES = [{"id": f"k{i}", "v": i} for i in range(8)]
EDITED = [*SAMPLES[:1], {"id": "k2", "v": -2}, SAMPLES[3], {"id": "n0", "v": 90}, {"id": "n1", "v": 91}]
"""Two chunks of four samples, of which the second one goes."""


def edit_a_dataset(tmp_path: Path, make: Callable[[Path], DiskLog], images: int) -> int:
    """Inserts, deletes and patches with the power failing at every call: all of it or nothing is there, by position and by key."""
    write_dataset(tmp_path / "before", SAMPLES, key="id")
    before = LocalStore(tmp_path / "before")
    files = {entry.name: before.read(entry.name) for entry in before.list("") if entry.name != HEAD}
    head = before.read(HEAD)

    def begin(store: Store) -> None:
        for name, data in files.items():
            store.write(name, data)
        store.swap_head(head, None)

    def act(store: Store) -> None:
        with DatasetUpdate(store, policy=AT_ONCE) as update:
            for key in ("k1", "k4", "k5", "k6", "k7"):
                del update[key]
            update.patch("k2", v=-2)
            for sample in EDITED[-2:]:
                update.insert(sample["id"], sample)
            update.commit()

    def check(survivor: Store, acknowledged: bool) -> None:
        versions = check_dataset(survivor)
        assert len(versions) == 2 if acknowledged else len(versions) in (1, 2)
        with DatasetUpdate(survivor, policy=AT_ONCE) as update:
            expected = SAMPLES if len(versions) == 1 else EDITED
            assert [update[sample["id"]] for sample in expected] == expected
            assert versions[-1].samples == len(expected)
            # What is left can be built upon.
            del update["k0"]
            update.insert("n2", {"id": "n2", "v": 92})
            update.commit()
        check_dataset(survivor)

    return _everywhere(tmp_path, make, begin, act, check, images)


@pytest.mark.parametrize("images", [3, pytest.param(20, marks=pytest.mark.nightly)])
def test_power_loss_at_any_call_of_an_edit_leaves_all_of_it_or_nothing(tmp_path: Path, images: int) -> None:
    assert edit_a_dataset(tmp_path, DiskLog, images) > 100


@pytest.mark.parametrize("forgotten", ["sync", "keys"])
def test_a_sync_that_an_edit_forgets_is_noticed(tmp_path: Path, forgotten: str) -> None:
    with pytest.raises((AssertionError, ValueError, OSError)):
        edit_a_dataset(tmp_path, lambda root: DiskLog(root, forget=[forgotten]), 3)


def test_power_loss_while_a_dataset_is_created(tmp_path: Path) -> None:
    assert lose_power_everywhere(tmp_path, DiskLog, _two_chunks, 0) > 100


def test_power_loss_where_the_archive_is_a_copy(tmp_path: Path) -> None:
    assert lose_power_everywhere(tmp_path, NoLinks, _two_chunks, 2) > 100


def test_what_another_program_left_unsynced_is_archived_whole(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    root.mkdir()
    log = DiskLog(root)
    fd = log.create(str(root / "index.json"))
    log.write(fd, [b'{"chunks": [], "config": null}'])
    log.close(fd)
    _run(LocalStore(root, files=log), _two_chunks, "new")
    for number, image in enumerate(log.images(20)):
        after = LocalStore(tmp_path / f"image {number}")
        for name, data in image.items():
            after.write(name, data)
        assert [index.version for index in check_dataset(after)] == [0, 1]


@pytest.mark.parametrize("forgotten", ["sync", "sync_directory", "dataset", "versions", "_liveset"])
def test_a_forgotten_sync_is_noticed(tmp_path: Path, forgotten: str) -> None:
    def make(root: Path) -> DiskLog:
        return DiskLog(root, forget=[forgotten])

    with pytest.raises((AssertionError, ValueError, OSError)):
        lose_power_everywhere(tmp_path, make, _two_chunks, 2)


class SyncsTooLate(LocalStore):
    """Mutant: the head is replaced before the names that it lists are durable."""

    def _sync_directories(self) -> None:
        pass


def test_a_sync_after_the_rename_only_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "_sync_directories", SyncsTooLate._sync_directories)
    with pytest.raises((AssertionError, ValueError, OSError)):
        lose_power_everywhere(tmp_path, DiskLog, _two_chunks, 2)


class LosesTheLastSync(Files):
    def __init__(self, root: Path) -> None:
        self.root, self.renamed = str(root), False

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.renamed = target.endswith("index.json")

    def sync_directory(self, path: str) -> None:
        if self.renamed and path == self.root:
            raise OSError(5, "Input/output error")
        super().sync_directory(path)


def test_a_commit_that_may_not_survive_a_power_loss_is_read_back(tmp_path: Path) -> None:
    """All others see the new head, so the commit is in the history: what the directory sync said changes nothing about that."""
    store = LocalStore(tmp_path / "d", files=LosesTheLastSync(tmp_path / "d"))
    try:
        index = _run(store, _two_chunks, "job")
    except CommitUnknown:
        return
    assert open_snapshot(store).index == index
