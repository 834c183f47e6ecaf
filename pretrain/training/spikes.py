"""When a loss is a spike, by the losses before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pretrain.config import SpikeConfig

REMEMBERED = 64  # steps whose losses tell what is usual
_ENOUGH = 32
# A normal distribution's standard deviation is so many times its median absolute deviation.
_SIGMA = 1.4826


def is_spike(before: Sequence[float], loss: float, settings: SpikeConfig) -> bool:
    """Whether `loss` leaps out of the losses of the steps before it; never while these are too few.

    Median and median absolute deviation, so that one odd loss among them moves the bound little.
    """
    if not settings.spike_sigmas or len(before) < _ENOUGH:
        return False
    if not math.isfinite(loss):
        return True
    usual = statistics.median(before)
    sigma = _SIGMA * statistics.median(abs(one - usual) for one in before)
    return loss > usual + max(settings.spike_sigmas * sigma, settings.spike_share * abs(usual))
