"""Self-contained HTML pages: one layout and style sheet for all (templates/page.html.j2), no external resources."""

import datetime
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open

_START = b"<!doctype html"
_TEMPLATES = Path(__file__).parent / "templates"
DATE = "%Y-%m-%d %H:%M UTC"  # for strftime


def write_page(out: Path, template: str, **values: Any) -> Path:
    """Render `template` with `values` and `written` (the current time) and write it to `out` atomically.

    `InputError` if `out` is a file that is no page, such as one of the run.
    """
    import jinja2

    if out.is_file() and out.read_bytes().lstrip()[: len(_START)].lower() not in (b"", _START):
        raise InputError(f"{out}: exists and is not a page. Choose another name, or remove it.")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = datetime.datetime.now(datetime.timezone.utc).strftime(DATE)
    page = templates.get_template(template).render(**values, written=written)
    with atomic_open(out, "w") as file:
        file.write(page)
    return out
