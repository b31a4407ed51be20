"""What there is to say about a dataset without reading its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liveset.format.schema import Schema
from liveset.snapshot import Snapshot
from liveset.storage import VERSIONS, has_listing


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Facts about one version of a dataset.

    Attributes:
        path: where it is.
        version: its number; 0 when another program wrote it.
        versions: numbers of the versions that the dataset still knows, oldest first; on a web server, which lists none, that one alone.
        samples: how many samples it has.
        chunks: how many chunk files it has.
        size: bytes of the chunk files, before compression of whole files.
        schema: fields and leaf types; None when it never had a sample.
        compression: such as "zstd", or None.
        attributes: what ``set_attributes`` recorded.
        committed_at: when the version was committed (ISO 8601, UTC), or None.
    """

    path: str
    version: int
    versions: tuple[int, ...]
    samples: int
    chunks: int
    size: int
    schema: Schema | None
    compression: str | None
    attributes: Mapping[str, Any]
    committed_at: str | None


def kept_versions(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the numbers of the versions whose heads are still there, up to the one of the snapshot."""
    if not has_listing(snapshot.store):
        return (snapshot.version,)
    archived = (entry.name.removeprefix(VERSIONS).removesuffix(".json") for entry in snapshot.store.list(VERSIONS))
    return tuple(sorted({*(int(name) for name in archived if name.isdecimal()), snapshot.version}))


def describe(snapshot: Snapshot) -> DatasetInfo:
    """Return the facts about a snapshot; lists the kept versions, and reads nothing else."""
    index = snapshot.index
    config = index.config or {}
    return DatasetInfo(
        path=snapshot.store.url,
        version=index.version,
        versions=kept_versions(snapshot),
        samples=len(snapshot),
        chunks=len(index.chunks),
        size=sum(record.size for record in index.chunks),
        schema=Schema.from_config(config, index.file) if config else None,
        compression=config.get("compression"),
        attributes=index.attributes,
        committed_at=index.edit.committed_at if index.edit is not None else None,
    )
