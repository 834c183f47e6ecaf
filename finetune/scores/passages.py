"""Words, each in the passage of characters around it: the same for every model, whatever its vocabulary.

A word is a run of ASCII letters between two blanks, so every tokenizer makes it one or several whole tokens.

Shape letters: L tokens of a passage, special tokens included; K tokens of a word.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from finetune.scores.held_out import document_key
from finetune.scores.masked_model import MaskedModel, frame
from pretrain.batches.order import draw
from pretrain.common.errors import InputError

_WORD = re.compile(r"(?<= )[A-Za-z]{1,40}(?= )")
# Minimum share of lower-case ASCII letters and blanks in a passage. Others are formulas, tables, lists of names or
# other scripts, which have up to three times as many tokens.
_PLAIN = 0.85
_LETTERS = re.compile(r"[a-z ]")


@dataclass(frozen=True)
class PassageSettings:
    """Selection of the words to score, and size of the passages around them.

    Attributes:
        characters: maximum characters of a passage around the word, half of them before it and half after it. 192 are
            some 50 tokens; in vocabularies of 2,000 tokens or more, no passage of 80,000 had more than 112.
        words: maximum number of words to score; chosen by the lowest hash of document, place and seed.
        seed: seed of the hashes.
    """

    characters: int = 192
    words: int = 8192
    seed: int = 0


class Occurrence(NamedTuple):
    """A word in its passage: `passage[begin:end]`."""

    passage: str
    begin: int
    end: int

    @property
    def word(self) -> str:
        return self.passage[self.begin : self.end]


class WordTokens(NamedTuple):
    """A passage as tokens: ids int64 [L], and the places of the word's tokens, int64 [K]."""

    ids: np.ndarray
    places: np.ndarray


class NoScoreError(InputError):
    """The model or the documents cannot have a score; the message says why."""


def all_words(documents: Iterable[str]) -> Iterator[str]:
    """Yield every word that may be scored, unchanged."""
    return (match[0] for document in documents for match in _WORD.finditer(document))


def sampled(documents: Sequence[str], settings: PassageSettings, is_scored: Callable[[str], bool]) -> list[Occurrence]:
    """Choose the occurrences to score, in document order; they depend only on the documents and `settings`.

    Raises `NoScoreError` if there is none.
    """
    texts, places = list(documents), list[tuple[int, int, int]]()
    keys = [np.zeros(0, np.uint64)]
    for number, document in enumerate(texts):
        found = [match.span() for match in _WORD.finditer(document) if is_scored(match[0])]
        places += [(number, begin, end) for begin, end in found]
        keys.append(draw(document_key(document, settings.seed), np.array([begin for begin, _ in found], np.int64)))
    chosen: dict[tuple[int, int, int], Occurrence] = {}
    for rank in np.argsort(np.concatenate(keys), kind="stable"):
        number, begin, end = places[rank]
        one = _passage(texts[number], begin, end, settings.characters // 2)
        if len(_LETTERS.findall(one.passage)) >= _PLAIN * len(one.passage):
            chosen[places[rank]] = one
        if len(chosen) == settings.words:
            break
    if not chosen:
        raise NoScoreError("the text has none of these words between blanks, in passages of small ASCII letters")
    return [chosen[place] for place in sorted(chosen)]


def _passage(document: str, begin: int, end: int, around: int) -> Occurrence:
    """Return the whole words within `around` characters of the word."""
    first, last = max(0, begin - around), min(len(document), end + around)
    if first:
        first = document.index(" ", first - 1) + 1  # stays at `first` if a word starts there
    if last < len(document):
        last = document.rindex(" ", 0, last + 1)
    return Occurrence(document[first:last], begin - first, end - first)


def word_tokens(model: MaskedModel, occurrences: Sequence[Occurrence]) -> list[WordTokens]:
    """Tokenize the passages. Raises `NoScoreError` if one does not fit the model, or has an unknown word."""
    before, after = frame(model.special_ids)
    tokens = []
    encoded = model.tokenizer.encode_batch([one.passage for one in occurrences], add_special_tokens=False)
    for one, found in zip(occurrences, encoded, strict=True):
        ids = np.concatenate([before, np.array(found.ids, np.int64), after])
        places = _places(found.offsets, one.begin, one.end) + len(before)
        if len(ids) > model.max_positions:
            raise NoScoreError(f"a passage has {len(ids)} tokens, and the model {model.max_positions} positions")
        if (ids[places] == model.unknown_id).any():
            raise NoScoreError(f"the vocabulary does not know the word {one.word!r}")
        tokens.append(WordTokens(ids, places))
    return tokens


def _places(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> np.ndarray:
    """Return the tokens that overlap [begin, end), int64 [K]; some tokenizers include the blank before a word."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    return np.flatnonzero((ends > begin) & (begins < end))


def tokens_of_words(model: MaskedModel, words: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each word between blanks, int64 [K] each."""
    contexts = [f"a {word} a" for word in words]
    encoded = model.tokenizer.encode_batch(contexts, add_special_tokens=False)
    return [
        np.array(found.ids, np.int64)[_places(found.offsets, 2, 2 + len(word))]
        for word, found in zip(words, encoded, strict=True)
    ]
