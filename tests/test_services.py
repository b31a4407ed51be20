"""The servers of the other tests do what those tests rely on."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import services
from tests.support.services import RemoteFolder, Server, Service, Unavailable, WebServer
from tests.support.stores import Behind
from tests.support.stub_server import StubServer

obstore = pytest.importorskip("obstore")
errors = pytest.importorskip("obstore.exceptions")

NAMES = ["plain", "with space", "plus+", "percent%20", "question?", "hash#", "quote'", "braces{}", "ümlaut/漢"]


def put(folder: RemoteFolder, name: str, data: bytes, mode: Any = "overwrite", **client: Any) -> Any:
    return obstore.put(folder.store(**client), name, data, mode=mode, use_multipart=False)


def get(folder: RemoteFolder, name: str) -> bytes:
    return bytes(obstore.get(folder.store(), name).bytes())


def known(result: Any) -> dict[str, str]:
    return {key: result[key] for key in ("e_tag", "version") if result[key] is not None}


def outcome(act: Callable[[], object]) -> str | None:
    """Name of the error that it raises."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return None


# Real servers


def test_stores_that_obey_conditions(remote_folder: RemoteFolder) -> None:
    first = put(remote_folder, "head", b"one", "create")
    with pytest.raises(errors.AlreadyExistsError):
        put(remote_folder, "head", b"other", "create")
    put(remote_folder, "head", b"two", known(first))
    with pytest.raises(errors.PreconditionError):
        put(remote_folder, "head", b"other", known(first))
    with pytest.raises(errors.PreconditionError):
        put(remote_folder, "missing", b"other", known(first))
    assert get(remote_folder, "head") == b"two"


def test_names_ranges_listings_and_big_objects(remote_folder: RemoteFolder) -> None:
    store = remote_folder.store()
    for name in NAMES:
        obstore.put(store, name, name.encode())
    assert sorted(entry["path"] for page in obstore.list(store) for entry in page) == sorted(NAMES)
    assert [get(remote_folder, name).decode() for name in NAMES] == NAMES
    assert bytes(obstore.get_range(store, "plain", start=1, length=3)) == b"lai"
    big = os.urandom(6 << 20)
    obstore.put(store, "big", big, use_multipart=True, chunk_size=5 << 20)
    assert get(remote_folder, "big") == big
    obstore.delete(store, NAMES)
    assert [entry["path"] for page in obstore.list(store) for entry in page] == ["big"]


def test_folders_are_fresh(moto: Service) -> None:
    one, other = moto.fresh(), moto.fresh()
    put(one, "name", b"")
    assert not obstore.list(other.store()).collect()
    assert obstore.list(one.store()).collect()


def test_stores_that_ignore_conditions(careless_folder: RemoteFolder, request: pytest.FixtureRequest) -> None:
    put(careless_folder, "head", b"one", "create")
    put(careless_folder, "head", b"two", {"e_tag": '"bogus"'})
    assert get(careless_folder, "head") == b"two"
    if "localbucket" in request.node.name:
        with pytest.raises(errors.AlreadyExistsError):
            put(careless_folder, "head", b"three", "create")
    else:
        put(careless_folder, "head", b"three", "create")
        assert get(careless_folder, "head") == b"three"


def test_signatures_are_checked(on_seaweedfs: RemoteFolder) -> None:
    from obstore.store import from_url

    stranger = from_url(on_seaweedfs.url, **on_seaweedfs.options | {"secret_access_key": "wrong"})
    with pytest.raises(errors.PermissionDeniedError):
        obstore.put(stranger, "name", b"")


@pytest.mark.slow
@pytest.mark.servers
def test_seaweedfs_comes_back_with_its_data(tmp_path: Path) -> None:
    try:
        first = services.start_seaweedfs(tmp_path)
    except Unavailable as error:
        pytest.skip(str(error))
    folder = first.fresh()
    put(folder, "name", b"data")
    first.stop()
    port = int(folder.endpoint.rsplit(":", 1)[1])
    second = services.start_seaweedfs(tmp_path, port=port)
    try:
        assert get(folder, "name") == b"data"
    finally:
        second.stop()


# Processes


def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"  # at its end once no process has it open
    os.mkfifo(fifo)
    code = (
        "import sys; from pathlib import Path; from tests.support.services import Server\n"
        "server = Server(['sh', '-c', 'exec >$0; echo up; sleep 600; true', sys.argv[1]], Path(sys.argv[2]))\n"
        "sys.stdin.read()"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, fifo, tmp_path / "log"], cwd=services.HERE.parent.parent, stdin=subprocess.PIPE)
    with starter, fifo.open() as held:
        assert held.readline() == "up\n"
        starter.kill()
        assert held.read() == ""


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", "raise SystemExit('the disk is purple')"], tmp_path / "log")

    def never() -> None:
        raise OSError("not yet")

    with pytest.raises(services.ServerEnded, match=r"(?s)the disk is purple.*ended with 1"):
        server.wait(never)
    server.stop()


