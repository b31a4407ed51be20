"""A read-only web server with ranges and TLS, for machines without nginx.

    python web_server.py FOLDER PORT TLS_PORT CERTIFICATE KEY

``/slow/`` sends 4 MB/s; ``/norange/`` knows no ranges.
"""

from __future__ import annotations

import email.utils
import re
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16
SLOW = 4 << 20


class WebHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def fail(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        way, path = "", unquote(urlsplit(self.path).path).lstrip("/")
        for prefix in ("slow/", "norange/"):
            if path.startswith(prefix):
                way, path = prefix, path.removeprefix(prefix)
        file = (self.folder / path).resolve()
        if not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            return self.fail(404)
        facts = file.stat()
        tag = f'"{facts.st_mtime_ns:x}-{facts.st_size:x}"'
        if self.headers.get("If-Match", tag) not in (tag, "*"):
            return self.fail(412)
        if self.headers.get("If-None-Match") in (tag, "*"):
            return self.fail(304, ETag=tag)
        start, stop = 0, facts.st_size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if way != "norange/" else None
        if asked and any(asked.groups()):
            first, last = asked.groups()
            start = int(first) if first else max(stop - int(last), 0)
            stop = min(int(last) + 1, stop) if first and last else stop
            if start >= stop:
                return self.fail(416, Content_Range=f"bytes */{facts.st_size}")
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", email.utils.formatdate(facts.st_mtime, usegmt=True))
        if way != "norange/":
            self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{facts.st_size}")
        self.end_headers()
        if self.command == "GET":
            with file.open("rb") as source:
                source.seek(start)
                while start < stop:
                    piece = source.read(min(PIECE, stop - start))
                    self.wfile.write(piece)
                    start += len(piece)
                    if way == "slow/":
                        time.sleep(len(piece) / SLOW)
        return None

    do_HEAD = do_GET  # noqa: N815  # what the base class looks for


def main() -> None:
    folder, port, tls_port, certificate, key = sys.argv[1:]
    WebHandler.folder = Path(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    secure = ThreadingHTTPServer(("127.0.0.1", int(tls_port)), WebHandler)
    secure.socket = context.wrap_socket(secure.socket, server_side=True)
    threading.Thread(target=secure.serve_forever, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(port)), WebHandler).serve_forever()


if __name__ == "__main__":
    main()
