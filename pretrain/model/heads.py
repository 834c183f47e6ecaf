"""The two pretraining objectives on top of the encoder: masked language modelling and next-sentence prediction.

Shape letters: T tokens, S sequences, K masked tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.attention.dispatch import program
from pretrain.model.encoder import Encoder, UnpaddedBatch
from pretrain.model.fused_cross_entropy import vocabulary_losses
from pretrain.model.parts import layer_norm, linear, normal, ones, zeros


class PretrainingBatch(UnpaddedBatch, Protocol):
    """What pretraining reads of a batch besides; `pretrain.batches.loader.MicroBatch` is one."""

    @property
    def masked_rows(self) -> Tensor: ...  # int64 [K]
    @property
    def masked_labels(self) -> Tensor: ...  # int64 [K]
    @property
    def nsp_labels(self) -> Tensor: ...  # int64 [S]; 0 is next, 1 is random; [0] without NSP


class Losses(NamedTuple):
    """Sums over the micro-batch (law 3 divides by global counts), fp32 scalars."""

    mlm_loss: Tensor  # cross-entropy in nats
    nsp_loss: Tensor
    mlm_correct: Tensor  # number of masked tokens whose label has the highest score
    nsp_correct: Tensor


class PretrainingModel(Encoder):
    """The encoder with its pretraining heads; arguments as `Encoder`, and whether there is an NSP head."""

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        next_sentence: bool = True,
        *,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(shape, vocabulary_size, compile=compile, activation_checkpointing=activation_checkpointing)
        self.heads = Heads(shape, vocabulary_size, next_sentence, compile)

    def forward(self, batch: PretrainingBatch) -> Losses:
        """Losses and right answers of one micro-batch; only rows that a loss looks at reach the heads."""
        rows_R, order_R = torch.cat([batch.cu_seqlens[:-1].long(), batch.masked_rows]).sort()
        hidden_RH = self.encode(batch, rows_R)[order_R.argsort()]
        return self.heads(hidden_RH, self.embeddings.word, batch.masked_labels, batch.nsp_labels)

    def masked_logits(self, batch: PretrainingBatch) -> Tensor:
        """[K, V] scores of the vocabulary at the masked rows."""
        heads = self.heads
        transformed_KH = mlm_transform(
            self.encode(batch, batch.masked_rows), heads.mlm_weights(), self.shape.layer_norm_eps
        )
        return F.linear(transformed_KH, self.embeddings.word, heads.mlm_bias)

    def next_sentence_logits(self, batch: PretrainingBatch) -> Tensor:
        """[S, 2] scores of (is next, is random)."""
        return nsp_logits(self.encode(batch, batch.cu_seqlens[:-1].long()), self.heads.nsp_weights())


class Heads(nn.Module):
    """MLM transform with the tied decoder's bias, and pooler with NSP classifier (Devlin et al., section 3.1)."""

    def __init__(self, shape: ModelConfig, vocabulary_size: int, next_sentence: bool, compile: bool) -> None:
        super().__init__()
        self.fused = compile
        self.next_sentence = next_sentence
        self.eps = shape.layer_norm_eps
        hidden, std = shape.hidden, shape.init_std
        if next_sentence:
            self.pooler_weight, self.pooler_bias = normal(std, hidden, hidden), zeros(hidden)
            self.nsp_weight, self.nsp_bias = normal(std, 2, hidden), zeros(2)
        self.mlm_transform_weight, self.mlm_transform_bias = normal(std, hidden, hidden), zeros(hidden)
        self.mlm_norm_weight, self.mlm_norm_bias = ones(hidden), zeros(hidden)
        self.mlm_bias = zeros(vocabulary_size)

    def forward(self, hidden_RH: Tensor, word_VH: Tensor, masked_labels_K: Tensor, nsp_labels_S: Tensor) -> Losses:
        """`hidden_RH`: the first tokens' rows, then the masked tokens'."""
        sequences = hidden_RH.shape[0] - masked_labels_K.shape[0]
        transformed_KH = program(mlm_transform, self.fused)(hidden_RH[sequences:], self.mlm_weights(), self.eps)
        mlm_loss, mlm_correct = vocabulary_losses(transformed_KH, word_VH, self.mlm_bias, masked_labels_K, self.fused)
        if not self.next_sentence:
            return Losses(mlm_loss, mlm_loss.new_zeros(()), mlm_correct, mlm_loss.new_zeros(()))
        logits_S2 = nsp_logits(hidden_RH[:sequences], self.nsp_weights()).float()
        nsp_loss = F.cross_entropy(logits_S2, nsp_labels_S, reduction="sum")
        return Losses(mlm_loss, nsp_loss, mlm_correct, (logits_S2.argmax(-1) == nsp_labels_S).sum().float())

    def mlm_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.mlm_transform_weight, self.mlm_transform_bias, self.mlm_norm_weight, self.mlm_norm_bias

    def nsp_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.pooler_weight, self.pooler_bias, self.nsp_weight, self.nsp_bias


def mlm_transform(hidden_KH: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], eps: float) -> Tensor:
    """google-research/bert run_pretraining.py, get_masked_lm_output: dense, GELU, LayerNorm."""
    weight, bias, norm_weight, norm_bias = weights
    inner_KH = F.gelu(linear(hidden_KH, weight, bias))
    return layer_norm(inner_KH, norm_weight, norm_bias, eps).to(hidden_KH.dtype)


def nsp_logits(hidden_SH: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """google-research/bert modeling.py, pooler; run_pretraining.py, get_next_sentence_output."""
    pooler_weight, pooler_bias, weight, bias = weights
    return F.linear(torch.tanh(F.linear(hidden_SH, pooler_weight, pooler_bias)), weight, bias)
