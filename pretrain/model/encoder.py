"""The encoder over unpadded batches. The config chooses the parts of its block (`config/families.py`); BERT's are the
defaults (Devlin et al. 2019).

Shape letters: T tokens of the micro-batch, S sequences, R query positions, H hidden width, E width of the
embeddings (H except in some ELECTRA models), V vocabulary, N heads of width D.

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
from pretrain.model.attention import AttentionOptions, ProjectionWeights, RelativeRows, TokenLayout, self_attention
from pretrain.model.block import (
    BlockFunctions,
    EmbeddingWeights,
    LayerWeights,
    after_attention,
    apply_norm,
    embed,
    norm_weights,
)
from pretrain.model.compile import program
from pretrain.model.initialization import (
    attend_to_adjacent_tokens,
    attend_to_adjacent_tokens_by_rotation,
    create_parameters,
)
from pretrain.model.kernels.hash_rng import BETWEEN
from pretrain.model.parameters import (
    embedding_parameters,
    final_parameters,
    layer_parameters,
    position_parameters,
)
from pretrain.model.positions import distance_rows, relative_buckets, rotations, sinusoids


class UnpaddedBatch(Protocol):
    """The fields of a batch that the encoder reads; `pretrain.batches.batch.MicroBatch` is one."""

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
    """The backbone: embeddings, layers, and a last norm in pre-norm. `parameters.py` lists the parameters.

    Args:
        shape: sizes, dropout, and the parts of the block.
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
        relative = {"relative": RelativePositions, "disentangled": RelativeEmbeddings}.get(shape.positions)
        self.relative = None if relative is None else relative(shape)
        layers = [Layer(shape, number, compile) for number in range(shape.layers)]
        if shape.attention_init == "neighbors":
            self._initialize_to_neighbors(layers[: (shape.layers + 1) // 2])
        self.layers = nn.ModuleList(layers)
        self.final = FinalNorm(shape, compile) if shape.norm_placement == "pre" else None

    def _initialize_to_neighbors(self, layers: list[Layer]) -> None:
        shape = self.shape
        if shape.positions == "learned":
            weights = [layer.qkv_weight for layer in layers]
            attend_to_adjacent_tokens(self.embeddings.position, weights, shape.heads, shape.init_std)
            return
        for number, layer in enumerate(layers):
            attend_to_adjacent_tokens_by_rotation(
                layer.get_parameter("qkv_bias"),
                shape.heads,
                shape.rotary_base_of(number),
                interleaved=shape.positions == "rotary_interleaved",
            )

    def encode(self, batch: UnpaddedBatch, rows_R: Tensor | None = None) -> Tensor:
        """Last hidden states [T, H], or [R, H] only at the query positions `rows_R` (int64, ascending).

        In the last layer, all other tokens only serve as keys and values.
        """
        # Invariant 1: dropout depends on the sample and the place in the model, never on a generator's state.
        keys_T = batch.token_keys
        layout = TokenLayout(batch.cu_seqlens, batch.lengths, None, keys_T)
        if isinstance(self.relative, RelativePositions):
            layout = layout._replace(distance_bias=self.relative(layout.max_seqlen))
        elif self.relative is not None:
            layout = layout._replace(relative=self.relative(layout.max_seqlen))
        turns = rotations(self.shape, batch.positions)
        hidden_TH = self.embeddings(batch.input_ids, batch.token_types, batch.positions, keys_T)
        for number in range(self.shape.depth):
            layer = self.layers[number % self.shape.layers]
            keys_T = keys_T + BETWEEN
            layout = layout._replace(
                keys=keys_T,
                rows=rows_R if number == self.shape.depth - 1 else None,
                rotation=turns.get(self.shape.rotary_base_of(number % self.shape.layers)),
            )
            if self.activation_checkpointing and self.training:
                # Only CUDA's attention kernel uses the generator; all other dropout is a hash.
                hidden_TH = checkpoint(
                    layer,
                    hidden_TH,
                    layout,
                    use_reentrant=False,
                    preserve_rng_state=hidden_TH.is_cuda and self.shape.attention_dropout > 0,
                )
            else:
                hidden_TH = layer(hidden_TH, layout)
        return hidden_TH if self.final is None else self.final(hidden_TH)


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, normalized (Devlin et al., figure 2), of those that the config has.

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
        # Give the gradients of tables that nothing else uses as torch.sparse_coo, for an engine that adds up rows.
        self.sparse_gradients = False
        self.functions = BlockFunctions.of(shape)
        self.projected = shape.embedding not in (0, shape.hidden)
        create_parameters(self, embedding_parameters(shape, vocabulary_size), shape.init_std)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """int64 [T] three times and int32 [T] -> [T, H]."""
        # The look-ups stay outside: torch's own gradient of them is faster than the compiled one.
        positions_TE = None
        if self.shape.positions == "learned":
            positions_TE = self.position_rows(positions)
        elif self.shape.positions == "sinusoidal":
            positions_TE = sinusoids(positions, self.word.shape[1])
        embedded_TE = program(embed, self.fused, ("M",) * 4)(
            self.word_rows(input_ids),
            positions_TE,
            token_types if self.shape.token_types else None,
            keys,
            EmbeddingWeights.of(self, self.shape),
            self.functions,
            self.shape.hidden_dropout if self.training else 0.0,
        )
        return F.linear(embedded_TE, self.project_weight, self.project_bias) if self.projected else embedded_TE

    def word_rows(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, E]"""
        return look_up(self.word, input_ids, sparse=self.sparse_gradients and not self.tied)

    def position_rows(self, positions: Tensor) -> Tensor:
        """int64 [T] -> [T, E]"""
        return look_up(self.position, positions)


class RelativePositions(nn.Module):
    """Biases of the scores by distance, one table for all layers (Raffel et al. 2020, T5, section 2.1)."""

    table: nn.Parameter  # [buckets, N]

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        create_parameters(self, position_parameters(shape), shape.init_std)

    def forward(self, max_seqlen: int) -> Tensor:
        """fp32 [N, 2M - 1]: the bias of the distances 1 - M to M - 1, key minus query, M being `max_seqlen`."""
        distances = torch.arange(1 - max_seqlen, max_seqlen, device=self.table.device)
        buckets = relative_buckets(distances, self.shape.relative_buckets, self.shape.relative_max_distance)
        return F.embedding(buckets, self.table.float()).T.contiguous()


class RelativeEmbeddings(nn.Module):
    """Embeddings of distances, one table for all layers (He et al. 2021, DeBERTa, section 3.1).

    transformers drops entries of them in training. Ours does not: the table belongs to no sample (invariant 1).
    """

    table: nn.Parameter  # [2 * span, H]

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape, self.functions = shape, BlockFunctions.of(shape)
        create_parameters(self, position_parameters(shape), shape.init_std)

    def forward(self, max_seqlen: int) -> RelativeRows:
        """The rows of the distances between the tokens of the longest sequence."""
        row_of = distance_rows(torch.arange(1 - max_seqlen, max_seqlen), self.shape)
        rows_PH = self.table[int(row_of[0]) : int(row_of[-1]) + 1]
        if self.shape.relative_norm:
            rows_PH = apply_norm(rows_PH, norm_weights(self, "norm", self.shape), self.functions)
        return RelativeRows(rows_PH, row_of - row_of[0])


class Layer(nn.Module):
    """One Transformer layer.

    Args:
        shape: the model.
        number: from 0; which layers are local, and which has a norm before its attention, depends on it.
        compile: fuse what lies between the matmuls.
    """

    # Query, key and value one below the other: one matmul instead of three. If key and value have fewer heads, the
    # query is apart: q and kv.
    qkv_weight: nn.Parameter  # [3H, H]

    def __init__(self, shape: ModelConfig, number: int, compile: bool) -> None:
        super().__init__()
        self.shape, self.window = shape, shape.window(number)
        self.fused = compile
        self.functions = BlockFunctions.of(shape)
        self.norm_first = shape.norm_placement == "pre" and shape.has_attention_norm(number)
        create_parameters(self, layer_parameters(shape, number), shape.init_std)

    def forward(self, hidden_TH: Tensor, layout: TokenLayout) -> Tensor:
        """[T, H] -> [T, H], or [R, H] of `layout.rows`."""
        shape, training = self.shape, self.training
        normed_TH = hidden_TH
        if self.norm_first:
            weights = norm_weights(self, "attention_norm", shape)
            normed_TH = program(apply_norm, self.fused, ("M",))(hidden_TH, weights, self.functions)
        context_TH = self_attention(
            normed_TH,
            ProjectionWeights.of(self, shape),
            layout,
            AttentionOptions(shape.heads, shape.attention_dropout if training else 0.0, self.fused, self.window),
        )
        keys_T = layout.keys
        if layout.rows is not None:
            hidden_TH, keys_T = hidden_TH.index_select(0, layout.rows), keys_T[layout.rows]
        weights = LayerWeights.of(self, shape)
        dropout = shape.hidden_dropout if training else 0.0
        return program(after_attention, self.fused, ("M",) * 3)(
            context_TH, hidden_TH, keys_T, weights, self.functions, dropout
        )


class FinalNorm(nn.Module):
    """The norm after the last layer of a pre-norm model."""

    def __init__(self, shape: ModelConfig, compile: bool) -> None:
        super().__init__()
        self.shape, self.fused, self.functions = shape, compile, BlockFunctions.of(shape)
        create_parameters(self, final_parameters(shape), shape.init_std)

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] -> [R, H]"""
        return program(apply_norm, self.fused, ("M",))(
            hidden_RH, norm_weights(self, "norm", self.shape), self.functions
        )


def look_up(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """The rows `ids` (int64 [T]) of `table` [V, E], whose gradient is summed in fp32 and rounded once: [T, E].

    Args:
        sparse: give the gradient as those rows only, uncoalesced, for a caller that sums them itself.
    """
    # On CPU torch sums a gradient in the table's own precision: a row that is read a thousand times, such as that of
    # [MASK], would be off by several percent in bf16. Its CUDA kernels sum in fp32; up to 3,072 tokens, they sum short
    # runs, which are added in the table's precision (aten EmbeddingBackwardKernel.cu and Embedding.cu).
    if sparse or not table.is_cpu or table.dtype == torch.float32:
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
