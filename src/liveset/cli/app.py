"""The commands. Each loads the library when it runs, so that help and version answer at once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import liveset
from liveset.cli.cache import cache
from liveset.cli.check import check
from liveset.cli.edits import edits
from liveset.cli.entities import AllowPickle, At, as_version, entities
from liveset.cli.places import Access, CacheDir, DatasetPath, OptionalPath, StorageOptions, parse_options
from liveset.cli.upkeep import upkeep
from liveset.cli.usage import usage_errors
from liveset.cli.versions import AsJson, versions

SAMPLES = "Samples and keys"

app = typer.Typer(
    name="liveset",
    help="Streaming training datasets that can be edited in place.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example:  [bold]liveset demo[/bold]",
)

for group, title in (
    (entities, SAMPLES),
    (edits, "Edits"),
    (versions, "Versions"),
    (upkeep, "Upkeep"),
    (cache, "Upkeep"),
    (check, "Checks"),
):
    for command in group.registered_commands:
        command.rich_help_panel = title
    for inner in group.registered_groups:
        inner.rich_help_panel = title
    app.add_typer(group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"liveset {liveset.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    storage_options: StorageOptions = None,
    cache_dir: CacheDir = None,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Streaming training datasets that can be edited in place."""
    del version  # its callback has told it
    ctx.obj = Access(parse_options(storage_options), cache_dir)


@app.command(epilog="Examples:  [bold]liveset demo[/bold]   [bold]liveset demo ./digits --workers 4[/bold]")
def demo(
    path: OptionalPath = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
) -> None:
    """Show the library at work on 1,797 handwritten digits: write, train, fix wrong labels by key, append, overwrite, look back."""
    from liveset.demo import run

    run(path, workers=workers, say=typer.echo)


@app.command(
    rich_help_panel=SAMPLES,
    epilog="Examples:  [bold]liveset info ./digits[/bold]   [bold]liveset info ./digits --json | jq .samples[/bold]",
)
def info(path: DatasetPath, version: At = None, as_json: AsJson = False) -> None:
    """Tell samples, chunks, bytes, schema and versions."""
    from liveset.cli.show import info_as_dict, print_info

    found = liveset.StreamingDataset(path, version=as_version(version)).info()
    if as_json:
        typer.echo(json.dumps(info_as_dict(found), indent=2))
    else:
        print_info(found)


@app.command(
    rich_help_panel=SAMPLES, epilog="Examples:  [bold]liveset head ./digits[/bold]   [bold]liveset head ./digits -n 10 --json[/bold]"
)
def head(
    path: DatasetPath,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many samples.")] = 3,
    fields: Annotated[
        list[str] | None, typer.Option("--field", help="Only this field; may be given several times.", show_default=False)
    ] = None,
    version: At = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Print the first samples; with --json, one line each, long arrays and bytes told by shape and size."""
    from liveset.cli.show import as_json_value, print_sample

    with usage_errors():
        dataset = liveset.StreamingDataset(path, version=as_version(version), fields=fields, allow_pickle=allow_pickle)
    for position, sample in enumerate(dataset[:count]):
        if as_json:
            typer.echo(json.dumps(as_json_value(sample), ensure_ascii=False))
        else:
            print_sample(position, sample)
