"""Changes and their rebase: pure decisions on frozen data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from liveset.edit.changes import HISTORY, Append, Change, Overwrite, SetAttributes, Stamp, apply
from liveset.edit.rebase import check_rebase, check_schema
from liveset.errors import Conflict, DatasetNotFound, OverwriteConflict, SchemaConflict
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import HistoryEntry

CONFIG = {"compression": None, "data_format": ["int"], "data_spec": "spec"}


def stamp(number: int) -> Stamp:
    return Stamp(f"id {number}", f"job {number}", datetime(2030, 1, 1, tzinfo=UTC))


def line(*changes: Change, base: Index | None = None) -> Index:
    """The index after some changes."""
    index = base
    for number, change in enumerate(changes):
        index = apply(index, change, stamp(number + (base.version if base else 0)))
    assert index is not None
    return index


def since(base: Index | None, head: Index | None) -> list[HistoryEntry]:
    if head is None or head.edit is None or base is None:
        return []
    return [entry for entry in (head.edit.entry, *head.edit.history) if entry.version > base.version]


def adds(name: str, **config: Any) -> Append:
    return Append(CONFIG | config, (ChunkRecord(name, 1, 1),))


def replaces(name: str, force: bool = False) -> Overwrite:
    return Overwrite(CONFIG, (ChunkRecord(name, 1, 1),), force)


BASE = line(adds("a"))
MINE: dict[str, Change] = {
    "append": adds("m"),
    "overwrite": replaces("m"),
    "forced": replaces("m", force=True),
    "attributes": SetAttributes({"x": 1}),
}
THEIRS: dict[str, tuple[Change, ...]] = {
    "nothing": (),
    "append": (adds("t"),),
    "overwrite": (replaces("t"),),
    "attributes": (SetAttributes({"y": 1}),),
    "overwrite, then append": (replaces("t"), adds("u")),
}
REFUSED = {
    ("append", "overwrite"),
    ("append", "overwrite, then append"),
    *(("overwrite", theirs) for theirs in THEIRS if theirs != "nothing"),
}


@pytest.mark.parametrize("mine", MINE)
@pytest.mark.parametrize("theirs", THEIRS)
def test_the_table_of_conflicts(mine: str, theirs: str) -> None:
    head = line(*THEIRS[theirs], base=BASE)
    if (mine, theirs) in REFUSED:
        with pytest.raises(OverwriteConflict, match="meanwhile"):
            check_rebase(MINE[mine], BASE, head, since(BASE, head))
    else:
        check_rebase(MINE[mine], BASE, head, since(BASE, head))


def test_commits_of_unknown_kinds_may_have_replaced_everything() -> None:
    head = line(adds("t"), base=BASE)
    for op, refused in (("replace", False), ("compact", False), ("restore", True), ("something new", True)):
        entries = [since(BASE, head)[0]._replace(op=op)]
        if refused:
            with pytest.raises(OverwriteConflict):
                check_rebase(adds("m"), BASE, head, entries)
        else:
            check_rebase(adds("m"), BASE, head, entries)


def test_a_dataset_that_appeared() -> None:
    check_rebase(adds("m"), None, BASE, [])
    check_rebase(replaces("m", force=True), None, BASE, [])
    with pytest.raises(OverwriteConflict, match="appeared here meanwhile"):
        check_rebase(replaces("m"), None, BASE, [])


def test_a_dataset_that_went() -> None:
    for change in (adds("m"), replaces("m")):
        with pytest.raises(OverwriteConflict, match="removed meanwhile"):
            check_rebase(change, BASE, None, [])
    check_rebase(replaces("m", force=True), BASE, None, [])
    for base in (None, BASE):
        with pytest.raises(DatasetNotFound):
            check_rebase(SetAttributes({}), base, None, [])
    for change in (adds("m"), replaces("m")):
        check_rebase(change, None, None, [])


def test_another_dataset_in_the_same_place() -> None:
    other = apply(None, adds("o"), Stamp("other", "other", datetime(2030, 1, 1, tzinfo=UTC)))
    later = line(adds("p"), base=other)
    for head in (other, later):
        for change in (adds("m"), replaces("m")):
            # The history of the other one does not reach the base, so nothing is listed since.
            with pytest.raises(OverwriteConflict, match="another one was put in its place"):
                check_rebase(change, BASE, head, [])


def test_a_foreign_dataset_that_a_foreign_program_changed() -> None:
    base = Index.build(chunks=[ChunkRecord("a", 1, 1)], config=CONFIG)
    check_rebase(adds("m"), base, Index.parse(base.to_bytes()), [])
    with pytest.raises(OverwriteConflict):
        check_rebase(adds("m"), base, Index.build(chunks=[ChunkRecord("b", 1, 1)], config=CONFIG), [])


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("data_format", ["str"]),
        ("data_spec", "other"),
        ("compression", "zstd"),
        ("compression_level", "batch"),
        ("item_loader", "TokensLoader"),
        ("encryption", {"algorithm": "fernet"}),
        ("temporal_schema", {}),
    ],
)
def test_samples_of_another_kind_are_named(member: str, value: Any) -> None:
    with pytest.raises(SchemaConflict, match=r"^The config isn't consistent between chunks\. This shouldn't have happened\.") as info:
        check_rebase(adds("m", **{member: value}), BASE, BASE, [])
    assert member in str(info.value)
    assert "mode='overwrite'" in str(info.value)
    assert isinstance(info.value, ValueError)


def test_limits_and_hints_may_differ() -> None:
    limits = {"chunk_size": 5, "chunk_bytes": None, "types": {"x": "int"}, "compression_batch_size": 9, "ipc_compression": "zstd"}
    check_schema(CONFIG, CONFIG | limits)
    check_schema(CONFIG | limits, CONFIG)
    check_schema(CONFIG, CONFIG | {"item_loader": "PyTreeLoader", "compression_level": "chunk", "encryption": None})


def test_an_empty_dataset_takes_any_config() -> None:
    empty = line(Append(None, ()))
    assert (empty.config, empty.chunks) == (None, ())
    change = adds("m", data_format=["str"])
    check_rebase(change, empty, empty, [])
    assert apply(empty, change, stamp(1)).config == change.config
    # And nothing appended to something changes nothing about it.
    check_rebase(Append(None, ()), BASE, BASE, [])
    assert apply(BASE, Append(None, ()), stamp(1)).config == CONFIG


def test_attributes_of_two_commits_are_merged_unless_they_contradict() -> None:
    base = line(adds("a"), SetAttributes({"name": "old", "gone": 1}))
    theirs = apply(base, SetAttributes({"name": "theirs", "gone": None}), stamp(9))
    check_rebase(SetAttributes({"licence": "free", "gone": None, "name": "theirs"}), base, theirs, [])
    with pytest.raises(Conflict, match="'name'.*'?theirs"):
        check_rebase(SetAttributes({"name": "mine"}), base, theirs, [])
    assert apply(theirs, SetAttributes({"licence": "free"}), stamp(10)).attributes == {"name": "theirs", "licence": "free"}


def test_what_a_change_does_not_touch_stays() -> None:
    base = Index.build(
        chunks=[ChunkRecord("a", 1, 1)], config=CONFIG | {"x": 1}, attributes={"n": 1}, members={"theirs": b"[1]", "keys": b"{}"}
    )
    appended, replaced = apply(base, adds("b"), stamp(0)), apply(base, replaces("b"), stamp(0))
    assert appended.config == CONFIG | {"x": 1}
    assert replaced.config == CONFIG
    assert appended.attributes == replaced.attributes == {"n": 1}
    assert set(appended.members) == {"theirs", "keys", "updated_at"}
    assert set(replaced.members) == {"theirs", "updated_at"}
    assert [record.filename for record in appended.chunks] == ["a", "b"]
    assert [record.filename for record in replaced.chunks] == ["b"]


def test_a_chunk_is_not_appended_twice() -> None:
    with pytest.raises(ValueError, match="in the dataset already"):
        apply(BASE, adds("a"), stamp(1))


def test_the_stamp_follows_from_the_parent() -> None:
    index = line(*(adds(f"{number}") for number in range(HISTORY + 5)))
    assert index.edit is not None
    assert index.edit.parent == (HISTORY + 4, f"id {HISTORY + 3}")
    assert [entry.version for entry in index.edit.history] == list(range(HISTORY + 4, 4, -1))
    assert index.edit.history[0].session == f"job {HISTORY + 3}"
    assert (index.edit.op, index.edit.session) == ("append", f"job {HISTORY + 4}")
