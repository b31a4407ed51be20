"""dataset_update: what a user may do, what is refused, and what is left on the disk."""

from __future__ import annotations

import gc
import io
import os
import random
import struct
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liveset
from liveset.edit import pending as pending_module
from liveset.edit import staging
from liveset.edit.adopt import adopt
from liveset.edit.changes import SetAttributes
from liveset.edit.commit import Policy, commit
from liveset.edit.report import UpdateResult
from liveset.edit.rewrite import Splicer
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.edit.staging import Kind, Staged, StagedEdits
from liveset.errors import (
    CommitUnknown,
    Corrupt,
    DatasetNotFound,
    KeyConflict,
    KeyNotFound,
    OverwriteConflict,
    PickleRefused,
    SampleError,
    SessionClosed,
    StorageError,
)
from liveset.format.codec import Compression
from liveset.format.schema import Decoder, Encoder, Schema
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.storage.local import LocalStore
from liveset.testing import LossyStore
from liveset.testing.disk import FailingFiles
from liveset.testing.invariants import check_dataset
from liveset.testing.strategies import same
from tests.support.foreign import write_arrow, write_foreign
from tests.support.writing import write_dataset

SAMPLE, BATCH, CHUNK = (Compression("zstd", level, 3) for level in ("sample", "batch", "chunk"))
LAYOUTS = {"classic": None, "sample": SAMPLE, "batch": BATCH, "chunk": CHUNK}


def sample(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"k{number}", "n": number, "text": text or f"number {number}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", map(sample, range(20)), key="id")
    return tmp_path / "ds"


def read(path: Path, **options: Any) -> list[Any]:
    return list(liveset.StreamingDataset(path, **options))


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def put(path: Path, *numbers: int, text: str = "new") -> UpdateResult:
    with dataset_update(path) as update:
        for number in numbers:
            update[f"k{number}"] = sample(number, text)
        return update.commit()


# --- the session ----------------------------------------------------------------------------------------------------


def test_samples_are_replaced_in_one_commit(path: Path) -> None:
    with dataset_update(path, author="ann") as update:
        update["k3"] = sample(3, "new")
        update.replace("k17", sample(17, "much longer than before"))
        assert len(update) == 2
        assert list(update) == ["k3", "k17"]
        result = update.commit(message="two fixed")
    assert (result.version, result.keys, result.chunks) == (2, 2, 2)
    assert result.seconds > 0
    index = open_snapshot(open_store(path)).index
    written = [
        record.size
        for record, before in zip(index.chunks, open_snapshot(open_store(path), 1).index.chunks, strict=True)
        if record != before
    ]
    assert result.bytes_written == sum(written)
    assert index.edit is not None
    assert (index.edit.op, index.edit.message, index.edit.author) == ("replace", "two fixed", "ann")
    expected = [sample(i) for i in range(20)]
    expected[3], expected[17] = sample(3, "new"), sample(17, "much longer than before")
    assert read(path) == expected
    assert read(path, version=1) == [sample(i) for i in range(20)]
    assert liveset.StreamingDataset(path)["k17"] == expected[17]
    assert liveset.verify(path).ok
    check_dataset(open_store(path))


def test_the_last_assignment_wins(path: Path) -> None:
    with dataset_update(path) as update:
        for text in ("a", "b", "c"):
            update["k3"] = sample(3, text)
        assert update["k3"]["text"] == "c"
        assert update.commit().keys == 1
    assert read(path)[3]["text"] == "c"


def test_reads_are_of_the_staged_sample_else_of_the_stored_one(path: Path) -> None:
    with dataset_update(path) as update:
        assert update["k3"] == sample(3)
        update["k3"] = sample(3, "new")
        assert update["k3"] == sample(3, "new")
        assert "k3" in update
        assert "k99" not in update
        with pytest.raises(KeyNotFound, match="k99"):
            update["k99"]
    assert read(path)[3] == sample(3)


def test_leaving_without_commit_discards(path: Path) -> None:
    before = files(path)
    with dataset_update(path) as update:
        update["k3"] = sample(3, "new")
    failing = dataset_update(path)
    failing["k3"] = sample(3, "new")
    with pytest.raises(ZeroDivisionError), failing:
        _ = 1 / 0
    assert files(path) == before
    assert read(path)[3] == sample(3)
    for closed in (update, failing):
        with pytest.raises(SessionClosed, match=r"Cannot modify dataset_update after commit\(\)"):
            closed["k3"] = sample(3)
        with pytest.raises(RuntimeError, match="uncommitted"):
            closed.commit()


