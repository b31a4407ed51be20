"""Changes: what a commit does to a dataset, as frozen data, and how an index looks afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec

from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import EditStamp, Fence, KeyFiles, Redirects

__all__ = [
    "ASIDE",
    "HISTORY",
    "Adopt",
    "Append",
    "Change",
    "Expire",
    "Keys",
    "Overwrite",
    "Purge",
    "Replace",
    "Restore",
    "Retag",
    "SetAttributes",
    "SetKeys",
    "Stamp",
    "apply",
    "files_of",
    "keeps_places",
    "staged_files",
]

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
    """Puts other chunks in the place of some, which may hold fewer samples, takes chunks away (None), and adds chunks behind all others.

    ``records`` maps ids of chunks to their new records, ``expects`` to the names of the files that the new ones were made from.
    ``key_files`` holds the keys of the new version where they are not those of the one before.
    """

    records: Mapping[str, ChunkRecord | None]
    expects: Mapping[str, str]
    key_files: KeyFiles | None = None
    added: tuple[ChunkRecord, ...] = ()
    op: str = "replace"


@dataclass(frozen=True, slots=True)
class Adopt(Replace):
    """Makes a dataset of another program ours: its chunks get names that old writers refuse, its keys become a table."""

    op: str = "adopt"


@dataclass(frozen=True, slots=True)
class Purge(Replace):
    """Takes samples out of the newest version, and puts files without their bytes in the place of those that earlier versions name.

    ``staged`` names the files that it brings along for them; ``fence`` makes every writer see what may hold these bytes as gone.
    """

    op: str = "purge"
    redirects: Redirects = field(default_factory=Redirects)
    staged: frozenset[str] = frozenset()
    fence: Fence | None = None


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


@dataclass(frozen=True, slots=True)
class Retag:
    """Gives a version a name, or takes the name away (``version`` None)."""

    op: ClassVar[str] = "tag"
    name: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Restore:
    """Makes the content of an earlier version the newest: samples, keys, schema and attributes. ``force`` also undoes later commits.

    ``staged`` names the files that it brings along; all others are those of the earlier version.
    """

    op: ClassVar[str] = "restore"
    index: Index
    force: bool = False
    staged: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Expire:
    """Puts up the fence behind which a vacuum deletes; nothing else changes. ``redirects`` are those that are still needed."""

    op: ClassVar[str] = "fence"
    fence: Fence
    redirects: Redirects | None = None


Change = Append | Overwrite | SetAttributes | Replace | SetKeys | Retag | Restore | Expire
ASIDE = frozenset((Retag.op, Expire.op))
"""Commits that change nothing that a version consists of."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who commits, and when: what a stamp holds beside the facts that follow from the parent."""

    id: str
    session: str
    now: datetime
    message: str = ""
    author: str = ""


def apply(index: Index | None, change: Change, stamp: Stamp) -> Index:
    """The index after a change; what ``index`` holds and the change does not touch stays as it is."""
    edit = _dataset_facts(replace(_stamp(index, change, stamp), key_files=_key_files(index, change)), change)
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
        case Restore():
            chunks, config, attributes = change.index.chunks, change.index.config, dict(change.index.attributes)
            members = dict(change.index.members) | {"updated_at": members["updated_at"]}
            if change.index.edit is None:
                members.pop("keys", None)  # the published keys that it describes have been withdrawn or replaced since
        case SetKeys() | Retag() | Expire():
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
    if isinstance(change, Replace) and change.key_files is not None:
        return change.key_files
    if isinstance(change, Restore):
        return change.index.edit.key_files if change.index.edit is not None else None
    if isinstance(change, Overwrite) or index is None or index.edit is None:
        return None
    files = index.edit.key_files
    adds = (isinstance(change, Append) and change.records) or (isinstance(change, Replace) and change.added)
    if files is not None and (adds or not keeps_places(index, change)):
        raise ValueError("cannot add samples without keys to a dataset that has keys, nor remove them together with their chunks alone")
    return files


