"""Commits to object stores: races, killed writers, every kind of edit, and what one edit costs."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.commit import new_token
from liveset.errors import DatasetExists, KeyConflict, VersionExpired
from liveset.snapshot import open_snapshot
from liveset.storage import Place, open_store
from liveset.testing.invariants import check_dataset
from tests.support.remote import place_at, store_at
from tests.support.services import RemoteFolder, Service
from tests.support.stores import Behind

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "liveset.edit.session", "liveset.read.dataset", "liveset.write.optimize"])


@pytest.fixture(params=["seaweedfs", "azurite", "gcs"])
def folder(request: pytest.FixtureRequest) -> RemoteFolder:
    service: Service = request.getfixturevalue(request.param)
    return service.fresh()


def make(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": -1}


def write(place: Place, count: int, **more: Any) -> Place:
    liveset.optimize(make, range(count), place, chunk_size=4, key_fn="id", num_workers=1, verbose=False, **more)
    return place


def contents(place: str | Place, version: Any = None) -> dict[Any, Any]:
    dataset = liveset.StreamingDataset(place, version=version)
    return dict(zip(dataset.keys, (sample["x"] for sample in dataset), strict=True))


# --- races ------------------------------------------------------------------------------------------------------------


def added(place: Place, writer: int, number: int) -> dict[str, Any]:
    return {"id": f"n{writer}-{number}", "x": number}


def race(place: Place, writer: int, turns: int, start: Any) -> None:
    """In turn replace one's own sample of a chunk that all share, and add one: as an update, and as an append."""
    start.wait(60)
    for number in range(turns):
        session = f"{writer}.{number}"
        if number % 4 == 3:
            item = added(place, writer, number)
            liveset.optimize(dict, [item], place, mode="append", key_fn="id", num_workers=1, verbose=False, session=session)
            continue
        with liveset.dataset_update(place, session=session) as update:
            if number % 2:
                update.insert(f"n{writer}-{number}", added(place, writer, number))
            else:
                update[f"k{writer}"] = {"id": f"k{writer}", "x": number}
            update.commit()


def check_state(found: dict[Any, Any], writers: int, commits: int) -> None:
    """What a version holds is what some of the commits of each writer make, from its first one on, and it is all of them together."""
    done = 0
    for writer in range(writers):
        numbers = {value for key, value in found.items() if key.startswith(f"n{writer}-")}
        last = max([found[f"k{writer}"], *numbers])
        assert numbers == set(range(1, last + 1, 2)), found
        assert found[f"k{writer}"] in (last, last - 1), found
        done += last + 1
    assert done == commits, (found, commits)


def watch(place: Place, writers: int, stop: Any, ear: Connection) -> None:
    """Pin one version after the other and read it whole, by position and by key."""
    seen = 0
    while not stop.is_set() or not seen:
        dataset = liveset.StreamingDataset(place)
        found = dict(zip(dataset.keys, (sample["x"] for sample in dataset), strict=True))
        check_state(found, writers, dataset.version - 1)
        keys = random.sample(sorted(found), 3)
        assert [sample["x"] for sample in dataset.get_by_keys(keys)] == [found[key] for key in keys]
        seen += 1
    ear.send(seen)


