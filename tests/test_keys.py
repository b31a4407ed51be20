"""Keys: written with a dataset, added to one, looked up from anywhere, and never wrong."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from liveset import StreamingDataset, adopt, build_keys_index, compact, dataset_update, history, optimize, transform, verify
from liveset.errors import (
    DuplicateKeys,
    KeyConflict,
    KeyNotFound,
    KeysExist,
    OverwriteConflict,
    PositionOutOfRange,
    SampleError,
    StorageError,
)
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.storage.files import Files
from liveset.storage.local import LocalStore
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset

pq = pytest.importorskip("pyarrow.parquet")


def play(i: int) -> dict[str, Any]:
    return {"id": f"play-{i}", "n": i, "meta": {"uid": i * 10}}


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Ten plays in chunks of four, keyed by their id."""
    optimize(play, range(10), tmp_path / "plays", chunk_size=4, key_fn="id", num_workers=1)
    return tmp_path / "plays"


def append(path: Path, numbers: Any, **options: Any) -> None:
    optimize(play, numbers, path, mode="append", num_workers=1, **options)


def test_entities_are_read_by_key(plays: Path) -> None:
    ds = StreamingDataset(plays)
    for i in range(10):
        assert ds[f"play-{i}"] == ds.get_by_key(f"play-{i}".encode()) == ds[i] == play(i)
        assert ds.key_at(i) == f"play-{i}"
    assert ds.key_at(-1) == "play-9"
    assert "play-3" in ds.keys
    assert "play-10" not in ds.keys
    assert len(ds.keys) == 10
    assert list(ds.keys) == [f"play-{i}" for i in range(10)]
    assert ds.get_by_keys(["play-9", "play-0", "play-9"]) == [play(9), play(0), play(9)]
    assert ds.get_by_keys([]) == []
    with pytest.raises(PositionOutOfRange):
        ds.key_at(10)


def test_transforms_and_fields_apply_to_lookups(plays: Path) -> None:
    assert StreamingDataset(plays, fields=["n"], transform=lambda row: row["n"] + 1)["play-4"] == 5


def test_wrong_keys_say_what_is_wrong(plays: Path) -> None:
    ds = StreamingDataset(plays)
    with pytest.raises(KeyNotFound, match="no sample with the key 'nope'"):
        ds["nope"]
    with pytest.raises(KeyNotFound, match=r"are text, not int"):
        ds.get_by_key(3)
    with pytest.raises(KeyNotFound, match="are text, not int"):
        ds.get_by_keys([3])
    with pytest.raises(KeyError, match="'a', 'b'"):
        ds.get_by_keys(["play-1", "a", "b"])
    for wrong in (True, 1.5, None, ("play-1",)):
        with pytest.raises(TypeError, match="Unsupported key type"):
            ds.get_by_key(wrong)


def test_int_keys(tmp_path: Path) -> None:
    optimize(play, range(10), tmp_path, chunk_size=4, key_fn="meta.uid", num_workers=1)
    ds = StreamingDataset(tmp_path)
    assert ds.get_by_key(70) == ds.get_by_key(np.int16(70)) == play(7)
    assert ds[7] == play(7)  # an integer in brackets stays a position
    assert ds.keys.kind is int
    with pytest.raises(KeyNotFound, match="are integers, not str"):
        ds["70"]


def test_a_dataset_without_keys_says_how_to_make_them(tmp_path: Path) -> None:
    write_dataset(tmp_path, [play(0)])
    ds = StreamingDataset(tmp_path)
    for act in (lambda: ds["play-0"], lambda: ds.get_by_key(1), lambda: ds.keys, lambda: ds.key_at(0)):
        with pytest.raises(KeyError, match=r"Keyed access requires a keys/ index.*build_keys_index"):
            act()


def test_a_part_answers_only_for_its_own_samples(plays: Path) -> None:
    ds = StreamingDataset(plays)
    part = ds.subset([8, 2, 3])
    assert part["play-8"] == play(8)
    assert list(part.keys) == ["play-8", "play-2", "play-3"]
    assert part.key_at(1) == "play-2"
    assert len(part.keys) == 3
    assert "play-5" not in part.keys
    for act in (lambda: part["play-5"], lambda: part.get_by_keys(["play-2", "play-5"])):
        with pytest.raises(KeyError, match="play-5"):
            act()
    half = StreamingDataset(plays, subsample=0.5, shuffle=True, seed=3)
    for i in range(10):
        if f"play-{i}" in half.keys:
            assert half[f"play-{i}"] == play(i)
        else:
            with pytest.raises(KeyError):
                half[f"play-{i}"]
    assert sum(f"play-{i}" in half.keys for i in range(10)) == 5
    repeated = ds.subset([0, 1, 2, 3, 4] * 2)  # as long as the whole, and with as many regions as it has chunks
    assert "play-9" not in repeated.keys
    twice = StreamingDataset(plays, subsample=2.0)
    assert twice["play-9"] == play(9)


