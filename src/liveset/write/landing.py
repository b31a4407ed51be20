"""How the chunks of a run land in the dataset: one commit, with the keys of the new samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from liveset.edit.adopt import adopt_store, adopt_version, remove_unnamed
from liveset.edit.changes import Append, Change, Keys, Overwrite, Replace
from liveset.edit.commit import commit, landed
from liveset.edit.keyfiles import KeyWriter, ids_of
from liveset.edit.publish import layout, publish_keys
from liveset.edit.rebase import check_rebase
from liveset.errors import (
    Conflict,
    Corrupt,
    DatasetError,
    DatasetExists,
    DuplicateKeys,
    KeyConflict,
    NotFound,
    OverwriteConflict,
)
from liveset.format.config import make_config
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import KeyColumn
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot
from liveset.write.chunker import StagedChunk
from liveset.write.duplicates import Merge, Merged, OnDuplicate
from liveset.write.options import dataset_exists_message
from liveset.write.spans import ChunkSettings
from liveset.write.target import Target, newest

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class CommitWishes:
    """What the caller said about the commit.

    Attributes:
        session: name of the piece of work.
        message: a text for the history.
        author: who did it, for the history.
        num_shards: into how many files the keys are published.
        force: an overwrite also replaces what was committed since the run began.
        resumed: some of the chunks may be older than the version that the run began with.
        on_duplicate: what is done about keys that occur twice.
        verbose: show progress, if this is a terminal.
    """

    session: str | None = None
    message: str = ""
    author: str = ""
    num_shards: int = 1
    force: bool = False
    resumed: bool = False
    on_duplicate: OnDuplicate = "error"
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of a run.

    Attributes:
        version: that holds what came of it; None if there was nothing to change.
        records: the chunks that it brought.
        repeated: number of samples that do not count, since another one of the run has their key.
        replaced: number of samples that took the place of stored ones.
        skipped: number of samples that were left out, since the dataset has their keys.
    """

    version: Index | None
    records: tuple[ChunkRecord, ...]
    repeated: int = 0
    replaced: int = 0
    skipped: int = 0


