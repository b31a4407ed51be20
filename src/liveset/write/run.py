"""One run from the first input to the commit, and what is cleaned up when it fails."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from liveset.edit.adopt import remove_unnamed
from liveset.edit.changes import files_of
from liveset.edit.commit import landed, new_token
from liveset.edit.meter import Progress
from liveset.edit.publish import publish_keys
from liveset.errors import CommitInterrupted, CommitUnknown, VersionExpired, VersionNotFound
from liveset.format.index import Index
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store
from liveset.write.checkpoint import Checkpoint, checkpoints
from liveset.write.chunker import StagedChunk
from liveset.write.execution import Execution, Job
from liveset.write.inputs import Indexed
from liveset.write.landing import CommitWishes, Landed, Landing
from liveset.write.plan import Span
from liveset.write.signals import held
from liveset.write.spans import SpanResult
from liveset.write.staging import Staging
from liveset.write.target import Target, newest
from liveset.write.unify import unify, with_keys

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller wants of a run beside its result."""

    use_checkpoint: bool = False
    verbose: bool = True
    commit: CommitWishes = field(default_factory=CommitWishes)
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a resumed run must have in common with the broken one


class Run:
    """Does a job and commits what came of it; a failed run leaves nothing behind but a checkpoint that was asked for."""

    def __init__(self, job: Job, target: Target, wishes: Wishes) -> None:
        self._target, self._wishes = target, wishes
        self._store = target.store
        self._landing = Landing(target, wishes.commit)
        self._token = new_token()
        self._staging = Staging(self._store, self._token)
        self._checkpoint: Checkpoint | None = None
        self._committing = False
        self._job = replace(job, settings=replace(job.settings, token=self._token))

    def __call__(self) -> None:
        """Do it."""
        try:
            self._probe()
            if self._wishes.use_checkpoint:
                self._open_checkpoint()
            elif isinstance(self._job.inputs, Indexed):
                self._job = replace(self._job, spans=(Span(0, 0, len(self._job.inputs)),))
            self._execute()
        except BaseException as error:
            with held():
                self._clean_up(error)
            raise

    def _probe(self) -> None:
        """Write a file and remove it: a place that cannot be written to is found out before any work is done; makes no folder."""
        self._store.probe()
        if os.path.lexists(self._store.url):
            name = f"chunk-0-0-{self._token}.probe.bin"
            self._store.write(name, b"")
            self._store.delete([name])

    def _execute(self) -> None:
        total = len(self._job.inputs) if isinstance(self._job.inputs, Indexed) else self._job.inputs.length
        before = total - sum(map(len, self._job.spans)) if self._checkpoint is not None and total is not None else 0
        progress = Progress(total, enabled=self._wishes.verbose, done=before)
        results = Execution(self._store, self._job, progress).run()
        settings = self._job.settings
        joined, skipped = self._joined(results)
        chunks = [with_keys(self._store, chunk, settings) for chunk in joined]
        unified = unify(
            self._store,
            chunks,
            compression=settings.compression,
            allow_pickle=settings.allow_pickle,
            on_write=self._staging.track,
        )
        self._committing = True
        end = self._landing.commit(unified.chunks, unified.schema, settings)
        with nullcontext() if end.version is None else landed(self._store, end.version):
            # Widening and duplicate keys make other files of some; those of a session that was committed before are in no version.
            remove_unnamed(self._store, [*unified.replaced, *(chunk.record.filename for chunk in unified.chunks)], end.version)
            self._report(progress, end, sum(result.inputs for result in results) + before, skipped)
            if self._checkpoint is not None:
                forget(self._checkpoint, end.version, self._staging)
            self._staging.prune()

    def _joined(self, results: Sequence[SpanResult]) -> tuple[list[StagedChunk], int]:
        """Return all chunks in their order, those of earlier attempts included, and how many inputs gave no sample."""
        skipped = sum(result.skipped for result in results)
        if self._checkpoint is None:
            return [chunk for result in results for chunk in result.chunks], skipped
        parts = [((result.span.start, result.span.skip), result.chunks) for result in results]
        parts += [(chain.begin, chain.chunks) for chain in self._checkpoint.done]
        skipped += sum(chain.skipped for chain in self._checkpoint.done)
        return [chunk for _, chunks in sorted(parts, key=lambda part: part[0]) for chunk in chunks], skipped

    def _report(self, progress: Progress, landed: Landed, inputs: int, skipped: int) -> None:
        samples, size = sum(record.samples for record in landed.records), sum(record.size for record in landed.records)
        text = f"{samples:,} samples of {inputs:,} inputs in {len(landed.records):,} chunks ({size:,} bytes)"
        if skipped:
            text += f"; {skipped:,} inputs were skipped, since fn gave no sample for them"
        if landed.replaced:
            text += f"; {landed.replaced:,} samples took the place of those with the same keys"
        if landed.skipped:
            text += f"; {landed.skipped:,} samples were left out, since the dataset has their keys"
        if landed.repeated:
            text += f"; {landed.repeated:,} samples were left out, since others of the same run have their keys"
        if landed.version is None:
            text += "; nothing to append, so there is no new version"
        _log.info("%s: %s.", self._store.url, text)
        progress.say(f"liveset: {text}.")

    # The checkpoint

    def _open_checkpoint(self) -> None:
        inputs = self._job.inputs
        assert isinstance(inputs, Indexed)
        config = self._target.config
        facts = {
            **self._wishes.facts,
            "dataset": None if config is None else hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }
        wishes = self._wishes.commit
        self._checkpoint = Checkpoint.open(self._store, facts, len(inputs), self._token, wishes.session)
        self._landing = Landing(self._target, replace(wishes, session=self._checkpoint.session, resumed=True))
        settings = replace(self._job.settings, log=self._checkpoint.folder)
        self._job = replace(self._job, settings=settings, spans=tuple(self._checkpoint.left))

    # Failure

    def _clean_up(self, error: BaseException) -> None:
        """Remove what the run made, unless it may be part of the dataset, or is to be used again."""
        if isinstance(error, CommitUnknown | CommitInterrupted) or (self._committing and self._landing.may_hold(error)):
            return
        self._landing.discard()
        if self._checkpoint is None:
            self._staging.discard()
        elif self._checkpoint.is_empty():
            self._checkpoint.remove()
            self._staging.discard()
            self._staging.prune(self._checkpoint.folder)
        else:
            error.add_note("What is finished is kept: run the same again with use_checkpoint=True, and it goes on from there.")
            _log.warning("The run failed; what is finished is kept in %s/%s.", self._store.url, self._checkpoint.folder)


