"""Reads evaluation sets, and writes the table of their n-grams, by which contaminated documents are found.

    .txt                 each line is an example
    .csv, .tsv           each cell of the configured columns (default: all) is an example; the first row is a header
    .jsonl, .json        each string at any depth is an example; if keys are configured, only strings below them
    .conll, .bio, .iob   each sentence is an example: the words in its first column; blank lines separate sentences

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
from pretrain.corpus.filters.terms import QUARTERS_PER_WORD, document_terms
from pretrain.corpus.inputs import READ_ERRORS, open_file, plain_suffix
from pretrain.corpus.listing import files_in

TABLE = "evaluation.npz"
NGRAM = 13  # words per n-gram, as in GPT-3
MIN_TERMS = 8  # an example of fewer than NGRAM words is ignored if it has fewer terms (see `terms.py`) than this
PREFIX_WORDS = 6  # n-grams are looked up by their first PREFIX_WORDS words, then in full; shorter examples are ignored
_BATCH_EXAMPLES = 4096  # examples converted to terms together


def evaluation_files(config: ContaminationConfig) -> list[list[Path]]:
    """Return the files of each set, sorted. Raises `InputError` if a file is missing or its format is unknown."""
    return [_files(eval_set, f"corpus.filters.contamination.sets.{n}") for n, eval_set in enumerate(config.sets)]


def set_names(config: ContaminationConfig) -> list[str]:
    """Return the name of each set; by default, the stem of its path."""
    return [eval_set.name or Path(eval_set.path).name.split(".")[0] for eval_set in config.sets]


def write_table(config: ContaminationConfig, path: Path) -> list[dict[str, int]]:
    """Write the n-grams of all sets to `path`; return the numbers of examples, "texts", and ignored ones, "too_short".

    The file has these arrays:
        hashes      uint64 [G], hashes of the n-grams, ascending
        texts       int64 [G], for each n-gram, the index of the first example that contains it
        beginnings  uint64, hashes of the first `PREFIX_WORDS` words of n-grams
        lengths     int64, distinct lengths of n-grams in quarters of a word (without spaces, a letter has 1 to 3)
        first       int64 [sets + 1], index of each set's first example
    """
    empty = np.zeros(0, np.uint64)
    ngrams, starts, sizes = [_NGrams(empty, empty, empty.astype(np.int64), empty.astype(np.int64))], [0], []
    for eval_set, files in zip(config.sets, evaluation_files(config), strict=True):
        count, too_short = starts[-1], 0
        for batch in _batched(_examples(files, eval_set)):
            ngrams.append(_ngrams(batch, count))
            count += len(batch)
            too_short += len(batch) - len(np.unique(ngrams[-1].examples))
        if count == starts[-1]:
            raise InputError(f"{eval_set.path}: no text in this evaluation set. Check the file and its columns.")
        sizes.append({"texts": count - starts[-1], "too_short": too_short})
        starts.append(count)
    hashes, prefixes, examples, lengths = (np.concatenate(column) for column in zip(*ngrams, strict=True))
    distinct, first_indices = np.unique(hashes, return_index=True)
    arrays: dict[str, Any] = {"lengths": np.unique(lengths), "first": np.array(starts), "hashes": distinct}
    with atomic_open(path) as file:
        np.savez(file, **arrays, texts=examples[first_indices], beginnings=np.unique(prefixes))
    return sizes


class _NGrams(NamedTuple):
    hashes: np.ndarray  # hashes of the n-grams
    prefixes: np.ndarray  # hashes of the first PREFIX_WORDS words of each n-gram
    examples: np.ndarray  # index of the example that contains each n-gram
    lengths: np.ndarray  # length of each n-gram in quarters of a word


def _ngrams(examples: Sequence[str], first_index: int) -> _NGrams:
    """Return the examples' n-grams. One with fewer than NGRAM words has one of all its words, or none."""
    batch = document_terms(examples)
    starts, counts = batch.document_grams(NGRAM)
    ngram_starts = np.arange(counts.sum()) + np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts)
    quarters = batch.document_quarters()
    is_long_enough = (np.diff(batch.document_starts) >= MIN_TERMS) & (quarters >= PREFIX_WORDS * QUARTERS_PER_WORD)
    short = np.flatnonzero((counts == 0) & is_long_enough)
    lengths = np.append(np.full(len(ngram_starts), NGRAM * QUARTERS_PER_WORD), quarters[short])
    ngram_starts = np.append(ngram_starts, batch.document_starts[short])
    return _NGrams(
        batch.sequence_hashes(ngram_starts, batch.sequence_ends(ngram_starts, lengths)),
        batch.sequence_hashes(ngram_starts, batch.sequence_ends(ngram_starts, PREFIX_WORDS * QUARTERS_PER_WORD)),
        first_index + np.append(np.repeat(np.arange(len(examples)), counts), short),
        lengths,
    )


