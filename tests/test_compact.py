"""Compaction: chunks and key tables become fewer, and nothing else changes, whoever else is at work and whatever fails."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveset
from liveset.edit.compact import CompactReport, choose_runs, compact_store
from liveset.edit.session import DatasetUpdate, dataset_update
from liveset.edit.splice import open_stored
from liveset.errors import CommitUnknown, Corrupt, DatasetNotFound, KeyConflict, StorageError, UnsupportedFormat
from liveset.format.codec import Compression
from liveset.format.framed import pack_framed
from liveset.format.index import Index
from liveset.keystore import open_keys
from liveset.snapshot import open_snapshot
from liveset.storage import HEAD, Store, open_store
from liveset.testing import FaultyStore, LossyStore, SimulatedCrash, WrappedStore
from liveset.testing.invariants import check_dataset, unneeded_files
from tests.support.foreign import write_foreign
from tests.support.old_view import old_keys, old_samples
from tests.support.writing import write_dataset
from tests.test_edits import LAYOUTS, Plain, check, play, sample
from tests.test_update_crash import AT_ONCE, Rival, in_memory, orphans, samples_of

pytest.importorskip("pyarrow", exc_type=ImportError)

LEVELS: dict[str, Compression | None] = {
    "classic": None,
    "sample": Compression("zstd", "sample"),
    "batch": Compression("zstd", "batch", 3),
    "chunk": Compression("zstd", "chunk"),
}


def insert(path: Path, *numbers: int) -> None:
    with dataset_update(path) as update:
        for number in numbers:
            update.insert(f"k{number}", sample(number))
        update.commit()


def delete(path: Path, *numbers: int) -> None:
    with dataset_update(path) as update:
        for number in numbers:
            del update[f"k{number}"]
        update.commit()


def grown(path: Path, *, compression: Compression | None = None) -> dict[str, Any]:
    """Write five samples, and add fifteen in commits of one; return all of them by key."""
    shutil.copytree(_template(compression).name, path, dirs_exist_ok=True)
    return {f"k{number}": sample(number) for number in range(20)}


@cache
def _template(compression: Compression | None) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    write_dataset(Path(folder.name), map(sample, range(5)), key="id", compression=compression, chunk_size=40)
    for number in range(5, 20):
        insert(Path(folder.name), number)
    return folder


def head(path: Path) -> Index:
    return open_snapshot(open_store(path)).index


def sizes(path: Path) -> list[int]:
    return [record.samples for record in head(path).chunks]


def published(path: Path) -> dict[str | int, int]:
    """Return the positions by key that the old tool would take from the published shards."""
    names = [f"keys/{file.name}" for file in (path / "keys").glob("*.parquet")] if (path / "keys").is_dir() else []
    return old_keys(lambda name: (path / name).read_bytes(), names)


# --- what it does ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=12)
def test_samples_keys_and_positions_stay_whatever_was_edited_before(layout: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        expected = {f"k{number}": sample(number) for number in range(10)}
        LAYOUTS[layout](path, list(expected.values()))
        for _ in range(data.draw(st.integers(1, 5))):
            if data.draw(st.booleans()):
                plain = Plain(expected)
                with dataset_update(path) as update:
                    for step in range(data.draw(st.integers(1, 5))):
                        play(update, plain, data.draw(st.sampled_from(["put", "insert", "upsert", "delete", "patch"])), step, data)
                    update.commit()
                expected = plain.commit()
                continue
            keys, before = data.draw(st.booleans()), head(path)
            planned = liveset.compact(path, small=1.0, keys=keys, dry_run=True)
            report = liveset.compact(path, small=1.0, keys=keys)
            assert report.chunks_after == planned.chunks_after == len(head(path).chunks) <= len(before.chunks)
            assert report.key_tables_after <= max(planned.key_tables_after, before.edit is None)
            assert (report.version is None) is (head(path).version == before.version)
            assert orphans(open_store(path)) == set()
            check(path, expected)
            if keys and head(path).edit is not None:
                assert report.key_tables_after == 1
                assert published(path) == {key: position for position, key in enumerate(expected)}
        check(path, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_small_chunks_become_one_where_they_stand(tmp_path: Path, level: str) -> None:
    expected = grown(tmp_path, compression=LEVELS[level])
    delete(tmp_path, 3, 11)
    for gone in ("k3", "k11"):
        del expected[gone]
    assert published(tmp_path) == {}
    report = liveset.compact(tmp_path, message="tidy", author="Ada")
    assert (report.chunks_before, report.chunks_after) == (15, 1)
    assert report.key_tables_before > 1
    assert report.key_tables_after == 1
    entry = liveset.history(tmp_path)[0]
    assert (entry.version, entry.op, entry.message, entry.author) == (report.version, "compact", "tidy", "Ada")
    check(tmp_path, expected)
    assert published(tmp_path) == {key: position for position, key in enumerate(expected)}
    assert list(old_samples(lambda name: (tmp_path / name).read_bytes())) == list(expected.values())
    assert liveset.verify(tmp_path).ok
    again = liveset.compact(tmp_path)
    assert (again.version, again.bytes_written, again.chunks_after) == (None, 0, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_the_file_is_the_one_that_a_writer_would_have_made(tmp_path: Path, level: str) -> None:
    """Also for bytes: nothing of how the samples came is left in the file."""
    expected = grown(tmp_path / "a", compression=LEVELS[level])
    assert liveset.compact(tmp_path / "a").chunks_after == 1
    write_dataset(tmp_path / "b", expected.values(), key="id", compression=LEVELS[level], chunk_size=40)
    one, other = (path / head(path).chunks[0].filename for path in (tmp_path / "a", tmp_path / "b"))
    assert one.read_bytes() == other.read_bytes()
    left, right = (head(path).chunks[0] for path in (tmp_path / "a", tmp_path / "b"))
    assert (left.size, left.check, left.head_check) == (right.size, right.check, right.head_check)


def test_a_last_sample_that_ends_like_arrow_rows(tmp_path: Path) -> None:
    """The old tool would take the file for such: it needs a byte behind it."""
    samples: list[dict[str, Any]] = [{"id": f"k{number}", "data": b"LDARW01\0"} for number in range(6)]
    write_dataset(tmp_path, samples[:3], key="id", chunk_size=40)
    with dataset_update(tmp_path) as update:
        for each in samples[3:]:
            update.insert(each["id"], each)
        update.commit()
    liveset.compact(tmp_path)
    assert not (tmp_path / head(tmp_path).chunks[0].filename).read_bytes().endswith(b"LDARW01\0")
    assert sizes(tmp_path) == [6]
    check(tmp_path, {each["id"]: each for each in samples})


@pytest.mark.parametrize("limit", [{"chunk_size": 500}, {"chunk_bytes": "64KB"}, {}])
@pytest.mark.parametrize("level", LEVELS)
def test_there_is_nothing_to_do_for_what_was_written_at_once(tmp_path: Path, level: str, limit: dict[str, Any]) -> None:
    """However well it is compressed: a full chunk is full before compression."""
    compression = LEVELS[level]
    packed: dict[str, Any] = {"compression": compression.name, "compression_level": compression.level} if compression else {}
    liveset.optimize(_repetitive, range(1_400), tmp_path / "ds", key_fn="id", num_workers=1, verbose=False, **packed, **limit)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    report = liveset.compact(tmp_path / "ds")
    assert (report.version, report.bytes_written) == (None, 0)
    assert report.chunks_before == report.chunks_after == len(head(tmp_path / "ds").chunks)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def _repetitive(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "text": f"number {number} " * 30}


def test_chunks_are_filled_up_to_the_limit_and_not_beyond(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(sample, range(7)), key="id", chunk_size=7)
    for number in range(7, 40):
        insert(tmp_path, number)
    assert liveset.compact(tmp_path).chunks_after == 6
    assert sizes(tmp_path) == [7, 7, 7, 7, 7, 5]
    check(tmp_path, {f"k{number}": sample(number) for number in range(40)})


def test_a_limit_in_bytes(tmp_path: Path) -> None:
    liveset.optimize(_wide, range(20), tmp_path, key_fn="id", num_workers=1, verbose=False, chunk_bytes=10_000)
    before = sizes(tmp_path)
    for number in range(20, 50):
        with dataset_update(tmp_path) as update:
            update.insert(f"k{number}", _wide(number))
            update.commit()
    liveset.compact(tmp_path)
    assert sizes(tmp_path)[: len(before) - 1] == before[:-1]
    assert len(sizes(tmp_path)) <= len(before) + 5
    assert max(record.size for record in head(tmp_path).chunks) <= 10_000 + 200
    assert [item["id"] for item in liveset.StreamingDataset(tmp_path)] == [f"k{number}" for number in range(50)]


def _wide(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "data": bytes([number]) * 1000}


def test_old_versions_are_read_until_a_vacuum_removes_their_chunks(tmp_path: Path) -> None:
    expected = grown(tmp_path)
    version = head(tmp_path).version
    assert liveset.compact(tmp_path).version == version + 1
    old = liveset.StreamingDataset(tmp_path, version=version)
    assert list(old) == list(expected.values())
    assert [old[key] for key in expected] == list(expected.values())
    found = liveset.diff(tmp_path, version, version + 1)
    assert (found.added, found.removed, found.changed) == (0, 0, 0)
    liveset.vacuum(tmp_path, keep=0, grace=timedelta(0))
    assert len(list(tmp_path.glob("chunk-*"))) == 1
    assert len(list(tmp_path.glob("_liveset/keys/*"))) == 1
    assert unneeded_files(open_store(tmp_path)) == set()
    check(tmp_path, expected)


def test_without_keys_only_chunks_are_merged(tmp_path: Path) -> None:
    expected = grown(tmp_path)
    base = head(tmp_path).edit.key_files.base  # type: ignore[union-attr]
    report = liveset.compact(tmp_path, keys=False)
    assert report.chunks_after == 1
    assert head(tmp_path).edit.key_files.base == base  # type: ignore[union-attr]
    assert report.key_tables_after > 1
    check(tmp_path, expected)
    assert published(tmp_path) == {key: position for position, key in enumerate(expected)}, "what was published is published again"
    assert liveset.compact(tmp_path, small=0).key_tables_after == 1
    check(tmp_path, expected)


def test_keys_are_published_again_where_nothing_else_is_to_be_done(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(sample, range(20)), key="id", chunk_size=40)
    shutil.rmtree(tmp_path / "keys")
    assert liveset.compact(tmp_path, dry_run=True).version is None
    assert published(tmp_path) == {}
    assert liveset.compact(tmp_path, keys=False).version is None
    assert published(tmp_path) == {}
    assert liveset.compact(tmp_path).version is None
    assert len(published(tmp_path)) == 20


def test_the_number_of_shards_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "verbose": False}
    liveset.optimize(sample, range(20), tmp_path, **options)
    liveset.build_keys_index(tmp_path, "id", num_shards=3, verbose=False)
    delete(tmp_path, 7)
    assert published(tmp_path) == {}
    liveset.compact(tmp_path)
    assert len(list((tmp_path / "keys").iterdir())) == 3
    assert len(published(tmp_path)) == 19


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_small_datasets(tmp_path: Path, count: int, keyed: bool) -> None:
    write_dataset(tmp_path, map(sample, range(count)), key="id" if keyed else None)
    report = liveset.compact(tmp_path)
    assert (report.version, report.chunks_after) == (None, min(count, 1))
    assert (report.key_tables_before, report.key_tables_after) == (keyed, keyed)
    assert list(liveset.StreamingDataset(tmp_path)) == list(map(sample, range(count)))


def test_a_dataset_that_became_empty(tmp_path: Path) -> None:
    grown(tmp_path)
    delete(tmp_path, *range(20))
    assert liveset.compact(tmp_path).chunks_after == 0
    check(tmp_path, {})
    insert(tmp_path, 3)
    check(tmp_path, {"k3": sample(3)})


def test_a_dataset_without_keys(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "verbose": False}
    liveset.optimize(sample, range(3), tmp_path, **options)
    for number in range(3, 12):
        liveset.optimize(sample, [number], tmp_path, mode="append", **options)
    report = liveset.compact(tmp_path)
    assert (report.chunks_before, report.chunks_after) == (10, 1)
    assert report.key_tables_after == 0
    assert list(liveset.StreamingDataset(tmp_path)) == list(map(sample, range(12)))
    assert not (tmp_path / "keys").exists()


# --- datasets of another program ------------------------------------------------------------------------------------


def test_a_dataset_of_another_program_is_adopted_if_there_is_something_to_do(tmp_path: Path) -> None:
    write_foreign(tmp_path / "full", list(map(sample, range(8))))
    assert liveset.compact(tmp_path / "full").version is None
    assert head(tmp_path / "full").version == 0
    write_foreign(tmp_path / "small", list(map(sample, range(8))), chunk_size=2)
    _set_config(tmp_path / "small", chunk_size=8)
    assert liveset.compact(tmp_path / "small", dry_run=True).chunks_after == 1
    assert head(tmp_path / "small").version == 0
    assert liveset.compact(tmp_path / "small").version == 2
    assert [entry.op for entry in liveset.history(tmp_path / "small")][:2] == ["compact", "adopt"]
    check(tmp_path / "small", {f"k{number}": sample(number) for number in range(8)})
    assert len(published(tmp_path / "small")) == 8


def _set_config(path: Path, lengths: Mapping[str, int] | None = None, **members: Any) -> None:
    index = json.loads((path / HEAD).read_bytes())
    index["config"] |= members
    for entry in index["chunks"]:
        entry["chunk_bytes"] = (lengths or {}).get(entry["filename"], entry["chunk_bytes"])
    (path / HEAD).write_text(json.dumps(index, sort_keys=True))


@pytest.mark.parametrize("level", ["classic", "chunk"])
def test_what_another_program_pads_stays_readable(tmp_path: Path, level: str) -> None:
    """Its files may have gaps before, behind and within items; ours do not, and are read more strictly."""
    import zstandard

    write_foreign(tmp_path, list(map(sample, range(8))), chunk_size=2, compression=LEVELS[level])
    lengths = {}
    for number, record in enumerate(head(tmp_path).chunks):
        stored = open_stored((tmp_path / record.filename).read_bytes(), record, LEVELS[level])
        items = [stored.content(slot) + b"\0" * number for slot in range(2)]
        offsets = np.cumsum([4 + 4 * 3 + number, *map(len, items)]).astype("<u4").tobytes()
        data = struct.pack("<I", 2) + offsets + b"\7" * number + b"".join(items) + b"\7" * number
        (tmp_path / record.filename).write_bytes(data if level == "classic" else zstandard.compress(data))
        lengths[record.filename] = len(data)
    _set_config(tmp_path, lengths, chunk_size=8)
    assert list(liveset.StreamingDataset(tmp_path)) == list(map(sample, range(8)))
    assert liveset.compact(tmp_path).chunks_after == 1
    check(tmp_path, {f"k{number}": sample(number) for number in range(8)})


def test_arrow_chunks_stay_as_they_are(tmp_path: Path) -> None:
    LAYOUTS["arrow"](tmp_path, list(map(sample, range(12))))
    _set_config(tmp_path, chunk_size=40)
    insert(tmp_path, 12)
    insert(tmp_path, 13)
    before = [record.filename for record in head(tmp_path).chunks]
    assert liveset.compact(tmp_path).chunks_after == 4
    assert [record.filename for record in head(tmp_path).chunks][:3] == before[:3]
    check(tmp_path, {f"k{number}": sample(number) for number in range(14)})


def test_samples_that_were_erased_are_not_put_into_frames(tmp_path: Path) -> None:
    packed = Compression("zstd", "batch", 2)
    write_dataset(tmp_path, map(sample, range(4)), key="id", compression=packed, chunk_size=40)
    insert(tmp_path, 4, 5, 6, 7)
    insert(tmp_path, 8, 9, 10, 11)
    store, index = open_store(tmp_path), head(tmp_path)
    record = index.chunks[1]
    spliced = open_stored((tmp_path / record.filename).read_bytes(), record, packed).splice({}, erased={0, 1})
    store.write("chunk-0-9-0123456789abcdef.bin", spliced.buffers)
    erased = record.replace(filename="chunk-0-9-0123456789abcdef.bin", size=spliced.size, check=None)
    (tmp_path / HEAD).write_bytes(index.replace(chunks=(index.chunks[0], erased, index.chunks[2])).to_bytes())
    assert liveset.compact(tmp_path, dry_run=True).chunks_after == 1
    assert liveset.compact(tmp_path).chunks_after == 3
    dataset = liveset.StreamingDataset(tmp_path)
    assert [dataset[f"k{number}"] for number in (3, 6, 11)] == [sample(number) for number in (3, 6, 11)]


def test_a_chunk_of_frames_among_others_stands_alone(tmp_path: Path) -> None:
    write_foreign(tmp_path, list(map(sample, range(8))), chunk_size=2)
    record = head(tmp_path).chunks[1]
    stored = open_stored((tmp_path / record.filename).read_bytes(), record, None)
    framed = b"".join(pack_framed([stored.content(slot) for slot in range(2)], Compression()))
    (tmp_path / record.filename).write_bytes(framed)
    _set_config(tmp_path, {record.filename: len(framed)}, chunk_size=8)
    assert liveset.compact(tmp_path).chunks_after == 3
    assert sizes(tmp_path) == [2, 2, 4]
    check(tmp_path, {f"k{number}": sample(number) for number in range(8)})


@pytest.mark.parametrize("config", [{"encryption": {"algorithm": "x"}}, {"item_loader": "TokensLoader"}])
def test_what_needs_another_loader_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write_foreign(tmp_path, list(map(sample, range(8))))
    _set_config(tmp_path, **config)
    with pytest.raises(UnsupportedFormat, match="cannot be compacted yet"):
        liveset.compact(tmp_path)


# --- which chunks ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(60, 200), st.one_of(st.none(), st.integers(2, 20)))
def test_runs_are_worth_it_and_nothing_that_is_worth_it_is_left(chunks: list[int], limit: int, samples: int | None) -> None:
    runs = choose_runs([(size, 1) for size in chunks], limit, samples)
    for start, stop in runs:
        run = chunks[start:stop]
        assert len(run) > 1
        assert sum(run) <= limit
        assert samples is None or len(run) <= samples
        assert max(run) <= sum(run) - max(run), "a large chunk would be written again for little"
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
    left = set(range(len(chunks))) - {number for start, stop in runs for number in range(start, stop)}
    for a, b in itertools.pairwise(sorted(left)):
        if b == a + 1 and chunks[a] == chunks[b]:
            assert chunks[a] + chunks[b] > limit, "two of one size belong together"


@pytest.mark.parametrize("batch", [[10], [10, 15], [1, 500], [7, 1, 90, 2, 2, 300]])
def test_compacting_after_each_commit_costs_n_log_n(batch: list[int]) -> None:
    """Counted in bytes that are written again; the limit is never reached, which is the worst case."""
    cost, chunks, total, most = 0, list[int](), 0, 0
    for size in itertools.islice(itertools.cycle(batch), 3_000):
        chunks.append(size)
        total += size
        for start, stop in reversed(choose_runs([(size, 1) for size in chunks], 1 << 60, None)):
            cost += sum(chunks[start:stop])
            chunks[start:stop] = [sum(chunks[start:stop])]
        most = max(most, len(chunks))
    assert cost <= total * math.log2(total / min(batch))
    assert most <= 2 * math.log2(total)


def test_compacting_after_each_commit_writes_n_log_n_bytes(tmp_path: Path) -> None:
    """The same with files: twice as many commits write a little more than twice as much."""
    write_dataset(tmp_path, [sample(0, "x" * 1000)], key="id", chunk_size=10_000)
    written, numbers = [0], itertools.count(1)
    for _ in range(64):
        with dataset_update(tmp_path) as update:
            for number in itertools.islice(numbers, 10):
                update.insert(f"k{number}", sample(number, "x" * 1000))
            update.commit()
        written.append(written[-1] + liveset.compact(tmp_path, keys=False).bytes_written)
    size = head(tmp_path).size
    assert written[64] <= 1.2 * size * math.log2(64)
    assert written[64] <= 2 * written[32] + 1.2 * size
    assert len(sizes(tmp_path)) <= 3
    assert [item["n"] for item in liveset.StreamingDataset(tmp_path)] == list(range(641))


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Makes a fresh store each time: five samples in a chunk and three in chunks of their own, one of the five is gone."""
    numbers, template = itertools.count(), tmp_path / "template"
    write_dataset(template, map(sample, range(5)), key="id", chunk_size=40)
    for number in range(5, 8):
        insert(template, number)
    insert(template, *range(8, 13))
    delete(template, 2)

    def make() -> Store:
        if request.param == "memory":
            return in_memory(template)
        return open_store(shutil.copytree(template, tmp_path / str(next(numbers))))

    return make


