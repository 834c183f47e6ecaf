"""The interfaces that the training loop uses: the training task, its steps, and the recorder of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pretrain.training.engine import Engine


class Step(Protocol):
    """One rank's part of an optimizer step, such as a `pretrain.batches.batch.StepBatch`."""

    @property
    def micro_batches(self) -> tuple[Any, ...]: ...
    @property
    def sequences(self) -> int: ...  # number of sequences of all ranks
    @property
    def tokens(self) -> int: ...  # number of tokens of all ranks
    @property
    def epoch(self) -> int: ...


S = TypeVar("S", bound=Step)


class TrainingTask(Protocol[S]):
    """A task to train.

    Losses are normalized globally: a total is a sum over micro-batches and ranks, and `metrics` divides it by a count
    over micro-batches and ranks.
    """

    def batches(self, start_step: int, skipped: dict[str, Any]) -> Iterator[S]:
        """Yield the steps from the 0-based `start_step` to the end; `skipped` is a result of `skip`, or {}."""
        ...

    def skip(self, step: int, failed: int, skipped: dict[str, Any]) -> dict[str, Any]:
        """Return the `skipped` (JSON) for a restart of `batches` at `step` with the data that follows step `failed`.

        The argument `skipped` is the value that was last passed to `batches`.
        """
        ...

    def largest_step(self) -> S:
        """Return a step of a single micro-batch of the largest possible size."""
        ...

    def loss_weights(self, step: S) -> tuple[float, ...]:
        """Return the factor of each loss of a micro-batch: the loss's weight divided by its global count."""
        ...

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """Return this micro-batch's part of the global mean loss; `weights` is a result of `loss_weights`."""
        ...

    def totals(self, output: Any) -> Tensor:
        """Return the sums over one micro-batch that `metrics` needs, fp32 [n]."""
        ...

    def counts(self, step: S) -> Tensor:
        """Return the global counts of one step, fp64 [m], by which totals are divided."""
        ...

    def flops(self, micro_batch: Any) -> float:
        """Return the useful floating-point operations of one micro-batch, forward and backward."""
        ...

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        """Return the metrics by name, including `loss`: totals divided by counts."""
        ...

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Return metrics of the held-out samples by name, including `loss`; {} if there are no samples."""
        ...

    def to_minimize(self, means: dict[str, float]) -> float:
        """Return the value of an evaluation that ranks checkpoints; lower is better."""
        ...

    def validation_set(self) -> str:
        """Return a name for the held-out samples of `evaluate`. Results on different sets are not comparable."""
        ...

    def stalled_seconds(self) -> float:
        """Return the seconds spent so far on waiting for batches."""
        ...

    def close(self) -> None:
        """Close files and stop threads of the task."""
        ...


class Recorder(Protocol):
    """Records metrics, as `pretrain.tracking.tracker.Tracker` does."""

    def log(self, record: dict[str, Any]) -> None:
        """Append one record."""

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`."""
