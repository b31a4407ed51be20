"""build_keys_index: keys for a dataset that has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from liveset.edit.adopt import adopt_store, remove_unnamed
from liveset.edit.changes import Change, Keys, SetKeys
from liveset.edit.commit import check_texts, commit, landed, new_token
from liveset.edit.keyfiles import KeyWriter
from liveset.edit.meter import Progress
from liveset.edit.publish import layout, publish_keys, require_parquet
from liveset.errors import CommitInterrupted, CommitUnknown, Corrupt, DatasetError, DatasetNotFound, DuplicateKeys, KeysExist
from liveset.format.index import Index
from liveset.format.keytable import KeyColumn, refuse_duplicates
from liveset.format.schema import Decoder, Schema
from liveset.format.stamp import HistoryEntry
from liveset.keystore import open_keys
from liveset.read.chunks import OpenChunks
from liveset.snapshot import Snapshot, open_snapshot
from liveset.storage import Store, open_store
from liveset.write.keying import KeyRule
from liveset.write.options import check_shards


def build_keys_index(
    input_dir: str | os.PathLike[str],
    key_fn: Callable[[Any], Any] | str,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verbose: bool = True,
    num_shards: int = 1,
    allow_pickle: bool = False,
    message: str = "",
    author: str = "",
    dry_run: bool = False,
) -> str:
    """Give every sample of a dataset a key, in one commit; the samples stay as they are.

    Reads the dataset chunk by chunk; memory holds the keys. With a field name only that field is decoded.

    Args:
        input_dir: the dataset.
        key_fn: a function of a sample that returns its key, or the name of the field that holds it, which the dataset remembers.
        output_dir: must be the dataset itself, if given.
        overwrite: replace keys that the dataset has.
        verbose: show progress, if this is a terminal.
        num_shards: into how many files the keys are published for other tools.
        allow_pickle: let samples create objects of any type while their keys are found.
        message: what the history says about it.
        author: who does this.
        dry_run: only find the keys and check them.

    Returns:
        The folder of the published keys.

    Raises:
        DatasetNotFound: there is no dataset.
        KeysExist: it has keys, and ``overwrite`` is False (also a ``FileExistsError``).
        DuplicateKeys: a key occurs twice.
        SampleError: a sample has no key, or one of a type that keys cannot have; the message names its position.

    Example:
        >>> folder = liveset.build_keys_index(path, "id", verbose=False)
        >>> liveset.StreamingDataset(path)["play-3"]
        {'id': 'play-3', 'square': 9}
    """
    store = open_store(input_dir)
    if output_dir is not None and open_store(output_dir).url != store.url:
        raise ValueError("output_dir= must be the dataset itself: keys are part of it.")
    build_keys(store, key_fn, overwrite, num_shards, allow_pickle, verbose=verbose, message=message, author=author, dry_run=dry_run)
    return f"{store.url}/keys"


class KeysBuilt(NamedTuple):
    """The keys that a dataset has got, or would get."""

    number: int
    kind: type
    version: int | None


def build_keys(
    store: Store,
    key_fn: Callable[[Any], Any] | str,
    overwrite: bool,
    num_shards: int,
    allow_pickle: bool,
    *,
    verbose: bool,
    message: str,
    author: str,
    dry_run: bool,
) -> KeysBuilt:
    """Do what ``build_keys_index`` does, and tell what came of it."""
    check_shards(num_shards)
    check_texts(message=message, author=author)
    require_parquet()
    rule = KeyRule.of(key_fn)
    base = open_snapshot(store).index
    folder = f"{store.url}/keys"
    _refuse_existing(store, base, overwrite, folder)
    builder = _Builder(store, rule, allow_pickle, Progress(base.samples, enabled=verbose, title="keys"))
    if dry_run:
        try:
            found = KeyColumn.join([column for _, column in builder.columns(base)])
        finally:
            builder.progress.close()
        refuse_duplicates(found)
        return KeysBuilt(len(found), found.kind, None)
    if base.edit is None:
        try:
            base = adopt_store(store, author=author)
        except (Corrupt, DuplicateKeys):  # the keys that it has cannot be kept until there are new ones
            base = adopt_store(store, author=author, keys=False)
    tables = KeyWriter(store, new_token())
    sent = False  # whether a commit may be under way that names the tables

    def prepare(head: Index | None, _: Sequence[HistoryEntry]) -> Change:
        nonlocal sent
        sent = False
        if head is None:
            raise DatasetNotFound(f"{store.url} doesn't contain any index.json file.", path=store.url)
        _refuse_existing(store, head, overwrite, folder)
        change = SetKeys(Keys(tables.fresh(builder.columns(head)), layout(num_shards, rule.field)))
        sent = True
        return change

    try:
        index = commit(store, prepare, base, message=message, author=author)
    except (CommitUnknown, CommitInterrupted):
        raise
    except BaseException as error:
        if isinstance(error, DatasetError | OSError) or not sent:  # after any other error, such as an exit, the commit may have landed
            remove_unnamed(store, tables.written, None)
        raise
    finally:
        builder.progress.close()
    with landed(store, index):
        remove_unnamed(store, tables.written, index)
    publish_keys(store, index)
    assert index.edit is not None
    assert index.edit.key_files is not None
    return KeysBuilt(index.edit.key_files.count, int if index.edit.key_files.kind == "int" else str, index.version)


def _refuse_existing(store: Store, index: Index, overwrite: bool, folder: str) -> None:
    if not overwrite and open_keys(Snapshot(store, index)) is not None:
        raise KeysExist(f"Key index already exists under {folder}. Pass overwrite=True to build it again.", path=folder)


class _Builder:
    """Finds the keys of chunks, and remembers them: after a lost race only what is new is read."""

    def __init__(self, store: Store, rule: KeyRule, allow_pickle: bool, progress: Progress) -> None:
        self._store, self._rule, self._allow_pickle, self.progress = store, rule, allow_pickle, progress
        self._known: dict[tuple[str, str], KeyColumn] = {}

    def columns(self, index: Index) -> list[tuple[str, KeyColumn]]:
        """Return id and keys of every chunk of a version."""
        if index.config is None:
            return []
        snapshot = Snapshot(self._store, index)
        chunks = OpenChunks(snapshot, self._decoder(Schema.from_config(index.config, index.file)))
        found = []
        for number, record in enumerate(index.chunks):
            name = record.id or record.filename
            if (name, record.filename) not in self._known:
                keys = [
                    self._key(sample, snapshot.starts[number] + i) for i, sample in enumerate(chunks[number].iterate(0, record.samples))
                ]
                self._known[name, record.filename] = KeyColumn.of(keys)
                self.progress.add(record.samples, record.samples)
            found.append((name, self._known[name, record.filename]))
        return found

    def _decoder(self, schema: Schema) -> Decoder:
        field = self._rule.field
        fields = None
        if field is not None and any(name == field or name.startswith((f"{field}.", f"{field}[")) for name in schema.fields):
            fields = [field]
        return Decoder(schema, fields=fields, allow_pickle=self._allow_pickle, strict=False)

    def _key(self, sample: Any, position: int) -> str | int:
        try:
            return self._rule(sample)
        except Exception as error:
            error.add_note(f"The key of the sample at position {position} of {self._store.url} was asked for.")
            raise
