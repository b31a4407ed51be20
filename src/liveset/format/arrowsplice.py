"""Replace, remove and erase rows of an Arrow chunk: batches that keep their rows keep their stored bytes.

The batches of an Arrow file are found through its footer, which is a flatbuffer; only the few numbers that say where a batch lies, how many
rows it has and how it is compressed are read from it, and written back for the new file.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from liveset.errors import Corrupt, SampleError, UnsupportedFormat
from liveset.format.arrow import FILE_MAGIC, MAGIC, find_blob, load_pyarrow

if TYPE_CHECKING:
    from typing_extensions import Buffer

Row = Mapping[str, Any]

_BLOCK = struct.Struct("<qi4xq")
_CODECS = {0: "lz4", 1: "zstd"}
_END = b"\xff\xff\xff\xff\0\0\0\0"
_PLAIN = (type(None), bool, int, float, str, bytes)


def is_row(value: Any) -> bool:
    """Tell whether Arrow rows give a value back unchanged: None, bool, int, float, str, bytes, lists, dicts with text keys."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_row, value.values()))
    if type(value) is list:
        return all(map(is_row, value))
    return type(value) in _PLAIN


def same_row(a: Any, b: Any) -> bool:
    """Tell whether two rows are equal in every type and bit; the order of fields does not matter."""
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(same_row(a[key], b[key]) for key in a)
    if type(a) is list:
        return len(a) == len(b) and all(map(same_row, a, b))
    return struct.pack("<d", a) == struct.pack("<d", b) if type(a) is float else bool(a == b)


def check_rows(buffer: Buffer, rows: Sequence[Row], file: str = "") -> None:
    """Raise ``SampleError``, naming the field, unless the rows can stand in an Arrow chunk and read back equal."""
    pa = load_pyarrow()
    blob = find_blob(buffer, file)
    source = pa.py_buffer(blob)
    schema = (pa.ipc.open_file if _is_file(blob) else pa.ipc.open_stream)(source).schema
    _fit(pa, schema, rows)


def splice_rows(
    buffer: Buffer,
    count: int,
    rows: Mapping[int, Row],
    file: str = "",
    removed: AbstractSet[int] = frozenset(),
    erased: AbstractSet[int] = frozenset(),
) -> list[Buffer]:
    """Return the buffers of an Arrow chunk file in which some slots hold other rows, are gone, or are all null.

    Schema and compression stay as they are, and so do the batches up to the first removed row. Where a column held only nulls so far, it
    gets the type of the new value; then all batches are written anew, since the layout of each depends on the schema. What is removed or
    erased is in none of the buffers afterwards.

    Raises:
        SampleError: a row does not have the columns of the chunk, or would not read back equal; ``field`` names the place.
        Corrupt: the Arrow data is damaged.
        UnsupportedFormat: the chunk has dictionary or view columns.
    """
    pa = load_pyarrow()
    blob = find_blob(buffer, file)
    edit = _Edit(count, rows, removed, erased, file)
    try:
        parts = (_splice_file if _is_file(blob) else _splice_stream)(pa, blob, edit)
    except pa.ArrowNotImplementedError as error:
        raise UnsupportedFormat(f"{file}: Arrow chunks with columns of such types cannot be edited ({error}).") from error
    except (pa.ArrowException, OSError, struct.error, OverflowError, IndexError) as error:
        raise Corrupt(f"{file}: the Arrow data is damaged ({error}).", file=file) from error
    length = sum(len(memoryview(part)) for part in parts)
    count -= len(removed)
    start = 4 + 4 * (count + 1)
    size = start + length + 4 + len(MAGIC)
    if size >= 1 << 32:
        raise SampleError(f"{file} would grow to {size:,} bytes: the format ends at 4 GiB per chunk.")
    return [struct.pack(f"<{count + 2}I", count, *[start] * (count + 1)), *parts, struct.pack("<I", length) + MAGIC]


def _is_file(blob: memoryview) -> bool:
    return bytes(blob[: len(FILE_MAGIC)]) == FILE_MAGIC


# --- the two forms of Arrow data ------------------------------------------------------------------------------------


