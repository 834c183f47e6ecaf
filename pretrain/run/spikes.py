"""Loss spikes: detected by comparison with the losses before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pretrain.config import SpikeConfig

REMEMBERED = 64  # steps whose losses define the usual loss
_ENOUGH = 32  # fewest losses with which a spike can be detected
_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def is_spike(before: Sequence[float], loss: float, settings: SpikeConfig) -> bool:
    """Whether `loss` is a spike above the losses of the steps before it; never while these are too few.

    The bound uses their median and median absolute deviation, which a single outlier hardly changes.
    """
    if not settings.spike_sigmas or len(before) < _ENOUGH:
        return False
    if not math.isfinite(loss):
        return True
    usual = statistics.median(before)
    sigma = _SIGMA * statistics.median(abs(one - usual) for one in before)
    return loss > usual + max(settings.spike_sigmas * sigma, settings.spike_share * abs(usual))
