"""dataset_update: replaces samples by their keys, all in one commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from liveset.edit.commit import Policy, check_texts, commit
from liveset.edit.encoding import SampleEncoder
from liveset.edit.meter import Meter
from liveset.edit.replacement import Replacement
from liveset.edit.splice import open_stored
from liveset.edit.staging import Staged, StagedSamples
from liveset.errors import (
    CommitUnknown,
    DatasetError,
    DatasetNotFound,
    KeyNotFound,
    NotFound,
    PickleRefused,
    SampleError,
    SessionClosed,
    UnsupportedFormat,
)
from liveset.format import codec
from liveset.format.arrowsplice import check_rows, is_row
from liveset.format.chunk import Chunk, open_chunk
from liveset.format.fields import field_value
from liveset.format.index import Index
from liveset.format.keytable import Key, normalize_key
from liveset.format.schema import Decoder, Schema
from liveset.keystore import KeyStore, missing_key, open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store, open_store

__all__ = ["DatasetUpdate", "UpdatePreview", "UpdateResult", "dataset_update"]

_OPEN_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class UpdatePreview:
    """What a commit would touch.

    Attributes:
        keys: number of samples that would be replaced.
        chunks: number of chunk files that would be written anew.
        bytes_to_rewrite: size of these files now.
        missing: staged keys that the dataset does not have; the commit would refuse them.
    """

    keys: int
    chunks: int
    bytes_to_rewrite: int
    missing: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What a commit did.

    Attributes:
        version: that has the changes.
        keys: number of samples that were replaced.
        chunks: number of chunk files that were written anew.
        bytes_written: size of all files that were written for it.
        seconds: that the commit took.
    """

    version: int
    keys: int
    chunks: int
    bytes_written: int
    seconds: float