# ---------------------------------------------------------------- files


def _files(eval_set: EvaluationSetConfig, config_key: str) -> list[Path]:
    path = Path(eval_set.path).expanduser()
    files = [path]
    if path.is_dir():
        files = [file for file in files_in(path, f"{config_key}.path") if plain_suffix(file) in _READERS]
    for file in files:
        if not file.is_file():
            raise InputError(f"{config_key}.path: {file}: no such file or folder. Check the path.")
        if plain_suffix(file) not in _READERS:
            raise InputError(f"{config_key}.path: {file}: unknown format. Use one of {', '.join(_READERS)}.")
    if not files:
        raise InputError(
            f"{config_key}.path: {path}: has no file in these formats: {', '.join(_READERS)}. Check the path."
        )
    return files


def _examples(files: Iterable[Path], eval_set: EvaluationSetConfig) -> Iterator[str]:
    for file in files:
        try:
            with open_file(file) as raw:
                for text in _READERS[plain_suffix(file)](raw, eval_set):
                    if text.strip():
                        yield text.replace("\0", "").encode("utf-8", "replace").decode()
        except (ValueError, KeyError, *READ_ERRORS) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{file}: cannot be read as an evaluation set ({reason}). Check the file.") from None


def _lines(raw: IO[Any], _: EvaluationSetConfig) -> Iterator[str]:
    yield from io.TextIOWrapper(raw, "utf-8-sig", newline=None)


def _cells(raw: IO[Any], eval_set: EvaluationSetConfig, delimiter: str = ",") -> Iterator[str]:
    text = raw.read().decode("utf-8-sig")

    # Quotes in a .tsv may be literal. They are read as such: n-grams contain no quotes anyway.
    rows = (bare_rows if delimiter == "\t" else quoted_rows)(io.StringIO(text, newline=""), delimiter)
    _, names = next(rows, (1, []))
    if missing := [name for name in eval_set.columns if name not in names]:
        raise ValueError(f"no column {missing[0]!r}; it has {', '.join(names)}")
    for _, cells in rows:
        row = dict(zip(names, cells, strict=False))
        yield from (row.get(name, "") for name in eval_set.columns or names)


def _json_lines(raw: IO[Any], eval_set: EvaluationSetConfig) -> Iterator[str]:
    for line in raw:
        if line.strip():
            yield from _strings(json.loads(line), eval_set.columns)


def _json_file(raw: IO[Any], eval_set: EvaluationSetConfig) -> Iterator[str]:
    yield from _strings(json.load(raw), eval_set.columns)


def _strings(value: Any, keys: Sequence[str]) -> Iterator[str]:
    """Yield the strings in a JSON value; with `keys`, only the strings below these keys."""
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
        if len(batch) == _BATCH_EXAMPLES:
            yield batch
            batch = []
    if batch:
        yield batch


_READERS: dict[str, Any] = {
    ".txt": _lines,
    ".csv": _cells,
    ".tsv": lambda raw, eval_set: _cells(raw, eval_set, "\t"),
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".conll": _sentences,
    ".bio": _sentences,
    ".iob": _sentences,
}
