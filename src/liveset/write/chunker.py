"""ChunkWriter: samples in, durable chunk files of the wanted size out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from liveset.edit.chunkfiles import ChunkLimit, write_chunk
from liveset.format import codec
from liveset.format.chunk import MAX_CHUNK_SIZE
from liveset.format.index import ChunkRecord
from liveset.format.jsonleaf import NotExact
from liveset.format.keytable import Key, KeyColumn
from liveset.format.sample import Mismatch
from liveset.format.schema import Decoder, Encoder, Schema
from liveset.storage import Store


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A durable chunk file that no version names yet.

    Attributes:
        record: its future entry in the index.
        schema: what its items were written with; widening may have gone on after it.
        end: how many samples its writer had written, this chunk included.
        keys: the keys of its samples, slot by slot, for a dataset with keys.
    """

    record: ChunkRecord
    schema: Schema
    end: int
    keys: KeyColumn | None = None


class ChunkWriter:
    """Turns samples into durable chunk files; widens its schema when a sample asks for it, unless the schema is fixed.

    Files are written and synced by one background thread while the next chunk fills, so memory holds about two chunks.

    Args:
        store: where the files go.
        token: random part of the file names.
        rank: number of the writer; with the token and a counter it makes names unique.
        limit: when a chunk is full. A larger sample gets a chunk of its own.
        compression: of the chunks.
        schema: a fixed schema: samples that do not fit are refused. None: taken from the first sample and widened.
        fixed: whether ``schema`` is; otherwise it is the one to start from.
        nullable: fields that may be None from the start.
        allow_pickle: store objects of any type with pickle.
        first_number: where the counter in the file names starts.
        key: returns the key of a sample, for a dataset with keys.
        on_chunk: called with each chunk once it is durable, in order, in the thread that adds samples.
    """

    def __init__(
        self,
        store: Store,
        *,
        token: str,
        rank: int = 0,
        limit: ChunkLimit | None = None,
        compression: codec.Compression | None = None,
        schema: Schema | None = None,
        fixed: bool = True,
        nullable: Iterable[str] = (),
        allow_pickle: bool = False,
        first_number: int = 0,
        key: Callable[[Any], Key] | None = None,
        on_chunk: Callable[[StagedChunk], None] | None = None,
    ) -> None:
        self._store, self._token, self._rank, self._compression = store, token, rank, compression
        limit = limit or ChunkLimit()
        self._max_samples = limit.samples
        self._max_size = min(limit.size or MAX_CHUNK_SIZE, MAX_CHUNK_SIZE)
        self._encoder = Encoder(schema, fixed=fixed and schema is not None, nullable=nullable, allow_pickle=allow_pickle)
        self._encode = self._encoder.encode_exact
        self._allow_pickle = allow_pickle
        self._number, self._on_chunk = first_number, on_chunk
        self._items: list[bytes] = []
        self._size = 0
        self._key, self._keys = key, list[Key]()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[StagedChunk] | None = None
        self._flushed = 0
        self.staged: list[StagedChunk] = []
        self.names: list[str] = []

    @property
    def samples(self) -> int:
        """How many samples were added."""
        return self._flushed + len(self._items)

    @property
    def schema(self) -> Schema | None:
        """The schema of what was added so far; None before the first sample."""
        return self._encoder.schema

    def add(self, sample: Any) -> None:
        """Add one sample.

        Raises:
            SampleError: it cannot be stored so that it reads back equal, or does not fit a fixed schema.
            PickleRefused: it needs ``allow_pickle=True``.
            TypeError: its key is of a type that keys cannot have, or of another type than the keys before.
            StorageError: an earlier chunk could not be written.
        """
        try:
            item = self._encode(sample)
        except (Mismatch, UnicodeEncodeError, NotExact):
            item = self._encode_wider(sample)
        key = self._key(sample) if self._key is not None else None
        size = self._size + len(item)
        if (size > self._max_size or (self._max_samples and len(self._items) >= self._max_samples)) and self._items:
            self.flush()
            size = len(item)
        self._items.append(item)
        if key is not None:
            self._keys.append(key)
        self._size = size

    def flush(self) -> None:
        """Hand the current chunk to the background thread; waits for the one before."""
        self._collect()
        if not self._items:
            return
        assert self.schema is not None
        name = f"chunk-{self._rank}-{self._number}-{self._token}"
        chunk_id = f"{self._token}.{self._rank}.{self._number}"
        items, schema, end = self._items, self.schema, self.samples
        keys = KeyColumn.of(self._keys) if self._key is not None else None
        self._items, self._keys, self._size, self._flushed = [], [], 0, end
        self._number += 1
        self.names.append(name)
        self._thread = self._thread or ThreadPoolExecutor(1, "liveset-write")
        self._writing = self._thread.submit(self._write, name, chunk_id, items, schema, end, keys)

    def finish(self) -> None:
        """Write what is left; afterwards every chunk is durable and in ``staged``."""
        self.flush()
        self._collect()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def abort(self) -> None:
        """Forget what is not written and stop the background thread."""
        self._items, self._keys = [], []
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        if (writing := self._writing) is not None and writing.done() and not writing.cancelled() and writing.exception() is None:
            self.staged.append(writing.result())
        self._writing = None

    def _write(self, name: str, chunk_id: str, items: list[bytes], schema: Schema, end: int, keys: KeyColumn | None) -> StagedChunk:
        return StagedChunk(write_chunk(self._store, name, chunk_id, items, self._compression), schema, end, keys)

    def _collect(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        chunk = writing.result()
        self.staged.append(chunk)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def _encode_wider(self, sample: Any) -> bytes:
        before = self._encoder.schema
        item = self._encoder.encode(sample)
        after = self._encoder.schema
        if before is not None and after is not None and self._items:
            self._items, widest = recode(self._items, before, after, allow_pickle=self._allow_pickle)
            if widest != after:  # a stored value asked for more than this sample does
                self._encoder = Encoder(widest, allow_pickle=self._allow_pickle)
                item = self._encoder.encode(sample)
            self._size = sum(map(len, self._items))
        self._encode = self._encoder.encode_exact
        return item


def recode(items: list[bytes], narrow: Schema, wide: Schema, *, allow_pickle: bool) -> tuple[list[bytes], Schema]:
    """Return the items rewritten for a wider schema, and that schema: even wider than asked for when a value needs it."""
    if narrow == wide:
        return items, wide
    decode = Decoder(narrow, allow_pickle=allow_pickle).decode
    encoder = Encoder(wide, allow_pickle=allow_pickle)
    while True:
        target = encoder.schema
        rewritten = [encoder.encode(decode(item, 0, len(item))) for item in items]
        if target is not None and encoder.schema == target:
            return rewritten, target
