"""The index: ``index.json`` as frozen data.

One document lists the chunks of one version, in the order of their samples. Members that this version of liveset does not know survive a
rewrite, at the top level, in ``config``, in chunk entries and in ``edit``, because other tools and newer versions keep facts there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import xxhash

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format.lazy import lazy
from liveset.format.stamp import EditStamp, Redirects

__all__ = ["ChunkRecord", "Index"]

_KNOWN = ("chunks", "config", "attributes", "edit")
_NOT_DIGESTED = ("edit", "keys")  # the stamp holds the digest; `keys` describes a mirror that old tools may rebuild
_NEEDED_CONFIG = ("compression", "data_format", "data_spec")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, gc=False):
    """The members of a chunk entry that we know; msgspec checks their types while it parses."""

    filename: str
    chunk_size: _Size
    chunk_bytes: _Size
    dim: int | None = None
    id: str | None = None
    check: str | None = None
    head_check: str | None = None


class _StrictEntry(_Entry, forbid_unknown_fields=True, gc=False):
    """An entry without members that we do not know: the usual case, parsed without a dict for each chunk."""


_ENTRY_MEMBERS = frozenset(_Entry.__struct_fields__)
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_strict = msgspec.json.Decoder(list[_StrictEntry]).decode
_decode_entries = msgspec.json.Decoder(list[_Entry]).decode
_decode_dicts = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_config = msgspec.json.Decoder(dict[str, Any] | None).decode


class ChunkRecord(msgspec.Struct, frozen=True, gc=False):
    """One chunk of a dataset, as the index lists it.

    A msgspec struct instead of a dataclass, because a dataset may have tens of thousands of them, and opening it must stay quick.
    """

    filename: str
    samples: int
    size: int
    """Length of the file in bytes, before compression of the whole file."""
    dim: int | None = None
    id: str | None = None
    """Stable for the life of the chunk, also when its file is replaced."""
    check: str | None = None
    """``xxh3:<16 hex>`` of the whole file."""
    head_check: str | None = None
    """``xxh3:<16 hex>`` of the header and the offset table."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Members that we do not know; they survive."""
    erased: tuple[int, ...] = ()
    """Slots whose samples a purge has erased; a redirect in the head says so, and the entry does not."""

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], file: str = "index.json") -> ChunkRecord:
        """Makes a record from one entry of ``chunks``."""
        return _records(msgspec.json.encode([dict(entry)]), file)[0]

    def to_json(self) -> dict[str, Any]:
        """The entry of ``chunks`` for this record; members of ``extra`` never hide the known ones."""
        entry: dict[str, Any] = dict(self.extra)
        entry.update(filename=self.filename, chunk_size=self.samples, chunk_bytes=self.size, dim=self.dim)
        if self.id is not None:
            entry["id"] = self.id
        if self.check is not None:
            entry["check"] = self.check
        if self.head_check is not None:
            entry["head_check"] = self.head_check
        return entry

    def replace(self, **changes: Any) -> ChunkRecord:
        """The same record with some fields changed."""
        return msgspec.structs.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Index:
    """Frozen view of one ``index.json``; its bytes are kept, and pickling sends just those."""

    chunks: tuple[ChunkRecord, ...]
    config: Mapping[str, Any] | None
    attributes: Mapping[str, Any]
    edit: EditStamp | None
    members: Mapping[str, bytes]
    """Raw JSON of all top-level members that we do not know; they survive."""
    digest: str
    """Of all members but the stamp; what ``edit.digest`` must be unless another program wrote here."""
    source: bytes
    file: str

    @classmethod
    def parse(cls, data: bytes, file: str = "index.json") -> Index:
        """Parses and checks an index: ``Corrupt`` or ``UnsupportedFormat``, naming ``file``, when it is not one."""
        raw = _checked(_decode_members, data, file, "")
        if "chunks" not in raw:
            if "shards" in raw:
                raise UnsupportedFormat(f"{file} describes a MosaicML dataset (`shards`, no `chunks`); that cannot be read yet.", file=file)
            raise Corrupt(f"{file} is damaged: it has no member `chunks`.", file=file)
        if "config" not in raw:
            raise Corrupt(f"{file} is damaged: it has no member `config`.", file=file)
        # The stamp comes first: it may say that the rest is written in a way that we cannot know.
        edit = EditStamp.from_json(_checked(_decode_object, raw["edit"], file, "edit"), file) if "edit" in raw else None
        config = _checked(_decode_config, raw["config"], file, "config")
        chunks = _records(bytes(raw["chunks"]), file)
        _check_names([record.filename for record in chunks], file)
        _check_config(config, bool(chunks), file)
        attributes = _checked(_decode_object, raw["attributes"], file, "attributes") if "attributes" in raw else {}
        members = {name: bytes(value) for name, value in raw.items() if name not in _KNOWN}
        return cls(tuple(chunks), config, attributes, edit, members, _digest(raw), data, file)

    @classmethod
    def build(
        cls,
        *,
        chunks: Iterable[ChunkRecord] = (),
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        edit: EditStamp | None = None,
        members: Mapping[str, bytes] | None = None,
    ) -> Index:
        """Makes an index from its parts; the result has been through ``parse``, so what is written can be read."""
        raw = {name: _plain(bytes(value)) for name, value in (members or {}).items()}
        raw["chunks"] = _encode([record.to_json() for record in chunks])
        raw["config"] = _encode(None if config is None else dict(config))
        if attributes:
            raw["attributes"] = _encode(dict(attributes))
        if edit is not None:
            raw["edit"] = _encode(edit.with_digest(_digest(raw)).to_json())
        # Sorted, and spaced as Python's json module does it: an old tool that rewrites only `keys` leaves the other members' bytes alone.
        return cls.parse(b"{" + b", ".join(_encode(name) + b": " + raw[name] for name in sorted(raw)) + b"}")

    def replace(self, **changes: Any) -> Index:
        """The same index with some parts changed (the arguments of ``build``), its stamp renewed to fit them."""
        parts = {"chunks": self.chunks, "config": self.config, "attributes": self.attributes, "edit": self.edit, "members": self.members}
        return Index.build(**(parts | changes))

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        return self.source

    def redirected(self, redirects: Redirects) -> Index:
        """The index with the files that a purge put in the place of those it names; its bytes stay those that were committed."""
        chunks = self.chunks
        if redirects.chunks:
            chunks = tuple([redirect(record, redirects) if record.filename in redirects.chunks else record for record in chunks])
        edit = self.edit
        if edit is not None and edit.key_files is not None and redirects.tables:
            edit = replace(edit, key_files=redirects.key_files(edit.key_files))
        return replace(self, chunks=chunks, edit=edit)

    @property
    def version(self) -> int:
        """Number of the version; 0 when another program wrote the index."""
        return self.edit.version if self.edit else 0

    @property
    def id(self) -> str | None:
        """Id of the commit that wrote this index, unique for ever; None when another program wrote it."""
        return self.edit.id if self.edit else None

    @lazy
    def samples(self) -> int:
        """Number of samples in all chunks."""
        return sum([record.samples for record in self.chunks])

    @lazy
    def size(self) -> int:
        """Bytes in all chunks."""
        return sum([record.size for record in self.chunks])

    @property
    def compressed_files(self) -> bool:
        """Whether each chunk file is compressed as a whole, so that the sizes of the records are not those of the files."""
        config = self.config or {}
        return config.get("compression") is not None and config.get("compression_level") in (None, "chunk")

    @property
    def has_foreign_chunks(self) -> bool:
        """Whether another program wrote some of the chunks, adopted ones included: the format allows padding behind their items."""
        return any(record.id is None or record.id.endswith(".bin") for record in self.chunks)

    @property
    def layout_of_keys(self) -> Mapping[str, Any]:
        """What the index says about published keys (``version``, ``num_shards``, ``sharding``, ``field``); empty when it says nothing."""
        raw = self.members.get("keys")
        return _checked(_decode_object, raw, self.file, "keys") if raw is not None else {}

    def digest_matches(self) -> bool:
        """Whether the members are those that the stamp was made for; True without a stamp."""
        return self.edit is None or self.edit.digest == self.digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.source == other.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        return Index.parse, (self.source, self.file)


