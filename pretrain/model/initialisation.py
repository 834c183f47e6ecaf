"""First values with which attention heads look at neighbouring tokens from the first step on.

From BERT's own first values every head looks everywhere alike, and a small run spends its days on the plateau
where a masked token is guessed from word frequencies alone: it must first find out, position by position, where
the neighbours are. Here each head begins with one place to look at, as the heads of a trained BERT do (Clark et
al. 2019, "What Does BERT Look At?", section 3.1). Only first values differ; the model is BERT's, and learns.
The idea of starting where trained attention ends is Trockman & Kolter's (2023, "Mimetic Initialization of
Self-Attention Layers").
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Positions begin larger than words and token types, which are noise to them: two thirds of an embedding's square.
POSITION_SCALE = 2.0
# The score of the place a head begins with, above a mean of zero: about half of the attention among 128 tokens.
PEAK = 5.0


@torch.no_grad()
def attend_to_neighbours(position_PH: Tensor, qkv_weights: Iterable[Tensor], heads: int, std: float) -> None:
    """Fill the position embeddings and add to the layers' stacked projections [3H, H], in place.

    Positions are cosines and sines of H/2 frequencies between 0 and pi, each with a phase, drawn from torch's
    generator: far apart from each other, and a place further on is a rotation (Vaswani et al. 2017, section 3.5).
    Without phases the first place, [CLS], would be ones and zeros, whose mean the LayerNorm takes away.
    Queries begin with the position as it is, keys with the one that a head looks back from: heads begin at the
    tokens 1 before, 1 after, 2 before, 2 after and so on.

    Args:
        position_PH: the position embeddings, fp32 [P, H].
        qkv_weights: of each layer that begins so, queries', keys' and values' rows stacked: fp32 [3H, H]. The lower
            half of the encoder is enough; [CLS] must find the whole text in the layers above.
        heads: attention heads, of an even width.
        std: deviation of the words' first values.
    """
    positions, hidden = position_PH.shape
    width = hidden // heads
    frequency_K = torch.rand(hidden // 2) * math.pi
    phase_K = torch.rand(hidden // 2) * (2 * math.pi)
    angle_PK = torch.arange(positions)[:, None] * frequency_K + phase_K
    waves_PH = torch.stack([angle_PK.cos(), angle_PK.sin()], dim=-1).flatten(1)
    position_PH.copy_(waves_PH * (math.sqrt(2) * POSITION_SCALE * std))

    # The LayerNorm makes the sum's variance 1: what is position's share, beside words and token types of 1 each?
    share = POSITION_SCALE**2 / (POSITION_SCALE**2 + 2)
    # A head's score at its place is gain^2 * width * share / sqrt(width).
    gain = math.sqrt(PEAK / (math.sqrt(width) * share))
    offset_K = torch.tensor([_offset(head) for head in range(heads)]).repeat_interleave(width // 2)
    cosine_K, sine_K = gain * torch.cos(frequency_K * offset_K), gain * torch.sin(frequency_K * offset_K)
    even_K = torch.arange(0, hidden, 2)
    odd_K = even_K + 1
    for weight in qkv_weights:
        queries_HH, keys_HH = weight[:hidden], weight[hidden : 2 * hidden]
        queries_HH.diagonal().add_(gain)
        keys_HH[even_K, even_K] += cosine_K
        keys_HH[even_K, odd_K] += sine_K
        keys_HH[odd_K, even_K] -= sine_K
        keys_HH[odd_K, odd_K] += cosine_K


def _offset(head: int) -> int:
    """-1, 1, -2, 2, ..."""
    distance = head // 2 + 1
    return distance if head % 2 else -distance
