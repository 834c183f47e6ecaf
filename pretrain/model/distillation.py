"""A student that learns from a teacher (Sanh et al. 2019, "DistilBERT", arXiv:1910.01108, section 2).

Shape letters: T tokens, S sequences, K masked tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import DistillationConfig, ModelConfig
from pretrain.model.heads import PretrainingBatch, PretrainingModel, nsp_logits, pool
from pretrain.model.kernels.fused_cross_entropy import SoftTargets, soft_target_losses


class DistillationLosses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; the training task divides them by global counts (invariant 3).

    Only `predictions`, `nsp_loss` and `cosine_loss` are differentiable.
    """

    predictions: Tensor  # soft_weight * soft_loss + mlm_weight * mlm_loss
    mlm_loss: Tensor  # cross-entropy with the masked tokens, in nats
    nsp_loss: Tensor
    mlm_correct: Tensor
    nsp_correct: Tensor
    soft_loss: Tensor  # divergence from the teacher's predictions, in nats
    cosine_loss: Tensor  # 1 - cosine of the two models' last hidden states, over all tokens


class DistillingModel(PretrainingModel):
    """A `PretrainingModel` with a teacher beside it, which is neither a submodule nor in a checkpoint.

    Args:
        shape, vocabulary_size, next_sentence, compile, activation_checkpointing: of the student, as its base class.
        teacher: a model over the same vocabulary. It is not trained, and runs without dropout.
        settings: weights of the losses.
    """

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        next_sentence: bool,
        *,
        teacher: PretrainingModel,
        settings: DistillationConfig,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(
            shape, vocabulary_size, next_sentence, compile=compile, activation_checkpointing=activation_checkpointing
        )
        self.settings = settings
        # In a tuple, torch does not find it: DeepSpeed would partition it, and `parameters` list it.
        self._teachers = (teacher.eval().requires_grad_(False),)

    @property
    def teacher(self) -> PretrainingModel:
        return self._teachers[0]

    def move_teacher(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teacher to where the student computes, in the precision that it computes in."""
        self.teacher.to(device=device, dtype=dtype)

    def forward(self, batch: PretrainingBatch) -> DistillationLosses:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Losses and correct predictions of one micro-batch. The cosine loss reads all tokens, the others some."""
        rows_K, whole = batch.masked_rows, self.settings.cosine_weight > 0
        whole_too = whole or self.heads.next_sentence
        hidden = self.encode(batch) if whole_too else self.encode(batch, rows_K)
        with torch.no_grad():
            theirs = self.teacher.encode(batch) if whole else self.teacher.encode(batch, rows_K)
        soft = self._soft_targets(theirs.index_select(0, rows_K) if whole else theirs)
        predictions, mlm_loss, soft_loss, mlm_correct = soft_target_losses(
            self.heads.transform(hidden.index_select(0, rows_K) if whole_too else hidden, self.fused),
            self._decoder(),
            self.heads.decoder_bias,
            batch.masked_labels,
            soft,
            self.fused,
        )
        nothing = mlm_loss.new_zeros(())
        cosine_loss = (1 - F.cosine_similarity(hidden.float(), theirs.float(), dim=-1)).sum() if whole else nothing
        nsp_loss, nsp_correct = self._pairs(hidden, batch) if self.heads.next_sentence else (nothing, nothing)
        return DistillationLosses(predictions, mlm_loss, nsp_loss, mlm_correct, nsp_correct, soft_loss, cosine_loss)

    @torch.no_grad()
    def _soft_targets(self, hidden_KH: Tensor) -> SoftTargets:
        teacher, settings = self.teacher, self.settings
        return SoftTargets(
            teacher.heads.transform(hidden_KH, teacher.fused),
            teacher._decoder(),
            teacher.heads.decoder_bias,
            settings.temperature,
            settings.soft_weight,
            settings.mlm_weight,
        )

    def _pairs(self, hidden_TH: Tensor, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Loss and correct predictions of the classifier of sentence pairs."""
        pooled_SH = pool(hidden_TH, batch.cu_seqlens, self.shape.pooling)
        logits_S2 = nsp_logits(pooled_SH, self.heads.nsp_weights()).float()
        loss = F.cross_entropy(logits_S2, batch.nsp_labels, reduction="sum")
        return loss, (logits_S2.argmax(-1) == batch.nsp_labels).sum().float()


def evenly_spread(student: int, teacher: int) -> tuple[int, ...]:
    """Which of the teacher's layers each layer of the student begins with: from the first to the last.

    For 6 of 12 they are DistilBERT's 0, 2, 4, 7, 9, 11 (transformers, research project distillation,
    scripts/extract_distilbert.py).
    """
    if student == 1:
        return (0,)
    return tuple(round(number * (teacher - 1) / (student - 1)) for number in range(student))