KEPT = {f"k{number}": sample(number) for number in range(13) if number != 2}


def look(store: Store) -> dict[str, Any]:
    """Check all versions and the keys of the newest, by key, by position and as published; return its samples by key."""
    check_dataset(store)
    newest = open_snapshot(store)
    samples = samples_of(newest)
    keys = open_keys(newest)
    assert keys is not None
    assert len(keys) == len(samples)
    assert [key for number in range(len(newest.index.chunks)) for key in keys.keys_of(number)] == [item["id"] for item in samples]
    for position, item in enumerate(samples):
        place = keys.locate(item["id"])
        assert place is not None
        assert newest.starts[place[0]] + place[1] == position
        assert keys.key_at(*place) == item["id"]
    shards = [entry.name for entry in store.list("keys/shard-")]
    for key, position in old_keys(store.read, shards).items():
        assert samples[position]["id"] == key, "the old tool would take another sample"
    return {item["id"]: item for item in samples}


def run(store: Store, **options: Any) -> CompactReport:
    return compact_store(store, policy=AT_ONCE, **options)


def edit(store: Store, staged: Callable[[DatasetUpdate], object]) -> None:
    update = DatasetUpdate(store, policy=AT_ONCE)
    staged(update)
    update.commit()


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_at_any_call_changes_nothing_that_a_reader_sees(new_store: Callable[[], Store], when: Any) -> None:
    counting = FaultyStore(new_store())
    assert run(counting).version == 7
    assert counting.calls.count("write") >= 3
    assert "publish" in counting.calls
    for call in range(1, len(counting.calls) + 1):
        store = new_store()
        with pytest.raises(SimulatedCrash):
            run(FaultyStore(store, call, when), session="job")
        assert look(store) == KEPT, f"call {call} ({counting.calls[call - 1]}) {when}"
        report = run(store, session="job")
        assert report.version == 7
        assert report.key_tables_after == 1
        assert look(store) == KEPT
        assert len(old_keys(store.read, [entry.name for entry in store.list("keys/shard-")])) == len(KEPT)
        edit(store, lambda update: update.insert("k40", sample(40)))
        assert look(store) == {**KEPT, "k40": sample(40)}


