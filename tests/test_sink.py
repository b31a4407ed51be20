"""Files that are fetched into memory: whole or not at all, and nothing of them is left."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from liveset.errors import Corrupt
from liveset.format.codec import checksum
from liveset.storage.sink import fetched_in_memory
from liveset.storage.store import Sink

SIZES = [0, 1, 99_999, 100_000, 3_000_000]


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def descriptors() -> int:
    """How many files in memory are open; other tests may have left connections that end just now."""
    gc.collect()
    found = 0
    for number in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:liveset ")
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("known", [True, False])
def test_pieces_in_any_order_make_the_file(size: int, known: bool) -> None:
    data, before = content(size), descriptors()

    def download(sink: Sink) -> None:
        places = list(range(0, size, 7_001))
        random.Random(1).shuffle(places)
        for at in places:
            sink.write(data[at : at + 7_001], at)

    view = fetched_in_memory("a", size if known else 0, checksum(data), download)
    assert view == data
    assert view.readonly
    assert isinstance(view.obj, bytes | mmap.mmap)
    assert view.obj[: size // 2] == data[: size // 2]  # of a map and of bytes, slices are bytes
    assert descriptors() <= before + 1
    view.release()
    del view
    assert descriptors() == before


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("fault", ["short", "wrong", "lost"])
def test_what_comes_damaged_leaves_nothing(size: int, fault: str) -> None:
    data, before = content(size), descriptors()

    def download(sink: Sink) -> None:
        sink.write({"short": data[:-1], "wrong": bytes(size), "lost": data[:1]}[fault], 0)
        if fault == "lost":
            raise ConnectionError("cut")

    with pytest.raises(ConnectionError if fault == "lost" else Corrupt):
        fetched_in_memory("a", size, checksum(data), download)
    assert descriptors() == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="of files in memory, which Linux has")
def test_memory_that_is_refused_is_an_error() -> None:
    program = """
import resource
from liveset.errors import StorageError
from liveset.storage.sink import fetched_in_memory
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
assert fetched_in_memory("small", 400_000, "", lambda sink: sink.write(bytes(400_000), 0)) == bytes(400_000)
try:
    fetched_in_memory("s3://b/big.bin", 3_000_000, "", lambda sink: sink.write(bytes(3_000_000), 0))
except StorageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("cannot keep s3://b/big.bin in memory (3,000,000 bytes): "), done.stdout + done.stderr
