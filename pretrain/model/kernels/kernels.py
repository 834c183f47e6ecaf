"""The operations between the matmuls of the grouped attention: plain functions, each fused by torch.compile.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D; inside a group of G
units (sequences, or chunks of them) L tokens and Q queries each, B = G * N.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.model.compile import program
from pretrain.model.kernels.hash_rng import ALONG, keep_mask
from pretrain.model.positions import join_pairs, rotate_pairs, split_pairs


class Kernels(NamedTuple):
    """The functions of this file, compiled or not."""

    to_heads: Callable[..., Tensor]
    grad_to_heads: Callable[..., tuple[Tensor, Tensor]]
    to_tokens: Callable[..., Tensor]
    softmax: Callable[..., tuple[Tensor, Tensor]]
    softmax_backward: Callable[..., tuple[Tensor, Tensor]]


_TERMS = ("BQ", "BQ", "BQL")


@functools.cache
def kernels(fused: bool) -> Kernels:
    """The functions, compiled if `fused`."""
    return Kernels(
        to_heads=program(heads_kernel, fused, ("T", "", "GL", "T", "T")),
        grad_to_heads=program(_grad_to_heads, fused, ("T", "T", "GQ", "GQ")),
        to_tokens=program(_to_tokens, fused, ("BL", "T", "T", "", "T", "T")),
        softmax=program(weights_kernel, fused, ("BQL", "BL", "", "BQ", "", *_TERMS)),
        softmax_backward=program(gradients_kernel, fused, ("BQL", "BQL", "BQ", "BQ", "BL", "", "BQ", "", *_TERMS)),
    )


def heads_first(x_GQN: Tensor) -> Tensor:
    """[G, Q, N, ...] -> [B, Q, ...], with the strides of its shape also if Q is 1."""
    return x_GQN.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(0, 1)


def heads_kernel(
    x_TND: Tensor,
    bias_ND: Tensor | None,
    rows_GL: Tensor,
    cos_TK: Tensor | None = None,
    sin_TK: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """[T, N, D] -> [B, L, D] of one group's rows, with bias and rotation if given."""
    if cos_TK is None or sin_TK is None:
        x_GLND = _add_bias(x_TND[rows_GL], bias_ND)
        return x_GLND.to(x_TND.dtype).transpose(1, 2).flatten(0, 1).contiguous()
    # The halves are gathered separately: one vectorized loop, where a split after the gather makes three.
    biases = (None, None) if bias_ND is None else split_pairs(bias_ND, interleaved=interleaved)
    first_GLNK, second_GLNK = (
        _add_bias(x_TNK[rows_GL], bias_NK).float()
        for x_TNK, bias_NK in zip(split_pairs(x_TND, interleaved=interleaved), biases, strict=True)
    )
    turn_GL1K = cos_TK[rows_GL][:, :, None], sin_TK[rows_GL][:, :, None]
    return (
        _joined(rotate_pairs(first_GLNK, second_GLNK, *turn_GL1K), x_TND.dtype, interleaved)
        .transpose(1, 2)
        .flatten(0, 1)
        .contiguous()
    )


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """In fp32 if there is a bias."""
    return x if bias is None else x.float() + bias.float()


def _joined(pairs: tuple[Tensor, Tensor], dtype: torch.dtype, interleaved: bool) -> Tensor:
    # Rounded before they are joined: what is joined is written to memory.
    first, second = pairs
    return join_pairs(first.to(dtype), second.to(dtype), interleaved=interleaved)


