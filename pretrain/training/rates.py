"""Learning rates of the parts of a model that continues from a checkpoint, as shares of the run's rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pretrain.model.parameters import layer_of
from pretrain.training.optim import parameter_groups

if TYPE_CHECKING:
    from pretrain import config


def lr_scales(names: Iterable[str], settings: config.AdaptationConfig, layers: int) -> dict[str, float]:
    """The share of the learning rate that each parameter has.

    Heads have the full rate, and every layer below `layer_decay` times the rate of the one above it (Howard and Ruder
    2018, discriminative fine-tuning).
    """
    return {name: settings.layer_decay ** (layers + 1 - layer_of(name, layers)) for name in names}


def scaled_groups(
    named: Iterable[tuple[str, Tensor]], weight_decay: float, shares: Mapping[str, float]
) -> list[dict[str, Any]]:
    """`parameter_groups`, a pair for each share of the rate; as they are if all have the full rate."""
    named = list(named)
    if all(shares[name] == 1 for name, _ in named):
        return parameter_groups(named, weight_decay)
    groups: list[dict[str, Any]] = []
    for share in sorted({shares[name] for name, _ in named}):
        members = [(name, parameter) for name, parameter in named if shares[name] == share]
        groups += [{**group, "lr_scale": share} for group in parameter_groups(members, weight_decay)]
    return groups
