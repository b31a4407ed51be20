"""The commands that edit: single samples as JSON, many of them from a table, and samples that go."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, TypeAlias

import typer

import liveset
from liveset.cli.entities import AllowPickle, AsInteger, KeyText, parse_key
from liveset.cli.places import DatasetPath
from liveset.cli.usage import usage_errors
from liveset.cli.versions import AsJson, Author, DryRun, Message

if TYPE_CHECKING:
    from liveset.cli.values import Change
    from liveset.edit.report import UpdatePreview, UpdateResult
    from liveset.edit.session import DatasetUpdate
    from liveset.format.keytable import Key
    from liveset.storage import Place

# Every edit is a new version, which `liveset restore` takes back: nothing here asks, or needs --yes.
edits = typer.Typer()

Stage: TypeAlias = "Callable[[DatasetUpdate], Sequence[Change]]"
"""Stages what a command edits, and returns the changed fields if that is a single sample."""


def _session(name: str | None) -> str | None:
    if name == "":  # of an unset variable of the shell, it would be every job's
        raise typer.BadParameter("it is empty.")
    return name


SAMPLE = typer.Option("--json", metavar="SAMPLE", help="The whole sample as JSON; - reads it from stdin.", show_default=False)
Session = Annotated[
    str | None,
    typer.Option(
        "--session", callback=_session, help="Name of the work: a job that is run again does not do it again.", show_default=False
    ),
]
KeyTexts = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY...", help="Keys of samples. Write -- before negative numbers: PATH -- -7", show_default=False),
]
KeysFrom = Annotated[
    str | None, typer.Option("--keys-from", metavar="FILE", help="More keys, one on each line; - reads stdin.", show_default=False)
]
# Where --json gives a sample
PrintJson = Annotated[bool, typer.Option("--as-json", help="Print JSON, for programs.")]


_JSON = (
    "   As JSON: (key,) dry_run, version, keys, inserted, deleted, chunks, bytes, milliseconds; in a dry run bytes are those to rewrite, "
    "version and milliseconds null"
)


class Missing(StrEnum):
    """What to do with keys that the dataset does not have."""

    ERROR = "error"
    SKIP = "skip"
    INSERT = "insert"


class Format(StrEnum):
    """What a table holds."""

    CSV = "csv"
    JSONL = "jsonl"
    JSON = "json"
    PARQUET = "parquet"
    ARROW = "arrow"


class _How(NamedTuple):
    """Options that all edits have."""

    message: str
    author: str
    session: str | None
    dry_run: bool
    as_json: bool
    allow_pickle: bool = False


@edits.command(
    "set",
    epilog="""Examples:  [bold]liveset set ./plays play-3 --json '{"id": "play-3", "label": null}' --dry-run[/bold]   """
    "[bold]liveset set ./plays play-3 --json - < play-3.json[/bold]   Some fields only: [bold]liveset patch[/bold]" + _JSON,
)
def set_(
    path: DatasetPath,
    key: KeyText,
    sample: Annotated[str | None, SAMPLE] = None,
    fields: Annotated[list[str] | None, typer.Option("--field", hidden=True)] = None,
    integer: AsInteger = False,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    as_json: PrintJson = False,
) -> None:
    """Replace the sample with a key, in one commit, unless it is the same already; tells the chunks and bytes that are written anew."""
    from liveset.cli.values import changes, with_sample

    how = _How(message, author, session, dry_run, as_json, allow_pickle)
    if (sample is None) == (not fields):
        raise typer.BadParameter("give the whole new sample with --json; liveset patch PATH KEY NAME=VALUE changes some fields.")
    if sample is None:
        _patch(path, key, integer, fields or [], how)
        return
    whole = _read_sample(sample)
    dataset = liveset.StreamingDataset(path)
    plain, schema = parse_key(key, dataset.keys.kind, integer), dataset.schema

    def stage(update: DatasetUpdate) -> Sequence[Change]:
        stored = update[plain]
        assert schema is not None  # there is a sample
        new = with_sample(schema.root, stored, whole)
        if changed := list(changes(stored, new)):
            update[plain] = new
        return changed

    _run(path, stage, how, plain)


@edits.command(
    epilog="Examples:  [bold]liveset patch ./digits digit-0042 label=7 -m 'a wrong label'[/bold]   "
    """[bold]liveset patch ./plays play-3 'meta.note="seen"' 'boxes[0]=[1, 2]' --dry-run[/bold]""" + _JSON
)
def patch(
    path: DatasetPath,
    key: KeyText,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="""Fields (label, meta.id, boxes\\[0]) and their new values as JSON: 7, '"text"', null, '[1, 2]'.""",
            show_default=False,
        ),
    ],
    integer: AsInteger = False,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change some fields of the sample with a key, in one commit, unless they are the same already; all others keep their stored bytes."""
    _patch(path, key, integer, values, _How(message, author, session, dry_run, as_json, allow_pickle))