def test_published_shards_have_the_columns_of_the_format(plays: Path) -> None:
    table = pq.read_table(plays / "keys" / "shard-00000.parquet")
    assert table.column_names == ["key", "index", "chunk_index", "chunk_offset"]
    rows = table.to_pylist()
    assert [row["key"] for row in rows] == sorted(f"play-{i}" for i in range(10))
    assert all(row["index"] == row["chunk_offset"] == int(row["key"][5:]) and row["chunk_index"] == row["index"] // 4 for row in rows)
    assert json.loads((plays / "index.json").read_bytes())["keys"] == {"version": 1, "num_shards": 1, "sharding": "none", "field": "id"}


def test_shards(tmp_path: Path) -> None:
    optimize(play, range(100), tmp_path, key_fn="id", num_shards=4, num_workers=1)
    shards = [pq.read_table(tmp_path / "keys" / f"shard-0000{i}.parquet")["key"].to_pylist() for i in range(4)]
    assert sorted(key for keys in shards for key in keys) == sorted(f"play-{i}" for i in range(100))
    assert all(shards)
    assert json.loads((tmp_path / "index.json").read_bytes())["keys"]["sharding"] == "hash"
    with pytest.raises(ValueError, match="num_shards must be >= 1"):
        optimize(play, range(1), tmp_path / "x", key_fn="id", num_shards=0)


# --- growing ------------------------------------------------------------------------------------------------------------


def test_append_extends_the_keys_by_the_remembered_field(plays: Path) -> None:
    before = StreamingDataset(plays)
    append(plays, range(10, 15))
    ds = StreamingDataset(plays)
    assert [ds[f"play-{i}"] for i in range(15)] == [play(i) for i in range(15)]
    assert list(ds.keys) == [f"play-{i}" for i in range(15)]
    assert len(ds.keys) == 15
    assert "play-12" not in before.keys


def test_append_with_a_function_must_be_given_one_again(tmp_path: Path) -> None:
    optimize(play, range(4), tmp_path, key_fn=lambda sample: sample["id"], num_workers=1)
    with pytest.raises(ValueError, match="key_fn="):
        append(tmp_path, range(4, 8))
    append(tmp_path, range(4, 8), key_fn=lambda sample: sample["id"])
    assert StreamingDataset(tmp_path)["play-7"] == play(7)


def test_append_cannot_mix_samples_with_and_without_keys(tmp_path: Path, plays: Path) -> None:
    write_dataset(tmp_path / "bare", [play(0)])
    with pytest.raises(ValueError, match="build_keys_index"):
        append(tmp_path / "bare", range(1, 3), key_fn="id")
    with pytest.raises(ValueError, match="'id', not in 'meta.uid'"):
        append(plays, range(10, 12), key_fn="meta.uid")
    with pytest.raises(ValueError, match="'id', not in what a function returns"):
        append(plays, range(10, 12), key_fn=lambda sample: "x" + sample["id"])
    assert len(StreamingDataset(plays)) == 10


def test_many_appends_keep_few_tables(plays: Path) -> None:
    for start in range(10, 50, 2):
        append(plays, range(start, start + 2))
    ds = StreamingDataset(plays)
    assert [ds[f"play-{i}"] for i in range(50)] == [play(i) for i in range(50)]
    edit = json.loads((plays / "index.json").read_bytes())["edit"]
    assert len(edit["key_files"]["deltas"]) <= 5  # twenty appends of equal size: as many as twenty has binary digits
    assert edit["key_files"]["count"] == 50
    append(plays, range(50, 150))
    (large,) = json.loads((plays / "index.json").read_bytes())["edit"]["key_files"]["deltas"]
    for i in range(150, 170):
        append(plays, [i])
        deltas = json.loads((plays / "index.json").read_bytes())["edit"]["key_files"]["deltas"]
        assert deltas[0] == large  # a small append never writes a large table again


def test_overwrite_leaves_no_stale_keys(plays: Path) -> None:
    optimize(play, range(20, 23), plays, mode="overwrite", num_workers=1)
    with pytest.raises(KeyError):
        StreamingDataset(plays)["play-1"]
    assert not list((plays / "keys").glob("*"))  # an old tool would believe them
    assert StreamingDataset(plays, version=1)["play-1"] == play(1)
    optimize(play, range(30, 33), plays, mode="overwrite", key_fn="id", num_workers=1)
    assert list(StreamingDataset(plays).keys) == ["play-30", "play-31", "play-32"]
    assert pq.read_table(plays / "keys" / "shard-00000.parquet")["key"].to_pylist() == ["play-30", "play-31", "play-32"]


OLD = [play(i) for i in range(10)]


def new(i: int) -> dict[str, Any]:
    return {"id": f"new-{i}", "n": -i}


def overwrite(path: Path, fn: Callable[[int], Any] = new, **options: Any) -> None:
    optimize(fn, range(3), path, mode="overwrite", key_fn="id", num_workers=1, **options)


def old_by_key(path: Path, version: int | None = None) -> list[Any]:
    ds = StreamingDataset(path, version=version)
    return [ds[sample["id"]] for sample in OLD]


def test_an_overwrite_of_another_programs_dataset_keeps_its_keys(tmp_path: Path) -> None:
    write_foreign(tmp_path, OLD)
    overwrite(tmp_path, author="ann")
    assert [(entry.version, entry.op, entry.author) for entry in history(tmp_path)] == [
        (2, "overwrite", "ann"),
        (1, "adopt", "ann"),
        (0, "foreign", ""),
    ]
    assert StreamingDataset(tmp_path)["new-2"] == new(2)
    assert old_by_key(tmp_path, 0) == old_by_key(tmp_path, 1) == OLD


def test_an_overwrite_that_fails_does_not_take_the_only_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_foreign(tmp_path, OLD)
    rename, swaps = Files.rename, list[str]()

    def fails(self: Files, old: str, name: str) -> None:
        if name.endswith("index.json"):
            swaps.append(name)
            if len(swaps) == 2:
                raise OSError(errno.EIO, "the disk is gone")
        rename(self, old, name)

    monkeypatch.setattr(Files, "rename", fails)
    with pytest.raises(StorageError, match="the disk is gone"):
        overwrite(tmp_path)
    assert old_by_key(tmp_path) == old_by_key(tmp_path, 0) == OLD
    listed = {record.filename for version in (0, 1) for record in open_snapshot(open_store(tmp_path), version).index.chunks}
    assert {file.name for file in tmp_path.glob("chunk-*")} == listed
    assert len(list((tmp_path / "_liveset/keys").iterdir())) == 1


@pytest.mark.parametrize("damage", ["keys", "repeated", "chunk"])
def test_what_is_damaged_can_be_overwritten(tmp_path: Path, damage: str) -> None:
    write_foreign(tmp_path, [play(0), *OLD[1:]])
    shard = tmp_path / "keys/shard-00000.parquet"
    if damage == "keys":
        shard.write_bytes(shard.read_bytes()[:-20])
    elif damage == "repeated":
        table = pq.read_table(shard)
        pq.write_table(table.set_column(0, "key", [["play-0"] * 10]), shard)
    else:
        next(tmp_path.glob("chunk-*")).unlink()
    overwrite(tmp_path)
    assert [StreamingDataset(tmp_path)[f"new-{i}"] for i in range(3)] == [new(i) for i in range(3)]


@pytest.mark.parametrize(("how", "force"), [("adopt", False), ("edit", False), ("edit", True), ("foreign", False), ("foreign", True)])
def test_others_change_another_programs_dataset_that_is_overwritten(tmp_path: Path, how: str, force: bool) -> None:
    write_foreign(tmp_path, OLD)

    def fn(i: int) -> dict[str, Any]:
        if i == 1 and how == "adopt":
            adopt(tmp_path)
        elif i == 1 and how == "edit":
            with dataset_update(tmp_path) as update:
                update["play-3"] = {**play(3), "n": 33}
                update.commit()
        elif i == 1:
            index = json.loads((tmp_path / "index.json").read_bytes())
            (tmp_path / "index.json").write_text(json.dumps(index | {"updated_at": "7"}))
        return new(i)

    if how == "adopt" or force:
        overwrite(tmp_path, fn, force=force)
        assert StreamingDataset(tmp_path)["new-2"] == new(2)
    else:
        with pytest.raises(OverwriteConflict):
            overwrite(tmp_path, fn)
        assert StreamingDataset(tmp_path)["play-3"]["n"] == (33 if how == "edit" else 3)
    assert old_by_key(tmp_path, 0) == OLD


def test_a_keys_folder_of_others_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "shard-00000.parquet").write_bytes(b"theirs")
    optimize(play, range(3), tmp_path, key_fn="id", num_workers=1)
    assert (tmp_path / "keys" / "shard-00000.parquet").read_bytes() == b"theirs"
    assert StreamingDataset(tmp_path)["play-2"] == play(2)


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("workers", [1, 2])
def test_duplicates_in_a_run_are_named_and_change_nothing(plays: Path, workers: int) -> None:
    before = files(plays)
    with pytest.raises(DuplicateKeys, match=r"Duplicate keys are not allowed in the keys sidecar.*play-77") as caught:
        optimize(lambda i: play(77 if i in (1, 9) else 100 + i), range(10), plays, mode="append", num_workers=workers)
    assert caught.value.keys == ("play-77",)
    assert isinstance(caught.value, ValueError)
    assert files(plays) == before


