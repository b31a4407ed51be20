"""Vacuum: forgets old versions, and deletes the files that no version needs.

Before anything is deleted, a fence is committed that says what may go from now on. Writers and readers that meet the fence know that their
files or their version may be gone, and those that came before it have made the commit of the fence fail. So no waiting time is needed for
safety; the grace is for runs that have not committed yet.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from liveset.edit.changes import ASIDE, Expire, files_of
from liveset.edit.commit import Policy, check_texts, commit, landed
from liveset.edit.retention import Kind, Plan, Survey, age_of, kind_of, survey
from liveset.errors import Conflict, NotFound, StorageError, UnsupportedFormat, VersionExpired
from liveset.format.index import Index
from liveset.format.stamp import WRITE_FEATURES, Redirects, tokens_of
from liveset.lease import LEASES, leased_versions
from liveset.snapshot import entries, open_snapshot
from liveset.storage import Entry, Store, open_store, version_name

__all__ = ["Keep", "VacuumReport", "vacuum", "vacuum_store"]

_log = logging.getLogger("liveset")

Keep = timedelta | int
"""Versions to keep: those that were the newest within a time, or the last so many that changed the content."""

WEEK = timedelta(days=7)
DAY = timedelta(days=1)
FEW = 64  # names that are looked for as text


@dataclass(frozen=True, slots=True)
class VacuumReport:
    """What a vacuum did, or would do.

    Attributes:
        path: of the dataset.
        dry_run: whether nothing was done.
        version: of the commit that forgot the versions; None when there was nothing to do, or with ``dry_run``.
        kept: numbers of the versions that can be read afterwards, oldest first.
        pinned: those among them, or of expired versions whose files were spared, that readers hold.
        expired: numbers of the versions that were forgotten.
        deleted: names of the deleted files by kind (``chunk``, ``key table``, ``checkpoint``, ``temporary file``, ``lease``, ``version``).
        freed: their bytes.
        unknown: names of files that liveset does not know; they were left alone.
    """

    path: str
    dry_run: bool
    version: int | None
    kept: tuple[int, ...]
    pinned: tuple[int, ...]
    expired: tuple[int, ...]
    deleted: Mapping[str, tuple[str, ...]]
    freed: int
    unknown: tuple[str, ...]

    @property
    def files(self) -> int:
        """Number of deleted files."""
        return sum(map(len, self.deleted.values()))


def vacuum(
    path: str | os.PathLike[str],
    *,
    keep: Keep = WEEK,
    grace: timedelta = DAY,
    dry_run: bool = False,
    message: str = "",
    author: str = "",
) -> VacuumReport:
    """Forget old versions of a dataset and delete the files that only they needed, and those that runs left behind.

    Versions with a tag, versions that a reader has pinned, and the newest version stay. Others may read and write meanwhile: a reader of an
    expired version gets ``VersionExpired``, and a run that began longer ago than the grace and has not committed may get
    ``SessionExpired``, unless it works with a checkpoint.

    Args:
        path: of the dataset.
        keep: a time: versions that were the newest one at some moment of it stay; or a number: so many of the last versions that changed
            the content stay.
        grace: files younger than this stay, since a run may be about to commit them, and so do versions that were the newest one within it,
            whatever ``keep`` says, since a run may have begun with one. Without any (``timedelta(0)``) running writers must start again.
        dry_run: only tell what would be done.
        message: what the history says about it; if not given, how many files and versions went.
        author: who does this.

    Returns:
        What was deleted, and what was left.

    Raises:
        DatasetNotFound: there is no dataset.
        Conflict: others committed all the time, so that no moment was found; nothing was deleted.
        UnsupportedFormat: the dataset may only be changed by a newer liveset.
        StorageError: no space is left even for the commit of the vacuum, which has the size of ``index.json``; nothing was deleted.

    Example:
        >>> import datetime, liveset
        >>> liveset.vacuum(path, dry_run=True).files
        0
        >>> liveset.vacuum(path, keep=datetime.timedelta(days=30)).kept
        (1, 2)
    """
    return vacuum_store(open_store(path), keep=keep, grace=grace, dry_run=dry_run, message=message, author=author)


def vacuum_store(
    store: Store,
    *,
    keep: Keep = WEEK,
    grace: timedelta = DAY,
    dry_run: bool = False,
    message: str = "",
    author: str = "",
    policy: Policy | None = None,
    spare: timedelta | None = None,
) -> VacuumReport:
    """Do what ``vacuum`` does, in any store; ``spare`` is a grace of its own for runs with a checkpoint."""
    _check(keep, grace)
    check_texts(message=message, author=author)
    policy = policy or Policy()
    for attempt in range(policy.attempts):
        if attempt:
            policy.pause(attempt)
        head = open_snapshot(store).index
        _check_head(store, head)
        listing = list(store.list("")) if dry_run or head.edit is None else None
        # Where nothing will be changed nothing is written, either: the clock of this host, or the newest file, tells the time well enough.
        now = store.now() if listing is None else max(datetime.now(UTC), *map(age_of, listing))
        if listing is None:
            head, listing = open_snapshot(store).index, list(store.list(""))
        found = survey(head, listing, now, grace, spare)
        if head.edit is None:
            return _report(store, found, None, {}, dry_run=dry_run)
        try:
            plan = found.plan(_first_kept(store, found, keep, grace))
            doomed, strangers = spoils(store, found, plan)
            redirects = _redirects_left(store, found, listing)
            witnesses = _witnesses(store, found.plain_and_young, plan.expired)
        except NotFound:
            continue  # another vacuum was quicker, and has removed a version that was listed
        found = replace(found, unknown=tuple(sorted({*found.unknown, *strangers})))
        if not _worth_a_commit(found, plan, doomed, witnesses) and redirects == found.redirects:
            return _report(store, found, None, {}, dry_run=dry_run)
        if dry_run:
            return _report(store, found, plan, doomed, dry_run=True, witnesses=witnesses)
        try:
            told = message or f"{len(doomed)} files and {len(plan.expired)} versions"
            # The plan holds for this head alone: whoever commits before the fence is up makes it worthless.
            fenced = commit(store, Expire(plan.fence, redirects), head, message=told, author=author, policy=_once(policy))
        except Conflict:
            continue
        except StorageError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(store, head, error) from error
            raise
        with landed(store, fenced, "files that no version needs may be left; the next vacuum deletes them"):
            return _delete(store, found, plan, doomed, witnesses, fenced.version)
    raise Conflict(f"gave up after losing {policy.attempts} races: others commit to {store.url} all the time. Nothing was deleted.")


def _check(keep: Keep, grace: timedelta) -> None:
    if isinstance(keep, bool) or not isinstance(keep, timedelta | int):
        raise TypeError(f"keep must be a timedelta or a number of versions, not {keep!r}.")
    if (keep.total_seconds() if isinstance(keep, timedelta) else keep) < 0:
        raise ValueError(f"keep must not be negative: {keep!r}.")
    if not isinstance(grace, timedelta):
        raise TypeError(f"grace must be a timedelta, not {grace!r}.")
    if grace < timedelta(0):
        raise ValueError(f"grace must not be negative: {grace!r}.")


def _check_head(store: Store, head: Index) -> None:
    unknown = sorted(set(head.edit.requires_write) - WRITE_FEATURES) if head.edit is not None else []
    if unknown:
        raise UnsupportedFormat(
            f"{store.url} may only be changed by a newer liveset: it needs {', '.join(map(repr, unknown))} (edit.requires.write)."
        )


def _once(policy: Policy) -> Policy:
    return Policy(1, policy.sends, policy.first_pause, policy.longest_pause, policy.now, policy.token, policy.sleep)


def _first_kept(store: Store, found: Survey, keep: Keep, grace: timedelta) -> int:
    """The first version that is kept for its age or its place, or since a writer may have begun with it within the grace."""
    first = _first_wanted(store, found, keep)
    return min(first, found.kept_since(grace)) if grace else first


def _first_wanted(store: Store, found: Survey, keep: Keep) -> int:
    if isinstance(keep, timedelta):
        return found.kept_since(keep)
    if keep == 0:
        return found.head.version
    left = keep
    with suppress(VersionExpired):
        for entry in entries(store, found.head):
            # Tags and fences make versions, too, but nobody who wants the last ten means those.
            left -= entry.op not in ASIDE
            if left == 0:
                return entry.version
    return 0


def spoils(store: Store, found: Survey, plan: Plan) -> tuple[dict[str, Entry], set[str]]:
    """Return the files that go when the fence of a plan is up, and the names of those that stay only because they may not be ours.

    ``NotFound`` means that another vacuum has removed a version that was listed.
    """
    doomed = plan.without(needed(store, plan.candidates, plan.stay, found.redirects))
    strangers = _strangers_among(store, doomed, plan.expired, found.redirects)
    return {name: entry for name, entry in doomed.items() if name not in strangers}, strangers


def needed(store: Store, files: Iterable[str], versions: Iterable[int], redirects: Redirects) -> set[str]:
    """Those of the files that one of the versions needs; reads as many of their indexes as there is doubt."""
    doubtful = {name for name in files if kind_of(name) in (Kind.CHUNK, Kind.KEYS)}
    found: set[str] = set()
    for version in sorted(versions, reverse=True):
        if not doubtful:
            break
        data = store.read(version_name(version))
        if len(doubtful) <= FEW and not redirects and not any(b'"%s.' % name.partition(".")[0].encode() in data for name in doubtful):
            continue  # looking for the names is much quicker than parsing; what goes before the suffix stands in the text as it is
        named = files_of(Index.parse(data, version_name(version)).redirected(redirects))
        found |= doubtful & named
        doubtful -= named
    return found


def _redirects_left(store: Store, found: Survey, listing: Iterable[Entry]) -> Redirects:
    """The redirects that may still be asked for: their old file is still there, or a version that is still there names it."""
    doubtful = set(found.redirects.old)
    left = doubtful & {entry.name for entry in listing}
    doubtful -= left
    # Also those that expire now: a reader may hold one that this vacuum does not know of yet.
    for version in found.versions if doubtful else ():
        named = files_of(Index.parse(store.read(version_name(version)), version_name(version)))
        left |= doubtful & named
        doubtful -= named
    return found.redirects.only(left)


def _strangers_among(store: Store, files: Iterable[str], expired: Iterable[int], redirects: Redirects) -> set[str]:
    """Those of the files that nothing says are ours: without a token in their names, and named by no redirect and no version that goes."""
    doubtful = {name for name in files if kind_of(name) is Kind.CHUNK and not tokens_of(name)} - redirects.old
    for version in expired:
        if not doubtful:
            break
        doubtful -= files_of(Index.parse(store.read(version_name(version)), version_name(version)))
    return doubtful


def _witnesses(store: Store, young: Collection[str], expired: Iterable[int]) -> frozenset[int]:
    """Those of the expired versions whose indexes must outlast them: they alone say of some files that are too young to go that we may."""
    left = set(young)
    found = set()
    for version in sorted(expired):
        if not left:
            break
        named = files_of(Index.parse(store.read(version_name(version)), version_name(version)))
        if not left.isdisjoint(named):
            found.add(version)
        left -= named
    return frozenset(found)


def _worth_a_commit(found: Survey, plan: Plan, doomed: Mapping[str, Entry], witnesses: frozenset[int]) -> bool:
    """Whether there is more to do than to forget the version before the last fence: a vacuum each night would find that for ever."""
    fence = found.fence
    before = {fence.version - 1, *(v for v in witnesses if not fence.keeps(v))} if fence is not None else set()
    return bool(doomed) or not plan.expired <= before


def _no_space(store: Store, head: Index, error: StorageError) -> StorageError:
    new = StorageError(
        f"{error} Before a vacuum deletes anything it commits which versions go, which takes about {len(head.source):,} bytes: "
        f"nothing was deleted from {store.url}. Make room for that, and start again."
    )
    new.errno = error.errno
    return new


def _delete(store: Store, found: Survey, plan: Plan, doomed: dict[str, Entry], witnesses: frozenset[int], fence: int) -> VacuumReport:
    # A reader may have pinned a version after the listing and looked for a fence before there was one.
    late = leased_versions(store.list(LEASES), found.now).live - found.leased
    spared = late & plan.expired
    for version in spared:
        # A version of which an earlier vacuum has removed even the index cannot be saved; its reader has met that one's fence.
        with suppress(NotFound):
            doomed = {name: doomed[name] for name in doomed.keys() - needed(store, doomed, [version], found.redirects)}
    store.delete(sorted(doomed))
    # Last, so that a vacuum that breaks off leaves no version that looks younger than it is.
    store.delete(version_name(version) for version in sorted(plan.expired - spared - witnesses))
    report = _report(store, found, plan, doomed, dry_run=False, version=fence, late=spared, witnesses=witnesses)
    _log.info("vacuum of %s: %d files deleted, %d versions kept", store.url, report.files, len(report.kept))
    return report


def _report(
    store: Store,
    found: Survey,
    plan: Plan | None,
    doomed: Mapping[str, Entry],
    *,
    dry_run: bool,
    version: int | None = None,
    late: frozenset[int] = frozenset(),
    witnesses: frozenset[int] = frozenset(),
) -> VacuumReport:
    acted = dry_run or version is not None
    expired = plan.expired - late if plan is not None and acted else frozenset()
    sizes = {entry.name: entry.size for entry in found.files[Kind.VERSION]}
    by_kind: dict[str, list[str]] = {}
    for name in doomed:
        kind = kind_of(name) or Kind.CHUNK  # those of another program may have any name
        by_kind.setdefault(kind.value, []).append(name)
    removed = [version_name(number) for number in expired - witnesses]
    if removed:
        by_kind[Kind.VERSION.value] = removed
    kept = (set(found.versions) - expired - late) | {found.head.version} | ({version} if version is not None else set())
    fence = plan.fence if plan is not None and acted else found.fence
    if fence is not None:
        kept = {number for number in kept if number >= found.head.version or fence.keeps(number)}
    return VacuumReport(
        path=store.url,
        dry_run=dry_run,
        version=version,
        kept=tuple(sorted(kept)),
        pinned=tuple(sorted((found.leased | late) & {*found.versions, found.head.version})),
        expired=tuple(sorted(expired)),
        deleted={kind: tuple(sorted(names)) for kind, names in sorted(by_kind.items())},
        freed=sum(entry.size for entry in doomed.values()) + sum(sizes[name] for name in removed),
        unknown=found.unknown,
    )