def test_a_port_that_was_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = services.free_ports
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        answers = [[other.getsockname()[1]], free_ports(1)]
        monkeypatch.setattr(services, "free_ports", lambda count: answers.pop(0))
        server, ports = services._run(
            1,
            lambda ports: Server([sys.executable, "-m", "http.server", "-b", "127.0.0.1", str(ports[0])], tmp_path / "log"),
            lambda ports: services.ask(f"http://127.0.0.1:{ports[0]}/"),
        )
        server.stop()
        assert not answers
        assert ports != [other.getsockname()[1]]


def test_a_missing_program_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="no-such-store is not installed: run `make env-servers`"):
        services.find_tool("no-such-store")


def test_a_store_that_cannot_be_had_is_named_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support import services\npytest_plugins = ['tests.support.stores']\nservices.NODE = services.NODE.parent / 'nowhere'\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(azurite):\n    pass\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=services.HERE.parent.parent,
    )
    assert run.returncode == 0, run.stdout
    assert "object stores not tested: Azurite (nowhere/bin/node is missing: run `make env-servers`)" in run.stdout
    assert "1 skipped" in run.stdout


# The proxy


@pytest.mark.parametrize(
    ("fault", "requests", "error", "stored"),
    [
        ("p503", 2, None, True),
        ("p_reset", 1, "GenericError", False),
        ("p_swallow", 1, "GenericError", True),
        ("p_late503", 2, "AlreadyExistsError", True),
        ("p_eof", 2, "AlreadyExistsError", True),
    ],
)
def test_the_proxy_loses_requests_and_answers(
    on_moto: RemoteFolder, behind_proxy: Behind, fault: str, requests: int, error: str | None, stored: bool
) -> None:
    folder, proxy = behind_proxy(on_moto)
    proxy.set(**{fault: 1, "match": "^PUT", "max_faults": 1})
    assert outcome(lambda: put(folder, "name", b"data", "create")) == error
    stats = proxy.stats()
    assert stats["methods"] == {"PUT": requests}
    assert stats["faults"] == {fault: 1}
    assert [entry["path"] for entry in obstore.list(on_moto.store()).collect()] == (["name"] if stored else [])


def test_the_proxy_cuts_stalls_delays_and_counts(on_moto: RemoteFolder, behind_proxy: Behind) -> None:
    data = os.urandom(1 << 20)
    put(on_moto, "name", data)
    folder, proxy = behind_proxy(on_moto)
    assert get(folder, "name") == data
    assert proxy.stats()["bytes_down"] > len(data)
    proxy.set(p_cut=1, cut_after=100_000, max_faults=1)
    assert get(folder, "name") == data
    assert proxy.stats()["requests"] == 3
    assert "bytes=" in proxy.stats()["log"][2]
    proxy.reset()
    proxy.set(p_stall=1, stall_s=600, max_faults=1)
    assert bytes(obstore.get(folder.store(timeout="300ms"), "name").bytes()) == data
    assert proxy.stats()["requests"] == 2
    proxy.reset()
    proxy.set(delay_ms=300, rate=4 << 20)
    store = folder.store(retry_config={"max_retries": 0}, timeout="200ms")
    with pytest.raises(errors.GenericError):
        obstore.get(store, "name")
    with pytest.raises(urllib.error.HTTPError) as refused:
        proxy.set(p_purple=1)
    refused.value.close()


def test_the_proxy_in_front_of_all_stores(remote_folder: RemoteFolder, behind_proxy: Behind) -> None:
    folder, proxy = behind_proxy(remote_folder)
    put(folder, "name", b"data", "create")
    assert get(remote_folder, "name") == b"data"
    assert proxy.stats()["methods"] == {"PUT": 1}


# The stub


@pytest.fixture(params=["s3", "gs"])
def any_stub(request: pytest.FixtureRequest, stub: StubServer, gcs_stub: StubServer) -> StubServer:
    return stub if request.param == "s3" else gcs_stub


def test_the_stub_is_a_store(any_stub: StubServer) -> None:
    folder = any_stub.root / "a folder"
    test_stores_that_obey_conditions(folder)
    store = folder.store()
    for name in NAMES:
        obstore.put(store, name, name.encode(), use_multipart=False)
    assert sorted(entry["path"] for entry in obstore.list(store).collect()) == sorted(["head", *NAMES])
    assert obstore.list_with_delimiter(store)["common_prefixes"] == ["ümlaut"]
    assert [get(folder, name).decode() for name in NAMES] == NAMES
    assert bytes(obstore.get_range(store, "plain", start=1, length=3)) == b"lai"
    assert obstore.head(store, "plain")["size"] == 5
    for name in NAMES:
        obstore.delete(store, name)
    assert [entry["path"] for entry in obstore.list(store).collect()] == ["head"]
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "plain")


