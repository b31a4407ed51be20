"""cp: whole datasets between places of all kinds; broken off, meanwhile changed, damaged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.edit.retention import Kind, kind_of
from liveset.format.codec import Compression
from liveset.storage import Head, open_store
from liveset.storage.local import LocalStore
from liveset.storage.requests import PART
from liveset.tools import copy as copying
from tests.support.foreign import make_foreign, write_foreign
from tests.support.places import parquet_rows
from tests.support.services import RemoteFolder, Service, WebServer
from tests.support.stores import Behind
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)
obstore = pytest.importorskip("obstore")

Place = str | os.PathLike[str]


class Broken(Exception):
    pass


def row(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "text": f"secret-{number} " * 4, "n": number}


def make(path: Path) -> Path:
    """Write a dataset with tags, edits, deletes, an expired version and a purge."""
    write_dataset(path, [row(number) for number in range(40)], chunk_size=10, key="id")
    liveset.tag(path, "first", 1)
    for number in (3, 17):
        with liveset.dataset_update(path) as update:
            update[f"k{number}"] = row(number) | {"n": -number}
            update.commit()
    with liveset.dataset_update(path) as update:
        del update["k25"]
        update.insert("k40", row(40))
        update.commit()
    liveset.vacuum(path, keep=2, grace=timedelta(0))
    liveset.purge(path, ["k7"])
    liveset.compact(path)
    liveset.tag(path, "last")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is only read."""
    return make(tmp_path_factory.mktemp("made") / "ds")


@pytest.fixture
def path(tmp_path: Path, made: Path) -> Path:
    shutil.copytree(made, tmp_path / "ds", copy_function=shutil.copy2)
    return tmp_path / "ds"


def content(place: Place) -> dict[str, bytes]:
    store = open_store(liveset.Place.of(place, cache_dir=False))
    return {entry.name: store.read(entry.name) for entry in store.list("")}


def seen(place: Place) -> dict[int, list[Any]]:
    """All samples of all versions that can be opened."""
    found: dict[int, list[Any]] = {}
    for version in liveset.history(place):
        if version.available:
            ds = liveset.StreamingDataset(place, version=version.version)
            found[version.version] = [_or_erased(ds, position) for position in range(len(ds))] + [list(ds.keys)]
    return found


def _or_erased(ds: liveset.StreamingDataset, position: int) -> Any:
    try:
        return ds[position]
    except liveset.Erased:
        return "erased"


def place_of(folder: RemoteFolder, cache: Path | None = None) -> liveset.Place:
    return liveset.Place(folder.url, storage_options=folder.options, cache_dir=False if cache is None else cache)


def break_off(src: Place, dst: Place, after: int) -> None:
    def stop(done: int, total: int) -> None:
        if done == after:
            raise Broken

    with pytest.raises(Broken):
        liveset.cp(src, dst, progress=stop)
    with pytest.raises(liveset.DatasetNotFound):
        liveset.StreamingDataset(dst)
    assert "index.json" not in content(dst)


def is_same(copy: Place, path: Place) -> None:
    assert content(copy) == content(path)
    assert seen(copy) == seen(path)
    assert liveset.verify(copy).ok


# --- all of it --------------------------------------------------------------------------------------------------------


def test_all_versions_tags_and_keys_are_copied(path: Path, tmp_path: Path) -> None:
    report = liveset.cp(path, tmp_path / "copy")
    is_same(tmp_path / "copy", path)
    assert len(seen(path)) > 2
    assert any("erased" in samples for samples in seen(path).values())
    assert (report.source, report.target) == (str(path), str(tmp_path / "copy"))
    assert report.version == report.versions[-1] == liveset.history(path)[0].version
    assert list(report.versions) == sorted(seen(path))
    assert (report.files, report.bytes) == (len(content(path)), sum(map(len, content(path).values())))
    assert (report.skipped, report.left) == (0, ())
    assert liveset.StreamingDataset(tmp_path / "copy", version="first")["k3"] == row(3)


def test_the_copy_goes_on_by_itself(path: Path, tmp_path: Path) -> None:
    liveset.cp(path, tmp_path / "copy")
    before = seen(path)
    with liveset.dataset_update(tmp_path / "copy") as update:
        update["k1"] = row(1) | {"n": 100}
        update.commit()
    assert liveset.StreamingDataset(tmp_path / "copy")["k1"]["n"] == 100
    assert seen(path) == before
    liveset.vacuum(tmp_path / "copy", keep=1, grace=timedelta(0))
    assert liveset.verify(tmp_path / "copy").ok