def _splice_file(pa: Any, blob: memoryview, edit: _Edit) -> list[Buffer]:
    reader = pa.ipc.open_file(pa.py_buffer(blob))
    footer = _Footer(blob)
    groups = edit.groups([_batch_rows(blob[offset:]) for offset, _, _ in footer.blocks])
    schema, new = _fit(pa, reader.schema, edit.added)
    codecs = [_codec(blob[offset:]) for offset, _, _ in footer.blocks]
    source = _Source(pa, reader.get_batch, schema, new)
    if schema != reader.schema or not footer.is_plain:
        return [_written(pa, pa.ipc.new_file, schema, [source.batch(group) for group in groups], codecs[0] if codecs else None)]
    messages: list[memoryview] = []
    sizes: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        stored = edit.stored(group)
        if stored is not None and not (stored < edit.last_lost and source.has_residue(stored)):
            offset, head, body = footer.blocks[stored]
            message = blob[offset : offset + head + body]
        else:
            single = memoryview(_written(pa, pa.ipc.new_file, schema, [source.batch(group)], codecs[number]))
            ((offset, head, body),) = _Footer(single).blocks
            # The message may be used as it is: how it lies in its file matters only by multiples of 8.
            message = single[offset : offset + head + body]
        messages.append(message)
        sizes.append((head, body))
    first = footer.blocks[0][0]
    return [blob[:first], *messages, footer.moved(first, sizes)]


def _splice_stream(pa: Any, blob: memoryview, edit: _Edit) -> list[Buffer]:
    reader = pa.ipc.open_stream(pa.py_buffer(blob))
    batches = list(reader)
    groups = edit.groups([len(batch) for batch in batches])
    schema, new = _fit(pa, reader.schema, edit.added)
    source = _Source(pa, batches.__getitem__, schema, new)
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(blob))
    codec = next((_codec_of(memoryview(message.metadata)) for message in messages if message.type == "record batch"), None)
    return [_written(pa, pa.ipc.new_stream, schema, [source.batch(group) for group in groups], codec)]


# Where rows come from: a stored batch by its number, or one of these; then the first row and the end.
_Rows = tuple[int, int, int]
_ADDED, _NULL = -1, -2


class _Edit:
    """What becomes of the rows of a file.

    Attributes:
        added: the new rows, by slot.
        last_lost: number of the last batch that loses a row, or -1.
    """

    def __init__(self, count: int, rows: Mapping[int, Row], removed: AbstractSet[int], erased: AbstractSet[int], file: str) -> None:
        self._count, self._rows, self._removed, self._erased, self._file = count, rows, removed, erased, file
        self._slots = sorted([*rows, *removed, *erased])
        self.added = [rows[slot] for slot in self._slots if slot in rows]
        self.last_lost = -1
        self._sizes: Sequence[int] = ()

    def groups(self, sizes: Sequence[int]) -> list[list[_Rows]]:
        """Return what each new batch is made of, from the sizes of the stored ones.

        The old tool divides a slot by 256 to find its batch. So the batches behind a removed row are cut anew, all but the last as long as
        the longest was.
        """
        starts = list(accumulate(sizes, initial=0))
        if starts[-1] != self._count:
            raise Corrupt(f"{self._file}: the Arrow data has {starts[-1]} rows, but the index says {self._count}.", file=self._file)
        lost = [slot for slot in self._slots if slot not in self._rows]
        self.last_lost = bisect_right(starts, lost[-1]) - 1 if lost else -1
        self._sizes, added = sizes, 0
        groups: list[list[_Rows]] = []
        for number, (first, end) in enumerate(pairwise(starts)):
            group, at = [], first
            for slot in self._slots[bisect_left(self._slots, first) : bisect_left(self._slots, end)]:
                if at < slot:
                    group.append((number, at - first, slot - first))
                if slot in self._rows:
                    group.append((_ADDED, added, added + 1))
                    added += 1
                elif slot in self._erased:
                    group.append((_NULL, 0, 1))
                at = slot + 1
            if at < end or first == end:
                group.append((number, at - first, end - first))
            groups.append(group)
        return _cut(chain.from_iterable(groups), max(sizes)) if self._removed else groups

    def stored(self, group: list[_Rows]) -> int | None:
        """Return the number of the stored batch that a new one equals, if it does."""
        number = group[0][0]
        return number if len(group) == 1 and number >= 0 and group[0][1:] == (0, self._sizes[number]) else None


