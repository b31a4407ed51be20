"""The commands that compare and check: what changed between versions, what is damaged, and putting it right."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

import liveset
from liveset.cli.entities import At, as_version
from liveset.cli.places import DatasetPath, OtherCopy
from liveset.cli.usage import reworded, usage_errors
from liveset.cli.versions import AsJson, Author, DryRun, Message, Yes, parse_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from liveset.storage import Place
    from liveset.tools.diff import Diff
    from liveset.tools.repair import RepairReport
    from liveset.tools.verify import Damage, VerifyReport

check = typer.Typer()

# Keys of damaged samples that are told to people.
_TOLD = 5


@check.command(
    epilog="Examples:  [bold]liveset diff ./digits 3[/bold]   [bold]liveset diff ./digits paper 7 --json | jq .changed[/bold]   "
    "[bold]liveset diff ./digits 2024-06-01 -n 0[/bold]"
)
def diff(
    path: DatasetPath,
    a: Annotated[str, typer.Argument(metavar="A", help="Number, tag or time of the version before.", show_default=False)],
    b: Annotated[str | None, typer.Argument(metavar="B", help="The version after; the newest if not given.", show_default=False)] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=0, help="How many keys to list of each kind.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Tell which samples were added, removed and changed between two versions, and in which fields."""
    found = liveset.diff(path, parse_version(a), None if b is None else parse_version(b))
    if as_json:
        typer.echo(json.dumps(_diff_as_dict(found, limit), indent=2, ensure_ascii=False))
    else:
        _print_diff(found, limit)


@check.command(
    epilog="Examples:  [bold]liveset verify ./digits && ./train[/bold]   [bold]liveset verify ./digits --absent digit-0042[/bold]"
)
def verify(
    path: DatasetPath,
    absent: Annotated[
        list[str] | None,
        typer.Option("--absent", metavar="KEY", help="Search all files for this key or text, too; several times.", show_default=False),
    ] = None,
    version: At = None,
    as_json: AsJson = False,
) -> None:
    """Read every chunk, compare it with its checksum and decode its samples; exit code 1 if anything is damaged or not absent."""
    with usage_errors():
        report = liveset.verify(path, version=as_version(version), absent=_wanted(path, absent) if absent else ())
    if as_json:
        typer.echo(json.dumps(_verify_as_dict(report), indent=2, ensure_ascii=False))
    else:
        _print_verify(report)
    if not report.ok:
        raise typer.Exit(1)