def test_after_commit_it_is_closed(path: Path) -> None:
    with dataset_update(path) as update:
        update["k3"] = sample(3, "new")
        update.commit()
        with pytest.raises(RuntimeError, match=r"Cannot modify dataset_update after commit\(\)\."):
            update["k4"] = sample(4, "late")
        with pytest.raises(RuntimeError, match=r"session already committed\."):
            update.commit()
    assert read(path)[4] == sample(4)


def test_an_empty_commit_makes_no_version(path: Path) -> None:
    before = (path / "index.json").read_bytes()
    with dataset_update(path) as update:
        result = update.commit()
        with pytest.raises(SessionClosed):
            update.commit()
    assert (result.version, result.keys, result.chunks, result.bytes_written) == (1, 0, 0, 0)
    assert (path / "index.json").read_bytes() == before


@pytest.mark.parametrize("layout", [*LAYOUTS, "arrow"])
@pytest.mark.parametrize("how", ["replace", "patch", "upsert", "apply"])
def test_what_changes_nothing_makes_no_version(tmp_path: Path, layout: str, how: str) -> None:
    samples = [sample(i) for i in range(20)]
    if layout == "arrow":
        write_arrow(tmp_path, samples, chunk_size=4)
        adopt(tmp_path)
    else:
        write_dataset(tmp_path, samples, key="id", chunk_size=4, compression=LAYOUTS[layout])
    before, version = files(tmp_path), open_snapshot(open_store(tmp_path)).version

    def edit(*numbers: int, session: str | None = None, **changed: Any) -> UpdateResult:
        rows = {f"k{i}": {**sample(i), **changed} if i == numbers[-1] else sample(i) for i in numbers}
        with dataset_update(tmp_path, session=session) as update:
            if how == "apply":
                update.apply({key: {"n": row["n"], "text": row["text"]} for key, row in rows.items()})
            for key, row in rows.items() if how != "apply" else ():
                update.patch(key, n=row["n"], text=row["text"]) if how == "patch" else getattr(update, how)(key, row)
            return update.commit()

    result = edit(3, 4, 17)
    assert (result.version, result.keys, result.chunks, result.bytes_written) == (version, 3, 0, 0)
    assert files(tmp_path) - {"_liveset/lock"} == before - {"_liveset/lock"}
    # One sample is another: only its chunk is written anew.
    for changed in ({"n": -1}, {"n": -2, "text": "longer than before"}):
        version += 1
        result = edit(3, 4, 17, **changed)
        assert (result.version, result.keys, result.chunks) == (version, 3, 1)
        assert read(tmp_path) == [{**one, **changed} if one["id"] == "k17" else one for one in samples]
    # Work with a name is remembered, whatever it did.
    before = files(tmp_path)
    result = edit(3, 4, session="again")
    assert (result.version, result.keys, result.chunks, result.bytes_written) == (version + 1, 2, 0, 0)
    assert {name for name in files(tmp_path) - before if not name.startswith("_liveset/versions")} == set()
    assert liveset.was_committed(tmp_path, "again")
    assert edit(3, 4, session="again", n=7).version == version + 1
    assert read(tmp_path)[4] == samples[4]
    assert liveset.verify(tmp_path).ok
    check_dataset(open_store(tmp_path))


def test_what_somebody_else_changed_is_a_conflict_for_who_changes_nothing(path: Path) -> None:
    with dataset_update(path) as update:
        update["k3"] = sample(3)
        put(path, 3)
        with pytest.raises(KeyConflict, match="'k3' was changed by another commit"):
            update.commit()


def test_a_chunk_that_could_not_be_written_is_written_again(path: Path) -> None:
    """The next one is made meanwhile, and what was written before it is used again."""
    store = LocalStore(path, files=FailingFiles(crash_at=2, error=OSError(28, "No space left on device"), only="write"))
    staged, snapshot = StagedEdits(), open_snapshot(store)
    edits = {number: {0: f"k{snapshot.starts[number]}"} for number in range(3)}
    config = snapshot.index.config or {}
    schema = Schema.from_config(config)
    for slots in edits.values():
        staged.put(slots[0], Staged(Encoder(schema).encode(sample(1, "new")), Kind.REPLACE))
    splicer = Splicer(store, staged, Decoder(schema))
    with pytest.raises(StorageError, match="No space left"):
        splicer.splice(snapshot, edits, {}, lambda *_: None)
    records, _ = splicer.splice(snapshot, edits, {}, lambda *_: None)
    assert len(records) == 3
    assert all(record is not None and len(store.read(record.filename)) == record.size for record in records.values())
    assert len(splicer.written) == 4


