"""What reading does to the memory allocator of the process: what is freed stays within a bound, and settings of the user count."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.writing import write_dataset

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc/self/smaps_rollup").exists(), reason="of the C library of Linux"
)

# Blocks that are too small to be mapped by themselves, as many as make up 50 or 400 MB, are freed before and after a pass. Nothing
# else may be allocated between them, because one small piece that stays (numpy keeps shapes for later) would hold all below it.
SCRIPT = """
import gc, sys
import liveset
from liveset.read.lightloader import StreamingDataLoader

def own():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) / 1000

def kept(size):
    blocks = [None] * (size * 10)
    before = own()
    for at in range(len(blocks)):
        blocks[at] = bytearray(b"x") * 100_000
    assert own() - before > size / 2
    for at in range(len(blocks)):
        blocks[at] = None
    return own() - before

loader = StreamingDataLoader(liveset.StreamingDataset(sys.argv[1]), batch_size=4)
iter(loader), len(loader)
print(kept(50))
for batch in loader:
    pass
del batch
gc.collect()
print(kept(50), kept(400))
"""


def kept(tmp_path: Path, **settings: str) -> list[float]:
    """Megabytes of the freed ones that the process still has: of 50 before a pass, and of 50 and 400 afterwards."""
    write_dataset(tmp_path / "ds", [{"i": i} for i in range(20)])
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "ds")]
    done = subprocess.run(command, env=others | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


def test_what_is_freed_is_kept_once_something_was_read_but_not_much(tmp_path: Path) -> None:
    before, some, much = kept(tmp_path)
    assert before < 10
    assert 30 < some < 60
    assert much < 80  # twice the 31 MB of the largest block that was freed, and what was in use anyway


@pytest.mark.parametrize(
    "settings", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}], ids=str
)
def test_a_setting_of_the_user_counts(tmp_path: Path, settings: dict[str, str]) -> None:
    assert max(kept(tmp_path, **settings)) < 10
