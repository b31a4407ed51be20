"""Splicing: replaced samples are the new ones, all others keep their stored bytes, in every layout of a chunk."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.edit import splice as module
from liveset.edit.patch import apply_patch, join_parts, leaf_parts, leaves_of
from liveset.edit.splice import changed_slots, fresh_name, open_stored, splice
from liveset.errors import Corrupt, SampleError, UnsupportedFormat
from liveset.format import codec
from liveset.format.arrow import ArrowChunk
from liveset.format.arrowsplice import check_rows, is_row, same_row
from liveset.format.chunk import open_chunk, pack_classic
from liveset.format.codec import Compression
from liveset.format.framed import FramedItems, pack_framed, pack_sample_compressed
from liveset.format.index import ChunkRecord
from liveset.format.schema import Decoder, Encoder, Schema

SAMPLE, BATCH, CHUNK = (Compression("zstd", level, 3) for level in ("sample", "batch", "chunk"))


def padded(items: Sequence[bytes], gap: int, tail: bytes) -> bytes:
    """A classic chunk as another program may write it: a gap behind the header, bytes behind the last item."""
    start = 4 + 4 * (len(items) + 1) + gap
    offsets = [start]
    for item in items:
        offsets.append(offsets[-1] + len(item))
    return struct.pack(f"<{len(items) + 2}I", len(items), *offsets) + b"\xaa" * gap + b"".join(items) + tail


PACKERS: dict[str, tuple[Compression | None, Callable[[Sequence[bytes]], bytes]]] = {
    "classic": (None, lambda items: b"".join(pack_classic(items))),
    "foreign": (None, lambda items: padded(items, 5, b"tail")),
    "sample": (SAMPLE, lambda items: b"".join(pack_sample_compressed(items, SAMPLE))),
    "sample-by-name-only": (SAMPLE, lambda items: b"".join(pack_classic(items))),
    "batch": (BATCH, lambda items: b"".join(pack_framed(items, BATCH))),
    "batch-by-name-only": (BATCH, lambda items: b"".join(pack_classic(items))),
    "framed-unsaid": (None, lambda items: b"".join(pack_framed(items, BATCH))),
    "chunk": (CHUNK, lambda items: codec.compress(b"".join(pack_classic(items)), CHUNK)),
    "chunk-inflated": (CHUNK, lambda items: b"".join(pack_classic(items))),
}


def plain_size(compression: Compression | None, data: bytes) -> int:
    return len(codec.decompress(data)) if compression is CHUNK and codec.is_frame(data) else len(data)


def record(data: bytes, count: int, compression: Compression | None = None) -> ChunkRecord:
    return ChunkRecord("chunk-0-0.bin", count, plain_size(compression, data))


def slots_of(data: bytes, count: int) -> list[bytes]:
    bounds = struct.unpack_from(f"<{count + 1}I", data, 4)
    return [data[a:b] for a, b in pairwise(bounds)]


# No item starts like a zstd frame: its first leaf would be 4 GB.
item_strategy = st.binary(min_size=1, max_size=40).filter(lambda item: not codec.is_frame(item))
items_strategy = st.lists(item_strategy, min_size=1, max_size=12)


@st.composite
def edits(draw: st.DrawFn, count: int, contents: st.SearchStrategy[Any]) -> tuple[dict[int, Any], frozenset[int], frozenset[int]]:
    """New contents, removed and erased slots: at least one slot is left."""
    fates = draw(st.lists(st.sampled_from(["kept", "kept", "replaced", "removed", "erased"]), min_size=count, max_size=count))
    if set(fates) == {"removed"}:
        fates[draw(st.integers(0, count - 1))] = "kept"
    at = {fate: [slot for slot in range(count) if fates[slot] == fate] for fate in ("replaced", "removed", "erased")}
    return {slot: draw(contents) for slot in at["replaced"]}, frozenset(at["removed"]), frozenset(at["erased"])


def model(old: Sequence[Any], changes: dict[int, Any], removed: frozenset[int], erased: frozenset[int], gone: Any) -> list[Any]:
    return [gone if slot in erased else changes.get(slot, content) for slot, content in enumerate(old) if slot not in removed]


@pytest.mark.parametrize("layout", PACKERS)
@given(st.data())
def test_replaced_items_are_new_and_all_others_as_they_were(layout: str, data: st.DataObject) -> None:
    compression, pack = PACKERS[layout]
    items = data.draw(items_strategy)
    changes = data.draw(st.dictionaries(st.integers(0, len(items) - 1), st.binary(min_size=1, max_size=60)))
    old = pack(items)
    spliced = splice(old, record(old, len(items), compression), compression, changes)
    new = b"".join(spliced.buffers)
    expected = [changes.get(slot, item) for slot, item in enumerate(items)]
    after = ChunkRecord("chunk-0-0-new.bin", len(items), spliced.size, head_check=spliced.head_check)
    assert plain_size(compression, new) == spliced.size
    stored = open_stored(new, after, compression)
    assert [stored.content(slot) for slot in range(len(items))] == expected
    before = open_stored(old, record(old, len(items), compression), compression)
    differing = [slot for slot in changes if changes[slot] != items[slot]]
    assert sorted(changed_slots(before, stored, range(len(items)))) == sorted(differing)


@pytest.mark.parametrize("layout", ["classic", "foreign", "sample"])
@given(st.data())
def test_untouched_slots_are_bit_identical(layout: str, data: st.DataObject) -> None:
    compression, pack = PACKERS[layout]
    items = data.draw(items_strategy)
    changes = data.draw(st.dictionaries(st.integers(0, len(items) - 1), st.binary(max_size=60)))
    old = pack(items)
    new = b"".join(splice(old, record(old, len(items)), compression, changes).buffers)
    for slot, (before, after) in enumerate(zip(slots_of(old, len(items)), slots_of(new, len(items)), strict=True)):
        assert slot in changes or before == after


@st.composite
def patched(draw: st.DrawFn, leaves: int) -> tuple[list[bytes], dict[int, bytes]]:
    """Items of so many leaves, some damaged or erased, and patches for some of the others."""
    leaf = st.sampled_from([b"", b"a", b"b", b"cc", b"dd"])
    items = [join_parts(draw(st.lists(leaf, min_size=leaves, max_size=leaves))) for _ in range(draw(st.integers(1, 9)))]
    patches = {}
    for slot, item in enumerate(items):
        fate = draw(st.sampled_from(["patched", "patched", "kept", "cut", "longer", "erased"]))
        if fate == "erased":
            items[slot] = b""
        elif fate != "kept":
            items[slot] = item[:-1] if fate == "cut" and len(item) > 4 * leaves else item + b"x" * (fate == "longer")
            patches[slot] = msgspec.msgpack.encode(draw(st.dictionaries(st.integers(0, leaves - 1), leaf, min_size=1)))
    return (items if any(items) else [b"kept", *items[1:]]), dict(draw(st.permutations(list(patches.items()))))


def test_a_leaf_without_bytes_is_patched_beside_one_with_bytes() -> None:
    items = [join_parts([b"", b""]), join_parts([b"", b"a"])]
    compression, pack = PACKERS["classic"]
    old = pack(items)
    stored = open_stored(old, record(old, 2, compression), compression)
    pieces, others = stored.pieces({1: msgspec.msgpack.encode({1: b"b", 0: b""})}, 2)  # the later leaf comes first
    assert not others
    assert b"".join(map(bytes, stored.splice({}, pieces=pieces).buffers)) == pack([items[0], join_parts([b"", b"b"])])


@pytest.mark.parametrize("layout", PACKERS)
@given(st.data())
def test_patches_are_pieces_where_sizes_stay(layout: str, data: st.DataObject) -> None:
    compression, pack = PACKERS[layout]
    leaves = data.draw(st.integers(1, 3))
    items, patches = data.draw(patched(leaves))
    free = sorted(set(range(len(items))) - patches.keys())
    contents = data.draw(st.dictionaries(st.sampled_from(free), st.sampled_from([b"new", b"longer"]))) if free else {}
    gone = frozenset(slot for slot in free if slot not in contents and data.draw(st.booleans()))
    removed = gone if len(gone) < len(items) else frozenset()
    old = pack(items) if all(items) or not layout.startswith(("batch", "framed")) else pack([item or b"?" for item in items])
    stored = open_stored(old, record(old, len(items), compression), compression)
    whole = {slot: apply_patch(stored.content(slot), patch, leaves) for slot, patch in patches.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", data.draw(st.integers(1, 9)))
        pieces, others = stored.pieces(patches, leaves)
    assert set(others) <= patches.keys()
    rest = {slot: whole[slot] for slot in others}
    expected = splice(old, record(old, len(items), compression), compression, {**contents, **whole}, removed)
    found = stored.splice({**contents, **rest}, removed, pieces=pieces)
    assert b"".join(map(bytes, found.buffers)) == b"".join(map(bytes, expected.buffers))
    assert (found.size, found.samples, found.head_check) == (expected.size, expected.samples, expected.head_check)
    changes = {**contents, **whole}
    assert stored.holds({**contents, **rest}, pieces) == all(stored.content(slot) == item for slot, item in changes.items())
    if layout == "classic":
        sizes = {slot: list(map(len, leaf_parts(items[slot], leaves))) for slot in patches}
        fits = {slot for slot in patches if len(items[slot]) == 4 * leaves + sum(struct.unpack_from(f"<{leaves}I", items[slot]))}
        same = {slot for slot in fits if all(len(part) == sizes[slot][n] for n, part in leaves_of(patches[slot]).items())}
        assert set(others) == patches.keys() - same


def test_erased_items_are_replaced_in_their_order() -> None:
    items = [b"a", b"", b"", b"b"]
    old = b"".join(pack_classic(items))
    new = b"".join(splice(old, record(old, 4), None, {3: b"3", 2: b"22", 1: b"1"}).buffers)
    assert slots_of(new, 4) == [b"a", b"1", b"22", b"3"]


def frames(data: bytes, count: int) -> list[bytes]:
    chunk = FramedItems(data, count)
    return [data[start : start + size] for start, size in zip(chunk._offsets.tolist(), chunk._packed.tolist(), strict=True)]


def test_untouched_frames_are_bit_identical() -> None:
    items = [bytes([i]) * 50 for i in range(20)]
    old = b"".join(pack_framed(items, BATCH))
    new = b"".join(splice(old, record(old, 20), BATCH, {4: b"longer than before" * 9, 19: b"x"}).buffers)
    before, after = frames(old, 20), frames(new, 20)
    assert [number for number in range(7) if before[number] == after[number]] == [0, 2, 3, 4, 5]


@given(st.data())
def test_frames_that_keep_their_items_are_copied(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 20))
    items = [bytes([i]) * 50 for i in range(count)]
    changes, removed, erased = data.draw(edits(count, st.binary(min_size=1, max_size=9)))
    old = b"".join(pack_framed(items, BATCH))
    marked = bytearray(old)
    for start in FramedItems(old, count)._offsets.tolist():
        marked[start + 4] |= 0x10  # a bit of the frame header that readers ignore, and that no new frame has
    spliced = splice(bytes(marked), record(old, count), BATCH, changes, removed, erased)
    new = b"".join(spliced.buffers)
    kept = [slot for slot in range(count) if slot not in removed]
    for number, frame in enumerate(frames(new, spliced.samples)):
        slots = kept[3 * number : 3 * number + 3]
        whole = slots[0] % 3 == 0 and slots == list(range(slots[0], min(slots[0] + 3, count)))
        untouched = not (set(slots) & (changes.keys() | erased))
        assert bool(frame[4] & 0x10) == (whole and untouched)


@pytest.mark.parametrize("layout", PACKERS)
@given(st.data())
def test_any_slots_are_replaced_removed_and_erased(layout: str, data: st.DataObject) -> None:
    compression, pack = PACKERS[layout]
    items = data.draw(items_strategy)
    changes, removed, erased = data.draw(edits(len(items), st.binary(min_size=1, max_size=60)))
    old = pack(items)
    spliced = splice(old, record(old, len(items), compression), compression, changes, removed, erased)
    new = b"".join(spliced.buffers)
    expected = model(items, changes, removed, erased, b"")
    assert plain_size(compression, new) == spliced.size
    assert spliced.samples == len(expected)
    if spliced.head_check is not None:
        assert spliced.head_check == codec.checksum(new[: 4 + 4 * (len(expected) + 1)])
    after = ChunkRecord("chunk-0-0-new.bin", spliced.samples, spliced.size, head_check=spliced.head_check)
    stored = open_stored(new, after, compression)
    assert [stored.content(slot) for slot in range(len(expected))] == expected
    # And again: what is erased already stays so.
    second = data.draw(edits(len(expected), st.binary(min_size=1, max_size=60)))
    spliced = stored.splice(*second)
    newer = b"".join(spliced.buffers)
    stored = open_stored(newer, ChunkRecord("f", spliced.samples, spliced.size, head_check=spliced.head_check), compression)
    assert [stored.content(slot) for slot in range(spliced.samples)] == model(expected, *second, b"")


@pytest.mark.parametrize("layout", ["classic", "foreign", "sample"])
@given(st.data())
def test_kept_items_are_bit_identical(layout: str, data: st.DataObject) -> None:
    compression, pack = PACKERS[layout]
    items = data.draw(items_strategy)
    changes, removed, erased = data.draw(edits(len(items), st.binary(max_size=60)))
    old = pack(items)
    spliced = splice(old, record(old, len(items)), compression, changes, removed, erased)
    after = iter(slots_of(b"".join(spliced.buffers), spliced.samples))
    for slot, before in enumerate(slots_of(old, len(items))):
        if slot not in removed:
            now = next(after)
            assert slot in changes or now == (b"" if slot in erased else before)


@pytest.mark.parametrize("layout", PACKERS)
@pytest.mark.parametrize(
    ("changes", "removed", "erased", "match"),
    [
        ({0: b"x"}, {0}, set(), "twice"),
        ({0: b"x"}, set(), {0}, "twice"),
        ({}, {1}, {1}, "twice"),
        ({3: b"x"}, set(), set(), "chunk of 3"),
        ({}, {-1}, set(), "chunk of 3"),
        ({}, set(), {7}, "chunk of 3"),
        ({}, {0, 1, 2}, set(), "drop the chunk"),
    ],
)
def test_slots_that_make_no_sense(layout: str, changes: dict[int, bytes], removed: set[int], erased: set[int], match: str) -> None:
    compression, pack = PACKERS[layout]
    old = pack([b"a", b"b", b"c"])
    with pytest.raises(ValueError, match=match):
        splice(old, record(old, 3, compression), compression, changes, removed, erased)


@pytest.mark.parametrize("layout", PACKERS)
@given(st.data(), st.booleans(), st.sampled_from([None, ["n"], []]))
def test_erased_samples_are_never_read(layout: str, data: st.DataObject, strict: bool, fields: list[str] | None) -> None:
    """One by one, as a run and from the middle of a run: the others are right, and the error names the erased one."""
    compression, pack = PACKERS[layout]
    samples = [{"n": i, "t": "x" * (i % 4)} for i in range(data.draw(st.integers(1, 10)))]
    schema = Schema.of(samples[0])
    encoder = Encoder(schema)
    old = pack([encoder.encode(sample) for sample in samples])
    erased = data.draw(st.frozensets(st.integers(0, len(samples) - 1)))
    spliced = splice(old, record(old, len(samples), compression), compression, {}, erased=erased)
    after = ChunkRecord("f", len(samples), spliced.size, head_check=spliced.head_check)
    chunk = open_chunk(b"".join(spliced.buffers), after, Decoder(schema, fields=fields, strict=strict), compression)
    wanted = [sample if fields is None else {name: sample[name] for name in fields} for sample in samples]
    for slot, sample in enumerate(wanted):
        run = chunk.iterate(slot, len(samples))
        for later in range(slot, len(samples)):
            if later in erased:
                with pytest.raises(Corrupt, match=f"sample {later} of f has no bytes"):
                    next(run)
                break
            assert next(run) == wanted[later]
        if slot not in erased:
            assert chunk.read(slot) == sample
            continue
        with pytest.raises(Corrupt, match=f"sample {slot} of f has no bytes") as caught:
            chunk.read(slot)
        assert caught.value.file == "f"


@pytest.mark.parametrize("layout", ["classic", "batch"])
def test_a_damaged_sample_behind_an_erased_one_is_named(layout: str) -> None:
    compression, pack = PACKERS[layout]
    schema = Schema.of({"n": 1})
    encoder = Encoder(schema)
    old = pack([encoder.encode({"n": 1}), encoder.encode({"n": 2}), b"bad", encoder.encode({"n": 3})])
    spliced = splice(old, record(old, 4, compression), compression, {}, erased={1})
    chunk = open_chunk(b"".join(spliced.buffers), ChunkRecord("f", 4, spliced.size), Decoder(schema), compression)
    with pytest.raises(Corrupt, match="sample 2 of f, field 'n' is damaged"):
        list(chunk.iterate(2, 4))
    with pytest.raises(Corrupt, match="sample 1 of f has no bytes"):
        list(chunk.iterate(0, 4))


@pytest.mark.parametrize("sample", ["", b"", [], None, {"a": ""}, np.empty(0, "u1"), (b"", ""), 0, True], ids=repr)
def test_no_sample_with_a_leaf_is_stored_without_bytes(sample: Any) -> None:
    schema = Schema.of(sample)
    assert len(Encoder(schema).encode(sample)) >= 4 * len(schema.formats) or not schema.formats


def test_a_frame_of_erased_items_is_kept() -> None:
    old = b"".join(pack_framed([bytes([i]) for i in range(9)], BATCH))
    new = b"".join(splice(old, record(old, 9), BATCH, {}, erased={3, 4, 5}).buffers)
    assert [FramedItems(new, 9).item(slot) for slot in range(9)] == [b"" if 3 <= i < 6 else bytes([i]) for i in range(9)]
    with pytest.raises(SampleError, match="without any content"):
        splice(old, record(old, 9), BATCH, {3: b"", 4: b"", 5: b""})


def test_whole_frames_are_removed_without_inflating(monkeypatch: pytest.MonkeyPatch) -> None:
    old = b"".join(pack_framed([bytes([i]) * 50 for i in range(10)], BATCH))
    monkeypatch.setattr(codec, "decompress", None)
    new = b"".join(splice(old, record(old, 10), BATCH, {}, removed={3, 4, 5}).buffers)
    assert frames(new, 7) == [frame for number, frame in enumerate(frames(old, 10)) if number != 1]


def test_items_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the touched frames is inflated, and nothing is ever turned into samples."""
    items = [bytes([i]) * 50 for i in range(21)]
    inflated: list[int] = []
    inflate = codec.decompress

    def spy(data: Any, **options: Any) -> bytes:
        inflated.append(1)
        return inflate(data, **options)

    old = b"".join(pack_framed(items, BATCH))
    monkeypatch.setattr(codec, "decompress", spy)
    splice(old, record(old, 21), BATCH, {4: b"x", 5: b"y", 20: b"z"})
    assert len(inflated) == 2
    inflated.clear()
    old = b"".join(pack_sample_compressed(items, SAMPLE))
    splice(old, record(old, 21), SAMPLE, {4: b"x"})
    assert inflated == []