def test_unknown_keys_are_all_named_and_nothing_is_changed(path: Path) -> None:
    before = files(path)
    with dataset_update(path) as update:
        update["k3"] = sample(3, "new")
        for number in range(100, 115):
            update[f"k{number}"] = sample(number)
        assert update.preview().missing == tuple(f"k{number}" for number in range(100, 115))
        with pytest.raises(KeyNotFound, match="Unknown dataset key: 'k100', .*'k109' and 5 more") as caught:
            update.commit()
    assert len(caught.value.__dict__["keys"]) == 15
    assert isinstance(caught.value, KeyError)
    assert files(path) == before
    assert read(path) == [sample(i) for i in range(20)]


def test_the_preview_tells_what_a_commit_touches(path: Path) -> None:
    with dataset_update(path) as update:
        for number in (0, 1, 9):
            update[f"k{number}"] = sample(number, "x")
        preview = update.preview()
        sizes = [record.size for record in open_snapshot(open_store(path)).index.chunks]
        assert (preview.keys, preview.chunks, preview.bytes_to_rewrite, preview.missing) == (3, 2, sizes[0] + sizes[2], ())
        with pytest.raises(AttributeError):
            preview.keys = 5  # type: ignore[misc]


@pytest.mark.parametrize("key", [None, 1.5, True, ("k", 1)])
def test_keys_of_other_types_are_type_errors(path: Path, key: Any) -> None:
    with dataset_update(path) as update, pytest.raises(TypeError, match="Unsupported key type"):
        update[key] = sample(3)


def test_keys_of_the_wrong_kind_say_which_is_right(path: Path, tmp_path: Path) -> None:
    with dataset_update(path) as update, pytest.raises(KeyNotFound, match="are text, not int"):
        update[3] = sample(3)
    write_dataset(tmp_path / "ints", [{"id": i, "x": 0} for i in range(5)], key="id")
    with dataset_update(tmp_path / "ints") as update:
        with pytest.raises(KeyNotFound, match="are integers, not str"):
            update["3"] = {"id": 3, "x": 1}
        update[np.int32(3)] = {"id": 3, "x": 1}
        update.commit()
    assert liveset.StreamingDataset(tmp_path / "ints").get_by_key(3) == {"id": 3, "x": 1}


def test_bytes_are_taken_as_text_keys(path: Path) -> None:
    with dataset_update(path) as update:
        update[b"k3"] = sample(3, "new")
        assert update.commit().keys == 1


def test_a_sample_must_hold_its_key(path: Path, tmp_path: Path) -> None:
    with dataset_update(path) as update:
        with pytest.raises(SampleError, match="'id' says 'k4', .* 'k3'") as caught:
            update["k3"] = sample(4)
        assert caught.value.field == "id"
        with pytest.raises(SampleError, match="has none there"):
            update["k3"] = {"n": 1}
    write_dataset(tmp_path / "nested", [{"meta": {"id": f"{i}"}, "x": i} for i in range(4)], key="meta.id")
    with dataset_update(tmp_path / "nested") as update:
        with pytest.raises(SampleError, match="meta.id"):
            update["3"] = {"meta": {"id": "2"}, "x": 1}
        update["3"] = {"meta": {"id": "3"}, "x": 1}
        update.commit()


def test_without_a_known_field_any_sample_is_taken(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", range(8), key=lambda n: f"k{n}")
    with dataset_update(tmp_path / "ds") as update:
        update["k3"] = -3
        update.commit()
    assert read(tmp_path / "ds") == [0, 1, 2, -3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"n": "three"}, "n"), ({"n": 3.0}, "n"), ({"n": None}, "n"), ({"text": b"x"}, "text"), ({"extra": 1}, "extra"), ({"n": 2**70}, "n")],
    ids=str,
)
def test_samples_that_do_not_fit_are_refused_at_once(path: Path, change: dict[str, Any], field: str) -> None:
    with dataset_update(path) as update:
        with pytest.raises(SampleError, match=field) as caught:
            update["k3"] = {**sample(3), **change}
        assert caught.value.field == field
        with pytest.raises(SampleError, match="n"):
            update["k3"] = {"id": "k3", "text": "x"}
        assert len(update) == 0