def test_to_a_store_and_to_another_folder_there_and_back(path: Path, tmp_path: Path, remote_folder: RemoteFolder) -> None:
    there, beside = place_of(remote_folder / "a"), place_of(remote_folder / "b")
    sent = liveset.cp(path, there)
    is_same(there, path)
    assert liveset.cp(there, beside).files == sent.files
    is_same(beside, path)
    back = liveset.cp(beside, tmp_path / "back")
    assert (back.files, back.bytes) == (sent.files, sent.bytes)
    is_same(tmp_path / "back", path)


def test_between_buckets_of_the_same_name(path: Path, on_seaweedfs: RemoteFolder, moto: Service) -> None:
    elsewhere = on_seaweedfs.at(moto.root.endpoint)
    liveset.cp(path, place_of(on_seaweedfs))
    liveset.cp(place_of(on_seaweedfs), place_of(elsewhere))
    is_same(place_of(elsewhere), path)


def test_onto_a_store_without_conditions(path: Path, careless_folder: RemoteFolder) -> None:
    place = place_of(careless_folder)
    liveset.cp(path, place)
    assert seen(place) == seen(path)
    with pytest.raises(liveset.UnsafeStore):
        liveset.tag(place, "more")


@pytest.mark.parametrize("part", ["", "/norange"])
def test_from_a_web_server(path: Path, tmp_path: Path, web: tuple[WebServer, Path], part: str) -> None:
    server, docs = web
    name = f"copied{part.strip('/')}"
    shutil.copytree(path, docs / name)
    report = liveset.cp(f"{server.url}{part}/{name}", tmp_path / "copy")
    is_same(tmp_path / "copy", path)
    assert report.bytes == sum(map(len, content(path).values()))
    with pytest.raises(liveset.StorageError, match="can only be read"):
        liveset.cp(path, f"{server.url}{part}/new")


def test_a_marked_folder(path: Path, tmp_path: Path) -> None:
    liveset.cp(f"local:{path}", f"local:{tmp_path / 'copy'}")
    is_same(tmp_path / "copy", path)


def test_large_files_come_through_a_temporary_file(tmp_path: Path) -> None:
    samples = [{"id": str(number), "raw": os.urandom(1 << 20)} for number in range(12)]
    write_dataset(tmp_path / "ds", samples, chunk_size=12, key="id")
    assert max(map(len, content(tmp_path / "ds").values())) > PART
    liveset.cp(f"local:{tmp_path / 'ds'}", tmp_path / "copy")
    is_same(tmp_path / "copy", tmp_path / "ds")


def test_the_newest_version_alone(path: Path, tmp_path: Path) -> None:
    report = liveset.cp(path, tmp_path / "copy", versions=False)
    newest = max(seen(path))
    assert report.versions == (newest,)
    assert seen(tmp_path / "copy") == {newest: seen(path)[newest]}
    with pytest.raises(liveset.VersionExpired):
        liveset.StreamingDataset(tmp_path / "copy", version="first")
    assert len(content(tmp_path / "copy")) < len(content(path))


@pytest.mark.parametrize("compression", [None, Compression("zstd", "chunk")])
def test_a_dataset_of_another_program(tmp_path: Path, compression: Compression | None) -> None:
    write_foreign(tmp_path / "ds", [row(number) for number in range(10)], compression=compression)
    liveset.cp(tmp_path / "ds", tmp_path / "copy")
    is_same_foreign(tmp_path / "copy", tmp_path / "ds")
    if compression is not None:  # the old tool inflates chunks where they lie
        for file in (tmp_path / "ds").glob("chunk-*"):
            file.with_name(file.name.replace(".zstd", "")).write_bytes(_inflated(file))
            file.unlink()
        liveset.cp(f"local:{tmp_path / 'ds'}", tmp_path / "inflated")
        is_same_foreign(tmp_path / "inflated", tmp_path / "ds")


def _inflated(file: Path) -> bytes:
    from liveset.format.codec import decompress

    return decompress(file.read_bytes())


def is_same_foreign(copy: Path, path: Path) -> None:
    there = content(copy)
    assert there == content(path)
    assert any(name.startswith("keys/") for name in there)
    assert list(liveset.StreamingDataset(copy)) == [row(number) for number in range(10)]
    assert liveset.StreamingDataset(copy)["k3"] == row(3)


