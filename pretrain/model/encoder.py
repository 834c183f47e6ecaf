"""BERT as published (Devlin et al. 2019), over unpadded batches: post-norm, learned positions, erf-GELU.

Shape letters: T tokens of the micro-batch, S sequences, R query positions, H hidden width, E width of the
embeddings (H except in some ELECTRA models), V vocabulary.

A layer keeps its parameters flat, and what follows the attention is one pure function (`block.after_attention`). So
torch.compile makes one program for all layers of a model, and ZeRO-3 gathers a layer's parameters once, outside of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config import ModelConfig
from pretrain.model.attention import AttentionOptions, TokenLayout, self_attention
from pretrain.model.block import BlockFunctions, EmbeddingWeights, LayerWeights, after_attention, embed
from pretrain.model.compile import program
from pretrain.model.hash_rng import BETWEEN
from pretrain.model.initialisation import attend_to_adjacent_tokens, create_parameters
from pretrain.model.parameters import embedding_parameters, layer_parameters


class UnpaddedBatch(Protocol):
    """The fields of a batch that the encoder reads; `pretrain.batches.loader.MicroBatch` is one."""

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
    """The backbone: embeddings and layers. `pretrain/model/parameters.py` lists the parameters.

    Args:
        shape: sizes, dropout, norm and activation.
        vocabulary_size: V.
        compile: fuse the layers with torch.compile.
        activation_checkpointing: keep only the layers' inputs and compute the rest again in the backward pass.

    Raises:
        InputError: `shape` names an unknown norm or activation.
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
            attend_to_adjacent_tokens(
                self.embeddings.position,
                [layer.qkv_weight for layer in layers[: (shape.layers + 1) // 2]],
                shape.heads,
                shape.init_std,
            )
        self.layers = nn.ModuleList(layers)

    def encode(self, batch: UnpaddedBatch, rows_R: Tensor | None = None) -> Tensor:
        """Last hidden states [T, H], or [R, H] only at the query positions `rows_R` (int64, ascending).

        In the last layer, all other tokens only serve as keys and values.
        """
        # Invariant 1: dropout depends on the sample and the place in the model, never on a generator's state.
        keys_T = batch.token_keys
        max_seqlen = max(batch.lengths)
        hidden_TH = self.embeddings(batch.input_ids, batch.token_types, batch.positions, keys_T)
        for number, layer in enumerate(self.layers):
            keys_T = keys_T + BETWEEN
            rows = rows_R if number == len(self.layers) - 1 else None
            arguments = (hidden_TH, keys_T, batch.cu_seqlens, max_seqlen, rows)
            if self.activation_checkpointing and self.training:
                # Only CUDA's attention kernel uses the generator; all other dropout is a hash.
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

    A projection follows if they are narrower or wider than the layers (google-research/electra modeling.py,
    embeddings_project).
    """

    word: nn.Parameter  # [V, E]
    position: nn.Parameter  # [P, E]
    project_weight: nn.Parameter  # [H, E]
    project_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, vocabulary_size: int, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        self.tied = True  # the words serve as a decoder, too
        self.sparse_gradient = False  # of the words: torch.sparse_coo, for an engine that adds up rows
        self.functions = BlockFunctions.of(shape)
        self.projected = shape.embedding not in (0, shape.hidden)
        create_parameters(self, embedding_parameters(shape, vocabulary_size), shape.init_std)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """int64 [T] three times and int32 [T] -> [T, H]."""
        # The look-ups stay outside: torch's own gradient of them is faster than the compiled one.
        embedded_TE = program(embed, self.fused)(
            look_up(self.word, input_ids, sparse=self.sparse_gradient),
            look_up(self.position, positions),
            token_types,
            keys,
            EmbeddingWeights.of(self, self.shape),
            self.functions,
            self.shape.hidden_dropout if self.training else 0.0,
        )
        return F.linear(embedded_TE, self.project_weight, self.project_bias) if self.projected else embedded_TE


class Layer(nn.Module):
    """One Transformer layer."""

    qkv_weight: nn.Parameter  # [3H, H], query, key and value one below the other: one matmul instead of three
    qkv_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        self.functions = BlockFunctions.of(shape)
        create_parameters(self, layer_parameters(shape), shape.init_std)

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
            TokenLayout(cu_seqlens, max_seqlen, rows_R, keys_T),
            AttentionOptions(shape.heads, shape.attention_dropout if training else 0.0, self.fused),
        )
        if rows_R is not None:
            hidden_TH, keys_T = hidden_TH.index_select(0, rows_R), keys_T[rows_R]
        weights = LayerWeights.of(self, shape)
        dropout = shape.hidden_dropout if training else 0.0
        return program(after_attention, self.fused)(context_TH, hidden_TH, keys_T, weights, self.functions, dropout)


def look_up(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """The rows `ids` (int64 [T]) of `table` [V, E], whose gradient is summed in fp32 and rounded once: [T, E].

    Args:
        sparse: give the gradient as those rows only, uncoalesced, for a caller that sums them itself.
    """
    # On CPU torch sums a gradient in the table's own precision: a row that is read a thousand times, such as that of
    # [MASK], would be off by several percent in bf16. Its CUDA kernels sum in fp32; up to 3,072 tokens, they sum short
    # runs, which are added in the table's precision (aten EmbeddingBackwardKernel.cu and Embedding.cu).
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
