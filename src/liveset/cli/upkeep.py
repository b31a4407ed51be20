"""The commands that see to the files of a dataset: fewer and larger ones, and none that still hold what must be gone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

import liveset
from liveset.cli.edits import KeysFrom, KeyTexts, Session, committed, read_keys
from liveset.cli.entities import AsInteger
from liveset.cli.places import CopyFrom, CopyTo, DatasetPath, access_of, parse_options, reached
from liveset.cli.usage import usage_errors
from liveset.cli.versions import AsJson, Author, DryRun, Message, Yes, ask

if TYPE_CHECKING:
    from liveset.edit.compact import CompactReport
    from liveset.edit.purge import PurgeReport
    from liveset.tools.copy import CopyReport

upkeep = typer.Typer()


@upkeep.command(
    epilog="Examples:  [bold]liveset compact ./digits --dry-run[/bold]   [bold]liveset compact ./digits --small 1 --json[/bold]   "
    "Afterwards [bold]liveset vacuum[/bold] deletes the old files.   "
    "As JSON: dry_run, version (null if nothing was done), chunks and key_tables (before and after), bytes, key_bytes, milliseconds"
)
def compact(
    path: DatasetPath,
    small: Annotated[
        float, typer.Option("--small", min=0, max=1, help="Merge chunks below this part of the chunk size of the dataset.")
    ] = 0.5,
    keys: Annotated[bool, typer.Option("--keys/--no-keys", help="Also make one table of all key tables.")] = True,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Merge small chunks that stand side by side, and key tables, in one commit; samples keep their positions and keys."""
    with usage_errors():
        report = liveset.compact(path, small=small, keys=keys, message=message, author=author, session=session, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(_compact_as_dict(report, dry_run)))
    else:
        _print_compact(report, dry_run)


@upkeep.command(
    epilog="Examples:  [bold]liveset purge ./faces face-0042 --dry-run[/bold]   "
    "[bold]liveset purge ./faces --keys-from withdrawn.txt --yes -m 'request 4711'[/bold]   "
    "Afterwards [bold]liveset verify ./faces --absent face-0042[/bold] proves it.   "
    "As JSON: path, dry_run, version, keys, missing, versions, chunks, quarantined, bytes_written, bytes_freed, milliseconds "
    "(null in a dry run)"
)
def purge(
    path: DatasetPath,
    keys: KeyTexts = None,
    keys_from: KeysFrom = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out keys that no version has, and delete what may be left of them.")
    ] = False,
    integer: AsInteger = False,
    message: Message = "",
    author: Author = "",
    session: Session = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Erase samples and their keys from all versions and files. Nothing brings them back, so it asks first; liveset delete does not."""
    wanted = read_keys(path, keys, keys_from, integer)
    act = partial(liveset.purge, path, wanted, on_missing="skip" if skip_missing else "error", message=message, author=author)
    with usage_errors():
        before = committed(path, session)
        if dry_run and before is not None:
            sys.exit(f"liveset: the session {session} was committed already, as version {before}: there is nothing to preview.")
        if not (dry_run or yes or before is not None):
            plan = act(dry_run=True)
            if plan.keys or plan.quarantined:
                ask(f"Erase {_purged(plan)}, for good?")
        report = act(session=session, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(_purge_as_dict(report), ensure_ascii=False))
    else:
        _print_purge(report, session, before)


@upkeep.command(
    epilog="Examples:  [bold]liveset cp ./digits s3://bucket/digits[/bold]   "
    "[bold]liveset --storage-options minio.json cp s3://bucket/digits gs://other/digits --dst-storage-options '{}'[/bold]   "
    "As JSON: source, target, version, versions, files, bytes, skipped, left, milliseconds"
)
def cp(
    ctx: typer.Context,
    src: CopyFrom,
    dst: CopyTo,
    newest: Annotated[bool, typer.Option("--newest", help="Without the earlier versions.")] = False,
    dst_options: Annotated[
        str | None,
        typer.Option(
            "--dst-storage-options",
            metavar="JSON|FILE",
            help="How to reach DST, if not as liveset --storage-options says.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset with its versions, tags and keys; checked on the way. A copy that was broken off goes on when it is started again."""
    from liveset.edit.meter import Meter

    access = access_of(ctx)
    if dst_options is not None:
        access = replace(access, options=parse_options(dst_options, "--dst-storage-options"))
    meter = Meter("cp: files")
    with usage_errors():
        try:
            report = liveset.cp(src, reached(dst, access), versions=not newest, progress=meter)
        finally:
            meter.close()
    if as_json:
        typer.echo(json.dumps(_copy_as_dict(report), ensure_ascii=False))
    else:
        _print_copy(report)


