"""The fit of the scaling law to measured runs, and what its bootstrap says about it. Pure functions.

Hoffmann et al. 2022, approach 3: the Huber loss of the errors of log L, minimized from a grid of starts. It differs in
two things. A dozen runs do not determine the exponents, so all coefficients have weak priors. And the minimum is found
by reweighted Gauss-Newton steps with damping (Levenberg-Marquardt) for all starts and resamples at once, not by L-BFGS:
the same objective, five unknowns, exact derivatives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.planning.law import FLOPS_PER_PARAMETER, Law, coefficients, effective_tokens, useful_size
from pretrain.planning.published import MeasuredRun

HUBER = 1e-3  # from this error of log L on, errors count in proportion, not squared (Hoffmann et al. 2022)
FEWEST = 6  # points: one more than the law has coefficients
_NOISE = 0.01  # errors of log L that are expected; weighs the priors against the points
_STEPS = 300
_SEED = 0
_DIGITS = 6  # of a coefficient in a file


@dataclass(frozen=True)
class Prior:
    """Mean and standard deviation of a normal distribution."""

    mean: float
    deviation: float


# Hoffmann et al. 2022 have alpha 0.34 and beta 0.28, the replication of Besiroglu et al. 2024 (arXiv:2404.10102) 0.35
# and 0.37. The floor is that of masked tokens: RoBERTa-large has 1.3 nats (Liu et al. 2019, table 3: perplexity 3.7),
# which are 0.4 bits per character of 4.8 per token; a lower floor by a factor of 1.6 either way.
EXPONENT = Prior(0.35, 0.15)
LOG_FLOOR = Prior(float(np.log(0.3)), 0.5)
# Of the logarithms of the two terms at the points' geometric means, in bits per character: all but flat.
_LOG_TERM = Prior(-1.0, 3.0)
_PRIORS = (_LOG_TERM, _LOG_TERM, LOG_FLOOR, EXPONENT, EXPONENT)  # in the order of the unknowns
_MEANS = np.array([prior.mean for prior in _PRIORS])
_DEVIATIONS = np.array([prior.deviation for prior in _PRIORS])


@dataclass(frozen=True)
class Points:
    """Measured runs: float64 arrays of one length."""

    size: np.ndarray  # effective parameters, as `law.useful_size`
    tokens: np.ndarray  # effective ones, as `law.effective_tokens`
    loss: np.ndarray  # bits per character

    def __len__(self) -> int:
        return len(self.loss)


@dataclass(frozen=True)
class Fit:
    """The law, and those of the resamples: likely laws too, whose spread is its uncertainty."""

    law: Law
    resampled: tuple[Law, ...]


def fit(points: Points, resamples: int = 100) -> Fit:
    """Fit the law, and again to `resamples` bootstrap samples of the points.

    Each resample also draws the centers of its priors from the priors ("randomize, then optimize", Bardsley et al.
    2014). So a coefficient that the points do not determine varies as widely as its prior, not as little as the fit.

    Raises `ValueError` with fewer than `FEWEST` points.
    """
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} points; expected at least {FEWEST}")
    problem = _Problem.of(points)
    starts = _starts(points)
    best = problem.best(starts, np.ones((len(starts), len(points))), np.tile(_MEANS, (len(starts), 1)))[None]
    random = np.random.default_rng(_SEED)
    counts = random.multinomial(len(points), np.full(len(points), 1 / len(points)), size=resamples).astype(float)
    centers = random.normal(_MEANS, _DEVIATIONS, (resamples, len(_MEANS)))
    found = problem.minimize(np.repeat(best, resamples, axis=0), counts, centers)[0]
    return Fit(problem.law(best[0]), tuple(map(problem.law, found)))


def best_size(law: Law, flops: float) -> float:
    """The size with the lowest loss after `flops` FLOPs on text that does not repeat.

    Hoffmann et al. 2022, equation 4. The optimizer's FLOPs are not counted.
    """
    alpha, beta = law.size_exponent, law.data_exponent
    ratio = alpha * law.size_scale / (beta * law.data_scale)
    return float((ratio * (flops / FLOPS_PER_PARAMETER) ** beta) ** (1 / (alpha + beta)))


def objective(law: Law, points: Points) -> float:
    """What `fit` minimizes over the points, with the priors."""
    problem = _Problem.of(points)
    log_size, log_data = np.log(law.size_scale), np.log(law.data_scale)
    unknowns = [
        log_size - law.size_exponent * problem.middle[0],
        log_data - law.data_exponent * problem.middle[1],
        np.log(law.floor),
        law.size_exponent,
        law.data_exponent,
    ]
    return float(problem.objective(np.array([unknowns]), np.ones((1, len(points))), _MEANS[None])[0])


@dataclass(frozen=True)
class _Problem:
    """The points as the minimizer needs them.

    The unknowns of a row are (log of A's term at the mean size, log of B's at the mean tokens, log E, alpha, beta). At
    the means, the terms and the exponents hardly depend on each other.
    """

    size: np.ndarray  # [n], logarithms less their means
    tokens: np.ndarray
    loss: np.ndarray  # [n], logarithms
    middle: tuple[float, float]  # the means

    @classmethod
    def of(cls, points: Points) -> _Problem:
        size, tokens = np.log(points.size), np.log(points.tokens)
        middle = float(size.mean()), float(tokens.mean())
        return cls(size - middle[0], tokens - middle[1], np.log(points.loss), middle)

    def law(self, unknowns: np.ndarray) -> Law:
        a, b, floor, alpha, beta = map(float, unknowns)
        size_scale, data_scale = np.exp(a + alpha * self.middle[0]), np.exp(b + beta * self.middle[1])
        return Law(float(np.exp(floor)), float(size_scale), alpha, float(data_scale), beta)

    def best(self, starts: np.ndarray, counts: np.ndarray, centers: np.ndarray) -> np.ndarray:
        """The unknowns [5] of the lowest minimum from all starts [S, 5]."""
        unknowns, values = self.minimize(starts, counts, centers)
        return unknowns[int(np.argmin(values))]

    def minimize(self, unknowns: np.ndarray, counts: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(unknowns [S, 5], objectives [S]) at the minimum below each row of `unknowns`.

        Args:
            unknowns: [S, 5], the starts.
            counts: [S, n], how often each point counts.
            centers: [S, 5], of the priors.
        """
        damping, value = np.full(len(unknowns), 1e-2), self.objective(unknowns, counts, centers)
        precision = HUBER * _NOISE / _DEVIATIONS**2
        for _ in range(_STEPS):
            errors, slopes = self._errors(unknowns)
            weights = counts * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-300))
            gradient = np.einsum("sn,snk->sk", weights * errors, slopes) + precision * (unknowns - centers)
            curvature = np.einsum("sn,snk,snl->skl", weights, slopes, slopes) + np.diag(precision)
            diagonal = np.einsum("skk->sk", curvature)
            curvature = curvature + damping[:, None, None] * np.einsum("sk,kl->skl", diagonal, np.eye(5))
            there = unknowns - np.linalg.solve(curvature, gradient[..., None])[..., 0]
            new = self.objective(there, counts, centers)
            better = new < value
            unknowns, value = np.where(better[:, None], there, unknowns), np.where(better, new, value)
            damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
        return unknowns, value

    def objective(self, unknowns: np.ndarray, counts: np.ndarray, centers: np.ndarray) -> np.ndarray:
        """[S]. A prior counts as it does beside errors with a Laplace distribution of scale `_NOISE`."""
        errors = np.abs(self._errors(unknowns)[0])
        huber = np.where(errors <= HUBER, errors**2 / 2, HUBER * (errors - HUBER / 2))
        priors = ((unknowns - centers) / _DEVIATIONS) ** 2 / 2
        return (counts * huber).sum(axis=1) + HUBER * _NOISE * priors.sum(axis=1)

    def _errors(self, unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(errors [S, n] of log L, their derivatives [S, n, 5])."""
        a, b, floor, alpha, beta = (column[:, None] for column in unknowns.T)
        terms = np.stack(
            np.broadcast_arrays(a - alpha * self.size, b - beta * self.tokens, floor + 0 * self.size), axis=-1
        )
        top = terms.max(axis=-1, keepdims=True)
        predicted = top[..., 0] + np.log(np.exp(terms - top).sum(axis=-1))
        shares = np.exp(terms - predicted[..., None])
        of_exponents = [-shares[..., 0] * self.size, -shares[..., 1] * self.tokens]
        return predicted - self.loss, np.concatenate([shares, np.stack(of_exponents, axis=-1)], axis=-1)


def _starts(points: Points) -> np.ndarray:
    """[S, 5]: shares of the loss that the terms have at the means, and exponents."""
    loss = float(points.loss.mean())
    grid = itertools.product((0.1, 0.3, 0.6), (0.2, 0.5, 0.8), (0.15, 0.35, 0.7), (0.15, 0.35, 0.7))
    return np.array(
        [
            (np.log((1 - floor) * share * loss), np.log((1 - floor) * (1 - share) * loss), np.log(floor * loss), x, y)
            for floor, share, x, y in grid
        ]
    )


def as_points(points: Sequence[MeasuredRun]) -> Points:
    """The runs as arrays for the fit."""
    size, tokens, unique, loss = (
        np.array([(one.size, one.tokens, one.unique, one.loss) for one in points]).reshape(-1, 4).T
    )
    return Points(np.asarray(useful_size(size, tokens, unique)), np.asarray(effective_tokens(tokens, unique)), loss)


def published_fit(points: Sequence[MeasuredRun]) -> dict[str, Any]:
    """`coefficients` and `resampled` of the law of these runs, with as many digits as the file keeps."""
    found = fit(as_points(points))
    law, *resampled = (
        tuple(float(f"{value:.{_DIGITS}g}") for value in coefficients(one)) for one in (found.law, *found.resampled)
    )
    return {"coefficients": law, "resampled": tuple(resampled)}
