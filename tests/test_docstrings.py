"""The examples in the docstrings are run, each with a dataset of its own."""

from __future__ import annotations

import doctest
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.read.keys import KeyView
from liveset.read.view import MapView
from tests.support.foreign import make_foreign

PUBLIC = {**{name: getattr(liveset, name) for name in liveset.__all__}, "KeyView": KeyView, "MapView": MapView}
NEEDS = {"MapView": "torch", "KeyView.to_polars": "polars"}


def docstrings() -> dict[str, str]:
    """Return docstrings with examples by name: of what is exported and of its public members, inherited ones too."""
    found = {}
    for name, value in PUBLIC.items():
        members = {f"{name}.{member}": getattr(value, member) for member in dir(value) if not member.startswith("_")}
        for path, each in {name: value, **(members if inspect.isclass(value) else {})}.items():
            # What has no docstring of its own would show that of its type.
            if (inspect.isroutine(each) or inspect.isclass(each) or isinstance(each, property)) and ">>>" in (inspect.getdoc(each) or ""):
                found[path] = inspect.getdoc(each) or ""
    return found


EXAMPLES = docstrings()


def play(i: int) -> dict[str, Any]:
    return {"id": f"play-{i}", "square": i * i}


def prepare(path: Path, name: str) -> None:
    """What the examples call ``path``: two versions with keys; without keys, of another program, or damaged, where that is the point."""
    key = None if name == "build_keys_index" else "id"
    liveset.optimize(play, range(100), path, num_workers=1, key_fn=key)
    if name == "adopt":
        make_foreign(path)
    else:
        liveset.optimize(play, range(100, 120), path, num_workers=1, mode="append")
    if name == "repair":
        shutil.copytree(path, path.parent / "backup")
        next(path.glob("chunk-*")).unlink()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], exc_type=ImportError)
    path = tmp_path / "plays"
    prepare(path, name)
    names = {"liveset": liveset, "Schema": liveset.Schema, "tmp": tmp_path, "path": path, "backup": tmp_path / "backup"}
    names["ds"] = liveset.StreamingDataset(path)
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, None)
    told: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    if runner.run(example, out=told.append).failed:
        pytest.fail("".join(told), pytrace=False)


def test_every_function_has_an_example() -> None:
    functions = {name for name in liveset.__all__ if inspect.isfunction(getattr(liveset, name))}
    assert functions
    assert functions <= EXAMPLES.keys()
