"""The client of this process for each place.

The runtime of the object store client does not survive a fork. A process that was forked after its parent had sent requests asks a helper
process instead, which is started anew and so has none of its parent's threads; all others send their requests themselves.
"""

from __future__ import annotations

import os
import threading

from liveset.storage.helper import HelperRequests
from liveset.storage.location import Location
from liveset.storage.requests import DirectRequests, Requests, runtime_used

__all__ = ["connect"]

_lock = threading.Lock()
_clients: dict[str, Requests] = {}
_kept: list[Requests] = []
_forked_after_use = False


def connect(location: Location) -> Requests:
    """The client of this process for a place."""
    client = _clients.get(location.identity)
    return client if client is not None else _new_client(location)


def _new_client(location: Location) -> Requests:
    with _lock:
        if (client := _clients.get(location.identity)) is None:
            client = HelperRequests(location) if _forked_after_use else DirectRequests(location)
            _clients[location.identity] = client
        return client


def _after_fork() -> None:
    global _forked_after_use, _lock
    _lock = threading.Lock()
    _forked_after_use = _forked_after_use or runtime_used()
    # Closing a client of the parent would wait for threads that do not exist here.
    _kept.extend(_clients.values())
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
