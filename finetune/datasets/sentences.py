"""Sentences with or without entities, from CoNLL columns, JSON lines, Parquet, or one record or text of a user's.

Columns: a line per word, a blank line (or one of blanks and tabs alone) between sentences, `-DOCSTART-` or
`# newdoc` between documents. The first line of a word tells whether columns are parted by tabs or by runs of blanks.
Lines before a sentence that begin with `#` are comments, unless they are a word and its tag as all other lines.

JSON lines, one object for each sentence, with the same `document` (text or a number) in all of a document's, which
follow each other:

    {"tokens": ["Ann", "left"], "tags": ["B-PER", "O"]}
    {"text": "Ann left", "entities": [{"start": 0, "end": 3, "type": "PER"}]}

`labels` and `ner_tags` stand for `tags`, `spans` for `entities`, and an entity's `label` for its `type`, as other
tools write them. Tokens that are text are the words, also of a record with `text` and `entities`; where they are
objects, as Prodigy has them, the words are cut from the text. Characters are Unicode code points, of the tokens joined
by blanks where there is no text. Without tags or entities a sentence is unlabelled. Parquet files have columns of the
same names; numbers in them get the names that `datasets` wrote beside them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.datasets.files import plain_suffix, read_text
from finetune.datasets.tables import read_table
from finetune.datasets.words import cut_words, joined
from pretrain.common.errors import InputError

_LINES = (".jsonl", ".ndjson", ".json")
_TAGS, _ENTITIES = ("tags", "labels", "ner_tags"), ("entities", "spans")
_COLUMNS = ("id", "text", "tokens", *_TAGS, *_ENTITIES, "document")  # of a Parquet file
_SURROGATES = re.compile("[\ud800-\udfff]")
_BLANKS = re.compile("[ \t]+")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:")
_TAG = re.compile(r"O|[BIESLU]-.+")
_NEW_DOCUMENT = re.compile(r"#\s*newdoc\b")

Cut = Callable[[str], np.ndarray]
"""Where the words of a text are: int64 [W, 2], as `cut_words` has it."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """W words, and the tag of each where they are known."""

    words: Sequence[str]
    tags: Sequence[str] | None  # [W]; None: nobody has said
    source: str  # a file, or whatever names a single record
    line: int = 0  # the record's, or the first word's where `lined`; 0 where `source` says all
    lined: bool = False  # a line for each word
    text: str | None = None  # None: the words joined by blanks
    offsets: np.ndarray | None = None  # int64 [W, 2], places of the words in `text`
    document: Sequence[Sequence[str]] = ()  # words of all sentences of its document, its own among them
    place: int = 0  # which of them it is
    name: str | None = None  # of its document, where a record says it
    id: Any = None  # that a record has
    from_spans: bool = False  # tags were made from spans of characters: IOB2, whatever the file's scheme
    from_text: bool = False  # the words were cut from the text, not given

    def __post_init__(self) -> None:
        if not self.document:
            object.__setattr__(self, "document", [self.words])

    def where(self, word: int = 0) -> str:
        """File and line of a word, for messages."""
        return f"{self.source}:{self.line + word * self.lined}" if self.line else self.source

    def characters(self) -> tuple[str, np.ndarray]:
        """The text, and int64 [W, 2]: the first character of each word, and the one behind its last."""
        if self.text is not None and self.offsets is not None:
            return self.text, self.offsets
        return " ".join(self.words), joined(list(self.words))


@dataclass
class Remarks:
    """What was odd in a file without being wrong: how often, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, where: str, count: int = 1) -> None:
        self.counts[what] += count
        self.places.setdefault(what, where)

    def lines(self) -> list[str]:
        return [
            f"{self.places[what]}: {what}" + (f"; {count} in all, this is the first" if count > 1 else "")
            for what, count in self.counts.items()
        ]


