"""JoinedStreamingDataset: two datasets read together, key by key."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import KeyNotFound, StateMismatch
from liveset.read.lightloader import StreamingDataLoader as LightLoader
from tests.support.writing import write_dataset

Loaders = Callable[..., Any]


@pytest.fixture(params=["torch", "light"])
def loader_of(request: pytest.FixtureRequest) -> Loaders:
    if request.param == "light":
        return LightLoader
    pytest.importorskip("torch")
    return liveset.StreamingDataLoader


def base_row(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "i": i, "label": 0}


def side_row(i: int) -> dict[str, Any]:
    return {"id": f"k{i}", "label": 100 + i, "meta": {"odd": i % 2}}


def make(tmp_path: Path, have: Any = range(20)) -> tuple[Path, Path]:
    """A base of 20 samples, and a side with labels for some of them, in another order and in other chunks."""
    write_dataset(tmp_path / "base", map(base_row, range(20)), chunk_size=4, key="id")
    write_dataset(tmp_path / "side", map(side_row, reversed(have)), chunk_size=7, key="id")
    return tmp_path / "base", tmp_path / "side"


def open_joined(paths: tuple[Path, Path], options: dict[str, Any] | None = None, **join: Any) -> liveset.JoinedStreamingDataset:
    return liveset.JoinedStreamingDataset(liveset.StreamingDataset(paths[0], **(options or {})), liveset.StreamingDataset(paths[1]), **join)


def joined_row(i: int) -> dict[str, Any]:
    return base_row(i) | side_row(i)


def test_it_is_read_like_the_base(tmp_path: Path) -> None:
    ds = open_joined(make(tmp_path))
    expected = [joined_row(i) for i in range(20)]
    assert len(ds) == 20
    assert list(ds) == expected
    assert ds[:] == expected
    assert ds[3] == ds["k3"] == ds.get_by_key("k3") == joined_row(3)
    assert ds.get_by_keys(["k7", "k1"]) == [joined_row(7), joined_row(1)]
    assert ds.keys.at(4) == "k4"
    with pytest.raises(TypeError, match="flatnonzero"):
        ds.keys.at(True)
    assert ds.subset([5, 2])[:] == [joined_row(5), joined_row(2)]
    assert [ds.as_map()[i] for i in range(3)] == expected[:3]


def test_its_order_is_that_of_the_base(tmp_path: Path, loader_of: Loaders) -> None:
    paths = make(tmp_path)
    plain = loader_of(liveset.StreamingDataset(paths[0], shuffle=True), batch_size=3)
    for workers in (0, 2):
        loader = loader_of(open_joined(paths, {"shuffle": True}), batch_size=3, num_workers=workers)
        plain = loader_of(liveset.StreamingDataset(paths[0], shuffle=True), batch_size=3, num_workers=workers)
        for _ in range(2):
            batches = list(loader)
            assert [b["i"].tolist() for b in batches] == [b["i"].tolist() for b in plain]
            assert all(b["label"].tolist() == [100 + i for i in b["i"].tolist()] for b in batches)
            assert all(b["meta"]["odd"].tolist() == [i % 2 for i in b["i"].tolist()] for b in batches)


def test_missing_keys(tmp_path: Path) -> None:
    paths = make(tmp_path, [i for i in range(20) if i not in (3, 4, 11)])
    with pytest.raises(KeyNotFound, match="the keys 'k3', 'k4', 'k11' occur in .*base, and not in .*side") as caught:
        open_joined(paths)
    assert vars(caught.value)["keys"] == ("k3", "k4", "k11")
    dropped = open_joined(paths, missing="drop")
    assert [row["i"] for row in dropped] == [i for i in range(20) if i not in (3, 4, 11)]
    assert "k3" not in dropped.keys
    alone = open_joined(paths, missing="none")
    assert alone[3] == base_row(3) | {"meta": None}
    assert list(alone)[3:6] == alone[3:6]
    assert alone[5] == joined_row(5)
    told = open_joined(paths, missing="none", combine=lambda a, b: (a["i"], b and b["label"]))
    assert list(told)[2:6] == told[2:6] == [(2, 102), (3, None), (4, None), (5, 105)]


def test_transforms_and_other_samples(tmp_path: Path) -> None:
    paths = make(tmp_path)
    base = liveset.StreamingDataset(paths[0], transform=lambda row: {"i": -row["i"]})
    side = liveset.StreamingDataset(paths[1], transform=lambda row: row["label"])
    for ds in (
        liveset.JoinedStreamingDataset(base, side),
        liveset.JoinedStreamingDataset(base, side, transform=[lambda pair: pair, tuple]),
    ):
        assert ds[2] == ({"i": -2}, 102)
        assert list(ds)[5] == ds[5:6][0] == ({"i": -5}, 105)
    fields = liveset.StreamingDataset(paths[1], fields=["meta.odd"])
    assert liveset.JoinedStreamingDataset(base, fields)[3] == {"i": -3, "meta": {"odd": 1}}


def test_joins_of_joins(tmp_path: Path) -> None:
    paths = make(tmp_path)
    write_dataset(tmp_path / "more", [{"key": f"k{i}", "more": i * i} for i in range(20)], chunk_size=3, key="key")
    ds = liveset.JoinedStreamingDataset(open_joined(paths), liveset.StreamingDataset(tmp_path / "more", fields=["more"]))
    expected = [joined_row(i) | {"more": i * i} for i in range(20)]
    assert list(ds) == ds[:] == expected
    assert LightLoader(ds, batch_size=20, collate_fn=list).__iter__().__next__() == expected


def test_the_schema_is_that_of_the_joined_samples(tmp_path: Path) -> None:
    paths = make(tmp_path)
    write_dataset(tmp_path / "texts", [{"id": f"k{i}", "text": "a", "scores": {"x": 0.5}} for i in range(20)], key="id")

    def fields(ds: liveset.StreamingDataset) -> dict[str, str] | None:
        return ds.schema.fields if ds.schema is not None else None

    once = open_joined(paths)
    assert fields(once) == {"id": "str", "i": "int", "label": "int", "meta.odd": "int"}
    twice = liveset.JoinedStreamingDataset(once, liveset.StreamingDataset(tmp_path / "texts", fields=["text"]), missing="none")
    assert fields(twice) == fields(once) | {"text": "json"}  # type: ignore[operator]
    assert fields(open_joined(paths, combine=lambda a, b: (a, b))) is None


def test_arguments_are_checked(tmp_path: Path) -> None:
    paths = make(tmp_path)
    with pytest.raises(ValueError, match='missing must be "raise", "drop" or "none"'):
        open_joined(paths, missing="skip")
    with pytest.raises(ValueError, match="must be StreamingDatasets"):
        liveset.JoinedStreamingDataset(liveset.StreamingDataset(paths[0]), [1])  # type: ignore[arg-type]
    write_dataset(tmp_path / "ints", [{"i": i} for i in range(3)], key="i")
    write_dataset(tmp_path / "none", [{"i": i} for i in range(3)])
    with pytest.raises(ValueError, match="has keys of type str and .*ints has keys of type int"):
        open_joined((paths[0], tmp_path / "ints"))
    with pytest.raises(KeyNotFound, match="Keyed access requires a keys/ index"):
        open_joined((paths[0], tmp_path / "none"))


def test_both_stay_at_their_versions_until_they_are_refreshed(tmp_path: Path) -> None:
    paths = make(tmp_path)
    ds = open_joined(paths)
    running = iter(ds)
    first = [next(running) for _ in range(2)]
    with liveset.dataset_update(paths[1]) as update:
        for i in range(20):
            update[f"k{i}"] = side_row(i) | {"label": -i}
        update.commit()
    assert ds[7]["label"] == 107
    assert ds.refresh()
    assert [row["label"] for row in ds] == [-i for i in range(20)]
    assert first + list(running) == [joined_row(i) for i in range(20)]
    liveset.optimize(base_row, range(20, 23), paths[0], mode="append", num_workers=1, key_fn="id")
    with pytest.raises(KeyNotFound, match="'k20', 'k21', 'k22'"):
        ds.refresh()
    assert ds.version == 1
    assert [row["label"] for row in ds] == [-i for i in range(20)]
    liveset.optimize(side_row, range(20, 23), paths[1], mode="append", num_workers=1, key_fn="id")
    assert ds.refresh()
    assert len(ds) == 23
    assert not ds.refresh()


def test_states_go_on_with_both_versions(tmp_path: Path, loader_of: Loaders) -> None:
    paths = make(tmp_path)

    def read(batches: Any) -> list[tuple[list[int], list[int]]]:
        return [(b["i"].tolist(), b["label"].tolist()) for b in batches]

    expected = read(loader_of(open_joined(paths, {"shuffle": True}), batch_size=3))
    loader = loader_of(open_joined(paths, {"shuffle": True}), batch_size=3)
    seen = read(islice(loader, 2))
    state = loader.state_dict()
    with liveset.dataset_update(paths[1]) as update:
        for i in range(20):
            update[f"k{i}"] = side_row(i) | {"label": -i}
        update.commit()
    loader = loader_of(open_joined(paths, {"shuffle": True}), batch_size=3)
    loader.load_state_dict(state)
    assert seen + read(loader) == expected
    assert loader.dataset.refresh()
    assert all(label == -i for batch in read(loader) for i, label in zip(*batch, strict=True))
    alone = loader_of(liveset.StreamingDataset(paths[0], shuffle=True), batch_size=3)
    list(islice(alone, 2))
    with pytest.raises(StateMismatch, match="no state of a dataset that is joined"):
        loader.load_state_dict(alone.state_dict())


@pytest.mark.slow
def test_workers_that_are_not_forked(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ds = open_joined(make(tmp_path))
    loader = liveset.StreamingDataLoader(ds, batch_size=5, num_workers=1, multiprocessing_context="spawn")
    assert [b["label"].tolist() for b in loader] == [[100 + i for i in range(at, at + 5)] for at in range(0, 20, 5)]
