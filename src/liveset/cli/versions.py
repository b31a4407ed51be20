"""The commands for versions: what was committed, names for versions, the way back, and forgetting."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import liveset
from liveset.cli.places import DatasetPath
from liveset.cli.usage import usage_errors

if TYPE_CHECKING:
    from liveset.edit.vacuum import VacuumReport
    from liveset.storage import Place
    from liveset.tools.history import Version

versions = typer.Typer()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
Message = Annotated[str, typer.Option("-m", "--message", help="What the history says about it.", show_default=False)]
Author = Annotated[str, typer.Option("--author", help="Who does this.", show_default=False)]

_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds", "w": "weeks"}
_EVER = timedelta(days=100_000)  # more would lead to before the first day that Python knows
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?")


@versions.command(epilog="Examples:  [bold]liveset log ./digits[/bold]   [bold]liveset log ./digits -n 5 --json | jq '.[0].version'[/bold]")
def log(
    path: DatasetPath,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many versions.", show_default="all")] = 1 << 62,
    as_json: AsJson = False,
) -> None:
    """List the versions, newest first; '-' where a version is no longer available."""
    found = liveset.history(path)[:count]
    if as_json:
        typer.echo(json.dumps([_as_dict(version) for version in found], indent=2))
    else:
        _print_log(found)


@versions.command(
    epilog="Examples:  [bold]liveset tag ./digits paper 3[/bold]   [bold]liveset tag ./digits release-2[/bold]   "
    "[bold]liveset tag ./digits paper --delete --yes[/bold]"
)
def tag(
    path: DatasetPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.", show_default=False)],
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="Number, tag or time; the newest if not given.", show_default=False)
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Take the name away.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Take it from another version that has it.")] = False,
    message: Message = "",
    author: Author = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Give a version a name, which keeps it from every vacuum."""
    if delete and version is not None:
        raise typer.BadParameter("--delete takes no VERSION.")
    chosen = None if version is None else parse_version(version)
    act = partial(liveset.untag, path, name) if delete else partial(liveset.tag, path, name, chosen, move=move)
    with usage_errors():
        try:
            number = act(dry_run=True)
        except ValueError as error:
            if isinstance(error, liveset.DatasetError) or delete or move or _tagged(path, name) is None:
                raise
            raise liveset.Conflict(str(error)) from error  # it is another version's
        if not dry_run:
            if (delete or move) and not yes and (before := _tagged(path, name)) is not None and (delete or before != number):
                ask(f"Take the tag {name} away from version {before}{'' if delete else f' and give it to version {number}'}?")
            number = act(message=message, author=author)
    if as_json:
        typer.echo(json.dumps({"tag": name, "version": None if delete else number, "dry_run": dry_run}))
    elif delete:
        typer.echo(f"version {number} {'would lose' if dry_run else 'lost'} the tag {name}")
    else:
        typer.echo(f"version {number} {'would be' if dry_run else 'is'} tagged {name}")


