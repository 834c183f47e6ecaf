"""Bootstrap confidence intervals (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3)."""

from collections.abc import Callable

import numpy as np

_NUM_RESAMPLES = 1000


def bootstrap(score: Callable[[np.ndarray], float], num_examples: int) -> tuple[float, float] | None:
    """Return the 95 % interval of `score`, called with resampled example indices; None for fewer than two."""
    if num_examples < 2:
        return None
    generator = np.random.default_rng(0)
    scores = [score(generator.integers(0, num_examples, num_examples)) for _ in range(_NUM_RESAMPLES)]
    low, high = (float(bound) for bound in np.quantile(scores, [0.025, 0.975]))
    if low == high and low in (0, 1):  # all correct or all wrong: use the rule of three (Hanley 1983)
        low, high = max(0.0, low - 3 / num_examples), min(1.0, high + 3 / num_examples)
    return low, high
