"""Sphinx settings. The pages are plain Markdown for GitHub; everything that only Sphinx needs is in this file."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

# The navigation: headings and pages, without `.md`. `tests/docs/test_docs.py` checks that every page is in it.
NAVIGATION = {
    "Start": ["quickstart", "guides/install"],
    "Guides": [
        "guides/data",
        "guides/corpus",
        "guides/languages",
        "guides/web-text",
        "guides/storage",
        "guides/large-corpora",
        "guides/pretraining",
        "guides/recipes",
        "guides/adapt",
        "guides/evaluating-pretrained",
        "guides/finetuning",
        "guides/use",
        "guides/hand-on",
        "guides/first-hour",
        "guides/python",
        "guides/monitoring",
        "guides/recovery",
        "guides/multi-gpu",
        "guides/clusters",
        "guides/limits",
    ],
    "Reference": [
        "reference/commands",
        "reference/config-pretrain",
        "reference/config-finetune",
        "reference/config-place",
        "reference/run-folder",
        "reference/metrics",
        "reference/exit-codes",
    ],
    "Architecture": ["architecture", "invariants", "decisions/index"],
    "Extend": [
        "extend/your-own-modules",
        "extend/change-the-model",
        "extend/add-a-source",
        "extend/add-a-masking-scheme",
        "extend/add-an-objective",
        "extend/add-a-task",
        "extend/add-a-metric",
        "contributing",
    ],
    "Measurements": [
        "benchmarks/index",
        "benchmarks/speedrun",
        "benchmarks/parity",
        "benchmarks/lab-notes",
        "reliability",
        "security",
    ],
}

project = "bertrain"
author = "the bertrain authors"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # the same anchors as on GitHub
html_theme = "furo"
html_title = "bertrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_view_link": None, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "native"

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")


def setup(app: Any) -> None:
    """Register the hooks; Sphinx calls this."""
    app.connect("source-read", _on_source_read)


def _on_source_read(app: Any, docname: str, source: list[str]) -> None:
    text, folder = source[0], posixpath.dirname(docname)
    if docname == "security":  # the page itself is where GitHub expects it
        text, folder = (ROOT / "SECURITY.md").read_text(encoding="utf-8"), ".."
    text = within_docs(text, folder)
    if docname == "index":
        text += "".join(map(_toctree, NAVIGATION, NAVIGATION.values()))
    if docname == "decisions/index":
        text += _toctree("", sorted(path.stem for path in (DOCS / "decisions").glob("[0-9]*.md")))
    source[0] = text


def within_docs(text: str, folder: str) -> str:
    """Return Markdown in which links out of docs/ are plain text: the site does not have these files.

    Args:
        text: a page.
        folder: its folder, relative to docs/, with slashes.
    """

    def replace(link: re.Match[str]) -> str:
        label, target = link.groups()
        path, hash_, anchor = target.partition("#")
        inside = posixpath.relpath(posixpath.normpath(posixpath.join("docs", folder, path)), "docs")
        if inside == "../SECURITY.md":
            inside = "security.md"
        if inside.startswith(".."):
            return label
        if folder == "..":
            return f"[{label}]({inside}{hash_}{anchor})"
        back = posixpath.relpath(inside, folder or ".")
        return f"[{label}]({back}{hash_}{anchor})"

    return _LINK.sub(replace, text)


def _toctree(caption: str, pages: list[str]) -> str:
    title = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + title + "\n" + "\n".join(pages) + "\n```\n"
