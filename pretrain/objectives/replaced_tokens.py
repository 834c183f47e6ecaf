"""Replaced-token detection: a generator's samples, found by the discriminator (Clark et al. 2020, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.config import PretrainConfig
from pretrain.model.electra import ElectraLosses, ElectraModel
from pretrain.planning.work import Flops


class ReplacedTokens:
    """ELECTRA as an `Objective`."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        self._config, self._vocabulary_size = config, vocabulary_size
        self.identity: dict[str, Any] = {}
        self.model = ElectraModel(
            config.model,
            vocabulary_size,
            settings=config.electra,
            compile=config.engine.compiled,
            activation_checkpointing=config.engine.activation_checkpointing,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """All there is are parameters of the model."""

    def first_weights(self) -> Mapping[str, Tensor]:
        return {}

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        # Invariant 3: the generator's loss is a mean over the masked tokens, the discriminator's over all.
        settings = self._config.electra
        return settings.mlm_weight / max(step.masked, 1), settings.rtd_weight / step.tokens

    def loss(self, output: ElectraLosses, weights: Sequence[float] | Tensor) -> Tensor:
        return output.mlm_loss * weights[0] + output.rtd_loss * weights[1]

    def totals(self, output: ElectraLosses) -> Tensor:
        return torch.stack(list(output))

    def counts(self, step: StepBatch) -> Tensor:
        return torch.tensor([step.masked, step.tokens], dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        counted = Flops(self._config, self._vocabulary_size)
        return counted.of_models(micro_batch.real_lengths, micro_batch.targets)

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        mlm_loss, rtd_loss, mlm_correct, rtd_correct = totals
        masked, tokens, settings = max(counts[0], 1), counts[1], self._config.electra
        return {
            "loss": settings.mlm_weight * mlm_loss / masked + settings.rtd_weight * rtd_loss / tokens,
            "mlm_loss": mlm_loss / masked,
            "mlm_accuracy": mlm_correct / masked,
            "rtd_loss": rtd_loss / tokens,
            "rtd_accuracy": rtd_correct / tokens,
        }
