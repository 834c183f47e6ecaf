"""Self-attention over unpadded batches."""

from pretrain.model.attention.dispatch import self_attention
from pretrain.model.attention.layout import AttentionOptions, TokenLayout

__all__ = ["AttentionOptions", "TokenLayout", "self_attention"]
