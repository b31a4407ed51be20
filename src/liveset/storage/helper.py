"""Requests of a forked process, sent by a helper process that was started anew.

Each thread that waits has a pair of sockets to the helper: a pickled call goes there, the pieces of a file and the outcome come back. The
helper ends when the process that started it ends, however that happens; a helper that ends is started again once, and then it is an error.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle

from liveset.errors import StorageError
from liveset.storage.location import Location
from liveset.storage.requests import DirectRequests, Facts
from liveset.storage.store import Buffer, Sink
from liveset.storage.throttle import add_told, throttled_requests

__all__ = ["HelperRequests"]

_FRAME = struct.Struct("<qq")  # offset in the file that is downloaded, and size
_OUTCOME = -1  # instead of an offset: the last frame of an answer
_TRIES = 3
_helper: _Helper | None = None
_idle: list[_Connection] = []
_kept: list[_Helper] = []
_lock = threading.Lock()


class HelperRequests:
    """The requests of a place, sent by a helper process."""

    def __init__(self, location: Location) -> None:
        self._location = location
        # At the other end these bytes tell places apart: an object that gives credentials has no other name there.
        self._pickled = cloudpickle.dumps(location)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._ask("get", key, start, length)  # type: ignore[no-any-return]

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        return self._ask("get_tagged", key)  # type: ignore[no-any-return]

    def get_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        return self._ask("get_changed", key, tag)  # type: ignore[no-any-return]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        return self._ask("get_ranges", key, list(ranges))  # type: ignore[no-any-return]

    def has_ranges(self, key: str) -> bool:
        return self._ask("has_ranges", key)  # type: ignore[no-any-return]

    def download(self, key: str, sink: Sink, size: int = 0) -> None:
        self._ask("download", key, size, sink=sink)

    def put(self, key: str, data: Sequence[Buffer], condition: str | None = None) -> str | None:
        return self._ask("put", key, [bytes(buffer) for buffer in data], condition)  # type: ignore[no-any-return]

    def list(self, folder: str) -> Iterator[Facts]:
        return iter(self._ask("list", folder))

    def facts(self, key: str) -> Facts:
        return self._ask("facts", key)  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", list(keys))

    def copy(self, source: str, key: str) -> None:
        self._ask("copy", source, key)

    def _ask(self, method: str, *arguments: Any, sink: Sink | None = None) -> Any:
        for left in reversed(range(_TRIES)):
            try:
                connection = _take()
            except OSError as error:
                reason = f"the process that sends the requests cannot be started or reached ({error.strerror or error})"
                failure = StorageError(f"cannot reach {self._location.url}: {reason}.")
                failure.errno = error.errno
                raise failure from error
            try:
                done, outcome = connection.call((self._pickled, method, arguments), sink)
            except (OSError, EOFError) as error:
                connection.close()
                _forget_idle()
                # A conditional put may have been sent: only its caller can find out.
                if not left or (method == "put" and arguments[2] is not None):
                    raise StorageError(f"cannot reach {self._location.url}: the process that sends the requests has ended.") from error
                continue
            except BaseException:
                connection.close()  # an answer may still come, and would be taken for that of the next call
                raise
            _give(connection)
            if not done:
                raise outcome
            return outcome
        raise AssertionError("unreachable")


class _Connection:
    """One conversation with the helper: a call at a time."""

    def __init__(self, helper: _Helper) -> None:
        self._helper, self._socket = helper, helper.connection()

    def call(self, request: Any, sink: Sink | None) -> tuple[bool, Any]:
        _send(self._socket, cloudpickle.dumps(request))
        while (offset := (found := _receive(self._socket))[0]) != _OUTCOME:
            assert sink is not None
            sink.write(found[1], offset)
        done, outcome, refused = pickle.loads(found[1])  # noqa: S301 - from our own process
        add_told(self._helper, refused)
        return done, outcome

    def close(self) -> None:
        self._socket.close()


class _Helper:
    """The process that sends the requests of this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: what lies in the current folder must not stand in for the modules of Python.
                [sys.executable, "-P", "-c", _START, json.dumps(_path()), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for the one that asks
            )

    def connection(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        self._control.close()
        self._process.poll()

    def let_go(self) -> None:
        self._control.close()


_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from liveset.storage.helper import serve; serve(int(sys.argv[2]))"
_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _path() -> list[str]:
    """Where this process finds modules, among them those of objects that give credentials; folders that move with the current one last."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    source = [] if _SOURCE in path else [_SOURCE]
    return source + sorted(path, key=lambda folder: not os.path.isabs(folder))


def _take() -> _Connection:
    global _helper
    with _lock:
        if _idle:
            return _idle.pop()
        if _helper is None:
            _helper = _Helper()
        try:
            return _Connection(_helper)
        except OSError:
            _helper.close()
            _helper = _Helper()
            return _Connection(_helper)


def _forget_idle() -> None:
    """Drops the connections to a helper that has ended; those in use find out themselves."""
    with _lock:
        for connection in _idle:
            connection.close()
        _idle.clear()


def _after_fork() -> None:
    global _helper, _lock
    _lock = threading.Lock()
    if _helper is not None:  # it is the parent's, and is to end with the parent
        _helper.let_go()
        _kept.append(_helper)
        _helper = None
    for connection in _idle:
        connection.close()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)


def _give(connection: _Connection) -> None:
    with _lock:
        _idle.append(connection)


def _send(channel: socket.socket, data: Buffer, offset: int = _OUTCOME) -> None:
    view = memoryview(data).cast("B")
    channel.sendall(_FRAME.pack(offset, len(view)))
    channel.sendall(view)


def _receive(channel: socket.socket) -> tuple[int, bytearray]:
    offset, size = _FRAME.unpack(_exactly(channel, _FRAME.size))
    return offset, _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        taken = channel.recv_into(view[at:])
        if not taken:
            raise EOFError
        at += taken
    return data


# The other side


def serve(control: int) -> None:
    """Answers calls until the process that started this one has ended."""
    with socket.socket(fileno=control) as channel:
        while True:
            mark, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not mark:
                os._exit(0)  # requests that are under way are for nobody
            threading.Thread(target=_answer, args=(socket.socket(fileno=fds[0]),), daemon=True).start()


@functools.cache
def _client(location: bytes) -> DirectRequests:
    # The process that forked has sent requests itself, so the address is right.
    return DirectRequests(pickle.loads(location), answered=True)  # noqa: S301 - from our own process


class _Wire:
    """A sink at the other end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def write(self, data: Buffer, offset: int) -> None:
        _send(self._channel, data, offset)


def _answer(channel: socket.socket) -> None:
    with channel, suppress(OSError, EOFError):
        while True:
            _, request = _receive(channel)
            try:
                done, found = True, _perform(pickle.loads(request), channel)  # noqa: S301 - from our own process
            except Exception as error:
                done, found = False, error
            _send(channel, pickle.dumps((done, found, throttled_requests())))


def _perform(request: Any, channel: socket.socket) -> Any:
    location, method, arguments = request
    client = _client(location)
    if method == "download":
        key, size = arguments
        return client.download(key, _Wire(channel), size)
    found = getattr(client, method)(*arguments)
    return list(found) if method == "list" else found
