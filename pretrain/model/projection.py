"""Projections that BERT lacks: rotary queries and keys, shared heads of keys and values, and distance embeddings.

Shape letters: T tokens (the padded encoder has sequences and tokens), N heads of width D, G heads of keys and values,
H = N * D, P distance embeddings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.positions import Rotation, rotate


class RelativeProjection(NamedTuple):
    """The projections of the distance embeddings: which terms exist, and weights unless the tokens' are used."""

    terms: str  # as `ModelConfig.relative_terms`
    key: tuple[Tensor, Tensor | None] | None = None  # separate weight [H, H] and bias for keys
    query: tuple[Tensor, Tensor | None] | None = None  # separate weight and bias for queries

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> RelativeProjection:
        """Return the projection of a module with the parameters of `parameters.layer_parameters`."""
        separate = (
            (layer_weight, getattr(layer, f"{name}_bias", None))
            if (layer_weight := getattr(layer, f"{name}_weight", None)) is not None
            else None
            for name in ("position_key", "position_query")
        )
        return cls(model.relative_terms, *separate)


QKV_AXES = "M", "", "M"  # axes of products, biases and rotation of `form_qkv`, for `compile.maybe_compile`


def form_qkv(
    products: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    rotation: Rotation | None,
    heads: int,
) -> Tensor:
    """Return [T, 3H]: query, key and value of every head, in the dtype of the products.

    Args:
        products: hidden states times the weights of `attention.ProjectionWeights`: [T, 3H], or [T, H] and [T, 2GD].
        biases: the bias of each product, or None.
        rotation: the rotation of queries and keys; None leaves them unrotated.
        heads: N.
    """
    # Rotate in fp32 in every precision, as transformers does (modeling_modernbert.py, apply_rotary_pos_emb).
    sums = [x.float() if bias is None else x.float() + bias.float() for x, bias in zip(products, biases, strict=True)]
    if len(products) == 1:
        # One expression, for the same reason as in `rotate`.
        qkv_TND = sums[0].unflatten(-1, (3 * heads, -1))
        if rotation is not None:
            is_rotated = torch.arange(3 * heads, device=qkv_TND.device)[:, None] < 2 * heads
            qkv_TND = torch.where(is_rotated, rotate(qkv_TND, rotation), qkv_TND)
        return qkv_TND.to(products[0].dtype).flatten(-2)
    q_TND = sums[0].unflatten(-1, (heads, -1))
    k_TND, v_TND = sums[1].unflatten(-1, (2, -1, q_TND.shape[-1])).unbind(-3)
    if rotation is not None:
        q_TND, k_TND = rotate(q_TND, rotation), rotate(k_TND, rotation)
    qkv = (q_TND, *(_repeat_heads(x, heads) for x in (k_TND, v_TND)))
    return torch.cat([x.to(products[0].dtype).flatten(-2) for x in qkv], dim=-1)


def project_distances(
    embeddings_PH: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    relative: RelativeProjection,
    heads: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Project the distance embeddings to (keys, queries), each [N, P, D], or None if no term uses it.

    Uses the weights and biases of the tokens, or separate ones (transformers modeling_deberta_v2.py,
    disentangled_attention_bias, share_att_key).
    """
    hidden, last = embeddings_PH.shape[1], len(weights) - 1
    start = hidden * (1 - last)  # first row of the keys in the last weight, which is qkv or kv
    key_rows = slice(start, start + (weights[last].shape[0] - start) // 2)
    projected: list[Tensor | None] = []
    for term, i, rows, separate in (("c2p", last, key_rows, relative.key), ("p2c", 0, slice(hidden), relative.query)):
        if relative.terms not in (term, "both"):
            projected.append(None)
            continue
        bias = biases[i]
        weight, bias = separate or (weights[i][rows], None if bias is None else bias[rows])
        x_PND = F.linear(embeddings_PH, weight, bias).unflatten(-1, (-1, hidden // heads))
        projected.append(_repeat_heads(x_PND, heads).transpose(0, 1).contiguous())
    return projected[0], projected[1]


def _repeat_heads(x_TGD: Tensor, heads: int) -> Tensor:
    """[T, G, D] -> [T, N, D]: repeat each head for the consecutive query heads that share it."""
    kv_heads = x_TGD.shape[-2]
    if kv_heads == heads:
        return x_TGD
    return x_TGD.repeat_interleave(heads // kv_heads, dim=-2)
