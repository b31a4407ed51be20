"""The contract of a store on object stores, and what is special to them."""

from __future__ import annotations

import base64
import http.server
import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from liveset.errors import Corrupt, NotFound, StorageError
from liveset.format import codec
from liveset.storage import Place, Store, Swap, has_ranges, is_inside, open_store
from liveset.storage.location import parse_location
from liveset.storage.requests import PART, open_bucket
from liveset.testing.conformance import StoreTests
from tests.support.remote import store_at
from tests.support.services import RemoteFolder, WebServer
from tests.support.stub_server import StubServer


class RemoteStoreTests(StoreTests):
    refusals: ClassVar = (Swap.LOST, Swap.UNKNOWN)
    overwrites: ClassVar = True
    turns: ClassVar = 4


class TestObjectStores(RemoteStoreTests):
    @pytest.fixture
    def store(self, remote_folder: RemoteFolder) -> Store:
        return store_at(remote_folder)


class TestCachedObjectStore(RemoteStoreTests):
    @pytest.fixture
    def store(self, on_seaweedfs: RemoteFolder, tmp_path: Path) -> Store:
        return store_at(on_seaweedfs, tmp_path / "cache")


class TestStub(RemoteStoreTests):
    @pytest.fixture(params=["s3", "gs"])
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with StubServer(request.param) as stub:
            yield store_at(stub.root / "dataset")


