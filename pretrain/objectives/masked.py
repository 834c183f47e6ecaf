"""Masked language modeling, and the prediction of next sentences or of their order (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.config import PretrainConfig
from pretrain.model.heads import Losses, PretrainingModel
from pretrain.planning.work import Flops


class MaskedTokens:
    """BERT's objectives as an `Objective`."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        self._config, self._vocabulary_size = config, vocabulary_size
        self.identity: dict[str, Any] = {}
        self.model = PretrainingModel(
            config.model,
            vocabulary_size,
            config.pairs.has_classifier,
            compile=config.engine.compiled,
            activation_checkpointing=config.engine.activation_checkpointing,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """All there is are parameters of the model."""

    def first_weights(self) -> Mapping[str, Tensor]:
        return {}

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        # Invariant: losses are normalized globally, by counts over all ranks and micro-batches. As in Devlin et al.,
        # the loss is the sum of the two means.
        return 1 / max(step.masked, 1), 1 / max(step.labeled, 1)

    def loss(self, output: Losses, weights: Sequence[float] | Tensor) -> Tensor:
        return output.mlm_loss * weights[0] + output.nsp_loss * weights[1]

    def totals(self, output: Losses) -> Tensor:
        return torch.stack(list(output))

    def counts(self, step: StepBatch) -> Tensor:
        return torch.tensor([step.masked, step.labeled], dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        return Flops(self._config, self._vocabulary_size).of_models(micro_batch.real_lengths, micro_batch.targets)

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        mlm_loss, nsp_loss, mlm_correct, nsp_correct = totals
        masked, labeled = max(counts[0], 1), max(counts[1], 1)
        means = {
            "loss": mlm_loss / masked + nsp_loss / labeled,
            "mlm_loss": mlm_loss / masked,
            "mlm_accuracy": mlm_correct / masked,
        }
        if self._config.pairs.has_classifier:
            name = self._config.pairs.objective
            means |= {f"{name}_loss": nsp_loss / labeled, f"{name}_accuracy": nsp_correct / labeled}
        return means
