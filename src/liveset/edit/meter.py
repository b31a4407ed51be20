"""The progress of a long commit, on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Meter"]

# A commit that is over sooner shows nothing.
_SILENCE = 1.0


class Meter:
    """Draws a bar on stderr while chunks are written, if that is a terminal."""

    def __init__(self) -> None:
        self._visible = sys.stderr is not None and sys.stderr.isatty()
        self._due = time.monotonic() + _SILENCE
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` chunks are written."""
        if not self._visible or (self._bar is None and (time.monotonic() < self._due or done == total)):
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task("update: chunks", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
