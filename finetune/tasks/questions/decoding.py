"""Turn logits into answers, compute their official scores, and write the input files of SQuAD's scripts.

Shape letters: N questions, F windows with R tokens in all, T context tokens of all windows, S candidate answers.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.tasks.base import Windows
from finetune.tasks.datasets.arrays import concatenate_ranges
from finetune.tasks.datasets.squad import Question
from finetune.tasks.questions.metrics import Golds, best_threshold, means, score_v1, score_v2, squad_v1, squad_v2
from pretrain.common.errors import InputError

N_BEST = 20  # maximum number of start or end positions per window, and of answers (n_best_size of run_squad.py)
MAX_SCORES = 1 << 22  # maximum number of scores to compute at once: 32 MiB of float64

Predictions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerDecoder:
    """Chooses answers from logits and scores them."""

    max_answer_tokens: int  # maximum number of tokens of an answer
    unanswerable: bool  # whether a question may have no answer (SQuAD v2.0)
    threshold: float  # predict "no answer" if its score exceeds the best answer's by more than this

    def decode(self, examples: Sequence[Question], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one prediction per question, as `Questions.decode` describes it, from logits float32 [R, 2]."""
        spans = _best_spans(windows, logits, self.max_answer_tokens)
        candidates = _AnswerTexts(examples, windows, spans)
        first_window_N = np.searchsorted(windows.examples, np.arange(len(examples)))
        null_F = logits[windows.starts[:-1]].astype(np.float64).sum(1)  # score of no answer: sum of [CLS]'s logits
        null_N = np.minimum.reduceat(null_F, first_window_N) if len(examples) else null_F
        counts = np.bincount(windows.examples, minlength=len(examples))
        return [
            self._prediction(question, candidates.best(index, N_BEST), float(null_score), int(count))
            for index, (question, null_score, count) in enumerate(zip(examples, null_N, counts, strict=True))
        ]

    def _prediction(
        self, question: Question, entries: list[_Candidate], null_score: float, num_windows: int
    ) -> dict[str, Any]:
        """Return the prediction for a question; `null_score` is the score of "no answer"."""
        # Without a candidate, add one with logits of 0 (run_squad.py, "nonce prediction").
        best = entries[0] if entries else _Candidate("", 0, 0, 0.0)
        no_answer_entry = _Candidate("", 0, 0, null_score)
        no_answer_margin = null_score - best.score if self.unanswerable else 0.0
        if self.unanswerable or not entries:
            rank = sum(entry.score >= null_score for entry in entries)
            entries = [*entries[:rank], no_answer_entry, *entries[rank:]]
            entries = entries[:N_BEST] if rank < N_BEST else [*entries[:N_BEST], no_answer_entry]
        probabilities = _softmax([entry.score for entry in entries])
        answer = no_answer_entry if not best.text or self._predicts_no_answer(no_answer_margin) else best
        return {
            "id": question.id,
            "answer": answer.text,
            "start": answer.start,
            "end": answer.end,
            "score": next(p for entry, p in zip(entries, probabilities, strict=True) if entry.text == answer.text),
            "no_answer_score": no_answer_margin,
            "best_non_empty": best.text,
            "nbest": [
                {"text": entry.text, "start": entry.start, "end": entry.end, "probability": probability}
                for entry, probability in zip(entries, probabilities, strict=True)
            ],
            "windows": num_windows,
        }

    def scorer_files(self, predictions: Predictions) -> dict[str, str]:
        """Return {suffix: JSON}: {id: answer} and, for SQuAD v2.0, {id: probability of "no answer"}."""
        files = {".answers.json": _json(self._answers(predictions))}
        if self.unanswerable:
            probabilities = {entry["id"]: _logistic(float(entry["no_answer_score"])) for entry in predictions}
            files[".no-answer.json"] = _json(probabilities)
        return files

    def best_threshold(self, examples: Sequence[Question], predictions: Predictions, metric: str) -> float:
        """Return the threshold with the best `metric`, f1 or exact."""
        golds, by_id = _golds(examples), {prediction["id"]: prediction for prediction in predictions}
        answers = {id_: prediction["best_non_empty"] for id_, prediction in by_id.items()}
        column = 0 if metric == "exact" else 1
        scores = {id_: score_v2(texts, answers[id_])[column] for id_, texts in golds.items() if id_ in answers}
        no_answer_scores = {id_: float(prediction["no_answer_score"]) for id_, prediction in by_id.items()}
        best_score, threshold = best_threshold(golds, answers, scores, no_answer_scores)
        if best_score > sum(not texts for texts in golds.values()) / len(scores):
            return threshold
        # Leaving all questions unanswered is best, so return a threshold below all scores. The script returns 0.
        return min(0.0, math.nextafter(min(no_answer_scores.values()), -math.inf))

    def score(self, examples: Sequence[Question], predictions: Predictions) -> dict[str, float]:
        """Return the scores that `Questions.score` describes."""
        golds, answers = _golds(examples), self._answers(predictions)
        if not any(id_ in answers for id_ in golds):
            raise InputError(
                "predictions: none is for one of these questions. Give predictions with the ids of the questions."
            )
        if not self.unanswerable:
            return squad_v1(golds, answers)
        best_answers = {prediction["id"]: prediction["best_non_empty"] for prediction in predictions}
        no_answer_scores = {prediction["id"]: float(prediction["no_answer_score"]) for prediction in predictions}
        scores = squad_v2(golds, best_answers, no_answer_scores)
        return squad_v2(golds, answers) | {name: scores[name] for name in scores if name.startswith("best_")}

    def score_each(self, examples: Sequence[Question], predictions: Predictions, metric: str) -> np.ndarray:
        """Return f1 or exact match of each question, float64 [N]; `score` returns their mean."""
        score_answer = score_v2 if self.unanswerable else score_v1
        golds, answers = self.aligned_answers(examples, predictions)
        scores = [score_answer(texts, answer) for texts, answer in zip(golds, answers, strict=True)]
        return np.array(scores, np.float64).reshape(-1, 2)[:, int(metric == "f1")]

    def aligned_answers(self, examples: Sequence[Question], predictions: Predictions) -> tuple[list[Any], list[str]]:
        """Return (lists of gold answers, predicted answers) of the questions that have a prediction."""
        golds, answers = _golds(examples), self._answers(predictions)
        ids = [id_ for id_ in golds if id_ in answers]
        return [golds[id_] for id_ in ids], [answers[id_] for id_ in ids]

    def details(self, examples: Sequence[Question], predictions: Predictions) -> dict[str, Any]:
        """Return {"answerable": {"HasAns" | "NoAns": {"exact", "f1", "total"}}, "threshold"}."""
        answers = self._answers(predictions)
        score_answer = score_v2 if self.unanswerable else score_v1
        groups: dict[str, list[tuple[float, float]]] = {}
        for id_, texts in _golds(examples).items():
            if id_ in answers:
                groups.setdefault("HasAns" if texts else "NoAns", []).append(score_answer(texts, answers[id_]))
        return {
            "answerable": {name: {**means(groups[name]), "total": len(groups[name])} for name in sorted(groups)},
            "threshold": self.threshold if self.unanswerable else None,
        }

    def _answers(self, predictions: Predictions) -> dict[str, str]:
        """Return {id: answer} at the current threshold."""
        return {
            entry["id"]: "" if self._predicts_no_answer(float(entry["no_answer_score"])) else entry["best_non_empty"]
            for entry in predictions
        }

    def _predicts_no_answer(self, margin: float) -> bool:
        return self.unanswerable and margin > self.threshold


