"""A real S3 server (moto, in a separate process), and a proxy that injects faults before any store, on loopback."""

import contextlib
import functools
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pretrain.common.addresses import CACHE_VARIABLE, RUNS_VARIABLE
from pretrain.storage import objects
from pretrain.storage.runs import fetched_model
from tests.distributed import free_port

KEY = "right"  # the only access key that the proxy accepts
BUCKET = "bucket"
_SERVE = (
    "from werkzeug.serving import make_server, WSGIRequestHandler\n"
    "from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app\n"
    "WSGIRequestHandler.log_request = lambda *a, **k: None\n"
    "app = DomainDispatcherApplication(create_backend_app)\n"
    "server = make_server('127.0.0.1', 0, app, threaded=True)\n"
    "print(server.server_port, flush=True)\n"
    "server.serve_forever()\n"
)
_SECRET = "ZW11bGF0b3I="  # key of the Azurite account, in base64
_GOOGLE = "fake-gcs-server -scheme http -host 127.0.0.1 -public-host 127.0.0.1:{proxy} -backend filesystem"
_AZURE = "azurite-blob --silent --skipApiVersionCheck --disableTelemetry --blobHost 127.0.0.1"
# Other stores than moto, as {scheme: (package of the client, command line of the server)}.
STORES = {
    "gs": ("gcsfs", f"{_GOOGLE} -port {{port}} -external-url http://127.0.0.1:{{proxy}} -filesystem-root {{folder}}"),
    "az": ("adlfs", f"{_AZURE} --blobPort {{port}} --location {{folder}}"),
    "s3": ("s3fs", "localbucket --host 127.0.0.1 --port {port} {folder}"),
}


@dataclass
class Fault:
    """A fault of the next `times` requests whose "METHOD path" matches `where`.

    kind: `503`, `500` and `403` are answered with this status; `drop` closes before the request is passed on; `lost`
    passes it on, and closes without an answer; `cut` closes in the middle of the answer's body; `slow` answers after a
    moment.
    """

    kind: str
    where: str
    times: int = 1


class FaultyProxy:
    """Forwards requests to a server, except for the faults in `plan` and requests without the `key`.

    Attributes:
        plan: pending faults; a fault is removed after it has happened `times` times.
        happened: "kind METHOD path" of the faults that have happened.
        requests: "METHOD path" of all requests, with the object name that Google's client sends in the body.
    """

    def __init__(self, port: int, key: str = KEY) -> None:
        self._target, self._key, self._lock = port, key, threading.Lock()
        self.plan: list[Fault] = []
        self.happened: list[str] = []
        self.requests: list[str] = []
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    proxy._serve(self.rfile, self.wfile, self.connection)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address, request_queue_size = True, True, 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        """Empty the bucket, and remove all faults."""
        self.plan, self.happened = [], []
        fetched_model.cache_clear()
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            answer = self._pass_on(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), b"")
            assert b" 200 " in answer.partition(b"\r\n")[0]
        self.requests = []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, incoming: Any, outgoing: Any, connection: socket.socket) -> None:
        head = _head(incoming)
        if not head:
            return
        if re.search(rb"(?i)\r\nexpect: *100-continue", head):
            outgoing.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            outgoing.flush()
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = incoming.read(int(length[1])) if length else b""
        method, path = head.split(b"\r\n", 1)[0].decode().split(" ")[:2]
        named = re.search(rb'"name": *"([^"]+)"', body[:500])
        kind = self._fault(f"{method} {path}{' ' + named[1].decode() if named else ''}")
        if kind == "drop":
            connection.shutdown(socket.SHUT_RDWR)
            return
        if (self._key and f"Credential={self._key}/".encode() not in head) or kind == "403":
            outgoing.write(_error(method, 403, "InvalidAccessKeyId", "The access key id does not exist."))
            return
        if kind == "503":
            outgoing.write(_error(method, 503, "SlowDown", "Please reduce your request rate."))
            return
        if kind == "500":  # s3fs does not retry it
            outgoing.write(_error(method, 500, "InternalError", "We encountered an internal error."))
            return
        if kind == "slow":
            time.sleep(0.3)
        answer = self._pass_on(head, body)
        if kind == "lost":
            connection.shutdown(socket.SHUT_RDWR)
            return
        if kind == "cut":
            start = answer.index(b"\r\n\r\n") + 4
            outgoing.write(answer[: start + (len(answer) - start) // 2])
            outgoing.flush()
            connection.shutdown(socket.SHUT_RDWR)
            return
        outgoing.write(answer)

    def _fault(self, request: str) -> str:
        with self._lock:
            self.requests.append(request)
            fault = next((one for one in self.plan if re.search(one.where, request)), None)
            if fault is None:
                return ""
            fault.times -= 1
            if not fault.times:
                self.plan.remove(fault)
            self.happened.append(f"{fault.kind} {request}")
            return fault.kind

    def _pass_on(self, head: bytes, body: bytes) -> bytes:
        """Send a request to the server, and return the complete answer."""
        head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
        first, rest = head.split(b"\r\n", 1)
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            server.sendall(first + b"\r\nConnection: close\r\n" + re.sub(rb"(?i)expect:[^\r]*\r\n", b"", rest) + body)
            parts = []
            while part := server.recv(1 << 20):
                parts.append(part)
        return b"".join(parts)


def _head(incoming: Any) -> bytes:
    """Return the head of a request including the empty line; b"" at the end of the connection."""
    lines = []
    while (line := incoming.readline()) not in (b"\r\n", b""):
        lines.append(line)
    return b"".join([*lines, b"\r\n"]) if lines else b""


def _error(method: str, status: int, code: str, message: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n{'' if method == 'HEAD' else body}".encode()


@contextlib.contextmanager
def s3_server() -> Iterator[FaultyProxy]:
    """Start a server with one bucket, and a proxy in front of it."""
    server = subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        proxy = FaultyProxy(int(server.stdout.readline()))
        try:
            yield proxy
        finally:
            proxy.close()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def real_store(scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Start one of `STORES` with an empty bucket, used for addresses of its scheme, and a proxy in front of it."""
    from tests.chaos import wait_for

    package, command = STORES[scheme]
    pytest.importorskip(package)
    if not shutil.which(program := command.split()[0]):
        pytest.skip(f"{program} is not on PATH")
    proxy = FaultyProxy(port := free_port(), KEY if scheme == "s3" else "")
    point_to(proxy, folder / "cache", monkeypatch)
    account = f"AccountName=bert;AccountKey={_SECRET};BlobEndpoint=http://127.0.0.1:{proxy.port}/bert;"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AZURITE_ACCOUNTS", f"bert:{_SECRET}")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}")
    forget_clients(monkeypatch)
    (folder / "store" / BUCKET).mkdir(parents=True)  # for stores whose buckets are folders
    words = command.format(port=port, proxy=proxy.port, folder=folder / "store").split()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: f":{port:04X} " in Path("/proc/net/tcp").read_text(encoding="ascii"))
            if scheme == "az":
                fsspec.filesystem("az", skip_instance_cache=True).mkdir(BUCKET)
            yield proxy
        finally:
            server.kill()
            proxy.close()


def forget_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear cached clients, so that credentials are read again."""
    monkeypatch.setattr(objects, "_open_filesystem", functools.cache(objects._open_filesystem.__wrapped__))


def point_to(proxy: FaultyProxy, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `proxy` for s3:// addresses of this process and its children, with local folders in `cache`."""
    for name, value in environment(proxy, cache).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", RUNS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def environment(proxy: FaultyProxy, cache: Any) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # only our code retries
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        CACHE_VARIABLE: str(cache),
    }
