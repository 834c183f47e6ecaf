"""Bits per common word: how well a model predicts frequent words, comparable across vocabularies.

The words are listed in common_words.txt, which never changes. Lower-case occurrences between two spaces are scored:
each is masked in the passage around it, and all models get the same passages. Probabilities are normalized over the
words of the list. The probability of a word is the sum over all tokens that spell it, in any case, with or without
accents or a leading space. So the scores of models with different vocabularies are comparable.
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
from finetune.scores.passages import NoScoreError, PassageSettings, sample_words, tokenize_passages, tokenize_words
from pretrain.corpus.byte_level import is_byte_level
from pretrain.corpus.byte_words import entry_bytes

NAME = "common_words"  # name of the score
WORD_LIST = Path(__file__).parent / "common_words.txt"


@dataclass(frozen=True)
class CommonWordScore:
    """Quality of the prediction of common words.

    Attributes:
        bits: mean of -log2 of the probability of each scored word; comparable between vocabularies.
        standard_error: standard error of `bits` over the scored words; excludes the variance between training runs.
        words: number of scored words.
    """

    bits: float
    standard_error: float
    words: int


@cache
def common_words() -> tuple[str, ...]:
    """Return the words of the list, in alphabetical order."""
    return tuple(WORD_LIST.read_text(encoding="utf-8").split())


def score_common_words(
    model: MaskedModel, documents: Sequence[str], settings: PassageSettings, words: Sequence[str] | None = None
) -> CommonWordScore:
    """Score a model on documents with normalized spaces (`read_documents`); `words` defaults to `common_words()`.

    Raises `NoScoreError` if a word is not one token of the vocabulary, or as `sample_words` and `tokenize_passages` do.
    """
    words = common_words() if words is None else words
    groups, group_index = token_groups(model, words), {word: index for index, word in enumerate(words)}
    occurrences = sample_words(documents, settings, group_index.__contains__)
    sequences = []
    for occurrence, (ids, positions) in zip(occurrences, tokenize_passages(model, occurrences), strict=True):
        masked = ids.copy()
        masked[positions] = model.mask_id
        sequences.append(MaskedSequence(masked, positions, np.array([group_index[occurrence.word]])))
    with progress_bar("common words", len(sequences)) as advance:
        bits = -model.predict(sequences, advance, groups).log_probabilities / math.log(2)
    return CommonWordScore(float(bits.mean()), float(bits.std() / math.sqrt(len(bits))), len(bits))


def token_groups(model: MaskedModel, words: Sequence[str]) -> TokenGroups:
    """Group the tokens by the word they spell. Raises `NoScoreError` if a word between spaces is not a single token."""
    spell = _speller(model.tokenizer)
    for word, tokens in zip(words, tokenize_words(model, words), strict=True):
        if len(tokens) != 1 or spell(model.tokenizer.id_to_token(int(tokens[0]))) != word:
            raise NoScoreError(f"the vocabulary lacks {word!r} as a single token")
    group_index = {word: index for index, word in enumerate(words)}
    spellings = sorted((token, spell(entry)) for entry, token in model.tokenizer.get_vocab().items())
    pairs = [(token, group_index[word]) for token, word in spellings if word in group_index]
    tokens, groups = np.array(pairs, np.int64).T.copy()
    return TokenGroups(tokens, groups, len(words))


def _speller(tokenizer: Tokenizer) -> Callable[[str | None], str]:
    """Return a function that spells a vocabulary entry in lower case, without accents or a leading space."""
    is_bytes = is_byte_level(tokenizer)

    def spell(entry: str | None) -> str:
        entry = entry or ""
        text = entry_bytes(entry).decode("utf-8", "replace") if is_bytes else entry.replace("\u2581", " ")
        letters = unicodedata.normalize("NFD", text.removeprefix(" ").lower())
        return "".join(letter for letter in letters if not unicodedata.combining(letter))

    return spell