def _cut(rows: Iterable[_Rows], width: int) -> list[list[_Rows]]:
    """Return rows in groups of a width."""
    groups: list[list[_Rows]] = []
    room = 0
    for number, first, end in rows:
        start = first
        while start < end:
            if not room:
                groups.append([])
                room = width
            stop = min(end, start + room)
            groups[-1].append((number, start, stop))
            room -= stop - start
            start = stop
    return groups


class _Source:
    """The stored batches and the new rows, in the new schema."""

    def __init__(self, pa: Any, get: Callable[[int], Any], schema: Any, added: Sequence[Any]) -> None:
        self._pa, self._get, self._schema, self._added = pa, get, schema, added
        # Two, since batches are asked for in order and a new one may hold the rows of neighbours.
        self._piece = lru_cache(maxsize=2)(self._load)

    def batch(self, group: Iterable[_Rows]) -> Any:
        """Return a batch of rows, which are copied as they are, never converted, and nothing else of the memory that they lay in."""
        pieces = [
            self._piece(number).slice(start, end - start) if number >= 0 else self._single(number, start) for number, start, end in group
        ]
        columns = [self._pa.concat_arrays([piece.column(i) for piece in pieces]) for i in range(len(self._schema))]
        return self._pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def has_residue(self, number: int) -> bool:
        """Tell whether the buffers of a stored batch hold more than its rows.

        Arrow fills the last bytes of a batch that is a slice of a longer table with what follows in memory: the next rows.
        """
        stored = self._piece(number)
        full: int = self.batch([(number, 0, len(stored))]).get_total_buffer_size()
        return full < int(stored.get_total_buffer_size())

    def _single(self, number: int, at: int) -> Any:
        if number == _ADDED:
            return self._added[at]
        return self._pa.RecordBatch.from_arrays([self._pa.nulls(1, field.type) for field in self._schema], schema=self._schema)

    def _load(self, number: int) -> Any:
        batch = self._get(number)
        batch.validate(full=True)  # damaged offsets would read beyond the buffers
        return batch.cast(self._schema)


def _written(pa: Any, new: Any, schema: Any, batches: Sequence[Any], codec: str | None) -> bytes:
    sink = io.BytesIO()
    with new(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


# --- rows and schemas -----------------------------------------------------------------------------------------------


def _fit(pa: Any, schema: Any, rows: Sequence[Row]) -> tuple[Any, list[Any]]:
    """Return the schema that holds the rows too, and each row as a batch of it; ``SampleError`` when a row would not read back equal."""
    if any(_shares_values(pa, field.type) for field in schema):
        raise UnsupportedFormat("Arrow chunks with dictionary or view columns cannot be edited.")
    names = set(schema.names)
    for row in rows:
        for name in [*(name for name in row if name not in names), *(name for name in schema.names if name not in row)]:
            what, known = "has" if name in row else "lacks", ", ".join(map(repr, schema.names))
            raise SampleError(f"field {name!r}: the sample {what} it, but those stored beside it have the fields {known}.", field=name)
    try:
        batches = _batches(pa, schema, rows)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        schema = _wider(pa, schema, rows)
        batches = [_single(pa, schema, row) for row in rows]
    for row, batch in zip(rows, batches, strict=True):
        (read,) = _to_rows(batch)
        for name in schema.names:
            if not same_row(row[name], read[name]):
                raise _refusal(name, schema, row)
    return schema, batches


def _shares_values(pa: Any, kind: Any) -> bool:
    """Tell whether rows of a type refer to values that lie elsewhere, and stay there when a row goes."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_string_view(kind) or types.is_binary_view(kind):
        return True
    return any(_shares_values(pa, kind.field(i).type) for i in range(kind.num_fields))


def _batches(pa: Any, schema: Any, rows: Sequence[Row]) -> list[Any]:
    whole = pa.RecordBatch.from_pylist(list(rows), schema=schema)
    return [whole.slice(number, 1) for number in range(len(rows))]


def _single(pa: Any, schema: Any, row: Row) -> Any:
    try:
        return pa.RecordBatch.from_pylist([row], schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        for field in schema:
            try:
                pa.array([row[field.name]], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                raise _refusal(field.name, schema, row) from error
        raise


def _refusal(name: str, schema: Any, row: Row) -> SampleError:
    kind = schema.field(name).type
    return SampleError(
        f"field {name!r} is {type(row[name]).__name__} here and would not read back equal: the stored column is {kind}.", field=name
    )


def _to_rows(batch: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except KeyError:  # a map with a key that occurs twice is no dict
        rows = batch.to_pylist()
    return rows


def _wider(pa: Any, schema: Any, rows: Sequence[Row]) -> Any:
    """Return the schema with types in the places that held only nulls."""
    fields = []
    for field in schema:
        kind = field.type
        for row in rows:
            try:
                kind = _wider_type(pa, kind, pa.array([row[field.name]]).type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise _refusal(field.name, schema, row) from error
        fields.append(field.with_type(kind))
    return pa.schema(fields, metadata=schema.metadata)


def _wider_type(pa: Any, old: Any, new: Any) -> Any:
    """Return ``old`` with the types of ``new`` where it has none; every other difference would change rows that are there."""
    if pa.types.is_null(old):
        return new
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(old.value_field.with_type(_wider_type(pa, old.value_type, new.value_type)))
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        given = {field.name: field.type for field in new}
        return pa.struct([f.with_type(_wider_type(pa, f.type, given[f.name])) if f.name in given else f for f in old])
    return old


# --- flatbuffers ----------------------------------------------------------------------------------------------------


def _u32(data: Any, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: Any, table: int, number: int) -> int | None:
    """Return where field ``number`` of a flatbuffer table lies, or None when the table does not have it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + at)[0] if at < size else 0
    return table + offset if offset else None


