"""Rebase: whether a change that was made for one version may be applied to a later one. Pure: it looks at frozen data only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from liveset.edit.changes import (
    ASIDE,
    Adopt,
    Append,
    Change,
    Expire,
    Overwrite,
    Purge,
    Replace,
    Restore,
    Retag,
    SetAttributes,
    SetKeys,
    files_of,
)
from liveset.errors import Conflict, DatasetNotFound, OverwriteConflict, SchemaConflict, SessionExpired, VersionExpired
from liveset.format.index import Index
from liveset.format.stamp import HistoryEntry

__all__ = ["check_rebase", "check_schema", "keeps"]

_ADDITIVE = frozenset("adopt append attributes keys replace insert delete edit transform compact purge repair tag fence".split())
"""Commits that leave the samples of an append where they belong; any other may have replaced the dataset."""
_VERBS: dict[type, tuple[str, str, str]] = {
    Append: ("append to", "samples", "Append"),
    Overwrite: ("overwrite", "samples", "Overwrite"),
    Replace: ("update", "changes", "Update"),
    Adopt: ("adopt", "chunks", "Adopt it"),
    Purge: ("purge", "samples", "Purge"),
    SetKeys: ("make keys for", "keys", "Make them"),
    Restore: ("restore", "content", "Restore"),
}
_DEFAULTS = {
    "data_format": None,
    "data_spec": None,
    "item_loader": "PyTreeLoader",
    "compression": None,
    "compression_level": None,
    "encryption": None,
    "temporal_schema": None,
}
"""Members of `config` that say how chunks are read, with what their absence means. All others are limits of the writer or hints."""


def check_rebase(change: Change, base: Index | None, head: Index | None, since: Sequence[HistoryEntry]) -> None:
    """Raises a ``Conflict`` if a change made for ``base`` must not be applied to ``head``.

    ``since`` lists the commits after ``base`` up to and including the head.
    """
    if isinstance(change, SetAttributes):
        _check_attributes(change, base, head)
        return
    if isinstance(change, Retag):
        _check_tag(change, base, head)
        return
    if isinstance(change, Expire):
        # What a vacuum may delete was chosen for one head; after any other commit it must be chosen again.
        if head is None or base is None or head.id != base.id:
            raise Conflict("cannot put up the fence: the dataset was changed meanwhile. Nothing was deleted.")
        return
    if isinstance(change, Restore):
        check_kept(head, change.index.version, "cannot restore")
        _check_files(change, head)
    if not (isinstance(change, Overwrite | Restore) and change.force):
        if base is not None and not keeps(head, base.version):
            raise SessionExpired(
                f"version {base.version}, which this change was made for, has expired, and with it the history that tells what was changed "
                "since. Nothing was changed; start again."
            )
        _check_ground(change, base, head, since)
    if isinstance(change, Append) and head is not None and change.records:
        _check_keys(base, head, since)
        if change.keys is None and head.edit is not None and head.edit.key_files is not None:
            raise Conflict(
                "cannot append samples without keys: the dataset has keys since meanwhile. Nothing was changed. Append with key_fn=."
            )
        if head.chunks:
            check_schema(head.config or {}, change.config or {})


def _check_keys(base: Index | None, head: Index, since: Sequence[HistoryEntry]) -> None:
    """Keys that were made anew tell nothing about how those of the new samples were found, but where both stand in the same field."""
    made = [entry for entry in since if entry.op == SetKeys.op]
    field = base.layout_of_keys.get("field") if base is not None else None
    if made and (field is None or head.layout_of_keys.get("field") != field):
        raise Conflict(
            f"cannot append: the samples were given other keys meanwhile ({_told(made)} committed). Nothing was changed. Append again, "
            "with keys of the same kind."
        )


def _check_files(change: Restore, head: Index | None) -> None:
    """A purge since the version was opened may have put other files in the place of its own."""
    old = head.edit.redirects.old if head is not None and head.edit is not None else frozenset()
    if not old.isdisjoint(files_of(change.index)) or any(record.erased for record in change.index.chunks):
        raise OverwriteConflict(
            f"cannot restore version {change.index.version}: samples of it were purged meanwhile. Nothing was changed. Restore again."
        )


def check_kept(head: Index | None, version: int, what: str) -> None:
    """Raises ``VersionExpired`` if a vacuum may have removed files of a version."""
    if head is not None and not keeps(head, version):
        assert head.edit is not None
        assert head.edit.fence is not None
        raise VersionExpired(
            f"{what}: version {version} has expired (the vacuum of version {head.edit.fence.version} kept nothing before version "
            f"{head.edit.fence.expired_before} but what was tagged or pinned).",
            version=version,
        )


def keeps(head: Index | None, version: int) -> bool:
    """Whether no vacuum has forgotten a version."""
    return head is None or head.edit is None or head.edit.fence is None or head.edit.fence.keeps(version)


def _check_tag(change: Retag, base: Index | None, head: Index | None) -> None:
    if head is None:
        raise DatasetNotFound("cannot tag a version: no dataset is here.")
    if change.version is not None:
        check_kept(head, change.version, f"cannot tag it {change.name!r}")
    before, theirs = (index.edit.tags.get(change.name) if index is not None and index.edit is not None else None for index in (base, head))
    if theirs not in (before, change.version):
        told = "took it away" if theirs is None else f"gave it to version {theirs}"
        raise Conflict(f"cannot set the tag {change.name!r}: another commit {told} meanwhile.")


def check_schema(dataset: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ``SchemaConflict`` if chunks of two configs cannot stand in one dataset."""
    differing = [name for name, default in _DEFAULTS.items() if _meaning(dataset, name, default) != _meaning(new, name, default)]
    if not differing:
        return
    lines = [f"  {name}: the dataset has {_short(dataset.get(name))}, the new samples have {_short(new.get(name))}" for name in differing]
    raise SchemaConflict(
        "The config isn't consistent between chunks. This shouldn't have happened.\n"
        + "\n".join(lines)
        + "\nThe dataset was not changed. Make the new samples like those of the dataset (same structure, leaf types, compression and "
        "loader), or replace the dataset with mode='overwrite'.",
        members=differing,
    )


