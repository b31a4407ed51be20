"""Which schema a sample has, and the narrowest schema that holds two of them.

A run starts with the schema of its first sample and widens it when a later sample does not fit, always to something that reads back
equal: numbers, text, None and JSON-like containers meet in a ``json`` leaf, arrays of different shape or dtype in an array leaf that stores
both, everything else that is safe in a ``pickle`` leaf.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from liveset.errors import PickleRefused, SampleError
from liveset.format import jsonleaf, media, safepickle
from liveset.format.leaves import array_format, is_tensor, media_family
from liveset.format.tree import SAFE_FACTORIES, Branch, Leaf, Node, Path, locate, path_text

JSON_FORMATS = frozenset({"bool", "int", "float", "str", "json"})
_I64 = range(-(1 << 63), 1 << 63)
# A longer list is one value rather than so many fields; wide tables have many columns, though.
MAX_ITEMS = 256
MAX_KEYS = 4096

JSON, PICKLE = Leaf("json"), Leaf("pickle")


def infer(value: Any, *, allow_pickle: bool = False, path: Path = ()) -> Node:
    """Return the schema of one sample.

    Raises:
        SampleError: a value cannot be stored so that it reads back equal.
        PickleRefused: a value needs ``allow_pickle=True``.
    """
    kind = type(value)
    if kind in (bool, float, str, bytes):
        return Leaf(kind.__name__)
    if kind is int:
        return Leaf("int") if value in _I64 else PICKLE
    if value is None:
        return JSON
    if fmt := array_format(value):
        return Leaf(fmt)
    if fmt := media.media_format(value):
        return Leaf(fmt)
    if kind in (dict, OrderedDict, defaultdict):
        return _infer_mapping(value, allow_pickle, path)
    if kind in (list, tuple, deque):
        return _infer_sequence(value, allow_pickle, path)
    return _infer_pickle(value, allow_pickle, path)


def _infer_mapping(value: dict[Any, Any], allow_pickle: bool, path: Path) -> Node:
    factory = getattr(value, "default_factory", None)
    if type(value) is defaultdict and (factory is None or factory.__module__ != "builtins" or factory.__name__ not in SAFE_FACTORIES):
        return _infer_pickle(value, allow_pickle, path)
    if not all(_is_key(key) for key in value) or len(value) > MAX_KEYS:
        return JSON if jsonleaf.is_exact(value) else _infer_pickle(value, allow_pickle, path)
    if path and not value and type(value) is dict:
        return JSON  # what an empty dict will hold later is open
    children = tuple(infer(child, allow_pickle=allow_pickle, path=(*path, key)) for key, child in value.items())
    return Branch(type(value).__name__, children, tuple(value), factory.__name__ if factory is not None else None)


def _infer_sequence(value: Any, allow_pickle: bool, path: Path) -> Node:
    if type(value) is list and (path or len(value) > MAX_ITEMS) and jsonleaf.is_exact(value):
        return JSON  # lists inside a sample vary in length, so they are one value
    if len(value) > MAX_ITEMS:
        return _infer_pickle(value, allow_pickle, path)
    children = tuple(infer(child, allow_pickle=allow_pickle, path=(*path, i)) for i, child in enumerate(value))
    return Branch(type(value).__name__, children, None, getattr(value, "maxlen", None))


def _is_key(key: Any) -> bool:
    """Tell whether ``data_spec`` can carry a key."""
    return key is None or type(key) in (str, bool) or (type(key) is int and key in _I64) or (type(key) is float and math.isfinite(key))


def _infer_pickle(value: Any, allow_pickle: bool, path: Path) -> Leaf:
    name = path_text(path)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise SampleError(f"field {name!r}: an array of Python objects cannot be stored: use a list, or an array of numbers.", field=name)
    if is_tensor(value):
        raise SampleError(f"field {name!r}: a tensor of {value.dtype} cannot be stored: convert it to another dtype.", field=name)
    if not allow_pickle and not safepickle.is_safe(value):
        raise PickleRefused(
            f"field {name!r} holds a {type(value).__module__}.{type(value).__qualname__}, which only pickle can store: "
            "convert it to builtin types, arrays or bytes, or pass allow_pickle=True here and when reading.",
            field=name,
        )
    return PICKLE


# --- joining --------------------------------------------------------------------------------------------------------


def join(a: Node, b: Node, path: Path = ()) -> Node:
    """Return the narrowest schema that holds the samples of both; ``SampleError`` when there is none.

    ``join(a, b)`` keeps the key order of ``a``; ``join(a, a) == a``.
    """
    if a == b:
        return a
    if isinstance(a, Branch) and isinstance(b, Branch) and _same_container(a, b):
        if a.keys is None:
            pairs: Iterable[tuple[Any, Node, Node]] = zip(range(len(a.children)), a.children, b.children, strict=True)
        else:
            others = dict(zip(b.keys or (), b.children, strict=True))
            pairs = ((key, child, others[key]) for key, child in zip(a.keys, a.children, strict=True))
        return Branch(a.kind, tuple(join(left, right, (*path, step)) for step, left, right in pairs), a.keys, a.option)
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return _join_leaves(a, b, path)
    if _is_json(a) and _is_json(b):
        return JSON
    for node in (a, b):
        _require_picklable(node, a, b, path)
    return PICKLE


def _same_container(a: Branch, b: Branch) -> bool:
    if a.kind != b.kind or a.option != b.option or len(a.children) != len(b.children):
        return False
    return a.keys == b.keys if a.kind == "OrderedDict" or a.keys is None or b.keys is None else set(a.keys) == set(b.keys)


def _join_leaves(a: Leaf, b: Leaf, path: Path) -> Leaf:
    formats = (a.format, b.format)
    families = {media_family(fmt) for fmt in formats}
    if all(fmt in JSON_FORMATS for fmt in formats):
        return JSON
    if families <= {"no_header_numpy", "numpy"}:
        return Leaf("numpy")
    if families <= {"no_header_tensor", "tensor"}:
        return Leaf("tensor")
    if families == {"file"}:
        return Leaf("file")
    if families == {"image"}:
        return a  # the extension is a hint: contents are recognised
    for leaf in (a, b):
        _require_picklable(leaf, a, b, path)
    return PICKLE


def _is_json(node: Node) -> bool:
    """Tell whether values of this schema may be JSON that reads back equal."""
    if isinstance(node, Leaf):
        return node.format in JSON_FORMATS
    return node.kind in ("dict", "list") and all(type(key) is str for key in node.keys or ()) and all(map(_is_json, node.children))


_PICKLABLE = JSON_FORMATS | {"bytes", "numpy", "no_header_numpy", "tensor", "no_header_tensor", "pickle"}


def _require_picklable(node: Node, a: Node, b: Node, path: Path) -> None:
    if isinstance(node, Branch):
        for step, child in zip(node.keys if node.keys is not None else range(len(node.children)), node.children, strict=True):
            _require_picklable(child, a, b, (*path, step))
    elif media_family(node.format) not in _PICKLABLE:
        name = path_text(path)
        raise SampleError(
            f"field {name!r} is {describe(node)} in some samples and missing, None or of another kind in others ({describe(a)}, then "
            f"{describe(b)}), and no leaf type holds both. Give it the same kind of value in all samples, such as a placeholder; or store "
            "bytes or None there (path.read_bytes()) and decode them after reading.",
            field=name,
        )


def make_nullable(root: Node, fields: Iterable[str]) -> Node:
    """Return the schema in which the named fields may also be None."""
    places = {name: locate(root, name) for name in fields}
    if missing := sorted(name for name, place in places.items() if place is None):
        raise SampleError(f"nullable= names the fields {missing}, which the samples do not have.", field=missing[0])
    wanted = {place[0] for place in places.values() if place is not None}

    def build(node: Node, path: Path) -> Node:
        if path in wanted:
            return _with_none(node, path)
        if isinstance(node, Leaf):
            return node
        steps = node.keys if node.keys is not None else range(len(node.children))
        return Branch(node.kind, tuple(build(c, (*path, s)) for s, c in zip(steps, node.children, strict=True)), node.keys, node.option)

    return build(root, ())


def _with_none(node: Node, path: Path) -> Node:
    try:
        return join(node, JSON, path)
    except SampleError as error:
        raise SampleError(
            f"nullable= names the field {path_text(path)!r}, but {describe(node)} cannot be None. Use a placeholder; or store bytes or "
            "None there (path.read_bytes()) and decode them after reading.",
            field=error.field,
        ) from error


def describe(node: Node) -> str:
    """Return a short name of a schema for messages, such as ``int`` or ``dict[id: str, x: float]``."""
    if isinstance(node, Leaf):
        from liveset.format.dtypes import NUMPY_DTYPES, TORCH_NAMES

        name, _, argument = node.format.partition(":")
        if name in ("no_header_numpy", "no_header_tensor") and argument.isdecimal():
            table: list[str] = [str(dtype) for dtype in NUMPY_DTYPES] if name == "no_header_numpy" else list(TORCH_NAMES)
            dtype = table[int(argument)] if int(argument) < len(table) else "?"
            return f"{'array' if name == 'no_header_numpy' else 'tensor'}[{dtype}, 1-d]"
        return {"numpy": "array", "json": "JSON value", "pickle": "Python object"}.get(node.format, node.format)
    if node.keys is not None:
        return f"{node.kind}[{', '.join(f'{key}: {describe(child)}' for key, child in zip(node.keys, node.children, strict=True))}]"
    return f"{node.kind}[{', '.join(map(describe, node.children))}]"
