"""What a run writes to: a place, the version that stands there, and what follows from it for the new chunks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from liveset.edit.chunkfiles import DEFAULT_CHUNK_SIZE, ChunkLimit
from liveset.edit.publish import require_parquet
from liveset.edit.versions import find_session
from liveset.errors import DatasetExists, DatasetNotFound, SchemaConflict
from liveset.format.codec import Compression
from liveset.format.config import stored_limits
from liveset.format.schema import Schema
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import HEAD, Store
from liveset.write.keying import KeyFunction, KeyRule
from liveset.write.options import Sizes, dataset_exists_message
from liveset.write.spans import ChunkSettings


def newest(store: Store) -> Snapshot | None:
    """Return the newest version of a dataset, or None where there is none."""
    try:
        return open_snapshot(store)
    except DatasetNotFound:
        return None


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
        self.snapshot = newest(store)
        self.base = self.snapshot.index if self.snapshot is not None else None
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
        keyed = base is not None and self.snapshot is not None and open_keys(self.snapshot) is not None
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
            store=self.store,
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
        samples, size = stored_limits(self.config or {})
        return ChunkLimit(samples, size) if samples or size else ChunkLimit(None, DEFAULT_CHUNK_SIZE)

    @property
    def first_number(self) -> int:
        """Where the counter in the names of chunk files goes on."""
        names = [record.filename for record in self.base.chunks] if self.base is not None and self.mode == "append" else []
        numbers = [int(found[1]) for name in names if (found := re.match(r"chunk-\d+-(\d+)", name))]
        return max(numbers, default=-1) + 1


def _told(compression: Compression | None) -> str:
    return "no compression" if compression is None else f"compression={compression.name!r}, compression_level={compression.level!r}"
