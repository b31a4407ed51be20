"""The tree of a sample: containers (branches) with typed values (leaves), and its text form, the ``data_spec`` of ``index.json``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from liveset.errors import Corrupt, UnsupportedFormat

SPEC_PROTOCOL = 1

TYPE_NAMES = {
    "dict": "builtins.dict",
    "OrderedDict": "collections.OrderedDict",
    "defaultdict": "collections.defaultdict",
    "list": "builtins.list",
    "tuple": "builtins.tuple",
    "deque": "collections.deque",
}
KINDS = {name: kind for kind, name in TYPE_NAMES.items()}
MAPPING_KINDS = frozenset({"dict", "OrderedDict", "defaultdict"})

# A default factory is imported by name when a dataset is read, so only these are accepted, in files of strangers too.
SAFE_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool", "bytes", "frozenset"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One typed value; ``format`` is its ``data_format`` string, such as ``int`` or ``no_header_numpy:9``."""

    format: str


@dataclass(frozen=True, slots=True)
class Branch:
    """One container.

    ``keys`` are the keys of a mapping (None for sequences); ``option`` is the ``maxlen`` of a deque or the factory name of a defaultdict.
    """

    kind: str
    children: tuple[Node, ...]
    keys: tuple[Any, ...] | None = None
    option: Any = None


Node: TypeAlias = Leaf | Branch
Path: TypeAlias = tuple[Any, ...]


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Yield each leaf with its path of keys and positions, in storage order (depth first)."""
    if isinstance(node, Leaf):
        yield path, node
        return
    steps = node.keys if node.keys is not None else range(len(node.children))
    for step, child in zip(steps, node.children, strict=True):
        yield from leaves(child, (*path, step))


_STEP = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\]'"]+)\]|(?:(?<!^)\.|^)([^.\[\]]+)""", re.DOTALL)
_SPECIAL = re.compile(r"[.\[\]]|^$")


def path_text(path: Path) -> str:
    """Return the name of a field for messages and for ``fields=``: ``a.b[0]``; the sample itself is ``sample``.

    Keys that are empty or hold dots or brackets are quoted, ``meta['a.b']``, but for those of the sample itself: ``a.b``.
    """
    if len(path) == 1 and isinstance(path[0], str) and path[0]:
        return path[0]
    text = ""
    for step in path:
        if isinstance(step, str) and not _SPECIAL.search(step):
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text or "sample"


def parse_path(name: str) -> Path:
    """Return the keys and positions that a name such as ``a.b[0]`` or ``meta['a.b']`` consists of; ``LookupError`` when it is no path."""
    path: list[Any] = []
    end = 0
    while end < len(name) or not path:
        if (found := _STEP.match(name, end)) is None:
            raise LookupError(f"{name!r} is not the name of a field.")
        try:
            path.append(ast.literal_eval(found[1]) if found[1] else found[2])
        except (ValueError, SyntaxError, TypeError, MemoryError) as error:
            raise LookupError(f"{name!r} is not the name of a field.") from error
        end = found.end()
    return tuple(path)


def locate(root: Node, name: str) -> tuple[Path, Node] | None:
    """Return where the field of a name stands, and what it is; None when there is none.

    A key of the sample itself goes before a path: ``a.b`` is ``sample["a.b"]``, and only without that ``sample["a"]["b"]``, which is always
    ``['a']['b']`` too.
    """
    if isinstance(root, Branch) and root.keys is not None and name in root.keys:
        return (name,), root.children[root.keys.index(name)]
    try:
        path = parse_path(name)
    except (LookupError, TypeError):  # a name that is no text is only that of a key
        return None
    node = root
    for step in path:
        if isinstance(node, Leaf):
            return None
        steps = node.keys if node.keys is not None else range(len(node.children))
        if step not in steps:
            return None
        node = node.children[steps.index(step)]
    return path, node


