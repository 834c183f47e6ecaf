"""Reads sentences from records: JSON, Parquet rows, or a single object or string.

Lines of a .jsonl file, or items of the list in a .json file, are objects, one per sentence. Adjacent sentences with
the same `document` (a string or a number) form a document:

    {"tokens": ["Ann", "left"], "tags": ["B-PER", "O"]}
    {"text": "Ann left", "entities": [{"start": 0, "end": 3, "type": "PER"}]}

Names of other tools are accepted: `labels` and `ner_tags` for `tags`, `spans` for `entities`, an entity's `label` for
its `type`, and the whole records of `span_forms`. Tokens that are strings are the words, even in a record with `text`
and `entities`. If they are objects, as in Prodigy's files, the text is segmented instead. `start` and `end` count
Unicode code points of the text, or of the tokens joined by spaces. A sentence without tags and entities is unlabeled.
Parquet files have columns of the same names; class indices become the names that `datasets` stored in the file.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.tasks.datasets.annotations import NoLabel, example_key, merge_annotations, reject_label_ids
from finetune.tasks.datasets.sentences import Remarks, Segmenter, Sentence, group_documents
from finetune.tasks.datasets.span_forms import convert_offsets, decode_tags, normalize_record
from finetune.tasks.datasets.surrogates import check_id, replace_surrogates
from finetune.tasks.datasets.table import Format, excerpt
from finetune.tasks.datasets.tables import json_values, read_table
from finetune.tasks.datasets.words import cut_words
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

_TAGS, _ENTITIES = ("tags", "labels", "ner_tags"), ("entities", "spans")  # possible keys
_COLUMNS = ("id", "text", "tokens", *_TAGS, *_ENTITIES, "label", "document")  # columns to read from a Parquet file


def to_sentence(
    record: Mapping[str, Any] | str, where: str, remarks: Remarks, segment: Segmenter = cut_words
) -> Sentence:
    """Return a sentence from plain text, which `segment` segments into words, or from one JSON object (see the module).

    The sentence has no context until `group_documents` is called.

    Raises:
        InputError: there is neither text nor tokens; the numbers of tags and tokens differ; an entity is outside the
            text or overlaps another.
    """
    return _parse({"text": record} if isinstance(record, str) else normalize_record(record), where, remarks, segment)


def _parse(record: Any, where: str, remarks: Remarks, segment: Segmenter) -> Sentence:
    if not isinstance(record, Mapping):
        raise InputError(f'{where}: {excerpt(record)} is not an object. Write {{"text": ...}} or {{"tokens": [...]}}.')
    if isinstance(reason := record.get("entities"), NoLabel):
        unlabeled = {key: value for key, value in record.items() if key in ("id", "text", "tokens", "document")}
        return replace(_parse(unlabeled, where, remarks, segment), missing_reason=reason)
    reject_label_ids(record, where)
    entities, tags = _first_present(record, _ENTITIES), _first_present(record, _TAGS)
    text, tokens = record.get("text"), record.get("tokens")
    # An empty text may have an empty list of tags.
    has_no_tokens = not tokens and (bool(text) or tags is None)
    if text is not None and (has_no_tokens or _are_objects(tokens)):
        if tokens and tags is not None and entities is None:
            raise InputError(f"{where}: tags need tokens that are strings. Give such tokens, or entities.")
        sentence, tags = _from_text(text, where, segment), None
    elif tokens is not None:
        if text is not None and entities is not None:
            tags = None
        sentence = _from_tokens(tokens, tags, text, where, "text" if entities is None else "tokens")
    else:
        raise InputError(
            f'{where}: has neither "text" nor "tokens". Its keys: {", ".join(map(str, list(record)[:10])) or "none"}.'
        )
    check_id(record.get("id"), where)
    sentence = replace(sentence, document_name=_document_name(record, where), id=record.get("id"))
    return sentence if tags is not None or entities is None else _with_spans(sentence, entities, where, remarks)


def json_records(path: Path, text: str, file_format: Format) -> Iterator[tuple[str, int, Any]]:
    """Yield (path, line number, value) of each non-blank line, or (location, 0, item) of the list in a .json file."""
    separator, numbered_values = json_values(path, text, file_format)
    for number, value in numbered_values:
        yield (str(path), number, value) if separator == ":" else (f"{path}{separator}{number}", 0, value)


def parquet_records(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield (location, 0, record) of each row; `InputError` if the file has neither tokens nor text."""
    table = read_table(path, _COLUMNS, optional=_COLUMNS)
    if not table.columns.keys() & {"text", "tokens"}:
        raise InputError(f"{path}: has neither a column tokens nor text. Rename the columns.")
    for row in range(len(table)):
        yield table.where(row), 0, {name: cells[row] for name, cells in table.columns.items()}


