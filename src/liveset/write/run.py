"""One run from the first input to the commit, and what is cleaned up when it fails."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from liveset.edit.commit import new_token
from liveset.errors import CommitUnknown
from liveset.format.index import Index
from liveset.write.checkpoint import Checkpoint, fingerprint
from liveset.write.chunker import StagedChunk
from liveset.write.execution import Execution, Job
from liveset.write.inputs import Indexed
from liveset.write.plan import Span
from liveset.write.progress import Progress
from liveset.write.spans import SpanResult
from liveset.write.staging import Staging
from liveset.write.target import CommitWishes, Target
from liveset.write.unify import unify, with_keys

_log = logging.getLogger("liveset")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller wants of a run beside its result."""

    use_checkpoint: bool = False
    verbose: bool = True
    commit: CommitWishes = field(default_factory=CommitWishes)
    facts: Mapping[str, Any] | None = None  # arguments that a resumed run must have in common with the broken one


class Run:
    """Does a job and commits what came of it; a failed run leaves nothing behind but a checkpoint that was asked for."""

    def __init__(self, job: Job, target: Target, wishes: Wishes) -> None:
        self._target, self._wishes = target, wishes
        self._store = target.store
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
                if self._committed_before():
                    return
            elif isinstance(self._job.inputs, Indexed):
                self._job = replace(self._job, spans=(Span(0, 0, len(self._job.inputs)),))
            self._execute()
        except BaseException as error:
            self._clean_up(error)
            raise

    def _probe(self) -> None:
        """Write a file and remove it: a place that cannot be written to is found out before any work is done; makes no folder."""
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
        records = [chunk.record for chunk in unified.chunks]
        self._committing = True
        wishes = replace(self._wishes.commit, resumed=self._checkpoint is not None)
        version = self._target.commit(unified.chunks, unified.schema, settings, wishes)
        names = {record.filename for record in records} | _key_tables(version)
        if version is not None and not {record.filename for record in records} <= {record.filename for record in version.chunks}:
            self._staging.discard()  # the session was committed before; these chunks are in no version
        elif unified.replaced:
            self._store.delete(unified.replaced)
        self._report(progress, version, chunks, sum(result.inputs for result in results) + before, skipped)
        self._close_checkpoint(names)
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

    def _report(self, progress: Progress, version: Index | None, chunks: Sequence[StagedChunk], inputs: int, skipped: int) -> None:
        samples, size = sum(chunk.record.samples for chunk in chunks), sum(chunk.record.size for chunk in chunks)
        text = f"{samples:,} samples of {inputs:,} inputs in {len(chunks):,} chunks ({size:,} bytes)"
        if skipped:
            text += f"; {skipped:,} inputs were skipped, since fn gave no sample for them"
        if version is None:
            text += "; nothing to append, so there is no new version"
        _log.info("%s: %s.", self._store.url, text)
        progress.say(f"liveset: {text}.")

    # The checkpoint

    def _open_checkpoint(self) -> None:
        inputs = self._job.inputs
        assert isinstance(inputs, Indexed)
        config = self._target.config
        facts = {
            **(self._wishes.facts or {}),
            "dataset": None if config is None else hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
            "inputs": fingerprint(inputs),
        }
        self._checkpoint = Checkpoint.open(self._store, facts, len(inputs), self._token)
        settings = replace(self._job.settings, log=self._checkpoint.folder)
        self._job = replace(self._job, settings=settings, spans=tuple(self._checkpoint.left))

    def _committed_before(self) -> bool:
        """Return whether the broken run got as far as its commit: then all that is left is to forget the checkpoint."""
        assert self._checkpoint is not None
        base = self._target.base
        names = {chunk.record.filename for chain in self._checkpoint.done for chunk in chain.chunks}
        if base is None or not names & {record.filename for record in base.chunks}:
            return False
        _log.info("%s: the run of this checkpoint was committed already.", self._store.url)
        self._close_checkpoint(names | _key_tables(base))
        return True

    def _close_checkpoint(self, keep: set[str]) -> None:
        if self._checkpoint is None:
            return
        if tokens := self._checkpoint.dead_tokens():
            self._staging.adopt(tokens)
            self._staging.discard(keep)
        self._checkpoint.remove()
        self._staging.prune(self._checkpoint.folder)

    # Failure

    def _clean_up(self, error: BaseException) -> None:
        """Remove what the run made, unless it may be part of the dataset, or is to be used again."""
        if isinstance(error, CommitUnknown) or (self._committing and self._target.may_hold(error)):
            return
        if self._checkpoint is None:
            self._staging.discard()
        elif self._checkpoint.is_empty():
            self._checkpoint.remove()
            self._staging.discard()
            self._staging.prune(self._checkpoint.folder)
        else:
            error.add_note("What is finished is kept: run the same again with use_checkpoint=True, and it goes on from there.")
            _log.warning("The run failed; what is finished is kept in %s/%s.", self._store.url, self._checkpoint.folder)


def _key_tables(version: Index | None) -> set[str]:
    files = version.edit.key_files if version is not None and version.edit is not None else None
    return set(files.tables) if files is not None else set()
