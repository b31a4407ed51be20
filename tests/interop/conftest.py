"""Fixtures that run the old tool (litData 0.2.76) as a black box in its own environment."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 120


class OldToolError(Exception):
    """The old tool raised; ``kinds`` names the classes of its exception."""

    def __init__(self, kinds: list[str], message: str) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = kinds


class NoAnswerError(Exception):
    """The old tool's process hangs or is gone."""


class OldTool:
    """A process with the old tool that answers requests one by one; the commands are the functions of ``old_tool.py``.

    A process that hangs or ends takes only the request with it that it was at: the next one goes to a new process.
    """

    def __init__(self, python: Path, scratch: Path, *, pyarrow: bool) -> None:
        self._python = python
        self._log = scratch / "old_tool.log"
        path = [] if pyarrow else [str(Path(__file__).parent / "without_pyarrow")]
        env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
        self._env = env | {"HOME": str(scratch), "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __getattr__(self, command: str) -> Any:
        def call(directory: object = None, **arguments: Any) -> Any:
            return self._ask(command, arguments if directory is None else {"directory": str(directory), **arguments})

        return call

    def each(self, command: str, grids: list[dict[str, Any]], **arguments: Any) -> list[Any]:
        """Return what a reading command answers for each of the grids; where its worker processes hang, ask once more."""
        answers = []
        for grid in grids:
            try:
                answers.append(self._ask(command, {**arguments, "grid": grid}))
            except NoAnswerError:
                answers.append(self._ask(command, {**arguments, "grid": grid}))
        return answers

    def _ask(self, command: str, arguments: dict[str, Any]) -> Any:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pickle.dumps((command, arguments)))
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(TIMEOUT):
                    raise NoAnswerError(f"no answer from the old tool within {TIMEOUT} s; its log ends:\n{self._tail()}")
            answer = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError):
            self.close()
            raise NoAnswerError(f"the old tool's process is gone; its log ends:\n{self._tail()}") from None
        except BaseException:  # whatever ends the wait: its answer would be taken for that of the next request
            self.close()
            raise
        if answer[0] == "failed":
            raise OldToolError(*answer[1:])
        return answer[1]

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(self._python), "-m", "tests.interop.old_tool"], cwd=ROOT, env=self._env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _python() -> Path:
    python = Path(os.environ.get("LIVESET_LITDATA_PYTHON") or ROOT / ".venv-litdata" / "bin" / "python")
    if not python.exists():
        pytest.fail(f"{python} is missing: run `make env-litdata`, which installs the old tool in an environment of its own")
    return python


@pytest.fixture(scope="session")
def old_tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldTool]:
    tool = OldTool(_python(), tmp_path_factory.mktemp("old_tool"), pyarrow=True)
    yield tool
    tool.close()


@pytest.fixture(scope="session")
def old_tool_without_pyarrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldTool]:
    tool = OldTool(_python(), tmp_path_factory.mktemp("old_tool_without_pyarrow"), pyarrow=False)
    yield tool
    tool.close()