def read_sentences(
    path: Path | str,
    remarks: Remarks,
    *,
    token_column: int = 0,
    label_column: int = -1,
    encoding: str = "utf-8",
    labelled: bool = True,
    texts: bool = False,
    cut: Cut = cut_words,
) -> list[Sentence]:
    """The sentences of a file: .jsonl and .parquet as records, anything else as columns.

    All but Parquet may be compressed (.gz, .bz2, .xz). Tags are as the file has them. Either all sentences have some
    or none has. Where they need none (`labelled` False), a single column holds the words, whatever the columns are
    called in other files.

    Args:
        texts: whether a .txt without a tag on every line holds a text on each, not columns.
        cut: where the words of texts are.

    Raises:
        InputError: no such file, other bytes than `encoding` has, ragged columns, a record of another form,
            spans that do not fit their text, no sentence at all.
    """
    path = Path(path).expanduser()
    if plain_suffix(path) == ".parquet":
        sentences = _of_records(_parquet_records(path), remarks, cut)
        return _some(sentences, path)
    lines = read_text(path, encoding, ", or set `encoding`, such as latin-1").split(
        "\n"
    )  # not splitlines: U+2028 and others may be words
    if plain_suffix(path) in _LINES:
        sentences = _of_records(_json_records(str(path), lines), remarks, cut)
    elif texts and plain_suffix(path) == ".txt" and not _are_tagged(lines, label_column):
        sentences = _read_texts(str(path), lines, cut)
    else:
        sentences = _read_columns(str(path), lines, token_column, label_column, remarks, labelled=labelled)
    return _some(sentences, path)


def _some(sentences: list[Sentence], path: Path) -> list[Sentence]:
    if not sentences:
        raise InputError(f"{path}: no sentence in it. Give a file with at least one.")
    return sentences


def sentence(record: Mapping[str, Any] | str, where: str, remarks: Remarks, cut: Cut = cut_words) -> Sentence:
    """A sentence from plain text, which `cut` cuts into words, or one JSON object, as above.

    It stands alone until `in_documents` has seen its neighbours.

    Raises:
        InputError: neither text nor tokens; tags that are not as many as the tokens; an entity that does not fit
            the text, or that overlaps another.
    """
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        raise InputError(f'{where}: {_shown(record)} is no object; expected {{"text": ...}} or {{"tokens": [...]}}.')
    entities, tags = _first_of(record, _ENTITIES), _first_of(record, _TAGS)
    text, tokens = record.get("text"), record.get("tokens")
    if text is not None and (not tokens or _are_objects(tokens)):
        if tokens and tags is not None and entities is None:
            raise InputError(f"{where}: tags need tokens that are texts; give those, or entities.")
        one, tags = _from_text(text, where, cut), None
    elif tokens is not None:
        if text is not None and entities is not None:
            tags = None
        one = _from_tokens(tokens, tags, text, where, "text" if entities is None else "tokens")
    else:
        raise InputError(
            f'{where}: neither "text" nor "tokens"; it has {", ".join(map(str, list(record)[:10])) or "nothing"}.'
        )
    one = replace(one, name=_document_name(record, where), id=record.get("id"))
    return one if tags is not None or entities is None else _with_spans(one, entities, where, remarks)


def in_documents(sentences: Iterable[Sentence]) -> list[Sentence]:
    """`sentences` as each other's context: those that follow each other with the same name make a document.

    One without a name is a document of its own.
    """
    made: list[Sentence] = []
    for one in sentences:
        known = bool(made) and one.name is not None and one.name == made[-1].name
        document: list[Sequence[str]] = made[-1].document if known else []  # pyright: ignore[reportAssignmentType]
        document.append(one.words)
        made.append(replace(one, document=document, place=len(document) - 1))
    return made


# ---------------------------------------------------------------- columns


