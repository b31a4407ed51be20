from __future__ import annotations

import struct
import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, SampleError
from liveset.format import codec
from liveset.format.codec import Compression
from liveset.format.framed import FramedItems, inflate_file, is_framed, pack_framed, pack_sample_compressed, sample_item

PAIRS = Compression("zstd", "batch", 2)


def item(number: int) -> bytes:
    return struct.pack("<Iq", 8, number)


def test_vector() -> None:
    data = b"".join(pack_framed([item(10), item(20), item(30)], PAIRS))
    head = bytes.fromhex(
        "4c44465a30310000 0100 0000 03000000 02000000 02000000  00000000 0c000000 18000000 24000000"
        "00000000 02000000 5800000000000000 21000000 18000000  02000000 01000000 7900000000000000 15000000 0c000000"
    )
    assert len(data) == 142
    assert data.startswith(head)
    assert data[0x58:].startswith(codec.ZSTD_MAGIC)
    assert data[0x79:].startswith(codec.ZSTD_MAGIC)


items_lists = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)


@given(items_lists, st.integers(1, 8), st.data())
def test_items_round_trip(items: list[bytes], width: int, source: st.DataObject) -> None:
    data = b"".join(pack_framed(items, Compression("zstd", "batch", width)))
    assert is_framed(data)
    framed = FramedItems(data, len(items), "f")
    slots = source.draw(st.permutations(range(len(items))))
    assert {slot: framed.item(slot) for slot in slots} == dict(enumerate(items))
    assert framed.frames == -(-len(items) // width)
    read = []
    for number in range(framed.frames):
        plain, bounds = framed.frame(number)
        assert bounds[0] == 0
        assert bounds[-1] == len(plain)
        read += [plain[a:b] for a, b in pairwise(bounds)]
    assert read == items


def test_empty_items_among_others() -> None:
    items = [b"", b"a", b"", b"b"]
    framed = FramedItems(b"".join(pack_framed(items, PAIRS)), 4)
    assert [framed.item(i) for i in range(4)] == items
    with pytest.raises(SampleError, match="without any content"):
        pack_framed([b"", b"", b"a"], PAIRS)
    assert b"".join(pack_framed([b"", b""], PAIRS)) == struct.pack("<4I", 2, 16, 16, 16)  # a classic chunk
    with pytest.raises(ValueError, match="at least one"):
        pack_framed([], PAIRS)


def test_bounds_of_the_api() -> None:
    framed = FramedItems(b"".join(pack_framed([b"a"], PAIRS)), 1)
    for call in (framed.item, framed.frame):
        for number in (-1, 1):
            with pytest.raises(IndexError):
                call(number)


ITEMS = [item(i) for i in range(5)]
GOOD = b"".join(pack_framed(ITEMS, PAIRS))
TABLE = 24 + 4 * 6  # where the frame table starts: 3 entries of 24 bytes


def patch(at: int, code: str, value: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(code, data, at, value)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        GOOD[:10],
        GOOD[:23],
        GOOD[:60],
        GOOD[: TABLE + 71],
        GOOD[:-1],
        patch(0, "<B", 0),
        patch(8, "<H", 2),
        patch(10, "<H", 1),
        patch(12, "<I", 4),
        patch(16, "<I", 0),
        patch(16, "<I", 3),
        patch(20, "<I", 2),
        patch(24, "<I", 1),
        patch(28, "<I", 25),
        patch(32, "<I", 0xFFFFFFFF),
        patch(44, "<I", 59),
        patch(TABLE, "<I", 1),
        patch(TABLE + 4, "<I", 1),
        patch(TABLE + 8, "<Q", 0),
        patch(TABLE + 8, "<Q", 1 << 63),
        patch(TABLE + 8, "<Q", (1 << 64) - 1),
        patch(TABLE + 16, "<I", 0),
        patch(TABLE + 16, "<I", 1000),
        patch(TABLE + 20, "<I", 0),
        patch(TABLE + 20, "<I", 25),
        patch(TABLE + 24 + 8, "<Q", TABLE + 72),
        patch(TABLE + 48 + 16, "<I", 0xFFFFFFFF),
    ],
    ids=range(27),
)
def test_damaged_header_or_tables(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"chunk-0-0\.bin") as caught:
        FramedItems(data, 5, "chunk-0-0.bin")
    assert caught.value.file == "chunk-0-0.bin"


def test_another_count_than_the_index_says() -> None:
    for count in (0, 4, 6):
        with pytest.raises(Corrupt, match="the index says"):
            FramedItems(GOOD, count, "f")


def test_damaged_frame_is_named() -> None:
    data = bytearray(GOOD)
    data[-18] ^= 0xFF  # in the header of the last frame
    framed = FramedItems(bytes(data), 5, "chunk-0-0.bin")
    assert framed.item(0) == ITEMS[0]
    for _ in range(2):  # a failure must not be kept as a result
        with pytest.raises(Corrupt, match=r"chunk-0-0\.bin"):
            framed.item(4)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_any_byte_changed_never_gives_an_item_of_another_length(at: int, value: int) -> None:
    data = bytearray(GOOD)
    data[at] = value
    try:
        framed = FramedItems(bytes(data), 5, "f")
        items = [framed.item(i) for i in range(5)]
    except Corrupt:
        return
    assert [len(i) for i in items] == [len(i) for i in ITEMS] or 24 < at < TABLE


def test_few_frames_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = codec.decompress

    def counted(*arguments: Any, **options: Any) -> bytes:
        calls.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(codec, "decompress", counted)
    items = [item(i) for i in range(20)]
    framed = FramedItems(b"".join(pack_framed(items, PAIRS)), 20)
    for slot in range(20):
        assert framed.item(slot) == items[slot]
    assert len(calls) == 10
    framed.item(19)
    assert len(calls) == 10
    framed.item(0)
    assert len(calls) == 11


def test_threads_read_at_once() -> None:
    items = [struct.pack("<Q", i) * 50 for i in range(200)]
    framed = FramedItems(b"".join(pack_framed(items, Compression("zstd", "batch", 7))), 200)
    failures: list[int] = []

    def work(start: int) -> None:
        for i in range(400):
            slot = (start + i * 37) % 200
            if framed.item(slot) != items[slot]:
                failures.append(slot)

    threads = [threading.Thread(target=work, args=(i * 50,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_compressed_samples_round_trip(items: list[bytes]) -> None:
    data = b"".join(pack_sample_compressed(items, Compression("zstd", "sample")))
    count = len(items)
    assert struct.unpack_from("<I", data) == (count,)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    assert offsets[0] == 4 + 4 * (count + 1)
    assert offsets[-1] == len(data)
    slots = [data[a:b] for a, b in pairwise(offsets)]
    assert all(map(codec.is_frame, slots))
    assert [sample_item(slot) for slot in slots] == items


def test_slots_that_the_old_tool_left_uncompressed() -> None:
    assert sample_item(item(5)) == item(5)
    assert sample_item(memoryview(item(5))) == item(5)
    with pytest.raises(Corrupt, match="f"):
        sample_item(codec.compress(b"abc")[:-1], "f")


def test_whole_file() -> None:
    assert inflate_file(codec.compress(GOOD), len(GOOD), "f") == GOOD
    with pytest.raises(Corrupt, match="f"):
        inflate_file(codec.compress(GOOD)[:-2], len(GOOD), "f")