def _follow(data: Any, at: int) -> int:
    return at + _u32(data, at)


class _Footer:
    """The footer of an Arrow file.

    Attributes:
        blocks: offset, length of the head and length of the body of each record batch.
        is_plain: whether the batches follow each other without anything between them.
    """

    def __init__(self, blob: memoryview) -> None:
        (length,) = struct.unpack_from("<i", blob, len(blob) - 10)
        self._data = bytes(blob[len(blob) - 10 - length : len(blob) - 10])
        root = _follow(self._data, 0)
        at = _field(self._data, root, 3)
        self._first = _follow(self._data, at) + 4 if at is not None else 0
        count = _u32(self._data, self._first - 4) if at is not None else 0
        self.blocks = [_BLOCK.unpack_from(self._data, self._first + number * _BLOCK.size) for number in range(count)]
        dictionaries = _field(self._data, root, 2)
        self.is_plain = (
            bool(self.blocks)
            and (dictionaries is None or not _u32(self._data, _follow(self._data, dictionaries)))
            and all(a[0] + a[1] + a[2] == b[0] for a, b in pairwise(self.blocks))
            and all((head + body) % 8 == 0 for _, head, body in self.blocks)
        )

    def moved(self, first: int, sizes: Sequence[tuple[int, int]]) -> bytes:
        """Return the end of the file whose batches begin at ``first``: their lengths of head and body; not more batches than there were."""
        data = bytearray(self._data)
        struct.pack_into("<I", data, self._first - 4, len(sizes))
        for number, (head, body) in enumerate(sizes):
            _BLOCK.pack_into(data, self._first + number * _BLOCK.size, first, head, body)
            first += head + body
        return _END + bytes(data) + struct.pack("<i", len(data)) + FILE_MAGIC


def _batch_table(message: Any) -> tuple[Any, int]:
    """Return the flatbuffer of an encapsulated record batch, and where its table lies."""
    # Before Arrow 0.15 the length stood alone.
    data = message[8:] if _u32(message, 0) == 0xFFFFFFFF else message[4:]
    return data, _header_table(data)


def _header_table(data: Any) -> int:
    header = _field(data, _follow(data, 0), 2)
    if header is None:
        raise IndexError("a message without a header")
    return _follow(data, header)


def _batch_rows(message: Any) -> int:
    data, table = _batch_table(message)
    at = _field(data, table, 0)
    return int(struct.unpack_from("<q", data, at)[0]) if at is not None else 0


def _codec(message: Any) -> str | None:
    return _codec_of(_batch_table(message)[0])


def _codec_of(data: Any) -> str | None:
    """Return how the body of a record batch is compressed, from the flatbuffer of its message."""
    at = _field(data, _header_table(data), 3)
    if at is None:
        return None
    table = _follow(data, at)
    codec = _field(data, table, 0)
    return _CODECS.get(data[codec] if codec is not None else 0)
