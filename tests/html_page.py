"""Parses generated HTML pages for tests."""

import json
from html.parser import HTMLParser
from typing import Any

_VOID = ("meta", "input", "line", "polyline", "circle")  # without an end tag, or self-closing


class Page(HTMLParser):
    """The text, tags, chart data and external resources of a page, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.fetched: list[str] = []
        self.charts: list[list[dict[str, Any]]] = []
        self.open: list[str] = []
        self.html = html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.fetched += [f"{tag} {values[key]}" for key in ("src", "href", "srcset", "xlink:href") if key in values]
        if tag == "link" or (tag == "script" and "src" in values):
            self.fetched.append(tag)
        if "data-chart" in values:
            self.charts.append(json.loads(values["data-chart"] or ""))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data

    def assert_stands_alone(self) -> None:
        """Assert that the page is well-formed and loads no external resources."""
        assert self.open == []
        assert self.fetched == []
        for reference in ("url(", "@import", "fetch(", "XMLHttp"):
            assert reference not in self.html.replace("url(#", "")  # a reference inside the page
        assert "http" not in self.html.replace("http://www.w3.org/2000/svg", "")
