"""Plain-text books, one document per file. The lines of a paragraph are joined; headings, captions of pictures, and
Project Gutenberg's header and license are removed."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import regex

from pretrain.corpus import inputs
from pretrain.corpus.inputs import Chunk, Input, Problems, SourceReader
from pretrain.corpus.streams import open_text
from pretrain.corpus.word_counts import count_words

_START = re.compile(r"^\s*\*{3}\s*START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*{3}[^\n]*$", re.M | re.I | re.S)
_OLD_START = re.compile(r"^\*END\*? ?THE SMALL PRINT![^\n]*$", re.M | re.I)  # last line of headers until about 2003
_END = re.compile(
    r"^\s*(?:\*{3}\s*END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)[^\n]*", re.M | re.I
)
_CREDITS = re.compile(r"(?:Produced by|E-text prepared by|Transcribed (?:by|from))\b", re.I)
_ENCODING = re.compile(rb"Character set encoding:\s*([\w-]+)", re.I)
_BRACKETED = re.compile(r"\[(?:Illustration|Frontispiece|Transcriber|Footnote\b)[^\]]*\]", re.I)
_UNDERSCORED = re.compile(r"(?<!\w)_([^_]+)_(?!\w)")  # _emphasis_
_NUMERAL = (
    r"(?:[IVXLCDM]+|\d+|the (?:first|last|second)|one|two|three|four|five|six|seven|eight|nine|ten|"
    r"(?:eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|first|"
    r"second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)(?:-\w+)?)"
)
_HEADING = re.compile(
    rf"(?:(?:chapter|book|part|volume|vol\.?|act|scene|canto|letter|stave|section|episode)\b\s*{_NUMERAL}\b.{{0,80}}"
    r"|(?:contents|preface|prologue|epilogue|introduction|appendix|footnotes?|notes|the end|finis)\.?"
    r"|[IVXLCDM]+\.?|\d+\.?)",
    re.I,
)
_MAX_TITLE_WORDS = 12
_FINAL_PUNCTUATION = regex.compile(r"[\p{Terminal_Punctuation}…‥]")  # full stops, commas etc.


class Reader(SourceReader):
    """Plain-text books, one document each."""

    suffixes = (".txt",)

    def find(self, config_key: str) -> list[Input]:
        return inputs.grouped(self.find_files(config_key), config_key)

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        for path in chunk.paths:
            if text := read_text(Path(path), problems):
                yield paragraphs(text, problems)


def read_text(path: Path, problems: Problems) -> str:
    """Return the text of a file up to the first damage; damaged and empty files are added to `problems`."""
    try:
        with open_text(path) as stream:
            raw = stream.read()
            fault = stream.fault
    except OSError as error:
        raw, fault = b"", inputs.one_line(error)
    if fault:
        problems.add(str(path), f"broken file: {fault}")
    if not raw.strip():
        if not fault:
            problems.add(str(path), "empty file")
        return ""
    return raw.decode("latin-1") if declares_latin1(raw) else inputs.decode(raw, str(path), 0, problems)


def declares_latin1(raw: bytes) -> bool:
    """Return whether a Project Gutenberg header declares ISO 8859-1, which was common before about 2010."""
    declared = _ENCODING.search(raw, 0, 20_000)
    return declared is not None and declared[1].lower() in (b"iso-8859-1", b"iso-latin-1", b"latin-1", b"latin1")


def paragraphs(text: str, problems: Problems) -> str:
    """Return the book's paragraphs, one per line, without boilerplate, headings, ornaments and emphasis marks.

    Removed headings and ornaments are counted in `problems`.
    """
    text, has_header = _strip_boilerplate(text.replace("\r\n", "\n").replace("\r", "\n"))
    problems.skip_counts["read_characters"] += len(text)  # so that the share of skipped characters can be reported
    text = _BRACKETED.sub("", text)
    kept_paragraphs = []
    # Without Gutenberg's header, the first short paragraph may be text, such as a line of a chat.
    may_be_title = has_header
    for block in re.split(r"\n[ \t]*\n", text):
        paragraph = " ".join(block.split())
        if not paragraph:
            continue
        if not any(character.isalpha() for character in paragraph):  # page numbers, rows of asterisks
            problems.count_skipped(paragraph)
            continue
        is_heading = _is_heading(paragraph)
        if is_heading or (may_be_title and _is_title(paragraph)):
            problems.count_skipped(paragraph)
            # Only one title follows a heading; further short paragraphs are text.
            may_be_title = is_heading
            continue
        may_be_title = False
        kept_paragraphs.append(_UNDERSCORED.sub(r"\1", paragraph))
    return "\n".join(kept_paragraphs)


def _strip_boilerplate(text: str) -> tuple[str, bool]:
    """Return the text between Project Gutenberg's header and license, and whether there is a header."""
    start = _START.search(text) or _OLD_START.search(text)
    if start:
        text = text[start.end() :].lstrip()
        if _CREDITS.match(text):
            text = text.partition("\n\n")[2]
    end = _END.search(text)
    return text[: end.start()] if end else text, start is not None


def _is_heading(paragraph: str) -> bool:
    """Return whether a paragraph is a chapter number or, in scripts with capitals, a title in capitals."""
    if _HEADING.fullmatch(paragraph):
        return True
    return _is_upper(paragraph) and not ends_in_punctuation(paragraph) and count_words(paragraph) <= _MAX_TITLE_WORDS


def _is_title(paragraph: str) -> bool:
    """Return whether a paragraph is short, and is in capitals or does not end in punctuation."""
    return (_is_upper(paragraph) or not ends_in_punctuation(paragraph)) and count_words(paragraph) <= _MAX_TITLE_WORDS


def _is_upper(paragraph: str) -> bool:
    return paragraph.isupper() and all(map(str.isupper, filter(str.isalpha, paragraph)))


def ends_in_punctuation(paragraph: str) -> bool:
    """Return whether a paragraph ends in punctuation of any script, such as "。" or "।", ignoring closing quotes."""
    end = len(paragraph)
    while end and (paragraph[end - 1] in "\"'_" or unicodedata.category(paragraph[end - 1]) in ("Pe", "Pf", "Pi")):
        end -= 1
    return _FINAL_PUNCTUATION.fullmatch(paragraph, max(0, end - 1), end) is not None
