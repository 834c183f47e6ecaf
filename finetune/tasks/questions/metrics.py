"""Exact match and F1 of answers, computed as the official scripts of SQuAD v1.1 and v2.0 do.

The differences between the two scripts are kept (evaluate-v1.1.py and evaluate-v2.0.py, worksheets.codalab.org, as in
allenai/bi-att-flow squad/evaluate-v1.1.py and traviemcg/cs224nfinalproject evaluate-v2.0.py):

    a gold text that normalizes to ""    v1.1: kept, its F1 is 0; v2.0: dropped, and "" is the gold if none is left
    gold or prediction without words     v1.1: F1 is 0; v2.0: F1 is 1 if both have no words
    a question without a prediction      v1.1: counts as wrong; v2.0: is not counted

Scores are fractions of 1, while the scripts print per cent. Thresholds and totals are as in the scripts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Golds = Mapping[str, Sequence[str]]
"""Gold answers of each question, by its id; empty if the context has no answer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the scripts


def normalize_answer(text: str) -> str:
    """Lower-case the text; remove ASCII punctuation, English articles and repeated spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def squad_v1(golds: Golds, answers: Mapping[str, str]) -> dict[str, float]:
    """Return exact_match and f1 of evaluate-v1.1.py: means over all questions of `golds`, which all have answers."""
    exact = f1 = 0.0
    for id_, texts in golds.items():
        if id_ in answers:
            question_exact, question_f1 = score_v1(texts, answers[id_])
            exact, f1 = exact + question_exact, f1 + question_f1
    return {"exact_match": exact / len(golds), "f1": f1 / len(golds)}


def squad_v2(
    golds: Golds, answers: Mapping[str, str], no_answer_scores: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return scores of evaluate-v2.0.py: exact, f1, total, HasAns_*, NoAns_*; best_* if given `no_answer_scores`.

    Args:
        golds: gold answers of each question.
        answers: predicted answer of each question, "" for no answer.
        no_answer_scores: score of each question; the higher, the more probable that it has no answer.

    The best_* scores are for the best threshold; they need `answers` that were predicted without a threshold. The
    script fails if HasAns or NoAns questions lack predictions; here they are not counted, as in its total.

    Raises:
        ValueError: no question of `golds` has a prediction.
    """
    scores = {id_: score_v2(texts, answers[id_]) for id_, texts in golds.items() if id_ in answers}
    if not scores:
        raise ValueError("no question has a prediction")
    result = means(list(scores.values()))
    for prefix, answerable in (("HasAns", True), ("NoAns", False)):
        group = [pair for id_, pair in scores.items() if bool(golds[id_]) is answerable]
        if group:
            result |= {f"{prefix}_{name}": value for name, value in means(group).items()}
    if no_answer_scores is not None:
        for column, name in enumerate(("exact", "f1")):
            column_scores = {id_: pair[column] for id_, pair in scores.items()}
            best, threshold = best_threshold(golds, answers, column_scores, no_answer_scores)
            result |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return result


def best_threshold(
    golds: Golds, answers: Mapping[str, str], scores: Mapping[str, float], no_answer_scores: Mapping[str, float]
) -> tuple[float, float]:
    """Return (best mean score, its threshold on the no-answer score), as find_best_thresh of evaluate-v2.0.py.

    Two quirks of the script are kept: the threshold is 0.0 if answering no question is best, and the scan may stop
    between questions with equal no-answer scores, which `score > threshold` cannot separate.

    Args:
        scores: exact match or F1 of each question's answer.
    """
    total = best = float(sum(not texts for texts in golds.values()))  # score of answering no question
    threshold = 0.0
    for id_ in sorted(no_answer_scores, key=no_answer_scores.__getitem__):
        if id_ not in scores:
            continue
        total += scores[id_] if golds[id_] else -1 if answers[id_] else 0
        if total > best:
            best, threshold = total, no_answer_scores[id_]
    return best / len(scores), threshold


def score_v1(golds: Sequence[str], answer: str) -> tuple[float, float]:
    """Return (exact match, F1) of one answer to one question, the best over its gold answers."""
    return _best_score(golds, answer, _f1_v1)


def score_v2(golds: Sequence[str], answer: str) -> tuple[float, float]:
    """Return (exact match, F1) of one answer to one question; without gold answers, only "" is correct."""
    return _best_score([text for text in golds if normalize_answer(text)] or [""], answer, _f1_v2)


def _best_score(golds: Sequence[str], answer: str, f1: Callable[[list[str], list[str]], float]) -> tuple[float, float]:
    predicted = normalize_answer(answer)
    normalized = [normalize_answer(text) for text in golds]
    words = predicted.split()
    return float(predicted in normalized), max(f1(gold.split(), words) for gold in normalized)


def _f1_v1(gold: list[str], answer: list[str]) -> float:
    num_common = (Counter(gold) & Counter(answer)).total() if gold and answer else 0
    if not num_common:
        return 0.0
    precision, recall = num_common / len(answer), num_common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _f1_v2(gold: list[str], answer: list[str]) -> float:
    return _f1_v1(gold, answer) if gold and answer else float(gold == answer)


def means(scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the mean exact match, the mean F1 and the number of `scores`, which are (exact match, F1) each."""
    total = len(scores)
    return {
        "exact": sum(exact for exact, _ in scores) / total,
        "f1": sum(f1 for _, f1 in scores) / total,
        "total": float(total),
    }
