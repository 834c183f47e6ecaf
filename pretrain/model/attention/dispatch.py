"""Self-attention over an unpadded batch: the one place that knows where sequences begin and end (law 2).

Shape letters: T tokens of the micro-batch, R of them that ask (queries; all T but in the last layer), S sequences,
N heads, D width of a head, H = N * D; inside a group of G sequences padded to L tokens and Q queries, B = G * N.

CUDA in half precision: torch's varlen flash kernel. Everywhere else (CPU, fp32): batched matmuls over groups of
sequences of like lengths, with what lies between the matmuls fused by torch.compile. On CPU that is
2 to 6 times faster than torch's own fused CPU kernel (BENCHMARKS.md), and it has attention dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# What calling the kernels of one more group costs, in scores that they make in that time (BENCHMARKS.md).
SCORES_PER_GROUP = 400_000
# Scores of one batched matmul: 2^20 bf16 entries are 2 MiB, so that they stay in cache from one step to the next.
SCORES_PER_PIECE = 1 << 20

# Odd constants that set apart the draws of one token: along features or keys, and between heads or layers. In compiled
# code the first one is the stride of a loop, where C++ must not leave int32: it does not up to MAX_WIDTH columns.
ALONG = 0x3C6EF
BETWEEN = 0x85EBCA6B - (1 << 32)
_HEADS = 0xC2B2AE35 - (1 << 32)  # another step, or (layer, head) would share its mask with (layer + 1, head - 1)

# Sizes that the compiler reckons with where it is told not to rely on any: it fuses by them.
_TYPICAL = {"C": 2, "G": 8, "B": 64, "Q": 128, "L": 128, "T": 1024}
# Older ones were not tried.
_MARKS_UNKNOWN_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def self_attention(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    rows: Tensor | None,
    heads: int,
    keys: Tensor,
    dropout: float,
    fused: bool,
) -> Tensor:
    """Scaled dot-product attention within each sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        weight, bias: [3H, H] and [3H], the projections to query, key and value one below the other.
        cu_seqlens: int32 [S + 1], where the sequences begin on the token axis; the first is 0, the last T.
        max_seqlen: length of the longest sequence.
        rows: int64 [R], ascending: the tokens whose context is wanted, if not all. They see all of their sequence.
        heads: number of heads N.
        keys: int32 [T], the dropout seed of each query token.
        dropout: probability of dropping an attention weight. The flash kernel draws from the device's
            generator, the grouped matmuls from `keys`.
        fused: let torch.compile fuse the steps between the matmuls.

    Returns:
        [R, H], the context of each token asked for, in the dtype of `hidden`.
    """
    if (
        hidden.is_cuda
        and hidden.dtype != torch.float32
        and _has_flash(hidden.device)
        and _flash_takes(hidden.shape[1] // heads)
    ):
        qkv_T3H = F.linear(hidden, weight, bias)
        return _flash_attention(qkv_T3H, cu_seqlens, max_seqlen, rows, heads, dropout)
    # torch's CPU matmul writes the bias out to every row first; the kernels add it for nothing as they read.
    return grouped_attention(hidden @ weight.T, bias, cu_seqlens, rows, heads, keys, dropout, fused)[0]


def hash_bits(seed: Tensor) -> Tensor:
    """Well-mixed 32 bits of int32 `seed`, elementwise: "lowbias32" of Chris Wellons' hash-prospector."""
    # int32 arithmetic wraps; torch's `>>` keeps the sign, so a mask makes each shift a logical one.
    x = seed ^ ((seed >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def keep_mask(seed: Tensor, dropout: float) -> Tensor:
    """Bool, true with probability 1 - `dropout`: a pure function of int32 `seed`, elementwise."""
    return (hash_bits(seed) & 0xFFFFFF) >= round(dropout * (1 << 24))


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether the kernel runs there: Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_takes(head_width: int) -> bool:
    """pytorch aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd: no padding there."""
    return head_width % 8 == 0 and head_width <= 256


def _flash_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, rows: Tensor | None, heads: int, dropout: float
) -> Tensor:
    q_RND, k_TND, v_TND = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    cu_queries = cu_seqlens
    if rows is not None:
        q_RND, cu_queries = q_RND.index_select(0, rows), _query_boundaries(rows, cu_seqlens)
    # The op below torch.nn.attention.varlen, called directly because that wrapper has no dropout.
    context_RND = torch.ops.aten._flash_attention_forward(
        q_RND, k_TND, v_TND, cu_queries, cu_seqlens, max_seqlen, max_seqlen, dropout, False, False
    )[0]
    return context_RND.flatten(1)


def _query_boundaries(rows_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int32 [S + 1]: where the sequences begin among the ascending `rows_R`."""
    return torch.searchsorted(rows_R, cu_seqlens.long()).int()


@functools.cache
def program(function: Callable[..., Any], fused: bool) -> Callable[..., Any]:
    """`function`, compiled once for all sizes of batches when `fused`."""
    if not fused:
        return function
    # Sizes that happen to be equal in the first batch must not be taken for one size: that compiles again later.
    torch.fx.experimental._config.use_duck_shape = False  # pyright: ignore[reportAttributeAccessIssue]
    torch._dynamo.config.recompile_limit = 32
    torch._dynamo.config.specialize_float = True
    # What a pass over memory can make again is made again in the backward pass: faster, and half the memory.
    torch._functorch.config.aggressive_recomputation = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.compile(function, dynamic=True)


class SequenceGroup(NamedTuple):
    """Consecutive sequences, padded to the longest."""

    keys: Padded  # token rows
    queries: Padded  # numbers among the rows that ask
    mask_GL: Tensor  # fp32, 0 at keys and -inf at padding: added to the scores


class Padded(NamedTuple):
    """Neighbouring ranges of numbers laid side by side, padded to the longest."""

    range: slice  # all the numbers
    number_GL: Tensor  # int64, the number at each place; padding repeats one of the range
    real_GL: Tensor  # bool, false at padding
    place_T: Tensor  # int64 [numbers], g * L + l of each number


@functools.lru_cache(maxsize=8)  # a micro-batch has two, asked for by every layer, forward and backward
def group_sequences(
    boundaries: tuple[int, ...], queries: tuple[int, ...] | None, heads: int, device: torch.device
) -> tuple[SequenceGroup, ...]:
    """Cut the sequences between `boundaries` (S + 1 token offsets) into the groups that cost least.

    Any order of the sequences is right; the ascending order of the loader's batches makes the cheapest groups.
    `queries` are the like offsets among the rows that ask, None when all do. A group that asks nothing is left out.
    """
    groups = []
    for begin, end in _cheapest_cuts(np.diff(boundaries), heads):
        asking = (boundaries if queries is None else queries)[begin : end + 1]
        if asking[0] < asking[-1]:
            keys = _pad(boundaries[begin : end + 1], device)
            padded = keys if queries is None else _pad(asking, device)
            groups.append(SequenceGroup(keys, padded, torch.where(keys.real_GL, 0.0, -math.inf)))
    return tuple(groups)


def _cheapest_cuts(lengths: np.ndarray, heads: int) -> list[tuple[int, int]]:
    """(first, behind the last) sequence of each group, in order.

    A group of G sequences padded to L costs its calls and heads * G * L * (L + 128) scores: L for each of its G * L
    tokens, and as many as 128 for carrying a token of a head of 64 there and back. Exact, by dynamic programming.
    """
    count = len(lengths)
    best, cut = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        # Of the groups that end here, one for each beginning: its longest and its number of sequences.
        longest = np.maximum.accumulate(lengths[end - 1 :: -1])[::-1].astype(np.float64)
        costs = best[:end] + heads * np.arange(end, 0, -1) * longest * (longest + 128)
        cut[end] = costs.argmin()
        best[end] = costs[cut[end]] + SCORES_PER_GROUP
    cuts, end = [], count
    while end:
        cuts.append((int(cut[end]), end))
        end = int(cut[end])
    return cuts[::-1]


def _pad(boundaries: tuple[int, ...], device: torch.device) -> Padded:
    offsets = torch.tensor(boundaries)
    lengths_G1, place_L = offsets.diff()[:, None], torch.arange(int(offsets.diff().max()))
    real_GL = place_L < lengths_G1
    # An empty range repeats a neighbour's number: what is computed there goes nowhere.
    last_G1 = (offsets[1:, None] - 1).clamp_min(boundaries[0])
    number_GL = torch.minimum(offsets[:-1, None] + place_L, last_G1)
    place_T = torch.arange(real_GL.numel()).view_as(real_GL)[real_GL]
    tensors = (x.to(device) for x in (number_GL, real_GL, place_T))
    return Padded(slice(boundaries[0], boundaries[-1]), *tensors)


@torch.library.custom_op("bertrain::grouped_attention", mutates_args=())
def grouped_attention(
    qkv: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    heads: int,
    keys: Tensor,
    dropout: float,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """([R, H] context, fp32 [R, N] log-sum-exp of each row of scores), by groups of like lengths.

    `qkv` [T, 3H]: query, key and value side by side, still without their `bias` [3H].
    """
    qkv, bias = qkv.detach(), bias.detach()  # the same compiled code with and without a gradient
    hidden = qkv.shape[1] // 3
    queries = len(qkv) if rows is None else len(rows)
    context_RH = qkv.new_empty(queries, hidden)
    lse_RN = qkv.new_empty(queries, heads, dtype=torch.float32)
    pieces = _pieces(fused)
    for group in _groups(cu_seqlens, rows, heads):
        q_BQD, k_BLD, v_BLD = _project(pieces, qkv, bias, group, rows, heads)
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        context_1BQD, lse_BQ = (
            q_BQD.new_empty(1, *q_BQD.shape),
            q_BQD.new_empty(q_BQD.shape[:2], dtype=torch.float32),
        )
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            seeds = None if keys_BQ is None else keys_BQ[b]
            weights_BQL, lse_BQ[b] = pieces.softmax(scores_BQL, mask_BL[b], _scale(q_BQD), seeds, dropout)
            torch.bmm(weights_BQL, v_BLD[b], out=context_1BQD[0, b])
        asking = group.queries
        context_RH[asking.range] = pieces.to_tokens(context_1BQD, asking.place_T, heads)
        lse_RN[asking.range] = _per_head_to_tokens(lse_BQ, asking.place_T, heads)
    return context_RH, lse_RN


@torch.library.custom_op("bertrain::grouped_attention_backward", mutates_args=())
def _grouped_attention_backward(
    grad_context: Tensor,
    qkv: Tensor,
    bias: Tensor,
    context: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    heads: int,
    keys: Tensor,
    dropout: float,
    fused: bool,
) -> Tensor:
    """[T, 3H] gradient of `qkv`; scores are computed again, as in flash attention (Dao et al. 2022, alg. 4)."""
    qkv, bias, context = qkv.detach(), bias.detach(), context.detach()
    hidden = qkv.shape[1] // 3
    grad_qkv = torch.empty_like(qkv) if rows is None else torch.zeros_like(qkv)
    pieces = _pieces(fused)
    for group in _groups(cu_seqlens, rows, heads):
        q_BQD, k_BLD, v_BLD = _project(pieces, qkv, bias, group, rows, heads)
        asking = group.queries
        do_BQD, delta_BQ = pieces.grad_to_heads(grad_context, context, asking.number_GL, asking.real_GL, heads)
        lse_BQ = _per_token_to_heads(lse, asking.number_GL)
        keys_BQ = _keys_to_heads(keys, _rows(group, rows), heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        grad_q_1BQD, grad_kv_2BLD = q_BQD.new_empty(1, *q_BQD.shape), k_BLD.new_empty(2, *k_BLD.shape)
        for b in _head_slices(q_BQD, k_BLD):
            scores_BQL = torch.bmm(q_BQD[b], k_BLD[b].mT)
            grad_weights_BQL = torch.bmm(do_BQD[b], v_BLD[b].mT)
            seeds = None if keys_BQ is None else keys_BQ[b]
            weights_BQL, grad_scores_BQL = pieces.softmax_backward(
                scores_BQL, grad_weights_BQL, lse_BQ[b], delta_BQ[b], mask_BL[b], _scale(q_BQD), seeds, dropout
            )
            torch.bmm(grad_scores_BQL, k_BLD[b], out=grad_q_1BQD[0, b])
            torch.bmm(grad_scores_BQL.mT, q_BQD[b], out=grad_kv_2BLD[0, b])
            torch.bmm(weights_BQL.mT, do_BQD[b], out=grad_kv_2BLD[1, b])
        grad_q_RH = pieces.to_tokens(grad_q_1BQD, asking.place_T, heads)
        if rows is None:
            grad_qkv[asking.range, :hidden] = grad_q_RH
        else:  # a row may ask twice
            grad_qkv[:, :hidden].index_add_(0, rows[asking.range], grad_q_RH)
        grad_qkv[group.keys.range, hidden:] = pieces.to_tokens(grad_kv_2BLD, group.keys.place_T, heads)
    return grad_qkv


@grouped_attention.register_fake
def _(
    qkv: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    heads: int,
    keys: Tensor,
    dropout: float,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    asking = qkv.shape[0] if rows is None else rows.shape[0]
    return qkv.new_empty(asking, qkv.shape[1] // 3), qkv.new_empty(asking, heads, dtype=torch.float32)


@_grouped_attention_backward.register_fake
def _(
    grad_context: Tensor,
    qkv: Tensor,
    bias: Tensor,
    context: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    rows: Tensor | None,
    heads: int,
    keys: Tensor,
    dropout: float,
    fused: bool,
) -> Tensor:
    return torch.empty_like(qkv)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, cu_seqlens, rows, ctx.heads, keys, ctx.dropout, ctx.fused = inputs
    ctx.save_for_backward(qkv, bias, *output, cu_seqlens, rows, keys)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_context: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    qkv, bias, context, lse, cu_seqlens, rows, keys = ctx.saved_tensors
    grad_qkv = _grouped_attention_backward(
        grad_context, qkv, bias, context, lse, cu_seqlens, rows, ctx.heads, keys, ctx.dropout, ctx.fused
    )
    return grad_qkv, grad_qkv.sum(0), None, None, None, None, None, None


grouped_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _groups(cu_seqlens: Tensor, rows: Tensor | None, heads: int) -> tuple[SequenceGroup, ...]:
    queries = None if rows is None else tuple(_query_boundaries(rows, cu_seqlens).tolist())
    return group_sequences(tuple(cu_seqlens.tolist()), queries, heads, cu_seqlens.device)


def _rows(group: SequenceGroup, rows: Tensor | None) -> Tensor:
    """int64 [G, Q], token row of each query."""
    return group.queries.number_GL if rows is None else rows[group.queries.number_GL]


def _project(
    pieces: _Pieces, qkv: Tensor, bias: Tensor, group: SequenceGroup, rows: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries [B, Q, D], keys [B, L, D], values [B, L, D]) of one group."""
    hidden = qkv.shape[1] // 3
    (q_BQD,) = pieces.to_heads(qkv[:, :hidden], bias[:hidden], _rows(group, rows), 1, heads)
    k_BLD, v_BLD = pieces.to_heads(qkv[:, hidden:], bias[hidden:], group.keys.number_GL, 2, heads)
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


def _per_token_to_heads(x_TN: Tensor, rows_GL: Tensor) -> Tensor:
    """[R, N] -> [B, Q]."""
    return _heads_first(x_TN[rows_GL])


def _heads_first(x_GQN: Tensor) -> Tensor:
    """[G, Q, N, ...] -> [B, Q, ...], with the strides of its shape where Q is 1 as well."""
    return x_GQN.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(0, 1)


def _keys_to_heads(keys_T: Tensor, rows_GL: Tensor, heads: int) -> Tensor:
    """int32 [T] -> int32 [B, Q] of the token rows, a seed for each head's row of weights."""
    head_N1 = torch.arange(heads, device=keys_T.device, dtype=torch.int32)[:, None]
    return hash_bits(keys_T[rows_GL][:, None] + head_N1 * _HEADS).flatten(0, 1)


# What lies between the matmuls: plain functions, each one fused into a single pass by torch.compile.


def _to_heads(x_TCH: Tensor, bias_CH: Tensor, rows_GL: Tensor, parts: int, heads: int) -> Tensor:
    """[T, parts * H] -> [parts, B, L, D] of one group's rows, with the bias added."""
    x_GLCH = (x_TCH[rows_GL].float() + bias_CH.float()).to(x_TCH.dtype)
    x_GLCND = x_GLCH.unflatten(-1, (parts, heads, x_TCH.shape[1] // (parts * heads)))
    return x_GLCND.permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


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
    return _heads_first(grad_GQND), _heads_first(delta_GQN)


def _to_tokens(x_CBLD: Tensor, place_T: Tensor, heads: int) -> Tensor:
    """[parts, B, L, D] -> [group's tokens, parts * H]."""
    parts, _, length, width = x_CBLD.shape
    x_GLCND = x_CBLD.view(parts, -1, heads, length, width).permute(1, 3, 0, 2, 4)
    return x_GLCND.flatten(0, 1)[place_T].flatten(1)


def _dropout_factor(keys_BQ: Tensor, length: int, dropout: float) -> Tensor:
    """fp32 [B, Q, L]: 0 where dropped, else 1 / (1 - dropout)."""
    along_L = torch.arange(length, device=keys_BQ.device, dtype=torch.int32) * ALONG
    return keep_mask(keys_BQ[..., None] + along_L, dropout) * (1 / (1 - dropout))


def _softmax(
    scores_BQL: Tensor, mask_BL: Tensor, scale: float, keys_BQ: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """(attention weights after dropout [B, Q, L], log-sum-exp of the rows fp32 [B, Q])."""
    x_BQL = scores_BQL.float() * scale + mask_BL[:, None]
    top_BQ1 = x_BQL.amax(-1, keepdim=True)
    weights_BQL = (x_BQL - top_BQ1).exp()
    total_BQ1 = weights_BQL.sum(-1, keepdim=True)
    weights_BQL = weights_BQL * total_BQ1.reciprocal()
    if keys_BQ is not None:
        weights_BQL = weights_BQL * _dropout_factor(keys_BQ, scores_BQL.shape[-1], dropout)
    return weights_BQL.to(scores_BQL.dtype), (top_BQ1 + total_BQ1.log()).squeeze(-1)


def _softmax_backward(
    scores_BQL: Tensor,
    grad_BQL: Tensor,
    lse_BQ: Tensor,
    delta_BQ: Tensor,
    mask_BL: Tensor,
    scale: float,
    keys_BQ: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """(weights after dropout, gradient of the scores), both [B, Q, L]; `grad_BQL` is that of dropped weights."""
    weights_BQL = (scores_BQL.float() * scale + mask_BL[:, None] - lse_BQ[..., None]).exp()
    dropped_BQL, grad = weights_BQL, grad_BQL.float()
    if keys_BQ is not None:
        factor_BQL = _dropout_factor(keys_BQ, scores_BQL.shape[-1], dropout)
        dropped_BQL, grad = weights_BQL * factor_BQL, grad * factor_BQL
    grad_scores_BQL = weights_BQL * (grad - delta_BQ[..., None]) * scale
    return dropped_BQL.to(scores_BQL.dtype), grad_scores_BQL.to(scores_BQL.dtype)


class _Pieces(NamedTuple):
    to_heads: Callable[..., Tensor]
    grad_to_heads: Callable[..., tuple[Tensor, Tensor]]
    to_tokens: Callable[..., Tensor]
    softmax: Callable[..., tuple[Tensor, Tensor]]
    softmax_backward: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def _pieces(fused: bool) -> _Pieces:
    return _Pieces(
        to_heads=_of_any_size(_to_heads, ("T", "", "GL"), fused),
        grad_to_heads=_of_any_size(_grad_to_heads, ("T", "T", "GQ", "GQ"), fused),
        to_tokens=_of_any_size(_to_tokens, ("CBL", "T"), fused),
        softmax=_of_any_size(_softmax, ("BQL", "BL", "", "BQ"), fused),
        softmax_backward=_of_any_size(_softmax_backward, ("BQL", "BQL", "BQ", "BQ", "BL", "", "BQ"), fused),
    )


def _of_any_size(function: Callable[..., Any], axes: tuple[str, ...], fused: bool) -> Callable[..., Any]:
    """`program(function, fused)`, compiled once for sizes of 1 and all others on these leading axes of its arguments.

    torch.compile takes a size of 1 for a constant, and compiles again, in the middle of training, when a group has a single
    sequence or each of its sequences a single query.
    """
    compiled = program(function, fused)
    if not fused or not _MARKS_UNKNOWN_SIZES:
        return compiled
    known = set()  # what it was compiled for: marks count then, and cost as much as a small kernel

    def call(*arguments: Any) -> Any:
        variant = tuple(x.dtype if isinstance(x, Tensor) else x for x in arguments)
        if variant not in known:
            known.add(variant)
            for argument, letters in zip(arguments, axes, strict=False):
                if isinstance(argument, Tensor):
                    _mark_unknown(argument, letters)
        return compiled(*arguments)

    return call


def _mark_unknown(x: Tensor, letters: str) -> None:
    for axis, letter in enumerate(letters):
        torch._dynamo.decorators.mark_unbacked(x, axis, hint_override=_TYPICAL[letter])
    if letters and x._base is not None:  # its sizes are looked at, too
        for axis in range(x._base.dim()):
            torch._dynamo.decorators.mark_unbacked(x._base, axis, hint_override=_TYPICAL["B"])
