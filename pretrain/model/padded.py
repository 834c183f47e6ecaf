"""The encoder as a plain module over padded batches, for other runtimes: no dropout, no training, no custom operator.

It computes the same function as `encoder.Encoder` from the same parameters, with the same `block` functions. Shape
letters: B sequences padded to L tokens, E width of the embeddings, H hidden width, N heads of width D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, EmbeddingWeights, LayerWeights, after_attention, embed


class PaddedEncoder(nn.Module):
    """The backbone over padded batches, fp32.

    Args:
        shape: as for `encoder.Encoder`.
        state: the state of an `Encoder`; parameters of heads in it are ignored.
    """

    def __init__(self, shape: ModelConfig, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shape, self.functions = shape, BlockFunctions.of(shape)
        self.embeddings = constants(state, "embeddings.")
        self.layers = nn.ModuleList(constants(state, f"layers.{number}.") for number in range(shape.layers))

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        attention: list[Tensor] | None = None,
    ) -> Tensor:
        """Last hidden states [B, L, H].

        Args:
            input_ids: int64 [B, L].
            attention_mask: int64 [B, L], 0 at padding, which follows a sequence's tokens.
            token_type_ids: int64 [B, L]; without them every token has type 0.
            attention: gets the attention weights of each layer appended, [B, N, L, L].
        """
        hidden_BLH = self._embed(input_ids, token_type_ids)
        # Not -inf: a sequence that is all padding would become NaN.
        lowest = torch.finfo(hidden_BLH.dtype).min
        mask_B11L = (1 - attention_mask[:, None, None].to(hidden_BLH.dtype)) * lowest
        for layer in self.layers:
            context_BLH = self._attend(layer, hidden_BLH, mask_B11L, attention)
            weights = LayerWeights.of(layer, self.shape)
            hidden_BLH = after_attention(context_BLH, hidden_BLH, None, weights, self.functions, 0.0)
        return hidden_BLH

    def _embed(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        own = self.embeddings
        positions_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        words_BLE, positions_LE = F.embedding(input_ids, own.word), F.embedding(positions_L, own.position)
        weights = EmbeddingWeights.of(own, self.shape)
        embedded_BLE = embed(words_BLE, positions_LE, token_type_ids, None, weights, self.functions, 0.0)
        if self.shape.embedding in (0, self.shape.hidden):
            return embedded_BLE
        return F.linear(embedded_BLE, own.project_weight, own.project_bias)

    def _attend(self, layer: Any, hidden_BLH: Tensor, mask_B11L: Tensor, attention: list[Tensor] | None) -> Tensor:
        qkv_BL3ND = F.linear(hidden_BLH, layer.qkv_weight, layer.qkv_bias).unflatten(-1, (3, self.shape.heads, -1))
        q_BNLD, k_BNLD, v_BNLD = qkv_BL3ND.transpose(1, 3).unbind(2)
        scores_BNLL = q_BNLD @ k_BNLD.mT / math.sqrt(q_BNLD.shape[-1]) + mask_B11L
        weights_BNLL = scores_BNLL.softmax(-1)
        if attention is not None:
            attention.append(weights_BNLL)
        return (weights_BNLL @ v_BNLD).transpose(1, 2).flatten(2)


def constants(state: Mapping[str, Tensor], prefix: str) -> Any:
    """A module with the tensors of `state` whose names start with `prefix`, without that prefix; no gradients."""
    module = nn.Module()
    for name, tensor in state.items():
        if name.startswith(prefix):
            module.register_parameter(name.removeprefix(prefix), nn.Parameter(tensor, requires_grad=False))
    return module