class Full(WrappedStore):
    """Has no room for a file any more after some."""

    def __init__(self, store: Store, room: int) -> None:
        super().__init__(store)
        self.room = room

    def write(self, name: str, data: Any) -> None:
        self.room -= 1
        if self.room < 0:
            raise StorageError(f"no space left for {name}")
        super().write(name, data)


def test_a_compaction_that_fails_leaves_no_file(new_store: Callable[[], Store]) -> None:
    for room in itertools.count():
        store = new_store()
        before = {entry.name for entry in store.list("")}
        try:
            run(Full(store, room))
        except StorageError:
            assert {entry.name for entry in store.list("")} == before
        else:
            assert room >= 3
            break


@pytest.mark.parametrize("plan", ["".join(plan) for length in (1, 2, 3) for plan in itertools.product("aldrx", repeat=length)])
def test_lost_answers(tmp_path_factory: pytest.TempPathFactory, plan: str) -> None:
    path = tmp_path_factory.mktemp("lost")
    expected = grown(path)
    store = in_memory(path)
    lossy = LossyStore(store, plan + "x" * (4 - len(plan)))
    session = None
    try:
        run(lossy)
    except CommitUnknown as error:
        session = error.session
    if session is not None:
        lossy.deliver()
        assert run(lossy, session=session).version == 17
    lossy.deliver()
    assert look(store) == expected
    assert open_snapshot(store).version == 17


