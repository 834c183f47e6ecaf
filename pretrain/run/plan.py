"""The schedule of a training: its steps, learning rates and periodic actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.config import RunConfig


@dataclass(frozen=True)
class TrainingPlan:
    """The schedule of a training."""

    config: RunConfig  # only its sections tracking, checkpoint, guard and engine are used
    total_steps: int
    learning_rate: Callable[[int], float]  # learning rate of a 0-based step
    evaluate_every_steps: int
    checkpoint_every_steps: int
    keep_best: bool = False  # save after each new best evaluation, for a task that restores the best weights at the end
    patience: int = 0  # consecutive evaluations without a better score before training stops; 0 disables early stopping
    warmup_step: bool = True  # test the largest batch before the first step, so that too large a batch fails early
    weight_decay: Callable[[int], float | None] = lambda _: None  # weight decay of a 0-based step; None: unchanged
    averaged_steps: Callable[[int], int] = lambda _: 0  # number of steps in the average after a 0-based step
    evaluate_first: bool = False  # evaluate before the first step, for a run that does not start from random weights
    peak_flops: float = math.nan  # matmul peak of all workers together, FLOP/s, measured when training starts

    def due(self, steps: int) -> DueActions:
        """Return the actions that are due after `steps` steps."""
        last = steps == self.total_steps
        return DueActions(
            last=last,
            log=last or steps % self.config.tracking.log_every_steps == 0,
            evaluate=last or steps % self.evaluate_every_steps == 0,
            save=last or steps % self.checkpoint_every_steps == 0 or steps in self.config.checkpoint.keep_at,
        )


class DueActions(NamedTuple):
    """Actions that are due after a step."""

    last: bool  # whether it is the last step, after which all actions are due
    log: bool
    evaluate: bool
    save: bool
