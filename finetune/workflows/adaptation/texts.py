"""Makes `corpus.sources` for `adapt`: detects file formats, and cuts plain text into documents to hold some out."""

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
from pretrain.corpus.inputs import SKIP_COUNTERS, Problems, first_faults
from pretrain.corpus.sources import books

_MIN_FILES = 100  # if there are fewer plain-text files, they are cut, so that a small share of the text can be held out
_DOCUMENT_CHARACTERS = 8_000  # approximate length of a document cut from plain text; less if the text is short
_NUM_DOCUMENTS = 20  # approximate number of documents cut from a short text
_MIN_DOCUMENTS = 3  # minimum number of documents: two are held out, and one is trained on
_HELD_OUT_BYTES = 300_000  # size of the text to hold out, enough for the sequences of an evaluation
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_MIN_SHARE, _MAX_SHARE = 0.005, 0.1  # limits of the share of the text to hold out


def find_sources(paths: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Return `corpus.sources` for files and folders. If plain-text files are cut, their documents are written to `out`.

    Raises:
        InputError: a path does not exist, there is too little text, or a folder has files of several formats.
    """
    sources: list[dict[str, Any]] = []
    plain_files: list[Path] = []
    for path in paths:
        files = files_below(path, problems := Problems())
        if problems.entries():
            print(f"  warning: {first_faults(problems.entries())}.")
        kinds = {kind_of(file) for file in files}
        if len(kinds) > 1:
            raise InputError(f"{path}: has files of several formats: {', '.join(sorted(kinds))}. Pass them one by one.")
        if kinds == {PLAIN} and len(files) < _MIN_FILES:
            plain_files += files
        else:
            sources.append({"kind": kinds.pop(), "name": path.stem, "path": str(path)})
    if plain_files:
        num_documents = _write_documents(plain_files, out)
        if num_documents < _MIN_DOCUMENTS and not sources:
            raise InputError(
                f"{_first_names(plain_files)}: {counted(num_documents, 'document')}; at least {_MIN_DOCUMENTS} are "
                "needed, as 2 are held out. Add text, or separate paragraphs by blank lines: documents are cut there."
            )
        name = plain_files[0].stem if len(plain_files) == 1 else "texts"
        sources.append({"kind": "jsonl", "name": name, "path": str(out)})
    return sources


def held_out_share(num_bytes: int) -> float:
    """Return the share to hold out from `num_bytes` of text."""
    return min(max(_HELD_OUT_BYTES / max(num_bytes, 1), _MIN_SHARE), _MAX_SHARE)


def _write_documents(files: Sequence[Path], out: Path) -> int:
    """Cut `files` at paragraphs into documents, write them to the JSONL file `out`, and return their number.

    If `out` has this content already, it is not rewritten: a prepared corpus checks the file's modification time.
    Raises `InputError` if there is no text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    min_characters = max(1, min(_DOCUMENT_CHARACTERS, sum(file.stat().st_size for file in files) // _NUM_DOCUMENTS))
    count = 0
    problems = Problems()
    temporary = out.with_name(f".{out.name}.new")
    with atomic_open(temporary, "w") as output:
        for file in files:
            for document in passages_of(_paragraphs(books.read_text(file, problems), problems), min_characters):
                output.write(json.dumps({"text": document}) + "\n")
                count += 1
        if not count:
            faults = [fault for fault in problems.entries() if fault["fault"] != "empty file"]
            raise InputError(f"{_first_names(files)}: no text. {first_faults(faults)}".strip())
    _print_skipped(files, problems)
    if out.is_file() and sha256_file(out) == sha256_file(temporary):
        temporary.unlink()
    else:
        temporary.replace(out)
    return count


def _first_names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3]))


def _print_skipped(files: Sequence[Path], problems: Problems) -> None:
    """Print warnings about unreadable parts, and about text skipped as headings if it is a large share."""
    if problems.entries():
        print(f"  warning: {first_faults(problems.entries())}.")
    paragraphs, skipped, total = (problems.skip_counts[key] for key in SKIP_COUNTERS)  # the last two: characters
    if skipped > MAX_LEFT_OUT * total:
        print(
            f"  warning: {_first_names(files)}: {skipped / total:.1%} of the text was left out as headings "
            f"({counted(paragraphs, 'paragraph')}). If they are body text, convert it to JSONL."
        )


def _paragraphs(text: str, problems: Problems) -> str:
    """Return the paragraphs of `text`, one per line; if it has few blank lines, each of its lines is a paragraph."""
    text = text.replace("\r\n", "\n").strip()
    if "\n" in text and len(text) <= _DOCUMENT_CHARACTERS * len(_BLANK_LINE.split(text)):
        return books.paragraphs(text, problems)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())