class Landing:
    """The commit that ends a run.

    Args:
        target: where the dataset is, as it was when the run began.
        wishes: what the caller said.
    """

    def __init__(self, target: Target, wishes: CommitWishes) -> None:
        self._target, self._wishes = target, wishes
        self._store, self._base = target.store, target.base
        self._appends = target.mode == "append"
        self._keys: KeyWriter | None = None
        self._merge: Merge | None = None
        self._merged: Merged | None = None
        self._head: Index | None = None  # what the last change was made for
        self._sent = self._committed = False

    def commit(self, chunks: Sequence[StagedChunk], schema: Schema | None, settings: ChunkSettings) -> Landed:
        """Make the chunks a version.

        Raises:
            DatasetExists: a dataset appeared meanwhile, and there is no mode.
            DuplicateKeys, KeyConflict: a key occurs twice, or is in the dataset already.
            Conflict: other commits stand in the way.
        """
        wishes = self._wishes
        records = tuple(chunk.record for chunk in chunks)
        if self._appends and self._base is not None and not chunks:
            return Landed(None, records)
        base = self._adopted()
        config = self._target.config
        if config is None and schema is not None:
            limit = settings.limit
            config = make_config(schema, samples=limit.samples, size=limit.size, compression=settings.compression)
        if settings.keys is not None:
            self._keys = KeyWriter(self._store, settings.token)
            if schema is not None and wishes.on_duplicate != "error":
                decoder = Decoder(schema, allow_pickle=settings.allow_pickle)
                replaces = wishes.on_duplicate == "replace"
                self._merge = Merge(self._store, chunks, config, decoder, replaces=replaces, verbose=wishes.verbose)
        columns = [(chunk.record.id or chunk.record.filename, chunk.keys) for chunk in chunks if chunk.keys is not None]
        # That there will be keys is known, their tables are not.
        planned = Keys(KeyFiles("text", 0, ()), layout(wishes.num_shards, settings.keys.field)) if settings.keys is not None else None
        change: Append | Overwrite
        change = Append(config, records, planned) if self._appends else Overwrite(config, records, wishes.force, planned)

        def prepare(head: Index | None, since: Sequence[HistoryEntry]) -> Change | None:
            # First of all: in another dataset the new keys must not even be looked up.
            self._sent = False
            check_rebase(change, base, head, since)
            made = change if self._keys is None else self._with_keys(change, head, self._keys, columns)
            self._head, self._sent = head, True
            return made

        try:
            index = commit(
                self._store,
                prepare,
                base,
                session=wishes.session,
                message=wishes.message,
                author=wishes.author,
                resumed=wishes.resumed,
            )
            self._committed = True
        except OverwriteConflict as error:
            if self._target.mode is None:
                raise DatasetExists(dataset_exists_message(self._store.url)) from error
            if self._target.mode == "overwrite":
                error.add_note("optimize(mode='overwrite', force=True) also replaces what others commit meanwhile.")
            raise
        except (DuplicateKeys, KeyConflict) as error:
            error.add_note("optimize(on_duplicate='skip') keeps the first sample of each key, on_duplicate='replace' the newest.")
            raise
        finally:
            if self._merge is not None:
                self._merge.close()
        with landed(self._store, index):
            remove_unnamed(self._store, self._written, index)
            return self._landed(index, records)

    def discard(self) -> None:
        """Remove what a commit that failed has written."""
        remove_unnamed(self._store, self._written, None)

    def _adopted(self) -> Index | None:
        """Adopt a dataset of another program, and return the version that the change is made for.

        Its writers would not see our commits; and when it is overwritten its published keys go, which may be the only ones that it has.
        """
        base, author = self._base, self._wishes.author
        if base is None or base.edit is not None:
            return base
        if self._appends:
            adopt_store(self._store, author=author)
            return base  # others may have committed since it was read
        assert self._target.snapshot is not None
        try:
            if open_keys(self._target.snapshot) is None:
                return base
            first = adopt_version(self._store, base, author=author)
        except (Conflict, Corrupt, DuplicateKeys, NotFound) as error:
            _log.info("%s is overwritten without being adopted first, which is not possible: %s", self._store.url, error)
            return base
        return first if first is not None and first.edit is not None and first.edit.op == "adopt" else base

    @property
    def _written(self) -> list[str]:
        """The files that were written for the commit; lost races make some of them useless."""
        return (self._keys.written if self._keys is not None else []) + (self._merge.written if self._merge is not None else [])

    def _with_keys(
        self, change: Append | Overwrite, head: Index | None, keys: KeyWriter, columns: Sequence[tuple[str, KeyColumn]]
    ) -> Change | None:
        """Return a change of a head with the keys of its samples; None if all of them are left out."""
        current = Snapshot(self._store, head) if self._appends and head is not None and head.chunks else None
        have = open_keys(current) if current is not None else None
        published = change.keys.published if change.keys is not None else {}
        if self._merge is None or (current is not None and have is None):  # extended() refuses the latter
            if current is None:
                return replace(change, keys=Keys(keys.fresh(columns), published))
            return replace(change, keys=Keys(keys.extended(current.index, columns), current.index.layout_of_keys))
        if have is not None:
            for _, column in columns:
                keys.check_kind(have, column)
        self._merged = merged = self._merge.into(current, have)
        if current is None or have is None:
            return replace(change, records=merged.records, keys=Keys(keys.fresh(merged.keys), published))
        if not merged.records and not merged.replaced:
            return None
        files = None
        if merged.records:
            listed = {*ids_of(current.index), *(name for name, _ in merged.keys)}
            count = len(current) + sum(record.samples for record in merged.records)
            old = keys.adopted(have, current)
            files = keys.edited(old, listed, count, deleted=KeyColumn.of([]), removed={}, added=merged.keys)
        if not merged.replaced:
            assert files is not None
            return replace(change, records=merged.records, keys=Keys(files, current.index.layout_of_keys))
        if current.index.edit is None:
            adopt_store(self._store)  # it appeared meanwhile; this race is lost now, and the next one is for what it becomes
        return Replace(merged.replaced, merged.expects, files, merged.records, "edit" if merged.records else "replace")

    def _landed(self, index: Index, records: tuple[ChunkRecord, ...]) -> Landed:
        base, merged = self._base, self._merged
        version = index if merged is None or merged.records or merged.replaced else None
        if version is not None and self._keys is not None and (base is None or not self._appends or not base.chunks):
            self._publish(version)
        if merged is None:
            return Landed(version, records)
        replaced, skipped = (merged.taken, 0) if self._wishes.on_duplicate == "replace" else (0, merged.taken)
        return Landed(version, merged.records, merged.repeated, replaced, skipped)

    def _publish(self, index: Index) -> None:
        """Publish the keys of a dataset that is new."""
        if self._base is None and next(iter(self._store.list("keys/")), None) is not None:
            _log.warning("%s/keys holds files that are not this dataset's, so its keys are not published there.", self._store.url)
            return
        publish_keys(self._store, index)

    def may_hold(self, error: BaseException) -> bool:
        """Return whether a commit that ended in an error may have made our chunks part of the dataset all the same."""
        if self._committed:
            return True
        if not self._sent or isinstance(error, DatasetError | OSError):
            return False
        try:
            now = newest(self._store)
        except DatasetError:
            return True  # an exit may have come right after the swap
        return (now and now.index.source) != (self._head and self._head.source)
