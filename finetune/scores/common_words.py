"""Bits of common words: prediction of frequent words, comparable across vocabularies.

The words are listed in common_words.txt, which never changes. Their lower-case occurrences between two spaces are
scored, one masked at a time, in the same passages for every model. Probabilities are normalized over the words of the
list; a word's probability is the sum over all tokens that spell it: in any case, with or without accents, with or
without a space before it. So the scores of models with different vocabularies are comparable.
"""

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from finetune.scores.masked_model import MaskedModel, MaskedSequence, TokenGroups, progress_bar
from finetune.scores.passages import NoScoreError, PassageSettings, sample_words, tokens_of_words, word_tokens
from pretrain.corpus.byte_level import is_byte_level
from pretrain.corpus.byte_words import entry_bytes

NAME = "common_words"  # name of the score
LIST = Path(__file__).parent / "common_words.txt"


@dataclass(frozen=True)
class CommonWordScore:
    """Quality of the prediction of common words.

    Attributes:
        bits: mean -log2 of the probabilities of the scored words; comparable between vocabularies.
        standard_error: of the mean, over the scored words; it does not include the variance between trainings.
        words: number of scored words.
    """

    bits: float
    standard_error: float
    words: int


@cache
def common_words() -> tuple[str, ...]:
    """Return the words of the list, in alphabetical order."""
    return tuple(LIST.read_text(encoding="utf-8").split())


def score_common_words(
    model: MaskedModel, documents: Sequence[str], settings: PassageSettings, words: Sequence[str] | None = None
) -> CommonWordScore:
    """Score a model on documents with normalized spaces (`read_documents`); `words` are `common_words` by default.

    Raises `NoScoreError` if a word is not one token of the vocabulary, or as `sample_words` and `word_tokens` do.
    """
    words = common_words() if words is None else words
    groups, numbers = token_groups(model, words), {word: number for number, word in enumerate(words)}
    occurrences = sample_words(documents, settings, numbers.__contains__)
    sequences = []
    for occurrence, (ids, positions) in zip(occurrences, word_tokens(model, occurrences), strict=True):
        masked = ids.copy()
        masked[positions] = model.mask_id
        sequences.append(MaskedSequence(masked, positions, np.array([numbers[occurrence.word]])))
    with progress_bar("common words", len(sequences)) as advance:
        bits = -model.predict(sequences, advance, groups).log_probabilities / math.log(2)
    return CommonWordScore(float(bits.mean()), float(bits.std() / math.sqrt(len(bits))), len(bits))


def token_groups(model: MaskedModel, words: Sequence[str]) -> TokenGroups:
    """Return the tokens that spell each word. Raises `NoScoreError` if a word between spaces is not one token."""
    spell = _speller(model.tokenizer)
    for word, tokens in zip(words, tokens_of_words(model, words), strict=True):
        if len(tokens) != 1 or spell(model.tokenizer.id_to_token(int(tokens[0]))) != word:
            raise NoScoreError(f"the vocabulary lacks {word!r} as a single token")
    numbers = {word: number for number, word in enumerate(words)}
    entries = sorted((token, spell(entry)) for entry, token in model.tokenizer.get_vocab().items())
    pairs = [(token, numbers[word]) for token, word in entries if word in numbers]
    tokens, groups = np.array(pairs, np.int64).T.copy()
    return TokenGroups(tokens, groups, len(words))


def _speller(tokenizer: Tokenizer) -> Callable[[str | None], str]:
    """Return a function that spells a vocabulary entry in lower case, without accents and leading space."""
    is_bytes = is_byte_level(tokenizer)

    def spell(entry: str | None) -> str:
        entry = entry or ""
        text = entry_bytes(entry).decode("utf-8", "replace") if is_bytes else entry.replace("\u2581", " ")
        letters = unicodedata.normalize("NFD", text.removeprefix(" ").lower())
        return "".join(letter for letter in letters if not unicodedata.combining(letter))

    return spell
