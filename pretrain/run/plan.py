"""The schedule of a training: its steps and learning rates, and what is due after which step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.config import RunConfig


@dataclass(frozen=True)
class TrainingPlan:
    """The schedule of a training: steps, learning rate, evaluations and checkpoints."""

    config: RunConfig  # tracking, checkpoint, guard and engine
    total_steps: int
    learning_rate: Callable[[int], float]  # of the 0-based step
    evaluate_every_steps: int
    checkpoint_every_steps: int
    keep_best: bool = False  # save when an evaluation is the best so far, for a task that returns to it at the end
    patience: int = (
        0  # consecutive evaluations without a better score after which training ends; 0 disables early stopping
    )
    warmup_step: bool = True  # step the largest batch before the first step, so that one that is too large fails early
    weight_decay: Callable[[int], float | None] = lambda _: None  # of the 0-based step; None keeps the optimizer's
    averages: Callable[[int], int] = lambda _: 0  # of how many steps the mean of the weights is after a 0-based step
    evaluate_first: bool = False  # before the first step, for a run that does not begin from random weights
    peak_flops: float = math.nan  # matmul peak of all workers together, FLOP/s, measured when training starts

    def due(self, steps: int) -> DueActions:
        """What is due after so many steps."""
        last = steps == self.total_steps
        return DueActions(
            last=last,
            log=last or steps % self.config.tracking.log_every_steps == 0,
            evaluate=last or steps % self.evaluate_every_steps == 0,
            save=last or steps % self.checkpoint_every_steps == 0 or steps in self.config.checkpoint.keep_at,
        )


class DueActions(NamedTuple):
    """What is due after a step."""

    last: bool
    log: bool
    evaluate: bool
    save: bool
