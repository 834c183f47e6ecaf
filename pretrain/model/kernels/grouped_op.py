"""Attention by batched matmuls over groups of sequences of similar lengths, as a torch operator with its gradient.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D; inside a group of G
units (sequences, or chunks of them) L tokens and Q queries each, B = G * N. `terms.py` defines M, `distances.py` P.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from pretrain.model.kernels.distances import DistanceTables, DistanceTerms
from pretrain.model.kernels.grouping import SequenceGroup, cut_into_units, group_sequences
from pretrain.model.kernels.hash_rng import HEAD_STEP, hash_bits
from pretrain.model.kernels.kernels import Kernels, heads_first, kernels
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout, query_boundaries
from pretrain.model.kernels.native import NativeSequences, prefer_native_attention
from pretrain.model.kernels.rounding import LENGTH_MULTIPLE, compiles_each_shape
from pretrain.model.kernels.terms import GroupTerms

# Maximum scores of one batched matmul: 2^20 bf16 entries are 2 MiB, which stay in cache between operations.
SCORES_PER_MATMUL = 1 << 20
# On a GPU, scores only have to fit into memory: 128 MiB of fp32 for each of about five tensors.
SCORES_PER_MATMUL_ON_GPU = 1 << 25


def grouped_attention(
    qkv: Tensor,
    bias: Tensor | None,
    layout: TokenLayout,
    options: AttentionOptions,
    tables: DistanceTables | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention within each sequence, group by group.

    Args:
        qkv: [T, 3H], query, key and value concatenated, without their bias.
        bias: [3H], or None if there is none or `qkv` contains it.
        layout: sequences, query positions, dropout seeds, and rotary angles.
        options: heads, dropout, compilation and window.
        tables: projected distance embeddings; None if scores do not use them.

    Returns:
        (context [R, H], differentiable once; log-sum-exp of each query's scores, fp32 [R, N]).
    """
    if layout.queries is not None and not layout.queries.is_cpu:
        # The number of queries per sequence is only on the device; reading it would wait for all queued work in each
        # pass. Using all tokens as queries only computes more scores in the last layer.
        context_TH, lse_TN = grouped_attention(qkv, bias, layout._replace(queries=None), options, tables)
        return context_TH.index_select(0, layout.queries), lse_TN.index_select(0, layout.queries)
    return forward_op(*Arguments.of(qkv, bias, layout, options, tables or DistanceTables()))


class Arguments(NamedTuple):
    """The operator's arguments, defined once. torch passes an operator only tensors, numbers and lists of numbers."""

    qkv: Tensor  # qkv and bias: see `grouped_attention`
    bias: Tensor | None
    rows: Tensor | None  # `queries` of `layout.TokenLayout`: the query positions
    keys: Tensor  # `seeds` of `layout.TokenLayout`: dropout seeds
    distance_bias: Tensor | None  # see `layout.TokenLayout`
    cos: Tensor | None  # cos and sin, [T, K]: see `positions.Rotation`
    sin: Tensor | None
    distance_keys: Tensor | None  # distance_keys, distance_queries, row_by_distance: see `distances.DistanceTables`
    distance_queries: Tensor | None
    row_by_distance: Tensor | None
    lengths: Sequence[int]  # number of tokens of each sequence
    interleaved: bool  # see `positions.Rotation`
    heads: int  # heads, dropout, fused, window: see `layout.AttentionOptions`
    dropout: float
    fused: bool
    window: int

    @classmethod
    def of(
        cls, qkv: Tensor, bias: Tensor | None, layout: TokenLayout, options: AttentionOptions, tables: DistanceTables
    ) -> Arguments:
        """Flatten the arguments of `grouped_attention`."""
        cos, sin, interleaved = layout.rotation or (None, None, False)
        tensors = layout.queries, layout.seeds, layout.distance_bias, cos, sin
        return cls(qkv, bias, *tensors, *tables, layout.lengths, interleaved, *options)

    def detached(self) -> Arguments:
        """Return the arguments without gradients: whether they require them must not affect compiled code."""
        tensors = {name: getattr(self, name) for name in _DIFFERENTIABLE}
        return self._replace(**{name: x.detach() for name, x in tensors.items() if x is not None})

    @property
    def tables(self) -> DistanceTables:
        return DistanceTables(self.distance_keys, self.distance_queries, self.row_by_distance)

    @property
    def rotary(self) -> _Rotary:
        return _Rotary(self.cos, self.sin, self.interleaved)

    @property
    def runs_natively(self) -> bool:
        """Return whether `native` computes the operator, not batched matmuls."""
        has_terms = self.distance_bias is not None or self.tables.term_count
        longest = max(self.lengths)
        return not has_terms and prefer_native_attention(self.qkv, self.heads, longest, self.window)

    @property
    def native(self) -> NativeSequences:
        offsets = _offsets(tuple(self.lengths))
        query_offsets = offsets if self.rows is None else query_boundaries(self.rows, offsets)
        flags = self.heads, self.interleaved, self.window, self.dropout
        return NativeSequences(offsets, self.rows, query_offsets, self.keys, self.cos, self.sin, *flags)


