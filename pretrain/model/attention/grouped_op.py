"""Attention by batched matmuls over groups of sequences of similar lengths, as an operator of torch with its gradient.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D; inside a group of G
sequences L tokens and Q queries each, B = G * N.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.grouping import SequenceGroup, group_sequences
from pretrain.model.attention.kernels import Kernels, heads_first, kernels
from pretrain.model.attention.layout import AttentionOptions, TokenLayout, query_boundaries
from pretrain.model.hash_rng import HEADS, hash_bits

# Scores of one batched matmul: 2^20 bf16 entries are 2 MiB, so that they stay in cache from one step to the next.
SCORES_PER_PIECE = 1 << 20


def grouped_attention(
    qkv: Tensor, bias: Tensor, layout: TokenLayout, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention within each sequence, group by group.

    Args:
        qkv: [T, 3H], query, key and value side by side, still without their bias.
        bias: [3H].
        layout: which tokens attend.
        options: heads, dropout and compilation.

    Returns:
        ([R, H] context, fp32 [R, N] log-sum-exp of each row of scores); the first is differentiable, once.
    """
    # An operator takes only tensors and numbers.
    return _forward(qkv, bias, layout.cu_seqlens, layout.rows, layout.keys, *options)


@torch.library.custom_op("bertrain::grouped_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    heads: int,
    dropout: float,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    qkv, bias = qkv.detach(), bias.detach()  # the same compiled code with and without a gradient
    queries = len(qkv) if rows is None else len(rows)
    context_RH = qkv.new_empty(queries, qkv.shape[1] // 3)
    lse_RN = qkv.new_empty(queries, heads, dtype=torch.float32)
    between = kernels(fused)
    for group in _groups(cu_seqlens, rows, heads):
        q_BQD, k_BLD, v_BLD = _project(between, qkv, bias, group, rows, heads)
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        context_1BQD = q_BQD.new_empty(1, *q_BQD.shape)
        lse_BQ = q_BQD.new_empty(q_BQD.shape[:2], dtype=torch.float32)
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            seeds = None if keys_BQ is None else keys_BQ[b]
            weights_BQL, lse_BQ[b] = between.softmax(scores_BQL, mask_BL[b], _scale(q_BQD), seeds, dropout)
            torch.bmm(weights_BQL, v_BLD[b], out=context_1BQD[0, b])
        numbers = group.queries
        context_RH[numbers.range] = between.to_tokens(context_1BQD, numbers.place_T, heads)
        lse_RN[numbers.range] = _per_head_to_tokens(lse_BQ, numbers.place_T, heads)
    return context_RH, lse_RN


@torch.library.custom_op("bertrain::grouped_attention_backward", mutates_args=())
def _backward(
    grad_context: Tensor,
    saved: list[Tensor],
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    heads: int,
    dropout: float,
    fused: bool,
) -> Tensor:
    """[T, 3H] gradient of `qkv`; scores are computed again, as in flash attention (Dao et al. 2022, alg. 4).

    `saved` are qkv [T, 3H], bias [3H], context [R, H] and log-sum-exp [R, N] of the forward pass.
    """
    qkv, bias, context, lse = (tensor.detach() for tensor in saved)
    hidden = qkv.shape[1] // 3
    grad_qkv = torch.empty_like(qkv) if rows is None else torch.zeros_like(qkv)
    between = kernels(fused)
    for group in _groups(cu_seqlens, rows, heads):
        q_BQD, k_BLD, v_BLD = _project(between, qkv, bias, group, rows, heads)
        numbers = group.queries
        do_BQD, delta_BQ = between.grad_to_heads(grad_context, context, numbers.number_GL, numbers.real_GL, heads)
        lse_BQ = heads_first(lse[numbers.number_GL])
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        grad_q_1BQD, grad_kv_2BLD = q_BQD.new_empty(1, *q_BQD.shape), k_BLD.new_empty(2, *k_BLD.shape)
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            grad_weights_BQL = torch.bmm(do_BQD[b], v_BLD[b].mT)
            seeds = None if keys_BQ is None else keys_BQ[b]
            weights_BQL, grad_scores_BQL = between.softmax_backward(
                scores_BQL, grad_weights_BQL, lse_BQ[b], delta_BQ[b], mask_BL[b], _scale(q_BQD), seeds, dropout
            )
            torch.bmm(grad_scores_BQL, k_BLD[b], out=grad_q_1BQD[0, b])
            torch.bmm(grad_scores_BQL.mT, q_BQD[b], out=grad_kv_2BLD[0, b])
            torch.bmm(weights_BQL.mT, do_BQD[b], out=grad_kv_2BLD[1, b])
        grad_q_RH = between.to_tokens(grad_q_1BQD, numbers.place_T, heads)
        if rows is None:
            grad_qkv[numbers.range, :hidden] = grad_q_RH
        else:  # a token may be a query twice
            grad_qkv[:, :hidden].index_add_(0, rows[numbers.range], grad_q_RH)
        grad_qkv[group.keys.range, hidden:] = between.to_tokens(grad_kv_2BLD, group.keys.place_T, heads)
    return grad_qkv


@_forward.register_fake
def _(
    qkv: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    heads: int,
    dropout: float,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    queries = qkv.shape[0] if rows is None else rows.shape[0]
    return qkv.new_empty(queries, qkv.shape[1] // 3), qkv.new_empty(queries, heads, dtype=torch.float32)


@_backward.register_fake
def _(grad_context: Tensor, saved: list[Tensor], *layout_and_options: Any) -> Tensor:
    return torch.empty_like(saved[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, cu_seqlens, rows, keys, *ctx.options = inputs
    ctx.save_for_backward(qkv, bias, *output, cu_seqlens, rows, keys)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_context: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens, rows, keys = ctx.saved_tensors
    grad_qkv = _backward(grad_context, saved, cu_seqlens, rows, keys, *ctx.options)
    return grad_qkv, grad_qkv.sum(0), None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


def _groups(cu_seqlens: Tensor, rows: Tensor | None, heads: int) -> tuple[SequenceGroup, ...]:
    queries = None if rows is None else tuple(query_boundaries(rows, cu_seqlens).tolist())
    return group_sequences(tuple(cu_seqlens.tolist()), queries, heads, cu_seqlens.device)


def _rows(group: SequenceGroup, rows: Tensor | None) -> Tensor:
    """int64 [G, Q], token row of each query."""
    return group.queries.number_GL if rows is None else rows[group.queries.number_GL]


def _project(
    between: Kernels, qkv: Tensor, bias: Tensor, group: SequenceGroup, rows: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries [B, Q, D], keys [B, L, D], values [B, L, D]) of one group."""
    hidden = qkv.shape[1] // 3
    (q_BQD,) = between.to_heads(qkv[:, :hidden], bias[:hidden], _rows(group, rows), 1, heads)
    k_BLD, v_BLD = between.to_heads(qkv[:, hidden:], bias[hidden:], group.keys.number_GL, 2, heads)
    return q_BQD, k_BLD, v_BLD


def _scale(q_BLD: Tensor) -> float:
    return 1 / math.sqrt(q_BLD.shape[-1])


def _head_slices(q_BQD: Tensor, k_BLD: Tensor) -> list[slice]:
    """Slices of the first axis whose scores fit into one piece."""
    step = max(1, SCORES_PER_PIECE // (q_BQD.shape[1] * k_BLD.shape[1]))
    return [slice(b, b + step) for b in range(0, len(q_BQD), step)]


def _per_head_to_tokens(x_BL: Tensor, place_T: Tensor, heads: int) -> Tensor:
    """[B, Q] -> [group's queries, N]."""
    return x_BL.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[place_T]


def _keys_to_heads(keys_T: Tensor, rows_GL: Tensor, heads: int) -> Tensor:
    """int32 [T] -> int32 [B, Q] of the token rows, a seed for each head's row of weights."""
    head_N1 = torch.arange(heads, device=keys_T.device, dtype=torch.int32)[:, None]
    return hash_bits(keys_T[rows_GL][:, None] + head_N1 * HEADS).flatten(0, 1)
