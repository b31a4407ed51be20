"""Replace rows of an Arrow chunk: batches that are not touched keep their stored bytes.

The batches of an Arrow file are found through its footer, which is a flatbuffer; only the few numbers that say where a batch lies, how many
rows it has and how it is compressed are read from it, and written back for the new file.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
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


def splice_rows(buffer: Buffer, count: int, rows: Mapping[int, Row], file: str = "") -> list[Buffer]:
    """Return the buffers of an Arrow chunk file in which some slots hold other rows.

    Schema, compression and batches stay as they are. Where a column held only nulls so far, it gets the type of the new value; then all
    batches are written anew, since the layout of each depends on the schema.

    Raises:
        SampleError: a row does not have the columns of the chunk, or would not read back equal; ``field`` names the place.
        Corrupt: the Arrow data is damaged.
        UnsupportedFormat: the chunk has dictionary columns.
    """
    pa = load_pyarrow()
    blob = find_blob(buffer, file)
    try:
        parts = _splice_file(pa, blob, count, rows, file) if _is_file(blob) else _splice_stream(pa, blob, count, rows, file)
    except (pa.ArrowException, OSError, struct.error, OverflowError, IndexError) as error:
        raise Corrupt(f"{file}: the Arrow data is damaged ({error}).", file=file) from error
    length = sum(len(memoryview(part)) for part in parts)
    start = 4 + 4 * (count + 1)
    size = start + length + 4 + len(MAGIC)
    if size >= 1 << 32:
        raise SampleError(f"{file} would grow to {size:,} bytes: the format ends at 4 GiB per chunk.")
    return [struct.pack(f"<{count + 2}I", count, *[start] * (count + 1)), *parts, struct.pack("<I", length) + MAGIC]


def _is_file(blob: memoryview) -> bool:
    return bytes(blob[: len(FILE_MAGIC)]) == FILE_MAGIC


# --- the two forms of Arrow data ------------------------------------------------------------------------------------


def _splice_file(pa: Any, blob: memoryview, count: int, rows: Mapping[int, Row], file: str) -> list[Buffer]:
    reader = pa.ipc.open_file(pa.py_buffer(blob))
    footer = _Footer(blob)
    sizes = [_batch_rows(blob[offset:]) for offset, _, _ in footer.blocks]
    touched = _by_batch(sizes, count, rows, file)
    schema, new = _fit(pa, reader.schema, [row for numbered in touched.values() for row in numbered.values()])
    codecs = [_codec(blob[offset:]) for offset, _, _ in footer.blocks]
    added = iter(new)
    if schema != reader.schema or not footer.is_plain:
        batches = [reader.get_batch(number) for number in range(len(sizes))]
        replaced = [_replaced(pa, batch.cast(schema), touched.get(i, {}), added) for i, batch in enumerate(batches)]
        return [_written(pa, pa.ipc.new_file, schema, replaced, codecs[0] if codecs else None)]
    messages: dict[int, memoryview] = {}
    for number, numbered in touched.items():
        batch = _replaced(pa, reader.get_batch(number), numbered, added)
        single = memoryview(_written(pa, pa.ipc.new_file, schema, [batch], codecs[number]))
        ((offset, head, body),) = _Footer(single).blocks
        # The message may be reused as it is: how it lies in its file matters only by multiples of 8.
        messages[number] = single[offset : offset + head + body]
        footer.sizes[number] = head, body
    stored = [blob[offset : offset + head + body] for offset, head, body in footer.blocks]
    first = footer.blocks[0][0]
    return [blob[:first], *(messages.get(number, message) for number, message in enumerate(stored)), footer.moved(first)]


def _splice_stream(pa: Any, blob: memoryview, count: int, rows: Mapping[int, Row], file: str) -> list[Buffer]:
    reader = pa.ipc.open_stream(pa.py_buffer(blob))
    batches = list(reader)
    touched = _by_batch([len(batch) for batch in batches], count, rows, file)
    schema, new = _fit(pa, reader.schema, [row for numbered in touched.values() for row in numbered.values()])
    added = iter(new)
    replaced = [_replaced(pa, batch.cast(schema), touched.get(number, {}), added) for number, batch in enumerate(batches)]
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(blob))
    codec = next((_codec_of(memoryview(message.metadata)) for message in messages if message.type == "record batch"), None)
    return [_written(pa, pa.ipc.new_stream, schema, replaced, codec)]


def _by_batch(sizes: Sequence[int], count: int, rows: Mapping[int, Row], file: str) -> dict[int, dict[int, Row]]:
    """Return the rows by number of the batch and place in it, in order."""
    starts = list(accumulate(sizes, initial=0))
    if starts[-1] != count:
        raise Corrupt(f"{file}: the Arrow data has {starts[-1]} rows, but the index says {count}.", file=file)
    found: dict[int, dict[int, Row]] = {}
    for slot in sorted(rows):
        number = bisect_right(starts, slot) - 1
        found.setdefault(number, {})[slot - starts[number]] = rows[slot]
    return found


def _replaced(pa: Any, batch: Any, numbered: Mapping[int, Row], added: Any) -> Any:
    """Return a batch with some rows taken from ``added``; the others are copied as they are, never converted."""
    if not numbered:
        return batch
    batch.validate(full=True)  # damaged offsets would read beyond the buffers
    pieces, at = [], 0
    for row in numbered:
        pieces += [batch.slice(at, row - at), next(added)]
        at = row + 1
    pieces.append(batch.slice(at))
    table = pa.Table.from_batches([piece for piece in pieces if len(piece)], batch.schema)
    (whole,) = table.combine_chunks().to_batches()
    return whole


def _written(pa: Any, new: Any, schema: Any, batches: Sequence[Any], codec: str | None) -> bytes:
    sink = io.BytesIO()
    with new(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


# --- rows and schemas -----------------------------------------------------------------------------------------------


def _fit(pa: Any, schema: Any, rows: Sequence[Row]) -> tuple[Any, list[Any]]:
    """Return the schema that holds the rows too, and each row as a batch of it; ``SampleError`` when a row would not read back equal."""
    if any(pa.types.is_dictionary(field.type) for field in schema):
        raise UnsupportedFormat("Arrow chunks with dictionary columns cannot be edited.")
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
        sizes: the two lengths of each batch, to be changed before ``moved``.
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
        self.sizes = {number: (head, body) for number, (_, head, body) in enumerate(self.blocks)}
        dictionaries = _field(self._data, root, 2)
        self.is_plain = (
            bool(self.blocks)
            and (dictionaries is None or not _u32(self._data, _follow(self._data, dictionaries)))
            and all(a[0] + a[1] + a[2] == b[0] for a, b in pairwise(self.blocks))
            and all((head + body) % 8 == 0 for _, head, body in self.blocks)
        )

    def moved(self, first: int) -> bytes:
        """Return the end of the file whose batches begin at ``first`` and have the changed sizes."""
        data = bytearray(self._data)
        for number, (head, body) in sorted(self.sizes.items()):
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
