"""Bootstrap intervals of scores (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3)."""

from collections.abc import Callable

import numpy as np

_RESAMPLES = 1000


def bootstrap(score: Callable[[np.ndarray], float], examples: int) -> tuple[float, float] | None:
    """The 95 % interval of the score of resampled examples (their numbers, int64 [N]); None for a single example."""
    if examples < 2:
        return None
    draw = np.random.default_rng(0)
    scores = [score(draw.integers(0, examples, examples)) for _ in range(_RESAMPLES)]
    low, high = np.quantile(scores, [0.025, 0.975])
    return float(low), float(high)
