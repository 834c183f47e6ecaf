"""Words to score, each in a passage of text around it: the same for every model, regardless of its vocabulary.

A word is a run of ASCII letters between two spaces, so every tokenizer splits it into one or more whole tokens.

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
# Minimum share of lower-case ASCII letters and spaces in a passage. Other passages are formulas, tables, lists of names
# or other scripts, which have up to three times as many tokens.
_MIN_PLAIN = 0.85
_LETTERS = re.compile(r"[a-z ]")


@dataclass(frozen=True)
class PassageSettings:
    """Selection of the words to score, and size of the passages around them.

    Attributes:
        characters: maximum characters of a passage around the word, half of them before it and half after it. 192 are
            some 50 tokens; in vocabularies of 2,000 tokens or more, no passage of 80,000 had more than 112.
        words: maximum number of words to score; the ones with the lowest hashes of document, position and seed.
        seed: seed of the hashes.
    """

    characters: int = 192
    words: int = 8192
    seed: int = 0


class Occurrence(NamedTuple):
    """A word in its passage: `passage[start:end]`."""

    passage: str
    start: int
    end: int

    @property
    def word(self) -> str:
        return self.passage[self.start : self.end]


class WordTokens(NamedTuple):
    """A passage as tokens: ids int64 [L], and the positions of the word's tokens, int64 [K]."""

    ids: np.ndarray
    positions: np.ndarray


class NoScoreError(InputError):
    """The score cannot be computed for this model or these documents; the message states the reason."""


def all_words(documents: Iterable[str]) -> Iterator[str]:
    """Yield every word that may be scored, in its original case."""
    return (match[0] for document in documents for match in _WORD.finditer(document))


def sample_words(documents: Sequence[str], settings: PassageSettings, keep: Callable[[str], bool]) -> list[Occurrence]:
    """Choose the occurrences to score, in document order; they depend only on the documents and `settings`.

    Raises `NoScoreError` if there is none.
    """
    spans = list[tuple[int, int, int]]()  # (document, start, end)
    keys = [np.zeros(0, np.uint64)]
    for number, document in enumerate(documents):
        matches = [match.span() for match in _WORD.finditer(document) if keep(match[0])]
        spans += [(number, start, end) for start, end in matches]
        keys.append(draw(document_key(document, settings.seed), np.array([start for start, _ in matches], np.int64)))
    chosen: dict[tuple[int, int, int], Occurrence] = {}
    for index in np.argsort(np.concatenate(keys), kind="stable"):
        number, start, end = span = spans[int(index)]
        occurrence = _occurrence(documents[number], start, end, settings.characters // 2)
        if len(_LETTERS.findall(occurrence.passage)) >= _MIN_PLAIN * len(occurrence.passage):
            chosen[span] = occurrence
        if len(chosen) == settings.words:
            break
    if not chosen:
        raise NoScoreError("the text has none of these words between spaces, in passages of lower-case ASCII letters")
    return [chosen[span] for span in sorted(chosen)]


def _occurrence(document: str, start: int, end: int, radius: int) -> Occurrence:
    """Return the word with the whole words within `radius` characters around it."""
    first, last = max(0, start - radius), min(len(document), end + radius)
    if first:
        first = document.index(" ", first - 1) + 1  # unchanged if a word starts there
    if last < len(document):
        last = document.rindex(" ", 0, last + 1)
    return Occurrence(document[first:last], start - first, end - first)


def word_tokens(model: MaskedModel, occurrences: Sequence[Occurrence]) -> list[WordTokens]:
    """Tokenize the passages. Raises `NoScoreError` if one does not fit the model, or has an unknown word."""
    before, after = frame(model.special_ids)
    tokens = []
    encodings = model.tokenizer.encode_batch([item.passage for item in occurrences], add_special_tokens=False)
    for occurrence, encoding in zip(occurrences, encodings, strict=True):
        ids = np.concatenate([before, np.array(encoding.ids, np.int64), after])
        positions = _overlapping(encoding.offsets, occurrence.start, occurrence.end) + len(before)
        if len(ids) > model.max_positions:
            raise NoScoreError(f"a passage has {len(ids)} tokens, and the model {model.max_positions} positions")
        if (ids[positions] == model.unknown_id).any():
            raise NoScoreError(f"the vocabulary has no tokens for the word {occurrence.word!r}")
        tokens.append(WordTokens(ids, positions))
    return tokens


def _overlapping(offsets: Sequence[tuple[int, int]], start: int, end: int) -> np.ndarray:
    """Return the tokens that overlap [start, end), int64 [K]; some tokenizers include the space before a word."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    return np.flatnonzero((ends > start) & (starts < end))


def tokens_of_words(model: MaskedModel, words: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each word between spaces, int64 [K] each."""
    contexts = [f"a {word} a" for word in words]
    encodings = model.tokenizer.encode_batch(contexts, add_special_tokens=False)
    return [
        np.array(encoding.ids, np.int64)[_overlapping(encoding.offsets, 2, 2 + len(word))]
        for word, encoding in zip(words, encodings, strict=True)
    ]