def test_keys_that_the_dataset_has_are_named_and_change_nothing(plays: Path) -> None:
    append(plays, range(10, 12))
    before = files(plays)
    with pytest.raises(KeyConflict, match=r"'play-3', 'play-11' occur in the dataset already") as caught:
        optimize(play, [50, 3, 11, 51], plays, mode="append", num_workers=1)
    assert caught.value.keys == ("play-3", "play-11")
    assert files(plays) == before


def test_keys_that_cannot_be_keys_name_input_and_field(tmp_path: Path) -> None:
    def with_key(wrong: object, i: int) -> dict[str, Any]:
        return {"id": "a" if i < 2 else wrong, "i": i}

    for wrong in (None, 1.5, True):
        with pytest.raises(SampleError, match=r"input 2.*'id'.*Unsupported key type"):
            optimize(functools.partial(with_key, wrong), range(3), tmp_path / "ds", key_fn="id", num_workers=1)
    with pytest.raises(SampleError, match=r"input 0.*no field 'name'"):
        optimize(play, range(3), tmp_path / "ds", key_fn="name", num_workers=1)
    with pytest.raises(Exception, match=r"Unsupported key type.*mixed"):
        optimize(lambda i: {"id": i or "x"}, range(3), tmp_path / "ds", key_fn="id", num_workers=1)
    assert not (tmp_path / "ds").exists()


