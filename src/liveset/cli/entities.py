"""The commands for entities: read a sample by its key, and see to the keys themselves."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

import liveset
from liveset.cli.places import DatasetPath
from liveset.cli.usage import usage_errors
from liveset.cli.versions import AsJson, Author, DryRun, Message, Yes, ask, parse_version

if TYPE_CHECKING:
    from liveset.format.keytable import Key
    from liveset.snapshot import Version

entities = typer.Typer()
keys = typer.Typer(help="Give a dataset keys, list them, tell what they take.", no_args_is_help=True)
entities.add_typer(keys, name="keys")

KeyText = Annotated[
    str, typer.Argument(metavar="KEY", help="Key of the sample. Write -- before a negative number: get PATH -- -7", show_default=False)
]
AsInteger = Annotated[bool, typer.Option("--int", help="The key is an integer: refuse a dataset whose keys are text.")]
At = Annotated[
    str | None,
    typer.Option("--version", metavar="VERSION", help="Number, tag or time of a version instead of the newest.", show_default=False),
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled objects. Only for data whose origin you trust.")]


@entities.command(
    epilog="Examples:  [bold]liveset get ./digits digit-0042[/bold]   [bold]liveset get ./digits digit-0042 --json | jq .label[/bold]   "
    "[bold]liveset get ./digits digit-0042 --version 1[/bold]"
)
def get(
    path: DatasetPath,
    key: KeyText,
    integer: AsInteger = False,
    fields: Annotated[
        list[str] | None, typer.Option("--field", help="Only this field; may be given several times.", show_default=False)
    ] = None,
    version: At = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """Print the sample with a key; with --json on one line, long arrays and bytes told by shape and size."""
    from liveset.cli.show import as_json_value, print_sample

    with usage_errors():
        dataset = liveset.StreamingDataset(path, version=as_version(version), fields=fields, allow_pickle=allow_pickle)
    plain = parse_key(key, dataset.keys.kind, integer)
    sample = dataset.get_by_key(plain)
    if as_json:
        typer.echo(json.dumps(as_json_value(sample), ensure_ascii=False))
    else:
        print_sample(plain, sample)


@keys.command(
    epilog="Examples:  [bold]liveset keys build ./digits --field id[/bold]   "
    "[bold]liveset keys build ./digits --field meta.id --dry-run[/bold]   "
    "[bold]liveset keys build ./digits --field uid --overwrite --yes[/bold]"
)
def build(
    path: DatasetPath,
    field: Annotated[str, typer.Option("--field", help="The field that holds the key: text or integers, each once.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the keys that the dataset has.")] = False,
    shards: Annotated[int, typer.Option("--shards", min=1, help="Files into which the keys are published for other tools.")] = 1,
    allow_pickle: AllowPickle = False,
    message: Message = "",
    author: Author = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Give every sample a key, in one commit; the samples stay as they are. With --dry-run the keys are read and checked only."""
    from liveset.keystore import open_keys
    from liveset.snapshot import open_snapshot
    from liveset.storage import open_store
    from liveset.tools.keys import build_keys

    store = open_store(path)
    if overwrite and not dry_run and not yes and open_keys(open_snapshot(store)) is not None:
        ask(f"Replace the keys of {path} by the field {field}?")
    try:
        count, kind, version = build_keys(
            store, field, overwrite, shards, allow_pickle, verbose=not as_json, message=message, author=author, dry_run=dry_run
        )
    except TypeError as error:  # text and integers among the keys
        raise liveset.SampleError(str(error), field=field) from error
    except liveset.KeysExist as error:
        raise liveset.KeysExist(f"{path} has keys already; --overwrite builds them again.") from error
    told = "text" if kind is str else "int"
    if as_json:
        typer.echo(json.dumps({"field": field, "keys": count, "type": told, "version": version, "dry_run": dry_run}))
    else:
        typer.echo(f"{'would build' if dry_run else f'version {version}:'} {count:,} keys ({told}) from the field {field}")


@keys.command(
    "list", epilog="Examples:  [bold]liveset keys list ./digits -n 5[/bold]   [bold]liveset keys list ./digits | grep -c digit-00[/bold]"
)
def list_(
    path: DatasetPath,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many keys.", show_default="all")] = 1 << 62,
    version: At = None,
    as_json: AsJson = False,
) -> None:
    """Print the keys in the order of the samples, one on each line."""
    from itertools import islice

    for key in islice(liveset.StreamingDataset(path, version=as_version(version)).keys, count):
        typer.echo(json.dumps(key, ensure_ascii=False) if as_json else key)


@keys.command(epilog="Examples:  [bold]liveset keys stats ./digits[/bold]   [bold]liveset keys stats ./digits --json | jq .keys[/bold]")
def stats(path: DatasetPath, version: At = None, as_json: AsJson = False) -> None:
    """Tell number and type of the keys, and the files that hold them."""
    told = _stats(path, as_version(version))
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    rows = {
        "keys": f"{told['keys']:,}",
        "type": told["type"],
        "field": told["field"] or "not remembered",
        "tables": f"{told['tables']:,} with {told['bytes']:,} bytes" if told["tables"] else "none: another program published the keys",
        "published": "not known: a web server lists no files"
        if told["published"] is None
        else f"{told['published']:,} Parquet files with {told['published_bytes']:,} bytes",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<10} {value}")


def as_version(text: str | None) -> Version | None:
    """Return what --version names."""
    return None if text is None else parse_version(text)


def parse_key(text: str, kind: type, integer: bool) -> Key:
    """Return a key of the type that the keys of the dataset have."""
    if kind is not int and not integer:
        return text
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise typer.BadParameter(f"{text!r} is no integer{', and the keys of this dataset are integers' if kind is int else ''}.")
    if not -(1 << 63) <= int(text) < 1 << 63:
        raise typer.BadParameter(f"{text} does not fit into 64 bits, as all integer keys do.")
    if kind is str:
        raise liveset.KeyNotFound(f"{text}: the keys of this dataset are text, not int.", key=int(text))
    return int(text)


def _stats(path: Any, version: Version | None) -> dict[str, Any]:
    from liveset.snapshot import open_snapshot
    from liveset.storage import has_listing, open_store

    dataset = liveset.StreamingDataset(path, version=version)
    store = open_store(path)
    index = open_snapshot(store, dataset.version).index
    files = index.edit.key_files if index.edit is not None else None
    tables = files.tables if files is not None else ()
    if lists := has_listing(store):
        sizes = {entry.name: entry.size for entry in store.list("_liveset/keys/")}
        published = [entry.size for entry in store.list("keys") if entry.name.endswith(".parquet")]
    else:
        sizes, published = dict(files.sizes) if files is not None else {}, []
    return {
        "version": dataset.version,
        "keys": len(dataset.keys),
        "type": "text" if dataset.keys.kind is str else "int",
        "field": index.layout_of_keys.get("field"),
        "tables": len(tables),
        "bytes": sum(sizes.get(name, 0) for name in tables),
        "published": len(published) if lists else None,
        "published_bytes": sum(published) if lists else None,
    }
