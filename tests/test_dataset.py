"""StreamingDataset: positions, slices, iteration, subsets, versions, and damaged files."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset.errors import (
    Corrupt,
    DatasetNotFound,
    FormatError,
    NotFound,
    PickleRefused,
    PositionOutOfRange,
    UnsupportedFormat,
    VersionNotFound,
)
from liveset.format.codec import Compression
from liveset.read.dataset import StreamingDataset
from liveset.testing.strategies import same, samples
from tests.support.writing import write_dataset

COMPRESSIONS = [None, Compression("zstd", "batch", 3), Compression("zstd", "sample"), Compression("zstd:3", "chunk")]


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten samples in chunks of 4, 4 and 2."""
    write_dataset(tmp_path / "ten", [{"i": i, "text": f"t{i}", "vec": np.full(3, i, np.float32)} for i in range(10)])
    return tmp_path / "ten"


def numbers(rows: Any) -> list[int]:
    return [row["i"] for row in rows]


def test_positions(ten: Path) -> None:
    ds = StreamingDataset(ten)
    assert len(ds) == 10
    assert [ds[i]["i"] for i in range(10)] == list(range(10))
    assert ds[-1]["i"] == 9
    assert ds[-10]["i"] == 0
    assert ds[np.int64(3)]["text"] == "t3"


