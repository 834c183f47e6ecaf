"""A LAMB that stays correct when ZeRO shards it: it scales each tensor's step by |weight| / |update|."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.training.optim.tensorwise import Segment, TensorwiseOptimizer, square_sum


class Lamb(TensorwiseOptimizer):
    """LAMB, You et al. 2020 (arXiv:1904.00962), Algorithm 2 with NVIDIA's choices.

    From apex's FusedLAMB, which NVIDIA's BERT recipe uses: bias-corrected moments, decay inside the update,
    phi the identity, trust ratio 1 where either norm is 0. Gradient clipping is the engine's work. A stacked
    `qkv_weight` counts as the three tensors it holds.

    Groups carry `names` and `layer_adaptation` as `parameter_groups` makes them. Parameters must be
    contiguous fp32. `step` uses up the gradient: it holds the update afterwards, which saves a buffer.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "layer_adaptation": True,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the gradients present. Returns what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        adapted: list[tuple[float, Tensor, Tensor, int]] = []  # rate, weights, update, tensor id
        count = self._tensor_count
        for group in self.param_groups:
            if not group["layer_adaptation"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        update = self._update(group, parameter, (Segment(0, parameter.numel(), -1),))
                        parameter.view(-1).add_(update, alpha=-group["lr"])
                continue
            for parameter, pieces in self._pieces(group, count):
                count = max([count, *(piece.tensor_id + 1 for piece in pieces)])
                if parameter.grad is None:
                    continue
                weights, update = parameter.view(-1), self._update(group, parameter, pieces)
                for start, stop, tensor_id, _ in pieces:
                    adapted.append((group["lr"], weights[start:stop], update[start:stop], tensor_id))
        if any(group["layer_adaptation"] for group in self.param_groups):
            self._apply_adapted(adapted, count)
        return loss

    def _apply_adapted(self, adapted: list[tuple[float, Tensor, Tensor, int]], count: int) -> None:
        """Step each piece at its tensor's trust ratio; every worker calls this, even without a piece."""
        squares = self._zeros(count)
        for _, weights, update, tensor_id in adapted:
            squares[0, tensor_id] += square_sum(weights)
            squares[1, tensor_id] += square_sum(update)
        self._reduce(squares.view(-1))
        weight_norms, update_norms = squares.sqrt()
        measurable = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(measurable, weight_norms / update_norms, 1.0).to(torch.float32)
        for rate, weights, update, tensor_id in adapted:
            weights.addcmul_(update, ratios[tensor_id], value=-rate)

    def _update(self, group: dict[str, Any], parameter: Tensor, pieces: Sequence[Segment]) -> Tensor:
        """Advance the moments of `parameter` and turn its gradient into the update, flat [numel]."""
        state = self._moments(parameter)
        # The count stays on its device: to read it would wait for all work queued there.
        step, (beta1, beta2) = state["step"].double(), group["betas"]
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        gradient = parameter.grad
        assert gradient is not None
        flat = (
            gradient.view(-1),
            parameter.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
        )
        for start, stop, *_ in pieces:  # piece by piece: the temporaries stay small
            grad, weights, mean, square = (whole[start:stop] for whole in flat)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (square / correction2).sqrt_().add_(group["eps"])
            torch.div(mean, denominator.mul_(correction1), out=grad)
            if group["weight_decay"]:
                grad.add_(weights, alpha=group["weight_decay"])
        return flat[0]
