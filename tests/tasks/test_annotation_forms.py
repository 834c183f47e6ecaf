"""Annotation tools and the states in which they leave a record: each is read, or left out with a count."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.tasks.base import Task
from finetune.tasks.classification import Classification, ClassificationSettings
from finetune.tasks.entities import Entities, EntitiesSettings
from finetune.tasks.questions import Questions, QuestionsSettings
from tests.tasks.refusals import refused

MULTI, MOOD, VALUE = (
    {"problem_type": "multi_label"},
    {"label_column": "mood"},
    {"problem_type": "regression", "labels": ()},
)
YES, NO, PASS = "accept", "reject", "ignore"
OPTIONS = [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]


def texts(*labels: Any, key: str = "label", **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"t{n}", key: label, **more} for n, label in enumerate(labels)]


def answered(*labels: Any, key: str = "label", text: str = "") -> list[dict[str, Any]]:
    """Records of Prodigy."""
    return [{"text": text or f"t{n}", key: label, "answer": answer} for n, (label, answer) in enumerate(labels)]


def choice(*chosen: str, **more: Any) -> dict[str, Any]:
    return {"result": [{"type": "choices", "from_name": "mood", "value": {"choices": list(chosen)}}], **more}


def tasks(*annotations: list[Any]) -> list[dict[str, Any]]:
    """Records of Label Studio."""
    return [{"id": n, "data": {"sentence": f"t{n}"}, "annotations": every} for n, every in enumerate(annotations)]


def minimal(*labels: Any, annotators: int = 1) -> list[dict[str, Any]]:
    """Records of Label Studio in JSON_MIN."""
    rows = [{"text": "t", "id": n // annotators, "mood": one, "annotation_id": n} for n, one in enumerate(labels)]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


# Row of the guide's table -> (settings, records, labels of those that are read, remark).
SAME = [("a", YES), ("b", YES)]
DISPUTE = [("a", YES), ("b", YES), ("a", NO)]
CHOSEN = [(["a"], YES), (["b"], YES), ([], YES), (["a", "b"], YES), (["a"], NO)]
GROUND = [choice("a"), choice("b", ground_truth=True)]
TASKS = tasks([choice("a")], [choice("b")], [choice("a", was_cancelled=True)], [], [choice()])
PAIRS = tasks([choice("a")] * 2, [choice("b")], [choice("a"), choice("b")], GROUND)
OUT = "rows left out"
CLASSES: dict[str, list[tuple[dict[str, Any], list[Any] | str, list[Any], str]]] = {
    "Prodigy: `label`, `answer`": [
        ({}, answered(("a", YES), ("b", YES), ("b", NO), ("a", PASS)), ["a", "b"], f"2 of 4 {OUT}: 1 rejected, 1 ign"),
        (MULTI, answered(("a", YES), ("a", NO)), [("a",)], f"1 of 2 {OUT}: 1 rejected"),
        (
            {"pair_column": "b"},
            [{**one, "b": f"{n}"} for n, one in enumerate(answered(*SAME, text="t"))],
            ["a", "b"],
            "",
        ),
    ],
    "Prodigy: `accept`, `options`": [
        ({}, answered(*CHOSEN, key=YES), ["a", "b"], f"3 of 5 {OUT}: 1 unlabeled, 1 with several labels, 1 rejected"),
        (MULTI, answered((["b", "a"], YES), ([], YES), ([], PASS), key=YES), [("a", "b"), ()], f"1 of 3 {OUT}: 1 ign"),
        ({}, texts([1], [2], key=YES, options=OPTIONS), ["a", "b"], ""),
    ],
    "Label Studio: JSON": [
        ({}, TASKS, ["a", "b"], f"3 of 5 {OUT}: 2 unlabeled, 1 skipped"),
        (MULTI, tasks([choice("b", "a")], [choice()], []), [("a", "b"), ()], f"1 of 3 {OUT}: 1 unlabeled"),
    ],
    "Label Studio: JSON_MIN": [
        (MOOD, minimal("a", "b"), ["a", "b"], ""),
        (MOOD, minimal("a", "b", None), ["a", "b"], f"1 of 3 {OUT}: 1 unlabeled"),
        (MULTI, minimal({"choices": ["b", "a"]}), [("a", "b")], ""),  # the only column that may be labels
    ],
    "several annotators": [
        ({}, PAIRS, ["a", "b", "b"], f"1 of 4 {OUT}: 1 disputed by annotators"),
        (MOOD, minimal(*"aabbab", annotators=2), ["a", "b"], f"4 of 6 {OUT}: 2 merged with another annotation, 2 d"),
        (
            {},
            answered(*DISPUTE, text="t") + texts("a", "b"),
            ["a", "b"],
            f"3 of 5 {OUT}: 2 disputed by annotators, 1",
        ),
        (
            MOOD,
            "annotation_id,id,mood,text\n1,7,a,t\n2,7,b,t\n3,8,b,u\n4,9,a,v\n",
            ["b", "a"],
            f"2 of 4 {OUT}: 2 disputed",
        ),
    ],
    "Doccano: classes": [
        ({}, texts(["a"], ["b"], [], ["a", "b"]), ["a", "b"], f"2 of 4 {OUT}: 1 unlabeled, 1 with several labels")
    ],
    "no label: blank, `null`, NaN": [
        ({}, [*texts("a", "b", None, " "), {"text": "u"}], ["a", "b"], f"3 of 5 {OUT}: 3 unlabeled"),
        (VALUE, texts(1, 2.5, float("nan")), [1.0, 2.5], f"1 of 3 {OUT}: 1 unlabeled"),
    ],
    "CSV of Excel": [({}, '\ufeffsep=;\ntext;label\n"a; b";a\nü;b\nc;\n', ["a", "b"], f"1 of 3 {OUT}: 1 unlabeled")],
}


ANN = [[0, 3, "PER"], [9, 12, "LOC"]]
OFFSETS = [{"id": 1, "start_offset": a, "end_offset": b, "label": kind} for a, b, kind in ANN]
TAGS = ["B-PER", "O", "B-LOC"]
ANN_LEFT = "Ann left Rio"
SPANS = [{"start": a, "end": b, "label": kind, "text": ANN_LEFT[a:b]} for a, b, kind in ANN]
MARKED = {"result": [{"type": "labels", "value": {**one, "labels": [one["label"]]}} for one in SPANS]}
EMPTY: dict[str, Any] = {"result": []}
TRUTH = MARKED | {"ground_truth": True}


def spans(*found: Any, key: str = "spans", **more: Any) -> list[dict[str, Any]]:
    return [{"text": ANN_LEFT, key: one, **more} for one in found]


def marked(*annotations: list[Any]) -> list[dict[str, Any]]:
    return [{"id": n, "data": {"text": ANN_LEFT}, "annotations": every} for n, every in enumerate(annotations)]


# Row of the guide's table -> (records, tags of those that are read, remark).
NONE, LATER = ["O"] * 3, ["O", "B-PER", "O", "O", "B-LOC"]
UNITS = [[3, 6, "PER"], [15, 18, "LOC"]]
SMILE = "\N{GRINNING FACE} Ann left \N{GRINNING FACE} Rio"
WORDS = "Sentence #,Word,POS,Tag\nSentence: 1,Ann,NNP,b-PER\n,left,VB,O\n,Rio,NNP,B-LOC \nSentence: 2,it,P,o\n"
REJECTED = [*spans(SPANS, answer=YES), *spans(SPANS, answer=NO), *spans([], answer=PASS)]
ENTITIES: dict[str, list[tuple[list[Any] | str, list[Any], str]]] = {
    "Prodigy: `spans`": [
        (REJECTED, [TAGS], f"2 of 3 {OUT}: 1 rejected, 1 ignored"),
        ([*spans(SPANS, answer=YES), {"text": "it went on", "answer": YES}], [TAGS, NONE], ""),
        (spans(SPANS, answer=YES) + spans(SPANS, answer=YES, _view_id="ner"), [TAGS], "with an answer"),
    ],
    "Label Studio: JSON": [
        (marked([MARKED], [MARKED | {"was_cancelled": True}], [], [EMPTY]), [TAGS, NONE], "1 skipped, 1 unlabeled")
    ],
    "Label Studio: JSON_MIN": [
        ([*spans(SPANS, key="ner", id=1, annotation_id=1), {"text": "it", "annotation_id": 2}], [TAGS], "1 unlabeled")
    ],
    "several annotators": [
        (marked([MARKED] * 2, [MARKED, EMPTY], [EMPTY, TRUTH]), [TAGS, TAGS], f"1 of 3 {OUT}: 1 disputed by annotators")
    ],
    "Doccano: spans": [
        (spans(ANN, [], key="label"), [TAGS, NONE], ""),
        (spans(OFFSETS, key="entities", relations=[]), [TAGS], ""),
    ],
    "offsets in UTF-16 units": [
        ([{"text": SMILE, "label": UNITS}, *spans(ANN, key="label")], [LATER, TAGS], "offsets count"),
        ([{"text": SMILE, "label": [[2, 5, "PER"], [13, 16, "LOC"]]}], [LATER], ""),
    ],
    "CSV of words": [(WORDS, [TAGS, ["O"]], ""), ("sep=;\n" + WORDS.replace(",", ";"), [TAGS, ["O"]], "")],
}


# Row of the guide's table -> (file, content, starts of the answers that are read, remark).
CAT = "\N{CAT FACE} The cat sat."
ASKED = {"question": "Who?", "context": CAT}
ONE = {**ASKED, "answer_text": "cat", "answer_start": 6}
QUESTIONS: dict[str, list[tuple[str, Any, list[Any], str]]] = {
    "`{context, qas}`": [
        ("a.json", [{"context": CAT, "qas": [{"question": "Who?", "answers": []}, {"question": "Why?"}]}], [()], "1 u"),
        ("a.jsonl", [{"context": CAT, "qas": [{**ONE, "id": "1"}, {**ONE, "id": "2", "answer": NO}]}], [(6,)], "1 rej"),
    ],
    "`answer_text`, `answer_start`": [
        ("a.jsonl", [ONE, ASKED], [(6,)], f"1 of 2 {OUT}: 1 unlabeled"),
        ("a.csv", "question,context,answer_text,answer_start\nWho?,A cat,cat,2\nWho?,A,,\n", [(2,)], "1 unlabeled"),
    ],
}

REMARK = re.compile("rows left out:|offsets count UTF")


def write(path: Path, content: list[Any] | str) -> str:
    path.write_text(content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content))
    return str(path)


def check(task: Task[Any], path: str, rows: list[Any] | str, gold: Callable[[Any], Any], expected: list[Any]) -> None:
    assert [gold(one) for one in task.read_train()] == expected
    assert [gold(one) for one in task.read_file(path)] == expected
    # All are predicted; only labels that are given are gold.
    predicted = task.read_file(path, labeled=False)
    assert len(predicted) == len(rows) if isinstance(rows, list) else len(predicted) >= len(expected)
    assert [gold(one) for one in predicted if gold(one) is not None] == expected
    assert task.is_labeled(predicted)


def check_remark(line: str, caplog: pytest.LogCaptureFixture) -> None:
    logged = [record.message for record in caplog.records if REMARK.search(record.message)]
    assert len(logged) == bool(line)  # once, although the file is read twice
    assert all(line in one for one in logged)


@pytest.mark.parametrize(("settings", "rows", "labels", "line"), [one for every in CLASSES.values() for one in every])
def test_labels_are_read_or_left_out_with_a_count(settings, rows, labels, line, tmp_path, caplog) -> None:
    path = write(tmp_path / ("a.csv" if isinstance(rows, str) else "a.jsonl"), rows)
    task = Classification(ClassificationSettings(**{"train": path, "labels": ("a", "b"), **settings}))
    check(task, path, rows, lambda one: one.label, labels)
    check_remark(line, caplog)


@pytest.mark.parametrize(("rows", "tags", "line"), [one for every in ENTITIES.values() for one in every])
def test_spans_are_read_or_left_out_with_a_count(rows, tags, line, tmp_path, caplog) -> None:
    path = write(tmp_path / ("a.csv" if isinstance(rows, str) else "a.jsonl"), rows)
    task = Entities(EntitiesSettings(train=path, labels=("PER", "LOC")))
    check(task, path, rows, lambda one: one.tags, tags)
    check_remark(line, caplog)
    assert (
        task.score(found := task.read_file(path, labeled=False), [{"tags": one.tags or ["O"]} for one in found])["f1"]
        == 1
    )


@pytest.mark.parametrize(("name", "content", "starts", "line"), [one for every in QUESTIONS.values() for one in every])
def test_answers_are_read_or_left_out_with_a_count(name, content, starts, line, tmp_path, caplog) -> None:
    path = write(tmp_path / name, json.dumps(content) if name == "a.json" else content)
    task = Questions(QuestionsSettings(train=path, unanswerable=True))
    assert [tuple(answer.start for answer in one.answers or ()) for one in task.read_train()] == starts
    check_remark(line, caplog)
    predicted = task.read_file(path, labeled=False)
    assert len(predicted) > len(starts)
    assert sum(one.answers is not None for one in predicted) == len(starts)
    assert task.is_labeled(predicted)


# Row of the guide's table -> (task, file, content, message).
IDS = [{"label": 3, "user": 1, "start_offset": 0, "end_offset": 3}]
BY_ID = spans([{**OFFSETS[0], "label": 7}], key="entities")
REFUSED: dict[str, list[tuple[type[Task[Any]], str, Any, str]]] = {
    "Doccano: ids of labels": [
        (
            Classification,
            "a.jsonl",
            texts(IDS, key="annotations"),
            "a.jsonl:1: annotations have label ids, such as",
        ),
        (Classification, "a.jsonl", texts([3], [4]), r"a.jsonl:1: label is \[3\]. Give each example the name of"),
        (Entities, "a.jsonl", texts(IDS, key="annotations"), "a.jsonl:1: annotations have label ids, such as 3"),
        (Entities, "a.jsonl", BY_ID, "a.jsonl:1: entity 0 is "),
    ],
    "`.xlsx`, `.ods`": [
        (Classification, "a.xlsx", "PK", "a.xlsx: spreadsheets are not supported. Save it as CSV UTF-8"),
        (Entities, "a.ods", "PK", "a.ods: spreadsheets are not supported"),
        (Questions, "a.xlsx", "PK", "a.xlsx: spreadsheets are not supported"),
    ],
}


@pytest.mark.parametrize(("task", "name", "content", "message"), [one for every in REFUSED.values() for one in every])
def test_what_is_not_read_is_refused_with_what_to_do(task, name, content, message, tmp_path) -> None:
    made = task(task.settings_type(train=write(tmp_path / name, content)))
    refused(message, made.read_train)


def test_the_guide_has_every_row() -> None:
    page = (
        (Path(__file__).parents[2] / "docs/guides/finetuning.md")
        .read_text()
        .partition("## Annotation tools")[2]
        .partition("\n## ")[0]
    )
    rows = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")}
    assert rows == {"From", "---"} | CLASSES.keys() | ENTITIES.keys() | QUESTIONS.keys() | REFUSED.keys()
