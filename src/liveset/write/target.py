"""What a run writes to: a place, the version that stands there, and what follows from it for the new chunks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from liveset.edit.adopt import adopt_store
from liveset.edit.changes import Append, Change, Keys, Overwrite
from liveset.edit.commit import commit
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.publish import layout, publish_keys, require_parquet
from liveset.edit.rebase import check_rebase
from liveset.edit.versions import find_session
from liveset.errors import Conflict, DatasetError, DatasetExists, DuplicateKeys, OverwriteConflict, SchemaConflict, SessionExpired
from liveset.format.codec import Compression
from liveset.format.config import make_config
from liveset.format.index import Index
from liveset.format.schema import Schema
from liveset.format.stamp import HistoryEntry, KeyFiles
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot
from liveset.storage import HEAD, Store
from liveset.write.chunker import DEFAULT_CHUNK_SIZE, ChunkLimit, StagedChunk
from liveset.write.keying import KeyFunction, KeyRule
from liveset.write.options import Sizes, dataset_exists_message, parse_size
from liveset.write.spans import ChunkSettings

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller said about the chunks."""

    sizes: Sizes
    compression: str | None
    compression_level: str | None
    compression_batch_size: int | None
    nullable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommitWishes:
    """What the caller said about the commit."""

    session: str | None = None
    message: str = ""
    num_shards: int = 1
    resumed: bool = False


