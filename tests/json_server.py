"""A server on loopback that answers requests with JSON, as a Ray dashboard does."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def serving(answer: Callable[[str, Mapping[str, str]], tuple[Any, ...]]) -> Iterator[str]:
    """Yield the URL of a server; `answer(path, headers)` returns status, JSON value and, optionally, an error code."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value, *code = answer(self.path, self.headers)  # type: ignore[arg-type]
            self.send_response(status)
            self.send_header("X-Error-Code", "".join(code))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
