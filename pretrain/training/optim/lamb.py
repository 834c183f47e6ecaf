"""LAMB for parameters sharded by ZeRO: each whole tensor's step is scaled by |weight| / |update|."""

from typing import Any

import torch

from pretrain.training.optim.lists import batches, foreach
from pretrain.training.optim.tensorwise import (
    Segment,
    TensorPiece,
    TensorwiseOptimizer,
    sums_of_squares,
    write_adam_updates,
)


class Lamb(TensorwiseOptimizer):
    """LAMB, You et al. 2020 (arXiv:1904.00962), Algorithm 2 with NVIDIA's choices.

    As in apex's FusedLAMB, which NVIDIA's BERT recipe uses, moments are bias-corrected, weight decay is part of the
    update, phi is the identity, and the trust ratio is 1 if either norm is 0. The engine clips gradients. A stacked
    `qkv_weight` is treated as three tensors.

    Each param group has the entries `names` and `layer_adaptation` (see `parameter_groups`). Parameters must be
    contiguous fp32. `step` overwrites the gradient with the update, which saves a buffer.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "layer_adaptation": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the parameters with gradients; do nothing before `set_segments`, when DeepSpeed allocates moments."""
        if not self._segments:
            return
        self._prepare_skip()
        adapted_groups: list[tuple[float, list[TensorPiece]]] = []  # (learning rate, pieces)
        for group in self.param_groups:
            is_adapted = group["layer_adaptation"]
            whole_parameters = ((p, (Segment(0, p.numel(), -1),)) for p in group["params"])
            pieces = self._start_step(group, self._parameters_with_segments(group) if is_adapted else whole_parameters)
            self._compute_updates(group, pieces)
            if is_adapted and pieces:
                adapted_groups.append((group["lr"], pieces))
            elif pieces:
                weights, updates = [piece.weights for piece in pieces], [piece.gradient for piece in pieces]
                if self._applied is not None:
                    foreach._foreach_mul_(updates, self._zero_if_skipped(1.0))
                foreach._foreach_add_(weights, updates, alpha=-group["lr"])
        if any(group["layer_adaptation"] for group in self.param_groups):
            self._step_adapted(adapted_groups)

    def _step_adapted(self, groups: list[tuple[float, list[TensorPiece]]]) -> None:
        """Step each piece, scaled by its tensor's trust ratio; every worker must call this, even without pieces."""
        squared_norms = self._zero_sums()
        for _, pieces in groups:
            ids, _ = self._ids_and_sizes(pieces)
            squared_norms[0].index_add_(0, ids, sums_of_squares([piece.weights for piece in pieces]))
            squared_norms[1].index_add_(0, ids, sums_of_squares([piece.gradient for piece in pieces]))
        self._reduce(squared_norms.view(-1))
        weight_norms, update_norms = squared_norms.sqrt()
        both_nonzero = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both_nonzero, weight_norms / update_norms, 1.0).to(torch.float32)
        ratios *= self._zero_if_skipped(1.0)
        for lr, pieces in groups:
            # This takes one kernel per piece: torch has no operation that takes a list of factors on the device.
            factors = ratios[self._ids_and_sizes(pieces)[0]].unbind()
            weights, updates = [piece.weights for piece in pieces], [piece.gradient for piece in pieces]
            foreach._foreach_addcmul_(weights, updates, factors, value=-lr)

    def _compute_updates(self, group: dict[str, Any], pieces: list[TensorPiece]) -> None:
        """Update the moments of `pieces` and overwrite their gradients with the updates."""
        for indices in batches([piece.weights for piece in pieces]):
            batch = pieces[indices]
            write_adam_updates(group, batch, self._update_moments(group, batch))
            if group["weight_decay"]:
                gradients, weights = [piece.gradient for piece in batch], [piece.weights for piece in batch]
                foreach._foreach_add_(gradients, weights, alpha=group["weight_decay"])