def test_an_empty_dataset_may_get_keys_later(tmp_path: Path) -> None:
    optimize(lambda i: None, range(3), tmp_path, key_fn="id", num_workers=1)
    assert len(StreamingDataset(tmp_path).keys) == 0
    append(tmp_path, range(3), key_fn="id")
    assert StreamingDataset(tmp_path)["play-2"] == play(2)


def test_idle_workers_and_empty_shares(tmp_path: Path) -> None:
    optimize(lambda i: play(i) if i % 2 else None, range(5), tmp_path, key_fn="id", num_workers=4)
    assert list(StreamingDataset(tmp_path).keys) == ["play-1", "play-3"]


def test_widened_chunks_keep_their_keys(tmp_path: Path) -> None:
    optimize(lambda i: {"id": f"k{i}", "v": None if i == 7 else i}, range(8), tmp_path, chunk_size=2, key_fn="id", num_workers=2)
    ds = StreamingDataset(tmp_path)
    assert [ds[f"k{i}"]["v"] for i in range(8)] == [0, 1, 2, 3, 4, 5, 6, None]


def test_a_resumed_run_finds_the_keys_of_what_was_finished(tmp_path: Path) -> None:
    def failing(i: int) -> dict[str, Any]:
        if i == 7 and not (tmp_path / "mended").exists():
            raise RuntimeError("not yet")
        return play(i)

    options: dict[str, Any] = {"chunk_size": 2, "key_fn": "id", "use_checkpoint": True, "num_workers": 1}
    with pytest.raises(RuntimeError, match="not yet"):
        optimize(failing, range(10), tmp_path / "ds", **options)
    (tmp_path / "mended").touch()
    optimize(failing, range(10), tmp_path / "ds", **options)
    ds = StreamingDataset(tmp_path / "ds")
    assert [ds[f"play-{i}"] for i in range(10)] == [play(i) for i in range(10)]


