"""Exact match, F1 and thresholds against slow twins of the official scripts' rules, over texts made up at random.

transformers carried the v2.0 script up to its version 4: `squad_v2` equals its `squad_evaluate` (4.46.3) on 3,000 such
sets.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.tasks.questions.metrics import best_threshold, normalize_answer, score_v1, score_v2, squad_v1, squad_v2

ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WORDS = ["a", "The", "an", "cat", "cats", "CAT", "U.S.", "the-end", "aß", "Ünï", "«quoted»"]
WORDS += ["é", "1,990", "_a_", "—", "..."]

texts = st.lists(st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=5).map(" ".join)
questions = st.lists(
    st.tuples(st.lists(texts, max_size=3), texts | st.none(), st.integers(-3, 3)), min_size=1, max_size=8
)


def test_normalization_by_hand():
    assert normalize_answer(" The  Cat, a dog -- AN ox\u00a0!") == "cat dog ox"
    assert normalize_answer("the-end a.b") == "theend ab"  # punctuation goes before articles
    assert normalize_answer("«The» ’a’") == "« » ’ ’"  # only ASCII punctuation goes, and « does not make a word
    assert normalize_answer("The A,") == ""


@pytest.mark.parametrize(
    ("golds", "answer", "first", "second"),
    [
        (["The A,"], "", (1, 0), (1, 1)),  # a gold that normalizes to nothing: v1.1 sees no common word, v2.0 drops it
        (["The A,"], "the", (1, 0), (1, 1)),
        (["The A,", "cat"], "", (1, 0), (0, 0)),
        (["cat"], "", (0, 0), (0, 0)),
        (["cat"], "a", (0, 0), (0, 0)),
        (["the cat sat", "dog"], "cat", (0, 2 / 3), (0, 2 / 3)),
        (["cat cat dog"], "cat cat cat", (0, 2 / 3), (0, 2 / 3)),  # words count as often as they occur
        (["b c", "c d", "d"], "d", (1, 1), (1, 1)),
    ],
)
def test_one_question(golds, answer, first, second):
    assert score_v1(golds, answer) == pytest.approx(first)
    assert score_v2(golds, answer) == pytest.approx(second)


def test_no_gold_means_that_only_nothing_is_right():
    assert score_v2([], "") == (1, 1)
    assert score_v2([], "the") == (1, 1)  # as the script: it compares what is normalized
    assert score_v2([], "cat") == (0, 0)


def test_missing_predictions_count_in_v1_only():
    golds = {"1": ["cat"], "2": ["dog"], "3": ["ox"]}
    assert squad_v1(golds, {"1": "cat", "9": "dog"}) == pytest.approx({"exact_match": 1 / 3, "f1": 1 / 3})
    assert squad_v2(golds, {"1": "cat", "9": "dog"}) == pytest.approx(
        {"exact": 1, "f1": 1, "total": 1, "HasAns_exact": 1, "HasAns_f1": 1, "HasAns_total": 1}
    )
    assert squad_v1(golds, {}) == {"exact_match": 0, "f1": 0}
    with pytest.raises(ValueError, match="no question has a prediction"):
        squad_v2(golds, {})


def test_threshold_by_hand():
    golds = {"1": ["cat"], "2": [], "3": ["dog"], "4": []}
    answers = {"1": "cat", "2": "ox", "3": "dog", "4": "ox"}
    no_answer = {"1": -2.0, "2": 1.0, "3": 0.5, "4": 3.0}
    exact = {"1": 1.0, "2": 0.0, "3": 1.0, "4": 0.0}
    assert best_threshold(golds, answers, exact, no_answer) == (1.0, 0.5)
    found = squad_v2(golds, answers, no_answer)
    assert (found["HasAns_f1"], found["NoAns_f1"]) == (1, 0)
    assert (found["best_f1"], found["best_f1_thresh"]) == (1, 0.5)


def test_threshold_where_no_answer_is_worth_it():
    golds = {"1": ["cat"], "2": []}
    assert best_threshold(golds, {"1": "ox", "2": "ox"}, {"1": 0, "2": 0}, {"1": 5.0, "2": 4.0}) == (0.5, 0.0)


def normalized(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in ASCII_PUNCTUATION)
    words: list[str] = []
    word = ""
    for character in bare + " ":  # \b of Python's re stands between a word character and another one
        is_word = character.isalnum() or character == "_"
        if is_word != bool(word and (word[-1].isalnum() or word[-1] == "_")) and word:
            words.append(word)
            word = ""
        word += character
    kept = "".join([" " if word in ("a", "an", "the") else word for word in [*words, word]])
    return kept.split()


def overlap(gold: list[str], answer: list[str]) -> float:
    left, same = list(gold), 0
    for word in answer:
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(answer), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def twin_v1(golds, answers):
    exact = f1 = 0.0
    for question in golds:
        if question in answers:
            given = normalized(answers[question])
            exact += max(1.0 if normalized(gold) == given else 0.0 for gold in golds[question])
            f1 += max(overlap(normalized(gold), given) for gold in golds[question])
    return {"exact_match": exact / len(golds), "f1": f1 / len(golds)}


def twin_v2_scores(golds, answers):
    exact, f1 = {}, {}
    for question in golds:
        if question in answers:
            given = normalized(answers[question])
            right = [words for words in map(normalized, golds[question]) if words] or [[]]
            exact[question] = max(1.0 if words == given else 0.0 for words in right)
            f1[question] = max(
                overlap(words, given) if words and given else 1.0 if words == given else 0.0 for words in right
            )
    return exact, f1


@given(questions)
@settings(max_examples=100, deadline=None)
def test_v1_equals_twin(made):
    golds = {str(number): one or ["cat"] for number, (one, _, _) in enumerate(made)}
    answers = {str(number): answer for number, (_, answer, _) in enumerate(made) if answer is not None}
    assert squad_v1(golds, answers) == pytest.approx(twin_v1(golds, answers))


@given(questions)
@settings(max_examples=100, deadline=None)
def test_v2_equals_twin(made):
    golds = {str(number): one for number, (one, _, _) in enumerate(made)}
    answers = {str(number): answer for number, (_, answer, _) in enumerate(made) if answer is not None}
    no_answer = {str(number): float(score) for number, (_, _, score) in enumerate(made)}
    if not answers:
        return
    exact, f1 = twin_v2_scores(golds, answers)
    expected = {}
    for prefix, part in (
        ("", list(exact)),
        ("HasAns_", [question for question in exact if golds[question]]),
        ("NoAns_", [question for question in exact if not golds[question]]),
    ):
        for name, scores in (("exact", exact), ("f1", f1)):
            if part:
                expected[prefix + name] = sum(scores[q] for q in part) / len(part)
                expected[prefix + "total"] = len(part)
    # Answering the first k in order of their no-answer scores and nothing else: the best k, the least of equals.
    order = [question for question in sorted(no_answer, key=no_answer.__getitem__) if question in exact]
    for name, scores in (("exact", exact), ("f1", f1)):
        base = sum(not golds[question] for question in golds)
        gains = [scores[q] if golds[q] else -1.0 * bool(answers[q]) for q in order]
        sums = list(accumulate(gains, initial=float(base)))
        best = max(range(len(sums)), key=lambda count: (sums[count], -count))
        expected[f"best_{name}"] = sums[best] / len(exact)
        expected[f"best_{name}_thresh"] = no_answer[order[best - 1]] if best else 0.0
    found = squad_v2(golds, answers, no_answer)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)
