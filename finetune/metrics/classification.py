"""Scores of classes, sets of labels and values, equal to scikit-learn's and scipy's.

Where a score is not defined it is 0, as scikit-learn's `zero_division` has it: F1 of a class that neither is there
nor was predicted, Matthews of a constant prediction. scipy gives NaN for the correlation with a constant; a NaN
would choose no checkpoint and is no JSON, so it is 0 here too: a constant tells nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassCounts:
    """How often each of C classes or labels was predicted, was true, and was both."""

    both: np.ndarray  # int64 [C]
    predicted: np.ndarray  # int64 [C]
    true: np.ndarray  # int64 [C]

    @property
    def precision(self) -> np.ndarray:
        """float64 [C]: share of the predictions of each that are right."""
        return _ratio(self.both, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """float64 [C]: share of each that was found."""
        return _ratio(self.both, self.true)

    @property
    def f1(self) -> np.ndarray:
        """float64 [C]: harmonic mean of precision and recall."""
        return _ratio(2 * self.both, self.predicted + self.true)

    @property
    def micro_f1(self) -> float:
        """F1 of all decisions together."""
        return float(_ratio(2 * self.both.sum(), self.predicted.sum() + self.true.sum()))

    def macro_f1(self, *, present: bool) -> float:
        """Mean of the F1 of each; with `present`, of those that are true or predicted somewhere.

        sklearn's f1_score(average="macro") takes those present for classes, and all columns for sets of labels.
        """
        f1 = self.f1[self.predicted + self.true > 0] if present else self.f1
        return float(f1.mean()) if len(f1) else 0.0


def confusion(true: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C] from class numbers [N]: rows are what was true, columns what was predicted."""
    return np.bincount(true * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def class_counts(matrix: np.ndarray) -> ClassCounts:
    """Counts of each class from a confusion matrix."""
    return ClassCounts(matrix.diagonal(), matrix.sum(0), matrix.sum(1))


def label_counts(true: np.ndarray, predicted: np.ndarray) -> ClassCounts:
    """Counts of each label from sets of labels, bool [N, C]."""
    return ClassCounts((true & predicted).sum(0), predicted.sum(0), true.sum(0))


def accuracy(matrix: np.ndarray) -> float:
    """Share of a confusion matrix on its diagonal."""
    return float(_ratio(np.trace(matrix), matrix.sum()))


def matthews(matrix: np.ndarray) -> float:
    """Matthews' correlation coefficient of a confusion matrix, for two classes or more (Gorodkin, 2004)."""
    # Python's integers: products of the counts of a million examples are past int64.
    true, predicted = [int(n) for n in matrix.sum(1)], [int(n) for n in matrix.sum(0)]
    total, right = sum(true), int(np.trace(matrix))
    covariance = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
    spread = (total**2 - sum(t * t for t in true)) * (total**2 - sum(p * p for p in predicted))
    return covariance / spread**0.5 if spread else 0.0


def subset_accuracy(true: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the examples whose set of labels, a row of bool [N, C], is right as a whole."""
    return float((true == predicted).all(1).mean()) if len(true) else 0.0


def pearson(true: np.ndarray, predicted: np.ndarray) -> float:
    """Pearson's correlation of two columns of values [N]."""
    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return 0.0
    x, y = _unit(true), _unit(predicted)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(true: np.ndarray, predicted: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of the ranks, ties sharing the mean of theirs."""
    return pearson(ranks(true), ranks(predicted))


def ranks(values: np.ndarray) -> np.ndarray:
    """float64 [N]: ranks from 1 on; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _unit(values: np.ndarray) -> np.ndarray:
    """Centred and of length 1, in float64."""
    # Scaled first: squares of very large or small values would overflow or vanish.
    values = values.astype(np.float64) / np.abs(values).max()
    centred = values - values.mean()
    return centred / np.linalg.norm(centred)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.shape(whole)), where=np.asarray(whole) > 0)
