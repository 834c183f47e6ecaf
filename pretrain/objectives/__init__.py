"""What a pretraining minimizes: one module for each objective, with its class as `OBJECTIVE`, chosen by the config.

Adding one is adding its module and its line in the registry.
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
"""Module -> whether a config chooses it. A module is imported when it is needed, since its model needs torch."""

KIND = Contract("OBJECTIVE", Objective)
_own: dict[str, type[Objective]] = {}  # those of other packages that were used, for the metrics of pages


def objective_of(config: PretrainConfig, vocabulary: int = 0, frozen: ModelConfig | None = None) -> Objective:
    """The objective that a config chooses, else masked tokens; arguments as its attributes.

    Raises `InputError` if it is a module of the user's own that is missing or nobody asked for.
    """
    if config.objective:
        _own[config.objective] = load_kind(__name__, config.objective).OBJECTIVE
        return _own[config.objective](config, vocabulary, frozen)
    chosen = next((_load(module) for module, is_chosen in REGISTRY.items() if is_chosen(config)), MaskedTokens)
    return chosen(config, vocabulary, frozen)


def objective_metrics() -> Mapping[str, Metric]:
    """The metrics of all objectives, by name."""
    asked = {name: module.OBJECTIVE for name, module in imported_modules().items() if hasattr(module, "OBJECTIVE")}
    classes = (MaskedTokens, *map(_load, REGISTRY), *{**asked, **_own}.values())
    return {name: metric for one in classes for name, metric in one.metrics.items()}


def _load(module: str) -> type[Objective]:
    return importlib.import_module(module).OBJECTIVE
