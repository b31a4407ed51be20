"""What goes wrong on the way to an object store: one clear error each, soon, and no error at all for what passes."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import liveset
from liveset.errors import AccessDenied, DatasetNotFound, NotFound, StorageError
from liveset.storage import Place, Swap, requests, throttle
from tests.support.remote import place_at, store_at
from tests.support.services import BUCKET, RemoteFolder, WebServer, free_ports
from tests.support.stores import Behind
from tests.support.stub_server import StubServer

SOON = 8.0


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test gives counts, not what this machine has."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))


def make(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number}


def write(place: Place, count: int = 6) -> Place:
    liveset.optimize(make, range(count), place, chunk_size=4, key_fn="id", num_workers=1, verbose=False)
    return place


def changed(place: Place, **options: Any) -> Place:
    return Place(place.url, storage_options={**(place.storage_options or {}), **options}, cache_dir=False)


def refused(place: Place, kind: type[Exception], *said: str, acts: str = "rw") -> None:
    """Reading and writing fail alike: soon, naming the place and what to do."""
    tries: list[Callable[[], object]] = []
    if "r" in acts:
        tries.append(lambda: liveset.StreamingDataset(place))
    if "w" in acts:
        tries.append(lambda: write(place))
    for act in tries:
        begun = time.monotonic()
        with pytest.raises(kind) as info:
            act()
        assert time.monotonic() - begun < SOON
        text = str(info.value)
        assert place.url in text
        assert all(part in text for part in said), text
        assert len(text) < 500, text
        assert "\n" not in text


# --- who asks, and for what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["seaweedfs", "moto", "azurite"])  # fake-gcs-server does not tell what is missing
def test_no_bucket(request: pytest.FixtureRequest, store: str) -> None:
    remote_folder: RemoteFolder = request.getfixturevalue(f"on_{store}")
    place = place_at(remote_folder)
    wrong = Place(place.url.replace(f"//{BUCKET}/", "//no-such-bucket/"), storage_options=place.storage_options, cache_dir=False)
    refused(wrong, StorageError, "there is no bucket 'no-such-bucket'", remote_folder.endpoint, "create the bucket")
    with pytest.raises(StorageError, match="^there is no bucket"):  # not that something cannot be read, to those who write
        write(wrong)


def test_no_dataset(remote_folder: RemoteFolder) -> None:
    place = place_at(remote_folder)
    for act in (liveset.StreamingDataset, liveset.dataset_update, liveset.history, liveset.verify, liveset.vacuum):
        with pytest.raises(DatasetNotFound, match=r"index\.json") as info:
            act(place)
        assert place.url in str(info.value)


@pytest.mark.parametrize("options", [{"secret_access_key": "wrong"}, {"access_key_id": "nobody"}, {"skip_signature": True}])
def test_wrong_keys(on_seaweedfs: RemoteFolder, options: dict[str, Any]) -> None:
    refused(changed(place_at(on_seaweedfs), **options), AccessDenied, "the store refuses it", "Check the credentials")


def test_a_wrong_key_of_an_account(on_azurite: RemoteFolder) -> None:
    refused(changed(place_at(on_azurite), account_key="d3Jvbmc="), AccessDenied, "the store refuses it", "Check the credentials")


def test_no_credentials(tmp_path: Path) -> None:
    """Nothing is given, and there is no machine of the cloud to ask."""
    (port,) = free_ports(1)
    refused(
        Place(
            "s3://bucket/plays", storage_options={"metadata_endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1"}, cache_dir=False
        ),
        AccessDenied,
        "no credentials were found",
        "skip_signature",
    )


@contextmanager
def answering(status: int, body: str, **headers: str) -> Iterator[str]:
    """A server that gives the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def error_body(code: str, message: str = "why") -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (400, "ExpiredToken", AccessDenied, "the credentials have expired"),
        (403, "ExpiredTokenException", AccessDenied, "the credentials have expired"),
        (403, "AccessDenied", AccessDenied, "AccessDenied: why"),
        (403, "RequestTimeTooSkewed", AccessDenied, "RequestTimeTooSkewed: why"),
        (401, "Unauthorized", AccessDenied, "Unauthorized: why"),
        (301, "PermanentRedirect", StorageError, "another region"),
        (400, "AuthorizationHeaderMalformed", StorageError, "another region"),
        (400, "InvalidArgument", StorageError, "InvalidArgument: why"),
        (405, "MethodNotAllowed", StorageError, "MethodNotAllowed: why"),
    ],
)
def test_refusals_of_a_store(status: int, code: str, kind: type[Exception], said: str) -> None:
    with answering(status, error_body(code)) as endpoint:
        refused(place_at(RemoteFolder("s3", endpoint, "plays")), kind, said)


