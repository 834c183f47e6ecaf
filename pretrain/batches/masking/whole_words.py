"""Whole word masking: all tokens of a word are masked together (google-research/bert).

Words are tried in random order. A word is masked if its tokens fit into what is left of its sequence's token limit.
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
    """Return whether to mask each word, bool [W]: in order, words are masked if they fit into the rest of the limit.

    `sizes`, int64 [W], has the number of tokens of each word; `stops`, int64 [S], the end of each sequence's words.
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
