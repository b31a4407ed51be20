"""Where the bytes live: the only package that touches the disk."""

from __future__ import annotations

import os

from liveset.storage.store import HEAD, PRIVATE, VERSIONS, Buffer, Entry, Head, Store, Swap, Tag, as_buffers, check_name, version_name

__all__ = [
    "HEAD",
    "PRIVATE",
    "VERSIONS",
    "Buffer",
    "Entry",
    "Head",
    "Store",
    "Swap",
    "Tag",
    "as_buffers",
    "check_name",
    "open_store",
    "version_name",
]


def open_store(path: str | os.PathLike[str]) -> Store:
    """Opens the place at ``path``; nothing is created before the first write. ``NotImplementedError`` for URLs."""
    from liveset.storage.local import LocalStore

    text = os.fspath(path)
    scheme, colon, rest = text.partition("://")
    if colon and scheme != "file":
        raise NotImplementedError(f"{text!r} is a URL: liveset requires a local dataset directory so far, not {scheme}://.")
    return LocalStore(rest if colon else text)
