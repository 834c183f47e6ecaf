"""Reads files of sentences with or without tags: CoNLL columns, JSON, Parquet, or plain text."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.datasets.conll import are_tagged, read_columns
from finetune.tasks.datasets.files import plain_suffix, read_text
from finetune.tasks.datasets.sentence_records import from_lines, from_records, json_records, parquet_records
from finetune.tasks.datasets.sentences import Remarks, Segmenter, Sentence
from finetune.tasks.datasets.table import TableFormat
from finetune.tasks.datasets.tables import format_of, read_table
from finetune.tasks.datasets.words import cut_words
from pretrain.common.errors import InputError

# Possible names of the columns sentence, word and tag in a table with one word per row.
_COLUMN_NAMES = (
    ("Sentence #", "sentence #", "Sentence", "sentence", "sentence_id", "sentence_idx"),
    ("Word", "word", "Token", "token"),
    ("Tag", "tag", "Label", "label", "NER", "ner", "ner_tag"),
)


def read_sentences(
    path: Path | str,
    remarks: Remarks,
    *,
    token_column: int = 0,
    label_column: int = -1,
    encoding: str = "utf-8",
    labeled: bool = True,
    plain: bool = False,
    cut: Segmenter = cut_words,
    tag_names: Sequence[str] = (),
) -> list[Sentence]:
    """Read the sentences of a file: .jsonl, .json and .parquet as records, .csv as a table, any other as CoNLL columns.

    All but Parquet may be compressed (.gz, .bz2, .xz). Tags are returned as in the file. If `labeled` is False, a file
    with a single column has only words, regardless of `token_column` and `label_column`.

    Args:
        plain: read a .txt that does not have a tag in every line as one document per line.
        cut: segments plain text into words.
        tag_names: names of the tags, in order, if records have tag numbers.

    Raises:
        InputError: no such file, bytes invalid in `encoding`, ragged columns, an unknown form of record, spans that do
            not fit their text, no sentences.
    """
    path = Path(path).expanduser()
    kind = format_of(path)
    if kind == "parquet":
        sentences = from_records(parquet_records(path), remarks, cut, tag_names)
        return _non_empty(sentences, path)
    if kind == "csv":
        return _non_empty(_word_rows(path, encoding, labeled=labeled), path)
    text = read_text(path, encoding, ", or set `encoding`, such as latin-1")
    if kind in ("jsonl", "json"):
        sentences = from_records(json_records(path, text, kind), remarks, cut, tag_names)
        return _non_empty(sentences, path)
    lines = _split_lines(path, text)
    if plain and plain_suffix(path) == ".txt" and not are_tagged(lines, label_column):
        sentences = from_lines(str(path), lines, cut)
    else:
        sentences = read_columns(str(path), lines, token_column, label_column, remarks, labeled=labeled)
    return _non_empty(sentences, path)


def _word_rows(path: Path, encoding: str, *, labeled: bool) -> list[Sentence]:
    """Read the sentences of a table with one word per row; only a sentence's first row needs the sentence name."""
    names = list(itertools.chain.from_iterable(_COLUMN_NAMES))
    table = read_table(path, names, layout=TableFormat(encoding=encoding), optional=names)
    cells = [next((table.columns[key] for key in keys if key in table.columns), None) for keys in _COLUMN_NAMES]
    sentence_names, words, tags = cells
    if sentence_names is None or words is None or (labeled and tags is None):
        raise InputError(
            f"{path}: needs the columns Sentence #, Word and Tag, with a word in each row. Rename them, or give .jsonl "
            "with text and entities."
        )
    filled = list(itertools.accumulate(sentence_names, lambda previous, name: name.strip() or previous))
    sentences = []
    for _, group in itertools.groupby(range(len(table)), filled.__getitem__):
        rows = list(group)
        row_tags = None if tags is None else [tags[row].strip() for row in rows]
        row_words, line = [words[row] for row in rows], table.numbers[rows[0]]
        sentences.append(Sentence(row_words, row_tags, str(path), line, one_word_per_line=True))
    return sentences


def _split_lines(path: Path, text: str) -> list[str]:
    lines = text.split("\n")  # not splitlines: U+2028 and others may be words
    for number, line in enumerate(lines, 1):
        if "\r" in line.rstrip("\r"):
            raise InputError(f"{path}:{number}: lines end with CR only. Convert the file to LF.")
    return lines


def _non_empty(sentences: list[Sentence], path: Path) -> list[Sentence]:
    if not sentences:
        raise InputError(f"{path}: has no sentences. Give a file with at least one.")
    return sentences
