"""Reads sentences from files in CoNLL's column format.

Each line has one word. An empty line (spaces and tabs allowed) separates sentences; `-DOCSTART-` or `# newdoc`
separates documents. The file's first word line determines whether tabs or runs of spaces separate columns. Before the
first word of a sentence, lines that start with `#` are comments, unless they have the columns and tag of a word.
"""

import re
from collections.abc import Sequence

from finetune.tasks.datasets.sentences import Remarks, Sentence
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

_SPACES = re.compile("[ \t]+")
_LANGUAGE_PREFIX = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:")
_TAG = re.compile(r"O|[BIESLU](?:-.+)?")
_NEW_DOCUMENT = re.compile(r"#\s*newdoc\b")


def read_columns(
    path: str, lines: list[str], token_column: int, label_column: int, remarks: Remarks, *, labeled: bool
) -> list[Sentence]:
    """Read the sentences of a file's lines; `InputError` with file and line if columns are ragged or missing.

    Args:
        path: the file, for messages.
        token_column, label_column: indices from 0; negative ones count from the last column.
        remarks: collects warnings.
        labeled: whether tags are required.
    """
    width, tabs = 0, False
    words_only = not labeled and _has_one_column(lines)
    sentences: list[Sentence] = []
    document: list[Sequence[str]] = []  # words of each of its sentences so far
    words: list[str] = []
    tags: list[str] | None = []
    token_index = label_index = 0
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip(" \t\r")
        if not words and _is_comment(line, width, tabs, token_column, label_column, words_only=words_only):
            document = [] if _NEW_DOCUMENT.match(line) else document
            continue
        if not line or line.startswith("-DOCSTART-"):
            if words:
                document.append(words)
                start, index = number - len(words), len(document) - 1  # start: the first word's line
                sentence = Sentence(words, tags, path, start, one_word_per_line=True, document=document, index=index)
                sentences.append(sentence)
                words, tags = [], None if tags is None else []
            if line:
                document = []
            continue
        if not width:
            tabs = "\t" in line
        fields = _fields(line, tabs)
        if len(fields) != width:
            if width:
                raise InputError(_width_error(path, number, len(fields), width, tabs))
            width = len(fields)
            token_index = 0 if words_only else _column_index(path, number, "token_column", token_column, width)
            label_index = 0 if words_only else _column_index(path, number, "label_column", label_column, width)
            tags = None if label_index == token_index else []
        words.append(fields[token_index])
        if tags is not None:
            tags.append(fields[label_index])
    return _remove_language_prefix(sentences, remarks)


def _fields(line: str, tabs: bool) -> list[str]:
    # split() without an argument would split at no-break spaces, which may be words.
    return line.split("\t") if tabs else _SPACES.split(line.strip(" \t"))


def _has_one_column(lines: list[str]) -> bool:
    """Return whether the first line that cannot be a comment has one column, so that all other lines must have one."""
    word_lines = (line for line in lines if line.strip(" \t\r") and not line.startswith(("#", "-DOCSTART-")))
    first = next(word_lines, "").rstrip(" \t\r")
    return len(_fields(first, "\t" in first)) == 1


def _is_comment(line: str, width: int, tabs: bool, token_column: int, label_column: int, *, words_only: bool) -> bool:
    """Return whether a line before a sentence's first word is a comment: a `#` without the columns or tag of a word.

    Before the file's first word, `width` (its number of columns) is 0. `words_only`: the file's only column has words.
    """
    if not line.startswith("#"):
        return False
    fields = _fields(line, tabs if width else "\t" in line)
    if len(fields) == 1:
        return width > 1 or not (width or words_only)
    if (width and len(fields) != width) or not -len(fields) <= label_column < len(fields):
        return True
    return label_column % len(fields) != token_column % len(fields) and not _TAG.fullmatch(fields[label_column])


def are_tagged(lines: list[str], label_column: int) -> bool:
    """Return whether all lines have the same number of columns, with a tag in `label_column`, unlike plain text.

    B or I without a type is a tag only if there is an O, too: "so do I" is plain text.
    """
    rows = [
        _SPACES.split(line.strip(" \t\r"))
        for line in lines
        if line.strip(" \t\r") and not line.startswith(("#", "-DOCSTART-"))
    ]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not -max(widths) <= label_column < max(widths) or max(widths) < 2:
        return False
    tags = {row[label_column] for row in rows}
    return all(map(_TAG.fullmatch, tags)) and ("O" in tags or any("-" in tag for tag in tags))


def _column_index(path: str, line: int, name: str, column: int, width: int) -> int:
    if not -width <= column < width:
        raise InputError(
            f"{path}:{line}: the line has {counted(width, 'column')}, numbered from 0, but {name} is "
            f"{column}. Set {name} to one of them; -1 is the last."
        )
    return column % width


def _width_error(path: str, line: int, count: int, width: int, tabs: bool) -> str:
    separator = "tabs" if tabs else "spaces"
    return (
        f"{path}:{line}: has {counted(count, 'column')}, separated by {separator}, but the first line of "
        f"the file has {width}. Give every line the same number of columns, and separate sentences by an empty line."
    )


def _remove_language_prefix(sentences: list[Sentence], remarks: Remarks) -> list[Sentence]:
    """Remove the language prefix of words in WikiANN's files (Pan et al. 2017), `en:Paris`, if every word has it."""
    if not sentences or not (match := _LANGUAGE_PREFIX.match(sentences[0].words[0])):
        return sentences
    prefix = match[0]
    if not all(word.startswith(prefix) and word != prefix for sentence in sentences for word in sentence.words):
        return sentences
    remarks.add(f"every word starts with {prefix!r}, as in WikiANN's files; it is removed", sentences[0].where())
    for sentence in sentences:
        # In place, because `document` refers to the same lists.
        sentence.words[:] = [word[len(prefix) :] for word in sentence.words]  # pyright: ignore[reportIndexIssue]
    return sentences
