"""Patches: other values for some leaves of an item; the bytes of all other leaves stay as they are stored."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from liveset.edit.encoding import SampleEncoder
from liveset.errors import SampleError
from liveset.format.schema import Schema
from liveset.format.tree import Leaf, Node, leaves, path_text

__all__ = ["PatchEncoder", "apply_patch", "join_parts", "join_patches", "leaf_parts"]


def leaf_parts(item: bytes, count: int) -> list[bytes]:
    """Return the bytes of each of the ``count`` leaves of an item."""
    sizes = struct.unpack_from(f"<{count}I", item)
    parts = []
    start = 4 * count
    for size in sizes:
        parts.append(item[start : start + size])
        start += size
    return parts


def join_parts(parts: Iterable[bytes]) -> bytes:
    """Return the item that has these leaves."""
    held = list(parts)
    return b"".join([struct.pack(f"<{len(held)}I", *map(len, held)), *held])


def apply_patch(item: bytes, patch: bytes, count: int) -> bytes:
    """Return an item of ``count`` leaves with those of a patch in their places."""
    parts = leaf_parts(item, count)
    for number, data in msgspec.msgpack.decode(patch, type=dict[int, bytes]).items():
        parts[number] = data
    return join_parts(parts)


def join_patches(first: bytes, then: bytes) -> bytes:
    """Return the patch that does what two do one after the other."""
    decode = msgspec.msgpack.decode
    return msgspec.msgpack.encode({**decode(first, type=dict[int, bytes]), **decode(then, type=dict[int, bytes])})


class PatchEncoder:
    """Turns new values for some fields into patches.

    Args:
        schema: of the dataset.
        allow_pickle: store objects of any type with pickle.
    """

    def __init__(self, schema: Schema, *, allow_pickle: bool = False) -> None:
        self._fields = list(schema.fields)
        self._count = len(self._fields)
        self._allow_pickle = allow_pickle
        self._nodes: dict[str, tuple[Node, int]] = {}
        self._list(schema.root, (), 0)
        self._encoders: dict[str, tuple[SampleEncoder, int, int]] = {}

    def encode(self, values: Mapping[str, Any], stored: Callable[[], bytes | None]) -> bytes:
        """Return the patch that sets some fields.

        Args:
            values: new values by the name of the field, such as ``label`` or ``meta.author``; a field may be a container as a whole.
            stored: returns the item that is patched, or None; called only when the answer depends on it.

        Raises:
            SampleError: there is no such field, or a value does not fit it; ``field`` names it.
            PickleRefused: a value needs ``allow_pickle=True``.
        """
        parts: dict[int, bytes] = {}
        for name, value in values.items():
            encoder, first, count = self._encoder(name)
            try:
                item = encoder.encode(value, lambda first=first, count=count: self._part(stored(), first, count))  # type: ignore[misc]
            except SampleError as error:
                inner = "" if error.field in ("", "sample") else error.field
                raise SampleError(f"field {name!r}: {error}", field=f"{name}{'.' if inner else ''}{inner}") from error
            parts.update(zip(range(first, first + count), leaf_parts(item, count), strict=True))
        return msgspec.msgpack.encode(parts)

    def whole(self, patch: bytes) -> bytes:
        """Return the item that a patch makes on its own; ``SampleError`` names the fields that it lacks."""
        parts = msgspec.msgpack.decode(patch, type=dict[int, bytes])
        if len(parts) < self._count:
            lacking = [name for number, name in enumerate(self._fields) if number not in parts]
            raise SampleError(f"the fields {', '.join(lacking)} are missing: a new sample needs all of them.", field=lacking[0])
        return join_parts(parts[number] for number in range(self._count))

    def _encoder(self, name: str) -> tuple[SampleEncoder, int, int]:
        if (known := self._encoders.get(name)) is not None:
            return known
        if name not in self._nodes:
            raise SampleError(f"there is no field {name!r}: the samples have the fields {', '.join(self._nodes)}.", field=name)
        node, first = self._nodes[name]
        encoder = SampleEncoder(Schema(node), allow_pickle=self._allow_pickle)
        self._encoders[name] = encoder, first, sum(1 for _ in leaves(node))
        return self._encoders[name]

    def _part(self, item: bytes | None, first: int, count: int) -> bytes | None:
        return None if item is None else join_parts(leaf_parts(item, self._count)[first : first + count])

    def _list(self, node: Node, path: tuple[Any, ...], first: int) -> int:
        """Note a node and those below it by name; return the number of the first leaf behind them."""
        if path:
            self._nodes[path_text(path)] = node, first
        if isinstance(node, Leaf):
            return first + 1
        steps = node.keys if node.keys is not None else range(len(node.children))
        for step, child in zip(steps, node.children, strict=True):
            first = self._list(child, (*path, step), first)
        return first
