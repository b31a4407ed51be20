"""Attributes: what a dataset says about itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from liveset.edit.adopt import adopt_store
from liveset.edit.changes import SetAttributes
from liveset.edit.commit import commit
from liveset.format import jsonleaf
from liveset.snapshot import open_snapshot
from liveset.storage import open_store


def set_attributes(
    path: str | os.PathLike[str], attributes: Mapping[str, Any] | None = None, /, *, message: str = "", author: str = "", **more: Any
) -> int:
    """Record facts about a dataset, such as its name, licence or a free text, in one commit.

    Args:
        path: of the dataset.
        attributes: names and JSON values; None removes one, and those not named stay.
        message: what the history says about it.
        author: who does this.
        more: attributes as keyword arguments; one that is called ``message`` or ``author`` goes into ``attributes``.

    Returns:
        The number of the new version.

    Raises:
        DatasetNotFound: there is no dataset.
        TypeError: a value is not JSON.

    Example:
        >>> liveset.set_attributes(path, name="digits", licence="CC-BY-4.0")
        3
        >>> liveset.StreamingDataset(path).attributes["licence"]
        'CC-BY-4.0'
    """
    chosen = {**(attributes or {}), **more}
    store = open_store(path)
    base = open_snapshot(store).index
    if not chosen:
        return base.version
    if not all(isinstance(name, str) for name in chosen):
        raise TypeError("the names of attributes must be text")
    for name, value in chosen.items():
        if not jsonleaf.is_exact([name, value]):
            raise TypeError(f"the attribute {name!r} is not JSON that reads back equal: {value!r}.")
    # A stamp alone would hide the keys of another program, which are found only where there is none.
    base = adopt_store(store, author=author) if base.edit is None else base
    return commit(store, SetAttributes(chosen), base, message=message, author=author).version


__all__ = ["set_attributes"]
