"""Types of the training loop: a step launched on the device, its outcome, and a failure that needs a rollback."""

from dataclasses import dataclass
from typing import Generic, NamedTuple

from pretrain.common.transfers import PendingCopy
from pretrain.run.task import S


@dataclass(frozen=True)
class TrainingFailure:
    """A failure of the last steps, after which the run rolls back to a checkpoint."""

    reason: str  # one clause, for messages
    remedy: str = ""  # continues the sentence "Lower the learning rate"


class StepOutcome(NamedTuple):
    """The outcome of one step, the same on all ranks."""

    stop: bool  # whether training must stop after this step
    failure: TrainingFailure | None
    save: bool = False  # whether `checkpoint.every_minutes` have passed


@dataclass(frozen=True)
class LaunchedStep(Generic[S]):
    """A step launched on the device, whose results may not be available yet.

    Attributes:
        index: 0-based index of the step.
        step: batches of the step.
        learning_rate: learning rate of the step.
        validation_set: name of the validation set of the step's phase.
        results: fp64 [n + 6]. First the sums over all ranks of the task's n totals, stop requests, due saves, failed
            saves, FLOPs, and seconds of waiting for data; then the gradient norm.
    """

    index: int
    step: S
    learning_rate: float
    validation_set: str
    results: PendingCopy
