"""Races of a vacuum with writers and readers, and what must hold whatever their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from liveset.edit.changes import Append, Overwrite, Restore, Retag
from liveset.edit.commit import Policy, commit
from liveset.edit.vacuum import Keep, VacuumReport, vacuum_store
from liveset.edit.versions import list_versions
from liveset.errors import Conflict, SessionExpired, VersionExpired
from liveset.format.index import Index
from liveset.lease import pin
from liveset.snapshot import open_snapshot
from liveset.storage import Store
from liveset.testing.invariants import check_dataset, stage, unneeded_files

CONFIG = {"compression": None, "data_format": ["bytes"], "data_spec": "spec"}
ZERO = timedelta(0)
_numbers = itertools.count()


def at_once() -> Policy:
    """No pauses, and a clock of its own, which says nothing about the store's."""
    return Policy(first_pause=0, now=lambda: datetime(2020, 1, 1, tzinfo=UTC))


def chunk(store: Store) -> Any:
    return stage(store, f"chunk-0-0-{next(_numbers):016x}.bin")


def append(store: Store, *, session: str | None = None, base: Index | None = None) -> Index:
    base = base or _head(store)
    return commit(store, Append(CONFIG, (chunk(store),)), base, session=session, policy=at_once())


def overwrite(store: Store, *, session: str | None = None) -> Index:
    base = _head(store)
    return commit(store, Overwrite(CONFIG, (chunk(store),), force=True), base, session=session, policy=at_once())


def tag(store: Store, name: str, version: int) -> Index:
    return commit(store, Retag(name, version), open_snapshot(store).index, policy=at_once())


def restore(store: Store, version: int) -> Index:
    base = open_snapshot(store).index
    return commit(store, Restore(open_snapshot(store, version).index, force=True), base, policy=at_once())


def sweep(store: Store, keep: Keep = 0, grace: timedelta = ZERO, **more: Any) -> VacuumReport:
    return vacuum_store(store, keep=keep, grace=grace, policy=at_once(), **more)


def content(store: Store, version: int | None = None) -> list[bytes]:
    snapshot = open_snapshot(store, version)
    return [bytes(snapshot.chunk_buffer(number)) for number in range(len(snapshot.index.chunks))]


def _head(store: Store) -> Index | None:
    head = store.read_head()
    return None if head is None else Index.parse(head.data)


# Actors


def appender(store: Store) -> str:
    base = _head(store)
    record = chunk(store)
    try:
        commit(store, Append(CONFIG, (record,)), base, session="append", policy=at_once())
    except (SessionExpired, Conflict) as error:
        return type(error).__name__
    return "append"


def overwriter(store: Store) -> str:
    try:
        overwrite(store, session="overwrite")
    except (SessionExpired, Conflict) as error:
        return type(error).__name__
    return "overwrite"


def tagger(store: Store) -> int | None:
    try:
        tag(store, "paper", 2)
    except (VersionExpired, Conflict):
        return None
    return 2


def restorer(store: Store) -> str:
    try:
        restore(store, 2)
    except (VersionExpired, SessionExpired, Conflict) as error:
        return type(error).__name__
    return "restored"


def vacuumer(store: Store) -> str:
    try:
        sweep(store)
    except Conflict:
        return "Conflict"
    return "swept"


def pinned_reader(expected: list[bytes], *, version: int = 2) -> Callable[[Store], str]:
    """Reads a version twice, with time between: once it is pinned it must all be there."""

    def read(store: Store) -> str:
        try:
            snapshot = open_snapshot(store, version)
            lease = pin(store, snapshot)
        except VersionExpired:
            return "VersionExpired"
        try:
            for _ in range(2):
                for number, data in enumerate(expected):
                    assert bytes(snapshot.chunk_buffer(number)) == data
        finally:
            lease.release()
        return "read"

    return read


def plain_reader(expected: list[bytes], *, version: int = 2) -> Callable[[Store], str]:
    """Reads a version that it does not hold: all of it, or an error that says that it has expired; never anything else."""

    def read(store: Store) -> str:
        try:
            snapshot = open_snapshot(store, version)
            for number, data in enumerate(expected):
                assert bytes(snapshot.chunk_buffer(number)) == data
        except VersionExpired as error:
            told = str(error)
        else:
            return "read"
        assert "vacuum" in told or "removed" in told
        return "VersionExpired"

    return read


# What must hold


def check_after(store: Store, results: dict[str, Any]) -> None:
    for name, result in results.items():
        assert not isinstance(result, BaseException), f"{name}: {result!r}"
    check_dataset(store)
    sessions = {entry.session for entry in list_versions(store)}
    for session in ("append", "overwrite"):
        if session in results:
            assert (results[session] == session) == (session in sessions), (results, sessions)
    if results.get("tag") is not None:
        content(store, 2)
    sweep(store)
    check_dataset(store)
    assert unneeded_files(store) == set()
    append(store)
    check_dataset(store)


def commit_with(store: Store, change: Any, base: Index | None) -> Index:
    return commit(store, change, base, policy=at_once())
