"""The commit of an update: staged edits go into the chunks that hold their keys, new samples into chunks behind all others.

What was committed since the update began decides: a chunk that nobody touched is spliced once; a chunk with a new file, in which other
samples changed, is spliced again from that file; where one of the same samples changed, the update is a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from liveset.edit.adopt import Adoption, remove_unnamed
from liveset.edit.changes import Replace
from liveset.edit.chunkfiles import DEFAULT_CHUNK_SIZE, ChunkLimit, write_chunk
from liveset.edit.commit import new_token
from liveset.edit.editable import check_intact
from liveset.edit.keyfiles import KeyWriter, ids_of
from liveset.edit.patch import apply_patch
from liveset.edit.rebase import check_rebase
from liveset.edit.splice import Piece, StoredChunk, changed_slots, fresh_name, open_stored
from liveset.edit.staging import Kind, StagedEdits
from liveset.errors import KeyConflict, OverwriteConflict, SampleError, name_some
from liveset.format import codec
from liveset.format.chunk import MAX_CHUNK_SIZE
from liveset.format.config import stored_limits
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyColumn
from liveset.format.schema import Decoder
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot
from liveset.storage import Store, version_name

__all__ = ["Places", "Rewrite", "Splicer"]

Places = Mapping[Key, tuple[int, int] | None]
"""Chunk number and slot of each key; None for a key that the version does not have."""

_LARGEST = MAX_CHUNK_SIZE // 2  # chunks that are limited by samples alone: offsets are 32-bit, and items are held until they are written
_AHEAD = 2 * DEFAULT_CHUNK_SIZE  # bytes of a file that is written while the next one is made: memory holds the new samples of both
_MOVES_KEYS = frozenset(("keys", "insert", "delete", "edit", "append", "compact", "purge", "repair"))
"""Commits after which a key may have another place, or one where it had none."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What a chunk became, the file that it was made from, and what was put in and taken out."""

    source: str
    slots: Mapping[int, Key]
    removed: frozenset[int]
    record: ChunkRecord | None
    writing: Future[None] | None = None

    def is_of(self, source: str, slots: Mapping[int, Key]) -> bool:
        """Tell whether these edits of a file were made, and written."""
        return (self.source, self.slots) == (source, slots) and (self.writing is None or self.writing.exception() is None)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What has to be done to a version: the edited keys by number of chunk and slot, the keys of new samples, and those that are gone."""

    edits: Mapping[int, Mapping[int, Key]]
    inserts: Sequence[Key]
    deletes: Mapping[int, frozenset[int]]


class Splicer:
    """Writes chunks with staged edits in them, or without some of their samples; the same work once, however often it is asked for.

    Args:
        store: where the chunks are.
        staged: the edits by key.
        decoder: for items that have to become Arrow rows.

    Attributes:
        written: names of the files that were written.
        size: bytes of these files.
    """

    def __init__(self, store: Store, staged: StagedEdits, decoder: Decoder) -> None:
        self._store, self._staged, self._decoder = store, staged, decoder
        self._leaves = len(decoder.schema.formats)
        self._made: dict[str, _Made] = {}
        self.written: list[str] = []
        self.size = 0

    def splice(
        self,
        snapshot: Snapshot,
        edits: Mapping[int, Mapping[int, Key]],
        deletes: Mapping[int, frozenset[int]],
        on_progress: Callable[[int, int], object],
    ) -> tuple[dict[str, ChunkRecord | None], dict[str, str]]:
        """Return the new records of chunks by their ids, None for those without a sample, and the files that they were made from.

        Chunks that hold already what the edits put into them stay as they are, and are left out.

        Args:
            snapshot: the version that holds the chunks.
            edits: for each chunk that becomes another, by its number: the keys of the edits by slot.
            deletes: the slots that go, by number of chunk.
            on_progress: called with the number of chunks that are done and their total.
        """
        records: dict[str, ChunkRecord | None] = {}
        expects: dict[str, str] = {}
        last: Future[None] | None = None
        with ThreadPoolExecutor(1, "liveset-update") as writer:
            for done, (number, slots) in enumerate(edits.items()):
                record, removed = snapshot.index.chunks[number], deletes.get(number, frozenset())
                name, source = record.id or record.filename, record.filename
                made = self._made.get(name)
                if made is None or not made.is_of(source, slots) or made.removed != removed:
                    made = self._made[name] = self._make(snapshot, number, slots, removed, writer, last)
                    last = made.writing or last
                if made.record is None or made.record.filename != source:
                    records[name], expects[name] = made.record, source
                on_progress(done + 1, len(edits))
            if last is not None:
                last.result()
        return records, expects

    def has(self, record: ChunkRecord, slots: Mapping[int, Key]) -> bool:
        """Tell whether the same edits of a file have been written already."""
        made = self._made.get(record.id or record.filename)
        return made is not None and made.is_of(record.filename, slots)

    def forget(self) -> None:
        """Forget what was written."""
        self._made.clear()

    def _make(
        self,
        snapshot: Snapshot,
        number: int,
        slots: Mapping[int, Key],
        removed: frozenset[int],
        writer: ThreadPoolExecutor,
        last: Future[None] | None,
    ) -> _Made:
        """Begin to write a chunk once the ``last`` one is written; checksums, and the next chunk, are made while the disk is busy."""
        record = snapshot.index.chunks[number]
        if len(removed) == record.samples:
            return _Made(record.filename, slots, removed, None)
        compression = codec.Compression.from_config(snapshot.index.config or {})
        name, buffer = snapshot.chunk_file(number)
        check_intact(record, name, buffer)
        stored = open_stored(buffer, record, compression)
        try:
            contents, pieces = self._contents(stored, {slot: key for slot, key in slots.items() if slot not in removed})
            if not removed and stored.holds(contents, pieces):
                return _Made(record.filename, slots, removed, record)
            spliced = stored.splice(contents, removed, pieces=pieces)
        except SampleError as error:
            named = ", ".join(map(repr, list(slots.values())[:10]))
            error.add_note(f"It is one of the samples for the keys {named}. Nothing was changed.")
            raise
        if last is not None:
            last.result()
        new = fresh_name(record.filename, number, new_token(), compression)
        self.written.append(new)
        writing = writer.submit(self._store.write, new, spliced.buffers)
        check = codec.checksum(spliced.buffers)
        size = sum(memoryview(part).nbytes for part in spliced.buffers)
        self.size += size
        if size > _AHEAD:
            writing.result()
        made = record.replace(
            filename=new,
            samples=spliced.samples,
            size=spliced.size,
            id=record.id or record.filename,
            check=check,
            head_check=spliced.head_check,
        )
        return _Made(record.filename, slots, removed, made, writing)

    def _contents(self, stored: StoredChunk, slots: Mapping[int, Key]) -> tuple[dict[int, Any], list[Piece]]:
        """Return what the edits put into a chunk: whole samples, and pieces of those whose other bytes stay where they are."""
        contents: dict[int, Any] = {}
        patches: dict[int, bytes] = {}
        for slot, key in slots.items():
            data, kind = self._staged.get(key)
            if kind is Kind.PATCH:
                patches[slot] = data
            elif kind is Kind.ROW:
                if not stored.holds_rows:
                    raise SampleError(f"the sample for the key {key!r} fits only Arrow chunks, and its chunk is none any more.")
                contents[slot] = msgspec.msgpack.decode(data)
            else:
                contents[slot] = self._decoder.decode(data, 0, len(data)) if stored.holds_rows else data
        pieces, others = stored.pieces(patches, self._leaves)
        contents.update((slot, apply_patch(stored.content(slot), patches[slot], self._leaves)) for slot in others)
        return contents, pieces


class Rewrite:
    """Makes the change that puts staged edits into a dataset, for whatever version is the newest; see ``Prepare``.

    Args:
        base: the version that the keys were looked up in.
        places: where the keys are in it, in the order in which they were staged.
        staged: the edits by key; needed until the outcome of the commit is known.
        decoder: for items that have to become Arrow rows.
        on_progress: called with the number of chunks written and their total.
        named: whether the work has a name: then a version says that it is done, even where it changes nothing.

    Attributes:
        size: bytes of all files that were written.
        chunks: number of chunks that become others.
        prepared: whether a change was made, so that a commit may have sent it.
    """

    def __init__(
        self,
        base: Snapshot,
        places: Places,
        staged: StagedEdits,
        decoder: Decoder,
        on_progress: Callable[[int, int], object],
        *,
        named: bool,
    ) -> None:
        self._base, self._places, self._staged, self._on_progress, self._named = base, places, staged, on_progress, named
        self._store = base.store
        self._ids = ids_of(base.index)
        self._token = new_token()
        self._keys = KeyWriter(self._store, self._token)
        self._adoption: Adoption | None = None
        self._splicer = Splicer(base.store, staged, decoder)
        self._added: list[tuple[ChunkRecord, KeyColumn]] | None = None
        self._written: list[str] = []
        self._size = 0
        self.chunks = 0
        self.prepared = False

    @property
    def size(self) -> int:
        return self._size + self._splicer.size

    def prepare(self, head: Index | None, since: Sequence[HistoryEntry]) -> Replace | None:
        """Return the change for a head, or None when nothing is left to change; writes the files that are missing for it.

        Raises:
            KeyConflict: a sample of this update was changed, added or removed since the base; ``keys`` names them.
            OverwriteConflict: the dataset was replaced since.
            SampleError: a sample does not fit the chunk that it belongs to.
            Corrupt: a chunk is damaged.
        """
        check_rebase(Replace({}, {}), self._base.index, head, since)  # before any work is done
        assert head is not None
        current = Snapshot(self._store, head)
        if head.edit is not None and self._base.index.edit is None:
            self._check_origin(head)
        plan = self._plan(current, moved=any(entry.op in _MOVES_KEYS for entry in since))
        self.chunks = 0
        if not plan.edits and not plan.inserts:
            return None
        records, expects = self._splicer.splice(current, plan.edits, plan.deletes, self._on_progress)
        self.chunks = len(records)
        if not records and not plan.inserts and not self._named:
            return None
        added = self._new_chunks(current, plan.inserts)
        files = self._adopted(current, records, expects)
        if plan.inserts or plan.deletes:
            files = self._key_files(current, plan, records, files)
        self.prepared = True
        return Replace(records, expects, files, tuple(record for record, _ in added), self._op(plan))

    def settle(self, index: Index | None) -> None:
        """Remove the files that the committed version (None: no version) does not name; only for outcomes that are known."""
        adopted = self._adoption.written if self._adoption is not None else []
        remove_unnamed(self._store, self._splicer.written + self._written + self._keys.written + adopted, index)
        self._splicer.forget()
        self._added = None

    # --- what is to be done, and whether it may be --------------------------------------------------------------------

    def _plan(self, current: Snapshot, *, moved: bool) -> _Plan:
        now = self._places_now(current) if moved else self._same_places(current)
        edits: dict[int, dict[int, Key]] = {}
        deletes: dict[int, set[int]] = {}
        inserts: list[Key] = []
        removed: list[Key] = []
        appeared: list[Key] = []
        for (key, before), place in zip(self._places.items(), now, strict=True):
            deletes_it = self._staged.kind(key) is Kind.DELETE
            if before is None:
                (inserts if place is None else appeared).append(key)
            elif place is not None:
                edits.setdefault(place[0], {})[place[1]] = key
                if deletes_it:
                    deletes.setdefault(place[0], set()).add(place[1])
            elif not deletes_it:  # two who delete the same sample want the same
                removed.append(key)
        if appeared:
            raise self._conflict(appeared, "added by another commit")
        if removed:
            raise self._conflict(removed, "removed by another commit")
        self._check_contents(current, edits, moved)
        frozen = {number: frozenset(slots) for number, slots in deletes.items()}
        return _Plan({number: edits[number] for number in sorted(edits)}, inserts, frozen)

    def _places_now(self, current: Snapshot) -> list[tuple[int, int] | None]:
        store = open_keys(current)
        if store is None:
            raise self._conflict(list(self._places), "left without a key by another commit")
        return store.locate_many(list(self._places))

    def _same_places(self, current: Snapshot) -> list[tuple[int, int] | None]:
        """The places of the keys where every sample still has its chunk and slot; only chunks may have been added or counted anew."""
        numbers = {name: number for number, name in enumerate(ids_of(current.index))}
        return [None if place is None else (numbers[self._ids[place[0]]], place[1]) for place in self._places.values()]

    def _check_origin(self, head: Index) -> None:
        """Somebody else adopted the dataset meanwhile: it must be the one that we looked at, since the other program reuses names."""
        if self._store.read(version_name(0)) != self._base.index.source:
            raise OverwriteConflict(
                f"cannot update the dataset: another program changed it before version 1 was committed (now version {head.version}). "
                "Nothing was changed. Update again if the changes belong to the new samples."
            )

    def _check_contents(self, current: Snapshot, edits: Mapping[int, Mapping[int, Key]], moved: bool) -> None:
        """Compare what is stored for our keys with what was stored when the update began, where the file or the slot is another."""
        changed: list[Key] = []
        files = {record.filename for record in self._base.index.chunks}
        for number, slots in edits.items():
            record = current.index.chunks[number]
            if self._splicer.has(record, slots) or (not moved and record.filename in files):
                continue  # compared when it was made, or where it stood
            stood: dict[int, list[tuple[int, int]]] = {}
            for slot, key in slots.items():
                if (before := self._places[key]) is not None:
                    stood.setdefault(before[0], []).append((slot, before[1]))
            for old, pairs in stood.items():
                if self._base.index.chunks[old].filename == record.filename and all(slot == before for slot, before in pairs):
                    continue
                both = self._open(self._base, old), self._open(current, number)
                erased = self._base.index.chunks[old].erased  # what stands for them now is somebody else's
                changed += [slots[slot] for slot, stood_at in pairs if stood_at in erased]
                here, there = ([pair[i] for pair in pairs if pair[1] not in erased] for i in (0, 1))
                changed += [slots[slot] for slot in changed_slots(*both, here, there)]
        if changed:
            raise self._conflict(changed, "changed by another commit")

    def _conflict(self, keys: list[Key], what: str) -> KeyConflict:
        text = name_some(keys).removesuffix(" occurs").removesuffix(" occur")
        were = "was" if len(keys) == 1 else "were"
        more = "since this update began. Nothing was changed: look at the new samples, then update again."
        return KeyConflict(f"{text} {were} {what} {more}", keys=tuple(keys))

    def _op(self, plan: _Plan) -> str:
        deleted = sum(map(len, plan.deletes.values()))
        replaced = sum(map(len, plan.edits.values())) - deleted
        done = [op for op, count in (("replace", replaced), ("insert", len(plan.inserts)), ("delete", deleted)) if count]
        return done[0] if len(done) == 1 else "edit"

    # --- files -------------------------------------------------------------------------------------------------------

    def _open(self, snapshot: Snapshot, number: int) -> StoredChunk:
        record, _, buffer = snapshot.chunk(number)
        return open_stored(buffer, record, codec.Compression.from_config(snapshot.index.config or {}))

    def _new_chunks(self, current: Snapshot, inserts: Sequence[Key]) -> list[tuple[ChunkRecord, KeyColumn]]:
        """Write the samples that the dataset does not have yet, once: where they stand depends on no other commit."""
        if self._added is None:
            config = current.index.config or {}
            compression = codec.Compression.from_config(config)
            samples, size = stored_limits(config)
            limit = ChunkLimit(samples, min(size or (_LARGEST if samples else DEFAULT_CHUNK_SIZE), _LARGEST))
            self._added = []
            for number, keys in enumerate(self._chunked(inserts, limit)):
                name = f"chunk-0-{len(current.index.chunks) + number}-{self._token}"
                items = [self._staged.get(key).data for key in keys]
                self._written.append(name + (f".{compression.name}" if compression and compression.level == "chunk" else "") + ".bin")
                record = write_chunk(self._store, name, f"{self._token}.{number}", items, compression)
                self._size += record.size
                self._added.append((record, KeyColumn.of(keys)))
        return self._added

    def _chunked(self, keys: Sequence[Key], limit: ChunkLimit) -> Iterator[list[Key]]:
        held: list[Key] = []
        size = 0
        for key in keys:
            length = len(self._staged.get(key).data) + 4
            if held and (len(held) == limit.samples or (limit.size is not None and size + length > limit.size)):
                yield held
                held, size = [], 0
            held.append(key)
            size += length
        if held:
            yield held

    def _key_files(self, current: Snapshot, plan: _Plan, records: Mapping[str, ChunkRecord | None], files: KeyFiles | None) -> KeyFiles:
        """Write what the change makes of the keys."""
        head, ids = current.index, ids_of(current.index)
        if files is None:
            assert head.edit is not None
            assert head.edit.key_files is not None
            files = head.edit.key_files
        added = [(record.id or record.filename, keys) for record, keys in self._added or ()]
        deleted = [plan.edits[number][slot] for number, slots in plan.deletes.items() for slot in sorted(slots)]
        listed = [name for name in ids if records.get(name, True) is not None]
        return self._keys.edited(
            files,
            {*listed, *(name for name, _ in added)},
            head.samples - len(deleted) + len(plan.inserts),
            deleted=KeyColumn.of(deleted),
            removed={ids[number]: sorted(slots) for number, slots in plan.deletes.items() if records[ids[number]] is not None},
            added=added,
        )

    def _adopted(self, current: Snapshot, records: dict[str, ChunkRecord | None], expects: dict[str, str]) -> KeyFiles | None:
        """Add what makes a dataset of another program ours."""
        if current.index.edit is not None:
            return None
        self._adoption = self._adoption or Adoption(self._store)
        others = self._adoption.records(current, skip=set(records))
        records.update(others)
        expects.update({name: name for name in others})
        return self._adoption.key_files(current)
