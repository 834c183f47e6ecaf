"""Masked language modelling and next-sentence prediction (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.batches.loader import MicroBatch, StepBatch
from pretrain.config import PretrainConfig
from pretrain.estimate import executed_flops
from pretrain.model.heads import Losses, PretrainingModel


class MaskedTokens:
    """BERT's objectives as an `Objective`."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        self._config, self._vocabulary_size = config, vocabulary_size
        self.identity: dict[str, Any] = {}
        self.model = PretrainingModel(
            config.model,
            vocabulary_size,
            config.pairs.next_sentence,
            compile=config.engine.compile,
            activation_checkpointing=config.engine.activation_checkpointing,
        )

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """All there is are parameters of the model."""

    def first_weights(self) -> Mapping[str, Tensor]:
        return {}

    def loss(self, output: Losses, step: StepBatch) -> Tensor:
        # Invariant: losses are normalised globally, by counts over all ranks and micro-batches. As in Devlin et al.,
        # the loss is the sum of the two means.
        return output.mlm_loss / step.masked + output.nsp_loss / step.sequences

    def totals(self, output: Losses) -> Tensor:
        return torch.stack(list(output))

    def counts(self, step: StepBatch) -> Tensor:
        return torch.tensor([step.masked, step.sequences], dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        return executed_flops(self._config, self._vocabulary_size, micro_batch.lengths, len(micro_batch.masked_rows))

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        mlm_loss, nsp_loss, mlm_correct, nsp_correct = totals
        masked, sequences = counts
        means = {
            "loss": mlm_loss / masked + nsp_loss / sequences,
            "mlm_loss": mlm_loss / masked,
            "mlm_accuracy": mlm_correct / masked,
        }
        if self._config.pairs.next_sentence:
            means |= {"nsp_loss": nsp_loss / sequences, "nsp_accuracy": nsp_correct / sequences}
        return means
