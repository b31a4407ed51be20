"""The ``json`` leaf: None, numbers, text, lists and dicts as tagged bytes that read back equal, with equal types."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any

from liveset.errors import Corrupt

# Lists and dicts may nest this deep; json readers of any kind manage that without running out of stack.
MAX_DEPTH = 100

_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1
_WORD, _INT, _FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_word, _int, _float = _WORD.unpack_from, _INT.unpack_from, _FLOAT.unpack_from
_pack_int, _pack_float = struct.Struct("<Bq").pack, struct.Struct("<Bd").pack
_SCALARS = frozenset({str, int, float, bool, type(None)})
_encode_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_decode_json = json.JSONDecoder().decode


class NotExact(ValueError):
    """A value would not read back equal from a ``json`` leaf; the writer chooses another leaf."""


def dumps(value: Any) -> bytes:
    """Return the bytes of a ``json`` leaf.

    Raises:
        NotExact: the value, or one inside it, would read back changed: a tuple, a dict with keys that are not text, bytes, an integer
            beyond 64 bits, a subclass, text that is not UTF-8, and the like.
    """
    kind = type(value)
    try:
        if kind is str:
            text: bytes = value.encode()
            return b"\x07" + len(text).to_bytes(4, "little") + text
        if kind is int:
            return _pack_int(8, value)
        if kind is float:
            return _pack_float(9, value)
        if kind is bool:
            return b"\x0a\x01" if value else b"\x0a\x00"
        if value is None:
            return b"\x0b"
        if kind is list:
            return _dump_list(value)
        if kind is dict:
            return _dump_text(value)
    except (struct.error, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise NotExact(f"a value does not fit a json leaf: {error}") from error
    raise NotExact(f"a {kind.__qualname__} does not read back equal from a json leaf")


def _dump_list(value: list[Any]) -> bytes:
    kinds = set(map(type, value))
    if len(kinds) > 1:
        return _dump_text(value)
    count = len(value)
    kind = kinds.pop() if kinds else str
    head = count.to_bytes(4, "little")
    if kind is str:
        texts = [text.encode() for text in value]
        return b"\x01" + head + b"".join(chain.from_iterable((len(text).to_bytes(4, "little"), text) for text in texts))
    if kind is int:
        return b"\x02" + head + struct.pack(f"<{count}q", *value)
    if kind is float:
        return b"\x03" + head + struct.pack(f"<{count}d", *value)
    if kind is bool:
        return b"\x04" + head + bytes(value)
    return _dump_text(value)


def _dump_text(value: Any) -> bytes:
    _check(value, MAX_DEPTH)
    try:
        text = _encode_json(value).encode()
    except UnicodeEncodeError:
        raise
    except ValueError as error:
        raise NotExact(f"a value does not fit a json leaf: {error}") from error
    return b"\x00" + len(text).to_bytes(4, "little") + text


def _check(value: Any, depth: int) -> None:
    """Raise ``NotExact`` unless JSON text keeps a list or dict exactly; numbers that are not finite are left to the encoder."""
    if not depth:
        raise NotExact(f"lists and dicts inside a json leaf nest deeper than {MAX_DEPTH}")
    if type(value) is dict:
        if set(map(type, value)) - {str}:
            raise NotExact("a dict whose keys are not all text does not read back equal from a json leaf")
        value = value.values()
    kinds = set(map(type, value))
    if int in kinds:
        numbers = value if len(kinds) == 1 else [item for item in value if type(item) is int]
        if min(numbers) < _I64_MIN or max(numbers) > _I64_MAX:
            raise NotExact("an integer beyond 64 bits does not fit a json leaf")
    if kinds <= _SCALARS:
        return
    for kind in kinds - _SCALARS:
        if kind is not list and kind is not dict:
            raise NotExact(f"a {kind.__qualname__} does not read back equal from a json leaf")
    for item in value:
        if type(item) is list or type(item) is dict:
            _check(item, depth - 1)


def is_exact(value: Any) -> bool:
    """Tell whether ``dumps`` takes a value."""
    try:
        dumps(value)
    except NotExact:
        return False
    return True


# --- reading ------------------------------------------------------------------------------------------------------------------------------


def loads(data: bytes) -> Any:
    """Return the value of a ``json`` leaf, whichever way the old tool or this library wrote it.

    Raises:
        Corrupt: the bytes are damaged.
    """
    data = bytes(data)
    try:
        if data[0] > 0x20:  # before it had tags, the old tool stored JSON text
            return _decode_json(data.decode())
        value, end = _READERS[data[0]](data, 1)
    except (LookupError, struct.error, ValueError, RecursionError, OverflowError) as error:
        raise Corrupt(f"a json leaf is damaged: {type(error).__name__}: {error}") from error
    if end != len(data):
        raise Corrupt(f"a json leaf is damaged: {len(data) - end} bytes follow its value")
    return value


_Read = tuple[Any, int]


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _word(data, at)
    end = at + 4 + size
    if end > len(data):
        raise ValueError(f"{size} bytes are announced, {len(data) - at - 4} are there")
    return data[at + 4 : end], end


def _read_str(data: bytes, at: int) -> tuple[str, int]:
    text, end = _read_bytes(data, at)
    return text.decode(), end


def _read_json(data: bytes, at: int) -> _Read:
    text, end = _read_bytes(data, at)
    return _decode_json(text.decode()), end


def _read_strs(data: bytes, at: int) -> _Read:
    (count,) = _word(data, at)
    at += 4
    result = []
    for _ in range(count):
        text, at = _read_str(data, at)
        result.append(text)
    return result, at


def _fixed_list(code: str, size: int, convert: Callable[[tuple[Any, ...]], list[Any]]) -> Callable[[bytes, int], _Read]:
    def read(data: bytes, at: int) -> _Read:
        (count,) = _word(data, at)
        if at + 4 + count * size > len(data):  # checked here, since a damaged count could ask for gigabytes
            raise ValueError(f"{count} numbers are announced, {len(data) - at - 4} bytes are there")
        return convert(struct.unpack_from(f"<{count}{code}", data, at + 4)), at + 4 + count * size

    return read


def _read_dict(data: bytes, at: int) -> _Read:
    (count,) = _word(data, at)
    at += 4
    result = {}
    for _ in range(count):
        key, at = _read_str(data, at)
        result[key], at = _READERS[data[at]](data, at + 1)
    return result, at


def _read_rows(data: bytes, at: int) -> _Read:
    rows, columns = _word(data, at)[0], _word(data, at + 4)[0]
    at += 8
    if rows and not columns:
        raise ValueError("rows without columns")
    keys = []
    for _ in range(columns):
        key, at = _read_str(data, at)
        keys.append(key)
    result = []
    for _ in range(rows):
        row = {}
        for key in keys:
            row[key], at = _CELLS[data[at]](data, at + 1)
        result.append(row)
    return result, at


def _read_int(data: bytes, at: int) -> _Read:
    return _int(data, at)[0], at + 8


def _read_float(data: bytes, at: int) -> _Read:
    return _float(data, at)[0], at + 8


def _read_bool(data: bytes, at: int) -> _Read:
    return data[at] != 0, at + 1


def _read_none(_: bytes, at: int) -> _Read:
    return None, at


_READERS: dict[int, Callable[[bytes, int], _Read]] = {
    0: _read_json,
    1: _read_strs,
    2: _fixed_list("q", 8, list),
    3: _fixed_list("d", 8, list),
    4: _fixed_list("B", 1, lambda values: list(map(bool, values))),
    5: _read_dict,
    6: _read_rows,
    7: _read_str,
    8: _read_int,
    9: _read_float,
    10: _read_bool,
    11: _read_none,
}
_CELLS: dict[int, Callable[[bytes, int], _Read]] = {0x10: _read_none, 0x11: _read_str, 0x12: _read_int, 0x13: _read_float, 0x14: _read_bool}