def _check_ground(change: Change, base: Index | None, head: Index | None, since: Sequence[HistoryEntry]) -> None:
    """The dataset that the change was made for must still be there."""
    verb, past, again = _VERBS[type(change)]
    if base is None:
        if head is not None and isinstance(change, Overwrite):
            raise OverwriteConflict(
                f"cannot overwrite: a dataset (version {head.version}, {head.samples} samples) appeared here meanwhile. "
                "Nothing was changed. Look at it, then overwrite it again."
            )
        return
    if head is None:
        raise OverwriteConflict(f"cannot {verb} the dataset: it was removed meanwhile (version {base.version} was there before).")
    if not _descends(base, head, since):
        raise OverwriteConflict(f"cannot {verb} the dataset: another one was put in its place meanwhile (now version {head.version}).")
    if isinstance(change, Overwrite | Restore):
        if others := [entry for entry in since if entry.op not in ASIDE]:
            raise OverwriteConflict(
                f"cannot {verb}: version {base.version} was to be replaced, but meanwhile {_told(others)} committed. "
                f"Nothing was changed. Look at it, then {again.lower()} again."
            )
    elif replaced := [entry for entry in since if entry.op not in _ADDITIVE]:
        raise OverwriteConflict(
            f"cannot {verb} the dataset: it was replaced meanwhile ({_told(replaced)} committed after version {base.version}). "
            f"Nothing was changed. {again} again if the {past} belong to the new dataset."
        )


def _descends(base: Index, head: Index, since: Sequence[HistoryEntry]) -> bool:
    if head.version == base.version:
        return head.id == base.id and head.digest == base.digest
    # The commits between the two must be all there, and the oldest of them must have been made on the base itself.
    return head.version > base.version and [entry.version for entry in since] == list(range(head.version, base.version, -1))


def _check_attributes(change: SetAttributes, base: Index | None, head: Index | None) -> None:
    if head is None:
        raise DatasetNotFound("cannot set attributes: no dataset is here.")
    if base is None:
        return
    for name, value in change.attributes.items():
        theirs = head.attributes.get(name)
        if theirs not in (base.attributes.get(name), value):
            raise Conflict(f"cannot set the attribute {name!r}: another commit changed it to {_short(theirs)} meanwhile.")


def _meaning(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if name == "compression_level" and value == "chunk":
        return None
    return default if value is None else value


def _told(entries: Sequence[HistoryEntry]) -> str:
    words = [f"version {entry.version} ({entry.op})" for entry in entries[:3]]
    return ", ".join(words) + (f" and {len(entries) - 3} more were" if len(entries) > 3 else " were" if len(entries) > 1 else " was")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 300 else text[:297] + "..."
