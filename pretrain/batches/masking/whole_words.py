"""Whole word masking: all tokens of a word are masked together (google-research/bert).

Words are tried in random order, and each is selected if it still fits. A sequence may stay below its limit.
"""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, per_sequence, shuffle, word_heads


class Scheme(MaskingScheme):
    """Masks all tokens of a word together."""

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        candidates = np.flatnonzero(rows.ordinary)
        first = word_heads(rows, candidates, self.vocabulary)
        sizes = np.zeros(len(rows.input_ids), np.int64)
        sizes[candidates[first]] = np.diff(first, append=len(candidates))
        stops, order = shuffle(rows, candidates[first], bits)
        heads = order[_select_words(sizes[order], stops, np.minimum(limits, per_sequence(rows, candidates)))]
        heads.sort()
        return ranges(heads, sizes[heads])


def _select_words(sizes: np.ndarray, stops: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return which words to mask, bool [W]: in order, each word that fits in what is left of its sequence's limit.

    sizes int64 [W], tokens of each word; stops int64 [S], the end of each sequence's words; limits int64 [S].
    """
    remaining = limits.copy()
    next_word = np.concatenate(([0], stops[:-1]))
    selected = np.zeros(len(sizes), bool)
    unfinished = np.arange(len(stops))
    while len(unfinished):
        words = next_word[unfinished]
        fits = sizes[words] <= remaining[unfinished]
        selected[words] = fits
        remaining[unfinished] -= sizes[words] * fits
        next_word[unfinished] += 1
        unfinished = unfinished[(remaining[unfinished] > 0) & (next_word[unfinished] < stops[unfinished])]
    return selected
