"""Chooses words to score, each in a passage of text; the choice is the same for every vocabulary.

A word is a run of ASCII letters between two spaces, so every tokenizer splits it into one or more whole tokens.

Shape letters: L tokens in a passage, special tokens included; K tokens in a word.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from finetune.scores.held_out import document_key
from finetune.scores.masked_model import MaskedModel, enclosing_ids
from pretrain.batches.order import draw
from pretrain.common.errors import InputError

_WORD = re.compile(r"(?<= )[A-Za-z]{1,40}(?= )")
# Minimum share of lower-case ASCII letters and spaces in a passage. It excludes formulas, tables, lists of names and
# other scripts, which have up to three times as many tokens.
_MIN_PLAIN_SHARE = 0.85
_PLAIN_CHARACTER = re.compile(r"[a-z ]")


@dataclass(frozen=True)
class PassageSettings:
    """Selection of the words to score, and size of the passages around them.

    Attributes:
        characters: maximum number of characters around the word, half before and half after it. 192 characters are
            about 50 tokens; the longest of 80,000 passages had 112, with vocabularies of 2,000 tokens or more.
        words: maximum number of words to score, chosen by the lowest hash of document, position and seed.
        seed: seed of the hash.
    """

    characters: int = 192
    words: int = 8192
    seed: int = 0


class Occurrence(NamedTuple):
    """A word to score, `passage[start:end]`, and the passage around it."""

    passage: str
    start: int
    end: int

    @property
    def word(self) -> str:
        return self.passage[self.start : self.end]


class WordTokens(NamedTuple):
    """The token ids of a passage, int64 [L], and the positions of the word's tokens in it, int64 [K]."""

    ids: np.ndarray
    positions: np.ndarray


class NoScoreError(InputError):
    """The score cannot be computed for this model or these documents; the message states the reason."""


def all_words(documents: Iterable[str]) -> Iterator[str]:
    """Yield every word that may be scored, in its original case."""
    return (match[0] for document in documents for match in _WORD.finditer(document))


def sample_words(documents: Sequence[str], settings: PassageSettings, keep: Callable[[str], bool]) -> list[Occurrence]:
    """Choose occurrences of words for which `keep` returns True; return them in document order.

    Raises `NoScoreError` if there are none.
    """
    spans = list[tuple[int, int, int]]()  # (index of the document, start, end)
    hashes = [np.zeros(0, np.uint64)]
    for index, document in enumerate(documents):
        matches = [match.span() for match in _WORD.finditer(document) if keep(match[0])]
        spans += [(index, start, end) for start, end in matches]
        hashes.append(draw(document_key(document, settings.seed), np.array([start for start, _ in matches], np.int64)))
    chosen: dict[tuple[int, int, int], Occurrence] = {}
    for candidate in np.argsort(np.concatenate(hashes), kind="stable"):
        index, start, end = span = spans[int(candidate)]
        occurrence = _occurrence(documents[index], start, end, settings.characters // 2)
        if len(_PLAIN_CHARACTER.findall(occurrence.passage)) >= _MIN_PLAIN_SHARE * len(occurrence.passage):
            chosen[span] = occurrence
        if len(chosen) == settings.words:
            break
    if not chosen:
        raise NoScoreError("the text contains no word to score (between spaces, amid lower-case ASCII letters)")
    return [chosen[span] for span in sorted(chosen)]


def _occurrence(document: str, start: int, end: int, radius: int) -> Occurrence:
    """Return the word with its passage: the whole words within `radius` characters before and after it."""
    left, right = max(0, start - radius), min(len(document), end + radius)
    if left:
        left = document.index(" ", left - 1) + 1  # unchanged if a word starts there
    if right < len(document):
        right = document.rindex(" ", 0, right + 1)
    return Occurrence(document[left:right], start - left, end - left)


def tokenize_passages(model: MaskedModel, occurrences: Sequence[Occurrence]) -> list[WordTokens]:
    """Tokenize the passages. Raises `NoScoreError` if one is too long for the model, or its word has unknown tokens."""
    prefix, suffix = enclosing_ids(model.special_ids)
    tokens = []
    encodings = model.tokenizer.encode_batch([item.passage for item in occurrences], add_special_tokens=False)
    for occurrence, encoding in zip(occurrences, encodings, strict=True):
        ids = np.concatenate([prefix, np.array(encoding.ids, np.int64), suffix])
        positions = _overlapping_tokens(encoding.offsets, occurrence.start, occurrence.end) + len(prefix)
        if len(ids) > model.max_positions:
            raise NoScoreError(f"a passage has {len(ids)} tokens, but the model has {model.max_positions} positions")
        if (ids[positions] == model.unknown_id).any():
            raise NoScoreError(f"the vocabulary cannot spell the word {occurrence.word!r}")
        tokens.append(WordTokens(ids, positions))
    return tokens


def _overlapping_tokens(offsets: Sequence[tuple[int, int]], start: int, end: int) -> np.ndarray:
    """Return the indices of the tokens that overlap [start, end), int64 [K]; the first may start with a space."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    return np.flatnonzero((ends > start) & (starts < end))


def tokenize_words(model: MaskedModel, words: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each word as it is tokenized between spaces, int64 [K] each."""
    contexts = [f"a {word} a" for word in words]
    encodings = model.tokenizer.encode_batch(contexts, add_special_tokens=False)
    return [
        np.array(encoding.ids, np.int64)[_overlapping_tokens(encoding.offsets, 2, 2 + len(word))]
        for word, encoding in zip(words, encodings, strict=True)
    ]