def from_records(
    records: Iterable[tuple[str, int, Any]], remarks: Remarks, segment: Segmenter, tag_names: Sequence[str] = ()
) -> list[Sentence]:
    """Return sentences from (source, line number or 0, record); `tag_names` are the names of tag ids 0, 1, ..."""
    items = [(source, line, normalize_record(decode_tags(row, tag_names, _TAGS))) for source, line, row in records]
    normalized = [record for _, _, record in items]
    converted_records = convert_offsets(normalized, segment)
    sentences: list[Sentence] = []
    for (source, line, record), converted_record in zip(items, converted_records, strict=True):
        where = f"{source}:{line}" if line else source
        if converted_record is not record:
            remarks.add("offsets count UTF-16 units, as in JavaScript; they are converted to characters", where)
        sentences.append(replace(_parse(converted_record, where, remarks, segment), source=source, line=line))
    values = [sentence.missing_reason if sentence.tags is None else sentence.tags for sentence in sentences]
    merge_annotations(values, [example_key(record, ["text"]) for record in normalized])
    return group_documents(
        replace(sentence, tags=None, missing_reason=value) if isinstance(value, NoLabel) else sentence
        for sentence, value in zip(sentences, values, strict=True)
    )


def from_lines(path: str, lines: list[str], segment: Segmenter) -> list[Sentence]:
    """Return one document per line; an empty line is an empty document."""
    return [
        replace(_from_text(line.removesuffix("\r"), f"{path}:{number}", segment), source=path, line=number)
        for number, line in enumerate(lines if lines[-1] else lines[:-1], 1)
    ]


def _document_name(record: Mapping[str, Any], where: str) -> str | None:
    name = record.get("document")
    if name is None:
        return None
    if not isinstance(name, str | int):
        raise InputError(f"{where}: document is {excerpt(name)}; expected text or a number.")
    return str(name)


def _from_tokens(tokens: Any, tags: Any, text: Any, where: str, conflicting_key: str) -> Sentence:
    """Return a sentence of `tokens` and `tags`; the words are located in `text`, if given, from left to right."""
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise InputError(f"{where}: tokens is {excerpt(tokens)}; expected a list of strings.")
    words = [replace_surrogates(token) for token in tokens]
    text, offsets = (None, None) if text is None else _find_words(words, text, where, conflicting_key)
    if tags is None:
        return Sentence(words, None, where, text=text, offsets=offsets)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise InputError(
            f"{where}: tags is {excerpt(tags)}; expected a list of strings such as B-PER and O. "
            f"If they are numbers, set `tag_names`."
        )
    if len(tags) != len(words):
        raise InputError(
            f"{where}: {counted(len(words), 'token')} and {counted(len(tags), 'tag')}. Give each token one tag."
        )
    return Sentence(words, tags, where, text=text, offsets=offsets)


def _find_words(words: list[str], text: Any, where: str, conflicting_key: str) -> tuple[str, np.ndarray]:
    """Return (text, int64 [W, 2]: start and end of each word in it, in characters)."""
    if not isinstance(text, str):
        raise InputError(f"{where}: text is {excerpt(text)}; expected text.")
    text, end = replace_surrogates(text), 0
    offsets = np.zeros((len(words), 2), np.int64)
    for index, word in enumerate(words):
        start = text.find(word, end)
        if start < 0:
            raise InputError(
                f"{where}: token {index}, {excerpt(word)}, is not in the text from character {end} on. Leave out "
                f'"{conflicting_key}", or give the tokens exactly as in the text.'
            )
        end = start + len(word)
        offsets[index] = start, end
    return text, offsets


def _from_text(text: Any, where: str, segment: Segmenter) -> Sentence:
    if not isinstance(text, str):
        raise InputError(f"{where}: text is {excerpt(text)}; expected text.")
    text = replace_surrogates(text)
    offsets = segment(text)
    words = [text[start:end] for start, end in offsets.tolist()]
    return Sentence(words, None, where, text=text, offsets=offsets, from_text=True)


