"""A model of a dataset: what a user may expect of it, in plain Python, without files, chunks, tables and races.

Each method does what one call of the library does, or raises the same kind of error and changes nothing. Time passes in hours and by hand.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Self

from liveset.errors import (
    Conflict,
    DuplicateKeys,
    KeyConflict,
    KeyNotFound,
    KeysExist,
    NotFound,
    OverwriteConflict,
    SessionExpired,
    VersionExpired,
    VersionNotFound,
)
from liveset.format.keytable import Key

__all__ = ["DatasetModel", "Edit", "ModelVersion", "UpdateModel"]

_HOUR = timedelta(hours=1)
_ASIDE = ("tag", "fence")
"""Commits that change nothing that a version consists of."""
_SAME_CONTENT = (*_ASIDE, "attributes", "restore")
_REPLACES_ALL = ("overwrite", "restore")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version: its samples in their order, and the key of each, if the dataset has keys.

    Attributes:
        number: of the version; 0 is what another program wrote.
        op: the kind of the commit that made it.
        hour: when that was.
        samples: in their order.
        keys: one for each sample, or None.
        key_field: the field that holds the keys, if the dataset remembers it.
        attributes: of the dataset.
        content: the version that wrote these samples and keys; restored ones have that of the original. -1: files of its own.
    """

    number: int
    op: str
    hour: int = 0
    samples: tuple[Any, ...] = ()
    keys: tuple[Key, ...] | None = None
    key_field: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    content: int = 0

    @property
    def by_key(self) -> dict[Key, Any]:
        """The samples by their keys."""
        return dict(zip(self.keys or (), self.samples, strict=bool(self.keys)))

    def place(self, key: Key) -> int | None:
        """Return the position of a key."""
        return self.keys.index(key) if self.keys is not None and key in self.keys else None


@dataclass(frozen=True, slots=True)
class Edit:
    """What a session does with the sample of a key.

    Attributes:
        what: ``replace`` wants the key to be there, ``upsert`` does not mind.
        value: the new sample, or the new fields of a patch.
    """

    what: Literal["replace", "upsert", "patch", "delete"]
    value: Any = None

    def applied(self, sample: Any) -> Any:
        """Return what becomes of a sample."""
        return {**sample, **self.value} if self.what == "patch" else self.value


class UpdateModel:
    """A session: the edits that are staged on one version, in the order in which each key was staged first."""

    def __init__(self, base: ModelVersion) -> None:
        self.base = base
        self.staged: dict[Key, Edit] = {}

    def __contains__(self, key: Key) -> bool:
        edit = self.staged.get(key)
        if edit is not None and edit.what in ("upsert", "delete"):
            return edit.what == "upsert"
        return key in self.base.by_key

    @property
    def missing(self) -> set[Key]:
        """The keys that the version should have and does not."""
        return {key for key, edit in self.staged.items() if edit.what != "upsert"} - self.base.by_key.keys()

    @property
    def inserted(self) -> int:
        """How many samples would be added."""
        return len(self.staged.keys() - self.base.by_key.keys() - self.missing)

    @property
    def deleted(self) -> int:
        """How many samples would be removed."""
        return sum(edit.what == "delete" for edit in self.staged.values())

    def __getitem__(self, key: Key) -> Any:
        """Return the sample that a key would have."""
        edit = self.staged.get(key)
        if edit is not None and edit.what in ("replace", "upsert"):
            return edit.value
        self._check_there(key)
        sample = self.base.by_key[key]
        return sample if edit is None else edit.applied(sample)

    def replace(self, key: Key, sample: Any) -> None:
        """Put another sample in its place."""
        edit = self.staged.get(key)
        self.staged[key] = Edit("upsert" if edit is not None and edit.what == "upsert" else "replace", sample)

    def insert(self, key: Key, sample: Any) -> None:
        """Add a sample."""
        if key in self:
            raise DuplicateKeys("taken", keys=(key,))
        self.upsert(key, sample)

    def upsert(self, key: Key, sample: Any) -> None:
        """Put a sample in its place, or add it."""
        self.staged[key] = Edit("upsert", sample)

    def __delitem__(self, key: Key) -> None:
        """Remove a sample."""
        self._check_there(key)
        if key in self.base.by_key:
            self.staged[key] = Edit("delete")
        else:
            del self.staged[key]

    def patch(self, key: Key, fields: Mapping[str, Any]) -> None:
        """Change some fields of a sample."""
        self._check_there(key)
        edit = self.staged.get(key)
        self.staged[key] = Edit("patch", fields) if edit is None else replace(edit, value={**edit.value, **fields})

    def apply(self, rows: Mapping[Key, Mapping[str, Any]], on_missing: str) -> int:
        """Change the fields of many samples; rows for keys that are not there are refused, left out or added."""
        missing = [key for key in rows if key not in self]
        if missing and on_missing == "error":
            raise KeyNotFound("unknown", keys=tuple(missing))
        for key, row in rows.items():
            if key in self:
                self.patch(key, row)
            elif on_missing == "insert":
                self.upsert(key, dict(row))
        return len(rows) if on_missing == "insert" else len(rows) - len(missing)

    def _check_there(self, key: Key) -> None:
        if key not in self:
            raise KeyNotFound("unknown")


