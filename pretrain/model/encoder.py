"""The encoder over unpadded batches. The config selects the parts of its blocks (`config/families.py`); the
defaults are BERT's (Devlin et al. 2019).

BERT's forward pass is in four files, in this order: `encoder.py`, `block.py`, `attention.py`, `heads.py`. They call
kernels (`kernels/`) and parts that BERT lacks, such as `relative_positions.py`, `norms.py`, `final_norm.py`.

Shape letters: T tokens of the micro-batch, S sequences, R query positions, H hidden width, E width of the
embeddings (H except in some ELECTRA models), V vocabulary size, P number of positions, U distinct ids.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, EmbeddingWeights, Layer, embed
from pretrain.model.compile import maybe_compile
from pretrain.model.final_norm import FinalNorm
from pretrain.model.initialization import create_parameters, initialize_neighbors
from pretrain.model.kernels.hash_rng import LAYER_STEP
from pretrain.model.kernels.layout import TokenLayout, UnpaddedBatch
from pretrain.model.kernels.rounding import pad_tokens
from pretrain.model.parameters import embedding_parameters
from pretrain.model.positions import rotations, sinusoids
from pretrain.model.relative_positions import RelativeBiases, RelativeEmbeddings


class Encoder(nn.Module):
    """The backbone: embeddings, layers and, in a pre-norm model, a final norm. `parameters.py` lists the parameters.

    Args:
        shape: the model's config: sizes, dropout, and the parts of the block.
        vocabulary_size: V.
        compile: fuse operations of the layers with torch.compile.
        activation_checkpointing: keep only the layers' inputs and recompute their activations in the backward pass.

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
        relative_class = {"relative": RelativeBiases, "disentangled": RelativeEmbeddings}.get(shape.positions)
        self.relative = None if relative_class is None else relative_class(shape)
        layers = [Layer(shape, index, compile) for index in range(shape.layers)]
        if shape.attention_init == "neighbors":
            initialize_neighbors(shape, self.embeddings, layers[: (shape.layers + 1) // 2])
        self.layers = nn.ModuleList(layers)
        self.final = FinalNorm(shape, compile) if shape.norm_placement == "pre" else None
        self.is_rotary = shape.positions.startswith("rotary")

    def use_rotary_bases(self, base: float, local: float) -> None:
        """Use other rotary frequencies from now on; arguments as for `ModelConfig.with_rotary_bases`."""
        self.shape = self.shape.with_rotary_bases(base, local)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            layer.rotary_base = self.shape.rotary_base_of(index)

    def encode(self, batch: UnpaddedBatch, queries_R: Tensor | None = None) -> Tensor:
        """Return the last hidden states [T, H], or [R, H] at the query positions `queries_R` (int64, ascending).

        With `queries_R`, the last layer uses all other tokens only as keys and values.
        """
        num_outputs = len(batch.input_ids if queries_R is None else queries_R)
        batch = pad_tokens(batch, self.embeddings.word)  # fewer distinct shapes for oneDNN (bf16 on CPUs)
        # Invariant 1 in docs/invariants.md: dropout depends on sample, position and layer, not on a generator's state.
        seeds_T = batch.token_keys
        layout = TokenLayout(batch.cu_seqlens, batch.lengths, None, seeds_T)
        if self.relative is not None:
            layout = self.relative(layout)
        rotation_by_base = rotations(self.shape, batch.positions) if self.is_rotary else {}
        hidden_TH = self.embeddings(batch.input_ids, batch.token_types, batch.positions, seeds_T)
        layer_calls: list[Any] = [*self.layers] * self.shape.recursions  # BERT applies each layer once
        for depth, layer in enumerate(layer_calls, start=1):
            seeds_T = seeds_T + LAYER_STEP
            queries = queries_R if depth == len(layer_calls) else None
            layout = layout._replace(seeds=seeds_T, queries=queries, rotation=rotation_by_base.get(layer.rotary_base))
            if self.activation_checkpointing and self.training:
                # Only dropout in CUDA's attention kernel uses a generator; all other dropout masks are hashes.
                hidden_TH = checkpoint(
                    layer,
                    hidden_TH,
                    layout,
                    use_reentrant=False,
                    preserve_rng_state=hidden_TH.is_cuda and self.shape.attention_dropout > 0,
                )
            else:
                hidden_TH = layer(hidden_TH, layout)
        return (hidden_TH if self.final is None else self.final(hidden_TH))[:num_outputs]


class Embeddings(nn.Module):
    """Normalized sum of word, position and segment embeddings (Devlin et al., figure 2); the last two are optional.

    If E is not H, a linear projection follows (google-research/electra modeling.py, embeddings_project).
    """

    word: nn.Parameter  # [V, E]
    position: nn.Parameter  # [P, E]
    project_weight: nn.Parameter  # [H, E]
    project_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, vocabulary_size: int, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.tied = True  # the word embeddings are also the decoder's weights
        # Return torch.sparse_coo gradients for tables that are only looked up; the engine must support them.
        self.sparse_gradients = False
        self.functions = BlockFunctions.of(shape)
        self.embed = maybe_compile(embed, compile, ("M",) * 4)
        self.has_projection = shape.embedding not in (0, shape.hidden)
        create_parameters(self, embedding_parameters(shape, vocabulary_size), shape.init_std)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
        """Embed int64 [T] ids, token types and positions, with int32 [T] dropout seeds: [T, H]."""
        # The look-ups are not compiled, because torch's eager backward pass for them is faster than the compiled one.
        positions_TE = None
        if self.shape.positions == "learned":
            positions_TE = self.embed_positions(positions)
        elif self.shape.positions == "sinusoidal":
            positions_TE = sinusoids(positions, self.word.shape[1])
        embedded_TE = self.embed(
            self.embed_words(input_ids),
            positions_TE,
            token_types if self.shape.token_types else None,
            seeds,
            EmbeddingWeights.of(self, self.shape, self.functions),
            self.functions,
            self.shape.hidden_dropout if self.training else 0.0,
        )
        return F.linear(embedded_TE, self.project_weight, self.project_bias) if self.has_projection else embedded_TE

    def embed_words(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, E]"""
        return look_up(self.word, input_ids, sparse=self.sparse_gradients and not self.tied)

    def embed_positions(self, positions: Tensor) -> Tensor:
        """int64 [T] -> [T, E]"""
        return look_up(self.position, positions)


def look_up(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Return the rows `ids` (int64 [T]) of `table` [V, E] as [T, E]; its gradient is summed in fp32 and rounded once.

    Args:
        sparse: return an uncoalesced sparse gradient, for a caller that sums its rows itself.
    """
    # On CPUs, torch sums gradients in the table's dtype. In bf16, the gradient of a row that is looked up a thousand
    # times, such as [MASK]'s, would be several percent off. CUDA kernels sum in fp32; for up to 3,072 tokens, they add
    # partial sums in the table's dtype (aten EmbeddingBackwardKernel.cu and Embedding.cu).
    if sparse or not table.is_cpu or table.dtype == torch.float32:
        return F.embedding(ids, table, sparse=sparse)
    return _LookUp.apply(table, ids)  # pyright: ignore[reportReturnType]


class _LookUp(torch.autograd.Function):
    """A look-up in a half-precision table on a CPU, whose gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table_rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids_T,), (grad_TE,) = ctx.saved_tensors, grads
        # Sum only the rows of distinct ids: an fp32 gradient of the whole table would take three times as long.
        ids_U, inverse_T = ids_T.unique(return_inverse=True)
        sums_UE = torch.ops.aten.embedding_dense_backward(grad_TE.float(), inverse_T, len(ids_U), -1, False)
        table_grad_VE = grad_TE.new_zeros(ctx.table_rows, grad_TE.shape[1])
        return table_grad_VE.index_copy_(0, ids_U, sums_UE.to(grad_TE.dtype)), None
