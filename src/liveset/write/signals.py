"""SIGTERM ends a run the way Ctrl-C does: files that no version names are removed, or kept for the checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM came."""


class _State:
    """What the main thread knows of SIGTERM; no other thread looks at it."""

    came = False
    holds = 0


_state = _State()


@contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM raise ``Terminated`` inside, and end the process by that signal afterwards, as if nobody had handled it.

    A second SIGTERM ends the process at once. Where the program has a handler of its own, or this is not the main thread, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:  # a process that was forked
            os.kill(os.getpid(), number)
            return
        _state.came = True
        if not _state.holds:
            raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Also where fn has swallowed the exception.
        if _state.came:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Let ``Terminated`` wait until the end of this: for a clean-up, or where Python drops what is raised, as it does while it forks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _state.came
    _state.holds += 1
    try:
        yield
    finally:
        _state.holds -= 1
    if _state.came and not before and not _state.holds:
        raise Terminated
