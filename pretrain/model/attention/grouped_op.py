"""Attention by batched matmuls over groups of sequences of similar lengths, as an operator of torch with its gradient.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D; inside a group of G
units (sequences, or chunks of them) L tokens and Q queries each, B = G * N; M as in `terms.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pretrain.model.attention.grouping import SequenceGroup, cut_into_units, group_sequences
from pretrain.model.attention.kernels import Kernels, heads_first, kernels
from pretrain.model.attention.layout import AttentionOptions, TokenLayout, query_boundaries
from pretrain.model.attention.terms import GroupTerms
from pretrain.model.hash_rng import HEADS, hash_bits

# Scores of one batched matmul: 2^20 bf16 entries are 2 MiB, so that they stay in cache from one step to the next.
SCORES_PER_PIECE = 1 << 20


def grouped_attention(
    qkv: Tensor, bias: Tensor | None, layout: TokenLayout, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention within each sequence, group by group.

    Args:
        qkv: [T, 3H], query, key and value side by side, still without their bias.
        bias: [3H], or None if there is none or `qkv` has it.
        layout: which tokens attend. Its rotation is not read: `qkv` is rotated.
        options: heads, dropout, compilation, window, and whether attention is causal.

    Returns:
        ([R, H] context, fp32 [R, N] log-sum-exp of each row of scores); the first is differentiable, once.
    """
    # An operator takes only tensors and numbers.
    return _forward(qkv, bias, layout.cu_seqlens, layout.rows, layout.keys, layout.distance_bias, *options)


