"""Where the bytes live: the only package that touches the disk and the network."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from liveset.storage.location import Place, parse_location
from liveset.storage.store import HEAD, PRIVATE, VERSIONS, Buffer, Entry, Head, Store, Swap, Tag, as_buffers, check_name, version_name
from liveset.storage.throttle import throttled_requests

if TYPE_CHECKING:
    from liveset.storage.cached import Source

__all__ = [
    "HEAD",
    "PRIVATE",
    "VERSIONS",
    "Buffer",
    "Entry",
    "Head",
    "Place",
    "Store",
    "Swap",
    "Tag",
    "as_buffers",
    "cache_limit",
    "check_name",
    "check_room",
    "forget_cached",
    "has_listing",
    "has_ranges",
    "is_inside",
    "open_store",
    "throttled_requests",
    "version_name",
]


def open_store(path: str | os.PathLike[str]) -> Store:
    """Opens the place at ``path``: nothing is created before the first write, and no request sent before the first read.

    Args:
        path: a folder, ``file://``, the URL of a place on an object store or a web server, ``local:PATH`` (a folder that is read like a
            remote store, through the cache), or a ``Place``, which says how to reach it.
    """
    from liveset.storage.local import LocalSource, LocalStore

    text = os.fspath(path)
    if re.match(r"(s3a?|r2|gs|gcs|az|azure|abfs|https?):/?(?!/)", text):
        raise ValueError(f"{text!r} is neither a path nor a URL: two slashes follow the colon of a URL, and ./ makes it a path.")
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    if text.startswith("local:"):
        folder = text.removeprefix("local:").removeprefix("//") or "."
        source: Source = LocalSource(folder)
        place = source.url
    elif "://" in text:
        from liveset.storage.remote import RemoteStore

        wanted = path if isinstance(path, Place) else Place(text)
        location = parse_location(text, wanted.storage_options, wanted.session_options)
        source, place = RemoteStore(location), location.place
    else:
        return LocalStore(text)
    return _cached(source, place, path)


def _cached(source: Source, place: str, path: str | os.PathLike[str]) -> Store:
    wanted = path if isinstance(path, Place) else Place("")
    if wanted.cache_dir is False:
        return source
    from liveset.storage.cache import ChunkCache, cache_root, check_root
    from liveset.storage.cached import CachedStore

    root = None if wanted.cache_dir is None or wanted.cache_dir is True else os.fspath(wanted.cache_dir)
    folder = cache_root(root)
    if place.startswith("local:"):
        check_root(folder, place.removeprefix("local:"))
    if os.path.lexists(os.path.join(folder, HEAD)):
        raise ValueError(f"{folder} is a dataset, and no folder for a cache: choose another one with cache_dir=.")
    return CachedStore(source, ChunkCache(root, wanted.max_cache_size), place)


def cache_limit(store: Store) -> int | None:
    """Return how many bytes the cache of a store may hold; None for a store without one."""
    if store.remote:
        from liveset.storage.cached import CachedStore

        if isinstance(store, CachedStore):
            return store.cache.limit
    return None


def forget_cached(store: Store) -> None:
    """Remove what the cache of this machine holds of a store."""
    if store.remote:
        from liveset.storage.cached import CachedStore

        if isinstance(store, CachedStore):
            store.forget()


def check_room(store: Store, largest: int) -> None:
    """Refuse a store whose cache cannot hold a file of ``largest`` bytes: ``ValueError`` with the smallest size that works."""
    if (limit := cache_limit(store)) is not None:
        from liveset.storage.cache import check_limit

        check_limit(limit, largest)


def has_listing(store: Store) -> bool:
    """Tell whether the files of a place can be listed; a web server only hands out what is asked for by name."""
    return not store.url.lower().startswith(("http://", "https://"))


def has_ranges(store: Store) -> bool:
    """Tell whether parts of a file can be had without the rest; some web servers only hand out whole files."""
    if has_listing(store):
        return True
    from liveset.storage.cached import CachedStore
    from liveset.storage.remote import RemoteStore

    source = store.source if isinstance(store, CachedStore) else store
    return not isinstance(source, RemoteStore) or source.has_ranges()


def is_inside(url: str, folder: str) -> bool:
    """Tell whether a place (``Store.url``) is a folder, or lies in it."""
    if "://" in url or "://" in folder:
        return f"{url}/".startswith(f"{folder}/")
    inner, outer = (os.path.realpath(path.removeprefix("local:")) for path in (url, folder))
    return os.path.commonpath([inner, outer]) == outer
