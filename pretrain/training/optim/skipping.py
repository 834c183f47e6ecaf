"""Optimizers that can skip a step on the device, without the host knowing whether the gradients are finite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.training.optim.lists import foreach


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer with `found_inf` as in torch's fused AdamW.

    Attributes:
        found_inf: fp32 scalar: 1 skips the next step on the device, and weights and state stay the same, bit for bit;
            0 takes the step. None takes it, too, with fewer kernels.
    """

    found_inf: Tensor | None = None
    _kept: Tensor | None = None  # fp64 scalar of a step: 0 if `found_inf` skips it, else 1

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._remainders: dict[float, Tensor] = {}  # cache of `_remaining`'s results in a step

    def _prepare_skip(self) -> None:
        """Prepare the step for `found_inf`: gradients of a skipped step become 0."""
        self._kept = None if self.found_inf is None else 1 - self.found_inf.double()
        self._remainders.clear()
        if self._kept is None:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        # As integers, because NaN times 0 is NaN.
        foreach._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], self._kept.int())

    def _share(self, share: float) -> Any:
        """Return `share`, or 0 on the device in a skipped step; fp32, as kernels round numbers of the host."""
        return share if self._kept is None else (share * self._kept).float()

    def _remaining(self, share: float) -> Any:
        """Return 1 - `share`, or 1 on the device in a skipped step."""
        if self._kept is None:
            return 1 - share
        if share not in self._remainders:
            self._remainders[share] = (1 - share * self._kept).float()
        return self._remainders[share]

    def _advance_counts(self, counts: Sequence[Tensor]) -> None:
        """Increment the step counts of the parameters, scalars."""
        # Adding one tensor to a list would read its value on the host.
        foreach._foreach_add_(counts, 1 if self._kept is None else [self._share(1.0)] * len(counts))

    def _blend(self, means: Sequence[Tensor], values: Sequence[Tensor], share: float) -> None:
        """Update running means with `share` of `values`, which are 0 in a skipped step."""
        if self._kept is None:
            foreach._foreach_lerp_(means, values, share)
        else:  # the lerp of lists does not take a weight on the device
            foreach._foreach_mul_(means, self._remaining(share))
            foreach._foreach_add_(means, values, alpha=share)
