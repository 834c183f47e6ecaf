"""BERT as published (Devlin et al. 2019), over unpadded batches: post-norm, learned positions, erf-GELU.

Shape letters: T tokens of the micro-batch, S sequences, R rows asked for, H hidden width, E width of the
embeddings (H but in some ELECTRA models), F feed-forward width, V vocabulary, P positions.

A layer keeps its parameters flat and what follows the attention in one pure function: torch.compile then makes
one program for all layers of a model, and ZeRO-3 gathers a layer's parameters once, outside of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config import ModelConfig
from pretrain.model.attention.dispatch import BETWEEN, program, self_attention
from pretrain.model.initialisation import attend_to_neighbours
from pretrain.model.parts import hash_dropout, layer_norm, linear, normal, ones, zeros


class UnpaddedBatch(Protocol):
    """What the encoder reads of a batch; `pretrain.batches.loader.MicroBatch` is one."""

    @property
    def input_ids(self) -> Tensor: ...  # int64 [T]
    @property
    def token_types(self) -> Tensor: ...  # int64 [T]
    @property
    def positions(self) -> Tensor: ...  # int64 [T]
    @property
    def cu_seqlens(self) -> Tensor: ...  # int32 [S + 1]
    @property
    def token_keys(self) -> Tensor: ...  # int32 [T]
    @property
    def lengths(self) -> tuple[int, ...]: ...


class Encoder(nn.Module):
    """The backbone: embeddings and layers. Parameter names are listed in `pretrain/checkpoint/layouts.py`.

    Args:
        shape: sizes and dropout.
        vocabulary_size: V.
        compile: fuse the layers with torch.compile.
        activation_checkpointing: keep only the layers' inputs and compute the rest again in the backward pass.
    """

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        *,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        self.activation_checkpointing = activation_checkpointing
        self.embeddings = Embeddings(shape, vocabulary_size, compile)
        layers = [Layer(shape, compile) for _ in range(shape.layers)]
        if shape.attention_init == "neighbours":
            attend_to_neighbours(
                self.embeddings.position,
                [layer.qkv_weight for layer in layers[: (shape.layers + 1) // 2]],
                shape.heads,
                shape.init_std,
            )
        self.layers = nn.ModuleList(layers)

    def encode(self, batch: UnpaddedBatch, rows_R: Tensor | None = None) -> Tensor:
        """Last hidden states [T, H], or [R, H] at the token rows `rows_R` (int64, ascending) alone.

        Rows that nobody asks for only serve as keys and values in the last layer.
        """
        # Dropout is drawn from the sample and the place, never from a generator's state: law 1 reaches to here.
        keys_T = batch.token_keys
        max_seqlen = max(batch.lengths)
        hidden_TH = self.embeddings(batch.input_ids, batch.token_types, batch.positions, keys_T)
        for number, layer in enumerate(self.layers):
            keys_T = keys_T + BETWEEN
            rows = rows_R if number == len(self.layers) - 1 else None
            arguments = (hidden_TH, keys_T, batch.cu_seqlens, max_seqlen, rows)
            if self.activation_checkpointing and self.training:
                # Only CUDA's attention kernel draws from the generator; all other dropout is a hash.
                hidden_TH = checkpoint(
                    layer,
                    *arguments,
                    use_reentrant=False,
                    preserve_rng_state=hidden_TH.is_cuda and self.shape.attention_dropout > 0,
                )
            else:
                hidden_TH = layer(*arguments)
        return hidden_TH


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, normalised (Devlin et al., figure 2).

    Where they are narrower or wider than the layers, a projection follows (google-research/electra modeling.py,
    embeddings_project).
    """

    def __init__(self, shape: ModelConfig, vocabulary_size: int, compile: bool) -> None:
        super().__init__()
        self.dropout, self.eps = shape.hidden_dropout, shape.layer_norm_eps
        self.fused = compile
        self.tied = True  # the words serve as a decoder, too
        self.sparse_gradient = False  # of the words: torch.sparse_coo, for an engine that adds up rows
        hidden, width = shape.hidden, shape.embedding or shape.hidden
        self.word = normal(shape.init_std, vocabulary_size, width)
        self.position = normal(shape.init_std, shape.max_positions, width)
        self.token_type = normal(shape.init_std, 2, width)
        self.norm_weight, self.norm_bias = ones(width), zeros(width)
        self.projected = width != hidden
        if self.projected:
            self.project_weight, self.project_bias = normal(shape.init_std, hidden, width), zeros(hidden)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """int64 [T] three times and int32 [T] -> [T, H]."""
        # The look-ups stay outside: torch's own gradient of them is faster than the compiled one.
        embedded_TE = program(embed, self.fused)(
            look_up(self.word, input_ids, sparse=self.sparse_gradient),
            look_up(self.position, positions),
            token_types,
            keys,
            self.token_type,
            self.norm_weight,
            self.norm_bias,
            self.eps,
            self.dropout if self.training else 0.0,
        )
        return F.linear(embedded_TE, self.project_weight, self.project_bias) if self.projected else embedded_TE


