"""Files of sentences with or without entities: CoNLL columns, JSON, Parquet, or plain texts."""

from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.datasets.conll import are_tagged, read_columns
from finetune.tasks.datasets.files import plain_suffix, read_text
from finetune.tasks.datasets.sentence_records import json_records, of_records, of_texts, parquet_records
from finetune.tasks.datasets.sentences import Cut, Remarks, Sentence
from finetune.tasks.datasets.tables import format_of
from finetune.tasks.datasets.words import cut_words
from pretrain.common.errors import InputError


def read_sentences(
    path: Path | str,
    remarks: Remarks,
    *,
    token_column: int = 0,
    label_column: int = -1,
    encoding: str = "utf-8",
    labeled: bool = True,
    texts: bool = False,
    cut: Cut = cut_words,
    tag_names: Sequence[str] = (),
) -> list[Sentence]:
    """The sentences of a file: .jsonl, .json and .parquet as records, anything else but .csv as columns.

    All but Parquet may be compressed (.gz, .bz2, .xz). Tags are as the file has them. Either all sentences have some
    or none has. Where they need none (`labeled` False), a single column holds the words, whatever the columns are
    called in other files.

    Args:
        texts: whether a .txt without a tag on every line holds a text on each, not columns.
        cut: where the words of texts are.
        tag_names: names of tags that are numbers, in records.

    Raises:
        InputError: no such file, a .csv, other bytes than `encoding` has, ragged columns, a record of another form,
            spans that do not fit their text, no sentence at all.
    """
    path = Path(path).expanduser()
    kind = format_of(path)
    if kind == "parquet":
        sentences = of_records(parquet_records(path), remarks, cut, tag_names)
        return _some(sentences, path)
    if kind == "csv":
        raise InputError(
            f"{path}: entities are not read from .csv. Give .jsonl, .json or .parquet with text or tokens, or one word "
            "on each line of a .txt, .tsv or .conll."
        )
    text = read_text(path, encoding, ", or set `encoding`, such as latin-1")
    if kind in ("jsonl", "json"):
        sentences = of_records(json_records(path, text, kind), remarks, cut, tag_names)
        return _some(sentences, path)
    lines = _lines(path, text)
    if texts and plain_suffix(path) == ".txt" and not are_tagged(lines, label_column):
        sentences = of_texts(str(path), lines, cut)
    else:
        sentences = read_columns(str(path), lines, token_column, label_column, remarks, labeled=labeled)
    return _some(sentences, path)


def _lines(path: Path, text: str) -> list[str]:
    lines = text.split("\n")  # not splitlines: U+2028 and others may be words
    for number, line in enumerate(lines, 1):
        if "\r" in line.rstrip("\r"):
            raise InputError(f"{path}:{number}: lines end with CR alone. Convert the file to LF.")
    return lines


def _some(sentences: list[Sentence], path: Path) -> list[Sentence]:
    if not sentences:
        raise InputError(f"{path}: no sentence in it. Give a file with at least one.")
    return sentences