def test_objects_need_allow_pickle(path: Path) -> None:
    class Thing:
        pass

    with dataset_update(path) as update, pytest.raises((PickleRefused, SampleError)):
        update["k3"] = {**sample(3), "n": Thing()}


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ftp:// is not supported"):
        dataset_update("ftp://host/ds")
    with pytest.raises(FileNotFoundError, match="Dataset directory not found:"):
        dataset_update(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFound, match=r"Missing index.json in .*\. Did you run optimize\(\)\?"):
        dataset_update(tmp_path / "empty")
    write_dataset(tmp_path / "plain", range(4))
    with pytest.raises(FileNotFoundError, match="Missing keys/ key index in .*build_keys_index"):
        dataset_update(tmp_path / "plain")


def test_progress_is_told_by_chunks(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with dataset_update(path, on_progress=lambda done, total: told.append((done, total))) as update:
        for number in (1, 2, 9, 19):
            update[f"k{number}"] = sample(number, "x")
        update.commit()
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_session_is_committed_once(path: Path) -> None:
    for text in ("first", "again"):
        with dataset_update(path, session="job-7") as update:
            update["k3"] = sample(3, text)
            assert update.commit().version == 2
    assert read(path)[3]["text"] == "first"
    assert len(list(path.glob("chunk-*"))) == 6, "the files of the second try are gone"


def test_a_session_is_committed_once_also_where_a_vacuum_has_forgotten_its_version(path: Path) -> None:
    for text in ("first", "again"):
        with dataset_update(path, session="job-7") as update:
            update["k3"] = sample(3, text)
            assert update.commit().version == 2
        put(path, 4)
        liveset.vacuum(path, keep=1, grace=timedelta(0))
    assert read(path)[3]["text"] == "first"
    assert liveset.verify(path).ok


def test_what_an_unknown_commit_has_written_stays_for_versions_after_it(path: Path) -> None:
    store = LossyStore(LocalStore(path), "dddd")
    update = DatasetUpdate(store, policy=Policy(first_pause=0))
    update["k3"] = sample(3, "first")
    with pytest.raises(CommitUnknown):
        update.commit()
    store.deliver()
    liveset.tag(path, "paper", liveset.set_attributes(path, name="as printed"))
    put(path, 3)
    liveset.vacuum(path, keep=1, grace=timedelta(0))
    assert update.commit().version == 2  # which is forgotten, so nobody knows what it consisted of
    assert liveset.StreamingDataset(path, version="paper")["k3"] == sample(3, "first")


# --- layouts and leaf types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_every_other_sample_as_it_was(layout: str, tmp_path: Path) -> None:
    """Case 21: exactly the named samples change; ids, positions and stored bytes of all others stay."""
    path = tmp_path / "ds"
    write_dataset(path, map(sample, range(50)), key="id", chunk_size=8, compression=LAYOUTS[layout])
    expected, dice = [sample(i) for i in range(50)], random.Random(layout)
    before = open_snapshot(open_store(path)).index.chunks
    for turn in range(4):
        with dataset_update(path) as update:
            for number in dice.sample(range(50), 5):
                expected[number] = sample(number, "x" * dice.randrange(100))
                update[f"k{number}"] = expected[number]
            assert update.commit().version == turn + 2
        assert read(path) == expected
    dataset = liveset.StreamingDataset(path)
    assert [dataset[f"k{i}"] for i in range(50)] == expected
    assert [record.id for record in open_snapshot(open_store(path)).index.chunks] == [record.id for record in before]
    assert liveset.verify(path).ok
    assert not [name for name in files(path) if name.endswith(".tmp")]


def test_untouched_items_are_bit_identical(path: Path) -> None:
    def stored() -> list[bytes]:
        found = []
        for record in open_snapshot(open_store(path)).index.chunks:
            data = (path / record.filename).read_bytes()
            bounds = struct.unpack_from(f"<{record.samples + 1}I", data, 4)
            found += [data[a:b] for a, b in pairwise(bounds)]
        return found

    before = stored()
    put(path, 3, 9)
    after = stored()
    assert [i for i in range(20) if before[i] != after[i]] == [3, 9]


VALUES: dict[str, Any] = {
    "arrays": lambda i: {"id": f"{i}", "a": np.arange(i + 1), "b": np.ones((2, i + 1), "f4"), "c": np.array(i)},
    "tuple": lambda i: (f"{i}", i, i / 2, i % 2 == 0, b"x" * i),
    "nested": lambda i: {"id": f"{i}", "m": {"x": [i] * i, "y": (i, {"z": None})}, "late": i or None},
    "pickle": lambda i: {"id": f"{i}", "s": {i}, "big": 2**70 + i, "c": 1j * i},
    "text": lambda i: f"{i}",
}


@pytest.mark.parametrize("kind", VALUES)
def test_every_kind_of_value(kind: str, tmp_path: Path) -> None:
    make = VALUES[kind]
    write_dataset(tmp_path / "ds", map(make, range(10)), key=lambda s: s if type(s) is str else s["id"] if type(s) is dict else s[0])
    with dataset_update(tmp_path / "ds") as update:
        for i in (2, 9):
            assert same(update[f"{i}"], make(i))
            update[f"{i}"] = make(i + 5)
            assert same(update[f"{i}"], make(i + 5))
        update.commit()
    expected = [make(i + 5 if i in (2, 9) else i) for i in range(10)]
    assert all(map(same, read(tmp_path / "ds"), expected))


def test_a_large_blob_beside_a_label_comes_back(tmp_path: Path) -> None:
    """Case 29."""
    write_dataset(tmp_path / "ds", [{"id": f"{i}", "label": 0, "blob": bytes([i]) * 200_000} for i in range(8)], key="id")
    with dataset_update(tmp_path / "ds") as update:
        update["5"] = {**update["5"], "label": 1}
        update.commit()
    assert [(s["label"], s["blob"]) for s in read(tmp_path / "ds")] == [(int(i == 5), bytes([i]) * 200_000) for i in range(8)]


def picture(seed: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)).save(stream, "JPEG", quality=97)
    return stream.getvalue()


