"""What goes to other processes, as bytes: functions by value, inputs and samples one by one."""

from __future__ import annotations

import importlib.machinery
import io
import logging
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle

_log = logging.getLogger("liveset")

# Shipping more than this to each worker is slow, and most often an accident.
LARGE = 10_000_000

_registry = threading.Lock()


def dump_function(fn: Any, rest: Any) -> bytes:
    """Return ``(fn, rest)`` as bytes that any process of this Python can load, whatever module ``fn`` is from.

    Raises:
        Exception: what pickling raised.
    """
    module = _hidden_module(fn)
    if module is None:
        return bytes(cloudpickle.dumps((fn, rest), protocol=5))
    with _registry:
        known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not known:
            cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps((fn, rest), protocol=5))
        finally:
            if not known:
                cloudpickle.unregister_pickle_by_value(module)


def warn_if_large(payload: bytes) -> None:
    """Warn when much is bound to a function."""
    if len(payload) > LARGE:
        _log.warning(
            "fn and what is bound to it take %.1f MB, which go to every worker process. "
            "Load large objects inside fn, or pass them as inputs.",
            len(payload) / 1e6,
        )


class Packer:
    """Pickles objects one after another, each at once: whoever made it may change it afterwards."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._pickler = cloudpickle.Pickler(self._file, protocol=5)

    def add(self, value: Any) -> None:
        """Append an object."""
        self._pickler.clear_memo()
        self._pickler.dump(value)

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._file.tell()

    def take(self) -> bytes:
        """Return the bytes and begin anew."""
        data = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return data


def unpack(data: bytes) -> Iterator[Any]:
    """Yield the objects that a Packer was given."""
    file = io.BytesIO(data)
    end = len(data)
    while file.tell() < end:
        yield pickle.load(file)  # noqa: S301 - bytes of our own processes


def unpack_all(data: bytes) -> Iterator[Any]:
    """Yield the members of the sequences that a Packer was given."""
    for part in unpack(data):
        yield from part


def pack_inputs(packer: Packer, items: Iterable[Any], *, whole: bool) -> bytes:
    """Return inputs as bytes for ``unpack_all``.

    Args:
        packer: what to use.
        items: the inputs.
        whole: they are a plain sequence, and none of them changes when the next one is read.
    """
    if whole:
        packer.add(items)
    else:
        for item in items:
            packer.add((item,))
    return packer.take()


def _hidden_module(fn: Any) -> ModuleType | None:
    """Return the module of a function if other processes would not find it by its name."""
    function = getattr(fn, "func", fn)
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name or "")
    if module is None or name == "__main__":
        return None
    return None if _can_be_found(name) else module


def _can_be_found(name: str) -> bool:
    """Return whether a fresh process with this ``sys.path`` can import a module."""
    path: list[str] | None = None
    known = ""
    for part in name.split("."):
        known = f"{known}.{part}" if known else part
        spec = _find_spec(known, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def _find_spec(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    # Not importlib.util.find_spec: that answers from sys.modules, which the other process does not share.
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (AttributeError, ImportError, ValueError):
            continue
        if spec is not None:
            return spec
    return None
