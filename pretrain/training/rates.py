"""Layer-wise learning rates for a model that continues from a checkpoint, relative to the run's learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pretrain.model.parameters import layer_of
from pretrain.training.optim import parameter_groups

if TYPE_CHECKING:
    from pretrain import config


def lr_scales(names: Iterable[str], settings: config.AdaptationConfig, layers: int) -> dict[str, float]:
    """Return the factor of each parameter's learning rate.

    The factor of heads is 1, and each layer has `layer_decay` times the factor of the layer above it (Howard and Ruder
    2018, discriminative fine-tuning).
    """
    return {name: settings.layer_decay ** (layers + 1 - layer_of(name, layers)) for name in names}


def scaled_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float, scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return `parameter_groups` for each distinct learning-rate factor, stored as `lr_scale` unless all are 1."""
    named_parameters = list(named_parameters)
    if all(scales[name] == 1 for name, _ in named_parameters):
        return parameter_groups(named_parameters, weight_decay)
    groups: list[dict[str, Any]] = []
    for scale in sorted({scales[name] for name, _ in named_parameters}):
        scaled = [(name, parameter) for name, parameter in named_parameters if scales[name] == scale]
        groups += [{**group, "lr_scale": scale} for group in parameter_groups(scaled, weight_decay)]
    return groups
