"""Fixed position encodings: sinusoids, rotations, and the buckets of relative positions.

Shape letters: T tokens (L positions in the padded encoder), E width of the embeddings, N heads of width D, K = D / 2
frequencies.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of the angles that rotate queries and keys, fp32 [T, K] (or [L, K] in a padded batch)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False  # as in `rotation`


def sinusoids(positions_T: Tensor, width: int) -> Tensor:
    """Encode int64 `positions_T` as fp32 [T, E]: alternating sine and cosine, wavelengths from 2 pi to 20,000 pi.

    Vaswani et al. 2017, section 3.5.
    """
    powers_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / 10_000.0**powers_K)
    return torch.stack([angle_TK.sin(), angle_TK.cos()], dim=-1).flatten(1)[:, :width]


def rotations(model: ModelConfig, positions_T: Tensor) -> dict[float, Rotation]:
    """Return the rotation for each rotary base of the layers, at int64 `positions_T`; {} without rotary positions."""
    bases = {model.rotary_base_of(index) for index in range(model.layers)} - {0.0}
    interleaved = model.positions == "rotary_interleaved"
    return {base: rotation(positions_T, model.head_width, base, interleaved=interleaved) for base in sorted(bases)}


def rotation(positions_T: Tensor, width: int, base: float, *, interleaved: bool = False) -> Rotation:
    """Return the rotation at each position by position * base^(-2k / width) (Su et al. 2021, arXiv:2104.09864, eq. 15).

    Args:
        positions_T: int64 [T].
        width: D, even.
        base: base of the frequencies; 10,000 in the paper.
        interleaved: whether column 2k is paired with 2k + 1, as in the paper, or column k with k + K.
    """
    powers_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / base**powers_K)
    return Rotation(angle_TK.cos(), angle_TK.sin(), interleaved)


def rotate(x_TND: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of columns of fp32 [..., T, N, D]."""
    # One expression for both columns of a pair: concatenated halves would compile to a kernel with branches.
    sizes, axis = _pair_layout(rotation.interleaved)
    x_TN2K = x_TND.unflatten(-1, sizes)
    cos_T12K, sin_T12K = rotation.cos[:, None].unsqueeze(axis), rotation.sin[:, None].unsqueeze(axis)
    sign_2 = torch.arange(-1, 2, 2, device=x_TND.device)
    sign_21 = sign_2 if rotation.interleaved else sign_2[:, None]
    return (x_TN2K * cos_T12K + x_TN2K.flip(axis) * (sin_T12K * sign_21)).flatten(-2)


def split_pairs(x_D: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second columns of the pairs in [..., D], as views [..., K]."""
    sizes, axis = _pair_layout(interleaved)
    first, second = x_D.unflatten(-1, sizes).unbind(axis)
    return first, second


def _pair_layout(interleaved: bool) -> tuple[tuple[int, int], int]:
    """Return (sizes for unflattening [D], axis of a pair's two columns)."""
    return ((-1, 2), -1) if interleaved else ((2, -1), -2)


def rotate_pairs(first_K: Tensor, second_K: Tensor, cos_K: Tensor, sin_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return both columns of each pair after its rotation, in fp32."""
    return first_K * cos_K - second_K * sin_K, second_K * cos_K + first_K * sin_K


def join_pairs(first_K: Tensor, second_K: Tensor, *, interleaved: bool) -> Tensor:
    """The inverse of `split_pairs`: [..., D]."""
    return torch.stack([first_K, second_K], dim=-1 if interleaved else -2).flatten(-2)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, key minus query, int64 of any shape (Raffel et al. 2020, section 2.1).

    Half of the buckets are for keys after the query. In each half, the first half are for single distances, the others
    for ranges growing by a constant factor to `max_distance` (transformers modeling_t5.py, _relative_position_bucket).
    """
    half = buckets // 2
    single = half // 2
    size = distances.abs()
    logarithm = (size.clamp_min(1).float() / single).log() / math.log(max_distance / single)
    far = (single + (logarithm * (half - single)).long()).clamp_max(half - 1)
    return torch.where(size < single, size, far) + half * (distances > 0)


def distance_rows(distances: Tensor, model: ModelConfig) -> Tensor:
    """Return the row of each distance, query minus key, in the table of disentangled positions: int64 of any shape.

    The table has `relative_span` rows for each direction. The first half of these are for single distances; the others
    are for ranges that grow by a constant factor up to `relative_max_distance` (transformers modeling_deberta_v2.py,
    make_log_bucket_position).
    """
    span, middle = model.relative_span, model.relative_span // 2
    buckets = distances
    if model.relative_buckets:
        # In fp32 and transformers' order of operations: other rounding at a bucket's border would select another row.
        size = distances.abs().clamp_min(middle)
        farthest = torch.tensor((model.relative_max_distance - 1) / middle)
        far = torch.ceil((size / middle).log() / farthest.log() * (middle - 1)) + middle
        buckets = torch.where(size <= middle, distances, (far * distances.sign()).long())
    return (buckets + span).clamp(0, 2 * span - 1)
