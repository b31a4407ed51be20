"""transform(): a function over all samples of a dataset, its results back in the same dataset, in one commit."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, islice
from typing import Any

from liveset.edit.adopt import adopt_version
from liveset.edit.changes import Keys, Overwrite, Replace, files_of
from liveset.edit.chunkfiles import DEFAULT_CHUNK_SIZE, ChunkLimit
from liveset.edit.commit import Policy, check_texts, commit, landed, new_token
from liveset.edit.editable import check_editable
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.merged import Merged, merged_since, slots_from
from liveset.edit.meter import Progress
from liveset.edit.publish import publish_keys
from liveset.edit.rebase import check_rebase
from liveset.edit.versions import find_session
from liveset.errors import (
    CommitInterrupted,
    CommitUnknown,
    DatasetError,
    OverwriteConflict,
    SampleError,
    SchemaConflict,
    SessionExpired,
    StorageError,
    VersionExpired,
    WorkerError,
)
from liveset.format.codec import Compression
from liveset.format.config import make_config, stored_limits
from liveset.format.fields import check_names
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import KeyColumn
from liveset.format.schema import Schema
from liveset.format.stamp import HistoryEntry
from liveset.keystore import open_keys
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import open_store
from liveset.write import options
from liveset.write.chunkfeed import Feed, Sink, items_of, shares_of
from liveset.write.chunktask import ChunkTask, Failure, Made, Misfit, NewSchema, Part, Written
from liveset.write.failures import FOUND
from liveset.write.runner import Runner
from liveset.write.shipping import dump_function, warn_if_large
from liveset.write.signals import unwinding
from liveset.write.spans import ChunkSettings
from liveset.write.staging import Staging
from liveset.write.unify import unify
from liveset.write.workers import Pool

__all__ = ["TransformResult", "transform"]

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class TransformResult:
    """What a transform did, or would do.

    Attributes:
        version: that has the new samples; the one before where nothing changed.
        samples: number of samples that the dataset had when the transform began.
        changed: number of samples that became others; all of them where their schema changed.
        chunks: number of chunk files that were written for them.
        bytes_written: size of these files.
        seconds: that it took.
    """

    version: int
    samples: int
    changed: int
    chunks: int
    bytes_written: int
    seconds: float


def transform(
    path: str | os.PathLike[str],
    fn: Callable[[Any], Any],
    *,
    where: Callable[[Any], Any] | None = None,
    fields: Iterable[str] | None = None,
    num_workers: int | None = None,
    start_method: str | None = None,
    message: str = "",
    author: str = "",
    session: str | None = None,
    allow_pickle: bool = False,
    nullable: Iterable[str] = (),
    verbose: bool = True,
    dry_run: bool = False,
) -> TransformResult:
    """Call ``fn`` with every sample of a dataset and put what it returns in the place of the sample, all in one commit.

    Only chunks in which a sample changed are written anew, and in these all other samples keep their stored bytes. Keys, order and
    attributes stay. Until the commit, and if anything fails, readers see what was there before; files of a failed transform are removed.

    When results do not fit the schema of the dataset (a field more or less, another name or type), all samples are written again with the
    schema that they have now, and a new version holds those; the earlier one stays readable. ``fn`` is then called for every sample once
    more, from the first on. All samples must come out with the same fields. Fields that stay keep their types, and images that come back
    as they were read keep their stored bytes, also under another name.

    Samples that others add meanwhile are left alone. Where they change, or remove some of, the samples of a chunk, or merge chunks, ``fn``
    is called again for the samples of the chunk as they are then; so it should depend on nothing but the sample. When the schema changes,
    any commit of others is an ``OverwriteConflict`` instead.

    Args:
        path: of the dataset.
        fn: called with each sample, which is its own to change; returns the new one. Lambdas and closures work with any number of workers.
        where: called with each sample before ``fn``; where it returns something false the sample stays as it is. With a new schema such
            samples must fit it, too.
        fields: names of the fields that ``fn`` and ``where`` get, as samples of these fields alone; ``fn`` returns the same fields, and
            all others keep their stored bytes and are not decoded: quick where samples hold images. The schema stays.
        num_workers: worker processes; None, 0 and 1 mean the calling process.
        start_method: ``"spawn"`` (default), ``"fork"`` or ``"forkserver"``; asks for worker processes even if ``num_workers`` does not.
        message: a text for the history.
        author: who did it, for the history.
        session: name of this piece of work. If a commit with this name is in the history already, nothing is done.
        allow_pickle: read and store objects of any type with pickle. Only for datasets that you trust.
        nullable: names of fields that may be None from now on, though they are not yet; where that is new, all samples are written again.
        verbose: show progress, if this is a terminal.
        dry_run: tell what would change, and write nothing.

    Raises:
        DatasetNotFound: there is no dataset.
        WorkerError: ``fn`` or ``where`` raised, or a worker process died; the message names the sample.
        SampleError: ``fn`` returned None, changed the field that holds the key, or gave a sample that cannot be stored, or not with the
            others; the message names the sample.
        PickleRefused: a sample needs ``allow_pickle=True``.
        OverwriteConflict: the dataset was replaced meanwhile, its keys were found to stand in another field, samples were deleted from a
            chunk that a compaction had made of samples from before and from after this began, or it was changed in any way while all of it
            was written again.
        SessionExpired: a purge or a vacuum removed files meanwhile that were to be read; transform again.
        Corrupt: a chunk is damaged.
        StorageError: the disk is full or failed.
        CommitUnknown: the store did not say whether the commit landed; ``was_committed`` tells later.
        ValueError: an argument has no meaning.

    Whatever is raised but CommitUnknown, and CommitInterrupted by Ctrl-C: nothing was changed.

    Example:
        >>> def flip(sample):
        ...     sample["square"] = -sample["square"]
        ...     return sample
        >>> result = liveset.transform(path, flip, where=lambda sample: sample["id"] == "play-3", message="a wrong sign")
        >>> result.version, result.changed, result.chunks
        (3, 1, 1)
        >>> liveset.StreamingDataset(path)["play-3"]["square"]
        -9
    """
    began = time.perf_counter()
    for name, function in (("fn", fn), ("where", where)):
        if not callable(function) and (name == "fn" or function is not None):
            raise ValueError(f"`{name}` should be a function of one sample. Found {type(function).__name__}.")
    check_texts(session=session, message=message, author=author)
    workers = options.check_workers(num_workers, start_method)
    fields = None if fields is None else check_names("fields", fields)
    nullable = check_names("nullable", nullable)
    store = open_store(path)
    base = open_snapshot(store)
    index = base.index
    if session is not None and (done := find_session(store, index, session)) is not None:
        _log.info("%s: session %r is committed already; there is nothing to do.", store.url, session)
        return TransformResult(done.version, len(base), 0, 0, 0, time.perf_counter() - began)
    config = index.config or {}
    check_editable(config, store.url, "transformed")
    if not len(base):
        return TransformResult(base.version, 0, 0, 0, 0, time.perf_counter() - began)
    if fields is not None:
        Schema.from_config(config, index.file).select(fields)
        if nullable:
            raise ValueError("`fields` keeps the schema, and `nullable` changes it: use one of them.")
    samples, size = stored_limits(config)
    task = ChunkTask(
        store=store,
        token=new_token(),
        index=_bare(index),
        fn=fn,
        where=where,
        field=str(index.layout_of_keys.get("field") or ""),
        fields=fields,
        allow_pickle=allow_pickle,
        strict=not index.has_foreign_chunks,
        limit=ChunkLimit(samples, size) if samples or size else ChunkLimit(None, DEFAULT_CHUNK_SIZE),
        dry=dry_run,
    )
    with unwinding():
        work = _Transform(base, task, workers, _Texts(session, message, author), verbose=verbose)
        version, changed, chunks, written = work.run(nullable)
    seconds = time.perf_counter() - began
    return TransformResult(version, len(base), changed, chunks, written, seconds)


@dataclass(frozen=True, slots=True)
class _Texts:
    session: str | None
    message: str
    author: str


class _Misfitting(Exception):
    """A result does not fit the schema, so all chunks must be written anew."""

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit.reason)
        self.misfit = misfit


class _Places:
    """Names samples of a version in errors."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def told(self, position: int) -> tuple[str, Any]:
        """Return how to call a sample, and its key."""
        chunk, slot = self._snapshot.locate(position)
        where = f"slot {slot} of {self._snapshot.index.chunks[chunk].filename}"
        try:
            keys = open_keys(self._snapshot)
            key = keys.key_at(chunk, slot) if keys is not None else None
        except DatasetError:
            key = None
        return (where if key is None else f"{key!r}, {where}"), key

    def failed(self, failure: Failure) -> Exception:
        """Return what to raise for something that went wrong."""
        error, position = failure.error, failure.position
        if position is None:
            return error
        text, key = self.told(position)
        message = f"sample {position} ({text}): {error}"
        if not isinstance(error, DatasetError):
            return StorageError(message, errno=getattr(error, "errno", None), position=position, key=key)
        return type(error)(message, **{**error.__dict__, "position": position, "key": key})

    def named(self, error: DatasetError) -> DatasetError:
        """Return an error that names its input by the number alone with the sample named, too."""
        position = getattr(error, "input_index", None)
        if position is None:
            return error
        text, key = self.told(position)
        message = str(error).replace(f" {position} ({position})", f" {position} ({text})", 1)
        return type(error)(message, **{**error.__dict__, "position": position, "key": key})