def _copy_as_dict(report: CopyReport) -> dict[str, object]:
    return {
        "source": report.source,
        "target": report.target,
        "version": report.version,
        "versions": list(report.versions),
        "files": report.files,
        "bytes": report.bytes,
        "skipped": report.skipped,
        "left": list(report.left),
        "milliseconds": round(report.seconds * 1000, 3),
    }


def _print_copy(report: CopyReport) -> None:
    there = f", {report.skipped:,} were there" if report.skipped else ""
    counts = f"{report.files:,} files, {report.bytes:,} bytes in {report.seconds:.1f} s{there}"
    typer.echo(f"copied version {report.version} and {len(report.versions) - 1:,} earlier ones: {counts}")
    for name in report.left:
        typer.echo(f"not copied, since no version needs it: {name}")


def _compact_as_dict(report: CompactReport, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "version": report.version,
        "chunks": [report.chunks_before, report.chunks_after],
        "key_tables": [report.key_tables_before, report.key_tables_after],
        "bytes": report.bytes_written,
        "key_bytes": report.key_bytes,
        "milliseconds": None if dry_run else round(report.seconds * 1000, 3),
    }


def _print_compact(report: CompactReport, dry_run: bool) -> None:
    before, after = (report.chunks_before, report.key_tables_before), (report.chunks_after, report.key_tables_after)
    if before == after:
        typer.echo("nothing to compact")
        return
    did = "would make" if dry_run else f"version {report.version}:"
    made = f"{before[0]:,} chunks -> {after[0]:,}, {before[1]:,} key tables -> {after[1]:,}"
    cost = "to write" if dry_run else f"written in {report.seconds * 1000:.1f} ms"
    keys = f" ({report.key_bytes:,} of them keys)" if report.key_bytes else ""
    typer.echo(f"{did} {made}, {report.bytes_written:,} bytes{keys} {cost}")


def _purged(report: PurgeReport) -> str:
    some = f"{report.keys:,} key{'s' * (report.keys != 1)}"
    versions = f"version{'s' * (len(report.versions) != 1)} {', '.join(map(str, report.versions))}"
    told = [f"{some} from {versions}, in {report.chunks:,} chunk file{'s' * (report.chunks != 1)}"]
    if not report.versions:  # the samples are gone already, and their keys are not
        told = [f"{some} from the key tables"] if report.keys else []
    if names := report.quarantined:
        listed = ", ".join(name.rpartition("/")[2] for name in names[:10]) + ", ..." * (len(names) > 10)
        told.append(f"{len(names):,} damaged file{'s' * (len(names) != 1)} in quarantine ({listed})")
    return " and ".join(told)


def _purge_as_dict(report: PurgeReport) -> dict[str, object]:
    return {
        "path": report.path,
        "dry_run": report.dry_run,
        "version": report.version,
        "keys": report.keys,
        "missing": list(report.missing),
        "versions": list(report.versions),
        "chunks": report.chunks,
        "quarantined": list(report.quarantined),
        "bytes_written": report.bytes_written,
        "bytes_freed": report.bytes_freed,
        "milliseconds": None if report.dry_run else round(report.seconds * 1000, 3),
    }


def _print_purge(report: PurgeReport, session: str | None, before: int | None) -> None:
    if before is not None:
        typer.echo(f"the session {session} was committed already, as version {before}")
    elif not (report.keys or report.quarantined):
        typer.echo("nothing to purge")
    elif report.dry_run:
        typer.echo(f"would erase {_purged(report)}; about {report.bytes_written:,} bytes to write, {report.bytes_freed:,} bytes to delete")
    else:
        size = f"{report.bytes_written:,} bytes written, {report.bytes_freed:,} bytes deleted"
        typer.echo(f"version {report.version}: erased {_purged(report)}; {size} in {report.seconds * 1000:.1f} ms")
