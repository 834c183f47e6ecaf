"""AdamW that lowers a tensor's learning rate while its gradients exceed what their second moments predict."""

from typing import Any

import torch
from torch import Tensor

from pretrain.training.optim.lists import batches, foreach, uses_foreach
from pretrain.training.optim.tensorwise import TensorPiece, TensorwiseOptimizer, write_adam_updates


class StableAdamW(TensorwiseOptimizer):
    """StableAdamW, Wortsman et al. 2023 (arXiv:2304.13013), Algorithm 2: AdamW with AdaFactor's update clipping.

    The learning rate of each tensor, also for weight decay, is divided by max(1, RMS); RMS is the root mean square of
    gradient / sqrt(second moment). ModernBERT's recipe uses it instead of gradient clipping, as implemented in
    warner-benjamin/optimi (stableadamw.py). This class is equivalent: optimi's debiased betas have the effect of the
    bias-corrected moments here. A stacked `qkv_weight` is treated as three tensors.

    Each param group has an entry `names`, one name per parameter. `step` overwrites the gradient.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the parameters with gradients; do nothing before `set_segments`, when DeepSpeed allocates moments."""
        if not self._segments:
            return
        self._prepare_skip()
        # (group, its pieces, each piece's sum of squared ratios)
        stepped: list[tuple[dict[str, Any], list[TensorPiece], Tensor]] = []
        for group in self.param_groups:
            pieces = self._start_step(group, self._parameters_with_segments(group))
            if pieces:
                slices = batches([piece.weights for piece in pieces])
                squared_ratios = [self._compute_updates(group, pieces[batch]) for batch in slices]
                stepped.append((group, pieces, torch.cat(squared_ratios)))
        sums = self._zero_sums()
        for _, pieces, squared_ratios in stepped:
            ids, sizes = self._ids_and_sizes(pieces)
            sums[0].index_add_(0, ids, squared_ratios)
            sums[1].index_add_(0, ids, sizes)
        self._reduce(sums.view(-1))
        scales = (sums[0] / sums[1].clamp(min=1)).sqrt().clamp(min=1).reciprocal() * self._zero_if_skipped(1.0)
        for group, pieces, _ in stepped:
            factors = scales[self._ids_and_sizes(pieces)[0]].to(torch.float32)
            decay_factors = 1 - factors * (group["lr"] * group["weight_decay"])
            weights, updates = [piece.weights for piece in pieces], [piece.gradient for piece in pieces]
            # This takes two kernels per piece: torch has no operation that takes a list of factors on the device.
            foreach._foreach_mul_(weights, decay_factors.unbind())
            foreach._foreach_addcmul_(weights, updates, factors.unbind(), value=-group["lr"])

    def _compute_updates(self, group: dict[str, Any], pieces: list[TensorPiece]) -> Tensor:
        """Update moments, replace gradients by Adam's updates, and return each piece's fp64 sum of squared ratios."""
        corrected = self._update_moments(group, pieces)
        ratios = [piece.gradient for piece in pieces]
        foreach._foreach_mul_(ratios, ratios)
        foreach._foreach_div_(ratios, foreach._foreach_clamp_min(corrected, group["eps"] ** 2))
        if not uses_foreach(ratios[0]):
            sums = [ratio.sum(dtype=torch.float64) for ratio in ratios]
        else:  # ratios are not negative: their L1 norm is their sum
            sums = foreach._foreach_norm(ratios, 1, dtype=torch.float64)
        squared_ratios = torch.stack(list(sums))
        write_adam_updates(group, pieces, corrected)
        return squared_ratios
