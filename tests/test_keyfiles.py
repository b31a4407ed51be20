"""Key files under edits: whatever is deleted, inserted, moved and joined, every key leads to its sample and every sample knows its key."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.edit.keyfiles import KeyWriter
from liveset.format.config import make_config
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyColumn
from liveset.format.schema import Schema
from liveset.format.stamp import KeyFiles
from liveset.format.tree import Leaf
from liveset.keystore import TableKeys
from liveset.snapshot import Snapshot
from liveset.storage import Store
from liveset.testing import MemoryStore

CONFIG = make_config(Schema(Leaf("int")), samples=None, size=1, compression=None)


@dataclass
class Edited:
    """A dataset of keys only: what each chunk holds, and the tables that should say so."""

    chunks: dict[str, list[Key]]
    store: Store = field(default_factory=MemoryStore)
    turn: int = 0

    def __post_init__(self) -> None:
        self.files = self.writer().fresh([(chunk, KeyColumn.of(keys)) for chunk, keys in self.chunks.items()])

    def writer(self) -> KeyWriter:
        self.turn += 1
        return KeyWriter(self.store, f"{self.turn:016x}")

    def edit(self, deleted: list[Key], added: dict[str, list[Key]], *, merged: list[str] | None = None) -> None:
        """Delete keys, add chunks; ``merged`` names chunks whose keys the added ones hold now."""
        removed: dict[str, list[int]] = {}
        for chunk in merged or ():
            del self.chunks[chunk]
        for chunk, keys in list(self.chunks.items()):
            if slots := [slot for slot, key in enumerate(keys) if key in deleted]:
                self.chunks[chunk] = [key for key in keys if key not in deleted]
                removed[chunk] = slots
                if not self.chunks[chunk]:
                    del self.chunks[chunk], removed[chunk]
        self.chunks.update(added)
        columns = [(chunk, KeyColumn.of(keys)) for chunk, keys in added.items()]
        self.files = self.writer().edited(
            self.files, self.chunks, self.count, deleted=KeyColumn.of(deleted), removed=removed, added=columns
        )

    @property
    def count(self) -> int:
        return sum(map(len, self.chunks.values()))

    def check(self, files: KeyFiles, gone: set[Key]) -> None:
        records = [ChunkRecord(filename=f"{chunk}.bin", samples=len(keys), size=1, id=chunk) for chunk, keys in self.chunks.items()]
        keys = TableKeys(Snapshot(self.store, Index.build(chunks=records, config=CONFIG)), files)
        assert len(keys) == self.count
        flat = {key: (number, slot) for number, held in enumerate(self.chunks.values()) for slot, key in enumerate(held)}
        for key, place in flat.items():
            assert keys.locate(key) == place
            assert keys.key_at(*place) == key
        assert keys.locate_many(list(flat)) == list(flat.values())
        for number, held in enumerate(self.chunks.values()):
            assert keys.keys_of(number) == held
        for key in gone - flat.keys():
            assert keys.locate(key) is None
        assert keys.locate_many(sorted(gone - flat.keys(), key=str)) == [None] * len(gone - flat.keys())


@given(st.data(), st.sampled_from([str, int]))
def test_keys_are_right_after_any_edits(data: st.DataObject, kind: type[str | int]) -> None:
    edit_and_check(data, kind, Edited)


def edit_and_check(data: st.DataObject, kind: type[str | int], made: type[Edited]) -> None:
    pool: list[Key] = [kind(number) for number in range(40)]
    edited = made({"c0": pool[:7], "c1": pool[7:9], "c2": pool[9:20]})
    ever: set[Key] = set(pool)
    for step in range(data.draw(st.integers(1, 8))):
        live = [key for keys in edited.chunks.values() for key in keys]
        if len(edited.chunks) > 1 and data.draw(st.booleans()):
            merged = data.draw(st.lists(st.sampled_from(sorted(edited.chunks)), min_size=1, max_size=3, unique=True))
            edited.edit([], {f"m{step}": [key for chunk in merged for key in edited.chunks[chunk]]}, merged=merged)
        else:
            deleted = data.draw(st.lists(st.sampled_from(live), max_size=6, unique=True)) if live else []
            absent = [key for key in pool if key not in live or key in deleted]
            inserted = data.draw(st.lists(st.sampled_from(absent), max_size=5, unique=True)) if absent else []
            inserted = [key for key in inserted if key not in deleted]
            if deleted or inserted:
                edited.edit(deleted, {f"i{step}": inserted} if inserted else {})
        edited.check(edited.files, ever)
        edited.check(edited.writer().merged(edited.files, edited.chunks, edited.count), ever)


def test_a_delete_writes_as_many_rows_as_it_removes_samples() -> None:
    edited = Edited({f"c{number}": [f"{number}-{slot}" for slot in range(1000)] for number in range(8)})
    edited.edit([f"{number}-{number}" for number in range(8)], {})
    (delta,) = edited.files.deltas
    assert len(edited.store.read(delta)) < 1000
    edited.check(edited.files, {"0-0"})


def test_many_small_edits_leave_few_tables_and_a_merge_one() -> None:
    edited = Edited({"c": [f"k{number}" for number in range(500)]})
    for number in range(0, 300, 3):
        edited.edit([f"k{number}"], {f"n{number}": [f"new{number}"]})
    assert len(edited.files.deltas) <= 8
    edited.check(edited.files, {"k0", "k299"})
    merged = edited.writer().merged(edited.files, edited.chunks, edited.count)
    assert merged.deltas == ()
    edited.check(merged, {"k0", "k297"})


@pytest.mark.parametrize("name", ["moved_down", "moved_up"])
def test_slots_move_and_come_back(name: str) -> None:
    import numpy as np

    from liveset.format.keyjoin import moved_down, moved_up

    free = np.array([0, 3, 4, 9], np.uint32)
    kept = np.array([slot for slot in range(14) if slot not in free.tolist()])
    now = np.arange(len(kept))
    if name == "moved_down":
        assert moved_down(kept, free).tolist() == now.tolist()
    else:
        assert moved_up(now, free).tolist() == kept.tolist()
