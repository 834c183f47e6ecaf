"""One step of the training loop: launched, and its outcome."""

from dataclasses import dataclass
from typing import Generic, NamedTuple

from pretrain.common.transfers import PendingCopy
from pretrain.run.task import S


@dataclass(frozen=True)
class TrainingFailure:
    """The reason for a rollback to a checkpoint: the last steps were harmful."""

    reason: str  # one clause, for messages
    remedy: str = ""  # continues "Lower the learning rate"


class StepOutcome(NamedTuple):
    """The outcome of one step, the same on all ranks."""

    stop: bool  # training is to stop after this step
    failure: TrainingFailure | None
    save: bool = False  # `checkpoint.every_minutes` have passed


@dataclass(frozen=True)
class LaunchedStep(Generic[S]):
    """A step launched on the device, whose numbers may not be available yet.

    Attributes:
        number: 0-based number of the step.
        step: its batches.
        rate: its learning rate.
        part: the validation set of its phase.
        numbers: fp64 [n + 6]: the totals; stops, due saves, failed saves, FLOPs, seconds waited for data, of all ranks;
            the gradients' norm.
    """

    number: int
    step: S
    rate: float
    part: str
    numbers: PendingCopy
