"""Keys that occur twice: which samples of a run stay in its chunks, and which take the place of stored ones.

The chunks are durable before anybody knows which of their keys the dataset has, and that may change with each lost race. So samples are
taken out of files that are there: what was written is spliced, and nothing is encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from liveset.edit.keyfiles import ids_of
from liveset.edit.meter import Progress
from liveset.edit.rewrite import Splicer
from liveset.edit.splice import open_stored
from liveset.edit.staging import Kind, Staged, StagedEdits
from liveset.errors import NotFound, SessionExpired
from liveset.format.codec import Compression
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyColumn
from liveset.format.schema import Decoder
from liveset.keystore import KeyStore
from liveset.snapshot import Snapshot
from liveset.storage import Store
from liveset.write.chunker import StagedChunk

__all__ = ["Merge", "Merged", "OnDuplicate"]

OnDuplicate: TypeAlias = Literal["error", "replace", "skip"]


@dataclass(frozen=True, slots=True)
class Merged:
    """What a run brings to a version.

    Attributes:
        records: the new chunks.
        keys: their ids and keys, slot by slot.
        replaced: new records of chunks of the version by their ids; they hold samples of the run.
        expects: the files that these were made from.
        repeated: number of samples that do not count, since another one of the run has their key.
        taken: number of the others whose keys the version has.
    """

    records: tuple[ChunkRecord, ...]
    keys: Sequence[tuple[str, KeyColumn]]
    replaced: Mapping[str, ChunkRecord | None]
    expects: Mapping[str, str]
    repeated: int
    taken: int


class Merge:
    """Finds the samples of a run whose keys occur twice, and takes them out of its chunks; the files are kept from one call to the next.

    Args:
        store: where the chunks are.
        chunks: of the run, with keys, in their order.
        config: of the new chunks.
        decoder: for their items.
        replaces: whether the last sample with a key counts, and takes the place of one that is stored, instead of the first one.
        verbose: show progress, if this is a terminal.
    """

    def __init__(
        self,
        store: Store,
        chunks: Sequence[StagedChunk],
        config: Mapping[str, Any] | None,
        decoder: Decoder,
        *,
        replaces: bool,
        verbose: bool,
    ) -> None:
        self._replaces, self._verbose = replaces, verbose
        self._run = Snapshot(store, Index.build(chunks=[chunk.record for chunk in chunks], config=config))
        self._ids = ids_of(self._run.index)
        self._keys = [chunk.keys if chunk.keys is not None else KeyColumn.of([]) for chunk in chunks]
        self._staged = StagedEdits()
        self._splicer = Splicer(store, self._staged, decoder)
        self._outdone: dict[int, set[int]] = {}
        for position in _repeated(KeyColumn.join(self._keys), last=replaces):
            number, slot = self._run.locate(position)
            self._outdone.setdefault(number, set()).add(slot)

    @property
    def written(self) -> list[str]:
        """Names of the files that were written."""
        return self._splicer.written

    def into(self, current: Snapshot | None, have: KeyStore | None) -> Merged:
        """Return what the run brings to a version with some keys, or to a new dataset (None); writes the files that are missing for it."""
        removed = {number: set(slots) for number, slots in self._outdone.items()}
        edits: dict[int, dict[int, Key]] = {}
        taken = 0
        for number, keys in enumerate(self._keys):
            places = have.locate_column(keys) if have is not None else ()
            outdone = self._outdone.get(number, ())
            found = {slot: place for slot, place in enumerate(places) if place is not None and slot not in outdone}
            if not found:
                continue
            removed.setdefault(number, set()).update(found)
            taken += len(found)
            if self._replaces:
                self._stage(number, found)
                for slot, (chunk, there) in found.items():
                    edits.setdefault(chunk, {})[there] = keys[slot]
        records, replaced, expects = self._splice(current, removed, edits)
        kept = [(number, record) for number, record in enumerate(records) if record is not None]
        columns = [(self._ids[number], _without(self._keys[number], removed.get(number, set()))) for number, _ in kept]
        repeated = sum(map(len, self._outdone.values()))
        return Merged(tuple(record for _, record in kept), columns, replaced, expects, repeated, taken)

    def close(self) -> None:
        """Forget everything."""
        self._splicer.forget()
        self._staged.close()

    def _stage(self, number: int, slots: Mapping[int, Any]) -> None:
        """Keep the items of samples that go into other chunks."""
        keys = self._keys[number]
        missing = [slot for slot in slots if keys[slot] not in self._staged]
        if not missing:
            return
        index = self._run.index
        with _expiring():
            buffer = self._run.chunk_file(number)[1]
        stored = open_stored(buffer, index.chunks[number], Compression.from_config(index.config or {}))
        for slot in missing:
            self._staged.put(keys[slot], Staged(bytes(stored.content(slot)), Kind.UPSERT))

    def _splice(
        self, current: Snapshot | None, removed: Mapping[int, set[int]], edits: Mapping[int, Mapping[int, Key]]
    ) -> tuple[list[ChunkRecord | None], Mapping[str, ChunkRecord | None], Mapping[str, str]]:
        """Return the chunks of the run without some slots, and those of a version with staged items in some."""
        records: list[ChunkRecord | None] = list(self._run.index.chunks)
        progress = Progress(len(removed) + len(edits), enabled=self._verbose, title="optimize: chunks")
        try:
            deletes = {number: frozenset(removed[number]) for number in sorted(removed)}
            with _expiring():
                made, _ = self._splicer.splice(self._run, {number: {} for number in deletes}, deletes, lambda *_: progress.add(1))
            for number in deletes:
                records[number] = made[self._ids[number]]
            if current is None or not edits:
                return records, {}, {}
            ordered = {number: edits[number] for number in sorted(edits)}
            return records, *self._splicer.splice(current, ordered, {}, lambda *_: progress.add(1))
        finally:
            progress.close()


@contextmanager
def _expiring() -> Iterator[None]:
    """Say what it means when chunks of the run are gone."""
    try:
        yield
    except NotFound as error:
        text = "a vacuum ran over this session and deleted chunks that it had written. Nothing was committed; start again."
        raise SessionExpired(text, file=getattr(error, "file", "")) from error


def _repeated(keys: KeyColumn, *, last: bool) -> list[int]:
    """Return the rows of a column whose key stands in another row that counts: the last one with the key, or the first one."""
    by_hash = np.argsort(keys.hashes, kind="stable")
    hashes = keys.hashes[by_hash]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    rows = np.sort(by_hash[np.union1d(same, same + 1)])
    found: list[int] = []
    seen: set[bytes] = set()
    for row in (rows[::-1] if last else rows).tolist():
        key = keys.stored(row)
        if key in seen:
            found.append(row)
        seen.add(key)
    return sorted(found)


def _without(keys: KeyColumn, slots: set[int]) -> KeyColumn:
    return keys.take(np.delete(np.arange(len(keys)), sorted(slots))) if slots else keys
