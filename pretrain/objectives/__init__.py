"""Pretraining objectives: each has a module that sets `OBJECTIVE` to its class. The config selects one.

To add one here, add a module and a line in `REGISTRY`. To add one elsewhere, see docs/extend/add-an-objective.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from pretrain.common.extensions import Contract, imported_modules
from pretrain.common.kinds import load_kind
from pretrain.common.records import Metric
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.objectives.masked import MaskedTokens
from pretrain.objectives.objective import Objective

__all__ = ["REGISTRY", "MaskedTokens", "Objective", "make_objective", "objective_metrics"]

REGISTRY: dict[str, Callable[[PretrainConfig], object]] = {
    f"{__name__}.distillation": lambda config: config.distillation.teacher,
    f"{__name__}.replaced_tokens": lambda config: config.electra.is_on,
}
"""Module name -> function that returns whether a config selects it. Modules are imported on use: they need torch."""

INTERFACE = Contract("OBJECTIVE", Objective)  # what `load_kind` requires of a custom module
_custom: dict[str, type[Objective]] = {}  # custom objectives used so far, by module name, for `objective_metrics`


def make_objective(
    config: PretrainConfig, vocabulary_size: int = 0, frozen_config: ModelConfig | None = None
) -> Objective:
    """Create the objective that a config selects, by default masked tokens; `Objective` documents the arguments.

    Raises `InputError` if the config names a custom module that is missing or whose import is not allowed.
    """
    if config.objective:
        _custom[config.objective] = load_kind(__name__, config.objective).OBJECTIVE
        return _custom[config.objective](config, vocabulary_size, frozen_config)
    selected = next((_load(module) for module, is_selected in REGISTRY.items() if is_selected(config)), MaskedTokens)
    return selected(config, vocabulary_size, frozen_config)


def objective_metrics() -> Mapping[str, Metric]:
    """Return the metrics of all objectives, by name."""
    imported = {name: module.OBJECTIVE for name, module in imported_modules().items() if hasattr(module, "OBJECTIVE")}
    classes = (MaskedTokens, *map(_load, REGISTRY), *{**imported, **_custom}.values())
    return {name: metric for objective in classes for name, metric in objective.metrics.items()}


def _load(module: str) -> type[Objective]:
    return importlib.import_module(module).OBJECTIVE
