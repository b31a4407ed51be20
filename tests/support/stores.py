"""Fixtures with real object stores: the servers start when the first test asks for one, and each test gets a folder of its own.

A test that asks for one of them is marked ``servers``. Where a server cannot be had its tests are skipped, and the end of the run says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import services
from tests.support.services import Proxy, RemoteFolder, Service, Unavailable, WebServer
from tests.support.stub_server import StubServer

Behind = Callable[[RemoteFolder], tuple[RemoteFolder, Proxy]]

_UNTESTED = pytest.StashKey[dict[str, str]]()


def _start(
    name: str, start: Callable[[Path], Service], request: pytest.FixtureRequest, folders: pytest.TempPathFactory
) -> Iterator[Service]:
    try:
        if find_spec("obstore") is None:
            raise Unavailable("obstore is not installed: pip install 'liveset[remote]'")
        service = start(folders.mktemp(name))
    except Unavailable as error:
        request.config.stash.setdefault(_UNTESTED, {})[name] = str(error)
        pytest.skip(f"object store not tested: {name} ({error})")
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="session")
def seaweedfs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3, as good as a real one: for commits, races and crashes."""
    yield from _start("SeaweedFS", services.start_seaweedfs, request, tmp_path_factory)


@pytest.fixture(scope="session")
def moto(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3, quick to start."""
    yield from _start("moto", services.start_moto, request, tmp_path_factory)


@pytest.fixture(scope="session")
def azurite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from _start("Azurite", services.start_azurite, request, tmp_path_factory)


@pytest.fixture(scope="session")
def gcs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from _start("fake-gcs-server", services.start_gcs, request, tmp_path_factory)


@pytest.fixture(scope="session")
def s3rver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3 that ignores all conditions."""
    yield from _start("s3rver", services.start_s3rver, request, tmp_path_factory)


@pytest.fixture(scope="session")
def nanio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3 that ignores all conditions."""
    yield from _start("nanio", services.start_nanio, request, tmp_path_factory)


@pytest.fixture(scope="session")
def localbucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """S3 that ignores ``If-Match``."""
    yield from _start("localbucket", services.start_localbucket, request, tmp_path_factory)


# A fresh folder for each test


@pytest.fixture
def on_seaweedfs(seaweedfs: Service) -> RemoteFolder:
    return seaweedfs.fresh()


@pytest.fixture
def on_moto(moto: Service) -> RemoteFolder:
    return moto.fresh()


@pytest.fixture
def on_azurite(azurite: Service) -> RemoteFolder:
    return azurite.fresh()


@pytest.fixture
def on_gcs(gcs: Service) -> RemoteFolder:
    return gcs.fresh()


@pytest.fixture(params=["seaweedfs", "moto", "azurite", "gcs"])
def remote_folder(request: pytest.FixtureRequest) -> RemoteFolder:
    """On each of the stores that obey conditions."""
    service: Service = request.getfixturevalue(request.param)
    return service.fresh()


@pytest.fixture(params=["s3rver", "nanio", "localbucket"])
def careless_folder(request: pytest.FixtureRequest) -> RemoteFolder:
    """On each of the stores that silently ignore conditions; nothing that relies on one may be written there."""
    service: Service = request.getfixturevalue(request.param)
    return service.fresh()


# Bad networks, and reading over HTTP


@pytest.fixture
def behind_proxy(tmp_path: Path) -> Iterator[Behind]:
    """Puts a proxy in front of a folder: returns the folder as seen through it, and the proxy."""
    with ExitStack() as stack:

        def behind(folder: RemoteFolder) -> tuple[RemoteFolder, Proxy]:
            proxy = services.start_proxy(tmp_path / "proxies", folder.endpoint)
            stack.callback(proxy.stop)
            return folder.at(proxy.endpoint), proxy

        yield behind


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """S3 that does what the test asks for."""
    with StubServer() as server:
        yield server


@pytest.fixture
def gcs_stub() -> Iterator[StubServer]:
    with StubServer("gs") as server:
        yield server


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WebServer, Path]]:
    """A web server, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("web")
    docs = tmp_path_factory.mktemp("docs")
    try:
        server = services.start_web(folder, docs)
    except Unavailable as error:
        pytest.skip(f"no web server ({error})")
    try:
        yield server, docs
    finally:
        server.stop()


# Hooks

_NEED_SERVERS = {"seaweedfs", "moto", "azurite", "gcs", "s3rver", "nanio", "localbucket", "remote_folder", "careless_folder"}


def pytest_configure() -> None:
    # Here everything is on this machine, which a proxy of the network cannot reach
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _NEED_SERVERS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("servers")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    untested = config.stash.get(_UNTESTED, {})
    if untested:
        stores = "; ".join(f"{name} ({reason})" for name, reason in untested.items())
        terminalreporter.write_line(f"object stores not tested: {stores}", red=True, bold=True)