def test_what_belongs_to_no_version_stays(path: Path, tmp_path: Path) -> None:
    expected = content(path)
    for name in ("notes.txt", "_liveset/quarantine/chunk-0-0.bin.0123", "chunk-9-9-0123456789abcdef.bin"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"other")
    ds = liveset.StreamingDataset(path, pin=True)
    report = liveset.cp(path, tmp_path / "copy")
    del ds
    assert report.left == ("_liveset/quarantine/chunk-0-0.bin.0123", "notes.txt")
    assert content(tmp_path / "copy") == expected


# --- where it may go --------------------------------------------------------------------------------------------------


def test_only_to_an_empty_place(path: Path, tmp_path: Path) -> None:
    other, files = tmp_path / "other", tmp_path / "files"
    write_dataset(other, [{"n": 1}])
    files.mkdir()
    (files / "notes.txt").write_text("mine")
    before = content(other), content(files)
    for place in (other, files):
        with pytest.raises(liveset.DatasetExists, match="copy to a"):
            liveset.cp(path, place)
    assert (content(other), content(files)) == before
    (tmp_path / "empty").mkdir()
    liveset.cp(path, tmp_path / "empty")
    for inside in (path, path / "copy", f"local:{path}/copy"):
        with pytest.raises(ValueError, match="in it"):
            liveset.cp(path, inside)


def test_what_a_killed_probe_leaves_is_nothing(path: Path, on_seaweedfs: RemoteFolder) -> None:
    name = "_liveset/probe.0123456789abcdef.tmp"
    obstore.put(on_seaweedfs.store(), name, b"1")
    liveset.cp(path, place_of(on_seaweedfs))
    assert seen(place_of(on_seaweedfs)) == seen(path)
    assert kind_of(name) is Kind.TEMPORARY  # so a vacuum removes it


