"""What a pretraining minimizes: one module for each objective, chosen by the config."""

from __future__ import annotations

from pretrain.config import PretrainConfig
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.masked import MaskedTokens
from pretrain.objectives.objective import Objective
from pretrain.objectives.replaced_tokens import ReplacedTokens

__all__ = ["Objective", "make_objective"]


def make_objective(config: PretrainConfig, vocabulary_size: int) -> Objective:
    """The objective of a run, with its model. Raises `InputError` if a teacher does not fit."""
    if config.distillation.teacher:
        return Distillation(config, vocabulary_size)
    if config.electra.is_on:
        return ReplacedTokens(config, vocabulary_size)
    return MaskedTokens(config, vocabulary_size)
