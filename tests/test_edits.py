"""Adding, removing and patching samples: a dict of samples in order says what a dataset must be after any edits."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveset
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.edit.staging import Kind, Staged, StagedEdits
from liveset.errors import DuplicateKeys, KeyConflict, KeyNotFound, SampleError, SessionClosed
from liveset.format.codec import Compression
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.testing.invariants import check_dataset
from tests.support.foreign import write_arrow, write_foreign
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

SAMPLE, BATCH, CHUNK = (Compression("zstd", level, 3) for level in ("sample", "batch", "chunk"))
Write = Callable[[Path, list[dict[str, Any]]], object]
LAYOUTS: dict[str, Write] = {
    "classic": lambda path, samples: write_dataset(path, samples, key="id"),
    "sample": lambda path, samples: write_dataset(path, samples, key="id", compression=SAMPLE),
    "batch": lambda path, samples: write_dataset(path, samples, key="id", compression=BATCH),
    "chunk": lambda path, samples: write_dataset(path, samples, key="id", compression=CHUNK),
    "foreign": write_foreign,
    "foreign chunk": lambda path, samples: write_foreign(path, samples, compression=CHUNK),
    "arrow": lambda path, samples: write_arrow(path, samples, chunk_size=4),
}


def sample(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"k{number}", "n": number, "text": text or f"number {number}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", map(sample, range(20)), key="id")
    return tmp_path / "ds"


def check(path: Path, expected: dict[str, Any]) -> None:
    """By position, by key, and in every file, the dataset is what it should be."""
    dataset = liveset.StreamingDataset(path)
    assert list(dataset) == list(expected.values())
    assert list(dataset.keys) == list(expected)
    for position, (key, value) in enumerate(expected.items()):
        assert dataset[key] == dataset[position] == value
    check_dataset(open_store(path))


class Plain:
    """What an update should do, on a dict."""

    def __init__(self, samples: dict[str, Any]) -> None:
        self.before, self.staged = samples, dict[str, Any]()
        self.new: list[str] = []

    def put(self, key: str, value: Any) -> None:
        self.staged[key] = value

    def get(self, key: str) -> Any:
        return self.staged.get(key, self.before.get(key))

    def commit(self) -> dict[str, Any]:
        kept = {key: self.staged.get(key, value) for key, value in self.before.items()}
        kept = {key: value for key, value in kept.items() if value is not None}
        return kept | {key: value for key, value in self.staged.items() if key not in self.before and value is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=25)
def test_a_dataset_is_what_its_edits_made_of_it(layout: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        expected = {f"k{number}": sample(number) for number in range(10)}
        LAYOUTS[layout](path, list(expected.values()))
        for _ in range(data.draw(st.integers(1, 3))):
            plain = Plain(expected)
            with dataset_update(path) as update:
                for step in range(data.draw(st.integers(1, 8))):
                    play(update, plain, data.draw(st.sampled_from(["put", "insert", "upsert", "delete", "patch"])), step, data)
                plan = update.preview()
                result = update.commit()
            assert (plan.keys, plan.inserted, plan.deleted) == (result.keys, result.inserted, result.deleted)
            after = plain.commit()
            assert result.inserted == len(after.keys() - expected.keys())
            assert result.deleted == len(expected.keys() - after.keys())
            expected = after
            check(path, expected)


def play(update: DatasetUpdate, plain: Plain, op: str, step: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 13))
    key, value = f"k{number}", sample(number, f"step {step}")
    there = plain.get(key) is not None
    assert (key in update) is there
    if there:
        assert update[key] == plain.get(key)
    if op == "put":
        if there or key in plain.before:
            update[key] = value
            plain.put(key, value)
    elif op == "insert":
        if there:
            with pytest.raises(DuplicateKeys):
                update.insert(key, value)
        else:
            update.insert(key, value)
            plain.put(key, value)
    elif op == "upsert":
        update.upsert(key, value)
        plain.put(key, value)
    elif not there:
        with pytest.raises(KeyNotFound):
            update.__delitem__(key) if op == "delete" else update.patch(key, n=0)
    elif op == "delete":
        del update[key]
        if key in plain.before:
            plain.put(key, None)
        else:
            del plain.staged[key]
    else:
        update.patch(key, {"n": step}, text=f"patched {step}")
        plain.put(key, plain.get(key) | {"n": step, "text": f"patched {step}"})


def test_positions_follow_one_rule(path: Path) -> None:
    with dataset_update(path) as update:
        update.insert("new", sample(0) | {"id": "new"})
        del update["k0"], update["k7"]
        update["k3"] = sample(3, "same place")
        update.insert("newer", sample(0) | {"id": "newer"})
        result = update.commit()
    assert (result.keys, result.inserted, result.deleted) == (5, 2, 2)
    names = [f"k{number}" for number in range(20) if number not in (0, 7)]
    assert list(liveset.StreamingDataset(path).keys) == [*names, "new", "newer"]
    assert [entry.op for entry in liveset.history(path)] == ["edit", "create"]


def test_only_touched_chunks_are_written(path: Path) -> None:
    before = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    with dataset_update(path) as update:
        del update["k5"]
        assert update.commit().chunks == 1
    after = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    assert len(after.keys() - before.keys()) == 1
    assert before.items() <= after.items()


def test_a_chunk_without_samples_leaves_and_writes_nothing(path: Path) -> None:
    before = set(path.glob("chunk-*"))
    with dataset_update(path) as update:
        for number in range(4, 8):
            del update[f"k{number}"]
        assert update.commit().bytes_written == 0
    assert set(path.glob("chunk-*")) == before
    check(path, {f"k{n}": sample(n) for n in range(20) if not 4 <= n < 8})


def test_a_dataset_may_become_empty_and_be_filled_again(path: Path) -> None:
    with dataset_update(path) as update:
        for number in range(20):
            del update[f"k{number}"]
        update.commit()
    check(path, {})
    with dataset_update(path) as update:
        update.insert("k3", sample(3))
        update.commit()
    check(path, {"k3": sample(3)})
    liveset.restore(path, 1)
    check(path, {f"k{n}": sample(n) for n in range(20)})


@pytest.mark.parametrize("op", ["delete", "insert", "replace", "append"])
def test_published_keys_never_name_another_sample(path: Path, op: str) -> None:
    with dataset_update(path) as update:
        if op == "delete":
            del update["k2"]
        elif op == "insert":
            update.insert("k30", sample(30))
        elif op == "replace":
            update["k2"] = sample(2, "new")
        update.commit()
    assert (path / "keys" / "shard-00000.parquet").exists() is (op != "delete")


def two(path: Path, mine: Callable[[DatasetUpdate], object], theirs: Callable[[DatasetUpdate], object]) -> Iterator[Any]:
    """Stage mine, commit theirs, and yield for the commit of mine."""
    with dataset_update(path) as update:
        mine(update)
        with dataset_update(path) as other:
            theirs(other)
            other.commit()
        yield update


def put(key: str, text: str = "mine") -> Callable[[DatasetUpdate], object]:
    return lambda update: update.__setitem__(key, sample(int(key[1:]), text))


def delete(*keys: str) -> Callable[[DatasetUpdate], object]:
    def edit(update: DatasetUpdate) -> None:
        for key in keys:
            del update[key]

    return edit


def insert(key: str, text: str = "mine") -> Callable[[DatasetUpdate], object]:
    return lambda update: update.insert(key, sample(int(key[1:]), text))


def patch(key: str, **values: Any) -> Callable[[DatasetUpdate], object]:
    return lambda update: update.patch(key, **values)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (put("k2"), delete("k2")),
        (patch("k2", n=1), delete("k2")),
        (patch("k2", n=1), put("k2", "theirs")),
        (delete("k2"), put("k2", "theirs")),
        (delete("k2"), patch("k2", n=7)),
        (insert("k30"), insert("k30", "theirs")),
        (lambda update: update.upsert("k30", sample(30)), insert("k30", "theirs")),
    ],
)
def test_two_edits_of_one_key_are_a_conflict(path: Path, mine: Any, theirs: Any) -> None:
    for update in two(path, mine, theirs):
        before = sorted(path.glob("chunk-*"))
        with pytest.raises(KeyConflict, match="Nothing was changed") as caught:
            update.commit()
        assert caught.value.keys in (("k2",), ("k30",))
        assert sorted(path.glob("chunk-*")) == before
    check_dataset(open_store(path))


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (put("k3"), delete("k1", "k2"), {"k3": sample(3, "mine")}),
        (delete("k3"), delete("k1", "k2"), {}),
        (delete("k1", "k3"), delete("k1", "k2"), {}),
        (delete("k1", "k2", "k3"), delete("k0"), {}),
        (delete("k3"), put("k2", "theirs"), {"k2": sample(2, "theirs")}),
        (patch("k3", n=9), delete("k0"), {"k3": sample(3) | {"n": 9}}),
        (insert("k30"), delete("k0"), {"k30": sample(30, "mine")}),
        (insert("k30"), insert("k31", "theirs"), {"k31": sample(31, "theirs"), "k30": sample(30, "mine")}),
        (delete("k0"), insert("k31", "theirs"), {"k31": sample(31, "theirs")}),
    ],
)
def test_edits_of_other_keys_of_the_same_chunk_both_count(path: Path, mine: Any, theirs: Any, expected: dict[str, Any]) -> None:
    gone = set[str]()

    class Recorder:
        """Notes what would be deleted."""

        def __delitem__(self, key: str) -> None:
            gone.add(key)

        def __setitem__(self, *_: Any) -> None: ...
        def insert(self, *_: Any) -> None: ...
        def patch(self, *_: Any, **__: Any) -> None: ...

    for play_it in (mine, theirs):
        play_it(Recorder())
    for update in two(path, mine, theirs):
        update.commit()
    kept = {f"k{n}": sample(n) for n in range(20) if f"k{n}" not in gone}
    check(path, {**kept, **expected})


def test_a_delete_that_somebody_did_already_makes_no_version(path: Path) -> None:
    for update in two(path, delete("k1"), delete("k1", "k2")):
        result = update.commit()
        assert result.version == 2
    assert liveset.StreamingDataset(path).version == 2


def test_what_does_not_fit_is_refused_at_once(path: Path) -> None:
    with dataset_update(path) as update:
        with pytest.raises(DuplicateKeys, match="upsert"):
            update.insert("k1", sample(1))
        with pytest.raises(SampleError, match="n.*int") as caught:
            update.patch("k1", n="seven")
        assert caught.value.field == "n"
        with pytest.raises(SampleError, match="no field 'm'.*n, text"):
            update.patch("k1", m=1)
        with pytest.raises(SampleError, match="'k2'.*'k1'"):
            update.patch("k1", id="k2")
        with pytest.raises(SampleError, match="'k2'.*'k1'"):
            update.upsert("k1", sample(2))
        update.patch("k1", id="k1")
        with pytest.raises(KeyNotFound):
            update.patch("k99", n=1)
        with pytest.raises(KeyNotFound):
            del update["k99"]
        with pytest.raises(KeyNotFound, match="text"):
            del update[7]
        assert len(update) == 1
        update.commit()
        for late in (delete("k1"), insert("k40"), patch("k1", n=1)):
            with pytest.raises(SessionClosed, match="after commit"):
                late(update)


def test_nested_fields_are_patched_by_their_path(tmp_path: Path) -> None:
    def nested(i: int) -> dict[str, Any]:
        return {"id": i, "meta": {"who": f"w{i}", "tags": ["a", "b"]}, "boxes": [(1.5, i), (2.5, i)], "raw": b"\x00" * i}

    write_dataset(tmp_path, map(nested, range(9)), key="id")
    with dataset_update(tmp_path) as update:
        update.patch(3, {"meta.who": "Ada", "boxes[1][0]": -1.0})
        update.patch(4, {"meta": {"who": "Bob", "tags": ["x", "y"]}}, raw=b"new")
        update.patch(4, {"boxes[0]": (9.0, 9)})
        assert update[4]["boxes"] == [(9.0, 9), (2.5, 4)]
        update.commit()
    dataset = liveset.StreamingDataset(tmp_path)
    assert dataset.get_by_key(3) == nested(3) | {"meta": {"who": "Ada", "tags": ["a", "b"]}, "boxes": [(1.5, 3), (-1.0, 3)]}
    assert dataset.get_by_key(4) == {"id": 4, "meta": {"who": "Bob", "tags": ["x", "y"]}, "boxes": [(9.0, 9), (2.5, 4)], "raw": b"new"}
    assert dataset.get_by_key(5) == nested(5)


def test_a_patch_keeps_the_stored_bytes_of_all_other_fields(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (9, 7), (200, 30, 90))
    write_dataset(tmp_path, [{"id": f"k{i}", "image": picture, "label": i} for i in range(6)], key="id")
    before = liveset.StreamingDataset(tmp_path)
    with dataset_update(tmp_path) as update:
        update.patch("k2", label=-2)
        update.commit()
    after = liveset.StreamingDataset(tmp_path)
    assert after["k2"]["label"] == -2
    assert after["k2"]["image"] == before["k2"]["image"]


def test_new_samples_get_chunks_of_the_usual_size(path: Path) -> None:
    with dataset_update(path) as update:
        for number in range(20, 31):
            update.upsert(f"k{number}", sample(number))
        result = update.commit()
    assert result.inserted == 11
    sizes = [record.samples for record in open_snapshot(open_store(path)).index.chunks]
    assert sizes == [4] * 5 + [4, 4, 3]
    check(path, {f"k{n}": sample(n) for n in range(31)})


def test_keys_stay_few_tables_however_many_edits(path: Path) -> None:
    for number in range(40):
        with dataset_update(path) as update:
            update.insert(f"k{100 + number}", sample(100 + number))
            if number % 3 == 0:
                del update[f"k{number // 3}"]
            update.commit()
    edit = open_snapshot(open_store(path)).index.edit
    assert edit is not None
    assert edit.key_files is not None
    assert len(edit.key_files.tables) < 9
    check(path, {f"k{n}": sample(n) for n in [*range(14, 20), *range(100, 140)]})


# --- tables ---------------------------------------------------------------------------------------------------------


def test_a_table_changes_fields_and_leaves_the_others(path: Path, tmp_path: Path) -> None:
    (tmp_path / "edits.csv").write_text("id,n\nk3,-3\nk5,-5\n")
    with dataset_update(path) as update:
        update["k5"] = sample(5, "staged before")
        assert update.apply(tmp_path / "edits.csv") == 2
        assert update.apply({"k7": {"text": "from a mapping"}}) == 1
        assert update.commit().keys == 3
    expected = {f"k{n}": sample(n) for n in range(20)}
    expected["k3"]["n"] = -3
    expected["k5"] = sample(5, "staged before") | {"n": -5}
    expected["k7"]["text"] = "from a mapping"
    check(path, expected)


def test_keys_that_are_missing_are_an_error_or_left_out_or_added(path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "k3", "n": -3, "text": "a"},
        {"id": "k33", "n": 33, "text": "b"},
        {"id": "k34", "n": 34, "text": "c"},
    ]
    with dataset_update(path) as update:
        update.patch("k3", n=7)
        with pytest.raises(KeyNotFound) as caught:
            update.apply(rows)
        assert caught.value.keys == ("k33", "k34")  # type: ignore[attr-defined]
        assert update["k3"] == sample(3) | {"n": 7}
        assert len(update) == 1
        assert update.apply(rows, on_missing="skip") == 1
        assert update.apply(rows, on_missing="insert") == 3
        result = update.commit()
    assert result.inserted == 2
    check(path, {f"k{n}": sample(n) for n in range(20)} | {row["id"]: row for row in rows})


def test_a_new_row_must_be_whole(path: Path) -> None:
    with dataset_update(path) as update:
        with pytest.raises(SampleError, match="'k50'.*text are missing"):
            update.apply([{"id": "k3", "n": 1}, {"id": "k50", "n": 1}], on_missing="insert")
        assert len(update) == 0
        with pytest.raises(ValueError, match="on_missing"):
            update.apply([], on_missing="ignore")  # type: ignore[arg-type]
        with pytest.raises(SampleError, match="'k3'.*'k4'"):
            update.apply({"k4": {"id": "k3"}})
        del update["k3"]
        with pytest.raises(KeyNotFound, match="'k3'"):
            update.apply({"k3": {"n": 1}})


def test_a_job_with_deletes_and_inserts_may_be_run_again(path: Path) -> None:
    def job() -> int:
        with dataset_update(path, session="nightly") as update:
            del update["k1"]
            update.insert("k40", sample(40))
            update.patch("k2", n=-2)
            return update.commit().version

    assert job() == 2
    with dataset_update(path) as update:
        update.patch("k3", n=-3)
        update.commit()
    assert job() == 2
    expected = {f"k{n}": sample(n) for n in (*range(20), 40) if n != 1}
    expected["k2"]["n"], expected["k3"]["n"] = -2, -3
    check(path, expected)


# --- the edges ------------------------------------------------------------------------------------------------------


def test_a_failed_table_leaves_the_order_of_inserts(path: Path) -> None:
    with dataset_update(path) as update:
        update.insert("k50", sample(50))
        update.insert("k51", sample(51))
        with pytest.raises(KeyNotFound):
            update.apply({"k50": {"n": -1}, "k99": {"n": 1}})
        update.commit()
    assert list(liveset.StreamingDataset(path).keys)[-2:] == ["k50", "k51"]


def test_an_update_that_is_closed_answers_nothing(path: Path) -> None:
    update = dataset_update(path)
    update.patch("k1", n=-1)
    update.commit()
    for ask in (lambda: update["k1"], lambda: "k1" in update, update.preview, update.commit, lambda: update.discard("k1")):
        with pytest.raises(SessionClosed):
            ask()


def test_after_a_conflict_the_rest_can_be_committed(path: Path) -> None:
    with dataset_update(path) as update:
        update.patch("k1", n=-1)
        update.patch("k2", n=-2)
        with dataset_update(path) as other:
            other.patch("k2", n=22)
            other.commit()
        with pytest.raises(KeyConflict) as caught:
            update.commit()
        for key in caught.value.keys:
            update.discard(key)
        update.discard("k19")
        assert update.commit().keys == 1
    assert [liveset.StreamingDataset(path)[key]["n"] for key in ("k1", "k2")] == [-1, 22]


def test_what_patch_cannot_mean_is_refused(path: Path) -> None:
    with dataset_update(path) as update:
        with pytest.raises(TypeError, match="'n' twice"):
            update.patch("k1", {"n": 1}, n=2)
        with pytest.raises(TypeError, match="by name.*not str"):
            update.patch("k1", "n")  # type: ignore[arg-type]
        del update["k1"]
        with pytest.raises(KeyNotFound, match="removed by this update"):
            update.patch("k1", n=1)
        assert len(update) == 1


def test_staged_edits_are_counted_and_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liveset.edit.staging._STEP", 3)
    staged = StagedEdits(limit=10)
    for turn in range(2):
        for number in range(5):
            staged.put(f"k{number}", Staged(b"%d" % turn * 7, Kind.REPLACE))
            assert len(staged) == len(list(staged))
    assert [staged.get(f"k{number}").data for number in range(5)] == [b"1" * 7] * 5
    for number, left in ((0, 4), (4, 3), (4, 3)):
        staged.discard(f"k{number}")
        assert len(staged) == left


def test_chunks_of_new_samples_stay_below_what_the_format_can_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liveset.edit.rewrite._LARGEST", 200)
    with dataset_update(path) as update:
        for number in range(30, 34):
            update.insert(f"k{number}", sample(number, "x" * 100))
        update.commit()
    assert [record.samples for record in open_snapshot(open_store(path)).index.chunks][5:] == [1, 1, 1, 1]


def test_fields_with_dots_are_patched_as_they_are_named(tmp_path: Path) -> None:
    one = {"id": "k1", "a.b": 1, "a": {"b": "x", "c.d": 2.0}, "": True}
    write_dataset(tmp_path / "ds", [one], key="id")
    with dataset_update(tmp_path / "ds") as update:
        update.patch("k1", {"a.b": 7, "['a']['b']": "y", "a['c.d']": 3.0, "": False})
        changed = {"id": "k1", "a.b": 7, "a": {"b": "y", "c.d": 3.0}, "": False}
        assert update["k1"] == changed
        with pytest.raises(
            SampleError, match=r"there is no field 'a\.x': the samples have the fields id, a\.b, \['a'\]\['b'\], a\['c\.d'\]"
        ):
            update.patch("k1", {"a.x": 1})
        with pytest.raises(SampleError, match=r"field 'a\.b' is str here, but the dataset has int"):
            update.patch("k1", {"a.b": "y"})
        assert update.apply({"k1": {"a.b": 8, "a": {"b": "z", "c.d": 4.0}}}) == 1
        assert update["k1"] == {**changed, "a.b": 8, "a": {"b": "z", "c.d": 4.0}}
        update.commit()
    for name, value in (("a.b", {"a.b": 8}), ("['a']['b']", {"a": {"b": "z"}}), ("", {"": False})):
        assert liveset.StreamingDataset(tmp_path / "ds", fields=[name])["k1"] == value


def test_a_patch_that_does_not_fit_names_the_whole_field(tmp_path: Path) -> None:
    one = {
        "id": "k1",
        "v": np.zeros(3, np.float32),
        "im": liveset.Image(array=np.zeros((2, 2, 3), np.uint8)),
        "meta": {"n": 1, "t": (1, "")},
    }
    write_dataset(tmp_path / "ds", [one], key="id")
    with dataset_update(tmp_path / "ds") as update:
        for changes, field, message in (
            ({"im": None}, "im", "field 'im' is None here, but the dataset has image"),
            ({"meta": {"n": "x", "t": (1, "")}}, "meta.n", "field 'meta.n' is str here, but the dataset has int"),
            ({"meta": {"n": 1}}, "meta.t[0]", r"field 'meta\.t\[0\]' is missing here"),
            ({"meta.t": (1, None)}, "meta.t[1]", r"field 'meta\.t\[1\]' is None here, but the dataset has str"),
            ({"v": 1}, "v", r"field 'v' is int here, but the dataset has array\[float32, 1-d\]"),
            ({"v": [1, 16777217]}, "v", r"field 'v': \[1, 16777217\] does not fit: the field holds array\[float32, 1-d\]"),
            ({"v": ["x"]}, "v", "field 'v': .*does not fit"),
            ({"v": np.zeros(3)}, "v", r"field 'v' is array\[float64, 1-d\] here, but the dataset has array\[float32, 1-d\]"),
            ({"meta": {"n": "\ud800", "t": (1, "")}}, "meta.n", "field 'meta.n'"),
            ({"im": b"no image"}, "im", "field 'im': "),
        ):
            with pytest.raises(SampleError, match=message) as caught:
                update.patch("k1", changes)
            assert caught.value.field == field
            assert str(caught.value).count("field '") == 1
        update.patch("k1", v=[1, 0.1])
        np.testing.assert_array_equal(update["k1"]["v"], np.array([1, 0.1], np.float32))
        assert update["k1"]["v"].dtype == np.float32
        assert update["k1"]["meta"] == one["meta"]


def test_a_patch_says_once_what_a_field_is(path: Path, tmp_path: Path) -> None:
    with dataset_update(path) as update:
        with pytest.raises(SampleError, match="both say what .* is"):
            update.patch("k1", {"n": 1, "['n']": 1})
        with pytest.raises(SampleError, match="there is no field 3"):
            update.patch("k1", {3: 1})  # type: ignore[dict-item]
        with pytest.raises(SampleError, match="'other'.*'k1'"):
            update.patch("k1", {"['id']": "other"})
        assert len(update) == 0
    write_dataset(tmp_path / "nested", [{"meta": {"id": "k1", "n": 1}}], key="meta.id")
    with dataset_update(tmp_path / "nested") as update:
        for both in ({"meta.n": 1, "meta": {"id": "k1", "n": 2}}, {"meta": {"id": "k1", "n": 2}, "meta.n": 1}):
            with pytest.raises(SampleError, match="the fields 'meta' and 'meta.n' both say what 'meta.n' is"):
                update.patch("k1", both)
        with pytest.raises(SampleError, match="'meta.id' says 'other'"):
            update.patch("k1", meta={"id": "other", "n": 1})
        with pytest.raises(SampleError, match="has none there"):
            update.patch("k1", meta={"n": 1})
        assert len(update) == 0
        rows = [{"meta": {"id": "k1", "n": 3}}, {"meta": {"id": "k2", "n": 4}}]
        assert update.apply(rows, on_missing="insert") == 2
        assert [update[key] for key in ("k1", "k2")] == rows


def test_a_row_that_cannot_be_applied_is_named(path: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    for line, message in (
        ('{"key": "k50", "n": 1}', "(key 'k50'): the fields text are missing"),
        ('{"key": "k4", "id": "k5"}', "(key 'k4'): field 'id' says 'k5'"),
        ('{"key": "k2", "n": 1}', ": the key 'k2' occurs more than once ('k2' in rows 1 and 2)"),
    ):
        table.write_text('{"key": "k2", "n": 1}\n' + line + "\n")
        where = f"{table}" if "more than once" in message else f"{table}, row 2 "
        with dataset_update(path) as update:
            with pytest.raises((SampleError, DuplicateKeys), match=re.escape(where + message)):
                update.apply(table, key="key", on_missing="insert")
            assert len(update) == 0
