"""Wrong use of the command line, told as such."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from liveset.errors import DatasetError

# What the library calls its arguments and functions, and what they are here.
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\b(?:liveset\.)?build_keys_index\((?:path|'[^']*'|\"[^\"]*\"), key_fn\)", "liveset keys build PATH --field NAME"),
    (r"\b(?:liveset\.)?build_keys_index(?:\(\.\.\., overwrite=True\))?", "liveset keys build PATH --field NAME --overwrite"),
    (r"\b(move|overwrite|quarantine|force)=True\b", r"--\1"),
    (r"\ballow_pickle=True\b", "--allow-pickle"),
    (r"\b(absent|copy)=", r"--\1"),
    (r"(?<= )key=(?=\.)", "--key"),
    (r"\bfields=(?= names )", "--field"),
    (r"\bstorage_options=(\{[^}]*\})", lambda found: f"--storage-options '{found[1].replace('True', 'true')}'"),
    (r"\bstorage_options\b", "--storage-options"),
)


def reworded(text: str) -> str:
    """Return a message of the library in words of the command line."""
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text)
    return text


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ``ValueError`` about an argument into a message with exit code 2; what is wrong with the dataset stays as it is."""
    try:
        yield
    except DatasetError:
        raise
    except ValueError as error:
        raise typer.BadParameter(reworded(str(error))) from error
