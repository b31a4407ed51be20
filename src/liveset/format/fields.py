"""Fields of a sample by name, such as ``meta.id`` or ``pair[0]``; a key of the sample itself goes before a path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from liveset.format.tree import parse_path


def field_value(sample: Any, field: str) -> Any:
    """Return what stands in a field of a sample; ``LookupError`` or ``TypeError`` when the sample has no such field."""
    if isinstance(sample, dict) and field in sample:
        return sample[field]
    value = sample
    for step in parse_path(field):
        value = value[step]
    return value


def set_field(sample: Any, field: str, value: Any) -> None:
    """Put a value into a field of a sample; raises what ``field_value`` raises."""
    if isinstance(sample, dict) and field in sample:
        sample[field] = value
        return
    *steps, last = parse_path(field)
    for step in steps:
        sample = sample[step]
    sample[last] = value


def check_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names of fields; a text would be taken for the names of its letters."""
    if isinstance(names, str):
        raise TypeError(f"`{argument}` is a list of names of fields, as in {argument}=[{names!r}]. Found the text {names!r}.")
    if not isinstance(names, Iterable):
        raise TypeError(f"`{argument}` is a list of names of fields. Found {names!r}.")
    return tuple(names)
