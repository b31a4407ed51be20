"""optimize(input_dir=URL): inputs that lie in a bucket come as local copies, which are there just as long as they are needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest

import liveset
from liveset.errors import StorageError
from liveset.write.fetching import AHEAD, Fetching
from tests.support.services import RemoteFolder, WebServer

COUNT = 40


@pytest.fixture
def files(on_moto: RemoteFolder) -> RemoteFolder:
    store = on_moto.store()
    for number in range(COUNT):
        obstore.put(store, f"a b/{number}.txt", b"%d" % number * 1000)
    return on_moto


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; there must be none left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.glob("liveset-inputs-*")) == []


def urls(files: RemoteFolder) -> list[str]:
    return [f"{files.url}/a b/{number}.txt" for number in range(COUNT)]


def read(path: str) -> dict[str, Any]:
    folder = Path(path).parent
    with open(path, "rb") as file:
        return {"name": os.path.basename(path), "data": file.read(), "others": sum(1 for _ in folder.parent.iterdir()), "path": path}


def expected() -> list[tuple[str, bytes]]:
    return [(f"{number}.txt", b"%d" % number * 1000) for number in range(COUNT)]


def run(files: RemoteFolder, path: Path, fn: Callable[[Any], Any], inputs: Any, **options: Any) -> list[Any]:
    given: dict[str, Any] = {"num_workers": 1, "storage_options": files.options, "input_dir": files.url, "chunk_size": 5} | options
    liveset.optimize(fn, inputs, path, verbose=False, **given)
    return list(liveset.StreamingDataset(path))


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "start_method": "fork"}, {"num_workers": 2, "keep_data_ordered": False}], ids=str
)
def test_fn_gets_local_copies(files: RemoteFolder, tmp_path: Path, scratch: Path, options: dict[str, Any]) -> None:
    found = run(files, tmp_path / "ds", read, urls(files), **options)
    pairs = [(sample["name"], sample["data"]) for sample in found]
    assert pairs == expected() if "keep_data_ordered" not in options else sorted(pairs) == sorted(expected())
    assert max(sample["others"] for sample in found) <= options.get("num_workers", 1) * (AHEAD + 2)
    assert all(sample["path"].startswith(str(scratch)) for sample in found)


def test_the_next_ones_are_fetched_meanwhile(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    found = run(files, tmp_path / "ds", read, urls(files))
    assert max(sample["others"] for sample in found) > 2


def nested(item: dict[str, Any]) -> dict[str, Any]:
    first, number = item["pair"]
    with open(first) as one, open(item["files"][0]) as two:
        return {"n": number, "same": one.read() == two.read(), "kept": item["kept"], "apart": first != item["files"][0]}


def test_urls_in_containers(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    other = f"{files.url}-other/1.txt"
    items = [{"pair": (url, number), "files": [url], "kept": other} for number, url in enumerate(urls(files)[:6])]
    assert run(files, tmp_path / "ds", nested, items) == [{"n": number, "same": True, "kept": other, "apart": True} for number in range(6)]


def names(items: list[str]) -> dict[str, Any]:
    return {"names": [os.path.basename(item) for item in items], "there": all(map(os.path.exists, items))}


def test_batches_of_inputs(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    found = run(files, tmp_path / "ds", names, urls(files), batch_size=3)
    assert [name for sample in found for name in sample["names"]] == [name for name, _ in expected()]
    assert all(sample["there"] for sample in found)


def lines(path: str) -> Iterator[dict[str, Any]]:
    for number in range(3):
        with open(path) as file:
            yield {"n": number, "text": file.read(), "file": liveset.File(path=path)}


def test_copies_live_as_long_as_samples_are_made_of_them(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    for workers in (1, 2):
        found = run(files, tmp_path / f"ds{workers}", lines, urls(files)[:10], num_workers=workers)
        assert [(sample["n"], sample["text"]) for sample in found] == [(n, data.decode()) for _, data in expected()[:10] for n in range(3)]
        assert [bytes(sample["file"]) for sample in found] == [data for _, data in expected()[:10] for n in range(3)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_missing_file_names_the_input(files: RemoteFolder, tmp_path: Path, scratch: Path, workers: int) -> None:
    inputs = urls(files)
    inputs[7] = f"{files.url}/absent.txt"
    with pytest.raises(liveset.WorkerError, match=r"item 7 \('s3://.*absent.txt'\).*does not exist"):
        run(files, tmp_path / "ds", read, inputs, num_workers=workers)
    assert not (tmp_path / "ds" / "index.json").exists()


def test_inputs_elsewhere_are_passed_as_they_are(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    inputs = [f"{files.url}-other/1.txt", str(tmp_path), "text"]
    assert run(files, tmp_path / "ds", str, inputs) == inputs
    assert run(files, tmp_path / "local", str, inputs, input_dir=tmp_path) == inputs
    assert run(files, tmp_path / "none", str, urls(files), input_dir=None) == urls(files)


def test_inputs_must_be_a_sequence(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(ValueError, match="sequence of inputs"):
        run(files, tmp_path / "ds", read, iter(urls(files)))
    with pytest.raises(ValueError, match="`input_dir` should be a URL or a path"):
        run(files, tmp_path / "ds", read, urls(files), input_dir=7)


def test_from_a_web_server_to_a_bucket(files: RemoteFolder, web: tuple[WebServer, Path], scratch: Path) -> None:
    server, docs = web
    for number in range(5):
        (docs / f"{number}.txt").write_text(f"{number}" * 1000)
    place = liveset.Place(f"{files.url}/ds", storage_options=files.options, cache_dir=False)
    inputs = [f"{server.url}/{number}.txt" for number in range(5)]
    liveset.optimize(read, inputs, place, num_workers=1, input_dir=server.url, verbose=False)
    assert [(sample["name"], sample["data"]) for sample in liveset.StreamingDataset(place)] == expected()[:5]


def test_a_broken_run_goes_on(files: RemoteFolder, tmp_path: Path, scratch: Path) -> None:
    def fail(path: str, *, at: str) -> dict[str, Any]:
        if os.path.basename(path) == at:
            raise ValueError(at)
        return read(path)

    with pytest.raises(liveset.WorkerError, match="20.txt"):
        run(files, tmp_path / "ds", partial(fail, at="20.txt"), urls(files), use_checkpoint=True, chunk_size=3)
    found = run(files, tmp_path / "ds", partial(fail, at=""), urls(files), use_checkpoint=True, chunk_size=3)
    assert [(sample["name"], sample["data"]) for sample in found] == expected()


@pytest.mark.parametrize("name", ["folder/", "n" * 300])
def test_a_name_that_no_file_can_have_is_an_error(name: str, on_seaweedfs: RemoteFolder, tmp_path: Path) -> None:
    root = on_seaweedfs.url
    fetched = Fetching(str, liveset.Place(root, storage_options=on_seaweedfs.options), str(tmp_path))
    with pytest.raises(StorageError, match="folder|cannot be kept") as info:
        fetched(f"{root}/{name}")
    assert f"{root}/{name}" in str(info.value)
    fetched.close()
