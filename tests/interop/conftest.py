"""Fixtures that run the old tool (litData 0.2.76) as a black box in its own environment."""

from __future__ import annotations

import os
import pickle
import selectors
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


class OldTool:
    """A process with the old tool that answers requests one by one; the commands are the functions of ``old_tool.py``."""

    def __init__(self, python: Path, scratch: Path, *, pyarrow: bool) -> None:
        self._log = scratch / "old_tool.log"
        path = [] if pyarrow else [str(Path(__file__).parent / "without_pyarrow")]
        env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
        env |= {"HOME": str(scratch), "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "tests.interop.old_tool"], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def __getattr__(self, command: str) -> Any:
        def call(directory: object = None, **arguments: Any) -> Any:
            return self._ask(command, arguments if directory is None else {"directory": str(directory), **arguments})

        return call

    def _ask(self, command: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(pickle.dumps((command, arguments)))
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(TIMEOUT):
                    self.close()
                    pytest.fail(f"no answer from the old tool within {TIMEOUT} s; its log ends:\n{self._tail()}")
            answer = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError):
            pytest.fail(f"the old tool's process is gone; its log ends:\n{self._tail()}")
        if answer[0] == "failed":
            raise OldToolError(*answer[1:])
        return answer[1]

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
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
