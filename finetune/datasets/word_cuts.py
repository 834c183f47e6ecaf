"""Where words begin and end in plain text, learnt from the words of a training set.

A training set has its own words: "U.S.", "anti-Spanish" and "@ann" are one word in some sets and several in others. A
model is asked at the first piece of each word, so its text must be cut as its training set was.

What is learnt is a unigram model of words, as a segmenter has it: a piece of `cut_words` is a class (a word, a number,
an initial, an ideograph) or a sign; a word is a sequence of these, and its probability that of its trigrams. Words of
several pieces that were seen more than once have their own frequency ("Mr.", "'s"). Text is cut at white space, and what
stands between is divided into the most probable words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from finetune.datasets.words import cut_words, is_ideograph

_MOST_ENTRIES = 5000  # of each table; the most frequent ones stay
_MOST_PIECES = 48  # of a word
_START, _END = "start", "end"
_WORD, _NUMBER, _INITIAL, _IDEOGRAPH = "word", "number", "initial", "ideograph"
_SPELT = {_WORD, _NUMBER, _INITIAL, _IDEOGRAPH}
_LETTER = math.log(1 / 50)  # of one letter, any of them; a sign is known by its class
_UNSEEN = 0.1  # how often a sign was seen that never was
# A training set does not say what stood around a sign: "a - b" and "a-b" may be the same three words of it. Between
# two words without blanks it is seldom a word of its own.
_ENCLOSED = math.log(0.01)
_TYPED = str.maketrans("‘’“”‐‑", "''\"\"--")
_NOT = "n't"
_NOT_AT_AN_END = re.compile(rf"{_NOT}(?!\w)")


class WordCuts:
    """Cuts text into words as a training set does.

    Args:
        total: words of the training set.
        trigrams: how often three classes or signs follow each other in a word; words of several pieces count once.
        kept: words of several pieces, and how often each was seen.
    """

    def __init__(self, total: int, trigrams: Mapping[tuple[str, str, str], int], kept: Mapping[str, int]) -> None:
        self._total, self._trigrams, self._kept = total, dict(trigrams), dict(kept)
        contexts: Counter[tuple[str, str]] = Counter()
        for (one, two, _), count in trigrams.items():
            contexts[one, two] += count
        words = contexts[_START, _START]
        scale = math.log(words / total) if words else 0.0
        self._log_trigrams = {
            key: math.log(count / contexts[key[:2]]) + (scale if key[1] == _START else 0.0)
            for key, count in trigrams.items()
        }
        self._log_kept = {word: math.log(count / total) for word, count in kept.items()}
        self._longest_kept = max((len(_pieces(word)) for word in kept), default=0)
        self._log_unseen = math.log(_UNSEEN / max(total, 1))
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def learn(cls, words: Iterable[str]) -> WordCuts:
        """From all words of a training set, as often as they come. Words with white space in them are left out."""
        trigrams: Counter[tuple[str, str, str]] = Counter()
        kept: Counter[str] = Counter()
        total = 0
        for word, count in Counter(words).items():
            word = word.translate(_TYPED)
            pieces = _pieces(word)
            if not pieces or any(letter.isspace() for letter in word):
                continue
            total += count
            classes = [_class_of(piece) for piece in pieces]
            if len(pieces) > 1 and count > 1:
                kept[word] += count
            if (_IDEOGRAPH, _IDEOGRAPH) in pairwise(classes):
                continue  # their words are known one by one or not at all
            weight = count if len(pieces) == 1 else 1
            padded = [_START, _START, *classes, _END]
            trigrams.update({key: weight * number for key, number in Counter(_threes(padded)).items()})
        return cls(total, dict(trigrams.most_common(_MOST_ENTRIES)), dict(kept.most_common(_MOST_ENTRIES)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> WordCuts:
        """From what `state` gave."""
        return cls(
            state["total"],
            {(one, two, three): count for one, two, three, count in state["trigrams"]},
            state["kept"],
        )

    def state(self) -> dict[str, Any]:
        """{"total", "trigrams": [[class, class, class, count]], "kept": {word: count}}, as JSON has it."""
        trigrams = [[*key, count] for key, count in self._trigrams.items()]
        return {"total": self._total, "trigrams": trigrams, "kept": self._kept}

    def __call__(self, text: str) -> np.ndarray:
        """int64 [W, 2]: first character of each word of `text`, and the one behind its last. Words have no white space."""
        pieces = cut_words(text)
        if len(pieces) < 2:
            return pieces
        begins = np.flatnonzero(np.concatenate([[True], pieces[1:, 0] > pieces[:-1, 1]]))
        counts = np.diff(np.append(begins, len(pieces)))
        words = [pieces[begins[counts == 1]]]
        for first, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            begin, end = int(pieces[first, 0]), int(pieces[first + count - 1, 1])
            places = begin + np.array((0, *self._divided(text[begin:end])), np.int64)
            words.append(np.stack([places[:-1], places[1:]], axis=1))
        found = np.concatenate(words)
        return found[np.argsort(found[:, 0])]

    def _divided(self, chunk: str) -> tuple[int, ...]:
        """Where the words of a text without white space end."""
        ends = self._known.get(chunk)
        if ends is None:
            if len(self._known) > _MOST_ENTRIES:
                self._known.clear()
            ends = self._known[chunk] = self._divide(chunk.translate(_TYPED))
        return ends

    def _divide(self, chunk: str) -> tuple[int, ...]:
        places = self._places(chunk)
        pieces = [chunk[begin:end] for begin, end in pairwise(places)]
        classes = [_class_of(piece) for piece in pieces]
        count = len(pieces)
        best, before = [0.0, *[-math.inf] * count], [0] * (count + 1)
        for first in range(count):
            for behind, log_probability in self._words(chunk, places, pieces, classes, first):
                if best[first] + log_probability > best[behind]:
                    best[behind], before[behind] = best[first] + log_probability, first
        ends = []
        while count:
            ends.append(places[count])
            count = before[count]
        return tuple(reversed(ends))

    def _words(
        self, chunk: str, places: list[int], pieces: list[str], classes: list[str], first: int
    ) -> Iterable[tuple[int, float]]:
        """(the piece behind it, log probability) of each word that may begin with the piece `first`."""
        one, two, sofar = _START, _START, 0.0
        for behind in range(first + 1, min(len(pieces), first + _MOST_PIECES) + 1):
            three = classes[behind - 1]
            sofar += self._log_trigrams.get((one, two, three), -math.inf)
            sofar += len(pieces[behind - 1]) * _LETTER if three in _SPELT else 0.0
            one, two = two, three
            found = sofar + self._log_trigrams.get((one, two, _END), -math.inf)
            if behind == first + 1:
                unseen = self._log_unseen + (len(pieces[first]) * _LETTER if three in _SPELT else 0.0)
                found = max(found, unseen)
                if _is_enclosed(classes, first):
                    found += _ENCLOSED
            found = max(found, self._log_kept.get(chunk[places[first] : places[behind]], -math.inf))
            if found > -math.inf:
                yield behind, found
            if sofar == -math.inf and behind - first >= self._longest_kept:
                return

    def _places(self, chunk: str) -> list[int]:
        """Where words may begin, and the chunk's end: at each piece, and before "n't" where the training set cuts there."""
        places = {0, *cut_words(chunk)[:, 1].tolist()}
        if _NOT in self._kept:
            places |= {found.start() for found in _NOT_AT_AN_END.finditer(chunk)}
        return sorted(places)


def _pieces(word: str) -> list[str]:
    return [word[begin:end] for begin, end in cut_words(word).tolist()]


def _class_of(piece: str) -> str:
    if is_ideograph(piece[0]):
        return _IDEOGRAPH
    if piece.isdigit():
        return _NUMBER
    if not any(letter.isalnum() for letter in piece):
        return piece
    return _INITIAL if len(piece) == 1 and piece.isupper() else _WORD


def _is_enclosed(classes: list[str], place: int) -> bool:
    """Whether it is a sign right between two words."""
    return (
        classes[place] not in _SPELT
        and 0 < place < len(classes) - 1
        and classes[place - 1] in _SPELT
        and classes[place + 1] in _SPELT
    )


def _threes(classes: list[str]) -> Iterable[tuple[str, str, str]]:
    return zip(classes, classes[1:], classes[2:], strict=False)
