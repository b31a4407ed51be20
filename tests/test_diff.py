"""diff: counts, keys and fields, against what decoding both versions whole says; and that it reads no more than what changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveset
from liveset.cli import main
from liveset.edit.changes import Replace
from liveset.edit.commit import commit
from liveset.errors import KeyNotFound, NotFound, VersionNotFound
from liveset.format.chunk import pack_classic
from liveset.format.codec import Compression
from liveset.format.framed import pack_framed, pack_sample_compressed
from liveset.format.index import ChunkRecord
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.tools.compare import differing, open_samples
from liveset.tools.diff import Diff, diff
from tests.support.foreign import arrow_chunk, make_foreign, write_arrow
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

LEVELS = [None, "batch", "sample", "chunk"]


def play(i: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"play-{i}", "label": i % 3, "meta": {"note": f"as recorded {i}", "at": float(i)}} | fields


def compression(level: str | None) -> Compression | None:
    return Compression("zstd", level, 3) if level is not None else None


def edit(path: Path, replaced: dict[str, Any], gone: Sequence[str] = ()) -> None:
    with liveset.dataset_update(path) as update:
        for key, sample in replaced.items():
            update.upsert(key, sample)
        for key in gone:
            del update[key]
        update.commit()


def flat(sample: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(sample, dict):
        return {name: sample}
    return {inner: value for key, part in sample.items() for inner, value in flat(part, f"{name}.{key}" if name else key).items()}


def truth(path: Path, a: int, b: int) -> tuple[list[Any], list[Any], list[tuple[Any, tuple[str, ...]]]]:
    """What decoding both versions says."""
    old, new = (liveset.StreamingDataset(path, version=version) for version in (a, b))
    before, after = (dict(zip(ds.keys, map(flat, ds), strict=True)) for ds in (old, new))
    changed = []
    for key, sample in after.items():
        if key in before and (fields := tuple(name for name in sample if sample[name] != before[key][name])):
            changed.append((key, fields))
    return [key for key in after if key not in before], [key for key in before if key not in after], changed


def told(found: Diff) -> tuple[list[Any], list[Any], list[tuple[Any, tuple[str, ...]]]]:
    added, removed, changed = list(found.added_keys()), list(found.removed_keys()), [tuple(change) for change in found.changes()]
    assert (found.added, found.removed, found.changed) == (len(added), len(removed), len(changed))
    return added, removed, changed  # type: ignore[return-value]


# --- against the truth ------------------------------------------------------------------------------------------------


numbers = st.integers(0, 30)
steps = st.tuples(
    st.dictionaries(numbers, st.integers(0, 3), max_size=5),
    st.frozensets(numbers, max_size=5),
)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=10, deadline=None)
@given(edits=st.lists(steps, min_size=1, max_size=4), chunk_size=st.integers(1, 9))
def test_any_edits(level: str | None, edits: list[tuple[dict[int, int], frozenset[int]]], chunk_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        write_dataset(path, map(play, range(20)), chunk_size=chunk_size, compression=compression(level), key="id")
        for values, gone in edits:
            there = set(liveset.StreamingDataset(path).keys)
            lost = {f"play-{i}" for i in gone - values.keys()} & there
            if lost == there:
                lost = set()
            if values or lost:
                edit(path, {f"play-{i}": play(i, label=value) for i, value in values.items()}, sorted(lost))
        newest = liveset.StreamingDataset(path).version
        for a, b in {(1, newest), (newest, 1), (newest - 1, newest), (newest, newest)}:
            if min(a, b) > 0:
                assert told(diff(path, a, b)) == truth(path, a, b)


@pytest.mark.parametrize("level", LEVELS)
def test_an_overwrite_moves_every_sample(tmp_path: Path, level: str | None) -> None:
    write_dataset(tmp_path, map(play, range(20)), chunk_size=6, key="id")
    new = [play(i, meta={"note": "new", "at": 0.0}) if i == 7 else play(i) for i in reversed(range(3, 25))]
    write_dataset(tmp_path, new, chunk_size=5, compression=compression(level), key="id")
    found = diff(tmp_path, 1)
    assert told(found) == truth(tmp_path, 1, 2)
    assert [change for change in found.changes() if change.key == "play-7"] == [("play-7", ("meta.note", "meta.at"))]


def test_integer_keys_and_versions_by_tag_and_time(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"n": i, "v": 0} for i in range(9)], key="n")
    liveset.tag(tmp_path, "before")
    edit(tmp_path, {4: {"n": 4, "v": 1}}, [7])  # type: ignore[dict-item,list-item]
    assert told(liveset.diff(tmp_path, "before")) == ([], [7], [(4, ("v",))])
    when = liveset.history(tmp_path)[0].when
    assert not liveset.diff(tmp_path, when, None)
    assert liveset.diff(tmp_path, None, "before").added == 1
    with pytest.raises(VersionNotFound):
        liveset.diff(tmp_path, 77)


def test_keys_that_go_and_come_back_elsewhere(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(12)), key="id")
    edit(tmp_path, {}, ["play-2", "play-3"])
    edit(tmp_path, {"play-2": play(2), "play-3": play(3, label=9)})
    assert told(diff(tmp_path, 1)) == ([], [], [("play-3", ("label",))])
    assert told(diff(tmp_path, 2)) == (["play-2", "play-3"], [], [])


def test_other_keys_are_other_samples(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": f"k{i}", "alt": f"a{i}" if i else "k0", "v": 1} for i in range(6)], key="id")
    liveset.build_keys_index(tmp_path, "alt", overwrite=True, verbose=False)
    assert told(diff(tmp_path, 1)) == ([f"a{i}" for i in range(1, 6)], [f"k{i}" for i in range(1, 6)], [])


# --- what is read -----------------------------------------------------------------------------------------------------


def test_only_changed_chunks_are_read(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(100)), chunk_size=10, key="id")
    edit(tmp_path, {"play-42": play(42, label=9)})
    touched = {record.filename for version in (1, 2) for record in [open_snapshot(open_store(tmp_path), version).index.chunks[4]]}
    for file in tmp_path.glob("chunk-*"):
        if file.name not in touched:
            file.unlink()
    found = diff(tmp_path, 1)
    assert told(found) == ([], [], [("play-42", ("label",))])
    for name in touched:
        (tmp_path / name).unlink()
    assert found.added == 0
    with pytest.raises(NotFound, match="does not exist"):
        assert diff(tmp_path, 1).changed


def test_counts_of_appended_and_deleted_samples_read_no_chunk(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(100)), chunk_size=10, key="id")
    edit(tmp_path, {f"play-{i}": play(i) for i in range(100, 105)}, ["play-5", "play-50"])
    for file in tmp_path.glob("chunk-*"):
        file.unlink()
    found = diff(tmp_path, 1)
    assert (found.added, found.removed) == (5, 2)
    assert list(found.removed_keys()) == ["play-5", "play-50"]


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_other_schemas_name_their_fields_and_compare_values(tmp_path: Path) -> None:
    old = [{"id": f"k{i}", "n": i, "x": [1.0, float("nan")], "gone": "g"} for i in range(5)]
    new: list[dict[str, Any]] = [
        {"id": f"k{i}", "n": i + 0.5 if i == 3 else float(i), "x": [1.0, float("nan")], "fresh": b"f"} for i in range(1, 6)
    ]
    write_dataset(tmp_path, old, key="id")
    write_dataset(tmp_path, new, key="id")
    found = diff(tmp_path, 1)
    assert (found.fields_added, found.fields_dropped, found.fields_retyped) == (("fresh",), ("gone",), ("n",))
    assert told(found) == (["k5"], ["k0"], [("k3", ("n",))])


def test_a_field_that_is_new_is_a_difference_without_changed_samples(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": "a"}], key="id")
    write_dataset(tmp_path, [{"id": "a", "n": 1}], key="id")
    found = diff(tmp_path, 1)
    assert found
    assert told(found) == ([], [], [])


def test_arrays_of_another_type_are_compared_by_value(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": "a", "x": np.array([1, 2])}, {"id": "b", "x": np.array([3])}], key="id")
    write_dataset(tmp_path, [{"id": "a", "x": [1, 2]}, {"id": "b", "x": [4]}], key="id")
    changed = diff(tmp_path, 1)
    assert [change.key for change in changed.changes()] in (["b"], [])  # lists are branches of the tree, or one leaf
    assert changed


# --- without keys -----------------------------------------------------------------------------------------------------


def test_positions_stand_for_keys(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)))
    base = open_snapshot(open_store(tmp_path)).index
    twin = tmp_path / "twin"
    write_dataset(twin, [play(i, label=9) if i in (5, 6) else play(i) for i in range(10)])
    record = open_snapshot(open_store(twin)).index.chunks[1]
    (twin / record.filename).rename(tmp_path / record.filename)
    old = base.chunks[1]
    commit(open_store(tmp_path), Replace({str(old.id): record.replace(id=old.id)}, {str(old.id): old.filename}), base)
    liveset.optimize(play, range(10, 13), tmp_path, mode="append", num_workers=1, verbose=False)
    found = diff(tmp_path, 1)
    assert found.by == "position"
    assert told(found) == ([10, 11, 12], [], [(5, ("label",)), (6, ("label",))])
    assert told(diff(tmp_path, 3, 1))[1] == [10, 11, 12]


def test_without_keys_nothing_is_guessed(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(6)))
    base = open_snapshot(open_store(tmp_path)).index
    first, last = base.chunks
    shorter = Replace({str(first.id): last.replace(id=first.id), str(last.id): None}, {str(x.id): x.filename for x in base.chunks})
    commit(open_store(tmp_path), shorter, base)
    with pytest.raises(KeyNotFound, match="nothing says which"):
        assert diff(tmp_path, 1).changed


def test_keys_that_are_built_later(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(6)))
    liveset.build_keys_index(tmp_path, "id", verbose=False)
    edit(tmp_path, {"play-4": play(4, label=9)})
    found = diff(tmp_path, 1)
    assert (found.by, told(found)) == ("position", ([], [], [(4, ("label",))]))


# --- other programs ---------------------------------------------------------------------------------------------------


def test_adoption_changes_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)), key="id")
    make_foreign(tmp_path)
    liveset.adopt(tmp_path)
    assert not diff(tmp_path, 0)
    edit(tmp_path, {"play-3": play(3, label=9)}, ["play-8"])
    assert told(diff(tmp_path, 0)) == ([], ["play-8"], [("play-3", ("label",))])


def test_padding_is_no_difference(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(4)), key="id")
    make_foreign(tmp_path)
    liveset.adopt(tmp_path)
    store = open_store(tmp_path)
    base = open_snapshot(store).index
    (record,) = base.chunks
    samples = open_samples((tmp_path / record.filename).read_bytes(), record, None)
    padded = b"".join(pack_classic([samples[i] + bytes(i) for i in range(4)]))  # type: ignore[operator]
    name = record.filename.replace("-0-0-", "-0-9-")
    (tmp_path / name).write_bytes(padded)
    commit(store, Replace({str(record.id): record.replace(filename=name, size=len(padded))}, {str(record.id): record.filename}), base)
    assert told(diff(tmp_path, 1)) == ([], [], [])


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_arrow_rows(tmp_path: Path, codec: str | None) -> None:
    rows = [{"id": f"k{i}", "v": i, "t": {"a": f"x{i}", "b": None if i else 1}} for i in range(1000)]
    write_arrow(tmp_path, rows, chunk_size=600, codec=codec)
    edit(tmp_path, {f"k{i}": {**rows[i], "v": -1} for i in (5, 700, 999)})
    assert told(diff(tmp_path, 0)) == ([], [], [(f"k{i}", ("v",)) for i in (5, 700, 999)])


# --- comparing chunk files --------------------------------------------------------------------------------------------


PACKS: dict[str, tuple[Callable[[list[bytes]], bytes], Compression | None]] = {
    "classic": (lambda items: b"".join(pack_classic(items)), None),
    "framed": (lambda items: b"".join(pack_framed(items, Compression("zstd", "batch", 3))), Compression("zstd", "batch", 3)),
    "sample": (lambda items: b"".join(pack_sample_compressed(items, Compression("zstd", "sample"))), Compression("zstd", "sample")),
}
items = st.lists(st.sampled_from([b"a", b"b", b"aa", b"ab", b"", b"abc"]), min_size=1, max_size=12).filter(any)


@pytest.mark.parametrize("left", PACKS)
@pytest.mark.parametrize("right", PACKS)
@given(data=st.data())
def test_differing_items(left: str, right: str, data: st.DataObject) -> None:
    old = data.draw(items.filter(all) if left == "framed" else items)
    new = data.draw(items.filter(all) if right == "framed" else items)
    mine = data.draw(st.lists(st.integers(0, len(old) - 1), max_size=20).map(sorted))
    theirs = data.draw(st.lists(st.integers(0, len(new) - 1), min_size=len(mine), max_size=len(mine)))
    if data.draw(st.booleans()):
        if data.draw(st.booleans()) and right != "framed":  # most sizes stay, so that items are compared in long runs
            new = [bytes(data.draw(st.integers(0, 9)) and byte for byte in item) for item in old[:-1]] + new[-1:]
        mine = theirs = list(range(min(len(old), len(new))))
    opened = []
    for stored, (pack, packing) in ((old, PACKS[left]), (new, PACKS[right])):
        packed = pack(stored)
        opened.append(open_samples(packed, ChunkRecord("f", len(stored), len(packed)), packing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("liveset.tools.compare._STEP", data.draw(st.integers(1, 5)))
        found = differing(opened[0], opened[1], np.array(mine, np.int64), np.array(theirs, np.int64))
    assert found.tolist() == [old[a] != new[b] for a, b in zip(mine, theirs, strict=True)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=70), st.lists(st.integers(0, 2), min_size=1, max_size=70))
def test_differing_rows(old: list[int], new: list[int]) -> None:
    count = min(len(old), len(new))
    packed = [arrow_chunk([{"v": float(v) if v else float("nan")} for v in values]) for values in (old, new)]
    opened = [open_samples(p, ChunkRecord("f", len(v), len(p)), None) for p, v in zip(packed, (old, new), strict=True)]
    slots = np.arange(count)
    assert differing(opened[0], opened[1], slots, slots).tolist() == [a != b for a, b in zip(old[:count], new[:count], strict=True)]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path, map(play, range(10)), key="id")
    edit(tmp_path, {**{f"play-{i}": play(i) for i in range(10, 15)}, "play-1": play(1, label=9, meta={"note": "", "at": 1.0})}, ["play-2"])

    def call(*argv: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["diff", str(tmp_path), *map(str, argv)])
        assert exit_.value.code == 0
        return capsys.readouterr().out

    assert call(1, "-n", 2) == (
        "version 1 -> 2: 5 added, 1 removed, 1 changed\n+ play-10\n+ play-11\n+ ... and 3 more\n- play-2\n~ play-1  label, meta.note\n"
    )
    assert call(1, 2, "-n", 0) == "version 1 -> 2: 5 added, 1 removed, 1 changed\n"
    found = json.loads(call(1, "--json", "-n", 1))
    assert (found["added"], found["removed"], found["changed"]) == (5, 1, 1)
    assert found["keys"] == {"added": ["play-10"], "removed": ["play-2"], "changed": [{"key": "play-1", "fields": ["label", "meta.note"]}]}
