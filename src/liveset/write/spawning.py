"""Starting worker processes in a way that works from scripts without a main guard, notebooks, ``python -c`` and stdin."""

from __future__ import annotations

import multiprocessing.spawn
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from liveset.write.signals import held

_patching = threading.Lock()


def start_process(context: BaseContext, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process that does not import the ``__main__`` module of this one.

    Nothing in it is needed, since functions go to workers by value; and importing it again would run a script without a main guard once
    more in every worker.
    """
    process: BaseProcess = context.Process(target=target, args=args, name=name)  # type: ignore[attr-defined]
    with _without_main(), _without_interrupts(), held():
        process.start()
    return process


@contextmanager
def _without_main() -> Iterator[None]:
    with _patching:
        original, thread = multiprocessing.spawn.get_preparation_data, threading.get_ident()

        def prepare(name: str) -> dict[str, Any]:
            data: dict[str, Any] = original(name)
            if threading.get_ident() == thread:  # processes that other threads start meanwhile get what they expect
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        multiprocessing.spawn.get_preparation_data = prepare
        try:
            yield
        finally:
            multiprocessing.spawn.get_preparation_data = original


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT; a child inherits that, so that Ctrl-C cannot hit it before it has said that it ignores the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """Leave Ctrl-C to the parent process, and let SIGTERM, which comes from it, end this one at once (called in a worker)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the handler of its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
