"""Finds the sources of an adaptation: detects each file's kind, and cuts plain text so that a part can be held out."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, sha256_file
from pretrain.common.wording import counted
from pretrain.corpus.card import MAX_LEFT_OUT
from pretrain.corpus.formats import PLAIN, files_below, kind_of, passages_of
from pretrain.corpus.inputs import LEFT_OUT, Problems, first_faults
from pretrain.corpus.sources import books

_MIN_FILES = 100  # fewer files are cut into documents, which are held out by a hash of each document
_MAX_CHARACTERS = 8_000  # per document cut from plain text; fewer if the text is short, to get about _NUM_DOCUMENTS
_NUM_DOCUMENTS = 20
_MIN_DOCUMENTS = 3  # since at least two are held out
_HELD_OUT_BYTES = 300_000  # enough for the held-out sequences of an evaluation
_BLANK = re.compile(r"\n[ \t]*\n")
_SHARES = (0.005, 0.1)  # minimum and maximum held-out share


def find_sources(texts: Sequence[Path], pieces: Path) -> list[dict[str, Any]]:
    """Return `corpus.sources` for files and folders. A few plain-text files are cut into documents, in `pieces`.

    Raises:
        InputError: a path does not exist, there is too little text, or a folder has files of several formats.
    """
    sources: list[dict[str, Any]] = []
    plain: list[Path] = []
    for path in texts:
        files = files_below(path, problems := Problems())
        if problems.entries():
            print(f"  warning: {first_faults(problems.entries())}.")
        kinds = {kind_of(file) for file in files}
        if len(kinds) > 1:
            raise InputError(f"{path}: has files of several formats: {', '.join(sorted(kinds))}. Give them one by one.")
        if kinds == {PLAIN} and len(files) < _MIN_FILES:
            plain += files
        else:
            sources.append({"kind": kinds.pop(), "name": path.stem, "path": str(path)})
    if plain:
        count = _write_documents(plain, pieces)
        if count < _MIN_DOCUMENTS and not sources:
            raise InputError(
                f"{_join_names(plain)}: {counted(count, 'paragraph')}; at least {_MIN_DOCUMENTS} are needed, as 2 are "
                "held out. Give more text, or put blank lines between its paragraphs."
            )
        sources.append({"kind": "jsonl", "name": plain[0].stem if len(plain) == 1 else "texts", "path": str(pieces)})
    return sources


def held_out_share(size: int) -> float:
    """Return the share to hold out from `size` bytes of text."""
    return min(max(_HELD_OUT_BYTES / max(size, 1), _SHARES[0]), _SHARES[1])


def _write_documents(files: Sequence[Path], out: Path) -> int:
    """Write the paragraphs of `files` as documents of about `_MAX_CHARACTERS`, or fewer if the text is short.

    An output with the same content is not touched: a prepared corpus compares its modification time. Returns the
    number of documents. `InputError` if there is no text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    min_characters = max(1, min(_MAX_CHARACTERS, sum(file.stat().st_size for file in files) // _NUM_DOCUMENTS))
    count = 0
    problems = Problems()
    temporary = out.with_name(f".{out.name}.new")
    with atomic_open(temporary, "w") as written:
        for file in files:
            for document in passages_of(_paragraphs(books.read_text(file, problems), problems), min_characters):
                written.write(json.dumps({"text": document}) + "\n")
                count += 1
        if not count:
            faults = [fault for fault in problems.entries() if fault["fault"] != "empty file"]
            raise InputError(f"{_join_names(files)}: no text. {first_faults(faults)}".strip())
    _print_skipped(files, problems)
    if out.is_file() and sha256_file(out) == sha256_file(temporary):
        temporary.unlink()
    else:
        temporary.replace(out)
    return count


def _join_names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3]))


def _print_skipped(files: Sequence[Path], problems: Problems) -> None:
    """Print warnings about unreadable parts, and about text skipped as headings if it is a large share."""
    if problems.entries():
        print(f"  warning: {first_faults(problems.entries())}.")
    paragraphs, characters, total = (problems.left_out[key] for key in LEFT_OUT)
    if characters > MAX_LEFT_OUT * total:
        print(
            f"  warning: {_join_names(files)}: {characters / total:.1%} of the text was left out as headings "
            f"({counted(paragraphs, 'paragraph')}). If they are text, give it as JSONL."
        )


def _paragraphs(text: str, problems: Problems) -> str:
    """Return the paragraphs of a book, one per line; if there are hardly any blank lines, the lines of the file."""
    text = text.replace("\r\n", "\n").strip()
    if "\n" in text and len(text) <= _MAX_CHARACTERS * len(_BLANK.split(text)):
        return books.paragraphs(text, problems)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())
