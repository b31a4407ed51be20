"""Checkpoints: what a broken run has finished, so that the next one goes on from there.

A run keeps ``_liveset/staged/<run>/``: a manifest (what is made from what), one file per attempt (who works here), and one small file for
each chunk, written once the chunk is durable. Nothing is ever replaced, so a file is whole or it is the last one that was begun; every
file carries a checksum, and a damaged one ends the chain that it belongs to. A resumed run does the inputs that no chain covers.

A run commits with a session of its own, so that a checkpoint that was left behind after the commit is known to be done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import marshal
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liveset.edit.retention import STAGED
from liveset.edit.versions import find_session
from liveset.errors import DatasetError
from liveset.format.codec import checksum
from liveset.format.index import ChunkRecord, Index
from liveset.format.schema import Schema
from liveset.format.stamp import HistoryEntry
from liveset.storage import Store
from liveset.write.chunker import StagedChunk
from liveset.write.plan import Span

if TYPE_CHECKING:
    from liveset.write.inputs import Indexed

_log = logging.getLogger("liveset")

_MANIFEST, _ATTEMPT = "manifest.json", "attempt-"
_FORMAT = 1


def write_sealed(store: Store, name: str, value: Mapping[str, Any]) -> None:
    """Write a JSON file with a checksum in its first line."""
    body = json.dumps(value, sort_keys=True).encode()
    store.write(name, checksum(body).encode() + b"\n" + body)


def read_sealed(store: Store, name: str) -> dict[str, Any] | None:
    """Return what ``write_sealed`` wrote, or None if the file is not whole."""
    try:
        seal, _, body = store.read(name).partition(b"\n")
    except DatasetError:
        return None
    if checksum(body).encode() != seal:
        return None
    value = json.loads(body)
    return value if isinstance(value, dict) and value.get("format") == _FORMAT else None


class SpanLog:
    """Writes the chain of one span, in the process that does the span."""

    def __init__(self, store: Store, folder: str, span: Span, token: str) -> None:
        self._store, self._span = store, span
        self._name = f"{folder}span-{span.start}-{span.skip}-{token}"
        self._number = 0
        self._samples = 0
        self._last: tuple[int, int, int] = (span.start, 0, 0)

    def chunk(self, chunk: StagedChunk, next_input: int, partial: int, skipped: int) -> None:
        """Note a durable chunk.

        Args:
            chunk: the chunk.
            next_input: the inputs before this one are done.
            partial: so many samples of ``next_input`` are in chunks too.
            skipped: so many of the inputs that are done gave no sample.
        """
        if chunk.end != self._samples + chunk.record.samples:
            raise AssertionError(f"{chunk.record.filename} does not follow the chunk before it")
        self._samples = chunk.end
        self._write((next_input, partial, skipped), {"record": chunk.record.to_json(), "schema": chunk.schema.to_config()})

    def close(self, next_input: int, partial: int, skipped: int) -> None:
        """Note inputs that are done since the last chunk."""
        if (next_input, partial, skipped) != self._last:
            self._write((next_input, partial, skipped), None)

    def _write(self, reached: tuple[int, int, int], chunk: Mapping[str, Any] | None) -> None:
        self._last = reached
        # Samples that were dropped because earlier chunks hold them still count as samples of their input.
        partial = reached[1] + (self._span.skip if reached[0] == self._span.start else 0)
        value = {
            "format": _FORMAT,
            "span": [self._span.start, self._span.skip],
            "number": self._number,
            "next": [reached[0], partial],
            "skipped": reached[2],
            "chunk": chunk,
        }
        write_sealed(self._store, f"{self._name}-{self._number:06d}.json", value)
        self._number += 1


@dataclass(frozen=True, slots=True)
class Chain:
    """What one attempt finished of one span: it covers the samples from ``begin`` up to ``end`` (input, samples of it)."""

    begin: tuple[int, int]
    end: tuple[int, int]
    skipped: int
    chunks: list[StagedChunk]


@dataclass(slots=True)
class Checkpoint:
    """The checkpoint of a run: what earlier attempts finished, and what is left to do.

    Attributes:
        store: where the dataset is.
        folder: where the checkpoint is.
        facts: what was told about the run when it began.
        done: what earlier attempts finished.
        left: the inputs that are left to do.
        attempts: what was noted about earlier attempts.
        session: what this attempt commits with.
    """

    store: Store
    folder: str
    facts: Mapping[str, Any]
    session: str = ""
    done: list[Chain] = field(default_factory=list)
    left: list[Span] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, store: Store, facts: Mapping[str, Any], count: int, token: str, session: str | None = None) -> Checkpoint:
        """Resume the run with these facts, or begin one.

        Args:
            store: where the dataset is.
            facts: what must be equal for a run to be resumed: configuration and inputs.
            count: how many inputs there are.
            token: of this attempt.
            session: what it commits with, if the user has said that.

        Raises:
            ValueError: there is a checkpoint of other inputs or another configuration, or a run that is at work.
        """
        others = []
        for checkpoint in checkpoints(store):
            if not (differing := checkpoint.differing(facts)):
                checkpoint.resume(count)
                checkpoint.sign(token, session)
                return checkpoint
            others.append(f"{checkpoint.folder} (other {', '.join(differing)})")
        if others:
            raise ValueError(
                f"Existing checkpoints are not compatible with the current configuration. {store.url} holds {'; '.join(others)}. "
                "Run with the same inputs and arguments as before to go on, or remove the folder to begin anew."
            )
        checkpoint = cls(store, f"{STAGED}{secrets.token_hex(8)}/", facts, left=[Span(0, 0, count)])
        write_sealed(store, checkpoint.folder + _MANIFEST, {"format": _FORMAT, "facts": facts})
        checkpoint.sign(token, session)
        return checkpoint

    def resume(self, count: int) -> None:
        """Find out what earlier attempts finished, of so many inputs."""
        self.require_idle()
        names = [entry.name for entry in self.store.list(self.folder)]
        sizes = {entry.name: entry.size for entry in self.store.list("chunk-")}
        chains = read_chains(self.store, self.folder, names, sizes)
        self.done, self.left = cover(chains, count)
        finished = count - sum(len(span) for span in self.left)
        _log.info("Resuming the run in %s/%s: %d of %d inputs are done.", self.store.url, self.folder, finished, count)

    def sign(self, token: str, session: str | None) -> None:
        """Note that an attempt begins."""
        self.session = session if session is not None else self._own_session
        value = {
            "format": _FORMAT,
            "token": token,
            "session": self.session,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
        }
        write_sealed(self.store, f"{self.folder}{_ATTEMPT}{token}.json", value)

    def differing(self, facts: Mapping[str, Any]) -> list[str]:
        """Return the names of those facts that are not equal here."""
        return [name for name, value in json.loads(json.dumps(facts)).items() if self.facts.get(name) != value]

    def find_commit(self, head: Index) -> HistoryEntry | None:
        """Return the commit that an attempt made of the run, if one got so far."""
        sessions = {self._own_session, *(attempt.get("session", "") for attempt in self.attempts)} - {""}
        found = (find_session(self.store, head, session) for session in sessions)
        return next((entry for entry in found if entry is not None), None)

    def is_idle(self) -> bool:
        """Return whether no attempt is at work, as far as this machine can tell."""
        return not any(map(_alive, self.attempts))

    def require_idle(self) -> None:
        """Raise ``ValueError`` if an attempt is at work."""
        for attempt in filter(_alive, self.attempts):
            raise ValueError(
                f"Another run (process {attempt['pid']}) is at work on the checkpoint {self.folder} of {self.store.url}. "
                "Wait until it ends, or run without use_checkpoint."
            )

    def remove(self) -> None:
        """Remove the files of the checkpoint, after the commit."""
        # The manifest goes last: without it nobody could tell that the rest is of a run that was committed.
        names = [entry.name for entry in self.store.list(self.folder)]
        self.store.delete(sorted(names, key=lambda name: (name == self.folder + _MANIFEST, name.startswith(self.folder + _ATTEMPT))))

    def is_empty(self) -> bool:
        """Return whether nothing is finished that could be used again."""
        return not any(self.store.list(f"{self.folder}span-"))

    def dead_tokens(self) -> set[str]:
        """Return the tokens of earlier attempts that are certainly over: files of theirs that nobody lists are left-overs."""
        return {attempt["token"] for attempt in self.attempts if attempt["host"] == socket.gethostname()}

    @property
    def _own_session(self) -> str:
        return f"checkpoint-{self.folder.split('/')[-2]}"


def checkpoints(store: Store) -> Iterator[Checkpoint]:
    """Yield the checkpoints that are there, with their attempts; what they finished is not read yet."""
    for folder, names in sorted(_folders(store).items()):
        manifest = read_sealed(store, folder + _MANIFEST)
        if manifest is None:
            _log.warning("%s/%s is no readable checkpoint and is ignored; remove the folder.", store.url, folder)
            continue
        attempts = [read_sealed(store, name) for name in names if name.startswith(folder + _ATTEMPT)]
        yield Checkpoint(store, folder, manifest["facts"], attempts=[attempt for attempt in attempts if attempt is not None])


def read_chains(store: Store, folder: str, names: Sequence[str], sizes: Mapping[str, int]) -> list[Chain]:
    """Return what the chains in a folder say, each up to the first file that is missing or damaged."""
    files: dict[str, dict[int, str]] = {}
    for name in names:
        if name.startswith(folder + "span-"):
            stem, _, number = name.removesuffix(".json").rpartition("-")
            if number.isdecimal():
                files.setdefault(stem, {})[int(number)] = name
    chains = [_read_chain(store, numbered, sizes) for numbered in files.values()]
    return [chain for chain in chains if chain is not None]


def _read_chain(store: Store, files: Mapping[int, str], sizes: Mapping[str, int]) -> Chain | None:
    chain, samples = None, 0
    for number in range(len(files)):
        entry = read_sealed(store, files[number]) if number in files else None
        if entry is None or entry["number"] != number:
            break
        chunks = chain.chunks if chain is not None else []
        if entry["chunk"] is not None:
            record = ChunkRecord.from_json(entry["chunk"]["record"])
            if record.filename not in sizes or (record.head_check is not None and sizes[record.filename] != record.size):
                break
            samples += record.samples
            chunks.append(StagedChunk(record, Schema.from_config(entry["chunk"]["schema"]), samples))
        begin, end = (entry["span"][0], entry["span"][1]), (entry["next"][0], entry["next"][1])
        chain = Chain(begin, end, entry["skipped"], chunks)
    return chain


def cover(chains: Sequence[Chain], count: int) -> tuple[list[Chain], list[Span]]:
    """Return chains that follow each other without overlap, and the spans of inputs between and after them."""
    done: list[Chain] = []
    left: list[Span] = []
    at = (0, 0)
    # Of two attempts at the same span the one that came further is taken.
    for chain in sorted(chains, key=lambda chain: (chain.begin, (-chain.end[0], -chain.end[1]))):
        if chain.begin != at:
            # A chain that begins inside an input only fits onto the one that it was made to follow.
            if chain.begin < at or chain.begin[1] != 0:
                continue
            left.append(Span(*at, chain.begin[0]))
        done.append(chain)
        at = chain.end
    if at[0] < count:
        left.append(Span(*at, count))
    return done, left


def fingerprint(inputs: Indexed) -> str:
    """Return a hash of the inputs, the same in every process: of all of them where they lie in memory, else of some."""
    state = hashlib.blake2b(digest_size=16)
    count = len(inputs)
    step = 1 if inputs.stable else max(1, count // 16)
    width = 4096 if inputs.stable else 1
    for start in range(0, count, width * step):
        part = inputs.take(start, min(start + width, count))
        try:
            state.update(marshal.dumps(list(part), 2))  # version 2 knows no references: equal values give equal bytes
        except ValueError:
            for item in part:
                _hash(state, item, 0)
    return f"{count}:{state.hexdigest()}"


def _hash(state: Any, value: Any, depth: int) -> None:
    """Add a value of any type; of unknown types only what they hold."""
    kind = type(value)
    state.update(f"{kind.__module__}.{kind.__qualname__}(".encode())
    if depth > 8:
        return
    if isinstance(value, Mapping):
        for key, member in value.items():
            _hash(state, key, depth + 1)
            _hash(state, member, depth + 1)
    elif isinstance(value, list | tuple):
        for member in value:
            _hash(state, member, depth + 1)
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        state.update(f"{value.dtype}{getattr(value, 'shape', ())}".encode() + (b"" if value.dtype.hasobject else value.tobytes()))
    elif isinstance(value, os.PathLike):
        state.update(os.fsencode(value))
    else:
        try:
            state.update(marshal.dumps(value, 2))
        except ValueError:
            if members := getattr(value, "__dict__", None):
                _hash(state, members, depth + 1)


def _folders(store: Store) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in store.list(STAGED):
        run, slash, _ = entry.name[len(STAGED) :].partition("/")
        if slash:
            found.setdefault(f"{STAGED}{run}/", []).append(entry.name)
    return found


def _alive(attempt: Mapping[str, Any]) -> bool:
    """Return whether the process of an attempt still runs, as far as this machine can tell."""
    if attempt["host"] != socket.gethostname() or attempt["pid"] == os.getpid():
        return False
    try:
        os.kill(attempt["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return bool(_started(attempt["pid"]) == attempt["started"])


def _started(pid: int) -> str | None:
    """Return when a process began, where the system says it: process numbers come again."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
