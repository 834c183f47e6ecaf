"""MediaWiki XML dumps to articles in plain text. `mwparserfromhell` reads the markup.

Templates, tables, references and comments, about half of an article and two thirds of the parser's time, are cut out
beforehand by patterns that only ever remove balanced, innermost pairs.
"""

import html
import re
from collections.abc import Iterator

import mwparserfromhell
from mwparserfromhell.nodes import Heading, Tag, Wikilink

from pretrain.corpus.inputs import Chunk, Problems, decode
from pretrain.corpus.records import RecordReader

_PAGE = re.compile(rb"<page>(.*?)</page>", re.S)
_NAMESPACE = re.compile(rb"<ns>(-?\d+)</ns>")
_MODEL = re.compile(rb"<model>([^<]*)</model>")
_TEXT = re.compile(rb"<text\b[^>]*?(?<!/)>(.*?)</text>", re.S)

_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNER_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.S)
_ELEMENTS = "ref|math|gallery|timeline|score|chem|code|source|syntaxhighlight|imagemap|table|graph|hiero|poem|pre"
_EMPTY_ELEMENT = re.compile(rf"<(?:{_ELEMENTS}|references)\b[^<>]*/>", re.I)
_ELEMENT = re.compile(rf"<({_ELEMENTS}|references)\b[^<>]*>(?:(?!<\1\b).)*?</\1\s*>", re.S | re.I)
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_LINK_TARGET = re.compile(r"\s*:?\s*([\w -]+?)\s*:", re.UNICODE)
# Links into these namespaces are pictures or sorting, not text.
_NON_TEXT_NAMESPACES = frozenset(
    {
        "file",
        "image",
        "category",
        "media",
        "datei",
        "bild",
        "kategorie",
        "fichier",
        "catégorie",
        "archivo",
        "categoría",
        "immagine",
        "categoria",
        "plik",
        "файл",
        "категория",
        "ファイル",
        "文件",
        "分类",
    }
)
_LIST_MARK = re.compile(r"^[*#:;]+\s*")
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;:\s]*\)|\s*\[\s*\]")
_SPACE_BEFORE_MARK = re.compile(r"[ \t]+([,.;:!?])(?=\s|$)")


class Reader(RecordReader):
    """Articles of MediaWiki's XML dumps, without markup."""

    suffixes = (".xml",)
    text_share = 0.25  # 20 GB of text in the 87 GB of the English Wikipedia of March 2022
    record_start = b"<page>"
    cuts_bzip2 = True

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        """The articles (namespace 0, no redirects) of whole <page> elements, one paragraph per line."""
        data, path = self.records(chunk, problems), chunk.paths[0]
        for page in _PAGE.finditer(data):
            body = page[1]
            namespace, model, text = _NAMESPACE.search(body), _MODEL.search(body), _TEXT.search(body)
            if b"<redirect " in body or (namespace and namespace[1] != b"0") or (model and model[1] != b"wikitext"):
                continue
            if text:
                yield plain_text(html.unescape(decode(text[1], path, chunk.start, problems)))
        if data.count(b"<page>") > data.count(b"</page>"):
            problems.add(path, "<page> that is not closed")


def plain_text(markup: str) -> str:
    """The running text of an article's markup: paragraphs and list items, one per line."""
    code = mwparserfromhell.parse(_without_blocks(markup), skip_style_tags=False)
    for node in code.ifilter(recursive=False):
        if isinstance(node, Heading):
            code.replace(node, "\n")
    _strip_links(code)
    for tag in code.ifilter_tags():
        if str(tag.tag).lower() in ("br", "hr"):
            _replace(code, tag, "\n")
    text = code.strip_code(normalize=True, collapse=False)
    lines = (_clean_line(line) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _without_blocks(markup: str) -> str:
    """Cut out comments, references, templates and tables, from the innermost outwards."""
    markup = _COMMENT.sub("", markup)
    markup = _EMPTY_ELEMENT.sub("", markup)
    for pattern in (_ELEMENT, _INNER_TEMPLATE, _INNER_TABLE):
        count = 1
        while count:
            markup, count = pattern.subn("", markup)
    return _MAGIC_WORD.sub("", markup)


def _strip_links(code: mwparserfromhell.wikicode.Wikicode) -> None:
    """Remove picture and category links; others become their label."""
    for link in code.ifilter_wikilinks(recursive=False):
        namespace = _LINK_TARGET.match(str(link.title))
        if namespace and not str(link.title).lstrip().startswith(":"):
            name = namespace[1].strip().lower()
            # A picture has options; a link to another language's article (de:Foo) has no label.
            if name in _NON_TEXT_NAMESPACES or (link.text is None and len(name) <= 3):
                _replace(code, link, "")


def _replace(code: mwparserfromhell.wikicode.Wikicode, node: Tag | Wikilink, text: str) -> None:
    try:
        code.replace(node, text)
    except ValueError:  # it was inside something that has been removed
        return


def _clean_line(line: str) -> str:
    line = _LIST_MARK.sub("", line.strip())
    line = _EMPTY_BRACKETS.sub("", line.replace("'''", "").replace("''", ""))
    line = _SPACE_BEFORE_MARK.sub(r"\1", line)
    return " ".join(line.split()) if any(character.isalnum() for character in line) else ""
