"""Adoption: a dataset that another program wrote becomes one of ours.

Every chunk gets a second name that old writers refuse, so that they cannot change what they do not know to be versioned, and the published
keys become a key table. No sample is rewritten. The first update of a dataset does the same in its own commit.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence

from liveset.edit.changes import Adopt, files_of
from liveset.edit.commit import Policy, commit, landed, new_token
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.splice import fresh_name
from liveset.errors import CommitUnknown, DatasetError
from liveset.format import codec
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store, open_store, version_name

__all__ = ["Adoption", "adopt", "adopt_store", "adopt_version", "remove_unnamed"]

_log = logging.getLogger("liveset")

_OURS = re.compile(r"chunk-\d+-\d+-[0-9a-f]{16}(\.[^./]+)?\.bin")


def adopt(path: str | os.PathLike[str], *, message: str = "", author: str = "") -> int:
    """Make a dataset that another program wrote ours, and return its version; nothing happens to one that is ours already.

    Samples, their order, positions and keys stay the same, and the other program goes on reading them. Its writers refuse the dataset
    afterwards, since they would not see the commits of others. The first ``dataset_update`` does this too.

    Args:
        path: of the dataset.
        message: what the history says about it.
        author: who does this.

    Raises:
        DatasetNotFound: there is no dataset.
        Corrupt, DuplicateKeys: its published keys do not fit its samples; nothing was changed. ``build_keys_index(path, ...,
            overwrite=True)`` makes new ones.
        OverwriteConflict: the other program changed it meanwhile.

    Example:
        >>> liveset.adopt(path)
        1
    """
    return adopt_store(open_store(path), message=message, author=author).version


def adopt_store(store: Store, *, message: str = "", author: str = "", keys: bool = True, policy: Policy | None = None) -> Index:
    """Adopt the dataset in a store and return its newest version; without ``keys`` those that are published are left behind."""
    base = open_snapshot(store).index
    if base.edit is not None:
        return base
    adoption = Adoption(store)

    def prepare(head: Index | None, _: Sequence[HistoryEntry]) -> Adopt | None:
        if head is None or head.edit is not None:
            return None if head is not None else Adopt({}, {})  # the commit tells that it is gone
        return adoption.change(Snapshot(store, head), keys=keys)

    try:
        index = commit(store, prepare, base, message=message, author=author, policy=policy)
    except CommitUnknown:
        raise
    except (DatasetError, OSError):
        remove_unnamed(store, adoption.written, None)
        raise
    with landed(store, index):
        remove_unnamed(store, adoption.written, index)
    return index


def adopt_version(store: Store, base: Index, *, author: str = "", keys: bool = True) -> Index | None:
    """Adopt a dataset, and return the version that followed the one that another program wrote; None if that one is not ``base``."""
    adopt_store(store, author=author, keys=keys)
    return open_snapshot(store, 1).index if store.read(version_name(0)) == base.source else None


def remove_unnamed(store: Store, written: Iterable[str], index: Index | None) -> None:
    """Remove those of our files that a version does not name; a failure is logged, since a vacuum removes them too."""
    superseded = sorted({*written} - files_of(index))
    if not superseded:
        return
    try:
        store.delete(superseded)
    except (DatasetError, OSError) as error:
        _log.warning("files that are not needed any more could not be removed: %s", error)


class Adoption:
    """The files that adopting a dataset takes.

    Attributes:
        written: names of the files that were made.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = KeyWriter(store, new_token())
        self._links: dict[str, ChunkRecord] = {}
        self._tables: KeyFiles | None = None
        self._names: list[str] = []

    @property
    def written(self) -> list[str]:
        return self._names + self._keys.written

    def change(self, snapshot: Snapshot, *, keys: bool = True) -> Adopt:
        """Return the change that adopts a version of another program."""
        records = self.records(snapshot)
        files = self.key_files(snapshot) if keys else None
        return Adopt(records, {record.filename: record.filename for record in snapshot.index.chunks}, files)

    def records(self, snapshot: Snapshot, skip: Collection[str] = ()) -> dict[str, ChunkRecord]:
        """Return the new records of all chunks by their ids (which are the old names), but those in ``skip``; makes the second names."""
        compression = codec.Compression.from_config(snapshot.index.config or {})
        found: dict[str, ChunkRecord] = {}
        for number, record in enumerate(snapshot.index.chunks):
            name = record.filename
            if name in skip:
                continue
            if name not in self._links:
                self._links[name] = record.replace(filename=self._second_name(snapshot, number, compression), id=name)
            found[name] = self._links[name]
        return found

    def key_files(self, snapshot: Snapshot) -> KeyFiles | None:
        """Return the published keys as a key table, after checking them; None for a dataset without keys."""
        if self._tables is None and (keys := open_keys(snapshot)) is not None:
            self._tables = self._keys.adopted(keys, snapshot)
        return self._tables

    def _second_name(self, snapshot: Snapshot, number: int, compression: codec.Compression | None) -> str:
        old = snapshot.index.chunks[number].filename
        if _OURS.fullmatch(old):
            return old
        new = fresh_name(old, number, new_token(), compression)
        self._names.append(new)
        if snapshot.index.compressed_files:
            name, buffer = snapshot.chunk_file(number)
            if name != old:  # the old tool has inflated it; under a name that says "compressed" it must be so
                self._store.write(new, codec.compress(buffer, compression))
                return new
        self._store.copy(old, new)
        return new