def _with_spans(sentence: Sentence, entities: Any, where: str, remarks: Remarks) -> Sentence:
    """Return the sentence with tags made from the character spans of `entities`."""
    text, offsets = sentence.text_and_offsets()
    spans = _parse_spans(entities, text, where)
    if sentence.text is None:
        _check_alignment(spans, offsets, where)
    tags = _make_tags(spans, text, offsets, where, remarks)
    return replace(sentence, tags=tags, from_spans=True)


def _parse_spans(entities: Any, text: str, where: str) -> list[tuple[int, int, str]]:
    """Return (start, end, type) of each entity, sorted; they are within the text and do not overlap."""
    if not isinstance(entities, list):
        raise InputError(f"{where}: entities is {excerpt(entities)}; expected a list.")
    spans = []
    for index, entity in enumerate(entities):
        location = f"{where}: entity {index}"
        form = '{"start": 0, "end": 3, "type": "PER"}'
        if not isinstance(entity, Mapping):
            raise InputError(f"{location} is {excerpt(entity)}; expected {form}.")
        type_ = entity.get("type", entity.get("label"))
        type_ = type_.strip() if isinstance(type_, str) else type_
        start, end = entity.get("start"), entity.get("end")
        if not isinstance(type_, str) or not type_ or type(start) is not int or type(end) is not int:
            raise InputError(f"{location} is {excerpt(entity)}; expected {form}.")
        if not 0 <= start < end <= len(text):
            raise InputError(
                f"{location} is from {start} to {end}, but the text has {len(text)} characters. Count Unicode "
                f"characters from 0; `end` is the index after the last."
            )
        expected = entity.get("text")
        if isinstance(expected, str) and replace_surrogates(expected) != text[start:end]:
            raise InputError(
                f"{location} is {excerpt(expected)}, but {start} to {end} of the text is {excerpt(text[start:end])}. "
                f"Count Unicode characters from 0, not bytes; `end` is the index after the last."
            )
        spans.append((start, end, type_))
    spans.sort()
    for (start, end, type_), (other_start, other_end, other_type) in itertools.pairwise(spans):
        if other_start < end:
            raise InputError(
                f"{where}: entities {type_} from {start} to {end} and {other_type} from {other_start} to {other_end} "
                f"overlap. A word can have one tag: keep one of them."
            )
    return spans


def _check_alignment(spans: list[tuple[int, int, str]], offsets: np.ndarray, where: str) -> None:
    """Raise `InputError` unless entities begin and end with a token; if not, their offsets probably count tokens."""
    starts, ends = set(offsets[:, 0].tolist()), set(offsets[:, 1].tolist())
    for start, end, type_ in spans:
        if start not in starts or end not in ends:
            raise InputError(
                f"{where}: the entity {type_} from {start} to {end} does not begin and end with a token. "
                f"Count characters of the tokens joined by spaces, not tokens; or give tags."
            )


def _make_tags(
    spans: list[tuple[int, int, str]], text: str, offsets: np.ndarray, where: str, remarks: Remarks
) -> list[str]:
    """Return IOB2 tags of the words at `offsets`; a word belongs to the first entity that covers any part of it."""
    tags = ["O"] * len(offsets)
    starts, ends = offsets[:, 0], offsets[:, 1]
    next_free = 0  # index after the last word that is in an entity
    for start, end, type_ in spans:
        first = int(np.searchsorted(ends, start, "right"))
        stop = int(np.searchsorted(starts, end, "left"))
        quoted = excerpt(text[start:end])
        if first >= stop:
            raise InputError(f"{where}: the entity {type_} from {start} to {end} is {quoted}, which contains no word.")
        if stop <= next_free:
            remarks.add(
                "an entity shares a word with the previous entity and is skipped; give `tokens` that separate them",
                f"{where}, {quoted}",
            )
            continue
        if starts[first] < start or ends[stop - 1] > end:
            remarks.add(
                "an entity has a boundary inside a word; such entities are extended to whole words",
                f"{where}, {quoted}",
            )
        first = max(first, next_free)
        for word in range(first, stop):
            tags[word] = f"I-{type_}" if word > first else f"B-{type_}"
        next_free = stop
    return tags


def _first_present(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _are_objects(tokens: Any) -> bool:
    return isinstance(tokens, list) and bool(tokens) and all(isinstance(token, Mapping) for token in tokens)