def _read_columns(
    path: str, lines: list[str], token_column: int, label_column: int, remarks: Remarks, *, labelled: bool
) -> list[Sentence]:
    width, tabs = 0, False
    words_alone = not labelled and _begin_with_a_word_alone(lines)
    sentences: list[Sentence] = []
    document: list[Sequence[str]] = []
    words: list[str] = []
    tags: list[str] | None = []
    tokens_at = labels_at = 0
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip(" \t\r")
        if not words and _is_comment(line, width, tabs, token_column, label_column, words_alone=words_alone):
            document = [] if _NEW_DOCUMENT.match(line) else document
            continue
        if not line or line.startswith("-DOCSTART-"):
            if words:
                document.append(words)
                first, place = number - len(words), len(document) - 1
                sentences.append(Sentence(words, tags, path, first, lined=True, document=document, place=place))
                words, tags = [], None if tags is None else []
            if line:
                document = []
            continue
        if not width:
            tabs = "\t" in line
        fields = _fields(line, tabs)
        if len(fields) != width:
            if width:
                raise InputError(_ragged(path, number, len(fields), width, tabs))
            width = len(fields)
            tokens_at = 0 if words_alone else _column(path, number, "token_column", token_column, width)
            labels_at = 0 if words_alone else _column(path, number, "label_column", label_column, width)
            tags = None if labels_at == tokens_at else []
        words.append(fields[tokens_at])
        if tags is not None:
            tags.append(fields[labels_at])
    return _without_language(sentences, remarks)


def _fields(line: str, tabs: bool) -> list[str]:
    # Not split() without an argument: a no-break space may be a word.
    return line.split("\t") if tabs else _BLANKS.split(line.strip(" \t"))


def _begin_with_a_word_alone(lines: list[str]) -> bool:
    """Whether the first line that can be no comment has a single column, as all others then must."""
    shown = (line for line in lines if line.strip(" \t\r") and not line.startswith(("#", "-DOCSTART-")))
    first = next(shown, "").rstrip(" \t\r")
    return len(_fields(first, "\t" in first)) == 1


def _is_comment(line: str, width: int, tabs: bool, token_column: int, label_column: int, *, words_alone: bool) -> bool:
    """Whether a line before a sentence is no word: `#` with as many columns as the others and a tag is one.

    `width` and `tabs` are those of the file, or 0 before its first word; `words_alone`: its words have no columns beside.
    """
    if not line.startswith("#"):
        return False
    fields = _fields(line, tabs if width else "\t" in line)
    if len(fields) == 1:
        return width > 1 or not (width or words_alone)
    if (width and len(fields) != width) or not -len(fields) <= label_column < len(fields):
        return True
    return label_column % len(fields) != token_column % len(fields) and not _TAG.fullmatch(fields[label_column])


def _are_tagged(lines: list[str], label_column: int) -> bool:
    """Whether all lines have as many columns, with a tag in one: no text looks like that."""
    rows = [
        _BLANKS.split(line.strip(" \t\r"))
        for line in lines
        if line.strip(" \t\r") and not line.startswith(("#", "-DOCSTART-"))
    ]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not -max(widths) <= label_column < max(widths) or max(widths) < 2:
        return False
    return all(_TAG.fullmatch(row[label_column]) for row in rows)


def _column(path: str, line: int, name: str, wanted: int, width: int) -> int:
    if not -width <= wanted < width:
        raise InputError(
            f"{path}:{line}: {width} column{'s' if width > 1 else ''}, numbered from 0, and {name} is {wanted}. "
            f"Set {name} to one of them; -1 is the last."
        )
    return wanted % width


def _ragged(path: str, line: int, found: int, width: int, tabs: bool) -> str:
    separator = "a tab" if tabs else "blanks"
    return (
        f"{path}:{line}: {found} column{'s' if found > 1 else ''}, parted by {separator}, where the first line of "
        f"the file has {width}. Give each word's line as many, and leave a line empty between sentences."
    )


def _without_language(sentences: list[Sentence], remarks: Remarks) -> list[Sentence]:
    """WikiANN's files (Pan et al. 2017) put the language before each word, `en:Paris`; every one, or it is text."""
    if not sentences or not (found := _LANGUAGE.match(sentences[0].words[0])):
        return sentences
    prefix = found[0]
    if not all(word.startswith(prefix) and word != prefix for one in sentences for word in one.words):
        return sentences
    remarks.add(f"every word begins with {prefix!r}, as in WikiANN's files; it is taken off", sentences[0].where())
    for one in sentences:
        # In place, since the documents hold the same lists.
        one.words[:] = [word[len(prefix) :] for word in one.words]  # pyright: ignore[reportIndexIssue]
    return sentences


