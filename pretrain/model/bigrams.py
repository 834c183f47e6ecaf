"""Embeddings of adjacent tokens: hashes of pairs choose rows of one table, which are looked up, not computed.

A token gets three: of (previous, own), (own, next) and (previous, next), the last of which tells what surrounds a mask.
They give a small model memory for frequent phrases at no FLOPs (modded-nanogpt, bigram hash embedding, 2026; Cheng et
al. 2026, Engram, arXiv:2601.07372, with longer n-grams and inside of some layers).

Shape letters: T tokens, B sequences padded to L tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAIRS = 3
# Rows are multiplied by this. Adam moves the row of a rare pair as far as that of a frequent word, so at full rate rare
# pairs would be noise. docs/decisions, 0121.
SCALE = 0.2
_PRIME = (1 << 31) - 1
# Below the prime. Products with ids stay below 2**63.
_FACTORS = (0x5BD1E995, 0x27D4EB2F)
_OFFSETS = (0x165667B1, 0x3C6EF372, 0x2545F491)


def bigram_rows(ids: Tensor, previous: Tensor, following: Tensor, rows: int) -> Tensor:
    """The rows of each token's pairs in a table of `rows`, int64 [3, ...].

    The hash is of Carter and Wegman's universal family: ((a x + b y + c) mod p) mod rows. Its operations exist in ONNX.

    Args:
        ids: int64, any shape, from 1: 0 stands for no token.
        previous, following: the tokens beside them in the sequence, of the same shape.
    """
    pairs = (previous, ids), (ids, following), (previous, following)
    hashed = (
        (first * _FACTORS[0] + second * _FACTORS[1] + offset) % _PRIME % rows
        for (first, second), offset in zip(pairs, _OFFSETS, strict=True)
    )
    return torch.stack(list(hashed))


def unpadded_bigram_rows(ids_T: Tensor, positions_T: Tensor, rows: int) -> Tensor:
    """int64 [3, T] for sequences that lie end to end; `positions_T` are 0 where one begins."""
    own_T, begins_T = ids_T + 1, positions_T == 0
    previous_T = own_T.roll(1).masked_fill(begins_T, 0)
    following_T = own_T.roll(-1).masked_fill(begins_T.roll(-1), 0)
    return bigram_rows(own_T, previous_T, following_T, rows)


def padded_bigram_rows(ids_BL: Tensor, mask_BL: Tensor, rows: int) -> Tensor:
    """int64 [3, B, L] for sequences with padding after them, where `mask_BL` is 0."""
    own_BL = (ids_BL + 1) * mask_BL
    none_B1 = torch.zeros_like(own_BL[:, :1])
    previous_BL = torch.cat([none_B1, own_BL[:, :-1]], dim=1)
    following_BL = torch.cat([own_BL[:, 1:], none_B1], dim=1)
    return bigram_rows(own_BL, previous_BL, following_BL, rows)


def sum_bigrams(looked_up: Tensor) -> Tensor:
    """[3, ..., E] rows of the table -> fp32 [..., E], what they add to the embeddings."""
    return looked_up.float().sum(0) * SCALE
