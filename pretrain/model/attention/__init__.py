"""Self-attention over unpadded batches."""

from pretrain.model.attention.dispatch import self_attention
from pretrain.model.attention.layout import AttentionOptions, ProjectionWeights, RelativeRows, TokenLayout

__all__ = ["AttentionOptions", "ProjectionWeights", "RelativeRows", "TokenLayout", "self_attention"]
