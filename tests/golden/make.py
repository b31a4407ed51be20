"""Make the golden datasets: ``python -m tests.golden.make tests/golden/vN [NAME ...]``.

Each folder ``vN`` holds small datasets as the library of that time wrote them. They are never made again: a later library has to read
them. When the format changes, this script writes the next folder, with those that are new. Clock and random names are replaced here, so that the same library
writes the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np

import liveset
from liveset.storage.local import LocalStore
from tests.golden.expected import write_expected
from tests.support.foreign import write_arrow, write_foreign

Sample = Callable[[int], Any]
START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock(datetime):
    """Each look at the clock is one second later than the one before."""

    looks = count()

    @classmethod
    def now(cls, tz: Any = None) -> Self:
        return cls.fromtimestamp(START.timestamp() + next(cls.looks), tz)


@contextmanager
def repeatable() -> Iterator[None]:
    """Replace clock and random names."""
    tokens = count(1)
    Clock.looks = count()
    with (
        mock.patch("secrets.token_hex", lambda size: f"{next(tokens):0{2 * size}x}"),
        mock.patch("liveset.edit.commit.datetime", Clock),
        mock.patch.object(LocalStore, "now", side_effect=lambda: Clock.now(UTC)),
    ):
        yield


def put(sample: Sample, path: Path, numbers: range, **options: Any) -> None:
    liveset.optimize(sample, numbers, path, num_workers=1, verbose=False, **options)


def replace(path: Path, samples: dict[Any, Any], **options: Any) -> None:
    with liveset.dataset_update(path, author="golden") as update:
        for key, sample in samples.items():
            update[key] = sample
        update.commit(**options)


# --- samples ----------------------------------------------------------------------------------------------------------


def row(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "n": i, "x": i / 4, "flag": i % 2 == 0, "text": "número " * (i % 4)}


def number(i: int) -> dict[str, Any]:
    return {"uid": (i - 2) * 10**15, "raw": bytes(range(i % 9))}


def values(i: int) -> dict[str, Any]:
    dtypes = (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
    )
    return {
        "id": f"k{i}",
        "arrays": {name: np.arange(i, i + 4).astype(name).reshape(2, 2) for name in dtypes},
        "vector": np.arange(i % 3, dtype=np.int64),
        "big-endian": np.arange(3, dtype=">f4"),
        "zero-dim": np.array(i, dtype=np.int16),
        "scalar": np.float32(i / 3),
        "json": {"list": [i, None, "é"], "dict": {"a": [i / 7, True]}, "nan": float("nan"), "zero": -0.0},
        "mixed": i if i % 2 else f"text {i}",
        "none": None,
        "sometimes": None if i % 3 == 1 else i,
        "tuple": (i, (f"{i}", i / 2)),
        "bytes": b"\0" * i,
        "large": 2**70 + i,
        "when": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=i, microseconds=1),
        "set": {i, i + 1},
    }


def bare(i: int) -> tuple[Any, ...]:
    return (i, f"row {i}", i / 3, [i, -i])


def picture(i: int, kind: str) -> bytes:
    """One color, so that every decoder gives the same pixels."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (6, 5), (40 * (i % 6), 128, 128)).save(stream, kind)
    return stream.getvalue()


def media(i: int) -> dict[str, Any]:
    return {
        "id": f"k{i}",
        "jpeg": liveset.Jpeg(bytes=picture(i, "JPEG")),
        "image": liveset.Image(bytes=picture(i, "PNG")),
        "pil": liveset.Pil(bytes=picture(i, "PNG")),
        "list": liveset.JpegArray([picture(i, "JPEG"), picture(i + 1, "JPEG")]),
        "text": liveset.Text(text=f"text {i}"),
        "file": liveset.File(bytes=b"file %d" % i),
        "label": i,
    }


def wordy(i: int) -> dict[str, Any]:
    """So long a key that a few fill several pages of a key table."""
    return {"id": f"{i}:" + "né" * (100 + 7 * i % 50), "n": i}


def nullable(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "n": i if i % 3 != 1 else None, "x": i / 2, "list": [i]}


# --- datasets ---------------------------------------------------------------------------------------------------------


def make_plain(path: Path) -> None:
    put(bare, path, range(7), chunk_size=3, message="the first seven")
    put(bare, path, range(7, 10), mode="append")
    liveset.set_attributes(path, name="plain", licence="CC0-1.0")


def make_empty(path: Path) -> None:
    put(lambda i: None, path, range(3))


