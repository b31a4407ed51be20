"""Patches: other values for some leaves of an item; the bytes of all other leaves stay as they are stored."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import accumulate
from operator import getitem
from typing import Any

import msgspec

from liveset.edit.cells import ARRAYS, reader
from liveset.edit.encoding import SampleEncoder
from liveset.errors import SampleError
from liveset.format.schema import Schema
from liveset.format.tree import Branch, Leaf, Node, Path, locate, parse_path

__all__ = ["PatchEncoder", "apply_patch", "join_parts", "join_patches", "leaf_parts", "leaves_of"]

leaves_of: Callable[[bytes], dict[int, bytes]] = msgspec.msgpack.Decoder(dict[int, bytes]).decode
"""Returns the leaves that a patch holds, by their numbers."""
_pack: Callable[[dict[int, bytes]], bytes] = msgspec.msgpack.Encoder().encode


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
    sizes = list(struct.unpack_from(f"<{count}I", item))
    bounds = list(accumulate(sizes, initial=4 * count))
    parts = [b""]
    start = bounds[0]
    for number, data in sorted(leaves_of(patch).items()):
        parts += item[start : bounds[number]], data
        start, sizes[number] = bounds[number + 1], len(data)
    parts[0] = struct.pack(f"<{count}I", *sizes)
    parts.append(item[start : bounds[count]])
    return b"".join(parts)


def join_patches(first: bytes, then: bytes) -> bytes:
    """Return the patch that does what two do one after the other."""
    return _pack({**leaves_of(first), **leaves_of(then)})


class PatchEncoder:
    """Turns new values for some fields into patches.

    Args:
        schema: of the dataset.
        allow_pickle: store objects of any type with pickle.
    """

    def __init__(self, schema: Schema, *, allow_pickle: bool = False) -> None:
        self._fields, self._allow_pickle, self._root = list(schema.fields), allow_pickle, schema.root
        self._count = len(self._fields)
        self._places: dict[Path, tuple[int, int]] = {}
        self._list(schema.root, (), 0)
        self._encoders: dict[str, tuple[SampleEncoder, Callable[[Any], Any] | None, int, int]] = {}
        self._checked: set[tuple[str, ...]] = set()
        self._known: dict[str, Path] = {}

    def check(self, names: Iterable[str]) -> None:
        """Check that a patch of these fields says of each place once what it is; ``SampleError`` names the field of which it does not."""
        given = tuple(names)
        if given in self._checked:
            return
        known: dict[Path, str] = {}
        for path, name in sorted(((self._steps(name), name) for name in given), key=lambda place: len(place[0])):
            for depth in range(1, len(path) + 1):
                if (other := known.get(path[:depth])) is not None:
                    raise SampleError(f"the fields {other!r} and {name!r} both say what {name!r} is.", field=name)
            known[path] = name
        self._checked.add(given)

    def given(self, changes: Mapping[str, Any], field: str) -> tuple[Any, ...]:
        """Return what changes say that a field is, by its name or as a part of what holds it: one value, or none.

        ``LookupError`` or ``TypeError`` when they change what holds it and leave it out.
        """
        if field in changes:
            return (changes[field],)
        wanted = self._steps(field)
        for name in changes:
            steps = self._steps(name)
            if wanted[: len(steps)] == steps:
                return (reduce(getitem, wanted[len(steps) :], changes[name]),)
        return ()

    def encode(self, values: Mapping[str, Any], stored: Callable[[], bytes | None]) -> bytes:
        """Return the patch that sets some fields.

        Args:
            values: new values by the name of the field, such as ``label`` or ``meta.author``; a field may be a container as a whole, and a
                list stands for the array that it makes.
            stored: returns the item that is patched, or None; called only when the answer depends on it.

        Raises:
            SampleError: there is no such field, or a value does not fit it; ``field`` names it.
            PickleRefused: a value needs ``allow_pickle=True``.
        """
        parts: dict[int, bytes] = {}
        for name, value in values.items():
            encoder, read, first, count = self._encoder(name)
            try:
                plain = read(value) if read is not None and type(value) in (list, tuple) else value
            except ValueError as error:
                raise SampleError(f"field {name!r}: {error}.", field=name) from error
            try:
                item = encoder.encode(plain, lambda first=first, count=count: self._part(stored(), first, count))  # type: ignore[misc]
            except SampleError as error:
                if error.field:
                    raise
                raise SampleError(f"field {name!r}: {error}", field=name) from error
            if count == 1:
                parts[first] = item[4:]
            else:
                parts.update(zip(range(first, first + count), leaf_parts(item, count), strict=True))
        return _pack(parts)

    def whole(self, patch: bytes) -> bytes:
        """Return the item that a patch makes on its own; ``SampleError`` names the fields that it lacks."""
        parts = leaves_of(patch)
        if len(parts) < self._count:
            lacking = [name for number, name in enumerate(self._fields) if number not in parts]
            raise SampleError(f"the fields {', '.join(lacking)} are missing: a new sample needs all of them.", field=lacking[0])
        return join_parts(parts[number] for number in range(self._count))

    def _encoder(self, name: str) -> tuple[SampleEncoder, Callable[[Any], Any] | None, int, int]:
        if (known := self._encoders.get(name)) is not None:
            return known
        if (found := locate(self._root, name)) is None:
            raise SampleError(f"there is no field {name!r}: the samples have the fields {', '.join(self._fields)}.", field=name)
        path, node = found
        first, count = self._places[path]
        encoder = SampleEncoder(Schema(node), allow_pickle=self._allow_pickle, path=path)
        read = reader(node, "python") if isinstance(node, Leaf) and node.format.partition(":")[0] in ARRAYS else None
        self._encoders[name] = encoder, read, first, count
        return self._encoders[name]

    def _steps(self, name: str) -> Path:
        """Return the place of a field, also of one inside a leaf."""
        if (known := self._known.get(name)) is None:
            try:
                found = locate(self._root, name)
                known = found[0] if found is not None else parse_path(name)
            except (LookupError, TypeError):
                known = (name,)
            self._known[name] = known
        return known

    def _part(self, item: bytes | None, first: int, count: int) -> bytes | None:
        return None if item is None else join_parts(leaf_parts(item, self._count)[first : first + count])

    def _list(self, node: Node, path: Path, first: int) -> int:
        """Note a node and those below it; return the number of the first leaf behind them."""
        end = first + 1
        if isinstance(node, Branch):
            end = first
            for step, child in zip(node.keys if node.keys is not None else range(len(node.children)), node.children, strict=True):
                end = self._list(child, (*path, step), end)
        self._places[path] = first, end - first
        return end
