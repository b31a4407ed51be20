"""transform(): what a function makes of the samples is what the dataset holds afterwards, and nothing else changes."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveset
from liveset.edit.patch import join_parts, leaf_parts
from liveset.edit.session import dataset_update
from liveset.edit.splice import open_stored
from liveset.errors import (
    Corrupt,
    DatasetNotFound,
    OverwriteConflict,
    PickleRefused,
    SampleError,
    SchemaConflict,
    SessionExpired,
    WorkerError,
)
from liveset.format.codec import Compression
from liveset.snapshot import open_snapshot
from liveset.storage import open_store
from liveset.testing.invariants import check_dataset
from liveset.write.transform import transform
from tests.support.foreign import write_arrow, write_foreign
from tests.support.writing import write_dataset

pytest.importorskip("pyarrow", exc_type=ImportError)

SAMPLE, BATCH, CHUNK = (Compression("zstd", level, 3) for level in ("sample", "batch", "chunk"))
Write = Callable[[Path, list[dict[str, Any]]], object]
LAYOUTS: dict[str, Write] = {
    "classic": lambda path, samples: write_dataset(path, samples, key="id"),
    "sample": lambda path, samples: write_dataset(path, samples, key="id", compression=SAMPLE),
    "batch": lambda path, samples: write_dataset(path, samples, key="id", compression=BATCH),
    "chunk": lambda path, samples: write_dataset(path, samples, key="id", compression=CHUNK),
    "foreign": write_foreign,
    "foreign chunk": lambda path, samples: write_foreign(path, samples, compression=CHUNK),
    "arrow": lambda path, samples: write_arrow(path, samples, chunk_size=4),
}


def sample(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"k{number}", "n": number, "text": text or f"number {number}"}


def samples(count: int = 20) -> dict[str, Any]:
    return {f"k{number}": sample(number) for number in range(count)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "ds", map(sample, range(20)), key="id")
    return tmp_path / "ds"


@pytest.fixture(autouse=True)
def _no_processes_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def place(error: BaseException) -> tuple[Any, Any]:
    return error.__dict__["key"], error.__dict__["position"]


def check(path: Path, expected: dict[str, Any]) -> None:
    """By position, by key, and in every file, the dataset is what it should be."""
    dataset = liveset.StreamingDataset(path)
    assert list(dataset) == list(expected.values())
    assert list(dataset.keys) == list(expected)
    for position, (key, value) in enumerate(expected.items()):
        assert dataset[key] == dataset[position] == value
    check_dataset(open_store(path))
    assert liveset.verify(path).damaged == ()


# --- what fn makes of the samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(max_examples=15)
def test_a_dataset_is_what_fn_makes_of_it(layout: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds"
        expected = samples(10)
        LAYOUTS[layout](path, list(expected.values()))
        for step in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["same", "text", "number", "add", "drop"]))
            chosen = set(expected) if kind in ("add", "drop") else data.draw(st.sets(st.sampled_from(list(expected))))
            fn = partial(edited, kind=kind, step=step)
            after = {key: fn(dict(value)) if key in chosen else value for key, value in expected.items()}
            before = open_snapshot(open_store(path))
            changed = {number for number, key in enumerate(expected) if after[key] != expected[key]}
            result = transform(path, fn, where=partial(is_one_of, chosen))
            assert result.changed == len(changed)
            assert (result.bytes_written > 0) is bool(changed)
            assert result.version == before.version + (0 if not changed else 1 if before.index.edit is not None else 2)
            if kind not in ("add", "drop"):
                assert result.chunks == len({before.locate(number)[0] for number in changed})
            expected = after
            check(path, expected)


def is_one_of(chosen: set[str], value: dict[str, Any]) -> bool:
    return value["id"] in chosen


def edited(value: dict[str, Any], *, kind: str, step: int) -> dict[str, Any]:
    if kind == "text":
        value["text"] = f"step {step}"
    elif kind == "number":
        value["n"] //= 2  # leaves zeros as they are
    elif kind == "add":
        value[f"new {step}"] = [step, value["n"]]
    elif kind == "drop":
        return {name: part for name, part in value.items() if not name.startswith("new")}
    return value


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_do_the_same(path: Path, start_method: str) -> None:
    factor = 3
    result = transform(path, lambda value: {**value, "n": value["n"] * factor}, num_workers=2, start_method=start_method)
    assert (result.samples, result.changed, result.chunks) == (20, 19, 5)
    check(path, {key: {**value, "n": value["n"] * 3} for key, value in samples().items()})
    assert liveset.history(path)[0].op == "transform"


def test_only_chunks_with_changed_samples_are_written_and_the_rest_keeps_its_bytes(path: Path) -> None:
    before = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    stored = stored_items(path)
    result = transform(path, lambda value: {**value, "text": "new"}, where=lambda value: value["id"] in ("k5", "k6"))
    assert (result.changed, result.chunks, result.version) == (2, 1, 2)
    after = {file.name: file.stat().st_ino for file in path.glob("chunk-*")}
    assert len(after.keys() - before.keys()) == 1
    assert before.items() <= after.items()
    now = stored_items(path)
    assert [number for number in range(20) if now[number] != stored[number]] == [5, 6]


def stored_items(path: Path) -> list[Any]:
    snapshot = open_snapshot(open_store(path))
    compression = Compression.from_config(snapshot.index.config or {})
    opened = [(open_stored(snapshot.chunk_file(n)[1], record, compression), record) for n, record in enumerate(snapshot.index.chunks)]
    return [stored.content(slot) for stored, record in opened for slot in range(record.samples)]


def test_nothing_changed_is_no_version(path: Path) -> None:
    before = files(path)
    result = transform(path, lambda value: value)
    assert (result.version, result.changed, result.chunks, result.bytes_written) == (1, 0, 0, 0)
    assert files(path) == before


def test_another_way_to_store_the_same_value_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    values = [{"id": f"k{number}", "value": complex(number)} for number in range(4)]
    write_foreign(path, values)
    (file,) = path.glob("chunk-*")
    record = open_snapshot(open_store(path)).index.chunks[0]
    stored = open_stored(file.read_bytes(), record, None)
    item = stored.content(1)
    head, value = leaf_parts(item, 2)
    other = pickle.dumps(pickle.loads(value), 2)
    assert other != value
    data = b"".join(bytes(part) for part in stored.splice({1: join_parts([head, other])}).buffers)
    file.write_bytes(data)
    index = path / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"chunk_bytes": %d' % record.size, b'"chunk_bytes": %d' % len(data)))
    assert list(liveset.StreamingDataset(path)) == values
    assert transform(path, lambda value: value).changed == 0
    assert transform(path, lambda value: {**value, "value": 1 + value["value"]}).changed == 4


def test_a_sample_is_its_own_to_change(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ds", [{"a": np.arange(4) + n, "meta": {"tags": ["x"]}} for n in range(6)])

    def grow(value: Any) -> Any:
        value["a"] += 1
        value["meta"]["tags"].append("y")
        return value

    assert transform(tmp_path / "ds", grow).changed == 6
    dataset = liveset.StreamingDataset(tmp_path / "ds")
    assert [value["a"].tolist() for value in dataset] == [(np.arange(4) + n + 1).tolist() for n in range(6)]
    assert dataset[0]["meta"] == {"tags": ["x", "y"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_without_keys_are_transformed_by_position(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "ds"
    write_dataset(path, range(10))
    assert transform(path, lambda value: value * 2, num_workers=workers).changed == 9
    assert list(liveset.StreamingDataset(path)) == [value * 2 for value in range(10)]
    transform(path, lambda value: {"n": value}, num_workers=workers)
    assert list(liveset.StreamingDataset(path)) == [{"n": value * 2} for value in range(10)]
    check_dataset(open_store(path))


def test_an_empty_dataset_stays_one(path: Path) -> None:
    with dataset_update(path) as update:
        for key in samples():
            del update[key]
        update.commit()
    assert transform(path, lambda value: 1 / 0).samples == 0


def test_a_session_is_done_once(path: Path) -> None:
    def grow(value: Any) -> Any:
        return {**value, "n": value["n"] + 1}

    first = transform(path, grow, session="grow")
    again = transform(path, grow, session="grow")
    assert (first.version, again.version, again.changed) == (2, 2, 0)
    check(path, {key: grow(value) for key, value in samples().items()})


# --- some fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 2])
def test_some_fields_alone(tmp_path: Path, layout: str, workers: int) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, list(samples().values()))

    def fn(value: Any) -> Any:
        assert value.keys() == {"n", "text"}
        return {"text": value["text"] + "!", "n": -value["n"]}

    result = transform(path, fn, fields=["n", "text"], where=lambda value: value["n"] in (0, 6), num_workers=workers)
    assert (result.changed, result.chunks) == (2, 2)
    check(path, samples() | {"k0": sample(0, "number 0!"), "k6": {**sample(6, "number 6!"), "n": -6}})
    assert transform(path, lambda value: value, fields=["text"], num_workers=workers).changed == 0
    before = files(path)
    wrong: list[Any] = [{"n": "1", "text": ""}, {"n": 1}, {"n": 1, "text": "", "x": 1}, {"n": 1, "text": "", "id": "k0"}, [1, "a"]]
    for number in range(5):
        with pytest.raises(SampleError, match=r"sample 0 \('k0'.*With fields="):
            transform(path, lambda value: wrong[number], fields=["n", "text"])  # noqa: B023 - used at once
    with pytest.raises(SampleError, match="fn changed field 'id'"):
        transform(path, lambda value: {"id": "other"}, fields=["id"])
    with pytest.raises(ValueError, match="fields= names 'x'"):
        transform(path, lambda value: value, fields=["x"])
    with pytest.raises(ValueError, match="use one of them"):
        transform(path, lambda value: value, fields=["n"], nullable=["n"])
    assert files(path) == before


def test_fields_inside_others_and_media_that_are_not_decoded(tmp_path: Path) -> None:
    path, broken = tmp_path / "ds", picture(0)[:-20]
    rows = [{"meta": {"a": n, "b": [n, None], "c": {}}, "image": liveset.Jpeg(bytes=broken), "pair": (n, "x")} for n in range(6)]
    write_dataset(path, rows)
    with pytest.raises(Corrupt):
        transform(path, lambda value: value)
    seen = []

    def fn(value: Any) -> Any:
        seen.append(repr(value))
        value["meta"]["b"].append(7)
        return value

    assert transform(path, fn, fields=["meta.b"], where=lambda value: value["meta"]["b"][0] in (2, 5)).changed == 2
    assert seen == ["{'meta': {'b': [2, None]}}", "{'meta': {'b': [5, None]}}"]
    assert transform(path, lambda value: {"pair": (value["pair"][0] + 1, "y")}, fields=["pair"], num_workers=2).changed == 6
    assert list(liveset.StreamingDataset(path, fields=["meta", "pair"])) == [
        {"meta": {"a": n, "b": [n, None, 7] if n in (2, 5) else [n, None], "c": {}}, "pair": (n + 1, "y")} for n in range(6)
    ]
    names = list(liveset.Schema.from_config(open_snapshot(open_store(path)).index.config or {}).fields)
    assert {leaf_parts(item, len(names))[names.index("image")] for item in stored_items(path)} == {broken}


# --- a trial ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", [lambda value: {**value, "n": 7}, lambda value: {**value, "more": 1.5}])
def test_a_trial_tells_what_would_be_done_and_writes_nothing(tmp_path: Path, layout: str, fn: Callable[[Any], Any]) -> None:
    LAYOUTS[layout](tmp_path / "ds", list(samples().values()))
    before = files(tmp_path / "ds")
    trial = transform(tmp_path / "ds", fn, dry_run=True)
    assert files(tmp_path / "ds") == before
    done = transform(tmp_path / "ds", fn)
    assert (trial.samples, trial.changed, trial.chunks, trial.bytes_written) == (
        done.samples,
        done.changed,
        done.chunks,
        done.bytes_written,
    )
    assert trial.version < done.version


# --- a new schema -----------------------------------------------------------------------------------------------------

NEW: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "add": lambda value: {**value, "score": value["n"] / 2},
    "drop": lambda value: {"id": value["id"], "n": value["n"]},
    "rename": lambda value: {"id": value["id"], "number": value["n"], "text": value["text"]},
    "type": lambda value: {**value, "n": str(value["n"])},
    "later": lambda value: {**value, "n": None} if value["id"] == "k17" else value,
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("change", NEW)
def test_a_new_schema_keeps_keys_order_attributes_and_the_version_before(path: Path, change: str, workers: int) -> None:
    liveset.set_attributes(path, license="CC0")
    result = transform(path, NEW[change], num_workers=workers, message="better")
    assert (result.version, result.samples, result.changed) == (3, 20, 20)
    check(path, {key: NEW[change](dict(value)) for key, value in samples().items()})
    info = liveset.StreamingDataset(path).info()
    assert info.attributes["license"] == "CC0"
    assert liveset.history(path)[0].message == "better"
    assert list(liveset.StreamingDataset(path, version=2)) == list(samples().values())
    index = open_snapshot(open_store(path)).index
    assert index.layout_of_keys["field"] == "id"
    with dataset_update(path) as update:
        update["k3"] = update["k4"] | {"id": "k3"}
        update.commit()
    assert (path / "keys" / "shard-00000.parquet").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_schema_in_every_layout(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "ds"
    LAYOUTS[layout](path, list(samples().values()))
    before = open_snapshot(open_store(path)).index.config or {}
    transform(path, NEW["add"])
    check(path, {key: NEW["add"](value) for key, value in samples().items()})
    after = open_snapshot(open_store(path)).index.config or {}
    for name in ("compression", "compression_level", "chunk_size"):
        assert after[name] == before[name]


@pytest.mark.parametrize("drop", [True, False])
def test_without_the_key_field_keys_stay_and_the_field_is_forgotten(path: Path, drop: bool) -> None:
    transform(path, lambda value: {"n": value["n"]} if drop else {"name": value["id"], "n": value["n"]})
    dataset = liveset.StreamingDataset(path)
    assert list(dataset.keys) == list(samples())
    assert dataset["k7"]["n"] == 7
    assert "field" not in open_snapshot(open_store(path)).index.layout_of_keys
    with dataset_update(path) as update:
        update["k7"] = dataset["k8"]
        update.commit()
    check_dataset(open_store(path))


def test_chunks_of_a_new_schema_keep_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    liveset.optimize(lambda n: {"id": n, "data": bytes(100)}, range(100), str(path), chunk_bytes=2_000, key_fn="id", num_workers=1)
    transform(path, lambda value: {**value, "more": bytes(100)})
    large = open_snapshot(open_store(path)).index
    assert all(record.size <= 2_200 for record in large.chunks)
    transform(path, lambda value: {"id": value["id"]})
    small = open_snapshot(open_store(path)).index
    assert len(small.chunks) == 1
    assert (small.config or {})["chunk_bytes"] == 2_000
    assert list(liveset.StreamingDataset(path)) == [{"id": n} for n in range(100)]
    assert list(liveset.StreamingDataset(path).keys) == list(range(100))


def test_fields_that_stay_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    write_dataset(path, [{"id": "a", "n": None}, {"id": "b", "n": 3}, {"id": "c", "n": 4}], key="id", chunk_size=2)
    with dataset_update(path) as update:
        update["a"] = {"id": "a", "n": 2}
        update.commit()
    transform(path, lambda value: {**value, "x": 1})
    schema = liveset.Schema.from_config(open_snapshot(open_store(path)).index.config or {})
    assert schema.fields == {"id": "str", "n": "json", "x": "int"}


def test_nullable_fields(path: Path) -> None:
    result = transform(path, lambda value: value, nullable=["n"])
    assert (result.version, result.changed) == (2, 20)
    assert transform(path, lambda value: value, nullable=["n"]).version == 2
    assert transform(path, lambda value: {**value, "n": None}, where=lambda value: value["n"] == 3).chunks == 1
    check(path, {**samples(), "k3": {**sample(3), "n": None}})
    assert transform(path, lambda value: {**value, "x": 1}, nullable=["x"]).version == 4
    with pytest.raises(SampleError, match="nullable= names the fields"):
        transform(path, lambda value: value, nullable=["y"])


def test_samples_that_are_not_chosen_must_fit_the_new_schema(path: Path) -> None:
    before = files(path)
    for fn, field in ((NEW["add"], "score"), (NEW["type"], "n")):
        with pytest.raises(SampleError, match=r"sample 6 \('k6', slot 2 of chunk-.*`where` did not choose it") as caught:
            transform(path, fn, where=lambda value: value["n"] < 6)
        assert (caught.value.field, *place(caught.value)) == (field, "k6", 6)
    assert files(path) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_all_samples_get_the_same_fields(path: Path, workers: int) -> None:
    before = files(path)
    with pytest.raises(SampleError, match="fn must give all samples the same fields") as caught:
        transform(path, lambda value: {**value, "x": 1} if value["n"] < 15 else value, num_workers=workers)
    assert caught.value.field == "x"
    assert files(path) == before


def picture(seed: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize("make", [lambda data: liveset.Jpeg(bytes=data), lambda data: liveset.Image(bytes=data)])
@pytest.mark.parametrize(
    "fn",
    [
        lambda value: {**value, "label": value["label"] + 1},
        lambda value: {**value, "x": 1},
        lambda value: {"picture": value["image"], "label": value["label"], "text": value["text"]},
        lambda value: {"inner": {"image": value["image"]}, "text": value["text"]},
    ],
)
def test_media_that_come_back_keep_their_bytes(tmp_path: Path, make: Callable[[bytes], Any], fn: Callable[[Any], Any]) -> None:
    path, pictures = tmp_path / "ds", [picture(seed) for seed in range(6)]
    write_dataset(path, [{"image": make(data), "label": 1, "text": liveset.Text(text=f"t{n}")} for n, data in enumerate(pictures)])
    formats = liveset.Schema.from_config(open_snapshot(open_store(path)).index.config or {}).fields
    transform(path, fn)
    snapshot = open_snapshot(open_store(path))
    fields = liveset.Schema.from_config(snapshot.index.config or {}).fields
    name = next(name for name in fields if name.endswith(("image", "picture")))
    assert fields[name] == formats["image"]
    assert fields["text"] == formats["text"]
    number = list(fields).index(name)
    assert [leaf_parts(item, len(fields))[number] for item in stored_items(path)] == pictures


# --- what is refused --------------------------------------------------------------------------------------------------


def boom(value: Any) -> Any:
    if value["n"] == 7:
        raise ValueError("boom")
    return {**value, "n": 0}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("layout", ["classic", "foreign"])
def test_errors_of_fn_name_the_sample_and_change_nothing(tmp_path: Path, layout: str, workers: int) -> None:
    LAYOUTS[layout](tmp_path / "ds", list(samples().values()))
    before = files(tmp_path / "ds")
    with pytest.raises(WorkerError, match=r"'k7', slot 3 of chunk-0-1.*: ValueError: boom") as caught:
        transform(tmp_path / "ds", boom, num_workers=workers)
    assert place(caught.value) == ("k7", 7)
    assert files(tmp_path / "ds") == before
    with pytest.raises(WorkerError, match="'k7'.*boom"):
        transform(tmp_path / "ds", lambda value: value, where=boom, num_workers=workers)
    with pytest.raises(WorkerError, match="'k7'.*boom"):
        transform(tmp_path / "ds", lambda value: {**boom(value), "x": 1}, num_workers=workers)
    assert files(tmp_path / "ds") == before


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda value: None if value["n"] == 9 else value, "fn returned None.*dataset_update"),
        (lambda value: {**value, "id": "other"} if value["n"] == 9 else value, "fn changed field 'id'.*the key 'other'"),
        (lambda value: {**value, "x": 1, "id": "other" if value["n"] == 9 else value["id"]}, "fn changed field 'id'.*the key 'other'"),
    ],
)
def test_results_that_are_refused(path: Path, fn: Callable[[Any], Any], words: str, workers: int) -> None:
    before = files(path)
    with pytest.raises(SampleError, match=r"sample 9 \('k9', slot 1 of chunk-0-2.*" + words) as caught:
        transform(path, fn, num_workers=workers)
    assert place(caught.value) == ("k9", 9)
    assert files(path) == before


class Odd:
    pass


def test_objects_need_allow_pickle(path: Path) -> None:
    before = files(path)
    with pytest.raises(PickleRefused, match="'k0'"):
        transform(path, lambda value: {**value, "x": Odd()})
    assert files(path) == before


def test_arguments_without_meaning(path: Path) -> None:
    with pytest.raises(ValueError, match="`fn` should be a function"):
        transform(path, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`where` should be a function"):
        transform(path, boom, where=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers"):
        transform(path, boom, num_workers=-1)
    with pytest.raises(DatasetNotFound):
        transform(path / "nothing", boom)
    with pytest.raises(TypeError, match=r"`fields` is a list of names of fields, as in fields=\['n'\]"):
        transform(path, boom, fields="n")
    with pytest.raises(TypeError, match="`nullable` is a list of names"):
        transform(path, boom, nullable="n")
    assert open_snapshot(open_store(path)).version == 1


def test_damaged_chunks_are_not_copied(path: Path) -> None:
    name = open_snapshot(open_store(path)).index.chunks[1].filename
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    before = files(path)
    with pytest.raises(Corrupt, match=name):
        transform(path, lambda value: {**value, "n": -1})
    assert files(path) == before


def test_a_worker_that_is_killed_is_noticed(path: Path) -> None:
    before, parent = files(path), os.getpid()

    def die(value: Any) -> Any:
        if value["n"] == 18:
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)
        return {**value, "n": -1}

    for fn in (die, lambda value: {**die(value), "x": 1}):
        with pytest.raises(WorkerError, match="killed by SIGKILL.*'k18', slot 2 of chunk-0-4"):
            transform(path, fn, num_workers=2)
        assert files(path) == before


@pytest.mark.parametrize("more", [{}, {"x": 1}])
def test_an_interrupt_leaves_nothing(path: Path, more: dict[str, Any]) -> None:
    before = files(path)

    def stop(value: Any) -> Any:
        if value["n"] == 18:
            raise KeyboardInterrupt
        return {**value, "n": -1, **more}

    with pytest.raises(KeyboardInterrupt):
        transform(path, stop)
    assert files(path) == before


# --- others at work ---------------------------------------------------------------------------------------------------


def meanwhile(action: Callable[[], object], fn: Callable[[Any], Any], at: str = "k19") -> Callable[[Any], Any]:
    """Return ``fn`` with something that happens when it gets to a sample, once."""
    done = list[str]()

    def both(value: Any) -> Any:
        if value["id"] == at and not done:
            done.append(at)
            action()
        return fn(value)

    return both


def mark(value: Any) -> Any:
    return {**value, "text": value["text"] + "!"}


def test_chunks_that_others_changed_are_transformed_again(path: Path) -> None:
    def others() -> None:
        with dataset_update(path) as update:
            update["k2"] = sample(2, "theirs")
            del update["k5"]
            for number in range(8, 12):
                del update[f"k{number}"]
            update.insert("k30", sample(30))
            update.commit()
        liveset.optimize(sample, range(40, 42), str(path), mode="append", num_workers=1)

    result = transform(path, meanwhile(others, mark))
    expected = {key: mark(value) for key, value in samples().items()}
    expected["k2"] = mark(sample(2, "theirs"))
    for number in (5, *range(8, 12)):
        del expected[f"k{number}"]
    expected |= {f"k{number}": sample(number) for number in (30, 40, 41)}
    check(path, expected)
    assert (result.version, result.changed, result.chunks) == (4, 15, 4)
    assert chunk_files(path) == named(path)


def chunk_files(path: Path) -> set[str]:
    return {file.name for file in path.glob("chunk-*")}


def named(path: Path) -> set[str]:
    store = open_store(path)
    versions = [entry.version for entry in liveset.history(path)]
    return {record.filename for version in versions for record in open_snapshot(store, version).index.chunks}


def test_samples_that_others_made_the_chosen_ones_are_transformed_too(path: Path) -> None:
    def others() -> None:
        with dataset_update(path) as update:
            update["k2"] = sample(2, "odd")
            update.commit()

    transform(path, meanwhile(others, mark), where=lambda value: value["text"] == "odd" or value["id"] == "k19")
    check(path, {**samples(), "k2": sample(2, "odd!"), "k19": mark(sample(19))})


def test_a_race_that_is_lost_is_run_again(path: Path) -> None:
    """While a chunk is transformed again for the new head, that head is replaced, too."""
    action = {"number 19": lambda: put(path, "k2", "second"), "second": lambda: put(path, "k9", "third")}

    def fn(value: Any) -> Any:
        if (act := action.pop(value["text"], None)) is not None:
            act()
        return mark(value)

    assert transform(path, fn).version == 4
    expected = samples() | {"k2": sample(2, "second"), "k9": sample(9, "third")}
    check(path, {key: mark(value) for key, value in expected.items()})
    assert chunk_files(path) == named(path)


def test_samples_that_were_moved_to_other_chunks_meanwhile_are_not_forgotten(path: Path) -> None:
    append(path, 40, 41, 42)
    expected = samples() | {f"k{number}": sample(number) for number in range(40, 43)}
    transform(path, meanwhile(lambda: liveset.compact(path), mark))
    check(path, {key: mark(value) for key, value in expected.items()})
    assert chunk_files(path) == named(path)


def append(path: Path, *numbers: int) -> None:
    for number in numbers:
        liveset.optimize(sample, [number], str(path), mode="append", num_workers=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_merged_chunks_only_the_samples_that_were_there_are_transformed(layout: str, tmp_path: Path) -> None:
    """Edited before one compaction, between two and after both, and lost a race in which a third one comes."""
    path = tmp_path / "ds"
    LAYOUTS[layout](path, list(samples(4).values()))
    append(path, 10, 11)

    def others() -> None:
        with dataset_update(path) as update:
            update["k10"] = sample(10, "before")
            update.commit()
        append(path, 20)
        liveset.compact(path, small=1.0)
        append(path, 21, 22)
        with dataset_update(path) as update:
            update["k1"] = sample(1, "between")
            update.commit()
        liveset.compact(path, small=1.0)
        put(path, "k20", "after")

    def more() -> None:
        append(path, 23)
        liveset.compact(path, small=1.0)

    actions = {"number 11": others, "between": more}

    def fn(value: Any) -> Any:
        actions.pop(value["text"], lambda: None)()
        return mark(value)

    transform(path, fn)
    assert not actions
    theirs = {"k20": sample(20, "after")} | {f"k{number}": sample(number) for number in (21, 22, 23)}
    ours = samples(4) | {"k10": sample(10, "before"), "k11": sample(11), "k1": sample(1, "between")}
    check(path, {key: mark(value) for key, value in ours.items()} | theirs)
    assert [entry.op for entry in liveset.history(path)].count("compact") == 3


def test_a_merged_chunk_that_lost_samples(path: Path) -> None:
    """Where all of its samples were there before, nothing is doubtful."""
    append(path, 40, 41)

    def others(*added: int) -> None:
        append(path, *added)
        liveset.compact(path, small=1.0)
        with dataset_update(path) as update:
            del update["k40"]
            update.commit()

    expected = samples() | {"k41": sample(41)}
    transform(path, meanwhile(others, mark))
    check(path, expected := {key: mark(value) for key, value in expected.items()})
    append(path, 40)
    with pytest.raises(OverwriteConflict, match="and some were deleted from it since. Nothing was changed"):
        transform(path, meanwhile(lambda: others(50), mark))
    check(path, expected | {"k50": sample(50)})
    assert chunk_files(path) == named(path)


def test_without_keys_a_compaction_is_followed_too(tmp_path: Path) -> None:
    append(tmp_path, *range(5))
    transform(tmp_path, meanwhile(lambda: liveset.compact(tmp_path, small=1.0), mark, "k4"))
    assert len(open_snapshot(open_store(tmp_path)).index.chunks) == 1
    assert list(liveset.StreamingDataset(tmp_path)) == [mark(sample(number)) for number in range(5)]


def test_what_is_committed_stays_whatever_fails_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("liveset.write.transform.publish_keys", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        transform(path, NEW["add"])
    check(path, {key: NEW["add"](value) for key, value in samples().items()})


@pytest.mark.parametrize(("fn", "more"), [(mark, {}), (NEW["add"], {}), (mark, {"start_method": "spawn", "num_workers": 1})])
def test_a_purge_meanwhile_is_told_as_what_it_is(path: Path, fn: Callable[[Any], Any], more: dict[str, Any]) -> None:
    with pytest.raises(SessionExpired, match=r"a purge has replaced it meanwhile.*Nothing was changed. Transform again"):
        transform(path, meanwhile(lambda: liveset.purge(path, ["k17"]), fn, "k0"), **more)
    expected = samples()
    del expected["k17"]
    check(path, expected)
    assert chunk_files(path) == named(path)


def test_keys_that_stand_in_another_field_meanwhile_stay_what_it_says(path: Path) -> None:
    """What ``fn`` does to that field was not compared with the keys."""
    with pytest.raises(OverwriteConflict, match="the keys of the samples are those in the field 'text' since meanwhile"):
        transform(path, meanwhile(lambda: liveset.build_keys_index(path, "text", overwrite=True), mark))
    assert liveset.StreamingDataset(path)["number 3"] == sample(3)
    assert chunk_files(path) == named(path)
    with pytest.raises(SampleError, match="holds the key"):
        transform(path, mark)


def test_keys_that_are_made_of_the_same_field_meanwhile(path: Path) -> None:
    transform(path, meanwhile(lambda: liveset.build_keys_index(path, "id", overwrite=True), mark))
    check(path, {key: mark(value) for key, value in samples().items()})


def test_errors_in_samples_that_others_changed_name_them(path: Path) -> None:
    def others() -> None:
        with dataset_update(path) as update:
            del update["k0"]
            update["k2"] = sample(2, "odd")
            update.commit()

    with pytest.raises(WorkerError, match=r"'k2', slot 1 of chunk.*boom"):
        transform(path, meanwhile(others, odd))
    assert chunk_files(path) == named(path)


def test_samples_that_others_changed_must_fit_the_schema(path: Path) -> None:
    def half(value: Any) -> Any:
        return {**value, "n": 0.5 if value["text"] == "odd" else 1}

    with pytest.raises(SchemaConflict, match="another commit changed samples.*field 'n' is float"):
        transform(path, meanwhile(lambda: put(path, "k3", "odd"), half))
    check(path, {**samples(), "k3": sample(3, "odd")})
    assert chunk_files(path) == named(path)


def odd(value: Any) -> Any:
    if value["text"] == "odd":
        raise ValueError("boom")
    return mark(value)


def put(path: Path, key: str, text: str) -> liveset.UpdateResult:
    with dataset_update(path) as update:
        update[key] = sample(int(key[1:]), text)
        return update.commit()


def test_two_transforms_at_once_both_count(path: Path) -> None:
    transform(path, meanwhile(lambda: transform(path, lambda value: {**value, "n": value["n"] + 1}), mark))
    check(path, {key: {**mark(value), "n": value["n"] + 1} for key, value in samples().items()})


@pytest.mark.parametrize("fn", [mark, NEW["add"]])
def test_a_dataset_that_was_replaced_meanwhile_is_left_alone(path: Path, fn: Callable[[Any], Any]) -> None:
    def others() -> None:
        write_dataset(path, map(sample, range(5)), key="id")

    with pytest.raises(OverwriteConflict):
        transform(path, meanwhile(others, fn))
    check(path, samples(5))


def test_a_new_schema_does_not_undo_what_others_committed(path: Path) -> None:
    with pytest.raises(OverwriteConflict):
        transform(path, meanwhile(lambda: put(path, "k3", "theirs"), NEW["add"]))
    check(path, {**samples(), "k3": sample(3, "theirs")})
    assert chunk_files(path) == named(path)


@pytest.mark.parametrize("fn", [mark, NEW["add"]])
@pytest.mark.parametrize("how", ["adopt", "update"])
def test_a_dataset_of_another_program_that_somebody_adopts_meanwhile(tmp_path: Path, fn: Callable[[Any], Any], how: str) -> None:
    path = tmp_path / "ds"
    write_foreign(path, list(samples().values()))
    expected = samples()

    def action() -> object:
        return liveset.adopt(path) if how == "adopt" else put(path, "k3", "theirs").version

    if how == "update":
        expected["k3"] = sample(3, "theirs")
    try:
        transform(path, meanwhile(action, fn))
        expected = {key: fn(value) for key, value in expected.items()}
    except OverwriteConflict:
        assert (fn, how) == (NEW["add"], "update")
    check(path, expected)
