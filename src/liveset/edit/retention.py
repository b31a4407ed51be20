"""Retention: which versions a vacuum keeps, and which files nobody needs any more. Pure: it judges a listing and an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from liveset.edit.changes import files_of
from liveset.format.index import Index
from liveset.format.stamp import Fence, Redirects, tokens_of
from liveset.lease import leased_versions
from liveset.storage import HEAD, PRIVATE, VERSIONS, Entry

__all__ = ["QUARANTINE", "Kind", "Plan", "Survey", "kind_of", "survey"]

STAGED = PRIVATE + "staged/"
QUARANTINE = PRIVATE + "quarantine/"
"""Where damaged files are kept that were replaced, with the checksum of their bytes in the name."""


class Kind(Enum):
    """What a file of a dataset is."""

    CHUNK = "chunk"
    KEYS = "key table"
    STAGED = "checkpoint"
    TEMPORARY = "temporary file"
    LEASE = "lease"
    VERSION = "version"
    FIXED = "fixed"
    """The head, and the published keys, whose names are used again and again."""


# Every kind of file must be in here: what is not is kept, and reported.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.CHUNK, re.compile(r"chunk-\d+-\d+(-[0-9a-f]{16})?(\.[^./]+)?\.bin")),
    (Kind.KEYS, re.compile(re.escape(PRIVATE) + r"keys/[^/]+\.keys")),
    (Kind.VERSION, re.compile(re.escape(VERSIONS) + r"\d{8,}\.json")),
    (Kind.LEASE, re.compile(re.escape(PRIVATE) + r"leases/[^/]+\.json")),
    (Kind.STAGED, re.compile(re.escape(STAGED) + r"[^/]+/[^/]+")),
    (Kind.TEMPORARY, re.compile(re.escape(PRIVATE) + r"[^/]+\.[0-9a-f]{16}\.tmp")),
    (Kind.FIXED, re.compile(rf"{re.escape(HEAD)}|keys/[^/]+\.parquet|keys\.parquet|{re.escape(PRIVATE)}(lock|quarantine/[^/]+)")),
)


def kind_of(name: str) -> Kind | None:
    """Return what a file is by its name; None for one that is not ours."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), None)


