"""The requests to an object store, repeated while the store does not answer, with errors that name the object.

Only ``storage.clients`` chooses between these requests and those of a helper process.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from liveset.errors import AccessDenied, MissingDependency, NotFound
from liveset.storage.answers import NO_CREDENTIALS, NoRanges, PastTheEnd, Refused, Silent, explain, first_line
from liveset.storage.location import Location, profile_credentials
from liveset.storage.store import Buffer, Sink
from liveset.storage.throttle import Flight, throttle_of

__all__ = ["CREATE", "DirectRequests", "Facts", "Requests", "runtime_used"]

_log = logging.getLogger("liveset")
T = TypeVar("T")

CREATE = "create"
"""The condition that no object has the key yet."""
PART = 8 << 20
"""Bytes asked for at once of an object that is fetched whole, and put at once of a large one."""
PIECE = 1 << 20
"""Bytes that are written at once of what comes: with fewer, downloads wait for the thread that reads at each of them."""
TIMEOUT = 60.0
"""How long the client waits for the answer to a request, with its body."""
UPLOAD_TIMEOUT = 240.0
"""The same for much that is put, over a line that may be slow; below the time for retries, which a dead connection takes then."""
FIRST_ANSWER = 5.0
"""Seconds until an address is given up that has no server: its name or its port is likely to be wrong."""
LISTEN = 1.0
"""Seconds after which a signal is heard at the latest while the main thread waits for an answer."""
QUIET = 3
"""How often a request is repeated before anybody is told; of all that wait for a store one tells it."""


class Facts(NamedTuple):
    """What a store says about an object."""

    key: str
    size: int
    modified: datetime
    tag: str
    """Names one content of the object, for a conditional put."""


class Requests(Protocol):
    """The requests that a store is made of; keys are whole, ``NotFound`` names them."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of an object from ``start``; fewer where it ends earlier."""

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """An object and its tag, seen at one moment."""

    def get_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        """The same, unless the object still has the given tag: None then. A store that knows no such condition sends it all the same."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Parts of an object (start, length), in parallel; those at its end may be shorter."""

    def has_ranges(self, key: str) -> bool:
        """Whether the server gives parts of an object."""

    def download(self, key: str, sink: Sink, size: int = 0) -> None:
        """Fetches an object whole, piece by piece; ``size`` is what is expected, 0 if nothing is."""

    def put(self, key: str, data: Sequence[Buffer], condition: str | None = None) -> str | None:
        """Writes an object whole and returns its tag; None when the condition (``CREATE`` or a tag) refused it.

        With a condition, an error or None does not tell whether the object was written: the answer may have been lost.
        """

    def list(self, folder: str) -> Iterator[Facts]:
        """All objects below a folder."""

    def facts(self, key: str) -> Facts:
        """What the store says about one object."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; missing ones are fine."""

    def copy(self, source: str, key: str) -> None:
        """Copies an object inside the store."""


_used = False


def runtime_used() -> bool:
    """Tell whether this process, or one that it was forked from, has sent requests itself."""
    return _used