@pytest.mark.parametrize(("writers", "turns"), [(4, 4), pytest.param(6, 25, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1200)
def test_no_commit_of_a_race_is_lost(folder: RemoteFolder, writers: int, turns: int) -> None:
    place = write(place_at(folder), writers)
    start, stop = CONTEXT.Barrier(writers), CONTEXT.Event()
    mouth, ear = CONTEXT.Pipe(duplex=False)
    reader = CONTEXT.Process(target=watch, args=(place, writers, stop, ear))
    processes = [CONTEXT.Process(target=race, args=(place, writer, turns, start)) for writer in range(writers)]
    for process in (reader, *processes):
        process.start()
    for process in processes:
        process.join()
    stop.set()
    assert wait([mouth, reader.sentinel], timeout=60)
    reader.join(60)
    assert [process.exitcode for process in (reader, *processes)] == [0] * (writers + 1)
    assert mouth.recv() > 0
    sessions = Counter(version.session for version in liveset.history(place)[:-1])
    assert sessions == Counter(f"{writer}.{number}" for writer in range(writers) for number in range(turns))
    check_state(contents(place), writers, writers * turns)
    assert liveset.verify(place).ok
    check_dataset(store_at(folder))


# --- killed writers ---------------------------------------------------------------------------------------------------


def edit_until_killed(place: Place, ear: Connection) -> None:
    while True:
        session = new_token()
        with liveset.dataset_update(place, session=session) as update:
            update.insert(session, {"id": session, "x": 0})
            update.upsert("k1", {"id": "k1", "x": random.randrange(10**9)})
            try:
                update.commit()
            except KeyConflict:
                continue
        ear.send(session)


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1200)
def test_killed_writers_leave_whole_versions(folder: RemoteFolder, rounds: int) -> None:
    place = write(place_at(folder), 4)
    dice = random.Random(rounds)
    told: set[str] = set()
    for _ in range(rounds):
        writers = []
        for _ in range(2):
            mouth, ear = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=edit_until_killed, args=(place, ear), daemon=True)
            process.start()
            ear.close()
            writers.append((process, mouth))
        for process, mouth in writers:
            assert wait([mouth], timeout=60)  # the first commit, so that the kill falls somewhere in the work
            process.join(dice.uniform(0, 0.3))
            process.kill()
        for process, mouth in writers:
            process.join()
            try:
                while True:
                    told.add(mouth.recv())
            except EOFError:
                mouth.close()
        history = liveset.history(place)
        sessions = Counter(version.session for version in history)
        assert told <= sessions.keys(), "a commit that was reported is not in the history"
        assert max(sessions.values()) == 1
        assert set(contents(place)) == {f"k{number}" for number in range(4)} | (sessions.keys() - {history[-1].session})
    assert liveset.verify(place).ok
    liveset.vacuum(place, keep=0, grace=timedelta(0))
    check_dataset(store_at(folder))
    assert set(contents(place)) >= told


# --- every kind of edit -----------------------------------------------------------------------------------------------


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": 2 * sample["x"]}


def count(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number}


def plain(number: int) -> dict[str, Any]:
    return {"name": f"p{number}", "x": number}


