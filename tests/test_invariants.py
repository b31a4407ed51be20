"""The invariants that other tests rely on: each can fail, and what another program may do is no failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liveset.edit.changes import Keys, SetKeys
from liveset.edit.commit import commit, new_token
from liveset.edit.keyfiles import KeyWriter, ids_of
from liveset.edit.publish import layout
from liveset.edit.session import dataset_update
from liveset.errors import DatasetError
from liveset.format import codec
from liveset.format.codec import Compression
from liveset.format.index import Index
from liveset.format.keytable import KeyColumn
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.storage.local import LocalStore
from liveset.testing.invariants import check_dataset
from tests.support.foreign import write_foreign
from tests.support.writing import write_dataset

NAMES = [f"k{i}" for i in range(10)]
SAMPLES = [{"id": name, "v": i} for i, name in enumerate(NAMES)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", SAMPLES, key="id")
    return tmp_path / "ds"


def set_keys(path: Path, keys: Sequence[str], *, count: int | None = None, chunks: int = 3, field: str | None = "id") -> None:
    """Commit any keys, right or wrong."""
    store = LocalStore(path)
    index = open_snapshot(store).index
    columns, start = [], 0
    for name, record in list(zip(ids_of(index), index.chunks, strict=True))[:chunks]:
        columns.append((name, KeyColumn.of(keys[start : start + record.samples])))
        start += record.samples
    files = KeyWriter(store, new_token()).fresh(columns)
    commit(store, SetKeys(Keys(files if count is None else replace(files, count=count), layout(1, field))), index)


def _edited(path: Path, part: str, nothing: Any, patch: pytest.MonkeyPatch) -> None:
    edited = KeyWriter.edited
    patch.setattr(KeyWriter, "edited", lambda self, *given, **parts: edited(self, *given, **{**parts, part: nothing}))
    with dataset_update(path) as update:
        del update["k1"]
        update.insert("n", {"id": "n", "v": 0})
        update.commit()


WRONG: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "keys of other samples": lambda path, _: set_keys(path, NAMES[::-1]),
    "too many keys": lambda path, _: set_keys(path, NAMES, count=11),
    "a chunk without keys": lambda path, _: set_keys(path, NAMES, chunks=2),
    "no tombstone": lambda path, patch: _edited(path, "deleted", KeyColumn.of([]), patch),
    "no free slots": lambda path, patch: _edited(path, "removed", {}, patch),
    "new samples without keys": lambda path, patch: _edited(path, "added", [], patch),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_keys_are_noticed(path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_dataset(open_store(path))
    WRONG[what](path, monkeypatch)
    with pytest.raises((AssertionError, DatasetError)):
        check_dataset(open_store(path))


def test_keys_that_no_field_holds_are_whatever_they_are(path: Path) -> None:
    set_keys(path, NAMES[::-1], field=None)
    assert len(check_dataset(open_store(path))) == 2


@pytest.mark.parametrize("adopted", [False, True])
def test_files_that_the_old_tool_has_inflated_are_no_damage(tmp_path: Path, adopted: bool) -> None:
    """Reading them where they lie, it replaces each chunk file that is compressed as a whole."""
    pytest.importorskip("pyarrow", exc_type=ImportError)
    path = tmp_path / "ds"
    write_foreign(path, SAMPLES, compression=Compression("zstd", "chunk"))
    if adopted:
        with dataset_update(path) as update:
            del update["k1"]
            update.commit()
    index = Index.parse((path / "index.json").read_bytes())
    files = [*path.glob("chunk-*.zstd.bin")]
    assert len(files) >= len(index.chunks)
    for file in files:
        file.with_name(file.name.replace(".zstd", "")).write_bytes(codec.inflate(file.read_bytes(), size=0))
        file.unlink()
    assert len(check_dataset(open_store(path))) >= 1 + adopted