class DirectRequests:
    """Requests that this process sends itself."""

    def __init__(self, location: Location, *, answered: bool = False) -> None:
        self._location = location
        self._answered = answered
        self._alone = math.inf  # since when no request has been answered, of all that were ever sent
        self._throttle = throttle_of(location.server)

    # The requests

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        import obstore

        if length == 0:
            return b""
        if start == 0 and length is None:
            return bytes(self._send(key, "read", lambda store: obstore.get(store, key).bytes()))
        try:
            if length is None:
                return bytes(self._send(key, "read", lambda store: obstore.get(store, key, options={"range": {"offset": start}}).bytes()))
            return bytes(self._send(key, "read", lambda store: obstore.get_range(store, key, start=start, length=length)))
        except PastTheEnd:
            return b""
        except NoRanges:
            return self.get(key)[start:][:length]

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        found = self._get_unless(key, None)
        assert found is not None
        return found

    def get_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        return self._get_unless(key, msgspec.json.decode(tag).get("e_tag"))

    def _get_unless(self, key: str, e_tag: str | None) -> tuple[bytes, str] | None:
        import obstore
        from obstore.exceptions import NotModifiedError

        def send(store: Any) -> tuple[bytes, str] | None:
            try:
                answer = obstore.get(store, key, options={"if_none_match": e_tag} if e_tag else None)
            except NotModifiedError:
                return None
            return bytes(answer.bytes()), _tag(answer.meta)

        return self._send(key, "read", send)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        import obstore

        # The client can merge ranges itself, but panics where one of them begins behind the end of the object.
        merged = merge_ranges(ranges, GAP)
        if len(merged) > 1 and self._throttle.limit == math.inf:  # else one by one: the client would send ten at once
            starts, ends = [start for start, _ in merged], [end for _, end in merged]
            try:
                found: Sequence[Any] = self._send(
                    key, "read", lambda store: obstore.get_ranges(store, key, starts=starts, ends=ends, coalesce=0)
                )
            except PastTheEnd:
                return [self.get(key, *wanted) for wanted in ranges]
            except NoRanges:
                whole = self.get(key)
                return [whole[start : start + length] for start, length in ranges]
        else:
            found = [self.get(key, start, end - start) for start, end in merged]
        parts = [(start, memoryview(data)) for (start, _), data in zip(merged, found, strict=True)]

        def cut(start: int, length: int) -> bytes:
            if not length:
                return b""
            begin, data = parts[bisect_right(parts, start, key=itemgetter(0)) - 1]
            return bytes(data[start - begin : start - begin + length])

        return [cut(start, length) for start, length in ranges]

    def has_ranges(self, key: str) -> bool:
        import obstore

        try:
            self._send(key, "read", lambda store: obstore.get_range(store, key, start=0, length=1))
        except NoRanges:
            return False
        except PastTheEnd:
            return True
        return True

    def download(self, key: str, sink: Sink, size: int = 0) -> None:
        import obstore

        if 0 < size <= PART:
            sink.write(self.get(key), 0)
            return
        at = 0

        def go_on(store: Any) -> None:
            nonlocal at
            for part in obstore.get(store, key, options={"range": {"offset": at}} if at else None).stream(min_chunk_size=PIECE):
                sink.write(part, at)
                at += len(part)

        def reached() -> int:
            return at

        for left in reversed(range(RESTARTS)):
            try:
                with suppress(PastTheEnd):  # the connection was lost behind the last byte
                    self._send(key, "read", go_on, progress=reached)
                return
            except NoRanges:  # this server can only begin anew
                if not left:
                    raise
                at = 0

    def put(self, key: str, data: Sequence[Buffer], condition: str | None = None) -> str | None:
        import obstore

        if condition is None:
            # Few at once: they share a line, and each has its time.
            options: Any = {"chunk_size": PART, "max_concurrency": 2}
            return _tag(
                self._send(
                    key,
                    "write",
                    lambda store: obstore.put(store, key, _parts(data), **options),
                    upload=_size(data) > SMALL,
                    repeated=_size(data) > PART,
                )
            )
        mode: Any = CREATE if condition == CREATE else msgspec.json.decode(condition)
        whole = b"".join(data)
        try:
            options = {"mode": mode, "use_multipart": False}
            sent = self._send(key, "write", lambda store: obstore.put(store, key, whole, **options), once=True, upload=len(whole) > SMALL)
            return _tag(sent)
        except Refused:
            return None

    def list(self, folder: str) -> Iterator[Facts]:
        import obstore

        def send(store: Any) -> list[Any]:
            return [entry for batch in obstore.list(store, prefix=folder or None) for entry in batch]

        return (
            Facts(entry["path"], entry["size"], entry["last_modified"], _tag(entry))
            for entry in self._send(folder, "list", send, repeated=True)
        )

    def facts(self, key: str) -> Facts:
        import obstore

        entry = self._send(key, "look at", lambda store: obstore.head(store, key))
        return Facts(key, entry["size"], entry["last_modified"], _tag(entry))

    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        for at in range(0, len(keys), BATCH):
            batch = list(keys[at : at + BATCH])
            try:
                self._send(batch[0], "delete", partial(obstore.delete, paths=batch), repeated=True)
            except NotFound:
                for key in batch:  # some stores take a missing object for a failure, and may have stopped there
                    with suppress(NotFound):
                        self._send(key, "delete", partial(obstore.delete, paths=key))

    def copy(self, source: str, key: str) -> None:
        import obstore

        self._send(source, "copy", lambda store: obstore.copy(store, source, key))

    # How they are sent

    def _send(
        self,
        key: str,
        action: str,
        request: Callable[[Any], T],
        *,
        once: bool = False,
        upload: bool = False,
        repeated: bool = False,
        progress: Callable[[], int] = int,
    ) -> T:
        """Sends a request until it is answered: again and again while the store is silent or busy, for a limited time.

        With ``once`` only the client repeats it, which it does for moments: the caller has to find out what happened. An ``upload`` has
        a long body. What is ``repeated`` by the client, too, is several requests, of which one that failed should not cost the others.
        ``progress`` tells how far it came: the time is counted anew whenever it came any further. It begins with the first try: a wait
        for its turn is none for the store.
        """
        global _used
        _used = True
        repeated = repeated or once
        begun, number, reached = math.inf, 0, 0
        while True:
            try:
                store = open_bucket(self._location, upload=upload, repeated=repeated)
                with self._throttle.flight() as flight:
                    begun = min(begun, time.monotonic())
                    self._alone = min(self._alone, begun)
                    answer = self._attempt(flight, key, action, request, store, once)
            except (Refused, Silent) as problem:
                if isinstance(problem, Refused):
                    if once:
                        raise
                    meaning = Silent(f"cannot {action} {problem.file}: the store is busy with the same object", file=problem.file)
                else:
                    meaning = problem
                self._answered = self._answered or not meaning.nobody
                if progress() > reached:
                    begun, number, reached = time.monotonic(), 0, progress()
                patience = self._location.retry_timeout if self._answered else min(FIRST_ANSWER, self._location.retry_timeout)
                # Who asks again does not wait anew for an address that nobody has answered at: a wrong one costs that time once.
                left = (begun if self._answered else self._alone) + patience - time.monotonic()
                if once or left <= 0:
                    raise meaning.error() from problem.__cause__
                if number == (0 if repeated else QUIET) and self._throttle.may_tell():
                    _log.warning("%s; trying again for up to %.0f s", meaning, patience)
                time.sleep(min(left, random.uniform(0.05, min(10.0, 0.2 * 2 ** min(number, 8)))))
                number += 1
            except AccessDenied as problem:
                forget_bucket(self._location)
                if repeated or NO_CREDENTIALS not in str(problem):
                    raise
                repeated = True  # what gives them may be busy: the client asks that again, too
            else:
                self._answered = True
                return answer

    def _attempt(self, flight: Flight, key: str, action: str, request: Callable[[Any], T], store: Any, once: bool) -> T:
        try:
            if action in ("write", "copy", "delete") and not once:
                return request(store)  # is waited for: who is interrupted in a write would not know that it may still land
            return interruptible(partial(request, store), lands=once)
        except Exception as error:
            meaning = explain(error, self._location, key, action)
            if meaning is None:
                raise
            flight.busy = isinstance(meaning, Silent) and meaning.busy
            self._answered |= isinstance(meaning, NotFound) or (isinstance(meaning, AccessDenied) and NO_CREDENTIALS not in str(meaning))
            raise meaning from error