def test_a_store_that_does_not_answer() -> None:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    place = place_at(RemoteFolder("s3", endpoint, "plays"), retry_timeout=2)
    refused(place, StorageError, "the store does not answer")


def test_an_outage_at_the_first_request_is_waited_for_and_a_wrong_address_is_not(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes connections is there; what refuses them, or has no name, never was."""
    place = write(place_at(stub.root / "plays"))
    monkeypatch.setattr(requests, "FIRST_ANSWER", 0.0)
    fresh = changed(place, retry_timeout=77)
    stub.act("cut-before", method="GET", times=3)
    assert liveset.StreamingDataset(fresh)[1]["x"] == 1
    assert not stub.acts_left
    (port,) = free_ports(1)
    for endpoint in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid"):
        begun = time.monotonic()
        with pytest.raises(StorageError, match="the store does not answer"):
            liveset.StreamingDataset(place_at(RemoteFolder("s3", endpoint, "plays")))
        assert time.monotonic() - begun < SOON


def test_an_endpoint_without_a_scheme() -> None:
    place = place_at(RemoteFolder("s3", "127.0.0.1:9000", "plays"))
    refused(place, ValueError, "needs http:// or https://", "127.0.0.1:9000")


def test_a_web_page_is_no_store() -> None:
    with (
        answering(200, "<html>welcome</html>", Content_Type="text/html") as endpoint,
        pytest.raises(liveset.FormatError, match=r"index\.json"),
    ):
        liveset.StreamingDataset(place_at(RemoteFolder("s3", endpoint, "plays")))


def test_an_unknown_option() -> None:
    for url in ("s3://bucket/plays", "gs://bucket/plays", "az://bucket/plays"):
        every: list[dict[str, Any]] = [{"enpoint": "http://a"}, {"client_options": {"tiemout": "1s"}}]
        for options in every:
            (name,) = {"enpoint"} & set(options) or {"tiemout"}
            refused(Place(url, storage_options=options, cache_dir=False), ValueError, "not understood", name)
    for options in ({"retry_timeout": "long"}, {"retry_timeout": -1}):
        with pytest.raises(ValueError, match="retry_timeout"):
            liveset.StreamingDataset(Place("s3://bucket/plays", storage_options=options))


def test_a_certificate_of_another_authority(web: tuple[WebServer, Path], tmp_path: Path) -> None:
    server, _ = web
    place = Place(f"{server.tls_url}/plays", cache_dir=False)
    refused(place, StorageError, "is not trusted", '"verify"', acts="r")
    refused(changed(place, verify=str(server.ca)), DatasetNotFound, acts="r")
    with pytest.raises((FileNotFoundError, ValueError), match="absent"):
        liveset.StreamingDataset(changed(place, verify=str(tmp_path / "absent.pem")))


# --- where credentials come from --------------------------------------------------------------------------------------


@pytest.fixture
def without_keys(on_seaweedfs: RemoteFolder) -> Place:
    """A dataset, and how to reach it but for the credentials."""
    place = write(place_at(on_seaweedfs))
    options = {name: value for name, value in on_seaweedfs.options.items() if "access_key" not in name}
    return Place(place.url, storage_options=options, cache_dir=False)


def keys_of(folder: RemoteFolder) -> tuple[str, str]:
    return folder.options["access_key_id"], folder.options["secret_access_key"]


def works(place: Place) -> None:
    assert liveset.StreamingDataset(place)["k3"]["x"] == 3
    with liveset.dataset_update(place) as update:
        update["k1"] = {"id": "k1", "x": -1}
        update.commit()


def test_the_names_of_boto3(on_seaweedfs: RemoteFolder, without_keys: Place) -> None:
    key, secret = keys_of(on_seaweedfs)
    options = {"endpoint_url": on_seaweedfs.endpoint, "aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
    works(Place(without_keys.url, storage_options=options, cache_dir=False))


def test_credentials_of_the_environment(on_seaweedfs: RemoteFolder, without_keys: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key, secret = keys_of(on_seaweedfs)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    works(changed(without_keys, user_agent="environment"))  # options that no other test has, whose client would be taken
    monkeypatch.setenv("AWS_ENDPOINT_URL", on_seaweedfs.endpoint)
    works(Place(without_keys.url, storage_options={"user_agent": "endpoint"}, cache_dir=False))


def test_credentials_that_are_set_after_a_refusal(on_seaweedfs: RemoteFolder, without_keys: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, say: the same place works as soon as they are there."""
    key, secret = keys_of(on_seaweedfs)
    place = changed(without_keys, user_agent="set later")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a slip")
    refused(place, AccessDenied, "the store refuses it")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    works(place)


@pytest.mark.parametrize("how", ["session", "environment", "default"])
def test_credentials_of_a_profile(
    on_seaweedfs: RemoteFolder, without_keys: Place, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    key, secret = keys_of(on_seaweedfs)
    profile = "default" if how == "default" else "team"
    file = tmp_path / "credentials"
    file.write_text(f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    if how == "environment":
        monkeypatch.setenv("AWS_PROFILE", profile)
    session = {"profile_name": profile} if how == "session" else None
    options = {**(without_keys.storage_options or {}), "user_agent": how}
    works(Place(without_keys.url, storage_options=options, session_options=session, cache_dir=False))


def test_a_profile_that_is_not_there(without_keys: Place) -> None:
    pytest.importorskip("boto3")
    place = Place(
        without_keys.url, storage_options=without_keys.storage_options, session_options={"profile_name": "absent"}, cache_dir=False
    )
    refused(place, ValueError, "absent")


def test_credentials_that_expire_are_renewed(on_seaweedfs: RemoteFolder, without_keys: Place) -> None:
    from datetime import UTC, datetime, timedelta

    key, secret = keys_of(on_seaweedfs)
    asked = []

    def give() -> dict[str, Any]:
        asked.append(1)
        return {"access_key_id": key, "secret_access_key": secret, "expires_at": datetime.now(UTC) - timedelta(seconds=1)}

    place = changed(without_keys, credential_provider=give)
    works(place)
    works(place)
    assert len(asked) > 1


def test_public_buckets_need_no_credentials(stub: StubServer) -> None:
    place = write(place_at(stub.root / "plays"))
    for name in ("skip_signature", "anon"):
        works(Place(place.url, storage_options={"endpoint_url": stub.root.endpoint, name: True}, cache_dir=False))


# --- what passes ------------------------------------------------------------------------------------------------------

FAULTS = [
    {"p503": 0.3},
    {"p_reset": 0.15},
    {"p_cut": 0.15, "cut_after": 3000},
    {"p_late503": 0.15},
    {"p_swallow": 0.15},
    {"p_eof": 0.15},
    {"p_stall": 0.05, "stall_s": 2},
]


def big(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number, "data": bytes([number % 256]) * 5_000}


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: next(iter(faults)))
def test_a_bad_network_changes_nothing(on_seaweedfs: RemoteFolder, behind_proxy: Behind, faults: dict[str, Any], tmp_path: Path) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    place = place_at(folder, client_options={"allow_http": True, "timeout": "1s"})
    liveset.optimize(big, range(60), place_at(on_seaweedfs), chunk_size=8, key_fn="id", num_workers=1, verbose=False)
    proxy.set(seed=1, **faults)
    dataset = liveset.StreamingDataset(place)
    assert list(dataset) == [big(number) for number in range(60)]
    assert [dataset[number] for number in (59, 0, 31)] == [big(59), big(0), big(31)]
    assert dataset["k17"] == big(17)
    cached = liveset.StreamingDataset(Place(place.url, storage_options=place.storage_options, cache_dir=tmp_path / "cache"))
    assert list(cached) == [big(number) for number in range(60)]
    for number in range(4):
        with liveset.dataset_update(place) as update:
            update[f"k{number}"] = {**big(number), "x": -1}
            update.commit()
    liveset.optimize(big, range(60, 70), place, mode="append", chunk_size=8, key_fn="id", num_workers=1, verbose=False)
    assert proxy.stats()["faults"]
    proxy.reset()
    after = [sample["x"] for sample in liveset.StreamingDataset(place)]
    assert after == [-1] * 4 + list(range(4, 70))
    assert [version.version for version in liveset.history(place)] == [6, 5, 4, 3, 2, 1]
    assert liveset.verify(place).ok


def test_an_outage_is_waited_for(on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    write(place_at(on_seaweedfs))
    dataset = liveset.StreamingDataset(place_at(folder, retry_timeout=60))
    assert dataset["k1"]["x"] == 1
    proxy.set(p503=1.0)
    threading.Timer(2.5, proxy.reset).start()
    assert [sample["x"] for sample in dataset] == list(range(6))
    assert proxy.stats()["requests"]


def test_a_long_outage_is_an_error_and_the_dataset_stays_usable(on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(on_seaweedfs)
    write(place_at(on_seaweedfs))
    dataset = liveset.StreamingDataset(place_at(folder, retry_timeout=1))
    assert dataset["k1"]["x"] == 1
    proxy.set(p503=1.0)
    begun = time.monotonic()
    with pytest.raises(StorageError, match=rf"{folder.url}/chunk-.*the store does not answer"):
        dataset[5]
    assert time.monotonic() - begun < SOON
    proxy.set(p503=0.0, p_reset=1.0)
    with pytest.raises(StorageError, match=rf"{folder.url}/chunk-.*the store does not answer"):
        list(dataset)
    proxy.reset()
    assert dataset[5]["x"] == 5
    assert [sample["x"] for sample in dataset] == list(range(6))
    proxy.server.stop()
    with pytest.raises(StorageError, match="does not answer"):
        liveset.StreamingDataset(place_at(folder, retry_timeout=1))


def test_a_slow_download_is_not_an_outage(on_seaweedfs: RemoteFolder, behind_proxy: Behind) -> None:
    """Longer than a request may take, and than the time for retries, but it always goes on."""
    folder, proxy = behind_proxy(on_seaweedfs)
    store_at(on_seaweedfs).write("large.bin", [bytes(1 << 20)] * 10)
    slow = store_at(folder, retry_timeout=1, client_options={"allow_http": True, "timeout": "500ms"})
    assert len(slow.read("large.bin", 0, 10)) == 10
    proxy.set(rate=3 << 20)
    got = bytearray(10 << 20)

    class Sink:
        def write(self, data: Any, offset: int) -> None:
            got[offset : offset + len(data)] = data

    begun = time.monotonic()
    slow.download("large.bin", Sink(), len(got))  # type: ignore[attr-defined]
    assert time.monotonic() - begun > 2
    assert bytes(got) == bytes(10 << 20)


def test_a_slow_upload_has_its_time(on_seaweedfs: RemoteFolder, behind_proxy: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the answer to a small request may take."""
    monkeypatch.setattr(requests, "TIMEOUT", 0.7)
    folder, proxy = behind_proxy(on_seaweedfs)
    slow = store_at(folder, retry_timeout=1)
    data = os.urandom(5 << 20)
    proxy.set(rate=3 << 20)
    slow.write("large.bin", data)
    assert slow.swap_head(data, None) is Swap.SWAPPED
    proxy.reset()
    assert slow.read("large.bin") == data


def test_an_interrupt_does_not_wait_for_the_store(stub: StubServer) -> None:
    place = write(place_at(stub.root / "plays"))
    dataset = liveset.StreamingDataset(place)
    stub.act("stall-before", method="GET")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dataset[0]
    assert time.monotonic() - begun < SOON
    timer.join()
    assert dataset[0] == make(0)


def test_an_interrupt_that_does_not_end_a_wait_is_heard_all_the_same(stub: StubServer) -> None:
    """As one that comes just before the wait."""
    dataset = liveset.StreamingDataset(write(place_at(stub.root / "plays")))
    stub.act("stall-before", method="GET")

    def interrupt() -> None:
        stub.wait_for_acts()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dataset[0]
    assert time.monotonic() - begun < SOON
    thread.join()


@pytest.mark.parametrize("act", ["stall-before", "stall-after"])
def test_an_interrupt_does_not_wait_for_a_commit_and_nothing_is_deleted(stub: StubServer, act: str) -> None:
    place = write(place_at(stub.root / "plays"))
    stub.act(act, method="PUT", match=r"plays/index\.json$")
    update = liveset.dataset_update(place)
    update["k1"] = {"id": "k1", "x": -1}

    def interrupt() -> None:
        stub.wait_for_acts()  # until the put has come
        os.kill(os.getpid(), signal.SIGINT)

    before = set(stub.objects)
    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(liveset.CommitInterrupted, match="was_committed") as info:
        update.commit()
    assert time.monotonic() - begun < SOON
    thread.join()
    assert not isinstance(info.value, Exception), "it ends programs"
    assert info.value.version is None
    assert before <= set(stub.objects)
    assert liveset.was_committed(place, info.value.session) is (act == "stall-after")
    update.commit()  # settles it
    assert [entry.version for entry in liveset.history(place)] == [2, 1]
    assert liveset.StreamingDataset(place)["k1"]["x"] == -1
    assert liveset.verify(place).ok


@pytest.mark.parametrize("act", ["stall-before", "stall-after"])
@pytest.mark.parametrize(
    "change",
    [
        lambda place: liveset.optimize(lambda i: {"id": f"new-{i}", "x": i}, [1], place, mode="append", key_fn="id", num_workers=1),
        lambda place: liveset.transform(place, lambda sample: {**sample, "x": -1}, verbose=False),
        lambda place: liveset.transform(place, lambda sample: {**sample, "y": -1}, verbose=False),
        lambda place: liveset.build_keys_index(place, "id", overwrite=True, verbose=False),
        lambda place: liveset.compact(place, small=1),
        lambda place: liveset.purge(place, ["k1"]),
    ],
    ids=["append", "transform", "new schema", "keys", "compact", "purge"],
)
def test_what_may_have_landed_stays_after_an_interrupt(stub: StubServer, change: Callable[[Place], object], act: str) -> None:
    place = write(place_at(stub.root / "plays"))
    with liveset.dataset_update(place) as update:  # a small chunk more, to be compacted
        update.insert("late", {"id": "late", "x": 7})
        update.commit()
    stub.act(act, method="PUT", match=r"plays/index\.json$")
    before = set(stub.objects)

    def interrupt() -> None:
        stub.wait_for_acts()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(liveset.CommitInterrupted) as info:
        change(place)
    thread.join()
    assert [name for name in set(stub.objects) - before if name.endswith((".bin", ".keys"))], "what it wrote is still there"
    assert {name for name in before - set(stub.objects) if "/keys/shard-" not in name} == set(), "keys are withdrawn before"
    assert liveset.was_committed(place, info.value.session) is (act == "stall-after")
    assert liveset.StreamingDataset(place).version == 2 + (act == "stall-after")
    assert liveset.verify(place).ok


def test_what_many_requests_wait_for_is_told_once(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(stub.root / "plays")
    store.write("x", b"data")
    monkeypatch.setattr(requests, "QUIET", 0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    for told in (1, 1, 2):
        if told > 1:
            monkeypatch.setattr(throttle, "_TELL", 0.0)
        stub.act("500-before", method="GET", times=1 if told > 1 else 8)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(store.read, ["x"] * 8)) == [b"data"] * 8
        assert len(caplog.records) == told
    assert "trying again" in caplog.text


def test_a_missing_file_is_not_waited_for(stub: StubServer) -> None:
    place = write(place_at(stub.root / "plays"))
    for name in [name for name in stub.objects if "chunk" in name]:
        del stub.objects[name]
    begun = time.monotonic()
    with pytest.raises(NotFound, match=r"s3://bkt/plays/chunk-"):
        liveset.StreamingDataset(place)[0]
    assert time.monotonic() - begun < SOON


def test_a_cut_chunk_is_corrupt(stub: StubServer) -> None:
    """The ranges that are wanted lie behind its end."""
    place = write(place_at(stub.root / "plays"), 40)
    dataset = liveset.StreamingDataset(place)
    for name, stored in list(stub.objects.items()):
        if "chunk" in name:
            with stub.lock:
                stub.put(name, stored.data[:50])
    for act in (lambda: dataset[0], lambda: dataset[2:39:3], lambda: dataset["k7"], lambda: list(dataset)):
        with pytest.raises(liveset.Corrupt, match=r"s3://bkt/plays/chunk-"):
            act()


def test_account_keys_are_json(gcs_stub: StubServer) -> None:
    place = place_at(gcs_stub.root / "plays")
    refused(changed(place, service_account_key=json.dumps({"private_key": "x"})), ValueError, "not understood")
