"""Fixed position encodings: sinusoids, rotations (RoPE), and buckets of relative positions.

Shape letters: T tokens (L positions in the padded encoder), E width of the embeddings, N heads of width D, K
frequencies (D / 2, or E / 2 for sinusoids).
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
    interleaved: bool = False  # see `rotation`


def sinusoids(positions_T: Tensor, width: int) -> Tensor:
    """Encode int64 `positions_T` as fp32 [T, E]: alternating sine and cosine, wavelengths from 2 pi to 20,000 pi.

    Vaswani et al. 2017, section 3.5.
    """
    exponents_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / 10_000.0**exponents_K)
    return torch.stack([angle_TK.sin(), angle_TK.cos()], dim=-1).flatten(1)[:, :width]


def rotations(model: ModelConfig, positions_T: Tensor) -> dict[float, Rotation]:
    """Return the rotation at int64 `positions_T` by rotary base, for every base that a layer uses."""
    bases = {model.rotary_base_of(index) for index in range(model.layers)} - {0.0}
    interleaved = model.positions == "rotary_interleaved"
    return {base: rotation(positions_T, model.head_width, base, interleaved=interleaved) for base in sorted(bases)}


def rotation(positions_T: Tensor, width: int, base: float, *, interleaved: bool = False) -> Rotation:
    """Return the rotation of pairs k by position * base^(-2k / width) (Su et al. 2021, arXiv:2104.09864, eq. 15).

    Args:
        positions_T: int64 [T].
        width: D, even.
        base: 10,000 in the paper.
        interleaved: pair column 2k with 2k + 1, as in the paper, instead of column k with k + K.
    """
    exponents_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / base**exponents_K)
    return Rotation(angle_TK.cos(), angle_TK.sin(), interleaved)


def rotate(x_TND: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of columns of fp32 [..., T, N, D]."""
    # One expression for both columns of a pair: torch.compile would turn a torch.cat into a kernel with branches.
    sizes, axis = _pair_layout(rotation.interleaved)
    x_TN2K = x_TND.unflatten(-1, sizes)
    cos_T11K, sin_T11K = rotation.cos[:, None].unsqueeze(axis), rotation.sin[:, None].unsqueeze(axis)
    sign_2 = torch.arange(-1, 2, 2, device=x_TND.device)
    sign_21 = sign_2 if rotation.interleaved else sign_2[:, None]
    return (x_TN2K * cos_T11K + x_TN2K.flip(axis) * (sin_T11K * sign_21)).flatten(-2)


def split_pairs(x_D: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second column of every pair in [..., D], as views [..., K]."""
    sizes, axis = _pair_layout(interleaved)
    first, second = x_D.unflatten(-1, sizes).unbind(axis)
    return first, second


def _pair_layout(interleaved: bool) -> tuple[tuple[int, int], int]:
    """Return (sizes to unflatten D into, axis of the two columns of a pair)."""
    return ((-1, 2), -1) if interleaved else ((2, -1), -2)


def rotate_pairs(first_K: Tensor, second_K: Tensor, cos_K: Tensor, sin_K: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs; return their first and second columns, in fp32."""
    return first_K * cos_K - second_K * sin_K, second_K * cos_K + first_K * sin_K


def join_pairs(first_K: Tensor, second_K: Tensor, *, interleaved: bool) -> Tensor:
    """Join the columns that `split_pairs` returns to [..., D]."""
    return torch.stack([first_K, second_K], dim=-1 if interleaved else -2).flatten(-2)


def relative_buckets(distances: Tensor, bucket_count: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance (key minus query position), int64 of any shape (Raffel et al. 2020, 2.1).

    Keys after the query have the second half of the buckets. In each half, the first buckets have one distance, and
    the others ranges that grow by a constant factor to `max_distance` (as in transformers modeling_t5.py).
    """
    half = bucket_count // 2
    exact_buckets = half // 2
    magnitude = distances.abs()
    log_share = (magnitude.clamp_min(1).float() / exact_buckets).log() / math.log(max_distance / exact_buckets)
    far_bucket = (exact_buckets + (log_share * (half - exact_buckets)).long()).clamp_max(half - 1)
    return torch.where(magnitude < exact_buckets, magnitude, far_bucket) + half * (distances > 0)


def relative_row_indices(distances: Tensor, model: ModelConfig) -> Tensor:
    """Return the row of each distance (query position minus key position) in the table, int64 of any shape.

    DeBERTa's table of relative positions has `relative_span` rows for each direction. The half nearest to distance 0
    has one distance per row, the other half ranges that grow by a constant factor up to `relative_max_distance`
    (transformers modeling_deberta_v2.py, make_log_bucket_position).
    """
    span, exact_rows = model.relative_span, model.relative_span // 2
    offsets = distances  # offset of each row from the row of distance 0
    if model.relative_buckets:
        # In fp32, in the same order as in transformers: rounding differently at a border would select another row.
        magnitude = distances.abs().clamp_min(exact_rows)
        max_ratio = torch.tensor((model.relative_max_distance - 1) / exact_rows)
        far_offset = torch.ceil((magnitude / exact_rows).log() / max_ratio.log() * (exact_rows - 1)) + exact_rows
        offsets = torch.where(magnitude <= exact_rows, distances, (far_offset * distances.sign()).long())
    return (offsets + span).clamp(0, 2 * span - 1)
