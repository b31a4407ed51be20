"""The commit: turns a change into the next version of a dataset, or says honestly that it did not.

The head is replaced by compare-and-swap, and nothing that a version needs is ever replaced. Before that the parent is archived, so that no
version is lost; after it, the outcome is read back from the head wherever the answer does not settle it.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from itertools import takewhile
from typing import TypeAlias

from liveset.edit.changes import Change, Stamp, apply, files_of, keeps_places, staged_files
from liveset.edit.rebase import check_rebase, keeps
from liveset.edit.versions import entries, entries_since, find_session
from liveset.errors import (
    CommitInterrupted,
    CommitUnknown,
    Conflict,
    DatasetError,
    ForeignEdit,
    NotFound,
    SessionExpired,
    UnsupportedFormat,
    VersionExpired,
)
from liveset.format.index import Index
from liveset.format.stamp import WRITE_FEATURES, HistoryEntry
from liveset.storage import HEAD, VERSIONS, Head, Store, Swap, version_name

__all__ = ["Policy", "Prepare", "check_texts", "commit", "landed", "new_token"]

_log = logging.getLogger("liveset")


def new_token() -> str:
    """Sixteen hex digits that nobody else draws."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Policy:
    """How stubborn a commit is, and where it takes time and chance from."""

    attempts: int = 200
    """Races that may be lost before giving up."""
    sends: int = 4
    """How often the same bytes are sent while nobody knows whether they arrived."""
    first_pause: float = 0.005
    longest_pause: float = 0.5
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    token: Callable[[], str] = new_token
    sleep: Callable[[float], object] = time.sleep
    patience: int = 3
    """Races that may be lost before others are kept waiting, where the store can do that."""

    def pause(self, number: int) -> None:
        """Waits before the next try: longer each time, and by chance, so that writers who met once do not meet again."""
        self.sleep(random.uniform(0, min(self.longest_pause, self.first_pause * 2 ** min(number, 16))))


Prepare: TypeAlias = Callable[[Index | None, Sequence[HistoryEntry]], Change | None]
"""Makes the change for the head that it will be applied to, given the commits since the base; called again after each lost race.

It may write files, and raises ``Conflict`` when the change has no place on this head. None means that nothing is left to change."""


class Outcome(Enum):
    """What the head says about a swap that was sent."""

    COMMITTED = "committed"
    LOST = "lost"
    OPEN = "open"
    """The head is still the parent: the request may yet arrive."""


def commit(
    store: Store,
    change: Change | Prepare,
    base: Index | None,
    *,
    session: str | None = None,
    message: str = "",
    author: str = "",
    resumed: bool = False,
    policy: Policy | None = None,
) -> Index:
    """Commits a change that was made for ``base`` (None: for a place without a dataset) and returns the new version.

    A ``session`` names the work: if it is in the history already, its version is returned and nothing is committed twice; of one that a
    vacuum has forgotten (``rebase.keeps`` is false for it) only the stamp is right, and the rest is that of the newest one. Raises
    ``Conflict`` when the change does not fit what was committed since ``base``, and ``CommitUnknown`` when the store does not say whether
    it landed; after that the same call with the same session settles it. Ctrl-C is ``CommitInterrupted`` from where it may come too late
    on; what its caller does after the commit goes into ``landed``. ``resumed`` says that files of the change may be older
    than the base.

    ``SessionExpired`` is raised when a vacuum ran since, and may have deleted the files of the change or the base itself.
    """
    check_texts(session=session, message=message, author=author)
    return _Commit(store, change, base, session, message, author, resumed, policy or Policy()).run()


