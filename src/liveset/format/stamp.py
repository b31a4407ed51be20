"""The stamp: the member ``edit`` of an index, which says what commit wrote it and what came before."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from liveset.errors import Corrupt, UnsupportedFormat

__all__ = [
    "FORMAT",
    "READ_FEATURES",
    "WRITE_FEATURES",
    "EditStamp",
    "Fence",
    "HistoryEntry",
    "KeyFiles",
    "Redirect",
    "Redirects",
    "tokens_of",
]

FORMAT = 1
READ_FEATURES: frozenset[str] = frozenset()
"""What ``edit.requires.read`` may name: without it a reader would return wrong samples."""
WRITE_FEATURES: frozenset[str] = frozenset(("fence", "redirects"))
"""What ``edit.requires.write`` may name: without it a writer would break a promise."""

_KNOWN = frozenset(
    "format requires version id session parent op committed_at digest message author history key_files tags fence redirects".split()
)
_INFLATED = re.compile(r"\.[^./]+(?=\.bin$)")
_TOKEN = re.compile(r"(?<=-)[0-9a-f]{16}(?=[-.])")
_KEY_FILES_KNOWN = frozenset(("kind", "count", "base", "deltas", "sizes"))
_FENCE_KNOWN = frozenset(("version", "expired_before", "kept", "cutoff", "spared"))


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """The key tables of a version; a later table is right where two know the same key or chunk."""

    kind: str
    """``text`` or ``int``."""
    count: int
    """Number of keys, which is the number of samples."""
    base: tuple[str, ...]
    deltas: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Bytes of tables by their names, which need no request to be known then; heads of earlier versions of liveset have none."""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Members that we do not know; they survive as long as the tables stay."""

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables, oldest first."""
        return self.base + self.deltas

    def to_json(self) -> dict[str, Any]:
        """The member ``key_files`` of a stamp."""
        sizes = {name: self.sizes[name] for name in self.tables if name in self.sizes}
        return {
            **self.extra,
            "kind": self.kind,
            "count": self.count,
            "base": list(self.base),
            "deltas": list(self.deltas),
            **({"sizes": sizes} if sizes else {}),
        }


@dataclass(frozen=True, slots=True)
class Fence:
    """What the newest vacuum was allowed to delete: writers and readers judge by it what may be gone."""

    version: int
    """Of the commit that put the fence up."""
    expired_before: int
    """Versions below this number have expired, but for those in ``kept``."""
    cutoff: datetime
    """Files that no kept version names and that are as old as this, by the clock of the store, may be gone."""
    kept: tuple[int, ...] = ()
    """Versions below ``expired_before`` that were spared because a tag or a reader held them."""
    spared: tuple[str, ...] = ()
    """Tokens in the names of files that were spared, however old: of runs that had not committed yet."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Members that we do not know; they survive until the next vacuum."""

    def keeps(self, version: int) -> bool:
        """Whether all that a version needs is still there."""
        return version >= self.expired_before or version in self.kept

    def spares(self, name: str) -> bool:
        """Whether a file is one of a run that was spared."""
        return not set(self.spared).isdisjoint(tokens_of(name))

    def to_json(self) -> dict[str, Any]:
        """The member ``fence`` of a stamp."""
        return {
            **self.extra,
            "version": self.version,
            "expired_before": self.expired_before,
            "kept": list(self.kept),
            "cutoff": self.cutoff.astimezone(UTC).isoformat(timespec="microseconds"),
            "spared": list(self.spared),
        }


class Redirect(NamedTuple):
    """The chunk file that a purge put in the place of another one: without the bytes of some samples, whose slots stay."""

    file: str
    size: int
    check: str | None
    head_check: str | None
    erased: tuple[int, ...]
    """All slots that have no bytes, ascending."""


@dataclass(frozen=True, slots=True)
class Redirects:
    """What purges put in the place of files that earlier versions name; the files themselves are gone, or about to go."""

    chunks: Mapping[str, Redirect] = field(default_factory=dict)
    """By name of the chunk file."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Key tables by the name of the one before."""
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Bytes of the new key tables by their names, as in ``KeyFiles``."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.tables)

    @property
    def old(self) -> frozenset[str]:
        """Names of the files that have been replaced, and of what the old tool leaves when it inflates one of them."""
        return frozenset((*self.chunks, *(_INFLATED.sub("", name) for name in self.chunks), *self.tables))

    def key_files(self, files: KeyFiles) -> KeyFiles:
        """The key tables of a version with those that replaced them."""
        base, deltas = (tuple([self.tables.get(name, name) for name in names]) for names in (files.base, files.deltas))
        return replace(files, base=base, deltas=deltas, sizes={**files.sizes, **self.sizes})

    def only(self, names: Collection[str]) -> Redirects:
        """What is said of some of the files."""
        return Redirects(
            {name: new for name, new in self.chunks.items() if name in names},
            {name: new for name, new in self.tables.items() if name in names},
            self.sizes,
        )

    def to_json(self) -> dict[str, Any]:
        """The member ``redirects`` of a stamp."""
        sizes = {name: self.sizes[name] for name in dict.fromkeys(self.tables.values()) if name in self.sizes}
        return {
            "chunks": {name: new._asdict() for name, new in self.chunks.items()},
            "tables": dict(self.tables),
            **({"sizes": sizes} if sizes else {}),
        }


