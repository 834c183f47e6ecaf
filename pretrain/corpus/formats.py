"""Which kind of source reads a file that no config describes: by its suffix, or its first bytes."""

from collections.abc import Iterator
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.config import SourceConfig
from pretrain.corpus import json_values, sources
from pretrain.corpus.inputs import Problems, plain_suffix
from pretrain.corpus.listing import files_in, visible
from pretrain.corpus.sources import books, csv, jsonl, mediawiki, parquet
from pretrain.corpus.streams import open_text

PLAIN = books.__name__.rpartition(".")[2]
KINDS = {
    suffix: module.__name__.rpartition(".")[2]
    for module in (books, csv, jsonl, mediawiki, parquet)
    for suffix in module.Reader.suffixes
}
_HEAD = 1_000  # bytes that show the format of a file without a known suffix


def files_below(path: Path, problems: Problems) -> list[Path]:
    """The file `path`, or all files of the folder but for those that are left out, which go to `problems`.

    Raises `InputError` if there is none, or a folder cannot be listed.
    """
    if path.is_dir():
        files = visible(files_in(path), path, problems)
        if not files:
            raise InputError(f"{path}: an empty folder. Give one with text.")
        return files
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder. Give text files, or a folder with them.")
    return [path]


def kind_of(file: Path) -> str:
    """The kind of source that reads a file: by its suffix, or plain text, which WikiExtractor's files resemble."""
    kind = KINDS.get(plain_suffix(file), PLAIN)
    if kind != PLAIN:
        return kind
    try:
        with open_text(file) as stream:
            if stream.read(_HEAD).lstrip().startswith(b"<doc "):
                return "wikiextractor"
        return "jsonl" if json_values.begins_with_object(file) else kind
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}). Check the file and its permissions.") from None


def documents_of(file: Path, problems: Problems) -> Iterator[str]:
    """The documents of a file in order, paragraphs as lines. Its faults go to `problems`.

    Raises `InputError` if the file cannot be read, or lacks the column `text`.
    """
    config = SourceConfig(kind=kind_of(file), path=str(file))
    for number, item in enumerate(sources.find_inputs(config, "text")):
        for chunk in sources.cut(config, 0, number, item):
            yield from sources.documents(chunk, problems)


def pieces_of(text: str, least: int) -> Iterator[str]:
    """Successive lines of a document with `least` characters or more; the last piece may have fewer."""
    lines: list[str] = []
    size = 0
    for line in text.split("\n"):
        lines.append(line)
        size += len(line)
        if size >= least:
            yield "\n".join(lines)
            lines, size = [], 0
    if any(lines):
        yield "\n".join(lines)
