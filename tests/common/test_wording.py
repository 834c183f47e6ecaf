"""Counts and scores as people read them."""

from __future__ import annotations

import pytest

from finetune.training.saved import result_lines
from pretrain.common.wording import counted, did_you_mean, for_terminal, shown_scores


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (1, "column", "", "1 column"),
        (0, "column", "", "0 columns"),
        (2000, "column", "", "2,000 columns"),
        (1, "process", "processes", "1 process"),
        (3, "process", "processes", "3 processes"),
    ],
)
def test_a_noun_follows_its_number(number: int, noun: str, plural: str, text: str) -> None:
    assert counted(number, noun, plural) == text


def test_a_name_that_goes_on_is_nearer_than_a_similar_one() -> None:
    assert did_you_mean("learn", ["lean", "learning_rate"]) == "did you mean learning_rate?"
    assert did_you_mean("--", ["--out", "--set"]) == ""


def test_a_terminal_gets_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"Names:\n  name  {'word ' * 9}end\n  total  {'w' * 60}"
    assert for_terminal(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    first, *rest = for_terminal(text).split("\n")[1:]
    assert (first, rest[0]) == (f"  name{'  word'}{' word' * 5}", f"        {'word ' * 3}end")
    assert max(map(len, [first, rest[0]])) <= 40


def test_micro_f1_is_shown_unless_it_is_the_accuracy() -> None:
    single = {"accuracy": 0.3, "macro_f1": 0.2, "micro_f1": 0.1 + 0.2}
    assert list(shown_scores(single)) == ["accuracy", "macro_f1"]
    assert list(shown_scores(single, "micro_f1")) == ["macro_f1", "micro_f1"]
    sets = {"micro_f1": 0.5, "macro_f1": 0.4}
    assert shown_scores(sets) == sets
    other = {"accuracy": 0.25, "micro_f1": 0.5}
    assert shown_scores(other) == other


def test_the_line_of_a_result_has_its_scores_and_its_remarks() -> None:
    class Task:
        metric, positive = "accuracy", ""

        def result_remarks(self, details: dict[str, str]) -> list[str]:
            return [details["remark"]] if details else []

    scores = {"accuracy": 0.5, "micro_f1": 0.5}
    task: object = Task()
    assert result_lines(task, "dev", scores, {}) == ["dev: accuracy 0.5000"]  # pyright: ignore[reportArgumentType]
    assert result_lines(task, "dev", scores, {"remark": "odd."})[1] == "  warning: dev: odd."  # pyright: ignore[reportArgumentType]
