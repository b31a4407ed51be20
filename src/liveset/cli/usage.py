"""Wrong use of the command line, told as such."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from liveset.errors import DatasetError


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ``ValueError`` about an argument into a message with exit code 2; what is wrong with the dataset stays as it is."""
    try:
        yield
    except DatasetError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
