"""verify names what is affected and proves that something is gone; repair brings back what is damaged, and nothing else."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import liveset
import liveset.tools.verify
from liveset.cli import main
from liveset.edit.changes import Keys, SetKeys
from liveset.edit.commit import commit
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.session import DatasetUpdate
from liveset.edit.splice import splice
from liveset.errors import Corrupt, DatasetNotFound, ForeignEdit
from liveset.format.codec import ZSTD_MAGIC, Compression, checksum, compress
from liveset.format.keytable import KeyColumn
from liveset.format.stamp import Redirect, Redirects
from liveset.snapshot import open_snapshot
from liveset.storage import Swap, Tag, open_store
from liveset.storage.local import LocalStore
from liveset.testing import SimulatedCrash, WrappedStore
from liveset.tools.repair import RepairReport, Restored
from liveset.tools.search import Found
from liveset.tools.verify import Damage
from tests.support.foreign import make_foreign, write_arrow
from tests.support.remote import place_at
from tests.support.services import RemoteFolder
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

LEVELS = [None, "batch", "sample", "chunk"]


def play(i: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"play-{i}", "label": i % 3, "note": f"recorded as {i}"} | fields


def compression(level: str | None) -> Compression | None:
    return Compression("zstd", level, 3) if level is not None else None


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Version 1 with ten samples in three chunks, version 2 with another sample in the second one."""
    path = tmp_path / "plays"
    write_dataset(path, map(play, range(10)), key="id")
    edit(path, 5, label=9)
    return path


@pytest.fixture
def backup(plays: Path) -> Path:
    return Path(shutil.copytree(plays, plays.parent / "backup"))


@pytest.fixture(autouse=True)
def _no_commit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveset.tools.verify, "COMMITS_TAKE", 0)


def edit(path: Path, i: int, **fields: Any) -> None:
    with liveset.dataset_update(path) as update:
        update[f"play-{i}"] = play(i, **fields)
        update.commit()


def chunk(path: Path, number: int, version: int | None = None) -> Path:
    return path / open_snapshot(open_store(path), version).index.chunks[number].filename


def damage(file: Path, at: int = -5) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.unlink()  # an archived version may be a second name of the index
    file.write_bytes(data)


def content(path: Path, version: int | None = None) -> list[Any]:
    with liveset.StreamingDataset(path, version=version) as ds:
        return list(zip(ds.keys, ds, strict=True))


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


def kept(path: Path) -> list[bytes]:
    """Return the damaged files that a repair has replaced."""
    return sorted(file.read_bytes() for file in (path / "_liveset/quarantine").glob("*"))


def used(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(path).items() if not name.startswith("_liveset/quarantine/")}


def stays_repaired(path: Path, **options: Any) -> None:
    before = files(path)
    assert not liveset.repair(path, **options).done
    assert files(path) == before


# --- verify: what is affected -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_damage_names_positions_and_keys(tmp_path: Path, level: str | None) -> None:
    write_dataset(tmp_path, map(play, range(10)), key="id", compression=compression(level))
    damage(chunk(tmp_path, 1), 20)
    chunk(tmp_path, 2).unlink()
    first, second = liveset.verify(tmp_path).damaged
    assert (first.file, first.positions, first.keys) == (chunk(tmp_path, 1).name, range(4, 8), tuple(f"play-{i}" for i in range(4, 8)))
    assert (second.positions, second.keys) == (range(8, 10), ("play-8", "play-9"))


def test_few_keys_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(350)), chunk_size=300, key="id")
    damage(chunk(tmp_path, 0))
    (found,) = liveset.verify(tmp_path).damaged
    assert (len(found.positions), len(found.keys), found.keys[99]) == (300, 100, "play-99")


def test_without_keys_positions_are_enough(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)))
    damage(chunk(tmp_path, 0))
    (found,) = liveset.verify(tmp_path).damaged
    assert (found.positions, found.keys) == (range(4), ())


def test_a_damaged_key_table_hides_no_damaged_chunk(plays: Path) -> None:
    damage(chunk(plays, 0))
    damage(next((plays / "_liveset/keys").iterdir()))
    first, second = liveset.verify(plays).damaged
    assert (first.positions, first.keys, second.positions) == (range(4), (), range(0))


def test_an_old_index_that_was_put_back_is_damage(plays: Path) -> None:
    shutil.copy(plays / "_liveset/versions/00000001.json", plays / "older.json")
    (plays / "index.json").unlink()
    (plays / "older.json").rename(plays / "index.json")
    assert liveset.verify(plays).ok, "nothing proves that there was a second version"
    edit(plays, 1, label=11)
    edit(plays, 1, label=2)
    (plays / "index.json").unlink()
    shutil.copy(plays / "_liveset/versions/00000001.json", plays / "index.json")
    assert liveset.verify(plays).damaged == (
        Damage("index.json", "it is version 1, but version 2 is archived: it was put back or replaced"),
    )
    assert liveset.verify(plays, version=1).ok
    liveset.repair(plays)
    assert liveset.verify(plays).ok


def test_without_an_index_the_error_tells_the_way_back(plays: Path) -> None:
    for harm in (cut, lose):
        harm(plays)
        with pytest.raises((Corrupt, DatasetNotFound), match=r"index\.json.*`liveset repair` puts the newest"):
            liveset.verify(plays)
    shutil.rmtree(plays / "_liveset/versions")
    with pytest.raises(DatasetNotFound, match=r"index\.json file\.$"):
        liveset.verify(plays)


def test_an_index_of_another_program_beside_our_versions_is_damage(plays: Path) -> None:
    index = json.loads((plays / "index.json").read_bytes())
    del index["edit"]
    (plays / "index.json").unlink()
    (plays / "index.json").write_text(json.dumps(index))
    (found,) = liveset.verify(plays).damaged
    assert (found.file, "written by another program, but version 1" in found.problem) == ("index.json", True)