@edits.command(
    epilog="""Examples:  [bold]liveset insert ./plays play-120 --json '{"id": "play-120", "label": 1}'[/bold]   """
    "[bold]liveset insert ./plays play-120 --json - --replace < play-120.json[/bold]   "
    "Many at once: [bold]liveset apply --on-missing insert[/bold]" + _JSON
)
def insert(
    path: DatasetPath,
    key: KeyText,
    sample: Annotated[str, SAMPLE],
    replace: Annotated[bool, typer.Option("--replace", help="Replace the sample if the dataset has the key.")] = False,
    integer: AsInteger = False,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    as_json: PrintJson = False,
) -> None:
    """Add a sample behind all others, in one commit."""
    from liveset.cli.values import with_sample

    whole = _read_sample(sample)
    dataset = liveset.StreamingDataset(path, allow_pickle=allow_pickle)
    plain, schema = parse_key(key, dataset.keys.kind, integer), dataset.schema

    def stage(update: DatasetUpdate) -> Sequence[Change]:
        assert schema is not None  # the update has one
        # Any sample shows which lists are tuples, and such
        new = with_sample(schema.root, dataset[0], whole) if len(dataset) else whole
        try:
            (update.upsert if replace else update.insert)(plain, new)
        except liveset.DuplicateKeys as error:
            raise liveset.DuplicateKeys(f"{path} has the key {plain!r} already; --replace replaces its sample.", keys=(plain,)) from error
        return ()

    _run(path, stage, _How(message, author, session, dry_run, as_json, allow_pickle), plain)


@edits.command(
    epilog="Examples:  [bold]liveset delete ./digits digit-0042 digit-0043 -m 'recorded twice'[/bold]   "
    "[bold]liveset delete ./digits --keys-from bad.txt --dry-run[/bold]   "
    "[bold]liveset keys list ./digits | grep test | liveset delete ./digits --keys-from -[/bold]" + _JSON
)
def delete(
    path: DatasetPath,
    keys: KeyTexts = None,
    keys_from: KeysFrom = None,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="Leave out keys that the dataset does not have.")] = False,
    integer: AsInteger = False,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove samples, in one commit. It needs no --yes: earlier versions still have the samples, and liveset restore brings them back."""
    wanted = read_keys(path, keys, keys_from, integer)

    def stage(update: DatasetUpdate) -> Sequence[Change]:
        there = [key for key in wanted if key in update]
        if len(there) < len(wanted) and not skip_missing:
            raise _unknown(path, [key for key in wanted if key not in update])
        for key in there:
            del update[key]
        return ()

    _run(path, stage, _How(message, author, session, dry_run, as_json))


@edits.command(
    epilog="Examples:  [bold]liveset apply ./digits labels.csv --dry-run[/bold]   "
    "[bold]liveset apply ./digits new.parquet --key id --on-missing insert -m 'batch 7'[/bold]   "
    "[bold]./relabel | liveset apply ./digits - --format jsonl[/bold]" + _JSON
)
def apply(
    path: DatasetPath,
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="A .csv, .jsonl, .json, .parquet or .arrow file; - reads stdin, with --format.",
            show_default=False,
        ),
    ],
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="COLUMN",
            help="The column that holds the keys: that of the key field, or 'key', if not given.",
            show_default=False,
        ),
    ] = None,
    on_missing: Annotated[
        Missing, typer.Option("--on-missing", help="What to do with keys that the dataset does not have; insert needs whole samples.")
    ] = Missing.ERROR,
    form: Annotated[
        Format | None, typer.Option("--format", help="What TABLE holds, if its name does not end so.", show_default=False)
    ] = None,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change fields of many samples to what a table says, in one commit: a row for each sample, a column for each field."""
    if form is None and Path(table).suffix.lower() not in (".ndjson", *(f".{known}" for known in Format)):
        what = "stdin" if table == "-" else f"the name of {table}"
        raise typer.BadParameter(f"{what} does not say what it holds: add --format {'|'.join(Format)}.")

    def stage(update: DatasetUpdate) -> Sequence[Change]:
        with _table_file(table, form) as file:
            update.apply(file, key=key, on_missing=on_missing.value)
        return ()

    _run(path, stage, _How(message, author, session, dry_run, as_json, allow_pickle))


def read_keys(path: Place, texts: Sequence[str] | None, file: str | None, integer: bool) -> list[Key]:
    """Return keys of a dataset that are given on the command line and in a file, each once."""
    if not texts and file is None:
        raise typer.BadParameter("name the keys, or a file that holds them with --keys-from.")
    found = list(texts or ())
    if file is not None:
        with usage_errors(), _opened(file) as lines:
            text = lines.read().decode("utf-8-sig")  # which leaves out the mark that some editors put first
            found += filter(None, (line.rstrip("\r") for line in text.split("\n")))
    kind = liveset.StreamingDataset(path).keys.kind
    return list(dict.fromkeys(parse_key(text, kind, integer) for text in found))


# --- parts ------------------------------------------------------------------------------------------------------------


