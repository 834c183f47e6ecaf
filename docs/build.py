"""./launch.sh docs: build the documentation as a static site with Sphinx, and serve it on this machine only."""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
from pathlib import Path

_DOCS = Path(__file__).resolve().parent
_OUT = _DOCS / "_build" / "html"


def main(argv: list[str] | None = None) -> int:
    """Build the site, then serve it on 127.0.0.1 unless `--build` names a folder. Return an exit code."""
    parser = argparse.ArgumentParser(
        prog="./launch.sh docs",
        description="Build the documentation as a static site and serve it on this machine alone.",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--port", type=int, default=8000, metavar="N", help="port on 127.0.0.1 (default: 8000)")
    one.add_argument("--build", type=Path, metavar="DIR", help="write the site's files to DIR and do not serve them")
    one.add_argument("--generate", action="store_true", help="write docs/reference from the code and do nothing else")
    arguments = parser.parse_args(argv)
    if arguments.generate:
        return subprocess.call([sys.executable, str(_DOCS / "generate.py")])
    out = arguments.build or _OUT
    code = build(out)
    if code:
        return code
    if arguments.build:
        print(f"{out}: written. Open {(out / 'index.html').resolve().as_uri()}")
        return 0
    return _serve(out, arguments.port)


def build(out: Path) -> int:
    """Write the site to the folder `out`; a warning fails the build. Return Sphinx's exit code."""
    # -E: pages depend on conf.py's hooks, which Sphinx does not watch. -d: its cache is not part of the site.
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-q",
        "-W",
        "--keep-going",
        "-E",
        "-d",
        str(_DOCS / "_build/cache"),
    ]
    return subprocess.call([*command, str(_DOCS), str(out)])


def _serve(folder: Path, port: int) -> int:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        print(f"error: port {port} of 127.0.0.1: {error.strerror}. Choose another with --port N.", file=sys.stderr)
        return 3
    with server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
