"""Self-attention over unpadded batches."""

from pretrain.model.attention.dispatch import self_attention
from pretrain.model.attention.layout import AttentionOptions, ProjectionWeights, TokenLayout

__all__ = ["AttentionOptions", "ProjectionWeights", "TokenLayout", "self_attention"]
