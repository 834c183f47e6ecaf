"""Words of a text, each in the passage of characters around it: the same for every model, whatever its vocabulary.

A word is a run of ASCII letters between two blanks, so that in every tokenizer it is one or several whole tokens.

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
# Share of small ASCII letters and blanks in a passage: others are formulas, tables, lists of names or other scripts,
# which have up to three times as many tokens.
_PLAIN = 0.85
_LETTERS = re.compile(r"[a-z ]")


@dataclass(frozen=True)
class PassageSettings:
    """Which words of a text are scored, and what a model sees of it.

    Attributes:
        characters: of a passage at most, besides the word itself: half of them before it and half after it. 192 are
            some 50 tokens, and at most 112 of 80,000 passages were in any vocabulary of 2,000 tokens or more.
        words: to score at most; those with the lowest hashes of document, place and seed.
        seed: of the hashes.
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
    """A passage as tokens: ids int64 [L], and places int64 [K], those of the word's tokens."""

    ids: np.ndarray
    places: np.ndarray


class NoScoreError(InputError):
    """A model or a text cannot have a score; the message says why."""


def all_words(documents: Iterable[str]) -> Iterator[str]:
    """Every word that may be scored, as it stands."""
    return (match[0] for document in documents for match in _WORD.finditer(document))


def sampled(documents: Sequence[str], how: PassageSettings, wanted: Callable[[str], bool]) -> list[Occurrence]:
    """The occurrences to score, in the order of the text; they depend on the documents and `how` alone.

    Raises `NoScoreError` if there is none.
    """
    texts, places = list(documents), list[tuple[int, int, int]]()
    keys = [np.zeros(0, np.uint64)]
    for number, document in enumerate(texts):
        found = [match.span() for match in _WORD.finditer(document) if wanted(match[0])]
        places += [(number, begin, end) for begin, end in found]
        keys.append(draw(document_key(document, how.seed), np.array([begin for begin, _ in found], np.int64)))
    chosen: dict[tuple[int, int, int], Occurrence] = {}
    for rank in np.argsort(np.concatenate(keys), kind="stable"):
        number, begin, end = places[rank]
        one = _passage(texts[number], begin, end, how.characters // 2)
        if len(_LETTERS.findall(one.passage)) >= _PLAIN * len(one.passage):
            chosen[places[rank]] = one
        if len(chosen) == how.words:
            break
    if not chosen:
        raise NoScoreError("the text has none of these words between blanks, in passages of small ASCII letters")
    return [chosen[place] for place in sorted(chosen)]


def _passage(document: str, begin: int, end: int, around: int) -> Occurrence:
    """The whole words within `around` characters of the word."""
    first, last = max(0, begin - around), min(len(document), end + around)
    if first:
        first = document.index(" ", first - 1) + 1  # at `first` if a word begins there
    if last < len(document):
        last = document.rindex(" ", 0, last + 1)
    return Occurrence(document[first:last], begin - first, end - first)


def word_tokens(model: MaskedModel, occurrences: Sequence[Occurrence]) -> list[WordTokens]:
    """The passages as the model reads them. Raises `NoScoreError` if one does not fit, or has an unknown word."""
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
    """int64 [K] of the tokens with characters of `begin` to `end`; some tokenizers add the blank before a word."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    return np.flatnonzero((ends > begin) & (begins < end))


def tokens_of_words(model: MaskedModel, words: Sequence[str]) -> list[np.ndarray]:
    """The ids of each word between blanks, int64 [K] each."""
    contexts = [f"a {word} a" for word in words]
    encoded = model.tokenizer.encode_batch(contexts, add_special_tokens=False)
    return [
        np.array(found.ids, np.int64)[_places(found.offsets, 2, 2 + len(word))]
        for word, found in zip(words, encoded, strict=True)
    ]