# ---------------------------------------------------------------- spans


@dataclass(frozen=True)
class _Spans:
    """S candidate answers, grouped by example, best first."""

    examples: np.ndarray  # int64 [S], ascending: index of each answer's example
    first: np.ndarray  # int64 [S], index of the first token in windows.extra["offsets"]
    last: np.ndarray  # int64 [S], index of the last token in the same array
    scores: np.ndarray  # float64 [S], start logit plus end logit


def _best_spans(windows: Windows, logits: np.ndarray, max_tokens: int) -> _Spans:
    """Combine the `N_BEST` best start and end positions of each window into answers of at most `max_tokens` tokens.

    Where an example gets no answer in this way, combine all its positions.
    """
    length_F = windows.extra["context_length"]
    may_start_T = has_most_context(windows.examples, windows.extra["context_token"], length_F)
    max_length = max(1, int(length_F.max(initial=0)))
    chunks = [(np.zeros(0, np.int64),) * 3 + (np.zeros(0),)]  # tuples (examples, first, last, scores)
    chunks += _combine(windows, logits, np.arange(len(windows)), may_start_T, min(N_BEST, max_length), max_tokens)
    answered_examples = np.concatenate([chunk[0] for chunk in chunks])
    remaining_windows = np.flatnonzero((length_F > 0) & ~np.isin(windows.examples, answered_examples))
    chunks += _combine(windows, logits, remaining_windows, may_start_T, max_length, max_tokens)
    examples, first, last, scores = (np.concatenate(column) for column in zip(*chunks, strict=True))
    order = np.lexsort((-scores, examples))  # stable: ties keep the earlier window and the better start
    return _Spans(examples[order], first[order], last[order], scores[order])


