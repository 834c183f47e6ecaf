"""Bits per character of whole words, as an interval: all tokens of a word are masked together.

A word of several tokens costs what the chain rule says: each is predicted with those before it revealed and those after
it masked. But the number of masks tells how many tokens the word has, which is worth more the smaller the vocabulary
is. So the lower bound leaves that number out, and the upper bound pays for it: -log2 of its share among all words of
the same text, a code that every model could use. What a model knows of the number lies between the two.
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
    sampled,
    tokens_of_words,
    word_tokens,
)

PART = "whole_words"  # name of the score
_BLANK = 1  # a word's characters are its letters and the blank before it


@dataclass(frozen=True)
class WholeWordScore:
    """How well a model predicts whole words.

    Attributes:
        lower: bits per character with the number of a word's tokens given.
        upper: the same and the cost of that number; what lies between the bounds is not known of a model.
        standard_error: of the upper bound, over the words that were scored.
        words: that were scored.
        tokens: of these words.
    """

    lower: float
    upper: float
    standard_error: float
    words: int
    tokens: int


def score_whole_words(model: MaskedModel, documents: Sequence[str], how: PassageSettings) -> WholeWordScore:
    """The score of a model on documents in which each run of blanks is one.

    Raises `NoScoreError` as `sampled` and `word_tokens`.
    """
    occurrences = sampled(documents, how, lambda word: True)
    tokens = word_tokens(model, occurrences)
    counts = np.array([len(places) for _, places in tokens])
    sequences = [sequence for one in tokens for sequence in _chain(one, model.mask_id)]
    with progress_bar("whole words, tokens", len(sequences)) as advance:
        said = -model.predict(sequences, advance).log_probabilities / math.log(2)
    given = np.add.reduceat(said, counts.cumsum() - counts)
    paid = given + _bits_of_counts(model, documents)[counts]
    characters = np.array([len(one.word) + _BLANK for one in occurrences])
    upper = paid.sum() / characters.sum()
    error = (paid - upper * characters).std() * math.sqrt(len(paid)) / characters.sum()
    return WholeWordScore(
        float(given.sum() / characters.sum()), float(upper), float(error), len(occurrences), int(counts.sum())
    )


def _chain(word: WordTokens, mask_id: int) -> Iterator[MaskedSequence]:
    """A sequence for each token of the word: those before it as they are, it and those after it masked."""
    ids, places = word
    for number, place in enumerate(places):
        masked = ids.copy()
        masked[places[number:]] = mask_id
        yield MaskedSequence(masked, places[number : number + 1], ids[place : place + 1])


def _bits_of_counts(model: MaskedModel, documents: Sequence[str]) -> np.ndarray:
    """float64 [n + 1]: -log2 of the share of all words that have 0 to n tokens.

    Of the text itself, as the training text of a released model is not at hand. With 10^5 words and some ten numbers of
    tokens, that is less than 10^-4 bits a word cheaper than shares of another part of the same text would be.
    """
    words = Counter(all_words(documents))
    counts = np.array([len(tokens) for tokens in tokens_of_words(model, list(words))])
    shares = np.bincount(counts, weights=list(words.values())) / sum(words.values())
    with np.errstate(divide="ignore"):
        return -np.log2(shares)