@pytest.mark.parametrize("layout", ["classic", "sample", "batch", "chunk"])
def test_items_that_end_like_an_arrow_file(layout: str) -> None:
    compression, pack = PACKERS[layout]
    end = struct.pack("<I", 9) + b"LDARW01\0"
    old = pack([b"a", b"b" + end])
    stored = open_stored(old, record(old, 2, compression), compression)
    assert stored.content(1) == b"b" + end
    for changes in ({0: b"c"}, {1: b"d" + end}, {0: end, 1: end}, {1: b"other"}):
        spliced = stored.splice(changes)
        new = b"".join(spliced.buffers)
        assert plain_size(compression, new) == spliced.size
        assert not new.endswith(end), "the old tool would look for Arrow data"
        again = open_stored(new, ChunkRecord("f", 2, spliced.size), compression)
        assert [again.content(0), again.content(1)] == [changes.get(0, b"a"), changes.get(1, b"b" + end)]


def test_a_large_chunk_is_not_copied_in_memory() -> None:
    items = [bytes(100_000)] * 50
    old = b"".join(pack_classic(items))
    buffers = splice(old, record(old, 50), None, {20: b"x"}).buffers
    assert len(buffers) == 4
    assert all(isinstance(part, memoryview) for part in (buffers[1], buffers[3]))


