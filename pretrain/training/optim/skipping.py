"""Optimizers that skip a step on the device if `found_inf` is 1, so that the host need not check the gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.training.optim.lists import foreach


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer with the attribute `found_inf`, like torch's fused AdamW.

    Attributes:
        found_inf: fp32 scalar. 1 skips the next step on the device: weights and state stay bit-identical. 0 and None do
            not skip it; None needs fewer kernels.
    """

    found_inf: Tensor | None = None
    _applied: Tensor | None = None  # fp64 scalar: 0 if `found_inf` skips the current step, else 1

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._complements: dict[float, Tensor] = {}  # cache of the results of `_one_minus` in a step

    def _prepare_skip(self) -> None:
        """Apply `found_inf` to the gradients, which become 0 in a skipped step."""
        self._applied = None if self.found_inf is None else 1 - self.found_inf.double()
        self._complements.clear()
        if self._applied is None:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Multiply them as integers, because NaN times 0 is NaN.
        foreach._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], self._applied.int())

    def _zero_if_skipped(self, value: float) -> Any:
        """Return `value`, or 0 in a skipped step; an fp32 tensor if the step may be skipped."""
        return value if self._applied is None else (value * self._applied).float()

    def _one_minus(self, value: float) -> Any:
        """Return 1 - `value`, or 1 in a skipped step; an fp32 tensor if the step may be skipped."""
        if self._applied is None:
            return 1 - value
        if value not in self._complements:
            self._complements[value] = (1 - value * self._applied).float()
        return self._complements[value]

    def _advance_counts(self, counts: Sequence[Tensor]) -> None:
        """Increment the step counts of parameters, scalar tensors, unless the step is skipped."""
        # Adding one tensor, instead of a list, would read its value on the host.
        foreach._foreach_add_(counts, 1 if self._applied is None else [self._zero_if_skipped(1.0)] * len(counts))

    def _lerp_means(self, means: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
        """Set running means to (1 - weight) * mean + weight * value; a skipped step, whose values are 0, keeps them."""
        if self._applied is None:
            foreach._foreach_lerp_(means, values, weight)
        else:  # `_foreach_lerp_` does not accept a weight on the device
            foreach._foreach_mul_(means, self._one_minus(weight))
            foreach._foreach_add_(means, values, alpha=weight)
