"""Encoding of replacements: like encoding new samples, but what was read from the dataset may be written back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from liveset.format import images
from liveset.format.leaves import is_tensor
from liveset.format.media import File, Image, Jpeg, JpegArray, Text, decode_media, is_supported
from liveset.format.schema import Encoder, Schema
from liveset.format.tree import Leaf, Node, Path

__all__ = ["SampleEncoder"]

_OF_BYTES: dict[str, Callable[[bytes], Any]] = {
    "file": lambda data: File(bytes=data),
    "image": lambda data: Image(bytes=data),
    "jpeg": lambda data: Jpeg(bytes=data, max_quality=100),  # any file as it is; a wrapper made by the user may have a lower limit
}


class SampleEncoder:
    """Turns replacements into items of a fixed schema.

    A media field takes what reading it gives: text for ``text``, bytes for ``file``, and for images the bytes of an image file or the array
    that was read. The array of an image that is stored already keeps the stored bytes, so that writing a sample back changes nothing.

    Args:
        schema: of the dataset.
        allow_pickle: store objects of any type with pickle.
        path: where the values stand in a sample, if they are not whole samples.
    """

    def __init__(self, schema: Schema, *, allow_pickle: bool = False, path: Path = ()) -> None:
        self._encoder = Encoder(schema, fixed=True, allow_pickle=allow_pickle, path=path)
        self._schema = schema
        self._has_media = any(map(is_supported, schema.formats))

    def encode(self, sample: Any, stored: Callable[[], bytes | None]) -> bytes:
        """Return the item of a sample.

        Args:
            sample: the new sample.
            stored: returns the item that it will replace, or None; called only when the answer depends on it.

        Raises:
            SampleError: the sample does not fit the schema; ``field`` names the place.
            PickleRefused: a value needs ``allow_pickle=True``.
        """
        return self._encoder.encode(self.wrapped(sample, stored))

    def wrapped(self, sample: Any, stored: Callable[[], bytes | None]) -> Any:
        """Return a sample with wrappers where media fields hold what was read; arguments as for ``encode``."""
        if not self._has_media:
            return sample
        return self._as_media(self._schema.root, sample, iter(range(len(self._schema.formats))), stored)

    def _as_media(self, node: Node, value: Any, numbers: Iterator[int], stored: Callable[[], bytes | None]) -> Any:
        """Return a sample with wrappers where media fields hold what was read; where it does not fit the tree it stays as it is."""
        if isinstance(node, Leaf):
            number = next(numbers)
            return self._wrapped(node.format, value, number, stored) if is_supported(node.format) else value
        if type(value).__name__ != node.kind or len(value) != len(node.children):
            return value  # the encoder says what is wrong
        if node.keys is None:
            parts = [self._as_media(child, part, numbers, stored) for child, part in zip(node.children, value, strict=True)]
            return parts if node.kind == "list" else tuple(parts) if node.kind == "tuple" else type(value)(parts, node.option)
        if any(key not in value for key in node.keys):
            return value
        changed = value.copy()
        for child, key in zip(node.children, node.keys, strict=True):
            changed[key] = self._as_media(child, value[key], numbers, stored)
        return changed

    def _wrapped(self, fmt: str, value: Any, number: int, stored: Callable[[], bytes | None]) -> Any:
        name = fmt.partition(":")[0]
        if name == "text" and type(value) is str:
            return Text(text=value)
        if type(value) is bytes and name in _OF_BYTES:
            return _OF_BYTES[name](value)
        listed = name == "jpeg_array" and type(value) is list and value and all(map(_is_array, value))
        if not (listed or (name in ("image", "jpeg") and _is_array(value))) or (item := stored()) is None:
            return value
        data = _leaf(item, number, len(self._schema.formats))
        read = decode_media(fmt, data)
        if not listed:
            return _OF_BYTES[name](data) if _same(read, value) else value
        unchanged = len(read) == len(value) and all(map(_same, read, value))
        return JpegArray(images.split_blobs(data), max_quality=100) if unchanged else value


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray or is_tensor(value)


def _same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(a.dtype == b.dtype and np.array_equal(a, b))


def _leaf(item: bytes, number: int, count: int) -> bytes:
    """Return the bytes of one leaf of an item."""
    sizes = struct.unpack_from(f"<{count}I", item)
    start = 4 * count + sum(sizes[:number])
    return item[start : start + sizes[number]]
