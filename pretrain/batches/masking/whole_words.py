"""Whole words: the pieces of a word are masked together (google-research/bert, whole word masking).

Words come in random order, and each is taken if it still fits. A sequence may stay below its limit if no word fits.
"""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, per_sequence, shuffle, word_heads


class Scheme(MaskingScheme):
    """Masks all pieces of a word together."""

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        candidates = np.flatnonzero(rows.ordinary)
        first = word_heads(rows, candidates, self.vocabulary)
        sizes = np.zeros(len(rows.input_ids), np.int64)
        sizes[candidates[first]] = np.diff(first, append=len(candidates))
        stops, order = shuffle(rows, candidates[first], bits)
        heads = order[_taken(sizes[order], stops, np.minimum(limits, per_sequence(rows, candidates)))]
        heads.sort()
        return ranges(heads, sizes[heads])


def _taken(sizes: np.ndarray, stops: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return which words to take, bool [W]: in order, each one that fits into the rest of its sequence's limit.

    sizes int64 [W], tokens of each word; stops int64 [S], one past the last word of each sequence; limits int64 [S].
    """
    left = limits.copy()
    next_word = np.concatenate(([0], stops[:-1]))
    taken = np.zeros(len(sizes), bool)
    unfinished = np.arange(len(stops))
    while len(unfinished):
        words = next_word[unfinished]
        fits = sizes[words] <= left[unfinished]
        taken[words] = fits
        left[unfinished] -= sizes[words] * fits
        next_word[unfinished] += 1
        unfinished = unfinished[(left[unfinished] > 0) & (next_word[unfinished] < stops[unfinished])]
    return taken