def test_a_commit_during_verify_is_no_damage(plays: Path) -> None:
    report = liveset.verify(plays, progress=lambda done, total: edit(plays, 1, label=done + 3))
    assert report.ok


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("more", [1, -1])
def test_a_wrong_count_in_the_index_is_damage(plays: Path, number: int, more: int) -> None:
    index = json.loads((plays / "index.json").read_bytes())
    index["chunks"][number]["chunk_size"] += more
    (plays / "index.json").unlink()
    (plays / "index.json").write_text(json.dumps(index))
    first, second = liveset.verify(plays).damaged
    assert (first.file, second.file) == ("index.json", index["chunks"][number]["filename"])
    assert second.problem.startswith("the header item count is"), "without the name again"


# --- verify: what is absent -------------------------------------------------------------------------------------------


def found(path: Path, *absent: Any) -> set[str]:
    report = liveset.verify(path, absent=absent)
    assert report.ok == (not report.found)
    assert report.searched == len(files(path))
    return {one.file for one in report.found}


@pytest.mark.parametrize("level", LEVELS)
def test_a_key_is_found_in_every_file_that_holds_it(tmp_path: Path, level: str | None) -> None:
    write_dataset(tmp_path, map(play, range(10)), key="id", compression=compression(level))
    edit(tmp_path, 5, label=9)
    tables = {f"_liveset/keys/{file.name}" for file in (tmp_path / "_liveset/keys").iterdir()}
    assert found(tmp_path, "play-5") == tables | {"keys/shard-00000.parquet", chunk(tmp_path, 1, 1).name, chunk(tmp_path, 1).name}
    assert found(tmp_path, "recorded as 9") == {chunk(tmp_path, 2).name}
    assert found(tmp_path, "play-77", "recorded", b"nowhere") == {chunk(tmp_path, i, v).name for i, v in ((0, 1), (1, 1), (2, 1), (1, 2))}
    assert found(tmp_path, "play-77", b"nowhere", 5) == set()


def test_a_deleted_key_is_found_until_its_files_are_gone(plays: Path) -> None:
    with liveset.dataset_update(plays) as update:
        del update["play-5"]
        update.commit()
    assert {place.rpartition("/")[0] for place in found(plays, "play-5")} == {"", "_liveset/keys"}
    assert any("deleted" in one.place for one in liveset.verify(plays, absent=["play-5"]).found)


def test_words_and_bytes(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": "a-10", "t": "about a-1, twice", "b": b"xa-2y"}, {"id": "b", "t": "a-33", "b": b""}], key="id")
    (name,) = (file.name for file in tmp_path.glob("chunk-*"))
    assert found(tmp_path, "a-10") >= {name}
    assert liveset.verify(tmp_path, absent=["a-1"]).found == (Found("a-1", name, "sample 0, field 't'"),)
    assert liveset.verify(tmp_path, absent=["a-2"]).found == (Found("a-2", name, "sample 0, field 'b'"),)
    assert found(tmp_path, "a-3") == set()
    assert name in found(tmp_path, b"a-3")
    assert found(tmp_path, b"bout") == {name}


def test_a_key_is_not_in_a_longer_one(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"id": "game-1/play-2"}, {"id": "game-1"}], key="id")
    assert found(tmp_path, "play-2") == set()
    assert {one.place for one in liveset.verify(tmp_path, absent=["game-1"]).found} >= {"sample 1, field 'id'", "column 'key'"}


def test_a_text_does_not_go_on_in_the_next_field(tmp_path: Path) -> None:
    """The fields stand one behind the other; what follows is no part of the word."""
    write_dataset(tmp_path, [{"id": "k", "a": "secret", "b": "ly"}], key="id")
    assert len(found(tmp_path, "secret")) == 1


def packed(data: bytes, noise: int = 9000) -> bytes:
    """Return a zstd frame in which nothing of the data can be read."""
    return compress(bytes(random.Random(1).choices(b"abcdef", [9, 5, 4, 3, 2, 1], k=noise)) + data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("notes.txt", b"about play-5000."),
        ("_liveset/staged/run/a.json", b'{"key": "play-5000"}'),
        ("_liveset/index.json.0123456789abcdef.tmp", b"{play-5000"),
        ("_liveset/leases/x.json", b'{"a\\u0062": "\\n\\u0070lay-5000"}'),
        ("old.zst", b"lead" + packed(b"play-5000") + b"trail"),
        ("twice.zst", packed(packed(b"play-5000"), 60_000)),
        ("chunk-0-9.bin", b"play-5000"),
        ("index.json.bak", b'"play-5000"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_nothing_names(plays: Path, name: str, data: bytes) -> None:
    assert found(plays, "play-5000") == set()
    assert not name.endswith(".zst") or (ZSTD_MAGIC not in data[5:] and b"play" not in data), "it is not to be seen from outside"
    (plays / name).parent.mkdir(parents=True, exist_ok=True)
    (plays / name).write_bytes(data)
    assert found(plays, "play-5000") == {name}


def test_attributes_and_messages(plays: Path) -> None:
    liveset.set_attributes(plays, {"owner": "Zoë and play-5000"})
    assert found(plays, "play-5000") == found(plays, "Zoë") == {"index.json"}
    shutil.copy(plays / "index.json", plays / "index.json.bak")
    assert found(plays, "Zoë") == {"index.json", "index.json.bak"}, "escaped in both"
    (plays / "index.json.bak").unlink()
    liveset.set_attributes(plays, {"owner": None})
    assert found(plays, "Zoë") == {"_liveset/versions/00000003.json"}


def test_parquet_and_arrow(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_arrow(tmp_path / "ds", [{"id": f"k{i}", "t": {"x": [f"name {i}"]}} for i in range(500)], chunk_size=300, codec="lz4")
    assert found(tmp_path / "ds", "name 400") == {"chunk-0-1.bin"}
    assert found(tmp_path / "ds", "k40") == {"chunk-0-0.bin", "keys/shard-00000.parquet"}
    pq.write_table(pa.table({"d": pa.array(["of k40, too", "z"]).dictionary_encode()}), tmp_path / "ds/other.parquet")
    assert "other.parquet" in found(tmp_path / "ds", "k40")


def test_integers(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"n": i, "v": 7000} for i in range(6990, 6998)], key="n")
    places = {one.file.partition("-")[0]: one.place for one in liveset.verify(tmp_path, absent=[6993]).found}
    assert places.keys() == {"_liveset/keys/base", "keys/shard", "chunk"}
    assert places["chunk"] == "sample 3, field 'n'"
    assert found(tmp_path, 7000, 1) == set()


def test_a_deleted_integer_is_found(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"n": i} for i in range(6990, 6998)], key="n")
    with liveset.dataset_update(tmp_path) as update:
        del update[6993]
        update.commit()
    places = {one.file.partition("-")[0]: one.place for one in liveset.verify(tmp_path, absent=[6993]).found}
    assert places["_liveset/keys/delta"] == "row 0 of the key table (a deleted key)"