def edits(place: Any, other: Any, copy: Path) -> Iterator[tuple[str, Any]]:
    """One edit after the other; what each of them said, and what can be seen after it."""

    def optimize(make: Callable[[int], Any], numbers: range, to: Any = place, **more: Any) -> None:
        liveset.optimize(make, numbers, to, chunk_size=4, verbose=False, num_workers=1, **more)

    def update(act: Callable[[Any], None]) -> Any:
        with liveset.dataset_update(place) as session:
            act(session)
            result = session.commit()
        return result.version, result.keys, result.chunks, result.inserted, result.deleted

    def replace(session: Any) -> None:
        session["k3"] = {"id": "k3", "x": 33}

    def remove(session: Any) -> None:
        del session["k0"]

    optimize(count, range(10), key_fn="id")
    yield "create", contents(place)
    with pytest.raises(DatasetExists):
        optimize(count, range(2), key_fn="id")
    yield "replace", update(replace)
    yield "insert", update(lambda session: session.insert("new", {"id": "new", "x": 5}))
    yield "delete", update(remove)
    yield "patch", update(lambda session: session.patch("k2", x=22))
    optimize(count, range(20, 26), mode="append", key_fn="id")
    yield "append", contents(place)
    yield "transform", asdict(liveset.transform(place, double, num_workers=2, verbose=False)) | {"seconds": 0, "bytes_written": 0}
    yield "tag", (liveset.tag(place, "paper", 3), contents(place, "paper"))
    yield "attributes", (liveset.set_attributes(place, {"name": "plays"}), dict(liveset.StreamingDataset(place).attributes))
    changes = liveset.diff(place, 1)
    yield "diff", (changes.a, changes.b, *map(sorted, (changes.added_keys(), changes.removed_keys())), changes.changed)
    yield "restore", (liveset.restore(place, 2), contents(place))
    yield "untag", liveset.untag(place, "paper")
    yield "purge", (liveset.purge(place, ["k5"]).keys, contents(place))
    with pytest.raises(liveset.Erased):
        list(liveset.StreamingDataset(place, version=1))
    yield "compact", (liveset.compact(place).version, contents(place))
    optimize(count, range(3), mode="overwrite", key_fn="id")
    yield "overwrite", contents(place)
    report = liveset.vacuum(place, keep=0, grace=timedelta(0))
    yield "vacuum", (report.kept, report.expired, report.unknown, contents(place))
    with pytest.raises(VersionExpired):
        liveset.StreamingDataset(place, version=2)
    yield "verify", (liveset.verify(place).ok, liveset.verify(place).chunks)
    liveset.cp(place, copy)
    yield "copy", contents(str(copy))
    store = open_store(place)
    store.delete([open_snapshot(store).index.chunks[0].filename])
    yield "damaged", (liveset.verify(place).ok, len(liveset.verify(place).damaged))
    repaired = liveset.repair(place, copy=copy)
    yield "repair from a copy", (len(repaired.restored), liveset.verify(place).ok, contents(place))
    store.delete([open_snapshot(store).index.chunks[0].filename])
    repaired = liveset.repair(place, quarantine=True)
    yield "repair", (repaired.version, liveset.verify(place).ok, contents(place))
    yield "history", [(version.version, version.op) for version in liveset.history(place)]
    optimize(plain, range(6), other)
    liveset.build_keys_index(other, "name", verbose=False)
    yield "keys", (contents(other), liveset.StreamingDataset(other)["p4"]["x"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the edits do to a folder."""
    root = tmp_path_factory.mktemp("local")
    return dict(edits(str(root / "plays"), str(root / "other"), root / "copy"))


def test_a_purge_deletes_what_a_repair_has_kept(folder: RemoteFolder, tmp_path: Path) -> None:
    place = write(place_at(folder / "plays", tmp_path / "cache"), 8)
    liveset.cp(place, tmp_path / "copy")
    store = store_at(folder / "plays")
    name = open_snapshot(store).index.chunks[0].filename
    data = store.read(name)
    store.delete([name])
    store.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    assert len(liveset.repair(place, copy=tmp_path / "copy").restored) == 1
    (kept,) = (entry.name for entry in store.list("_liveset/quarantine/"))
    assert liveset.purge(place, ["k1"], dry_run=True).quarantined == (kept,)
    assert kept in {found.file for found in liveset.verify(place, absent=["k1"]).found}
    assert liveset.purge(place, ["k1"]).quarantined == (kept,)
    assert list(store.list("_liveset/quarantine/")) == []
    assert liveset.verify(place, absent=["k1"]).ok
    assert list(contents(place)) == [f"k{number}" for number in (0, *range(2, 8))]


def test_every_edit_is_the_same_as_in_a_folder(folder: RemoteFolder, expected: dict[str, Any], tmp_path: Path) -> None:
    for name, found in edits(place_at(folder / "plays", tmp_path / "cache"), place_at(folder / "other"), tmp_path / "copy"):
        assert found == expected[name], name


def test_every_edit_is_the_same_through_a_cache(expected: dict[str, Any], tmp_path: Path) -> None:
    place, other = (Place(f"local:{tmp_path / name}", cache_dir=tmp_path / "cache") for name in ("plays", "other"))
    for name, found in edits(place, other, tmp_path / "copy"):
        assert found == expected[name], name


# --- what an edit costs -----------------------------------------------------------------------------------------------


def large(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number, "data": random.Random(number).randbytes(4_000)}


def test_an_edit_moves_the_chunk_and_the_index(on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    place = place_at(folder)
    liveset.optimize(large, range(1000), place, chunk_bytes="400KB", key_fn="id", num_workers=1, verbose=False)
    chunk = max(record.size for record in check_dataset(store_at(folder))[-1].chunks)
    proxy.reset()
    with liveset.dataset_update(place) as update:
        update["k3"] = {**large(3), "x": -1}
        update.commit()
    stats = proxy.stats()
    assert [re.sub(r"/bkt/[0-9a-f]+/|[-/]?[0-9a-f]{8,}.*| HTTP.*", "", line) for line in stats["log"]] == [
        "GET index.json",
        "GET _liveset/keys/base",  # where the key is
        "GET index.json",  # is it the same still?
        "GET _liveset/versions",  # nobody put an old one back
        "GET chunk-0-0",
        "PUT chunk-0-0",
        "PUT _liveset/versions",
        "PUT index.json",
    ]
    assert stats["bytes_up"] < chunk + 20_000
    assert stats["bytes_down"] < chunk + 60_000
