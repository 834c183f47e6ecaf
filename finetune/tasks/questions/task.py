"""Extractive question answering: the answer is a span of the context, or, as in SQuAD v2.0, there may be none."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from finetune.tasks.base import Head, Objective, Predictions, Task, Windows
from finetune.tasks.custom_metric import custom_score, metric_name
from finetune.tasks.datasets import squad
from finetune.tasks.datasets.arrays import unique_strings
from finetune.tasks.datasets.squad import Question
from finetune.tasks.datasets.text import FramedWindows, TextEncoder, TokenizedTexts, frame
from finetune.tasks.datasets.windows import slide
from finetune.tasks.intervals import bootstrap
from finetune.tasks.questions.decoding import AnswerDecoder
from finetune.tasks.questions.settings import QuestionsSettings
from finetune.tasks.questions.source import QuestionSource
from pretrain.common.errors import InputError

logger = logging.getLogger(__name__)


class Questions(Task[Question]):
    """Finds the answer to a question as a span of its context.

    A window is `[CLS] question [SEP] part of the context [SEP]`. The head scores each token as start and as end
    of the answer. The first token, [CLS], stands for no answer in this window.

    Args:
        settings: the section `questions` of the config.
        state: the return value of the trained model's `state()`; a threshold in the settings overrides its threshold.
    """

    kind = "questions"
    settings_type = QuestionsSettings
    head: Head = "spans"
    objective: Objective = "span"
    outputs = 2
    summary = "Answers questions with a span of the context"

    def __init__(self, settings: QuestionsSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.sample = {"question": "Who wrote it?", "context": "It was written by Ann."}
        saved = state or {}
        self._source = QuestionSource(settings, saved.get("unanswerable"))
        self.threshold = float(saved.get("threshold", 0.0) if settings.threshold is None else settings.threshold)

    @property
    def metric(self) -> str:
        # The official scripts of v1.1 and v2.0 name the same score differently.
        if self.settings.metric == "exact" and self._source.unanswerable is False:
            return "exact_match"
        return metric_name(self.settings.metric)

    @property
    def unanswerable(self) -> bool:
        """True if questions may have no answer, so that they are decoded and scored as in SQuAD v2.0."""
        return bool(self._source.unanswerable)

    def state(self) -> dict[str, Any]:
        return {"unanswerable": self.unanswerable, "threshold": self.threshold}

    # ------------------------------------------------------------ reading files

    def read_train(self) -> list[Question]:
        return self._source.read_train()

    def read_held_out(self) -> dict[str, list[Question]]:
        return {"dev": self.read_file(self.settings.dev)} if self.settings.dev else {}

    def read_test(self) -> dict[str, list[Question]]:
        return {"test": self._source.read(self.settings.test, labeled=False)} if self.settings.test else {}

    def read_file(self, path: str, *, labeled: bool = True) -> list[Question]:
        return self._source.read(path, labeled=labeled, check=labeled)

    def example(self, record: Mapping[str, Any] | str, where: str) -> Question:
        return squad.from_record(record, where)

    def is_labeled(self, examples: Sequence[Question]) -> bool:
        return any(example.answers is not None for example in examples)

    def record(self, example: Question) -> dict[str, Any]:
        """Return {"id", "question", "context", "gold": the answers as strings}; "gold" is omitted without labels."""
        record: dict[str, Any] = {"id": example.id, "question": example.text, "context": example.context}
        if example.answers is not None:
            record["gold"] = [answer.text for answer in example.answers]
        return record

    # ------------------------------------------------------------ predictions and scores

    def decode(self, examples: Sequence[Question], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return {"id", "answer", "start", "end", "score", "no_answer_score", "best_non_empty", "nbest", "windows"}.

        answer: `context[start:end]`, or "" with 0, 0.
        score: softmax probability of the answer among the n best.
        no_answer_score: score of "no answer" minus score of the best answer; 0 if not `unanswerable`.
        best_non_empty: the best answer, even if "no answer" is predicted.
        nbest: the n best answers, {"text", "start", "end", "probability"}, best first.
        windows: number of windows of the question.

        Mostly as in google-research/bert run_squad.py (write_predictions) and transformers' postprocess_qa_predictions
        (examples/pytorch/question-answering/utils_qa.py). As in run_squad.py, an answer starts only in the window with
        most context around it, and equal answers are listed once. As in transformers, answers are copied from the
        text. The n best start and end positions of a window are context tokens; if they give no answer, all are tried.
        """
        return self._decoder().decode(examples, windows, logits)

    def scorer_files(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the input of evaluate-v1.1.py or -v2.0.py: {id: answer}; for v2.0 also {id: probability of no answer}.

        The probability is the logistic function of `no_answer_score`. It never exceeds 1, the script's default
        threshold, so the script scores the answers unchanged.
        """
        return self._decoder().scorer_files(predictions)

    @property
    def tunes(self) -> bool:
        return self.unanswerable and self.settings.threshold is None

    def tune(self, examples: Sequence[Question], windows: Windows, logits: np.ndarray) -> None:
        """Choose the threshold with the best `metric`, unless the settings have one; `score` and `details` use it."""
        if self.tunes:
            predictions = self.decode(examples, windows, logits)
            self.threshold = self._decoder().best_threshold(examples, predictions, self.settings.metric)

    def score(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return evaluate-v1.1.py's exact_match and f1, or the scores of evaluate-v2.0.py.

        exact, f1, HasAns_* and NoAns_* use the current threshold. best_exact and best_f1 are the best scores with any
        threshold, and best_*_thresh are their thresholds.

        Raises:
            InputError: no example has a prediction.
        """
        scores = self._decoder().score(examples, predictions)
        return scores | custom_score(self.settings.metric, *self._decoder().aligned_answers(examples, predictions))

    def interval(self, examples: Sequence[Question], predictions: Predictions) -> tuple[float, float] | None:
        if self.metric not in ("exact_match", "exact", "f1"):
            return None
        scores = self._decoder().score_each(examples, predictions, self.metric)
        return bootstrap(lambda indices: float(scores[indices].mean()), len(scores))

    def details(self, examples: Sequence[Question], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return {"answerable": {"HasAns" | "NoAns": {"exact", "f1", "total"}}, "threshold"}."""
        return self._decoder().details(examples, predictions)

    def _decoder(self) -> AnswerDecoder:
        return AnswerDecoder(self.settings.max_answer_tokens, self.unanswerable, self.threshold)

    # ------------------------------------------------------------ windows

    def windows(self, examples: Sequence[Question], encoder: TextEncoder, *, training: bool) -> Windows:
        """Build windows; adjacent ones share `stride` tokens of context. Training and prediction use the same windows.

        In training, each window is an example, labeled as having no answer unless it contains the whole first answer
        (transformers examples/pytorch/question-answering/run_qa.py, prepare_train_features).

        Raises:
            InputError: windows are too short for max_question_tokens and stride.
        """
        self._check_window_size(encoder)
        distinct_questions, question_N = unique_strings([example.text.strip() for example in examples])
        distinct_contexts, context_N = unique_strings([example.context for example in examples])
        encoded_questions, contexts = encoder.encode(distinct_questions), encoder.encode(distinct_contexts)
        length_N = np.diff(encoded_questions.starts)[question_N]
        question_length_N = np.minimum(length_N, self.settings.max_question_tokens)
        self._warn_about_truncated_questions(examples, length_N)
        capacity_N = encoder.capacity(pair=True) - question_length_N
        example_F, start_F, length_F = slide(np.diff(contexts.starts)[context_N], capacity_N, self.settings.stride)
        context_token = contexts.starts[context_N[example_F]] + start_F
        framed = frame(
            encoder,
            (encoded_questions.ids, encoded_questions.starts[question_N[example_F]], question_length_N[example_F]),
            (contexts.ids, context_token, length_F),
        )
        labels, weights = self._targets(examples, contexts, context_N, framed, (example_F, start_F, length_F))
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=np.arange(len(example_F)) if training else example_F,
            queries=np.arange(len(framed.ids)),
            labels=labels,
            weights=weights,
            extra={
                "context_start": framed.second,  # index of each window's first context token in `ids`
                "context_token": context_token,  # index of the same token in `offsets`
                "context_length": length_F,  # number of context tokens of each window
                "offsets": contexts.offsets,  # character offsets of the tokens of all contexts
            },
        )

    def _targets(
        self,
        examples: Sequence[Question],
        contexts: TokenizedTexts,
        context_N: np.ndarray,
        framed: FramedWindows,
        ranges: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels uint8 [T, 2], weights float32 [T]) of windows; `ranges` is the result of `slide`."""
        example_F, start_F, length_F = ranges
        first, last, is_used_N = _answer_tokens(examples, contexts, context_N)
        contains = (first[example_F] >= start_F) & (last[example_F] < start_F + length_F)
        has_whole_answer = np.bincount(example_F[contains], minlength=len(examples)) > 0
        self._warn_about_split_answers(examples, np.flatnonzero((first >= 0) & ~has_whole_answer))
        labels = np.zeros((len(framed.ids), 2), np.uint8)
        weights = np.zeros(len(framed.ids), np.float32)
        cls_positions, is_used = framed.starts[:-1], is_used_N[example_F]
        for column, token in enumerate((first, last)):
            position = np.where(contains, framed.second + token[example_F] - start_F, cls_positions)
            labels[position[is_used], column] = 1
        weights[cls_positions[is_used]] = 1
        return labels, weights

    def _check_window_size(self, encoder: TextEncoder) -> None:
        """Raise `InputError` if adjacent windows would contain no new context."""
        max_tokens, stride = self.settings.max_question_tokens, self.settings.stride
        capacity = encoder.capacity(pair=True)
        if capacity - max_tokens > stride:
            return
        advice = f"stride to at most {(capacity - max_tokens) // 2}"
        if capacity - max_tokens < 2:
            advice = f"max_question_tokens to at most {capacity // 4} and stride to at most {capacity // 4}"
        raise InputError(
            f"questions: a window of {encoder.max_length} tokens holds {capacity} tokens of text. With "
            f"max_question_tokens {max_tokens} and stride {stride}, adjacent windows would have no new context. Raise "
            f"max_length, or set {advice}."
        )

    def _warn_about_truncated_questions(self, examples: Sequence[Question], lengths: np.ndarray) -> None:
        max_tokens = self.settings.max_question_tokens
        if truncated := int((lengths > max_tokens).sum()):
            longest = int(lengths.argmax())
            logger.warning(
                "%d of %d questions are longer than max_question_tokens %d and are cut; the longest, %s, has %d.",
                truncated,
                len(examples),
                max_tokens,
                examples[longest].id,
                lengths[longest],
            )

    def _warn_about_split_answers(self, examples: Sequence[Question], split: np.ndarray) -> None:
        """Warn about the examples with the indices `split`, because no window contains their whole answer."""
        if len(split):
            logger.warning(
                "%d questions are trained as having no answer, since no window contains their whole answer; the first "
                "is %s. Answers of up to stride tokens (now %d) always fit.",
                len(split),
                examples[split[0]].id,
                self.settings.stride,
            )


def _answer_tokens(
    examples: Sequence[Question], contexts: TokenizedTexts, context_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first int64 [N], last int64 [N], is_used bool [N]) of each question.

    `first` and `last` are the indices of the answer's first and last token in its context, -1 without an answer. The
    loss ignores unlabeled questions and questions whose answer has no token: `is_used` is false. A character without a
    token (an accent that the normalizer drops) belongs to the token before it at the answer's end, and to the token
    after it at the answer's start.
    """
    answers = [question.answers[0] if question.answers else None for question in examples]
    is_labeled = np.array([question.answers is not None for question in examples], bool)
    has_answer = np.array([answer is not None for answer in answers], bool)
    start = np.array([answer.start if answer else 0 for answer in answers], np.int64)
    end = start + np.array([len(answer.text) if answer else 0 for answer in answers], np.int64)
    # One search for all contexts: context i starts at character i * chars_per_context.
    lengths = np.diff(contexts.starts)
    max_offset = int(contexts.offsets.max(initial=0))
    chars_per_context = max(max_offset, int(end.max(initial=0))) + 1
    context_T = np.repeat(np.arange(len(lengths)), lengths)
    starts_T = contexts.offsets[:, 0] + context_T * chars_per_context
    ends_T = contexts.offsets[:, 1] + context_T * chars_per_context
    first = np.searchsorted(ends_T, context_N * chars_per_context + start, "right") - contexts.starts[context_N]
    last = np.searchsorted(starts_T, context_N * chars_per_context + end, "left") - 1 - contexts.starts[context_N]
    has_tokens = has_answer & (first <= last) & (start < end)
    if len(ignored := np.flatnonzero(has_answer & ~has_tokens)):
        logger.warning(
            "%d answers have no token and are ignored in training; the first is %s, of question %s.",
            len(ignored),
            ascii(next(answer.text for answer in examples[ignored[0]].answers or ())),
            examples[ignored[0]].id,
        )
    return np.where(has_tokens, first, -1), np.where(has_tokens, last, -1), is_labeled & (has_tokens | ~has_answer)
