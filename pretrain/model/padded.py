"""The encoder as a plain module over padded batches, to export to other runtimes: no dropout, training or custom ops.

It computes the same function as `encoder.Encoder` from the same parameters, with the same `block` functions. Shape
letters: B sequences padded to L tokens, E width of the embeddings, H hidden width, N heads of width D.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.attention import ProjectionWeights
from pretrain.model.block import (
    BlockFunctions,
    EmbeddingWeights,
    LayerWeights,
    after_attention,
    apply_norm,
    embed,
    norm_weights,
)
from pretrain.model.positions import Rotation, relative_buckets, relative_row_indices, rotations, sinusoids
from pretrain.model.projection import form_qkv, project_distances


class PaddedEncoder(nn.Module):
    """The backbone over padded batches, fp32.

    Args:
        shape: as for `encoder.Encoder`.
        state: the state dict of an `Encoder`; any parameters of heads are ignored.
    """

    def __init__(self, shape: ModelConfig, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shape, self.functions = shape, BlockFunctions.of(shape)
        self.embeddings = frozen_module(state, "embeddings.")
        self.relative, self.final = frozen_module(state, "relative."), frozen_module(state, "final.")
        self.layers = nn.ModuleList(frozen_module(state, f"layers.{index}.") for index in range(shape.layers))

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        attention: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, L, H].

        Args:
            input_ids: int64 [B, L].
            attention_mask: int64 [B, L], 0 at padding, which follows a sequence's tokens.
            token_type_ids: int64 [B, L]; without them every token has type 0.
            attention: a list to which each applied layer appends its attention weights, [B, N, L, L].
        """
        shape = self.shape
        hidden_BLH = self._embed(input_ids, token_type_ids)
        positions_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        masks, angles = self._masks(attention_mask, positions_L, hidden_BLH.dtype), rotations(shape, positions_L)
        for index in [*range(shape.layers)] * shape.recursions:  # BERT applies each layer once
            layer, normed_BLH = self.layers[index], hidden_BLH
            if shape.norm_placement == "pre" and shape.has_attention_norm(index):
                normed_BLH = apply_norm(
                    hidden_BLH, norm_weights(layer, "attention_norm", self.functions), self.functions
                )
            rotation = angles.get(shape.rotary_base_of(index))
            context_BLH = self._attend(layer, normed_BLH, rotation, masks[shape.window(index)], attention)
            weights = LayerWeights.of(layer, self.functions)
            hidden_BLH = after_attention(context_BLH, hidden_BLH, None, weights, self.functions, 0.0)
        if shape.norm_placement == "post":
            return hidden_BLH
        return apply_norm(hidden_BLH, norm_weights(self.final, "norm", self.functions), self.functions)

    def _embed(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        embeddings = self.embeddings
        positions_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        words_BLE, positions_LE = F.embedding(input_ids, embeddings.word), None
        if self.shape.positions == "learned":
            positions_LE = F.embedding(positions_L, embeddings.position)
        elif self.shape.positions == "sinusoidal":
            positions_LE = sinusoids(positions_L, embeddings.word.shape[1])
        weights = EmbeddingWeights.of(embeddings, self.shape, self.functions)
        embedded_BLE = embed(words_BLE, positions_LE, token_type_ids, None, weights, self.functions, 0.0)
        if self.shape.embedding in (0, self.shape.hidden):
            return embedded_BLE
        return F.linear(embedded_BLE, embeddings.project_weight, embeddings.project_bias)

    def _masks(self, attention_mask: Tensor, positions_L: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the masks to add to the scores, by attention window; they broadcast to [B, N, L, L]."""
        # Not -inf: the softmax of a sequence of only padding would be NaN.
        lowest, shape = torch.finfo(dtype).min, self.shape
        mask = (1 - attention_mask[:, None, None].to(dtype)) * lowest
        if shape.positions == "relative":
            distance_LL = positions_L[None] - positions_L[:, None]
            buckets_LL = relative_buckets(distance_LL, shape.relative_buckets, shape.relative_max_distance)
            mask = mask + F.embedding(buckets_LL, self.relative.table).permute(2, 0, 1)
        masks = {0: mask}
        for window in {shape.window(index) for index in range(shape.layers)} - {0}:
            outside_LL = (positions_L[None] - positions_L[:, None]).abs() > window
            masks[window] = torch.where(outside_LL, lowest, mask)
        return masks

    def _attend(
        self, layer: Any, hidden_BLH: Tensor, rotation: Rotation | None, mask: Tensor, attention: list[Tensor] | None
    ) -> Tensor:
        """Return [B, L, H], the context of every token."""
        heads, projection = self.shape.heads, ProjectionWeights.of(layer, self.shape)
        products = tuple(F.linear(hidden_BLH, weight) for weight in projection.weights)
        qkv_BLX = form_qkv(products, projection.biases, rotation, heads)
        q_BNLD, k_BNLD, v_BNLD = qkv_BLX.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
        products_BNLL = q_BNLD @ k_BNLD.mT
        if projection.relative is not None:
            keys_NPD, queries_NPD = project_distances(
                self._distance_embeddings(), projection.weights, projection.biases, projection.relative, heads
            )
            products_BNLL = products_BNLL + self._distance_scores(keys_NPD, queries_NPD, q_BNLD, k_BNLD)
        scores_BNLL = products_BNLL / math.sqrt(q_BNLD.shape[-1] * self.shape.score_terms) + mask
        weights_BNLL = scores_BNLL.softmax(-1)
        if attention is not None:
            attention.append(weights_BNLL)
        return (weights_BNLL @ v_BNLD).transpose(1, 2).flatten(2)

    def _distance_embeddings(self) -> Tensor:
        """Return [P, H]: the distance embeddings, normalized if the model has `relative_norm`."""
        if not self.shape.relative_norm:
            return self.relative.table
        return apply_norm(self.relative.table, norm_weights(self.relative, "norm", self.functions), self.functions)

    def _distance_scores(
        self, keys_NPD: Tensor | None, queries_NPD: Tensor | None, q_BNLD: Tensor, k_BNLD: Tensor
    ) -> Tensor:
        """Return [B, N, L, L]: products of queries and keys with the projected embeddings of their distances."""
        positions_L = torch.arange(q_BNLD.shape[2], device=q_BNLD.device)
        row_LL = relative_row_indices(positions_L[:, None] - positions_L[None], self.shape)
        row_BNLL = row_LL.expand(*q_BNLD.shape[:2], -1, -1)
        terms = []
        if keys_NPD is not None:
            terms.append((q_BNLD @ keys_NPD.mT).gather(-1, row_BNLL))
        if queries_NPD is not None:
            terms.append((queries_NPD @ k_BNLD.mT).gather(-2, row_BNLL))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def frozen_module(state: Mapping[str, Tensor], prefix: str) -> Any:
    """Return a module with the tensors of `state` whose names start with `prefix`, which is removed; no gradients."""
    module = nn.Module()
    for name, tensor in state.items():
        if name.startswith(prefix):
            module.register_parameter(name.removeprefix(prefix), nn.Parameter(tensor, requires_grad=False))
    return module
