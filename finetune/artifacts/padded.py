"""A fine-tuned model as a plain module over padded batches, for other runtimes: no dropout, no custom ops.

Shape letters: B sequences padded to L tokens, H hidden width, C outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from finetune.tasks.base import Head
from pretrain.checkpoint.layouts import HEAD_ACTIVATION
from pretrain.checkpoint.released import Released
from pretrain.model.activations import get_activation
from pretrain.model.padded import PaddedEncoder, constants


class PaddedModel(PaddedEncoder):
    """Computes the same logits as `finetune.model.task_model.TaskModel` from the same weights.

    Padding, where `attention_mask` is 0, is on the right: positions count from the left.

    Args:
        released: weights of encoder and head, and the family.
        head: kind of head.
    """

    def __init__(self, released: Released, head: Head) -> None:
        super().__init__(released.model, released.backbone)
        self.head = head
        self.token_types = released.token_types > 1
        self.activation = get_activation(HEAD_ACTIVATION[released.family]).function
        self.out = constants(released.head, "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of `forward`'s inputs, in order."""
        return ("input_ids", "attention_mask", *(("token_type_ids",) if self.token_types else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of `forward`'s outputs, in order."""
        return ("start_logits", "end_logits") if self.head == "spans" else ("logits",)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Logits from int64 [B, L] each: [B, C] for sequences, [B, L, C] for tokens, two [B, L] for spans."""
        hidden_BLH = self.encode(input_ids, attention_mask, token_type_ids)
        if self.head == "sequence":
            pooled_BH = F.linear(hidden_BLH[:, 0], self.out.dense_weight, self.out.dense_bias)
            return (F.linear(self.activation(pooled_BH), self.out.out_weight, self.out.out_bias),)
        logits_BLC = F.linear(hidden_BLH, self.out.out_weight, self.out.out_bias)
        return logits_BLC.unbind(-1) if self.head == "spans" else (logits_BLC,)
