"""Pending edits: what an update would change, checked against the version that it was opened on and kept encoded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from liveset.edit.encoding import SampleEncoder
from liveset.edit.patch import PatchEncoder, apply_patch, join_patches
from liveset.edit.rewrite import Places
from liveset.edit.staging import Kind, Staged, StagedEdits
from liveset.edit.tables import Table
from liveset.errors import DuplicateKeys, KeyNotFound, PickleRefused, SampleError
from liveset.format import codec
from liveset.format.arrowsplice import check_rows, is_row
from liveset.format.chunk import Chunk, open_chunk
from liveset.format.fields import field_value, set_field
from liveset.format.keytable import Key, normalize_key
from liveset.format.schema import Decoder, Schema
from liveset.keystore import KeyStore, missing_key
from liveset.snapshot import Snapshot

__all__ = ["OnMissing", "PendingEdits"]

OnMissing = Literal["error", "skip", "insert"]

_OPEN_CHUNKS = 4


class PendingEdits:
    """The edits of one update. Keys are normalized by the caller with ``key``.

    Args:
        base: the version that is edited.
        keys: its keys.
        allow_pickle: store objects of any type with pickle.

    Attributes:
        staged: the edits.
        decoder: for items of the dataset.
    """

    def __init__(self, base: Snapshot, keys: KeyStore, *, allow_pickle: bool = False) -> None:
        index = base.index
        self._base, self._keys = base, keys
        self._config = index.config or {}
        schema = Schema.from_config(self._config, index.file)
        self._leaves, self._foreign = len(schema.formats), index.has_foreign_chunks
        self._encoder = SampleEncoder(schema, allow_pickle=allow_pickle)
        self._patches = PatchEncoder(schema, allow_pickle=allow_pickle)
        self._field = str(index.layout_of_keys.get("field") or "")
        self._chunks: dict[int, Chunk] = {}
        self._located: dict[Key, tuple[int, int] | None] = {}
        self.decoder = Decoder(schema, allow_pickle=allow_pickle, strict=not self._foreign)
        self.staged = StagedEdits()

    def key(self, key: Any) -> Key:
        """Return a key as the dataset has them; ``KeyNotFound`` for one of the other type, ``TypeError`` for what cannot be a key."""
        plain = normalize_key(key)
        if type(plain) is not self._keys.kind:
            raise self.missing(plain)
        return plain

    def missing(self, key: Any) -> KeyNotFound:
        """Return the error for a key that is not there."""
        if self.staged.kind(key) is Kind.DELETE:
            return KeyNotFound(f"{key!r} is removed by this update; insert() or upsert() gives it a sample again.", key=key)
        return missing_key(self._keys, key, self._base.store.url)

    def close(self) -> None:
        """Forget everything."""
        self.staged.close()
        self._chunks.clear()
        self._located.clear()

    # --- what the dataset would hold ----------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        kind = self.staged.kind(key)
        if kind is Kind.UPSERT or kind is Kind.DELETE:
            return kind is Kind.UPSERT
        return self._keys.locate(key) is not None

    def read(self, key: Key) -> Any:
        """Return the sample of a key."""
        kind = self.staged.kind(key)
        if kind is Kind.DELETE:
            raise self.missing(key)
        if kind is Kind.ROW:
            return msgspec.msgpack.decode(self.staged.get(key).data)
        if kind is Kind.REPLACE or kind is Kind.UPSERT:
            return self._decoded(self.staged.get(key).data)
        if (place := self._keys.locate(key)) is None:
            raise self.missing(key)
        if kind is Kind.PATCH:
            return self._decoded(apply_patch(self._item(key) or b"", self.staged.get(key).data, self._leaves))
        return self._chunk(*place).read(place[1])

    def places(self) -> dict[Key, tuple[int, int] | None]:
        """Return where the samples of the staged keys are, in the order in which these were staged."""
        known = self._located
        if unknown := [key for key in self.staged if key not in known]:
            known.update(zip(unknown, self._keys.locate_many(unknown), strict=True))
        return {key: known[key] for key in self.staged}

    def absent(self, places: Places) -> tuple[int, list[Key]]:
        """Return how many samples would be added, and the keys that the dataset should have and does not."""
        absent = [key for key, place in places.items() if place is None]
        missing = [key for key in absent if self.staged.kind(key) is not Kind.UPSERT]
        return len(absent) - len(missing), missing

    def deleted(self) -> int:
        """Return how many samples would be removed."""
        return sum(self.staged.kind(key) is Kind.DELETE for key in self.staged)

    def unknown(self, missing: Sequence[Key]) -> KeyNotFound:
        """Return the error for keys that the dataset should have."""
        listed = ", ".join(map(repr, missing[:10])) + (f" and {len(missing) - 10:,} more" if len(missing) > 10 else "")
        return KeyNotFound(
            f"Unknown dataset key: {listed}. Version {self._base.version} of {self._base.store.url} does not have "
            f"{'it' if len(missing) == 1 else f'these {len(missing):,} keys'}; nothing was changed.",
            keys=tuple(missing),
        )

    # --- edits -------------------------------------------------------------------------------------------------------

    def replace(self, key: Key, sample: Any) -> None:
        """Stage another sample for a key that is there, or said to be."""
        self._put(key, sample, Kind.UPSERT if self.staged.kind(key) is Kind.UPSERT else Kind.REPLACE)

    def insert(self, key: Key, sample: Any) -> None:
        """Stage a new sample."""
        if key in self:
            raise DuplicateKeys(f"{self._base.store.url} has the key {key!r} already: upsert() replaces its sample.", keys=(key,))
        self._put(key, sample, Kind.UPSERT)

    def upsert(self, key: Key, sample: Any) -> None:
        """Stage a sample for a key that may be there."""
        self._put(key, sample, Kind.UPSERT)

    def delete(self, key: Key) -> None:
        """Stage that a sample goes."""
        if key not in self:
            raise self.missing(key)
        if self._keys.locate(key) is None:
            self.staged.discard(key)
        else:
            self.staged.put(key, Staged(b"", Kind.DELETE))

    def patch(self, key: Key, changes: Mapping[str, Any]) -> None:
        """Stage other values for some fields of a sample."""
        if key not in self:
            raise self.missing(key)
        if changes:
            self._patches.check(changes)
            self._patch(key, changes, self.staged.kind(key))

    def apply(self, table: Table, on_missing: OnMissing) -> int:
        """Stage the rows of a table, all or none, and return how many there were."""
        before: dict[Key, Staged | None] = {}
        missing: list[Key] = []
        try:
            for keys, columns in table.batches():
                places = self._keys.locate_many(keys)
                self._located.update(zip(keys, places, strict=True))
                for key, row, place in zip(keys, _rows(columns, len(keys)), places, strict=True):
                    kind = self.staged.kind(key)
                    there = kind is Kind.UPSERT or (place is not None and kind is not Kind.DELETE)
                    if not there and on_missing != "insert":
                        missing.append(key)
                        continue
                    before[key] = self.staged.get(key) if kind is not None else None
                    try:
                        self._patch(key, row, kind) if there else self._insert_row(key, row)
                    except (SampleError, PickleRefused) as error:
                        raise type(error)(f"{table.where(key)}: {error}", field=error.field, key=key) from error
            if missing and on_missing == "error":
                raise self.unknown(missing)
        except BaseException:
            for key, edit in before.items():
                if edit is None:
                    self.staged.discard(key)
                else:
                    self.staged.put(key, edit)  # in its place: the order of inserts is that of their positions
            raise
        return len(before)

    def _put(self, key: Key, sample: Any, kind: Kind) -> None:
        if self._field:
            try:
                found = field_value(sample, self._field)
            except (LookupError, TypeError) as error:
                raise self._keyless(key) from error
            self._check_same_key(key, found)
        self.staged.put(key, self._encode(key, sample, kind))

    def _patch(self, key: Key, changes: Mapping[str, Any], kind: Kind | None) -> None:
        self._says_key(key, changes)
        rows = self._foreign and self._holds_rows(key)
        try:
            patch = self._patches.encode(changes, lambda: self._item(key))
        except SampleError:
            if not rows:
                raise
            self._put(key, self._patched(key, changes), Kind.REPLACE)  # such chunks hold more than the schema says
            return
        if kind is Kind.REPLACE or kind is Kind.UPSERT:
            self.staged.put(key, Staged(apply_patch(self.staged.get(key).data, patch, self._leaves), kind))
        elif kind is Kind.PATCH:
            self.staged.put(key, Staged(join_patches(self.staged.get(key).data, patch), kind))
        elif rows:
            self._put(key, self._patched(key, changes), Kind.REPLACE)
        else:
            self.staged.put(key, Staged(patch, Kind.PATCH))

    def _insert_row(self, key: Key, row: Mapping[str, Any]) -> None:
        if self._field and not self._says_key(key, row):
            row = {**row, self._field: key}
        item = self._patches.whole(self._patches.encode(row, lambda: None))
        self.staged.put(key, Staged(item, Kind.UPSERT))

    def _patched(self, key: Key, changes: Mapping[str, Any]) -> Any:
        sample = copy.deepcopy(self.read(key))
        for name, value in changes.items():
            set_field(sample, name, value)
        return sample

    # --- checks and bytes --------------------------------------------------------------------------------------------

    def _says_key(self, key: Key, changes: Mapping[str, Any]) -> bool:
        """Check what changes say about the field that holds the key, if they say it; tell whether they do."""
        try:
            given = self._patches.given(changes, self._field) if self._field else ()
        except (LookupError, TypeError) as error:
            raise self._keyless(key) from error
        for found in given:
            self._check_same_key(key, found)
        return bool(given)

    def _check_same_key(self, key: Key, found: Any) -> None:
        try:
            normal = normalize_key(found)
        except TypeError as error:
            raise self._keyless(key) from error
        if normal != key or type(normal) is not type(key):
            text = f"field {self._field!r} says {found!r}, but the sample is to be stored under the key {key!r}."
            raise SampleError(text, field=self._field)

    def _keyless(self, key: Key) -> SampleError:
        text = f"field {self._field!r} holds the key of a sample, but the sample for {key!r} has none there."
        return SampleError(text, field=self._field)

    def _encode(self, key: Key, sample: Any, kind: Kind) -> Staged:
        try:
            return Staged(self._encoder.encode(sample, lambda: self._item(key)), kind)
        except (SampleError, PickleRefused) as error:
            # Arrow chunks hold more than their schema says, None in a column of integers for example.
            if type(sample) is not dict or not is_row(sample) or (place := self._keys.locate(key)) is None or not self._holds_rows(key):
                raise
            record, _, buffer = self._base.chunk(place[0])
            try:
                check_rows(buffer, [sample], record.filename)
            except SampleError as reason:
                raise reason from error
            return Staged(msgspec.msgpack.encode(sample), Kind.ROW)

    def _decoded(self, item: bytes) -> Any:
        return self.decoder.decode(item, 0, len(item))

    def _holds_rows(self, key: Key) -> bool:
        """Whether the stored sample of a key is a row of an Arrow chunk."""
        if not self._foreign or (place := self._keys.locate(key)) is None:
            return False
        return not hasattr(self._chunk(*place), "item")

    def _item(self, key: Key) -> bytes | None:
        """Return the stored item of a key."""
        if (place := self._keys.locate(key)) is None:
            return None
        item: Callable[[int], bytes] | None = getattr(self._chunk(*place), "item", None)
        return item(place[1]) if item is not None else None

    def _chunk(self, number: int, slot: int) -> Chunk:
        """Return an open chunk; only the latest few are kept, since an inflated one takes memory. ``Erased`` if a purge took the sample."""
        if (chunk := self._chunks.pop(number, None)) is None:
            record, _, buffer = self._base.chunk(number)
            chunk = open_chunk(buffer, record, self.decoder, codec.Compression.from_config(self._config))
        self._chunks[number] = chunk
        while len(self._chunks) > _OPEN_CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        if slot in self._base.index.chunks[number].erased:
            raise self._base.erased(number, slot)
        return chunk


def _rows(columns: Mapping[str, Sequence[Any]], count: int) -> Iterator[dict[str, Any]]:
    """Yield columns row by row."""
    if not columns:
        return iter([{}] * count)
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
