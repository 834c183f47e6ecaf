"""Plain-text books, one document a file. Project Gutenberg's header and licence, hard line ends, headings and
pictures are removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from pretrain.corpus import inputs
from pretrain.corpus.inputs import Input, Piece, Problems, SourceReader

_START = re.compile(r"^\s*\*{3}\s*START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*{3}[^\n]*$", re.M | re.I | re.S)
_OLD_START = re.compile(r"^\*END\*? ?THE SMALL PRINT![^\n]*$", re.M | re.I)  # before about 2003
_END = re.compile(
    r"^\s*(?:\*{3}\s*END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)[^\n]*",
    re.M | re.I,
)
_CREDITS = re.compile(r"(?:Produced by|E-text prepared by|Transcribed (?:by|from))\b", re.I)
_ENCODING = re.compile(rb"Character set encoding:\s*([\w-]+)", re.I)
_BRACKETED = re.compile(r"\[(?:Illustration|Frontispiece|Transcriber|Footnote\b)[^\]]*\]", re.I)
_UNDERSCORED = re.compile(r"(?<!\w)_([^_]+)_(?!\w)")  # _emphasis_
_NUMBER = (
    r"(?:[IVXLCDM]+|\d+|the (?:first|last|second)|one|two|three|four|five|six|seven|eight|nine|ten|"
    r"(?:eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|first|"
    r"second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)(?:-\w+)?)"
)
_HEADING = re.compile(
    rf"(?:(?:chapter|book|part|volume|vol\.?|act|scene|canto|letter|stave|section|episode)\b\s*{_NUMBER}\b.{{0,80}}"
    r"|(?:contents|preface|prologue|epilogue|introduction|appendix|footnotes?|notes|the end|finis)\.?"
    r"|[IVXLCDM]+\.?|\d+\.?)",
    re.I,
)
_TITLE_WORDS = 12


class Reader(SourceReader):
    """Plain text files, one document each, without the frame of Project Gutenberg."""

    suffixes = (".txt",)

    def find(self, where: str) -> list[Input]:
        return inputs.grouped(self.find_files(where), where)

    def read(self, piece: Piece, problems: Problems) -> Iterator[str]:
        for path in piece.paths:
            try:
                with inputs.open_file(Path(path)) as file:
                    raw = cast(bytes, file.read())
            except inputs.BROKEN as error:
                problems.add(path, f"broken file: {inputs.one_line(error)}")
                continue
            if not raw.strip():
                problems.add(path, "empty file")
                continue
            yield paragraphs(raw.decode("latin-1") if is_latin1(raw) else inputs.decode(raw, path, 0, problems))


def is_latin1(raw: bytes) -> bool:
    """Whether a Gutenberg header declares ISO 8859-1, as those before about 2010 do."""
    declared = _ENCODING.search(raw, 0, 20_000)
    return declared is not None and declared[1].lower() in (b"iso-8859-1", b"iso-latin-1", b"latin-1", b"latin1")


def paragraphs(text: str) -> str:
    """The book's paragraphs, one per line, without boilerplate, headings, ornaments and emphasis marks."""
    text = _body(text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _BRACKETED.sub("", text)
    kept = []
    after_heading = True
    for block in re.split(r"\n[ \t]*\n", text):
        paragraph = " ".join(block.split())
        if not any(character.isalpha() for character in paragraph):
            continue  # page numbers, rows of asterisks
        if _is_heading(paragraph, after_heading):
            after_heading = True
            continue
        after_heading = False
        kept.append(_UNDERSCORED.sub(r"\1", paragraph))
    return "\n".join(kept)


def _body(text: str) -> str:
    """The text between Project Gutenberg's header and its licence."""
    start = _START.search(text) or _OLD_START.search(text)
    if start:
        text = text[start.end() :].lstrip()
        if _CREDITS.match(text):
            text = text.partition("\n\n")[2]
    end = _END.search(text)
    return text[: end.start()] if end else text


def _is_heading(paragraph: str, after_heading: bool) -> bool:
    """Chapter numbers, titles in capitals, and a short line without a full stop right below one of those."""
    if _HEADING.fullmatch(paragraph):
        return True
    short = len(paragraph.split()) <= _TITLE_WORDS
    ended = paragraph.rstrip("\"'”’)_").endswith((".", "!", "?", ":", ";", ","))
    if short and paragraph.isupper():
        return not ended or after_heading
    return short and after_heading and not ended
