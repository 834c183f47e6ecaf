"""The two pretraining objectives on top of the encoder: masked language modelling and next-sentence prediction.

Shape letters: T tokens, S sequences, K masked tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, linear, norm_weights
from pretrain.model.compile import program
from pretrain.model.encoder import Encoder, UnpaddedBatch
from pretrain.model.fused_cross_entropy import vocabulary_losses
from pretrain.model.initialisation import create_parameters
from pretrain.model.parameters import head_parameters


class PretrainingBatch(UnpaddedBatch, Protocol):
    """The further fields of a batch that pretraining reads; `pretrain.batches.loader.MicroBatch` is one."""

    @property
    def masked_rows(self) -> Tensor: ...  # int64 [K]
    @property
    def masked_labels(self) -> Tensor: ...  # int64 [K]
    @property
    def nsp_labels(self) -> Tensor: ...  # int64 [S]; 0 is next, 1 is random; [0] without NSP


class Losses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; the training task divides them by global counts (invariant 3)."""

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
        """Losses and correct predictions of one micro-batch; the heads compute only the rows that a loss reads."""
        rows_R, order_R = torch.cat([batch.cu_seqlens[:-1].long(), batch.masked_rows]).sort()
        hidden_RH = self.encode(batch, rows_R)[order_R.argsort()]
        return self.heads(hidden_RH, self.embeddings.word, batch.masked_labels, batch.nsp_labels)

    def masked_logits(self, batch: PretrainingBatch) -> Tensor:
        """[K, V] scores of the vocabulary at the masked rows."""
        heads = self.heads
        transformed_KH = mlm_transform(self.encode(batch, batch.masked_rows), heads.mlm_weights(), heads.functions)
        return F.linear(transformed_KH, self.embeddings.word, heads.mlm_bias)

    def next_sentence_logits(self, batch: PretrainingBatch) -> Tensor:
        """[S, 2] scores of (is next, is random)."""
        return nsp_logits(self.encode(batch, batch.cu_seqlens[:-1].long()), self.heads.nsp_weights())


class MlmWeights(NamedTuple):
    """The parameters of `mlm_transform`."""

    weight: Tensor  # [H, H]
    bias: Tensor
    norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [H]


class Heads(nn.Module):
    """MLM transform with the tied decoder's bias, and pooler with NSP classifier (Devlin et al., section 3.1)."""

    mlm_transform_weight: nn.Parameter
    mlm_transform_bias: nn.Parameter
    mlm_bias: nn.Parameter  # [V]
    pooler_weight: nn.Parameter
    pooler_bias: nn.Parameter
    nsp_weight: nn.Parameter  # [2, H]
    nsp_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, vocabulary_size: int, next_sentence: bool, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        self.next_sentence = next_sentence
        self.functions = BlockFunctions.of(shape)
        create_parameters(self, head_parameters(shape, vocabulary_size, next_sentence), shape.init_std)

    def forward(self, hidden_RH: Tensor, word_VH: Tensor, masked_labels_K: Tensor, nsp_labels_S: Tensor) -> Losses:
        """`hidden_RH`: the first tokens' rows, then the masked tokens'."""
        sequences = hidden_RH.shape[0] - masked_labels_K.shape[0]
        transformed_KH = program(mlm_transform, self.fused)(hidden_RH[sequences:], self.mlm_weights(), self.functions)
        mlm_loss, mlm_correct = vocabulary_losses(transformed_KH, word_VH, self.mlm_bias, masked_labels_K, self.fused)
        if not self.next_sentence:
            return Losses(mlm_loss, mlm_loss.new_zeros(()), mlm_correct, mlm_loss.new_zeros(()))
        logits_S2 = nsp_logits(hidden_RH[:sequences], self.nsp_weights()).float()
        nsp_loss = F.cross_entropy(logits_S2, nsp_labels_S, reduction="sum")
        return Losses(mlm_loss, nsp_loss, mlm_correct, (logits_S2.argmax(-1) == nsp_labels_S).sum().float())

    def mlm_weights(self) -> MlmWeights:
        """The weights of the masked-token head before the tied decoder."""
        return MlmWeights(
            self.mlm_transform_weight, self.mlm_transform_bias, norm_weights(self, "mlm_norm", self.shape)
        )

    def nsp_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pooler weight [H, H] and bias [H], next-sentence weight [2, H] and bias [2]."""
        return self.pooler_weight, self.pooler_bias, self.nsp_weight, self.nsp_bias


def mlm_transform(hidden_KH: Tensor, weights: MlmWeights, functions: BlockFunctions) -> Tensor:
    """[K, H] -> [K, H]: dense, activation, norm (google-research/bert run_pretraining.py, get_masked_lm_output)."""
    inner_KH = functions.activation(linear(hidden_KH, weights.weight, weights.bias))
    return functions.norm(inner_KH, *weights.norm, eps=functions.eps).to(hidden_KH.dtype)


def nsp_logits(hidden_SH: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """google-research/bert modeling.py, pooler; run_pretraining.py, get_next_sentence_output."""
    pooler_weight, pooler_bias, weight, bias = weights
    return F.linear(torch.tanh(F.linear(hidden_SH, pooler_weight, pooler_bias)), weight, bias)
