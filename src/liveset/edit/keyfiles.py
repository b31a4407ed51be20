"""The key tables of a new version: written before the commit, named by its head."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from liveset.errors import Conflict, KeyConflict, NotFound, SessionExpired, name_some
from liveset.format.index import Index
from liveset.format.keyfront import HEADER_SIZE, has_pages
from liveset.format.keyjoin import join_tables
from liveset.format.keytable import DELETED, Key, KeyColumn, KeyTable, Rows, pack_table
from liveset.format.remotetable import RangedKeyTable
from liveset.format.stamp import KeyFiles
from liveset.keystore import KeyStore, TableFile, TableKeys, open_keys
from liveset.snapshot import Snapshot
from liveset.storage import PRIVATE, Store

__all__ = ["KEYS", "KeyWriter", "ids_of"]

KEYS = PRIVATE + "keys/"
"""Where the key tables lie."""


class KeyWriter:
    """Writes the key tables of one commit.

    Args:
        store: where the dataset is.
        token: random part of the file names.

    Attributes:
        written: names of the files that were written; those that the committed version does not name are superseded.
        sizes: bytes of each of them.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self.written: list[str] = []
        self.sizes: dict[str, int] = {}
        self._delta: str | None = None

    def fresh(self, chunks: Sequence[tuple[str, KeyColumn]]) -> KeyFiles:
        """Write the keys of whole chunks (id and keys, slot by slot) as a base of their own; ``DuplicateKeys`` names what occurs twice."""
        rows = Rows.of_chunks(chunks)
        return KeyFiles(_kind(rows.keys), len(rows.keys), (self._write("base", rows),), sizes=dict(self.sizes))

    def extended(self, head: Index, chunks: Sequence[tuple[str, KeyColumn]]) -> KeyFiles:
        """Write the keys of new chunks beside those of a version; only the new keys are looked up, whatever the number of the old ones.

        Raises:
            DuplicateKeys: a key occurs twice in the new chunks.
            KeyConflict: a key is in the dataset already.
            TypeError: the dataset has keys of the other type.
        """
        snapshot = Snapshot(self._store, head)
        have = open_keys(snapshot)
        rows = Rows.of_chunks(chunks)
        if have is None:
            raise Conflict(f"{self._store.url} has no keys: build them with build_keys_index before samples with keys are appended.")
        self.check_kind(have, rows.keys)
        if self._delta is None:
            self._delta = self._write("delta", rows)  # before the search: it finds duplicates among the new keys themselves
        files = self.adopted(have, snapshot)
        taken = [key for key, place in zip(rows.keys, have.locate_column(rows.keys), strict=True) if place is not None]
        if taken:
            found = tuple(taken)
            text = f"Duplicate keys are not allowed in the keys sidecar: {name_some(found)} in the dataset already. Nothing was changed."
            raise KeyConflict(text, keys=found)
        listed = {*ids_of(head), *(chunk for chunk, _ in chunks)}
        return self._with_delta(files, self._delta, listed, files.count + len(rows.keys), rows.keys)

    def edited(
        self,
        files: KeyFiles,
        listed: Collection[str],
        count: int,
        *,
        deleted: KeyColumn,
        removed: Mapping[str, Sequence[int]],
        added: Sequence[tuple[str, KeyColumn]],
    ) -> KeyFiles:
        """Write what an edit changes of the keys beside the tables of a version.

        Args:
            files: the tables of the version that is edited.
            listed: ids of the chunks of the new version.
            count: samples of the new version.
            deleted: the keys of samples that go.
            removed: the slots of these samples in the chunks that stay, ascending.
            added: keys of chunks that are new, slot by slot; keys that were in other chunks have moved.
        """
        rows = Rows.of_chunks(added)
        gone = np.full(len(deleted), DELETED, np.uint32)
        delta = Rows(
            KeyColumn.join([rows.keys, deleted]),
            np.concatenate([rows.chunks, gone]),
            np.concatenate([rows.slots, np.zeros(len(deleted), np.uint32)]),
            rows.directory,
            {chunk: np.asarray(slots, np.uint32) for chunk, slots in removed.items()},
        )
        return self._with_delta(files, self._write("delta", delta), listed, count, rows.keys)

    def merged(self, files: KeyFiles, listed: Collection[str], count: int) -> KeyFiles:
        """Write the tables of a version as one base."""
        rows = join_tables([self._file(name, files).whole for name in files.tables], listed, whole=True)
        return KeyFiles(files.kind, count, (self._write("base", rows),), sizes=dict(self.sizes))

    def outdated(self, files: KeyFiles) -> bool:
        """Tell whether a table of a version has an earlier form, of which every process that opens it makes the present one in memory."""
        return any(not has_pages(self._store.read_ranges(name, [(0, HEADER_SIZE)])[0], name) for name in files.tables)

    def renamed(self, table: KeyTable, names: Mapping[Key, Key]) -> str:
        """Write a table with other keys in the place of some, and return its name; places and slots stay, also what is said to be gone."""
        rows = table.to_rows()
        at = {row: new for old, new in names.items() if (row := table.find(old)) is not None}
        by = np.concatenate([np.delete(np.arange(table.rows), list(at)), np.array(list(at), np.int64)])
        keys = KeyColumn.join([rows.keys.take(by[: len(by) - len(at)]), KeyColumn.of(list(at.values()))])
        return self._write("renamed", Rows(keys, rows.chunks[by], rows.slots[by], rows.directory, rows.removed))

    def check_kind(self, have: KeyStore, keys: KeyColumn) -> None:
        """Raise ``TypeError`` when keys are of another type than those of a dataset."""
        if len(keys) and len(have) and keys.kind is not have.kind:
            words = f"the keys of {self._store.url} are {_word(have.kind)}, the new ones are {_word(keys.kind)}"
            raise TypeError(f"Unsupported key type: {words}.")

    def adopted(self, have: KeyStore, snapshot: Snapshot) -> KeyFiles:
        """Return the tables of a version; a published store of another program becomes a table first."""
        if isinstance(have, TableKeys):
            return have.files
        listed = snapshot.index.chunks
        return self.fresh([(record.id or record.filename, KeyColumn.of(have.keys_of(number))) for number, record in enumerate(listed)])

    def _with_delta(self, files: KeyFiles, delta: str, listed: Collection[str], count: int, added: KeyColumn) -> KeyFiles:
        kind = files.kind if files.count or not len(added) else _kind(added)
        deltas = self._tiered(files, delta, listed)
        return KeyFiles(kind, count, files.base, deltas, {**files.sizes, **self.sizes})

    def _tiered(self, files: KeyFiles, newest: str, listed: Collection[str]) -> tuple[str, ...]:
        """Return the deltas of a version, those at the end joined as long as the next older one is not larger.

        So each is larger than all after it together, there are few however many commits there were, and a key is written again only when
        its table at least doubles: a small commit never pays for the large ones before it.
        """
        tables = [self._file(newest, files)]
        try:
            weight = _weight(tables[0].table())
        except NotFound as error:
            text = "a vacuum ran over this session and deleted the keys that it had written. Nothing was committed; start again."
            raise SessionExpired(text, file=newest) from error
        rest = list(files.deltas)
        while rest and (more := _weight((older := self._file(rest[-1], files)).table())) <= weight:
            tables.insert(0, older)
            weight += more
            rest.pop()
        if len(tables) == 1:
            return (*rest, newest)
        return (*rest, self._write("delta", join_tables([table.whole for table in tables], listed)))

    def _file(self, name: str, files: KeyFiles) -> TableFile:
        return TableFile(self._store, name, self.sizes.get(name) or files.sizes.get(name, 0))

    def _write(self, kind: str, rows: Rows) -> str:
        name = f"{KEYS}{kind}-{self._token}-{len(self.written)}.keys"
        buffers = pack_table(rows)
        self.written.append(name)
        self.sizes[name] = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._store.write(name, buffers)
        return name


def ids_of(index: Index) -> list[str]:
    """Return the ids of the chunks of a version."""
    return [record.id or record.filename for record in index.chunks]


def _weight(table: KeyTable | RangedKeyTable) -> int:
    return int(table.rows) + sum(map(len, table.removed.values()))


def _kind(keys: KeyColumn) -> str:
    return "int" if keys.kind is int else "text"


def _word(kind: type) -> str:
    return "text" if kind is str else "integers"