class TestLocalSource(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(Place(f"local:{tmp_path / 'dataset'}", cache_dir=tmp_path / "cache"))


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Host and port of a web server of this process."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


NAMES = ["a b", "a+b", "50%", "a%20b", "a#b", "a?b=c&d", "it's", "plays ä ü 日本", "{x}[y]", "a:b*~!", 'a"b', "a|b"]


@pytest.mark.parametrize("name", NAMES)
def test_every_character_of_a_folder_stands_for_itself(remote_folder: RemoteFolder, name: str) -> None:
    store = store_at(remote_folder / name)
    assert store.swap_head(b"head", None) is Swap.SWAPPED
    store.write("chunk-0.bin", b"bytes")
    store.copy("chunk-0.bin", "_liveset/copy.bin")
    assert store.read("_liveset/copy.bin", 1, 3) == b"yte"
    assert {entry.name for entry in store.list("")} == {"index.json", "chunk-0.bin", "_liveset/copy.bin"}
    assert {entry.name for entry in store_at(remote_folder).list("")} == {
        f"{name}/{file}" for file in ("index.json", "chunk-0.bin", "_liveset/copy.bin")
    }
    store.delete(["chunk-0.bin", "_liveset/copy.bin"])
    assert [entry.name for entry in store.list("")] == ["index.json"]


def test_a_web_server_is_read(web: tuple[WebServer, Path], tmp_path: Path) -> None:
    server, docs = web
    folder = docs / "plays ä#1"
    folder.mkdir()
    (folder / "index.json").write_bytes(b"head")
    (folder / "chunk-0.bin").write_bytes(b"0123456789")
    for url in (f"{server.url}/plays%20%C3%A4%231", f"{server.url}/norange/plays ä%231/"):
        store = open_store(Place(url, cache_dir=False))
        head = store.read_head()
        assert head is not None
        assert head.data == b"head"
        assert store.read("chunk-0.bin") == b"0123456789"
        assert has_ranges(store) == ("norange" not in url)
        assert store.read_ranges("chunk-0.bin", [(0, 2), (8, 2)]) == [b"01", b"89"]
        assert bytes(open_store(Place(url, cache_dir=tmp_path / "cache")).map("chunk-0.bin", 10)) == b"0123456789"
    store = open_store(Place(f"{server.tls_url}/plays%20ä%231", storage_options={"verify": str(server.ca)}, cache_dir=False))
    assert store.read("chunk-0.bin", 2, 3) == b"234"
    assert store.read_ranges("chunk-0.bin", [(0, 2), (8, 2)]) == [b"01", b"89"]
    for act in (lambda: store.write("a.bin", b""), lambda: store.swap_head(b"", None), lambda: store.delete(["chunk-0.bin"]), store.probe):
        with pytest.raises(StorageError, match="can only be read"):
            act()
    assert (folder / "chunk-0.bin").exists()


def test_a_lost_connection_to_a_server_without_ranges() -> None:
    """It can only be asked for all of it again."""
    data = bytes(range(256)) * 40_000
    cuts = [data[: len(data) // 2], data[: len(data) // 3], data]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.end_headers()
            with suppress(OSError):  # whoever asked for a part leaves
                self.wfile.write(data if self.headers["Range"] else cuts.pop(0))

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with serving(Handler) as host:
        store = open_store(Place(f"http://{host}/plays", cache_dir=False))
        assert bytes(store.map("chunk-0.bin", len(data))) == data
    assert not cuts


@pytest.mark.parametrize("checked", [True, False])
def test_a_damaged_file_of_the_cache_is_fetched_again(stub: StubServer, tmp_path: Path, checked: bool) -> None:
    data = bytes(range(256))
    content = codec.checksum(data) if checked else "edition"
    store = store_at(stub.root / "plays", tmp_path / "cache")
    store.write("chunk-0.bin", data)
    store.map("chunk-0.bin", len(data), content).release()
    (file,) = (tmp_path / "cache").rglob("*.cached")
    found = file.stat()
    file.write_bytes(bytes(256))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert bytes(store.map("chunk-0.bin", len(data), content)) == bytes(256)
    stub.forget()
    assert bytes(store.map("chunk-0.bin", len(data), content, fresh=True)) == data
    assert stub.count("GET") == 1
    assert bytes(store.map("chunk-0.bin", len(data), content)) == data
    assert stub.count("GET") == 1


def test_damage_at_the_store_names_the_url(stub: StubServer, tmp_path: Path) -> None:
    store = store_at(stub.root / "plays", tmp_path / "cache")
    store.write("chunk-0.bin", b"damaged")
    with pytest.raises(Corrupt, match="is damaged where it is stored") as info:
        store.map("chunk-0.bin", 7, codec.checksum(b"as told"))
    assert info.value.file == f"{store.url}/chunk-0.bin"
    assert str(info.value).startswith(info.value.file)


def test_a_folder_is_not_one_whose_name_begins_the_same(remote_folder: RemoteFolder) -> None:
    store, other = store_at(remote_folder / "plays"), store_at(remote_folder / "plays-2")
    store.write("a.bin", b"1")
    other.write("b.bin", b"2")
    assert [entry.name for entry in store.list("")] == ["a.bin"]
    assert [entry.name for entry in other.list("")] == ["b.bin"]


def test_large_files_go_up_and_down_in_parts(remote_folder: RemoteFolder, tmp_path: Path) -> None:
    store = store_at(remote_folder)
    pieces = [bytes([number]) * (1 << 20) for number in range(21)]
    store.write("large.bin", [*pieces, memoryview(b"end")])
    whole = b"".join(pieces) + b"end"
    assert store.read("large.bin") == whole
    assert bytes(store.map("large.bin", len(whole))) == whole
    cached = store_at(remote_folder, tmp_path / "cache")
    for size in (len(whole), 0):  # as known from an index, and as of files that nothing describes
        assert bytes(cached.map("large.bin", size, f"edition {size}")) == whole
    one = bytes(PART + 1)
    store.write("one.bin", one)
    assert store.read("one.bin") == one
    assert store.read_ranges("large.bin", [(0, 1), (5 << 20, 2), (len(whole) - 3, 3), (7, 0)]) == [b"\0", b"\5\5", b"end", b""]
    with pytest.raises(Corrupt, match=r"large\.bin is truncated"):
        store.read_ranges("large.bin", [(0, 1), (len(whole) - 1, 2)])
    with pytest.raises(Corrupt, match=r"large\.bin is truncated"):
        store.read_ranges("large.bin", [(len(whole) + 10, 2)])


def test_many_files_are_listed_and_deleted(on_seaweedfs: RemoteFolder) -> None:
    """More than one page, and more than one batch."""
    import obstore

    inside = on_seaweedfs.store()
    for number in range(1010):
        obstore.put(inside, f"a/{number:04d}", b"1", use_multipart=False)
    store = store_at(on_seaweedfs)
    names = [entry.name for entry in store.list("a/")]
    assert sorted(names) == [f"a/{number:04d}" for number in range(1010)]
    store.delete([*names, "absent"])
    assert list(store.list("")) == []


def test_batches_are_no_larger_than_a_store_takes(on_azurite: RemoteFolder) -> None:
    store = store_at(on_azurite)
    store.write("a/1", b"1")
    store.delete([f"a/{number}" for number in range(260)])
    assert list(store.list("")) == []


def test_a_store_is_the_same_after_pickling(on_moto: RemoteFolder, tmp_path: Path) -> None:
    for cache_dir in (False, tmp_path / "cache"):
        store = store_at(on_moto, cache_dir)
        name = f"{uuid.uuid4().hex}.bin"
        store.write(name, b"bytes")
        again: Store = pickle.loads(pickle.dumps(store))
        assert (again.url, again.read(name), bytes(again.map(name, 5))) == (store.url, b"bytes", b"bytes")


@pytest.mark.parametrize("cache_dir", [True, False])
def test_nothing_shows_a_secret(on_moto: RemoteFolder, cache_dir: bool) -> None:
    place = Place(on_moto.url, storage_options={**on_moto.options, "secret_access_key": "hush"}, cache_dir=cache_dir)
    for shown in (place, open_store(place), parse_location(place.url, place.storage_options)):
        assert "hush" not in f"{shown!r} {shown}"


# --- what a URL says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("S3://bucket/a/b/", "bucket", "a/b"),
        ("s3a://bucket//a///b", "bucket", "a/b"),
        ("gs://my.bucket/a#b?c", "my.bucket", "a#b?c"),
        ("az://box/a", "box", "a"),
        ("azure://box/a%20b", "box", "a%20b"),
        ("abfs://box@account.dfs.core.windows.net/a", "box", "a"),
        ("https://host:8000/a%20b", "https://host:8000", "a b"),
    ],
)
def test_urls(url: str, bucket: str, prefix: str) -> None:
    location = parse_location(url)
    assert (location.bucket, location.prefix) == (bucket, prefix)
    assert location.key("index.json") == (f"{prefix}/index.json" if prefix else "index.json")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/a", "ftp:// is not supported"),
        ("s3:///a", "names no bucket"),
        ("s3://bucket/a/../b", "no folders named"),
        ("https://host/a?sig=1", "%3F"),
        ("https://host/a?b", "%3F"),
        ("az://box/a?sv=1&sig=1", "sas_token"),
        ("r2://bucket/a", "account_id"),
    ],
)
def test_urls_that_are_not_understood(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(ValueError, match=said) as info:
        open_store(url)
    assert url.partition("?")[0] in str(info.value)
    assert "sig=" not in str(info.value)


def test_places_differ_by_endpoint_and_account() -> None:
    account = '{"gcs_base_url": "http://a"}'
    places = [
        parse_location("s3://b/d"),
        parse_location("s3://b/d", {"endpoint_url": "http://a"}),
        parse_location("s3://b/d", {"endpoint": "http://b"}),
        parse_location("az://b/d", {"account_name": "one"}),
        parse_location("az://b/d", {"account_name": "two"}),
        parse_location("gs://b/d"),
        parse_location("gs://b/d", {"endpoint_url": "http://a"}),
    ]
    assert len({location.place for location in places}) == len(places)
    assert parse_location("gs://b/d", {"service_account_key": account}).place == places[-1].place
    assert parse_location("r2://b/d", {"account_id": "me"}).endpoint == "https://me.r2.cloudflarestorage.com"


def test_the_names_of_boto3_are_understood() -> None:
    ours = {"endpoint": "http://a", "access_key_id": "k", "secret_access_key": "s", "session_token": "t", "region": "eu-west-1"}
    theirs = {
        "endpoint_url": "http://a",
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": "t",
        "region_name": "eu-west-1",
    }
    assert parse_location("s3://b/d", theirs) == parse_location("s3://b/d", ours)
    assert parse_location("s3://b/d", {"endpoint_url": "http://a"}, {"region_name": "eu-west-1"}).config["region"] == "eu-west-1"


@pytest.mark.parametrize(
    ("url", "variable", "one", "two"),
    [
        ("s3://b/d", "AWS_ENDPOINT_URL_S3", "http://a", "http://b"),
        ("s3://b/d", "AWS_ENDPOINT_URL", "http://a", "http://b"),
        ("s3://b/d", "AWS_ENDPOINT", "http://a", "http://b"),
        ("gs://b/d", "GOOGLE_BASE_URL", "http://a", "http://b"),
        ("az://b/d", "AZURE_STORAGE_ENDPOINT", "http://a", "http://b"),
        ("az://b/d", "AZURE_STORAGE_ACCOUNT_NAME", "one", "two"),
    ],
)
def test_the_environment_is_asked_once(url: str, variable: str, one: str, two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, one)
    first = parse_location(url)
    monkeypatch.setenv(variable, two)
    second = parse_location(url)
    assert (first.endpoint, second.endpoint) == (one, two)
    assert first.bucket_identity != second.bucket_identity
    assert first.place != second.place
    monkeypatch.delenv(variable)
    again = pickle.loads(pickle.dumps(first))
    assert again.endpoint == one, "in another process, too"


def test_another_profile_is_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = [None, "one", "two"]
    found = set()
    for profile in profiles:
        if profile is not None:
            monkeypatch.setenv("AWS_PROFILE", profile)
        else:
            monkeypatch.delenv("AWS_PROFILE", raising=False)
        found.add(parse_location("s3://b/d").bucket_identity)
    assert len(found) == len(profiles)


class Provider:
    """Shows no secrets, and so looks like every other one."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return "Provider()"

    def __call__(self) -> dict[str, Any]:
        return {"access_key_id": "me", "secret_access_key": self.secret, "token": None, "expires_at": None}


def test_each_credential_provider_has_its_client() -> None:
    old, new = Provider("old"), Provider("new")
    places = [parse_location("s3://b/d", {"endpoint": "http://a", "credential_provider": provider}) for provider in (old, new, old)]
    clients = [open_bucket(place) for place in places]
    assert clients[0] is clients[2]
    assert clients[0] is not clients[1]
    again = pickle.loads(pickle.dumps(places[0]))
    assert again.bucket_identity != places[0].bucket_identity, "it has a provider of its own"


def test_a_password_in_a_url_is_used_and_not_shown() -> None:
    asked: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with serving(Handler) as host:
        store = open_store(Place(f"http://bob:se%40cret@{host}/plays", cache_dir=False))
        assert store.url == f"http://{host}/plays"
        with pytest.raises(NotFound) as info:
            store.read("a.bin")
    assert asked == ["Basic " + base64.b64encode(b"bob:se@cret").decode()]
    assert "cret" not in f"{info.value} {store!r} {Place(f'https://bob:se%40cret@{host}/plays')!r}"


def test_what_lies_inside() -> None:
    assert is_inside("s3://b/d/x", "s3://b/d")
    assert not is_inside("s3://b/d-2", "s3://b/d")
    assert not is_inside("/tmp/d", "s3://b/d")
