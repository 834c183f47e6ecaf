"""The learning rate of each step: warm-up, a plateau, decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain import config

_DECAY_POWER = 0.5  # exponent of the polynomial decay, as in run_pretraining.py of NVIDIA's DeepLearningExamples


def learning_rate(phases: Sequence[config.PhaseConfig], step: int) -> float:
    """Return the learning rate of the 0-based optimizer step `step`; each phase restarts the schedule.

    The rate warms up linearly from 1 / warmup_steps of the peak to the peak in the last warm-up step. Then it decays
    over the phase's remaining steps, or over its last `decay_steps` after a plateau (warm-up, stable, decay: Hägele et
    al. 2024, arXiv:2405.18392). The first step of the decay still has the peak rate.

    This equals transformers' get_{constant,linear,polynomial_decay}_schedule_with_warmup or get_wsd_schedule with one
    more step and without its first, whose rate of 0 would waste a global batch.
    """
    for phase in phases:
        if step < phase.steps:
            return _phase_rate(phase, step)
        step -= phase.steps
    raise IndexError("past the last phase")


def _phase_rate(phase: config.PhaseConfig, step: int) -> float:
    decay_start = max(0, phase.warmup_steps - 1)  # the last warm-up step, unless there is a plateau
    if step < decay_start:
        return phase.peak_learning_rate * (step + 1) / phase.warmup_steps
    if phase.decay_steps:
        decay_start = phase.steps - phase.decay_steps
    if phase.decay == "constant" or step < decay_start:
        return phase.peak_learning_rate
    remaining = (phase.steps - step) / (phase.steps - decay_start)
    if phase.decay == "1-sqrt":
        factor = 1.0 - math.sqrt(1.0 - remaining)
    else:
        factor = remaining ** (_DECAY_POWER if phase.decay == "polynomial" else 1.0)
    return phase.final_learning_rate + (phase.peak_learning_rate - phase.final_learning_rate) * factor