def _patch(path: Place, key: str, integer: bool, texts: Sequence[str], how: _How) -> None:
    from liveset.cli.values import changes, parse_field, with_fields

    with usage_errors():
        values = [parse_field(text) for text in texts]
    dataset = liveset.StreamingDataset(path)
    plain, schema = parse_key(key, dataset.keys.kind, integer), dataset.schema

    def stage(update: DatasetUpdate) -> Sequence[Change]:
        stored = update[plain]
        assert schema is not None  # there is a sample
        new = with_fields(schema.root, stored, values)
        changed = list(changes(stored, new))
        if changed and getattr(schema.root, "keys", None) is not None:
            update.patch(plain, {change.field: change.new for change in changed})
        elif changed:  # a sample that is no dict, or is one JSON value
            update[plain] = new
        return changed

    _run(path, stage, how, plain)


def _run(path: Place, stage: Stage, how: _How, key: Key | None = None) -> None:
    """Commit what ``stage`` stages, or only tell what that would cost."""
    from liveset.edit.session import dataset_update

    told: dict[str, Any] = {} if key is None else {"key": key}
    before = committed(path, how.session)
    with usage_errors(), dataset_update(path, session=how.session, author=how.author, allow_pickle=how.allow_pickle) as update:
        if before is not None:
            changed: Sequence[Change] = ()
            done: UpdatePreview | UpdateResult = liveset.UpdateResult(before, 0, 0, 0, 0.0)
        else:
            changed = stage(update)
            done = update.preview() if how.dry_run else update.commit(how.message)
    if how.as_json:
        typer.echo(json.dumps({**told, "dry_run": how.dry_run, **_cost(done)}, ensure_ascii=False))
    elif before is not None:
        typer.echo(f"the session {how.session} was committed already, as version {before}")
    elif not done.keys:
        typer.echo(f"nothing to change in version {update.version}")
    else:
        _print_changes(changed)
        _print_cost(done)


def committed(path: Place, session: str | None) -> int | None:
    """Return the version that a session committed; its keys may be gone, so that nothing can be staged for it again."""
    from liveset.edit.versions import find_session
    from liveset.snapshot import open_snapshot
    from liveset.storage import open_store

    if session is None:
        return None
    store = open_store(path)
    found = find_session(store, open_snapshot(store).index, session)
    return found.version if found is not None else None


def _read_sample(text: str) -> Any:
    from liveset.cli.values import parse_json

    with usage_errors():
        return parse_json(sys.stdin.read() if text == "-" else text, "the sample")


def _unknown(path: Place, keys: Sequence[Key]) -> liveset.KeyNotFound:
    listed = ", ".join(map(repr, keys[:10])) + (f" and {len(keys) - 10:,} more" if len(keys) > 10 else "")
    text = f"{path} has no sample{'s' * (len(keys) > 1)} with the key{'s' * (len(keys) > 1)} {listed}; nothing was changed."
    return liveset.KeyNotFound(text, keys=tuple(keys))


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb")


@contextmanager
def _table_file(table: str, form: Format | None) -> Iterator[Path]:
    """Yield a file whose name says what a table holds; errors name the table as the user did."""
    if form is None:
        yield Path(table)
        return
    with TemporaryDirectory(prefix="liveset-") as folder:
        file = Path(folder) / f"table.{form}"
        with _opened(table) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
        try:
            yield file
        except liveset.DatasetError as error:
            error.args = (str(error).replace(str(file), "stdin" if table == "-" else table), *error.args[1:])
            raise


def _cost(done: UpdatePreview | UpdateResult) -> dict[str, Any]:
    if isinstance(done, liveset.UpdatePreview):
        version, size, milliseconds = None, done.bytes_to_rewrite, None
    else:
        version, size, milliseconds = done.version, done.bytes_written, round(done.seconds * 1000, 3)
    counts = {"keys": done.keys, "inserted": done.inserted, "deleted": done.deleted, "chunks": done.chunks, "bytes": size}
    return {"version": version, **counts, "milliseconds": milliseconds}


def _print_cost(done: UpdatePreview | UpdateResult) -> None:
    some = f"{done.keys:,} key{'s' * (done.keys != 1)}"
    kinds = [f"{count:,} {word}" for count, word in ((done.inserted, "inserted"), (done.deleted, "deleted")) if count]
    some += f" ({', '.join(kinds)})" * bool(kinds) + f" in {done.chunks:,} chunk{'s' * (done.chunks != 1)}"
    if isinstance(done, liveset.UpdatePreview):
        typer.echo(f"would change {some}, {done.bytes_to_rewrite:,} bytes to rewrite")
    else:
        typer.echo(f"version {done.version}: {some}, {done.bytes_written:,} bytes written in {done.seconds * 1000:.1f} ms")


def _print_changes(changed: Sequence[Change]) -> None:
    from liveset.cli.show import describe
    from liveset.cli.values import NOTHING

    width = max((len(change.field) for change in changed), default=0)
    for field, *values in changed:
        before, after = ("nothing" if value is NOTHING else describe(value) for value in values)
        typer.echo(f"{field:<{width}}{'  ' * bool(width)}{before} -> {after}")
