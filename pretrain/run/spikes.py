"""Detects harmful steps: loss spikes, and overflows that fp16's loss scaler cannot prevent by lowering the scale."""

import math
import statistics
from collections.abc import Sequence

from pretrain.config import SpikeConfig

LOSS_WINDOW = 64  # number of previous losses that a new loss is compared with
_MIN_LOSSES = 32  # number of previous losses needed to detect spikes
_MIN_EXCESS = 0.2  # minimum excess of a spike over the median, as a fraction of the median
_MAX_SKIPS_AT_ONE_SCALE = 3  # by then, a working fp16 loss scaler has lowered the scale (its hysteresis is 2)
_STD_PER_MAD = 1.4826  # standard deviation / median absolute deviation of a normal distribution


def is_spike(previous_losses: Sequence[float], loss: float, settings: SpikeConfig) -> bool:
    """Return whether `loss` is a spike above the previous losses; False if there are too few of them.

    The threshold depends on their median and median absolute deviation, which a single outlier hardly changes.
    """
    if not settings.spike_sigmas or len(previous_losses) < _MIN_LOSSES:
        return False
    if not math.isfinite(loss):
        return True
    median = statistics.median(previous_losses)
    sigma = _STD_PER_MAD * statistics.median(abs(value - median) for value in previous_losses)
    return loss > median + max(settings.spike_sigmas * sigma, _MIN_EXCESS * abs(median))


class SkipCounter:
    """Counts steps that fp16's loss scaler skipped in a row, to detect overflows that no lower scale prevents."""

    def __init__(self) -> None:
        self._skips, self._scale = 0, 0.0  # number of steps skipped in a row; their loss scale

    def record_skip(self, scale: float) -> bool:
        """Record a step that was skipped at this scale; return whether the scaler has stopped lowering the scale."""
        self._skips = self._skips + 1 if scale == self._scale else 1
        self._scale = scale
        return scale <= 1 or self._skips > _MAX_SKIPS_AT_ONE_SCALE

    def record_applied(self) -> None:
        """Record that a step was applied."""
        self._skips = 0
