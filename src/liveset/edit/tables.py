"""Tables of edits: a key and new values in each row, read in batches from a mapping, rows, a data frame or a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from liveset.edit.cells import plain, reader
from liveset.edit.sources import Block, open_source
from liveset.errors import DuplicateKeys, SampleError, name_some
from liveset.format.keytable import Key, normalize_key
from liveset.format.schema import Schema
from liveset.format.tree import Node, Path, leaves, locate

__all__ = ["Batch", "Table", "open_table"]

_CANONICAL = re.compile(r"0|-?[1-9][0-9]{0,18}")


class Batch(NamedTuple):
    """Some rows: their keys, and for each column as many values, plain and in the types of the schema."""

    keys: list[Key]
    columns: dict[str, list[Any]]


def open_table(table: Any, *, schema: Schema, kind: type, key: str | None = None, field: str | None = None) -> Table:
    """Open a table of edits and check its columns.

    Args:
        table: a mapping of keys to ``{field: value}``; rows as dicts; a polars, pandas or pyarrow table; or the path of a .csv, .jsonl,
            .ndjson, .json, .parquet or .arrow file. Rows that are dicts need not have the same fields.
        schema: of the dataset.
        kind: of its keys, ``str`` or ``int``.
        key: name of the column with the keys; by default ``field`` if there is such a column, else ``key``. The index of a pandas frame
            is one where it has that name, or where no column has.
        field: the field of the samples that holds the key, where the dataset knows one.

    Raises:
        SampleError: no column holds keys, or one is no field of the samples; ``field`` names it.
        NotFound: there is no such file.
        StorageError: the file cannot be read.
        MissingDependency: the file needs pyarrow.
        TypeError: nothing here reads such a table.
    """
    origin, source, blocks = open_source(table, key, field)
    return Table(origin, source, blocks, schema, kind, key, field)


class Table:
    """Rows of edits; made by ``open_table`` and read once.

    Attributes:
        key: name of the column with the keys.
        columns: names of the others: fields such as ``label``, ``meta.author`` or ``boxes[0]``. A column may also be a container of fields:
            its values stand for all that is in it, and are left as they are. Of rows that are dicts these are the columns of the first.
    """

    def __init__(
        self, origin: str, source: str, blocks: Iterator[Block], schema: Schema, kind: type, key: str | None, field: str | None
    ) -> None:
        self._origin, self._source, self._kind, self._asked, self._field = origin, source, kind, key, field
        self._schema = schema
        self._places: dict[str, tuple[Path, Node] | None] = {}
        self._readers: dict[str, Callable[[Any], Any]] = {}
        self._checked: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        self._rows: dict[Key, int] = {}
        first = next(blocks, Block((), {}, ()))
        self.key, others = self._check(first)
        self.columns = tuple(others)
        self._blocks: Iterator[Block] | None = chain((first,), blocks)

    def covers(self, schema: Schema, columns: Iterable[str] | None = None) -> bool:
        """Tell whether columns (those of the table, or of one batch) and the field that holds the key make a whole sample."""
        names = {*(self.columns if columns is None else columns), self._field or self.key}
        given = {place[0] for name in names if (place := locate(schema.root, name)) is not None}
        return all(_holder(path, given) is not None for path, _ in leaves(schema.root))

    def where(self, key: Key) -> str:
        """Return how to call the row of a key in messages; the key is one of a batch that was yielded."""
        return f"{self._origin}, row {self._rows[key]} (key {key!r})"

    def batches(self) -> Iterator[Batch]:
        """Yield the rows; those of a batch have the same columns, so rows with different fields may come in another order.

        Raises:
            SampleError: a value does not fit its field, or a key the dataset; it says in which row, and ``field`` names the column.
            DuplicateKeys: a key has two rows; ``keys`` names some of these keys.
            StorageError: the file cannot be read.
        """
        if self._blocks is None:
            raise RuntimeError("the rows of a table are read once: open it again.")
        blocks, self._blocks = self._blocks, None
        for block in blocks:
            column, others = self._check(block)
            keys = self._keys(block, column)
            if len(set(keys)) < len(keys) or not self._rows.keys().isdisjoint(keys):
                raise self._duplicates(block, keys)
            self._rows.update(zip(keys, block.rows, strict=True))
            if keys:
                yield Batch(keys, {name: self._values(block, keys, name) for name in others})

    def _duplicates(self, block: Block, keys: list[Key]) -> DuplicateKeys:
        twice = tuple(key for key, count in Counter(keys).items() if count > 1 or key in self._rows)
        rows = [row for key, row in zip(keys, block.rows, strict=True) if key == twice[0]]
        rows = sorted([*rows, *([self._rows[twice[0]]] if twice[0] in self._rows else [])])
        places = f"{twice[0]!r} in rows {' and '.join(map(str, rows[:2]))}"
        return DuplicateKeys(f"{self._origin}: {name_some(twice)} more than once ({places}); give each sample one row.", keys=twice)

    def _place(self, name: str) -> tuple[Path, Node] | None:
        """Return which field a column is."""
        if name not in self._places:
            self._places[name] = locate(self._schema.root, name)
        return self._places[name]

    def _field_columns(self, names: Iterable[str]) -> dict[Path, str]:
        """Return the columns that are fields."""
        return {place[0]: name for name in names if (place := self._place(name)) is not None}

    def _check(self, block: Block) -> tuple[str, list[str]]:
        """Return the names of the column with the keys and of the others; ``SampleError`` when one is missing or unknown."""
        names = tuple(block.columns)
        if (checked := self._checked.get(names)) is not None:
            return checked
        where = f"{self._origin}, row {block.rows[0]}" if self._source in ("python", "json") and block.rows else self._origin
        key = self._asked or self._field or "key"
        if block.keys is None:
            found = self._find_key(names)
            if found is None:
                wanted = repr(key) if self._asked or key == "key" else f"{key!r} or 'key'"
                listed = ", ".join(map(repr, names)) or "none"
                raise SampleError(f"{where}: no column {wanted} holds the keys; the columns are {listed}. Name it with key=.", field=key)
            key = found
        others = [name for name in names if name != key or block.keys is not None]
        for name in others:
            if self._place(name) is None:
                known = ", ".join(self._schema.fields)
                raise SampleError(f"{where}: the samples have no field {name!r}; they have the fields {known}.", field=name)
        paths = self._field_columns(others)
        for name in others:
            path = (self._place(name) or ((),))[0]
            holder = path if paths[path] != name else _holder(path[:-1], paths)
            if holder is not None:
                raise SampleError(f"{where}: the columns {paths[holder]!r} and {name!r} both say what {name!r} is.", field=name)
        self._checked[names] = key, others
        return key, others

    def _find_key(self, names: Iterable[str]) -> str | None:
        """Return which column holds the keys; a field such as ``meta.id`` may stand in a column ``meta``."""
        paths = self._field_columns(names)
        for wanted in (self._asked,) if self._asked is not None else (self._field, "key"):
            if wanted and (wanted in names or ((place := self._place(wanted)) is not None and _holder(place[0], paths) is not None)):
                return wanted
        return None

    def _keys(self, block: Block, column: str) -> list[Key]:
        values = block.keys if block.keys is not None else block.columns.get(column)
        keys: list[Key] = []
        try:
            for value in values if values is not None else self._inner(block, column):
                keys.append(self._key(value))  # noqa: PERF401 - see _values
        except (TypeError, ValueError) as error:
            row = block.rows[len(keys)]
            raise SampleError(f"{self._origin}, row {row}: {str(error).rstrip('.')}.", field=column, row=row) from error
        return keys

    def _inner(self, block: Block, column: str) -> Iterator[Any]:
        """Yield the keys that stand inside another column."""
        paths = self._field_columns(block.columns)
        path = (self._place(column) or ((),))[0]
        holder = _holder(path, paths) or ()
        for cell in block.columns[paths[holder]]:
            value = cell
            try:
                for step in path[len(holder) :]:
                    value = value[step]
                yield value
            except (LookupError, TypeError) as error:
                raise ValueError(f"there is no key in {column!r}") from error

    def _key(self, value: Any) -> Key:
        value = plain(value)
        if value is None or (value == "" and self._source == "csv"):
            raise ValueError("the row has no key")
        key = normalize_key(value)
        if type(key) is str and self._kind is int and _CANONICAL.fullmatch(key):
            key = normalize_key(int(key))
        if type(key) is not self._kind:
            have = "text" if self._kind is str else "integers"
            raise ValueError(f"the key {key!r} is {'text' if type(key) is str else 'an integer'}, and the keys of the dataset are {have}")
        return key

    def _values(self, block: Block, keys: list[Key], name: str) -> list[Any]:
        if (read := self._readers.get(name)) is None:
            place = self._place(name)
            assert place is not None
            read = self._readers[name] = reader(place[1], self._source)
        values: list[Any] = []
        try:
            for cell in block.columns[name]:
                values.append(read(cell))  # noqa: PERF401 - the number of those that were read tells which one failed
        except ValueError as error:
            row, key = block.rows[len(values)], keys[len(values)]
            text = f"{self._origin}, row {row} (key {key!r}), column {name!r}: {error}."
            raise SampleError(text, field=name, key=key, row=row) from error
        return values


def _holder(path: Path, paths: Collection[Path]) -> Path | None:
    """Return which of some paths holds the place of a path: one above it, or itself."""
    return next((path[:depth] for depth in range(len(path) + 1) if path[:depth] in paths), None)