class AfterAttention(NamedTuple):
    """A layer's parameters past the attention, in the order of its arithmetic."""

    attention_out_weight: Tensor  # [H, H]
    attention_out_bias: Tensor
    attention_norm_weight: Tensor  # [H]
    attention_norm_bias: Tensor
    ffn_in_weight: Tensor  # [F, H]
    ffn_in_bias: Tensor
    ffn_out_weight: Tensor  # [H, F]
    ffn_out_bias: Tensor
    ffn_norm_weight: Tensor  # [H]
    ffn_norm_bias: Tensor


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: ModelConfig, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        hidden, ffn = shape.hidden, shape.intermediate
        # Query, key and value stacked: one matmul instead of three.
        self.qkv_weight, self.qkv_bias = normal(shape.init_std, 3 * hidden, hidden), zeros(3 * hidden)
        self.attention_out_weight, self.attention_out_bias = (
            normal(shape.init_std, hidden, hidden),
            zeros(hidden),
        )
        self.attention_norm_weight, self.attention_norm_bias = ones(hidden), zeros(hidden)
        self.ffn_in_weight, self.ffn_in_bias = normal(shape.init_std, ffn, hidden), zeros(ffn)
        self.ffn_out_weight, self.ffn_out_bias = normal(shape.init_std, hidden, ffn), zeros(hidden)
        self.ffn_norm_weight, self.ffn_norm_bias = ones(hidden), zeros(hidden)

    def forward(
        self,
        hidden_TH: Tensor,
        keys_T: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H], or [R, H] of `rows_R`."""
        shape, training = self.shape, self.training
        context_TH = self_attention(
            hidden_TH,
            self.qkv_weight,
            self.qkv_bias,
            cu_seqlens,
            max_seqlen,
            rows_R,
            shape.heads,
            keys_T,
            shape.attention_dropout if training else 0.0,
            self.fused,
        )
        if rows_R is not None:
            hidden_TH, keys_T = hidden_TH.index_select(0, rows_R), keys_T[rows_R]
        weights = AfterAttention(*(getattr(self, name) for name in AfterAttention._fields))
        dropout = shape.hidden_dropout if training else 0.0
        eps = shape.layer_norm_eps
        return program(after_attention, self.fused)(context_TH, hidden_TH, keys_T, weights, eps, dropout)


def look_up(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """The rows `ids` (int64 [T]) of `table` [V, E], whose gradient is summed in fp32 and rounded once: [T, E].

    Args:
        sparse: give the gradient as the rows alone, uncoalesced, for a caller that sums them itself.
    """
    # On CPU torch sums a gradient in the table's own precision: a row that is read a thousand times, such as that of
    # [MASK], would be off by several percent in bf16. Its CUDA kernels sum in fp32, up to 3,072 tokens in short runs that
    # are added up in the table's precision (aten EmbeddingBackwardKernel.cu and Embedding.cu).
    if sparse or table.is_cuda or table.dtype == torch.float32:
        return F.embedding(ids, table, sparse=sparse)
    return _LookUp.apply(table, ids)  # pyright: ignore[reportReturnType]


class _LookUp(torch.autograd.Function):
    """A look-up in a half-precision table on CPU."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids_T,), (grad_TE,) = ctx.saved_tensors, grads
        # Only rows that were read are summed: an fp32 copy of the table would take three times as long.
        read_R, place_T = ids_T.unique(return_inverse=True)
        sums_RE = torch.ops.aten.embedding_dense_backward(grad_TE.float(), place_T, len(read_R), -1, False)
        whole_VE = grad_TE.new_zeros(ctx.rows, grad_TE.shape[1])
        return whole_VE.index_copy_(0, read_R, sums_RE.to(grad_TE.dtype)), None


def embed(
    words_TE: Tensor,
    positions_TE: Tensor,
    token_types_T: Tensor,
    keys_T: Tensor,
    token_type_2E: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    dropout: float,
) -> Tensor:
    """[T, E] normalised sum of the three embeddings."""
    first_E, second_E = token_type_2E.float()  # before they are spread, so that their gradient is summed in fp32
    types_TE = torch.where(token_types_T[:, None] == 0, first_E, second_E)
    summed_TE = words_TE.float() + positions_TE.float() + types_TE
    embedded_TE = hash_dropout(layer_norm(summed_TE, norm_weight, norm_bias, eps), keys_T, 0, dropout)
    return embedded_TE.to(words_TE.dtype)


def after_attention(
    context_TH: Tensor, hidden_TH: Tensor, keys_T: Tensor, w: AfterAttention, eps: float, dropout: float
) -> Tensor:
    """Output projection, residual and LayerNorm, then the feed-forward network with its own: [T, H]."""
    attended_TH = linear(context_TH, w.attention_out_weight, w.attention_out_bias)
    attended_TH = hidden_TH + hash_dropout(attended_TH, keys_T, 1, dropout)
    attended_TH = layer_norm(attended_TH, w.attention_norm_weight, w.attention_norm_bias, eps)
    attended_TH = attended_TH.to(hidden_TH.dtype)
    inner_TF = F.gelu(linear(attended_TH, w.ffn_in_weight, w.ffn_in_bias)).to(hidden_TH.dtype)
    output_TH = linear(inner_TF, w.ffn_out_weight, w.ffn_out_bias)
    output_TH = attended_TH + hash_dropout(output_TH, keys_T, 2, dropout)
    return layer_norm(output_TH, w.ffn_norm_weight, w.ffn_norm_bias, eps).to(hidden_TH.dtype)
