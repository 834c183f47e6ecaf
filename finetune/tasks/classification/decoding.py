"""Turn logits into predictions (classes, sets of labels, or values), and predictions into scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.tasks.classification import metrics as metrics
from finetune.tasks.datasets.labels import Label, ProblemType

THRESHOLD = 0.5  # default minimum probability to predict a label
_LOG_TEMPERATURE_STD = 0.5  # standard deviation of the normal prior on the logarithm of the temperature
_MAX_SAMPLED_THRESHOLDS = 100  # maximum number of thresholds sampled to try on the dev set

Predictions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LabelDecoder:
    """Decodes a model's C outputs into predictions, and scores these.

    Arrays of labels, such as `true`, are class indices int64 [N], sets of labels bool [N, C], or values float64 [N].
    """

    problem_type: ProblemType
    names: tuple[str, ...]  # label of each output; () for regression
    positive: str  # positive class, for the f1 of two classes; "" if there is no f1
    threshold: float  # minimum probability to predict a label (multi_label) or the positive class

    def encode(self, labels: Sequence[Label | None]) -> np.ndarray:
        """Encode labels as an array (see the class); missing labels become zeros."""
        if self.problem_type == "regression":
            return np.array([label or 0.0 for label in labels], np.float64)
        indices: dict[Any, int] = {name: index for index, name in enumerate(self.names)}
        if self.problem_type == "single_label":
            indices[None] = 0
            return np.array([indices[label] for label in labels], np.int64)
        sets_NC = np.zeros((len(labels), len(indices)), bool)
        for row, label in enumerate(labels):
            if isinstance(label, tuple):
                sets_NC[row, [indices[name] for name in label]] = True
        return sets_NC

    def decode(self, logits_NC: np.ndarray) -> list[dict[str, Any]]:
        """Return one prediction per example, from float64 logits.

        single_label: {"label", "score", "scores": {name: probability}}; multi_label: {"labels", "scores"};
        regression: {"value"}.
        """
        if self.problem_type == "regression":
            return [{"value": value} for value in logits_NC[:, 0].tolist()]
        if self.problem_type == "multi_label":
            probabilities_NC = 0.5 * (1 + np.tanh(logits_NC / 2))  # the logistic function, without overflow
            return [self._predict_labels(probabilities) for probabilities in probabilities_NC.tolist()]
        probabilities_NC = np.exp(logits_NC - logits_NC.max(1, keepdims=True))
        probabilities_NC /= probabilities_NC.sum(1, keepdims=True)
        class_N = logits_NC.argmax(1)
        if self.has_positive and self.threshold != THRESHOLD:
            index = self.names.index(self.positive)
            class_N = np.where(probabilities_NC[:, index] >= self.threshold, index, 1 - index)
        return [
            {
                "label": self.names[index],
                "score": probabilities[index],
                "scores": dict(zip(self.names, probabilities, strict=True)),
            }
            for index, probabilities in zip(class_N.tolist(), probabilities_NC.tolist(), strict=True)
        ]

    def scores(self, true: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """Return all scores of the problem type; `predicted` is a result of `to_array`."""
        if self.problem_type == "regression":
            return {name: score(true, predicted) for name, score in metrics.VALUE_SCORES.items()}
        if self.problem_type == "multi_label":
            return {name: score(true, predicted) for name, score in metrics.LABEL_SCORES.items()}
        matrix = metrics.confusion(true, predicted, len(self.names))
        scores = {name: score(matrix) for name, score in metrics.CLASS_SCORES.items()}
        if self.has_positive:
            scores["f1"] = float(metrics.class_counts(matrix).f1[self.names.index(self.positive)])
            scores["accuracy_and_f1"] = (scores["accuracy"] + scores["f1"]) / 2
        return scores

    def details(self, true: np.ndarray, predictions: Predictions) -> dict[str, Any]:
        """Return precision, recall and F1 per class, for single_label a confusion matrix; for values, mean errors."""
        if self.problem_type == "regression":
            errors_N = _predicted_values(predictions) - true
            return {
                "mean_absolute_error": float(np.abs(errors_N).mean()),
                "mean_squared_error": float((errors_N**2).mean()),
            }
        if self.problem_type == "multi_label":
            counts = metrics.label_counts(true, self.probabilities(predictions) >= self.threshold)
            return {"threshold": float(self.threshold), "by_type": self._class_scores(counts)}
        matrix = metrics.confusion(true, self.to_array(predictions), len(self.names))
        return {
            "confusion": {"labels": list(self.names), "counts": matrix.tolist()},
            "by_type": self._class_scores(metrics.class_counts(matrix)),
            **({"positive": self.positive, "threshold": float(self.threshold)} if self.has_positive else {}),
        }

    @property
    def has_positive(self) -> bool:
        """True if there are two classes and `positive` is set."""
        return len(self.names) == 2 and bool(self.positive)

    def best_threshold(self, true: np.ndarray, predictions: Predictions, metric: str) -> float:
        """For multi_label, return the threshold with the best `metric`, common to all labels; ties: nearest to 0.5."""
        probabilities_NC = self.probabilities(predictions)
        # All thresholds between two adjacent probabilities give the same label sets, so midpoints are tried. Of many,
        # only a sample, and the next below each multiple of 0.01: most probabilities of rare labels are near 0.
        values = np.unique(probabilities_NC)
        midpoints = (values[1:] + values[:-1]) / 2
        sample = np.linspace(0, len(midpoints) - 1, min(_MAX_SAMPLED_THRESHOLDS, len(midpoints))).round().astype(int)
        hundredths = np.searchsorted(midpoints, np.arange(1, 100) / 100, side="right") - 1
        candidates = [THRESHOLD, *midpoints[np.union1d(sample, hundredths[hundredths >= 0])].tolist()]
        candidates.sort(key=lambda candidate: abs(candidate - THRESHOLD))
        scores = [metrics.LABEL_SCORES[metric](true, probabilities_NC >= candidate) for candidate in candidates]
        return candidates[int(np.argmax(scores))]

    def best_temperature(self, true: np.ndarray, logits_NC: np.ndarray) -> float:
        """Return the temperature (divisor of the logits) with the lowest loss (Guo et al. 2017, section 4.2).

        A normal prior on its logarithm keeps it near 1 if there are few examples, or all predictions are correct.
        """

        def loss(log_temperature: float) -> float:
            scaled = logits_NC / np.exp(log_temperature)
            if self.problem_type == "multi_label":
                losses = np.logaddexp(0, scaled) - true * scaled
            else:
                losses = np.logaddexp.reduce(scaled, axis=1) - scaled[np.arange(len(true)), true]
            return float(losses.sum()) + (log_temperature / _LOG_TEMPERATURE_STD) ** 2 / 2

        best = 0.0
        for radius in (3.0, 0.3, 0.03):
            best = min((best + np.linspace(-radius, radius, 21)).tolist(), key=loss)
        return float(np.exp(best))

    def _predict_labels(self, probabilities: Sequence[float]) -> dict[str, Any]:
        scores = dict(zip(self.names, probabilities, strict=True))
        return {"labels": [name for name in self.names if scores[name] >= self.threshold], "scores": scores}

    def probabilities(self, predictions: Predictions) -> np.ndarray:
        """Return the predicted probabilities, float64 [N, C]."""
        rows = [[prediction["scores"][name] for name in self.names] for prediction in predictions]
        return np.array(rows, np.float64).reshape(len(rows), len(self.names))

    def to_array(self, predictions: Predictions) -> np.ndarray:
        """Return the predictions as an array of labels (see the class)."""
        if self.problem_type == "regression":
            return _predicted_values(predictions)
        if self.problem_type == "multi_label":
            return self.probabilities(predictions) >= self.threshold
        indices = {name: index for index, name in enumerate(self.names)}
        return np.array([indices[prediction["label"]] for prediction in predictions], np.int64)

    def _class_scores(self, counts: metrics.ClassCounts) -> dict[str, dict[str, float]]:
        columns = (column.tolist() for column in (counts.precision, counts.recall, counts.f1, counts.true))
        return {
            name: {"precision": precision, "recall": recall, "f1": f1, "support": support}
            for name, precision, recall, f1, support in zip(self.names, *columns, strict=True)
        }


def _predicted_values(predictions: Predictions) -> np.ndarray:
    """Return the predicted values, float64 [N]."""
    return np.array([prediction["value"] for prediction in predictions], np.float64)
