"""The texts of evaluation sets, from files of labeled examples, and the table of their n-grams.

    .txt                 a text per line
    .csv, .tsv           with a header; a text per cell, of all columns or those named
    .jsonl, .json        every string is a text, at any depth, or those below the keys named
    .conll, .bio, .iob   a text per sentence: the first column, sentences parted by empty lines

Files may be compressed (.gz, .bz2, .xz).
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open
from pretrain.common.quoting import bare_rows, quoted_rows
from pretrain.config import ContaminationConfig, EvaluationSetConfig
from pretrain.corpus.filters.text_columns import WORD, text_columns
from pretrain.corpus.inputs import BROKEN, open_file, plain_suffix
from pretrain.corpus.listing import files_in

TABLE = "evaluation.npz"
NGRAM = 13  # words, as in GPT-3
SHORTEST = 8  # terms of a text with fewer than NGRAM words that is looked for
BEGINNING = 6  # words that these are at least, where a term is less than one
_TEXTS_AT_ONCE = 4096


def evaluation_files(config: ContaminationConfig) -> list[list[Path]]:
    """The files of each set, sorted. Raises `InputError` if one is missing or of an unknown format."""
    return [_files(one, f"corpus.filters.contamination.sets.{n}") for n, one in enumerate(config.sets)]


def set_names(config: ContaminationConfig) -> list[str]:
    """The names of the sets, by default those of their paths."""
    return [one.name or Path(one.path).name.split(".")[0] for one in config.sets]


def write_table(config: ContaminationConfig, path: Path) -> list[dict[str, int]]:
    """Write the n-grams of all sets to `path`; returns {texts, too_short} of each: those too short are not looked for.

    hashes uint64 [G], ascending, and texts int64 [G], the first text that has it; beginnings uint64: hashes of their
    first `BEGINNING` words; lengths int64: quarters of words in the n-grams; first int64 [sets + 1]: the first text of
    each set.
    """
    none = np.zeros(0, np.uint64)
    grams, first, sizes = [_Grams(none, none, none.astype(np.int64), none.astype(np.int64))], [0], []
    for one, files in zip(config.sets, evaluation_files(config), strict=True):
        count, short = first[-1], 0
        for texts in _batched(_texts(files, one)):
            grams.append(_grams(texts, count))
            count += len(texts)
            short += len(texts) - len(np.unique(grams[-1].texts))
        if count == first[-1]:
            raise InputError(f"{one.path}: no text in this evaluation set. Check the file and its columns.")
        sizes.append({"texts": count - first[-1], "too_short": short})
        first.append(count)
    hashes, beginnings, texts_of, lengths = (np.concatenate(column) for column in zip(*grams, strict=True))
    distinct, place = np.unique(hashes, return_index=True)
    with atomic_open(path) as file:
        np.savez(
            file,
            lengths=np.unique(lengths),
            first=np.array(first),
            hashes=distinct,
            texts=texts_of[place],
            beginnings=np.unique(beginnings),
        )
    return sizes


class _Grams(NamedTuple):
    hashes: np.ndarray
    beginnings: np.ndarray
    texts: np.ndarray
    lengths: np.ndarray


def _grams(texts: Sequence[str], first: int) -> _Grams:
    """The n-grams of `texts`, of which the first has the number `first`. A shorter text is one n-gram."""
    columns = text_columns(texts)
    starts, counts = columns.gram_documents(NGRAM)
    begins = np.arange(counts.sum()) + np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts)
    quarters = columns.document_quarters()
    is_long = (np.diff(columns.terms) >= SHORTEST) & (quarters >= BEGINNING * WORD)
    short = np.flatnonzero((counts == 0) & is_long)
    lengths = np.append(np.full(len(begins), NGRAM * WORD), quarters[short])
    begins = np.append(begins, columns.terms[short])
    return _Grams(
        columns.sequence_hashes(begins, columns.sequence_ends(begins, lengths)),
        columns.sequence_hashes(begins, columns.sequence_ends(begins, BEGINNING * WORD)),
        first + np.append(np.repeat(np.arange(len(texts)), counts), short),
        lengths,
    )


# ---------------------------------------------------------------- files


def _files(one: EvaluationSetConfig, where: str) -> list[Path]:
    path = Path(one.path).expanduser()
    files = [path]
    if path.is_dir():
        files = [file for file in files_in(path, f"{where}.path") if plain_suffix(file) in _READERS]
    for file in files:
        if not file.is_file():
            raise InputError(f"{where}.path: {file}: no such file or folder. Check the path.")
        if plain_suffix(file) not in _READERS:
            raise InputError(f"{where}.path: {file}: unknown format. Give one of {', '.join(_READERS)}.")
    if not files:
        raise InputError(f"{where}.path: {path}: no evaluation set in it. Give files of {', '.join(_READERS)}.")
    return files


def _texts(files: Iterable[Path], one: EvaluationSetConfig) -> Iterator[str]:
    for file in files:
        try:
            with open_file(file) as raw:
                for text in _READERS[plain_suffix(file)](raw, one):
                    if text.strip():
                        yield text.replace("\0", "").encode("utf-8", "replace").decode()
        except (ValueError, KeyError, *BROKEN) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{file}: cannot be read as an evaluation set ({reason}). Check the file.") from None


def _lines(raw: IO[Any], _: EvaluationSetConfig) -> Iterator[str]:
    yield from io.TextIOWrapper(raw, "utf-8-sig", newline=None)


def _cells(raw: IO[Any], one: EvaluationSetConfig, delimiter: str = ",") -> Iterator[str]:
    text = raw.read().decode("utf-8-sig")

    # Quotes of a .tsv may be of the text or of its writer; none is a part of an n-gram.
    rows = (bare_rows if delimiter == "\t" else quoted_rows)(io.StringIO(text, newline=""), delimiter)
    _, names = next(rows, (1, []))
    if missing := [name for name in one.columns if name not in names]:
        raise ValueError(f"no column {missing[0]!r}; it has {', '.join(names)}")
    for _, cells in rows:
        row = dict(zip(names, cells, strict=False))
        yield from (row.get(name, "") for name in one.columns or names)


def _json_lines(raw: IO[Any], one: EvaluationSetConfig) -> Iterator[str]:
    for line in raw:
        if line.strip():
            yield from _strings(json.loads(line), one.columns)


def _json_file(raw: IO[Any], one: EvaluationSetConfig) -> Iterator[str]:
    yield from _strings(json.load(raw), one.columns)


def _strings(value: Any, keys: Sequence[str]) -> Iterator[str]:
    """The strings in a JSON value; if there are `keys`, those below them."""
    if isinstance(value, str):
        if not keys:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, keys)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item, () if key in keys else keys)


def _sentences(raw: IO[Any], _: EvaluationSetConfig) -> Iterator[str]:
    words: list[str] = []
    for line in io.TextIOWrapper(raw, "utf-8-sig"):
        if not line.strip() or line.startswith("-DOCSTART-"):
            yield " ".join(words)
            words = []
        elif not line.startswith("# "):
            words.append(line.split()[0])
    yield " ".join(words)


def _batched(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _TEXTS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


_READERS: dict[str, Any] = {
    ".txt": _lines,
    ".csv": _cells,
    ".tsv": lambda raw, one: _cells(raw, one, "\t"),
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".conll": _sentences,
    ".bio": _sentences,
    ".iob": _sentences,
}