def test_runs_of_kept_items_are_not_copied() -> None:
    items = [bytes([i % 256]) * 1000 for i in range(1000)]
    old = b"".join(pack_classic(items))
    removed = {*range(100, 200), 500, *range(990, 1000)}
    spliced = splice(old, record(old, 1000), None, {}, removed)
    _, *runs = (memoryview(part) for part in spliced.buffers)
    assert [len(run) for run in runs] == [100_000, 300_000, 489_000, 0]
    assert all(run.obj is old for run in runs)


def test_four_gigabytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNK_SIZE", 100)
    old = b"".join(pack_classic([b"a" * 30, b"b" * 30]))
    splice(old, record(old, 2), None, {1: b"c" * 54})
    with pytest.raises(SampleError, match="4 GiB"):
        splice(old, record(old, 2), None, {1: b"c" * 55})


def test_a_damaged_file_is_refused() -> None:
    old = b"".join(pack_classic([b"a" * 30, b"b" * 30]))
    with pytest.raises(Corrupt):
        splice(old[:20], ChunkRecord("f", 2, 20), None, {1: b"x"})
    with pytest.raises(Corrupt):
        splice(old, ChunkRecord("f", 3, len(old)), None, {1: b"x"})


@pytest.mark.parametrize(
    ("old", "compression", "new"),
    [
        ("chunk-3-17.bin", None, "chunk-3-17-00ff.bin"),
        ("chunk-3-17-0123456789abcdef.bin", None, "chunk-3-17-00ff.bin"),
        ("chunk-0-1.zstd.bin", CHUNK, "chunk-0-1-00ff.zstd.bin"),
        ("chunk-0-1.bin", BATCH, "chunk-0-1-00ff.bin"),
        ("part/chunk-0-1.bin", None, "chunk-0-1-00ff.bin"),
        ("chunk-0-2-u17.bin", None, "chunk-0-2-00ff.bin"),
        ("anything", None, "chunk-0-9-00ff.bin"),
    ],
)
def test_new_names_keep_rank_and_number(old: str, compression: Compression | None, new: str) -> None:
    assert fresh_name(old, 9, "00ff", compression) == new


