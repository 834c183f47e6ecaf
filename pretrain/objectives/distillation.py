"""Distillation: a teacher's predictions and hidden states beside the masked tokens (Sanh et al. 2019, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.checkpoint.teacher import read_teacher, student_weights
from pretrain.config import PretrainConfig
from pretrain.model.distillation import DistillationLosses, DistillingModel
from pretrain.planning.work import Flops


class Distillation:
    """Learning from a teacher as an `Objective`. Raises `InputError` as `read_teacher` and `student_weights`."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        self._config, self._vocabulary_size = config, vocabulary_size
        teacher = read_teacher(config)
        self._teacher = teacher.model
        self.identity: dict[str, Any] = {"teacher": {"folder": teacher.folder, "fingerprint": teacher.fingerprint}}
        self.model = DistillingModel(
            config.model,
            vocabulary_size,
            config.pairs.has_classifier,
            teacher=teacher.build(compile=config.engine.compiled),
            settings=config.distillation,
            compile=config.engine.compiled,
            activation_checkpointing=config.engine.activation_checkpointing,
        )
        self._first: dict[str, Tensor] = {}
        if config.distillation.initialize:
            own = self.model.state_dict()
            self._first = {**own, **student_weights(config, teacher, {name: own[name].shape for name in own})}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self.model.move_teacher(device, dtype)

    def first_weights(self) -> Mapping[str, Tensor]:
        first, self._first = self._first, {}
        return first

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        # Invariant 3: global counts. Both losses of the predictions are means over the masked tokens.
        return 1 / max(step.masked, 1), 1 / max(step.labeled, 1), self._config.distillation.cosine_weight / step.tokens

    def loss(self, output: DistillationLosses, weights: Sequence[float] | Tensor) -> Tensor:
        return output.predictions * weights[0] + output.nsp_loss * weights[1] + output.cosine_loss * weights[2]

    def totals(self, output: DistillationLosses) -> Tensor:
        return torch.stack(list(output[1:]))

    def counts(self, step: StepBatch) -> Tensor:
        return torch.tensor([step.masked, step.labeled, step.tokens], dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        counted = Flops(self._config, self._vocabulary_size, self._teacher)
        return counted.of_models(micro_batch.real_lengths, micro_batch.targets)

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        mlm_loss, nsp_loss, mlm_correct, nsp_correct, soft_loss, cosine_loss = totals
        (masked, labeled, tokens), settings = (max(one, 1) for one in counts), self._config.distillation
        means = {
            "mlm_loss": mlm_loss / masked,
            "mlm_accuracy": mlm_correct / masked,
            "distil_loss": soft_loss / masked,
        }
        if settings.cosine_weight:
            means["cosine_loss"] = cosine_loss / tokens
        loss = settings.soft_weight * soft_loss / masked + settings.mlm_weight * mlm_loss / masked
        loss += settings.cosine_weight * cosine_loss / tokens + nsp_loss / labeled
        if self._config.pairs.has_classifier:
            name = self._config.pairs.objective
            means |= {f"{name}_loss": nsp_loss / labeled, f"{name}_accuracy": nsp_correct / labeled}
        return {"loss": loss, **means}
