"""Self-attention over an unpadded batch: the only module that uses the boundaries of sequences (docs/invariants.md, 2).

In half precision on CUDA, it runs torch's varlen flash kernel; on a CPU, our C++ loops (docs/decisions/0149-*); in all
other cases (fp32 on a GPU, terms that depend on distances), batched matmuls over groups of sequences of similar length,
with the operations between them fused by torch.compile. All kernels are in `kernels/` and support attention dropout.

Shape letters: T tokens of the micro-batch, R query positions, N heads of width D, H = N * D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.compile import maybe_compile
from pretrain.model.kernels.distances import DistanceTables
from pretrain.model.kernels.flash import flash_attention, supports_flash
from pretrain.model.kernels.grouped_op import grouped_attention
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.kernels.products import linear_product
from pretrain.model.projection import QKV_AXES, RelativeProjection, form_qkv, project_distances


class ProjectionWeights(NamedTuple):
    """The projections to query, key and value: stacked, or the query separate if it has more heads."""

    weights: tuple[Tensor, ...]  # one [3H, H], or [H, H] and [2 * kv_heads * D, H]
    biases: tuple[Tensor | None, ...]
    relative: RelativeProjection | None = None  # projection of the distance embeddings, for disentangled positions

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> ProjectionWeights:
        """Return the projections of a module with the parameters of `parameters.layer_parameters`."""
        names = ("qkv",) if model.kv_heads in (0, model.heads) else ("q", "kv")
        weights = tuple(getattr(layer, f"{name}_weight") for name in names)
        biases = tuple(getattr(layer, f"{name}_bias", None) for name in names)
        return cls(weights, biases, RelativeProjection.of(layer, model) if model.positions == "disentangled" else None)


def self_attention(
    hidden: Tensor, projection: ProjectionWeights, layout: TokenLayout, options: AttentionOptions
) -> Tensor:
    """Scaled dot-product attention within each sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        projection: the projections to query, key and value.
        layout: the sequences and query positions; a query attends to its whole sequence, or to `options.window`.
        options: heads, dropout, compilation and window. The flash kernel samples dropout from the device's generator,
            the other kernels hash `layout.seeds`.

    Returns:
        [R, H], the context of each query position, in the dtype of `hidden`.
    """
    # The flash kernel cannot add biases to scores.
    use_flash = supports_flash(hidden, options.heads) and layout.distance_bias is None and layout.relative is None
    weight, bias = projection.weights[0], projection.biases[0]
    rotation = layout.rotation if use_flash else None  # the grouped kernels apply RoPE when they load q and k
    if rotation is not None or len(projection.weights) > 1:
        products = tuple(linear_product(hidden, weight) for weight in projection.weights)
        qkv = maybe_compile(form_qkv, options.fused, QKV_AXES)(products, projection.biases, rotation, options.heads)
        bias = None
    elif use_flash:
        qkv, bias = F.linear(hidden, weight, bias), None
    else:
        qkv = linear_product(hidden, weight)  # [T, 3H]; the kernels add the bias when they load it
    if use_flash:
        return flash_attention(qkv, layout, options)
    tables = DistanceTables()
    if layout.relative is not None and projection.relative is not None:  # projected once for all groups
        embeddings_PH, row_by_distance = layout.relative
        projected = project_distances(
            embeddings_PH, projection.weights, projection.biases, projection.relative, options.heads
        )
        tables = DistanceTables(*projected, row_by_distance)
    return grouped_attention(qkv, bias, layout, options, tables)[0]
