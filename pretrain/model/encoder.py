"""The encoder over unpadded batches. The config selects the parts of its block (`config/families.py`); BERT's are the
defaults (Devlin et al. 2019).

BERT's forward pass is in four files, in this order: `encoder.py`, `block.py`, `attention.py`, `heads.py`. They call
kernels (`kernels/`) and parts that BERT lacks, such as `relative_positions.py`, `norms.py`, `final_norm.py`.

Shape letters: T tokens of the micro-batch, S sequences, R query positions, H hidden width, E width of the
embeddings (H except in some ELECTRA models), V vocabulary, P positions.
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
from pretrain.model.relative_positions import RelativeEmbeddings, RelativePositions


class Encoder(nn.Module):
    """The backbone: embeddings, layers, and a last norm in pre-norm. `parameters.py` lists the parameters.

    Args:
        shape: the model's config: sizes, dropout, and the parts of the block.
        vocabulary_size: V.
        compile: fuse the layers with torch.compile.
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
        relative = {"relative": RelativePositions, "disentangled": RelativeEmbeddings}.get(shape.positions)
        self.relative = None if relative is None else relative(shape)
        layers = [Layer(shape, number, compile) for number in range(shape.layers)]
        if shape.attention_init == "neighbors":
            initialize_neighbors(shape, self.embeddings, layers[: (shape.layers + 1) // 2])
        self.layers = nn.ModuleList(layers)
        self.final = FinalNorm(shape, compile) if shape.norm_placement == "pre" else None
        self.rotary = shape.positions.startswith("rotary")

    def use_rotary_bases(self, base: float, local: float) -> None:
        """Use other rotary frequencies from now on; arguments as for `ModelConfig.with_rotary_bases`."""
        self.shape = self.shape.with_rotary_bases(base, local)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            layer.rotary_base = self.shape.rotary_base_of(number)

    def encode(self, batch: UnpaddedBatch, rows_R: Tensor | None = None) -> Tensor:
        """Return the last hidden states [T, H], or [R, H] at the query positions `rows_R` (int64, ascending).

        In the last layer, all other tokens are only keys and values.
        """
        rows = len(batch.input_ids if rows_R is None else rows_R)
        batch = pad_tokens(batch, self.embeddings.word)
        # Invariant 1: dropout depends on the sample and the position in the model, never on a generator's state.
        keys_T = batch.token_keys
        layout = TokenLayout(batch.cu_seqlens, batch.lengths, None, keys_T)
        if self.relative is not None:
            layout = self.relative(layout)
        rotation_of = rotations(self.shape, batch.positions) if self.rotary else {}
        hidden_TH = self.embeddings(batch.input_ids, batch.token_types, batch.positions, keys_T)
        applied: list[Any] = [*self.layers] * self.shape.recursions  # BERT applies each layer once
        for number, layer in enumerate(applied, start=1):
            keys_T = keys_T + LAYER_STEP
            queries = rows_R if number == len(applied) else None
            layout = layout._replace(keys=keys_T, rows=queries, rotation=rotation_of.get(layer.rotary_base))
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
        return (hidden_TH if self.final is None else self.final(hidden_TH))[:rows]


class Embeddings(nn.Module):
    """Normalized sum of word, position and segment embeddings (Devlin et al., figure 2), as far as the config has them.

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
        self.tied = True  # the word embeddings are also the decoder
        # Return gradients of tables that are only looked up as torch.sparse_coo, for an engine that sums rows.
        self.sparse_gradients = False
        self.functions = BlockFunctions.of(shape)
        self.embed = maybe_compile(embed, compile, ("M",) * 4)
        self.projected = shape.embedding not in (0, shape.hidden)
        create_parameters(self, embedding_parameters(shape, vocabulary_size), shape.init_std)

    def forward(self, input_ids: Tensor, token_types: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Embed int64 [T] ids, token types and positions, with int32 [T] dropout seeds: [T, H]."""
        # The look-ups are not compiled: torch's gradient of them is faster than the compiled one.
        positions_TE = None
        if self.shape.positions == "learned":
            positions_TE = self.position_rows(positions)
        elif self.shape.positions == "sinusoidal":
            positions_TE = sinusoids(positions, self.word.shape[1])
        embedded_TE = self.embed(
            self.word_rows(input_ids),
            positions_TE,
            token_types if self.shape.token_types else None,
            keys,
            EmbeddingWeights.of(self, self.shape, self.functions),
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


def look_up(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Look up the rows `ids` (int64 [T]) of `table` [V, E]: [T, E]; the gradient is summed in fp32 and rounded once.

    Args:
        sparse: return the gradient as these rows only, uncoalesced, for a caller that sums them itself.
    """
    # On CPU torch sums a gradient in the table's precision: the error of a row that is read a thousand times, such as
    # [MASK], would be several percent in bf16. Its CUDA kernels sum in fp32; up to 3,072 tokens, they sum short runs,
    # which are added in the table's precision (aten EmbeddingBackwardKernel.cu and Embedding.cu).
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
        read_R, row_T = ids_T.unique(return_inverse=True)
        sums_RE = torch.ops.aten.embedding_dense_backward(grad_TE.float(), row_T, len(read_R), -1, False)
        table_grad_VE = grad_TE.new_zeros(ctx.rows, grad_TE.shape[1])
        return table_grad_VE.index_copy_(0, read_R, sums_RE.to(grad_TE.dtype)), None