def media(i: int) -> dict[str, Any]:
    return {
        "id": f"{i}",
        "jpeg": liveset.Jpeg(bytes=picture(i), max_quality=100),
        "image": liveset.Image(bytes=picture(i)),
        "pil": liveset.Pil(bytes=picture(i)),
        "list": liveset.JpegArray([picture(i), picture(i + 1)], max_quality=100),
        "text": liveset.Text(text=f"text {i}"),
        "file": liveset.File(bytes=b"file %d" % i),
        "label": 0,
    }


def test_media_that_was_read_may_be_written_back(tmp_path: Path) -> None:
    """Reading an image gives an array; putting that back keeps the stored file, so only the label changes."""
    path = tmp_path / "ds"
    write_dataset(path, map(media, range(6)), key="id")
    size = [record.size for record in open_snapshot(open_store(path)).index.chunks]
    stored = {file.name: file.read_bytes() for file in path.glob("chunk-*")}
    with dataset_update(path) as update:
        for i in range(6):
            update[f"{i}"] = {**update[f"{i}"], "label": 7}
        update.commit()
    assert [s["label"] for s in read(path)] == [7] * 6
    index = open_snapshot(open_store(path)).index
    assert [record.size for record in index.chunks] == size
    old = open_snapshot(open_store(path), 1).index
    for new, before in zip(index.chunks, old.chunks, strict=True):
        data = (path / new.filename).read_bytes()
        assert sum(a != b for a, b in zip(data, stored[before.filename], strict=True)) == new.samples, "one byte for each label"


def test_media_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(media, range(6)), key="id")
    with dataset_update(path) as update:
        update["1"] = {**update["1"], "text": "other", "file": b"other", "image": picture(9), "jpeg": liveset.Jpeg(bytes=picture(9))}
        update["2"] = {**media(2), "list": liveset.JpegArray([picture(5)])}
        with pytest.raises(SampleError, match="image"):
            update["3"] = {**update["3"], "image": np.zeros((3, 2, 2), "u1")}
        update.commit()
    one = read(path)[1]
    assert (one["text"], one["file"]) == ("other", b"other")
    assert np.array_equal(one["image"], one["jpeg"]) or one["image"].shape == one["jpeg"].shape
    assert len(read(path)[2]["list"]) == 1