def test_many_keys_at_once(tmp_path: Path) -> None:
    write_dataset(tmp_path, [{"t": "t" * (i % 7), "id": f"{i * 7919:08x}"} for i in range(300)], chunk_size=100, key="id")
    report = liveset.verify(tmp_path, absent=[f"{i:08x}" for i in range(0, 300 * 7919, 53)])
    chunks = {one.what for one in report.found if one.file.startswith("chunk")}
    assert chunks == {f"{i * 7919:08x}" for i in range(300) if i * 7919 % 53 == 0}


def test_what_cannot_be_searched_for(plays: Path) -> None:
    with pytest.raises(TypeError, match="list"):
        liveset.verify(plays, absent="play-5")
    with pytest.raises(TypeError, match="Unsupported key type"):
        liveset.verify(plays, absent=[1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="empty"):
        liveset.verify(plays, absent=[""])


def test_what_is_packed_otherwise_is_not_seen(plays: Path) -> None:
    """The documented limit."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", "play-5000" * 100)
    (plays / "a.zip").write_bytes(sink.getvalue())
    assert found(plays, "play-5000") == set()


# --- repair: the index ------------------------------------------------------------------------------------------------


def lose(path: Path) -> None:
    (path / "index.json").unlink()


def cut(path: Path) -> None:
    (path / "index.json").write_bytes((path / "index.json").read_bytes()[:-300])


def turn_a_bit(path: Path) -> None:
    data = (path / "index.json").read_bytes()
    (path / "index.json").unlink()
    (path / "index.json").write_bytes(data.replace(b'"chunk_size": 4', b'"chunk_size": 5', 1))


def put_back_an_old_one(path: Path) -> None:
    edit(path, 1, label=11)
    edit(path, 1, label=2)
    (path / "index.json").unlink()
    shutil.copy(path / "_liveset/versions/00000001.json", path / "index.json")


@pytest.mark.parametrize("harm", [lose, cut, turn_a_bit, put_back_an_old_one])
def test_the_newest_archived_version_becomes_the_newest(plays: Path, harm: Callable[[Path], None]) -> None:
    first = content(plays, 1)
    lost = chunk(plays, 1).name
    harm(plays)
    before = files(plays)
    planned = liveset.repair(plays, dry_run=True)
    assert files(plays) == before
    report = liveset.repair(plays)
    assert (planned.version, planned.index, planned.done) == (report.version, report.index, True)
    newest = 3 if harm is put_back_an_old_one else 1
    assert f"version {newest}, the newest that is archived" in report.index
    assert content(plays) == (first if newest == 1 else content(plays, 3))
    assert (lost in report.unlisted) == (newest == 1)
    head = liveset.history(plays)[0]
    assert (head.op, head.version) == ("repair", newest + 2), "the number of the lost version is not used again"
    assert liveset.verify(plays).ok
    if harm is not lose:
        assert kept(plays) == [before["index.json"]]
    stays_repaired(plays)
    edit(plays, 7, label=8)
    assert liveset.StreamingDataset(plays)["play-7"]["label"] == 8
    assert liveset.vacuum(plays, keep=1, grace=timedelta(0)).expired
    assert liveset.repair(plays).ok
    assert liveset.verify(plays).ok


@pytest.mark.parametrize("keep", [None, 300])
def test_the_index_of_an_object_store_comes_back(plays: Path, remote_folder: RemoteFolder, keep: int | None) -> None:
    place = place_at(remote_folder / "plays")
    liveset.cp(plays, place)
    store = open_store(place)
    assert {entry.name for entry in store.list("keys/")} == {"keys/shard-00000.parquet"}, "which the new head must withdraw"
    head = store.read("index.json")
    store.delete(["index.json"])
    if keep is not None:
        store.write("index.json", head[:keep])
    report = liveset.repair(place)
    assert (report.ok, report.version) == (True, 3)
    with liveset.StreamingDataset(place) as ds:
        assert (list(ds.keys), list(ds)) == ([f"play-{i}" for i in range(10)], [play(i) for i in range(10)])
    assert liveset.verify(place).ok
    assert not liveset.repair(place).done


def test_a_copy_gives_the_lost_version_back(plays: Path, backup: Path) -> None:
    expected = content(plays)
    lose(plays)
    report = liveset.repair(plays, copy=backup)
    assert (report.index, report.version, report.unlisted) == ("missing: version 2 of the copy", 3, ())
    assert content(plays) == content(plays, 2) == expected
    assert [version.version for version in liveset.history(plays)] == [3, 2, 1]
    stays_repaired(plays, copy=backup)


def test_a_copy_gives_back_the_last_version_whose_archive_is_damaged(plays: Path, backup: Path) -> None:
    expected = content(plays)
    edit(plays, 1, label=7)
    damage(plays / "_liveset/versions/00000002.json")
    damaged = (plays / "_liveset/versions/00000002.json").read_bytes()
    lose(plays)
    planned = liveset.repair(plays, copy=backup, dry_run=True)
    report = liveset.repair(plays, copy=backup)
    assert replace(planned, dry_run=False) == report
    assert (report.index, report.version, report.older) == ("missing: version 2 of the copy", 4, ())
    assert content(plays) == content(plays, 2) == expected
    assert kept(plays) == [damaged]
    stays_repaired(plays, copy=backup)


def put_back(path: Path, data: bytes, when: float) -> None:
    """Do what a backup tool does, with the time that the file had or the present one."""
    (path / "index.json").unlink()
    (path / "index.json").write_bytes(data)
    os.utime(path / "index.json", (when, when))


@pytest.mark.parametrize("later", [0, 60])
def test_an_index_of_the_version_before_may_have_been_put_back(plays: Path, later: int) -> None:
    edit(plays, 1, label=7)
    with liveset.dataset_update(plays) as update:
        del update["play-2"]
        update.commit()
    old, when = (plays / "index.json").read_bytes(), (plays / "index.json").stat().st_mtime
    edit(plays, 3, label=8)
    expected = content(plays)
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    put_back(plays, old, when + later)
    report = liveset.verify(plays)
    assert (report.ok, report.damaged, len(report.notes)) == (True, (), 1)
    assert "a version after 4 was begun" in report.notes[0]
    assert not liveset.repair(plays).done, "without a copy it looks like a commit that did not land"
    planned = liveset.repair(plays, copy=copy, dry_run=True)
    done = liveset.repair(plays, copy=copy)
    assert replace(planned, dry_run=False) == done
    assert (done.index, done.version) == ("older (version 4) than version 5, whose files are here: version 5 of the copy", 6)
    assert content(plays) == content(plays, 5) == expected
    assert kept(plays) == [old]
    assert (liveset.verify(plays).ok, liveset.verify(plays).notes) == (True, ())
    stays_repaired(plays, copy=copy)
    edit(plays, 5, label=1)
    assert liveset.verify(plays).notes == ()


class DiesAtTheSwap(WrappedStore):
    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        raise SimulatedCrash


def test_a_commit_that_did_not_land_is_not_brought_back(plays: Path, backup: Path) -> None:
    edit(backup, 3, label=7)
    update = DatasetUpdate(DiesAtTheSwap(open_store(plays)))
    update["play-1"] = play(1, label=11)
    with pytest.raises(SimulatedCrash):
        update.commit()
    before = files(plays)
    assert "_liveset/versions/00000002.json" in before
    assert not liveset.repair(plays, copy=backup).done, "what the copy has was committed there, and not here"
    assert files(plays) == before
    assert (liveset.verify(plays).ok, len(liveset.verify(plays).notes)) == (True, 1)
    # On object stores the archive is a file of its own, younger than the index.
    younger = archive(plays, 2)
    data = younger.read_bytes()
    younger.unlink()
    younger.write_bytes(data)
    os.utime(younger, (time.time() + 60,) * 2)
    assert liveset.verify(plays).notes == ()
    edit(plays, 1, label=11)
    assert (liveset.verify(plays).ok, liveset.verify(plays).notes) == (True, ())


def test_a_lost_version_of_which_others_know_nothing_is_not_brought_back(plays: Path) -> None:
    old, when = (plays / "index.json").read_bytes(), (plays / "index.json").stat().st_mtime
    edit(plays, 3, label=8)
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    edit(copy, 3, label=9)
    put_back(plays, old, when)
    edit(plays, 7, label=5)
    os.link(plays / "index.json", archive(plays, 3))
    assert not liveset.repair(plays, copy=copy).done, "the copy does not continue what was committed since"


def test_a_commit_under_way_is_waited_for(plays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.link(plays / "index.json", archive(plays, 2))  # what it does first
    assert len(liveset.verify(plays).notes) == 1

    def land(_: float) -> None:
        monkeypatch.undo()
        edit(plays, 1, label=11)

    monkeypatch.setattr(liveset.tools.verify, "COMMITS_TAKE", 60)
    monkeypatch.setattr(time, "sleep", land)
    report = liveset.verify(plays)
    assert (report.ok, report.notes) == (True, ())
    assert open_snapshot(open_store(plays)).version == 3


def test_versions_that_are_archived_at_once_raise_no_question(plays: Path) -> None:
    liveset.purge(plays, ["play-3"])
    assert liveset.verify(plays).notes == ()
    lose(plays)
    liveset.repair(plays)
    assert liveset.verify(plays).notes == ()


def test_an_index_of_another_line_is_replaced_by_what_is_archived(plays: Path, backup: Path) -> None:
    edit(plays, 1, label=7)
    expected = content(plays)
    edit(plays, 1, label=8)
    edit(backup, 3, label=9)
    put_back(plays, (other := (backup / "index.json").read_bytes()), 0)
    (found,) = (damage for damage in liveset.verify(plays).damaged if damage.file == "index.json")
    assert found.problem == "it is version 3, but another version of that number is archived: it was put back or replaced"
    with pytest.raises(ForeignEdit):
        edit(plays, 5, label=1)
    report = liveset.repair(plays)
    assert report.index.startswith("another version 3 than the one that is archived: version 3")
    assert (content(plays), kept(plays)) == (expected, [other])
    edit(plays, 5, label=1)
    assert liveset.verify(plays).ok


def test_a_copy_that_is_older_or_of_another_dataset_is_not_believed(plays: Path, backup: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "other", map(play, range(3)), key="id")
    for i in range(6):
        edit(tmp_path / "other", 1, label=i)
    for i in range(3):
        edit(plays, 1, label=i + 5)
    expected = content(plays, 4)
    lose(plays)
    for copy in (backup, tmp_path / "other"):
        assert liveset.repair(plays, copy=copy, dry_run=True).index == "missing: version 4, the newest that is archived"
    liveset.repair(plays, copy=backup)
    assert content(plays) == expected


def test_a_copy_that_is_no_newer_is_not_needed(plays: Path, backup: Path) -> None:
    edit(plays, 1, label=7)
    lose(plays)
    assert liveset.repair(plays, copy=backup).index == "missing: version 2, the newest that is archived"


def test_a_number_is_not_used_twice_when_the_index_is_lost_again(plays: Path, backup: Path) -> None:
    lose(plays)
    assert liveset.repair(plays).version == 3
    lose(plays)
    assert liveset.repair(plays, copy=backup).version == 5


def test_a_first_version_comes_from_a_copy_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(10)), key="id")
    expected = content(path)
    backup = shutil.copytree(path, tmp_path / "backup")
    lose(path)
    with pytest.raises(Corrupt, match="copy="):
        liveset.repair(path)
    assert not (path / "index.json").exists()
    assert liveset.repair(path, copy=backup).version == 2
    assert content(path) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_chunk_files_and_the_schema_of_a_copy(tmp_path: Path, level: str | None) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(50)), key="id", compression=compression(level))
    expected = content(path)
    write_dataset(tmp_path / "like", map(play, range(3)), compression=compression(level))
    lose(path)
    report = liveset.repair(path, copy=tmp_path / "like")
    assert "13 chunk files, with the schema of the copy" in report.index
    assert content(path) == expected
    assert [(version.version, version.op) for version in liveset.history(path)] == [(1, "repair")]
    assert liveset.verify(path).ok
    stays_repaired(path, copy=tmp_path / "like")


def test_chunk_files_of_two_generations_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(10)))
    write_dataset(path, map(play, range(5)))
    write_dataset(tmp_path / "like", map(play, range(3)))
    lose(path)
    shutil.rmtree(path / "_liveset")
    with pytest.raises(Corrupt, match="the same place"):
        liveset.repair(path, copy=tmp_path / "like")


def test_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound):
        liveset.repair(tmp_path / "absent")
    with pytest.raises(DatasetNotFound, match="index.json"):
        liveset.repair(tmp_path)


def test_the_index_of_another_program_is_not_replaced(plays: Path) -> None:
    index = json.loads((plays / "index.json").read_bytes())
    del index["edit"]
    (plays / "index.json").write_text(json.dumps(index))
    with pytest.raises(ForeignEdit, match="another program"):
        liveset.repair(plays)


def test_an_index_of_another_program_is_put_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(10)), key="id")
    make_foreign(path)
    backup = shutil.copytree(path, tmp_path / "backup")
    cut(path)
    assert liveset.repair(path, copy=backup).version == 0
    assert (path / "index.json").read_bytes() == (tmp_path / "backup/index.json").read_bytes()


# --- repair: files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_chunks_of_all_versions_and_key_tables_come_back(tmp_path: Path, level: str | None) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(10)), key="id", compression=compression(level))
    edit(path, 5, label=9)
    backup = shutil.copytree(path, tmp_path / "backup")
    expected = files(path)
    damage(chunk(path, 0), 20)
    chunk(path, 1).unlink()
    chunk(path, 1, 1).write_bytes(b"")
    damage(next((path / "_liveset/keys").iterdir()))
    damage(path / "_liveset/versions/00000001.json")
    before = files(path)
    planned = liveset.repair(path, copy=backup, dry_run=True)
    assert files(path) == before
    report = liveset.repair(path, copy=backup)
    assert replace(planned, dry_run=False) == report
    assert (len(report.restored), report.left, report.older) == (5, (), ())
    assert used(path) == expected
    assert kept(path) == sorted(before[one.file] for one in report.restored if one.file in before)
    assert all(one.source == f"{tmp_path}/backup/{one.file}" for one in report.restored)
    stays_repaired(path, copy=backup)


def test_the_checksum_decides_and_not_the_name(plays: Path, backup: Path) -> None:
    name = chunk(plays, 0).name
    good = chunk(plays, 0).read_bytes()
    damage(plays / name)
    damage(backup / name)
    assert not liveset.repair(plays, copy=backup).done
    (backup / "renamed.bin").write_bytes(good)
    (report,) = liveset.repair(plays, copy=backup).restored
    assert report == (name, f"{backup}/renamed.bin")
    assert chunk(plays, 0).read_bytes() == good


def test_an_exported_copy_serves_too(plays: Path, tmp_path: Path) -> None:
    liveset.export(plays, tmp_path / "plain")
    expected = content(plays)
    for number in range(3):
        damage(chunk(plays, number))
    assert len(liveset.repair(plays, copy=tmp_path / "plain").restored) == 3
    assert content(plays) == expected


def test_chunks_without_a_checksum_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, map(play, range(10)), key="id")
    make_foreign(path)
    backup = Path(shutil.copytree(path, tmp_path / "backup"))
    good = (path / "chunk-0-1.bin").read_bytes()
    for folder in (path, backup):
        (folder / "chunk-0-1.bin").write_bytes(good[:40])
    assert [one.file for one in liveset.repair(path, copy=backup).left] == ["chunk-0-1.bin"]
    (backup / "chunk-0-1.bin").write_bytes(good)
    assert liveset.repair(path, copy=backup).ok
    assert (path / "chunk-0-1.bin").read_bytes() == good


def archive(path: Path, number: int) -> Path:
    return path / f"_liveset/versions/{number:08}.json"


def test_versions_whose_archive_is_lost_come_back(plays: Path) -> None:
    for label in (4, 5, 6):
        edit(plays, 7, label=label)
    expected = {number: content(plays, number) for number in range(1, 6)}
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    names = [f"_liveset/versions/{number:08}.json" for number in (4, 2)]
    for name in names:
        (plays / name).unlink()
    report = liveset.repair(plays)
    assert (report.ok, report.done) == (True, False)
    assert report.older == tuple(Damage(name, "does not exist, and no vacuum has removed it") for name in names)
    report = liveset.repair(plays, copy=copy)
    assert ([restored.file for restored in report.restored], report.older) == (names, ())
    assert {number: content(plays, number) for number in expected} == expected
    stays_repaired(plays, copy=copy)
    shutil.rmtree(plays / "_liveset/versions")
    assert not liveset.repair(plays).older, "it may be a copy without earlier versions"
    assert len(liveset.repair(plays, copy=copy).restored) == 4
    assert {number: content(plays, number) for number in expected} == expected


def test_versions_that_were_not_copied_or_forgotten_do_not_come_back(plays: Path) -> None:
    edit(plays, 7, label=5)
    alone = plays.parent / "alone"
    liveset.cp(plays, alone, versions=False)
    edit(alone, 7, label=6)
    stays_repaired(alone, copy=plays)
    assert not liveset.repair(alone).older
    liveset.tag(plays, "first", 1)
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    assert liveset.vacuum(plays, keep=1, grace=timedelta(0)).expired
    stays_repaired(plays, copy=copy)
    assert not liveset.repair(plays).older


def test_versions_of_a_copy_that_was_edited_elsewhere_are_not_ours(plays: Path, backup: Path) -> None:
    for path, i in ((plays, 1), (backup, 2)):
        edit(path, i, label=7)
        edit(path, i, label=8)
    archive(plays, 3).unlink()
    report = liveset.repair(plays, copy=backup)
    assert (report.done, [damage.file for damage in report.older]) == (False, ["_liveset/versions/00000003.json"])


def test_an_archive_that_a_purge_did_not_see_does_not_come_back(plays: Path) -> None:
    edit(plays, 7, label=5)
    edit(plays, 7, label=6)
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    archive(plays, 2).unlink()
    liveset.purge(plays, ["play-5"])
    edit(plays, 7, label=4)
    stays_repaired(plays, copy=copy)
    assert liveset.verify(plays, absent=["play-5"]).found == ()
    # One that was lost after the purge is without the sample.
    archive(plays, 3).unlink()
    assert [restored.file for restored in liveset.repair(plays, copy=copy).restored] == ["_liveset/versions/00000003.json"]
    assert [found.file for found in liveset.verify(plays, absent=["play-5"]).found] == []
    with liveset.StreamingDataset(plays, version=3) as ds:
        assert (ds[0], "play-5" in ds.keys) == (play(0), False)


def test_keys_are_published_after_their_tables_have_come_back(plays: Path, backup: Path) -> None:
    (table,) = (plays / "_liveset/keys").iterdir()
    cut(plays)
    table.unlink()
    assert liveset.repair(plays, copy=backup).ok
    assert (plays / "keys/shard-00000.parquet").exists()


@pytest.mark.parametrize("harm", [damage, Path.unlink])
def test_an_archive_comes_back_from_the_newest_version_of_a_copy(plays: Path, backup: Path, harm: Callable[[Path], None]) -> None:
    edit(plays, 7, label=5)
    expected = content(plays, 2)
    harm(archive(plays, 2))
    report = liveset.repair(plays, copy=backup)
    assert report.restored == (Restored("_liveset/versions/00000002.json", f"{backup}/index.json"),)
    assert content(plays, 2) == expected
    stays_repaired(plays, copy=backup)


def test_what_another_program_wrote_is_not_taken_from_another_dataset(tmp_path: Path) -> None:
    for name, count in (("plays", 10), ("other", 6)):
        write_dataset(tmp_path / name, map(play, range(count)), key="id")
        make_foreign(tmp_path / name)
    edit(tmp_path / "plays", 5, label=9)
    damage(archive(tmp_path / "plays", 0), 0)
    report = liveset.repair(tmp_path / "plays", copy=tmp_path / "other")
    assert (report.done, [damage.file for damage in report.older]) == (False, ["_liveset/versions/00000000.json"])


def test_an_archive_of_the_newest_version_comes_back_from_the_index(plays: Path) -> None:
    liveset.purge(plays, ["play-3"])
    expected = content(plays)
    damage(archive(plays, 3))
    (found,) = liveset.verify(plays).damaged
    assert (found.file, "digest" in found.problem) == ("_liveset/versions/00000003.json", True)
    with pytest.raises(ForeignEdit):
        edit(plays, 1, label=2)
    report = liveset.repair(plays)
    assert (report.ok, report.version, [restored.file for restored in report.restored]) == (True, 3, [found.file])
    stays_repaired(plays)
    edit(plays, 1, label=2)
    assert content(plays, 3) == expected


def test_a_key_table_under_the_name_of_another_one_is_damage(plays: Path, backup: Path) -> None:
    with liveset.dataset_update(plays) as update:
        del update["play-2"]
        update.commit()
    expected = content(plays)
    copy = Path(shutil.copytree(plays, plays.parent / "copy"))
    base, delta = (name for name in sorted(files(plays)) if name.startswith("_liveset/keys/"))
    (plays / delta).unlink()
    shutil.copy(plays / base, plays / delta)
    (found,) = liveset.verify(plays).damaged
    assert (found.file, found.problem.startswith("is another key table: it has ")) == (delta, True)
    assert not liveset.repair(plays).ok
    assert liveset.repair(plays, copy=copy).ok
    assert content(plays) == expected


def test_a_key_table_of_another_dataset_is_damage(plays: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "twin", map(play, range(10)), key="id")
    (mine,), (other,) = (sorted((path / "_liveset/keys").iterdir()) for path in (plays, tmp_path / "twin"))
    assert mine.stat().st_size == other.stat().st_size
    mine.unlink()
    shutil.copy(other, mine)
    report = liveset.verify(plays)
    assert [len(damage.positions) for damage in report.damaged] == [4, 4, 2]
    assert all("the key tables know 0 keys of its" in damage.problem for damage in report.damaged)


def test_without_a_copy_the_damage_is_told(plays: Path) -> None:
    damage(chunk(plays, 0))
    damage(chunk(plays, 1, 1))
    report = liveset.repair(plays)
    assert (report.done, report.ok) == (False, False)
    assert [(one.file, one.keys) for one in report.left] == [(chunk(plays, 0).name, tuple(f"play-{i}" for i in range(4)))]
    assert [(one.file, one.keys) for one in report.older] == [(chunk(plays, 1, 1).name, ())]


def test_what_was_erased_from_earlier_versions_does_not_come_back(plays: Path, backup: Path) -> None:
    old = open_snapshot(open_store(plays), 1).index.chunks[1]
    head = open_snapshot(open_store(plays)).index
    assert head.edit is not None
    spliced = splice(chunk(plays, 1, 1).read_bytes(), old, None, {}, erased={1})
    buffers = b"".join(spliced.buffers)
    without = Redirect("chunk-0-1-0123456789abcdef.bin", len(buffers), checksum(buffers), spliced.head_check, (1,))
    new = head.replace(edit=replace(head.edit, redirects=Redirects({old.filename: without})))
    (plays / without.file).write_bytes(buffers)
    (plays / old.filename).unlink()
    (plays / "index.json").unlink()
    (plays / "index.json").write_bytes(new.to_bytes())
    stays_repaired(plays, copy=backup)
    (plays / without.file).unlink()
    assert [one.file for one in liveset.repair(plays, copy=backup).older] == [without.file]
    assert not (plays / old.filename).exists()


def test_readers_go_on_while_files_are_put_in_place(plays: Path, backup: Path) -> None:
    with liveset.StreamingDataset(plays) as ds:
        first = ds[0]
        damage(chunk(plays, 0))
        liveset.repair(plays, copy=backup)
        assert (ds[0], ds[1]["id"]) == (first, "play-1")


def test_files_that_hold_each_others_bytes_change_back(plays: Path) -> None:
    """Each is the only source of the other."""
    expected = used(plays)
    a, b, c = (chunk(plays, number) for number in range(3))
    first = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(c.read_bytes())
    c.write_bytes(first)
    before = files(plays)
    planned = liveset.repair(plays, dry_run=True)
    assert files(plays) == before
    report = liveset.repair(plays)
    assert replace(planned, dry_run=False) == report
    assert (report.ok, report.left, len(report.restored)) == (True, (), 3)
    assert used(plays) == expected
    assert kept(plays) == sorted([first, expected[b.name], expected[c.name]])
    stays_repaired(plays)


def test_a_repair_that_died_has_lost_nothing(plays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = used(plays)
    a, b = chunk(plays, 0), chunk(plays, 1)
    first = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(first)
    publish = LocalStore.publish

    def publish_and_die(*args: Any) -> bool:
        publish(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", publish_and_die)
        with pytest.raises(KeyboardInterrupt):
            liveset.repair(plays)
    assert used(plays) != expected
    assert liveset.repair(plays).ok
    assert used(plays) == expected


# --- repair: quarantine -----------------------------------------------------------------------------------------------


def test_quarantine_takes_damaged_chunks_out(plays: Path) -> None:
    rest = [pair for pair in content(plays) if pair[0] not in {f"play-{i}" for i in range(4, 8)}]
    damage(chunk(plays, 1))
    before = files(plays)
    planned = liveset.repair(plays, quarantine=True, dry_run=True)
    assert files(plays) == before
    report = liveset.repair(plays, quarantine=True)
    for one in (planned, report):
        assert (one.version, one.ok, one.left) == (3, True, ())
        assert [(gone.positions, gone.keys) for gone in one.quarantined] == [(range(4, 8), tuple(f"play-{i}" for i in range(4, 8)))]
    assert content(plays) == rest
    assert "play-5" not in liveset.StreamingDataset(plays).keys
    assert liveset.history(plays)[0].op == "repair"
    assert liveset.diff(plays, 2).removed == 4
    assert liveset.verify(plays).ok
    assert [one.file for one in liveset.repair(plays).older] == [chunk(plays, 1, 2).name], "earlier versions still need it"
    stays_repaired(plays, quarantine=True)
    with liveset.dataset_update(plays) as update:
        update.insert("play-5", play(5))
        update.commit()
    assert liveset.StreamingDataset(plays)["play-5"] == play(5)


def test_quarantine_of_everything_and_of_nothing(plays: Path, backup: Path) -> None:
    stays_repaired(plays, quarantine=True)
    for number in range(3):
        chunk(plays, number).unlink()
    report = liveset.repair(plays, quarantine=True)
    assert (len(report.quarantined), report.ok, content(plays)) == (3, True, [])
    liveset.repair(plays, copy=backup)
    liveset.restore(plays, 2)
    assert content(plays) == content(backup)


def test_quarantine_without_keys(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)))
    damage(chunk(tmp_path, 0))
    assert len(liveset.repair(tmp_path, quarantine=True).quarantined) == 1
    assert list(liveset.StreamingDataset(tmp_path)) == [play(i) for i in range(4, 10)]


def test_a_copy_is_better_than_quarantine(plays: Path, backup: Path) -> None:
    damage(chunk(plays, 1))
    report = liveset.repair(plays, copy=backup, quarantine=True)
    assert (report.quarantined, len(report.restored), report.version) == ((), 1, 2)


def test_quarantine_needs_keys_that_can_be_read(plays: Path) -> None:
    damage(chunk(plays, 1))
    damage(next((plays / "_liveset/keys").iterdir()))
    before = files(plays)
    for dry_run in (True, False):
        with pytest.raises(Corrupt, match="copy="):
            liveset.repair(plays, quarantine=True, dry_run=dry_run)
    assert files(plays) == before


def test_quarantine_is_for_datasets_of_ours(tmp_path: Path) -> None:
    write_dataset(tmp_path, map(play, range(10)), key="id")
    make_foreign(tmp_path)
    (tmp_path / "chunk-0-1.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="adopt"):
        liveset.repair(tmp_path, quarantine=True)


def test_the_copy_must_be_another_folder(plays: Path) -> None:
    (plays.parent / "link").symlink_to(plays)
    for copy in (plays, plays.parent / "link"):
        with pytest.raises(ValueError, match="itself"):
            liveset.repair(plays, copy=copy)


@pytest.mark.parametrize("harm", [None, lose])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_wrong_path_is_not_a_copy_without_help(
    plays: Path, tmp_path: Path, harm: Callable[[Path], None] | None, dry_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last commit would be lost by a typing error."""
    if harm is not None:
        harm(plays)
    before = files(plays)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for copy, error, said in (
        ("absent", DatasetNotFound, "should be the copy, does not exist"),
        ("empty", DatasetNotFound, "holds no dataset"),
        ("file", DatasetNotFound, "is a file"),
    ):
        with pytest.raises(error, match=said):
            liveset.repair(plays, copy=tmp_path / copy, dry_run=dry_run)
        code, out, _ = call(capsys, "repair", plays, "--copy", tmp_path / copy, "--dry-run" if dry_run else "--yes")
        assert said in str(code)
        assert out == ""
    assert files(plays) == before


def test_the_history_says_who_repaired_and_why(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(chunk(plays, 0))
    liveset.repair(plays, quarantine=True, message="a bad disk", author="ann")
    lose(plays)
    call(capsys, "repair", plays, "--yes", "-m", "a slip", "--author", "bob")
    found = [(one.op, one.message, one.author) for one in liveset.history(plays)[:2]]
    assert found == [("repair", "a slip", "bob"), ("replace", "", "")], "the quarantine was the lost version"
    liveset.repair(plays, quarantine=True, message="a bad disk", author="ann")
    assert [(one.op, one.message, one.author) for one in liveset.history(plays)[:1]] == [("repair", "a bad disk", "ann")]
    with pytest.raises(TypeError, match="message="):
        liveset.repair(plays, message=1)  # type: ignore[arg-type]


# --- the commands -----------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_verify_command(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "verify", plays) == (0, "ok: 3 chunks with 10 samples\n", "")
    code, out, _ = call(capsys, "verify", plays, "--absent", "play-5000", "--json")
    assert (code, json.loads(out)["found"]) == (0, [])
    code, _, err = call(capsys, "verify", plays, "--absent", "")
    assert (code, "--absent names an empty text" in err) == (2, True)
    code, out, _ = call(capsys, "verify", plays, "--absent", "play-5")
    assert code == 1
    assert f"  play-5: {chunk(plays, 1).name}, sample 1, field 'id'\n" in out
    damage(chunk(plays, 2))
    code, out, _ = call(capsys, "verify", plays)
    assert (code, out.splitlines()[2]) == (1, "    positions 8 to 9: play-8, play-9")
    code, out, _ = call(capsys, "verify", plays, "--json")
    (told,) = json.loads(out)["damaged"]
    assert (told["positions"], told["samples"], told["keys"]) == ([8, 10], 2, ["play-8", "play-9"])


def test_verify_command_tells_what_the_damage_is_to(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = next((plays / "_liveset/keys").glob("base-*"))
    damage(table)
    hint = "Build the keys again with liveset keys build PATH --field NAME --overwrite."
    code, out, _ = call(capsys, "verify", plays)
    line = f"_liveset/keys/{table.name}: its checksum differs. {hint}"
    assert (code, out.splitlines()[:2]) == (1, ["damaged: 1 key table", f"  {line}"])
    assert "liveset repair" in out.splitlines()[2]
    for more in ((), ("--quarantine",)):
        code, out, _ = call(capsys, "repair", plays, "--yes", *more)
        assert (code, out.splitlines()) == (1, [f"damaged: {line}", "nothing could be repaired"])
    assert call(capsys, "keys", "build", plays, "--field", "id", "--overwrite", "--yes")[0] == 0
    assert call(capsys, "verify", plays)[0] == 0
    damage(chunk(plays, 1))
    turn_a_bit(plays)
    for table in (plays / "_liveset/keys").iterdir():
        table.unlink()
    out = call(capsys, "verify", plays)[1]
    assert out.startswith("damaged: 2 of 3 chunks, 1 key table, index.json\n")
    assert out.count(hint) == 1


def test_verify_command_tells_what_may_be(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(plays / "index.json", archive(plays, 2))
    code, told, _ = call(capsys, "verify", plays)
    assert (code, told.splitlines()[-1].startswith("note: a version after 2 was begun: ")) == (0, True)
    _, told, _ = call(capsys, "verify", plays, "--json")
    assert len(json.loads(told)["notes"]) == 1


def test_verify_command_of_a_version(plays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(chunk(plays, 1, 1))
    assert call(capsys, "verify", plays)[0] == 0
    assert call(capsys, "verify", plays, "--version", "2")[0] == 0
    assert call(capsys, "verify", plays, "--version", "1")[0] == 1


def test_repair_command(plays: Path, backup: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(capsys, "repair", plays) == (0, "nothing to repair\n", "")
    damage(chunk(plays, 2))
    code, out, _ = call(capsys, "repair", plays)
    assert (code, out.splitlines()[-1]) == (1, "nothing could be repaired")
    before = files(plays)
    code, out, _ = call(capsys, "repair", plays, "--quarantine", "--dry-run", "--json")
    assert (code, json.loads(out)["quarantined"][0]["keys"], json.loads(out)["dry_run"]) == (0, ["play-8", "play-9"], True)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, out, err = call(capsys, "repair", plays, "--copy", backup)
    assert isinstance(code, str)
    assert "nothing was done" in code
    assert "would be restored" in err
    assert files(plays) == before
    code, out, err = call(capsys, "repair", plays, "--copy", backup, "--yes")
    assert (code, out, err) == (0, f"restored: {chunk(plays, 2).name} from {backup}/{chunk(plays, 2).name}\n", "")
    assert liveset.verify(plays).ok


def test_the_report_pickles(plays: Path) -> None:
    import pickle

    report = liveset.repair(plays)
    again: RepairReport = pickle.loads(pickle.dumps(report))
    assert again == report


def test_keys_that_lead_to_other_samples_are_found(tmp_path: Path) -> None:
    """Keys were made by a function that says something else than the field that they should stand in."""
    write_dataset(tmp_path / "ds", [{"id": f"k{i}", "n": i} for i in range(6)], key="id")
    assert liveset.verify(tmp_path / "ds").ok
    store = open_store(tmp_path / "ds")
    base = open_snapshot(store).index
    names = [record.id or "" for record in base.chunks]
    columns = list(zip(names, map(KeyColumn.of, [["k0", "k2", "k1", "k3"], ["k4", "k5"]]), strict=True))
    commit(store, SetKeys(Keys(KeyWriter(store, "0" * 16).fresh(columns), base.layout_of_keys)), base)
    (damage,) = liveset.verify(tmp_path / "ds").damaged
    assert (damage.file, damage.positions, damage.keys) == (base.chunks[0].filename, range(4), ("k2", "k1"))
    assert "'k2' where it says 'k1'" in damage.problem


def test_a_keyed_dataset_without_samples_is_whole(tmp_path: Path) -> None:
    liveset.optimize(lambda i: None, range(3), tmp_path / "ds", key_fn="id", num_workers=1, verbose=False)
    assert liveset.verify(tmp_path / "ds").ok
