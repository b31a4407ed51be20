"""Writers that are killed at any moment: nothing acknowledged is lost, and nothing is half there."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from liveset.edit.changes import Append
from liveset.edit.commit import commit, new_token
from liveset.edit.versions import list_versions
from liveset.storage import open_store
from liveset.storage.local import LocalStore
from liveset.testing.invariants import check_dataset, stage

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}


def _append_until_killed(root: str, ear: Connection) -> None:
    store = open_store(root)
    while True:
        session = new_token()
        commit(store, Append(CONFIG, (stage(store, f"chunk-{session}"),)), None, session=session)
        ear.send(session)


def kill_writers(root: Path, seconds: float, seed: int) -> tuple[int, int]:
    """Kills two writers at a time at random moments; returns how many were killed and how many commits they reported."""
    dice = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "liveset.edit.commit", "liveset.storage.local", "liveset.testing.invariants"])
    acknowledged: set[str] = set()
    killed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writers = []
        for _ in range(2):
            mouth, ear = context.Pipe(duplex=False)
            process = context.Process(target=_append_until_killed, args=(str(root), ear), daemon=True)
            process.start()
            ear.close()
            writers.append((process, mouth))
        for process, mouth in writers:
            wait([mouth], timeout=30)  # the first commit of each, so that the kill falls somewhere in the work
            process.join(dice.uniform(0, 0.04))
            process.kill()
            killed += 1
        for process, mouth in writers:
            process.join()
            try:
                while True:
                    acknowledged.add(mouth.recv())
            except EOFError:
                mouth.close()
        versions = check_dataset(LocalStore(root))
        found = {entry.session for entry in list_versions(LocalStore(root))}
        assert acknowledged <= found, "a commit that was reported is not in the history"
        # A commit may have landed without its writer living to say so: at most one for each that was killed.
        assert len(versions) <= len(acknowledged) + killed
    return killed, len(acknowledged)


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    killed, commits = kill_writers(tmp_path, 3, seed=1)
    assert killed >= 4
    assert commits >= killed


@pytest.mark.nightly
def test_killed_writers_lose_nothing_for_long(tmp_path: Path) -> None:
    for number in range(6):  # a new dataset each time, since all of it is checked after each kill
        killed, _ = kill_writers(tmp_path / str(number), 5, seed=number)
        assert killed >= 10
