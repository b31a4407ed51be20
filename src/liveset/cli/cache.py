"""The commands for the cache: what it holds of which dataset, where it is, and emptying it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from liveset.cli.places import access_of
from liveset.cli.versions import AsJson, DryRun
from liveset.errors import NotFound
from liveset.storage.location import plain_url

if TYPE_CHECKING:
    from liveset.storage.cache import CacheInfo

cache = typer.Typer()
commands = typer.Typer(help="See and empty the cache of files of remote datasets.", no_args_is_help=True)
cache.add_typer(commands, name="cache")


@commands.command(
    epilog="Examples:  [bold]liveset cache info[/bold]   [bold]liveset cache info --json | jq '.datasets[].url'[/bold]   "
    "As JSON: path, limit, bytes, and for each of datasets url, folder, files, bytes, in_use, last_used"
)
def info(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Tell what the cache holds of each dataset, and how much of it is in use."""
    from liveset.storage.cache import ChunkCache

    found = ChunkCache(access_of(ctx).cache_dir).info()
    if as_json:
        typer.echo(json.dumps(_info_as_dict(found), indent=2))
    else:
        _print_info(found)


@commands.command(
    epilog="Examples:  [bold]liveset cache clear[/bold]   [bold]liveset cache clear s3://bucket/digits[/bold]   "
    "As JSON: dry_run, files, bytes, kept_files and kept_bytes (those in use)"
)
def clear(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Only this dataset, as info names it; all if not given.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove cached files that nobody uses just now; they are fetched again when they are wanted."""
    from liveset.storage.cache import ChunkCache

    held = ChunkCache(access_of(ctx).cache_dir)
    if url is not None and "://" in url:
        url = plain_url(url)
    if url is not None and not held.holds(url):
        raise NotFound(f"nothing of {url} is cached; liveset cache info names the datasets.")
    done = held.clear(url, dry_run=dry_run)
    if as_json:
        told = {"dry_run": dry_run, "files": done.files, "bytes": done.size, "kept_files": done.kept_files, "kept_bytes": done.kept_size}
        typer.echo(json.dumps(told))
        return
    kept = f"; {done.kept_files:,} in use {'would ' * dry_run}stay ({done.kept_size:,} bytes)" if done.kept_files else ""
    typer.echo(f"{'would remove' if dry_run else 'removed'} {done.files:,} file{'s' * (done.files != 1)}, {done.size:,} bytes{kept}")


@commands.command(epilog="Example:  [bold]du -sh $(liveset cache path)[/bold]")
def path(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Print where the cache is."""
    from liveset.storage.cache import cache_root

    root = cache_root(access_of(ctx).cache_dir)
    typer.echo(json.dumps({"path": root}) if as_json else root)


def _info_as_dict(found: CacheInfo) -> dict[str, object]:
    return {
        "path": found.root,
        "limit": found.limit,
        "bytes": found.size,
        "datasets": [
            {
                "url": place.url,
                "folder": place.folder,
                "files": place.files,
                "bytes": place.size,
                "in_use": place.in_use,
                "last_used": place.last_used.isoformat(timespec="seconds") if place.last_used is not None else None,
            }
            for place in found.places
        ],
    }


def _print_info(found: CacheInfo) -> None:
    typer.echo(f"{found.root}  {found.size:,} bytes, of at most {found.limit:,} unless a program says otherwise")
    for place in found.places:
        used = f", last used {place.last_used.astimezone():%Y-%m-%d %H:%M}" if place.last_used is not None else ""
        typer.echo(f"{place.url}  {place.files:,} file{'s' * (place.files != 1)}, {place.size:,} bytes, {place.in_use:,} in use{used}")
