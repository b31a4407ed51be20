"""Imports only go up the list of layers in docs/architecture.md, lazy and type-only ones included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "liveset"

# The layer of one pinned version has several modules and no folder.
SNAPSHOT = {"snapshot", "keystore", "parquetkeys", "lease"}
ANY = {"errors", "format", "storage", "snapshot", "edit", "read", "write", "tools", "cli", "demo"}
MAY_IMPORT = {
    "errors": set[str](),
    "format": {"errors"},
    "storage": {"errors", "format"},
    "snapshot": {"errors", "format", "storage"},
    "edit": {"errors", "format", "storage", "snapshot"},
    "read": {"errors", "format", "storage", "snapshot"},
    "write": {"errors", "format", "storage", "snapshot", "edit", "read"},
    "tools": ANY,
    "cli": ANY,
    "demo": ANY,
    "testing": ANY,
}
# The package root only forwards names; who may go through it is limited to the outermost layers, or the root would tie all layers together.
MAY_IMPORT_ROOT = {"tools", "cli", "demo", "testing"}
# Code that does no I/O and starts no threads or processes must not be able to. (`threading` is not listed: its locks and locals are fine.)
PURE = {"errors", "format"}
IMPURE_MODULES = set("asyncio concurrent fcntl multiprocessing os shutil socket subprocess tempfile urllib".split())


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer(module: str) -> str:
    """``liveset.format.index`` -> ``format``; the package root itself has the layer ``""``."""
    name = module.split(".")[1] if "." in module else ""
    return "snapshot" if name in SNAPSHOT else "cli" if name == "__main__" else name


def module_name(path: Path) -> str:
    parts = ("liveset", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the file, at whatever depth and also as text for ``importlib``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            if node.module == "liveset" or (SOURCE / Path(*node.module.split(".")[1:])).is_dir():
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def own_layers(path: Path) -> Iterator[tuple[int, str]]:
    """(line, layer of liveset) for the imports that stay inside the package."""
    for line, name in imports(path):
        if name == "liveset" or name.startswith("liveset."):
            target = layer(name)
            top = name.split(".")[1] if "." in name else ""
            if target and not (SOURCE / top).is_dir() and not (SOURCE / f"{top}.py").is_file():
                target = ""  # a public name, taken through the package root
            yield line, target


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_imports_go_up_only(path: Path) -> None:
    here = layer(module_name(path))
    if here == "":
        return  # the root forwards every public name, lazily; test_exports.py holds that
    assert here in MAY_IMPORT, f"{here} is in no layer: give it a row in docs/architecture.md and in this test"
    for line, target in own_layers(path):
        if target == here:
            continue
        if target == "":
            assert here in MAY_IMPORT_ROOT, f"{path}:{line}: {here} imports the package root"
        else:
            assert target in MAY_IMPORT[here], f"{path}:{line}: {here} must not import {target}"


@pytest.mark.parametrize("path", [path for path in modules() if layer(module_name(path)) in PURE], ids=module_name)
def test_pure_layers_cannot_do_io(path: Path) -> None:
    for line, name in imports(path):
        if (module_name(path), name) == ("liveset.format.locks", "os"):
            continue  # to be told of a fork
        assert name.split(".")[0] not in IMPURE_MODULES, f"{path}:{line}: {name} in a layer without I/O and threads"


def test_modules_of_a_layer_have_no_import_cycles() -> None:
    names = {module_name(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        if name == "liveset":
            continue
        targets = {target for _, target in imports(path) if target in names}
        # `from liveset.format import index` names the package on the way to its module; that is not an edge to its __init__
        graph[name] = {target for target in targets if target not in {name, "liveset"} and not name.startswith(f"{target}.")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_modules_stay_short() -> None:
    too_long = {module_name(path): n for path in modules() if (n := path.read_text(encoding="utf-8").count("\n")) > 600}
    assert too_long == {}


def test_the_architecture_page_has_the_same_layers() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| layer |", 1)[1].split("\n\n", 1)[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)/?`", line.split("|")[1] if line.startswith("|") else "")}
    assert told == set(MAY_IMPORT)


def test_no_lock_of_the_standard_library_is_held_while_a_value_is_computed() -> None:
    """In Python 3.11 ``functools.cached_property`` holds one that forked children would wait for."""
    using = [path.name for path in SOURCE.rglob("*.py") if "import cached_property" in path.read_text()]
    assert using == []
