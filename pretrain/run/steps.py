"""A step of the training loop, as launched on the device; its outcome, and the reason for a rollback."""

from dataclasses import dataclass
from typing import Generic, NamedTuple

from pretrain.common.transfers import PendingCopy
from pretrain.run.task import S


@dataclass(frozen=True)
class TrainingFailure:
    """The reason for a rollback to a checkpoint: the last steps were harmful."""

    reason: str  # one clause, for messages
    remedy: str = ""  # continues the sentence "Lower the learning rate"


class StepOutcome(NamedTuple):
    """The outcome of one step, the same on all ranks."""

    stop: bool  # whether training must stop after this step
    failure: TrainingFailure | None
    save: bool = False  # whether `checkpoint.every_minutes` have passed


@dataclass(frozen=True)
class LaunchedStep(Generic[S]):
    """A step launched on the device, whose numbers may not be available yet.

    Attributes:
        index: 0-based index of the step.
        step: its batches.
        rate: its learning rate.
        validation_set: name of its phase's validation set.
        numbers: fp64 [n + 6]. Sums over all ranks: the n totals; stop requests, due saves, failed saves, FLOPs, seconds
            of waiting for data. Then the gradient norm.
    """

    index: int
    step: S
    rate: float
    validation_set: str
    numbers: PendingCopy
