"""Dropout without a generator: every random number is a hash of the token's key and of its use in the model.

A sample's dropout therefore depends neither on its position in a batch nor on earlier random numbers (invariant 1).
"""

import torch
from torch import Tensor

# Odd constants that separate the random numbers of one token: along features or keys, between layers, between heads. In
# compiled code the first one is the stride of a loop, which must stay within int32: it does up to MAX_WIDTH columns.
ALONG = 0x3C6EF
BETWEEN = 0x85EBCA6B - (1 << 32)
HEADS = 0xC2B2AE35 - (1 << 32)  # another step, or (layer, head) would share its mask with (layer + 1, head - 1)


def hash_bits(seed: Tensor) -> Tensor:
    """Well-mixed 32 bits of int32 `seed`, elementwise: "lowbias32" of Chris Wellons' hash-prospector."""
    # int32 arithmetic wraps; torch's `>>` keeps the sign, so a mask makes each shift a logical one.
    x = seed ^ ((seed >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def keep_mask(seed: Tensor, dropout: float) -> Tensor:
    """Bool, true with probability 1 - `dropout`: a pure function of int32 `seed`, elementwise."""
    return (hash_bits(seed) & 0xFFFFFF) >= round(dropout * (1 << 24))


def hash_dropout(x_TH: Tensor, keys_T: Tensor | None, use: int, dropout: float) -> Tensor:
    """Inverted dropout, a pure function of the token's key, the `use` and the feature: [T, H].

    Args:
        keys_T: int32 [T]; not needed if `dropout` is 0.
        use: number of this dropout within a layer; different uses give independent masks.
    """
    if dropout == 0:
        return x_TH
    assert keys_T is not None
    along_H = torch.arange(x_TH.shape[1], device=x_TH.device, dtype=torch.int32) * ALONG
    keep_TH = keep_mask((keys_T[:, None] ^ (use * 0x27D4EB2F)) + along_H, dropout)
    return torch.where(keep_TH, x_TH * (1 / (1 - dropout)), 0.0)
