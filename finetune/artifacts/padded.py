"""A fine-tuned model as a plain module over padded batches, for other runtimes: no dropout, no training, no custom op.

Shape letters: B sequences padded to L tokens, H hidden width, N heads of width D, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.model.task_model import ACTIVATIONS
from finetune.tasks.base import Head
from pretrain.checkpoint.layouts import HEAD_ACTIVATION
from pretrain.checkpoint.released import Released


class PaddedModel(nn.Module):
    """The same function as `finetune.model.task_model.TaskModel` without its loss, from the same state.

    Padding is where `attention_mask` is 0. It comes after a sequence's tokens, whose positions count from the left.

    Args:
        released: backbone, head and family.
        head: which head.
    """

    def __init__(self, released: Released, head: Head) -> None:
        super().__init__()
        shape = released.model
        self.head, self.heads, self.eps = head, shape.heads, shape.layer_norm_eps
        self.token_types = released.token_types > 1
        self.activation = ACTIVATIONS[HEAD_ACTIVATION[released.family]]
        self.embeddings = _module(released.backbone, "embeddings.")
        self.layers = nn.ModuleList(_module(released.backbone, f"layers.{number}.") for number in range(shape.layers))
        self.out = _module(released.head, "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what `forward` takes, in order."""
        return ("input_ids", "attention_mask", *(("token_type_ids",) if self.token_types else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what `forward` returns, in order."""
        return ("start_logits", "end_logits") if self.head == "spans" else ("logits",)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """int64 [B, L] each; [B, C] for sequences, [B, L, C] for tokens, start and end [B, L] for spans."""
        hidden_BLH = self._embed(input_ids, token_type_ids)
        # Not -inf: a sequence of nothing but padding would become NaN.
        lowest = torch.finfo(hidden_BLH.dtype).min
        mask_B11L = (1 - attention_mask[:, None, None].to(hidden_BLH.dtype)) * lowest
        for layer in self.layers:
            hidden_BLH = self._layer(layer, hidden_BLH, mask_B11L)
        if self.head == "sequence":
            pooled_BH = F.linear(hidden_BLH[:, 0], self.out.dense_weight, self.out.dense_bias)
            return (F.linear(self.activation(pooled_BH), self.out.out_weight, self.out.out_bias),)
        logits_BLC = F.linear(hidden_BLH, self.out.out_weight, self.out.out_bias)
        return logits_BLC.unbind(-1) if self.head == "spans" else (logits_BLC,)

    def _embed(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        own = self.embeddings
        positions_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        types = own.token_type[0] if token_type_ids is None else F.embedding(token_type_ids, own.token_type)
        embedded = F.embedding(input_ids, own.word) + F.embedding(positions_L, own.position) + types
        embedded = self._norm(embedded, own.norm_weight, own.norm_bias)
        if hasattr(own, "project_weight"):
            embedded = F.linear(embedded, own.project_weight, own.project_bias)
        return embedded

    def _layer(self, own: Any, hidden_BLH: Tensor, mask_B11L: Tensor) -> Tensor:
        qkv_BL3ND = F.linear(hidden_BLH, own.qkv_weight, own.qkv_bias).unflatten(-1, (3, self.heads, -1))
        q_BNLD, k_BNLD, v_BNLD = qkv_BL3ND.transpose(1, 3).unbind(2)
        scores_BNLL = q_BNLD @ k_BNLD.mT / math.sqrt(q_BNLD.shape[-1]) + mask_B11L
        context_BLH = (scores_BNLL.softmax(-1) @ v_BNLD).transpose(1, 2).flatten(2)
        attended_BLH = F.linear(context_BLH, own.attention_out_weight, own.attention_out_bias) + hidden_BLH
        attended_BLH = self._norm(attended_BLH, own.attention_norm_weight, own.attention_norm_bias)
        inner_BLF = F.gelu(F.linear(attended_BLH, own.ffn_in_weight, own.ffn_in_bias))
        output_BLH = F.linear(inner_BLF, own.ffn_out_weight, own.ffn_out_bias) + attended_BLH
        return self._norm(output_BLH, own.ffn_norm_weight, own.ffn_norm_bias)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def _module(state: Mapping[str, Tensor], prefix: str) -> Any:
    """The parameters of `state` whose names begin with `prefix`, under the rest of their names."""
    module = nn.Module()
    for name, tensor in state.items():
        if name.startswith(prefix):
            module.register_parameter(name.removeprefix(prefix), nn.Parameter(tensor, requires_grad=False))
    return module
