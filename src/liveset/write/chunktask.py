"""What a transform does with one chunk after another, in the calling process or in a worker.

Where the schema stays, changed samples are spliced into a new file for the chunk; where it changes, all samples go into new chunks.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from liveset.edit.chunkfiles import ChunkLimit
from liveset.edit.editable import check_intact
from liveset.edit.encoding import SampleEncoder
from liveset.edit.patch import join_parts, leaf_parts
from liveset.edit.splice import StoredChunk, fresh_name, open_stored
from liveset.errors import DatasetError, PickleRefused, SampleError
from liveset.format import codec
from liveset.format.arrowsplice import check_rows, is_row, same_row
from liveset.format.chunk import Buffer, open_chunk
from liveset.format.fields import field_value
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import normalize_key
from liveset.format.media import is_supported
from liveset.format.schema import Decoder, Schema, first_difference, leaf_values
from liveset.format.tree import Branch, Leaf, Node, Path, leaves, with_leaf
from liveset.snapshot import Snapshot
from liveset.storage import Store
from liveset.write.chunker import ChunkWriter, StagedChunk
from liveset.write.shipping import dump_function

__all__ = ["ChunkTask", "Failure", "Made", "Misfit", "NewSchema", "Part", "Written"]

_LOOSE = frozenset(("json", "pickle"))
"""Leaf types whose values may be stored in more than one way, so that other bytes need not be another value."""


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """One chunk to do; stands for its first sample, too.

    Attributes:
        number: of the chunk.
        first: position of its first sample.
        record: its entry in the index.
        rank: number of the writer, where new chunks are written.
        last: whether the new chunks end with it.
        slots: the samples to do, all others stay; None: all of them.
    """

    number: int
    first: int
    record: ChunkRecord
    rank: int = 0
    last: bool = False
    slots: frozenset[int] | None = None

    def __repr__(self) -> str:
        return str(self.first)


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a chunk that keeps its schema: how many samples changed, and the new record and size of the file if any did."""

    number: int
    changed: int
    record: ChunkRecord | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The chunks that a writer has written anew, and the size of the files."""

    rank: int
    chunks: list[StagedChunk]
    size: int


@dataclass(frozen=True, slots=True)
class NewSchema:
    """What the samples become.

    Attributes:
        schema: what the new chunks start from.
        keyed: whether the field that holds the keys is still there.
        origins: for each media leaf, the stored one that it comes from, by their numbers.
    """

    schema: Schema
    keyed: bool
    origins: dict[int, int]


@dataclass(frozen=True, slots=True)
class Misfit:
    """A result does not fit the schema of the dataset: all samples need this one. ``reason`` tells the field."""

    new: NewSchema
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, at which position if at one; errors of ``fn`` are raised instead."""

    error: Exception
    position: int | None


