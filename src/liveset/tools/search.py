"""Searching all files of a dataset folder for texts that must not be there any more.

What a file holds is looked at in the form in which it was written: zstd frames are inflated wherever they stand, Parquet and Arrow columns
are read, key tables are asked for the key. In files whose structure is known a text counts where it is a whole word of a field, so that
``play-1`` is not found in ``play-10``; in all others, and for bytes, it counts wherever its bytes stand.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from liveset.errors import Corrupt, DatasetError, MissingDependency, NotFound, UnsupportedFormat
from liveset.format import codec
from liveset.format.arrow import FILE_MAGIC, find_blob, is_arrow, load_pyarrow
from liveset.format.chunk import Buffer, open_chunk, plain_buffer
from liveset.format.index import ChunkRecord, Index
from liveset.format.keyfront import MAGIC
from liveset.format.keytable import KeyTable, normalize_key
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import Redirects
from liveset.snapshot import archived, open_snapshot, redirects_of
from liveset.storage import VERSIONS, Store
from liveset.tools.compare import Items, open_samples

__all__ = ["Found", "Wanted", "search"]

Wanted: TypeAlias = str | int | bytes
"""A text is a key or another word, an integer is a key, bytes are looked for as they are."""

# So many patterns are looked for one after another; of more than that, all at once.
_FEW = 8
_BLOCK = 1 << 18
_MIXER = np.uint32(2_654_435_761)
# What a frame may hold in turn is looked into so often.
_DEPTH = 2
# Of every version of the format.
_KEY_TABLE = MAGIC[:6]
_WORD = re.compile(rb"[0-9A-Za-z_]")


class Found(NamedTuple):
    """Something that should be absent, and the first place in a file where it is.

    Attributes:
        what: was looked for.
        file: that holds it.
        place: in the file, in words.
    """

    what: Wanted
    file: str
    place: str


class _Patterns:
    """What is looked for, as bytes."""

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        self.texts: set[str] = set()
        self.integers: set[int] = set()
        self.raw: set[bytes] = set()
        for what in wanted:
            if isinstance(what, bytes | bytearray | memoryview):
                self.raw.add(bytes(what))
            elif isinstance(key := normalize_key(what), str):
                self.texts.add(key)
            else:
                self.integers.add(key)
        if "" in self.texts or b"" in self.raw:
            raise ValueError("absent= names an empty text, which is everywhere.")
        self.of: dict[bytes, Wanted] = {text.encode(): text for text in self.texts}
        # As index files write it; the same bytes for most.
        self.of |= {json.dumps(text)[1:-1].encode(): text for text in self.texts}
        self.of |= {data: data for data in self.raw}
        self._short = [pattern for pattern in self.of if len(pattern) < 4]
        self._long = [pattern for pattern in self.of if len(pattern) >= 4]
        if len(self._long) <= _FEW:
            self._short, self._long = self._short + self._long, []
        self._lengths = sorted({len(pattern) for pattern in self._long})
        self._ends = np.array([int.from_bytes(pattern[-4:], "little") for pattern in self._long], np.uint32)
        self._marked = np.zeros(1 << 16, bool)
        self._marked[(self._ends * _MIXER) >> np.uint32(16)] = True

    def hits(self, data: Any) -> Iterator[tuple[int, bytes]]:
        """Yield where the patterns stand in bytes or in a map, in no order."""
        for pattern in self._short:
            at = data.find(pattern)
            while at >= 0:
                yield at, pattern
                at = data.find(pattern, at + 1)
        if self._long:
            yield from self._many(data)

    def _many(self, data: Any) -> Iterator[tuple[int, bytes]]:
        """Look at every four bytes that one of the patterns may end with."""
        size = len(data)
        for start in range(0, size - 3, _BLOCK):
            block = data[start : start + _BLOCK + 3]
            for first in range(min(4, len(block) - 3)):
                words = np.frombuffer(block, "<u4", (len(block) - first) // 4, first)
                likely = np.flatnonzero(self._marked.take((words * _MIXER) >> np.uint32(16)))
                for at in likely[np.isin(words[likely], self._ends)].tolist():
                    end = start + first + 4 * at + 4
                    for length in self._lengths:
                        if length <= end and (pattern := data[end - length : end]) in self.of:
                            yield end - length, pattern


def search(store: Store, wanted: Iterable[Wanted]) -> tuple[list[Found], int]:
    """Look for texts, keys and bytes in every file of a dataset.

    Returns:
        What was found, at most once for each file, and the number of files that were searched.

    Raises:
        MissingDependency: a file cannot be looked into without a package that is not installed.
    """
    patterns = _Patterns(wanted)
    listed: dict[str, tuple[Index, ChunkRecord]] = {}
    for index in _kept(store):
        listed |= {record.filename: (index, record) for record in index.chunks}
    found: list[Found] = []
    searched = 0
    for entry in store.list(""):
        try:
            data = plain_buffer(store.map(entry.name, 0))
        except NotFound:
            continue  # removed since it was listed
        places: dict[Wanted, str] = {}
        for what, place in _File(entry.name, data, patterns, listed.get(entry.name)).places():
            places.setdefault(what, place)
            if len(places) == len(patterns.texts) + len(patterns.integers) + len(patterns.raw):
                break
        found += [Found(what, entry.name, place) for what, place in places.items()]
        searched += 1
    return found, searched


def _kept(store: Store) -> Iterator[Index]:
    """Yield the newest version and all that are archived, as far as they can be read; the others are searched as plain files."""
    redirects = Redirects()
    with suppress(DatasetError):
        head = open_snapshot(store).index
        redirects = redirects_of(head)
        yield head
    for entry in store.list(VERSIONS):
        number = entry.name.removeprefix(VERSIONS).removesuffix(".json")
        with suppress(DatasetError):
            if number.isdecimal() and (index := archived(store, int(number))) is not None:
                yield index
                yield index.redirected(redirects)


class _File:
    """One file, looked at as what it is."""

    def __init__(self, name: str, data: Buffer, patterns: _Patterns, chunk: tuple[Index, ChunkRecord] | None) -> None:
        self._name, self._data, self._patterns, self._chunk = name, data, patterns, chunk

    def places(self) -> Iterator[tuple[Wanted, str]]:
        """Yield what is found, and where; some of it more than once."""
        data = self._data
        if data[: len(_KEY_TABLE)] == _KEY_TABLE:
            with suppress(Corrupt, UnsupportedFormat):
                table = KeyTable(data, self._name)
                table.check()
                yield from self._in_table(table)
                return
        if data[:4] == b"PAR1":
            yield from self._in_parquet()
        elif self._chunk is not None:
            try:
                yield from self._in_chunk(*self._chunk)
            except MissingDependency:
                raise
            except DatasetError:
                yield from self._anywhere(data)  # damaged, so nothing is known of its structure
        elif self._name.endswith(".json"):
            yield from self._in_json()
        else:
            yield from self._anywhere(data)

    def _anywhere(self, data: Any, where: str = "", depth: int = 0) -> Iterator[tuple[Wanted, str]]:
        """Look at bytes of which nothing is known, and at what is packed in them."""
        yield from ((self._patterns.of[pattern], f"byte {at:,}{where}") for at, pattern in self._patterns.hits(data))
        if depth == 0 and (data[: len(FILE_MAGIC)] == FILE_MAGIC or is_arrow(data)):
            yield from self._in_arrow(data)
        at = data.find(codec.ZSTD_MAGIC) if depth < _DEPTH else -1
        while at >= 0:
            if plain := _inflated(memoryview(data)[at:]):
                yield from self._anywhere(plain, f" of the zstd frame at byte {at:,}{where}", depth + 1)
            at = data.find(codec.ZSTD_MAGIC, at + 1)

    def _raw(self, data: Any, where: str = "") -> Iterator[tuple[Wanted, str]]:
        """Look for what was given as bytes, whatever the structure says."""
        yield from ((pattern, f"byte {at:,}{where}") for at, pattern in self._patterns.hits(data) if pattern in self._patterns.raw)

    def _in_table(self, table: KeyTable) -> Iterator[tuple[Wanted, str]]:
        for key in self._patterns.texts | self._patterns.integers:
            if (row := table.find(key)) is not None:
                yield key, f"row {row:,} of the key table{' (a deleted key)' if table.place(row) is None else ''}"
        yield from self._raw(self._data)

    def _in_json(self) -> Iterator[tuple[Wanted, str]]:
        data = bytes(self._data)
        if next(self._patterns.hits(data), None) is None and b"\\" not in data:
            return
        try:
            texts = list(_texts(msgspec.json.decode(data)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield from self._anywhere(data)
            return
        for text, place in texts:
            yield from ((what, place) for what in self._words(text.encode()))
        yield from self._raw(data)

    def _words(self, data: bytes) -> Iterator[Wanted]:
        """Yield what stands in a text as a whole word."""
        for at, pattern in self._patterns.hits(data):
            what = self._patterns.of[pattern]
            if isinstance(what, bytes) or (pattern == what.encode() and _is_word(data, at, at + len(pattern))):  # type: ignore[union-attr]
                yield what

    # --- columns -----------------------------------------------------------------------------------------------------

    def _in_parquet(self) -> Iterator[tuple[Wanted, str]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            text = f"{self._name} can only be searched with pyarrow: pip install 'liveset[keys]'"
            raise MissingDependency(text, package="pyarrow") from error
        try:
            table = pq.ParquetFile(pa.BufferReader(self._data)).read(use_threads=False)
        except (pa.ArrowException, OSError):
            yield from self._anywhere(self._data)
            return
        yield from self._in_columns(table, "key" if self._name.startswith("keys") else "")
        yield from self._raw(self._data)

    def _in_arrow(self, data: Any, field: str = "") -> Iterator[tuple[Wanted, str]]:
        pa = load_pyarrow()
        try:
            blob = find_blob(data, self._name) if is_arrow(data) else memoryview(data)
            opened = (pa.ipc.open_file if bytes(blob[:6]) == FILE_MAGIC else pa.ipc.open_stream)(pa.py_buffer(blob))
            table = opened.read_all()
        except (pa.ArrowException, OSError, Corrupt):
            return  # its bytes have been looked at
        yield from self._in_columns(table, field)

    def _in_columns(self, table: Any, field: str) -> Iterator[tuple[Wanted, str]]:
        for name, column in zip(table.schema.names, table.columns, strict=True):
            for chunk in column.chunks:
                yield from ((what, f"column {name!r}") for what in self._in_array(chunk, exact=name == field))

    def _in_array(self, array: Any, *, exact: bool) -> Iterator[Wanted]:
        import pyarrow as pa

        kind = array.type
        if pa.types.is_dictionary(kind):
            yield from self._in_array(array.dictionary, exact=exact)
        elif pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            parts = array.flatten()
            for part in parts if isinstance(parts, list) else [parts]:
                yield from self._in_array(part, exact=exact)
        elif pa.types.is_map(kind):
            yield from self._in_array(array.keys, exact=exact)
            yield from self._in_array(array.items, exact=exact)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            if exact:
                yield from self._patterns.texts.intersection(array.to_pylist())
            elif any(buffer is not None and next(self._patterns.hits(buffer.to_pybytes()), None) for buffer in array.buffers()[1:]):
                for text in array.to_pylist():
                    yield from self._words(text.encode()) if text is not None else ()
        elif pa.types.is_integer(kind):
            yield from self._patterns.integers.intersection(array.to_pylist()) if exact else ()
        else:
            for buffer in array.buffers():
                if buffer is not None:
                    yield from (self._patterns.of[pattern] for _, pattern in self._patterns.hits(buffer.to_pybytes()))

    # --- chunks ------------------------------------------------------------------------------------------------------

    def _in_chunk(self, index: Index, record: ChunkRecord) -> Iterator[tuple[Wanted, str]]:
        assert index.config is not None  # an index that lists chunks has one
        compression = codec.Compression.from_config(index.config)
        schema = Schema.from_config(index.config, self._name)
        field = str(index.layout_of_keys.get("field", ""))
        samples = open_samples(self._data, record, compression)
        if isinstance(samples, Items):
            blocks = (samples.block(number) for number in range(-(-record.samples // samples.width)))
            if samples.packed:
                blocks = ((item, np.array([0, len(item)])) for item in (samples[slot] for slot in range(record.samples)))
            first = 0
            for data, bounds in blocks:
                yield from self._in_items(data, bounds, first, schema, field)
                first += len(bounds) - 1
        else:
            data = codec.inflate(self._data, size=record.size) if codec.is_frame(self._data) else self._data
            yield from self._in_arrow(data, field)
        yield from self._raw(self._data)
        if self._patterns.integers and schema.fields.get(field) in ("int", "json"):
            decoder = Decoder(schema, fields=[field], strict=False)
            chunk = open_chunk(self._data, record, decoder, compression)
            for slot in sorted({*range(record.samples)}.difference(record.erased)):
                value = _field(chunk.read(slot), field)
                if type(value) is int and value in self._patterns.integers:
                    yield value, f"sample {slot:,}, field {field!r}"

    def _in_items(self, data: Any, bounds: Any, first: int, schema: Schema, field: str) -> Iterator[tuple[Wanted, str]]:
        """Look at items that stand one after another."""
        fields = list(schema.fields.items())
        for at, pattern in self._patterns.hits(data):
            what, end = self._patterns.of[pattern], at + len(pattern)
            slot = int(np.searchsorted(bounds, at, side="right")) - 1
            if not 0 <= slot < len(bounds) - 1 or isinstance(what, bytes):
                yield what, f"byte {at:,}"
                continue
            start = int(bounds[slot])
            sizes = struct.unpack_from(f"<{len(fields)}I", data, start)
            start += 4 * len(fields)
            place = f"sample {first + slot:,}, behind its fields"
            for (name, kind), size in zip(fields, sizes, strict=True):
                if start <= at < start + size:
                    text = kind == "str" and end <= start + size
                    whole = (start, start + size) == (at, end) if name == field else _is_word(data, at, end, start, start + size)
                    place = f"sample {first + slot:,}, field {name!r}" if not text or whole else ""
                start += size
            if place:
                yield what, place


def _inflated(data: memoryview) -> bytes:
    """Return what a zstd frame at the beginning of some bytes holds; nothing where there is none."""
    import zstandard

    pieces = []
    stream = zstandard.ZstdDecompressor().decompressobj()
    with suppress(zstandard.ZstdError):
        for start in range(0, len(data), 1 << 16):
            pieces.append(stream.decompress(data[start : start + (1 << 16)]))
            if stream.eof:
                break
    return b"".join(pieces)


def _is_word(data: Any, start: int, end: int, first: int = 0, stop: int | None = None) -> bool:
    """Whether neither end of a place in a text is in the middle of a word."""
    stop = len(data) if stop is None else stop
    edges = (start - 1, start), (end - 1, end)
    return not any(
        first <= a and b < stop and _WORD.match(data[a : a + 1]) is not None and _WORD.match(data[b : b + 1]) is not None for a, b in edges
    )


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a JSON value, and the members that hold them."""
    if isinstance(value, str):
        yield value, f"member {place!r}"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield name, f"member {place!r}"
            yield from _texts(part, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, place)


def _field(sample: Any, field: str) -> Any:
    """Return the value of a field of a sample that holds no other."""
    for step in field.split("."):
        sample = sample.get(step) if isinstance(sample, Mapping) else None
    return sample
