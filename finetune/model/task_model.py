"""The encoder with a task's head, and the loss of each objective.

Shape letters: T tokens, S windows, E examples, R rows that the head sees, C outputs, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.model.batches import LabelledBatch
from finetune.tasks.base import Head, Objective
from pretrain.checkpoint.layouts import HeadDropout
from pretrain.config import ModelConfig
from pretrain.model.activations import get_activation
from pretrain.model.encoder import Encoder
from pretrain.model.hash_rng import hash_dropout
from pretrain.model.initialisation import create_parameters
from pretrain.model.parameters import linear_parameters

_NO_DROPOUT = HeadDropout()
_BEFORE_OUT, _BEFORE_DENSE = 3, 4  # streams of a token's key that the encoder does not use


class Output(NamedTuple):
    """What `TaskModel` returns."""

    loss: Tensor  # fp32 scalar: weighted sum over rows, examples or windows
    logits: Tensor  # fp32 [R, C]


class TaskModel(Encoder):
    """An encoder with one task head. The head computes in fp32 for every precision of the encoder.

    bf16 has 8 significant bits, so the outputs of a regression would take only a dozen distinct values.

    Args:
        shape: sizes and dropout of the encoder.
        vocabulary_size: rows of the word embeddings.
        head: kind of head.
        objective: kind of loss.
        outputs: width C of the output layer.
        activation: of the sequence head, a name in `pretrain.model.activations.ACTIVATIONS`.
        dropout: dropout of the head, in training.
        compile, activation_checkpointing: as `Encoder`.
    """

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        head: Head,
        objective: Objective,
        outputs: int,
        activation: str,
        *,
        dropout: HeadDropout = _NO_DROPOUT,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(shape, vocabulary_size, compile=compile, activation_checkpointing=activation_checkpointing)
        self.embeddings.tied = False
        self.loss = LOSSES[head, objective]
        self.every_row = head == "spans"
        if head == "sequence":
            self.head: nn.Module = SequenceHead(shape, outputs, activation, dropout)
        else:
            self.head = RowHead(shape, outputs, dropout)

    def forward(self, batch: LabelledBatch) -> Output:
        """Loss and logits of one micro-batch."""
        rows = None if self.every_row else batch.rows
        logits_RC = self.head(self.encode(batch, rows), batch.token_keys[batch.rows])
        return Output(self.loss(logits_RC, batch), logits_RC)


class SequenceHead(nn.Module):
    """dense, activation, out: BERT's pooler and classifier, or the equivalent of another family."""

    dense_weight: nn.Parameter  # [H, H]
    dense_bias: nn.Parameter
    out_weight: nn.Parameter  # [C, H]
    out_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, outputs: int, activation: str, dropout: HeadDropout) -> None:
        super().__init__()
        self.dropout, self.activation = dropout, get_activation(activation).function
        dense = linear_parameters("dense", shape.hidden, shape.hidden)
        create_parameters(self, (*dense, *linear_parameters("out", outputs, shape.hidden)), shape.init_std)

    def forward(self, hidden_RH: Tensor, keys_R: Tensor) -> Tensor:
        """[R, C]"""
        before_dense, before_out = self.dropout if self.training else _NO_DROPOUT
        hidden_RH = hash_dropout(hidden_RH, keys_R, _BEFORE_DENSE, before_dense)
        pooled_RH = self.activation(_linear_fp32(hidden_RH, self.dense_weight, self.dense_bias))
        pooled_RH = hash_dropout(pooled_RH, keys_R, _BEFORE_OUT, before_out)
        return _linear_fp32(pooled_RH, self.out_weight, self.out_bias)


class RowHead(nn.Module):
    """A linear layer at each query position."""

    out_weight: nn.Parameter  # [C, H]
    out_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, outputs: int, dropout: HeadDropout) -> None:
        super().__init__()
        self.dropout = dropout
        create_parameters(self, linear_parameters("out", outputs, shape.hidden), shape.init_std)

    def forward(self, hidden_RH: Tensor, keys_R: Tensor) -> Tensor:
        """[R, C]"""
        before_out = self.dropout.before_out if self.training else 0.0
        dropped_RH = hash_dropout(hidden_RH, keys_R, _BEFORE_OUT, before_out)
        return _linear_fp32(dropped_RH, self.out_weight, self.out_bias)


