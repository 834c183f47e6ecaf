"""Convert MediaWiki XML dumps to articles in plain text. `mwparserfromhell` parses the markup.

Templates, tables, references and comments (about half of an article, and two thirds of the parser's time) are removed
first, by patterns that match only innermost, balanced pairs of opening and closing marks.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.corpus.inputs import Chunk, Problems, decode
from pretrain.corpus.records import RecordReader
from pretrain.corpus.streams import open_text

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Tag, Wikilink
    from mwparserfromhell.wikicode import Wikicode

_HEAD_BYTES = 1 << 16  # bytes at the start of a file that include everything before the first page
_LANGUAGE = re.compile(rb'<mediawiki\b[^>]*?\bxml:lang="([^"]+)"')
_NAMESPACE_NAME = re.compile(rb'<namespace\b[^>]*?\bkey="(-?\d+)"[^>]*>([^<]+)</namespace>')
_DROPPED_NAMESPACES = (b"-2", b"6", b"14")  # keys of the namespaces for media, files and categories
_PAGE = re.compile(rb"<page>(.*?)</page>", re.S)
_NAMESPACE = re.compile(rb"<ns>(-?\d+)</ns>")
_CONTENT_MODEL = re.compile(rb"<model>([^<]*)</model>")
_TEXT = re.compile(rb"<text\b[^>]*?(?<!/)>(.*?)</text>", re.S)

_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNER_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.S)
_ELEMENT_NAMES = "ref|math|gallery|timeline|score|chem|code|source|syntaxhighlight|imagemap|table|graph|hiero|poem|pre"
_EMPTY_ELEMENT = re.compile(rf"<(?:{_ELEMENT_NAMES}|references)\b[^<>]*/>", re.I)
_ELEMENT = re.compile(rf"<({_ELEMENT_NAMES}|references)\b[^<>]*>(?:(?!<\1\b).)*?</\1\s*>", re.S | re.I)
_MAGIC_WORD = re.compile(r"__(?=\S)[^\sa-z]+?__")  # in any language; lower case would be a Python name
_REDIRECT = re.compile(r"\s*#[^\W\d_][^\s\[]*\s*:?\s*\[\[")  # in any language; a list item has a space after "#"
# Language variants: -{A}- or -{zh-hans:A; zh-hant:B}-, with optional flags, some of which hide the text. Only the first
# variant is kept.
_HIDDEN, _LANG = r"(?:[HNT][^{}|]*|-)\|[^{}]*", r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*:"
_VARIANTS = re.compile(rf"-\{{(?:{_HIDDEN}|(?:[^{{}}|]*\|)?(?:{_LANG}([^;{{}}]*)[^{{}}]*|([^{{}}]*)))\}}-")
_FILE = re.compile(r"\.(?:jpe?g|png|svg|gif|tiff?|webp|og[agv]|webm|mp3|wav|flac|pdf|djvu)\s*$", re.I)
_DIRECTION_MARKS = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F)))
_LIST_MARK = re.compile(r"^[*#:;]+\s*")
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;:\s]*\)|\s*\[\s*\]")
_SPACE_BEFORE_PUNCTUATION = re.compile(r"[ \t]+([,.;:!?])(?=\s|$)")


class Reader(RecordReader):
    """Articles of MediaWiki's XML dumps, without markup."""

    suffixes = (".xml",)
    text_share = 0.25  # the English Wikipedia of March 2022 has 20 GB of text in 87 GB
    record_start = b"<page>"
    splits_bzip2 = True  # dumps are .bz2 files of many streams

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        """Yield the articles (namespace 0, no redirects) of complete <page> elements, one paragraph per line."""
        data, path = self.records(chunk, problems), chunk.paths[0]
        dropped_prefixes = _dropped_prefixes(path, Path(path).stat().st_mtime_ns)
        for page in _PAGE.finditer(data):
            body = page[1]
            namespace, model, text = _NAMESPACE.search(body), _CONTENT_MODEL.search(body), _TEXT.search(body)
            if b"<redirect " in body or (namespace and namespace[1] != b"0") or (model and model[1] != b"wikitext"):
                continue
            markup = html.unescape(decode(text[1], path, chunk.start, problems)) if text else ""
            if text and not _REDIRECT.match(markup):
                yield plain_text(markup, dropped_prefixes)
        if data.count(b"<page>") > data.count(b"</page>"):
            problems.add(path, "<page> that is not closed")