@dataclass
class ChunkTask:
    """Takes parts and, after each, the positions behind its first sample; returns what became of it with its last one, else None.

    Attributes:
        store: where the dataset is.
        token: random part of the names of new files.
        index: of the dataset, without its chunks.
        fn: makes a sample of a sample.
        where: chooses samples.
        field: that holds the keys, or nothing.
        fields: all that the functions get of a sample, and may change; None: whole samples.
        allow_pickle: of the caller.
        strict: items end where their leaves end, as in all chunks that are ours.
        limit: when a new chunk is full.
        new: what the samples become; None: the schema stays.
        looks: only the schema of the first result is wanted.
        dry: write nothing.
        attempt: tells files that are made for the same chunk apart.
    """

    store: Store
    token: str
    index: Index
    fn: Callable[[Any], Any]
    where: Callable[[Any], Any] | None
    field: str
    fields: tuple[str, ...] | None
    allow_pickle: bool
    strict: bool
    limit: ChunkLimit
    new: NewSchema | None = None
    looks: bool = False
    dry: bool = False
    attempt: int = 0
    _work: _Splicing | _Writing | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    _stopped: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        functions = {name: dump_function(getattr(self, name), None) for name in ("fn", "where")}
        return {**self.__dict__, **functions, "index": self.index.source, "_work": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        functions = {name: pickle.loads(state[name])[0] for name in ("fn", "where")}  # noqa: S301 - from our own process
        self.__dict__.update(state, **functions, index=Index.parse(state["index"]))

    def __call__(self, item: Part | int) -> Made | Written | Misfit | Failure | None:
        if self._stopped:
            return None
        position = item.first if isinstance(item, Part) else item
        if self._work is None:
            self._work = _Splicing(self) if self.new is None else _Writing(self, self.new)
        work = self._work
        try:
            if isinstance(item, Part):
                work.begin(item)
            sample = work.read(slot := position - work.part.first)
        except (DatasetError, OSError) as error:
            return self._stop(Failure(error, None))
        chosen = (work.part.slots is None or slot in work.part.slots) and (self.where is None or bool(self.where(sample)))
        key = work.key_of(sample) if chosen else None
        result = self.fn(sample) if chosen else sample
        try:
            if chosen and result is None:
                raise SampleError(_NONE)
            misfit = work.put(slot, result, key, chosen=chosen)
        except (DatasetError, OSError) as error:
            return self._stop(Failure(error, position))
        if misfit is not None or position + 1 < work.part.first + work.part.record.samples:
            return self._stop(misfit) if misfit is not None else None
        try:
            return work.end()
        except (DatasetError, OSError) as error:
            return self._stop(Failure(error, None))

    def close(self) -> None:
        """End what is at work."""
        if isinstance(self._work, _Writing):
            self._work.close()

    def _stop(self, result: Failure | Misfit) -> Failure | Misfit:
        self._stopped = True
        return result


_NONE = "fn returned None. Return the sample itself to leave it as it is; to remove samples, delete their keys in a dataset_update."


class _Work:
    """Reads the samples of a chunk."""

    def __init__(self, task: ChunkTask) -> None:
        self._task = task
        self._store = task.store
        config = task.index.config or {}
        self._schema = Schema.from_config(config, task.index.file)
        self._compression = codec.Compression.from_config(config)
        self._decoder = Decoder(self._schema, fields=task.fields, allow_pickle=task.allow_pickle, strict=task.strict)
        self.part: Part
        self._name: str
        self._buffer: Buffer
        self._stored: StoredChunk
        self._content: Any  # what is stored for the sample that was read; an item stays as it is, a row is given away

    def begin(self, part: Part) -> None:
        """Open a chunk."""
        self.part = part
        self._name, self._buffer = Snapshot(self._store, dataclasses.replace(self._task.index, chunks=(part.record,))).chunk_file(0)
        self._stored = open_stored(self._buffer, part.record, self._compression)

    def read(self, slot: int) -> Any:
        """Return a sample that nobody else has."""
        self._content = content = self._stored.content(slot)
        if self._stored.holds_rows:
            fields = self._task.fields
            return content if fields is None else {name: value for name, value in content.items() if name in fields}
        try:
            return self._decoder.decode(content, 0, len(content))
        except Exception:
            open_chunk(self._buffer, self.part.record, self._decoder, self._compression).read(slot)  # tells what is wrong
            raise

    def key_of(self, sample: Any) -> Any:
        """Return what stands in the field of the key; None where there is nothing."""
        if not self._task.field:
            return None
        try:
            return field_value(sample, self._task.field)
        except (LookupError, TypeError):
            return None

    def check_key(self, key: Any, result: Any) -> None:
        """Refuse a result that says another key."""
        found = self.key_of(result)
        if (type(found) is type(key) and found == key) or (found is not None and _normal(found) == _normal(key)):
            return
        told = "has no key any more" if found is None else f"says the key {found!r}"
        field = self._task.field
        raise SampleError(f"fn changed field {field!r}, which holds the key: the result {told}. Keys stay in a transform.", field=field)


class _Splicing(_Work):
    """Puts what changed into new files of the same chunks."""

    def __init__(self, task: ChunkTask) -> None:
        super().__init__(task)
        self._count = len(self._schema.formats)
        self._wanted = None if task.fields is None else sorted(self._schema.select(task.fields))
        schema = self._schema if self._wanted is None else Schema(_pruned(self._schema.root, iter(range(self._count)), self._wanted))
        self._encoder = SampleEncoder(schema, allow_pickle=task.allow_pickle)
        self._formats = schema.formats
        self._loose = not _LOOSE.isdisjoint(self._formats)
        self._contents: dict[int, Any] = {}

    def begin(self, part: Part) -> None:
        super().begin(part)
        self._contents = {}

    def put(self, slot: int, result: Any, key: Any, *, chosen: bool) -> Misfit | None:
        """Take the result for a slot; returns what is needed where it does not fit the schema."""
        if not chosen:
            return None
        if self._task.looks:
            return Misfit(self._new_schema(slot), "")
        try:
            content = self._row(slot, result) if self._stored.holds_rows else self._encoder.encode(result, self._item)
        except SampleError as error:
            if self._wanted is not None:
                raise SampleError(f"{error} With fields= fn returns these fields, and their types stay.", field=error.field) from error
            return Misfit(self._new_schema(slot), str(error))
        self.check_key(key, result)
        if self._same(slot, content):
            return None
        if self._wanted is not None and not self._stored.holds_rows:
            parts = leaf_parts(self._content, self._count)
            for number, part in zip(self._wanted, leaf_parts(content, len(self._wanted)), strict=True):
                parts[number] = part
            content = join_parts(parts)
        self._contents[slot] = content
        return None

    def end(self) -> Made:
        """Write the chunk, if a sample of it changed."""
        part, contents = self.part, self._contents
        if not contents:
            return Made(part.number, 0)
        spliced = self._stored.splice(contents)
        size = sum(memoryview(buffer).nbytes for buffer in spliced.buffers)
        if self._task.dry:
            return Made(part.number, len(contents), part.record, size)
        record = part.record
        check_intact(record, self._name, self._buffer)
        name = fresh_name(f"chunk-{self._task.attempt}-{part.number}", part.number, self._task.token, self._compression)
        self._store.write(name, spliced.buffers)
        record = record.replace(
            filename=name,
            samples=spliced.samples,
            size=spliced.size,
            id=record.id or record.filename,
            check=codec.checksum(spliced.buffers),
            head_check=spliced.head_check,
        )
        return Made(part.number, len(contents), record, size)

    def _row(self, slot: int, result: Any) -> Any:
        if type(result) is not dict or not is_row(result):
            raise SampleError("the result is no row of plain values, as the chunk holds them.")
        if self._wanted is not None:
            row = self._stored.content(slot)
            if result.keys() != {name for name in row if name in (self._task.fields or ())}:
                raise SampleError(f"fn returned the fields {', '.join(map(str, result))}.")
            result = {**row, **result}
        check_rows(self._buffer, [result], self.part.record.filename)
        return result

    def _item(self) -> bytes:
        """Return what is stored of the fields that ``fn`` gets."""
        if self._wanted is None:
            item: bytes = self._content
            return item
        parts = leaf_parts(self._content, self._count)
        return join_parts(parts[number] for number in self._wanted)

    def _same(self, slot: int, content: Any) -> bool:
        """Whether what is stored is the value that it would be replaced by."""
        if self._stored.holds_rows:
            return same_row(self._stored.content(slot), content)
        stored, count = self._item(), len(self._formats)
        if stored == content or not self._loose:
            return bool(stored == content)
        pairs = zip(self._formats, leaf_parts(stored, count), leaf_parts(content, count), strict=True)
        if not all(fmt in _LOOSE for fmt, old, new in pairs if old != new):
            return False
        return bool(self._encoder.encode(self._decoder.decode(self._content, 0, len(self._content)), self._item) == content)

    def _new_schema(self, slot: int) -> NewSchema:
        """Return the schema that the result for a slot asks for; what is as before keeps its leaf types."""
        sample = self.read(slot)
        media = dict[int, int]()  # numbers of the media leaves by the identity of their values
        parts = list[bytes]()
        if not self._stored.holds_rows:
            parts = leaf_parts(self._content, len(self._formats))
            values = leaf_values(self._schema.root, sample)
            media = {id(value): n for n, value in enumerate(values) if is_supported(self._formats[n])}
        result = self._task.fn(sample)
        names = {path: n for n, (path, leaf) in enumerate(leaves(self._schema.root)) if is_supported(leaf.format) and parts}
        origins: dict[Path, int] = {}

        def traced(value: Any, path: Path) -> Any:
            """Return a value with wrappers where a media leaf came back, under whatever name."""
            number = media.get(id(value), names.get(path))
            if number is not None:
                origins[path] = number
                encoder = SampleEncoder(Schema(Leaf(self._formats[number])), allow_pickle=self._task.allow_pickle)
                return encoder.wrapped(value, lambda: join_parts([parts[number]]))
            if isinstance(value, dict):
                changed = value.copy()
                changed.update({key: traced(part, (*path, key)) for key, part in value.items()})
                return changed
            if type(value) is list or type(value) is tuple:
                return type(value)(traced(part, (*path, step)) for step, part in enumerate(value))
            return value

        seen = Schema.of(traced(result, ()), allow_pickle=self._task.allow_pickle)
        root = _kept(self._schema.root, seen.root)
        found: dict[int, int] = {}
        for number, (path, leaf) in enumerate(leaves(root)):
            if path in origins and is_supported(leaf.format):
                found[number] = origins[path]
                root = with_leaf(root, number, Leaf(self._formats[origins[path]]))
        return NewSchema(Schema(root), self.key_of(result) is not None, found)


class _Writing(_Work):
    """Puts all samples into new chunks."""

    def __init__(self, task: ChunkTask, new: NewSchema) -> None:
        super().__init__(task)
        self._new = new
        self._media = SampleEncoder(new.schema, allow_pickle=task.allow_pickle)
        self._count = len(self._schema.formats)
        self._files = _Files(None if task.dry else self._store)
        self._writer: ChunkWriter | None = None

    def begin(self, part: Part) -> None:
        super().begin(part)
        if self._writer is None:
            self._writer = ChunkWriter(
                cast("Store", self._files),
                token=self._task.token,
                rank=part.rank,
                limit=self._task.limit,
                compression=self._compression,
                schema=self._new.schema,
                fixed=False,
                allow_pickle=self._task.allow_pickle,
            )

    def put(self, slot: int, result: Any, key: Any, *, chosen: bool) -> None:
        """Write a sample; its schema may widen the new one, where ``fn`` made it."""
        assert self._writer is not None
        if chosen and self._new.keyed:
            self.check_key(key, result)
        before = self._writer.schema
        assert before is not None
        sample = self._media.wrapped(result, self._origin)
        self._writer.add(sample)
        after = self._writer.schema
        if after is before or after is None or after == before:
            return
        if not chosen or (isinstance(before.root, Branch) and not isinstance(after.root, Branch)):
            field, have, new = first_difference(before, Schema.of(sample, allow_pickle=self._task.allow_pickle))
            why = (
                "fn must give all samples the same fields"
                if chosen
                else "`where` did not choose it, so it must fit what fn makes of others"
            )
            raise SampleError(f"field {field!r} is {new} here, but the new schema has {have}: {why}.", field=field)

    def end(self) -> Written | None:
        """Finish, after the last part."""
        if not self.part.last:
            return None
        assert self._writer is not None
        self._writer.finish()
        chunks, self._writer = self._writer.staged, None
        return Written(self.part.rank, chunks, self._files.size)

    def close(self) -> None:
        """Stop the thread that writes."""
        if self._writer is not None:
            self._writer.abort()

    def _origin(self) -> bytes | None:
        """Return an item of the new schema whose media leaves are what is stored for them."""
        formats = self._new.schema.formats
        media = [number for number, fmt in enumerate(formats) if is_supported(fmt)]
        if self._stored.holds_rows or any(number not in self._new.origins for number in media):
            return None
        parts = leaf_parts(self._content, self._count)
        return join_parts(parts[self._new.origins[number]] if number in self._new.origins else b"" for number in range(len(formats)))


class _Files:
    """Counts what is written to a store, or would be (None)."""

    def __init__(self, store: Store | None) -> None:
        self._store, self.size = store, 0

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        """Write a file."""
        self.size += sum(memoryview(buffer).nbytes for buffer in content)
        if self._store is not None:
            self._store.write(name, content)


def _normal(key: Any) -> Any:
    """Return a key as keys are stored, and its type."""
    try:
        normal = normalize_key(key)
    except TypeError:
        return None
    return type(normal), normal


def _pruned(node: Node, numbers: Iterator[int], wanted: Sequence[int]) -> Node:
    """Return a tree of some leaves, in the form in which a decoder of these fields gives samples."""
    if isinstance(node, Leaf):
        return node if next(numbers) in wanted else Branch("dict", (), ())
    children = [(step, child, _pruned(child, numbers, wanted)) for step, child in enumerate(node.children)]
    kept = [(step, part) for step, child, part in children if any(leaves(part)) or not any(leaves(child))]
    keys = None if node.keys is None else tuple(node.keys[step] for step, _ in kept)
    return Branch(node.kind, tuple(part for _, part in kept), keys, node.option)


def _kept(old: Node, seen: Node) -> Node:
    """Return the schema of a result, with the old leaf types wherever these hold what it has."""
    if isinstance(old, Branch) and isinstance(seen, Branch) and old.keys is not None and seen.keys is not None:
        known = dict(zip(old.keys, old.children, strict=True))
        pairs = zip(seen.keys, seen.children, strict=True)
        children = tuple(_kept(known[key], child) if key in known else child for key, child in pairs)
        return Branch(seen.kind, children, seen.keys, seen.option)
    try:
        return old if Schema(old).join(Schema(seen)).root == old else seen
    except (SampleError, PickleRefused):
        return seen