# --- Arrow ----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {
        "id": f"r{i}",
        "n": i if i % 3 else None,
        "f": i / 2,
        "b": i % 2 == 0,
        "raw": bytes([i % 256, 0]),
        "l": [[i], []],
        "s": {"x": i, "y": [None, "é"]},
        "none": None,
        "empty": [],
    }
    for i in range(600)
]
FORMS = [(stream, packed, size) for stream in (False, True) for packed in (None, "zstd", "lz4") for size in (256, 100)]
NEW: dict[str, Any] = {"id": "new", "n": None, "f": -0.5, "b": True, "raw": b"", "l": [], "s": {"x": 7, "y": []}, "none": None, "empty": []}


def pack_rows(rows: list[dict[str, Any]], *, stream: bool = False, packed: str | None = None, size: int = 256, schema: Any = None) -> bytes:
    """A chunk file as the old tool lays it out."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    table = pa.Table.from_pylist(rows, schema=schema)
    sink = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as out:
        out.write_table(table, max_chunksize=size)
    blob, start = sink.getvalue(), 4 + 4 * (len(rows) + 1)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *[start] * (len(rows) + 1)) + blob + struct.pack("<I", len(blob)) + b"LDARW01\0"


def spliced_rows(
    old: bytes, count: int, changes: dict[int, Any], removed: frozenset[int] = frozenset(), erased: frozenset[int] = frozenset()
) -> bytes:
    spliced = splice(old, record(old, count), None, changes, removed, erased)
    new = b"".join(spliced.buffers)
    count -= len(removed)
    assert (len(new), count) == (spliced.size, spliced.samples)
    assert spliced.head_check == codec.checksum(new[: 4 + 4 * (count + 1)])
    return new


@pytest.mark.parametrize(("stream", "packed", "size"), FORMS, ids=str)
def test_arrow_rows_are_replaced(stream: bool, packed: str | None, size: int) -> None:
    old = pack_rows(ROWS, stream=stream, packed=packed, size=size)
    changes = {0: NEW, 255: {**NEW, "id": "255"}, 256: NEW, 599: {**NEW, "n": 2**60}}
    new = spliced_rows(old, 600, changes)
    expected = [changes.get(slot, row) for slot, row in enumerate(ROWS)]
    assert list(ArrowChunk(new, 600).iterate(0, 600)) == expected
    assert abs(len(new) - len(old)) < 3000, "the compression was kept"
    again = spliced_rows(new, 600, {slot: ROWS[slot] for slot in changes})
    assert list(ArrowChunk(again, 600).iterate(0, 600)) == ROWS
    stored = open_stored(old, record(old, 600), None), open_stored(new, record(new, 600), None)
    assert changed_slots(*stored, range(600)) == sorted(changes)


def messages(data: bytes, count: int) -> list[bytes]:
    """The record batches of an Arrow file."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(bytes(ArrowChunk(data, count)._blob)[8:]))
    return [message.serialize().to_pybytes() for message in reader if message.type == "record batch"]


