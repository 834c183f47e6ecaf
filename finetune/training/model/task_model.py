"""The encoder with a task's head, and the loss of each objective.

Shape letters: T tokens, S windows, E examples, R query positions (or pooled windows), C outputs, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.tasks.base import Head, Objective, Task
from finetune.training.model.batches import LabeledBatch
from pretrain.checkpoint.layouts import HeadDropout, TaskHead
from pretrain.checkpoint.released import ReleasedModel
from pretrain.config import ModelConfig
from pretrain.model.block import activation_function, norm_function
from pretrain.model.encoder import Encoder
from pretrain.model.heads import pool as pool_tokens
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.hash_rng import hash_dropout
from pretrain.model.norms import get_norm
from pretrain.model.parameters import Parameter, linear_parameters

_NO_DROPOUT = HeadDropout()
_BEFORE_OUT, _BEFORE_DENSE = 3, 4  # indices of the random streams of dropout; the encoder uses lower indices


class Output(NamedTuple):
    """The output of `TaskModel`."""

    loss: Tensor  # fp32 scalar: weighted sum over query positions, examples or windows
    logits: Tensor  # fp32 [R, C]


class TaskModel(Encoder):
    """An encoder with one task head. The head computes in fp32 for every precision of the encoder.

    bf16 has 8 significant bits, so the outputs of a regression would take only a dozen distinct values.

    Args:
        shape: sizes and dropout of the encoder.
        vocabulary_size: number of word embeddings.
        head: kind of input that gets a prediction: a sequence, tokens or spans.
        objective: what the head predicts, which determines the loss.
        outputs: number of outputs, C.
        head_layers: the family's layers between the encoder and the output layer.
        compile, activation_checkpointing: as `Encoder`.
    """

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        head: Head,
        objective: Objective,
        outputs: int,
        head_layers: TaskHead,
        *,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(shape, vocabulary_size, compile=compile, activation_checkpointing=activation_checkpointing)
        self.embeddings.tied = False
        self.objective, self.loss = objective, LOSSES[head, objective]
        self.pooling = head_layers.pooling if head == "sequence" else "cls"
        self.reads_all_tokens = head == "spans" or self.pooling != "cls"
        self.head = OutputHead(shape, outputs, head_layers)

    @classmethod
    def of(cls, task: Task[Any], released: ReleasedModel, **options: bool) -> TaskModel:
        """Create the model of a task with the shape of a checkpoint; `options` are passed on to `Encoder`."""
        layers, vocabulary_size = released.task_head(task.head), released.vocabulary_size
        return cls(released.model, vocabulary_size, task.head, task.objective, task.outputs, layers, **options)

    def forward(self, batch: LabeledBatch) -> Output:
        """Compute loss and logits of one micro-batch."""
        logits_RC = self.head.logits(self._features(batch))
        return Output(self.loss(logits_RC, batch), logits_RC)

    def features(self, batch: LabeledBatch) -> Tensor:
        """Return the input of the output layer, fp32 [R, H], without an autograd graph."""
        with torch.no_grad():
            return self._features(batch).float()

    def _features(self, batch: LabeledBatch) -> Tensor:
        hidden_RH = self.encode(batch, None if self.reads_all_tokens else batch.query_positions)
        keys_R = batch.token_keys if self.pooling == "late" else batch.token_keys[batch.query_positions]
        return self.head(hidden_RH, keys_R, None if self.pooling == "cls" else batch.cu_seqlens)


class OutputHead(nn.Module):
    """A task's head: the family's layers, then a linear output layer, for each query position or pooled window."""

    # Also norm_weight [H] and norm_bias [H] if the family has them.
    dense_weight: nn.Parameter  # [H, H]
    dense_bias: nn.Parameter
    out_weight: nn.Parameter  # [C, H]
    out_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, outputs: int, layers: TaskHead) -> None:
        super().__init__()
        self.layers, self.eps = layers, shape.layer_norm_eps
        self.norm_kinds = tuple(get_norm(layers.norm).parameters) if layers.norm else ()
        create_parameters(self, head_parameters(shape, outputs, layers), shape.init_std)

    def forward(self, hidden_RH: Tensor, keys_R: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the input of the output layer, [R, H].

        Args:
            hidden_RH: last hidden states; of all tokens if `cu_seqlens` is given.
            keys_R: int32, dropout seeds: one for each vector to which dropout is applied.
            cu_seqlens: int32 [S + 1], the bounds of the windows; if given, windows are pooled to [S, H].
        """
        dense_dropout, out_dropout = self.layers.dropout if self.training else _NO_DROPOUT
        if cu_seqlens is not None and self.layers.pooling != "late":
            hidden_RH, cu_seqlens = _POOL[self.layers.pooling](hidden_RH, cu_seqlens), None
        hidden_RH = hash_dropout(hidden_RH, keys_R, _BEFORE_DENSE, dense_dropout)
        if self.layers.activation:
            bias = self.dense_bias if self.layers.bias else None
            hidden_RH = activation_function(self.layers.activation)(_linear_fp32(hidden_RH, self.dense_weight, bias))
        if self.norm_kinds:
            weights = (getattr(self, f"norm_{kind}").float() for kind in self.norm_kinds)
            hidden_RH = norm_function(self.layers.norm)(hidden_RH, *weights, eps=self.eps)
        hidden_RH = hash_dropout(hidden_RH, keys_R, _BEFORE_OUT, out_dropout)
        if cu_seqlens is not None:
            hidden_RH = window_means(hidden_RH, cu_seqlens)
        return hidden_RH

    def logits(self, features_RH: Tensor) -> Tensor:
        """Apply the output layer to the result of `forward`; return the logits, [R, C]."""
        return _linear_fp32(features_RH, self.out_weight, self.out_bias)