class _Transform:
    """One transform from the first sample to the commit; a failed one leaves nothing behind."""

    def __init__(self, base: Snapshot, task: ChunkTask, workers: options.Workers, texts: _Texts, *, verbose: bool) -> None:
        self._base, self._task, self._workers, self._texts, self._verbose = base, task, workers, texts, verbose
        self._store = base.store
        self._places = _Places(base)
        chunks = enumerate(base.index.chunks)
        self._parts = [Part(number, base.starts[number], record) for number, record in chunks if record.samples]
        self._sources = {record.id or record.filename: record.filename for record in base.index.chunks}
        self._chunks = frozenset(self._sources)
        self._made: dict[str, Made] = {}
        self._written: list[Written] = []
        self._staging = Staging(self._store, task.token)
        self._sent = self._committed = False

    def run(self, nullable: tuple[str, ...]) -> tuple[int, int, int, int]:
        """Do it; return the version and the numbers of changed samples, chunks and bytes."""
        try:
            new = self._look(nullable)
            if new is None:
                try:
                    self._work(self._task, self._parts)
                except _Misfitting as error:
                    _log.info("%s: not all results fit the schema, so all chunks are written anew: %s", self._store.url, error)
                    new = error.misfit.new
                    self._clean_up(error)
            return self._replace() if new is None else self._overwrite(new, nullable)
        except BaseException as error:
            self._clean_up(error)
            if isinstance(error, VersionExpired):
                raise SessionExpired(
                    f"files of version {self._base.version} were removed while it was transformed: {error} Nothing was changed. Transform "
                    "again.",
                    file=getattr(error, "file", ""),
                ) from error
            raise

    def _clean_up(self, error: BaseException) -> None:
        """Remove what was written, unless it may be part of the dataset."""
        if self._task.dry or self._committed or isinstance(error, CommitUnknown | CommitInterrupted):
            return
        if self._sent and not isinstance(error, DatasetError | OSError) and self._changed():
            return  # an interrupt may have come after the swap; what is not needed is left to a vacuum
        self._staging.discard()

    def _changed(self) -> bool:
        """Whether the dataset is not what it was when the commit began, as far as one can tell."""
        try:
            return open_snapshot(self._store).index.source != self._base.index.source
        except DatasetError:
            return True

    # --- samples -----------------------------------------------------------------------------------------------------

    def _look(self, nullable: tuple[str, ...]) -> NewSchema | None:
        """Return the new schema where it is known before all work that there will be one: fields are to be nullable that are not."""
        schema = Schema.from_config(self._base.index.config or {}, self._base.index.file)
        try:
            if schema.nullable(nullable) == schema:
                return None
        except SampleError:
            pass  # a field that fn may add
        try:
            self._here(replace(self._task, looks=True), self._parts, self._take, self._places)
        except _Misfitting as error:
            return error.misfit.new
        return NewSchema(schema, keyed=True, origins={n: n for n in range(len(schema.formats))})  # nothing was chosen

    def _work(self, task: ChunkTask, parts: Sequence[Part]) -> None:
        """Do all parts, here or in workers."""
        progress = Progress(len(self._base), enabled=self._verbose, title="transform")
        try:
            if not self._workers.forced:
                shown = progress if progress.visible else None
                self._here(task, shares_of(parts, 1)[0] if task.new else parts, self._take, self._places, shown)
                return
            count = min(self._workers.most, len(parts))
            queues = [deque(share) for share in shares_of(parts, count)] if task.new else [deque(parts)] * count
            try:
                self._pool(task, Feed(queues, self._take, progress), len(queues))
            except WorkerError as error:
                raise self._places.named(error) from error.__cause__
        finally:
            progress.close()

    def _here(
        self, task: ChunkTask, parts: Iterable[Part], take: Callable[[Any], None], places: _Places, progress: Progress | None = None
    ) -> None:
        sink = Sink()
        runner = Runner(task, sink, array("q", [-1]))
        try:
            for part in parts:
                runner.run(part.first, items_of(part, progress))
                while sink.results:
                    take(sink.results.pop(0))
        except WorkerError as error:
            raise places.named(error) from error.__cause__
        finally:
            task.close()

    def _pool(self, task: ChunkTask, feed: Feed, count: int) -> None:
        method = self._workers.start_method
        settings = ChunkSettings(self._store, task.token, task.limit)
        function: bytes | tuple[Any, ChunkSettings] = (task, settings)
        if method != "fork":
            try:
                function = dump_function(task, settings)
            except Exception as error:
                raise WorkerError(
                    f"{FOUND}. Nothing was committed.\nfn cannot be sent to worker processes: {type(error).__name__}: {error}. "
                    "Make what it needs inside fn, or run in the calling process with num_workers=1."
                ) from error
            warn_if_large(function)
        with Pool(count, method, function) as pool:
            pool.run(feed)

    def _take(self, result: Any) -> None:
        """Take note of what became of a part."""
        if isinstance(result, Failure):
            raise self._places.failed(result)
        if isinstance(result, Misfit):
            raise _Misfitting(result)
        if isinstance(result, Written):
            self._written.append(result)
        elif result.record is not None:
            self._made[_id(self._base.index.chunks[result.number])] = result

    # --- the same schema ---------------------------------------------------------------------------------------------

    def _replace(self) -> tuple[int, int, int, int]:
        """Put the new files in the place of the old ones."""
        if self._task.dry or not self._made:
            return self._base.version, *self._sums()
        base = self._adopted()

        def prepare(head: Index | None, since: Sequence[HistoryEntry]) -> Replace | None:
            check_rebase(Replace({}, {}), base, head, since)  # before any work is done
            assert head is not None
            if (field := str(head.layout_of_keys.get("field") or "")) != self._task.field:
                told = f"are those in the field {field!r}" if field else "stand in no field"
                raise OverwriteConflict(
                    f"cannot transform: the keys of the samples {told} since meanwhile. Nothing was changed. Transform again."
                )
            self._follow(Snapshot(self._store, head), merged_since(self._store, head, since))
            if not self._made:
                return None
            self._sent = True
            return Replace(
                {name: made.record for name, made in self._made.items()}, {name: self._sources[name] for name in self._made}, op="transform"
            )

        index = self._commit(prepare, base)
        return index.version, *self._sums()

    def _follow(self, head: Snapshot, merged: Merged) -> None:
        """Transform chunks again that have another file now or were merged, and forget those that are gone."""
        listed = head.index.chunks
        self._made = {name: self._made[name] for name in map(_id, listed) if name in self._made}
        for number, record in enumerate(listed):
            name = _id(record)
            if self._sources.get(name) == record.filename:
                continue
            if not (slots := slots_from(self._chunks, name, record.samples, merged)):
                continue  # samples that others added
            self._made.pop(name, None)
            self._task = replace(self._task, index=_bare(head.index), attempt=self._task.attempt + 1)
            places = _Places(head)

            def take(result: Any, name: str = name, places: _Places = places) -> None:
                if isinstance(result, Failure):
                    raise places.failed(result)
                if isinstance(result, Misfit):
                    raise SchemaConflict(
                        f"another commit changed samples of a chunk meanwhile, and what fn makes of them does not fit the schema: "
                        f"{result.reason} Nothing was changed. Transform again."
                    )
                if result.record is not None:
                    self._made[name] = result

            self._here(self._task, [Part(number, head.starts[number], record, slots=slots)], take, places)
            self._sources[name] = record.filename

    def _sums(self) -> tuple[int, int, int]:
        made = self._made.values()
        return sum(part.changed for part in made), len(made), sum(part.size for part in made)

    # --- a new schema ------------------------------------------------------------------------------------------------

    def _overwrite(self, new: NewSchema, nullable: tuple[str, ...]) -> tuple[int, int, int, int]:
        """Write all samples again, and put the new chunks in the place of all old ones."""
        if nullable:
            new = replace(new, schema=new.schema.nullable(nullable))
        token = new_token()
        self._made, self._staging = {}, Staging(self._store, token)
        task = self._task = replace(self._task, token=token, new=new)
        self._work(task, self._parts)
        staged = [chunk for written in sorted(self._written, key=lambda written: written.rank) for chunk in written.chunks]
        schema = reduce(Schema.join, [chunk.schema for chunk in staged])
        size = sum(written.size for written in self._written)
        if task.dry:
            return self._base.version, len(self._base), len(staged), size
        compression = Compression.from_config(self._base.index.config or {})
        unified = unify(self._store, staged, compression=compression, allow_pickle=task.allow_pickle, on_write=self._staging.track)
        records = [chunk.record for chunk in unified.chunks]
        again = {record.filename for record in records} - {chunk.record.filename for chunk in staged}
        size += sum(record.size for record in records if record.filename in again)
        config = make_config(unified.schema or schema, samples=task.limit.samples, size=task.limit.size, compression=compression)
        base = self._adopted()
        if base is not self._base.index and base.edit is not None and base.edit.op != "adopt":
            raise OverwriteConflict("cannot transform: the dataset was changed meanwhile. Nothing was changed. Transform again.")
        keys = self._keys(records)
        self._sent = True
        index = self._commit(Overwrite(config, tuple(records), keys=keys), base)
        if keys is not None:
            publish_keys(self._store, index)
        return index.version, len(self._base), len(records), size

    def _keys(self, records: Sequence[ChunkRecord]) -> Keys | None:
        """Give the samples in new chunks the keys that they had, by their positions."""
        store = open_keys(self._base)
        if store is None:
            return None
        keys = chain.from_iterable(store.keys_of(part.number) for part in self._parts)
        columns = [(_id(record), KeyColumn.of(list(islice(keys, record.samples)))) for record in records]
        published = dict(self._base.index.layout_of_keys)
        if self._task.new is not None and not self._task.new.keyed:
            published.pop("field", None)
        return Keys(KeyWriter(self._store, self._task.token).fresh(columns), published)

    # --- the commit --------------------------------------------------------------------------------------------------

    def _adopted(self) -> Index:
        """Adopt a dataset of another program, and return the version that has the samples that were read, in the same places."""
        before = self._base.index
        if before.edit is not None:
            return before
        first = adopt_version(self._store, before, author=self._texts.author)
        if first is None:
            raise OverwriteConflict(
                "cannot transform: another program changed the dataset before version 1 was committed. Nothing was changed. Transform "
                "again."
            )
        if first.edit is not None and first.edit.op == "adopt":  # else its chunks may hold other samples, and count as changed
            self._sources = {_id(record): record.filename for record in first.chunks}
        return first

    def _commit(self, change: Any, base: Index) -> Index:
        """Commit, and remove the files of ours that the version does not need."""
        texts = self._texts
        # Others must never wait for a function of the user, so races are lost until one is won.
        policy = Policy(patience=Policy().attempts)
        index = commit(self._store, change, base, session=texts.session, message=texts.message, author=texts.author, policy=policy)
        self._committed = True
        with landed(self._store, index):
            try:
                self._staging.discard(files_of(index))
            except (DatasetError, OSError) as error:
                _log.warning("files that are not needed any more could not be removed: %s", error)
        return index


def _bare(index: Index) -> Index:
    """Return an index without its chunks, which parts bring along: small, whatever the size of the dataset."""
    return Index.build(config=index.config, edit=index.edit)


def _id(record: ChunkRecord) -> str:
    return record.id or record.filename
