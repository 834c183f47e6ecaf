"""Find the kind of source that fits a file, by its suffix or its first bytes."""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.common.wording import counted
from pretrain.config import SourceConfig
from pretrain.corpus import json_values, sources
from pretrain.corpus.inputs import Input, Problems, plain_suffix
from pretrain.corpus.listing import files_in, visible_files
from pretrain.corpus.sources import books, csv, jsonl, mediawiki, parquet
from pretrain.corpus.sources.books import ends_in_punctuation
from pretrain.corpus.streams import open_text

PLAIN = books.__name__.rpartition(".")[2]  # kind for plain text
_KIND_BY_SUFFIX = {
    suffix: module.__name__.rpartition(".")[2]
    for module in (books, csv, jsonl, mediawiki, parquet)
    for suffix in module.Reader.suffixes
}
_MIN_FILES = 3  # minimum files that leave training text if each is a document, since two are held out
_MIN_DOCUMENTS = 10  # minimum documents into which another kind must split a file, for a warning
_LARGE_BYTES = 100_000  # minimum file size for a warning
_MIN_MEAN_BYTES = 10 << 20  # minimum mean file size for a warning if there are at least _MIN_FILES files
_BLANK_LINES = re.compile(r"\n[ \t]*\n")
_HEAD_BYTES = 1_000  # bytes to examine in a file without a known suffix


def files_below(path: Path, problems: Problems) -> list[Path]:
    """Return `path` if it is a file, or the files to read if it is a folder; skipped files are added to `problems`.

    Raises `InputError` if there are none, or a folder cannot be listed.
    """
    if path.is_dir():
        files = visible_files(files_in(path), path, problems.add)
        if not files:
            raise InputError(f"{path}: an empty folder. Use one with text files.")
        return files
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder. Use text files, or a folder of them.")
    return [path]


def kind_of(file: Path) -> str:
    """Return the kind of source for a file, by its suffix or, if that is missing or unknown, by its first bytes."""
    kind = _KIND_BY_SUFFIX.get(plain_suffix(file), PLAIN)
    if kind != PLAIN:
        return kind
    try:
        with open_text(file) as stream:
            if stream.read(_HEAD_BYTES).lstrip().startswith(b"<doc "):
                return "wikiextractor"
        return "jsonl" if json_values.starts_with_object(file) else kind
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}). Check the file and its permissions.") from None


def kind_warnings(
    sources: Mapping[int, SourceConfig], inputs: Mapping[int, list[Input]], validation_fraction: float
) -> tuple[list[str], bool]:
    """Return warnings about plain-text sources that fit another kind, and whether they concern all training text."""
    paths = {index: [Path(path) for item in inputs[index] for path in item.paths] for index in sources}
    has_few_files = validation_fraction > 0 and sum(map(len, paths.values())) < _MIN_FILES
    has_few_files &= not any(source.held_out for source in sources.values())
    min_bytes = 0 if has_few_files else _LARGE_BYTES
    found = {index: _kind_warning(source.kind, paths[index], min_bytes) for index, source in sources.items()}
    warnings = [f"corpus.sources.{index}.kind: {warning}" for index, warning in found.items() if warning]
    return warnings, has_few_files and len(warnings) == len(sources)


def _kind_warning(kind: str, paths: list[Path], min_bytes: int) -> str:
    """Return a warning if the files fit another kind than `kind`; "" if they do not, or if a file is not local."""
    if kind not in ("books", "files", "sentences") or not all(path.is_file() for path in paths):
        return ""
    sizes = [path.stat().st_size for path in paths]
    path = paths[sizes.index(max(sizes))]
    if max(sizes) < min_bytes or (len(paths) >= _MIN_FILES and sum(sizes) < _MIN_MEAN_BYTES * len(paths)):
        return ""
    with open_text(path) as stream:
        text = stream.read(1 << 20).decode("utf-8", "ignore").replace("\r\n", "\n")
    blocks = [block.strip().split("\n") for block in _BLANK_LINES.split(text) if block.strip()]
    line_count = sum(map(len, blocks))
    if line_count < _MIN_DOCUMENTS or _is_wrapped(blocks) or (kind == "sentences" and len(blocks) > 1):
        return ""
    if len(blocks) >= _MIN_DOCUMENTS and (line_count <= 100 * len(blocks) or len(text) < 200 * line_count):
        layout, advice = f"{counted(len(blocks), 'block')} of lines between blank lines", "sentences, which reads each"
    else:
        layout, advice = f"{counted(line_count, 'line')} and hardly a blank one", "lines, which reads each line"
    return f"{kind} makes one document of {path}. Its first megabyte has {layout}: set kind: {advice} as a document."


def _is_wrapped(blocks: list[list[str]]) -> bool:
    """Return whether lines are wrapped at a page width, as in books: the first word of the next line would not fit."""
    widths = sorted(len(line) for block in blocks for line in block)
    pairs = [pair for block in blocks for pair in itertools.pairwise(block)]
    width = widths[int(0.95 * len(widths))]
    wrapped = [
        line
        for line, following in pairs
        if " " in line and not ends_in_punctuation(line.rstrip()) and not following.lstrip()[:1].isupper()
        if len(line) + len(following.partition(" ")[0]) >= width
    ]
    return width <= 100 and 2 * len(wrapped) > len(pairs) > len(widths) / 4


def documents_of(file: Path, problems: Problems) -> Iterator[str]:
    """Yield the documents of a file in order; each line is a paragraph. Faults are added to `problems`.

    Raises `InputError` if the file cannot be read, or lacks the column `text`.
    """
    config = SourceConfig(kind=kind_of(file), path=str(file))
    for index, item in enumerate(sources.find_inputs(config, "text")):
        for chunk in sources.cut(config, 0, index, item):
            yield from sources.documents(chunk, problems)


def passages_of(text: str, min_characters: int) -> Iterator[str]:
    """Split a document at line breaks into passages of at least `min_characters`; the last one may be shorter."""
    lines: list[str] = []
    size = 0
    for line in text.split("\n"):
        lines.append(line)
        size += len(line)
        if size >= min_characters:
            yield "\n".join(lines)
            lines, size = [], 0
    if any(lines):
        yield "\n".join(lines)
