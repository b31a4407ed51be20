"""Datasets on the object stores of the tests."""

from __future__ import annotations

from typing import Any

from liveset.storage import Place, Store, open_store
from tests.support.services import RemoteFolder


def place_at(folder: RemoteFolder, cache_dir: Any = False, **options: Any) -> Place:
    """How the library reaches a folder; without a cache unless one is given."""
    return Place(folder.url, storage_options=folder.options | options, cache_dir=cache_dir)


def store_at(folder: RemoteFolder, cache_dir: Any = False, **options: Any) -> Store:
    return open_store(place_at(folder, cache_dir, **options))