# --- datasets of the old tool ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_update_adopts(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, [sample(i) for i in range(20)], compression=LAYOUTS[layout])
    before = {file.name: file.read_bytes() for file in path.glob("chunk-*")}
    head = (path / "index.json").read_bytes()
    with dataset_update(path) as update:
        assert update.version == 0
        assert update["k3"] == sample(3)
        update["k3"] = sample(3, "new")
        assert update.commit().version == 1
    index = open_snapshot(open_store(path)).index
    assert [record.id for record in index.chunks] == sorted(before)
    assert all(record.filename.count("-") == 3 for record in index.chunks), "old writers refuse such names"
    assert [(path / name).read_bytes() for name in before] == list(before.values())
    assert (path / "_liveset/versions/00000000.json").read_bytes() == head
    untouched = index.chunks[1]
    assert (path / untouched.filename).samefile(path / str(untouched.id))
    assert read(path) == [sample(i, "new" if i == 3 else "") for i in range(20)]
    assert read(path, version=0) == [sample(i) for i in range(20)]
    dataset = liveset.StreamingDataset(path)
    assert [dataset[f"k{i}"]["n"] for i in range(20)] == list(range(20))
    put(path, 3, 4, text="second")
    assert read(path)[4]["text"] == "second"
    assert open_snapshot(open_store(path)).index.layout_of_keys["field"] == "id"
    assert liveset.verify(path).ok


def test_adopt_changes_no_sample(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, [sample(i) for i in range(20)])
    assert adopt(path, message="ours now") == 1
    assert adopt(path) == 1
    index = open_snapshot(open_store(path)).index
    assert index.edit is not None
    assert (index.edit.op, index.edit.message) == ("adopt", "ours now")
    assert read(path) == [sample(i) for i in range(20)]
    assert liveset.StreamingDataset(path)["k7"] == sample(7)
    assert put(path, 7).version == 2
    with pytest.raises(DatasetNotFound):
        adopt(tmp_path / "absent")


def test_an_update_that_was_open_during_an_adoption_lands(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, [sample(i) for i in range(20)])
    with dataset_update(path) as first, dataset_update(path) as second, dataset_update(path) as third:
        first["k3"], second["k3"], third["k2"] = sample(3, "a"), sample(3, "b"), sample(2, "c")
        first.commit()
        with pytest.raises(KeyConflict, match="'k3'"):
            second.commit()
        assert third.commit().version == 2
    assert [read(path)[i]["text"] for i in (2, 3)] == ["c", "a"]
    names = {record.filename for record in open_snapshot(open_store(path)).index.chunks}
    dashed = {file.name for file in path.glob("chunk-*-*-*")}
    assert len(dashed - names) == 1, "only the file of version 1 is left beside those of version 2"


def test_a_dataset_that_the_old_tool_changed_meanwhile_is_a_conflict(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, [sample(i) for i in range(20)])
    for adopted in (False, True):
        with dataset_update(path) as update:
            update["k3"] = sample(3, "new")
            (path / "index.json").write_bytes((path / "index.json").read_bytes().replace(b'"updated_at": "', b'"updated_at": "1'))
            if adopted:
                adopt(path)
            with pytest.raises(OverwriteConflict):
                update.commit()
        assert read(path)[3] == sample(3)


def test_a_key_store_that_does_not_fit_stops_the_adoption(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path, other = tmp_path / "ds", tmp_path / "other"
    write_foreign(path, [sample(i) for i in range(20)])
    write_foreign(other, [sample(i) for i in range(12)])
    (path / "keys/shard-00000.parquet").write_bytes((other / "keys/shard-00000.parquet").read_bytes())
    before = files(path)
    with dataset_update(path) as update:
        update["k3"] = sample(3, "new")
        with pytest.raises(Corrupt, match="build_keys_index"):
            update.commit()
    with pytest.raises(Corrupt, match="build_keys_index"):
        adopt(path)
    assert files(path) - {"_liveset/lock"} == before


def test_padding_of_a_foreign_chunk_survives_edits(tmp_path: Path) -> None:
    """Slots may be longer than their items; after an update the chunk has a checksum, and its other slots are padded still."""
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, [sample(i) for i in range(4)])
    file = path / "chunk-0-0.bin"
    bounds = struct.unpack_from("<5I", file.read_bytes(), 4)
    items = [file.read_bytes()[a:b] + b"pad" for a, b in pairwise(bounds)]
    starts = [24]
    for item in items:
        starts.append(starts[-1] + len(item))
    file.write_bytes(struct.pack("<6I", 4, *starts) + b"".join(items))
    put(path, 3)
    assert read(path) == [sample(0), sample(1), sample(2), sample(3, "new")]
    assert liveset.verify(path).ok


