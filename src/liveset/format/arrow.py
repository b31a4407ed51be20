"""Chunks that carry an Arrow IPC file instead of items, as the old tool writes them for JSON-like rows."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from liveset.errors import Corrupt, MissingDependency
from liveset.format.locks import ForkLock

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"LDARW01\0"
FILE_MAGIC = b"ARROW1"
_TAIL = 12  # u32 length of the IPC data, then the magic
_KEPT_BATCHES = 8


def is_arrow(buffer: Buffer) -> bool:
    """Tell whether a chunk file ends with the footer that marks Arrow rows; a last item that ends like one does not count."""
    with memoryview(buffer) as view:
        size = len(view)
        if size < _TAIL or bytes(view[-8:]) != MAGIC:
            return False
        end = 4 + 4 * int.from_bytes(view[:4], "little")
        return end + 4 > size or int.from_bytes(view[end : end + 4], "little") <= size - _TAIL


def may_be_arrow(tail: bytes) -> bool:
    """Tell whether a file with these last bytes could carry Arrow rows."""
    return tail.endswith(MAGIC)


def end_mark(buffers: Sequence[Buffer]) -> list[bytes]:
    """Return what must follow the last item of a chunk file: a byte, if the old tool would take its end for the footer of Arrow rows."""
    tail = b""
    for buffer in reversed(buffers):
        with memoryview(buffer) as view:
            tail = bytes(view[max(len(view) - len(MAGIC) + len(tail), 0) :]) + tail
        if len(tail) >= len(MAGIC):
            break
    return [b"\0"] if tail == MAGIC else []


def load_pyarrow() -> Any:
    """Return pyarrow, or raise ``MissingDependency``."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependency("the dataset holds Arrow rows, which only pyarrow reads: pip install pyarrow", package="pyarrow") from error
    return pa


def find_blob(buffer: Buffer, file: str = "") -> memoryview:
    """Return the Arrow data in a chunk file; ``Corrupt`` when the footer does not point to any."""
    view = memoryview(buffer).cast("B").toreadonly()
    if not is_arrow(view):
        raise Corrupt(f"{file}: the footer of Arrow rows is missing.", file=file)
    end = len(view) - _TAIL
    length = int.from_bytes(view[end : end + 4], "little")
    if not 0 < length <= end:
        raise Corrupt(f"{file}: the footer says {length} bytes of Arrow data, but {end} are there.", file=file)
    return view[end - length : end]


# Columns whose values become the ints and floats of Python, without any that numpy's would not hold.
_INTS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"})
_FLOATS = frozenset({"float", "double"})


