"""Pretraining objectives: one module for each, with its class as `OBJECTIVE`, selected by the config.

To add an objective, add its module and its line in the registry.
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

__all__ = ["REGISTRY", "MaskedTokens", "Objective", "objective_metrics", "objective_of"]

REGISTRY: dict[str, Callable[[PretrainConfig], object]] = {
    f"{__name__}.distillation": lambda config: config.distillation.teacher,
    f"{__name__}.replaced_tokens": lambda config: config.electra.is_on,
}
"""Module -> function that returns whether a config selects it. Modules are imported on use, since they need torch."""

KIND = Contract("OBJECTIVE", Objective)
_custom: dict[str, type[Objective]] = {}  # custom objectives used so far, for `objective_metrics`


def objective_of(config: PretrainConfig, vocabulary: int = 0, frozen: ModelConfig | None = None) -> Objective:
    """Return the objective that a config selects, by default masked tokens; arguments as for `Objective`.

    Raises `InputError` if it is a custom module that is missing or was not imported on request.
    """
    if config.objective:
        _custom[config.objective] = load_kind(__name__, config.objective).OBJECTIVE
        return _custom[config.objective](config, vocabulary, frozen)
    selected = next((_load(module) for module, selects in REGISTRY.items() if selects(config)), MaskedTokens)
    return selected(config, vocabulary, frozen)


def objective_metrics() -> Mapping[str, Metric]:
    """Return the metrics of all objectives, by name."""
    imported = {name: module.OBJECTIVE for name, module in imported_modules().items() if hasattr(module, "OBJECTIVE")}
    classes = (MaskedTokens, *map(_load, REGISTRY), *{**imported, **_custom}.values())
    return {name: metric for kind in classes for name, metric in kind.metrics.items()}


def _load(module: str) -> type[Objective]:
    return importlib.import_module(module).OBJECTIVE