@check.command(
    epilog="Examples:  [bold]liveset repair ./digits[/bold]   [bold]liveset repair ./digits --copy /backup/digits --yes[/bold]   "
    "[bold]liveset repair ./digits --quarantine --dry-run --json[/bold]"
)
def repair(
    path: DatasetPath,
    copy: OtherCopy = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Take chunks that cannot be restored out of the newest version.")
    ] = False,
    message: Message = "",
    author: Author = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Put right a lost index and damaged files, from what is there and from another copy; exit code 1 if something stays damaged."""
    with usage_errors():
        act = partial(liveset.repair, path, copy=copy, quarantine=quarantine, message=message, author=author)
        report = act(dry_run=dry_run or not yes)
        if report.done and not dry_run and not yes:
            _print_repair(report, file=sys.stderr)
            print("Do it? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                sys.exit("liveset: nothing was done; --yes does it without asking.")
            report = act()
    if as_json:
        typer.echo(json.dumps(_repair_as_dict(report), indent=2, ensure_ascii=False))
    else:
        _print_repair(report)
    if not report.ok:
        raise typer.Exit(1)


# --- diff -------------------------------------------------------------------------------------------------------------


def _diff_as_dict(found: Diff, limit: int) -> dict[str, Any]:
    return {
        "path": found.path,
        "a": found.a,
        "b": found.b,
        "by": found.by,
        "added": found.added,
        "removed": found.removed,
        "changed": found.changed,
        "fields": {"added": found.fields_added, "dropped": found.fields_dropped, "retyped": found.fields_retyped},
        "keys": {
            "added": list(islice(found.added_keys(), limit)),
            "removed": list(islice(found.removed_keys(), limit)),
            "changed": [{"key": key, "fields": fields} for key, fields in islice(found.changes(), limit)],
        },
    }


def _print_diff(found: Diff, limit: int) -> None:
    counts = f"{found.added:,} added, {found.removed:,} removed, {found.changed:,} changed"
    typer.echo(f"version {found.a} -> {found.b}: {counts}{' (by position: a version has no keys)' if found.by == 'position' else ''}")
    for word, fields in (("added", found.fields_added), ("dropped", found.fields_dropped), ("retyped", found.fields_retyped)):
        if fields:
            typer.echo(f"fields {word}: {', '.join(fields)}")
    _print_some("+", map(str, found.added_keys()), found.added, limit)
    _print_some("-", map(str, found.removed_keys()), found.removed, limit)
    _print_some("~", (f"{key}  {', '.join(fields)}" for key, fields in found.changes()), found.changed, limit)


def _print_some(mark: str, lines: Iterable[str], count: int, limit: int) -> None:
    for line in islice(lines, limit):
        typer.echo(f"{mark} {line}")
    if 0 < limit < count:
        typer.echo(f"{mark} ... and {count - limit:,} more")


# --- verify and repair ------------------------------------------------------------------------------------------------


def _wanted(path: Place, absent: list[str]) -> list[str | int]:
    """Return what is to be absent, as keys of the kind that the dataset has."""
    with liveset.StreamingDataset(path) as dataset:
        try:
            integers = dataset.keys.kind is int
        except liveset.KeyNotFound:
            integers = False
    return [int(text) if integers and text.lstrip("-").isdecimal() else text for text in absent]


def _damage_as_dict(damage: Damage) -> dict[str, Any]:
    told: dict[str, Any] = {"file": damage.file, "problem": damage.problem}
    if damage.positions:
        told |= {"positions": [damage.positions.start, damage.positions.stop], "samples": len(damage.positions)}
        told |= {"keys": list(damage.keys)} if damage.keys else {}
    return told


def _verify_as_dict(report: VerifyReport) -> dict[str, Any]:
    told: dict[str, Any] = {"ok": report.ok, "chunks": report.chunks, "samples": report.samples}
    told["damaged"] = [_damage_as_dict(damage) for damage in report.damaged]
    if report.notes:
        told["notes"] = list(report.notes)
    if report.searched:
        told |= {"searched": report.searched, "found": [found._asdict() for found in report.found]}
    return told


def _print_verify(report: VerifyReport) -> None:
    if not report.damaged:
        typer.echo(f"ok: {report.chunks:,} chunks with {report.samples:,} samples")
    else:
        typer.echo(f"damaged: {_counted(report)}")
    for damage in report.damaged:
        _print_damage("  ", damage)
    if report.damaged:
        typer.echo("liveset repair puts right what it can, with --copy from another copy of the dataset")
    for note in report.notes:
        typer.echo(f"note: {reworded(note)}")
    if report.searched:
        typer.echo(f"{'found' if report.found else 'absent'}: {report.searched:,} files were searched")
    for found in report.found:
        typer.echo(f"  {found.what!s}: {found.file}, {found.place}")


def _counted(report: VerifyReport) -> str:
    from liveset.edit.keyfiles import KEYS
    from liveset.storage import HEAD

    tables = sum(damage.file.startswith(KEYS) for damage in report.damaged)
    index = any(damage.file == HEAD for damage in report.damaged)
    chunks = len({damage.file for damage in report.damaged}) - tables - index
    parts = [f"{chunks:,} of {report.chunks:,} chunks"] * bool(chunks) + [f"{tables:,} key table{'s' * (tables > 1)}"] * bool(tables)
    return ", ".join(parts + [HEAD] * index)


def _print_damage(start: str, damage: Damage, file: Any = None) -> None:
    typer.echo(f"{start}{damage.file}: {reworded(damage.problem)}", file=file)
    if damage.positions:
        first, last = damage.positions[0], damage.positions[-1]
        keys = ", ".join(map(str, damage.keys[:_TOLD])) + (", ..." if len(damage.positions) > _TOLD else "")
        typer.echo(f"    positions {first:,} to {last:,}{f': {keys}' if damage.keys else ''}", file=file)


def _repair_as_dict(report: RepairReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "dry_run": report.dry_run,
        "version": report.version,
        "index": report.index,
        "unlisted": list(report.unlisted),
        "restored": [restored._asdict() for restored in report.restored],
        "quarantined": [_damage_as_dict(damage) for damage in report.quarantined],
        "left": [_damage_as_dict(damage) for damage in report.left],
        "older": [_damage_as_dict(damage) for damage in report.older],
    }


def _print_repair(report: RepairReport, file: Any = None) -> None:
    would = "would be " if report.dry_run else ""
    if report.index:
        typer.echo(f"index.json {would}replaced, version {report.version}: {report.index}", file=file)
    for name in report.unlisted:
        typer.echo(f"no version names {name}", file=file)
    for restored in report.restored:
        typer.echo(f"{would}restored: {restored.file} from {restored.source}", file=file)
    for word, damages in (
        (f"{would}taken out", report.quarantined),
        ("damaged", report.left),
        ("damaged, in earlier versions", report.older),
    ):
        for damage in damages:
            _print_damage(f"{word}: ", damage, file)
    if not report.done:
        typer.echo("nothing to repair" if report.ok else "nothing could be repaired", file=file)
