"""What a run writes to: a place, the version that stands there, and what follows from it for the new chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from liveset.edit.changes import Append, Overwrite
from liveset.edit.commit import commit
from liveset.edit.versions import find_session
from liveset.errors import Conflict, DatasetError, DatasetExists, OverwriteConflict, SchemaConflict
from liveset.format.codec import Compression
from liveset.format.config import make_config
from liveset.format.index import ChunkRecord, Index
from liveset.format.schema import Schema
from liveset.storage import HEAD, Store
from liveset.write.chunker import DEFAULT_CHUNK_SIZE, ChunkLimit
from liveset.write.options import Sizes, dataset_exists_message, parse_size
from liveset.write.spans import ChunkSettings


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller said about the chunks."""

    sizes: Sizes
    compression: str | None
    compression_level: str | None
    compression_batch_size: int | None
    nullable: tuple[str, ...]


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

    def settings(self, asked: Asked, *, allow_pickle: bool, whole: bool) -> ChunkSettings:
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

    def commit(
        self,
        records: Sequence[ChunkRecord],
        schema: Schema | None,
        limit: ChunkLimit,
        compression: Compression | None,
        *,
        session: str | None,
        message: str,
    ) -> Index | None:
        """Make the chunks a version.

        Returns:
            The version, or None if there was nothing to append.

        Raises:
            DatasetExists: a dataset appeared meanwhile, and there is no mode.
            Conflict: other commits stand in the way.
        """
        if self.mode == "append" and self.base is not None and not records:
            return None
        config = self.config
        if config is None and schema is not None:
            config = make_config(schema, samples=limit.samples, size=limit.size, compression=compression)
        change = (Append if self.mode == "append" else Overwrite)(config, tuple(records))
        try:
            return commit(self.store, change, self.base, session=session, message=message)
        except OverwriteConflict as error:
            if self.mode is None:
                raise DatasetExists(dataset_exists_message(self.store.url)) from error
            raise

    def may_hold(self, error: BaseException) -> bool:
        """Return whether a commit that ended in an error may have made our chunks part of the dataset all the same."""
        if isinstance(error, Conflict | DatasetExists):
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