@pytest.mark.parametrize("level", LEVELS)
def test_a_damaged_chunk_is_not_copied(tmp_path: Path, level: str) -> None:
    grown(tmp_path, compression=LEVELS[level])
    name = head(tmp_path).chunks[7].filename
    data = bytearray((tmp_path / name).read_bytes())
    data[-2] ^= 1
    (tmp_path / name).write_bytes(data)
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(Corrupt, match=f"{name}.*Nothing was changed"):
        liveset.compact(tmp_path)
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == before


def test_what_is_asked_for_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound):
        liveset.compact(tmp_path / "nothing")
    grown(tmp_path)
    for small in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            liveset.compact(tmp_path, small=small)
    with pytest.raises(TypeError, match="small must be a number"):
        liveset.compact(tmp_path, small="half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="message"):
        liveset.compact(tmp_path, message=7)  # type: ignore[arg-type]
    assert head(tmp_path).version == 16


def test_a_session_is_done_once(tmp_path: Path) -> None:
    expected = grown(tmp_path)
    first = liveset.compact(tmp_path, session="nightly")
    insert(tmp_path, 20)
    insert(tmp_path, 21)
    assert liveset.compact(tmp_path, session="nightly").version == first.version
    assert head(tmp_path).version == first.version + 2  # type: ignore[operator]
    assert orphans(open_store(tmp_path)) == set()
    check(tmp_path, {**expected, "k20": sample(20), "k21": sample(21)})


def test_progress_counts_the_new_chunks(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(sample, range(7)), key="id", chunk_size=7)
    for number in range(7, 28):
        insert(tmp_path, number)
    told: list[tuple[int, int]] = []
    liveset.compact(tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# --- races ----------------------------------------------------------------------------------------------------------


def put(*numbers: int) -> Callable[[DatasetUpdate], None]:
    def staged(update: DatasetUpdate) -> None:
        for number in numbers:
            update[f"k{number}"] = sample(number, "theirs")

    return staged


def drop(*numbers: int) -> Callable[[DatasetUpdate], None]:
    def staged(update: DatasetUpdate) -> None:
        for number in numbers:
            del update[f"k{number}"]

    return staged


def add(*numbers: int) -> Callable[[DatasetUpdate], None]:
    def staged(update: DatasetUpdate) -> None:
        for number in numbers:
            update.insert(f"k{number}", sample(number, "theirs"))

    return staged


def patched(*numbers: int) -> Callable[[DatasetUpdate], None]:
    def staged(update: DatasetUpdate) -> None:
        for number in numbers:
            update.patch(f"k{number}", n=-number)

    return staged


def together(*edits: Callable[[DatasetUpdate], None]) -> Callable[[DatasetUpdate], None]:
    def staged(update: DatasetUpdate) -> None:
        for each in edits:
            each(update)

    return staged


def test_samples_that_are_added_meanwhile_cost_nothing(new_store: Callable[[], Store]) -> None:
    store = new_store()
    rival = Rival(store, *(lambda turn=turn: edit(store, add(40 + turn)) for turn in range(2)))
    names: list[str] = []
    write = rival.write
    rival.write = lambda name, data: (names.append(name), write(name, data))[1]  # type: ignore[method-assign,func-returns-value]
    report = run(rival)
    assert (report.chunks_before, report.chunks_after) == (7, 3)
    assert report.key_tables_after <= 3
    assert len([name for name in names if name.startswith("chunk-")]) == 1
    assert look(store) == {**KEPT, "k40": sample(40, "theirs"), "k41": sample(41, "theirs")}
    assert orphans(store) == set()


def test_newer_tables_stay_on_top_and_the_base_is_written_once(tmp_path: Path) -> None:
    """Where the tables of the base are still there; a join of deltas has to be merged again."""
    write_dataset(tmp_path, map(sample, range(40)), key="id", chunk_size=40)
    insert(tmp_path, *range(40, 50))
    store = open_store(tmp_path)
    rival = Rival(store, lambda: edit(store, add(50)))
    assert run(rival, small=0).key_tables_after == 2
    assert rival.writes == 1
    assert list(look(store)) == [f"k{number}" for number in range(51)]
    insert(tmp_path, 51)
    rival = Rival(store, lambda: edit(store, add(52, 53, 54)))
    assert run(rival, small=0).key_tables_after == 1
    assert rival.writes == 2
    assert list(look(store)) == [f"k{number}" for number in range(55)]
    assert orphans(store) == set()


@pytest.mark.parametrize(("theirs", "expected"), [(put(6), {"k6": sample(6, "theirs")}), (drop(6), {"k6": None}), (drop(0, 12), {})])
def test_what_is_touched_meanwhile_is_left_out(new_store: Callable[[], Store], theirs: Any, expected: dict[str, Any]) -> None:
    store = new_store()
    recorded = {**KEPT, **expected} if expected else {key: value for key, value in KEPT.items() if key not in ("k0", "k12")}
    rival = Rival(store, lambda: edit(store, theirs))
    report = run(rival)
    assert report.version == 8
    assert report.chunks_after < report.chunks_before
    assert look(store) == {key: value for key, value in recorded.items() if value is not None}
    assert orphans(store) == set()
    assert run(store).chunks_after == 1
    assert look(store) == {key: value for key, value in recorded.items() if value is not None}


def test_a_run_is_cut_where_somebody_touched_it(tmp_path: Path) -> None:
    grown(tmp_path)
    store = open_store(tmp_path)
    assert run(Rival(store, lambda: edit(store, put(12)))).chunks_after == 3
    assert sizes(tmp_path) == [12, 1, 7]
    assert look(store) == {f"k{number}": sample(number, "theirs" if number == 12 else "") for number in range(20)}


def test_two_compactions(new_store: Callable[[], Store]) -> None:
    store = new_store()
    reports: list[CompactReport] = []
    mine = run(Rival(store, lambda: reports.append(run(store))))
    assert (mine.version, mine.bytes_written, mine.chunks_before, mine.chunks_after) == (None, 0, 1, 1)
    assert reports[0].version == 7
    assert look(store) == KEPT
    assert orphans(store) == set()


def test_keys_that_are_made_anew_meanwhile(tmp_path: Path) -> None:
    grown(tmp_path)
    store = open_store(tmp_path)
    rival = Rival(store, lambda: liveset.build_keys_index(tmp_path, "n", overwrite=True, verbose=False))
    assert run(rival).chunks_after == 1
    dataset = liveset.StreamingDataset(tmp_path)
    assert [dataset.get_by_key(number) for number in range(20)] == [sample(number) for number in range(20)]
    assert len(published(tmp_path)) == 20
    assert orphans(store) == set()


def test_a_dataset_that_is_replaced_meanwhile_is_left_alone(tmp_path: Path) -> None:
    grown(tmp_path)
    store = open_store(tmp_path)
    report = run(Rival(store, lambda: write_dataset(tmp_path, [sample(3)], key="id")))
    assert (report.version, report.bytes_written) == (None, 0)
    check(tmp_path, {"k3": sample(3)})
    assert orphans(store) == set()


def test_a_vacuum_meanwhile_is_in_nobodys_way(tmp_path: Path) -> None:
    """It may have deleted what was written for the compaction; then there is none."""
    expected = grown(tmp_path)
    store = open_store(tmp_path)
    report = run(Rival(store, lambda: liveset.vacuum(tmp_path, keep=0, grace=timedelta(0))))
    assert report.version is None
    check(tmp_path, expected)
    report = run(Rival(store, lambda: liveset.vacuum(tmp_path, keep=0)))
    check(tmp_path, expected)
    assert unneeded_files(store) == set() or report.version is not None


def test_what_is_purged_meanwhile_is_in_no_file(tmp_path: Path) -> None:
    expected = grown(tmp_path)
    store = open_store(tmp_path)
    run(Rival(store, lambda: liveset.purge(tmp_path, ["k12"])))
    del expected["k12"]
    check(tmp_path, expected)
    run(store)
    check(tmp_path, expected)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or not any(word in file.read_bytes() for word in (b"number 12", b"k12")), file


@given(data=st.data())
@settings(max_examples=20)
def test_edits_between_the_attempts_of_a_compaction(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        level = data.draw(st.sampled_from(sorted(LEVELS)))
        write_dataset(path, map(sample, range(6)), key="id", chunk_size=8, compression=LEVELS[level])
        for first in range(6, 14, 2):
            insert(path, first, first + 1)
        insert(path, 14)
        store = in_memory(path)
        state = [{f"k{number}": sample(number) for number in range(15)}]

        def theirs() -> None:
            for _ in range(data.draw(st.integers(1, 3))):
                plain = Plain(state[0])
                update = DatasetUpdate(store, policy=AT_ONCE)
                for step in range(data.draw(st.integers(1, 3))):
                    play(update, plain, data.draw(st.sampled_from(["put", "insert", "upsert", "delete", "patch"])), step, data)
                update.commit()
                state[0] = plain.commit()

        for _ in range(data.draw(st.integers(1, 2))):
            acts = data.draw(st.integers(0, 5))
            report = run(Rival(store, *[theirs] * acts), small=1.0, keys=data.draw(st.booleans()))
            assert report.chunks_after == len(open_snapshot(store).index.chunks)
            assert list(look(store).items()) == list(state[0].items())
            assert orphans(store) == set()


MINE: dict[str, tuple[Callable[[DatasetUpdate], None], dict[str, Any]]] = {
    "put": (put(3, 7, 15), {f"k{number}": sample(number, "theirs") for number in (3, 7, 15)}),
    "delete": (drop(3, 7, 15), {"k3": None, "k7": None, "k15": None}),
    "insert": (add(40), {"k40": sample(40, "theirs")}),
    "patch": (patched(3, 7, 15), {f"k{number}": sample(number) | {"n": -number} for number in (3, 7, 15)}),
    "all": (
        together(put(4), drop(8), add(40), patched(15)),
        {"k4": sample(4, "theirs"), "k8": None, "k40": sample(40, "theirs"), "k15": sample(15) | {"n": -15}},
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", MINE)
@pytest.mark.parametrize("first", ["update", "compaction"])
def test_an_update_and_a_compaction_at_once(tmp_path: Path, first: str, kind: str, level: str) -> None:
    """Both begin on one version; whoever comes second finds the chunks or the keys elsewhere."""
    expected: dict[str, Any] = grown(tmp_path, compression=LEVELS[level])
    staged, changes = MINE[kind]
    store = open_store(tmp_path)
    update = DatasetUpdate(store, policy=AT_ONCE)
    staged(update)
    if first == "update":
        run(Rival(store, update.commit))
    else:
        run(store)
        update.commit()
    expected |= changes
    check(tmp_path, {key: value for key, value in expected.items() if value is not None})
    assert orphans(store) == set()
    run(store)
    check(tmp_path, {key: value for key, value in expected.items() if value is not None})


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(put(7), put(7)), (put(7), drop(7)), (drop(7), patched(7)), (patched(7), put(7))])
def test_conflicts_are_found_across_a_compaction(tmp_path: Path, mine: Any, theirs: Any, before: bool) -> None:
    grown(tmp_path)
    store = open_store(tmp_path)
    update = DatasetUpdate(store, policy=AT_ONCE)
    mine(update)
    for act in (lambda: run(store), lambda: edit(store, theirs))[:: -1 if before else 1]:
        act()
    with pytest.raises(KeyConflict, match="'k7'"):
        update.commit()
    check_dataset(store)


def test_an_append_that_began_before_a_compaction(tmp_path: Path) -> None:
    expected = grown(tmp_path)

    def fn(number: int) -> dict[str, Any]:
        if number == 20:
            liveset.compact(tmp_path)
        return sample(number)

    liveset.optimize(fn, range(20, 24), tmp_path, num_workers=1, verbose=False, mode="append")
    check(tmp_path, {**expected, **{f"k{number}": sample(number) for number in range(20, 24)}})
    assert [entry.op for entry in liveset.history(tmp_path)][:2] == ["append", "compact"]
    assert sizes(tmp_path) == [20, 4]


def test_a_restored_version_from_before(tmp_path: Path) -> None:
    expected = grown(tmp_path)
    version = head(tmp_path).version
    liveset.compact(tmp_path)
    delete(tmp_path, 3)
    liveset.restore(tmp_path, version)
    check(tmp_path, expected)
    assert liveset.compact(tmp_path).chunks_after == 1
    check(tmp_path, expected)
