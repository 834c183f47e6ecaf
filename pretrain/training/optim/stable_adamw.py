"""AdamW whose rate falls, tensor by tensor, while gradients exceed what their second moments expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.training.optim.tensorwise import Segment, TensorwiseOptimizer


class _Piece(NamedTuple):
    """A piece of a tensor whose update is computed."""

    group: dict[str, Any]
    weights: Tensor
    update: Tensor
    tensor_id: int


class StableAdamW(TensorwiseOptimizer):
    """StableAdamW, Wortsman et al. 2023 (arXiv:2304.13013), Algorithm 2: AdamW with AdaFactor's update clipping.

    The rate of each tensor, weight decay included, is divided by max(1, RMS), the root mean square of
    gradient / sqrt(second moment). ModernBERT's recipe uses it in place of gradient clipping, in the implementation of
    warner-benjamin/optimi (stableadamw.py), which this equals. Its debiased betas are the bias-corrected moments here.
    A stacked `qkv_weight` counts as the three tensors it holds.

    Groups carry `names`. `step` uses up the gradient.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the gradients present. Returns what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: list[tuple[_Piece, Tensor]] = []  # with the sum of the squared ratios
        count = self._tensor_count
        for group in self.param_groups:
            for parameter, pieces in self._pieces(group, count):
                count = max([count, *(piece.tensor_id + 1 for piece in pieces)])
                if parameter.grad is not None:
                    found += self._updates(group, parameter, list(pieces))
        sums = self._zeros(count)
        for piece, square_ratios in found:
            sums[0, piece.tensor_id] += square_ratios
            sums[1, piece.tensor_id] += piece.update.numel()
        self._reduce(sums.view(-1))
        shares = (sums[0] / sums[1].clamp(min=1)).sqrt().clamp(min=1).reciprocal()
        for (group, weights, update, tensor_id), _ in found:
            share = shares[tensor_id].to(torch.float32)
            weights.mul_(1 - share * (group["lr"] * group["weight_decay"]))
            weights.addcmul_(update, share, value=-group["lr"])
        return loss

    def _updates(self, group: dict[str, Any], parameter: Tensor, pieces: list[Segment]) -> list[tuple[_Piece, Tensor]]:
        """Advance the moments and turn the gradient into Adam's update; the sum of the squared ratios of each piece."""
        state = self._moments(parameter)
        step, (beta1, beta2) = state["step"].double(), group["betas"]
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        gradient = parameter.grad
        assert gradient is not None
        flat = (parameter.view(-1), gradient.view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        found = []
        for start, stop, tensor_id, _ in pieces:
            weights, grad, mean, square = (whole[start:stop] for whole in flat)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            corrected = square / correction2
            ratios = grad.square_().div_(corrected.clamp(min=group["eps"] ** 2)).sum(dtype=torch.float64)
            torch.div(mean, corrected.sqrt_().add_(group["eps"]).mul_(correction1), out=grad)
            found.append((_Piece(group, weights, grad, tensor_id), ratios))
        return found