# ---------------------------------------------------------------- records


def _json_records(path: str, lines: list[str]) -> Iterator[tuple[str, int, Any]]:
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            yield path, number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON ({error}). Write one object on each line.") from None


def _parquet_records(path: Path) -> Iterator[tuple[str, int, Any]]:
    table = read_table(path, _COLUMNS, optional=_COLUMNS)
    if not table.columns.keys() & {"text", "tokens"}:
        raise InputError(f"{path}: neither a column tokens nor text. Name them so, with tags or entities beside them.")
    for row in range(len(table)):
        yield table.where(row), 0, {name: cells[row] for name, cells in table.columns.items()}


def _of_records(records: Iterable[tuple[str, int, Any]], remarks: Remarks, cut: Cut) -> list[Sentence]:
    """From (source, line or 0, record)."""
    sentences: list[Sentence] = []
    for source, line, record in records:
        one = sentence(record, f"{source}:{line}" if line else source, remarks, cut)
        sentences.append(replace(one, source=source, line=line))
    labelled = [one.tags is not None for one in sentences]
    if any(labelled) and not all(labelled):
        raise InputError(
            f"{sentences[labelled.index(False)].where()}: neither tags nor entities, as {sentences[labelled.index(True)].where()} "
            f'has them. Write "entities": [] where there are none.'
        )
    return in_documents(sentences)


def _read_texts(path: str, lines: list[str], cut: Cut) -> list[Sentence]:
    """A document on each line; an empty line is an empty one."""
    numbered = enumerate(lines if lines[-1] else lines[:-1], 1)
    return [
        replace(_from_text(line.removesuffix("\r"), f"{path}:{number}", cut), source=path, line=number)
        for number, line in numbered
    ]


def _document_name(record: Mapping[str, Any], where: str) -> str | None:
    name = record.get("document")
    if name is None:
        return None
    if not isinstance(name, str | int):
        raise InputError(f"{where}: document is {_shown(name)}; expected text or a number.")
    return str(name)


def _from_tokens(tokens: Any, tags: Any, text: Any, where: str, needless: str) -> Sentence:
    """Words with their tags; where the `text` is given, too, they are looked for in it, from left to right."""
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise InputError(f"{where}: tokens is {_shown(tokens)}; expected a list of texts.")
    words = [_whole(token) for token in tokens]
    text, offsets = (None, None) if text is None else _find(words, text, where, needless)
    if tags is None:
        return Sentence(words, None, where, text=text, offsets=offsets)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise InputError(
            f"{where}: tags is {_shown(tags)}; expected a list of texts such as B-PER and O. "
            f"Write the names where there are numbers."
        )
    if len(tags) != len(words):
        raise InputError(f"{where}: {len(words)} tokens and {len(tags)} tags. Give each token one tag.")
    return Sentence(words, tags, where, text=text, offsets=offsets)


def _find(words: list[str], text: Any, where: str, needless: str) -> tuple[str, np.ndarray]:
    """The text, and int64 [W, 2]: where in it each word stands."""
    if not isinstance(text, str):
        raise InputError(f"{where}: text is {_shown(text)}; expected text.")
    text, behind = _whole(text), 0
    offsets = np.zeros((len(words), 2), np.int64)
    for number, word in enumerate(words):
        begin = text.find(word, behind)
        if begin < 0:
            raise InputError(
                f"{where}: token {number}, {_shown(word)}, is not in the text from character {behind} on. Leave out "
                f'"{needless}", or give the tokens as they stand in the text.'
            )
        behind = begin + len(word)
        offsets[number] = begin, behind
    return text, offsets


def _from_text(text: Any, where: str, cut: Cut) -> Sentence:
    if not isinstance(text, str):
        raise InputError(f"{where}: text is {_shown(text)}; expected text.")
    text = _whole(text)
    offsets = cut(text)
    words = [text[begin:end] for begin, end in offsets.tolist()]
    return Sentence(words, None, where, text=text, offsets=offsets, from_text=True)


