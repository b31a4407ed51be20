"""How the chunks of a run land in the dataset: one commit, with the keys of the new samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from liveset.edit.adopt import adopt_store
from liveset.edit.changes import Append, Change, Keys, Overwrite
from liveset.edit.commit import commit
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.publish import layout, publish_keys
from liveset.edit.rebase import check_rebase
from liveset.errors import Conflict, DatasetError, DatasetExists, DuplicateKeys, OverwriteConflict, SessionExpired
from liveset.format.config import make_config
from liveset.format.index import Index
from liveset.format.schema import Schema
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.write.chunker import StagedChunk
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
    """

    session: str | None = None
    message: str = ""
    author: str = ""
    num_shards: int = 1
    force: bool = False
    resumed: bool = False


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

    def commit(self, chunks: Sequence[StagedChunk], schema: Schema | None, settings: ChunkSettings) -> Index | None:
        """Make the chunks a version.

        Returns:
            The version, or None if there was nothing to append.

        Raises:
            DatasetExists: a dataset appeared meanwhile, and there is no mode.
            DuplicateKeys, KeyConflict: a key occurs twice, or is in the dataset already.
            Conflict: other commits stand in the way.
        """
        base, wishes = self._base, self._wishes
        if self._appends and base is not None and not chunks:
            return None
        if self._appends and base is not None and base.edit is None:
            # The other program's writers would not see our commits. The base stays: others may have committed since it was read.
            adopt_store(self._store)
        config = self._target.config
        if config is None and schema is not None:
            limit = settings.limit
            config = make_config(schema, samples=limit.samples, size=limit.size, compression=settings.compression)
        keys = KeyWriter(self._store, settings.token) if settings.keys is not None else None
        published = layout(wishes.num_shards, settings.keys.field) if settings.keys is not None else {}
        columns = [(chunk.record.id or chunk.record.filename, chunk.keys) for chunk in chunks if chunk.keys is not None]

        records = tuple(chunk.record for chunk in chunks)
        # That there will be keys is known, their tables are not.
        planned = Keys(KeyFiles("text", 0, ()), published) if keys is not None else None
        change: Append | Overwrite
        change = Append(config, records, planned) if self._appends else Overwrite(config, records, wishes.force, planned)

        def prepare(head: Index | None, since: Sequence[HistoryEntry]) -> Change:
            # First of all: in another dataset the new keys must not even be looked up.
            check_rebase(change, base, head, since)
            if keys is None:
                return change
            if self._appends and head is not None and head.chunks:
                return replace(change, keys=Keys(keys.extended(head, columns), head.layout_of_keys))
            return replace(change, keys=Keys(keys.fresh(columns), published))

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
        except OverwriteConflict as error:
            if self._target.mode is None:
                raise DatasetExists(dataset_exists_message(self._store.url)) from error
            if self._target.mode == "overwrite":
                error.add_note("optimize(mode='overwrite', force=True) also replaces what others commit meanwhile.")
            raise
        if keys is not None:
            self._settle_keys(keys, index)
        return index

    def _settle_keys(self, keys: KeyWriter, index: Index) -> None:
        """Remove tables that a lost race made useless, and publish the keys of a dataset that is new."""
        files = index.edit.key_files if index.edit is not None else None
        used = set(files.tables) if files is not None else set()
        self._store.delete([name for name in keys.written if name not in used])
        if self._base is None or not self._appends or not self._base.chunks:
            if self._base is None and next(iter(self._store.list("keys/")), None) is not None:
                _log.warning("%s/keys holds files that are not this dataset's, so its keys are not published there.", self._store.url)
                return
            publish_keys(self._store, index)

    def may_hold(self, error: BaseException) -> bool:
        """Return whether a commit that ended in an error may have made our chunks part of the dataset all the same."""
        if isinstance(error, Conflict | DatasetExists | DuplicateKeys | SessionExpired):
            return False
        try:
            now = newest(self._store)
        except DatasetError:
            return True
        if now is None or self._base is None:
            return now is not None
        return (now.version, now.index.id, now.index.digest) != (self._base.version, self._base.id, self._base.digest)
