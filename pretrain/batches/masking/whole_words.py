"""Whole word masking: all tokens of a word are masked together (google-research/bert).

Words are tried in random order. Each is masked if the limit of its sequence, a number of tokens, leaves room for it.
"""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import PackedTokens
from pretrain.batches.scheme import MaskingScheme, per_sequence, shuffle, word_heads


class Scheme(MaskingScheme):
    """Masks all tokens of a word together."""

    def choose(self, tokens: PackedTokens, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        candidates = np.flatnonzero(tokens.is_content)
        word_starts = word_heads(tokens, candidates, self.vocabulary)
        sizes = np.zeros(len(tokens.input_ids), np.int64)
        sizes[candidates[word_starts]] = np.diff(word_starts, append=len(candidates))
        stops, order = shuffle(tokens, candidates[word_starts], bits)
        heads = order[_select_words(sizes[order], stops, np.minimum(limits, per_sequence(tokens, candidates)))]
        heads.sort()
        return ranges(heads, sizes[heads])


def _select_words(sizes: np.ndarray, stops: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return which words to mask, bool [W]: each, in order, that fits into the rest of its sequence's limit.

    `sizes`, int64 [W], are the words' numbers of tokens; `stops`, int64 [S], is the end of each sequence's words.
    """
    remaining = limits.copy()
    next_word = np.concatenate(([0], stops[:-1]))
    selected = np.zeros(len(sizes), bool)
    unfinished = np.arange(len(stops))
    while len(unfinished):
        word = next_word[unfinished]
        fits = sizes[word] <= remaining[unfinished]
        selected[word] = fits
        remaining[unfinished] -= sizes[word] * fits
        next_word[unfinished] += 1
        unfinished = unfinished[(remaining[unfinished] > 0) & (next_word[unfinished] < stops[unfinished])]
    return selected
