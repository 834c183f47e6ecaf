"""Metrics for classes, label sets and values, with the same results as scikit-learn and scipy.

An undefined score is 0, as with scikit-learn's `zero_division`: F1 of a class that neither occurs nor is predicted,
Matthews correlation of a constant prediction. scipy returns NaN for the correlation with a constant. NaN cannot be
compared between checkpoints and is not valid JSON, so it is 0 here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_BINS = 15  # number of confidence bins of ece, the expected calibration error


@dataclass(frozen=True)
class ClassCounts:
    """Counts for precision, recall and F1 of C classes or labels."""

    correct: np.ndarray  # int64 [C], number of correct predictions of each class (true positives)
    predicted: np.ndarray  # int64 [C], number of predictions
    true: np.ndarray  # int64 [C], number of true occurrences

    @property
    def precision(self) -> np.ndarray:
        """float64 [C]: precision of each class."""
        return _ratio(self.correct, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """float64 [C]: recall of each class."""
        return _ratio(self.correct, self.true)

    @property
    def f1(self) -> np.ndarray:
        """float64 [C]: harmonic mean of precision and recall."""
        return _ratio(2 * self.correct, self.predicted + self.true)

    @property
    def micro_f1(self) -> float:
        """F1 over the summed counts of all classes."""
        return float(_ratio(2 * self.correct.sum(), self.predicted.sum() + self.true.sum()))

    def macro_f1(self, *, only_present: bool) -> float:
        """Return the mean F1 over all classes, or only over classes that occur or are predicted (`only_present`).

        scikit-learn's f1_score(average="macro") averages present classes only, but all labels of label sets.
        """
        f1 = self.f1[self.predicted + self.true > 0] if only_present else self.f1
        return float(f1.mean()) if len(f1) else 0.0


def confusion(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Return counts, int64 [C, C], from class indices [N]: rows are true classes, columns are predicted classes."""
    counts = np.bincount(true * num_classes + predicted, minlength=num_classes * num_classes)
    return counts.reshape(num_classes, num_classes)


def class_counts(matrix: np.ndarray) -> ClassCounts:
    """Return the counts of each class from a confusion matrix."""
    return ClassCounts(matrix.diagonal(), matrix.sum(0), matrix.sum(1))


def label_counts(true: np.ndarray, predicted: np.ndarray) -> ClassCounts:
    """Return the counts of each label from label sets, bool [N, C]."""
    return ClassCounts((true & predicted).sum(0), predicted.sum(0), true.sum(0))


def accuracy(matrix: np.ndarray) -> float:
    """Return the fraction of examples on the diagonal of a confusion matrix."""
    return float(_ratio(np.trace(matrix), matrix.sum()))


def matthews(matrix: np.ndarray) -> float:
    """Return the Matthews correlation coefficient of a confusion matrix, for two or more classes (Gorodkin, 2004)."""
    # Python integers, because products of the counts of a million examples overflow int64.
    true, predicted = [int(n) for n in matrix.sum(1)], [int(n) for n in matrix.sum(0)]
    total, correct = sum(true), int(np.trace(matrix))
    covariance = correct * total - sum(t * p for t, p in zip(true, predicted, strict=True))
    product = (total**2 - sum(t * t for t in true)) * (total**2 - sum(p * p for p in predicted))
    return covariance / product**0.5 if product else 0.0


def subset_accuracy(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return the fraction of examples whose whole label set, a row of bool [N, C], is correct."""
    return float((true == predicted).all(1).mean()) if len(true) else 0.0


def calibration(probabilities: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return nll (nats), brier and ece of probabilities [N, C]; lower is better.

    `true` has class indices int64 [N], or sets of labels bool [N, C]; each label is then a separate binary prediction.
    nll and brier are scikit-learn's log_loss and brier_score_loss; ece has 15 bins of equal width (Guo et al. 2017,
    "On Calibration of Modern Neural Networks", equation 3), for label sets over the probabilities of all labels.
    """
    if true.ndim == 1:
        likelihood_N = probabilities[np.arange(len(true)), true]
        brier = ((probabilities**2).sum(1) - 2 * likelihood_N + 1).mean() / (2 if probabilities.shape[1] == 2 else 1)
        confidences, outcomes = probabilities.max(1), probabilities.argmax(1) == true
    else:
        confidences, outcomes = probabilities.ravel(), true.ravel()
        likelihood_N = np.where(outcomes, confidences, 1 - confidences)
        brier = ((1 - likelihood_N) ** 2).mean()
    bins = np.minimum((confidences * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, outcomes - confidences, _BINS)
    nll = -np.log(np.maximum(likelihood_N, np.finfo(np.float64).tiny)).mean()
    return {"nll": float(nll), "brier": float(brier), "ece": float(np.abs(gaps).sum() / len(outcomes))}


def pearson(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return the Pearson correlation of two arrays [N]."""
    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    x, y = _center_and_normalize(true), _center_and_normalize(predicted)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return the Spearman correlation: the Pearson correlation of the ranks; equal values get their mean rank."""
    return pearson(ranks(true), ranks(predicted))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1, float64 [N]; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _center_and_normalize(values: np.ndarray) -> np.ndarray:
    """Return the values centered and normalized to length 1, float64."""
    # Scaled first, because squares of very large or small values would overflow or underflow.
    values = values.astype(np.float64) / np.abs(values).max()
    centered = values - values.mean()
    return centered / np.linalg.norm(centered)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.zeros(np.shape(denominator)), where=np.asarray(denominator) > 0)


CLASS_SCORES: dict[str, Callable[[np.ndarray], float]] = {
    "accuracy": accuracy,
    "macro_f1": lambda matrix: class_counts(matrix).macro_f1(only_present=True),
    "micro_f1": lambda matrix: class_counts(matrix).micro_f1,
    "matthews": matthews,
}
"""Scores of classes, from a confusion matrix."""

LABEL_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "micro_f1": lambda true, predicted: label_counts(true, predicted).micro_f1,
    "macro_f1": lambda true, predicted: label_counts(true, predicted).macro_f1(only_present=False),
    "subset_accuracy": subset_accuracy,
}
"""Scores of label sets, from true and predicted sets, bool [N, C]."""

VALUE_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "pearson": pearson,
    "spearman": spearman,
    "pearson_and_spearman": lambda true, predicted: (pearson(true, predicted) + spearman(true, predicted)) / 2,
}
"""Scores of values, from true and predicted values, float64 [N]."""