class HistoryEntry(NamedTuple):
    """One commit, as its successors remember it."""

    version: int
    id: str
    op: str
    committed_at: str
    session: str = ""
    message: str = ""
    author: str = ""

    @property
    def time(self) -> datetime:
        """``committed_at`` as a time with zone."""
        time = _time(self.committed_at)
        return time if time is not None else datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class EditStamp:
    """What commit wrote an index."""

    version: int
    id: str
    session: str
    op: str
    committed_at: str
    """ISO 8601 with time zone; later than the parent's, whatever the clocks say."""
    digest: str = ""
    message: str = ""
    author: str = ""
    parent: tuple[int, str | None] | None = None
    """Version and id of the index that this commit replaced; the id is None when another program wrote that one."""
    history: tuple[HistoryEntry, ...] = ()
    """The commits before this one, newest first; the older ones are found in the archived versions."""
    requires_read: tuple[str, ...] = ()
    requires_write: tuple[str, ...] = ()
    key_files: KeyFiles | None = None
    """Where the keys of the samples are; None for a dataset without keys."""
    tags: Mapping[str, int] = field(default_factory=dict)
    """Names of versions; they belong to the dataset, not to the version, so those of the newest count."""
    fence: Fence | None = None
    """Of the newest vacuum or purge; None where there was none."""
    redirects: Redirects = field(default_factory=Redirects)
    """What purges did to the files of earlier versions; of the dataset, like tags and fence."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Members that we do not know; they survive."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any], file: str = "index.json") -> EditStamp:
        """Checks the member ``edit`` of an index."""
        form = data.get("format")
        if type(form) is not int:
            raise _bad(file, "format", "a whole number")
        if form > FORMAT:
            raise UnsupportedFormat(
                f"{file} was written by a newer liveset (edit.format is {form}, {FORMAT} is the newest known). Update liveset.", file=file
            )
        requires = data.get("requires", {})
        read, write = (_strings(requires.get(name, [])) if isinstance(requires, dict) else None for name in ("read", "write"))
        if read is None or write is None:
            raise _bad(file, "requires", "an object with lists of strings")
        unknown = sorted(set(read) - READ_FEATURES)
        if unknown:
            raise UnsupportedFormat(
                f"{file} needs what this liveset does not have: {', '.join(map(repr, unknown))} (edit.requires.read). Update liveset.",
                file=file,
            )
        version, ident, op, time = data.get("version"), data.get("id"), data.get("op"), data.get("committed_at")
        if type(version) is not int or version < 1:
            raise _bad(file, "version", "a positive whole number")
        if not isinstance(ident, str) or not ident:
            raise _bad(file, "id", "a string")
        if not isinstance(op, str):
            raise _bad(file, "op", "a string")
        if not isinstance(time, str) or _time(time) is None:
            raise _bad(file, "committed_at", "a time in ISO 8601 with time zone")
        texts = _strings([data.get(name, "") for name in ("session", "digest", "message", "author")])
        if texts is None:
            raise _bad(file, "session, digest, message or author", "a string")
        parent = data.get("parent")
        if parent is not None:
            if not isinstance(parent, dict) or type(parent.get("version")) is not int or not isinstance(parent.get("id"), str | None):
                raise _bad(file, "parent", "an object with version and id, or null")
            parent = (parent["version"], parent.get("id"))
        history = data.get("history", [])
        if not isinstance(history, list):
            raise _bad(file, "history", "a list")
        return cls(
            version=version,
            id=ident,
            session=texts[0],
            op=op,
            committed_at=time,
            digest=texts[1],
            message=texts[2],
            author=texts[3],
            parent=parent,
            history=tuple(_entry(item, file) for item in history),
            requires_read=tuple(read),
            requires_write=tuple(write),
            key_files=_key_files(data.get("key_files"), file),
            tags=_tags(data.get("tags", {}), file),
            fence=_fence(data.get("fence"), file),
            redirects=_redirects(data.get("redirects"), file),
            extra={name: value for name, value in data.items() if name not in _KNOWN},
        )

    def to_json(self) -> dict[str, Any]:
        """The member ``edit``; members of ``extra`` never hide the known ones."""
        return {
            **self.extra,
            **({"key_files": self.key_files.to_json()} if self.key_files is not None else {}),
            **({"tags": dict(self.tags)} if self.tags else {}),
            **({"fence": self.fence.to_json()} if self.fence is not None else {}),
            **({"redirects": self.redirects.to_json()} if self.redirects else {}),
            **({"author": self.author} if self.author else {}),
            "format": FORMAT,
            "requires": {"read": list(self.requires_read), "write": list(self.requires_write)},
            "version": self.version,
            "id": self.id,
            "session": self.session,
            "parent": None if self.parent is None else {"version": self.parent[0], "id": self.parent[1]},
            "op": self.op,
            "committed_at": self.committed_at,
            "digest": self.digest,
            "message": self.message,
            "history": [list(entry) for entry in self.history],
        }

    def with_digest(self, digest: str) -> EditStamp:
        """The same stamp for other members."""
        return replace(self, digest=digest)

    @property
    def entry(self) -> HistoryEntry:
        """How the history of later versions lists this commit."""
        return HistoryEntry(self.version, self.id, self.op, self.committed_at, self.session, self.message, self.author)

    @property
    def time(self) -> datetime:
        """``committed_at`` as a time with zone."""
        time = _time(self.committed_at)
        return time if time is not None else datetime.fromtimestamp(0, UTC)


def tokens_of(name: str) -> list[str]:
    """The random parts in the name of a file, by which those of one run are known."""
    return _TOKEN.findall(name)


def _entry(item: Any, file: str) -> HistoryEntry:
    # Newer versions may add facts to an entry; those behind the ones that we know are dropped.
    texts = _strings(item[1 : len(HistoryEntry._fields)]) if isinstance(item, list) and len(item) >= 4 and type(item[0]) is int else None
    if texts is None:
        raise _bad(file, "history", "a list of [version, id, op, committed_at, ...]")
    return HistoryEntry(item[0], *texts)


def _key_files(item: Any, file: str) -> KeyFiles | None:
    if item is None:
        return None
    base, deltas = (_strings(item.get(name, [])) if isinstance(item, dict) else None for name in ("base", "deltas"))
    if base is None or deltas is None or item.get("kind") not in ("text", "int") or type(item.get("count")) is not int:
        raise _bad(file, "key_files", "an object with kind, count, base and deltas")
    if not _plain_names((*base, *deltas)):
        raise _bad(file, "key_files", "a list of plain relative paths")
    extra = {name: value for name, value in item.items() if name not in _KEY_FILES_KNOWN}
    return KeyFiles(item["kind"], item["count"], tuple(base), tuple(deltas), _sizes(item, "key_files", file), extra)


def _sizes(item: Mapping[str, Any], member: str, file: str) -> Mapping[str, int]:
    sizes = item.get("sizes", {})
    if not isinstance(sizes, dict) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise _bad(file, f"{member}.sizes", "an object with numbers of bytes")
    return sizes


def _tags(item: Any, file: str) -> Mapping[str, int]:
    if not isinstance(item, dict) or not all(type(version) is int and version >= 0 for version in item.values()):
        raise _bad(file, "tags", "an object with numbers of versions")
    return item


def _fence(item: Any, file: str) -> Fence | None:
    if item is None:
        return None
    wanted = "an object with version, expired_before, kept, cutoff and spared"
    if not isinstance(item, dict) or not isinstance(item.get("cutoff"), str) or (cutoff := _time(item["cutoff"])) is None:
        raise _bad(file, "fence", wanted)
    kept, spared = item.get("kept", []), _strings(item.get("spared", []))
    numbers = [item.get("version"), item.get("expired_before"), *(kept if isinstance(kept, list) else [None])]
    if spared is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise _bad(file, "fence", wanted)
    extra = {name: value for name, value in item.items() if name not in _FENCE_KNOWN}
    return Fence(item["version"], item["expired_before"], cutoff, tuple(kept), tuple(spared), extra)


def _redirects(item: Any, file: str) -> Redirects:
    if item is None:
        return Redirects()
    chunks, tables = (item.get(name, {}) if isinstance(item, dict) else None for name in ("chunks", "tables"))
    if not isinstance(chunks, dict) or not isinstance(tables, dict) or not all(isinstance(new, str) for new in tables.values()):
        raise _bad(file, "redirects", "an object with chunks and tables")
    found = {name: _redirect(new, file) for name, new in chunks.items()}
    if not _plain_names((*found, *(new.file for new in found.values()), *tables, *tables.values())):
        raise _bad(file, "redirects", "made of plain relative paths")
    return Redirects(found, tables, _sizes(item, "redirects", file))


def _redirect(item: Any, file: str) -> Redirect:
    name, size, check, head_check, erased = (item.get(member) if isinstance(item, dict) else None for member in Redirect._fields)
    if (
        not isinstance(name, str)
        or not isinstance(size, int)
        or not isinstance(erased, list)
        or not all(type(number) is int and number >= 0 for number in (size, *erased))
        or not isinstance(check, str | None)
        or not isinstance(head_check, str | None)
    ):
        raise _bad(file, "redirects.chunks", "an object of files with size and erased slots")
    return Redirect(name, size, check, head_check, tuple(erased))


def _plain_names(names: Iterable[str]) -> bool:
    """Whether names stay inside the dataset: an index is input from elsewhere."""
    return not any("\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")) for name in names)


def _strings(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def _bad(file: str, member: str, wanted: str) -> Corrupt:
    return Corrupt(f"{file} is damaged: `edit.{member}` is not {wanted}.", file=file)
