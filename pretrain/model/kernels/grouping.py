"""Groups sequences of similar lengths for batched attention, padded to the longest, at the lowest estimated cost.

In a local layer a long sequence is cut into chunks of queries, each with the keys in its window, so that the cost is
linear in the length, not quadratic. A unit is a chunk, or a whole sequence.

Shape letters: T tokens of the micro-batch, S sequences, inside a group of G units, L keys and Q queries each.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.common.transfers import to_device

# Cost of launching one more group's kernels, as the number of attention scores that could be computed in that time
# (docs/benchmarks/lab-notes.md).
SCORES_PER_GROUP = 400_000
# Estimated, not measured: a millisecond of Python and launches, at 900 GB/s and 64 bytes per score.
SCORES_PER_GROUP_ON_GPU = 1 << 24


class SequenceGroup(NamedTuple):
    """Consecutive units, padded to the longest."""

    keys: PaddedRanges  # each unit's token indices
    queries: PaddedRanges  # each unit's indices into the query positions
    mask_GL: Tensor  # fp32, 0 at keys and -inf at padding: added to the scores


class PaddedRanges(NamedTuple):
    """One range of indices per unit, padded to the longest. Ranges overlap only for keys of chunks."""

    range: slice  # the indices of all units
    index_GL: Tensor  # int64, the index at each position; padding repeats an index of the range
    valid_GL: Tensor  # bool, false at padding
    slot_T: Tensor  # int64, for each index in `range`, its slot g * L + l in its unit
    second_slot_T: Tensor | None = None  # likewise, its slot in a neighboring chunk, or -1; None without chunks


class AttentionUnits(NamedTuple):
    """Token ranges of each unit, int64 [units]: its queries, and the keys that they attend to."""

    query_start: np.ndarray
    query_end: np.ndarray
    key_start: np.ndarray
    key_end: np.ndarray


def cut_into_units(boundaries: tuple[int, ...], window: int) -> tuple[AttentionUnits, np.ndarray]:
    """Return (the units of the sequences between `boundaries`, offset of each sequence's first unit [S + 1]).

    A chunk is at least twice as long as the window, so that only its neighbors share keys with it. Sequences shorter
    than two chunks are not cut.
    """
    offsets = np.asarray(boundaries, np.int64)
    lengths = np.diff(offsets)
    counts = np.ones_like(lengths) if not window else np.maximum(1, lengths // (2 * window))
    unit_offsets = np.concatenate([[0], counts.cumsum()])
    sequence = np.repeat(np.arange(len(lengths)), counts)
    chunk = np.arange(unit_offsets[-1]) - unit_offsets[sequence]
    sequence_start, sequence_end = offsets[sequence], offsets[sequence + 1]
    start, end = (sequence_start + n * lengths[sequence] // counts[sequence] for n in (chunk, chunk + 1))
    if not window:
        return AttentionUnits(start, end, start, end), unit_offsets
    is_whole = counts[sequence] == 1
    key_start = np.where(is_whole, sequence_start, np.maximum(sequence_start, start - window))
    key_end = np.where(is_whole, sequence_end, np.minimum(sequence_end, end + window))
    return AttentionUnits(start, end, key_start, key_end), unit_offsets


@functools.lru_cache(maxsize=8)  # a micro-batch has few groupings, used by every layer, forward and backward
def group_sequences(
    boundaries: tuple[int, ...],
    query_offsets: tuple[int, ...] | None,
    heads: int,
    device: torch.device,
    window: int = 0,
    multiple: int = 1,
) -> tuple[SequenceGroup, ...]:
    """Group the units of the sequences between `boundaries` (S + 1 token offsets) at the lowest cost.

    Any order of the sequences is correct; ascending lengths, as in the loader's batches, make the cheapest groups.
    Groups without queries are dropped. No sequence is split between groups.

    Args:
        boundaries: token offsets of the sequences, and the end of the last.
        query_offsets: offsets of the units of `cut_into_units` among the query positions, and the end of the last;
            None if every token is a query.
        heads: N.
        device: device of the returned tensors.
        window: tokens that a query attends to on each side; 0 means its whole sequence.
        multiple: L and Q are rounded up to a multiple of this number.
    """
    units, unit_offsets = cut_into_units(boundaries, window)
    offsets = np.append(units.query_start, boundaries[-1]) if query_offsets is None else np.asarray(query_offsets)
    groups = []
    launch_cost = SCORES_PER_GROUP if device.type == "cpu" else SCORES_PER_GROUP_ON_GPU
    for start, stop in _best_ranges(units, unit_offsets, heads, launch_cost):
        unit_range = slice(int(unit_offsets[start]), int(unit_offsets[stop]))
        group_offsets = offsets[unit_range.start : unit_range.stop + 1]
        if group_offsets[0] < group_offsets[-1]:  # the group has queries
            group = AttentionUnits(*(x[unit_range] for x in units))
            keys = _pad_ranges(group.key_start, group.key_end, device, multiple)
            has_chunks = len(group.query_start) > stop - start
            if has_chunks:
                keys = keys._replace(**_slots_of_shared_keys(group, keys.index_GL.shape[1], device))
            keys_are_queries = query_offsets is None and not has_chunks
            queries = keys if keys_are_queries else _pad_ranges(group_offsets[:-1], group_offsets[1:], device, multiple)
            groups.append(SequenceGroup(keys, queries, torch.where(keys.valid_GL, 0.0, -math.inf)))
    return tuple(groups)


def _best_ranges(units: AttentionUnits, unit_starts: np.ndarray, heads: int, launch_cost: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each group's range of sequences, in order: the cheapest ones, by dynamic programming.

    A group of G units of Q queries and L keys costs `launch_cost` + heads * G * Q * (L + 128) scores: L for each
    of its G * Q queries, and 128 for copying a query in and out, with heads of width 64.
    """
    count = len(unit_starts) - 1
    widths = units.query_end - units.query_start, units.key_end - units.key_start
    longest = [np.maximum.reduceat(width, unit_starts[:-1]).astype(np.float64) for width in widths]
    lowest_cost, best_start = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for stop in range(1, count + 1):
        # Q and L of the candidate groups that end before `stop`, one for each start.
        queries, keys = (np.maximum.accumulate(x[stop - 1 :: -1])[::-1] for x in longest)
        costs = lowest_cost[:stop] + heads * (unit_starts[stop] - unit_starts[:stop]) * queries * (keys + 128)
        best_start[stop] = costs.argmin()
        lowest_cost[stop] = costs[best_start[stop]] + launch_cost
    ranges, stop = [], count
    while stop:
        ranges.append((int(best_start[stop]), stop))
        stop = int(best_start[stop])
    return ranges[::-1]


def _pad_ranges(start: np.ndarray, end: np.ndarray, device: torch.device, multiple: int) -> PaddedRanges:
    """Pad the ranges from `start` to `end` [G], in ascending order, to a common length, a multiple of `multiple`."""
    start_G1, end_G1 = torch.from_numpy(start.copy())[:, None], torch.from_numpy(end.copy())[:, None]
    position_L = torch.arange(-(-int((end - start).max()) // multiple) * multiple)
    valid_GL = position_L < end_G1 - start_G1
    # An empty range repeats a neighbor's index; the result is not used.
    last_G1 = (end_G1 - 1).clamp_min(int(start[0]))
    index_GL = torch.minimum(start_G1 + position_L, last_G1)
    slot_T = torch.arange(valid_GL.numel()).view_as(valid_GL)[valid_GL]
    tensors = (to_device(x, device) for x in (index_GL, valid_GL, slot_T))
    return PaddedRanges(slice(int(start[0]), int(end[-1])), *tensors)


def _slots_of_shared_keys(units: AttentionUnits, length: int, device: torch.device) -> dict[str, Tensor]:
    """Return `slot_T` and `second_slot_T` of the tokens of `units`, whose keys are laid out as [G, length]."""
    token_T = np.arange(units.query_start[0], units.query_end[-1])
    unit_T = np.searchsorted(units.query_end, token_T, side="right")

    def slot_in(index_T: np.ndarray) -> np.ndarray:
        """Return each token's slot in the unit with this index, or -1 if it is not among the unit's keys."""
        unit = index_T.clip(0, len(units.query_start) - 1)
        is_key = (units.key_start[unit] <= token_T) & (token_T < units.key_end[unit]) & (unit == index_T)
        return np.where(is_key, unit * length + token_T - units.key_start[unit], -1)

    second_slot_T = np.maximum(slot_in(unit_T - 1), slot_in(unit_T + 1))
    return {
        name: to_device(torch.from_numpy(slots), device)
        for name, slots in (("slot_T", slot_in(unit_T)), ("second_slot_T", second_slot_T))
    }