def dataset_update(
    path: str | os.PathLike[str],
    *,
    session: str | None = None,
    author: str | None = None,
    allow_pickle: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> DatasetUpdate:
    """Replace samples by their keys, all in one commit; a context manager.

    New samples are checked against the schema at once, and nothing is changed before ``commit()``: leaving without it discards them. A
    commit writes the touched chunks anew, with the stored bytes of all other samples, and is whole or not at all, whatever fails. Others
    may read, append and update meanwhile: only a sample that somebody else changed too is a conflict. The first update of a dataset that
    another program wrote adopts it (see ``adopt``).

    Args:
        path: of the dataset.
        session: a name for the work (a job id): a commit of the same session happens once, also when it is tried again later.
        author: who commits, for the history.
        allow_pickle: let samples hold objects of any type. Only for datasets that you trust.
        on_progress: called with the number of chunks written and their total; by default long commits show a bar on a terminal.

    Raises:
        DatasetNotFound: there is no dataset (also a ``FileNotFoundError``).
        NotFound: the dataset has no keys (also a ``FileNotFoundError``).
        NotImplementedError: ``path`` is a URL.

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
    scheme, colon, _ = os.fspath(path).partition("://")
    if colon and scheme != "file":
        raise NotImplementedError(f"dataset_update requires a local dataset directory so far, not {scheme}://.")
    return DatasetUpdate(open_store(path), session=session, author=author, allow_pickle=allow_pickle, on_progress=on_progress)


class DatasetUpdate:
    """An update that is being prepared; made by ``dataset_update``. One thread at a time may use it.

    ``update[key] = sample`` stages a sample (the last one for a key counts), ``update[key]`` reads the staged sample, else the stored one,
    ``key in update`` tells whether the dataset has a key, and ``len(update)`` counts the staged samples.

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
        self._base, self._keys = _open(store)
        index = self._base.index
        self.version = index.version
        assert index.config is not None
        schema = Schema.from_config(index.config, index.file)
        self._compression = codec.Compression.from_config(index.config)
        self._encoder = SampleEncoder(schema, allow_pickle=allow_pickle)
        self._decoder = Decoder(schema, allow_pickle=allow_pickle, strict=not index.has_foreign_chunks)
        self._field = str(index.layout_of_keys.get("field") or "")
        self._chunks: dict[int, Chunk] = {}
        self._staged = StagedSamples()
        self._work: Replacement | None = None
        self._unknown = False
        self._closed = ""

    # --- staging -----------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, sample: Any) -> None:
        """Stage a sample.

        Raises:
            SessionClosed: the update was committed or left.
            SampleError: the sample does not fit the schema, or the field that holds its key says another one; ``field`` names the place.
            PickleRefused: a value needs ``allow_pickle=True``.
            KeyNotFound: the key is an integer and the keys of the dataset are text, or the reverse.
            TypeError: the key is neither text nor an integer.
        """
        if self._closed:
            more = "" if self._closed == "committed" else " or after its `with` block"
            raise SessionClosed(f"Cannot modify dataset_update after commit(){more}.")
        if self._unknown:  # it may have landed as it was, and would not be done twice
            raise SessionClosed("Cannot modify dataset_update after commit(): its outcome is not known yet. Call commit() again.")
        key = self._key(key)
        if self._field:
            self._check_field(key, sample)
        self._staged.put(key, self._encode(key, sample))

    def replace(self, key: Any, sample: Any) -> None:
        """Stage a sample: the same as ``update[key] = sample``."""
        self[key] = sample

    def __getitem__(self, key: Any) -> Any:
        """Return the staged sample of a key, else the stored one; ``KeyNotFound`` when the dataset does not have the key."""
        key = self._key(key)
        if key in self._staged:
            data, row = self._staged.get(key)
            return msgspec.msgpack.decode(data) if row else self._decoder.decode(data, 0, len(data))
        if (place := self._keys.locate(key)) is None:
            raise missing_key(self._keys, key, self._store.url)
        return self._chunk(place[0]).read(place[1])

    def __contains__(self, key: Any) -> bool:
        return self._keys.locate(normalize_key(key)) is not None

    def __len__(self) -> int:
        return len(self._staged)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys of the staged samples."""
        return iter(self._staged)

    def __repr__(self) -> str:
        return f"DatasetUpdate({self._store.url!r}, version={self.version}, staged={len(self._staged)})"

    # --- the end -----------------------------------------------------------------------------------------------------

    def preview(self) -> UpdatePreview:
        """Return what a commit would touch; writes nothing."""
        places, missing = self._places()
        chunks = {record.id or record.filename: record.size for record in self._base.index.chunks}
        return UpdatePreview(sum(map(len, places.values())), len(places), sum(chunks[chunk] for chunk in places), tuple(missing))

    def commit(self, message: str = "") -> UpdateResult:
        """Put the staged samples into a new version; without any, nothing happens. Afterwards the update is closed.

        When it fails the staged samples stay, so that the commit can be tried again.

        Args:
            message: what the history says about the version.

        Raises:
            SessionClosed: the update was committed or left.
            KeyNotFound: the dataset does not have some of the keys; ``keys`` names all of them.
            KeyConflict: other commits changed some of the same samples since the update was opened; ``keys`` names them.
            OverwriteConflict: the dataset was replaced meanwhile.
            StorageError: a file could not be written.
            CommitUnknown: the store did not say whether the commit landed: call ``commit()`` again to settle it.

        Whatever is raised but CommitUnknown: nothing was changed.
        """
        if self._closed:
            raise SessionClosed(
                "session already committed." if self._closed == "committed" else "the `with` block of this update has ended uncommitted."
            )
        started = time.perf_counter()
        if not self._staged:
            self._end("committed")
            return UpdateResult(self._base.version, 0, 0, 0, time.perf_counter() - started)
        places, missing = self._places()
        if missing:
            listed = ", ".join(map(repr, missing[:10])) + (f" and {len(missing) - 10:,} more" if len(missing) > 10 else "")
            raise KeyNotFound(
                f"Unknown dataset key: {listed}. Version {self.version} of {self._store.url} does not have "
                f"{'it' if len(missing) == 1 else f'these {len(missing):,} keys'}; nothing was changed.",
                keys=tuple(missing),
            )
        meter = Meter() if self._on_progress is None else None
        if self._work is None or not self._unknown:  # after an unknown outcome the same files are sent again
            self._work = Replacement(self._base, places, self._staged, self._decoder, meter or self._on_progress or _silent)
        try:
            index = self._run(self._work, message)
        finally:
            if meter is not None:
                meter.close()
        result = UpdateResult(index.version, len(self._staged), len(places), self._work.size, time.perf_counter() - started)
        self._end("committed")
        return result

    def _run(self, work: Replacement, message: str) -> Index:
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
        except CommitUnknown as error:
            # The same session and files again: then only one of the two can land.
            self._unknown, self._session = True, error.session
            raise
        except BaseException as error:
            known = isinstance(error, DatasetError | OSError) or not work.prepared
            if known and not self._unknown and isinstance(error, Exception | KeyboardInterrupt):
                work.settle(None)
            raise
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
        self._staged.close()
        self._chunks.clear()
        self._work = None

    # --- parts -------------------------------------------------------------------------------------------------------

    def _key(self, key: Any) -> Key:
        plain = normalize_key(key)
        if type(plain) is not self._keys.kind:
            raise missing_key(self._keys, plain, self._store.url)
        return plain

    def _check_field(self, key: Key, sample: Any) -> None:
        try:
            found = normalize_key(field_value(sample, self._field))
        except (LookupError, TypeError, UnicodeDecodeError) as error:
            raise SampleError(
                f"field {self._field!r} holds the key of a sample, but the sample for {key!r} has none there.", field=self._field
            ) from error
        if found != key or type(found) is not type(key):
            text = f"field {self._field!r} says {found!r}, but the sample is to be stored under the key {key!r}."
            raise SampleError(text, field=self._field)

    def _encode(self, key: Key, sample: Any) -> Staged:
        try:
            return Staged(self._encoder.encode(sample, lambda: self._item(key)), is_row=False)
        except (SampleError, PickleRefused) as error:
            # Arrow chunks hold more than their schema says, None in a column of integers for example.
            if type(sample) is not dict or not is_row(sample) or (place := self._keys.locate(key)) is None:
                raise
            record = self._base.index.chunks[place[0]]
            buffer = self._base.chunk_file(place[0])[1]
            if not open_stored(buffer, record, self._compression).holds_rows:
                raise
            try:
                check_rows(buffer, [sample], record.filename)
            except SampleError as reason:
                raise reason from error
            return Staged(msgspec.msgpack.encode(sample), is_row=True)

    def _item(self, key: Key) -> bytes | None:
        """Return the stored item of a key."""
        if (place := self._keys.locate(key)) is None:
            return None
        chunk = self._chunk(place[0])
        item: Callable[[int], bytes] | None = getattr(chunk, "item", None)
        return item(place[1]) if item is not None else None

    def _chunk(self, number: int) -> Chunk:
        """Return an open chunk; only the latest few are kept, since an inflated one takes memory."""
        if (chunk := self._chunks.pop(number, None)) is None:
            record = self._base.index.chunks[number]
            chunk = open_chunk(self._base.chunk_file(number)[1], record, self._decoder, self._compression)
        self._chunks[number] = chunk
        while len(self._chunks) > _OPEN_CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        return chunk

    def _places(self) -> tuple[dict[str, dict[int, Key]], list[Key]]:
        """Return the staged keys by chunk id and slot, in the order of the chunks, and those that the dataset does not have."""
        keys = list(self._staged)
        places: dict[int, dict[int, Key]] = {}
        missing = []
        for key, place in zip(keys, self._keys.locate_many(keys), strict=True):
            if place is None:
                missing.append(key)
            else:
                places.setdefault(place[0], {})[place[1]] = key
        chunks = self._base.index.chunks
        return {chunks[number].id or chunks[number].filename: places[number] for number in sorted(places)}, missing


def _open(store: Store) -> tuple[Snapshot, KeyStore]:
    """Return the newest version of a dataset and its keys, or say why it cannot be updated."""
    if not store.exists():
        raise DatasetNotFound(f"Dataset directory not found: {store.url}", path=store.url)
    if store.read_head() is None:
        raise DatasetNotFound(f"Missing index.json in {store.url}. Did you run optimize()?", path=store.url)
    snapshot = open_snapshot(store)
    config = snapshot.index.config or {}
    if config.get("encryption") is not None or config.get("item_loader") not in (None, "PyTreeLoader"):
        what = f"needs the loader {config['item_loader']}" if config.get("encryption") is None else "is encrypted"
        raise UnsupportedFormat(f"{store.url} {what}: it cannot be updated yet.")
    keys = open_keys(snapshot)
    if keys is None or snapshot.index.config is None:
        raise NotFound(f"Missing keys/ key index in {store.url}: call build_keys_index({store.url!r}, key_fn) first.", path=store.url)
    return snapshot, keys


def _silent(_done: int, _total: int) -> None:
    """Show nothing."""
