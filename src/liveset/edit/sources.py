"""Where tables of edits come from: mappings, rows, data frames and files, as blocks of cells that nobody has looked at yet."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from liveset.errors import DatasetError, MissingDependency, NotFound, SampleError, StorageError

__all__ = ["Block", "open_source"]

ROWS = 10_000
"""The most rows of a batch."""
SIZE = 16_000_000
"""A batch has fewer rows when they take more bytes than this in a file or in Arrow."""

_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Block(NamedTuple):
    """Some rows as they were found: their numbers (the first is 1), their cells, and their keys where these stand in no column."""

    rows: Sequence[int]
    columns: Mapping[str, Sequence[Any]]
    keys: Sequence[Any] | None = None


def open_source(table: Any, key: str | None, field: str | None) -> tuple[str, str, Iterator[Block]]:
    """Return how to call a table in messages, what kind of source it is, and its blocks; the first one tells its columns."""
    if isinstance(table, str | os.PathLike):
        path = Path(table)
        if (known := _FILES.get(path.suffix.lower())) is None:
            raise TypeError(f"{path}: a table of edits is a file that ends in {', '.join(_FILES)}.")
        return str(path), known[0], _file(path, known[1])
    kinds = {(kind.__module__.partition(".")[0], kind.__qualname__) for kind in type(table).__mro__}
    if ("pandas", "DataFrame") in kinds:
        return "the table", "pandas", _pandas(table, key, field)
    if kinds & {("polars", "DataFrame"), ("polars", "LazyFrame")}:
        return "the table", "frame", _polars(table)
    if kinds & {("pyarrow", "Table"), ("pyarrow", "RecordBatch")}:
        return "the table", "frame", _arrow(table.schema, table.to_batches() if hasattr(table, "to_batches") else [table])
    if ("pyarrow", "RecordBatchReader") in kinds:
        return "the table", "frame", _arrow(table.schema, table)
    if isinstance(table, Mapping):
        return "the table", "python", _dicts(_batched(table.values()), keys=iter(table))
    if isinstance(table, Iterable) and not isinstance(table, bytes | bytearray | memoryview):
        return "the table", "python", _dicts(_batched(table))
    raise TypeError(f"a table of edits is a mapping, rows, a data frame or a path. Found {type(table).__qualname__}.")


def _header(names: Iterable[Any], origin: str) -> Block:
    texts = list(map(str, names))
    if twice := [name for name, count in Counter(texts).items() if count > 1]:
        raise SampleError(f"{origin} has two columns {twice[0]!r}.", field=twice[0])
    return Block((), dict.fromkeys(texts, ()))


def _batched(items: Iterable[Any], size: Callable[[Any], int] = lambda _: 0) -> Iterator[list[Any]]:
    part: list[Any] = []
    total = 0
    for item in items:
        part.append(item)
        total += size(item)
        if len(part) == ROWS or total > SIZE:
            yield part
            part, total = [], 0
    if part:
        yield part


def _dicts(parts: Iterable[list[Any]], origin: str = "the table", keys: Iterator[Any] | None = None) -> Iterator[Block]:
    """Yield the rows of each part by the fields that they have."""
    number = 0
    for part in parts:
        groups: dict[frozenset[Any], list[int]] = {}
        for at, row in enumerate(part):
            if not isinstance(row, Mapping):
                raise SampleError(f"{origin}, row {number + at + 1}: a {type(row).__qualname__} instead of fields and values.")
            groups.setdefault(frozenset(row), []).append(at)
        own = list(islice(keys, len(part))) if keys is not None else None
        for places in groups.values():
            columns = {str(name): [part[at][name] for at in places] for name in part[places[0]]}
            yield Block([number + at + 1 for at in places], columns, None if own is None else [own[at] for at in places])
        number += len(part)


def _columns(names: Sequence[str], parts: Iterable[Sequence[Sequence[Any]]]) -> Iterator[Block]:
    """Yield parts that are lists of columns."""
    number = 1
    for columns in parts:
        rows = range(number, number + len(columns[0]))
        yield Block(rows, dict(zip(names, columns, strict=True)))
        number = rows.stop


def _arrow(schema: Any, batches: Iterable[Any], origin: str = "the table") -> Iterator[Block]:
    yield _header(schema.names, origin)

    def parts() -> Iterator[list[list[Any]]]:
        for batch in batches:
            step = max(1, min(ROWS, batch.num_rows * SIZE // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, step):
                yield [cells(name, column) for name, column in zip(schema.names, batch.slice(start, step).columns, strict=True)]

    def cells(name: str, column: Any) -> list[Any]:
        try:
            found: list[Any] = column.to_pylist()
        except ValueError as error:  # times with nanoseconds, text that is not UTF-8
            raise SampleError(f"{origin}, column {name!r}: {error}", field=name) from error
        return found

    yield from _columns(schema.names, parts())


def _polars(frame: Any) -> Iterator[Block]:
    names = frame.collect_schema().names()
    yield _header(names, "the table")
    whole = frame.collect() if hasattr(frame, "collect") else frame
    yield from _columns(names, ([column.to_list() for column in part.get_columns()] for part in whole.iter_slices(ROWS)))


def _pandas(frame: Any, key: str | None, field: str | None) -> Iterator[Block]:
    names, index = list(map(str, frame.columns)), frame.index
    own = [str(index.name)] if index.name is not None else []
    numbered = not own and type(index).__name__ == "RangeIndex"
    found = next((name for name in ((key,) if key is not None else (field, "key")) if name in {*own, *names}), None)
    if found in own or (found is None and not numbered and (key is None or not own)):
        names = [found or key or field or "key", *names]
    else:
        index = None
    yield _header(names, "the table")
    starts = range(0, len(frame), ROWS)
    parts = (frame.iloc[start : start + ROWS] for start in starts)
    cells = (
        [*([part.index.tolist()] if index is not None else []), *(part.iloc[:, i].tolist() for i in range(part.shape[1]))] for part in parts
    )
    yield from _columns(names, cells)


def _csv(path: Path) -> Iterator[Block]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, None)
            if names is None:
                raise SampleError(f"{path} is empty; its first line should name the columns.")
            if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), "")):
                raise SampleError(f"{path}: its first line names one column, {names[0]!r}. Separate the cells by commas, not by {other!r}.")
            yield _header(names, str(path))
            number = 0
            parts = _batched((row for row in lines if row), lambda row: sum(map(len, row)))
            for part in parts:
                for at, row in enumerate(part, number + 1):
                    if len(row) != len(names):
                        raise SampleError(
                            f"{path}, row {at}: it has {len(row)} cells, and the first line names {len(names)} columns.", row=at
                        )
                yield Block(range(number + 1, number + 1 + len(part)), dict(zip(names, zip(*part, strict=True), strict=True)))
                number += len(part)
        except csv.Error as error:
            hint = "; use .jsonl or .parquet for cells of that length" if "limit" in str(error) else ""
            raise SampleError(f"{path}, line {lines.line_num}: {error}{hint}.") from error


def _json_lines(path: Path) -> Iterator[Block]:
    decode = msgspec.json.Decoder().decode

    def row(number: int, line: bytes) -> Any:
        try:
            return decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        except _NOT_JSON as error:
            raise SampleError(f"{path}, line {number}: {error}.") from error

    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        yield from _dicts(([row(*line) for line in part] for part in _batched(lines, lambda line: len(line[1]))), str(path))


def _json(path: Path) -> Iterator[Block]:
    try:
        rows = msgspec.json.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except _NOT_JSON as error:
        raise SampleError(f"{path}: {error}.") from error
    if type(rows) is not list:
        raise SampleError(f"{path} holds {type(rows).__name__}, not a list of objects.")
    yield from _dicts(_batched(rows), str(path))


def _parquet(path: Path) -> Iterator[Block]:
    _import_pyarrow(path)
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, pre_buffer=False) as file:
        metadata = file.metadata
        size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        rows = max(1, min(ROWS, metadata.num_rows * SIZE // max(1, size)))
        yield from _arrow(file.schema_arrow, file.iter_batches(batch_size=rows, use_threads=False), str(path))


def _ipc(path: Path) -> Iterator[Block]:
    pa = _import_pyarrow(path)
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            yield from _arrow(stream.schema, stream, str(path))
        else:
            yield from _arrow(file.schema, map(file.get_batch, range(file.num_record_batches)), str(path))


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependency(f"Reading {path} needs pyarrow: pip install 'liveset[arrow]'", package="pyarrow") from error
    return pyarrow


def _file(path: Path, read: Callable[[Path], Iterator[Block]]) -> Iterator[Block]:
    """Yield the blocks of a file with the errors that name it."""
    try:
        yield from read(path)
    except DatasetError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist.", file=str(path)) from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}.", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise SampleError(f"cannot read {path}: it is no UTF-8 text ({error.reason}). Save it as UTF-8.", file=str(path)) from error
    except ValueError as error:
        raise SampleError(f"cannot read {path}: {str(error).rstrip('.')}.") from error


_FILES: dict[str, tuple[str, Callable[[Path], Iterator[Block]]]] = {
    ".csv": ("csv", _csv),
    ".jsonl": ("json", _json_lines),
    ".ndjson": ("json", _json_lines),
    ".json": ("json", _json),
    ".parquet": ("frame", _parquet),
    ".arrow": ("frame", _ipc),
}
