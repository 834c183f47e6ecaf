"""Self-attention over an unpadded batch: the one place that knows where sequences begin and end (law 2).

Shape letters: T tokens of the micro-batch, S sequences, N heads, D width of a head, H = N * D; inside a
group of G sequences padded to L tokens, B = G * N.

CUDA in half precision: torch's varlen flash kernel. Everywhere else (CPU, fp32): batched matmuls over groups of
sequences of nearly the same length, with what lies between the matmuls fused by torch.compile. On CPU that is
2 to 6 times faster than torch's own fused CPU kernel (BENCHMARKS.md), and it has attention dropout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A sequence joins a group as long as it is at most this share shorter than the group's longest.
MAX_PADDING = 0.1
# Scores of one batched matmul: 2^20 bf16 entries are 2 MiB, so that they stay in cache from one step to the next.
SCORES_PER_PIECE = 1 << 20

# Odd constants that set apart the draws of one token: along features or keys, and between heads or uses.
ALONG = 0x9E3779B1 - (1 << 32)
BETWEEN = 0x85EBCA6B - (1 << 32)
_HEADS = 0xC2B2AE35 - (
    1 << 32
)  # another step, or (layer, head) would share its mask with (layer + 1, head - 1)


def self_attention(
    hidden: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor, max_seqlen: int, heads: int, keys: Tensor,
    dropout: float, fused: bool,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention within each sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        weight, bias: [3H, H] and [3H], the projections to query, key and value one below the other.
        cu_seqlens: int32 [S + 1], where the sequences begin on the token axis; the first is 0, the last T.
        max_seqlen: length of the longest sequence.
        heads: number of heads N.
        keys: int32 [T], the dropout seed of each query token.
        dropout: probability of dropping an attention weight. The flash kernel draws from the device's
            generator, the grouped matmuls from `keys`.
        fused: let torch.compile fuse the steps between the matmuls.

    Returns:
        [T, H], the context of each token, in the dtype of `hidden`.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return _flash_attention(F.linear(hidden, weight, bias), cu_seqlens, max_seqlen, heads, dropout)
    # torch's CPU matmul writes the bias out to every row first; the kernels add it for nothing as they read.
    return grouped_attention(hidden @ weight.T, bias, cu_seqlens, heads, keys, dropout, fused)[0]


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


def _flash_attention(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, heads: int, dropout: float) -> Tensor:
    q_TND, k_TND, v_TND = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    # The op below torch.nn.attention.varlen, called directly because that wrapper has no dropout.
    context_TND = torch.ops.aten._flash_attention_forward(
        q_TND, k_TND, v_TND, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout, False, False
    )[0]
    return context_TND.flatten(1)


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


class Group(NamedTuple):
    """Consecutive sequences of nearly the same length, padded to the longest."""

    first: int  # the group's tokens are rows [first, last)
    last: int
    rows_GL: Tensor  # int64, token row at each place; padding repeats the sequence's last row
    mask_GL: Tensor  # fp32, 0 at tokens and -inf at padding: added to the scores
    place_T: Tensor  # int64 [last - first], g * L + l of each token


@functools.lru_cache(maxsize=256)
def group_sequences(boundaries: tuple[int, ...], device: torch.device) -> tuple[Group, ...]:
    """Cut the sequences between `boundaries` (S + 1 token offsets) into groups.

    Any order of the sequences is right; the ascending order of the loader's batches makes the fewest groups.
    """
    lengths = [b - a for a, b in itertools.pairwise(boundaries)]
    groups, begin = [], 0
    while begin < len(lengths):
        end, low, high = begin, lengths[begin], lengths[begin]
        while end < len(lengths) and min(low, lengths[end]) >= (1 - MAX_PADDING) * max(high, lengths[end]):
            low, high = min(low, lengths[end]), max(high, lengths[end])
            end += 1
        lengths_G = torch.tensor(lengths[begin:end])
        starts_G1, l_L = torch.tensor(boundaries[begin:end])[:, None], torch.arange(high)
        rows_GL = starts_G1 + torch.minimum(l_L, lengths_G[:, None] - 1)
        place_T = torch.arange((end - begin) * high).view(-1, high)[l_L < lengths_G[:, None]]
        mask_GL = torch.where(l_L < lengths_G[:, None], 0.0, -math.inf)
        tensors = (x.to(device) for x in (rows_GL, mask_GL, place_T))
        groups.append(Group(boundaries[begin], boundaries[end], *tensors))
        begin = end
    return tuple(groups)


@torch.library.custom_op("bertrain::grouped_attention", mutates_args=())
def grouped_attention(
    qkv: Tensor, bias: Tensor, cu_seqlens: Tensor, heads: int, keys: Tensor, dropout: float, fused: bool
) -> tuple[Tensor, Tensor]:
    """([T, H] context, fp32 [T, N] log-sum-exp of each row of scores), by groups of like lengths.

    `qkv` [T, 3H]: query, key and value side by side, still without their `bias` [3H].
    """
    context_TH = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
    lse_TN = qkv.new_empty(qkv.shape[0], heads, dtype=torch.float32)
    pieces = _pieces(fused)
    for group in _groups(cu_seqlens):
        q_BLD, k_BLD, v_BLD = pieces.to_heads(qkv, bias, group.rows_GL, heads)
        keys_BL = _keys_to_heads(keys, group.rows_GL, heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        context_BLD, lse_BL = torch.empty_like(q_BLD), q_BLD.new_empty(q_BLD.shape[:2], dtype=torch.float32)
        for b in _head_slices(q_BLD):
            scores_BLL = torch.bmm(q_BLD[b], k_BLD[b].mT)
            seeds = None if keys_BL is None else keys_BL[b]
            weights_BLL, lse_BL[b] = pieces.softmax(scores_BLL, mask_BL[b], _scale(q_BLD), seeds, dropout)
            torch.bmm(weights_BLL, v_BLD[b], out=context_BLD[b])
        rows = slice(group.first, group.last)
        context_TH[rows] = pieces.to_tokens(context_BLD[None], group.place_T, heads)
        lse_TN[rows] = _per_head_to_tokens(lse_BL, group.place_T, heads)
    return context_TH, lse_TN


@torch.library.custom_op("bertrain::grouped_attention_backward", mutates_args=())
def _grouped_attention_backward(
    grad_context: Tensor, qkv: Tensor, bias: Tensor, context: Tensor, lse: Tensor, cu_seqlens: Tensor, heads: int,
    keys: Tensor, dropout: float, fused: bool,
) -> Tensor:  # fmt: skip
    """[T, 3H] gradient of `qkv`; scores are computed again, as in flash attention (Dao et al. 2022, alg. 4)."""
    grad_qkv = torch.empty_like(qkv)
    pieces = _pieces(fused)
    for group in _groups(cu_seqlens):
        q_BLD, k_BLD, v_BLD = pieces.to_heads(qkv, bias, group.rows_GL, heads)
        do_BLD, delta_BL = pieces.grad_to_heads(grad_context, context, group.rows_GL, group.mask_GL, heads)
        lse_BL = _per_token_to_heads(lse, group.rows_GL)
        keys_BL = _keys_to_heads(keys, group.rows_GL, heads) if dropout else None
        mask_BL = group.mask_GL.repeat_interleave(heads, 0)
        grad_3BLD = q_BLD.new_empty(3, *q_BLD.shape)
        for b in _head_slices(q_BLD):
            scores_BLL = torch.bmm(q_BLD[b], k_BLD[b].mT)
            grad_weights_BLL = torch.bmm(do_BLD[b], v_BLD[b].mT)
            seeds = None if keys_BL is None else keys_BL[b]
            weights_BLL, grad_scores_BLL = pieces.softmax_backward(
                scores_BLL, grad_weights_BLL, lse_BL[b], delta_BL[b], mask_BL[b], _scale(q_BLD), seeds, dropout
            )  # fmt: skip
            torch.bmm(grad_scores_BLL, k_BLD[b], out=grad_3BLD[0, b])
            torch.bmm(grad_scores_BLL.mT, q_BLD[b], out=grad_3BLD[1, b])
            torch.bmm(weights_BLL.mT, do_BLD[b], out=grad_3BLD[2, b])
        grad_qkv[group.first : group.last] = pieces.to_tokens(grad_3BLD, group.place_T, heads)
    return grad_qkv


@grouped_attention.register_fake
def _(
    qkv: Tensor, bias: Tensor, cu_seqlens: Tensor, heads: int, keys: Tensor, dropout: float, fused: bool
) -> tuple[Tensor, Tensor]:
    tokens = qkv.shape[0]
    return qkv.new_empty(tokens, qkv.shape[1] // 3), qkv.new_empty(tokens, heads, dtype=torch.float32)


@_grouped_attention_backward.register_fake
def _(
    grad_context: Tensor, qkv: Tensor, bias: Tensor, context: Tensor, lse: Tensor, cu_seqlens: Tensor, heads: int,
    keys: Tensor, dropout: float, fused: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(qkv)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, cu_seqlens, ctx.heads, keys, ctx.dropout, ctx.fused = inputs
    ctx.save_for_backward(qkv, bias, *output, cu_seqlens, keys)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_context: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    qkv, bias, context, lse, cu_seqlens, keys = ctx.saved_tensors
    grad_qkv = _grouped_attention_backward(
        grad_context, qkv, bias, context, lse, cu_seqlens, ctx.heads, keys, ctx.dropout, ctx.fused
    )
    return grad_qkv, grad_qkv.sum(0), None, None, None, None, None


grouped_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _groups(cu_seqlens: Tensor) -> tuple[Group, ...]:
    return group_sequences(tuple(cu_seqlens.tolist()), cu_seqlens.device)


def _scale(q_BLD: Tensor) -> float:
    return 1 / math.sqrt(q_BLD.shape[-1])


def _head_slices(q_BLD: Tensor) -> list[slice]:
    """Slices of the first axis whose scores fit into one piece."""
    heads, length, _ = q_BLD.shape
    step = max(1, SCORES_PER_PIECE // length**2)
    return [slice(b, b + step) for b in range(0, heads, step)]


def _per_head_to_tokens(x_BL: Tensor, place_T: Tensor, heads: int) -> Tensor:
    """[B, L] -> [group's tokens, N]."""
    return x_BL.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[place_T]


def _per_token_to_heads(x_TN: Tensor, rows_GL: Tensor) -> Tensor:
    """[T, N] -> [B, L]."""
    return x_TN[rows_GL].transpose(1, 2).flatten(0, 1)


def _keys_to_heads(keys_T: Tensor, rows_GL: Tensor, heads: int) -> Tensor:
    """int32 [T] -> int32 [B, L], a seed for each head's row of weights."""
    head_N1 = torch.arange(heads, device=keys_T.device, dtype=torch.int32)[:, None]
    return hash_bits(keys_T[rows_GL][:, None] + head_N1 * _HEADS).flatten(0, 1)


# What lies between the matmuls: plain functions, each one fused into a single pass by torch.compile.


def _to_heads(qkv_T3H: Tensor, bias_3H: Tensor, rows_GL: Tensor, heads: int) -> Tensor:
    """[T, 3H] -> [3, B, L, D] of one group's rows, with the bias added."""
    qkv_GL3H = (qkv_T3H[rows_GL].float() + bias_3H.float()).to(qkv_T3H.dtype)
    qkv_GL3ND = qkv_GL3H.unflatten(-1, (3, heads, qkv_T3H.shape[1] // (3 * heads)))
    return qkv_GL3ND.permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


def _grad_to_heads(
    grad_TH: Tensor, context_TH: Tensor, rows_GL: Tensor, mask_GL: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """The context's gradient [B, L, D] and its product with the context, fp32 [B, L]; both zero at padding.

    Rows of padding hold a copy of the last row: without a product of 0 they would reach the keys' gradient.
    """
    grad_GLH = torch.where(mask_GL[..., None] == 0, grad_TH[rows_GL], 0.0)
    split = (heads, grad_TH.shape[1] // heads)
    grad_GLND, context_GLND = (x.unflatten(-1, split) for x in (grad_GLH, context_TH[rows_GL]))
    delta_GLN = (grad_GLND.float() * context_GLND.float()).sum(-1)
    return grad_GLND.transpose(1, 2).flatten(0, 1).contiguous(), delta_GLN.transpose(1, 2).flatten(0, 1)


def _to_tokens(x_CBLD: Tensor, place_T: Tensor, heads: int) -> Tensor:
    """[parts, B, L, D] -> [group's tokens, parts * H]."""
    parts, _, length, width = x_CBLD.shape
    x_GLCND = x_CBLD.view(parts, -1, heads, length, width).permute(1, 3, 0, 2, 4)
    return x_GLCND.flatten(0, 1)[place_T].flatten(1)


def _dropout_factor(keys_BL: Tensor, length: int, dropout: float) -> Tensor:
    """fp32 [B, L, L]: 0 where dropped, else 1 / (1 - dropout)."""
    along_L = torch.arange(length, device=keys_BL.device, dtype=torch.int32) * ALONG
    return keep_mask(keys_BL[..., None] + along_L, dropout) * (1 / (1 - dropout))


def _softmax(
    scores_BLL: Tensor, mask_BL: Tensor, scale: float, keys_BL: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """(attention weights after dropout [B, L, L], log-sum-exp of the rows fp32 [B, L])."""
    x_BLL = scores_BLL.float() * scale + mask_BL[:, None]
    top_BL1 = x_BLL.amax(-1, keepdim=True)
    weights_BLL = (x_BLL - top_BL1).exp()
    total_BL1 = weights_BLL.sum(-1, keepdim=True)
    weights_BLL = weights_BLL * total_BL1.reciprocal()
    if keys_BL is not None:
        weights_BLL = weights_BLL * _dropout_factor(keys_BL, scores_BLL.shape[-1], dropout)
    return weights_BLL.to(scores_BLL.dtype), (top_BL1 + total_BL1.log()).squeeze(-1)


def _softmax_backward(
    scores_BLL: Tensor, grad_BLL: Tensor, lse_BL: Tensor, delta_BL: Tensor, mask_BL: Tensor, scale: float,
    keys_BL: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights after dropout, gradient of the scores), both [B, L, L]; `grad_BLL` is that of dropped weights."""
    weights_BLL = (scores_BLL.float() * scale + mask_BL[:, None] - lse_BL[..., None]).exp()
    dropped_BLL, grad = weights_BLL, grad_BLL.float()
    if keys_BL is not None:
        factor_BLL = _dropout_factor(keys_BL, scores_BLL.shape[-1], dropout)
        dropped_BLL, grad = weights_BLL * factor_BLL, grad * factor_BLL
    grad_scores_BLL = weights_BLL * (grad - delta_BL[..., None]) * scale
    return dropped_BLL.to(scores_BLL.dtype), grad_scores_BLL.to(scores_BLL.dtype)


class _Pieces(NamedTuple):
    to_heads: Callable[..., Tensor]
    grad_to_heads: Callable[..., tuple[Tensor, Tensor]]
    to_tokens: Callable[..., Tensor]
    softmax: Callable[..., tuple[Tensor, Tensor]]
    softmax_backward: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def _pieces(fused: bool) -> _Pieces:
    plain = _Pieces(_to_heads, _grad_to_heads, _to_tokens, _softmax, _softmax_backward)
    return _Pieces(*(program(piece, fused) for piece in plain))