ROWS: list[dict[str, Any]] = [
    {"id": f"k{i}", "n": i if i != 1 else None, "f": i / 2, "l": [i], "none": None if i else "first"} for i in range(700)
]


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_arrow_datasets(codec: str | None, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_arrow(path, ROWS, codec=codec)
    assert read(path) == ROWS
    expected = list(ROWS)
    expected[5] = {"id": "k5", "n": None, "f": -1.5, "l": [], "none": "text"}
    expected[650] = {"id": "k650", "n": -1, "f": 0.0, "l": [1, None], "none": "text in a column of nulls"}
    with dataset_update(path) as update:
        for number in (5, 650):
            update[f"k{number}"] = expected[number]
            assert update[f"k{number}"] == expected[number]
        with pytest.raises(SampleError, match="n"):
            update["k6"] = {**ROWS[6], "n": "text"}
        with pytest.raises(SampleError, match="n"):
            update["k6"] = {**ROWS[6], "n": (1,)}
        update.commit()
    assert read(path) == expected
    dataset = liveset.StreamingDataset(path)
    assert dataset["k650"] == expected[650]
    with dataset_update(path) as update:
        update["k1"] = {**update["k1"], "f": 9.5}
        update.commit()
    assert read(path)[1] == {**ROWS[1], "f": 9.5}


# --- others at work -------------------------------------------------------------------------------------------------


def test_other_keys_of_the_same_chunk_both_survive(path: Path) -> None:
    """Case 19."""
    with dataset_update(path) as a, dataset_update(path) as b:
        a["k1"], b["k2"] = sample(1, "a"), sample(2, "b")
        a.commit()
        assert b.commit().version == 3
    assert [read(path)[i]["text"] for i in (1, 2)] == ["a", "b"]
    check_dataset(open_store(path))


def test_the_same_key_is_a_conflict_for_the_later_one(path: Path) -> None:
    with dataset_update(path) as a, dataset_update(path) as b:
        a["k1"], b["k1"], b["k9"] = sample(1, "a"), sample(1, "b"), sample(9, "b")
        a.commit()
        before = files(path)
        with pytest.raises(KeyConflict, match="'k1'.*Nothing was changed") as caught:
            b.commit()
    assert caught.value.keys == ("k1",)
    assert files(path) == before
    assert [read(path)[i]["text"] for i in (1, 9)] == ["a", "number 9"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rebase_in_every_layout(layout: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", map(sample, range(20)), key="id", chunk_size=10, compression=LAYOUTS[layout])
    with dataset_update(tmp_path / "ds") as a, dataset_update(tmp_path / "ds") as b, dataset_update(tmp_path / "ds") as c:
        a["k1"], b["k2"], b["k12"], c["k1"] = sample(1, "a"), sample(2, "b"), sample(12, "b"), sample(1, "c")
        for update in (a, b):
            update.commit()
        with pytest.raises(KeyConflict):
            c.commit()
    assert [read(tmp_path / "ds")[i]["text"] for i in (1, 2, 12)] == ["a", "b", "b"]


def test_appends_attributes_and_overwrites_meanwhile(path: Path) -> None:
    """Case 43."""
    with dataset_update(path) as update, dataset_update(path) as late:
        update["k1"], late["k2"] = sample(1, "new"), sample(2, "new")
        liveset.optimize(sample, inputs=range(20, 25), output_dir=path, mode="append", num_workers=1, verbose=False, key_fn="id")
        store = open_store(path)
        commit(store, SetAttributes({"name": "plays"}), open_snapshot(store).index)
        update.commit()
        assert read(path) == [sample(i, "new" if i == 1 else "") for i in range(25)]
        write_dataset(path, map(sample, range(5)), key="id")
        with pytest.raises(OverwriteConflict, match="cannot update"):
            late.commit()
    assert read(path) == [sample(i) for i in range(5)]


def test_keys_that_were_rebuilt_differently_meanwhile(path: Path) -> None:
    with dataset_update(path) as same_keys, dataset_update(path) as other_keys:
        same_keys["k1"], other_keys["k2"] = sample(1, "new"), sample(2, "new")
        liveset.build_keys_index(path, "id", overwrite=True, verbose=False)
        same_keys.commit()
        liveset.build_keys_index(path, lambda s: f"k{19 - s['n']}", overwrite=True, verbose=False)
        with pytest.raises(KeyConflict, match="'k2'"):
            other_keys.commit()


def test_readers_go_on_with_their_version(path: Path) -> None:
    """Cases 27 and 37: the running epoch reads what it began with, the next one what was committed."""
    running = iter(liveset.StreamingDataset(path))
    assert next(running) == sample(0)
    put(path, *range(20))
    assert list(running) == [sample(i) for i in range(1, 20)]
    assert read(path) == [sample(i, "new") for i in range(20)]


def test_a_dataset_is_rewritten_from_itself(path: Path) -> None:
    """Case 38."""
    with dataset_update(path) as update:
        for read_sample in liveset.StreamingDataset(path):
            update[read_sample["id"]] = {**read_sample, "text": read_sample["text"].upper()}
        update.commit()
    assert read(path) == [sample(i, f"NUMBER {i}") for i in range(20)]


# --- failures -------------------------------------------------------------------------------------------------------


def failing(path: Path, **options: Any) -> DatasetUpdate:
    return DatasetUpdate(LocalStore(path, files=FailingFiles(**options)))


def test_a_full_disk_in_the_thirteenth_chunk_changes_nothing(tmp_path: Path) -> None:
    """Case 42: 1,000 edits over 20 chunks; the session can be tried again."""
    path = tmp_path / "ds"
    write_dataset(path, map(sample, range(1000)), key="id", chunk_size=50)
    before = files(path)
    full = OSError(28, "No space left on device")
    with failing(path, crash_at=13, error=full, only="write") as update:
        for number in range(1000):
            update[f"k{number}"] = sample(number, "new")
        with pytest.raises(StorageError, match="No space left"):
            update.commit()
        assert files(path) - {"_liveset/lock"} == before - {"_liveset/lock"}
        assert read(path) == [sample(i) for i in range(1000)]
        assert update.commit().version == 2
    assert read(path) == [sample(i, "new") for i in range(1000)]
    assert len(list(path.glob("chunk-*"))) == 40


def test_a_damaged_chunk_is_not_given_a_new_checksum(path: Path) -> None:
    record = open_snapshot(open_store(path)).index.chunks[0]
    data = bytearray((path / record.filename).read_bytes())
    data[-1] ^= 1
    (path / record.filename).write_bytes(data)
    with dataset_update(path) as update:
        update["k0"] = sample(0, "new")
        with pytest.raises(Corrupt, match="checksum"):
            update.commit()


# --- many samples ---------------------------------------------------------------------------------------------------


def test_staged_samples_spill_and_the_last_one_counts(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    staged = StagedEdits(limit=100)
    for turn in range(3):
        for number in range(50):
            staged.put(f"k{number}", Staged(b"%d-%d" % (turn, number), Kind.ROW if number % 2 == 0 else Kind.REPLACE))
    assert len(staged) == len(list(staged)) == 50
    assert sum(map(len, (held.data for held in staged._held.values()))) <= 100
    for number in range(50):
        assert staged.get(f"k{number}") == Staged(b"2-%d" % number, Kind.ROW if number % 2 == 0 else Kind.REPLACE)
    assert "k3" in staged
    assert "other" not in staged
    staged.close()
    assert len(staged) == 0
    monkeypatch.setattr(staging, "LIMIT", 0)
    monkeypatch.setattr(pending_module, "StagedEdits", lambda: StagedEdits(limit=50))
    put(path, *range(20))
    assert read(path) == [sample(i, "new") for i in range(20)]


def test_nothing_of_an_abandoned_session_is_left(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(pending_module, "StagedEdits", lambda: StagedEdits(limit=10))
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    update = dataset_update(path)
    update["k3"] = sample(3, "new")
    assert os.listdir(tmp_path / "scratch") == []
    del update
    gc.collect()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_temporary_folder_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    staged = StagedEdits(limit=3)
    with pytest.raises(StorageError, match="TMPDIR"):
        staged.put("a", Staged(b"long", Kind.REPLACE))
    assert staged.get("a").data == b"long"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8_193, 100_000])
def test_no_hidden_thresholds(count: int, tmp_path: Path) -> None:
    """Case 32."""
    path = tmp_path / "ds"
    write_dataset(path, map(sample, range(110_000)), key="id", chunk_size=5_000)
    chosen = set(random.Random(count).sample(range(110_000), count))
    with dataset_update(path) as update:
        for number in chosen:
            update[f"k{number}"] = sample(number, "new")
        assert update.commit().keys == count
    assert all(row == sample(i, "new" if i in chosen else "") for i, row in enumerate(liveset.StreamingDataset(path)))
