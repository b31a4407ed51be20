"""dataset_update: edits samples by their keys, all in one commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from liveset.edit.adopt import adopt_store
from liveset.edit.commit import Policy, check_texts, commit, landed
from liveset.edit.editable import check_editable
from liveset.edit.meter import Meter
from liveset.edit.pending import OnMissing, PendingEdits
from liveset.edit.rebase import keeps
from liveset.edit.report import UpdatePreview, UpdateResult
from liveset.edit.rewrite import Rewrite
from liveset.edit.tables import open_table
from liveset.edit.versions import find_session
from liveset.errors import (
    CommitInterrupted,
    CommitUnknown,
    DatasetError,
    DatasetNotFound,
    NotFound,
    SessionClosed,
)
from liveset.format.index import Index
from liveset.format.keytable import Key, normalize_key
from liveset.keystore import KeyStore, open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Place, Store, open_store

__all__ = ["DatasetUpdate", "dataset_update"]


def dataset_update(
    path: str | os.PathLike[str],
    *,
    session: str | None = None,
    author: str | None = None,
    allow_pickle: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetUpdate:
    """Replace, patch, add and remove samples by their keys, all in one commit; a context manager.

    New samples are checked against the schema at once, and nothing is changed before ``commit()``: leaving without it discards them. A
    commit writes the touched chunks anew, with the stored bytes of all other samples, and is whole or not at all, whatever fails. Others
    may read, append and update meanwhile: only a sample that somebody else changed too is a conflict. The first update of a dataset that
    another program wrote adopts it (see ``adopt``).

    Samples that are removed leave no gap: those behind them move up. New ones stand behind all others, in the order in which they were
    staged. A replaced sample stays where it is.

    Args:
        path: of the dataset.
        session: a name for the work (a job id): a commit of the same session happens once, also when it is tried again later.
        author: who commits, for the history.
        allow_pickle: let samples hold objects of any type. Only for datasets that you trust.
        on_progress: called with the number of chunks written and their total; by default long commits show a bar on a terminal.
        storage_options: how to reach an object store; see ``Place``.

    Raises:
        DatasetNotFound: there is no dataset (also a ``FileNotFoundError``).
        NotFound: the dataset has no keys (also a ``FileNotFoundError``).

    Example:
        >>> with liveset.dataset_update(path) as update:
        ...     sample = update["play-3"]
        ...     update["play-3"] = {**sample, "square": -9}
        ...     result = update.commit(message="a wrong sign")
        >>> result.version, result.keys, result.chunks
        (3, 1, 1)
        >>> liveset.StreamingDataset(path)["play-3"]["square"]
        -9
    """
    check_texts(session=session, author=author)
    store = open_store(Place.of(path, storage_options=storage_options))
    return DatasetUpdate(store, session=session, author=author, allow_pickle=allow_pickle, on_progress=on_progress)


class DatasetUpdate:
    """An update that is being prepared; made by ``dataset_update``. One thread at a time may use it.

    ``update[key] = sample`` replaces a sample and ``del update[key]`` removes it; ``insert``, ``upsert``, ``patch`` and ``apply`` do the
    rest. The last edit of a key counts. ``update[key]`` and ``key in update`` tell what the dataset would hold after a commit, and
    ``len(update)`` counts the staged edits.

    Attributes:
        version: the version that the update was opened on, and that it reads.
    """

    def __init__(
        self,
        store: Store,
        *,
        session: str | None = None,
        author: str | None = None,
        allow_pickle: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._store, self._session, self._author, self._on_progress, self._policy = store, session, author or "", on_progress, policy
        self._base, keys = _open(store, session)
        index = self._base.index
        self.version = index.version
        assert index.config is not None
        self._edits = PendingEdits(self._base, keys, allow_pickle=allow_pickle)
        self._kind, self._field = keys.kind, str(index.layout_of_keys.get("field") or "")
        self._work: Rewrite | None = None
        self._unknown = False
        self._closed = ""

    # --- staging -----------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, sample: Any) -> None:
        """Replace a sample.

        Raises:
            SessionClosed: the update was committed or left.
            SampleError: the sample does not fit the schema, or the field that holds its key says another one; ``field`` names the place.
            PickleRefused: a value needs ``allow_pickle=True``.
            KeyNotFound: the key is an integer and the keys of the dataset are text, or the reverse. A key that the dataset does not have
                is an error of ``commit()``, which names all of them.
            TypeError: the key is neither text nor an integer.
        """
        self._check_open()
        self._edits.replace(self._edits.key(key), sample)

    def replace(self, key: Any, sample: Any) -> None:
        """Replace a sample: the same as ``update[key] = sample``."""
        self[key] = sample

    def insert(self, key: Any, sample: Any) -> None:
        """Add a sample behind all others; raises what ``update[key] = sample`` raises, and ``DuplicateKeys`` if the key is there.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     update.insert("play-120", {"id": "play-120", "square": 14400})
            ...     result = update.commit()
            >>> result.inserted
            1
        """
        self._check_open()
        self._edits.insert(self._edits.key(key), sample)

    def upsert(self, key: Any, sample: Any) -> None:
        """Replace the sample of a key, or add it where the dataset does not have the key; raises what ``update[key] = sample`` raises.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     update.upsert("play-120", {"id": "play-120", "square": 14400})
            ...     update.upsert("play-3", {"id": "play-3", "square": 9})
            ...     result = update.commit()
            >>> result.keys, result.inserted
            (2, 1)
        """
        self._check_open()
        self._edits.upsert(self._edits.key(key), sample)

    def patch(self, key: Any, fields: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Change some fields of a sample; all others keep their stored bytes, and need no decoding.

        Args:
            key: of the sample.
            fields: new values by name, for names that are no Python words, such as ``meta.author`` or ``boxes[0]``. A field may be a
                container: then all that is in it is replaced.
            values: new values by name.

        Raises:
            KeyNotFound: the dataset does not have the key.
            SampleError: there is no such field, or a value does not fit it.
            SessionClosed, PickleRefused, TypeError: as for ``update[key] = sample``.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     update.patch("play-3", square=-9)
            ...     result = update.commit(message="a wrong sign")
            >>> liveset.StreamingDataset(path)["play-3"]
            {'id': 'play-3', 'square': -9}
        """
        self._check_open()
        if fields is not None and not isinstance(fields, Mapping):
            raise TypeError(f"patch() takes fields by name, as in patch(key, label=2), or a mapping of names, not {type(fields).__name__}.")
        if twice := sorted((fields or {}).keys() & values.keys()):
            raise TypeError(f"patch() was given the field {twice[0]!r} twice.")
        self._edits.patch(self._edits.key(key), {**(fields or {}), **values})

    def apply(self, table: Any, *, key: str | None = None, on_missing: OnMissing = "error") -> int:
        """Change the fields of many samples to what a table says: a row for each sample, a column for each field.

        Args:
            table: a mapping of keys to ``{field: value}``; rows as dicts; a polars, pandas or pyarrow table; or the path of a ``.csv``,
                ``.jsonl``, ``.json``, ``.parquet`` or ``.arrow`` file. Columns are named like fields: ``label``, ``meta.author``.
            key: name of the column that holds the keys; by default that of the field that holds them, else ``key``.
            on_missing: what to do with keys that the dataset does not have: raise, leave them out, or add their rows, which must be whole
                samples then.

        Returns:
            The number of samples that are changed or added.

        Raises:
            KeyNotFound: the dataset does not have some of the keys; ``keys`` names all of them.
            SampleError: a column is no field, or a value does not fit; the message names the row or the key.
            DuplicateKeys: two rows have the same key.
            SessionClosed, PickleRefused: as for ``update[key] = sample``.

        After an error the update is as it was before.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     count = update.apply({"play-3": {"square": 9}, "play-5": {"square": 25}})
            ...     result = update.commit(message="relabelled")
            >>> count, result.keys
            (2, 2)
        """
        self._check_open()
        if on_missing not in ("error", "skip", "insert"):
            raise ValueError(f"on_missing= is 'error', 'skip' or 'insert', not {on_missing!r}.")
        opened = open_table(table, schema=self._edits.decoder.schema, kind=self._kind, key=key, field=self._field or None)
        return self._edits.apply(opened, on_missing)

    def __delitem__(self, key: Any) -> None:
        """Remove a sample; ``KeyNotFound`` when the dataset does not have the key.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     del update["play-4"]
            ...     result = update.commit(message="recorded twice")
            >>> result.deleted, "play-4" in liveset.StreamingDataset(path).keys
            (1, False)
        """
        self._check_open()
        self._edits.delete(self._edits.key(key))

    def discard(self, key: Any) -> None:
        """Forget what is staged for a key, as after a ``KeyConflict``, which names the keys that stand in the way; else nothing happens.

        Example:
            >>> with liveset.dataset_update(path) as update:
            ...     update.patch("play-3", square=-9)
            ...     update.discard("play-3")
            ...     len(update)
            0
        """
        self._check_open()
        self._edits.staged.discard(self._edits.key(key))

    def __getitem__(self, key: Any) -> Any:
        """Return the sample that a key would have after a commit; ``KeyNotFound`` when it would have none."""
        self._check_not_closed()
        return self._edits.read(self._edits.key(key))

    def __contains__(self, key: Any) -> bool:
        """Tell whether a key would have a sample after a commit; ``len()`` and iteration are about the staged edits alone."""
        self._check_not_closed()
        return normalize_key(key) in self._edits

    def __len__(self) -> int:
        return len(self._edits.staged)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys of the staged edits."""
        return iter(self._edits.staged)

    def __repr__(self) -> str:
        return f"DatasetUpdate({self._store.url!r}, version={self.version}, staged={len(self)})"

    # --- the end -----------------------------------------------------------------------------------------------------

    def preview(self) -> UpdatePreview:
        """Return what a commit would touch; writes nothing."""
        self._check_not_closed()
        places = self._edits.places()
        touched = {place[0] for place in places.values() if place is not None}
        inserted, missing = self._edits.absent(places)
        return UpdatePreview(
            keys=len(places) - len(missing),
            chunks=len(touched),
            bytes_to_rewrite=sum(self._base.index.chunks[number].size for number in touched),
            missing=tuple(missing),
            inserted=inserted,
            deleted=self._edits.deleted(),
        )

    def commit(self, message: str = "") -> UpdateResult:
        """Put the staged edits into a new version; without any, nothing happens. Afterwards the update is closed.

        Chunks that hold the edits already are not written, and where all do, there is no new version; only an update with a ``session``
        makes one then, by which it is known as done. When it fails the staged edits stay, so that the commit can be tried again.

        Args:
            message: what the history says about the version.

        Raises:
            SessionClosed: the update was committed or left.
            KeyNotFound: the dataset does not have some of the keys; ``keys`` names all of them.
            KeyConflict: other commits changed, added or removed some of the same samples since the update was opened; ``keys`` names them.
            OverwriteConflict: the dataset was replaced meanwhile.
            StorageError: a file could not be written.
            CommitUnknown: the store did not say whether the commit landed: call ``commit()`` again to settle it.
            CommitInterrupted: Ctrl-C came when the commit had landed, or may have: the same settles it.

        Whatever is raised but these two: no sample was changed. A dataset of another program may have been adopted, which changes none.
        """
        self._check_not_closed()
        started = time.perf_counter()
        if not len(self):
            self._end("committed")
            return UpdateResult(self._base.version, 0, 0, 0, time.perf_counter() - started)
        places = self._edits.places()
        inserted, missing = self._edits.absent(places)
        if missing:
            raise self._edits.unknown(missing)
        if self._base.index.edit is None and (inserted or self._edits.deleted()):
            # A commit that moves samples withdraws the published keys: a crash in it must not leave the dataset without any, and the
            # keys of version 0 are those of a version that only adopts it.
            adopt_store(self._store, author=self._author, policy=self._policy)
        meter = Meter() if self._on_progress is None else None
        if self._work is None or not self._unknown:  # after an unknown outcome the same files are sent again
            progress = meter or self._on_progress or _silent
            named = self._session is not None
            self._work = Rewrite(self._base, places, self._edits.staged, self._edits.decoder, progress, named=named)
        try:
            index = self._run(self._work, message)
        finally:
            if meter is not None:
                meter.close()
        result = UpdateResult(
            version=index.version,
            keys=len(places),
            chunks=self._work.chunks,
            bytes_written=self._work.size,
            seconds=time.perf_counter() - started,
            inserted=inserted,
            deleted=self._edits.deleted(),
        )
        self._end("committed")
        return result

    def _run(self, work: Rewrite, message: str) -> Index:
        """Commit, and remove our files when it is certain that no version will ever name them."""
        try:
            index = commit(
                self._store,
                work.prepare,
                self._base.index,
                session=self._session,
                message=message,
                author=self._author,
                policy=self._policy,
            )
        except (CommitUnknown, CommitInterrupted) as error:
            # The same session and files again: then only one of the two can land.
            self._unknown, self._session = True, error.session
            raise
        except BaseException as error:
            known = isinstance(error, DatasetError | OSError) or not work.prepared
            if known and not self._unknown and isinstance(error, Exception | KeyboardInterrupt):
                work.settle(None)
            raise
        with landed(self._store, index):
            if not self._unknown or keeps(index, index.version):  # else nobody knows what it had, and later versions may name it, too
                work.settle(index)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Discard what is not committed."""
        if not self._closed:
            self._end("left")

    def _end(self, how: str) -> None:
        self._closed = how
        self._edits.close()
        self._work = None

    # --- parts -------------------------------------------------------------------------------------------------------

    def _check_not_closed(self) -> None:
        if self._closed:
            raise SessionClosed(
                "session already committed." if self._closed == "committed" else "the `with` block of this update has ended uncommitted."
            )

    def _check_open(self) -> None:
        if self._closed:
            more = "" if self._closed == "committed" else " or after its `with` block"
            raise SessionClosed(f"Cannot modify dataset_update after commit(){more}.")
        if self._unknown:  # it may have landed as it was, and would not be done twice
            raise SessionClosed("Cannot modify dataset_update after commit(): its outcome is not known yet. Call commit() again.")


def _open(store: Store, session: str | None) -> tuple[Snapshot, KeyStore]:
    """Return the version of a dataset that is to be updated, and its keys, or say why it cannot be updated.

    It is the newest one. But a piece of work that is done already is staged on the version that it was done to, if that is still there:
    on a later one its own deletes and inserts would be mistakes.
    """
    if not store.exists():
        raise DatasetNotFound(f"Dataset directory not found: {store.url}", path=store.url)
    try:
        snapshot = open_snapshot(store)
    except DatasetNotFound as error:
        raise DatasetNotFound(f"Missing index.json in {store.url}. Did you run optimize()?", path=store.url) from error
    if session is not None and (done := find_session(store, snapshot.index, session)) is not None:
        with suppress(NotFound):
            before = open_snapshot(store, done.version - 1)
            if (keys := open_keys(before)) is not None:
                return before, keys
    check_editable(snapshot.index.config or {}, store.url, "updated")
    keys = open_keys(snapshot)
    if keys is None or snapshot.index.config is None:
        raise NotFound(f"Missing keys/ key index in {store.url}: call build_keys_index({store.url!r}, key_fn) first.", path=store.url)
    return snapshot, keys


def _silent(_done: int, _total: int) -> None:
    """Show nothing."""