def check_texts(**texts: str | None) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what a history cannot hold."""
    for name, text in texts.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise TypeError(f"{name}= must be text, not {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}= is not valid Unicode: {error}.") from error


@contextmanager
def landed(store: Store, index: Index, left: str = "") -> Iterator[None]:
    """Makes Ctrl-C in what is done after a commit tell that there is a new version, and what is ``left`` to do."""
    try:
        yield
    except CommitInterrupted:
        raise
    except KeyboardInterrupt as error:
        raise interrupted_after(store, index, left) from error


def interrupted_after(store: Store, index: Index, left: str = "") -> CommitInterrupted:
    """Returns what Ctrl-C raises once there is a new version."""
    return CommitInterrupted(
        f"version {index.version} of {store.url} is committed, but what follows was interrupted{left and f': {left}'}.",
        version=index.version,
        session=index.edit.session if index.edit is not None else "",
    )


class _Commit:
    def __init__(
        self,
        store: Store,
        change: Change | Prepare,
        base: Index | None,
        session: str | None,
        message: str,
        author: str,
        resumed: bool,
        policy: Policy,
    ) -> None:
        self.store, self.change, self.base, self.policy = store, change, base, policy
        self.message, self.author, self.resumed = message, author, resumed
        self.token = policy.token()
        self.named = session is not None
        self.session = session if session is not None else self.token
        self.searched = 0  # versions up to this one hold no commit of our session

    def run(self) -> Index:
        self.store.probe()  # before a change writes its files
        for attempt in range(self.policy.attempts):
            if attempt:
                self.policy.pause(attempt)
            # Who makes long work anew after each lost race would lose for ever to those who are quicker.
            with self.store.exclusive() if attempt >= self.policy.patience else nullcontext():
                if (done := self.attempt(attempt)) is not None:
                    return done
        raise Conflict(
            f"gave up after losing {self.policy.attempts} races for the next version of {self.store.url}; nothing was committed."
        )

    def attempt(self, number: int) -> Index | None:
        """The new version, or the one that has the change already; None when the race was lost."""
        head, parent = self.read()
        if self.named and (done := self.find_done(parent)) is not None:
            return done
        since = self.since(parent)
        try:
            change = self.change if isinstance(self.change, Change) else self.change(parent, since)
        except NotFound:
            if self.stands(head):
                raise
            return None  # files of a head that was replaced meanwhile may be gone; whether ours are is looked at again
        if change is None:
            assert parent is not None
            return parent
        check_rebase(change, self.base, parent, since)
        self.check_staged(change, parent)
        stamp = Stamp(f"{self.token}.{number}", self.session, self.policy.now(), self.message, self.author)
        new = apply(parent, change, stamp)
        if head is not None and parent is not None:
            self.archive(head, parent)
        outdated = self.outdated(change, parent)
        try:
            if not self.swap(head, parent, new, outdated):
                return None
            _log.info("committed version %d of %s (%s, %d samples)", new.version, self.store.url, change.op, new.samples)
        except KeyboardInterrupt as error:
            if (told := self.interrupted(head, parent, new)) is None:
                raise
            raise told from error
        return new

    def read(self) -> tuple[Head | None, Index | None]:
        """The head, if it is one that may be built upon."""
        for number in range(self.policy.attempts):
            head = self.store.read_head()
            parent = None if head is None else Index.parse(head.data, f"{self.store.url}/{HEAD}")
            if not self.later_than(parent):
                break
            # Seen between two looks: either others were quicker, or an old head was put back. Only then does it stay the same.
            again = self.store.read_head()
            if (again and again.tag) == (head and head.tag):
                raise self.foreign(f"{VERSIONS} holds versions that it does not know of" if parent else "it is missing")
            self.policy.pause(number)
        if parent is not None and parent.edit is not None:
            if not parent.digest_matches():
                raise self.foreign(f"it does not fit the stamp of version {parent.version}")
            unknown = sorted(set(parent.edit.requires_write) - WRITE_FEATURES)
            if unknown:
                raise UnsupportedFormat(
                    f"{self.store.url} may only be changed by a newer liveset: it needs {', '.join(map(repr, unknown))} "
                    "(edit.requires.write). Update liveset."
                )
        return head, parent

    def stands(self, head: Head | None) -> bool:
        """Whether a head is still the newest."""
        now = self.store.read_head()
        return (now and now.tag) == (head and head.tag)

    def later_than(self, parent: Index | None) -> bool:
        """Whether versions after the head, or any where the head has no stamp, are archived: it is not the head that liveset left."""
        if parent is not None and parent.edit is not None:
            try:
                self.store.read(version_name(parent.version + 1), 0, 1)
            except NotFound:
                return False
            return True
        # The archive of version 0 is what a first commit leaves that did not get as far as the swap.
        return any(entry.name != version_name(0) for entry in self.store.list(VERSIONS)) if parent else any(self.store.list(VERSIONS))

    def foreign(self, reason: str) -> ForeignEdit:
        path = f"{self.store.url}/{HEAD}"
        return ForeignEdit(
            f"{path} was removed, replaced or changed by another program: {reason}. Nothing was committed. "
            "Run `liveset repair` on it (or liveset.repair(path)): it makes the newest archived version the newest one again. To go on "
            f"without the history, remove {VERSIONS} and the member `edit`.",
            file=path,
        )

    def since(self, parent: Index | None) -> Sequence[HistoryEntry]:
        """The commits since the base. Where some of them are no longer known, nothing can say whether they stand in the way."""
        try:
            return entries_since(self.store, parent, self.base)
        except VersionExpired as error:
            raise SessionExpired(f"{error} This change was made for an earlier version. Nothing was committed; start again.") from error

    def check_staged(self, change: Change, parent: Index | None) -> None:
        """Makes sure that no vacuum deletes, or has deleted, the files that the change brings along.

        A vacuum deletes behind its fence without looking again. So what it may delete counts as gone, even if it is still seen.
        """
        fence = parent.edit.fence if parent is not None and parent.edit is not None else None
        if fence is None or (self.base is not None and fence.version <= self.base.version and not self.resumed):
            return  # the files were written after the vacuum had listed what it would delete
        staged = {name for name in staged_files(change) - files_of(parent) if not fence.spares(name)}
        if not staged:
            return
        fresh = {entry.name for entry in self.store.list(_common_start(staged)) if entry.modified > fence.cutoff}
        if gone := sorted(staged - fresh):
            raise SessionExpired(
                f"a vacuum ran over this session and may have deleted {len(gone)} of its files, such as {gone[0]}: they are from before "
                f"{fence.cutoff.isoformat()}. Nothing was committed; start again.",
                file=gone[0],
            )

    def find_done(self, parent: Index | None) -> Index | None:
        """The version that a commit of the same session made, if there is one; where that is gone, its stamp with the newest content."""
        if parent is None:
            return None
        entry = find_session(self.store, parent, self.session, above=self.searched)
        self.searched = parent.version
        if entry is None:
            return None
        if entry.version == parent.version:
            return parent
        if parent.edit is not None and not keeps(parent, entry.version):
            return replace(parent, edit=replace(parent.edit, **entry._asdict()))
        return Index.parse(self.store.read(version_name(entry.version)), version_name(entry.version))

    def archive(self, head: Head, parent: Index) -> None:
        """Keeps the bytes of the parent. Whoever comes first does it; so an archived version always was the head."""
        self.store.write_once(version_name(parent.version), head.data)

    def outdated(self, change: Change, parent: Index | None) -> list[str]:
        """The published keys that would name other samples after the change: an old tool would believe them."""
        if parent is None:
            return []  # whatever has such a name is not a dataset's
        if keeps_places(parent, change):
            return []  # at worst the newest keys are missing there
        published = [entry.name for entry in self.store.list("keys/shard-") if entry.name.endswith(".parquet")]
        with suppress(NotFound):
            self.store.read("keys.parquet", 0, 1)  # to look for it in a listing would list everything
            published.append("keys.parquet")
        return published

    def swap(self, head: Head | None, parent: Index | None, new: Index, outdated: list[str]) -> bool:
        """Sends the new head until its fate is known: True if it is in the history, False if it never will be."""
        tag = head.tag if head else None
        withdrawn = [outdated] if outdated else []
        for sent in range(self.policy.sends):
            if sent:
                self.policy.pause(sent)
            try:
                if self.store.swap_head(new.to_bytes(), tag, *withdrawn) is Swap.SWAPPED:
                    return True
                outcome = self.outcome(head, parent, new)
            except (DatasetError, OSError) as error:
                if sent == 0 and not isinstance(error, _Unread):
                    raise  # the first send raises only if it is certain that nothing changed
                raise self.unknown() from error
            if outcome is not Outcome.OPEN:
                return outcome is Outcome.COMMITTED
            # The same bytes and tag again: whichever request arrives, the others can never match after it. A new id could land twice.
        raise self.unknown()

    def outcome(self, head: Head | None, parent: Index | None, new: Index) -> Outcome:
        """Reads the outcome of a swap from the head."""
        try:
            now = self.store.read_head()
            if (now and now.tag) == (head and head.tag):
                return Outcome.OPEN
            if now is None:
                return Outcome.LOST  # somebody removed the dataset; the tag that we expect is gone for ever
            index = Index.parse(now.data)
            ids = {entry.id for entry in entries(self.store, index, above=parent.version if parent else 0)}
        except (DatasetError, OSError) as error:
            raise _Unread from error
        return Outcome.COMMITTED if new.id in ids else Outcome.LOST

    def interrupted(self, head: Head | None, parent: Index | None, new: Index) -> CommitInterrupted | None:
        """What to raise for Ctrl-C in a swap; None when it is certain that nothing was committed."""
        if not self.store.remote:  # here a swap has happened by now, or never will
            with suppress(_Unread):
                return interrupted_after(self.store, new) if self.outcome(head, parent, new) is Outcome.COMMITTED else None
        return CommitInterrupted(self.doubt("it was interrupted while it was sent, and may still land"), session=self.session)

    def unknown(self) -> CommitUnknown:
        return CommitUnknown(self.doubt("the store did not answer"), session=self.session)

    def doubt(self, why: str) -> str:
        return (
            f"nobody knows whether the commit to {self.store.url} landed: {why}. Nothing was deleted. "
            f"liveset.was_committed(..., {self.session!r}) tells later."
        )


def _common_start(names: Collection[str]) -> str:
    """What all names begin with."""
    first, last = min(names), max(names)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


class _Unread(DatasetError):
    """The outcome of a swap could not be read back."""
