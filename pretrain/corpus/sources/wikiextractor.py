"""Output of WikiExtractor: articles of a Wikipedia dump in plain text, each between <doc ...> and </doc>."""

import html
import re
from collections.abc import Iterator

from pretrain.corpus.inputs import Chunk, Problems, decode
from pretrain.corpus.records import RecordReader

_HEAD = re.compile(r'^<doc [^\n]*?title="([^\n]*)"[^\n]*>\n', re.M)
_JSON = re.compile(r'\s*\{\s*"')


class Reader(RecordReader):
    """The <doc> elements of WikiExtractor."""

    record_start = b"\n<doc "
    previous_bytes = 1  # the newline of `record_start` belongs to the previous record

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        path = chunk.paths[0]
        return articles(decode(self.records(chunk, problems), path, chunk.start, problems), path, problems)


def articles(text: str, path: str, problems: Problems) -> Iterator[str]:
    """Yield the articles in `text` without titles, with HTML entities resolved."""
    count = position = 0
    # Searching for the end of an article is 10 times as fast as matching the whole article with a pattern.
    while head := _HEAD.search(text, position):
        start = head.end()
        end = start if text.startswith("</doc>", start) else text.find("\n</doc>", start) + 1
        if not end:
            break
        position = end + len("</doc>")
        count += 1
        title, body = head[1], text[start:end].lstrip("\n")
        first_line, _, rest = body.partition("\n")
        # Some versions of WikiExtractor keep the entities of the dump in titles and articles.
        is_title = first_line.strip() in (title.strip(), html.unescape(title).strip())
        yield html.unescape(rest if is_title else body)
    _report_unread(text, count, path, problems)


def _report_unread(text: str, read_count: int, path: str, problems: Problems) -> None:
    """Report how many articles could not be read; `read_count` is the number of articles read."""
    start_tag_count = read_count
    if text.count("<doc") != read_count:  # five times as fast as the next line, and usually enough
        start_tag_count = text.count("\n<doc ") + text.startswith("<doc ")
    if start_tag_count > read_count:
        problems.add(path, "<doc> that is not closed or has no title", count=start_tag_count - read_count)
    elif not start_tag_count and _JSON.match(text):
        problems.add(path, "JSON, as WikiExtractor's --json writes: use kind jsonl")
    elif not start_tag_count and text.strip():
        problems.add(path, "no <doc> in this part of the file", f"it starts with {text.strip()[:40]!r}")