def test_there_must_be_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(liveset.DatasetNotFound, match=name):
            liveset.cp(tmp_path / name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_finished_copy_is_not_sent_again(path: Path, tmp_path: Path) -> None:
    first = liveset.cp(path, tmp_path / "copy")
    next((tmp_path / "copy").glob("chunk-*")).unlink()
    again = liveset.cp(path, tmp_path / "copy")
    assert (again.files, again.versions) == (1, first.versions)
    is_same(tmp_path / "copy", path)
    liveset.tag(path, "more")
    with pytest.raises(liveset.DatasetExists):
        liveset.cp(path, tmp_path / "copy")


# --- broken off -------------------------------------------------------------------------------------------------------


def test_a_broken_copy_goes_on(path: Path, tmp_path: Path) -> None:
    break_off(path, tmp_path / "copy", after=3)
    there = {name for name in content(tmp_path / "copy") if kind_of(name) is Kind.CHUNK}
    assert there
    times = {name: (tmp_path / "copy" / name).stat().st_mtime_ns for name in there}
    report = liveset.cp(path, tmp_path / "copy")
    assert report.skipped >= 3
    assert report.files + report.skipped == len(content(path))
    assert times == {name: (tmp_path / "copy" / name).stat().st_mtime_ns for name in there}
    is_same(tmp_path / "copy", path)


def test_a_broken_copy_to_a_store_goes_on(path: Path, on_seaweedfs: RemoteFolder) -> None:
    break_off(path, place_of(on_seaweedfs), after=3)
    assert liveset.cp(path, place_of(on_seaweedfs)).skipped >= 3
    is_same(place_of(on_seaweedfs), path)


def test_what_a_broken_copy_left_on_a_store_is_compared_by_size(path: Path, on_seaweedfs: RemoteFolder) -> None:
    break_off(path, place_of(on_seaweedfs), after=5)
    victim = next(name for name in content(place_of(on_seaweedfs)) if kind_of(name) is Kind.CHUNK)
    obstore.put(on_seaweedfs.store(), victim, b"short")
    liveset.cp(path, place_of(on_seaweedfs))
    is_same(place_of(on_seaweedfs), path)


def test_a_dataset_that_took_the_place_of_a_broken_copy_is_left_alone(path: Path, tmp_path: Path) -> None:
    break_off(path, tmp_path / "copy", after=3)
    # Several files are sent at once. An archive among them would keep everybody from writing here, and this is about who could.
    shutil.rmtree(tmp_path / "copy/_liveset/versions", ignore_errors=True)
    write_dataset(tmp_path / "copy", [{"n": 1}])
    before = content(tmp_path / "copy")
    with pytest.raises(liveset.DatasetExists, match="holds a dataset already"):
        liveset.cp(path, tmp_path / "copy")
    assert content(tmp_path / "copy") == before


def test_what_a_broken_copy_left_is_compared(path: Path, tmp_path: Path) -> None:
    break_off(path, tmp_path / "copy", after=5)
    short, wrong = sorted((tmp_path / "copy").glob("chunk-*"))[:2]
    short.write_bytes(short.read_bytes()[:-1])
    wrong.write_bytes(wrong.read_bytes()[:-1] + b"?")
    liveset.cp(path, tmp_path / "copy")
    is_same(tmp_path / "copy", path)


def test_a_killed_copy_goes_on(path: Path, tmp_path: Path) -> None:
    program = (
        "import liveset, os, signal, sys\n"
        "def die(done, total):\n"
        "    if done == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "liveset.cp(sys.argv[1], sys.argv[2], progress=die)\n"
    )
    for after in (1, 4, 8, 12):
        done = subprocess.run([sys.executable, "-c", program, str(path), str(tmp_path / "copy"), str(after)])
        assert done.returncode == -signal.SIGKILL
        with pytest.raises(liveset.DatasetNotFound):
            liveset.StreamingDataset(tmp_path / "copy")
    liveset.cp(path, tmp_path / "copy")
    is_same(tmp_path / "copy", path)


def test_a_head_that_was_cut_is_written_again(path: Path, tmp_path: Path) -> None:
    break_off(path, tmp_path / "copy", after=3)
    (tmp_path / "copy" / "index.json").write_bytes((path / "index.json").read_bytes()[:100])
    liveset.cp(path, tmp_path / "copy")
    is_same(tmp_path / "copy", path)


def test_a_broken_copy_of_another_dataset_is_left_alone(path: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    break_off(tmp_path / "other", tmp_path / "copy", after=3)
    before = content(tmp_path / "copy")
    with pytest.raises(liveset.DatasetExists, match="of another dataset"):
        liveset.cp(path, tmp_path / "copy")
    assert content(tmp_path / "copy") == before
    liveset.cp(tmp_path / "other", tmp_path / "copy")
    is_same(tmp_path / "copy", tmp_path / "other")


def test_what_was_erased_since_leaves_a_broken_copy(path: Path, tmp_path: Path) -> None:
    break_off(path, tmp_path / "copy", after=8)
    liveset.purge(path, ["k12"])
    assert not liveset.verify(path, absent=["secret-13"]).ok
    liveset.cp(path, tmp_path / "copy")
    assert liveset.verify(tmp_path / "copy", absent=["k12", "secret-12"]).ok
    is_same(tmp_path / "copy", path)


def test_over_a_bad_network(path: Path, tmp_path: Path, on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    faults = {"p503": 0.05, "p_reset": 0.05, "p_late503": 0.05, "p_swallow": 0.05, "p_cut": 0.05, "cut_after": 500}
    proxy.set(seed=7, **faults)
    liveset.cp(path, place_of(folder))
    liveset.cp(place_of(folder), tmp_path / "back")
    assert sum(proxy.stats()["faults"].values()) > 5
    is_same(tmp_path / "back", path)


def test_an_outage_in_the_middle(path: Path, on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    place = liveset.Place(folder.url, storage_options=folder.options | {"retry_timeout": 0}, cache_dir=False)
    with pytest.raises(liveset.StorageError, match=folder.url):
        liveset.cp(path, place, progress=lambda done, _: proxy.set(p_reset=1.0) if done == 2 else None)
    proxy.reset()
    assert liveset.cp(path, place).skipped >= 2
    is_same(place_of(on_seaweedfs), path)


# --- meanwhile --------------------------------------------------------------------------------------------------------


def once(action: Callable[[], object]) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == 1:
            action()

    return progress


def test_a_commit_meanwhile_is_not_in_the_copy(path: Path, tmp_path: Path) -> None:
    before, old = seen(path), content(path)["index.json"]

    def edit() -> None:
        with liveset.dataset_update(path) as update:
            del update["k2"]
            update.commit()

    liveset.cp(path, tmp_path / "copy", progress=once(edit))
    assert seen(tmp_path / "copy") == before
    assert content(tmp_path / "copy")["index.json"] == old
    assert seen(path) != before


def test_a_purge_or_a_vacuum_meanwhile_is_told(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    # Enough files that those which go are not under way when the first is done.
    liveset.optimize(row, range(100, 200), path, mode="append", num_workers=1, chunk_size=1, verbose=False)
    with pytest.raises(liveset.VersionExpired, match="Copy again"):
        liveset.cp(path, copied, progress=once(lambda: liveset.purge(path, [f"k{number}" for number in range(150, 200)])))
    with pytest.raises(liveset.VersionExpired, match="Copy again"):
        liveset.cp(path, copied, progress=once(lambda: liveset.vacuum(path, keep=0, grace=timedelta(0))))
    liveset.cp(path, copied)
    is_same(copied, path)


def test_another_program_meanwhile_is_a_conflict(tmp_path: Path) -> None:
    write_foreign(tmp_path / "ds", [row(number) for number in range(10)])

    def replace() -> None:
        shutil.rmtree(tmp_path / "ds")
        write_foreign(tmp_path / "ds", [row(number) for number in range(10, 20)])

    with pytest.raises((liveset.Conflict, liveset.NotFound, liveset.Corrupt)):
        liveset.cp(tmp_path / "ds", tmp_path / "copy", progress=once(replace))
    assert not (tmp_path / "copy" / "index.json").exists()
    with pytest.raises(liveset.DatasetExists):
        liveset.cp(tmp_path / "ds", tmp_path / "copy")


class Busy(LocalStore):
    """Others commit each time its head has been read, so often as it is told."""

    times = 0

    def read_head(self) -> Head | None:
        head = super().read_head()
        if self.times:
            self.times -= 1
            liveset.build_keys_index(self.url, "n" if self.times % 2 else "id", overwrite=True, verbose=False)
        return head


@pytest.mark.parametrize("times", [1, 3, 20])
def test_published_keys_are_those_of_the_copied_version(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    source = Busy(path)
    monkeypatch.setattr(source, "times", times)
    monkeypatch.setattr(copying, "open_store", lambda place: source if place.url == str(path) else open_store(place))
    liveset.cp(path, tmp_path / "copy")
    field = "n" if liveset.StreamingDataset(tmp_path / "copy").keys.kind is int else "id"
    shards = [data for name, data in content(tmp_path / "copy").items() if name.endswith(".parquet")]
    assert len(shards) == (times < 20)  # else they are left out: nobody held still
    for shard in shards:
        assert sorted(row["key"] for row in parquet_rows(shard)) == sorted(liveset.StreamingDataset(tmp_path / "copy").keys)
    assert [sample[field] for sample in liveset.StreamingDataset(tmp_path / "copy")] == list(
        liveset.StreamingDataset(tmp_path / "copy").keys
    )


def test_what_is_left_of_an_expired_version_stays(path: Path, tmp_path: Path) -> None:
    names = set(content(path))
    data = content(path)
    liveset.vacuum(path, keep=0, grace=timedelta(0))
    gone = sorted(name for name in names - set(content(path)) if kind_of(name) is Kind.VERSION)
    assert gone
    (path / gone[0]).write_bytes(data[gone[0]])
    report = liveset.cp(path, tmp_path / "copy")
    assert gone[0] not in content(tmp_path / "copy")
    assert list(report.versions) == sorted(seen(path))


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", ["", "local:"])
@pytest.mark.parametrize("pattern", ["chunk-*", "_liveset/keys/*.keys"])
def test_damage_is_not_copied(path: Path, tmp_path: Path, marked: str, pattern: str) -> None:
    victim = next(path.glob(pattern))
    data = victim.read_bytes()
    victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(liveset.Corrupt, match=victim.name):
        liveset.cp(f"{marked}{path}", tmp_path / "copy")
    assert "index.json" not in content(tmp_path / "copy")
    victim.write_bytes(data[:-1])
    with pytest.raises(liveset.Corrupt, match="truncated"):
        liveset.cp(f"{marked}{path}", tmp_path / "copy")
    victim.unlink()
    with pytest.raises(liveset.NotFound, match=f"{victim.name}.*repair"):
        liveset.cp(f"{marked}{path}", tmp_path / "copy")
    victim.write_bytes(data)
    liveset.cp(f"{marked}{path}", tmp_path / "copy")
    is_same(tmp_path / "copy", path)


def test_a_damaged_archive_is_not_copied(path: Path, tmp_path: Path) -> None:
    victim = min((path / "_liveset/versions").iterdir())
    victim.write_bytes(victim.read_bytes().replace(b"10", b"11", 1))
    with pytest.raises(liveset.Corrupt, match=victim.name):
        liveset.cp(path, tmp_path / "copy")
    liveset.cp(path, tmp_path / "newest", versions=False)


def test_a_foreign_copy_can_be_adopted(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", [row(number) for number in range(10)], chunk_size=3, key="id")
    make_foreign(tmp_path / "ds")
    liveset.cp(tmp_path / "ds", tmp_path / "copy")
    with liveset.dataset_update(tmp_path / "copy") as update:
        del update["k3"]
        update.commit()
    assert len(liveset.StreamingDataset(tmp_path / "copy")) == 9
    assert len(liveset.StreamingDataset(tmp_path / "ds")) == 10
