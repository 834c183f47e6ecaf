"""Annotation tools and the states in which they leave a record: each is read, or left out with a count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.tasks.classification import Classification, ClassificationSettings

MULTI, VALUE = {"problem_type": "multi_label"}, {"problem_type": "regression", "labels": ()}
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
DISPUTE = [(("a"), YES), ("b", YES), ("a", NO)]
CHOSEN = [(["a"], YES), (["b"], YES), ([], YES), (["a", "b"], YES), (["a"], NO)]
USERS = [[{"label": one, "user": n} for n, one in enumerate(each)] for each in ("aa", "b", "ab", "")]
GROUND = [choice("a"), choice("b", ground_truth=True)]
TASKS = tasks([choice("a")], [choice("b")], [choice("a", was_cancelled=True)], [], [choice()])
PAIRS = tasks([choice("a")] * 2, [choice("b")], [choice("a"), choice("b")], GROUND)
CATS = [["t", {"cats": {"a": 1.0, "b": 0.0}}], {"text": "u", "cats": {"a": 0, "b": 1}}]
OUT = "rows left out"
CLASSES: dict[str, list[tuple[dict[str, Any], list[Any] | str, list[Any], str]]] = {
    "Prodigy: `label`, `answer`": [
        ({}, answered(("a", YES), ("b", YES), ("b", NO), ("a", PASS)), ["a", "b"], f"2 of 4 {OUT}: 1 rejected, 1 ign"),
        (MULTI, answered(("a", YES), ("a", NO), ("a", PASS)), [("a",), ()], f"1 of 3 {OUT}: 1 ignored"),
        (MULTI, answered(("b", YES), ("a", YES), text="t"), [("a", "b")], f"1 of 2 {OUT}: 1 merged with others of t"),
        (MULTI, answered(("b", YES), ("a", NO)), [("b",), ()], "2 of 2 texts were not asked about every label"),
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
        ({"label_column": "mood"}, minimal("a", "b"), ["a", "b"], ""),
        ({}, minimal("a", "b", None), ["a", "b"], f"1 of 3 {OUT}: 1 unlabeled"),
        (MULTI, minimal({"choices": ["b", "a"]}), [("a", "b")], "labels are those of 'mood'"),
    ],
    "several annotators": [
        ({}, PAIRS, ["a", "b", "b"], f"1 of 4 {OUT}: 1 disputed by annotators"),
        ({}, minimal(*"aabbab", annotators=2), ["a", "b"], f"4 of 6 {OUT}: 2 repeated by annotators, 2 disputed by an"),
        ({}, answered(*DISPUTE, text="t") + texts("b"), ["b"], f"3 of 4 {OUT}: 3 disputed by annotators"),
    ],
    "Doccano: classes": [
        ({}, texts(["a"], ["b"], [], ["a", "b"]), ["a", "b"], f"2 of 4 {OUT}: 1 unlabeled, 1 with several labels"),
        ({}, texts(*USERS, key="annotations"), ["a", "b"], f"2 of 4 {OUT}: 1 disputed by annotators, 1 unlabeled"),
    ],
    "spaCy: `cats`": [({}, CATS, ["a", "b"], "")],
    "no label: empty, blank, `null`, NaN": [
        ({}, [*texts("a", "b", None, " "), {"text": "u"}], ["a", "b"], f"3 of 5 {OUT}: 3 unlabeled"),
        (VALUE, texts(1, 2.5, float("nan")), [1.0, 2.5], f"1 of 3 {OUT}: 1 unlabeled"),
    ],
    "CSV of Excel": [
        ({}, '\ufeffsep=;\ntext;label\n"a; b";a\nü;b\nc;\n', ["a", "b"], f"1 of 3 {OUT}: 1 unlabeled"),
        ({}, "text;label\r\nt, u;a\r\nv;b\r\n", ["a", "b"], ""),
    ],
}


def write(path: Path, content: list[Any] | str) -> str:
    path.write_text(content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content))
    return str(path)


@pytest.mark.parametrize(("settings", "rows", "labels", "line"), [one for every in CLASSES.values() for one in every])
def test_labels_are_read_or_left_out_with_a_count(settings, rows, labels, line, tmp_path, caplog) -> None:
    path = write(tmp_path / ("a.csv" if isinstance(rows, str) else "a.jsonl"), rows)
    task = Classification(ClassificationSettings(**{"train": path, "dev": path, "labels": ("a", "b"), **settings}))
    assert [one.label for one in task.read_held_out()["dev"]] == labels
    assert [one.label for one in task.read_file(path)] == labels
    logged = [record.message for record in caplog.records]
    # Once, although the file is read twice.
    assert sum(one.startswith(f"{path}: {line}") for one in logged) == 1 if line else OUT not in caplog.text
    # All are predicted; only labels that are given are gold.
    predicted = task.read_file(path, labeled=False)
    assert len(predicted) == (len(rows) if isinstance(rows, list) else rows.count("\n") - 1 - rows.count("sep="))
    assert [one.label for one in predicted if one.label is not None] == labels
