from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import codec
from liveset.format.codec import Compression


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (("zstd",), ("zstd", "batch", 256)),
        (("zstd:7", None, 16), ("zstd:7", "batch", 16)),
        (("zstd", "sample"), ("zstd", "sample", None)),
        (("zstd:22", "chunk"), ("zstd:22", None, None)),
    ],
)
def test_parse_and_config(arguments: tuple[Any, ...], config: Any) -> None:
    compression = Compression.parse(*arguments)
    assert compression is not None
    written = compression.to_config()
    assert written == {"compression": config[0], "compression_level": config[1], "compression_batch_size": config[2]}
    assert Compression.from_config(written) == compression


def test_no_compression() -> None:
    assert Compression.parse(None) is None
    assert Compression.parse(None, "batch") is None
    assert Compression.from_config({"compression": None, "compression_level": "batch"}) is None
    assert Compression.from_config({}) is None


def test_loaders_that_need_whole_files() -> None:
    whole = Compression("zstd", "chunk")
    assert Compression.parse("zstd", item_loader="TokensLoader") == whole
    assert Compression.parse("zstd", encrypted=True) == whole


def test_older_configs_are_read() -> None:
    assert Compression.from_config({"compression": "zstd"}) == Compression("zstd", "chunk")
    older = Compression.from_config({"compression": "zstd:3", "compression_level": "chunk"})
    assert older is not None
    assert older.zstd_level == 3
    assert Compression("zstd").zstd_level == 4


@pytest.mark.parametrize(
    ("arguments", "options", "phrase"),
    [
        (("gzip",), {}, "isn't available in"),
        (("zstd:0",), {}, "isn't available in"),
        (("zstd:23",), {}, "isn't available in"),
        (("zstd:",), {}, "isn't available in"),
        (("zstd\n",), {}, "isn't available in"),
        ((3,), {}, "isn't available in"),
        (("zstd_framed",), {}, "is not a codec"),
        (("zstd", 3), {}, "is granularity, not a zstd numeric level"),
        (("zstd", "file"), {}, "compression_level must be 'chunk', 'batch', or 'sample'"),
        (("zstd", "batch", 0), {}, "compression_batch_size"),
        (("zstd", "batch", True), {}, "compression_batch_size"),
        (("zstd", "sample"), {"item_loader": "TokensLoader"}, "is only supported for pytree chunks"),
        (("zstd", "batch"), {"encrypted": True}, "does not support encryption"),
    ],
)
def test_arguments_without_meaning(arguments: tuple[Any, ...], options: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        Compression.parse(*arguments, **options)


@pytest.mark.parametrize("config", [{"compression": "gzip"}, {"compression": 3}, {"compression": "zstd", "compression_level": "row"}])
def test_unknown_config(config: Any) -> None:
    with pytest.raises(UnsupportedFormat):
        Compression.from_config(config)


@given(st.binary(max_size=2000), st.sampled_from(["zstd", "zstd:1", "zstd:9"]))
def test_frames_round_trip(data: bytes, name: str) -> None:
    frame = codec.compress(data, Compression(name))
    assert codec.is_frame(frame)
    assert zstandard.frame_content_size(frame) == len(data)
    assert codec.decompress(frame) == data
    assert codec.decompress(memoryview(frame), size=len(data)) == data


def test_level_is_used() -> None:
    data = random.Random(1).randbytes(20_000).hex().encode()
    assert codec.compress(data, Compression("zstd:19")) != codec.compress(data, Compression("zstd:1"))


def unsized(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def test_frames_without_a_size_are_read() -> None:
    data = bytes(300_000)
    frame = unsized(data)
    assert zstandard.frame_content_size(frame) == -1
    assert codec.decompress(frame) == data
    assert codec.decompress(frame, size=len(data)) == data
    with pytest.raises(Corrupt, match="more than"):
        codec.decompress(frame, limit=299_999)
    with pytest.raises(Corrupt):
        codec.decompress(frame[:-1])
    with pytest.raises(Corrupt):
        codec.decompress(frame + b"x")
    with pytest.raises(Corrupt):
        codec.decompress(frame, size=len(data) + 1)


def test_a_frame_cannot_fill_the_memory() -> None:
    huge = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(huge) < 10_000
    with pytest.raises(Corrupt, match="50,000,000"):
        codec.decompress(huge, size=1000, file="chunk-0-0.bin")
    # A header may lie about far more than memory holds: magic, 8-byte content size.
    with pytest.raises(Corrupt, match="chunk-0-0.bin"):
        codec.decompress(codec.ZSTD_MAGIC + b"\xe0" + (1 << 60).to_bytes(8, "little"), file="chunk-0-0.bin")


@pytest.mark.parametrize("data", [b"", b"abcd", codec.ZSTD_MAGIC, codec.ZSTD_MAGIC + b"\0" * 20])
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(Corrupt):
        codec.decompress(data)


@given(st.binary(min_size=20, max_size=300), st.data())
def test_damage_never_raises_anything_else(data: bytes, source: st.DataObject) -> None:
    frame = bytearray(codec.compress(data))
    frame[source.draw(st.integers(0, len(frame) - 1))] = source.draw(st.integers(0, 255))
    with contextlib.suppress(Corrupt):
        codec.decompress(bytes(frame), limit=1 << 20)
    with pytest.raises(Corrupt):
        codec.decompress(codec.compress(data)[: source.draw(st.integers(0, len(codec.compress(data)) - 1))])


def test_inflate_checks_the_size() -> None:
    frame = codec.compress(b"abcdef")
    assert codec.inflate(frame, size=6, file="f") == b"abcdef"
    assert codec.inflate(frame, size=5, file="f") == b"abcdef"
    with pytest.raises(Corrupt, match="f: the file inflates to 6 bytes, but the index says 7"):
        codec.inflate(frame, size=7, file="f")


def test_contexts_are_per_thread() -> None:
    data = [random.Random(i).randbytes(50_000) for i in range(4)]
    failures: list[int] = []

    def work(number: int) -> None:
        results = [codec.decompress(codec.compress(data[number])) for _ in range(20)]
        failures.extend(number for result in results if result != data[number])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_checksum_vectors() -> None:
    # xxh3_64 of nothing and of "abc", as published for XXH3.
    assert codec.checksum(b"") == "xxh3:2d06800538d394c2"
    assert codec.checksum(b"abc") == "xxh3:78af5f94892f3950"


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_checksum_of_pieces(pieces: list[bytes]) -> None:
    whole = codec.checksum(b"".join(pieces))
    assert codec.checksum(pieces) == whole
    assert codec.checksum(map(memoryview, pieces)) == whole
    assert codec.checksum(bytearray(b"".join(pieces))) == whole
    assert codec.verify(pieces, whole)
    assert not codec.verify([*pieces, b"x"], whole)


def test_unknown_checksum() -> None:
    with pytest.raises(UnsupportedFormat, match="crc32c"):
        codec.verify(b"", "crc32c:00000000")