def head_parameters(shape: ModelConfig, outputs: int, layers: TaskHead) -> tuple[Parameter, ...]:
    """Return the specifications of the parameters of `OutputHead`."""
    hidden = shape.hidden
    norm = get_norm(layers.norm).parameters if layers.norm else {}
    return (
        *(linear_parameters("dense", hidden, hidden, bias=layers.bias) if layers.activation else ()),
        *(Parameter(f"norm_{kind}", (hidden,), initial) for kind, initial in norm.items()),
        *linear_parameters("out", outputs, hidden),
    )


def window_means(hidden_TH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean over the tokens of each window, fp32 [S, H]."""
    lengths_S = cu_seqlens.diff().long()
    windows_S = torch.arange(len(lengths_S), device=hidden_TH.device)
    # Without output_size, the host would wait for the device to compute it.
    window_T = windows_S.repeat_interleave(lengths_S, output_size=len(hidden_TH))
    hidden_TH = hidden_TH.float()
    sums_SH = hidden_TH.new_zeros(len(lengths_S), hidden_TH.shape[1]).index_add(0, window_T, hidden_TH)
    return sums_SH / lengths_S[:, None]


def window_maxima(hidden_TH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the maximum over the tokens of each window, fp32 [S, H]."""
    return pool_tokens(hidden_TH.float(), cu_seqlens, "max")


_POOL = {"mean": window_means, "max": window_maxima}


def _linear_fp32(hidden_RH: Tensor, weight_CH: Tensor, bias_C: Tensor | None) -> Tensor:
    """Apply a linear layer in fp32; return [R, C]."""
    return F.linear(hidden_RH.float(), weight_CH.float(), None if bias_C is None else bias_C.float())


def pool_windows(logits_RC: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each example, (mean logits of its windows [E, C], labels [E] or [E, C], weight [E])."""
    example_R = batch.example_of_window[batch.window_of_query]
    num_examples = batch.examples
    num_windows_E = logits_RC.new_zeros(num_examples).index_add(0, example_R, logits_RC.new_ones(len(example_R)))
    sums_EC = logits_RC.new_zeros(num_examples, logits_RC.shape[1]).index_add(0, example_R, logits_RC)
    labels_E = batch.labels.new_zeros(num_examples, *batch.labels.shape[1:])
    labels_E[example_R] = batch.labels  # all windows of an example have the same labels
    weights_E = batch.weights.new_zeros(num_examples).index_add(0, example_R, batch.weights)
    return sums_EC / num_windows_E[:, None], labels_E, weights_E


def class_loss(logits_RC: Tensor, batch: LabeledBatch) -> Tensor:
    """Return the weighted sum of the cross-entropies at all query positions, in nats, fp32 scalar."""
    return (F.cross_entropy(logits_RC, batch.labels.long(), reduction="none") * batch.weights).sum()


def pooled_class_loss(logits_RC: Tensor, batch: LabeledBatch) -> Tensor:
    """Compute `class_loss` on the mean logits of each example's windows."""
    logits_EC, labels_E, weights_E = pool_windows(logits_RC, batch)
    targets = labels_E if labels_E.is_floating_point() else labels_E.long()
    return (F.cross_entropy(logits_EC, targets, reduction="none") * weights_E).sum()


def labels_loss(logits_RC: Tensor, batch: LabeledBatch) -> Tensor:
    """Return the weighted sum over examples of the mean binary cross-entropy of C labels, in nats, fp32 scalar."""
    logits_EC, labels_EC, weights_E = pool_windows(logits_RC, batch)
    true_EC = labels_EC > 0
    weight_EC = torch.where(true_EC, labels_EC, 1.0)
    losses_EC = F.binary_cross_entropy_with_logits(logits_EC, true_EC.float(), pos_weight=weight_EC, reduction="none")
    return (losses_EC.mean(1) * weights_E).sum()


def value_loss(logits_RC: Tensor, batch: LabeledBatch) -> Tensor:
    """Return the sum over examples of the weighted squared error, fp32 scalar; logits fp32 [R, 1]."""
    values_E1, labels_E, weights_E = pool_windows(logits_RC, batch)
    return ((values_E1[:, 0] - labels_E.float()).square() * weights_E).sum()


def span_loss(logits_R2: Tensor, batch: LabeledBatch) -> Tensor:
    """Return the weighted sum over windows of the mean cross-entropy of start and end (softmax over the tokens)."""
    starts = batch.cu_seqlens[:-1].long()  # every token of a window is a query position
    num_windows = len(starts)
    maxima_S2 = logits_R2.detach().new_full((num_windows, 2), -torch.inf)
    index_R2 = batch.window_of_query[:, None].expand(-1, 2)
    maxima_S2 = maxima_S2.scatter_reduce(0, index_R2, logits_R2.detach(), "amax")
    shifted_R2 = logits_R2 - maxima_S2[batch.window_of_query]
    sums_S2 = shifted_R2.new_zeros(num_windows, 2).index_add(0, batch.window_of_query, shifted_R2.exp())
    log_probabilities_R2 = shifted_R2 - sums_S2.log()[batch.window_of_query]
    losses_S2 = -torch.zeros_like(sums_S2).index_add(0, batch.window_of_query, log_probabilities_R2 * batch.labels)
    return (losses_S2.mean(1) * batch.weights[starts]).sum()


LOSSES: dict[tuple[Head, Objective], Callable[[Tensor, LabeledBatch], Tensor]] = {
    ("sequence", "classes"): pooled_class_loss,
    ("sequence", "labels"): labels_loss,
    ("sequence", "value"): value_loss,
    ("tokens", "classes"): class_loss,
    ("spans", "span"): span_loss,
}
