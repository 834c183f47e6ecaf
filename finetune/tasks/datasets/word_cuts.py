"""Word segmentation of plain text, learned from the words of a training set.

Training sets are segmented differently: "U.S.", "anti-Spanish" and "@ann" are one word in some and several in others.
The model tags the first token of each word, so plain text must be segmented like the training set.

The segmenter is a unigram model of words. A word is one or more of the pieces into which `cut_words` splits text. Each
piece has a class (word, number, initial, ideograph, or letter of another script without spaces) or is a symbol. A
word's probability is a product over trigrams of classes and symbols. Words of several pieces that occur more than once
("Mr.", "'s") are also counted whole. Text is split at whitespace, and each chunk into its most probable words by
the Viterbi algorithm.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from finetune.tasks.datasets.words import cut_words
from pretrain.common import scripts

_MAX_ENTRIES = 5000  # maximum number of entries of the cache, and of each table of counts (the most frequent)
_MAX_PIECES = 48  # maximum number of pieces of a word
_START, _END = "start", "end"
_WORD, _NUMBER, _INITIAL, _IDEOGRAPH = "word", "number", "initial", "ideograph"
_KATAKANA, _HIRAGANA, _COMPLEX = "katakana", "hiragana", "complex"
_ALPHANUMERIC = {_WORD, _NUMBER, _INITIAL, _IDEOGRAPH, _KATAKANA, _HIRAGANA, _COMPLEX}
_LOG_LETTER = math.log(1 / 50)  # log probability of each character of an alphanumeric piece
_UNSEEN_COUNT = 0.1  # count assumed for a piece that is not in the training set
# Log probability that a symbol directly between two words ("a-b") is a separate word. It cannot be learned: a training
# set of words does not show whether there were spaces around a symbol.
_LOG_ENCLOSED_SYMBOL = math.log(0.01)
_TO_ASCII = str.maketrans("‘’“”‐‑", "''\"\"--")  # typographic quotes and hyphens
_NT = "n't"
_NT_AT_WORD_END = re.compile(rf"{_NT}(?!\w)")


class WordSegmenter:
    """Segments text into words like the training set from which it was learned.

    Args:
        total: number of words in the training set.
        trigrams: counts of three consecutive classes or symbols in words; each word of several pieces counts once.
        compounds: counts of words of several pieces that occur more than once.
    """

    def __init__(self, total: int, trigrams: Mapping[tuple[str, str, str], int], compounds: Mapping[str, int]) -> None:
        self._total, self._trigrams, self._compounds = total, dict(trigrams), dict(compounds)
        contexts: Counter[tuple[str, str]] = Counter()
        for (first_class, second_class, _), count in trigrams.items():
            contexts[first_class, second_class] += count
        words_in_trigrams = contexts[_START, _START]
        log_share = math.log(words_in_trigrams / total) if words_in_trigrams else 0.0
        self._log_trigrams = {
            key: math.log(count / contexts[key[:2]]) + (log_share if key[1] == _START else 0.0)
            for key, count in trigrams.items()
        }
        self._log_compounds = {word: math.log(count / total) for word, count in compounds.items()}
        self._longest_compound = max((len(_pieces(word)) for word in compounds), default=0)  # in pieces
        self._log_unseen = math.log(_UNSEEN_COUNT / max(total, 1))
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def learn(cls, words: Iterable[str]) -> WordSegmenter:
        """Learn from all words of a training set, with repetitions. Words that contain whitespace are ignored."""
        trigrams: Counter[tuple[str, str, str]] = Counter()
        compounds: Counter[str] = Counter()
        total = 0
        for word, count in Counter(words).items():
            word = word.translate(_TO_ASCII)
            pieces = _pieces(word)
            if not pieces or any(letter.isspace() for letter in word):
                continue
            total += count
            classes = [_class_of(piece) for piece in pieces]
            if len(pieces) > 1 and count > 1:
                compounds[word] += count
            if (_IDEOGRAPH, _IDEOGRAPH) in pairwise(classes):
                continue  # such words only count as a whole, in `compounds`
            weight = count if len(pieces) == 1 else 1
            padded = [_START, _START, *classes, _END]
            trigrams.update({key: weight * occurrences for key, occurrences in Counter(_trigrams(padded)).items()})
        return cls(total, dict(trigrams.most_common(_MAX_ENTRIES)), dict(compounds.most_common(_MAX_ENTRIES)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> WordSegmenter:
        """Restore from the return value of `state`."""
        return cls(
            state["total"],
            {(first, second, third): count for first, second, third, count in state["trigrams"]},
            state["kept"],
        )

    def state(self) -> dict[str, Any]:
        """Return {"total", "trigrams": [[class, class, class, count]], "kept": {compound: count}}, ready for JSON."""
        trigrams = [[*key, count] for key, count in self._trigrams.items()]
        return {"total": self._total, "trigrams": trigrams, "kept": self._compounds}

    def __call__(self, text: str) -> np.ndarray:
        """Return int64 [W, 2]: start and end (exclusive) of each word of `text`, in characters."""
        pieces = cut_words(text)
        if len(pieces) < 2:
            return pieces
        chunk_starts = np.flatnonzero(np.concatenate([[True], pieces[1:, 0] > pieces[:-1, 1]]))
        piece_counts = np.diff(np.append(chunk_starts, len(pieces)))
        word_spans = [pieces[chunk_starts[piece_counts == 1]]]  # a chunk of one piece is a word
        is_longer = piece_counts > 1
        for first, count in zip(chunk_starts[is_longer].tolist(), piece_counts[is_longer].tolist(), strict=True):
            start, end = int(pieces[first, 0]), int(pieces[first + count - 1, 1])
            bounds = start + np.array((0, *self._word_ends(text[start:end])), np.int64)
            word_spans.append(np.stack([bounds[:-1], bounds[1:]], axis=1))
        spans = np.concatenate(word_spans)
        return spans[np.argsort(spans[:, 0])]

    def _word_ends(self, chunk: str) -> tuple[int, ...]:
        """Return the character index after each word of `chunk`, which has no whitespace."""
        ends = self._cache.get(chunk)
        if ends is None:
            if len(self._cache) > _MAX_ENTRIES:
                self._cache.clear()
            ends = self._cache[chunk] = self._viterbi(chunk.translate(_TO_ASCII))
        return ends

    def _viterbi(self, chunk: str) -> tuple[int, ...]:
        """Split a chunk into its most probable words; return the character index after each."""
        bounds = self._possible_bounds(chunk)
        pieces = [chunk[start:end] for start, end in pairwise(bounds)]
        classes = [_class_of(piece) for piece in pieces]
        count = len(pieces)
        # [n]: log probability of the best segmentation of the first n pieces, and the first piece of its last word.
        log_best, last_word_start = [0.0, *[-math.inf] * count], [0] * (count + 1)
        for first in range(count):
            for end, log_probability in self._candidates(chunk, bounds, pieces, classes, first):
                if log_best[first] + log_probability > log_best[end]:
                    log_best[end], last_word_start[end] = log_best[first] + log_probability, first
        ends = []
        while count:
            ends.append(bounds[count])
            count = last_word_start[count]
        return tuple(reversed(ends))

    def _candidates(
        self, chunk: str, bounds: list[int], pieces: list[str], classes: list[str], first: int
    ) -> Iterable[tuple[int, float]]:
        """Yield (index after its last piece, log probability) of each possible word that starts at piece `first`."""
        first_class, second_class, log_prefix = _START, _START, 0.0
        for end in range(first + 1, min(len(pieces), first + _MAX_PIECES) + 1):
            third_class = classes[end - 1]
            log_prefix += self._log_trigrams.get((first_class, second_class, third_class), -math.inf)
            log_letters = len(pieces[end - 1]) * _LOG_LETTER if third_class in _ALPHANUMERIC else 0.0
            log_prefix += log_letters
            first_class, second_class = second_class, third_class
            log_probability = log_prefix + self._log_trigrams.get((first_class, second_class, _END), -math.inf)
            if end == first + 1:
                log_probability = max(log_probability, self._log_unseen + log_letters)
                if _is_enclosed(classes, first):
                    log_probability += _LOG_ENCLOSED_SYMBOL
            log_whole_word = self._log_compounds.get(chunk[bounds[first] : bounds[end]], -math.inf)
            log_probability = max(log_probability, log_whole_word)
            if log_probability > -math.inf:
                yield end, log_probability
            if log_prefix == -math.inf and end - first >= self._longest_compound:
                return

    def _possible_bounds(self, chunk: str) -> list[int]:
        """Return 0 and the indices where words may end: after each piece, and before "n't" if it is a training word."""
        bounds = {0, *cut_words(chunk)[:, 1].tolist()}
        if _NT in self._compounds:
            bounds |= {match.start() for match in _NT_AT_WORD_END.finditer(chunk)}
        return sorted(bounds)


def _pieces(word: str) -> list[str]:
    return [word[start:end] for start, end in cut_words(word).tolist()]


def _class_of(piece: str) -> str:
    """Return the class of a piece; a symbol is returned unchanged."""
    if scripts.STARTS_UNIT.match(piece):
        kind = scripts.kind_of(piece[0])
        kana = _KATAKANA if "\u30a0" <= piece[0] <= "\u30ff" else _HIRAGANA
        return {scripts.KANA: kana, scripts.COMPLEX: _COMPLEX}.get(kind, _IDEOGRAPH)
    if piece.isdigit():
        return _NUMBER
    if not any(letter.isalnum() for letter in piece):
        return piece
    return _INITIAL if len(piece) == 1 and piece.isupper() else _WORD


def _is_enclosed(classes: list[str], index: int) -> bool:
    """Return whether the piece at `index` is a symbol directly between two alphanumeric pieces."""
    return (
        classes[index] not in _ALPHANUMERIC
        and 0 < index < len(classes) - 1
        and classes[index - 1] in _ALPHANUMERIC
        and classes[index + 1] in _ALPHANUMERIC
    )


def _trigrams(classes: list[str]) -> Iterable[tuple[str, str, str]]:
    return zip(classes, classes[1:], classes[2:], strict=False)