def _combine(
    windows: Windows, logits: np.ndarray, selected: np.ndarray, may_start_T: np.ndarray, num_best: int, max_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Combine the `num_best` best start and end positions of each selected window.

    Yields (examples, first, last, scores) as in `_Spans`, but unsorted. selected: indices of windows. may_start_T: bool
    for each context token of all windows, concatenated: whether an answer may start there.
    """
    length_F = windows.extra["context_length"]
    context_start_F = np.cumsum(length_F) - length_F
    may_start_T = np.append(may_start_T, False)  # so that index 0 exists even if no context has a token
    position = np.arange(max(1, int(length_F.max(initial=0))))
    windows_per_step = max(1, MAX_SCORES // max(len(position), num_best * num_best))
    for begin in range(0, len(selected), windows_per_step):
        window_indices = selected[begin : begin + windows_per_step]
        is_context = position < length_F[window_indices, None]
        may_start = is_context & may_start_T[np.where(is_context, context_start_F[window_indices, None] + position, 0)]
        token_indices = np.where(is_context, windows.extra["context_start"][window_indices, None] + position, 0)
        starts, ends = (
            np.where(mask, logits[token_indices, column].astype(np.float64), -np.inf)
            for column, mask in enumerate((may_start, is_context))
        )
        # Of equal logits the earlier token wins, as in run_squad.py.
        start, end = (np.argsort(-scores, axis=1, kind="stable")[:, :num_best] for scores in (starts, ends))
        start_scores, end_scores = np.take_along_axis(starts, start, 1), np.take_along_axis(ends, end, 1)
        total = start_scores[:, :, None] + end_scores[:, None, :]
        num_tokens = end[:, None, :] - start[:, :, None] + 1
        row, i, j = np.nonzero((num_tokens >= 1) & (num_tokens <= max_tokens) & np.isfinite(total))
        window = window_indices[row]
        base = windows.extra["context_token"][window]
        yield windows.examples[window], base + start[row, i], base + end[row, j], total[row, i, j]


def has_most_context(examples: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return whether each context token has more context in its window than in any other, bool [sum of `lengths`].

    A token's context is the smaller of the numbers of tokens before and after it in the window, plus 0.01 * window
    length, as in _check_is_max_context of run_squad.py; of equal windows, the first is chosen. For each window,
    `examples` has its example's index, `tokens` its first context token's index over all contexts, and `lengths` its
    number of context tokens.
    """
    total = int(lengths.sum())
    has_most = np.ones(total, bool)
    has_several_windows = np.bincount(examples)[examples] > 1 if len(examples) else np.zeros(0, bool)
    if not has_several_windows.any():
        return has_most
    window = np.flatnonzero(has_several_windows)
    length = lengths[window]
    position = concatenate_ranges(np.zeros(len(window), np.int64), length)
    token_length = np.repeat(length, length)
    context = 100 * np.minimum(position, token_length - 1 - position) + token_length
    # `key`: index of a context token over all contexts of these examples; an example's first window starts at 0.
    distinct, group = np.unique(examples[window], return_inverse=True)
    start = tokens[window] - tokens[np.searchsorted(examples, distinct)][group]
    context_length = np.zeros(len(distinct), np.int64)
    np.maximum.at(context_length, group, start + length)
    key = np.repeat((np.cumsum(context_length) - context_length)[group] + start, length) + position
    largest = np.full(context_length.sum(), -1)
    np.maximum.at(largest, key, context)
    best = np.flatnonzero(context == largest[key])[::-1]
    chosen = np.full(len(largest), -1)  # index into `key` of each context token's best occurrence
    chosen[key[best]] = best  # in reverse order, so that the first of equal occurrences wins
    has_most[concatenate_ranges((np.cumsum(lengths) - lengths)[window], length)] = chosen[key] == np.arange(len(key))
    return has_most


@dataclass(frozen=True)
class _Candidate:
    """A candidate answer, context[start:end]; its score is the sum of the start and end logits."""

    text: str
    start: int
    end: int
    score: float


class _AnswerTexts:
    """Converts candidate answers from token spans to spans of the original context."""

    def __init__(self, examples: Sequence[Question], windows: Windows, spans: _Spans) -> None:
        self._examples = examples
        self._span_bounds = np.searchsorted(spans.examples, np.arange(len(examples) + 1)).tolist()
        offsets = windows.extra["offsets"]
        stop_N = np.zeros(len(examples), np.int64)  # index after the last token of each example's context
        stop_F = windows.extra["context_token"] + windows.extra["context_length"]
        stop_N[windows.examples] = stop_F  # the last window of each example is written last
        starts = np.append(offsets[:, 0], 0)
        is_last = spans.last + 1 >= stop_N[spans.examples]
        self._starts = offsets[spans.first, 0].tolist()
        self._ends = offsets[spans.last, 1].tolist()
        self._next_starts = np.where(is_last, np.iinfo(np.int32).max, starts[spans.last + 1]).tolist()
        self._scores = spans.scores.tolist()

    def best(self, index: int, count: int) -> list[_Candidate]:
        """Return the best `count` distinct answers to the question with this index, best first."""
        entries: dict[str, _Candidate] = {}
        for span, start, end in self._stripped_spans(index):
            text = self._examples[index].context[start:end]
            if text and text not in entries:
                entries[text] = _Candidate(text, start, end, self._scores[span])
                if len(entries) == count:
                    break
        return list(entries.values())

    def _stripped_spans(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index of span, start, end) of each answer: character indices, without surrounding whitespace."""
        context = self._examples[index].context
        for span in range(self._span_bounds[index], self._span_bounds[index + 1]):
            start, end = self._starts[span], self._ends[span]
            if not context.isascii():
                end = _end_of_marks(context, end, self._next_starts[span])
            # Tokens of SentencePiece may include the space before the word.
            while start < end and context[start].isspace():
                start += 1
            while start < end and context[end - 1].isspace():
                end -= 1
            yield span, start, end


def _end_of_marks(context: str, end: int, limit: int) -> int:
    """Return the index after the combining marks at `end`, which have no token: BERT's normalizer drops accents."""
    limit = min(limit, len(context))
    while end < limit and unicodedata.category(context[end])[0] == "M":
        end += 1
    return end


def _logistic(value: float) -> float:
    return 0.5 * (1 + math.tanh(value / 2))  # without overflow


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def _softmax(scores: Sequence[float]) -> list[float]:
    array = np.array(scores)
    exponentials = np.exp(array - array.max())
    return (exponentials / exponentials.sum()).tolist()


# ---------------------------------------------------------------- scores


def _golds(examples: Sequence[Question]) -> Golds:
    return {
        question.id: [answer.text for answer in question.answers]
        for question in examples
        if question.answers is not None
    }