class DatasetModel:
    """A dataset as a list of versions.

    Attributes:
        versions: all that ever were, by number.
        readable: numbers of those that can be opened.
        tags: names of versions.
        fences: the versions that vacuums made.
        hour: what time it is.
    """

    def __init__(self) -> None:
        self.versions: dict[int, ModelVersion] = {}
        self.readable: set[int] = set()
        self.tags: dict[str, int] = {}
        self.fences: list[int] = []
        self.hour = 0

    def copy(self) -> Self:
        """Return an equal model that changes apart from this one; versions are frozen and shared."""
        other = copy.copy(self)
        other.versions, other.readable = dict(self.versions), set(self.readable)
        other.tags, other.fences = dict(self.tags), list(self.fences)
        return other

    @property
    def number(self) -> int | None:
        """The number of the newest version; None where there is no dataset."""
        return max(self.versions, default=None)

    @property
    def newest(self) -> ModelVersion:
        """The newest version; ``ValueError`` where there is none."""
        return self.versions[max(self.versions)]

    def open(self, wanted: int | str | None) -> ModelVersion:
        """Return the version with a number or a tag."""
        if isinstance(wanted, str) and wanted not in self.tags:
            raise VersionNotFound("no such tag")
        number = self.number if wanted is None else self.tags[wanted] if isinstance(wanted, str) else wanted
        if number not in self.versions:
            raise VersionNotFound("no such version")
        if number not in self.readable:
            raise VersionExpired("expired")
        assert number is not None
        return self.versions[number]

    # --- changes -----------------------------------------------------------------------------------------------------

    def foreign(self, samples: Sequence[Any], keys: Sequence[Key] | None, key_field: str | None) -> None:
        """Another program has written the dataset."""
        assert not self.versions
        self.versions[0] = ModelVersion(0, "foreign", self.hour, tuple(samples), None if keys is None else tuple(keys), key_field)
        self.readable.add(0)

    def overwrite(
        self, samples: Sequence[Any], keys: Sequence[Key] | None, key_field: str | None, base: ModelVersion | None = None
    ) -> ModelVersion:
        """Replace all samples; also makes the dataset."""
        if self.versions:
            self._check_base("overwrite", base)
        _check_unique(keys)
        if self.versions and self.newest.keys is not None:
            self.adopt()  # its published keys are withdrawn, and version 0 would have none
        before = self.newest.attributes if self.versions else {}
        op = "overwrite" if self.versions else "create"
        return self._add(ModelVersion(0, op, 0, tuple(samples), None if keys is None else tuple(keys), key_field, before))

    def append(
        self, samples: Sequence[Any], keys: Sequence[Key] | None, key_field: str | None, base: ModelVersion | None = None
    ) -> ModelVersion | None:
        """Put samples behind those that are there; keys only where the dataset has some, or has no samples."""
        if not samples:
            return None
        self._check_base("append", base)
        self.adopt()
        head = self.newest
        made_anew = base is not None and "keys" in [version.op for version in self.since(base)]
        if made_anew and (base is None or base.key_field is None or base.key_field != head.key_field):
            raise Conflict("there are other keys now")
        if keys is None:
            return self._add(replace(head, op="append", samples=head.samples + tuple(samples)))
        _check_unique(keys)
        if head.samples and head.keys is None:
            raise ValueError("the dataset has no keys")
        if taken := set(keys) & set(head.keys or ()):
            raise KeyConflict("taken", keys=tuple(taken))
        changed = replace(head, op="append", samples=head.samples + tuple(samples), keys=(head.keys or ()) + tuple(keys))
        return self._add(changed if head.samples else replace(changed, key_field=key_field))

    def edit(self, update: UpdateModel, *, named: bool = False) -> ModelVersion | None:
        """Commit a session. The first who commits a key wins; samples that go leave no gap, and new ones stand behind all others.

        What changes no sample makes no version, unless the session has a name, which the history remembers.
        """
        base, staged = update.base, update.staged
        if not staged:
            return None
        if base.keys is None:
            raise NotFound("no keys")
        if update.missing:
            raise KeyNotFound("unknown", keys=tuple(update.missing))
        self._check_base("edit", base)
        if update.deleted or update.inserted:
            self.adopt()
        head = self.newest
        before, now = base.by_key, head.by_key
        appeared = [key for key in staged if key not in before and key in now]
        # Two who remove the same sample want the same.
        gone = [key for key, edit in staged.items() if key in before and key not in now and edit.what != "delete"]
        changed = [key for key in staged if key in before and key in now and before[key] != now[key]]
        if taken := appeared or gone or changed:
            raise KeyConflict("somebody else was first", keys=tuple(taken))
        removed = {key for key in now if key in staged and staged[key].what == "delete"}
        added = {key: edit.value for key, edit in staged.items() if key not in before}
        replaced = len(staged.keys() & now.keys()) - len(removed)
        ops = [op for op, count in (("replace", replaced), ("insert", len(added)), ("delete", len(removed))) if count]
        if not ops:
            return None
        kept = {key: staged[key].applied(sample) if key in staged else sample for key, sample in now.items() if key not in removed}
        same = not added and kept == now
        if same and not named:
            return None
        after = {**kept, **added}
        op = ops[0] if len(ops) == 1 else "edit"
        return self._add(replace(head, op=op, samples=tuple(after.values()), keys=tuple(after)), same=same)

    def set_keys(self, keys: Sequence[Key], key_field: str | None, *, overwrite: bool) -> ModelVersion:
        """Give the samples keys, or other ones."""
        if self.newest.keys is not None and not overwrite:
            raise KeysExist("there are keys")
        _check_unique(keys)
        self.adopt()
        return self._add(replace(self.newest, op="keys", keys=tuple(keys), key_field=key_field))

    def adopt(self) -> ModelVersion | None:
        """Make the dataset of another program ours."""
        return self._add(replace(self.newest, op="adopt")) if self.newest.number == 0 else None

    def set_attributes(self, attributes: Mapping[str, Any]) -> ModelVersion | None:
        """Set attributes; None removes one."""
        if not attributes:
            return None
        self.adopt()
        merged = {**self.newest.attributes, **attributes}
        return self._add(replace(self.newest, op="attributes", attributes={k: v for k, v in merged.items() if v is not None}))

    def tag(self, name: str, wanted: int | str | None, *, move: bool) -> ModelVersion | None:
        """Name a version."""
        self.adopt()
        number = self.open(wanted).number
        if self.tags.get(name) == number:
            return None
        if name in self.tags and not move:
            raise ValueError("taken")
        self.tags[name] = number
        return self._add(replace(self.newest, op="tag"))

    def untag(self, name: str) -> ModelVersion:
        """Take a name away."""
        if name not in self.tags:
            raise VersionNotFound("no such tag")
        del self.tags[name]
        return self._add(replace(self.newest, op="tag"))

    def restore(self, wanted: int | str | None) -> ModelVersion | None:
        """Make the content of an earlier version the newest one."""
        old = self.open(wanted)
        if old.number or not self.newest.number:
            return None if self._holds(old) else self._add(replace(old, op="restore"))
        first = self.versions[1].op if 1 in self.readable else "gone"
        if first == "adopt":
            return None if self._holds(self.versions[1]) else self._add(replace(self.versions[1], op="restore"))
        if old.keys is not None and first != "replace":
            raise ValueError("keys of another program are kept only with the version that took all samples over in their places")
        return self._add(replace(old, op="restore", content=-1))

    def _holds(self, old: ModelVersion) -> bool:
        new = self.newest
        empty = not (old.samples or new.samples) and old.keys is None and new.keys is None  # nothing is the same as nothing
        return (empty or old.content == new.content) and old.attributes == new.attributes

    # --- vacuum ------------------------------------------------------------------------------------------------------

    def retained(
        self, keep: int | timedelta, leased: Iterable[int], *, grace: timedelta = timedelta(0), at_most: bool = False, late: bool = False
    ) -> set[int]:
        """Return the versions that a vacuum must keep.

        Args:
            keep: a number of versions, or a time in whole hours.
            grace: a time in whole hours; versions that were the newest one within it are kept, too.
            leased: versions that readers hold.
            at_most: the versions that it may keep; it takes a version for replaced by the next one that is still there.
            late: what it may keep on a store that archives a head by copying it, and so dates it by when it was replaced.
        """
        first = self._first(keep, at_most=at_most, late=late)
        if grace:
            first = min(first, self._first(grace, at_most=at_most, late=late))
        held = set(leased) | set(self.tags.values())
        return {number for number in self.readable if number >= first or number in held}

    def expire(self, kept: Iterable[int]) -> ModelVersion:
        """Put up the fence of a vacuum that keeps some versions."""
        self.readable = set(kept) & self.readable
        made = self._add(replace(self.newest, op="fence"))
        self.fences.append(made.number)
        return made

    def _first(self, keep: int | timedelta, *, at_most: bool, late: bool) -> int:
        newest = self.newest.number
        if isinstance(keep, timedelta):
            replaced = {number: self._replaced(number, at_most=at_most, late=late) for number in self.readable - {newest}}
            return min((number for number, hour in replaced.items() if hour > self.hour - keep / _HOUR), default=newest)
        left = keep
        for number in range(newest, 0, -1) if keep else ():
            left -= self.versions[number].op not in _ASIDE
            if left == 0:
                return number
        return 0 if keep else newest

    def _replaced(self, number: int, *, at_most: bool, late: bool) -> int:
        later = sorted(other for other in (self.readable if at_most else self.versions) if other > number)
        return self.versions[later[1] if late and len(later) > 1 else later[0]].hour

    # --- parts -------------------------------------------------------------------------------------------------------

    def since(self, base: ModelVersion) -> list[ModelVersion]:
        """Return the versions after one."""
        return [self.versions[number] for number in sorted(self.versions) if number > base.number]

    def _check_base(self, op: str, base: ModelVersion | None) -> None:
        """Raise when a change that was made for ``base`` has no place on the newest version."""
        if base is None:
            return
        if base.number not in self.readable:
            raise SessionExpired("the base has expired")
        ops = [version.op for version in self.since(base)]
        if any(known in _REPLACES_ALL for known in ops) or (op == "overwrite" and any(known not in _ASIDE for known in ops)):
            raise OverwriteConflict("replaced meanwhile")

    def _add(self, version: ModelVersion, *, same: bool = False) -> ModelVersion:
        number = max(self.versions, default=0) + 1
        content = version.content if (same or version.op in _SAME_CONTENT) and version.content >= 0 else number
        made = replace(version, number=number, hour=self.hour, content=content)
        self.versions[number] = made
        self.readable.add(number)
        return made


def _check_unique(keys: Sequence[Key] | None) -> None:
    if twice := [key for key, count in Counter(keys or ()).items() if count > 1]:
        raise DuplicateKeys("twice", keys=tuple(twice))
