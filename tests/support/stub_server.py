"""An object store in this process that loses answers, cuts bodies and counts: what no real server does when a test asks for it.

It speaks as much of S3 (``If-Match``, ``If-None-Match``, ETags) or of GCS (generations) as obstore uses.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.support.services import BUCKET, RemoteFolder

ERROR = b"<Error><Code>Stub</Code><Message>as the test asked</Message></Error>"
XML = {"Content-Type": "application/xml"}
ACTS = re.compile(r"(?:[45]\d\d|cut|stall)-(?:before|after)|short-body|cut-body")


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    method: str
    name: str
    """The name of the object, without the bucket."""
    range: str
    received: int
    """Bytes of its body."""


@dataclass(frozen=True)
class Stored:
    data: bytes
    tag: str
    generation: int
    time: float


@dataclass
class Act:
    """What to do to one of the next requests."""

    what: str
    method: str
    match: str
    left: int

    def fits(self, method: str, name: str) -> bool:
        return self.left > 0 and self.method in (method, "") and re.search(self.match, name) is not None


class StubServer:
    """A store that does to a request what it was told with `act`; a context manager.

    The acts are

    - ``"503-before"``, ``"409-before"``, ...: answers that, and changes nothing
    - ``"500-after"``, ...: does what it is asked, and then answers that
    - ``"cut-before"``, ``"cut-after"``: the connection is closed without an answer
    - ``"stall-before"``, ``"stall-after"``: no answer, until the client gives up or the server is closed
    - ``"short-body"``: a whole answer, but with the first half of the data only
    - ``"cut-body"``: the answer promises all data, and the connection is closed after the first half
    """

    def __init__(self, dialect: Literal["s3", "gs"] = "s3") -> None:
        self.dialect = dialect
        self.ignore_conditions = False
        """Whether writes are never refused, as some stores do it."""
        self.objects: dict[str, Stored] = {}
        self.requests: list[Request] = []
        self.bytes_received = self.bytes_sent = 0
        self.lock = threading.Lock()
        self._acted = threading.Condition(self.lock)
        self.uploads: dict[str, dict[int, bytes]] = {}
        """Multipart uploads that are under way."""
        self._acts: list[Act] = []
        self._generation = 0
        self._server = _Http(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def root(self) -> RemoteFolder:
        return RemoteFolder(self.dialect, f"http://127.0.0.1:{self._server.server_port}")

    def act(self, what: str, *, method: str = "PUT", match: str = "", times: int = 1) -> None:
        """Do ``what`` to the next ``times`` requests with this method (any: ``""``) whose name the pattern finds."""
        if not ACTS.fullmatch(what):
            raise ValueError(f"there is no act {what!r}")
        with self.lock:
            self._acts.append(Act(what, method, match, times))

    def stop_acting(self) -> None:
        """Behave from now on."""
        with self.lock:
            self._acts.clear()

    def wait_for_acts(self, seconds: float = 60.0) -> None:
        """Return once requests have come for all acts; what an act lets the store do first is done then."""
        with self._acted:
            if not self._acted.wait_for(lambda: not self.acts_left, seconds):
                raise TimeoutError(f"{self.acts_left} requests have not come")

    @property
    def acts_left(self) -> int:
        """How many requests something is still to be done to."""
        return sum(act.left for act in self._acts)

    def count(self, method: str = "", match: str = "") -> int:
        """How many such requests have come."""
        with self.lock:
            return sum(method in (request.method, "") and re.search(match, request.name) is not None for request in self.requests)

    def forget(self) -> None:
        """Count from zero."""
        with self.lock:
            self.requests.clear()
            self.bytes_received = self.bytes_sent = 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()

    # For the handler, which holds the lock

    def next_act(self, method: str, name: str) -> str:
        for act in self._acts:
            if act.fits(method, name):
                act.left -= 1
                self._acted.notify_all()
                return act.what
        return ""

    def put(self, name: str, data: bytes) -> Stored:
        self._generation += 1
        # The MD5, as real servers do it: equal bytes have equal tags
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        stored = self.objects[name] = Stored(data, tag, self._generation, time.time())
        return stored


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, stub: StubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stub = stub
        self._open: set[socket.socket] = set()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self.stub.lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        with self.stub.lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that leave in the middle are what this server is for

    def close_connections(self) -> None:
        with self.stub.lock:
            for connection in self._open:
                _cut(connection)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)


def _xml(kind: str, **fields: str) -> bytes:
    return f"<{kind}>{''.join(f'<{key}>{escape(value)}</{key}>' for key, value in fields.items())}</{kind}>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Http
    connection: socket.socket
    act = ""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    @property
    def stub(self) -> StubServer:
        return self.server.stub

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        with self.stub.lock:
            self.stub.requests.append(Request(self.command, name, self.headers.get("Range") or "", len(body)))
            self.stub.bytes_received += len(body)
            what, _, when = self.stub.next_act(self.command, name).partition("-")
            self.act = what if when == "body" else ""
            if when == "before":
                result: tuple[int, bytes, dict[str, str]] = (0, b"", {})
            else:
                result = self.handle_one(name, parse_qs(url.query, keep_blank_values=True), body)
        if when in ("", "body"):
            self.answer(*result)
        elif what.isdecimal():
            self.answer(int(what), ERROR, {})
        else:
            if what == "stall":
                select.select([self.connection], [], [], 60)  # readable once the client closes it
            self.close_connection = True
            _cut(self.connection)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815  # what the base class looks for

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.act == "short":
            body = body[: len(body) // 2]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            body = b""
        if self.act == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        with self.stub.lock:  # first, so that whoever has the answer finds it counted
            self.stub.bytes_sent += len(body)
        self.wfile.write(body)
        self.wfile.flush()
        if self.act == "cut":
            _cut(self.connection)

    # What a store does

    def handle_one(self, name: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        old, upload = self.stub.objects.get(name), query.get("uploadId", [""])[0]
        match self.command:
            case "POST" if "uploads" in query:
                upload = str(len(self.stub.requests))
                self.stub.uploads[upload] = {}
                return 200, _xml("InitiateMultipartUploadResult", Bucket=BUCKET, Key=name, UploadId=upload), XML
            case "PUT" | "POST" | "DELETE" if upload and upload not in self.stub.uploads:
                return 404, ERROR, {}
            case "PUT" if upload:
                part = query["partNumber"][0]
                self.stub.uploads[upload][int(part)] = body
                return 200, b"", {"ETag": f'"{part}"'}
            case "POST" if upload:
                if refusal := self.refusal(old):
                    return refusal, ERROR, {}
                stored = self.stub.put(name, b"".join(data for _, data in sorted(self.stub.uploads.pop(upload).items())))
                return 200, _xml("CompleteMultipartUploadResult", Bucket=BUCKET, Key=name, ETag=stored.tag), XML | self.facts(stored)
            case "DELETE" if upload:
                del self.stub.uploads[upload]
                return 204, b"", {}
            case "PUT":
                if source := self.headers.get("x-amz-copy-source") or self.headers.get("x-goog-copy-source"):
                    found = self.stub.objects.get(unquote(source).lstrip("/").removeprefix(f"{BUCKET}/"))
                    if found is None:
                        return 404, ERROR, {}
                    return 200, b"<CopyObjectResult/>", self.facts(self.stub.put(name, found.data))
                refusal = self.refusal(old)
                return (refusal, ERROR, {}) if refusal else (200, b"", self.facts(self.stub.put(name, body)))
            case "DELETE":
                self.stub.objects.pop(name, None)
                return 204, b"", {}
            case "POST" if "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    self.stub.objects.pop(unescape(key, {"&quot;": '"', "&apos;": "'"}), None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), XML
            case "GET" if "list-type" in query:
                return 200, "".join(self.listing(query)).encode(), XML
            case "GET" | "HEAD":
                return (404, ERROR, {}) if old is None else self.read(old)
        return 501, ERROR, {}

    def refusal(self, old: Stored | None) -> int:
        """The status that refuses a write whose condition does not hold; 0 if it does."""
        if self.stub.ignore_conditions:
            return 0
        if self.stub.dialect == "gs":
            wanted = self.headers.get("x-goog-if-generation-match")
            return 412 if wanted is not None and int(wanted) != (old.generation if old else 0) else 0
        if self.headers.get("If-None-Match") == "*" and old is not None:
            return 412
        wanted = self.headers.get("If-Match")
        if wanted is None or (old is not None and old.tag == wanted):
            return 0
        return 412 if old is not None else 404

    def facts(self, stored: Stored) -> dict[str, str]:
        return {"ETag": stored.tag} | ({"x-goog-generation": str(stored.generation)} if self.stub.dialect == "gs" else {})

    def read(self, stored: Stored) -> tuple[int, bytes, dict[str, str]]:
        facts = self.facts(stored) | {"Last-Modified": email.utils.formatdate(stored.time, usegmt=True)}
        if self.headers.get("If-Match", stored.tag) not in (stored.tag, "*"):
            return 412, ERROR, {}
        if self.headers.get("If-None-Match") in (stored.tag, "*"):
            return 304, b"", facts
        size = len(stored.data)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            return 200, stored.data, facts
        first, last = asked.groups()
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= stop:
            return 416, ERROR, {"Content-Range": f"bytes */{size}"}
        return 206, stored.data[start:stop], facts | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}

    def listing(self, query: dict[str, list[str]]) -> Iterator[str]:
        """Everything in one page, sorted."""
        prefix, after, delimiter = (query.get(key, [""])[0] for key in ("prefix", "start-after", "delimiter"))
        folders = set()
        yield "<ListBucketResult><IsTruncated>false</IsTruncated>"
        for name, stored in sorted(self.stub.objects.items()):
            if not name.startswith(prefix) or name <= after:
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                folders.add(name[: name.index(delimiter, len(prefix)) + 1])
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.time))
            yield f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified><ETag>{escape(stored.tag)}</ETag>"
            yield f"<Size>{len(stored.data)}</Size></Contents>"
        yield from (f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders))
        yield "</ListBucketResult>"
