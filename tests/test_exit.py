"""A process that has used Arrow ends as it should.

Threads of Arrow that let go of a buffer of Python while the interpreter ends bring it down (``terminate called without an active
exception``), so none are started: https://github.com/apache/arrow/issues/34314.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, threading
import pyarrow as pa, pyarrow.parquet as pq
import liveset

def threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

before = threads()
path = sys.argv[1]
liveset.optimize(lambda i: {"id": f"k{i}", "i": i}, range(300), path, num_workers=1, chunk_size=50, key_fn="id", verbose=False)
pq.write_table(pa.table({"id": ["k1", "k2"], "i": [7, 8]}), path + ".parquet", row_group_size=1)
with liveset.dataset_update(path) as update:
    assert update.apply(path + ".parquet") == 2
    update.commit()
liveset.purge(path, ["k5"])
assert liveset.verify(path, absent=["k5"]).ok
assert threads() == before, (threads(), before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_threads_of_arrow_are_started(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "ds")], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
