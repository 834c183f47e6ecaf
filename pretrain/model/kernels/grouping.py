"""Groups of sequences for batched attention: similar lengths, padded to the longest, at the lowest cost.

In a local layer a long sequence is cut into chunks of queries, each with the keys in its window, so that the cost is
linear in the length, not quadratic. A unit is a chunk, or a whole sequence.

Shape letters: T tokens of the micro-batch, S sequences, inside a group of G units L keys and Q queries each.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.common.transfers import to_device

# Cost of launching the kernels of one more group, as the attention scores computed in that time
# (docs/benchmarks/lab-notes.md).
SCORES_PER_GROUP = 400_000
# By arithmetic, not measured: a millisecond of Python and launches, in which 900 GB/s move 64 bytes of each score.
SCORES_PER_GROUP_ON_GPU = 1 << 24


class SequenceGroup(NamedTuple):
    """Consecutive units, padded to the longest."""

    keys: Padded  # token rows
    queries: Padded  # numbers among the query positions
    mask_GL: Tensor  # fp32, 0 at keys and -inf at padding: added to the scores
    chunked: bool  # whether units are chunks, which share keys


class Padded(NamedTuple):
    """Ranges of numbers as rows, padded to the longest. Ranges overlap only for keys of chunks."""

    range: slice  # all the numbers
    number_GL: Tensor  # int64, the number at each position; padding repeats one of the range
    real_GL: Tensor  # bool, false at padding
    place_T: Tensor  # int64 [numbers], the index g * L + l of each number in its unit
    other_T: Tensor | None = None  # the index in the neighboring chunk that shares it, or -1; None without chunks


class AttentionUnits(NamedTuple):
    """Ranges of the token axis, int64 [units]: the queries of a unit, and the keys that they read."""

    begin: np.ndarray
    end: np.ndarray
    key_begin: np.ndarray
    key_end: np.ndarray


def cut_into_units(boundaries: tuple[int, ...], window: int) -> tuple[AttentionUnits, np.ndarray]:
    """Return (the units of the sequences between `boundaries`, cumulative number of units [S + 1]).

    A chunk is at least twice as long as the window, so that only its neighbors share keys with it. Sequences shorter
    than two chunks stay whole.
    """
    offsets = np.asarray(boundaries, np.int64)
    lengths = np.diff(offsets)
    counts = np.ones_like(lengths) if not window else np.maximum(1, lengths // (2 * window))
    first = np.concatenate([[0], counts.cumsum()])
    sequence = np.repeat(np.arange(len(lengths)), counts)
    chunk = np.arange(first[-1]) - first[sequence]
    starts, ends = offsets[sequence], offsets[sequence + 1]
    begin, end = (starts + n * lengths[sequence] // counts[sequence] for n in (chunk, chunk + 1))
    if not window:
        return AttentionUnits(begin, end, begin, end), first
    alone = counts[sequence] == 1
    key_begin = np.where(alone, starts, np.maximum(starts, begin - window))
    return AttentionUnits(begin, end, key_begin, np.where(alone, ends, np.minimum(ends, end + window))), first


@functools.lru_cache(maxsize=8)  # a micro-batch has few groupings, used by every layer, forward and backward
def group_sequences(
    boundaries: tuple[int, ...],
    queries: tuple[int, ...] | None,
    heads: int,
    device: torch.device,
    window: int = 0,
    multiple: int = 1,
) -> tuple[SequenceGroup, ...]:
    """Put the units of the sequences between `boundaries` (S + 1 token offsets) into the groups with the lowest cost.

    Any order of the sequences is correct; the ascending order of the loader's batches makes the cheapest groups. Groups
    without queries are dropped. Groups do not split sequences.

    Args:
        boundaries: offsets of the sequences on the token axis, and the end of the last.
        queries: offsets of the units of `cut_into_units` among the query positions, and the end of the last; None if
            every token is a query.
        heads: N.
        device: of the tensors.
        window: tokens that a query attends to on each side; 0 if to its whole sequence.
        multiple: to which L and Q are rounded up.
    """
    units, first = cut_into_units(boundaries, window)
    starts = np.append(units.begin, boundaries[-1]) if queries is None else np.asarray(queries)
    groups = []
    per_group = SCORES_PER_GROUP if device.type == "cpu" else SCORES_PER_GROUP_ON_GPU
    for begin, end in _cheapest_cuts(units, first, heads, per_group):
        members = slice(int(first[begin]), int(first[end]))
        of_queries = starts[members.start : members.stop + 1]
        if of_queries[0] < of_queries[-1]:
            part = AttentionUnits(*(x[members] for x in units))
            keys = _pad(part.key_begin, part.key_end, device, multiple)
            chunked = len(part.begin) > end - begin
            if chunked:
                keys = keys._replace(**_places_of_shared_keys(part, keys.number_GL.shape[1], device))
            padded = (
                keys if queries is None and not chunked else _pad(of_queries[:-1], of_queries[1:], device, multiple)
            )
            groups.append(SequenceGroup(keys, padded, torch.where(keys.real_GL, 0.0, -math.inf), chunked))
    return tuple(groups)


def _cheapest_cuts(units: AttentionUnits, first: np.ndarray, heads: int, per_group: int) -> list[tuple[int, int]]:
    """Return (first, one past the last) sequence of each group, in order.

    A group of G units of Q queries and L keys costs `per_group` and heads * G * Q * (L + 128) scores: L for each of its
    G * Q tokens, and as many as 128 for carrying a token of a head of 64 there and back. Exact, by dynamic programming.
    """
    count = len(first) - 1
    widths = units.end - units.begin, units.key_end - units.key_begin
    longest = [np.maximum.reduceat(width, first[:-1]).astype(np.float64) for width in widths]
    best, cut = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        # The candidate groups that end here, one for each start: longest unit and number of units.
        q, k = (np.maximum.accumulate(x[end - 1 :: -1])[::-1] for x in longest)
        costs = best[:end] + heads * (first[end] - first[:end]) * q * (k + 128)
        cut[end] = costs.argmin()
        best[end] = costs[cut[end]] + per_group
    cuts, end = [], count
    while end:
        cuts.append((int(cut[end]), end))
        end = int(cut[end])
    return cuts[::-1]


def _pad(begin: np.ndarray, end: np.ndarray, device: torch.device, multiple: int) -> Padded:
    """Pad the ranges from `begin` to `end` [G], which are in ascending order."""
    begin_G1, end_G1 = torch.from_numpy(begin.copy())[:, None], torch.from_numpy(end.copy())[:, None]
    place_L = torch.arange(-(-int((end - begin).max()) // multiple) * multiple)
    real_GL = place_L < end_G1 - begin_G1
    # An empty range repeats a neighbor's number: its result is not used.
    last_G1 = (end_G1 - 1).clamp_min(int(begin[0]))
    number_GL = torch.minimum(begin_G1 + place_L, last_G1)
    place_T = torch.arange(real_GL.numel()).view_as(real_GL)[real_GL]
    tensors = (to_device(x, device) for x in (number_GL, real_GL, place_T))
    return Padded(slice(int(begin[0]), int(end[-1])), *tensors)


def _places_of_shared_keys(units: AttentionUnits, length: int, device: torch.device) -> dict[str, Tensor]:
    """Return `place_T` and `other_T` of the tokens of chunks, whose keys are laid out [G, length]."""
    token_T = np.arange(units.begin[0], units.end[-1])
    unit_T = np.searchsorted(units.end, token_T, side="right")

    def place(number_T: np.ndarray) -> np.ndarray:
        """Return the token's index in a unit, or -1 if it is not among the unit's keys."""
        unit = number_T.clip(0, len(units.begin) - 1)
        is_key = (units.key_begin[unit] <= token_T) & (token_T < units.key_end[unit]) & (unit == number_T)
        return np.where(is_key, unit * length + token_T - units.key_begin[unit], -1)

    other_T = np.maximum(place(unit_T - 1), place(unit_T + 1))
    return {
        name: to_device(torch.from_numpy(places), device)
        for name, places in (("place_T", place(unit_T)), ("other_T", other_T))
    }