@versions.command(
    epilog="Examples:  [bold]liveset restore ./digits 3[/bold]   [bold]liveset restore ./digits paper --yes -m 'bad labels'[/bold]"
)
def restore(
    path: DatasetPath,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Number, tag or time of the version.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Also undo what others commit meanwhile.")] = False,
    message: Message = "",
    author: Author = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the content of an earlier version the newest one; nothing is lost, since this is a version of its own."""
    chosen = parse_version(version)
    old, now = liveset.StreamingDataset(path, version=chosen), liveset.StreamingDataset(path)
    told = f"version {old.version} ({old.samples:,} samples) in the place of version {now.version} ({now.samples:,} samples)"
    if dry_run:
        number = None
    else:
        if not yes:
            ask(f"Put {told}?")
        with usage_errors():
            number = liveset.restore(path, chosen, force=force, message=message, author=author)
    if as_json:
        typer.echo(json.dumps({"restored": old.version, "version": number, "samples": old.samples, "dry_run": dry_run}))
    elif dry_run:
        typer.echo(f"would put {told}")
    else:
        typer.echo(f"version {number} has the content of version {old.version}: {old.samples:,} samples")


@versions.command(
    epilog="Examples:  [bold]liveset vacuum ./digits[/bold]   [bold]liveset vacuum ./digits --keep 30d --yes[/bold]   "
    "[bold]liveset vacuum ./digits --keep 10 --json --yes[/bold]"
)
def vacuum(
    path: DatasetPath,
    keep: Annotated[
        str, typer.Option("--keep", metavar="AGE|COUNT", help="Versions to keep: of the last 7d, 12h, ..., or the last so many.")
    ] = "7d",
    grace: Annotated[
        str, typer.Option("--grace", metavar="AGE", help="Files younger than this stay, and versions replaced within it.")
    ] = "1d",
    message: Message = "",
    author: Author = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Forget old versions and delete files that no version needs. Without --yes it only tells what would go."""
    if dry_run and yes:
        raise typer.BadParameter("--dry-run and --yes exclude each other.")
    age = parse_keep(grace)
    if isinstance(age, int):
        raise typer.BadParameter(f"--grace is a time such as 1d or 6h, not {grace!r}.")
    report = liveset.vacuum(path, keep=parse_keep(keep), grace=age, dry_run=not yes, message=message, author=author)
    if as_json:
        typer.echo(json.dumps(_report_as_dict(report), indent=2))
    else:
        _print_report(report)


def parse_version(text: str) -> int | str | datetime:
    """Return what names a version: a number, a time (in the time zone of this machine where it says none), or a tag."""
    if text.isdecimal():
        return int(text)
    if _TIME.fullmatch(text):
        try:
            time = datetime.fromisoformat(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is no time: {error}.") from error
        return time.astimezone()
    return text


def parse_keep(text: str) -> timedelta | int:
    """Return a number of versions, or a time such as ``7d``, ``12h``, ``30m``, ``2w``."""
    if text.isdecimal():
        return int(text)
    found = re.fullmatch(r"(\d+)([dhmsw])", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is neither a number of versions nor a time such as 7d, 12h or 2w.")
    try:
        return min(timedelta(**{_UNITS[found[2]]: int(found[1])}), _EVER)
    except OverflowError:
        return _EVER


def _tagged(path: Place, name: str) -> int | None:
    from liveset.snapshot import open_snapshot
    from liveset.storage import open_store

    edit = open_snapshot(open_store(path)).index.edit
    return edit.tags.get(name) if edit is not None else None


def ask(question: str) -> None:
    """Go on only after a yes; without a terminal the answer is no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        sys.exit("liveset: nothing was done; --yes does it without asking.")


def _as_dict(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "committed_at": version.when.isoformat() if version.when is not None else None,
        "op": _op(version),
        "message": version.message,
        "author": version.author,
        "session": version.session,
        "tags": list(version.tags),
        "available": version.available,
        "samples": version.samples,
        "chunks": version.chunks,
        "bytes": version.size,
        "bytes_alone": version.alone,
    }


def _op(version: Version) -> str:
    return "vacuum" if version.op == "fence" else version.op


def _print_log(found: list[Version]) -> None:
    rows = [("version", "committed", "op", "samples", "bytes alone", "tags and message")]
    for version in found:
        when = version.when.astimezone().strftime("%Y-%m-%d %H:%M:%S") if version.when is not None else "-"
        samples, alone = ("-" if value is None else f"{value:,}" for value in (version.samples, version.alone))
        words = [f"[{name}]" for name in version.tags] + version.message.split()
        words += [f"({version.author})"] * bool(version.author)
        rows.append((str(version.version), when, _op(version), samples, alone, " ".join(words)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for number, when, op, samples, alone, notes in rows:
        cells = (
            number.rjust(widths[0]),
            when.ljust(widths[1]),
            op.ljust(widths[2]),
            samples.rjust(widths[3]),
            alone.rjust(widths[4]),
            notes,
        )
        typer.echo("  ".join(cells).rstrip())


def _report_as_dict(report: VacuumReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "dry_run": report.dry_run,
        "version": report.version,
        "kept": list(report.kept),
        "pinned": list(report.pinned),
        "expired": list(report.expired),
        "deleted": {kind: list(names) for kind, names in report.deleted.items()},
        "files": report.files,
        "bytes": report.freed,
        "unknown": list(report.unknown),
    }


def _print_report(report: VacuumReport) -> None:
    would = report.dry_run
    kinds = ", ".join(f"{len(names):,} of kind '{kind}'" for kind, names in report.deleted.items())
    typer.echo(f"{'would delete' if would else 'deleted'} {report.files:,} files, {report.freed:,} bytes{f' ({kinds})' if kinds else ''}")
    forgot, stay = ("would forget", "would stay") if would else ("forgot", "stay")
    typer.echo(f"{forgot} {len(report.expired):,} versions; {len(report.kept):,} {stay}")
    if report.pinned:
        typer.echo(f"pinned by readers: {', '.join(map(str, report.pinned))}")
    for name in report.unknown:
        typer.echo(f"left alone, since it is not known: {name}")
    if would and report.files:
        typer.echo("Nothing was done; --yes does it.")
