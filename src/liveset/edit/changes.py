"""Changes: what a commit does to a dataset, as frozen data, and how an index looks afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec

from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import EditStamp, KeyFiles

__all__ = ["HISTORY", "Append", "Change", "Keys", "Overwrite", "Replace", "SetAttributes", "SetKeys", "Stamp", "apply"]

HISTORY = 64
"""How many earlier commits a head remembers; the older ones are found in the archived heads."""


@dataclass(frozen=True, slots=True)
class Append:
    """Adds chunks behind those that are there; makes the dataset where there is none."""

    op: ClassVar[str] = "append"
    config: Mapping[str, Any] | None
    records: tuple[ChunkRecord, ...]
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Replaces all chunks and the config; attributes stay. ``force`` also replaces what was committed meanwhile."""

    op: ClassVar[str] = "overwrite"
    config: Mapping[str, Any] | None
    records: tuple[ChunkRecord, ...]
    force: bool = False
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class SetAttributes:
    """Sets attributes of the dataset (name, licence, free text, ...); None removes one, those not named stay."""

    op: ClassVar[str] = "attributes"
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Replace:
    """Puts other files in the place of some chunks; samples keep their positions and keys.

    ``records`` maps ids of chunks to their new records, ``expects`` to the names of the files that the new ones were made from.
    """

    op: ClassVar[str] = "replace"
    records: Mapping[str, ChunkRecord]
    expects: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SetKeys:
    """Gives a dataset keys, or other ones; samples stay as they are."""

    op: ClassVar[str] = "keys"
    keys: Keys


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a version has: its tables, and the member ``keys`` of the index, which describes the published shards."""

    files: KeyFiles
    published: Mapping[str, Any]


Change = Append | Overwrite | SetAttributes | Replace | SetKeys


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who commits, and when: what a stamp holds beside the facts that follow from the parent."""

    id: str
    session: str
    now: datetime
    message: str = ""


def apply(index: Index | None, change: Change, stamp: Stamp) -> Index:
    """The index after a change; what ``index`` holds and the change does not touch stays as it is."""
    edit = replace(_stamp(index, change, stamp), key_files=_key_files(index, change))
    members = dict(index.members) if index else {}
    members["updated_at"] = msgspec.json.encode(_updated_at(edit.time, members.get("updated_at")))
    attributes = dict(index.attributes) if index else {}
    match change:
        case Append():
            chunks = (*(index.chunks if index else ()), *change.records)
            if len({record.filename for record in chunks}) != len(chunks):
                raise ValueError("cannot append: some of the chunks are in the dataset already")
            # An empty dataset has no samples that a new config could fail to describe.
            config = index.config if index and index.chunks else change.config or (index.config if index else None)
        case Overwrite():
            chunks, config = change.records, change.config
            members.pop("keys", None)  # it describes keys of chunks that are no longer listed
        case Replace():
            chunks, config = _replaced(index, change), index.config if index else None
        case SetKeys():
            chunks, config = (index.chunks, index.config) if index else ((), None)
        case SetAttributes():
            chunks, config = (index.chunks, index.config) if index else ((), None)
            attributes |= change.attributes
            attributes = {name: value for name, value in attributes.items() if value is not None}
    if isinstance(change, Append | Overwrite | SetKeys) and change.keys is not None:
        members["keys"] = msgspec.json.encode(change.keys.published, order="sorted")
    return Index.build(chunks=chunks, config=config, attributes=attributes, edit=edit, members=members)


def _key_files(index: Index | None, change: Change) -> KeyFiles | None:
    if isinstance(change, Append | Overwrite | SetKeys) and change.keys is not None:
        return change.keys.files
    if isinstance(change, Overwrite) or index is None or index.edit is None:
        return None
    files = index.edit.key_files
    if files is not None and isinstance(change, Append) and change.records:
        raise ValueError("cannot append samples without keys to a dataset that has keys")
    return files


def _replaced(index: Index | None, change: Replace) -> tuple[ChunkRecord, ...]:
    chunks = []
    left = dict(change.records)
    for record in index.chunks if index else ():
        new = left.pop(record.id or record.filename, None)
        if new is not None and change.expects[record.id or record.filename] != record.filename:
            raise ValueError(f"the chunk {record.filename} was replaced meanwhile")
        chunks.append(record if new is None else new)
    if left:
        raise ValueError(f"the dataset has no chunk {next(iter(left))!r}")
    return tuple(chunks)


def _stamp(index: Index | None, change: Change, stamp: Stamp) -> EditStamp:
    parent = index.edit if index else None
    now = stamp.now.astimezone(UTC)
    if parent:
        # "The version at that time" must be well defined when the clocks of two writers disagree.
        now = max(now, parent.time.astimezone(UTC) + timedelta(microseconds=1))
    return EditStamp(
        version=(index.version if index else 0) + 1,
        id=stamp.id,
        session=stamp.session,
        op=change.op,
        committed_at=now.isoformat(timespec="microseconds"),
        message=stamp.message,
        parent=(index.version, index.id) if index else None,
        history=(parent.entry, *parent.history[: HISTORY - 1]) if parent else (),
        requires_read=parent.requires_read if parent else (),
        requires_write=parent.requires_write if parent else (),
        extra=parent.extra if parent else {},
    )


def _updated_at(time: datetime, before: bytes | None) -> str:
    """Unix time as text. Old tools name their cache by it, so it must differ from the parent's even where another program wrote that."""
    whole = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    text = f"{whole // 1_000_000}.{whole % 1_000_000:06d}"
    return text + "1" if before is not None and msgspec.json.decode(before) == text else text