def settle(store: Store, facts: Mapping[str, Any]) -> bool:
    """Clean up after runs that were killed between their commit and the end.

    Args:
        store: where the dataset is.
        facts: what is known of a run by its arguments alone.

    Returns:
        Whether the run with these facts is one of them.

    Raises:
        ValueError: a run with these facts is at work.
    """
    head = newest(store)
    if head is None:
        return False
    found = False
    for checkpoint in checkpoints(store):
        same = not checkpoint.differing(facts)
        if same:
            checkpoint.require_idle()
        if not checkpoint.is_idle() or (entry := checkpoint.find_commit(head.index)) is None:
            continue
        found |= same
        _log.info("%s: the run of the checkpoint %s was committed already, as version %d.", store.url, checkpoint.folder, entry.version)
        staging = Staging(store, new_token())
        try:
            version = open_snapshot(store, entry.version)
        except (VersionExpired, VersionNotFound):
            checkpoint.remove()  # which of its files are needed still is for a vacuum to find out
            staging.prune(checkpoint.folder)
        else:
            forget(checkpoint, version.index, staging)
            _publish_late(version)
    return found


def forget(checkpoint: Checkpoint, version: Index | None, staging: Staging) -> None:
    """Remove a checkpoint, and what its attempts wrote that the version which came of them does not need."""
    if tokens := checkpoint.dead_tokens():
        staging.adopt(tokens)
        staging.discard(files_of(version))
    checkpoint.remove()
    staging.prune(checkpoint.folder)


def _publish_late(version: Snapshot) -> None:
    """Publish the keys of a version if its run did not get so far."""
    keyed = version.index.edit is not None and version.index.edit.key_files is not None
    if keyed and next(iter(version.store.list("keys/")), None) is None:
        publish_keys(version.store, version.index)