# --- adding keys ---------------------------------------------------------------------------------------------------------


def test_keys_for_a_dataset_without(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)))
    assert build_keys_index(tmp_path, "id", verbose=False) == str(tmp_path / "keys")
    ds = StreamingDataset(tmp_path)
    assert [ds[f"play-{i}"] for i in range(10)] == [play(i) for i in range(10)]
    with pytest.raises(KeysExist, match="Key index already exists under") as caught:
        build_keys_index(tmp_path, "id")
    assert isinstance(caught.value, FileExistsError)
    build_keys_index(tmp_path, lambda sample: sample["meta"]["uid"], overwrite=True, num_shards=2)
    assert StreamingDataset(tmp_path).get_by_key(30) == play(3)
    assert len(list((tmp_path / "keys").iterdir())) == 2
    with pytest.raises(KeyError):
        StreamingDataset(tmp_path, version=1)["play-3"]
    assert StreamingDataset(tmp_path, version=2)["play-3"] == play(3)


def test_building_keys_fails_clearly_and_changes_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", [play(0), play(1), play(0)])
    before = files(tmp_path / "ds")
    with pytest.raises(DuplicateKeys, match="play-0"):
        build_keys_index(tmp_path / "ds", "id")
    with pytest.raises(ValueError, match="num_shards must be >= 1"):
        build_keys_index(tmp_path / "ds", "id", num_shards=0)
    with pytest.raises(SampleError, match="no field 'name'") as caught:
        build_keys_index(tmp_path / "ds", "name")
    assert "position 0" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        build_keys_index(tmp_path / "ds", lambda sample: 1 / sample["n"])
    with pytest.raises(FileNotFoundError):
        build_keys_index(tmp_path / "nowhere", "id")
    assert files(tmp_path / "ds") == before


def test_keys_of_a_foreign_store_are_read_and_taken_over_by_an_append(plays: Path, tmp_path: Path) -> None:
    # What another program leaves: chunks, a plain index, Parquet shards.
    foreign = tmp_path / "foreign"
    shutil.copytree(plays, foreign, ignore=shutil.ignore_patterns("_liveset"))
    index = json.loads((foreign / "index.json").read_bytes())
    del index["edit"], index["keys"]["field"]
    for chunk in index["chunks"]:
        for name in ("id", "check", "head_check"):
            del chunk[name]
    (foreign / "index.json").unlink()
    (foreign / "index.json").write_text(json.dumps(index))
    ds = StreamingDataset(foreign)
    assert ds.version == 0
    assert [ds[f"play-{i}"] for i in range(10)] == [play(i) for i in range(10)]
    assert list(ds.keys) == [f"play-{i}" for i in range(10)]
    assert len(ds.keys) == 10
    with pytest.raises(KeyError, match="are text"):
        ds.get_by_key(1)
    with pytest.raises(KeyError, match="nope"):
        ds["nope"]
    with pytest.raises(KeyConflict, match="play-4"):
        append(foreign, [4], key_fn="id")
    append(foreign, range(10, 12), key_fn="id")
    ds = StreamingDataset(foreign)
    assert [ds[f"play-{i}"] for i in range(12)] == [play(i) for i in range(12)]


@pytest.mark.parametrize("error", [SystemExit, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: build_keys_index(path, "id", overwrite=True, verbose=False),
        lambda path: append(path, range(20, 24)),
        lambda path: optimize(lambda i: {**play(i), "n": -1}, range(10), path, mode="append", on_duplicate="replace", num_workers=1),
        lambda path: transform(path, lambda sample: {**sample, "n": -1}, verbose=False),
        lambda path: transform(path, lambda sample: {**sample, "more": 1}, verbose=False),
        lambda path: compact(path, small=1),
    ],
)
def test_what_landed_stays_whatever_ends_the_program_then(
    plays: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], error: type[BaseException]
) -> None:
    append(plays, [10])
    append(plays, [11])
    swap = LocalStore.swap_head

    def ends(self: LocalStore, *arguments: Any) -> Any:
        swap(self, *arguments)
        raise error

    monkeypatch.setattr(LocalStore, "swap_head", ends)
    with pytest.raises(error):
        change(plays)
    monkeypatch.undo()
    ds = StreamingDataset(plays)
    assert ds.version == 4
    assert verify(plays).ok
    assert [ds[f"play-{i}"]["id"] for i in range(12)] == [f"play-{i}" for i in range(12)]