@pytest.mark.parametrize("index", [10, -11, 1 << 40, np.int64(10)])
def test_a_position_out_of_range_is_an_index_error_and_the_old_value_error(ten: Path, index: Any) -> None:
    ds = StreamingDataset(ten)
    with pytest.raises(PositionOutOfRange, match="didn't find a match within the chunk intervals") as caught:
        ds[index]
    assert isinstance(caught.value, IndexError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("index", [1.0, None, (1, 2)])
def test_what_is_no_position_is_a_type_error(ten: Path, index: Any) -> None:
    with pytest.raises(TypeError):
        StreamingDataset(ten)[index]


@given(st.slices(10))
def test_slices_are_those_of_a_list(tmp_path_factory: pytest.TempPathFactory, part: slice) -> None:
    path = tmp_path_factory.getbasetemp() / "slices"
    if not path.exists():
        write_dataset(path, range(10))
    assert StreamingDataset(path)[part] == list(range(10))[part]


def test_a_key_is_a_key_error_that_says_what_is_missing(ten: Path) -> None:
    with pytest.raises(KeyError, match="keys/"):
        StreamingDataset(ten)["play-1"]


def test_iterators_are_independent(ten: Path) -> None:
    ds = StreamingDataset(ten)
    first, second = iter(ds), iter(ds)
    assert [next(first)["i"], next(first)["i"], next(second)["i"], next(first)["i"]] == [0, 1, 0, 2]
    assert numbers(ds) == list(range(10))


def test_shuffled_order_is_that_of_the_old_tool(ten: Path) -> None:
    ds = StreamingDataset(ten, shuffle=True)
    assert numbers(ds) == [8, 9, 4, 5, 6, 7, 1, 3, 0, 2]
    assert numbers(ds) == [7, 4, 5, 6, 3, 2, 1, 0, 8, 9]
    ds.set_epoch(1)
    assert numbers(ds) == [8, 9, 4, 5, 6, 7, 1, 3, 0, 2]
    assert numbers(StreamingDataset(ten, shuffle=True, seed=1)) != [8, 9, 4, 5, 6, 7, 1, 3, 0, 2]


def test_an_iterator_that_is_left_early_does_not_end_the_epoch(ten: Path) -> None:
    ds = StreamingDataset(ten, shuffle=True)
    next(iter(ds))
    assert ds.current_epoch == 1


def test_ranks_are_read_when_iterating(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = StreamingDataset(ten, shuffle=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert len(ds) == 5
    assert numbers(ds) == [7, 1, 3, 0, 2]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="rank 2 of 2"):
        iter(ds)


def test_transforms_apply_in_turn_everywhere(ten: Path) -> None:
    ds = StreamingDataset(ten, transform=[lambda row: row["i"], lambda i: i * 10])
    assert ds[3] == 30
    assert ds[2:4] == [20, 30]
    assert list(ds)[:3] == [0, 10, 20]


def test_subset_keeps_order_and_repetitions(ten: Path) -> None:
    ds = StreamingDataset(ten)
    sub = ds.subset([9, 3, 4, 5, 3])
    assert numbers(sub) == [9, 3, 4, 5, 3]
    assert len(sub) == 5
    assert sub[1]["i"] == 3
    assert numbers(sub.subset(slice(1, 4))[:]) == [3, 4, 5]
    assert len(ds) == 10
    assert numbers(ds.subset([-1, 0, -10])) == [9, 0, 0]
    assert numbers(ds.subset(np.array([-2, 1]))) == [8, 1]
    assert len(ds.subset([])) == 0
    for wrong in ([10], [-11]):
        with pytest.raises(ValueError, match="Subset indices must be in"):
            ds.subset(wrong)


MASK = [index in (3, 5) for index in range(10)]


@pytest.mark.parametrize("mask", ["bools", "array", "numpy", "tensor", "tensors"])
def test_a_mask_is_no_list_of_positions(ten: Path, mask: str) -> None:
    torch = pytest.importorskip("torch") if mask.startswith("tensor") else None
    array = torch.tensor(MASK) if torch is not None else np.array(MASK)
    wrong: Any = {"bools": MASK, "array": array, "numpy": list(array), "tensor": array, "tensors": list(array)}[mask]
    ds = StreamingDataset(ten)
    for take in (ds.subset, ds.read_many, ds.__getitem__, ds.as_map().__getitems__):
        with pytest.raises(TypeError, match="flatnonzero" if mask != "tensors" or take != ds.__getitem__ else "many positions to subset"):
            take(wrong)
    for single in (ds.__getitem__, ds.as_map().__getitem__, ds.key_at):
        with pytest.raises(TypeError, match="flatnonzero"):
            single(wrong[3])
    assert numbers(ds.subset(np.flatnonzero(np.array(MASK)))) == [3, 5]


def test_what_is_no_position_is_named(ten: Path) -> None:
    ds = StreamingDataset(ten)
    several: list[Any] = [[1, 2], np.array([1, 2])]
    for wrong in several:
        with pytest.raises(TypeError, match="many positions to subset"):
            ds[wrong]
    with pytest.raises(TypeError, match="1.5 is neither the position of a sample nor a key"):
        ds.subset([1, 1.5])  # type: ignore[list-item]


def test_subsample(ten: Path) -> None:
    assert numbers(StreamingDataset(ten, subsample=0.5)) == [0, 1, 2, 3, 4]
    assert len(StreamingDataset(ten, subsample=2.5)) == 25


def test_fields(ten: Path) -> None:
    ds = StreamingDataset(ten, fields=["text"])
    assert ds[1] == {"text": "t1"}
    assert list(ds)[-1] == {"text": "t9"}
    with pytest.raises(ValueError, match="nope"):
        StreamingDataset(ten, fields=["nope"])


def test_a_map_style_view(ten: Path) -> None:
    view = StreamingDataset(ten).as_map()
    assert len(view) == 10
    assert view[4]["i"] == 4
    assert numbers(view.__getitems__([5, 1])) == [5, 1]
    assert not hasattr(view, "__iter__")


def test_copies_and_pickles_read_the_same_version(ten: Path) -> None:
    ds = StreamingDataset(ten, fields=["i"]).subset([1, 2, 9])
    write_dataset(ten, [{"i": 77}])
    for other in (copy.deepcopy(ds), copy.copy(ds), pickle.loads(pickle.dumps(ds))):
        assert numbers(other) == [1, 2, 9]
        assert other.version == 1


def test_versions(ten: Path) -> None:
    old = StreamingDataset(ten)
    write_dataset(ten, [{"i": 77}])
    assert numbers(StreamingDataset(ten)) == [77]
    assert numbers(old) == list(range(10))
    assert numbers(StreamingDataset(ten, version=1)) == list(range(10))
    assert StreamingDataset(ten).version == 2
    with pytest.raises(VersionNotFound, match="3"):
        StreamingDataset(ten, version=3)
    (next(ten.glob("chunk-0-1-*.bin"))).unlink()
    with pytest.raises(NotFound, match="version 1.*liveset repair"):
        StreamingDataset(ten, version=1)[5]


def test_threads_read_the_right_samples(ten: Path) -> None:
    write_dataset(ten, [{"i": i} for i in range(2000)], chunk_size=3)  # more chunks than are kept open
    ds = StreamingDataset(ten)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        wrong.extend(i for i in np.random.default_rng(seed).integers(0, 2000, 3000).tolist() if ds[i]["i"] != i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_open_files_are_bounded(ten: Path) -> None:
    write_dataset(ten, range(1000), chunk_size=1)
    ds = StreamingDataset(ten)
    assert list(ds) == list(range(1000))
    assert ds[:] == list(range(1000))
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) < 300


def test_an_empty_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path / "empty", [])
    ds = StreamingDataset(tmp_path / "empty")
    assert len(ds) == 0
    assert list(ds) == ds[:] == []
    assert ds.schema is None
    with pytest.raises(IndexError):
        ds[0]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@given(rows=st.lists(samples(), min_size=1, max_size=7))
def test_every_layout_returns_samples_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, compression: Compression | None, rows: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("layout") / "ds"
    write_dataset(path, rows, compression=compression)
    ds = StreamingDataset(path)
    assert all(map(same, ds, rows))
    assert all(map(same, ds[:], rows))
    assert all(same(ds[i], rows[i]) for i in reversed(range(len(rows))))


def test_bad_arguments(ten: Path) -> None:
    for wrong, phrase in [
        ({"shuffle": 1}, "Shuffle should be a boolean"),
        ({"subsample": 0}, "subsample must be a float with value greater than 0"),
        ({"subsample": True}, "subsample must be a float"),
        ({"transform": 3}, "Transform should be a callable"),
        ({"item_shuffle_window": -1}, "item_shuffle_window"),
        ({"version": 1, "index_path": ten}, "index_path= and version="),
        ({"version": True}, "version=True is neither"),
        ({"drop_last": "x"}, "drop_last must be True, False or None"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 2**32}, "seed must be an integer"),
        ({"seed": None}, "seed must be an integer"),
        ({"subsample": math.inf}, "subsample must be a float"),
        ({"max_pre_download": "x"}, "max_pre_download must be a number of chunks, at least 0. Found 'x'"),
        ({"max_pre_download": -1}, "max_pre_download must be"),
        ({"max_pre_download": math.nan}, "max_pre_download must be"),
        ({"max_cache_size": -1}, "the limit of the cache cannot be negative"),
        ({"max_cache_size": math.nan}, "the limit of the cache as a fraction"),
        ({"cache_dir": 5}, "cache_dir must be a path, True or False"),
        ({"index_path": 5}, "index_path must be a path"),
        ({"version": 1.5}, "version must be a number, a tag or a time"),
        ({"serializers": [1]}, "serializers must be a mapping"),
        ({"pin": "x"}, "pin must be True or False"),
        ({"verify_reads": 1}, "verify_reads must be True or False"),
        ({"allow_pickle": "no"}, "allow_pickle must be True or False"),
        ({"force_override_state_dict": 0}, "force_override_state_dict must be True or False"),
        ({"storage_options": ["key"]}, "storage_options must be a mapping"),
    ]:
        with pytest.raises(ValueError, match=phrase):
            StreamingDataset(ten, **wrong)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="encryption="):
        StreamingDataset(ten, encryption=object())
    for epoch in (0, "x", 1.5, True):
        with pytest.raises(ValueError, match="an epoch is a number from 1 on"):
            StreamingDataset(ten).set_epoch(epoch)  # type: ignore[arg-type]
    assert StreamingDataset(ten, seed=np.int64(7)).seed == 7  # type: ignore[arg-type]
    for url in (3, Path("x")):
        with pytest.raises(ValueError, match="url of a Place must be text"):
            liveset.Place(url)  # type: ignore[arg-type]


