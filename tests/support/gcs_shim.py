"""Stands between obstore and fake-gcs-server: turns writes of the XML API, which that server does not know, into its JSON API.

The server itself decides about generations, so a write that depends on one is as atomic as there. Everything else passes unchanged.

    python gcs_shim.py LISTEN_PORT SERVER_PORT
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import uuid
from collections.abc import Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

Headers = Sequence[tuple[str, str]]
Answer = tuple[int, Headers, bytes]

XML = ("Content-Type", "application/xml")
_JSON_API = ("/storage/", "/upload/", "/batch/", "/_internal/")
_OF_THE_CONNECTION = {"transfer-encoding", "connection", "date", "content-length"}


class Shim(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, back: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.back = back
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.connections = threading.local()

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        for attempt in (1, 2):
            connection = getattr(self.connections, "open", None)
            if connection is None:
                connection = self.connections.open = http.client.HTTPConnection("127.0.0.1", self.back, timeout=60)
            try:
                connection.request(method, path, body, headers or {})
                answer = connection.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            except (ConnectionError, http.client.HTTPException):
                connection.close()
                self.connections.open = None
                if attempt == 2 or method == "POST":  # a write is never sent twice
                    raise
        raise AssertionError

    def upload(self, bucket: str, name: str, data: bytes, headers: Message) -> Answer:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        generation = headers.get("x-goog-if-generation-match")
        if generation is not None:
            path += f"&ifGenerationMatch={quote(generation)}"
        kind = headers.get("Content-Type") or "application/octet-stream"
        facts = {
            "name": name,
            "contentType": kind,
            "metadata": {key[12:]: value for key, value in headers.items() if key.lower().startswith("x-goog-meta-")},
        }
        if headers.get("Cache-Control"):
            facts["cacheControl"] = headers["Cache-Control"]
        mark = uuid.uuid4().hex
        start = f"--{mark}\r\nContent-Type: application/json\r\n\r\n{json.dumps(facts)}\r\n--{mark}\r\nContent-Type: {kind}\r\n\r\n"
        body = start.encode() + data + f"\r\n--{mark}--\r\n".encode()
        status, _, text = self.ask("POST", path, body, {"Content-Type": f"multipart/related; boundary={mark}"})
        if status != 200:
            return status, [XML], b"<Error><Code>PreconditionFailed</Code></Error>" if status == 412 else text
        made = json.loads(text)
        return 200, [("ETag", '"{}"'.format(made["etag"].strip('"'))), ("x-goog-generation", made["generation"])], b""

    def copy(self, source: str, bucket: str, name: str, generation: str | None) -> Answer:
        from_bucket, from_name = unquote(source).lstrip("/").split("/", 1)
        path = f"/storage/v1/b/{from_bucket}/o/{quote(from_name, safe='')}/rewriteTo/b/{bucket}/o/{quote(name, safe='')}"
        if generation is not None:
            path += f"?ifGenerationMatch={quote(generation)}"
        status, _, text = self.ask("POST", path, b"{}", {"Content-Type": "application/json"})
        return status, [XML], b"<CopyObjectResult/>" if status == 200 else text


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Shim

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def handle_any(self) -> None:
        status, headers, body = self.answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self.send_response(status)
        length = str(len(body))
        for key, value in headers:
            if key.lower() not in _OF_THE_CONNECTION:
                self.send_header(key, value)
            elif key.lower() == "content-length" and self.command == "HEAD":
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815  # what the base class looks for

    def answer(self, data: bytes) -> Answer:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        bucket, _, name = url.path.lstrip("/").partition("/")
        name = unquote(name)
        if name and not self.path.startswith(_JSON_API):
            upload = query.get("uploadId", [""])[0]
            match self.command:
                case "POST" if "uploads" in query:
                    return self.start_upload(bucket)
                case "POST" if upload:
                    return self.end_upload(bucket, name, upload)
                case "PUT" if upload:
                    part = query["partNumber"][0]
                    self.server.uploads[upload][int(part)] = data
                    return 200, [("ETag", f'"{part}"')], b""
                case "DELETE" if upload:
                    self.server.uploads.pop(upload, None)
                    return 204, [], b""
                case "PUT" if self.headers.get("x-goog-copy-source"):
                    return self.server.copy(
                        self.headers["x-goog-copy-source"], bucket, name, self.headers.get("x-goog-if-generation-match")
                    )
                case "PUT":
                    return self.server.upload(bucket, name, data, self.headers)
        skipped = {"content-length", "connection", "accept-encoding", "host"}
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
        return self.server.ask(self.command, self.path, data or None, headers)

    def start_upload(self, bucket: str) -> Answer:
        upload = uuid.uuid4().hex
        self.server.uploads[upload] = {}
        return 200, [XML], _result("InitiateMultipartUploadResult", Bucket=bucket, Key="k", UploadId=upload)

    def end_upload(self, bucket: str, name: str, upload: str) -> Answer:
        parts = self.server.uploads.pop(upload)
        status, headers, body = self.server.upload(bucket, name, b"".join(parts[part] for part in sorted(parts)), self.headers)
        if status != 200:
            return status, headers, body
        return 200, [*headers, XML], _result("CompleteMultipartUploadResult", Bucket=bucket, Key="k", ETag=headers[0][1])


def _result(kind: str, **fields: str) -> bytes:
    return f"<{kind}>{''.join(f'<{key}>{value}</{key}>' for key, value in fields.items())}</{kind}>".encode()


if __name__ == "__main__":
    Shim(int(sys.argv[1]), int(sys.argv[2])).serve_forever()
