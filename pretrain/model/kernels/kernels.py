"""The operations between the matmuls of grouped attention: plain functions, each fused by torch.compile.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D, K = D / 2; inside a group
of G units (sequences, or chunks of them) L tokens and Q queries each, B = G * N, P = G * L slots for tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.model.compile import maybe_compile
from pretrain.model.kernels.hash_rng import COLUMN_STEP, keep_mask
from pretrain.model.positions import join_pairs, rotate_pairs, split_pairs


class Kernels(NamedTuple):
    """The functions of this file, compiled or not."""

    to_heads: Callable[..., Tensor]
    grad_to_heads: Callable[..., tuple[Tensor, Tensor]]
    to_tokens: Callable[..., Tensor]
    softmax: Callable[..., tuple[Tensor, Tensor]]
    softmax_backward: Callable[..., tuple[Tensor, Tensor]]


_ROW_AXES = ("BL", "", "BQ", "", "BQ", "BQ", "BQL")  # axes of mask, scale, seeds, dropout and `terms.ScoreTerms`


@functools.cache
def kernels(fused: bool) -> Kernels:
    """Return the functions, compiled if `fused`."""
    return Kernels(
        to_heads=maybe_compile(heads_kernel, fused, ("T", "", "GL", "T", "T")),
        grad_to_heads=maybe_compile(_grad_to_heads, fused, ("T", "T", "GQ", "GQ")),
        to_tokens=maybe_compile(_to_tokens, fused, ("BL", "T", "T", "", "T", "T")),
        softmax=maybe_compile(softmax_kernel, fused, ("BQL", *_ROW_AXES)),
        softmax_backward=maybe_compile(softmax_backward_kernel, fused, ("BQL", "BQL", "BQ", "BQ", *_ROW_AXES)),
    )


def heads_first(x_GQN: Tensor) -> Tensor:
    """[G, Q, N, ...] -> [B, Q, ...], with contiguous strides even if Q is 1."""
    return x_GQN.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(0, 1)


def heads_kernel(
    x_TND: Tensor,
    bias_ND: Tensor | None,
    tokens_GL: Tensor,
    cos_TK: Tensor | None = None,
    sin_TK: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Gather the tokens of one group, [T, N, D] -> [B, L, D], and apply bias and rotation if there are any."""
    if cos_TK is None or sin_TK is None:
        x_GLND = _add_bias(x_TND[tokens_GL], bias_ND)
        return x_GLND.to(x_TND.dtype).transpose(1, 2).flatten(0, 1).contiguous()
    # The halves are gathered separately, in one vectorized loop: a split after the gather would need three loops.
    biases = (None, None) if bias_ND is None else split_pairs(bias_ND, interleaved=interleaved)
    first_GLNK, second_GLNK = (
        _add_bias(x_TNK[tokens_GL], bias_NK).float()
        for x_TNK, bias_NK in zip(split_pairs(x_TND, interleaved=interleaved), biases, strict=True)
    )
    cos_sin_GL1K = cos_TK[tokens_GL][:, :, None], sin_TK[tokens_GL][:, :, None]
    return (
        _join_rounded(rotate_pairs(first_GLNK, second_GLNK, *cos_sin_GL1K), x_TND.dtype, interleaved)
        .transpose(1, 2)
        .flatten(0, 1)
        .contiguous()
    )


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias in fp32, if there is one."""
    return x if bias is None else x.float() + bias.float()


def _join_rounded(pairs: tuple[Tensor, Tensor], dtype: torch.dtype, interleaved: bool) -> Tensor:
    # Round before the join, because compiled code writes the join's inputs to memory.
    first, second = pairs
    return join_pairs(first.to(dtype), second.to(dtype), interleaved=interleaved)


def _grad_to_heads(
    grad_RH: Tensor, context_RH: Tensor, queries_GQ: Tensor, valid_GQ: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the context's gradient [B, Q, D] and its product with the context, fp32 [B, Q]; both zero at padding.

    Padding repeats another query, so its product must be 0, or it would change the keys' gradient.
    """
    grad_GQH = torch.where(valid_GQ[..., None], grad_RH[queries_GQ], 0.0)
    split = (heads, grad_RH.shape[1] // heads)
    grad_GQND, context_GQND = (x.unflatten(-1, split) for x in (grad_GQH, context_RH[queries_GQ]))
    delta_GQN = (grad_GQND.float() * context_GQND.float()).sum(-1)
    return heads_first(grad_GQND), heads_first(delta_GQN)


def _to_tokens(
    x_BLD: Tensor,
    slot_T: Tensor,
    second_slot_T: Tensor | None,
    heads: int,
    cos_TK: Tensor | None = None,
    sin_TK: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """[B, L, D] -> [tokens of the group, N, D]; inverts the rotation if there is one.

    The row in a token's second slot is added; `second_slot_T` is -1 for tokens without one, None if no token has one.
    """
    x_PND = x_BLD.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
    if cos_TK is None or sin_TK is None:
        return _gather_slots(x_PND, slot_T, second_slot_T).to(x_BLD.dtype)
    first_TNK, second_TNK = (
        _gather_slots(x_PNK, slot_T, second_slot_T).float() for x_PNK in split_pairs(x_PND, interleaved=interleaved)
    )
    rotated = rotate_pairs(first_TNK, second_TNK, cos_TK[:, None], -sin_TK[:, None])
    return _join_rounded(rotated, x_BLD.dtype, interleaved)


def _gather_slots(x_P: Tensor, slot_T: Tensor, second_slot_T: Tensor | None) -> Tensor:
    """Return the row of `x_P` [P, ...] at each token's slot, or the sum of the rows at its two slots, in fp32."""
    if second_slot_T is None:
        return x_P[slot_T]
    second_slot_T11 = second_slot_T[:, None, None]
    return x_P[slot_T].float() + torch.where(second_slot_T11 >= 0, x_P[second_slot_T.clamp_min(0)].float(), 0.0)


def _dropout_factor(seeds_BQ: Tensor, length: int, dropout: float) -> Tensor:
    """Return fp32 [B, Q, L]: 0 where dropped, else 1 / (1 - dropout)."""
    steps_L = torch.arange(length, device=seeds_BQ.device, dtype=torch.int32) * COLUMN_STEP
    return keep_mask(seeds_BQ[..., None] + steps_L, dropout) * (1 / (1 - dropout))


def _finish_scores(
    scores_BQL: Tensor,
    mask_BL: Tensor,
    scale: float,
    first_key_BQ: Tensor | None,
    last_key_BQ: Tensor | None,
    bias_BQL: Tensor | None,
) -> Tensor:
    """Return fp32 [B, Q, L]: scaled products plus their `terms.ScoreTerms`; -inf where masked."""
    x_BQL = scores_BQL.float() * scale + mask_BL[:, None]
    if bias_BQL is not None:
        x_BQL = x_BQL + bias_BQL
    if first_key_BQ is None or last_key_BQ is None:
        return x_BQL
    key_L = torch.arange(scores_BQL.shape[-1], device=scores_BQL.device, dtype=torch.int32)
    in_window_BQL = (key_L >= first_key_BQ[..., None]) & (key_L <= last_key_BQ[..., None])
    return torch.where(in_window_BQL, x_BQL, -math.inf)


def softmax_kernel(
    scores_BQL: Tensor,
    mask_BL: Tensor,
    scale: float,
    seeds_BQ: Tensor | None,
    dropout: float,
    first_key_BQ: Tensor | None = None,
    last_key_BQ: Tensor | None = None,
    bias_BQL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (attention weights after dropout [B, Q, L], fp32 log-sum-exp of each query's scores [B, Q])."""
    x_BQL = _finish_scores(scores_BQL, mask_BL, scale, first_key_BQ, last_key_BQ, bias_BQL)
    max_BQ1 = x_BQL.amax(-1, keepdim=True)
    weights_BQL = (x_BQL - max_BQ1).exp()
    total_BQ1 = weights_BQL.sum(-1, keepdim=True)
    weights_BQL = weights_BQL * total_BQ1.reciprocal()
    if seeds_BQ is not None:
        weights_BQL = weights_BQL * _dropout_factor(seeds_BQ, scores_BQL.shape[-1], dropout)
    return weights_BQL.to(scores_BQL.dtype), (max_BQ1 + total_BQ1.log()).squeeze(-1)


def softmax_backward_kernel(
    scores_BQL: Tensor,
    grad_BQL: Tensor,
    lse_BQ: Tensor,
    delta_BQ: Tensor,
    mask_BL: Tensor,
    scale: float,
    seeds_BQ: Tensor | None,
    dropout: float,
    first_key_BQ: Tensor | None = None,
    last_key_BQ: Tensor | None = None,
    bias_BQL: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (weights after dropout, gradient of the products), each [B, Q, L]; `grad_BQL` is the weights' gradient."""
    x_BQL = _finish_scores(scores_BQL, mask_BL, scale, first_key_BQ, last_key_BQ, bias_BQL)
    weights_BQL = (x_BQL - lse_BQ[..., None]).exp()
    dropped_BQL, grad = weights_BQL, grad_BQL.float()
    if seeds_BQ is not None:
        factor_BQL = _dropout_factor(seeds_BQ, scores_BQL.shape[-1], dropout)
        dropped_BQL, grad = weights_BQL * factor_BQL, grad * factor_BQL
    grad_scores_BQL = weights_BQL * (grad - delta_BQ[..., None]) * scale
    return dropped_BQL.to(scores_BQL.dtype), grad_scores_BQL.to(scores_BQL.dtype)
