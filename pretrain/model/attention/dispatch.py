"""Self-attention over an unpadded batch: the only module that knows where sequences begin and end (invariant 2).

CUDA in half precision: torch's varlen flash kernel. Everywhere else (CPU, fp32): batched matmuls over groups of
sequences of similar lengths, with the operations between the matmuls fused by torch.compile. On CPU that is
2 to 6 times faster than torch's own fused CPU kernel (docs/benchmarks/lab-notes.md), and it has attention dropout.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pretrain.model.attention.projection import ProjectionWeights, form_qkv, project_distances
from pretrain.model.compile import program
from pretrain.model.kernels.distances import DistanceTables
from pretrain.model.kernels.flash import flash_attention, has_flash
from pretrain.model.kernels.grouped_op import grouped_attention
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout

FORM_AXES = "M", "", "", "M"  # of `form_qkv`: products, biases, norms, rotation


def self_attention(
    hidden: Tensor, projection: ProjectionWeights, layout: TokenLayout, options: AttentionOptions
) -> Tensor:
    """Scaled dot-product attention within each sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        projection: to query, key and value.
        layout: which tokens attend; each sees all of its sequence, or the part of it within `options.window`.
        options: heads, dropout, compilation and window. The flash kernel samples dropout from the device's generator,
            the grouped matmuls hash the keys of `layout`.

    Returns:
        [R, H], the context of each query position, in the dtype of `hidden`.
    """
    # The kernel adds nothing to scores.
    flash = has_flash(hidden, options.heads) and layout.distance_bias is None and layout.relative is None
    weight, bias = projection.weights[0], projection.biases[0]
    rotation = layout.rotation if flash else None  # the grouped matmuls rotate what they read
    if rotation is not None or not projection.only_product:
        products = tuple(F.linear(hidden, weight) for weight in projection.weights)
        form = program(form_qkv, options.fused, FORM_AXES)
        qkv, bias = form(products, projection.biases, projection.norms, rotation, options.heads), None
    elif flash:
        qkv, bias = F.linear(hidden, weight, bias), None
    else:
        qkv = hidden @ weight.T
    if flash:
        return flash_attention(qkv, layout, options)
    # torch's CPU matmul writes the bias out to every row first; the kernels add it as they read. On CPU the compiled
    # rotation of whole rows costs a tenth of a small model's step, that of the rows read nothing.
    tables = DistanceTables()
    if layout.relative is not None:  # once for all groups
        projected = project_distances(layout.relative.embeddings, projection, options.heads)
        tables = DistanceTables(*projected, layout.relative.row_of)
    return grouped_attention(qkv, bias, layout, options, tables)[0]
