"""Where datasets are, on the command line: paths and URLs, together with the global options that say how to reach them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from liveset.cli.usage import reworded
from liveset.storage import open_store
from liveset.storage.location import Place, parse_location

__all__ = [
    "Access",
    "CacheDir",
    "CopyFrom",
    "CopyTo",
    "DatasetPath",
    "OptionalPath",
    "OtherCopy",
    "StorageOptions",
    "access_of",
    "parse_options",
    "reached",
]


@dataclass(frozen=True)
class Access:
    """What the global options say."""

    options: Mapping[str, Any] | None = None
    cache_dir: Path | None = None


def parse_options(text: str | None, option: str = "--storage-options") -> Mapping[str, Any] | None:
    """Return the options in a JSON text or a file of it; messages hold nothing of it, since there are secrets in it."""
    if text is None:
        return None
    what = "its value"
    if not text.lstrip().startswith("{"):
        what = text
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise typer.BadParameter(
                f"it is neither a JSON object nor the name of a file that holds one ({reason}).", param_hint=option
            ) from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f'{what} is not a JSON object, such as {{"endpoint_url": "http://localhost:9000"}}.', param_hint=option)
    return found


def reached(place: Place, access: Access) -> Place:
    """Return a place together with how to reach it, after a look at whether that makes sense."""
    place = replace(place, storage_options=access.options, cache_dir=access.cache_dir)
    try:
        open_store(place)
        if place.storage_options and "://" in place.url and not place.url.startswith("file://"):
            from liveset.storage.requests import open_object_store

            open_object_store(parse_location(place.url, place.storage_options))
    except ValueError as error:
        raise typer.BadParameter(reworded(str(error))) from None  # what it was raised from may show the options
    return place


def access_of(ctx: typer.Context) -> Access:
    """Return what the global options of this call say."""
    access = ctx.find_root().obj
    return access if isinstance(access, Access) else Access()


def _place(ctx: typer.Context, place: Place | None) -> Place | None:
    return reached(place, access_of(ctx)) if place is not None else None


def _parse(text: str) -> Place:
    return Place(text)


DatasetPath = Annotated[
    Place, typer.Argument(metavar="PATH", help="Folder or URL of the dataset.", parser=_parse, callback=_place, show_default=False)
]
OptionalPath = Annotated[
    Place | None,
    typer.Argument(
        metavar="PATH",
        help="Where to write; a temporary directory, removed afterwards, if not given.",
        parser=_parse,
        callback=_place,
        show_default=False,
    ),
]
OtherCopy = Annotated[
    Place | None,
    typer.Option(
        "--copy", metavar="PATH", help="Another copy of the dataset; it is only read.", parser=_parse, callback=_place, show_default=False
    ),
]
CopyFrom = Annotated[
    Place, typer.Argument(metavar="SRC", help="Folder or URL of the dataset.", parser=_parse, callback=_place, show_default=False)
]
CopyTo = Annotated[
    Place,
    typer.Argument(
        metavar="DST", help="Folder or URL, new or empty, or with a copy that was broken off.", parser=_parse, show_default=False
    ),
]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON|FILE",
        help="How to reach URLs: a JSON object, or better, as it may hold secrets, a file of one.",
        show_default=False,
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Where files of URLs are kept; the usual folder if not given.", show_default=False),
]
