"""A store that has too many requests: fewer are sent at once until it has time again, and nothing is lost."""

from __future__ import annotations

import http.server
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import liveset
from liveset.errors import NotFound, StorageError
from liveset.storage import requests as sending
from liveset.storage.location import parse_location
from liveset.storage.requests import DirectRequests
from liveset.storage.throttle import Throttle, add_told, throttle_of, throttled_requests
from tests.support.remote import place_at
from tests.support.services import RemoteFolder, free_ports
from tests.support.stub_server import StubServer

MANY = 8


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


class Gate:
    """What a server does with each request: it waits until as many are there as are wanted, and answers all with one status."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.flying = self.most = self.came = 0
        self.wanted, self.status = 1, 200

    def set(self, wanted: int, status: int) -> None:
        with self.changed:
            self.wanted, self.status, self.most, self.came = wanted, status, 0, 0

    def passes(self) -> int:
        with self.changed:
            self.flying += 1
            self.came += 1
            self.most = max(self.most, self.flying)
            self.changed.notify_all()
            status = self.status
            if not self.changed.wait_for(lambda: self.came >= self.wanted, 20):
                status = 500
            if self.came >= MANY and self.status == 503:
                self.status = 200  # once around
        return status

    def left(self) -> None:
        with self.changed:
            self.flying -= 1


@pytest.fixture
def gate() -> Iterator[tuple[Gate, str]]:
    gate = Gate()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status = gate.passes()
            gate.left()  # before the client has the answer, and sends another one
            body = self.path.encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', "Last-Modified": "Tue, 01 Dec 2020 00:00:00 GMT"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield gate, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fewer_requests_at_once_until_the_store_has_time(gate: tuple[Gate, str]) -> None:
    server, endpoint = gate
    folder = RemoteFolder("s3", endpoint, "plays")
    location = parse_location(folder.url, folder.options)
    requests, throttle = DirectRequests(location), throttle_of(location.server)

    def ask(count: int) -> None:
        keys = [f"plays/{number}" for number in range(count)]
        with ThreadPoolExecutor(MANY) as pool:
            assert [data.endswith(key.encode()) for data, key in zip(pool.map(requests.get, keys), keys, strict=True)] == [True] * count

    server.set(MANY, 200)
    ask(MANY)
    assert server.most == MANY  # none was held back
    throttle.clock = lambda: 0.0  # only answers raise the limit
    server.set(MANY, 503)
    ask(MANY)
    assert throttle.refused == MANY
    allowed, waiting, all_wait = int(throttle.limit), set[int](), threading.Event()
    assert 1 < allowed < MANY - 1

    def clock() -> float:
        waiting.add(threading.get_ident())  # none is answered, so who asks for the time waits for its turn
        if len(waiting) == MANY - allowed:
            all_wait.set()
        return 0.0

    throttle.clock = clock
    server.set(MANY + 1, 200)  # holds all that come
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, MANY)
        assert all_wait.wait(15)
        with server.changed:
            assert server.changed.wait_for(lambda: server.flying == allowed, 15)
        assert server.came == allowed
        throttle.clock = lambda: 0.0
        with server.changed:
            server.wanted = 1
            server.changed.notify_all()
        asked.result(20)
    assert server.most < MANY
    while throttle.limit < math.inf:  # a few rounds
        ask(MANY)
    server.set(MANY, 200)
    ask(MANY)
    assert server.most == MANY


class Clock:
    """The time of requests, which only their pauses take, each as long as it may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(sending, "random", SimpleNamespace(uniform=max))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_for_its_turn_is_none_for_the_store_and_ends(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long what is ahead takes: a large file, say, over a slow line."""
    folder = stub.root / "plays"
    stub.put("plays/x", b"data")
    location = parse_location(folder.url, {**folder.options, "retry_timeout": 5})
    requests, throttle, time = DirectRequests(location), throttle_of(location.server), Clock(monkeypatch)
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        time.now += 1000
        return looks / 10

    throttle.clock, throttle.limit, throttle._most = clock, 1.0, 9
    stub.act("500-before", method="GET")
    with throttle.flight():
        assert requests.get("plays/x") == b"data"
    assert looks >= 3
    assert not stub.acts_left


def test_a_wrong_address_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that several requests are sent to, one after the other."""
    (port,) = free_ports(1)
    folder, time = RemoteFolder("s3", f"http://127.0.0.1:{port}", "plays"), Clock(monkeypatch)
    location = parse_location(folder.url, folder.options)
    requests = DirectRequests(location)
    for _ in range(2):
        with pytest.raises(StorageError, match="does not answer"):
            requests.get("plays/x")
        assert time.now == sending.FIRST_ANSWER
    for total in (1, 2):  # of a store that was there, all requests wait
        with pytest.raises(StorageError, match="does not answer"):
            DirectRequests(location, answered=True).get("plays/x")
        assert time.now == pytest.approx(sending.FIRST_ANSWER + total * location.retry_timeout)


def test_a_store_that_has_said_that_something_is_missing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    with StubServer() as stub:
        folder = stub.root / "plays"
        location = parse_location(folder.url, {**folder.options, "retry_timeout": 20})
        requests = DirectRequests(location)
        with pytest.raises(NotFound):
            requests.get("plays/x")
    with pytest.raises(StorageError, match="does not answer"):
        requests.get("plays/x")
    assert time.now == 20


def test_what_several_helpers_were_told_adds_up() -> None:
    before = throttled_requests()
    first, second = object(), object()
    for helper, refused in ((first, 2), (first, 5), (second, 1), (first, 5), (second, 3)):
        add_told(helper, refused)
    assert throttled_requests() - before == 8


def test_the_limit_falls_once_for_all_that_were_in_flight_and_comes_back() -> None:
    throttle = Throttle()

    def fly(count: int, busy: bool) -> None:
        flights = [throttle.flight() for _ in range(count)]
        opened = [flight.__enter__() for flight in flights]
        for flight, said in zip(flights, opened, strict=True):
            said.busy = busy
            flight.__exit__(*((KeyError, KeyError(), None) if busy else (None, None, None)))

    fly(16, True)
    assert throttle.limit == 8
    fly(8, True)
    fly(4, True)
    fly(2, True)
    assert throttle.limit == 1
    fly(1, True)
    assert throttle.limit == 1
    for _ in range(200):
        if throttle.limit == math.inf:
            break
        fly(int(throttle.limit), False)
    assert throttle.limit == math.inf
    assert throttle.refused == 31
    assert throttle.flying == 0


def test_who_waits_goes_on_when_another_one_is_back() -> None:
    throttle = Throttle(lambda: 0.0)
    throttle.limit, throttle._most = 1.0, 2
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with throttle.flight():
            inside.set()
            assert leave.wait(20)

    def follow() -> int:
        with throttle.flight():
            return throttle.flying

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hold)
        assert inside.wait(20)
        second = pool.submit(follow)
        assert throttle.flying == 1
        leave.set()
        assert second.result(20) == 1
        first.result(20)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("status", "workers"), [(429, 0), (503, 0), (503, 2)])
def test_a_loader_reads_everything_and_counts(stub: StubServer, status: int, workers: int) -> None:
    """Also what the helper of a forked worker was told."""
    place = place_at(stub.root / "plays")
    liveset.optimize(make, range(40), place, chunk_size=4, num_workers=1, verbose=False)
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(place), batch_size=4, num_workers=workers)
    assert loader.stats().throttled == 0
    stub.act(f"{status}-before", method="GET", match="chunk-", times=5)
    assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(40))
    assert loader.stats().throttled == 5
    assert list(loader)
    assert loader.stats().throttled == 0


def make(number: int) -> dict[str, Any]:
    return {"x": number}
