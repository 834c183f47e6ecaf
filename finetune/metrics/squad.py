"""Exact match and F1 of answers, as the official scripts of SQuAD v1.1 and v2.0 work them out.

Differences between the two are kept (evaluate-v1.1.py and evaluate-v2.0.py, worksheets.codalab.org, read in
allenai/bi-att-flow squad/evaluate-v1.1.py and traviemcg/cs224nfinalproject evaluate-v2.0.py):

    a gold text that normalises to nothing   v1.1: kept, F1 with it is 0; v2.0: dropped, "" if none is left
    no words on one side                     v1.1: F1 is 0; v2.0: F1 is 1 if there are none on the other side either
    a question without a prediction          v1.1: counts as wrong; v2.0: does not count

Scores are shares of 1 where the scripts print percent; thresholds and totals are as they print them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Golds = Mapping[str, Sequence[str]]
"""Texts of the right answers of each question, by its id; none where the context has no answer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as the scripts have it


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and more than single spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def squad_v1(golds: Golds, answers: Mapping[str, str]) -> dict[str, float]:
    """evaluate-v1.1.py: exact_match and f1, means over all questions of `golds`.

    Raises:
        ValueError: no questions, or one without a gold answer.
    """
    _expect_golds(golds)
    exact = f1 = 0.0
    for question, texts in golds.items():
        if question in answers:
            one = score_v1(texts, answers[question])
            exact, f1 = exact + one[0], f1 + one[1]
    return {"exact_match": exact / len(golds), "f1": f1 / len(golds)}


def squad_v2(
    golds: Golds,
    answers: Mapping[str, str],
    no_answer_scores: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """evaluate-v2.0.py: exact, f1 and total, of all and of HasAns_ and NoAns_; best_ where there are scores.

    Args:
        no_answer_scores: how likely each question has no answer; those above `threshold` count as not answered.
            The best_ scores say what the best threshold would be, for `answers` that do answer wherever they can.

    The script fails where HasAns or NoAns questions lack predictions; here they do not count, as in its total.

    Raises:
        ValueError: no question of `golds` has a prediction.
    """
    scores = {question: score_v2(texts, answers[question]) for question, texts in golds.items() if question in answers}
    if not scores:
        raise ValueError("no question has a prediction")
    raw = dict(scores)
    if no_answer_scores is not None:
        for question in scores:
            if no_answer_scores[question] > threshold:
                right = float(not golds[question])
                scores[question] = (right, right)
    result = _means(list(scores.values()))
    for prefix, answerable in (("HasAns", True), ("NoAns", False)):
        part = [one for question, one in scores.items() if bool(golds[question]) is answerable]
        if part:
            result |= {f"{prefix}_{name}": value for name, value in _means(part).items()}
    if no_answer_scores is not None:
        for column, name in enumerate(("exact", "f1")):
            single = {question: one[column] for question, one in raw.items()}
            best, at = best_threshold(golds, answers, single, no_answer_scores)
            result |= {f"best_{name}": best, f"best_{name}_thresh": at}
    return result


def best_threshold(
    golds: Golds,
    answers: Mapping[str, str],
    scores: Mapping[str, float],
    no_answer_scores: Mapping[str, float],
) -> tuple[float, float]:
    """(best mean score, the no-answer score up to which to answer for it), find_best_thresh of evaluate-v2.0.py.

    Its habits are kept: 0.0 where answering nothing at all is best, and a threshold in the middle of equal
    no-answer scores, which the comparison `score > threshold` cannot tell apart.

    Args:
        scores: exact match or F1 of each answer given.
    """
    current = best = float(sum(not texts for texts in golds.values()))
    threshold = 0.0
    for question in sorted(no_answer_scores, key=no_answer_scores.__getitem__):
        if question not in scores:
            continue
        current += scores[question] if golds[question] else -1 if answers[question] else 0
        if current > best:
            best, threshold = current, no_answer_scores[question]
    return best / len(scores), threshold


def score_v1(golds: Sequence[str], answer: str) -> tuple[float, float]:
    """(exact match, F1) of one answer to one question, the best over its gold texts."""
    return _best(golds, answer, _f1_v1)


def score_v2(golds: Sequence[str], answer: str) -> tuple[float, float]:
    """(exact match, F1) of one answer to one question; no golds means that only "" is right."""
    return _best([text for text in golds if normalize_answer(text)] or [""], answer, _f1_v2)


def _best(golds: Sequence[str], answer: str, f1: Callable[[list[str], list[str]], float]) -> tuple[float, float]:
    given = normalize_answer(answer)
    normalized = [normalize_answer(text) for text in golds]
    words = given.split()
    return float(given in normalized), max(f1(gold.split(), words) for gold in normalized)


def _f1_v1(gold: list[str], answer: list[str]) -> float:
    same = (Counter(gold) & Counter(answer)).total() if gold and answer else 0
    if not same:
        return 0.0
    precision, recall = same / len(answer), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _f1_v2(gold: list[str], answer: list[str]) -> float:
    return _f1_v1(gold, answer) if gold and answer else float(gold == answer)


def _means(scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    total = len(scores)
    return {
        "exact": sum(exact for exact, _ in scores) / total,
        "f1": sum(f1 for _, f1 in scores) / total,
        "total": float(total),
    }


def _expect_golds(golds: Golds) -> None:
    if not golds:
        raise ValueError("no questions")
    bare = [question for question, texts in golds.items() if not texts]
    if bare:
        raise ValueError(f"{len(bare)} questions have no gold answer, first {bare[0]}: SQuAD v1.1 has none such")
