"""Spans of neighbouring tokens or words (SpanBERT: Joshi et al. 2020, section 3.1).

Each run of ordinary tokens is divided into spans whose lengths have a geometric distribution, cut off at
`span_longest` and normalised, as in facebookresearch/SpanBERT masking.py, PairWithSpanMaskingScheme. Spans are taken in
random order until the sequence has lost as many tokens as it should; the last one taken is shortened. A span has one
replacement: all of it becomes [MASK], or random tokens, or stays.

SpanBERT draws spans one by one, which may overlap. Dividing first, as GPT-BERT does (Charpentier and Samuel 2024),
gives the same lengths, and every place is as likely.
"""

from __future__ import annotations

import numpy as np

from pretrain.batches.order import draw, uniform
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, MaskingVocabulary, ranges, shuffle, word_heads
from pretrain.config import MaskingConfig

_LENGTH, _SIDE = (1 << 32) + 3, (1 << 32) + 4  # counters distinct from those of scheme.py


class Scheme(MaskingScheme):
    has_exact_counts = True

    def __init__(self, masking: MaskingConfig, vocabulary: MaskingVocabulary) -> None:
        super().__init__(masking, vocabulary)
        self._lengths, self._remainders = span_lengths(masking.span_probability, masking.span_longest)

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        candidates = np.flatnonzero(rows.ordinary)
        if not len(candidates):
            return candidates
        units = np.arange(len(candidates))
        if self.masking.whole_word:
            units = word_heads(rows, candidates, self.vocabulary)
        # A run ends where a special token stands between.
        new_run = np.append(True, np.diff(candidates) > 1)[units]
        heads = units[self._divide(new_run, draw(bits[candidates[units]], _LENGTH))]
        sizes = np.zeros(len(bits), np.int64)
        sizes[candidates[heads]] = np.diff(heads, append=len(candidates))
        ends, order = shuffle(rows, candidates[heads], bits)
        taken = _first_tokens(sizes[order], ends, limits)
        # Of a shortened span, either end is kept.
        tail = (draw(bits[order], _SIDE) >> np.uint64(63)).astype(np.int64)
        begins = order + tail * (sizes[order] - taken)
        chosen = ranges(begins, taken)
        chosen.sort()
        return chosen

    def choice_bits(self, chosen: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """One choice for all tokens of a span; spans that touch are one (SpanBERT masking.py, merge_intervals)."""
        heads = np.flatnonzero(np.diff(chosen, prepend=-2) > 1)
        return np.repeat(bits[chosen[heads]], np.diff(heads, append=len(chosen)))

    def _divide(self, new_run: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Indices of the units at which spans begin.

        Args:
            new_run: bool [U], the units with which runs begin; no span reaches past a run.
            bits: random bits of each unit, uint64 [U].
        """
        count = len(new_run)
        chance = uniform(bits)
        lengths = np.searchsorted(self._lengths, chance, side="right") + 1
        lengths[new_run] = np.searchsorted(self._remainders, chance[new_run], side="right") + 1
        run_ends = np.append(np.flatnonzero(new_run)[1:], count)[np.cumsum(new_run) - 1]
        following = np.append(np.minimum(np.arange(count) + lengths, run_ends), count)
        # The spans are the units that are reached from the beginnings of runs, in 1, 2, 4, 8 ... steps.
        reached = np.append(new_run, False)
        for _ in range(count.bit_length()):
            reached[following[np.flatnonzero(reached)]] = True
            following = following[following]
        return np.flatnonzero(reached[:-1])


def span_lengths(probability: float, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative distributions of the lengths 1 .. `longest`, float64 [longest] each: of a span, and of what is left.

    What is left of a span at a random place within it is the length of the first span of a run: with it every place is
    as likely to begin a span as any other.
    """
    weights = (1 - probability) ** np.arange(longest)
    lengths = np.cumsum(weights / weights.sum())
    survivors = np.append(1.0, 1 - lengths[:-1])
    remainders = np.cumsum(survivors / survivors.sum())
    lengths[-1] = remainders[-1] = 1.0
    return lengths, remainders


def _first_tokens(sizes: np.ndarray, ends: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Tokens to take of each span, int64 [N], if those of each sequence are taken in order, up to its limit.

    sizes int64 [N], tokens of each span; ends int64 [S], where the spans of each sequence end; limits int64 [S].
    """
    total = np.append(0, np.cumsum(sizes))
    counts = np.diff(ends, prepend=0)
    before = total[:-1] - np.repeat(total[ends - counts], counts)
    return np.clip(np.repeat(limits, counts) - before, 0, sizes)