def test_the_stub_takes_big_objects(any_stub: StubServer) -> None:
    big = os.urandom(12 << 20)
    any_stub.act("cut-after", match="big")
    obstore.put(any_stub.root.store(), "big", big, use_multipart=True, chunk_size=5 << 20)
    assert any_stub.objects["big"].data == big
    assert any_stub.count("PUT") == 4
    assert not any_stub.uploads
    with pytest.raises(errors.AlreadyExistsError):
        obstore.put(any_stub.root.store(), "big", big, use_multipart=True, chunk_size=5 << 20, mode="create")


def test_the_stub_deletes_many_at_once(any_stub: StubServer) -> None:
    for name in NAMES:
        put(any_stub.root, name, b"")
    obstore.delete(any_stub.root.store(), NAMES)
    assert not any_stub.objects


@pytest.mark.parametrize(
    ("act", "mode", "requests", "error", "stored"),
    [
        ("503-before", "create", 2, None, True),
        ("503-before", "update", 2, None, True),
        ("500-after", "create", 2, "AlreadyExistsError", True),
        ("500-after", "update", 2, "PreconditionError", True),
        ("cut-after", "create", 2, "AlreadyExistsError", True),
        ("cut-after", "update", 2, "PreconditionError", True),
        ("cut-before", "update", 2, None, True),
        ("409-before", "create", 1, "AlreadyExistsError", False),
        ("stall-before", "update", 1, "GenericError", False),
        ("stall-after", "update", 1, "GenericError", True),
        ("500-after", "overwrite", 2, None, True),
    ],
)
def test_the_stub_loses_requests_and_answers(
    any_stub: StubServer, act: str, mode: str, requests: int, error: str | None, stored: bool
) -> None:
    folder = any_stub.root
    condition: Any = mode
    if mode == "update":
        condition = known(put(folder, "name", b"old"))
        any_stub.forget()
    any_stub.act(act, match="name")
    assert outcome(lambda: put(folder, "name", b"data", condition, timeout="300ms" if "stall" in act else "30s")) == error
    assert any_stub.count("PUT", "name") == requests
    assert any_stub.bytes_received == 4 * requests
    assert any_stub.acts_left == 0
    found = any_stub.objects.get("name")
    assert (found is not None and found.data == b"data") == stored


def test_the_stub_ignores_conditions(any_stub: StubServer) -> None:
    any_stub.ignore_conditions = True
    first = put(any_stub.root, "name", b"one", "create")
    put(any_stub.root, "name", b"two", "create")
    put(any_stub.root, "name", b"three", known(first))
    assert get(any_stub.root, "name") == b"three"


def test_the_stub_sends_bodies_short_or_cuts_them(any_stub: StubServer) -> None:
    put(any_stub.root, "name", b"0123456789")
    any_stub.forget()
    any_stub.act("short-body", method="GET")
    assert get(any_stub.root, "name") == b"01234"
    assert (any_stub.count("GET"), any_stub.bytes_sent) == (1, 5)
    any_stub.act("cut-body", method="GET")
    assert get(any_stub.root, "name") == b"0123456789"
    assert any_stub.requests[-1].range == "bytes=5-9"
    assert (any_stub.count("GET"), any_stub.bytes_sent) == (3, 15)


def test_the_stub_acts_on_what_it_is_told(stub: StubServer) -> None:
    stub.act("404-before", method="GET", match="^b$", times=2)
    for name in ("a", "b"):
        put(stub.root, name, name.encode())
    assert get(stub.root, "a") == b"a"
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            get(stub.root, "b")
    assert get(stub.root, "b") == b"b"
    with pytest.raises(ValueError, match="no act 'explode'"):
        stub.act("explode")


# The web server


@pytest.mark.parametrize("without_nginx", [False, True])
def test_web_server(web: tuple[WebServer, Path], without_nginx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import HTTPStore

    server, docs = web
    own = None
    if without_nginx:
        found = services.find_tool
        monkeypatch.setattr(services, "find_tool", lambda name, *how: found("no-" * (name == "nginx") + name, *how))
        server = own = services.start_web(tmp_path, docs)
        assert server.name == "web_server.py"
    try:
        (docs / "a file").write_bytes(b"0123456789")
        store = HTTPStore.from_url(server.url, client_options={"allow_http": True})
        assert bytes(obstore.get(store, "a file").bytes()) == b"0123456789"
        assert bytes(obstore.get(store, "slow/a file").bytes()) == b"0123456789"
        assert bytes(obstore.get_range(store, "a file", start=2, length=3)) == b"234"
        assert obstore.head(store, "a file")["e_tag"]
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "missing")
        assert bytes(obstore.get(store, "norange/a file").bytes()) == b"0123456789"
        with pytest.raises(errors.NotSupportedError):
            obstore.get_range(store, "norange/a file", start=2, length=3)
        with urllib.request.urlopen(f"{server.tls_url}/a%20file", context=ssl.create_default_context(cafile=server.ca)) as answer:
            assert answer.read() == b"0123456789"
        secure = HTTPStore.from_url(server.tls_url, client_options={"root_certificate": server.ca.read_bytes()})
        assert bytes(obstore.get(secure, "a file").bytes()) == b"0123456789"
    finally:
        if own is not None:
            own.stop()
