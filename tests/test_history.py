"""History: what it tells about each version, near and far, kept and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import liveset
from liveset.edit.changes import HISTORY, SetAttributes
from liveset.edit.commit import commit
from liveset.errors import CommitUnknown, DatasetNotFound, VersionExpired
from liveset.snapshot import open_snapshot
from liveset.storage import open_store, version_name
from tests.support.foreign import make_foreign
from tests.support.racing import append, sweep
from tests.support.writing import write_dataset


def test_each_version_with_its_facts(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    before = datetime.now(UTC)
    liveset.optimize(lambda i: {"n": i}, range(10), path, num_workers=1, chunk_size=5, verbose=False, message="all of it", session="job 1")
    liveset.optimize(lambda i: {"n": i}, range(3), path, num_workers=1, mode="append", verbose=False)
    liveset.tag(path, "paper", 2, message="as printed", author="ann")
    liveset.tag(path, "a", 2)
    found = liveset.history(path)
    assert [version.version for version in found] == [4, 3, 2, 1]
    assert [version.op for version in found] == ["tag", "tag", "append", "create"]
    assert [version.samples for version in found] == [13, 13, 13, 10]
    assert [version.chunks for version in found] == [3, 3, 3, 2]
    assert (found[1].message, found[1].author) == ("as printed", "ann")
    assert (found[3].message, found[3].author, found[3].session) == ("all of it", "", "job 1")
    assert [version.tags for version in found] == [(), (), ("a", "paper"), ()]
    assert all(version.available for version in found)
    times = [version.when for version in found]
    assert all(time is not None and before <= time <= datetime.now(UTC) + timedelta(seconds=1) for time in times)
    assert times == sorted(times, reverse=True)  # type: ignore[type-var]
    assert found[0].size == sum(file.stat().st_size for file in path.glob("chunk-*"))


def test_bytes_that_only_one_version_uses(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    sizes = []
    for count in (4, 40, 400):
        old = {file.name for file in path.glob("chunk-*")}
        write_dataset(path, range(count), chunk_size=1000)
        (new,) = [file for file in path.glob("chunk-*") if file.name not in old]
        sizes.append(new.stat().st_size)
    assert [version.alone for version in reversed(liveset.history(path))] == sizes
    liveset.restore(path, 1)
    assert [version.alone for version in reversed(liveset.history(path))] == [0, *sizes[1:], 0]
    # What it tells is what a vacuum frees.
    free = sum(version.alone or 0 for version in liveset.history(path))
    report = liveset.vacuum(path, keep=0, grace=timedelta(0))
    assert len(report.deleted["chunk"]) == 2
    assert free == sizes[1] + sizes[2]
    assert {file.stat().st_size for file in path.glob("chunk-*")} == {sizes[0]}


def test_it_goes_on_where_a_head_no_longer_remembers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store)
    for number in range(HISTORY + 5):
        commit(store, SetAttributes({"n": number}), open_snapshot(store).index, message=f"number {number}", author="ann")
    found = liveset.history(tmp_path)
    assert [version.version for version in found] == list(range(HISTORY + 6, 0, -1))
    assert found[-2].message == "number 0"
    assert found[-2].author == "ann"
    assert {version.samples for version in found} == {1}


def test_forgotten_versions_are_listed_without_facts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        append(store)
    sweep(store)
    found = {version.version: version for version in liveset.history(tmp_path)}
    assert [version for version, facts in found.items() if facts.available] == [4, 3]
    assert found[2].op == "append"
    assert (found[2].samples, found[2].chunks, found[2].size, found[2].alone) == (None, None, None, None)
    assert found[4].op == "fence"


def test_what_another_program_wrote_is_version_zero(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"chunks": [], "config": null}')
    (only,) = liveset.history(tmp_path)
    assert (only.version, only.when, only.op, only.samples) == (0, None, "foreign", 0)
    liveset.set_attributes(tmp_path, name="x")
    assert [(version.version, version.op) for version in liveset.history(tmp_path)] == [
        (2, "attributes"),
        (1, "adopt"),
        (0, "foreign"),
    ]


def test_there_is_no_history_where_nothing_is(tmp_path: Path) -> None:
    for call in (liveset.history, liveset.vacuum, lambda path: liveset.restore(path, 1), lambda path: liveset.untag(path, "x")):
        with pytest.raises(DatasetNotFound):
            call(tmp_path / "absent")
    with pytest.raises(DatasetNotFound):
        liveset.was_committed(tmp_path / "absent", "job")


def test_was_committed_answers_what_commit_unknown_asks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, session="job 7")
    error = CommitUnknown("nobody knows", session="job 7")
    assert liveset.was_committed(tmp_path, error.session)
    for _ in range(HISTORY + 3):
        append(store)
    assert liveset.was_committed(tmp_path, "job 7")
    store.delete([version_name(2), version_name(3), version_name(4), version_name(5)])
    with pytest.raises(VersionExpired, match="cut"):
        liveset.was_committed(tmp_path, "job 6")


def test_was_committed_knows_what_a_tag_has_saved_behind_the_cut(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in (1, 2):
        append(store, session=f"job {number}")
    liveset.tag(tmp_path, "paper", 2)
    for _ in range(HISTORY + 3):
        append(store)
    sweep(store)
    assert [version.session for version in liveset.history(tmp_path)][-2:] == ["job 2", "job 1"]
    assert liveset.was_committed(tmp_path, "job 2")
    assert liveset.was_committed(tmp_path, "job 1")
    with pytest.raises(VersionExpired, match="cut"):
        liveset.was_committed(tmp_path, "job 3")


def test_an_entry_of_an_older_liveset_has_no_author(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store)
    append(store)
    data = (tmp_path / "index.json").read_bytes()
    index = open_snapshot(store).index
    assert index.edit is not None
    entry = index.edit.history[0]
    assert entry.author == ""
    short = data.replace(b', "", ""]', b"]")
    assert short != data
    assert type(index).parse(short).edit == index.edit


@pytest.mark.parametrize(
    "act",
    [
        liveset.adopt,
        lambda path, **said: liveset.set_attributes(path, {"message": "of its own", "name": "ds"}, **said),
        lambda path, **said: liveset.build_keys_index(path, "id", verbose=False, **said),
        lambda path, **said: liveset.tag(path, "paper", **said),
    ],
    ids=["adopt", "set_attributes", "build_keys_index", "tag"],
)
def test_every_change_says_who_and_why(tmp_path: Path, act: Callable[..., object]) -> None:
    pytest.importorskip("pyarrow")
    write_dataset(tmp_path, [{"id": number} for number in range(5)])
    make_foreign(tmp_path)
    act(tmp_path, message="for spring", author="ann")
    found = liveset.history(tmp_path)
    assert (found[0].message, {version.author for version in found if version.version}) == ("for spring", {"ann"})
    dataset = liveset.StreamingDataset(tmp_path)
    assert dataset.attributes in ({}, {"message": "of its own", "name": "ds"})


def test_a_dry_run_of_keys_raises_what_building_them_would(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_dataset(tmp_path, [{"id": number, "half": number // 2} for number in range(5)])
    files = set(tmp_path.rglob("*"))
    with pytest.raises(liveset.DuplicateKeys, match="'?0'?"):
        liveset.build_keys_index(tmp_path, "half", dry_run=True, verbose=False)
    assert liveset.build_keys_index(tmp_path, "id", dry_run=True, verbose=False) == str(tmp_path / "keys")
    assert set(tmp_path.rglob("*")) == files
    liveset.build_keys_index(tmp_path, "id", verbose=False)
    with pytest.raises(liveset.KeysExist):
        liveset.build_keys_index(tmp_path, "id", dry_run=True, verbose=False)


def test_a_tagged_version_behind_a_cut_history_is_listed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", range(4))
    liveset.tag(tmp_path / "ds", "paper", 1)
    for turn in range(70):
        liveset.set_attributes(tmp_path / "ds", turn=turn)
    liveset.vacuum(tmp_path / "ds", keep=1, grace=timedelta(0), dry_run=False)
    listed = liveset.history(tmp_path / "ds")
    assert (listed[-1].version, listed[-1].tags, listed[-1].available) == (1, ("paper",), True)
    assert [version.version for version in listed] == [*range(73, 8, -1), 1]
