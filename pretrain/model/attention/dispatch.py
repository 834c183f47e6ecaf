"""Self-attention over an unpadded batch: the only module that knows where sequences begin and end (invariant 2).

CUDA in half precision: torch's varlen flash kernel. Everywhere else (CPU, fp32): batched matmuls over groups of
sequences of similar lengths, with the operations between the matmuls fused by torch.compile. On CPU that is
2 to 6 times faster than torch's own fused CPU kernel (docs/benchmarks/lab-notes.md), and it has attention dropout.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pretrain.model.attention.flash import flash_attention, has_flash
from pretrain.model.attention.grouped_op import grouped_attention
from pretrain.model.attention.layout import AttentionOptions, TokenLayout


def self_attention(
    hidden: Tensor, weight: Tensor, bias: Tensor, layout: TokenLayout, options: AttentionOptions
) -> Tensor:
    """Scaled dot-product attention within each sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        weight, bias: [3H, H] and [3H], the projections to query, key and value one below the other.
        layout: which tokens attend; each sees all of its sequence.
        options: heads, dropout and compilation. The flash kernel samples dropout from the device's generator, the
            grouped matmuls hash the keys of `layout`.

    Returns:
        [R, H], the context of each query position, in the dtype of `hidden`.
    """
    if has_flash(hidden, options.heads):
        return flash_attention(F.linear(hidden, weight, bias), layout, options)
    # torch's CPU matmul writes the bias out to every row first; the kernels add it for nothing as they read.
    return grouped_attention(hidden @ weight.T, bias, layout, options)[0]
