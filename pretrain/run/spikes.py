"""Detects harmful steps: loss spikes, and steps that fp16's loss scaler keeps skipping."""

import math
import statistics
from collections.abc import Sequence

from pretrain.config import SpikeConfig

LOSS_WINDOW = 64  # number of earlier losses with which a new loss is compared
_MIN_LOSSES = 32  # minimum number of earlier losses with which spikes are detected
_MIN_EXCESS = 0.2  # by which a spike exceeds the median, as a fraction of the median
_MAX_SKIPS_AT_ONE_SCALE = 3  # fp16's loss scaler lowers the scale before it skips more (its hysteresis is 2)
_STD_PER_MAD = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def is_spike(earlier: Sequence[float], loss: float, settings: SpikeConfig) -> bool:
    """Return whether `loss` is a spike above the `earlier` losses; False if these are too few.

    The bound uses their median and median absolute deviation, which a single outlier hardly changes.
    """
    if not settings.spike_sigmas or len(earlier) < _MIN_LOSSES:
        return False
    if not math.isfinite(loss):
        return True
    median = statistics.median(earlier)
    sigma = _STD_PER_MAD * statistics.median(abs(value - median) for value in earlier)
    return loss > median + max(settings.spike_sigmas * sigma, _MIN_EXCESS * abs(median))


class LossScaleSearch:
    """Distinguishes steps that fp16's loss scaler skips to find a lower scale from steps that remain bad."""

    def __init__(self) -> None:
        self._skips, self._scale = 0, 0.0  # steps in a row that were skipped at this loss scale

    def record_skip(self, scale: float) -> bool:
        """Record a step skipped at this scale; returns whether the scale will not be lowered further."""
        self._skips = self._skips + 1 if scale == self._scale else 1
        self._scale = scale
        return scale <= 1 or self._skips > _MAX_SKIPS_AT_ONE_SCALE

    def record_applied(self) -> None:
        """Record that a step was applied."""
        self._skips = 0
