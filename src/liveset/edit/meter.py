"""How far a run or a commit is, with rate and time left, on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Meter", "Progress"]

# What is over sooner shows no bar (and does not pay for loading what draws it).
_SILENCE = 0.5


class Progress:
    """Counts inputs and samples; draws a bar on stderr if that is a terminal.

    Args:
        total: how many inputs there are, where that is known.
        enabled: whether anything may be shown.
        done: inputs that an earlier attempt finished.
        title: what the bar is called.
    """

    def __init__(self, total: int | None, *, enabled: bool, done: int = 0, title: str = "optimize") -> None:
        self.inputs = 0
        self.samples = 0
        self._total, self._done, self._title = total, done, title
        self.visible = enabled and sys.stderr is not None and sys.stderr.isatty()
        self._due = time.monotonic() + _SILENCE
        self._bar: Any = None
        self._task: Any = None

    def add(self, inputs: int, samples: int = 0) -> None:
        """Count inputs that are done and samples that they gave."""
        self.inputs += inputs
        self.samples += samples
        if not self.visible:
            return
        if self._bar is None:
            if time.monotonic() < self._due:
                return
            self._open()
        self._bar.update(self._task, completed=self._done + self.inputs, rate=self._rate())

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        if self.visible:
            self.close()
            sys.stderr.write(text + "\n")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _rate(self) -> str:
        seconds = time.monotonic() - self._due + _SILENCE
        return f"{self.inputs / seconds:,.0f}/s" if self.inputs > seconds else f"{seconds / max(self.inputs, 1):.1f} s each"

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn(self._title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, rate="")
        self._bar.start()


class Meter:
    """Shows the progress of a commit, which knows how much there is only when it is at work."""

    def __init__(self, title: str = "update: chunks") -> None:
        self._title = title
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` chunks are written."""
        if self._progress is None:
            self._progress = Progress(total, enabled=True, title=self._title)
        self._progress.add(done - self._progress.inputs)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.close()
