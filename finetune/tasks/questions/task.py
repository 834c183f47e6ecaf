"""Span questions: the answer is a stretch of the context, or, as SQuAD v2.0 has it, that there is none in it."""

from __future__ import annotations

import json
import logging
import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from finetune.datasets import squad
from finetune.datasets.squad import Question
from finetune.datasets.text import Column, TextEncoder, distinct, frame, ragged, slide
from finetune.metrics.squad import Golds, best_threshold, score_v1, score_v2, squad_v1, squad_v2
from finetune.tasks.base import Head, Objective, Windows
from pretrain.common.errors import InputError
from pretrain.common.settings import LocalPath, Section

logger = logging.getLogger(__name__)

_CELLS = 1 << 22  # of the largest table that decoding makes: 32 MiB of float64
# Groups of answers by the most words they have.
_WORDS = {0: "0", 1: "1", 2: "2", 4: "3 to 4", 8: "5 to 8", 16: "9 to 16", math.inf: "17 and more"}


class QuestionsSettings(Section):
    """Span questions: an answer is marked in a context (SQuAD v1.1), or said not to be in it (v2.0)."""

    train: LocalPath = Field(
        default="",
        description="Questions to learn from: SQuAD's nested .json of v1.1 or v2.0, or flat records as .json, .jsonl, "
        ".parquet, .csv or .tsv.",
    )
    dev: LocalPath = Field(
        default="", description="Questions to score on; they choose the checkpoint and the threshold."
    )
    test: LocalPath = Field(
        default="",
        description="Questions to answer at the end, and to score if they have answers; they choose nothing.",
    )
    stride: int = Field(
        default=128,
        ge=0,
        description="Tokens of context that neighbouring windows share. This is doc_stride of Hugging Face's "
        "run_qa.py; doc_stride of Google's run_squad.py is how far the next window is moved instead.",
    )
    max_question_tokens: int = Field(
        default=64, ge=1, description="Longer questions are cut behind this many tokens, and that is logged."
    )
    max_answer_tokens: int = Field(default=30, ge=1, description="Longest answer to give, in tokens.")
    n_best: int = Field(
        default=20, ge=1, description="Best starts and ends to combine in each window, and answers to list."
    )
    unanswerable: Literal["auto", True, False] = Field(
        default="auto",
        description="Whether the answer may be that there is none (SQuAD v2.0); auto: if the training set has such.",
    )
    threshold: float | None = Field(
        default=None,
        description="Answer nothing where the score of no answer exceeds the best answer's by more than this; "
        "null chooses it on the dev set.",
    )
    bad_answers: Literal["stop", "skip"] = Field(
        default="stop",
        description="Answers that do not stand at their answer_start: stop, or skip them and go on with the others.",
    )
    metric: Literal["f1", "exact"] = Field(
        default="f1", description="Score that chooses checkpoint and threshold; exact is v1.1's exact_match."
    )


