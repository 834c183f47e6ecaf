"""Self-contained HTML pages: one layout and style sheet for all (templates/page.html.j2), no external resources."""

import contextlib
import datetime
import http.server
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError, RunError
from pretrain.common.files import atomic_open

_HTML_START = b"<!doctype html"
_TEMPLATES = Path(__file__).parent / "templates"
TIMESTAMP_FORMAT = "%Y-%m-%d %H:%M UTC"  # for strftime


def write_page(out: Path, template: str, **values: Any) -> Path:
    """Render `template` with `values` and `written_at` (the current time) and write it to `out` atomically.

    Raises `InputError` if `out` is an existing file other than an HTML page, for example a file of the run.
    """
    import jinja2

    if out.is_file() and out.read_bytes().lstrip()[: len(_HTML_START)].lower() not in (b"", _HTML_START):
        raise InputError(f"{out}: exists and is not an HTML page. Choose another name, or remove it.")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written_at = datetime.datetime.now(datetime.timezone.utc).strftime(TIMESTAMP_FORMAT)
    page = templates.get_template(template).render(**values, written_at=written_at)
    with atomic_open(out, "w") as file:
        file.write(page)
    return out


def make_server(write: Callable[[], Path]) -> http.server.ThreadingHTTPServer:
    """Return a server on a free port of 127.0.0.1 that, at each request, calls `write` and serves the written page."""
    write_lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                with write_lock:
                    page = write().read_bytes() if self.path == "/" else b""
            except RunError as error:
                return self.send_error(500, explain=str(error))
            if not page:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def serve(write: Callable[[], Path]) -> None:
    """Serve the page that `write` writes, until Ctrl-C is pressed."""
    with make_server(write) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"Live page: http://127.0.0.1:{server.server_port} (press Ctrl-C to stop the server)", flush=True)
        server.serve_forever()