def compressed(level: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        put(row, path, range(8), chunk_size=4, key_fn="id", compression="zstd", compression_level=level, compression_batch_size=2)
        put(row, path, range(8, 11), mode="append")
        replace(path, {"k1": {**row(1), "text": "replaced"}, "k9": {**row(9), "n": -9}})

    return make


def make_text_keys(path: Path) -> None:
    put(row, path, range(7), chunk_size=4, key_fn="id", session="create")
    put(row, path, range(7, 12), mode="append", message="five more")
    put(row, path, range(12, 13), mode="append")
    replace(path, {"k3": {**row(3), "text": "replaced"}, "k11": {**row(11), "n": -11}}, message="two fixed")
    liveset.tag(path, "paper", 2)
    put(row, path, range(100, 103), mode="overwrite", key_fn="id")
    liveset.restore(path, "paper")
    replace(path, {"k3": {**row(3), "text": "replaced again, and longer than before"}})


def make_int_keys(path: Path) -> None:
    put(number, path, range(9), chunk_size=4, key_fn="uid", num_shards=2)
    put(number, path, range(9, 12), mode="append")
    replace(path, {number(10)["uid"]: {**number(10), "raw": b"replaced"}})


def make_function_keys(path: Path) -> None:
    put(bare, path, range(6), chunk_size=4)
    liveset.build_keys_index(path, bare_key, verbose=False)


def bare_key(sample: Any) -> str:
    return str(sample[1])


def make_media(path: Path) -> None:
    put(media, path, range(3), chunk_size=2, key_fn="id")
    replace(path, {"k1": {**media(1), "label": -1}})


def make_values(path: Path) -> None:
    put(values, path, range(4), chunk_size=3, key_fn="id")
    replace(path, {"k2": values(7) | {"id": "k2"}})


def make_vacuumed(path: Path) -> None:
    put(row, path, range(8), chunk_size=4, key_fn="id")
    for turn in range(3):
        replace(path, {"k1": {**row(1), "n": 100 + turn}})
    liveset.tag(path, "kept", 2)
    for file in path.rglob("*"):
        os.utime(file, (START.timestamp(), START.timestamp()))
    liveset.vacuum(path, keep=0, grace=timedelta(0))


def make_adopted(path: Path) -> None:
    write_foreign(path, [row(i) for i in range(9)], chunk_size=4)
    forget_field(path)
    replace(path, {"k5": {**row(5), "text": "replaced"}})
    put(row, path, range(9, 11), mode="append", key_fn="id")


def make_adopted_arrow(path: Path) -> None:
    write_arrow(path, [nullable(i) for i in range(9)], chunk_size=5)
    forget_field(path)
    liveset.adopt(path)
    replace(path, {"k5": {**nullable(5), "n": None}})


def make_edited(path: Path) -> None:
    put(row, path, range(10), chunk_size=4, key_fn="id")
    with liveset.dataset_update(path, author="golden") as update:
        del update["k1"], update["k6"]
        update.patch("k2", n=-2, text="patched")
        update.insert("k20", row(20))
        update.commit(message="mixed")
    with liveset.dataset_update(path) as update:
        for i in (0, 2, 3):
            del update[f"k{i}"]
        update.apply({"k20": {"n": -20}, "k21": row(21)}, on_missing="insert")
        update.commit()


def make_compacted(path: Path) -> None:
    make_edited(path)
    liveset.compact(path, small=1.0)
    with liveset.dataset_update(path) as update:
        del update["k9"]
        update.commit()


def make_long_keys(path: Path) -> None:
    put(wordy, path, range(40), chunk_size=9, key_fn="id")
    with liveset.dataset_update(path) as update:
        for i in (3, 4, 20):
            del update[wordy(i)["id"]]
        update.commit()
    put(wordy, path, range(40, 44), mode="append")


def forget_field(path: Path) -> None:
    """Only our datasets remember which field holds the key."""
    index = json.loads((path / "index.json").read_bytes())
    del index["keys"]["field"]
    (path / "index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Golden:
    """A dataset, and what a test needs to go on with it."""

    make: Callable[[Path], None]
    sample: Sample
    key: Callable[[Any], Any] | str | None = "id"
    needs: tuple[str, ...] = ("pyarrow",)


GOLDEN = {
    "plain": Golden(make_plain, bare, None, ()),
    "empty": Golden(make_empty, bare, None, ()),
    "zstd-chunk": Golden(compressed("chunk"), row),
    "zstd-batch": Golden(compressed("batch"), row),
    "zstd-sample": Golden(compressed("sample"), row),
    "text-keys": Golden(make_text_keys, row),
    "int-keys": Golden(make_int_keys, number, "uid"),
    "function-keys": Golden(make_function_keys, bare, bare_key),
    "media": Golden(make_media, media, needs=("pyarrow", "PIL")),
    "values": Golden(make_values, values),
    "vacuumed": Golden(make_vacuumed, row),
    "adopted": Golden(make_adopted, row),
    "adopted-arrow": Golden(make_adopted_arrow, nullable),
    "edited": Golden(make_edited, row),
    "compacted": Golden(make_compacted, row),
    "long-keys": Golden(make_long_keys, wordy),
}


def make(folder: Path, name: str) -> None:
    """Make one dataset and what is expected of it: ``folder/name`` and ``folder/name.json``."""
    with repeatable():
        GOLDEN[name].make(folder / name)
    write_expected(folder / name, folder / f"{name}.json")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir()  # what an earlier version wrote is never made again
    for each in sys.argv[2:] or GOLDEN:
        make(target, each)