def _linear_fp32(hidden_RH: Tensor, weight_CH: Tensor, bias_C: Tensor) -> Tensor:
    """fp32 [R, C]"""
    return F.linear(hidden_RH.float(), weight_CH.float(), bias_C.float())


def pool(logits_RC: Tensor, batch: LabelledBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(mean logits of each example's windows [E, C], its labels [E] or [E, C], its weight [E])."""
    example_R = batch.owners[batch.sequence]
    count = int(batch.owners.max()) + 1
    windows_E = torch.bincount(example_R, minlength=count)
    sums_EC = logits_RC.new_zeros(count, logits_RC.shape[1]).index_add(0, example_R, logits_RC)
    labels_E = batch.labels.new_zeros(count, *batch.labels.shape[1:])
    labels_E[example_R] = batch.labels  # all windows of an example have the same labels
    weights_E = batch.weights.new_zeros(count).index_add(0, example_R, batch.weights)
    return sums_EC / windows_E[:, None], labels_E, weights_E


def class_loss(logits_RC: Tensor, batch: LabelledBatch) -> Tensor:
    """Sum of the weighted cross-entropies of all rows, in nats, fp32 scalar; logits fp32 [R, C]."""
    return (F.cross_entropy(logits_RC, batch.labels.long(), reduction="none") * batch.weights).sum()


def pooled_class_loss(logits_RC: Tensor, batch: LabelledBatch) -> Tensor:
    """As `class_loss`, of the mean logits of each example's windows."""
    logits_EC, labels_E, weights_E = pool(logits_RC, batch)
    return (F.cross_entropy(logits_EC, labels_E.long(), reduction="none") * weights_E).sum()


def labels_loss(logits_RC: Tensor, batch: LabelledBatch) -> Tensor:
    """Sum over examples of the weighted mean binary cross-entropy of their C labels, in nats, fp32 scalar."""
    logits_EC, labels_EC, weights_E = pool(logits_RC, batch)
    losses_EC = F.binary_cross_entropy_with_logits(logits_EC, labels_EC.float(), reduction="none")
    return (losses_EC.mean(1) * weights_E).sum()


def value_loss(logits_RC: Tensor, batch: LabelledBatch) -> Tensor:
    """Sum over examples of the weighted squared error, fp32 scalar; logits fp32 [R, 1]."""
    values_E1, labels_E, weights_E = pool(logits_RC, batch)
    return ((values_E1[:, 0] - labels_E.float()).square() * weights_E).sum()


def span_loss(logits_R2: Tensor, batch: LabelledBatch) -> Tensor:
    """Mean cross-entropy of start and end, each a softmax over a window's rows."""
    starts = batch.cu_seqlens[:-1].long()  # every token of a window is a query position
    windows = len(starts)
    tops_S2 = logits_R2.detach().new_full((windows, 2), -torch.inf)
    index_R2 = batch.sequence[:, None].expand(-1, 2)
    tops_S2 = tops_S2.scatter_reduce(0, index_R2, logits_R2.detach(), "amax")
    shifted_R2 = logits_R2 - tops_S2[batch.sequence]
    sums_S2 = shifted_R2.new_zeros(windows, 2).index_add(0, batch.sequence, shifted_R2.exp())
    log_probabilities_R2 = shifted_R2 - sums_S2.log()[batch.sequence]
    losses_S2 = -torch.zeros_like(sums_S2).index_add(0, batch.sequence, log_probabilities_R2 * batch.labels)
    return (losses_S2.mean(1) * batch.weights[starts]).sum()


LOSSES: dict[tuple[Head, Objective], Callable[[Tensor, LabelledBatch], Tensor]] = {
    ("sequence", "classes"): pooled_class_loss,
    ("sequence", "labels"): labels_loss,
    ("sequence", "value"): value_loss,
    ("tokens", "classes"): class_loss,
    ("spans", "span"): span_loss,
}
