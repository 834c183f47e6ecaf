"""Bootstrap confidence intervals (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3)."""

from collections.abc import Callable

import numpy as np

_RESAMPLES = 1000


def bootstrap(score: Callable[[np.ndarray], float], examples: int) -> tuple[float, float] | None:
    """Return the 95 % interval of `score`, called with resampled example indices; None for fewer than two examples."""
    if examples < 2:
        return None
    generator = np.random.default_rng(0)
    scores = [score(generator.integers(0, examples, examples)) for _ in range(_RESAMPLES)]
    low, high = (float(bound) for bound in np.quantile(scores, [0.025, 0.975]))
    if low == high and low in (0, 1):  # all correct or all wrong: use the rule of three (Hanley 1983)
        low, high = max(0.0, low - 3 / examples), min(1.0, high + 3 / examples)
    return low, high