def _dataset_facts(edit: EditStamp, change: Change) -> EditStamp:
    """The stamp with what holds for the dataset and not for one version: its tags, its fence and its redirects."""
    match change:
        case Retag(name, version):
            tags = {known: number for known, number in edit.tags.items() if known != name}
            return replace(edit, tags=tags if version is None else {**tags, name: version})
        case Expire(fence, redirects) | Purge(fence=Fence() as fence, redirects=redirects):
            left = edit.redirects if redirects is None else redirects
            needed = {*edit.requires_write, "fence", *(["redirects"] if left else [])}
            return replace(edit, fence=replace(fence, version=edit.version), redirects=left, requires_write=tuple(sorted(needed)))
        case Restore(index) if index.edit is not None:
            return replace(edit, requires_read=tuple(sorted({*edit.requires_read, *index.edit.requires_read})))
    return edit


def files_of(index: Index | None) -> set[str]:
    """Names of the files that a version consists of."""
    if index is None:
        return set()
    names = {record.filename for record in index.chunks}
    if index.compressed_files:
        # The old tool inflates such chunks where they lie and deletes the originals; what it leaves is read instead of them.
        names |= {name.replace(f".{(index.config or {})['compression']}", "") for name in names}
    return names | set(index.edit.key_files.tables if index.edit is not None and index.edit.key_files is not None else ())


def keeps_places(index: Index, change: Change) -> bool:
    """Whether every sample that was there stands where it stood, in the same chunk and slot."""
    if isinstance(change, Purge):
        return False
    if isinstance(change, Replace):
        new = [change.records.get(record.id or record.filename, record) for record in index.chunks]
        return all(b is not None and a.samples == b.samples for a, b in zip(index.chunks, new, strict=True))
    return isinstance(change, Append | SetAttributes | Retag | Expire)


def staged_files(change: Change) -> set[str]:
    """Names of the files that a change brings along, or builds upon."""
    match change:
        case Append() | Overwrite():
            names = {record.filename for record in change.records}
        case Replace():
            names = {record.filename for record in (*change.records.values(), *change.added) if record is not None}
            names.update(change.key_files.tables if change.key_files is not None else ())
            names |= change.staged if isinstance(change, Purge) else frozenset()
        case Restore():
            names = files_of(change.index) & change.staged
        case _:
            names = set()
    keys = change.keys if isinstance(change, Append | Overwrite | SetKeys) else None
    return names | set(keys.files.tables if keys is not None else ())


def _replaced(index: Index | None, change: Replace) -> tuple[ChunkRecord, ...]:
    chunks: list[ChunkRecord] = []
    left = dict(change.records)
    for record in index.chunks if index else ():
        name = record.id or record.filename
        if name not in left:
            chunks.append(record)
            continue
        if change.expects[name] != record.filename:
            raise ValueError(f"the chunk {record.filename} was replaced meanwhile")
        if (new := left.pop(name)) is not None:
            chunks.append(new)
    if left:
        raise ValueError(f"the dataset has no chunk {next(iter(left))!r}")
    return (*chunks, *change.added)


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
        op=change.op if index is not None or not isinstance(change, Append | Overwrite) else "create",
        committed_at=now.isoformat(timespec="microseconds"),
        message=stamp.message,
        author=stamp.author,
        parent=(index.version, index.id) if index else None,
        history=(parent.entry, *parent.history[: HISTORY - 1]) if parent else (),
        requires_read=parent.requires_read if parent else (),
        requires_write=parent.requires_write if parent else (),
        tags=parent.tags if parent else {},
        fence=parent.fence if parent else None,
        redirects=parent.redirects if parent else Redirects(),
        extra=parent.extra if parent else {},
    )


def _updated_at(time: datetime, before: bytes | None) -> str:
    """Unix time as text. Old tools name their cache by it, so it must differ from the parent's even where another program wrote that."""
    whole = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    text = f"{whole // 1_000_000}.{whole % 1_000_000:06d}"
    return text + "1" if before is not None and msgspec.json.decode(before) == text else text
