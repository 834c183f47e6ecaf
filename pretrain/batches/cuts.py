"""Divides documents into samples, so that every token is in exactly one sample (invariant 1 in docs/invariants.md).

The number of samples of a document depends only on its length and the capacity of a sequence. It is slightly higher
than necessary, so that most cuts can be moved to a sentence boundary. A document is divided at independent positions
into groups of a few parts, and each group is halved recursively, so any part is found in a few steps. A part is
a sample, or two if it is divided again to get short sequences. All cuts change from epoch to epoch.

A unit is a document, or a block of documents if sequences cross documents. A position is a token offset from the start
of a unit, counting one separator between documents. Arrays are int64 [B], for B samples, and `rows` index them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretrain.batches.order import below, draw, uniform

_SLACK, _SLACK_SHARE = 25, 0.2  # mean unused tokens per sample, to move cuts to sentence starts; their maximum share
_MAX_GROUP_PARTS = 4  # maximum number of parts in a group
_GOLDEN = 0.6180339887498949  # golden ratio: the fractional parts of its multiples are evenly spread
_NODE, _GRID, _DIVIDED, _HALF = range(4)  # counters for `draw`, for independent random numbers of a unit


class SentenceStarts(Protocol):
    """Finds the sentences that start in each of B units."""

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the range (first, stop) of the sentences that start in each unit."""
        ...

    def find_sentence(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the first sentence in [low, high) of the units `rows` that starts at or after `position`, else `high`.

        Returns (sentence, start of the previous one, start of the sentence); starts outside [low, high) are undefined.
        """
        ...


@dataclass(frozen=True)
class Spans:
    """Spans of units that become samples, and the sentences that start in them."""

    start: np.ndarray  # position of the first token
    end: np.ndarray  # position after the last token
    first_sentence: np.ndarray  # index of the first sentence that starts at or after `start`
    stop_sentence: np.ndarray  # index of the first sentence that starts at or after `end`
    ends_at_sentence: np.ndarray  # bool [B], whether `end` is a sentence boundary


@dataclass(frozen=True)
class Cutting:
    """Settings for dividing units into samples.

    Args:
        capacity: maximum number of tokens in a sequence, not counting special tokens; at least 4.
        min_tokens: minimum number of tokens in a sample.
        short_share: share of the parts of a unit that are divided again to get short sequences.
        crosses_documents: whether sequences cross documents; units are then whole blocks.
    """

    capacity: int
    min_tokens: int
    short_share: float
    crosses_documents: bool

    @property
    def identity(self) -> list[float]:
        """Values that determine the number of samples of a unit."""
        settings = self.capacity, self.min_tokens, self.short_share, self.crosses_documents
        return [*settings, self._mean_tokens, self._min_part_tokens]

    @property
    def _mean_tokens(self) -> int:
        """Mean number of tokens of a sample of a long unit."""
        return self.capacity - min(_SLACK, int(_SLACK_SHARE * self.capacity))

    @property
    def _min_part_tokens(self) -> int:
        """Minimum number of tokens of a part of a unit that has several parts."""
        return max(min(2 * self.min_tokens, (self.capacity + 1) // 2), self.capacity // 8)

    def count(self, size: np.ndarray) -> np.ndarray:
        """Return the number of samples of units of these sizes; int64 of the same shape."""
        parts = self._count_parts(size)
        return parts + self._count_divided(size, parts)

    def cut(self, sentences: SentenceStarts, size: np.ndarray, sample: np.ndarray, key: np.ndarray) -> Spans:
        """Return the span of each of B samples within its unit.

        Args:
            sentences: starts of the sentences of the samples' units.
            size: number of tokens of each sample's unit.
            sample: index of the sample within its unit, 0 .. `count` - 1.
            key: random key of the unit for this epoch, uint64 [B].
        """
        parts = self._count_parts(size)
        part, half = self._find_part(size, parts, sample, key)
        first, stop = sentences.bounds()
        spans = Spans(np.zeros_like(size), size.copy(), first, stop, np.ones(len(size), bool))
        search = _Search(sentences, spans, key)
        first_part, stop_part = self._narrow_to_groups(search, size, parts, part)
        self._narrow_to_parts(search, first_part, stop_part, part)
        self._narrow_to_halves(search, np.flatnonzero(half >= 0), half)
        return search.spans

    def _count_parts(self, size: np.ndarray) -> np.ndarray:
        """Return the number of parts of each unit, before some of them are divided again."""
        long_parts = np.maximum(2, -(-size // self._mean_tokens))
        min_tokens = 1 if self.crosses_documents else self.min_tokens
        return np.where(size <= self.capacity, size >= min_tokens, np.minimum(long_parts, size // self.min_tokens))

    def _count_divided(self, size: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Return the number of parts of each unit that are divided again."""
        if not self.short_share or self._min_part_tokens < 2 * self.min_tokens:
            return np.zeros_like(size)
        target = np.floor(self.short_share * parts + np.modf(size * _GOLDEN)[0]).astype(np.int64)
        return np.where(size >= 2 * self._min_part_tokens, np.minimum(target, parts), 0)

    def _find_part(
        self, size: np.ndarray, parts: np.ndarray, sample: np.ndarray, key: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each sample's part, and which half of it the sample is (0 or 1; -1: the whole part)."""
        divided = self._count_divided(size, parts)
        half = np.full_like(sample, -1)
        rows = np.flatnonzero(divided)
        if not len(rows):
            return sample, half
        ratio, shift = parts[rows] / divided[rows], uniform(draw(key[rows], _DIVIDED))

        def nth_divided_part(index: np.ndarray) -> np.ndarray:
            return np.floor((index + shift) * ratio).astype(np.int64)

        # Samples whose index is not an index of a part are the second halves of divided parts.
        second_half = sample[rows] - parts[rows]
        part = np.where(second_half >= 0, nth_divided_part(np.maximum(second_half, 0)), sample[rows])
        nearest = np.floor(part / ratio - shift).astype(np.int64)
        is_divided = np.zeros(len(rows), bool)
        for index in (nearest, nearest + 1):
            is_valid = (index >= 0) & (index < divided[rows])
            is_divided |= is_valid & (nth_divided_part(index) == part)
        half[rows] = np.where(second_half >= 0, 1, np.where(is_divided, 0, -1))
        result = sample.copy()
        result[rows] = part
        return result, half

    def _narrow_to_groups(
        self, search: _Search, size: np.ndarray, parts: np.ndarray, part: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Narrow each span to a group of parts; return the range (first, stop) of the parts in each group."""
        groups = np.maximum(1, -(-parts // _MAX_GROUP_PARTS))
        group = ((part + 1) * groups - 1) // np.maximum(parts, 1)
        first, stop = group * parts // groups, (group + 1) * parts // groups
        above_minimum = size // np.maximum(parts, 1) - self._min_part_tokens
        # Group edges lie on a grid that is longer than the unit by `stretch` tokens and shifted by `offset`.
        stretch = np.maximum(np.minimum(above_minimum, (parts * self.capacity - size) // 3), 0)
        offset = below(draw(search.key, _GRID), stretch + 1)
        # Both edges of a group may move, each by up to half of the tokens that its parts leave free.
        free = self.capacity - -(-(size + stretch) // np.maximum(parts, 1))
        reach = np.maximum(parts // groups * np.minimum(free, above_minimum) // 4, 0)

        def group_edge(rows: np.ndarray, part_index: np.ndarray) -> tuple[np.ndarray, ...]:
            target = part_index * (size + stretch)[rows] // parts[rows] - offset[rows]
            shift = below(search.bits(rows, part_index), 2 * reach[rows] + 1) - reach[rows]
            return target + shift, target - reach[rows], target + reach[rows]

        for part_index, is_stop in ((stop, True), (first, False)):
            rows = np.flatnonzero((group < groups - 1) if is_stop else (group > 0))
            search.cut(rows, *group_edge(rows, part_index[rows]), keep_first=is_stop)
        return first, stop

    def _narrow_to_parts(self, search: _Search, first: np.ndarray, stop: np.ndarray, part: np.ndarray) -> None:
        """Narrow each span from a group to one part, by bisection."""
        while len(rows := np.flatnonzero(stop - first > 1)):
            low, high = first[rows], stop[rows]
            middle = (low + high) >> 1
            is_low = part[rows] < middle
            start, end = search.spans.start[rows], search.spans.end[rows]
            free = (high - low) * self.capacity - (end - start)
            lower = np.maximum(end - (high - middle) * self.capacity, start + (middle - low) * self._min_part_tokens)
            upper = np.minimum(start + (middle - low) * self.capacity, end - (high - middle) * self._min_part_tokens)
            shift = below(search.bits(rows, middle), free // 2 + 1) - free // 4
            target = start + (end - start) * (middle - low) // (high - low) + shift
            search.cut(rows, target.clip(lower, upper), lower, upper, keep_first=is_low)
            first[rows], stop[rows] = np.where(is_low, low, middle), np.where(is_low, middle, high)

    def _narrow_to_halves(self, search: _Search, rows: np.ndarray, half: np.ndarray) -> None:
        """Divide each of the spans `rows` at a random position, and narrow it to the sample's half."""
        start, end = search.spans.start[rows], search.spans.end[rows]
        lower, upper = start + self.min_tokens, end - self.min_tokens
        bits = draw(draw(search.key[rows], _HALF), start)
        target = lower + below(bits, upper - lower + 1)
        search.cut(rows, target, lower, upper, keep_first=half[rows] == 0)


class _Search:
    """The spans of samples, which are narrowed by successive cuts, with the sentences to cut at and the random keys."""

    def __init__(self, sentences: SentenceStarts, spans: Spans, key: np.ndarray) -> None:
        self._sentences, self.spans, self.key = sentences, spans, key
        self._node_key = draw(key, _NODE)

    def bits(self, rows: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Return random bits, uint64, for the cut before the part with this index in each of the units `rows`."""
        return draw(self._node_key[rows], part)

    def cut(
        self,
        rows: np.ndarray,
        target: np.ndarray,
        lower: np.ndarray,
        upper: np.ndarray,
        *,
        keep_first: np.ndarray | bool,
    ) -> None:
        """Cut the spans `rows` at the sentence nearest to `target` in [lower, upper], or at `target`; keep a side."""
        if not len(rows):
            return
        spans = self.spans
        start, end = spans.start[rows], spans.end[rows]
        first, stop = spans.first_sentence[rows], spans.stop_sentence[rows]
        following, before, after = self._sentences.find_sentence(rows, first, stop, target)
        has_after = (following < stop) & (after <= upper) & (after < end)
        has_before = (following > first) & (before >= lower) & (before > start)
        takes_before = has_before & (~has_after | (target - before < after - target))
        position = np.where(takes_before, before, np.where(has_after, after, target))
        sentence = following - takes_before
        keep_first = np.broadcast_to(keep_first, len(rows))
        spans.start[rows], spans.end[rows] = np.where(keep_first, start, position), np.where(keep_first, position, end)
        spans.first_sentence[rows] = np.where(keep_first, first, sentence)
        spans.stop_sentence[rows] = np.where(keep_first, sentence, stop)
        spans.ends_at_sentence[rows] = np.where(keep_first, has_before | has_after, spans.ends_at_sentence[rows])