class Target:
    """The place of a dataset, as it was when the run began.

    Args:
        store: the place.
        mode: None, ``append`` or ``overwrite``.
        session: name of the piece of work.

    Raises:
        DatasetExists: a dataset stands there and there is no mode.
    """

    def __init__(self, store: Store, mode: str | None, session: str | None = None) -> None:
        self.store, self.mode = store, mode
        self.base = _read(store)
        # Whether this very piece of work is in the dataset already.
        self.done = self.base is not None and session is not None and find_session(store, self.base, session) is not None
        if self.base is not None and mode is None and not self.done:
            raise DatasetExists(dataset_exists_message(store.url))
        # An empty dataset has no samples that new ones would have to be like.
        self.config = self.base.config if self.base is not None and mode == "append" and self.base.chunks else None

    def key_rule(self, key_fn: KeyFunction | str | None) -> KeyRule | None:
        """Return how the keys of new samples are found; None for a dataset without keys.

        Raises:
            ValueError: the dataset that is appended to has keys and nothing says how to make more, or it has none.
            MissingDependency: keys could not be published.
        """
        rule = None if key_fn is None else KeyRule.of(key_fn)
        base = self.base if self.mode == "append" else None
        keyed = base is not None and open_keys(Snapshot(self.store, base)) is not None
        # A dataset without samples takes any keys, and remembers the field of those that it would have.
        if base is None or (not base.chunks and (rule is not None or not keyed)):
            if rule is not None:
                require_parquet()
            return rule
        if not keyed:
            if rule is not None:
                raise ValueError(
                    f"The samples of {self.store.url} have no keys, so new ones cannot have any: build them first with build_keys_index."
                )
            return None
        field = base.layout_of_keys.get("field")
        if rule is None and field is None:
            raise ValueError(
                f"The samples of {self.store.url} have keys: say what the keys of the new ones are with key_fn=, a function of a sample "
                "or the name of a field."
            )
        if rule is not None and field not in (None, rule.field):
            given = "what a function returns" if rule.field is None else repr(rule.field)
            raise ValueError(f"The keys of {self.store.url} stand in the field {field!r}, not in {given}: leave key_fn out.")
        return rule if rule is not None else KeyRule.of(str(field))

    def settings(self, asked: Asked, *, allow_pickle: bool, whole: bool, keys: KeyRule | None = None) -> ChunkSettings:
        """Return how the chunks of a run are written; its token is not chosen yet."""
        schema = self.schema(asked.nullable)
        return ChunkSettings(
            url=self.store.url,
            token="",
            limit=self.limit(asked.sizes),
            compression=self.compression(asked),
            schema=schema,
            nullable=() if schema is not None else asked.nullable,
            allow_pickle=allow_pickle,
            first_number=self.first_number,
            whole=whole,
            keys=keys,
        )

    def schema(self, nullable: Sequence[str]) -> Schema | None:
        """Return the schema that samples must fit, if the dataset has one already."""
        if self.config is None:
            return None
        loader = self.config.get("item_loader") or "PyTreeLoader"
        if loader != "PyTreeLoader" or self.config.get("encryption"):
            raise NotImplementedError(f"Appending to a dataset of {loader} or with encryption is not supported yet.")
        schema = Schema.from_config(self.config, f"{self.store.url}/{HEAD}")
        if nullable and schema.nullable(nullable) != schema:
            raise SchemaConflict(
                f"nullable={list(nullable)}: the dataset at {self.store.url} was written without that. Fields are made nullable when a "
                "dataset is written first; write it again with mode='overwrite'."
            )
        return schema

    def compression(self, asked: Asked) -> Compression | None:
        """Return how chunks are compressed; a dataset that is appended to decides.

        Raises:
            ValueError: it has another compression than was asked for.
        """
        given = Compression.parse(asked.compression, asked.compression_level, asked.compression_batch_size)
        if self.config is None:
            return given
        have = Compression.from_config(self.config)
        if asked.compression is None and asked.compression_level is None:
            return have
        name = asked.compression if asked.compression is not None or have is None else have.name
        wanted = Compression.parse(name, asked.compression_level, asked.compression_batch_size)
        if (wanted and (wanted.name, wanted.level)) != (have and (have.name, have.level)):
            raise ValueError(
                f"The dataset at {self.store.url} is written with {_told(have)}, and {_told(wanted)} was asked for: all chunks of a "
                "dataset are compressed alike. Leave the compression out to append, or use mode='overwrite'."
            )
        return wanted

    def limit(self, sizes: Sizes) -> ChunkLimit:
        """Return when a chunk is full: as asked for, else as in the dataset that is appended to."""
        if sizes.samples is not None or sizes.size is not None:
            return ChunkLimit(sizes.samples, sizes.size)
        samples, size = _limits(self.config or {})
        return ChunkLimit(samples, size) if samples or size else ChunkLimit(None, DEFAULT_CHUNK_SIZE)

    @property
    def first_number(self) -> int:
        """Where the counter in the names of chunk files goes on."""
        names = [record.filename for record in self.base.chunks] if self.base is not None and self.mode == "append" else []
        numbers = [int(found[1]) for name in names if (found := re.match(r"chunk-\d+-(\d+)", name))]
        return max(numbers, default=-1) + 1

    def commit(self, chunks: Sequence[StagedChunk], schema: Schema | None, settings: ChunkSettings, wishes: CommitWishes) -> Index | None:
        """Make the chunks a version.

        Returns:
            The version, or None if there was nothing to append.

        Raises:
            DatasetExists: a dataset appeared meanwhile, and there is no mode.
            DuplicateKeys, KeyConflict: a key occurs twice, or is in the dataset already.
            Conflict: other commits stand in the way.
        """
        if self.mode == "append" and self.base is not None and not chunks:
            return None
        if self.mode == "append" and self.base is not None and self.base.edit is None:
            # The other program's writers would not see our commits. The base stays: others may have committed since it was read.
            adopt_store(self.store)
        config = self.config
        if config is None and schema is not None:
            limit = settings.limit
            config = make_config(schema, samples=limit.samples, size=limit.size, compression=settings.compression)
        keys = KeyWriter(self.store, settings.token) if settings.keys is not None else None
        published = layout(wishes.num_shards, settings.keys.field) if settings.keys is not None else {}
        columns = [(chunk.record.id or chunk.record.filename, chunk.keys) for chunk in chunks if chunk.keys is not None]

        records = tuple(chunk.record for chunk in chunks)
        # That there will be keys is known, their tables are not.
        planned = Keys(KeyFiles("text", 0, ()), published) if keys is not None else None
        change: Append | Overwrite = (Append if self.mode == "append" else Overwrite)(config, records, keys=planned)

        def prepare(head: Index | None, since: Sequence[HistoryEntry]) -> Change:
            # First of all: in another dataset the new keys must not even be looked up.
            check_rebase(change, self.base, head, since)
            if keys is None:
                return change
            if self.mode == "append" and head is not None and head.chunks:
                return replace(change, keys=Keys(keys.extended(head, columns), head.layout_of_keys))
            return replace(change, keys=Keys(keys.fresh(columns), published))

        try:
            index = commit(self.store, prepare, self.base, session=wishes.session, message=wishes.message, resumed=wishes.resumed)
        except OverwriteConflict as error:
            if self.mode is None:
                raise DatasetExists(dataset_exists_message(self.store.url)) from error
            raise
        if keys is not None:
            self._settle_keys(keys, index)
        return index

    def _settle_keys(self, keys: KeyWriter, index: Index) -> None:
        """Remove tables that a lost race made useless, and publish the keys of a dataset that is new."""
        files = index.edit.key_files if index.edit is not None else None
        used = set(files.tables) if files is not None else set()
        self.store.delete([name for name in keys.written if name not in used])
        if self.base is None or self.mode != "append" or not self.base.chunks:
            if self.base is None and next(iter(self.store.list("keys/")), None) is not None:
                _log.warning("%s/keys holds files that are not this dataset's, so its keys are not published there.", self.store.url)
                return
            publish_keys(self.store, index)

    def may_hold(self, error: BaseException) -> bool:
        """Return whether a commit that ended in an error may have made our chunks part of the dataset all the same."""
        if isinstance(error, Conflict | DatasetExists | DuplicateKeys | SessionExpired):
            return False
        try:
            now = _read(self.store)
        except DatasetError:
            return True
        if now is None or self.base is None:
            return now is not None
        return (now.version, now.id, now.digest) != (self.base.version, self.base.id, self.base.digest)


def _read(store: Store) -> Index | None:
    head = store.read_head()
    return None if head is None else Index.parse(head.data, f"{store.url}/{HEAD}")


def _limits(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    samples, size = config.get("chunk_size"), config.get("chunk_bytes")
    if isinstance(size, str):
        size = parse_size(size)
    return samples if isinstance(samples, int) and samples > 0 else None, size if isinstance(size, int) and size > 0 else None


def _told(compression: Compression | None) -> str:
    return "no compression" if compression is None else f"compression={compression.name!r}, compression_level={compression.level!r}"