def _with_spans(one: Sentence, entities: Any, where: str, remarks: Remarks) -> Sentence:
    text, offsets = one.characters()
    spans = _spans(entities, text, where)
    if one.text is None:
        _check_edges(spans, offsets, where)
    tags = _tags_of(spans, text, offsets, where, remarks)
    return replace(one, tags=tags, from_spans=True)


def _spans(entities: Any, text: str, where: str) -> list[tuple[int, int, str]]:
    """(first character, the one behind the last, type), in order; they fit the text and do not overlap."""
    if not isinstance(entities, list):
        raise InputError(f"{where}: entities is {_shown(entities)}; expected a list.")
    spans = []
    for number, entity in enumerate(entities):
        name = f"{where}: entity {number}"
        form = '{"start": 0, "end": 3, "type": "PER"}'
        if not isinstance(entity, Mapping):
            raise InputError(f"{name} is {_shown(entity)}; expected {form}.")
        kind = entity.get("type", entity.get("label"))
        begin, end = entity.get("start"), entity.get("end")
        if not isinstance(kind, str) or not kind or type(begin) is not int or type(end) is not int:
            raise InputError(f"{name} is {_shown(entity)}; expected {form}.")
        if not 0 <= begin < end <= len(text):
            raise InputError(
                f"{name} is from {begin} to {end}, and the text has {len(text)} characters. Count Unicode "
                f"characters from 0; `end` is the one behind the last."
            )
        said = entity.get("text")
        if isinstance(said, str) and _whole(said) != text[begin:end]:
            raise InputError(
                f"{name} is {_shown(said)}, but {begin} to {end} of the text is {_shown(text[begin:end])}. "
                f"Count Unicode characters from 0, not bytes; `end` is the one behind the last."
            )
        spans.append((begin, end, kind))
    spans.sort()
    for (begin, end, kind), (other_begin, other_end, other) in itertools.pairwise(spans):
        if other_begin < end:
            raise InputError(
                f"{where}: entities {kind} from {begin} to {end} and {other} from {other_begin} to {other_end} "
                f"overlap. A word can have one tag: keep one of them."
            )
    return spans


def _check_edges(spans: list[tuple[int, int, str]], offsets: np.ndarray, where: str) -> None:
    """Without a text, numbers that do not fall between tokens are likely those of tokens."""
    begins, ends = set(offsets[:, 0].tolist()), set(offsets[:, 1].tolist())
    for begin, end, kind in spans:
        if begin not in begins or end not in ends:
            raise InputError(
                f"{where}: the entity {kind} from {begin} to {end} does not begin and end with a token. Count characters "
                f"of the tokens joined by blanks, not tokens; or give tags."
            )


def _tags_of(
    spans: list[tuple[int, int, str]], text: str, offsets: np.ndarray, where: str, remarks: Remarks
) -> list[str]:
    """IOB2 tags of the words at `offsets`. A word is in the entity that has the first of its characters in any."""
    tags = ["O"] * len(offsets)
    begins, ends = offsets[:, 0], offsets[:, 1]
    taken = 0
    for begin, end, kind in spans:
        first = int(np.searchsorted(ends, begin, "right"))
        behind = int(np.searchsorted(begins, end, "left"))
        if first >= behind:
            raise InputError(
                f"{where}: the entity {kind} from {begin} to {end} is {_shown(text[begin:end])}, which has no word in it."
            )
        if begins[first] < begin or ends[behind - 1] > end:
            remarks.add(
                f"the entity {_shown(text[begin:end])} begins or ends inside of a word; such entities count as the "
                f"whole words they touch",
                where,
            )
        first = max(first, taken)
        for word in range(first, behind):
            tags[word] = f"I-{kind}" if word > first else f"B-{kind}"
        taken = behind
    return tags


# ---------------------------------------------------------------- text


def _whole(text: str) -> str:
    """JSON may escape half a character ("\\ud83d"), which no encoding can write; as long as before."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


def _first_of(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _are_objects(tokens: Any) -> bool:
    return isinstance(tokens, list) and bool(tokens) and all(isinstance(one, Mapping) for one in tokens)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