class ArrowChunk:
    """The rows of an Arrow chunk file, as dicts; safe to use from several threads.

    Attributes:
        count: number of rows.
        columns: names of the columns that are read, in stored order. Chunks of one dataset may differ in them.
    """

    def __init__(self, buffer: Buffer, count: int, file: str = "", *, fields: Sequence[str] | None = None) -> None:
        """Open the rows.

        Args:
            buffer: the whole chunk file.
            count: how many rows the index says it has.
            file: named in errors.
            fields: only these columns are decoded and returned; those that the chunk does not have are left out.

        Raises:
            Corrupt: the data is damaged or has another number of rows.
            MissingDependency: pyarrow is not installed.
        """
        self._pa, self._file = load_pyarrow(), file
        self._lock = ForkLock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._blob = find_blob(buffer, file)
        self.count = count
        self._get: Callable[[int], Any]
        sizes = self._guard(self._open, fields)
        # Where each batch starts, and the total: batches may have any size.
        self._starts = [0, *accumulate(sizes)]
        if self._starts[-1] != count:
            raise Corrupt(f"{file}: the Arrow data has {self._starts[-1]} rows, but the index says {count}.", file=file)

    def _open(self, fields: Sequence[str] | None) -> list[int]:
        """Set ``columns`` and ``_get``, and return the number of rows in each batch."""
        ipc, source = self._pa.ipc, self._pa.py_buffer(self._blob)
        if bytes(self._blob[:6]) != FILE_MAGIC:
            schema = ipc.open_stream(source).schema
            options = self._project(schema, fields)
            batches = list(ipc.open_stream(source, options=options))
            self._get = batches.__getitem__
            return [len(batch) for batch in batches]
        schema = ipc.open_file(source).schema
        reader = ipc.open_file(source, options=self._project(schema, fields))
        self._get = reader.get_batch
        # The sizes stand in each batch's own header only; one narrow column is decoded to get at them.
        narrow = min(range(len(schema)), key=lambda i: _width(schema.field(i).type), default=None)
        probe = ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=[narrow])) if narrow is not None else reader
        return [probe.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def _project(self, schema: Any, fields: Sequence[str] | None) -> Any:
        wanted = [i for i, name in enumerate(schema.names) if fields is None or name in fields]
        self.columns = [schema.names[i] for i in wanted]
        self._empty = not wanted
        if len(set(self.columns)) != len(self.columns):
            raise Corrupt(f"{self._file}: the Arrow data has two columns of the same name.", file=self._file)
        # An empty list would mean "all columns" to Arrow.
        return self._pa.ipc.IpcReadOptions(included_fields=(wanted or [0]) if fields is not None and len(schema) else None)

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (self._pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, IndexError) as error:
            raise Corrupt(f"{self._file}: the Arrow data is damaged ({error}).", file=self._file) from error

    def _batch(self, number: int) -> Any:
        """Return a record batch, decoded and checked once."""
        with self._lock:
            if (kept := self._kept.get(number)) is not None:
                self._kept.move_to_end(number)
                return kept
            batch = self._get(number)
            batch.validate(full=True)  # damaged offsets would read beyond the buffers
            if len(batch) != self._starts[number + 1] - self._starts[number]:
                raise Corrupt(f"{self._file}: the Arrow batch {number} has {len(batch)} rows.", file=self._file)
            self._kept[number] = batch
            while len(self._kept) > _KEPT_BATCHES:
                self._kept.popitem(last=False)
            return batch

    def _rows(self, number: int, start: int, stop: int) -> list[dict[str, Any]]:
        if self._empty:
            return [{} for _ in range(stop - start)]
        batch = self._batch(number).slice(start, stop - start)
        try:
            rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
        except KeyError:  # a map with a key that occurs twice is no dict: its pairs are kept
            rows = batch.to_pylist()
        return rows

    def read(self, slot: int) -> dict[str, Any]:
        """Return one row."""
        if not 0 <= slot < self.count:
            raise IndexError(f"row {slot} of {self.count}")
        number = bisect_right(self._starts, slot) - 1
        at = slot - self._starts[number]
        rows: list[dict[str, Any]] = self._guard(self._rows, number, at, at + 1)
        return rows[0]

    def gather(self, slots: Sequence[int]) -> dict[str, Any] | None:
        """Return rows by column: numpy arrays of numbers where there are no nulls, lists elsewhere; None where only rows are right."""
        if self._empty:
            return {}
        table = self._guard(self._take, slots)
        # Maps become dicts or lists of pairs, as each row allows.
        if any("map<" in str(column.type) for column in table.columns):
            return None
        return {name: self._guard(self._values, column) for name, column in zip(self.columns, table.columns, strict=True)}

    def _take(self, slots: Sequence[int]) -> Any:
        of_batch: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if not 0 <= slot < self.count:
                raise IndexError(f"row {slot} of {self.count}")
            of_batch.setdefault(bisect_right(self._starts, slot) - 1, []).append(row)
        found = [
            self._batch(number).take(self._pa.array([slots[row] - self._starts[number] for row in rows]))
            for number, rows in of_batch.items()
        ]
        table = self._pa.Table.from_batches(found)
        if len(of_batch) == 1:
            return table
        places = [0] * len(slots)
        for place, row in enumerate(chain.from_iterable(of_batch.values())):
            places[row] = place
        return table.take(self._pa.array(places))

    def _values(self, column: Any) -> Any:
        kind = str(column.type)
        if column.null_count == 0:
            if kind in _INTS:
                return column.to_numpy().astype("int64")
            if kind in _FLOATS:
                return column.to_numpy().astype("float64")
            if kind == "bool":
                return column.to_numpy().copy()
        return column.to_pylist()

    def iterate(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the rows ``start`` to ``stop - 1``."""
        stop = min(stop, self.count)
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            yield from self._guard(self._rows, number, start - first, end - first)
            start = end


def _width(kind: Any) -> int:
    """Rank a column type by what it costs to decode."""
    try:
        return int(kind.bit_width)
    except ValueError:  # no fixed width: text, lists, structs; a null column has none either but costs nothing
        return 0 if str(kind) == "null" else 1 << 20
