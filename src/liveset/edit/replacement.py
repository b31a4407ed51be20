"""The commit of an update: staged samples go into the chunks that hold their keys, one new file for each of these chunks.

What was committed since the update began decides: a chunk that nobody touched is spliced once; a chunk with a new file, in which other
samples changed, is spliced again from that file; where one of the same samples changed, the update is a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from liveset.edit.adopt import Adoption, remove_unnamed
from liveset.edit.changes import Replace
from liveset.edit.commit import new_token
from liveset.edit.rebase import check_rebase
from liveset.edit.splice import StoredChunk, changed_slots, fresh_name, open_stored
from liveset.edit.staging import StagedSamples
from liveset.errors import Corrupt, KeyConflict, OverwriteConflict, SampleError, name_some
from liveset.format import codec
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key
from liveset.format.schema import Decoder
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot
from liveset.storage import version_name

__all__ = ["Replacement"]

_MOVES_KEYS = frozenset(("keys", "delete", "compact"))
"""Commits after which a key may belong to another sample."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A new file of a chunk, and the file that it was made from."""

    source: str
    record: ChunkRecord


class Replacement:
    """Makes the change that puts staged samples into a dataset, for whatever version is the newest; see ``Prepare``.

    Args:
        base: the version that the keys were looked up in.
        places: the keys by chunk id and slot.
        staged: the samples by key; needed until the outcome of the commit is known.
        decoder: for items that have to become Arrow rows.
        on_progress: called with the number of chunks written and their total.

    Attributes:
        size: bytes of all files that were written.
        prepared: whether a change was made, so that a commit may have sent it.
    """

    def __init__(
        self,
        base: Snapshot,
        places: Mapping[str, Mapping[int, Key]],
        staged: StagedSamples,
        decoder: Decoder,
        on_progress: Callable[[int, int], object],
    ) -> None:
        self._base, self._places, self._staged, self._decoder, self._on_progress = base, places, staged, decoder, on_progress
        self._store = base.store
        self._numbers = {record.id or record.filename: number for number, record in enumerate(base.index.chunks)}
        self._adoption: Adoption | None = None
        self._made: dict[str, _Made] = {}
        self._written: list[str] = []
        self.size = 0
        self.prepared = False

    def prepare(self, head: Index | None, since: Sequence[HistoryEntry]) -> Replace:
        """Return the change for a head; writes the files that are missing for it.

        Raises:
            KeyConflict: a sample of this update was changed, or a key moved, since the base; ``keys`` names them.
            OverwriteConflict: the dataset was replaced since.
            SampleError: a sample does not fit the chunk that it belongs to.
            Corrupt: a chunk is damaged.
        """
        check_rebase(Replace({}, {}), self._base.index, head, since)  # before any work is done
        assert head is not None
        current = Snapshot(self._store, head)
        if head.edit is not None and self._base.index.edit is None:
            self._check_origin(head)
        if any(entry.op in _MOVES_KEYS for entry in since):
            self._check_keys(current)
        numbers = {record.id or record.filename: number for number, record in enumerate(head.chunks)}
        self._check_slots(current, numbers)
        records: dict[str, ChunkRecord] = {}
        expects: dict[str, str] = {}
        with ThreadPoolExecutor(1, "liveset-update") as writer:
            for done, (chunk, slots) in enumerate(self._places.items()):
                source = head.chunks[numbers[chunk]].filename
                if (made := self._made.get(chunk)) is None or made.source != source:
                    made = self._made[chunk] = _Made(source, self._write(current, numbers[chunk], slots, writer))
                records[chunk], expects[chunk] = made.record, source
                self._on_progress(done + 1, len(self._places))
        self.prepared = True
        return Replace(records, expects, self._adopted(current, records, expects))

    def settle(self, index: Index | None) -> None:
        """Remove the files that the committed version (None: no version) does not name; only for outcomes that are known."""
        written = self._written + (self._adoption.written if self._adoption is not None else [])
        remove_unnamed(self._store, written, index)
        self._made.clear()

    # --- conflicts ---------------------------------------------------------------------------------------------------

    def _check_origin(self, head: Index) -> None:
        """Somebody else adopted the dataset meanwhile: it must be the one that we looked at, since the other program reuses names."""
        if self._store.read(version_name(0)) != self._base.index.source:
            raise OverwriteConflict(
                f"cannot update the dataset: another program changed it before version 1 was committed (now version {head.version}). "
                "Nothing was changed. Update again if the changes belong to the new samples."
            )

    def _check_keys(self, current: Snapshot) -> None:
        store = open_keys(current)
        moved: list[Key] = []
        for chunk, slots in self._places.items():
            found = store.locate_many(list(slots.values())) if store is not None else [None] * len(slots)
            for (slot, key), place in zip(slots.items(), found, strict=True):
                if place is None or _id(current.index.chunks[place[0]]) != chunk or place[1] != slot:
                    moved.append(key)
        if moved:
            raise self._conflict(moved, "no longer in the place where it was when this update began")

    def _check_slots(self, current: Snapshot, numbers: Mapping[str, int]) -> None:
        """Compare what is stored for our keys in chunks that have a new file."""
        changed: list[Key] = []
        for chunk, slots in self._places.items():
            before = self._base.index.chunks[self._numbers[chunk]].filename
            if chunk not in numbers:
                changed += slots.values()
                continue
            source = current.index.chunks[numbers[chunk]].filename
            if source == before or (chunk in self._made and self._made[chunk].source == source):
                continue
            old, new = self._open(self._base, self._numbers[chunk]), self._open(current, numbers[chunk])
            changed += [slots[slot] for slot in changed_slots(old, new, slots)]
        if changed:
            raise self._conflict(changed, "changed by another commit since this update began")

    def _conflict(self, keys: list[Key], what: str) -> KeyConflict:
        text = name_some(keys).removesuffix(" occurs").removesuffix(" occur")
        were = "was" if len(keys) == 1 else "were"
        return KeyConflict(f"{text} {were} {what}. Nothing was changed: look at the new samples, then update again.", keys=tuple(keys))

    # --- files -------------------------------------------------------------------------------------------------------

    def _open(self, snapshot: Snapshot, number: int) -> StoredChunk:
        index = snapshot.index
        return open_stored(snapshot.chunk_file(number)[1], index.chunks[number], codec.Compression.from_config(index.config or {}))

    def _write(self, snapshot: Snapshot, number: int, slots: Mapping[int, Key], writer: ThreadPoolExecutor) -> ChunkRecord:
        """Write a chunk with our samples and return its record; checksums are computed while the disk is busy."""
        record = snapshot.index.chunks[number]
        compression = codec.Compression.from_config(snapshot.index.config or {})
        name, buffer = snapshot.chunk_file(number)
        stored = open_stored(buffer, record, compression)
        try:
            spliced = stored.splice({slot: self._content(stored, key) for slot, key in slots.items()})
        except SampleError as error:
            named = ", ".join(map(repr, list(slots.values())[:10]))
            error.add_note(f"It is one of the samples for the keys {named}. Nothing was changed.")
            raise
        new = fresh_name(record.filename, number, new_token(), compression)
        self._written.append(new)
        writing = writer.submit(self._store.write, new, spliced.buffers)
        if record.check is not None and name == record.filename and not codec.verify(buffer, record.check):
            # What is copied gets a new checksum, which must not vouch for damaged bytes.
            raise Corrupt(f"{name} is damaged: its checksum differs from the index. Nothing was changed.", file=name)
        check = codec.checksum(spliced.buffers)
        writing.result()
        self.size += sum(memoryview(part).nbytes for part in spliced.buffers)
        return record.replace(filename=new, size=spliced.size, id=_id(record), check=check, head_check=spliced.head_check)

    def _content(self, stored: StoredChunk, key: Key) -> Any:
        data, is_row = self._staged.get(key)
        if is_row:
            if not stored.holds_rows:
                raise SampleError(f"the sample for the key {key!r} fits only Arrow chunks, and its chunk is none any more.")
            return msgspec.msgpack.decode(data)
        return self._decoder.decode(data, 0, len(data)) if stored.holds_rows else data

    def _adopted(self, current: Snapshot, records: dict[str, ChunkRecord], expects: dict[str, str]) -> KeyFiles | None:
        """Add what makes a dataset of another program ours."""
        if current.index.edit is not None:
            return None
        self._adoption = self._adoption or Adoption(self._store)
        others = self._adoption.records(current, skip=set(records))
        records.update(others)
        expects.update({name: name for name in others})
        return self._adoption.key_files(current)


def _id(record: ChunkRecord) -> str:
    return record.id or record.filename
