"""Relative positions: biases of the attention scores (T5), or distance embeddings (DeBERTa).

Shape letters: H hidden width, N heads, M tokens of the longest sequence, P rows of the table that are used.
"""

import torch
import torch.nn.functional as F
from torch import nn

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, apply_norm, norm_weights
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.layout import RelativeRows, TokenLayout
from pretrain.model.parameters import position_parameters
from pretrain.model.positions import relative_buckets, relative_row_indices


class RelativeBiases(nn.Module):
    """Biases of the scores by distance, one table for all layers (Raffel et al. 2020, T5, section 2.1)."""

    table: nn.Parameter  # [buckets, N]

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        create_parameters(self, position_parameters(shape), shape.init_std)

    def forward(self, layout: TokenLayout) -> TokenLayout:
        """Add to `layout` the biases of the distances 1 - M to M - 1, key minus query: fp32 [N, 2M - 1]."""
        distances = torch.arange(1 - layout.max_seqlen, layout.max_seqlen, device=self.table.device)
        buckets = relative_buckets(distances, self.shape.relative_buckets, self.shape.relative_max_distance)
        return layout._replace(distance_bias=F.embedding(buckets, self.table.float()).T.contiguous())


class RelativeEmbeddings(nn.Module):
    """Distance embeddings, one table for all layers (He et al. 2021, DeBERTa, section 3.1).

    transformers applies dropout to them. We do not: all samples share them, but our dropout masks depend on the sample.
    """

    table: nn.Parameter  # [2 * relative_span, H]

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape, self.functions = shape, BlockFunctions.of(shape)
        create_parameters(self, position_parameters(shape), shape.init_std)

    def forward(self, layout: TokenLayout) -> TokenLayout:
        """Add to `layout` the embeddings of all distances within the longest sequence."""
        row_by_distance = relative_row_indices(torch.arange(1 - layout.max_seqlen, layout.max_seqlen), self.shape)
        rows_PH = self.table[int(row_by_distance[0]) : int(row_by_distance[-1]) + 1]
        if self.shape.relative_norm:
            rows_PH = apply_norm(rows_PH, norm_weights(self, "norm", self.functions), self.functions)
        return layout._replace(relative=RelativeRows(rows_PH, row_by_distance - row_by_distance[0]))
