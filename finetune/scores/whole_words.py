"""Bits per character of whole words, as an interval: all tokens of a word are masked together.

The cost of a word of several tokens follows the chain rule: each token is predicted with the earlier ones revealed and
the later ones masked. But the number of masks reveals the number of tokens, which helps models with small vocabularies
more. So the lower bound omits the cost of this number, and the upper bound adds it: -log2 of its share among all words
of the same documents, a code that every model could use. The true cost is between the two.
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
    tokens_of_words,
    word_tokens,
)

NAME = "whole_words"  # name of the score
_SPACE = 1  # a word's characters are its letters and the space before it


@dataclass(frozen=True)
class WholeWordScore:
    """Quality of the prediction of whole words.

    Attributes:
        lower: bits per character, given the number of a word's tokens.
        upper: the same plus the cost of this number; the true value is between the bounds.
        standard_error: of the upper bound, over the scored words.
        words: number of scored words.
        tokens: tokens of these words.
    """

    lower: float
    upper: float
    standard_error: float
    words: int
    tokens: int


def score_whole_words(model: MaskedModel, documents: Sequence[str], settings: PassageSettings) -> WholeWordScore:
    """Score a model on documents with normalized spaces (`read_documents`).

    Raises `NoScoreError` as `sample_words` and `word_tokens` do.
    """
    occurrences = sample_words(documents, settings, lambda word: True)
    tokens = word_tokens(model, occurrences)
    counts = np.array([len(positions) for _, positions in tokens])
    sequences = [sequence for word in tokens for sequence in _chain(word, model.mask_id)]
    with progress_bar("whole words, tokens", len(sequences)) as advance:
        token_bits = -model.predict(sequences, advance).log_probabilities / math.log(2)
    lower_bits = np.add.reduceat(token_bits, counts.cumsum() - counts)
    upper_bits = lower_bits + _bits_of_counts(model, documents)[counts]
    characters = np.array([len(occurrence.word) + _SPACE for occurrence in occurrences])
    upper = upper_bits.sum() / characters.sum()
    error = (upper_bits - upper * characters).std() * math.sqrt(len(upper_bits)) / characters.sum()
    return WholeWordScore(
        float(lower_bits.sum() / characters.sum()), float(upper), float(error), len(occurrences), int(counts.sum())
    )


def _chain(word: WordTokens, mask_id: int) -> Iterator[MaskedSequence]:
    """Yield a sequence for each token of the word, in which this token and the later ones are masked."""
    ids, positions = word
    for number, position in enumerate(positions):
        masked = ids.copy()
        masked[positions[number:]] = mask_id
        yield MaskedSequence(masked, positions[number : number + 1], ids[position : position + 1])


def _bits_of_counts(model: MaskedModel, documents: Sequence[str]) -> np.ndarray:
    """Return -log2 of the share of words that have 0 to n tokens, float64 [n + 1].

    The shares are from the documents, as the training text of a released model is not available. With 10^5 words and
    about ten numbers of tokens, this is less than 10^-4 bits per word cheaper than shares of a separate sample.
    """
    words = Counter(all_words(documents))
    counts = np.array([len(tokens) for tokens in tokens_of_words(model, list(words))])
    shares = np.bincount(counts, weights=list(words.values())) / sum(words.values())
    with np.errstate(divide="ignore"):
        return -np.log2(shares)
