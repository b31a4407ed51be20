"""The python blocks of the README and of docs/ are run, page by page, in one namespace per page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.services import RemoteFolder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.is_file()]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
BUCKET = "python bucket"
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


def script(page: Path, mark: str = "python") -> str:
    """The page's runnable blocks, each on its own lines, so that a traceback names the line of the page.

    Blocks marked ``python`` run, and those marked ``python bucket`` where there is an object store; ``python no-run`` marks one that only
    shows an idea, ``py`` or ``text`` never run.
    """
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if block["info"].strip() == mark:
            start = text.count("\n", 0, block.start("body"))
            for offset, line in enumerate(block["body"].splitlines()):
                lines[start + offset] = line.removeprefix(block["indent"])
    return "\n".join(lines)


def runnable(page: Path) -> bool:
    # docs/architecture.md shows interfaces, not programs
    return page.name != "architecture.md" and bool(script(page).strip())


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    run(page, script(page), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if script(page, BUCKET).strip()], ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_about_buckets_run(page: Path, tmp_path: Path, on_seaweedfs: RemoteFolder) -> None:
    """As they stand, with credentials from the environment; only the bucket has another name."""
    options = on_seaweedfs.options
    names = {
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        "LIVESET_CACHE_DIR": str(tmp_path / "cache"),
    }
    run(page, script(page, BUCKET).replace("s3://my-bucket", on_seaweedfs.url), tmp_path, **names)


def run(page: Path, text: str, tmp_path: Path, **environment: str) -> None:
    # A file of its own, since worker processes import the main script again; named after the page for readable tracebacks
    program = tmp_path / f"{page.stem.lower().replace('-', '_')}_page.py"
    program.write_text(text, encoding="utf-8")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path / "work",
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{page.relative_to(ROOT)} (line numbers are those of the page)\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / link["target"]).exists(), f"{page.relative_to(ROOT)}: {link['target']}"
