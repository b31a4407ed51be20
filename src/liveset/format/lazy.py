"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["lazy"]

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - used like ``property``
    """Like ``functools.cached_property``, which in Python 3.11 holds a lock that all objects share while it computes.

    A process that is forked meanwhile would wait for that lock for ever, and one thread would wait for the disk of another. Here two
    threads may compute the same value; the one that is done first is kept.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> lazy[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> lazy[T] | T:
        if owner is None:
            return self
        value: T = owner.__dict__.setdefault(self._name, self._compute(owner))
        return value
