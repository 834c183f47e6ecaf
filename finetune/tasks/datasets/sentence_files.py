"""Reads sentences, tagged or not, from files: CoNLL columns, tables, JSON, Parquet or plain text."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.datasets.conll import are_tagged, read_columns
from finetune.tasks.datasets.files import plain_suffix, read_text
from finetune.tasks.datasets.sentence_records import from_lines, from_records, json_records, parquet_records
from finetune.tasks.datasets.sentences import Remarks, Segmenter, Sentence
from finetune.tasks.datasets.table import TableLayout
from finetune.tasks.datasets.tables import format_of, read_table
from finetune.tasks.datasets.words import cut_words
from pretrain.common.errors import InputError

# In a table with one word per row: possible names of the columns for the sentence, the word and the tag.
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
    segment: Segmenter = cut_words,
    tag_names: Sequence[str] = (),
) -> list[Sentence]:
    """Read the sentences of a file: .jsonl, .json and .parquet as records, .csv as a table, any other as CoNLL columns.

    Files other than Parquet may be compressed (.gz, .bz2, .xz). Tags are returned as they are in the file.

    Args:
        labeled: whether tags are needed. If not, a file may have words as its only column.
        plain: whether to read each line of a .txt as one document of plain text, unless all lines have tags.
        segment: function that segments plain text into words.
        tag_names: the name of each tag id, if records have ids instead of names.

    Raises:
        InputError: the file is missing, is not in `encoding`, or has no sentences, lines with different numbers of
            columns, records of an unknown form, or spans that do not fit their text.
    """
    path = Path(path).expanduser()
    file_format = format_of(path)
    if file_format == "parquet":
        sentences = from_records(parquet_records(path), remarks, segment, tag_names)
        return _reject_empty(sentences, path)
    if file_format == "csv":
        return _reject_empty(_read_word_rows(path, encoding, labeled=labeled), path)
    text = read_text(path, encoding, ", or set `encoding`, such as latin-1")
    if file_format in ("jsonl", "json"):
        sentences = from_records(json_records(path, text, file_format), remarks, segment, tag_names)
        return _reject_empty(sentences, path)
    lines = _split_lines(path, text)
    if plain and plain_suffix(path) == ".txt" and not are_tagged(lines, label_column):
        sentences = from_lines(str(path), lines, segment)
    else:
        sentences = read_columns(str(path), lines, token_column, label_column, remarks, labeled=labeled)
    return _reject_empty(sentences, path)


def _read_word_rows(path: Path, encoding: str, *, labeled: bool) -> list[Sentence]:
    """Read the sentences of a table with one word per row. A sentence's name may be only in its first row."""
    column_names = list(itertools.chain.from_iterable(_COLUMN_NAMES))
    table = read_table(path, column_names, layout=TableLayout(encoding=encoding), optional=column_names)
    columns = (next((table.columns[name] for name in names if name in table.columns), None) for names in _COLUMN_NAMES)
    sentence_names, words, tags = columns
    if sentence_names is None or words is None or (labeled and tags is None):
        raise InputError(
            f"{path}: needs the columns Sentence #, Word and Tag, with one word per row. Rename columns, or give "
            ".jsonl with text and entities."
        )
    filled_names = list(itertools.accumulate(sentence_names, lambda previous, name: name.strip() or previous))
    sentences = []
    for _, group in itertools.groupby(range(len(table)), filled_names.__getitem__):
        rows = list(group)
        row_tags = None if tags is None else [tags[row].strip() for row in rows]
        row_words, line = [words[row] for row in rows], table.numbers[rows[0]]
        sentences.append(Sentence(row_words, row_tags, str(path), line, one_word_per_line=True))
    return sentences


def _split_lines(path: Path, text: str) -> list[str]:
    lines = text.split("\n")  # not splitlines: U+2028 and the like may be parts of words
    for number, line in enumerate(lines, 1):
        if "\r" in line.rstrip("\r"):
            raise InputError(f"{path}:{number}: lines end with CR only. Convert the file to LF.")
    return lines


def _reject_empty(sentences: list[Sentence], path: Path) -> list[Sentence]:
    if not sentences:
        raise InputError(f"{path}: has no sentences. Give a file with sentences.")
    return sentences