def interruptible(call: Callable[[], T], *, lands: bool = False) -> T:
    """The result of a call, which Ctrl-C does not wait for: the client handles no signals until the last of its own tries has failed.

    Where it ``lands`` all the same, only Ctrl-C leaves it, which ``Commit.swap`` knows of, and nothing else that a signal raises.
    """
    global _runner
    if threading.current_thread() is not threading.main_thread():
        return call()
    runner, _runner = _runner or _Runner(), None
    result, error = runner.run(call, lands)
    _runner = runner
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


class _Runner:
    """A thread that does one call after the other."""

    def __init__(self) -> None:
        self._calls, self._outcomes = SimpleQueue[Any](), SimpleQueue[Any]()
        threading.Thread(target=self._work, name="liveset requests", daemon=True).start()

    def run(self, call: Callable[[], Any], lands: bool) -> tuple[Any, BaseException | None]:
        self._calls.put(call)
        try:
            while True:
                # A signal that comes just before the wait, or to another thread, does not end it: its handler runs once the time is over.
                with suppress(Empty):
                    return self._outcomes.get(timeout=LISTEN)  # type: ignore[no-any-return]
        except BaseException as error:
            self._calls.put(None)  # nobody waits for it any longer
            if lands and not isinstance(error, KeyboardInterrupt):
                self._outcomes.get()
            raise

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = call(), None
            except BaseException as error:
                outcome = None, error
            self._outcomes.put(outcome)
            del call, outcome


