"""Classification and regression: a class, a set of labels or a value for each document or pair of documents."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from finetune.tasks.base import Head, Objective, Predictions, Task, Windows
from finetune.tasks.classification import checks
from finetune.tasks.classification import metrics as metrics
from finetune.tasks.classification.decoding import THRESHOLD, LabelDecoder
from finetune.tasks.classification.settings import SCORES, ClassificationSettings
from finetune.tasks.classification.source import Example, ExampleSource
from finetune.tasks.custom_metric import custom_score, metric_name
from finetune.tasks.datasets import glue
from finetune.tasks.datasets.labels import ProblemType
from finetune.tasks.datasets.text import FramedWindows, Slices, TextEncoder, TokenizedTexts, frame
from finetune.tasks.datasets.windows import cut_pairs, select_evenly, slide
from finetune.tasks.intervals import bootstrap
from pretrain.common.errors import InputError

logger = logging.getLogger(__name__)

_OBJECTIVES: dict[ProblemType, Objective] = {"single_label": "classes", "multi_label": "labels", "regression": "value"}


class Classification(Task[Example]):
    """Predicts classes, labels or values of documents or pairs.

    Args:
        state: labels and threshold of a trained model, as returned by `state()`.
    """

    kind = "classification"
    settings_type = ClassificationSettings
    head: Head = "sequence"

    def __init__(self, settings: ClassificationSettings, state: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self._glue = glue.TASKS[settings.glue] if settings.glue else None
        self.problem_type: ProblemType = "regression" if settings.glue == "stsb" else settings.problem_type
        self.objective: Objective = _OBJECTIVES[self.problem_type]
        self.metric: str = metric_name(settings.metric) or (
            self._glue.metric if self._glue else SCORES[self.problem_type][0]
        )
        self.max_windows: int = settings.max_windows
        f1_task = self._glue if self._glue and "f1" in self._glue.scores else None
        self.positive = settings.positive or (list(f1_task.labels.values())[-1] if f1_task else "")
        # Minimum probability to predict a label (multi_label) or the positive class (two classes).
        self.threshold = float(state["threshold"]) if state else settings.threshold or THRESHOLD
        self._source = ExampleSource(settings, self.problem_type, state)
        columns = self._source.tables.column_keys.items()  # `record` calls the label "gold"
        self.columns = {name.replace("label", "gold"): column for name, column in columns if isinstance(column, str)}

    # ------------------------------------------------------------ outputs

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs; read from the training set if not yet known."""
        return tuple(self._source.names.values())

    @property
    def outputs(self) -> int:
        return 1 if self.problem_type == "regression" else len(self.labels)

    @property
    def takes_pairs(self) -> bool:
        """True if each example is a pair of documents."""
        return self._source.tables.pair_column is not None

    def state(self) -> dict[str, Any]:
        """Return the labels, their names in files ("values"), the threshold, and each label's number of examples."""
        return {
            "labels": list(self.labels),
            "values": list(self._source.names),
            "threshold": float(self.threshold),
            "examples": self._source.training_counts,
        }

    def set_threshold(self, value: float) -> None:
        if self.problem_type != "multi_label" and not self._decoder().has_positive:
            super().set_threshold(value)  # raises `InputError`
        if not 0 < value < 1:
            raise InputError(f"threshold: {value:g}; expected a probability above 0 and below 1.")
        self.threshold = value

    # ------------------------------------------------------------ descriptions

    @property
    def summary(self) -> str:
        return "Classifies pairs of texts" if self.takes_pairs else "Classifies text"

    @property
    def sample(self) -> str | dict[str, str]:
        return {"text": "A man sleeps.", "pair": "Somebody rests."} if self.takes_pairs else "text of any length"

    def origin(self, name: str) -> str:
        return self._source.tables.origin(name)

    # ------------------------------------------------------------ reading files

    def read_train(self) -> list[Example]:
        return self._source.read_train()

    def read_held_out(self) -> dict[str, list[Example]]:
        return self._source.read_held_out()

    def read_test(self) -> dict[str, list[Example]]:
        return self._source.read_test()

    def read_file(self, path: str, *, labeled: bool = True) -> list[Example]:
        return self._source.read_file(path, labeled=labeled)

    def example(self, record: Mapping[str, Any] | str, where: str) -> Example:
        return self._source.example(record, where)

    def is_labeled(self, examples: Sequence[Example]) -> bool:
        return any(example.label is not None for example in examples)

    def record(self, example: Example) -> dict[str, Any]:
        """Return {"id", "text", "pair", "gold": label, list of labels or value}, without the entries that are None."""
        gold = list(example.label) if isinstance(example.label, tuple) else example.label
        record = {"id": example.id, "text": example.text, "pair": example.pair, "gold": gold}
        return {key: value for key, value in record.items() if value is not None}

    def unused_columns(self, example: Example) -> Mapping[str, Any]:
        return example.unused_columns or {}

    def initial_prediction(self, examples: Sequence[Example]) -> float:
        return float(self._true_labels(examples).mean())

    # ------------------------------------------------------------ predictions and scores

    def decode(self, examples: Sequence[Example], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one prediction per example (see `LabelDecoder.decode`) from the logits, float32 [windows, C]."""
        return self._decoder().decode(_mean_logits(windows, logits)) if len(windows) else []

    @property
    def tunes(self) -> bool:
        return self.problem_type == "multi_label" and not self.settings.threshold

    def tune(self, examples: Sequence[Example], windows: Windows, logits: np.ndarray) -> None:
        """For multi_label, choose one threshold for all labels: the one with the best `metric` on these examples.

        A custom metric is replaced by micro F1; if several thresholds score equally, the one nearest to 0.5 is chosen.
        """
        if not self.tunes or not examples:
            return
        predictions = self.decode(examples, windows, logits)
        metric = self.metric if self.metric in SCORES[self.problem_type] else SCORES[self.problem_type][0]
        self.threshold = self._decoder().best_threshold(self._true_labels(examples), predictions, metric)

    def score(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the official scores of a GLUE task, otherwise all scores of the problem type; {} without labels.

        Unlabeled examples are ignored. Sets of labels are predicted with the current threshold.
        """
        if not self.is_labeled(examples):
            return {}
        true, predictions = self._true_and_predicted(examples, predictions)
        predicted = self._decoder().to_array(predictions)
        scores = self._decoder().scores(true, predicted)
        scores = {name: scores[name] for name in self._glue.scores} if self._glue else scores
        return scores | custom_score(self.settings.metric, true, predicted)

    def calibration(self, examples: Sequence[Example], predictions: Predictions) -> dict[str, float]:
        true, predictions = self._true_and_predicted(examples, predictions)
        has_probabilities = self.labels and predictions
        return metrics.calibration(self._decoder().probabilities(predictions), true) if has_probabilities else {}

    def temperature(self, examples: Sequence[Example], windows: Windows, logits: np.ndarray) -> float:
        return self._decoder().best_temperature(self._true_labels(examples), _mean_logits(windows, logits))

    def interval(self, examples: Sequence[Example], predictions: Predictions) -> tuple[float, float] | None:
        if ":" in self.settings.metric:  # a custom function may be slow
            return None
        decoder, (true, predictions) = self._decoder(), self._true_and_predicted(examples, predictions)
        predicted = decoder.to_array(predictions)
        return bootstrap(lambda indices: decoder.scores(true[indices], predicted[indices])[self.metric], len(true))

    def details(self, examples: Sequence[Example], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return precision, recall and F1 per class, for single_label the confusion matrix; for values, mean errors."""
        if not self.is_labeled(examples):
            return {}
        return self._decoder().details(*self._true_and_predicted(examples, predictions))

    def result_remarks(self, details: Mapping[str, Any]) -> list[str]:
        if "confusion" not in details:
            return []
        labels, counts = details["confusion"]["labels"], details["confusion"]["counts"]
        threshold = details.get("threshold", THRESHOLD)
        return list(checks.never_predicted_warnings(labels, counts, self._source.training_counts, threshold))

    def _decoder(self) -> LabelDecoder:
        return LabelDecoder(self.problem_type, self.labels, self.positive, self.threshold)

    def _true_and_predicted(self, examples: Sequence[Example], predictions: Predictions) -> tuple[Any, Any]:
        """Return (true labels, predictions) of the labeled examples."""
        pairs = [pair for pair in zip(examples, predictions, strict=True) if pair[0].label is not None]
        return self._true_labels([example for example, _ in pairs]), [prediction for _, prediction in pairs]

    def _true_labels(self, examples: Sequence[Example]) -> np.ndarray:
        return self._decoder().encode([example.label for example in examples])

    # ------------------------------------------------------------ windows

    def check(self, encoder: TextEncoder) -> None:
        _overlap(encoder.capacity(pair=self.takes_pairs))  # raises `InputError`

    def windows(self, examples: Sequence[Example], encoder: TextEncoder, *, training: bool) -> Windows:
        example_indices, framed = self._build_windows(examples, encoder, training=training)
        labels = self._true_labels(examples)
        weights = 1 / np.bincount(example_indices, minlength=len(examples))[example_indices]
        class_weights = self._source.class_weights if training else np.ones(self.outputs)
        if self.problem_type == "single_label":
            weights *= class_weights[labels[example_indices]]
        targets = self._targets(labels, class_weights, self.settings.label_smoothing if training else 0.0)
        return Windows(
            ids=framed.ids,
            types=framed.types,
            starts=framed.starts,
            examples=example_indices.astype(np.int64),
            queries=framed.starts[:-1].astype(np.int64),
            labels=targets[example_indices],
            weights=weights.astype(np.float32),
            extra={},
        )

    def _targets(self, labels: np.ndarray, class_weights: np.ndarray, smoothing: float) -> np.ndarray:
        """Return the labels that `Objective` expects, weighted as in torch's CrossEntropyLoss and BCEWithLogitsLoss."""
        if self.problem_type == "multi_label":
            return (labels * class_weights).astype(np.float32)
        if self.problem_type == "regression" or not smoothing:
            return labels.astype(np.float32 if self.problem_type == "regression" else np.int64)
        # Divide by the weight of the true class, because it is already a factor of the window's weight.
        smoothed_NC = class_weights / class_weights[labels][:, None] * smoothing / self.outputs
        return ((1 - smoothing) * np.eye(self.outputs)[labels] + smoothed_NC).astype(np.float32)

    def _build_windows(
        self, examples: Sequence[Example], encoder: TextEncoder, *, training: bool
    ) -> tuple[np.ndarray, FramedWindows]:
        """Return (index of each window's example, windows); for training, at most `max_windows` windows per example."""
        capacity = encoder.capacity(pair=self.takes_pairs)
        overlap = _overlap(capacity)
        texts = encoder.encode([example.text for example in examples])
        if not self.takes_pairs:
            ranges = slide(np.diff(texts.starts), capacity, overlap)
            indices, starts, lengths = self._limit_windows(ranges, len(examples)) if training else ranges
            return indices, frame(encoder, _slices(texts, indices, starts, lengths))
        pairs = encoder.encode([example.pair or "" for example in examples])
        ranges = cut_pairs(np.diff(texts.starts), np.diff(pairs.starts), capacity, overlap)
        indices, *spans = self._limit_windows(ranges, len(examples)) if training else ranges
        return indices, frame(encoder, _slices(texts, indices, *spans[:2]), _slices(pairs, indices, *spans[2:]))

    def _limit_windows(self, ranges: tuple[np.ndarray, ...], num_examples: int) -> tuple[np.ndarray, ...]:
        """Select at most `max_windows` windows of each example; `ranges` is a result of `slide` or `cut_pairs`."""
        limit = self.settings.max_windows
        counts = np.bincount(ranges[0], minlength=num_examples)
        is_long = counts > limit
        if not is_long.any():
            return ranges
        logger.warning(
            "%d of %d examples are longer than %d windows (max_windows): training uses %d of their %d windows, "
            "evenly spaced; predictions use all",
            is_long.sum(),
            num_examples,
            limit,
            limit * is_long.sum(),
            counts[is_long].sum(),
        )
        selected = select_evenly(ranges[0], num_examples, limit)
        return tuple(array[selected] for array in ranges)


def _mean_logits(windows: Windows, logits: np.ndarray) -> np.ndarray:
    """Return the mean logits of each example's windows, float64 [examples, C]."""
    starts = np.flatnonzero(np.diff(windows.examples, prepend=-1))
    counts = np.diff(starts, append=len(windows))
    return np.add.reduceat(logits.astype(np.float64), starts, axis=0) / counts[:, None]


def _slices(texts: TokenizedTexts, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Slices:
    """Return a slice for each window: `lengths[w]` tokens of string `indices[w]`, from its token `starts[w]` on."""
    return texts.ids, texts.starts[indices] + starts, lengths


def _overlap(capacity: int) -> int:
    """Return the number of tokens by which adjacent windows of a long document overlap."""
    if capacity < 4:
        raise InputError(f"max_length: windows hold {capacity} tokens of text; at least 4 are needed. Raise it.")
    return capacity // 4