def test_keys_that_did_not_land_leave_no_file(plays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(plays)

    def fails(*_: Any) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(LocalStore, "swap_head", fails)
    with pytest.raises(StorageError, match="the disk is gone"):
        build_keys_index(plays, "id", overwrite=True, verbose=False)
    monkeypatch.undo()
    assert files(plays).items() - before.items() <= {("_liveset/versions/00000001.json", before["index.json"])}


# --- from anywhere -------------------------------------------------------------------------------------------------------


def _look_up(ds: Any) -> list[Any]:
    return [ds[f"play-{i}"] for i in range(10)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lookups_work_in_processes_after_lookups_in_the_parent(plays: Path, method: str) -> None:
    ds = StreamingDataset(plays)
    assert ds["play-1"] == play(1)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_look_up, [ds, ds, ds]) == [[play(i) for i in range(10)]] * 3


def test_lookups_work_in_threads(plays: Path) -> None:
    ds = StreamingDataset(plays)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: ds[f"play-{i % 10}"]["n"], range(1000))) == [i % 10 for i in range(1000)]


def test_copies_look_up_in_the_same_version(plays: Path) -> None:
    ds = StreamingDataset(plays).subset(range(6))
    for act in (lambda: ds["play-7"], lambda: ds.get_by_keys(["play-7"])):
        with pytest.raises(KeyNotFound, match=f"this part of {plays}"):
            act()
    append(plays, range(10, 12))
    for other in (pickle.loads(pickle.dumps(ds)), ds):
        assert other["play-5"] == play(5)
        assert "play-7" not in other.keys


def _append_shifted(path: str, start: int, barrier: Any) -> str:
    barrier.wait(30)
    try:
        optimize(play, range(start, start + 5), path, mode="append", num_workers=1)
    except KeyConflict as error:
        return ",".join(map(str, error.keys))
    except OverwriteConflict as error:
        return str(error)
    return "done"


def test_racing_appends_keep_keys_unique(plays: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(4) as pool:
        barrier = manager.Barrier(4)
        # Three writers bring the same new keys, one brings others.
        results = pool.starmap(_append_shifted, [(str(plays), start, barrier) for start in (100, 100, 102, 200)])
    ds = StreamingDataset(plays)
    listed = list(ds.keys)
    assert len(set(listed)) == len(listed) == len(ds)
    assert [sample["id"] for sample in ds] == listed
    assert results[3] == "done"
    assert results[:3].count("done") == 1
    assert sum(result == "done" for result in results) * 5 + 10 == len(ds)
    tables = {f"_liveset/keys/{name}" for name in os.listdir(plays / "_liveset" / "keys")}
    heads = [plays / "index.json", *(plays / "_liveset" / "versions").iterdir()]
    named = [json.loads(head.read_bytes())["edit"]["key_files"] for head in heads]
    assert tables == {name for files in named for name in (*files["base"], *files["deltas"])}


@pytest.mark.parametrize("key", ["\ud800", "k\udfff", b"\xff"])
def test_keys_that_are_no_unicode_are_refused_everywhere(key: Any, plays: Path) -> None:
    ds = StreamingDataset(plays)
    looks: list[Callable[[Any], Any]] = [ds.keys.__contains__, ds.get_by_key, lambda key: ds.get_by_keys(["play-1", key])]
    for look in looks:
        with pytest.raises(TypeError, match="Unsupported key type: (text that is not valid Unicode|bytes that are not UTF-8)"):
            look(key)
    with dataset_update(plays) as update:
        edits: list[Callable[[Any], object]] = [update.__contains__, update.__getitem__, update.__delitem__]
        edits += [functools.partial(update.insert, sample=play(1)), functools.partial(update.patch, n=1)]
        for edit in edits:
            with pytest.raises(TypeError, match="Unsupported key type"):
                edit(key)
        with pytest.raises(SampleError, match="the table, row 2: Unsupported key type"):
            update.apply([{"id": "play-1", "n": 1}, {"id": key, "n": 1}])
        assert len(update) == 0
    with pytest.raises(SampleError, match="the key from key_fn cannot be used: Unsupported key type") as caught:
        optimize(play, range(3), plays.parent / "new", key_fn=lambda _: key, num_workers=1)
    assert "input" in str(caught.value)
    assert not (plays.parent / "new" / "index.json").exists()