_runner: _Runner | None = None


def merge_ranges(ranges: Sequence[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """The same bytes, given by start and length, as fewer ranges (start, end) in order: those with at most ``gap`` between them are one."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if merged and length and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + length))
        elif length:
            merged.append((start, start + length))
    return merged


GAP = 64 << 10
"""Two parts of an object that are nearer than this are asked for together."""
RESTARTS = 10
"""How often an object is fetched from its beginning where that is the only way."""
SMALL = 1 << 20
"""What has more bytes is a long upload."""
BATCH = 250
"""Objects deleted in one request; Azure takes up to 256."""


_stores: dict[tuple[str, bool, bool], Any] = {}
_opening = threading.Lock()


def open_bucket(location: Location, *, upload: bool = False, repeated: bool = False) -> Any:
    """The client of obstore for a bucket: one for all places in it, with their connections; sends nothing.

    There is another one for long uploads, and one that repeats requests itself, which hides what the store says in between.
    """
    name = location.bucket_identity, upload, repeated
    if (store := _stores.get(name)) is not None:
        return store
    with _opening:
        if name not in _stores:
            _stores[name] = open_object_store(location, upload=upload, repeated=repeated)
        return _stores[name]


def forget_bucket(location: Location) -> None:
    """Makes the next request look for credentials anew: whoever had none may have set them since."""
    with _opening:
        for name in [name for name in _stores if name[0] == location.bucket_identity]:
            del _stores[name]


def _after_fork() -> None:
    global _opening, _runner
    _opening, _runner = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


def open_object_store(location: Location, *, upload: bool = False, repeated: bool = True) -> Any:
    """The client of obstore for a bucket; sends nothing."""
    try:
        import obstore.store as stores
    except ImportError as error:
        raise MissingDependency(f"{location.url} needs obstore: pip install 'liveset[remote]'", package="obstore") from error
    from obstore.exceptions import BaseError

    # A server that takes a request and never answers is given up after the time that the caller allows, too.
    patience = max(location.retry_timeout, 2.0)
    timeout = UPLOAD_TIMEOUT if upload else min(TIMEOUT, patience)
    client = {"timeout": timedelta(seconds=timeout), "connect_timeout": "5s", "pool_max_idle_per_host": "64", **location.client}
    retry: Any = {
        "max_retries": 4 if repeated else 0,
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
        "retry_timeout": timedelta(seconds=min(120.0, patience)),
    }
    options: dict[str, Any] = {"client_options": client, "retry_config": retry}
    kinds = {"s3": stores.S3Store, "gcs": stores.GCSStore, "azure": stores.AzureStore}
    try:
        if location.kind == "http":
            return stores.HTTPStore.from_url(location.bucket, **options)
        if (provider := profile_credentials(location)) is not None:
            options["credential_provider"] = provider
        return kinds[location.kind](location.bucket, config=dict(location.config), **options)
    except (BaseError, ValueError, TypeError) as error:
        raise ValueError(f"storage_options for {location.url} are not understood: {first_line(error)}") from error


def _tag(meta: Any) -> str:
    return msgspec.json.encode({name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}).decode()


def _size(data: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in data)


def _parts(data: Sequence[Buffer]) -> Any:
    """The buffers of a file for one put: a single one as it is, many small ones joined into few."""
    if _size(data) <= PART:
        return b"".join(data)
    return _blocks(data)


def _blocks(data: Sequence[Buffer]) -> Iterator[bytes]:
    waiting: list[memoryview] = []
    size = 0
    for buffer in data:
        view = memoryview(buffer).cast("B")
        for at in range(0, len(view), PART):
            piece = view[at : at + PART]
            if size + len(piece) > PART:
                yield b"".join(waiting)
                waiting, size = [], 0
            waiting.append(piece)
            size += len(piece)
    yield b"".join(waiting)
