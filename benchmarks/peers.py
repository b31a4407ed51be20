"""What is measured: ours, the floor, and other tools, each with the same three jobs. Imports of the tools are inside their class."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import floor
from benchmarks.kinds import Kind, Sample

BATCH = 1000  # rows that Lance is given, and puts that LMDB commits, at a time


class Peer(Protocol):
    """The jobs."""

    workers: tuple[int, ...]

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None: ...
    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]: ...
    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]: ...


class Ours:
    workers: tuple[int, ...] = (1, 2)

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None:
        import liveset

        liveset.optimize(fn=kind.make, inputs=range(count), output_dir=path, num_workers=workers, chunk_bytes="64MB", verbose=False)

    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]:
        import liveset

        return iter(liveset.StreamingDataset(path))

    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]:
        import liveset

        return liveset.StreamingDataset(path).__getitem__


class Floor:
    """Reads what liveset wrote, so that both decode the same bytes."""

    workers: tuple[int, ...] = (1,)

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None:
        floor.write(path, kind, count)

    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]:
        return floor.iterate(path, kind)

    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]:
        return floor.opened(path, kind)


class LitData:
    workers: tuple[int, ...] = (1, 2)
    batch_decode: str | int = "auto"

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None:
        import litdata

        litdata.optimize(
            fn=kind.make,
            inputs=list(range(count)),
            output_dir=str(path),
            num_workers=workers,
            chunk_bytes="64MB",
            keep_data_ordered=True,
            verbose=False,
        )

    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]:
        import litdata

        return iter(litdata.StreamingDataset(str(path), batch_decode=self.batch_decode))

    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]:
        import litdata

        dataset = litdata.StreamingDataset(str(path), batch_decode=self.batch_decode)
        get: Callable[[int], Sample] = dataset.__getitem__
        return get


class LitDataPerItem(LitData):
    """The same without its batch decoding, which makes random access slow."""

    batch_decode = 0


class Lance:
    workers: tuple[int, ...] = (1,)

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None:
        import lance
        import pyarrow as pa

        schema = self._schema(kind, pa)

        def batches() -> Iterator[Any]:
            for start in range(0, count, BATCH):
                rows = [kind.make(position) for position in range(start, min(start + BATCH, count))]
                columns = [self._column([row[field.name] for row in rows], field.type, pa) for field in schema]
                yield pa.record_batch(columns, schema=schema)

        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), str(path))

    @staticmethod
    def _schema(kind: Kind, pa: Any) -> Any:
        types = {"id": pa.string(), "n": pa.int64(), "raw": pa.binary()}
        sample = kind.make(0)
        if "x" in sample:
            types["x"] = pa.list_(pa.float32(), sample["x"].size)
        return pa.schema([(name, types[name]) for name in sample])

    @staticmethod
    def _column(values: list[Any], kind: Any, pa: Any) -> Any:
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([value.reshape(-1) for value in values])), kind.list_size)
        return pa.array(values, kind)

    @staticmethod
    def _rows(batch: Any, shape: tuple[int, ...]) -> Iterator[Sample]:
        columns = []
        for name in batch.schema.names:
            column = batch.column(name)
            column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
            if name == "x":
                columns.append(list(column.flatten().to_numpy().reshape(-1, *shape).copy()))
            else:
                columns.append(column.to_pylist())
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))

    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]:
        import lance

        shape = kind.make(0)["x"].shape if "x" in kind.make(0) else ()
        rows = BATCH if kind.name == "small" else 64
        for batch in lance.dataset(str(path)).to_batches(batch_size=rows):
            yield from self._rows(batch, shape)

    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]:
        import lance

        dataset = lance.dataset(str(path))
        shape = kind.make(0)["x"].shape if "x" in kind.make(0) else ()
        return lambda position: next(self._rows(dataset.take([position]), shape))


class Lmdb:
    """The floor's items as values of a B-tree, keyed by position."""

    workers: tuple[int, ...] = (1,)
    _key = struct.Struct(">I").pack

    def write(self, path: Path, kind: Kind, count: int, workers: int) -> None:
        import lmdb

        encode, _ = floor.CODECS[kind.name]
        path.mkdir(parents=True)
        with lmdb.open(str(path), map_size=2**36, sync=False) as env:
            for start in range(0, count, BATCH):
                with env.begin(write=True) as transaction:
                    for position in range(start, min(start + BATCH, count)):
                        transaction.put(self._key(position), encode(kind.make(position)), append=True)
            env.sync(True)

    def _env(self, path: Path) -> Any:
        import lmdb

        return lmdb.open(str(path), map_size=2**36, readonly=True, lock=False, readahead=True)

    def iterate(self, path: Path, kind: Kind) -> Iterator[Sample]:
        _, decode = floor.CODECS[kind.name]
        with self._env(path) as env, env.begin() as transaction:
            for item in transaction.cursor().iternext(keys=False):
                yield decode(item, 0)

    def opened(self, path: Path, kind: Kind) -> Callable[[int], Sample]:
        _, decode = floor.CODECS[kind.name]
        transaction = self._env(path).begin()
        return lambda position: decode(transaction.get(self._key(position)), 0)


PEERS: dict[str, type[Peer]] = {
    "ours": Ours,
    "floor": Floor,
    "litdata": LitData,
    "litdata-item": LitDataPerItem,
    "lance": Lance,
    "lmdb": Lmdb,
}
