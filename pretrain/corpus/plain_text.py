"""How a file of plain text that its kind takes for one document is divided, by its first megabyte."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pretrain.common.wording import counted
from pretrain.config import SourceConfig
from pretrain.corpus.inputs import Input
from pretrain.corpus.sources.books import is_ended
from pretrain.corpus.streams import open_text

_FEWEST_FILES = 3  # of one document each: two are held out
_FEWEST_DOCUMENTS = 10  # that another kind makes
_SAMPLE_BYTES = 1 << 20
_LARGE_BYTES = 100_000  # of a file about which something is said
_NO_BOOK_BYTES = 10 << 20  # of files that are said something about although they are many
_MOST_SENTENCES = 100  # of a document in the mean, unless its lines are as short as sentences
_LONG_SENTENCE = 200  # characters
_WRAPPED = 100  # characters of lines that end where the page does
_BLANK_LINES = re.compile(r"\n[ \t]*\n")


def kinds_that_fit(
    sources: Mapping[int, SourceConfig], inputs: Mapping[int, list[Input]], held_out_share: float
) -> tuple[list[str], bool]:
    """Lines on the sources of plain text that another kind fits, and whether no other text is there to train on."""
    paths = {number: [Path(path) for item in inputs[number] for path in item.paths] for number in sources}
    are_few = held_out_share > 0 and sum(map(len, paths.values())) < _FEWEST_FILES
    are_few &= not any(source.held_out for source in sources.values())
    lines = []
    for number, source in sources.items():
        if fault := _fault(source.kind, paths[number], 0 if are_few else _LARGE_BYTES):
            lines.append(f"corpus.sources.{number}.kind: {fault}")
    return lines, are_few and len(lines) == len(sources)


def _fault(kind: str, paths: list[Path], least_bytes: int) -> str:
    """What a kind would do to files that another one fits; "" if it fits them, and of files that are not here."""
    if kind not in ("books", "files", "sentences") or not all(path.is_file() for path in paths):
        return ""
    sizes = {path.stat().st_size: path for path in paths}
    size, path = max(sizes.items())
    if size < least_bytes or (len(paths) >= _FEWEST_FILES and sum(sizes) < _NO_BOOK_BYTES * len(paths)):
        return ""
    with open_text(path) as stream:
        text = stream.read(_SAMPLE_BYTES).decode("utf-8", "ignore").replace("\r\n", "\n")
    blocks = [block.strip().split("\n") for block in _BLANK_LINES.split(text) if block.strip()]
    lines = sum(map(len, blocks))
    if lines < _FEWEST_DOCUMENTS or _is_wrapped(blocks) or (kind == "sentences" and len(blocks) > 1):
        return ""
    are_sentences = lines <= _MOST_SENTENCES * len(blocks) or len(text) < _LONG_SENTENCE * lines
    if len(blocks) >= _FEWEST_DOCUMENTS and are_sentences:
        found, fits = f"{counted(len(blocks), 'block')} of lines between blank lines", "sentences, which reads each"
    else:
        found, fits = f"{counted(lines, 'line')} and hardly a blank one", "lines, which reads each line"
    return f"{kind} makes one document of {path}. Its first megabyte has {found}: set kind: {fits} as a document."


def _is_wrapped(blocks: list[list[str]]) -> bool:
    """Whether lines end in the middle of sentences, where the page ends, as those of a book do."""
    widths = sorted(len(line) for block in blocks for line in block)
    width, inner = widths[int(0.95 * len(widths))], [line for block in blocks for line in block[:-1]]
    cut = [line for line in inner if len(line) > 0.6 * width and " " in line.strip() and not is_ended(line.rstrip())]
    return width <= _WRAPPED and 2 * len(cut) > len(inner) > len(widths) / 4
