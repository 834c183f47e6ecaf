"""Which sequences are attended together: groups of similar lengths, padded to the longest, at the lowest cost.

Shape letters: T tokens of the micro-batch, S sequences, inside a group of G sequences L tokens and Q queries each.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Cost of launching the kernels of one more group, as the attention scores computed in that time
# (docs/benchmarks/lab-notes.md).
SCORES_PER_GROUP = 400_000


class SequenceGroup(NamedTuple):
    """Consecutive sequences, padded to the longest."""

    keys: Padded  # token rows
    queries: Padded  # numbers among the query positions
    mask_GL: Tensor  # fp32, 0 at keys and -inf at padding: added to the scores


class Padded(NamedTuple):
    """Neighbouring ranges of numbers laid side by side, padded to the longest."""

    range: slice  # all the numbers
    number_GL: Tensor  # int64, the number at each place; padding repeats one of the range
    real_GL: Tensor  # bool, false at padding
    place_T: Tensor  # int64 [numbers], g * L + l of each number


@functools.lru_cache(maxsize=8)  # a micro-batch has two, used by every layer, forward and backward
def group_sequences(
    boundaries: tuple[int, ...], queries: tuple[int, ...] | None, heads: int, device: torch.device
) -> tuple[SequenceGroup, ...]:
    """Cut the sequences between `boundaries` (S + 1 token offsets) into the groups with the lowest cost.

    Any order of the sequences is correct; the ascending order of the loader's batches makes the cheapest groups. A
    group without queries is left out.

    Args:
        boundaries: where the sequences begin on the token axis, and the end of the last.
        queries: the same among the query positions; None if every token is one.
        heads: N.
        device: of the tensors.
    """
    groups = []
    for begin, end in _cheapest_cuts(np.diff(boundaries), heads):
        of_group = (boundaries if queries is None else queries)[begin : end + 1]
        if of_group[0] < of_group[-1]:
            keys = _pad(boundaries[begin : end + 1], device)
            padded = keys if queries is None else _pad(of_group, device)
            groups.append(SequenceGroup(keys, padded, torch.where(keys.real_GL, 0.0, -math.inf)))
    return tuple(groups)


def _cheapest_cuts(lengths: np.ndarray, heads: int) -> list[tuple[int, int]]:
    """(first, one past the last) sequence of each group, in order.

    A group of G sequences padded to L costs its calls and heads * G * L * (L + 128) scores: L for each of its G * L
    tokens, and as many as 128 for carrying a token of a head of 64 there and back. Exact, by dynamic programming.
    """
    count = len(lengths)
    best, cut = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        # Of the groups that end here, one for each beginning: its longest and its number of sequences.
        longest = np.maximum.accumulate(lengths[end - 1 :: -1])[::-1].astype(np.float64)
        costs = best[:end] + heads * np.arange(end, 0, -1) * longest * (longest + 128)
        cut[end] = costs.argmin()
        best[end] = costs[cut[end]] + SCORES_PER_GROUP
    cuts, end = [], count
    while end:
        cuts.append((int(cut[end]), end))
        end = int(cut[end])
    return cuts[::-1]


def _pad(boundaries: tuple[int, ...], device: torch.device) -> Padded:
    offsets = torch.tensor(boundaries)
    lengths_G1, place_L = offsets.diff()[:, None], torch.arange(int(offsets.diff().max()))
    real_GL = place_L < lengths_G1
    # An empty range repeats a neighbour's number: its result is not used.
    last_G1 = (offsets[1:, None] - 1).clamp_min(boundaries[0])
    number_GL = torch.minimum(offsets[:-1, None] + place_L, last_G1)
    place_T = torch.arange(real_GL.numel()).view_as(real_GL)[real_GL]
    tensors = (x.to(device) for x in (number_GL, real_GL, place_T))
    return Padded(slice(boundaries[0], boundaries[-1]), *tensors)
