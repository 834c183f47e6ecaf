"""The interfaces that the training loop uses: the task that is trained, its steps, and the recorder of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pretrain.training.engine import Engine


class Step(Protocol):
    """One rank's share of one optimizer step; `pretrain.batches.batch.StepBatch` is one."""

    @property
    def micro_batches(self) -> tuple[Any, ...]: ...
    @property
    def sequences(self) -> int: ...  # global
    @property
    def tokens(self) -> int: ...  # global
    @property
    def epoch(self) -> int: ...


S = TypeVar("S", bound=Step)


class TrainingTask(Protocol[S]):
    """The task that is trained.

    Losses are normalized globally: a total is a sum over micro-batches and ranks, and `metrics` divides it by a count
    over micro-batches and ranks.
    """

    def batches(self, start_step: int, skipped: dict[str, Any]) -> Iterator[S]:
        """Yield the steps from the 0-based `start_step` to the end of training; `skipped` is `skip`'s result, or {}."""
        ...

    def skip(self, step: int, failed: int, skipped: dict[str, Any]) -> dict[str, Any]:
        """Return, as JSON, what `batches` needs to restart at `step` with the data that follows the `failed` step.

        `skipped` is the value with which `batches` was last called.
        """
        ...

    def largest(self) -> S:
        """Return a step of one micro-batch, of the largest possible size."""
        ...

    def loss_weights(self, step: S) -> tuple[float, ...]:
        """Return the factor of each loss of a micro-batch: its weight over its global count."""
        ...

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """Return this micro-batch's part of the global mean loss; `weights` as returned by `loss_weights`."""
        ...

    def totals(self, output: Any) -> Tensor:
        """fp32 [n] sums of one micro-batch."""
        ...

    def counts(self, step: S) -> Tensor:
        """fp64 [m] global counts of one step, which totals are divided by."""
        ...

    def flops(self, micro_batch: Any) -> float:
        """Useful floating-point operations of one micro-batch, forward and backward."""
        ...

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        """Named means, `loss` among them."""
        ...

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Named means over the held-out samples, `loss` among them; {} when there are none."""
        ...

    def to_minimize(self, means: dict[str, float]) -> float:
        """The number of an evaluation that ranks checkpoints; lower is better."""
        ...

    def validation_set(self) -> str:
        """Name the held-out samples that `evaluate` uses now. Results on different sets are not comparable."""
        ...

    def stalled_seconds(self) -> float:
        """Seconds spent so far on waiting for batches."""
        ...

    def close(self) -> None:
        """Release what the task holds open."""
        ...


class Recorder(Protocol):
    """Records metrics; `pretrain.tracking.tracker.Tracker` is one."""

    def log(self, record: dict[str, Any]) -> None:
        """Append one record."""

    def rewind(self, step: int) -> None:
        """Drop the records past `step`."""
