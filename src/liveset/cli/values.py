"""Values that are written as JSON on the command line, in the types of the fields that they are for."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from liveset.edit.cells import reader
from liveset.errors import SampleError
from liveset.format.infer import JSON_FORMATS, describe
from liveset.format.tree import Branch, Leaf, Node, parse_path

_EXPRESSIBLE = JSON_FORMATS | {"text", "numpy", "no_header_numpy", "tensor", "no_header_tensor"}
_PLAIN = (type(None), bool, int, float, str)


class Change(NamedTuple):
    """What one field was and what it becomes; ``NOTHING`` where there is none."""

    field: str
    old: Any
    new: Any


NOTHING = object()
"""Stands for a field that a sample does not have."""


def parse_json(text: str, what: str) -> Any:
    """Return a JSON value; ``ValueError`` says what is wrong with it."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}.") from error


def parse_field(text: str) -> tuple[str, Any]:
    """Return name and value of ``name=value``; ``ValueError`` says what is wrong with it."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not of the form name=value.")
    try:
        return name, json.loads(value)
    except ValueError as error:
        hint = f"""; text is written with quotes: '{name}="{value}"'""" if '"' not in value else ""
        raise ValueError(f"the value of {name!r} is not JSON ({error}){hint}.") from error


def with_sample(root: Node, stored: Any, new: Any) -> Any:
    """Return a whole sample from JSON in the types of a stored one.

    Raises:
        SampleError: a value does not fit its field, or JSON cannot express what the field holds; ``field`` names it.
    """
    return _fitted(root, stored, new, "")


def with_fields(root: Node, stored: Any, values: Sequence[tuple[str, Any]]) -> Any:
    """Return a stored sample with other values in some fields, such as ``label``, ``meta.id`` or ``boxes[0]``.

    Raises:
        SampleError: there is no such field, or the value does not fit it, as for ``with_sample``; ``field`` names it.
        ValueError: two values are for one field.
    """
    sample, seen = stored, list[list[Any]]()
    for name, value in values:
        try:
            steps = [name] if isinstance(sample, Mapping) and name in sample else list(parse_path(name))
        except LookupError as error:
            raise SampleError(f"there is no field {name!r}.", field=name) from error
        if steps in seen:
            raise ValueError(f"the field {name!r} is given twice.")
        seen.append(steps)
        sample = _replaced(root, sample, steps, value, name)
    return sample


def changes(old: Any, new: Any) -> Iterator[Change]:
    """Yield the fields in which two samples differ."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if not _same(old, new):
            yield Change("", old, new)
        return
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name, NOTHING), new.get(name, NOTHING)
        if not _same(before, after):
            yield Change(str(name), before, after)


def _fitted(node: Node, stored: Any, new: Any, field: str) -> Any:
    """Return a JSON value in the types that a place of a sample has; one that does not fit a container stays, for the encoder to say so."""
    if isinstance(node, Leaf):
        place = f"field {field!r}" if field else "the sample"
        if new is not None and node.format.partition(":")[0] not in _EXPRESSIBLE:
            if node.format == "pickle" and type(new) is type(stored) and _is_plain(stored):
                return new
            raise SampleError(
                f"{place} holds what JSON cannot express ({describe(node)}): use liveset.dataset_update in Python, "
                "or change the other fields with liveset patch.",
                field=field,
            )
        try:
            return reader(node, "json")(new)
        except ValueError as error:
            raise SampleError(f"{place}: {error}.", field=field) from error
    if node.keys is not None:
        if not (isinstance(new, dict) and isinstance(stored, Mapping)):
            return new
        parts = {
            key: _fitted(child, stored[key], new[key], f"{field}.{key}" if field else str(key))
            for key, child in zip(node.keys, node.children, strict=True)
            if key in new and key in stored
        }
        return _filled(stored, {**new, **parts})
    if not (isinstance(new, list) and len(new) == len(node.children) == len(stored)):
        return new
    places = enumerate(zip(node.children, stored, new, strict=True))
    items = [_fitted(child, old, value, f"{field}[{i}]") for i, (child, old, value) in places]
    return tuple(items) if isinstance(stored, tuple) else _filled(stored, items)


def _replaced(node: Node, stored: Any, steps: Sequence[str | int], new: Any, field: str) -> Any:
    if not steps:
        return _fitted(node, stored, new, field)
    step, *rest = steps
    try:
        if isinstance(step, str) and isinstance(stored, Mapping):
            known = stored[step] if rest or step in stored else None  # a sample may get a field that it did not have
        elif isinstance(step, int) and isinstance(stored, Sequence) and not isinstance(stored, str | bytes):
            known = stored[step]
        else:
            raise LookupError(step)
    except LookupError as error:
        raise SampleError(f"the sample has no field {field!r}.", field=field) from error
    part = _replaced(_child(node, step), known, rest, new, field)
    made: Any = list(stored) if isinstance(stored, tuple) else copy.copy(stored)
    made[step] = part
    return tuple(made) if isinstance(stored, tuple) else made


def _child(node: Node, step: str | int) -> Node:
    """Return the node of a place; inside a leaf that holds whole JSON values, and for fields that are new, anything goes."""
    if isinstance(node, Branch):
        if node.keys is not None and step in node.keys:
            return node.children[node.keys.index(step)]
        if node.keys is None and isinstance(step, int):
            return node.children[step]
        return Leaf("json")
    return node if node.format == "pickle" else Leaf("json")


def _filled(stored: Any, content: Any) -> Any:
    """Return a container of the type of the stored one (a deque has a length, a defaultdict a factory) with other content."""
    made = copy.copy(stored)
    made.clear()
    if isinstance(made, dict):
        made.update(content)
    else:
        made.extend(content)
    return made


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return a is b or (_is_plain(a) and _is_plain(b) and json.dumps(a) == json.dumps(b))
