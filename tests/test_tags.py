"""Tags: names of versions, which open them and keep them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

import liveset
from liveset.edit.changes import Append, Overwrite, Retag, SetAttributes, Stamp, apply
from liveset.edit.rebase import check_rebase
from liveset.errors import Conflict, DatasetNotFound, VersionExpired, VersionNotFound
from liveset.format.index import ChunkRecord, Index
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.testing import MemoryStore
from tests.support.foreign import make_foreign
from tests.support.racing import append, content, overwrite, sweep, tag
from tests.support.writing import write_dataset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        write_dataset(tmp_path / "ds", [{"n": number}] * number)
    return tmp_path / "ds"


def tags(path: Path) -> dict[str, int]:
    edit = open_snapshot(open_store(path)).index.edit
    assert edit is not None
    return dict(edit.tags)


def test_a_tag_opens_its_version_whatever_is_committed(path: Path) -> None:
    assert liveset.tag(path, "paper", 2) == 2
    assert liveset.tag(path, "newest") == 4  # the first tag was version 4
    write_dataset(path, [{"n": 9}])
    assert liveset.StreamingDataset(path, version="paper")[:] == [{"n": 2}] * 2
    assert liveset.StreamingDataset(path, version="newest")[:] == [{"n": 3}] * 3
    assert tags(path) == {"paper": 2, "newest": 4}


def test_a_tag_is_moved_only_when_asked_to(path: Path) -> None:
    liveset.tag(path, "paper", 1)
    version = open_snapshot(open_store(path)).version
    assert liveset.tag(path, "paper", 1) == 1
    assert open_snapshot(open_store(path)).version == version  # nothing new to say
    with pytest.raises(ValueError, match="names version 1 .*move=True gives it to version 2"):
        liveset.tag(path, "paper", 2)
    assert liveset.tag(path, "paper", 2, move=True) == 2
    assert liveset.tag(path, "copy", "paper") == 2
    assert liveset.untag(path, "paper") == 2
    assert tags(path) == {"copy": 2}
    with pytest.raises(VersionNotFound, match="no tag 'paper'"):
        liveset.untag(path, "paper")


@pytest.mark.parametrize("name", ["", "5", "2026-01-01", "-x", "a b", "a\n", "x" * 101, None, "/a"])
def test_names_that_could_be_something_else_are_refused(path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a tag"):
        liveset.tag(path, name, 1)
    assert tags(path) == {}


@pytest.mark.parametrize("name", ["paper", "v1.0", "über", "a/b", "_x+y-z"])
def test_names_that_are_tags(path: Path, name: str) -> None:
    liveset.tag(path, name, 1)
    assert liveset.StreamingDataset(path, version=name).version == 1


def test_what_is_not_there_cannot_be_tagged(path: Path, tmp_path: Path) -> None:
    with pytest.raises(VersionNotFound, match="no version 9"):
        liveset.tag(path, "paper", 9)
    with pytest.raises(VersionNotFound, match="no tag 'other': it has no tags"):
        liveset.tag(path, "paper", "other")
    with pytest.raises(DatasetNotFound):
        liveset.tag(tmp_path / "absent", "paper")
    liveset.tag(path, "paper", 1)
    with pytest.raises(VersionNotFound, match="its tags are paper"):
        liveset.StreamingDataset(path, version="papers")
    with pytest.raises(VersionNotFound, match="asked for by the number, version=2"):
        liveset.StreamingDataset(path, version="2")


def test_a_dry_run_changes_nothing(path: Path) -> None:
    make_foreign(path)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert liveset.tag(path, "paper", dry_run=True) == 0
    with pytest.raises(VersionNotFound, match="no tag 'paper'"):
        liveset.untag(path, "paper", dry_run=True)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    liveset.adopt(path)
    liveset.tag(path, "paper", 1)
    assert liveset.untag(path, "paper", dry_run=True) == 1
    with pytest.raises(ValueError, match="the tag 'paper' names version 1"):
        liveset.tag(path, "paper", 0, dry_run=True)
    assert liveset.tag(path, "paper", 0, move=True, dry_run=True) == 0
    assert liveset.StreamingDataset(path, version="paper").version == 1


def test_unknown_members_beside_tags_survive(path: Path) -> None:
    index = open_snapshot(open_store(path)).index
    assert index.edit is not None
    assert "tags" not in index.edit.to_json()
    tagged = apply(index, Retag("paper", 1), Stamp("id", "job", datetime(2030, 1, 1, tzinfo=UTC)))
    assert tagged.edit is not None
    assert tagged.edit.to_json()["tags"] == {"paper": 1}
    assert Index.parse(tagged.to_bytes()).edit == tagged.edit
    assert (tagged.chunks, tagged.config, tagged.attributes) == (index.chunks, index.config, index.attributes)


# Rebase


def stamped(index: Index | None, *changes: Append | Overwrite | Retag | SetAttributes) -> Index:
    for change in changes:
        version = index.version if index else 0
        index = apply(index, change, Stamp(f"id {version}", f"job {version}", datetime(2030, 1, 1, tzinfo=UTC)))
    assert index is not None
    return index


CONFIG = {"compression": None, "data_format": ["int"], "data_spec": "spec"}
BASE = stamped(None, Append(CONFIG, (ChunkRecord("a", 1, 1),)), Retag("old", 1))


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        (Append(CONFIG, (ChunkRecord("b", 1, 1),)), False),
        (Overwrite(CONFIG, (ChunkRecord("b", 1, 1),)), False),
        (Retag("other", 1), False),
        (Retag("paper", 1), False),
        (Retag("paper", 2), True),
        (Retag("paper", None), False),
    ],
)
def test_tags_of_two_commits_are_merged_unless_they_contradict(theirs: Append | Overwrite | Retag, refused: bool) -> None:
    head = stamped(BASE, theirs)
    mine = Retag("paper", 1)
    assert head.edit is not None
    if refused:
        with pytest.raises(Conflict, match="gave it to version 2 meanwhile"):
            check_rebase(mine, BASE, head, [head.edit.entry])
    else:
        check_rebase(mine, BASE, head, [head.edit.entry])
    tagged = stamped(BASE, Retag("paper", 1))
    gone = stamped(tagged, Retag("paper", None))
    assert gone.edit is not None
    with pytest.raises(Conflict, match="took it away meanwhile"):
        check_rebase(Retag("paper", 2), tagged, gone, [gone.edit.entry])


def test_a_tag_does_not_stand_in_the_way_of_an_overwrite() -> None:
    head = stamped(BASE, Retag("paper", 1))
    assert head.edit is not None
    check_rebase(Overwrite(CONFIG, ()), BASE, head, [head.edit.entry])
    check_rebase(Append(CONFIG, ()), BASE, head, [head.edit.entry])


def test_a_tag_and_a_vacuum_never_both_win() -> None:
    store = MemoryStore()
    append(store)
    overwrite(store)
    base = open_snapshot(store).index
    sweep(store)
    with pytest.raises(VersionExpired, match="version 1 has expired"):
        check_rebase(Retag("paper", 1), base, open_snapshot(store).index, [])
    with pytest.raises(VersionExpired):
        tag(store, "paper", 1)
    tag(store, "paper", 2)
    overwrite(store)
    sweep(store)
    assert content(store, 2)