def _grad_to_heads(
    grad_RH: Tensor, context_RH: Tensor, queries_GQ: Tensor, real_GQ: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """The context's gradient [B, Q, D] and its product with the context, fp32 [B, Q]; both zero at padding.

    Padding holds a copy of another query: without a product of 0 it would reach the keys' gradient.
    """
    grad_GQH = torch.where(real_GQ[..., None], grad_RH[queries_GQ], 0.0)
    split = (heads, grad_RH.shape[1] // heads)
    grad_GQND, context_GQND = (x.unflatten(-1, split) for x in (grad_GQH, context_RH[queries_GQ]))
    delta_GQN = (grad_GQND.float() * context_GQND.float()).sum(-1)
    return heads_first(grad_GQND), heads_first(delta_GQN)


def _to_tokens(
    x_BLD: Tensor,
    place_T: Tensor,
    other_T: Tensor | None,
    heads: int,
    cos_TK: Tensor | None = None,
    sin_TK: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """[B, L, D] -> [group's tokens, N, D], rotated back if there is a rotation.

    `other_T` is a second row to add, or -1; None if no token has one.
    """
    x_PND = x_BLD.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
    if cos_TK is None or sin_TK is None:
        return _at_places(x_PND, place_T, other_T).to(x_BLD.dtype)
    first_TNK, second_TNK = (
        _at_places(x_PNK, place_T, other_T).float() for x_PNK in split_pairs(x_PND, interleaved=interleaved)
    )
    rotated = rotate_pairs(first_TNK, second_TNK, cos_TK[:, None], -sin_TK[:, None])
    return _joined(rotated, x_BLD.dtype, interleaved)


def _at_places(x_P: Tensor, place_T: Tensor, other_T: Tensor | None) -> Tensor:
    """Rows of `x_P` [places, ...]; sums of two are fp32."""
    if other_T is None:
        return x_P[place_T]
    other_T11 = other_T[:, None, None]
    return x_P[place_T].float() + torch.where(other_T11 >= 0, x_P[other_T.clamp_min(0)].float(), 0.0)


def _dropout_factor(keys_BQ: Tensor, length: int, dropout: float) -> Tensor:
    """fp32 [B, Q, L]: 0 where dropped, else 1 / (1 - dropout)."""
    along_L = torch.arange(length, device=keys_BQ.device, dtype=torch.int32) * ALONG
    return keep_mask(keys_BQ[..., None] + along_L, dropout) * (1 / (1 - dropout))


def _finish_scores(
    scores_BQL: Tensor,
    mask_BL: Tensor,
    scale: float,
    first_BQ: Tensor | None,
    last_BQ: Tensor | None,
    bias_BQL: Tensor | None,
) -> Tensor:
    """fp32 [B, Q, L]: scaled products with their `terms.ScoreTerms`, -inf where a query does not attend."""
    x_BQL = scores_BQL.float() * scale + mask_BL[:, None]
    if bias_BQL is not None:
        x_BQL = x_BQL + bias_BQL
    if first_BQ is None or last_BQ is None:
        return x_BQL
    key_L = torch.arange(scores_BQL.shape[-1], device=scores_BQL.device, dtype=torch.int32)
    sees_BQL = (key_L >= first_BQ[..., None]) & (key_L <= last_BQ[..., None])
    return torch.where(sees_BQL, x_BQL, -math.inf)


def weights_kernel(
    scores_BQL: Tensor,
    mask_BL: Tensor,
    scale: float,
    keys_BQ: Tensor | None,
    dropout: float,
    first_BQ: Tensor | None = None,
    last_BQ: Tensor | None = None,
    bias_BQL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(attention weights after dropout [B, Q, L], log-sum-exp of the rows fp32 [B, Q])."""
    x_BQL = _finish_scores(scores_BQL, mask_BL, scale, first_BQ, last_BQ, bias_BQL)
    top_BQ1 = x_BQL.amax(-1, keepdim=True)
    weights_BQL = (x_BQL - top_BQ1).exp()
    total_BQ1 = weights_BQL.sum(-1, keepdim=True)
    weights_BQL = weights_BQL * total_BQ1.reciprocal()
    if keys_BQ is not None:
        weights_BQL = weights_BQL * _dropout_factor(keys_BQ, scores_BQL.shape[-1], dropout)
    return weights_BQL.to(scores_BQL.dtype), (top_BQ1 + total_BQ1.log()).squeeze(-1)


def gradients_kernel(
    scores_BQL: Tensor,
    grad_BQL: Tensor,
    lse_BQ: Tensor,
    delta_BQ: Tensor,
    mask_BL: Tensor,
    scale: float,
    keys_BQ: Tensor | None,
    dropout: float,
    first_BQ: Tensor | None = None,
    last_BQ: Tensor | None = None,
    bias_BQL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights after dropout, gradient of the products), both [B, Q, L]; `grad_BQL` is of the dropped-out weights."""
    x_BQL = _finish_scores(scores_BQL, mask_BL, scale, first_BQ, last_BQ, bias_BQL)
    weights_BQL = (x_BQL - lse_BQ[..., None]).exp()
    dropped_BQL, grad = weights_BQL, grad_BQL.float()
    if keys_BQ is not None:
        factor_BQL = _dropout_factor(keys_BQ, scores_BQL.shape[-1], dropout)
        dropped_BQL, grad = weights_BQL * factor_BQL, grad * factor_BQL
    grad_scores_BQL = weights_BQL * (grad - delta_BQ[..., None]) * scale
    return dropped_BQL.to(scores_BQL.dtype), grad_scores_BQL.to(scores_BQL.dtype)
