"""The sources of an adaptation: the kind of each file, and plain text in pieces of which some can be held out."""

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

_FEW = 100  # documents; with fewer, too few might be held out, which a hash decides
_PIECE = 8_000  # characters of a piece of plain text, and fewer of a short one, so that it has about as many as this
_PIECES = 20
_FEWEST = 3  # documents that can be split: two are held out at least
_HELD_OUT_BYTES = 300_000  # enough for the held-out sequences of an evaluation
_BLANK = re.compile(r"\n[ \t]*\n")
_SHARES = (0.005, 0.1)  # least and largest held-out share


def sources_of(texts: Sequence[Path], pieces: Path) -> list[dict[str, Any]]:
    """The `corpus.sources` of files and folders. A few files of plain text are cut into documents in `pieces`.

    Raises:
        InputError: a path does not exist, or there is too little text, or a folder has files of several formats.
    """
    sources: list[dict[str, Any]] = []
    plain: list[Path] = []
    for path in texts:
        files = files_below(path, problems := Problems())
        if problems.entries():
            print(f"  warning: {first_faults(problems.entries())}.")
        kinds = {kind_of(file) for file in files}
        if len(kinds) > 1:
            raise InputError(
                f"{path}: holds files of several formats: {', '.join(sorted(kinds))}. Give them one by one."
            )
        if kinds == {PLAIN} and len(files) < _FEW:
            plain += files
        else:
            sources.append({"kind": kinds.pop(), "name": path.stem, "path": str(path)})
    if plain:
        count = _write_pieces(plain, pieces)
        if count < _FEWEST and not sources:
            raise InputError(
                f"{_named(plain)}: {counted(count, 'paragraph')}; at least {_FEWEST} are needed, since 2 are held out. "
                "Give more text, or put blank lines between its paragraphs."
            )
        sources.append({"kind": "jsonl", "name": plain[0].stem if len(plain) == 1 else "texts", "path": str(pieces)})
    return sources


def held_out_share(size: int) -> float:
    """The share to hold out of text of `size` bytes."""
    return min(max(_HELD_OUT_BYTES / max(size, 1), _SHARES[0]), _SHARES[1])


def _write_pieces(files: Sequence[Path], out: Path) -> int:
    """Write the paragraphs of `files` as documents of about `_PIECE` characters, of fewer if the text is short.

    A file that holds them already is left as it is: a prepared corpus knows it by its time. Returns the number of
    documents. `InputError` if there is no text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    least = max(1, min(_PIECE, sum(file.stat().st_size for file in files) // _PIECES))
    count = 0
    problems = Problems()
    aside = out.with_name(f".{out.name}.new")
    with atomic_open(aside, "w") as written:
        for file in files:
            for piece in passages_of(_paragraphs(books.read_text(file, problems), problems), least):
                written.write(json.dumps({"text": piece}) + "\n")
                count += 1
        if not count:
            faults = [fault for fault in problems.entries() if fault["fault"] != "empty file"]
            raise InputError(f"{_named(files)}: no text. {first_faults(faults)}".strip())
    _print_losses(files, problems)
    if out.is_file() and sha256_file(out) == sha256_file(aside):
        aside.unlink()
    else:
        aside.replace(out)
    return count


def _named(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3]))


def _print_losses(files: Sequence[Path], problems: Problems) -> None:
    """Say what was not read, and what was taken for headings if it is much."""
    if problems.entries():
        print(f"  warning: {first_faults(problems.entries())}.")
    paragraphs, characters, of_all = (problems.left_out[key] for key in LEFT_OUT)
    if characters > MAX_LEFT_OUT * of_all:
        print(
            f"  warning: {_named(files)}: {characters / of_all:.1%} of the text was left out as headings "
            f"({counted(paragraphs, 'paragraph')}). If they are text, give it as JSONL."
        )


def _paragraphs(text: str, problems: Problems) -> str:
    """The paragraphs, one on each line, of a book, or else the lines of a text with hardly any blank lines."""
    text = text.replace("\r\n", "\n").strip()
    if "\n" in text and len(text) <= _PIECE * len(_BLANK.split(text)):
        return books.paragraphs(text, problems)
    return "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())
