"""Dropout without a generator: every random number is a hash of the token's seed and the dropout's site in the model.

So a sample's dropout depends neither on its batch nor on earlier random numbers (invariant 1 in docs/invariants.md).
"""

import torch
from torch import Tensor

# Odd steps between the seeds of one token: by column (feature or key), layer, and head. Compiled code multiplies
# COLUMN_STEP by the index of a loop; the product fits in int32 for up to config.MAX_WIDTH columns.
COLUMN_STEP = 0x3C6EF
LAYER_STEP = 0x85EBCA6B - (1 << 32)
HEAD_STEP = 0xC2B2AE35 - (1 << 32)  # not LAYER_STEP: (layer, head) would share its mask with (layer + 1, head - 1)


def hash_bits(seed: Tensor) -> Tensor:
    """Hash int32 `seed` to 32 well-mixed bits, elementwise: "lowbias32" of Chris Wellons' hash-prospector."""
    # int32 arithmetic wraps; torch's `>>` keeps the sign, so a mask makes each shift a logical one.
    x = seed ^ ((seed >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def keep_mask(seed: Tensor, dropout: float) -> Tensor:
    """Return a bool mask, true with probability 1 - `dropout`: a pure function of int32 `seed`, elementwise."""
    return (hash_bits(seed) & 0xFFFFFF) >= round(dropout * (1 << 24))


def hash_dropout(x_TH: Tensor, seeds_T: Tensor | None, site: int, dropout: float) -> Tensor:
    """Apply inverted dropout to [T, H]: a pure function of the token's seed, the `site` and the feature.

    Args:
        seeds_T: int32 [T]; not needed if `dropout` is 0.
        site: index of this dropout within a layer; different sites have independent masks.
    """
    if dropout == 0:
        return x_TH
    assert seeds_T is not None
    steps_H = torch.arange(x_TH.shape[1], device=x_TH.device, dtype=torch.int32) * COLUMN_STEP
    keep_TH = keep_mask((seeds_T[:, None] ^ (site * 0x27D4EB2F)) + steps_H, dropout)
    return torch.where(keep_TH, x_TH * (1 / (1 - dropout)), 0.0)
