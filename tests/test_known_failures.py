"""What users of streaming datasets and of table formats have been hit by, each with what happens here.

Most of what is known to go wrong has its test beside the part that it is about; these are the cases that go through several parts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from liveset import StreamingDataset, build_keys_index, dataset_update, optimize, restore, vacuum, verify
from liveset.errors import KeyConflict, KeyNotFound, SampleError, UnsupportedFormat
from liveset.format import codec
from liveset.format.codec import Compression
from liveset.snapshot import open_snapshot
from liveset.storage import Store, open_store
from liveset.storage.local import LocalStore
from liveset.testing import MemoryStore, SimulatedCrash
from liveset.testing.conformance import StoreTests
from liveset.testing.invariants import check_dataset
from tests.support.foreign import write_arrow, write_foreign
from tests.support.old_view import old_keys
from tests.support.places import LocalPlace
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)


def play(i: int, text: str = "") -> dict[str, Any]:
    return {"id": f"k{i}", "n": i, "text": text or f"number {i}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Twenty plays in chunks of four."""
    write_dataset(tmp_path / "plays", map(play, range(20)), key="id")
    return tmp_path / "plays"


def put(path: Path, *numbers: int, text: str = "new") -> int:
    with dataset_update(path) as update:
        for i in numbers:
            update[f"k{i}"] = play(i, text)
        return update.commit().version


def append(path: Path, numbers: range, **options: Any) -> None:
    optimize(play, numbers, path, num_workers=1, mode="append", verbose=False, **options)


