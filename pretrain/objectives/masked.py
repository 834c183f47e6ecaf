"""Masked language modelling, and the prediction of next sentences or of their order (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.config import PretrainConfig
from pretrain.model.heads import Losses, PretrainingModel
from pretrain.work import Flops


class MaskedTokens:
    """BERT's objectives, and causal sequences beside masked ones, as an `Objective`."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        self._config, self._vocabulary_size = config, vocabulary_size
        self.identity: dict[str, Any] = {}
        self.model = PretrainingModel(
            config.model,
            vocabulary_size,
            config.pairs.has_classifier,
            compile=config.engine.compiled,
            activation_checkpointing=config.engine.activation_checkpointing,
            fp8=config.engine.fp8,
            z_loss=config.masking.z_loss,
        )

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """All there is are parameters of the model."""

    def first_weights(self) -> Mapping[str, Tensor]:
        return {}

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        # Invariant: losses are normalised globally, by counts over all ranks and micro-batches. As in Devlin et al.,
        # the loss is the sum of the two means.
        if not self._config.has_causal:
            return 1 / max(step.masked, 1), 1 / max(step.labeled, 1)
        # Masked and causal sequences weigh as many as they are, not as their targets (GPT-BERT, section 3).
        share = step.causal / step.sequences
        return (1 - share) / max(step.masked, 1), share / max(step.causal_targets, 1)

    def loss(self, output: Losses, weights: Sequence[float] | Tensor) -> Tensor:
        second = output.causal_loss if self._config.has_causal else output.nsp_loss
        assert second is not None
        return output.mlm_loss * weights[0] + second * weights[1]

    def totals(self, output: Losses) -> Tensor:
        sums = list(output[:4])
        nothing = torch.zeros_like(output.mlm_loss)
        if self._config.has_causal:
            sums += [nothing if total is None else total for total in (output.causal_loss, output.causal_correct)]
        if self._config.masking.z_loss:
            sums += [nothing if total is None else total for total in (output.z_loss, output.causal_z_loss)]
        return torch.stack(sums)

    def counts(self, step: StepBatch) -> Tensor:
        if not self._config.has_causal:
            return torch.tensor([step.masked, step.labeled], dtype=torch.float64)
        causal = [step.causal_targets, step.causal]
        return torch.tensor([step.masked, step.sequences, *causal], dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        counted = Flops(self._config, self._vocabulary_size)
        return counted.of_models(micro_batch.real_lengths, micro_batch.targets, micro_batch.causal_lengths)

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        if not self._config.masking.z_loss:
            return self._cross_entropies(totals, counts)
        *totals, z_loss, causal_z_loss = totals
        totals[0] -= z_loss
        z_mean = z_loss / max(counts[0], 1)
        if self._config.has_causal:
            totals[4] -= causal_z_loss
            share = counts[3] / counts[1]
            z_mean = (1 - share) * z_mean + share * causal_z_loss / max(counts[2], 1)
        means = self._cross_entropies(totals, counts)
        return {**means, "loss": means["loss"] + z_mean, "z_loss": z_mean}

    def _cross_entropies(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        """The means without z-loss, which `totals` must not contain."""
        if self._config.has_causal:
            return _causal_metrics(totals, counts)
        mlm_loss, nsp_loss, mlm_correct, nsp_correct = totals
        masked, labeled = max(counts[0], 1), max(counts[1], 1)
        means = {
            "loss": mlm_loss / masked + nsp_loss / labeled,
            "mlm_loss": mlm_loss / masked,
            "mlm_accuracy": mlm_correct / masked,
        }
        if self._config.pairs.has_classifier:
            name = self._config.pairs.chosen_objective
            means |= {f"{name}_loss": nsp_loss / labeled, f"{name}_accuracy": nsp_correct / labeled}
        return means


def _causal_metrics(totals: list[float], counts: list[float]) -> dict[str, float]:
    """Means of masked and of causal sequences, if there are any, and `loss`, weighted by the numbers of sequences."""
    mlm_loss, _, mlm_correct, _, causal_loss, causal_correct = totals
    masked, sequences, targets, causal = counts
    share = causal / sequences
    means = {"loss": 0.0}
    if masked:
        means |= {"mlm_loss": mlm_loss / masked, "mlm_accuracy": mlm_correct / masked}
        means["loss"] += (1 - share) * means["mlm_loss"]
    if targets:
        means |= {"causal_loss": causal_loss / targets, "causal_accuracy": causal_correct / targets}
        means["loss"] += share * means["causal_loss"]
    return means