def redirect(record: ChunkRecord, redirects: Redirects) -> ChunkRecord:
    """The record of a chunk with the file that a purge put in the place of its own; chunk, slots and positions stay the same."""
    new = redirects.chunks[record.filename]
    return record.replace(
        filename=new.file,
        size=new.size,
        check=new.check,
        head_check=new.head_check,
        id=record.id or record.filename,
        erased=new.erased,
    )


def _records(raw: bytes, file: str) -> list[ChunkRecord]:
    entries: Sequence[_Entry]
    try:
        entries = _decode_strict(raw)
    except (msgspec.DecodeError, RecursionError, ValueError):
        entries = _checked(_decode_entries, raw, file, "chunks")
        extras = [{k: v for k, v in entry.items() if k not in _ENTRY_MEMBERS} for entry in _checked(_decode_dicts, raw, file, "chunks")]
        return [
            ChunkRecord(e.filename, e.chunk_size, e.chunk_bytes, e.dim, e.id, e.check, e.head_check, extra)
            for e, extra in zip(entries, extras, strict=True)
        ]
    return [ChunkRecord(e.filename, e.chunk_size, e.chunk_bytes, e.dim, e.id, e.check, e.head_check) for e in entries]


def _checked(decode: Any, raw: Any, file: str, member: str) -> Any:
    """Decodes, and turns what msgspec says into an error that names the file and the member."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        reason = str(error)
        if member and "`$" not in reason:
            reason += " - at `$`"
        reason = reason.replace("`$", f"`{member}" if member else "`index")
        short = " (it looks truncated)" if "truncated" in reason else ""
        raise Corrupt(f"{file} is damaged{short}: {reason}.", file=file) from error


def _check_names(names: list[str], file: str) -> None:
    """Every name must stay inside the dataset: an index is input from elsewhere."""
    text = "\0/" + "/\0/".join(names) + "/\0"
    # One look at all names together is enough for nearly every index; only a suspicious text is examined name by name.
    if names and (text.count("\0") != len(names) + 1 or any(mark in text for mark in ("..", "\\", "//", "/./"))):
        for number, name in enumerate(names):
            parts = name.split("/")
            if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
                raise Corrupt(f"{file} is damaged or hostile: chunks[{number}].filename is {name!r}, not a plain relative path.", file=file)
    if len(set(names)) != len(names):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise Corrupt(f"{file} is damaged: it lists the chunk {name!r} twice.", file=file)
            seen.add(name)


def _check_config(config: Mapping[str, Any] | None, has_chunks: bool, file: str) -> None:
    if config is None:
        if has_chunks:
            raise Corrupt(f"{file} is damaged: it lists chunks, but `config` is null.", file=file)
        return
    for name in _NEEDED_CONFIG:
        if name not in config:
            raise Corrupt(f"{file} is damaged: `config` has no member `{name}`.", file=file)
    formats, spec, compression = config["data_format"], config["data_spec"], config["compression"]
    if not isinstance(formats, list) or not all(isinstance(item, str) for item in formats):
        raise Corrupt(f"{file} is damaged: `config.data_format` is not a list of strings.", file=file)
    if not isinstance(spec, str | None):
        raise Corrupt(f"{file} is damaged: `config.data_spec` is neither a string nor null.", file=file)
    if not isinstance(compression, str | None):
        raise Corrupt(f"{file} is damaged: `config.compression` is neither a string nor null.", file=file)


def _digest(raw: Mapping[str, Any]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(raw):
        if name not in _NOT_DIGESTED:
            value = memoryview(raw[name])
            # The lengths keep two different sets of members from giving the same bytes.
            state.update(f"{len(name)}:{name}={len(value)}:".encode("utf-8", "surrogatepass"))
            state.update(value)
    return "xxh3:" + state.hexdigest()


def _encode(value: Any) -> bytes:
    try:
        return _plain(msgspec.json.encode(value, order="sorted"))
    except (OverflowError, TypeError, ValueError):
        # Whole numbers beyond 64 bits: the slow encoder knows them, and refuses what is not JSON.
        return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _plain(raw: bytes) -> bytes:
    """The same JSON as Python's json module would space and escape it."""
    spaced = msgspec.json.format(raw, indent=0)
    return spaced if spaced.isascii() else _NOT_ASCII.sub(_escape, spaced.decode()).encode()


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]
