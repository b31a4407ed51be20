"""Tables of edits: a key and new values in each row, read in batches from a mapping, rows, a data frame or a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from liveset.edit.cells import plain, reader
from liveset.edit.sources import Block, open_source
from liveset.errors import DuplicateKeys, SampleError, name_some
from liveset.format.fields import field_value
from liveset.format.keytable import Key, normalize_key
from liveset.format.schema import Schema
from liveset.format.tree import Branch, Node, Path, path_text

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
        self._known, self._nodes = ", ".join(schema.fields), _nodes(schema.root)
        self._readers: dict[str, Callable[[Any], Any]] = {}
        self._checked: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        first = next(blocks, Block((), {}, ()))
        self.key, others = self._check(first)
        self.columns = tuple(others)
        self._blocks: Iterator[Block] | None = chain((first,), blocks)

    def covers(self, schema: Schema, columns: Iterable[str] | None = None) -> bool:
        """Tell whether columns (those of the table, or of one batch) and the field that holds the key make a whole sample."""
        nodes = _nodes(schema.root)
        names = {*(self.columns if columns is None else columns), self._field or self.key}
        given = {nodes[name][0] for name in names if name in nodes}
        return all(_holder(nodes[name][0], given, 0) is not None for name in schema.fields)

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
        seen: set[Key] = set()
        for block in blocks:
            column, others = self._check(block)
            keys = self._keys(block, column)
            if len(set(keys)) < len(keys) or not seen.isdisjoint(keys):
                twice = tuple(key for key, count in Counter(keys).items() if count > 1 or key in seen)
                raise DuplicateKeys(f"{self._origin}: {name_some(twice)} more than once; give each sample one row.", keys=twice)
            seen.update(keys)
            if keys:
                yield Batch(keys, {name: self._values(block, keys, name) for name in others})

    def _check(self, block: Block) -> tuple[str, list[str]]:
        """Return the names of the column with the keys and of the others; ``SampleError`` when one is missing or unknown."""
        names = tuple(block.columns)
        if (checked := self._checked.get(names)) is not None:
            return checked
        where = f"{self._origin}, row {block.rows[0]}" if self._source in ("python", "json") and block.rows else self._origin
        key = self._asked or self._field or "key"
        if block.keys is None:
            found = _find_key(names, self._asked, self._field, self._nodes)
            if found is None:
                wanted = repr(key) if self._asked or key == "key" else f"{key!r} or 'key'"
                listed = ", ".join(map(repr, names)) or "none"
                raise SampleError(f"{where}: no column {wanted} holds the keys; the columns are {listed}. Name it with key=.", field=key)
            key = found
        others = [name for name in names if name != key or block.keys is not None]
        for name in others:
            if name not in self._nodes:
                raise SampleError(f"{where}: the samples have no field {name!r}; they have the fields {self._known}.", field=name)
        paths = {self._nodes[name][0] for name in others}
        for name in others:
            if (holder := _holder(self._nodes[name][0], paths, 1)) is not None:
                raise SampleError(f"{where}: the columns {path_text(holder)!r} and {name!r} both say what {name!r} is.", field=name)
        self._checked[names] = key, others
        return key, others

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
        paths = {self._nodes[name][0] for name in block.columns if name in self._nodes}
        holder = path_text(_holder(self._nodes[column][0], paths, 1) or ())
        for cell in block.columns[holder]:
            try:
                yield field_value({holder: cell}, column)
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
            read = self._readers[name] = reader(self._nodes[name][1], self._source)
        values: list[Any] = []
        try:
            for cell in block.columns[name]:
                values.append(read(cell))  # noqa: PERF401 - the number of those that were read tells which one failed
        except ValueError as error:
            row, key = block.rows[len(values)], keys[len(values)]
            text = f"{self._origin}, row {row} (key {key!r}), column {name!r}: {error}."
            raise SampleError(text, field=name, key=key, row=row) from error
        return values


def _nodes(root: Node) -> dict[str, tuple[Path, Node]]:
    """Return the fields and the containers of a sample by name; of two with one name the outer one, which is found first elsewhere too."""
    found: dict[str, tuple[Path, Node]] = {}
    level: list[tuple[Path, Node]] = [((), root)]
    while level:
        below: list[tuple[Path, Node]] = []
        for path, node in level:
            if isinstance(node, Branch):
                below += [((*path, step), child) for step, child in zip(node.keys or range(len(node.children)), node.children, strict=True)]
            if path or not isinstance(node, Branch):
                found.setdefault(path_text(path), (path, node))
        level = below
    return found


def _holder(path: Path, paths: Collection[Path], least: int) -> Path | None:
    """Return which of some paths holds the place of a path: those above it or, with ``least`` 0, also itself."""
    return next((path[:depth] for depth in range(len(path) + 1 - least) if path[:depth] in paths), None)


def _find_key(names: Iterable[str], key: str | None, field: str | None, nodes: Mapping[str, tuple[Path, Node]]) -> str | None:
    """Return which column holds the keys; a field such as ``meta.id`` may stand in a column ``meta``."""
    paths = {nodes[name][0] for name in names if name in nodes}
    for wanted in (key,) if key is not None else (field, "key"):
        if wanted and (wanted in names or (wanted in nodes and _holder(nodes[wanted][0], paths, 1) is not None)):
            return wanted
    return None
