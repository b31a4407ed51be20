"""Keyed datasets of about 1 KB per sample, and how each tool makes and edits them. Imports of the tools are inside their class."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Sample = dict[str, Any]
NEW = -1  # the label that every edit writes
BATCH = 1000  # rows that Lance is given at a time
_HEAD = struct.Struct("<IIq")


def name(i: int) -> str:
    """Return the key of sample number i."""
    return f"entity-{i * 7919 % 1_000_000_007:012d}"


@cache
def _noise() -> bytes:
    return random.Random(0).randbytes(2**22)


def sample(i: int) -> Sample:
    """Return sample number i; its bytes do not compress."""
    start = i * 7919 % (2**22 - 1000)
    return {"id": name(i), "label": i % 10, "raw": _noise()[start : start + 1000]}


def edited(i: int) -> Sample:
    """Return what an edit makes of sample number i."""
    return {**sample(i), "label": NEW}


def tiny(i: int) -> Sample:
    """Return sample number i of a dataset of which the keys are the most part."""
    return {"id": name(i)}


def key_of(made: Sample) -> str:
    return str(made["id"])


class NotAvailableError(Exception):
    """This version of the tool cannot do it."""


class Peer:
    """How a tool does the jobs; those that it lacks are left out of the tables."""

    shares = True  # never changes a file in place, so a copy of the dataset may be made of hard links

    def write(self, path: Path, numbers: Sequence[int]) -> None:
        raise NotAvailableError

    def read(self, path: Path, number: int) -> Sample | None:
        raise NotAvailableError

    def append(self, path: Path, numbers: Sequence[int]) -> None:
        raise NotAvailableError

    def replace(self, path: Path, numbers: Sequence[int]) -> dict[str, float] | None:
        raise NotAvailableError

    def delete(self, path: Path, numbers: Sequence[int]) -> dict[str, float] | None:
        raise NotAvailableError

    def upsert(self, path: Path, numbers: Sequence[int]) -> dict[str, float] | None:
        raise NotAvailableError

    def patch(self, path: Path, numbers: Sequence[int], table: Path) -> dict[str, float] | None:
        """Give samples the labels of a Parquet file with the columns id and label."""
        raise NotAvailableError

    def diff(self, path: Path, numbers: Sequence[int]) -> dict[str, float] | None:
        """List what the newest version changed."""
        raise NotAvailableError


class Ours(Peer):
    def __init__(self, *, keyed: bool = True) -> None:
        self.key_fn = "id" if keyed else None

    def write(self, path: Path, numbers: Sequence[int]) -> None:
        import liveset

        liveset.optimize(fn=sample, inputs=numbers, output_dir=path, key_fn=self.key_fn, chunk_bytes="64MB", num_workers=1, verbose=False)

    def read(self, path: Path, number: int) -> Sample | None:
        import liveset

        if self.key_fn is None:
            raise NotAvailableError
        try:
            found: Sample = liveset.StreamingDataset(path)[name(number)]
        except KeyError:
            return None
        return found

    def append(self, path: Path, numbers: Sequence[int]) -> None:
        import liveset

        liveset.optimize(fn=edited, inputs=numbers, output_dir=path, mode="append", num_workers=1, verbose=False)

    def replace(self, path: Path, numbers: Sequence[int]) -> dict[str, float]:
        def stage(update: Any) -> None:
            for i in numbers:
                update[name(i)] = edited(i)

        return self._update(path, "__setitem__", stage)

    def delete(self, path: Path, numbers: Sequence[int]) -> dict[str, float]:
        def stage(update: Any) -> None:
            for i in numbers:
                del update[name(i)]

        return self._update(path, "__delitem__", stage)

    def upsert(self, path: Path, numbers: Sequence[int]) -> dict[str, float]:
        def stage(update: Any) -> None:
            for i in numbers:
                update.upsert(name(i), edited(i))

        return self._update(path, "upsert", stage)

    def patch(self, path: Path, numbers: Sequence[int], table: Path) -> dict[str, float]:
        return self._update(path, "apply", lambda update: update.apply(table))

    def diff(self, path: Path, numbers: Sequence[int]) -> dict[str, float]:
        import liveset

        if not hasattr(liveset, "diff"):
            raise NotAvailableError
        newest = liveset.StreamingDataset(path).info().version
        return {"found": sum(1 for _ in liveset.diff(path, newest - 1, newest).changes())}

    @staticmethod
    def _update(path: Path, needs: str, stage: Callable[[Any], object]) -> dict[str, float]:
        import liveset

        if not hasattr(liveset.DatasetUpdate, needs):
            raise NotAvailableError
        with liveset.dataset_update(path) as update:
            stage(update)
            return {"of it commit, s": update.commit().seconds}


class Copy(Peer):
    """Writes each chunk file that has one of the samples to a new, synced file: the least that an update of immutable files can cost.

    It reads the dataset that ``ours`` wrote, and samples that are new go into one more file.
    """

    def replace(self, path: Path, numbers: Sequence[int]) -> dict[str, float]:
        chunks = json.loads((path / "index.json").read_bytes())["chunks"]
        wanted, end, start, files = sorted(numbers), 0, 0, 0
        for chunk in chunks:
            end += chunk["chunk_size"]
            here = start
            while start < len(wanted) and wanted[start] < end:
                start += 1
            if start > here:
                self._put(path / f"{chunk['filename']}.copy", (path / chunk["filename"]).read_bytes())
                files += 1
        if start < len(wanted):
            self._put(path / "new.copy", b"".join(edited(i)["raw"] for i in wanted[start:]))
        return {"chunks": files}

    delete = upsert = replace

    def patch(self, path: Path, numbers: Sequence[int], table: Path) -> dict[str, float]:
        return self.replace(path, numbers)

    @staticmethod
    def _put(path: Path, data: bytes) -> None:
        # Written, not copied inside the kernel: some file systems only share the blocks then, and no byte reaches the disk
        with path.open("xb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())


class Lance(Peer):
    def __init__(self, *, index: bool) -> None:
        self.index = index

    def write(self, path: Path, numbers: Sequence[int]) -> None:
        import lance

        lance.write_dataset(self._reader(numbers, sample), str(path))
        if self.index:
            lance.dataset(str(path)).create_scalar_index("id", "BTREE")

    def read(self, path: Path, number: int) -> Sample | None:
        import lance

        rows: list[Sample] = lance.dataset(str(path)).to_table(filter=f"id = '{name(number)}'").to_pylist()
        return rows[0] if rows else None

    def append(self, path: Path, numbers: Sequence[int]) -> None:
        import lance

        dataset = lance.write_dataset(self._reader(numbers, edited), str(path), mode="append")
        if self.index:
            dataset.optimize.optimize_indices()

    def replace(self, path: Path, numbers: Sequence[int]) -> None:
        self._merge(path).when_matched_update_all().execute(self._reader(numbers, edited))

    def delete(self, path: Path, numbers: Sequence[int]) -> None:
        import lance

        listed = ", ".join(f"'{name(i)}'" for i in numbers)
        lance.dataset(str(path)).delete(f"id IN ({listed})")

    def upsert(self, path: Path, numbers: Sequence[int]) -> None:
        self._merge(path).when_matched_update_all().when_not_matched_insert_all().execute(self._reader(numbers, edited))

    def patch(self, path: Path, numbers: Sequence[int], table: Path) -> None:
        import pyarrow.parquet as pq

        self._merge(path).when_matched_update_all().execute(pq.read_table(table))

    @staticmethod
    def _merge(path: Path) -> Any:
        import lance

        return lance.dataset(str(path)).merge_insert("id")

    @staticmethod
    def _reader(numbers: Sequence[int], make: Callable[[int], Sample]) -> Any:
        import pyarrow as pa

        schema = pa.schema({"id": pa.string(), "label": pa.int64(), "raw": pa.binary()})

        def batches() -> Iterator[Any]:
            for start in range(0, len(numbers), BATCH):
                yield pa.RecordBatch.from_pylist([make(i) for i in numbers[start : start + BATCH]], schema)

        return pa.RecordBatchReader.from_batches(schema, batches())


class LitData(Peer):
    shares = False

    def __init__(self, *, keyed: bool = True) -> None:
        self.key_fn = key_of if keyed else None

    def write(self, path: Path, numbers: Sequence[int]) -> None:
        self._optimize(path, numbers, sample, key_fn=self.key_fn)

    def read(self, path: Path, number: int) -> Sample | None:
        import litdata

        if self.key_fn is None:
            raise NotAvailableError
        found: Sample = litdata.StreamingDataset(str(path))[name(number)]
        return found

    def append(self, path: Path, numbers: Sequence[int]) -> None:
        if self.key_fn is not None:  # its keyed append of a local dataset raises, and leaves wrong keys
            raise NotAvailableError
        self._optimize(path, numbers, edited, mode="append")

    def replace(self, path: Path, numbers: Sequence[int]) -> None:
        import litdata

        with litdata.dataset_update(str(path)) as update:
            for i in numbers:
                update[name(i)] = edited(i)
            update.commit()

    @staticmethod
    def _optimize(path: Path, numbers: Sequence[int], make: Callable[[int], Sample], **more: Any) -> None:
        import litdata

        litdata.optimize(
            fn=make,
            inputs=list(numbers),
            output_dir=str(path),
            num_workers=1,
            chunk_bytes="64MB",
            keep_data_ordered=True,
            verbose=False,
            **more,
        )


class Lmdb(Peer):
    """One transaction for each job, synced by its commit."""

    shares = False

    def write(self, path: Path, numbers: Sequence[int]) -> None:
        self._put(path, numbers, sample)

    def read(self, path: Path, number: int) -> Sample | None:
        with self._env(path) as env, env.begin() as transaction:
            value = transaction.get(name(number).encode())
        return None if value is None else unpack(value)

    def append(self, path: Path, numbers: Sequence[int]) -> None:
        self._put(path, numbers, edited)

    replace = upsert = append

    def delete(self, path: Path, numbers: Sequence[int]) -> None:
        with self._env(path) as env, env.begin(write=True) as transaction:
            for i in numbers:
                transaction.delete(name(i).encode())

    def patch(self, path: Path, numbers: Sequence[int], table: Path) -> None:
        import pyarrow.parquet as pq

        columns = pq.read_table(table)
        with self._env(path) as env, env.begin(write=True) as transaction:
            for key, label in zip(columns["id"].to_pylist(), columns["label"].to_pylist(), strict=True):
                transaction.put(key.encode(), pack({**unpack(transaction.get(key.encode())), "label": label}))

    def _put(self, path: Path, numbers: Sequence[int], make: Callable[[int], Sample]) -> None:
        with self._env(path) as env, env.begin(write=True) as transaction:
            for i in numbers:
                transaction.put(name(i).encode(), pack(make(i)))

    @staticmethod
    def _env(path: Path) -> Any:
        import lmdb

        return lmdb.open(str(path), map_size=1 << 36)


def pack(made: Sample) -> bytes:
    """Return a sample as a value of LMDB."""
    key: bytes = made["id"].encode()
    raw: bytes = made.get("raw", b"")
    return _HEAD.pack(len(key), len(raw), made.get("label", 0)) + key + raw


def unpack(value: Any) -> Sample:
    a, b, label = _HEAD.unpack_from(value)
    return {"id": str(value[16 : 16 + a], "utf-8"), "label": label, "raw": bytes(value[16 + a : 16 + a + b])}


PEERS: dict[str, Peer] = {
    "copy": Copy(),
    "ours": Ours(),
    "ours, no keys": Ours(keyed=False),
    "lance": Lance(index=False),
    "lance, index": Lance(index=True),
    "litdata": LitData(),
    "litdata, no keys": LitData(keyed=False),
    "lmdb": Lmdb(),
}
