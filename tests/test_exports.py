"""What `import liveset` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import liveset

HEAVY = {
    "numpy",
    "torch",
    "pyarrow",
    "polars",
    "typer",
    "rich",
    "msgspec",
    "zstandard",
    "xxhash",
    "cloudpickle",
    "PIL",
    "sklearn",
    "asyncio",
    "multiprocessing",
}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_all_names_are_reachable_and_sorted() -> None:
    names = list(liveset.__all__)
    assert len(names) == len(set(names))
    assert names == sorted(names)
    for name in names:
        assert getattr(liveset, name) is not None


def test_dir_tells_the_public_names() -> None:
    assert set(liveset.__all__) <= set(dir(liveset))


def test_nothing_else_is_public() -> None:
    """A fresh interpreter, so that no test's imports show; submodules are packages of the library and may be there."""
    told = run(
        "import liveset, types\n"
        "names = [n for n, v in vars(liveset).items() if not n.startswith('_') and not isinstance(v, types.ModuleType)]\n"
        "print(*sorted(set(names) - set(liveset.__all__) - {'annotations', 'Any', 'TYPE_CHECKING'}))"
    )
    assert told.split() == []


@pytest.mark.parametrize("name", liveset.__all__)
def test_names_say_that_they_are_public(name: str) -> None:
    value = getattr(liveset, name)
    if isinstance(value, (str, int, ModuleType)):
        return
    assert value.__module__ == "liveset", f"a traceback would show {value.__module__}.{name}"
    assert value.__doc__, f"{name} has no docstring"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = liveset.nonsense


def test_import_is_light() -> None:
    loaded = set(run("import sys, liveset; print(*{name.split('.')[0] for name in sys.modules})").split())
    assert loaded & HEAVY == set()


def test_errors_are_light_too() -> None:
    loaded = set(run("import sys, liveset.errors; print(*{name.split('.')[0] for name in sys.modules})").split())
    assert loaded & HEAVY == set()


def test_command_line_is_light() -> None:
    """`liveset --version` loads the command line, not what it works with."""
    code = (
        "import sys, liveset.cli\n"
        "try: liveset.cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    loaded = set(run(code).splitlines()[-1].split())
    assert loaded & {"numpy", "torch", "pyarrow", "PIL", "sklearn"} == set()


def test_errors_are_exported() -> None:
    from liveset import errors

    assert set(errors.__all__) <= set(liveset.__all__)


def test_version() -> None:
    from importlib.metadata import version

    assert liveset.__version__ == version("liveset")
