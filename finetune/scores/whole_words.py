"""Bits per character of whole words, as a lower and an upper bound: all tokens of a word are masked together.

The cost of a word of several tokens follows the chain rule: each token is predicted with the earlier ones revealed and
the later ones masked. But the number of masks reveals the number of tokens, which helps models with small vocabularies
more. So the lower bound omits the cost of coding this number, and the upper bound adds it: -log2 of the share of words
with this number of tokens in the documents (a code that every model could use). The true cost is between the bounds.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.scores.masked_model import MaskedModel, MaskedSequence, progress_bar
from finetune.scores.passages import (
    PassageSettings,
    WordTokens,
    all_words,
    sample_words,
    tokenize_passages,
    tokenize_words,
)

NAME = "whole_words"  # name of the score
_SPACE = 1  # number of spaces counted as characters of a word: the one before it


@dataclass(frozen=True)
class WholeWordScore:
    """Quality of the prediction of whole words.

    Attributes:
        lower: bits per character if the number of tokens in each word is known.
        upper: `lower` plus the cost of coding these numbers; the true value is between the bounds.
        standard_error: standard error of `upper` over the scored words.
        words: number of scored words.
        tokens: number of tokens in the scored words.
    """

    lower: float
    upper: float
    standard_error: float
    words: int
    tokens: int


def score_whole_words(model: MaskedModel, documents: Sequence[str], settings: PassageSettings) -> WholeWordScore:
    """Score a model on documents with normalized spaces (`read_documents`).

    Raises `NoScoreError` as `sample_words` and `tokenize_passages` do.
    """
    occurrences = sample_words(documents, settings, lambda word: True)
    tokens = tokenize_passages(model, occurrences)
    num_tokens = np.array([len(positions) for _, positions in tokens])
    sequences = [sequence for word in tokens for sequence in _chain_rule_sequences(word, model.mask_id)]
    with progress_bar("whole words, tokens", len(sequences)) as advance:
        token_bits = -model.predict(sequences, advance).log_probabilities / math.log(2)
    lower_bits = np.add.reduceat(token_bits, num_tokens.cumsum() - num_tokens)
    upper_bits = lower_bits + _token_count_bits(model, documents)[num_tokens]
    characters = np.array([len(occurrence.word) + _SPACE for occurrence in occurrences])
    lower, upper = lower_bits.sum() / characters.sum(), upper_bits.sum() / characters.sum()
    standard_error = (upper_bits - upper * characters).std() * math.sqrt(len(upper_bits)) / characters.sum()
    return WholeWordScore(float(lower), float(upper), float(standard_error), len(occurrences), int(num_tokens.sum()))


def _chain_rule_sequences(word: WordTokens, mask_id: int) -> Iterator[MaskedSequence]:
    """Yield a sequence for each token of the word, with this token and the later ones masked."""
    ids, positions = word
    for index, position in enumerate(positions):
        masked = ids.copy()
        masked[positions[index:]] = mask_id
        yield MaskedSequence(masked, positions[index : index + 1], ids[position : position + 1])


def _token_count_bits(model: MaskedModel, documents: Sequence[str]) -> np.ndarray:
    """Return -log2 of the share of words with 0, 1, ..., n tokens, float64 [n + 1].

    The shares are computed from the documents, since a released model's training text is unavailable. Shares from a
    separate sample would cost less than 10^-4 bits per word more, for 10^5 words with up to about ten tokens.
    """
    words = Counter(all_words(documents))
    counts = np.array([len(tokens) for tokens in tokenize_words(model, list(words))])
    shares = np.bincount(counts, weights=list(words.values())) / sum(words.values())
    with np.errstate(divide="ignore"):
        return -np.log2(shares)