@torch.library.custom_op("bertrain::grouped_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    distance_bias: Tensor | None,
    heads: int,
    dropout: float,
    fused: bool,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    # The same compiled code with and without a gradient.
    qkv, bias, distance_bias = qkv.detach(), _detached(bias), _detached(distance_bias)
    queries = len(qkv) if rows is None else len(rows)
    context_RH = qkv.new_empty(queries, qkv.shape[1] // 3)
    lse_RN = qkv.new_empty(queries, heads, dtype=torch.float32)
    between = kernels(fused)
    for group in _groups(cu_seqlens, rows, heads, window):
        q_BQD, k_BLD, v_BLD = _project(between, qkv, bias, group, rows, heads)
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        terms = GroupTerms(group, _rows(group, rows), heads, window, causal, distance_bias)
        context_1BQD = q_BQD.new_empty(1, *q_BQD.shape)
        lse_BQ = q_BQD.new_empty(q_BQD.shape[:2], dtype=torch.float32)
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            seeds = None if keys_BQ is None else keys_BQ[b]
            weights_BQL, lse_BQ[b] = between.softmax(
                scores_BQL, mask_BL[b], _scale(q_BQD), seeds, dropout, *terms.of(b)
            )
            torch.bmm(weights_BQL, v_BLD[b], out=context_1BQD[0, b])
        numbers = group.queries
        context_RH[numbers.range] = between.to_tokens(context_1BQD, numbers.place_T, heads)
        lse_RN[numbers.range] = _per_head_to_tokens(lse_BQ, numbers.place_T, heads)
    return context_RH, lse_RN


@torch.library.custom_op("bertrain::grouped_attention_backward", mutates_args=())
def _backward(
    grad_context: Tensor,
    saved: list[Tensor],
    bias: Tensor | None,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    distance_bias: Tensor | None,
    heads: int,
    dropout: float,
    fused: bool,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient of `qkv` [T, 3H], fp32 gradient of `distance_bias` [N, 2M - 1] or [0]).

    Scores are computed again, as in flash attention (Dao et al. 2022, alg. 4). `saved` are qkv [T, 3H], context [R, H]
    and log-sum-exp [R, N] of the forward pass.
    """
    qkv, context, lse = (tensor.detach() for tensor in saved)
    bias, distance_bias = _detached(bias), _detached(distance_bias)
    hidden = qkv.shape[1] // 3
    grad_qkv = torch.empty_like(qkv) if rows is None else torch.zeros_like(qkv)
    grad_table_NM = _empty_table(qkv, distance_bias).zero_()
    between = kernels(fused)
    for group in _groups(cu_seqlens, rows, heads, window):
        q_BQD, k_BLD, v_BLD = _project(between, qkv, bias, group, rows, heads)
        numbers = group.queries
        do_BQD, delta_BQ = between.grad_to_heads(grad_context, context, numbers.number_GL, numbers.real_GL, heads)
        lse_BQ = heads_first(_without_padding(lse[numbers.number_GL], numbers.real_GL, rows))
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        terms = GroupTerms(group, _rows(group, rows), heads, window, causal, distance_bias)
        grad_q_1BQD, grad_kv_2BLD = q_BQD.new_empty(1, *q_BQD.shape), k_BLD.new_empty(2, *k_BLD.shape)
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            grad_weights_BQL = torch.bmm(do_BQD[b], v_BLD[b].mT)
            seeds, scale = None if keys_BQ is None else keys_BQ[b], _scale(q_BQD)
            row_sums = lse_BQ[b], delta_BQ[b]
            weights_BQL, grad_scores_BQL = between.softmax_backward(
                scores_BQL, grad_weights_BQL, *row_sums, mask_BL[b], scale, seeds, dropout, *terms.of(b)
            )
            torch.bmm(grad_scores_BQL, k_BLD[b], out=grad_q_1BQD[0, b])
            torch.bmm(grad_scores_BQL.mT, q_BQD[b], out=grad_kv_2BLD[0, b])
            torch.bmm(weights_BQL.mT, do_BQD[b], out=grad_kv_2BLD[1, b])
            if distance_bias is not None:
                terms.add_gradient(grad_table_NM, b, grad_scores_BQL.float() / scale)
        grad_q_RH = between.to_tokens(grad_q_1BQD, numbers.place_T, heads)
        if rows is None:
            grad_qkv[numbers.range, :hidden] = grad_q_RH
        else:  # a token may be a query twice
            grad_qkv[:, :hidden].index_add_(0, rows[numbers.range], grad_q_RH)
        grad_qkv[group.keys.range, hidden:] = _keys_to_tokens(between, grad_kv_2BLD, group, heads)
    return grad_qkv, grad_table_NM


@_forward.register_fake
def _(
    qkv: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    distance_bias: Tensor | None,
    heads: int,
    dropout: float,
    fused: bool,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    queries = qkv.shape[0] if rows is None else rows.shape[0]
    return qkv.new_empty(queries, qkv.shape[1] // 3), qkv.new_empty(queries, heads, dtype=torch.float32)


@_backward.register_fake
def _(
    grad_context: Tensor,
    saved: list[Tensor],
    bias: Tensor | None,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    distance_bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(saved[0]), _empty_table(saved[0], distance_bias)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, cu_seqlens, rows, keys, distance_bias, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, bias, cu_seqlens, rows, keys, distance_bias)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_context: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    qkv, context, lse, bias, *layout = ctx.saved_tensors
    grad_qkv, grad_table = _backward(grad_context, [qkv, context, lse], bias, *layout, *ctx.options)
    distance_bias = layout[-1]
    grad_bias = None if bias is None else grad_qkv.sum(0)
    grad_table = None if distance_bias is None else grad_table.to(distance_bias.dtype)
    return grad_qkv, grad_bias, None, None, None, grad_table, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _empty_table(qkv: Tensor, distance_bias: Tensor | None) -> Tensor:
    """fp32, of the shape of `distance_bias`, or [0] without one."""
    return qkv.new_empty((0,) if distance_bias is None else distance_bias.shape, dtype=torch.float32)


def _groups(cu_seqlens: Tensor, rows: Tensor | None, heads: int, window: int) -> tuple[SequenceGroup, ...]:
    boundaries, queries = tuple(cu_seqlens.tolist()), None
    if rows is not None:
        begin = cut_into_units(boundaries, window)[0].begin if window else boundaries[:-1]
        starts = torch.tensor([*begin, boundaries[-1]], device=rows.device)
        queries = tuple(query_boundaries(rows, starts).tolist())
    return group_sequences(boundaries, queries, heads, cu_seqlens.device, window)


def _rows(group: SequenceGroup, rows: Tensor | None) -> Tensor:
    """int64 [G, Q], token row of each query."""
    return group.queries.number_GL if rows is None else rows[group.queries.number_GL]


def _project(
    between: Kernels, qkv: Tensor, bias: Tensor | None, group: SequenceGroup, rows: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries [B, Q, D], keys [B, L, D], values [B, L, D]) of one group."""
    hidden = qkv.shape[1] // 3
    bias_q, bias_kv = (None, None) if bias is None else (bias[:hidden], bias[hidden:])
    (q_BQD,) = between.to_heads(qkv[:, :hidden], bias_q, _rows(group, rows), 1, heads)
    k_BLD, v_BLD = between.to_heads(qkv[:, hidden:], bias_kv, group.keys.number_GL, 2, heads)
    return q_BQD, k_BLD, v_BLD


def _without_padding(lse_GQN: Tensor, real_GQ: Tensor, rows: Tensor | None) -> Tensor:
    """Infinite at padding that may repeat a query of other keys: its weights would be anything, even infinite."""
    return lse_GQN if rows is None else lse_GQN.masked_fill(~real_GQ[..., None], math.inf)


def _keys_to_tokens(between: Kernels, grad_kv_2BLD: Tensor, group: SequenceGroup, heads: int) -> Tensor:
    """[group's tokens, 2H], the gradients of keys and values, added up where chunks share them."""
    place_T, other_T = group.keys.place_T, group.keys.other_T
    if other_T is None:
        return between.to_tokens(grad_kv_2BLD, place_T, heads)
    return between.to_shared_tokens(grad_kv_2BLD, place_T, other_T, heads)


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
