"""Self-attention over unpadded batches."""

from pretrain.model.attention.dispatch import self_attention
from pretrain.model.attention.projection import ProjectionWeights
from pretrain.model.kernels.layout import AttentionOptions, RelativeRows, TokenLayout

__all__ = ["AttentionOptions", "ProjectionWeights", "RelativeRows", "TokenLayout", "self_attention"]
