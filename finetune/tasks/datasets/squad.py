"""Reads span questions from files: SQuAD's nested JSON (v1.1 and v2.0), and flat records as on the Hugging Face hub.

Nested (rajpurkar.github.io/SQuAD-explorer), one file:

    {"version": "v2.0", "data": [{"title": "", "paragraphs": [{"context": "", "qas": [
        {"id": "", "question": "", "answers": [{"text": "", "answer_start": 0}], "is_impossible": false}]}]}]}

Flat, one object per line (.jsonl), or a list of them, optionally under "data" (.json):

    {"id": "", "question": "", "context": "", "answers": {"text": [""], "answer_start": [0]}}
    {"id": "", "question": "", "context": "", "answers": [{"text": "", "answer_start": 0}]}
    {"id": "", "question": "", "context": "", "answer_text": "", "answer_start": 0}
    {"context": "", "qas": []}, with questions as above

Tables (.parquet, .csv, .tsv) with columns of these names; in .csv and .tsv, `answers` is JSON.

The format is determined by the keys, not by "version", which varies ("1.0" in SQuADShifts, "KorQuAD_v1.0"). An empty
list of answers, or a blank answer at -1, means that the context does not answer the question. `answer_start` counts
Unicode code points, as in SQuAD.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finetune.tasks.datasets.annotations import UNLABELED, NoLabel, skipped_summary, unused_reason
from finetune.tasks.datasets.files import plain_suffix, read_text
from finetune.tasks.datasets.surrogates import check_surrogates
from finetune.tasks.datasets.tables import json_values, read_table
from pretrain.common.errors import InputError

logger = logging.getLogger(__name__)

_COLUMNS = ("question", "context", "id", "answers", "answer_text", "answer_start")
_MAX_QUOTED = 3  # maximum number of bad answers quoted in a message
_FORMS = (  # accepted formats, for messages
    'a SQuAD file ({"data": [{"paragraphs": [{"context", "qas"}]}]}) or flat records '
    '({"id", "question", "context", "answers"})'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context; `start` is the index of its first character."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context. `answers` is () if the context does not answer it, None if unlabeled."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...] | None = None


def read(path: str, *, labeled: bool) -> list[Question]:
    """Read the questions of a file (.json, .jsonl, .parquet, .csv, .tsv, also .gz, .bz2, .xz).

    Questions about the same context share one string. Answers are not checked against the context here; see
    `handle_bad_answers`.

    Args:
        labeled: whether to skip unlabeled questions (neither answers nor is_impossible), and log their number.

    Raises:
        InputError: the file cannot be read, is not UTF-8, not JSON, has another format or is empty; two questions have
            the same id; with `labeled`, all questions are unlabeled.
    """
    records = _READERS.get(plain_suffix(Path(path)), _read_json)(path)
    questions: list[Question] = []
    locations: dict[str, str] = {}
    contexts: dict[str, str] = {}
    reasons: list[NoLabel] = []
    for location, record, context in records:
        question = _to_question(record, context, location, labeled=labeled)
        if labeled and question.answers is None:
            reasons.append(unused_reason(record) or UNLABELED)
            continue
        if question.id in locations:
            raise InputError(
                f"{location}: id {question.id!r} is already used in {locations[question.id]}. Predictions are "
                f"identified by their ids: make them unique."
            )
        locations[question.id] = location
        context = contexts.setdefault(question.context, question.context)
        questions.append(replace(question, context=context))
    line = skipped_summary(path, len(questions) + len(reasons), reasons) if reasons else ""
    if not questions:
        raise InputError(f"{line}. Give answers to questions." if line else f"{path}: has no questions. Give {_FORMS}.")
    if line:
        logger.warning("%s", line)
    return questions


def from_record(record: Any, location: str) -> Question:
    """Return an unlabeled question from one JSON object; its id is the `location` if the object has no id."""
    if not isinstance(record, Mapping):
        raise InputError(
            f"{location}: is {_describe(record)}. A span question needs a context: "
            f'write {{"question": "...", "context": "..."}}.'
        )
    unlabeled = {key: value for key, value in record.items() if key != "answers"}
    return _to_question({"id": location, **unlabeled}, record.get("context"), location, labeled=False)


def handle_bad_answers(
    questions: Sequence[Question], path: str, policy: Literal["stop", "skip"], *, training: bool
) -> list[Question]:
    """Handle bad answers: answers whose text is not in the context at their answer_start.

    With "skip", bad answers are removed from a training set, and so are questions without a good one. Other sets keep
    them, because scorers compare only strings. Either way, their number is logged.

    Args:
        questions: labeled or not.
        path: their file, for messages.
        policy: whether to raise an error for bad answers, or to skip them.
        training: whether this is the training set.

    Raises:
        InputError: policy is "stop" and there are bad answers, or "skip" leaves no question to train on. The message
            has their number and the first ones.
    """
    errors = [
        f"question {question.id}: {error}"
        for question in questions
        for answer in question.answers or ()
        if (error := _answer_error(question.context, answer, training=training))
    ]
    if not errors:
        return list(questions)
    total = sum(len(question.answers or ()) for question in questions)
    summary = f"{path}: {len(errors)} of {total} answers are not at their answer_start ({_join_first(errors)})"
    if policy == "stop":
        raise InputError(
            f"{summary}. Correct answer_start, which counts characters (Unicode code points) from 0, or skip them "
            f"with bad_answers: skip."
        )
    if not training:
        logger.warning("%s; kept, because scores compare only strings.", summary)
        return list(questions)
    filtered = [_with_good_answers(question) for question in questions]
    kept = [question for question in filtered if question is not None]
    logger.warning("%s; skipped, with %d questions that have no other answer.", summary, len(questions) - len(kept))
    if not kept:
        raise InputError(f"{path}: no question has a good answer ({_join_first(errors)}).")
    return kept


# ---------------------------------------------------------------- answers


def _with_good_answers(question: Question) -> Question | None:
    """Return the question with only its good answers; None if it has only bad ones."""
    answers = question.answers or ()
    good = tuple(answer for answer in answers if not _answer_error(question.context, answer, training=True))
    if len(good) == len(answers):
        return question
    return replace(question, answers=good) if good else None


def _answer_error(context: str, answer: Answer, *, training: bool) -> str:
    """Return why an answer is bad, "" if it is good."""
    text, start = answer.text, answer.start
    if training and not text.strip():
        return f"the answer {text!r} is blank"
    actual = context[start : start + len(text)] if start >= 0 else ""
    if actual == text:
        return ""
    error = f"{_quote(text)} at {start}, where the context of {len(context)} characters has {_quote(actual)}"
    starts = [context.rfind(text, 0, max(start, 0) + len(text)), context.find(text, max(start, 0))]
    if nearest := sorted((abs(position - start), position) for position in starts if position >= 0):
        return f"{error}; it is at {nearest[0][1]}"
    if "".join(text.split()) == "".join(actual.split()):
        return f"{error}; only whitespace differs"
    return f"{error}; the context does not contain it"


# ---------------------------------------------------------------- files


def _read_json(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, record, context) for every question of a .json file."""
    text = _read_nonempty(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ' A file with one object per line must be named ".jsonl".' if "Extra data" in str(error) else ""
        raise InputError(f"{path}: not JSON ({error}).{hint}") from None
    is_single = isinstance(document, dict) and "data" not in document and document.keys() & {"paragraphs", "qas"}
    items = [document] if is_single else document.get("data") if isinstance(document, dict) else document
    if not isinstance(items, list):
        kind = f"an object of {_keys(document)}" if isinstance(document, dict) else _describe(document)
        raise InputError(f"{path}: is {kind}; expected {_FORMS}.")
    name = "data" if isinstance(document, dict) else "record"
    for index, item in enumerate(items):
        location = f"{path}: {name}[{index}]"
        if not isinstance(item, dict):
            raise InputError(f"{location}: is {_describe(item)}; expected {_FORMS}.")
        rows = list(_question_records(item, location, str(index + 1)))
        if not rows and not item.keys() & {"paragraphs", "qas"}:
            raise InputError(f"{location}: is an object of {_keys(item)}; expected {_FORMS}.")
        yield from rows


def _question_records(item: dict[str, Any], location: str, default_id: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, record, context) for every question of `item`: an article, a paragraph or a flat record."""
    if "paragraphs" in item:
        for index, paragraph in enumerate(_expect_list(item, "paragraphs", location)):
            where = f"{location}.paragraphs[{index}]"
            if not isinstance(paragraph, dict):
                raise InputError(f"{where}: is {_describe(paragraph)}; expected an object of context and qas.")
            yield from _qas_records(paragraph, where)
    elif "qas" in item:
        yield from _qas_records(item, location, default_id)
    elif "question" in item and "context" in item:
        yield location, {"id": default_id, **item}, item["context"]


def _qas_records(paragraph: dict[str, Any], location: str, default_id: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, record, context) for every question of a paragraph."""
    for index, record in enumerate(_expect_list(paragraph, "qas", location)):
        if default_id and isinstance(record, dict):
            record = {"id": f"{default_id}.{index + 1}", **record}
        yield f"{location}.qas[{index}]", record, paragraph.get("context")


def _read_jsonl(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, record, context) for every question in a .jsonl file."""
    for number, record in json_values(Path(path), _read_nonempty(path), "jsonl")[1]:
        location = f"{path}:{number}"
        rows = list(_question_records(record, location, str(number))) if isinstance(record, dict) else []
        if not rows:
            kind = f"an object of {_keys(record)}" if isinstance(record, dict) else _describe(record)
            is_nested = isinstance(record, dict) and "data" in record
            hint = ' A nested SQuAD file must be named ".json".' if is_nested else ""
            raise InputError(
                f"{location}: is {kind}; expected a flat record with id, question, context and answers.{hint}"
            )
        yield from rows


def _read_table_rows(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, record, context) for every row of a table."""
    table = read_table(path, _COLUMNS, optional=_COLUMNS[2:])
    for row, cells in enumerate(zip(*table.columns.values(), strict=True)):
        record = {
            "id": str(table.numbers[row]),
            **{str(name): cell for name, cell in zip(table.columns, cells, strict=True) if cell is not None},
        }
        if isinstance(record.get("answers"), str):
            record["answers"] = _parse_answers_cell(record["answers"], table.where(row))
        yield table.where(row), record, record.get("context")


def _parse_answers_cell(cell: str, location: str) -> Any:
    """Parse the JSON in a cell of the column answers; None if it is blank."""
    if not cell.strip():
        return None
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        raise InputError(
            f'{location}: answers is {_quote(cell)}, not JSON. Write [{{"text": "...", "answer_start": 0}}], or leave '
            "the cell empty."
        ) from None


_READERS = {
    **dict.fromkeys((".jsonl", ".ndjson"), _read_jsonl),
    **dict.fromkeys((".parquet", ".csv", ".tsv"), _read_table_rows),
}


def _read_nonempty(path: str) -> str:
    text = read_text(Path(path).expanduser())
    if not text.strip():
        raise InputError(f"{path}: is empty. Give {_FORMS}.")
    return text


# ---------------------------------------------------------------- records


def _to_question(record: Any, context: Any, location: str, *, labeled: bool) -> Question:
    if not isinstance(record, Mapping):
        raise InputError(f"{location}: is {_describe(record)}; expected an object of id, question and answers.")
    id_ = record.get("id")
    if isinstance(id_, int) and not isinstance(id_, bool):
        id_ = str(id_)
    full_location = f"{location} (id {id_})" if isinstance(id_, str) and id_ != location else location
    text = _expect_string(record.get("question"), "question", full_location)
    return Question(
        id=_expect_string(id_, "id", location),
        text=text,
        context=_expect_string(context, "context", full_location),
        answers=_to_answers(record, full_location, labeled=labeled),
    )


def _to_answers(record: Mapping[str, Any], location: str, *, labeled: bool) -> tuple[Answer, ...] | None:
    raw, impossible = record.get("answers"), record.get("is_impossible")
    if raw is None:
        raw = [] if impossible is True else _single_answer(record, location)
    if raw is None or unused_reason(record) is not None:
        return None
    if isinstance(raw, dict):
        raw = _transpose_answers(raw, location)
    if not isinstance(raw, list):
        raise InputError(f'{location}: answers is {_describe(raw)}; expected [{{"text", "answer_start"}}].')
    parsed = [_to_answer(item, location) for item in raw]
    # Converters write a blank answer at -1 for questions without an answer.
    answers = tuple(answer for answer in parsed if answer.text.strip() or answer.start != -1)
    if not (answers or labeled or impossible in (None, True)):
        return None
    if impossible is not None and bool(impossible) == bool(answers):
        raise InputError(
            f"{location}: is_impossible is {json.dumps(impossible)}, but there are {len(answers)} answers. "
            f"Correct one of them."
        )
    return answers


def _single_answer(record: Mapping[str, Any], location: str) -> Any:
    """Return the answer in answer_text and answer_start, as a list of one; None if one of these keys is missing."""
    text, start = record.get("answer_text"), record.get("answer_start")
    if text is None or start is None or (isinstance(start, str) and not start.strip()) or start != start:
        return None
    try:
        return [{"text": text, "answer_start": start if isinstance(start, bool) else int(float(start))}]
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{location}: answer_start is {_quote(str(start))}; expected a character index.") from None


def _transpose_answers(columns: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return [{"text", "answer_start"}] from {"text": [], "answer_start": []}."""
    texts, starts = columns.get("text"), columns.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        raise InputError(
            f'{location}: answers is an object of {_keys(columns)}; expected {{"text": [...], "answer_start": [...]}}.'
        )
    if len(texts) != len(starts):
        raise InputError(
            f"{location}: answers has {len(texts)} text and {len(starts)} answer_start; expected the same number."
        )
    return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]


def _to_answer(item: Any, location: str) -> Answer:
    if not isinstance(item, dict):
        raise InputError(f'{location}: an answer is {_describe(item)}; expected {{"text", "answer_start"}}.')
    start = item.get("answer_start")
    if not isinstance(start, int) or isinstance(start, bool):
        raise InputError(f"{location}: answer_start is {_describe(start)}; expected a character index.")
    return Answer(_expect_string(item.get("text"), "the text of an answer", location), start)


def _expect_string(value: Any, name: str, location: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{location}: {name} is {_describe(value)}; expected text.")
    check_surrogates(value, name, location)
    return value


def _expect_list(record: dict[str, Any], key: str, location: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise InputError(f"{location}: {key} is {_describe(value)}; expected a list.")
    return value


# ---------------------------------------------------------------- wording


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, str):
        return f"text ({_quote(value)})"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return f"a list of {len(value)}" if isinstance(value, list) else "an object"


def _keys(mapping: Mapping[str, Any]) -> str:
    return ", ".join(list(mapping)[:8]) or "no keys"


def _quote(text: str) -> str:
    """Return `text` quoted and shortened, for a message."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _join_first(errors: Sequence[str]) -> str:
    return "; ".join(errors[:_MAX_QUOTED]) + ("; ..." if len(errors) > _MAX_QUOTED else "")
