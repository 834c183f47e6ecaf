"""Creates the configured optimizer and its parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pretrain.model.parameters import has_weight_decay, is_hidden_matrix
from pretrain.training.optim.lamb import Lamb
from pretrain.training.optim.muon import Muon
from pretrain.training.optim.stable_adamw import StableAdamW

if TYPE_CHECKING:
    from pretrain import config


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Return BERT's two optimizer groups: with weight decay, and without it (biases and norms).

    Args:
        named_parameters: (name, parameter) as `Module.named_parameters` yields them; the order is kept.
        weight_decay: decoupled weight decay of the first group.

    Returns:
        Groups with `params`, their `names`, `weight_decay`, `decays` (whether the group has weight decay) and
        `layer_adaptation` (whether LAMB's trust ratio applies). Parameters without decay also have no trust ratio,
        as in NVIDIA's FusedLAMB with its default `use_nvlamb=False` (apex csrc/multi_tensor_lamb.cu) and in Google's
        LAMBOptimizer, whose `exclude_from_layer_adaptation` defaults to `exclude_from_weight_decay`
        (google-research/albert lamb_optimizer.py). A group without parameters is omitted.
    """
    groups = [
        {"params": [], "names": [], "weight_decay": weight_decay, "decays": True, "layer_adaptation": True},
        {"params": [], "names": [], "weight_decay": 0.0, "decays": False, "layer_adaptation": False},
    ]
    for name, parameter in named_parameters:
        group = groups[0 if has_weight_decay(name) else 1]
        group["params"].append(parameter)
        group["names"].append(name)
    return [group for group in groups if group["params"]]


def make_optimizer(settings: config.OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the configured optimizer over `parameter_groups`.

    Its learning rate is 0 until training sets it: DeepSpeed's FP16_UnfusedOptimizer takes a step before training to
    allocate the moments, and this step must not change any weight.
    """
    betas = (settings.beta1, settings.beta2)
    if settings.name == "lamb":
        return Lamb(groups, lr=0.0, betas=betas, eps=settings.epsilon)
    if settings.name == "stable_adamw":
        return StableAdamW(groups, lr=0.0, betas=betas, eps=settings.epsilon)
    if settings.name == "muon":
        groups = _split_off_matrices(groups, settings.muon_lr_scale)
        return Muon(groups, lr=0.0, betas=betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.epsilon, fused=True)


def _split_off_matrices(groups: list[dict[str, Any]], lr_scale: float) -> list[dict[str, Any]]:
    """Split each group into matrices to orthogonalize, with `lr_scale` times the learning rate, and the rest."""
    split_groups = []
    for group in groups:
        for orthogonal in (True, False):
            selected = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if is_hidden_matrix(name) == orthogonal
            ]
            if selected:
                names, parameters = map(list, zip(*selected, strict=True))
                scale = group.get("lr_scale", 1.0) * (lr_scale if orthogonal else 1.0)
                changes = {"names": names, "params": parameters, "orthogonal": orthogonal, "lr_scale": scale}
                split_groups.append({**group, **changes})
    return split_groups