class Questions:
    """The task (see `finetune.tasks.base.Task`) of marking the answer to a question in its context.

    A window is `[CLS] question [SEP] stretch of the context [SEP]`; the head gives each of its rows a score as
    the answer's start and one as its end, and the first row, [CLS], stands for no answer in this window.

    Args:
        settings: the section `questions` of the config.
        state: what `state()` of the trained model gave; its threshold gives way to that of the settings.
    """

    kind = "questions"
    head: Head = "spans"
    objective: Objective = "span"
    labels: tuple[str, ...] = ()
    outputs = 2
    asks = ("question", "context")

    def __init__(self, settings: QuestionsSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        kept = state or {}
        known = kept.get("unanswerable") if settings.unanswerable == "auto" else settings.unanswerable
        self._unanswerable: bool | None = None  # not known until the first labelled set is read
        self.metric: str = settings.metric
        if known is not None:
            self._settle(bool(known))
        self.threshold = float(kept.get("threshold", 0.0) if settings.threshold is None else settings.threshold)

    @property
    def unanswerable(self) -> bool:
        """Whether the answer may be that there is none: it is decoded and scored as SQuAD v2.0 is."""
        return bool(self._unanswerable)

    def _settle(self, unanswerable: bool) -> None:
        self._unanswerable = unanswerable
        if self.settings.metric == "exact":
            self.metric = "exact" if unanswerable else "exact_match"

    # ---- files

    def read_train(self) -> list[Question]:
        if not self.settings.train:
            raise InputError("questions.train is empty. Name a file of questions with their answers.")
        return self._read(self.settings.train, labelled=True, training=True)

    def read_held_out(self) -> dict[str, list[Question]]:
        return {"dev": self.read_file(self.settings.dev)} if self.settings.dev else {}

    def read_test(self) -> dict[str, list[Question]]:
        if not self.settings.test:
            return {}
        return {"test": self._read(self.settings.test, labelled=False, training=False)}

    def read_file(self, path: str, *, labelled: bool = True) -> list[Question]:
        return self._read(path, labelled=labelled, training=False, check=labelled)

    def is_labelled(self, examples: Sequence[Question]) -> bool:
        return bool(examples) and all(one.answers is not None for one in examples)

    def record(self, example: Question) -> dict[str, Any]:
        """{"id", "question", "context", "gold": the texts of its answers, [] where it has none}."""
        record: dict[str, Any] = {"id": example.id, "question": example.text, "context": example.context}
        if example.answers is not None:
            record["gold"] = [answer.text for answer in example.answers]
        return record

    def example(self, record: Mapping[str, Any] | str, where: str) -> Question:
        return squad.from_record(record, where)

    def with_context(self, examples: Sequence[Question], *, ended: bool) -> tuple[list[Question], list[Question]]:
        """Each stands alone."""
        return list(examples), []

    def _read(self, path: str, *, labelled: bool, training: bool, check: bool = True) -> list[Question]:
        """`check`: whether questions without an answer are refused of a model that always answers."""
        questions = squad.read(path, labelled=labelled)
        questions = squad.without_bad_answers(questions, path, self.settings.bad_answers, training=training)
        bare = [question.id for question in questions if question.answers == ()]
        if self._unanswerable is None and labelled:
            self._settle(bool(bare))
        if check and bare and not self.unanswerable:
            why = (
                "unanswerable is false"
                if self.settings.unanswerable is False
                else "the training set has none such, so that the model always answers"
            )
            raise InputError(
                f"{path}: {len(bare)} of {len(questions)} questions have no answer, first {bare[0]}, but {why}. "
                f"Set unanswerable: true, or leave them out of the file."
            )
        return questions

    # ---- windows

    def windows(self, examples: Sequence[Question], encoder: TextEncoder, *, training: bool) -> Windows:
        """Windows of `stride` tokens overlap, the same ones to learn from and to predict from.

        In training each window counts as an example, as run_qa's features do: a context may be of any length.
        A window that does not hold the whole answer is labelled as having none (transformers
        examples/pytorch/question-answering/run_qa.py, prepare_train_features). Of several answers the first counts.

        Raises:
            InputError: windows are too short for the questions and the overlap.
        """
        self._expect_room(encoder)
        questions, question_N = distinct([one.text.strip() for one in examples])
        passages, context_N = distinct([one.context for one in examples])
        asked, contexts = encoder.encode(questions), encoder.encode(passages)
        full_N = np.diff(asked.starts)[question_N]
        kept_N = np.minimum(full_N, self.settings.max_question_tokens)
        self._report_cut(examples, full_N)
        room_N = encoder.room(pair=True) - kept_N
        example, begin, length = slide(np.diff(contexts.starts)[context_N], room_N, self.settings.stride)
        context_token = contexts.starts[context_N[example]] + begin
        framed = frame(
            encoder,
            (asked.ids, asked.starts[question_N[example]], kept_N[example]),
            (contexts.ids, context_token, length),
        )
        first, last, weight = _answer_tokens(examples, contexts, context_N)
        holds = (first[example] >= begin) & (last[example] < begin + length)
        self._report_divided(examples, first >= 0, example[holds])
        labels = np.zeros((len(framed.ids), 2), np.uint8)
        weights = np.zeros(len(framed.ids), np.float32)
        cls = framed.starts[:-1]
        counted = weight[example]
        for column, token in enumerate((first, last)):
            row = np.where(holds, framed.second + token[example] - begin, cls)
            labels[row[counted], column] = 1
        weights[cls[counted]] = 1
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example)) if training else example,
            asked=np.arange(len(framed.ids)),
            labels=labels,
            weights=weights,
            extra={
                "context_row": framed.second,
                "context_token": context_token,
                "context_length": length,
                "offsets": contexts.offsets,
            },
        )

    def _expect_room(self, encoder: TextEncoder) -> None:
        most, stride = self.settings.max_question_tokens, self.settings.stride
        room = encoder.room(pair=True)
        if room - most > stride:
            return
        fitting = f"stride to at most {(room - most) // 2}"
        if room - most < 2:
            fitting = f"max_question_tokens to at most {room // 4} and stride to at most {room // 4}"
        raise InputError(
            f"questions: a window of {encoder.max_length} tokens has place for {room} of text; with "
            f"max_question_tokens {most} and stride {stride}, which neighbouring windows share, there is no context "
            f"left to move on by. Take longer windows, or set {fitting}."
        )

    def _report_cut(self, examples: Sequence[Question], lengths: np.ndarray) -> None:
        most = self.settings.max_question_tokens
        if cut := int((lengths > most).sum()):
            longest = int(lengths.argmax())
            logger.warning(
                "%d of %d questions are longer than max_question_tokens %d and were cut; the longest, %s, has %d.",
                cut,
                len(examples),
                most,
                examples[longest].id,
                lengths[longest],
            )

    def _report_divided(self, examples: Sequence[Question], answered: np.ndarray, held: np.ndarray) -> None:
        """answered: bool [N]; held: int64, the examples of the windows that hold an answer."""
        whole = np.bincount(held, minlength=len(examples)) > 0
        divided = np.flatnonzero(answered & ~whole)
        if len(divided):
            logger.warning(
                "%d answers stand in no window as a whole and are learnt as having none; first question %s. "
                "An answer of up to stride tokens always does, now %d.",
                len(divided),
                examples[divided[0]].id,
                self.settings.stride,
            )

    # ---- predictions

    def decode(self, examples: Sequence[Question], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """{"id", "answer", "start", "end", "score", "no_answer_score", "best_non_empty", "nbest", "windows"} each.

        The answer is `context[start:end]`, or "" with 0, 0. score: its probability among the n best. no_answer_score:
        what the score of no answer exceeds the best answer's by; 0 where there always is an answer. best_non_empty:
        the answer at any threshold. nbest: {"text", "start", "end", "probability"}, best first. windows: how many
        the question has.

        google-research/bert run_squad.py, write_predictions, and transformers' postprocess_qa_predictions
        (examples/pytorch/question-answering/utils_qa.py) agree on most. Where they do not: starts only in the
        window with most context around them, and equal texts only once, as Google; original characters, as
        transformers; the best n starts and ends are chosen among the context's rows, where both choose them among
        all rows, and so may be left without any; where none of these make an answer, further ones are tried.
        """
        spans = _spans(windows, logits, self.settings.n_best, self.settings.max_answer_tokens)
        texts = _Texts(examples, windows, spans)
        first_F = np.searchsorted(windows.examples, np.arange(len(examples)))
        cls = logits[windows.starts[:-1]].astype(np.float64).sum(1)
        null_N = np.minimum.reduceat(cls, first_F) if len(examples) else cls
        counts = np.bincount(windows.examples, minlength=len(examples))
        return [
            self._prediction(question, texts.best(number, self.settings.n_best), float(null), int(count))
            for number, (question, null, count) in enumerate(zip(examples, null_N, counts, strict=True))
        ]

    def _prediction(self, question: Question, entries: list[_Entry], null: float, windows: int) -> dict[str, Any]:
        # No token to start from: as if its logits were 0 (run_squad.py, "nonce prediction").
        best = entries[0] if entries else _Entry("", 0, 0, 0.0)
        nothing = _Entry("", 0, 0, null)
        no_answer = null - best.score if self.unanswerable else 0.0
        if self.unanswerable or not entries:
            before = sum(entry.score >= null for entry in entries)
            entries = [*entries[:before], nothing, *entries[before:]]
            n = max(self.settings.n_best, 2)  # no answer, and the best one at least
            entries = entries[:n] if before < n else [*entries[:n], nothing]
        probabilities = _softmax([entry.score for entry in entries])
        answer = nothing if not best.text or self._is_nothing(no_answer) else best
        return {
            "id": question.id,
            "answer": answer.text,
            "start": answer.start,
            "end": answer.end,
            "score": next(p for entry, p in zip(entries, probabilities, strict=True) if entry.text == answer.text),
            "no_answer_score": no_answer,
            "best_non_empty": best.text,
            "nbest": [
                {"text": entry.text, "start": entry.start, "end": entry.end, "probability": probability}
                for entry, probability in zip(entries, probabilities, strict=True)
            ],
            "windows": windows,
        }

    def scorer_files(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """{id: answer} as evaluate-v1.1.py and evaluate-v2.0.py take it, and {id: probability of no answer} for the latter.

        The probability is that of no answer beside the best answer alone, which orders questions as `no_answer_score`
        does; none exceeds 1, the script's own threshold, so that it scores the answers as they are.
        """
        files = {".answers.json": _json(self._answers(predictions))}
        if self.unanswerable:
            files[".no-answer.json"] = _json(
                {one["id"]: _logistic(float(one["no_answer_score"])) for one in predictions}
            )
        return files

    def _is_nothing(self, no_answer_score: float) -> bool:
        return self.unanswerable and no_answer_score > self.threshold

    # ---- scores

    @property
    def tunes(self) -> bool:
        return self.unanswerable and self.settings.threshold is None

    def tune(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> None:
        """Set the threshold to the best one for `metric`, unless the settings do.

        `score` and `details` follow at once; the answers in `predictions` are as they were decoded.
        """
        if not self.tunes:
            return
        golds, by_id = _golds(examples), {one["id"]: one for one in predictions}
        best = {question: one["best_non_empty"] for question, one in by_id.items()}
        column = 0 if self.settings.metric == "exact" else 1
        scores = {q: score_v2(texts, best[q])[column] for q, texts in golds.items() if q in best}
        no_answer = {question: float(one["no_answer_score"]) for question, one in by_id.items()}
        reached, self.threshold = best_threshold(golds, best, scores, no_answer)
        if reached <= sum(not texts for texts in golds.values()) / len(scores):
            # Answering nothing at all is best, for which the script's 0 stands; ours are logits and may be below it.
            self.threshold = min(0.0, math.nextafter(min(no_answer.values()), -math.inf))

    def score(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """evaluate-v1.1.py's exact_match and f1, or what evaluate-v2.0.py reports.

        exact, f1, HasAns_ and NoAns_ are of the answers at the present threshold; best_ and best_thresh are what
        other thresholds would have made of them.

        Raises:
            InputError: no example has a prediction.
        """
        golds, answers = _golds(examples), self._answers(predictions)
        if not any(question in answers for question in golds):
            raise InputError("none of the questions has a prediction: their ids are not those of the predictions.")
        if not self.unanswerable:
            return squad_v1(golds, answers)
        best = {one["id"]: one["best_non_empty"] for one in predictions}
        no_answer = {one["id"]: float(one["no_answer_score"]) for one in predictions}
        thresholds = squad_v2(golds, best, no_answer)
        return squad_v2(golds, answers) | {k: v for k, v in thresholds.items() if k.startswith("best_")}

    def details(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """{"answerable" | "answer_words" | "windows": {group: {"exact", "f1", "total"}}, "threshold"}.

        answer_words: words of the shortest gold answer; "0" where there is none.
        """
        answers = self._answers(predictions)
        windows = {one["id"]: int(one["windows"]) for one in predictions}
        one_score = score_v2 if self.unanswerable else score_v1
        by_kind, by_words, by_windows = _Groups(), _Groups(), _Groups()
        for question, texts in _golds(examples).items():
            if question in answers:
                score = one_score(texts, answers[question])
                by_kind["HasAns" if texts else "NoAns"].append(score)
                by_words[_most_words(texts)].append(score)
                by_windows[windows[question]].append(score)
        return {
            "answerable": _table(by_kind),
            "answer_words": {_WORDS[most]: scores for most, scores in _table(by_words).items()},
            "windows": {str(count): scores for count, scores in _table(by_windows).items()},
            "threshold": self.threshold if self.unanswerable else None,
        }

    def state(self) -> dict[str, Any]:
        return {"unanswerable": self.unanswerable, "threshold": self.threshold}

    def _answers(self, predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The answers by question at the present threshold."""
        return {
            one["id"]: "" if self._is_nothing(float(one["no_answer_score"])) else one["best_non_empty"]
            for one in predictions
        }


# ---------------------------------------------------------------- windows


def _answer_tokens(
    examples: Sequence[Question], contexts: Column, context_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first int64 [N], last int64 [N], counted bool [N]): tokens of each context that cover its answer.

    Both are -1 where there is no answer. Not counted: no answers are known, or no token covers any of it.
    A character that no token covers (an accent that the normaliser drops) goes with the token before it at the
    answer's end, and with the one behind it at the answer's beginning.
    """
    answers = [question.answers[0] if question.answers else None for question in examples]
    known = np.array([question.answers is not None for question in examples], bool)
    has = np.array([answer is not None for answer in answers], bool)
    begin = np.array([answer.start if answer else 0 for answer in answers], np.int64)
    end = begin + np.array([len(answer.text) if answer else 0 for answer in answers], np.int64)
    # One search for all: the characters of the contexts are numbered on from one to the next.
    lengths = np.diff(contexts.starts)
    highest = int(contexts.offsets.max(initial=0))
    step = max(highest, int(end.max(initial=0))) + 1
    text_T = np.repeat(np.arange(len(lengths)), lengths)
    begins_T = contexts.offsets[:, 0] + text_T * step
    ends_T = contexts.offsets[:, 1] + text_T * step
    first = np.searchsorted(ends_T, context_N * step + begin, "right") - contexts.starts[context_N]
    last = np.searchsorted(begins_T, context_N * step + end, "left") - 1 - contexts.starts[context_N]
    covered = has & (first <= last) & (begin < end)
    if lost := int((has & ~covered).sum()):
        at = int(np.flatnonzero(has & ~covered)[0])
        logger.warning(
            "%d answers have no token of their own and are not learnt from; first %s of question %s.",
            lost,
            ascii(next(answer.text for answer in examples[at].answers or ())),
            examples[at].id,
        )
    return np.where(covered, first, -1), np.where(covered, last, -1), known & (covered | ~has)


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class _Spans:
    """S possible answers, those of an example together, the best first."""

    examples: np.ndarray  # int64 [S], ascending
    first: np.ndarray  # int64 [S], rows of windows.extra["offsets"]
    last: np.ndarray  # int64 [S]
    scores: np.ndarray  # float64 [S], start logit plus end logit


def _spans(windows: Windows, logits: np.ndarray, n_best: int, max_tokens: int) -> _Spans:
    """The combinations of the `n_best` starts and ends of a window that are answers of at most `max_tokens`.

    Where these give an example no answer at all, its other starts and ends are combined as well.
    """
    length_F = windows.extra["context_length"]
    starting_T = _has_most_context(windows.examples, windows.extra["context_token"], length_F)
    widest = max(1, int(length_F.max(initial=0)))
    parts = [(np.zeros(0, np.int64),) * 3 + (np.zeros(0),)]
    parts += _combined(windows, logits, np.arange(len(windows)), starting_T, min(n_best, widest), max_tokens)
    answered = np.concatenate([part[0] for part in parts])
    silent = np.flatnonzero((length_F > 0) & ~np.isin(windows.examples, answered))
    parts += _combined(windows, logits, silent, starting_T, widest, max_tokens)
    examples, first, last, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((-scores, examples))  # stable: of equals, the earlier window and the better start
    return _Spans(examples[order], first[order], last[order], scores[order])


def _combined(
    windows: Windows, logits: np.ndarray, chosen: np.ndarray, starting_T: np.ndarray, n: int, max_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(examples, first, last, scores) as in `_Spans` of the windows `chosen`, not in order.

    starting_T: bool, whether an answer may start, for the context tokens of all windows end to end.
    """
    length_F = windows.extra["context_length"]
    open_F = np.cumsum(length_F) - length_F
    starting_T = np.append(starting_T, False)  # something to look up even where no context has a token
    at = np.arange(max(1, int(length_F.max(initial=0))))
    step = max(1, _CELLS // max(len(at), n * n))
    for low in range(0, len(chosen), step):
        window = chosen[low : low + step]
        inside = at < length_F[window, None]
        may_start = inside & starting_T[np.where(inside, open_F[window, None] + at, 0)]
        row = np.where(inside, windows.extra["context_row"][window, None] + at, 0)
        starts, ends = (
            np.where(mask, logits[row, column].astype(np.float64), -np.inf)
            for column, mask in enumerate((may_start, inside))
        )
        # Of equal logits the earlier token is the better one, as in run_squad.py.
        start, end = (np.argsort(-scores, axis=1, kind="stable")[:, :n] for scores in (starts, ends))
        left, right = np.take_along_axis(starts, start, 1), np.take_along_axis(ends, end, 1)
        total = left[:, :, None] + right[:, None, :]
        tokens = end[:, None, :] - start[:, :, None] + 1
        number, i, j = np.nonzero((tokens >= 1) & (tokens <= max_tokens) & np.isfinite(total))
        base = windows.extra["context_token"][window[number]]
        yield (
            windows.examples[window[number]],
            base + start[number, i],
            base + end[number, j],
            total[number, i, j],
        )


def _has_most_context(examples: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool [sum of lengths]: whether no other window has more context around a token.

    As _check_is_max_context of run_squad.py: a token's context in a window is the lesser of what stands left and
    right of it; of equal windows the first has the token. The script adds a hundredth of the window's length,
    which decides the same: only the last window is shorter.
    """
    total = int(lengths.sum())
    owned = np.ones(total, bool)
    several = np.bincount(examples)[examples] > 1 if len(examples) else np.zeros(0, bool)
    if not several.any():
        return owned
    window = np.flatnonzero(several)
    length = lengths[window]
    place = ragged(np.zeros(len(window), np.int64), length)
    context = np.minimum(place, np.repeat(length, length) - 1 - place)
    # A number for each token of each example: its first window begins where its context does.
    firsts, number = np.unique(examples[window], return_inverse=True)
    begin = tokens[window] - tokens[np.searchsorted(examples, firsts)][number]
    size = np.zeros(len(firsts), np.int64)
    np.maximum.at(size, number, begin + length)
    key = np.repeat((np.cumsum(size) - size)[number] + begin, length) + place
    most = np.full(size.sum(), -1)
    np.maximum.at(most, key, context)
    best = np.flatnonzero(context == most[key])[::-1]
    owner = np.full(len(most), -1)
    owner[key[best]] = best  # backwards: the first of equals is written last
    owned[ragged((np.cumsum(lengths) - lengths)[window], length)] = owner[key] == np.arange(len(key))
    return owned


@dataclass(frozen=True)
class _Entry:
    """A possible answer, context[start:end]; score is the sum of its two logits."""

    text: str
    start: int
    end: int
    score: float


class _Texts:
    """Possible answers as stretches of the original context."""

    def __init__(self, examples: Sequence[Question], windows: Windows, spans: _Spans) -> None:
        self._examples = examples
        self._bounds = np.searchsorted(spans.examples, np.arange(len(examples) + 1)).tolist()
        offsets = windows.extra["offsets"]
        stop_N = np.zeros(len(examples), np.int64)  # behind the last token of each example's context
        stop_F = windows.extra["context_token"] + windows.extra["context_length"]
        stop_N[windows.examples] = stop_F  # an example's last window is written last
        begins = np.append(offsets[:, 0], 0)
        is_last = spans.last + 1 >= stop_N[spans.examples]
        self._start = offsets[spans.first, 0].tolist()
        self._end = offsets[spans.last, 1].tolist()
        self._next = np.where(is_last, np.iinfo(np.int32).max, begins[spans.last + 1]).tolist()
        self._scores = spans.scores.tolist()

    def best(self, number: int, n: int) -> list[_Entry]:
        """The best `n` answers of different text to question `number`, the best first."""
        entries: dict[str, _Entry] = {}
        for span, start, end in self._places(number):
            text = self._examples[number].context[start:end]
            if text and text not in entries:
                entries[text] = _Entry(text, start, end, self._scores[span])
                if len(entries) == n:
                    break
        return list(entries.values())

    def _places(self, number: int) -> Iterator[tuple[int, int, int]]:
        """(span, start, end) of each answer, without white space at its ends."""
        context = self._examples[number].context
        for span in range(self._bounds[number], self._bounds[number + 1]):
            start, end = self._start[span], self._end[span]
            if not context.isascii():
                end = _with_marks(context, end, self._next[span])
            # Tokens of SentencePiece may begin with the blank before the word.
            while start < end and context[start].isspace():
                start += 1
            while start < end and context[end - 1].isspace():
                end -= 1
            yield span, start, end


def _with_marks(context: str, end: int, limit: int) -> int:
    """`end`, moved behind the combining marks there that belong to no token: BERT's normaliser drops accents."""
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


def _most_words(texts: Sequence[str]) -> float:
    """The group of a question, a key of `_WORDS`, by the words of its shortest answer."""
    count = min((len(text.split()) for text in texts), default=0)
    return next(most for most in _WORDS if count <= most)


class _Groups(defaultdict[Any, list[tuple[float, float]]]):
    """(exact match, F1) of each question of each group."""

    def __init__(self) -> None:
        super().__init__(list)


def _table(groups: _Groups) -> dict[Any, dict[str, float]]:
    return {
        group: {
            "exact": sum(exact for exact, _ in scores) / len(scores),
            "f1": sum(f1 for _, f1 in scores) / len(scores),
            "total": len(scores),
        }
        for group, scores in sorted(groups.items())
    }
