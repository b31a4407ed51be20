"""A place on an object store has one name, however its URL is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import liveset
from liveset.storage import Place, open_store
from liveset.storage.cache import ChunkCache
from liveset.storage.location import parse_location
from tests.support.remote import place_at
from tests.support.stub_server import StubServer

pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("s3://b//x", "s3://b/x"),
        ("s3://b/x/", "s3://b/x"),
        ("S3://b///x//y//", "s3://b/x/y"),
        ("s3://b/", "s3://b"),
        ("gs://B//X", "gs://B/X"),
        ("https://host:8000//a%20b//c", "https://host:8000/a%20b/c"),
        ("https://user:word@host//a", "https://host/a"),
        ("abfs://box@account.dfs.core.windows.net//a", "abfs://box@account.dfs.core.windows.net/a"),
    ],
)
def test_a_place_has_one_url(url: str, plain: str) -> None:
    location = parse_location(url)
    assert location.url == plain
    assert (location.prefix, location.bucket) == (parse_location(plain).prefix, parse_location(plain).bucket)


def test_all_spellings_of_a_url_mean_one_dataset(tmp_path: Path) -> None:
    with StubServer() as stub:
        place = place_at(stub.root / "plays", tmp_path)
        other = Place(place.url.replace("/plays", "//plays/"), storage_options=place.storage_options, cache_dir=tmp_path)
        liveset.optimize(lambda number: {"x": number}, range(6), place, chunk_size=3, num_workers=1, verbose=False)
        for path in (place, other):
            assert len(list(liveset.StreamingDataset(path))) == 6
        assert [held.url for held in ChunkCache(tmp_path).info().places] == [f"{place.url} at {stub.root.endpoint}"]
        assert str(liveset.StreamingDataset(other).info().path) == place.url
        assert open_store(other).url == place.url
        for target in (other, Place(f"{other.url}//copy", storage_options=place.storage_options)):
            with pytest.raises(ValueError, match="is the dataset itself, or in it"):
                liveset.cp(place, target)
