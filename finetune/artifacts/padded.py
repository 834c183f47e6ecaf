"""A fine-tuned model as a plain module over padded batches, for other runtimes: no dropout, no custom ops.

Shape letters: B sequences padded to L tokens, H hidden width, C outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.tasks.base import Head
from pretrain.checkpoint.released import ReleasedModel
from pretrain.model.block import activation_function, norm_function
from pretrain.model.norms import get_norm
from pretrain.model.padded import PaddedEncoder, frozen_module


class PaddedModel(PaddedEncoder):
    """Computes the same logits as `finetune.training.model.task_model.TaskModel` from the same weights.

    Padding, where `attention_mask` is 0, is on the right.

    Args:
        released: the weights of encoder and head, and the model family.
        head: the kind of head.
    """

    def __init__(self, released: ReleasedModel, head: Head) -> None:
        super().__init__(released.model, released.backbone)
        self.head = head
        self.has_token_types = released.token_types > 1
        self.head_layers = released.task_head(head)
        self.out = frozen_module(released.head, "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of `forward`'s inputs, in order."""
        return ("input_ids", "attention_mask", *(("token_type_ids",) if self.has_token_types else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of `forward`'s outputs, in order."""
        return ("start_logits", "end_logits") if self.head == "spans" else ("logits",)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return logits from inputs int64 [B, L]: [B, C] (sequence), [B, L, C] (tokens) or two of [B, L] (spans)."""
        hidden_BLH = self.encode(input_ids, attention_mask, token_type_ids)
        if self.head != "sequence":
            logits_BLC = self._apply_output(self._apply_layers(hidden_BLH))
            return logits_BLC.unbind(-1) if self.head == "spans" else (logits_BLC,)
        pooling = self.head_layers.pooling
        if pooling == "late":  # the layers are applied to each token, and the results are averaged
            return (self._apply_output(_mean(self._apply_layers(hidden_BLH), attention_mask)),)
        pooled_BH = hidden_BLH[:, 0] if pooling == "cls" else _POOLING_FUNCTIONS[pooling](hidden_BLH, attention_mask)
        return (self._apply_output(self._apply_layers(pooled_BH)),)

    def _apply_layers(self, hidden: Tensor) -> Tensor:
        """Apply the head's layers that precede the output layer to [..., H]; they depend on the model family."""
        layers, parameters = self.head_layers, self.out
        if layers.activation:
            hidden = F.linear(hidden, parameters.dense_weight, parameters.dense_bias if layers.bias else None)
            hidden = activation_function(layers.activation)(hidden)
        if layers.norm:
            weights = (getattr(parameters, f"norm_{kind}") for kind in get_norm(layers.norm).parameters)
            hidden = norm_function(layers.norm)(hidden, *weights, eps=self.shape.layer_norm_eps)
        return hidden

    def _apply_output(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.out.out_weight, self.out.out_bias)


def _mean(hidden_BLH: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens, ignoring padding, [B, H]."""
    weights_BL1 = attention_mask[..., None].to(hidden_BLH.dtype)
    return (hidden_BLH * weights_BL1).sum(1) / weights_BL1.sum(1)


def _maximum(hidden_BLH: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the maximum over each sequence's tokens, ignoring padding, [B, H]."""
    lowest = torch.finfo(hidden_BLH.dtype).min
    return torch.where(attention_mask[..., None] == 0, lowest, hidden_BLH).amax(1)


_POOLING_FUNCTIONS = {"mean": _mean, "max": _maximum}
