"""What a pretraining minimizes, as the training task uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pretrain.batches.batch import MicroBatch, StepBatch


class Objective(Protocol):
    """A model that computes sums of losses, and the means that they become (invariant 3).

    Attributes:
        model: whose forward pass takes a `MicroBatch` and returns what the methods below call `output`.
        identity: what each checkpoint keeps of the objective; a resumed run must have the same.
    """

    identity: dict[str, Any]

    @property
    def model(self) -> nn.Module: ...

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is not a parameter of the model to where the engine computes, in its precision."""

    def first_weights(self) -> Mapping[str, Tensor]:
        """The weights of a new run by name, fp32; {} leaves the model as it was initialized."""
        ...

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        """What the losses of each micro-batch of a step are multiplied by: one over their global counts, and shares."""
        ...

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        """This micro-batch's part of the global mean loss, to be differentiated; `weights` as `loss_weights`."""
        ...

    def totals(self, output: Any) -> Tensor:
        """fp32 [n] sums of one micro-batch."""
        ...

    def counts(self, step: StepBatch) -> Tensor:
        """fp64 [m] global counts of one step, which totals are divided by."""
        ...

    def flops(self, micro_batch: MicroBatch) -> float:
        """Useful floating-point operations of one micro-batch, forward and backward."""
        ...

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        """Named means, `loss` among them."""
        ...