def test_a_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"does not exist\."):
        StreamingDataset(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"doesn't contain any index\.json file\."):
        StreamingDataset(tmp_path)


def test_index_path(ten: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_bytes((ten / "index.json").read_bytes())
    write_dataset(ten, [{"i": 77}])
    assert numbers(StreamingDataset(ten, index_path=kept)) == list(range(10))
    with pytest.raises(DatasetNotFound, match="nothing.json"):
        StreamingDataset(ten, index_path=tmp_path / "nothing.json")


# --- damage -------------------------------------------------------------------------------------------------------------


def read_all(path: Path, **settings: Any) -> list[Any]:
    ds = StreamingDataset(path, **settings)
    return [*ds[:], *ds]


def test_a_truncated_index_is_one_clear_error(ten: Path) -> None:
    whole = (ten / "index.json").read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (ten / "index.json").unlink()
        (ten / "index.json").write_bytes(whole[:length])
        with pytest.raises(Corrupt, match=r"index\.json"):
            StreamingDataset(ten)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_truncated_chunk_never_yields_a_wrong_sample(tmp_path: Path, compression: Compression | None) -> None:
    rows = [{"i": i, "b": bytes([i]) * i} for i in range(8)]
    write_dataset(tmp_path / "ds", rows, chunk_size=8, compression=compression)
    (chunk,) = (tmp_path / "ds").glob("chunk-*")
    whole = chunk.read_bytes()
    for length in range(len(whole)):
        os.truncate(chunk, 0)
        chunk.write_bytes(whole[:length])
        with pytest.raises(Corrupt, match=chunk.name.partition(".")[0]) as caught:
            read_all(tmp_path / "ds")
        assert chunk.name in caught.value.file


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_one_flipped_bit_in_header_or_lengths_never_yields_a_sample(tmp_path: Path, compression: Compression | None) -> None:
    rows: list[dict[str, Any]] = [{"i": i, "b": b"x" * i, "a": np.zeros((1, i), np.int8)} for i in range(4)]
    write_dataset(tmp_path / "ds", rows, compression=compression)
    (chunk,) = (tmp_path / "ds").glob("chunk-*")
    whole = bytearray(chunk.read_bytes())
    expected = rows + rows
    for position in range(len(whole)):
        damaged = whole.copy()
        damaged[position] ^= 1 << position % 8
        chunk.write_bytes(damaged)
        with pytest.raises(FormatError):  # every byte is covered when reads are verified
            read_all(tmp_path / "ds", verify_reads=True)
        if compression is not None:
            continue
        told: FormatError | None = None
        try:
            read = read_all(tmp_path / "ds")
        except FormatError as error:
            told = error
        if told is not None:
            assert chunk.name in str(told)
        else:  # only payload bytes may come back changed, and never their lengths
            assert [len(row["b"]) for row in read] == [len(row["b"]) for row in expected]
            assert [row["a"].nbytes for row in read] == [row["a"].nbytes for row in expected]


def test_a_newer_format_is_refused_with_what_it_needs(ten: Path) -> None:
    index = json.loads((ten / "index.json").read_bytes())
    index["edit"]["requires"] = {"read": ["overlays"], "write": []}
    (ten / "index.json").unlink()
    (ten / "index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedFormat, match="overlays"):
        StreamingDataset(ten)


def test_an_unknown_leaf_type_is_named_and_can_be_skipped(ten: Path) -> None:
    index = json.loads((ten / "index.json").read_bytes())
    index["config"]["data_format"][1] = "hologram:v2"
    (ten / "index.json").unlink()
    (ten / "index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedFormat, match=r"hologram:v2"):
        StreamingDataset(ten)
    assert StreamingDataset(ten, fields=["i"])[3] == {"i": 3}

    class Reader:
        """Gives back what a hologram holds."""

        def deserialize(self, data: bytes) -> str:
            return data.decode().upper()

    assert StreamingDataset(ten, serializers={"hologram": Reader()})[3]["text"] == "T3"


def test_file_names_cannot_leave_the_dataset(ten: Path) -> None:
    index = json.loads((ten / "index.json").read_bytes())
    for name in ("../secret.bin", "/etc/passwd", "a/../../b"):
        index["chunks"][0]["filename"] = name
        (ten / "index.json").unlink()
        (ten / "index.json").write_text(json.dumps(index))
        with pytest.raises(Corrupt, match=r"index\.json"):
            StreamingDataset(ten)


class Touch:
    """Unpickling it leaves a mark."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_pickles_of_strangers_are_not_run_unless_allowed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Touch(str(mark)))
    write_dataset(tmp_path / "ds", [{"id": 1, "p": evil}])
    text = (tmp_path / "ds" / "index.json").read_text().replace('"bytes"', '"pickle"')
    (tmp_path / "ds" / "index.json").unlink()
    (tmp_path / "ds" / "index.json").write_text(text)
    ds = StreamingDataset(tmp_path / "ds")
    with pytest.raises(PickleRefused, match=r"field 'p'.*allow_pickle=True") as caught:
        ds[0]
    assert caught.value.field == "p"
    with pytest.raises(PickleRefused, match="'p'"):
        list(ds)
    assert not mark.exists()
    assert StreamingDataset(tmp_path / "ds", fields=["id"])[0] == {"id": 1}
    with StreamingDataset(tmp_path / "ds", allow_pickle=True)[0]["p"]:
        assert mark.exists()


# --- torch ---------------------------------------------------------------------------------------------------------------


def test_torch_sees_an_iterable_dataset_whichever_is_imported_first(ten: Path) -> None:
    pytest.importorskip("torch")
    script = """
import sys, liveset
ds = liveset.StreamingDataset(sys.argv[1])
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, IterableDataset
assert isinstance(ds, IterableDataset)
batches = [batch["i"].tolist() for batch in DataLoader(ds, batch_size=4)]
assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], batches
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script, str(ten)], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_torch_workers_share_the_samples(ten: Path) -> None:
    data = pytest.importorskip("torch.utils.data")
    ds = StreamingDataset(ten)
    read = [int(i) for batch in data.DataLoader(ds, batch_size=None, num_workers=2) for i in [batch["i"]]]
    assert sorted(read) == list(range(10))
    loader = data.DataLoader(ds.as_map(), batch_size=5, shuffle=True)
    assert sorted(int(i) for batch in loader for i in batch["i"]) == list(range(10))