def field_names(root: Node) -> dict[Path, str]:
    """Return the names of all fields, and of the containers around them, outer ones first; ``locate`` finds each of them by its name."""
    top = frozenset(root.keys or ()) if isinstance(root, Branch) else frozenset()
    names: dict[Path, str] = {}

    def note(node: Node, path: Path) -> None:
        name = path_text(path)
        if len(path) > 1 and name in top:
            name = "".join(f"[{step!r}]" for step in path)
        names[path] = name
        if isinstance(node, Branch):
            for step, child in zip(node.keys if node.keys is not None else range(len(node.children)), node.children, strict=True):
                note(child, (*path, step))

    note(root, ())
    return names


def with_leaf(node: Node, number: int, leaf: Leaf) -> Node:
    """Return the tree with leaf ``number`` (storage order) replaced."""
    counter = iter(range(1 << 30))

    def build(part: Node) -> Node:
        if isinstance(part, Leaf):
            return leaf if next(counter) == number else part
        return Branch(part.kind, tuple(build(child) for child in part.children), part.keys, part.option)

    return build(node)


def to_spec(node: Node) -> str:
    """Return the ``data_spec`` text of a tree, byte for byte as the format wants it."""
    return json.dumps([SPEC_PROTOCOL, _spec(node)])


def _spec(node: Node) -> dict[str, Any]:
    if isinstance(node, Leaf):
        return {"type": None, "context": None, "children_spec": []}
    context: Any
    if node.kind == "defaultdict":
        context = {"default_factory_module": "builtins", "default_factory_name": node.option, "dict_context": list(node.keys or ())}
    elif node.kind in MAPPING_KINDS:
        context = json.dumps(list(node.keys or ()))
    else:
        context = json.dumps(node.option)
    return {"type": TYPE_NAMES[node.kind], "context": context, "children_spec": [_spec(child) for child in node.children]}


def parse_spec(text: str, formats: list[str], file: str = "index.json") -> Node:
    """Return the tree of a ``data_spec`` text whose leaves get ``formats`` in order; ``Corrupt`` when they do not fit together."""
    try:
        protocol, spec = json.loads(text)
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{file}: `data_spec` is not a valid tree description ({error}).", file=file) from error
    if protocol != SPEC_PROTOCOL:
        raise UnsupportedFormat(f"{file}: `data_spec` has protocol {protocol!r}; this version of liveset reads protocol {SPEC_PROTOCOL}.")
    remaining = iter(formats)
    try:
        node = _parse(spec, remaining, file)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        if isinstance(error, (Corrupt, UnsupportedFormat)):
            raise
        raise Corrupt(f"{file}: `data_spec` and `data_format` do not fit together ({error!r}).", file=file) from error
    if next(remaining, None) is not None:
        raise Corrupt(f"{file}: `data_format` names more leaves than `data_spec` has.", file=file)
    return node


def _parse(spec: dict[str, Any], formats: Iterator[str], file: str) -> Node:
    if spec["type"] is None:
        return Leaf(next(formats))
    kind = KINDS.get(spec["type"])
    if kind is None:
        raise UnsupportedFormat(f"{file}: samples hold a container of type {spec['type']!r}, which liveset does not read.")
    context = spec["context"]
    keys: tuple[Any, ...] | None = None
    option = None
    if kind == "defaultdict":
        option = context["default_factory_name"]
        if context["default_factory_module"] != "builtins" or option not in SAFE_FACTORIES:
            raise UnsupportedFormat(
                f"{file}: a defaultdict with the factory {context['default_factory_module']}.{option} is not read: only builtins are safe."
            )
        keys = tuple(context["dict_context"])
    elif kind in MAPPING_KINDS:
        keys = tuple(json.loads(context))
    else:
        option = json.loads(context) if isinstance(context, str) else context
    children = tuple(_parse(child, formats, file) for child in spec["children_spec"])
    if keys is not None and (len(keys) != len(children) or not all(isinstance(key, str | int | float | None) for key in keys)):
        raise ValueError(f"the keys {keys!r} for {len(children)} values")
    if kind in ("list", "tuple") or option is None:
        return Branch(kind, children, keys)
    if kind == "deque" and (type(option) is not int or option < 0):
        raise ValueError(f"the deque length {option!r}")
    return Branch(kind, children, keys, option)