@pytest.mark.parametrize("packed", [None, "zstd"])
def test_untouched_arrow_batches_are_bit_identical(packed: str | None) -> None:
    old = pack_rows(ROWS, packed=packed)
    new = spliced_rows(old, 600, {300: {**NEW, "id": "a much longer id " * 99}})
    before, after = messages(old, 600), messages(new, 600)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


NULLS = dict.fromkeys(NEW)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("packed", [None, "zstd", "lz4"])
@given(st.data())
def test_any_arrow_rows_are_replaced_removed_and_erased(stream: bool, packed: str | None, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    rows = ROWS[:count]
    old = pack_rows(rows, stream=stream, packed=packed, size=data.draw(st.integers(3, 10)))
    edit = data.draw(edits(count, st.sampled_from([NEW, {**NEW, "id": "other", "n": 5}, {**NEW, "none": 1}])))
    new = spliced_rows(old, count, *edit)
    expected = model(rows, *edit, NULLS)
    chunk = ArrowChunk(new, len(expected))
    assert list(chunk.iterate(0, len(expected))) == expected
    assert [chunk.read(slot) for slot in range(len(expected))] == expected
    assert len({b - a for a, b in pairwise(chunk._starts[:-1])}) <= 1, "the old tool needs batches of one size"
    second = data.draw(edits(len(expected), st.just({**NEW, "none": None})))
    newest = spliced_rows(new, len(expected), *second)
    expected = model(expected, *second, NULLS)
    assert list(ArrowChunk(newest, len(expected)).iterate(0, len(expected))) == expected


@given(st.data())
def test_arrow_batches_that_keep_their_rows_are_copied(data: st.DataObject) -> None:
    """Written batch by batch, so that none holds bytes of the next; the marks are flags that a new batch does not get."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    count = data.draw(st.integers(1, 20))
    batches = [pa.RecordBatch.from_pylist([{"t": str(i)} for i in range(first, min(first + 4, count))]) for first in range(0, count, 4)]
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for number, batch in enumerate(batches):
            writer.write_batch(batch, custom_metadata={"mark": str(number)})
    blob, head = sink.getvalue(), 4 + 4 * (count + 1)
    old = struct.pack(f"<{count + 2}I", count, *[head] * (count + 1)) + blob + struct.pack("<I", len(blob)) + b"LDARW01\0"
    changes, removed, erased = data.draw(edits(count, st.just({"t": "new"})))
    new = spliced_rows(old, count, changes, removed, erased)
    kept = [slot for slot in range(count) if slot not in removed]
    reader = pa.ipc.open_file(pa.py_buffer(ArrowChunk(new, len(kept))._blob))
    for number in range(reader.num_record_batches):
        _, metadata = reader.get_batch_with_custom_metadata(number)
        slots = kept[4 * number : 4 * number + 4]
        whole = slots == list(range(slots[0] // 4 * 4, min(slots[0] // 4 * 4 + 4, count)))
        copied = whole and not (set(slots) & (changes.keys() | erased))
        assert (metadata is not None and metadata[b"mark"] == str(slots[0] // 4).encode()) == copied


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["removed", "erased"])
@pytest.mark.parametrize("slot", [0, 4, 5, 14, 15, 18, 19])
def test_lost_arrow_rows_leave_no_bytes(slot: int, how: str, stream: bool) -> None:
    """Arrow pads a batch that is a slice of a table with what follows in memory: here the next text, be it some batches away."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    schema = pa.schema([("t", pa.string()), ("i", pa.int32()), ("l", pa.list_(pa.string())), ("s", pa.struct([("b", pa.binary())]))])
    secret, number = "geheim", 0x5EC2E75E
    rows: list[dict[str, Any]] = [{"t": "", "i": 1, "l": [], "s": {"b": b""}} for _ in range(20)]
    rows[0] = {"t": "a", "i": 1, "l": ["a"], "s": {"b": b"a"}}
    rows[slot] = {"t": secret, "i": number, "l": [secret], "s": {"b": secret.encode()}}
    old = pack_rows(rows, stream=stream, size=5, schema=schema)
    new = spliced_rows(old, 20, {}, **{how: frozenset([slot])})
    for trace in (secret.encode(), secret.encode()[:2], struct.pack("<I", number)):
        assert trace in old
        assert trace not in new
    others = [row for at, row in enumerate(rows) if at != slot]
    read = list(ArrowChunk(new, 20 - (how == "removed")).iterate(0, 20))
    assert read == (others if how == "removed" else [*rows[:slot], dict.fromkeys(rows[0]), *rows[slot + 1 :]])
    if not stream:
        again = spliced_rows(new, len(read), {len(read) - 1: rows[0]})
        assert messages(again, len(read))[:3] == messages(new, len(read))[:3]


def test_rows_with_views_are_refused() -> None:
    """Their texts lie in buffers that all rows share."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    schema = pa.schema([("l", pa.list_(pa.struct([("v", pa.string_view())])))])
    old = pack_rows([{"l": [{"v": "a"}]}, {"l": []}], schema=schema)
    with pytest.raises(UnsupportedFormat, match="view"):
        splice(old, record(old, 2), None, {}, removed={0})


@given(st.dictionaries(st.integers(0, 599), st.tuples(st.text(max_size=5), st.none() | st.integers(-9, 9), st.floats())))
def test_any_rows_of_an_arrow_chunk(changes: dict[int, tuple[str, int | None, float]]) -> None:
    old = pack_rows(ROWS, packed="zstd")
    new = {slot: {**ROWS[slot], "id": name, "n": n, "f": f} for slot, (name, n, f) in changes.items()}
    data = spliced_rows(old, 600, new)
    assert all(same_row(new.get(slot, ROWS[slot]), row) for slot, row in enumerate(ArrowChunk(data, 600).iterate(0, 600)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [5, "text", 1.5, True, b"x", [1, None], {"a": 1, "b": [None]}])
def test_a_column_of_nulls_takes_the_type_of_the_first_value(value: Any, stream: bool) -> None:
    old = pack_rows(ROWS, stream=stream, packed="zstd")
    changes = {7: {**ROWS[7], "none": value}, 300: {**ROWS[300], "empty": ["a", None]}}
    new = spliced_rows(old, 600, changes)
    assert list(ArrowChunk(new, 600).iterate(0, 600)) == [changes.get(slot, row) for slot, row in enumerate(ROWS)]


def test_nested_nulls_take_a_type_too() -> None:
    rows: list[dict[str, Any]] = [{"s": {"a": i, "b": None}, "l": [{"c": None}]} for i in range(3)]
    changes: dict[int, Any] = {1: {"s": {"a": 1, "b": "x"}, "l": [{"c": 1.5}, {"c": None}]}}
    new = spliced_rows(pack_rows(rows), 3, changes)
    assert list(ArrowChunk(new, 3).iterate(0, 3)) == [rows[0], changes[1], rows[2]]


def test_maps_of_arrow_chunks() -> None:
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    schema = pa.schema([("m", pa.map_(pa.string(), pa.int64()))])
    rows = [{"m": [("a", 1)]}, {"m": [("b", 2), ("c", 3)]}]
    new = spliced_rows(pack_rows(rows, schema=schema), 2, {0: {"m": {"z": 9}}})
    assert list(ArrowChunk(new, 2).iterate(0, 2)) == [{"m": {"z": 9}}, {"m": {"b": 2, "c": 3}}]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": "text"}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"f": 1}, "f"),
        ({"id": b"bytes"}, "id"),
        ({"raw": "text"}, "raw"),
        ({"b": 0}, "b"),
        ({"n": 2**63}, "n"),
        ({"s": {"x": 1}}, "s"),
        ({"s": {"x": 1, "y": [], "z": 1}}, "s"),
        ({"l": [["x"]]}, "l"),
        ({"extra": 1}, "extra"),
        ({"none": [1, "x"]}, "none"),
    ],
    ids=str,
)
def test_rows_that_would_not_read_back_equal_are_refused(change: dict[str, Any], field: str) -> None:
    old = pack_rows(ROWS)
    row = {**ROWS[1], **change}
    for act in (lambda: splice(old, record(old, 600), None, {1: row}), lambda: check_rows(old, [row])):
        with pytest.raises(SampleError, match=field) as caught:
            act()
        assert caught.value.field == field


def test_a_row_without_a_column_is_refused() -> None:
    old = pack_rows(ROWS)
    with pytest.raises(SampleError, match="lacks"):
        splice(old, record(old, 600), None, {1: {name: value for name, value in ROWS[1].items() if name != "f"}})


def test_dictionary_columns_are_refused() -> None:
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    old = pack_rows([{"d": "a"}, {"d": "b"}], schema=pa.schema([("d", pa.dictionary(pa.int8(), pa.string()))]))
    with pytest.raises(UnsupportedFormat, match="dictionary"):
        splice(old, record(old, 2), None, {0: {"d": "c"}})


@given(st.data())
def test_damaged_arrow_data_never_gives_a_wrong_chunk(data: st.DataObject) -> None:
    """Whatever byte is changed: an error, or a chunk whose other rows are what the damaged file itself gives."""
    old = bytearray(pack_rows(ROWS[:40], packed="zstd"))
    at = data.draw(st.integers(4 + 4 * 41, len(old) - 9))
    old[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = bytes(old)
    try:
        new = spliced_rows(damaged, 40, {3: ROWS[3]})
    except (Corrupt, SampleError, UnsupportedFormat):
        return
    try:
        before = list(ArrowChunk(damaged, 40).iterate(0, 40))
        after = list(ArrowChunk(new, 40).iterate(0, 40))
    except Corrupt:
        return
    assert all(same_row(a, b) for slot, (a, b) in enumerate(zip(before, after, strict=True)) if slot != 3)


def test_what_counts_as_a_row() -> None:
    assert is_row({"a": [None, 1, 1.5, "x", b"y", True, {"b": []}]})
    assert not is_row({"a": (1,)})
    assert not is_row({1: 2})
    assert not is_row({"a": {1}})
    assert not same_row({"a": 0.0}, {"a": -0.0})
    assert same_row({"a": float("nan")}, {"a": float("nan")})
    assert not same_row([1], [True])