@functools.lru_cache(maxsize=64)  # `_modified_ns` is only a cache key: a changed file is read again
def _dropped_prefixes(path: str, _modified_ns: int) -> Set[str]:
    """Return the prefixes of links to remove: `_common_prefixes`, corrected by the dump's namespaces and language."""
    with open_text(Path(path)) as file:
        head = file.read(_HEAD_BYTES).partition(b"<page>")[0]
    namespaces = [
        (key in _DROPPED_NAMESPACES, _normalize_name(html.unescape(name.decode("utf-8", "replace"))))
        for key, name in _NAMESPACE_NAME.findall(head)
    ]
    lang = _LANGUAGE.search(head)
    allowed = {name for is_dropped, name in namespaces if not is_dropped}
    allowed |= {lang[1].decode().lower()} if lang else set()
    return (_common_prefixes() - allowed) | {name for is_dropped, name in namespaces if is_dropped}


@functools.cache
def _common_prefixes() -> Set[str]:
    """Return names and aliases of the file, media and category namespaces in all languages, and language codes."""
    lines = Path(__file__).with_name("mediawiki_names.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines if not line.startswith("#") for name in line.split("|"))


def _normalize_name(name: str) -> str:
    """Normalize the name of a namespace for comparison, like MediaWiki."""
    return " ".join(name.translate(_DIRECTION_MARKS).replace("_", " ").split()).casefold()


def plain_text(markup: str, dropped_prefixes: Set[str]) -> str:
    """Return an article's prose: paragraphs and list items, one per line, without links with `dropped_prefixes`."""
    import mwparserfromhell
    from mwparserfromhell.nodes import Heading, Wikilink

    wikicode = mwparserfromhell.parse(_simplify_markup(markup), skip_style_tags=False)
    for node in wikicode.ifilter(recursive=False):
        if isinstance(node, Heading):
            wikicode.replace(node, "\n")
    tags = wikicode.filter_tags()
    for container in (wikicode, *(tag.contents for tag in tags if tag.contents is not None)):
        for link in [node for node in container.nodes if isinstance(node, Wikilink)]:
            _strip_link(container, link, dropped_prefixes)
    for tag in tags:
        if str(tag.tag).lower() in ("br", "hr"):
            _replace(wikicode, tag, "\n")
    text = wikicode.strip_code(normalize=True, collapse=False)
    lines = (_clean_line(line) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _simplify_markup(markup: str) -> str:
    """Remove comments, elements, templates and tables, innermost first, and magic words; keep one language variant."""
    markup = _COMMENT.sub("", markup)
    markup = _EMPTY_ELEMENT.sub("", markup)
    for pattern in (_ELEMENT, _INNER_TEMPLATE, _INNER_TABLE):
        count = 1
        while count:
            markup, count = pattern.subn("", markup)
    return _VARIANTS.sub(r"\1\2", _MAGIC_WORD.sub("", markup))


def _strip_link(wikicode: Wikicode, link: Wikilink, dropped_prefixes: Set[str]) -> None:
    """Remove a link with a dropped prefix (file, category, language); one that starts with a colon becomes its text."""
    if ":" not in (title := str(link.title)):
        return
    title = title.translate(_DIRECTION_MARKS).strip()
    prefix, _, page = title.removeprefix(":").partition(":")
    # Wikis may define more aliases for the file namespace.
    is_dropped = bool(page) and (_normalize_name(prefix) in dropped_prefixes or _FILE.search(page) is not None)
    if not title.startswith(":"):
        if is_dropped:
            _replace(wikicode, link, "")
    elif link.text is None:
        _replace(wikicode, link, page if is_dropped else title[1:])


def _replace(wikicode: Wikicode, node: Tag | Wikilink, text: str) -> None:
    try:
        wikicode.replace(node, text)
    except ValueError:  # an enclosing node has already been removed
        return


def _clean_line(line: str) -> str:
    line = _LIST_MARK.sub("", line.strip())
    line = _EMPTY_BRACKETS.sub("", line.replace("'''", "").replace("''", ""))
    line = _SPACE_BEFORE_PUNCTUATION.sub(r"\1", line)
    return " ".join(line.split()) if any(character.isalnum() for character in line) else ""