def files(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(file.relative_to(path)): (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*") if file.is_file()}


def stored(path: Path) -> list[bytes]:
    """Return the stored bytes of every sample of plain chunks, in the order of the samples."""
    found: list[bytes] = []
    for record in open_snapshot(open_store(path)).index.chunks:
        data = (path / record.filename).read_bytes()
        found += [data[a:b] for a, b in pairwise(struct.unpack_from(f"<{record.samples + 1}I", data, 4))]
    return found


def agrees(path: Path, expected: list[Any], *, versions: bool = True) -> None:
    """Compare by iteration, by position and by key; keys lead nowhere else."""
    ds = StreamingDataset(path)
    assert list(ds) == [ds[i] for i in range(len(ds))] == expected
    assert list(ds.keys) == [sample["id"] for sample in expected]
    assert [ds[sample["id"]] for sample in expected] == ds.get_by_keys([sample["id"] for sample in expected]) == expected
    assert verify(path).ok
    if versions:
        check_dataset(open_store(path))


# --- reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [None, "chunk", "batch", "sample"])
def test_reading_changes_and_deletes_nothing(level: str | None, tmp_path: Path) -> None:
    """Other tools inflate compressed chunks in place, or take a local dataset for their cache and empty it."""
    compression = Compression("zstd", level, 3) if level is not None else None
    write_dataset(tmp_path / "ds", map(play, range(20)), key="id", compression=compression)
    before = files(tmp_path)
    for _ in range(2):
        ds = StreamingDataset(tmp_path / "ds", max_cache_size=1, shuffle=True)
        assert sorted(sample["n"] for sample in ds) == list(range(20))
        assert ds["k7"] == ds[7] == play(7)
    assert files(tmp_path) == before


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of all files that are read meanwhile."""
    names: list[str] = []
    with monkeypatch.context() as patch:
        for method in ("map", "read"):
            real = getattr(LocalStore, method)

            def note(self: LocalStore, name: str, *more: Any, real: Any = real, **options: Any) -> Any:
                names.append(name)
                return real(self, name, *more, **options)

            patch.setattr(LocalStore, method, note)
        yield names


def test_a_lookup_reads_the_key_table_and_one_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch) as names:
        assert StreamingDataset(path)["k13"] == play(13)
    chunks = [record.filename for record in open_snapshot(open_store(path)).index.chunks]
    tables = [name for name in names if name.startswith("_liveset/keys/")]
    assert [name for name in names if name in chunks] == [chunks[3]]
    assert len(tables) == 1
    assert not [name for name in names if name.endswith(".parquet")]


def test_text_keys_that_look_like_numbers_are_no_positions(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": str(9 - i), "n": i} for i in range(10)], key="id")
    ds = StreamingDataset(tmp_path)
    assert (ds["3"]["n"], ds[3]["n"]) == (6, 3)
    for missing in ("03", "3.0", " 3", "10", ""):
        with pytest.raises(KeyNotFound):
            ds[missing]
    with pytest.raises(KeyNotFound, match="text"):
        ds.get_by_key(3)


def steps(act: Callable[[], object]) -> int:
    """Return how many lines of Python are run, each turn of a loop counted: a measure of work that does not depend on the machine."""
    number = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal number
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return number


def test_lookups_cost_no_more_in_a_larger_dataset(tmp_path: Path) -> None:
    """Neither the number of chunks nor that of keys is walked through, by key or by position."""
    work = []
    for count in (40, 4_000):
        write_dataset(tmp_path / str(count), ({"id": f"k{i}", "n": i} for i in range(count)), key="id", chunk_size=4)
        ds = StreamingDataset(tmp_path / str(count))
        assert ds["k1"] == ds[1]
        wanted = f"k{count // 2}"
        assert ds[wanted]["n"] == count // 2  # the chunk is open from here on
        work.append([steps(lambda ds=ds, wanted=wanted: ds[wanted]), steps(lambda ds=ds, count=count: ds[count // 2])])  # type: ignore[misc]
    for small, large in zip(*work, strict=True):
        assert large < 2 * small, work


def test_keys_are_built_in_work_that_grows_with_their_number_only(tmp_path: Path) -> None:
    """Twice the samples in twice the chunks are about twice the work, not four times."""
    work = {}
    for count in (10, 400, 800):  # the first one imports what is needed
        write_dataset(tmp_path / str(count), ({"id": f"k{i}", "n": i} for i in range(count)), chunk_size=1)
        work[count] = steps(lambda count=count: build_keys_index(tmp_path / str(count), "id", verbose=False))  # type: ignore[misc]
    assert work[800] < 2.2 * work[400], work


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*will create 4 worker processes:UserWarning")
def test_loader_workers_read_what_was_edited(path: Path, workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    ds = StreamingDataset(path)
    assert len(list(ds)) == 20  # all files are open
    put(path, 1, 2, 18)
    append(path, range(20, 23))
    assert ds.refresh()
    expected = [play(i, "new" if i in (1, 2, 18) else "") for i in range(23)]
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    for dataset in (ds, StreamingDataset(path)):
        for source in (dataset, dataset.as_map()):
            read = list(data.DataLoader(source, **options, multiprocessing_context="fork" if workers else None))
            assert sorted(read, key=lambda sample: sample["n"]) == expected


def _read_slowly(path: str, ear: Any, mouth: Any) -> None:
    samples = iter(StreamingDataset(path))
    found = [next(samples)]
    mouth.send("began")
    ear.recv()
    mouth.send([*found, *samples])


def test_a_reader_in_another_process_goes_on_while_its_chunks_are_replaced(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ear, to_reader = context.Pipe(duplex=False)
    from_reader, mouth = context.Pipe(duplex=False)
    reader = context.Process(target=_read_slowly, args=(str(path), ear, mouth))
    reader.start()
    assert from_reader.recv() == "began"
    put(path, *range(20), text="much longer than what was there before")
    to_reader.send("go on")
    assert from_reader.recv() == [play(i) for i in range(20)]
    reader.join()
    assert StreamingDataset(path)["k0"]["text"].startswith("much longer")


def test_what_is_staged_during_an_epoch_shows_in_the_next_one(path: Path) -> None:
    ds = StreamingDataset(path, shuffle=True)
    for epoch in range(3):
        seen = []
        with dataset_update(path) as update:
            for sample in ds:
                seen.append(sample["text"])
                update[sample["id"]] = {**sample, "text": f"after epoch {epoch}"}
            update.commit()
        assert len(seen) == 20
        if epoch:
            assert set(seen) == {f"after epoch {epoch - 1}"}
        assert ds.refresh()


# --- updates ------------------------------------------------------------------------------------------------------------


def test_an_update_changes_the_named_samples_and_nothing_else(tmp_path: Path) -> None:
    """With several chunks and several published shards, and samples that become larger and smaller."""
    path = tmp_path / "ds"
    optimize(play, range(60), path, chunk_size=7, key_fn="id", num_shards=4, num_workers=1, verbose=False)
    before, shards = stored(path), sorted(f"keys/{file.name}" for file in (path / "keys").iterdir())
    assert len(shards) == 4
    changed = {3: "x" * 1000, 4: "y", 20: "z" * 5, 59: "longer than what was there"}
    with dataset_update(path) as update:
        for i, text in changed.items():
            update[f"k{i}"] = play(i, text)
        update.commit()
    after = stored(path)
    assert [i for i in range(60) if before[i] != after[i]] == sorted(changed)
    agrees(path, [play(i, changed.get(i, "")) for i in range(60)])
    published = old_keys(lambda name: (path / name).read_bytes(), shards)
    assert published == {f"k{i}": i for i in range(60)}


def test_a_sample_replaced_again_and_again_has_one_entry_in_the_keys(path: Path) -> None:
    for turn in range(5):
        put(path, 5, text=f"turn {turn}")
        if turn % 2:
            build_keys_index(path, "id", overwrite=True, verbose=False)
        agrees(path, [play(i, f"turn {turn}" if i == 5 else "") for i in range(20)])
        rows = old_keys(lambda name: (path / name).read_bytes(), ["keys/shard-00000.parquet"])
        assert rows == {f"k{i}": i for i in range(20)}


def test_keys_lead_to_the_same_samples_after_every_kind_of_edit(path: Path) -> None:
    """Positions stay as well, except where other samples took the place of all."""
    expected = [play(i) for i in range(20)]

    def check() -> None:
        agrees(path, expected)

    put(path, 2, 19)
    expected[2], expected[19] = play(2, "new"), play(19, "new")
    check()
    append(path, range(20, 25))
    expected += [play(i) for i in range(20, 25)]
    check()
    put(path, 22, 0, text="again")
    expected[22], expected[0] = play(22, "again"), play(0, "again")
    check()
    build_keys_index(path, "id", overwrite=True, num_shards=3, verbose=False)
    check()
    version = StreamingDataset(path).version
    optimize(play, range(100, 103), path, mode="overwrite", key_fn="id", num_workers=1, verbose=False)
    agrees(path, [play(i) for i in range(100, 103)])
    restore(path, version)
    check()
    vacuum(path, keep=0, grace=timedelta(0))
    check()


def test_an_edit_writes_the_chunks_that_it_touches_and_nothing_more(tmp_path: Path) -> None:
    """Relabelling ten scattered samples beside large payloads costs their chunks; what it costs is told before and after."""
    path = tmp_path / "ds"
    write_dataset(path, ({"id": f"k{i}", "label": 0, "blob": bytes([i]) * 10_000} for i in range(200)), key="id", chunk_size=5)
    before = files(path)
    with dataset_update(path) as update:
        for i in range(0, 200, 20):
            update[f"k{i}"] = {**update[f"k{i}"], "label": 1}
        preview, result = update.preview(), update.commit()
    after = files(path)
    new = {name: data for name, (_, data) in after.items() if name not in before}
    chunks = [name for name in new if name.startswith("chunk-")]
    assert len(chunks) == preview.chunks == result.chunks == 10
    assert result.bytes_written == preview.bytes_to_rewrite == sum(len(new[name]) for name in chunks)
    assert sorted(new.keys() - set(chunks)) == ["_liveset/versions/00000001.json"]
    assert [name for name in before if after[name] != before[name]] == ["index.json"]


def test_an_append_writes_only_what_is_new(path: Path) -> None:
    before = files(path)
    append(path, range(20, 24))
    after = files(path)
    assert [name for name in before if after[name] != before[name]] == ["index.json"]
    new = sorted(name.partition("-")[0] for name in after.keys() - before.keys())
    assert new == ["_liveset/keys/delta", "_liveset/versions/00000001.json", "chunk"]


def test_one_large_update_equals_many_small_ones(tmp_path: Path) -> None:
    dice = random.Random(0)
    for name in ("one", "many"):
        write_dataset(tmp_path / name, map(play, range(200)), key="id", chunk_size=9)
    edits = [(i, "x" * dice.randrange(30)) for i in dice.sample(range(200), 60)]
    with dataset_update(tmp_path / "one") as update:
        for i, text in edits:
            update[f"k{i}"] = play(i, text)
        update.commit()
    for i, text in edits:
        put(tmp_path / "many", i, text=text)
    assert stored(tmp_path / "one") == stored(tmp_path / "many")


def test_keys_that_two_sessions_and_an_append_bring_stay_unique(path: Path) -> None:
    """An update never makes a key, so an append of the same key is the only one that can, and the second append is refused."""
    with dataset_update(path) as update:
        update["k20"] = play(20, "not there")
        append(path, range(20, 22))
        with pytest.raises(KeyNotFound, match="k20"):  # it was opened before the key was there
            update.commit()
    with pytest.raises(KeyConflict, match="k20"):
        append(path, range(20, 30))
    agrees(path, [play(i) for i in range(22)])


@pytest.mark.parametrize("kind", ["classic", "arrow"])
def test_a_chunk_whose_first_sample_holds_none_can_be_updated(kind: str, tmp_path: Path) -> None:
    """The schema is that of the dataset, and not what the first sample of a chunk happens to look like."""

    def row(i: int) -> dict[str, Any]:
        return {"id": f"k{i}", "n": None if i % 4 == 0 and i > 0 else i}

    path = tmp_path / "ds"
    if kind == "arrow":
        write_arrow(path, [row(i) for i in range(12)], chunk_size=4)
    else:
        write_dataset(path, map(row, range(12)), key="id")
    assert [sample["n"] for sample in StreamingDataset(path)][4::4] == [None, None]
    with dataset_update(path) as update:
        update["k5"], update["k8"], update["k9"] = {"id": "k5", "n": -5}, {"id": "k8", "n": 8}, {"id": "k9", "n": None}
        update.commit()
    changed = {5: -5, 8: 8, 9: None}
    agrees(path, [{**row(i), "n": changed.get(i, row(i)["n"])} for i in range(12)])


def test_values_of_another_type_never_get_into_a_column(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, [{"id": f"k{i}", "ids": np.arange(i + 1), "label": i} for i in range(8)], key="id")
    before = files(path)
    good = {"id": "k3", "ids": np.arange(3), "label": 3}
    with dataset_update(path) as update:
        for wrong in (
            {**good, "ids": np.arange(3, dtype=np.float32)},
            {**good, "ids": np.arange(3, dtype=np.int32)},
            {**good, "ids": [0, 1, 2]},
            {**good, "label": 3.5},
            {**good, "label": True},
            {**good, "more": 1},
            {"id": "k3", "ids": np.arange(3)},
        ):
            with pytest.raises(SampleError):
                update["k3"] = wrong
        assert len(update) == 0
    assert files(path) == before


@pytest.mark.parametrize(("member", "value"), [("item_loader", "TokensLoader"), ("encryption", {"algorithm": "fernet"})])
def test_datasets_whose_samples_need_more_are_refused_and_left_alone(path: Path, member: str, value: Any) -> None:
    index = json.loads((path / "index.json").read_bytes())
    index["config"][member] = value
    del index["edit"]
    (path / "index.json").unlink()  # it may be another name of an archived one
    (path / "index.json").write_text(json.dumps(index))
    before = files(path)
    with pytest.raises(UnsupportedFormat, match="TokensLoader" if member == "item_loader" else "encrypted"):
        dataset_update(path)
    with pytest.raises(NotImplementedError, match="not supported yet"):
        append(path, range(20, 22), key_fn="id")
    assert files(path) == before


def test_an_update_keeps_the_compression_of_arrow_chunks(tmp_path: Path) -> None:
    rows = [{"id": f"k{i}", "n": i, "text": "the same text again and again " * 20} for i in range(300)]
    sizes = {}
    for codec_name in (None, "zstd"):
        path = tmp_path / str(codec_name)
        write_arrow(path, rows, chunk_size=300, codec=codec_name)
        before = open_snapshot(open_store(path)).index.chunks[0].size
        with dataset_update(path) as update:
            update["k7"] = {**rows[7], "n": -7}
            update.commit()
        sizes[codec_name] = before, open_snapshot(open_store(path)).index.chunks[0].size
        assert StreamingDataset(path)["k7"]["n"] == -7
    for before, after in sizes.values():
        assert after < 1.1 * before
    assert 5 * sizes["zstd"][1] < sizes[None][1]


@pytest.mark.parametrize("original", ["kept", "gone"])
def test_an_inflated_copy_of_a_compressed_chunk_does_not_hide_an_update(original: str, tmp_path: Path) -> None:
    """Reading a dataset that is compressed by whole files, the old tool leaves inflated copies, and may delete the originals."""
    path = tmp_path / "ds"
    write_foreign(path, [play(i) for i in range(12)], compression=Compression("zstd", "chunk", 3))
    for entry in json.loads((path / "index.json").read_bytes())["chunks"]:
        file = path / entry["filename"]
        plain = codec.decompress(file.read_bytes())
        (path / entry["filename"].replace(".zstd", "")).write_bytes(plain)
        if original == "gone":
            file.unlink()
    for text in ("new", "newer"):
        put(path, 1, 5, text=text)
        agrees(path, [play(i, text if i in (1, 5) else "") for i in range(12)], versions=original == "kept")
    assert list(StreamingDataset(path, version=0)) == [play(i) for i in range(12)]


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_a_crash_while_keys_are_made_anew_never_loses_them() -> None:
    """At any call: the keys are those from before or the new ones, all of them, and always lead to their samples."""

    def prepared() -> LocalPlace:
        place = LocalPlace()
        write_dataset(Path(place.path), [{"id": f"k{i}", "alt": 100 + i} for i in range(6)], key="id")
        return place

    def rebuild(place: LocalPlace) -> None:
        build_keys_index(place.path, "alt", overwrite=True, num_shards=2, verbose=False)

    place = prepared()
    place.gate.arm((1000, "before"))
    rebuild(place)
    total = len(place.gate.calls)
    place.close()
    assert total > 5
    kinds = set()
    for call in range(1, total + 1):
        for when in ("before", "after", "torn"):
            place = prepared()
            try:
                place.gate.arm((call, when))
                with suppress(SimulatedCrash):
                    rebuild(place)
                place.gate.arm(None)
                ds = StreamingDataset(place.path)
                assert [ds.get_by_key(key) for key in ds.keys] == list(ds)
                assert len(ds.keys) == 6
                kinds.add(ds.keys.kind)
                rebuild(place)
                assert StreamingDataset(place.path).get_by_key(103)["id"] == "k3"
                check_dataset(place.store)
            finally:
                place.close()
    assert kinds == {str, int}


# --- writers ------------------------------------------------------------------------------------------------------------


def test_what_a_broken_run_of_another_tool_left_is_never_merged(path: Path) -> None:
    """Part indexes and chunks of a run that was killed, with the very schema of the dataset."""
    head = json.loads((path / "index.json").read_bytes())
    debris = {"0.index.json": json.dumps({"chunks": head["chunks"][:1], "config": head["config"]}).encode(), "chunk-0-5.bin": b"theirs"}
    for name, data in debris.items():
        (path / name).write_bytes(data)
    append(path, range(20, 22))
    put(path, 3)
    agrees(path, [play(i, "new" if i == 3 else "") for i in range(22)])
    assert {name: (path / name).read_bytes() for name in debris} == debris


def _append_own(path: str, start: int, barrier: Any) -> None:
    barrier.wait(60)
    optimize(play, range(start, start + 30), path, mode="append", key_fn="id", chunk_size=7, num_workers=1, verbose=False)


def test_machines_that_begin_one_dataset_together_lose_nothing(tmp_path: Path) -> None:
    """Each appends its share to a shared folder in which nothing is yet."""
    path = tmp_path / "shared"
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(3) as pool:
        barrier = manager.Barrier(3)
        pool.starmap(_append_own, [(str(path), start, barrier) for start in (0, 30, 60)])
    ds = StreamingDataset(path)
    assert sorted(sample["n"] for sample in ds) == list(range(90))
    assert sorted(ds.keys) == sorted(f"k{i}" for i in range(90))
    agrees(path, list(ds))


def test_folders_for_temporary_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tools share fixed names there, so that two runs on one machine delete each other's files."""
    scratch = tmp_path / "scratch"
    for name in ("chunks", "data"):
        (scratch / name).mkdir(parents=True)
        (scratch / name / "of-another-run").write_bytes(b"theirs")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = files(scratch)
    optimize(play, range(20), tmp_path / "ds", key_fn="id", num_workers=2, verbose=False)
    put(tmp_path / "ds", 3)
    assert list(StreamingDataset(tmp_path / "ds"))[3] == play(3, "new")
    assert files(scratch) == before
    assert sorted(os.listdir(scratch)) == ["chunks", "data"]


class LastWriteWins(MemoryStore):
    """A store whose writes of the head cannot be made conditional."""

    def swap_head(self, data: bytes, expected: Any, withdraw: Any = ()) -> Any:
        return super().swap_head(data, self._tag() if "index.json" in self.files else None, withdraw)


@pytest.mark.parametrize("rule", ["the_head_is_swapped_only_if_it_is_the_expected_one", "a_tag_for_no_head_does_not_create_one"])
def test_a_store_where_the_last_write_wins_does_not_pass_for_a_store(rule: str) -> None:
    """Two commits on it would both succeed, and one would vanish: the tests that every store must pass refuse it."""
    check: Callable[[StoreTests, Store], None] = getattr(StoreTests, f"test_{rule}")
    check(StoreTests(), MemoryStore())
    with pytest.raises(AssertionError):
        check(StoreTests(), LastWriteWins())
