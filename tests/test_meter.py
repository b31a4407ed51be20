"""The progress bar: drawn on a terminal alone, and only for what takes its time."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest


def shown(script: str) -> bytes:
    """What a program writes to its stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert process.wait() == 0
    return found


@pytest.mark.parametrize("silence", [0, 60])
def test_a_commit_tells_its_chunks(silence: int) -> None:
    told = shown(
        f"from liveset.edit import meter; meter._SILENCE = {silence}; bar = meter.Meter(); bar.close()\n"
        "for done in (1, 2, 3): bar(done, 4)\n"
        "bar.close(); bar.close()"
    )
    if silence:
        assert told == b""
    else:
        assert b"update: chunks" in told
        assert re.search(rb"3/4", told)


def test_nothing_is_drawn_without_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from liveset.edit import meter

    monkeypatch.setattr(meter, "_SILENCE", 0)
    bar = meter.Meter()
    bar(1, 2)
    bar.close()
    assert capfd.readouterr() == ("", "")
