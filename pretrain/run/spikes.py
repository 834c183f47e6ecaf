"""Detects harmful steps: loss spikes, and steps that fp16's loss scaler keeps skipping."""

import math
import statistics
from collections.abc import Sequence

from pretrain.config import SpikeConfig

LOSS_WINDOW = 64  # steps whose losses a new loss is compared with
_MIN_LOSSES = 32  # needed to detect a spike
_MIN_SHARE = 0.2  # of the median, by which a spike exceeds it
_MAX_SKIPS_AT_ONE_SCALE = 3  # fp16's loss scaler lowers the scale before it skips more (its hysteresis is 2)
_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def is_spike(before: Sequence[float], loss: float, settings: SpikeConfig) -> bool:
    """Return whether `loss` is a spike above the losses of the steps before it; False if these are too few.

    The bound uses their median and median absolute deviation, which a single outlier hardly changes.
    """
    if not settings.spike_sigmas or len(before) < _MIN_LOSSES:
        return False
    if not math.isfinite(loss):
        return True
    median = statistics.median(before)
    sigma = _SIGMA * statistics.median(abs(earlier - median) for earlier in before)
    return loss > median + max(settings.spike_sigmas * sigma, _MIN_SHARE * abs(median))


class LossScaleSearch:
    """Distinguishes steps that fp16's loss scaler skips to find a lower scale from steps that remain bad."""

    def __init__(self) -> None:
        self._skips, self._scale = 0, 0.0  # steps in a row that were skipped at this loss scale

    def skipped(self, scale: float) -> bool:
        """Record a step skipped at this scale; returns whether the scale will not be lowered further."""
        self._skips = self._skips + 1 if scale == self._scale else 1
        self._scale = scale
        return scale <= 1 or self._skips > _MAX_SKIPS_AT_ONE_SCALE

    def applied(self) -> None:
        """Record that a step was applied."""
        self._skips = 0