def age_of(entry: Entry) -> datetime:
    """Return the time from which a file counts: a stamp of whole seconds may be almost a second early."""
    return entry.modified if entry.modified.microsecond else entry.modified + timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a listing of a whole dataset says, beside its head."""

    head: Index
    now: datetime
    cutoff: datetime
    files: Mapping[Kind, Sequence[Entry]]
    versions: Mapping[int, datetime]
    """Versions that are there, and when each was replaced by the next one; the head never was, so it is not among them."""
    leased: frozenset[int]
    lapsed: frozenset[str]
    """Leases that hold no longer."""
    live: Mapping[str, frozenset[str]]
    """Runs that are at work or may be resumed, and the tokens in the names of their files."""
    unknown: tuple[str, ...]

    @property
    def fence(self) -> Fence | None:
        """The one that an earlier vacuum left."""
        return self.head.edit.fence if self.head.edit is not None else None

    @property
    def redirects(self) -> Redirects:
        """What purges put in the place of files; a purge that broke off may have left some of these."""
        return self.head.edit.redirects if self.head.edit is not None else Redirects()

    def plan(self, first: int) -> Plan:
        """Return what may go when the versions from ``first`` on are kept."""
        edit = self.head.edit
        assert edit is not None
        before = self.fence.expired_before if self.fence is not None else 0
        expired_before = max(first, before)
        held = self.leased | set(edit.tags.values())
        # A version that has expired stays so, since some of its files may be gone; a lease alone does not make it whole again.
        # Those from before the last fence that a tag or a reader has saved are as young as any when that lets them go.
        kept = tuple(v for v in sorted(self.versions) if v < expired_before and (v in held or v >= first) and self._keeps(v))
        stay = frozenset(v for v in self.versions if v >= expired_before or v in kept or v in self.leased)
        spared = tuple(sorted(token for token in self._live_tokens if self._whole(token)))
        # Never lower than before: what an earlier vacuum may still be deleting must stay doubtful for every writer.
        cutoff = max(self.cutoff, self.fence.cutoff) if self.fence is not None else self.cutoff
        fence = Fence(0, expired_before, cutoff, kept, spared)
        return Plan(fence, stay, frozenset(self.versions) - stay, self._candidates())

    @property
    def plain_and_young(self) -> set[str]:
        """Chunks that are too young to go, and of which only a version that names them can say that they are ours: they have no token."""
        named = files_of(self.head) | self.redirects.old
        return {
            entry.name
            for entry in self.files[Kind.CHUNK]
            if not tokens_of(entry.name) and entry.name not in named and not self._is_old(entry)
        }

    def kept_since(self, age: timedelta) -> int:
        """Return the first version that was the newest one, or became older than it, within the time before now."""
        return min((v for v, replaced in self.versions.items() if replaced > self.now - age), default=self.head.version)

    def _keeps(self, version: int) -> bool:
        return self.fence is None or self.fence.keeps(version)

    @property
    def _live_tokens(self) -> frozenset[str]:
        return frozenset().union(*self.live.values())

    def _whole(self, token: str) -> bool:
        """Whether no earlier vacuum may have deleted files with a token."""
        fence = self.fence
        if fence is None or token in fence.spared:
            return True
        files = (*self.files[Kind.CHUNK], *self.files[Kind.KEYS])
        return all(entry.modified > fence.cutoff for entry in files if token in tokens_of(entry.name))

    def _candidates(self) -> dict[str, Entry]:
        """Files that are old enough to go, unless a version that stays needs them."""
        named = files_of(self.head)
        live = self._live_tokens
        files = (*self.files[Kind.CHUNK], *self.files[Kind.KEYS])
        old = self.redirects.old
        unnamed = [entry for entry in files if entry.name not in named]
        found = [entry for entry in unnamed if not live or entry.name in old or live.isdisjoint(tokens_of(entry.name))]
        found += [entry for entry in self.files[Kind.STAGED] if entry.name.split("/")[2] not in self.live]
        found += self.files[Kind.TEMPORARY]
        found += [entry for entry in self.files[Kind.LEASE] if entry.name in self.lapsed]
        return {entry.name: entry for entry in found if self._is_old(entry) or entry.name in old}

    def _is_old(self, entry: Entry) -> bool:
        """Whether a file is old enough to go. What the last fence gave up may be left by one who broke off, whatever the grace."""
        fence = self.fence
        cutoff = self.cutoff if fence is None or fence.spares(entry.name) else max(self.cutoff, fence.cutoff)
        return age_of(entry) <= cutoff


@dataclass(frozen=True, slots=True)
class Plan:
    """What a vacuum will do."""

    fence: Fence
    stay: frozenset[int]
    """Earlier versions whose files must not go."""
    expired: frozenset[int]
    """Earlier versions that go."""
    candidates: Mapping[str, Entry]
    """Files that go, unless one of ``stay`` needs them."""

    def without(self, names: Iterable[str]) -> dict[str, Entry]:
        """Return the candidates that are not among the names."""
        rest = dict(self.candidates)
        for name in names:
            rest.pop(name, None)
        return rest


def survey(head: Index, listing: Iterable[Entry], now: datetime, grace: timedelta, spare: timedelta | None = None) -> Survey:
    """Return what a listing says; ``now`` is the time of the store's clock before it was made.

    Runs with a checkpoint that wrote to it within ``spare`` (if not given, within the grace) are at work.
    """
    files: dict[Kind, list[Entry]] = {kind: [] for kind in Kind}
    unknown: list[Entry] = []
    named = files_of(head)
    old = head.edit.redirects.old if head.edit is not None else frozenset()
    head_time = now
    for entry in listing:
        kind = kind_of(entry.name)
        if kind is not None:
            files[kind].append(entry)
        elif entry.name not in named:
            # The chunks of another program may have any name; a purge has replaced those that it names.
            (files[Kind.CHUNK] if entry.name in old else unknown).append(entry)
        if entry.name == HEAD:
            head_time = age_of(entry)
    leases = leased_versions(files[Kind.LEASE], now)
    versions = {_number(entry.name): age_of(entry) for entry in files[Kind.VERSION]}
    archived = sorted(version for version in versions if version < head.version)
    # A version was replaced when the next one that is still there was written.
    replaced = dict(zip(archived, [*(versions[version] for version in archived[1:]), head_time], strict=False))
    cutoff = now - grace
    lapsed = frozenset(leases.lapsed)
    live = _live_runs(files[Kind.STAGED], cutoff if spare is None else now - spare)
    return Survey(head, now, cutoff, files, replaced, leases.live, lapsed, live, tuple(sorted(entry.name for entry in unknown)))


def _number(name: str) -> int:
    return int(name.removeprefix(VERSIONS).removesuffix(".json"))


def _live_runs(entries: Iterable[Entry], cutoff: datetime) -> dict[str, frozenset[str]]:
    """Return the runs that wrote something to their checkpoint after the cutoff, and the tokens of their attempts."""
    tokens: dict[str, set[str]] = {}
    live = set()
    for entry in entries:
        run = entry.name.split("/")[2]
        tokens.setdefault(run, set()).update(tokens_of(entry.name))
        if age_of(entry) > cutoff:
            live.add(run)
    return {run: frozenset(found) for run, found in tokens.items() if run in live}
