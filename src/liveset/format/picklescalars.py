"""Short cuts for pickles of one numpy number, which are common as labels; everything else about pickles is in ``safepickle``."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from liveset.format.picklenames import PLAIN_SCALARS

_END = b"\x85R."  # one argument, call, stop


# --- our own form: ``type(number)`` without frames and memo -------------------------------------------------------------------------------


def _int_writer(head: bytes) -> Callable[[Any], bytes]:
    def write(value: Any) -> bytes:
        number = int(value)
        if 0 <= number < 256:
            return head + b"K" + number.to_bytes(1, "little") + _END
        if -(1 << 31) <= number < 1 << 31:
            return head + b"J" + number.to_bytes(4, "little", signed=True) + _END
        packed = pickle.encode_long(number)
        return head + b"\x8a" + bytes([len(packed)]) + packed + _END

    return write


def _int_reader(kind: Any, start: int) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        code = data[start]
        if code == 0x4B and len(data) == start + 5:
            return kind(data[start + 1])
        if code == 0x4A and len(data) == start + 8:
            return kind(int.from_bytes(data[start + 1 : start + 5], "little", signed=True))
        if code == 0x8A and len(data) == start + 5 + data[start + 1]:
            return kind(int.from_bytes(data[start + 2 : -3], "little", signed=True))
        return None

    return read


def _float_writer(head: bytes) -> Callable[[Any], bytes]:
    pack = struct.Struct(">d").pack
    return lambda value: head + b"G" + pack(value) + _END


def _float_reader(kind: Any, start: int) -> Callable[[bytes], Any]:
    unpack = struct.Struct(">d").unpack_from

    def read(data: bytes) -> Any:
        return kind(unpack(data, start + 1)[0]) if len(data) == start + 12 and data[start] == 0x47 else None

    return read


SCALAR_WRITERS: dict[type, Callable[[Any], bytes]] = {}
_READERS: dict[bytes, Callable[[bytes], Any]] = {}
for _kind, _name in PLAIN_SCALARS.items():
    _head = b"\x80\x05\x8c\x05numpy\x8c" + bytes([len(_name)]) + _name.encode() + b"\x93"
    if issubclass(_kind, np.integer):
        SCALAR_WRITERS[_kind], _READERS[_head] = _int_writer(_head), _int_reader(_kind, len(_head))
    elif _kind in (np.float64, np.float32, np.float16):
        SCALAR_WRITERS[_kind], _READERS[_head] = _float_writer(_head), _float_reader(_kind, len(_head))


# --- numpy's own form, which the old tool writes ------------------------------------------------------------------------------------------

_NUMPY_END = b"\x94\x86\x94R\x94."


def _numpy_head(protocol: int, module: bytes, code: bytes, size: int) -> bytes:
    """Return the bytes before the number: ``scalar(dtype(code), ...)`` as the standard pickler writes it."""
    order = b"|" if size == 1 else b"<"
    body = (
        b"\x8c" + bytes([len(module)]) + module + b"\x94\x8c\x06scalar\x94\x93\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94\x8c\x02" + code
        + b"\x94\x89\x88\x87\x94R\x94(K\x03\x8c\x01" + order + b"\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t\x94bC" + bytes([size])
    )  # fmt: skip
    frame = len(body) + size + len(_NUMPY_END)
    return b"\x80" + bytes([protocol]) + b"\x95" + frame.to_bytes(8, "little") + body


# By the length of the pickle: the sizes that the number may have in it.
_NUMPY_SIZES: dict[int, list[int]] = {}
_NUMPY_HEADS: dict[bytes, tuple[Any, Callable[[bytes], tuple[Any, ...]]]] = {}
for _kind, _code in ((np.dtype(_text).type, _text) for _text in "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()):
    _size = int(_code[1])
    _unpack = struct.Struct("<" + np.dtype(_code).char.replace("l", "q").replace("L", "Q")).unpack
    for _protocol in (4, 5):
        for _module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
            _head = _numpy_head(_protocol, _module, _code.encode(), _size)
            _NUMPY_HEADS[_head] = _kind, _unpack
            _sizes = _NUMPY_SIZES.setdefault(len(_head) + _size + len(_NUMPY_END), [])
            if _size not in _sizes:
                _sizes.append(_size)


def read_scalar(data: bytes) -> Any:
    """Return the numpy number that a pickle holds, or None when it is not in one of the two usual forms."""
    if (read := _READERS.get(data[: data.find(b"\x93", 0, 40) + 1])) is not None:
        return read(data) if data[-3:] == _END else None
    for size in _NUMPY_SIZES.get(len(data), ()):
        known = _NUMPY_HEADS.get(data[: -size - 6])
        if known is not None and data[-6:] == _NUMPY_END:
            kind, unpack = known
            return kind(*unpack(data[-size - 6 : -6]))
    return None