_DIFFERENTIABLE = "qkv", "bias", "distance_bias", "distance_keys", "distance_queries"
_NUM_TENSORS = 1 + Arguments._fields.index("row_by_distance")  # the tensors are the first arguments
_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[int]: "SymInt[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
}
_SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Arguments).items())


@torch.library.custom_op("bertrain::grouped_attention", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def forward_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return (context, log-sum-exp of the scores); takes the fields of `Arguments`."""
    args = Arguments(*arguments).detached()
    if args.runs_natively:
        return args.native.forward(args.qkv, args.bias)
    context_RH, lse_RN = _empty_outputs(args)
    heads, ops, tables = args.heads, kernels(args.fused), args.tables
    for group in sequence_groups(args):
        q_BQD, k_BLD, v_BLD = _gather_qkv(ops, args, group)
        token_GQ = _query_tokens(group, args.rows)
        distances = DistanceTerms(group, token_GQ, heads, args.window, tables)
        softmax = _SoftmaxArguments.of(args, group, token_GQ, q_BQD.shape[-1])
        context_BQD = torch.empty_like(q_BQD)
        lse_BQ = q_BQD.new_empty(q_BQD.shape[:2], dtype=torch.float32)
        for b in head_slices(q_BQD, k_BLD, heads if tables.term_count else 1):
            scores_BQL = distances.unscaled_scores(b, q_BQD[b], k_BLD[b])
            weights_BQL, lse_BQ[b] = ops.softmax(scores_BQL, *softmax.for_rows(b))
            torch.bmm(weights_BQL, v_BLD[b], out=context_BQD[b])
        queries = group.queries
        context_RH[queries.range] = ops.to_tokens(context_BQD, queries.slot_T, None, heads).flatten(1)
        lse_RN[queries.range] = _per_head_to_tokens(lse_BQ, queries.slot_T, heads)
    return context_RH, lse_RN


@torch.library.custom_op(
    "bertrain::grouped_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_context, Tensor context, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward_op(
    grad_context: Tensor, context: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (gradient of `qkv` [T, 3H], fp32 gradients of `distance_bias` [N, 2M - 1], `distance_keys` and
    `distance_queries` [N, P, D]); for an argument that is None, an empty tensor.

    Scores are recomputed, as in flash attention (Dao et al. 2022, alg. 4), from the context [R, H] and the log-sum-exp
    [R, N] of the forward pass.
    """
    context, lse, args = context.detach(), lse.detach(), Arguments(*arguments).detached()
    if args.runs_natively:
        grad_qkv = args.native.backward(grad_context, (context, lse), args.qkv, args.bias)
        return grad_qkv, _empty_bias_gradient(args), *args.tables.zero_gradients(args.qkv).pair()
    heads, ops, tables = args.heads, kernels(args.fused), args.tables
    grad_tables = tables.zero_gradients(args.qkv)
    grad_qkv = torch.empty_like(args.qkv) if args.rows is None else torch.zeros_like(args.qkv)
    grad_bias_NM = _empty_bias_gradient(args).zero_()
    for group in sequence_groups(args):
        q_BQD, k_BLD, v_BLD = _gather_qkv(ops, args, group)
        queries = group.queries
        grad_context_BQD, delta_BQ = ops.grad_to_heads(grad_context, context, queries.index_GL, queries.valid_GL, heads)
        lse_BQ = heads_first(_without_padding(lse[queries.index_GL], queries.valid_GL, args.rows))
        token_GQ = _query_tokens(group, args.rows)
        distances = DistanceTerms(group, token_GQ, heads, args.window, tables)
        softmax = _SoftmaxArguments.of(args, group, token_GQ, q_BQD.shape[-1])
        grad_q_BQD, grad_k_BLD, grad_v_BLD = (torch.empty_like(x) for x in (q_BQD, k_BLD, v_BLD))
        for b in head_slices(q_BQD, k_BLD, heads if tables.term_count else 1):
            scores_BQL = distances.unscaled_scores(b, q_BQD[b], k_BLD[b])
            grad_weights_BQL = torch.bmm(grad_context_BQD[b], v_BLD[b].mT)
            weights_BQL, grad_scores_BQL = ops.softmax_backward(
                scores_BQL, grad_weights_BQL, lse_BQ[b], delta_BQ[b], *softmax.for_rows(b)
            )
            torch.bmm(grad_scores_BQL, k_BLD[b], out=grad_q_BQD[b])
            torch.bmm(grad_scores_BQL.mT, q_BQD[b], out=grad_k_BLD[b])
            torch.bmm(weights_BQL.mT, grad_context_BQD[b], out=grad_v_BLD[b])
            operands, grads = (q_BQD[b], k_BLD[b]), (grad_q_BQD[b], grad_k_BLD[b])
            distances.add_gradients(b, grad_scores_BQL, operands, grads, grad_tables)
            if args.distance_bias is not None:
                softmax.terms.add_gradient(grad_bias_NM, b, grad_scores_BQL.float() / softmax.scale)
        _write_gradients(ops, grad_qkv, (grad_q_BQD, grad_k_BLD, grad_v_BLD), group, args)
    return grad_qkv, grad_bias_NM, *grad_tables.pair()


@forward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(Arguments(*arguments))


@backward_op.register_fake
def _(grad_context: Tensor, context: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = Arguments(*arguments)
    return torch.empty_like(args.qkv), _empty_bias_gradient(args), *args.tables.zero_gradients(args.qkv).pair()


@functools.lru_cache(maxsize=8)  # used by every layer, forward and backward
def _offsets(lengths: tuple[int, ...]) -> Tensor:
    """Return int32 [S + 1], offsets of sequences with these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_context: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    context, lse, *tensors = ctx.saved_tensors
    args = Arguments(*tensors, *ctx.options)
    grad_qkv, *table_grads = backward_op(grad_context, context, lse, *args)
    grads: dict[str, Tensor | None] = dict.fromkeys(Arguments._fields)
    grads["qkv"], grads["bias"] = grad_qkv, None if args.bias is None else grad_qkv.sum(0)
    for name, grad in zip(_DIFFERENTIABLE[2:], table_grads, strict=True):
        table = getattr(args, name)
        grads[name] = None if table is None else grad.to(table.dtype)
    return tuple(grads.values())


forward_op.register_autograd(_gradients, setup_context=_save_for_backward)


def _empty_outputs(args: Arguments) -> tuple[Tensor, Tensor]:
    """Allocate context [R, H] and fp32 log-sum-exp [R, N]."""
    qkv, queries = args.qkv, (args.qkv if args.rows is None else args.rows).shape[0]
    return qkv.new_empty(queries, qkv.shape[1] // 3), qkv.new_empty(queries, args.heads, dtype=torch.float32)


def _empty_bias_gradient(args: Arguments) -> Tensor:
    """Allocate the gradient of `distance_bias`, fp32 in its shape, or [0] without one."""
    shape = (0,) if args.distance_bias is None else args.distance_bias.shape
    return args.qkv.new_empty(shape, dtype=torch.float32)


def sequence_groups(args: Arguments) -> tuple[SequenceGroup, ...]:
    """Return the groups of a micro-batch, cached for all layers; `args.rows` must be on the host."""
    boundaries, queries = tuple(itertools.accumulate(args.lengths, initial=0)), None
    if args.rows is not None:
        unit_starts = cut_into_units(boundaries, args.window)[0].query_start if args.window else boundaries[:-1]
        starts = torch.tensor([*unit_starts, boundaries[-1]], device=args.rows.device)
        queries = tuple(query_boundaries(args.rows, starts).tolist())
    multiple = LENGTH_MULTIPLE if compiles_each_shape(args.qkv) else 1
    return group_sequences(boundaries, queries, args.heads, args.qkv.device, args.window, multiple)


def _query_tokens(group: SequenceGroup, rows: Tensor | None) -> Tensor:
    """Return int64 [G, Q], the index of each query's token."""
    return group.queries.index_GL if rows is None else rows[group.queries.index_GL]


class _Rotary(NamedTuple):
    """The fields of `positions.Rotation`; without rotary positions, `cos` and `sin` are None."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool

    def at(self, tokens: slice | Tensor) -> tuple[Tensor, Tensor, bool] | tuple[()]:
        """Return the rotation of these tokens: the last arguments of `kernels.to_tokens`."""
        if self.cos is None or self.sin is None:
            return ()
        return self.cos[tokens], self.sin[tokens], self.interleaved


class _SoftmaxArguments(NamedTuple):
    """Arguments of the softmax kernels for a group, in both passes."""

    mask_BL: Tensor
    scale: float
    seeds_BQ: Tensor | None  # dropout seeds
    dropout: float
    terms: GroupTerms

    @classmethod
    def of(cls, args: Arguments, group: SequenceGroup, token_GQ: Tensor, width: int) -> _SoftmaxArguments:
        """Create the arguments for a group whose queries are the tokens `token_GQ`; `width` is the head width."""
        seeds_BQ = seeds_per_head(args.keys[token_GQ], args.heads) if args.dropout else None
        terms = GroupTerms(group, token_GQ, args.heads, args.window, args.distance_bias)
        scale = 1 / math.sqrt(width * (1 + args.tables.term_count))  # number of products that a score sums
        return cls(group.mask_GL.repeat_interleave(args.heads, 0), scale, seeds_BQ, args.dropout, terms)

    def for_rows(self, b: slice) -> tuple[Any, ...]:
        """Return the arguments of the softmax kernels for rows `b`, starting with the mask."""
        seeds = None if self.seeds_BQ is None else self.seeds_BQ[b]
        return self.mask_BL[b], self.scale, seeds, self.dropout, *self.terms.for_rows(b)


def _gather_qkv(ops: Kernels, args: Arguments, group: SequenceGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Gather (queries [B, Q, D], keys [B, L, D], values [B, L, D]) of one group, with bias and rotation."""
    split = 3, args.heads, -1
    x_T3ND = args.qkv.unflatten(1, split)
    biases = (None, None, None) if args.bias is None else args.bias.unflatten(0, split).unbind(0)
    rotation = () if args.cos is None else args.rotary
    q_BQD = ops.to_heads(x_T3ND[:, 0], biases[0], _query_tokens(group, args.rows), *rotation)
    k_BLD = ops.to_heads(x_T3ND[:, 1], biases[1], group.keys.index_GL, *rotation)
    v_BLD = ops.to_heads(x_T3ND[:, 2], biases[2], group.keys.index_GL)
    return q_BQD, k_BLD, v_BLD


def _write_gradients(
    ops: Kernels,
    grad_qkv: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    group: SequenceGroup,
    args: Arguments,
) -> None:
    """Write the gradients of a group's queries [B, Q, D], keys and values [B, L, D] to `grad_qkv` [T, 3H]."""
    hidden, (grad_q_BQD, grad_k_BLD, grad_v_BLD), queries = grad_qkv.shape[1] // 3, grads, group.queries
    heads, rotary = args.heads, args.rotary
    rows = queries.range if args.rows is None else args.rows[queries.range]
    grad_q_RH = ops.to_tokens(grad_q_BQD, queries.slot_T, None, heads, *rotary.at(rows)).flatten(1)
    if isinstance(rows, slice):
        grad_qkv[rows, :hidden] = grad_q_RH
    else:  # a token may be a query twice
        grad_qkv[:, :hidden].index_add_(0, rows, grad_q_RH)
    tokens, slots = group.keys.range, (group.keys.slot_T, group.keys.second_slot_T, heads)
    grad_qkv[tokens, hidden : 2 * hidden] = ops.to_tokens(grad_k_BLD, *slots, *rotary.at(tokens)).flatten(1)
    grad_qkv[tokens, 2 * hidden :] = ops.to_tokens(grad_v_BLD, *slots).flatten(1)


def _without_padding(lse_GQN: Tensor, valid_GQ: Tensor, rows: Tensor | None) -> Tensor:
    """Set padding to infinity: it may repeat a query that attends to other keys, so its weights could overflow."""
    return lse_GQN if rows is None else lse_GQN.masked_fill(~valid_GQ[..., None], math.inf)


def head_slices(q_BQD: Tensor, k_BLD: Tensor, heads: int) -> list[slice]:
    """Return slices of the first axis whose scores fit one matmul: whole units of `heads` rows, or part of a unit."""
    limit = SCORES_PER_MATMUL if q_BQD.is_cpu else SCORES_PER_MATMUL_ON_GPU
    step = max(1, limit // (q_BQD.shape[1] * k_BLD.shape[1]))
    step = step - step % heads or max(divisor for divisor in range(1, step + 1) if heads % divisor == 0)
    return [slice(b, b + step) for b in range(0, len(q_BQD), step)]


def _per_head_to_tokens(x_BQ: Tensor, slot_T: Tensor, heads: int) -> Tensor:
    """[B, Q] -> [queries of the group, N]."""
    return x_BQ.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[slot_T]


def seeds_per_head(seeds_GQ: Tensor, heads: int) -> Tensor:
    """Derive a dropout seed for each query and head: int32 [G, Q] -> int32 [B, Q]."""
    head_N1 = torch.arange(heads, device=seeds_GQ.device, dtype=torch.int32)[:, None]
    return hash_bits(seeds_GQ[:, None] + head_N1 * HEAD_STEP).flatten(0, 1)
