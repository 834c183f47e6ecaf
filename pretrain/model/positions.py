"""Position encodings that are computed, not learned: sinusoids, rotations, and the buckets of relative positions.

Shape letters: T tokens (L positions in the padded twin), E width of the embeddings, N heads of width D, K = D / 2
frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import ModelConfig


class Rotation(NamedTuple):
    """Angles by which queries and keys are rotated, fp32 [T, K] (or [L, K] in a padded batch)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def sinusoids(positions_T: Tensor, width: int) -> Tensor:
    """fp32 [T, E] of int64 `positions_T`: sine and cosine in turn, with wavelengths from 2 pi to 20,000 pi.

    Vaswani et al. 2017, section 3.5.
    """
    powers_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / 10_000.0**powers_K)
    return torch.stack([angle_TK.sin(), angle_TK.cos()], dim=-1).flatten(1)[:, :width]


def rotations(model: ModelConfig, positions_T: Tensor) -> dict[float, Rotation]:
    """The rotation of each base that the model's layers have, at int64 `positions_T`; {} without rotary positions."""
    bases = {model.rotary_base_of(number) for number in range(model.layers)} - {0.0}
    interleaved = model.positions == "rotary_interleaved"
    return {base: rotation(positions_T, model.head_width, base, interleaved=interleaved) for base in sorted(bases)}


def rotation(positions_T: Tensor, width: int, base: float, *, interleaved: bool = False) -> Rotation:
    """The rotation at each position: by position * base^(-2k / width) (Su et al. 2021, arXiv:2104.09864, eq. 15).

    Args:
        positions_T: int64 [T].
        width: D, even.
        base: of the frequencies; 10,000 in the paper.
        interleaved: whether column 2k is paired with 2k + 1, as in the paper, or column k with k + K.
    """
    powers_K = torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width
    angle_TK = positions_T[:, None].float() * (1.0 / base**powers_K)
    return Rotation(angle_TK.cos(), angle_TK.sin(), interleaved)


def rotate(x_TND: Tensor, by: Rotation) -> Tensor:
    """[..., T, N, D] fp32 -> the same with each pair of columns rotated."""
    cos_T1K, sin_T1K = by.cos[:, None], by.sin[:, None]
    if by.interleaved:
        even, odd = x_TND[..., 0::2], x_TND[..., 1::2]
        return torch.stack([even * cos_T1K - odd * sin_T1K, odd * cos_T1K + even * sin_T1K], dim=-1).flatten(-2)
    first, second = x_TND.chunk(2, dim=-1)
    return torch.cat([first * cos_T1K - second * sin_T1K, second * cos_T1K + first * sin_T1K], dim=-1)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance, key minus query, int64 of any shape (Raffel et al. 2020, section 2.1).

    Half of the buckets are for keys that follow. Of each half, the first half are single distances; the others are
    ranges that grow by a constant factor up to `max_distance` (transformers modeling_t5.py, _relative_position_bucket).
    """
    half = buckets // 2
    single = half // 2
    size = distances.abs()
    logarithm = (size.clamp_min(1).float() / single).log() / math.log(max_distance / single)
    far = (single + (logarithm * (half - single)).long()).clamp_max(half - 1)
    return torch.where(size < single, size, far) + half * (distances > 0)
