"""Words of plain text by a rule of our own, and entities from characters to words and back."""

from __future__ import annotations

import unicodedata

import numpy as np

_SPACE, _RUN, _ALONE, _MARK = range(4)


def cut_words(text: str) -> np.ndarray:
    """int64 [W, 2]: first character of each word of `text`, and the one behind its last.

    As BERT's pre-tokeniser does it (google-research/bert tokenization.py, BasicTokenizer): white space separates;
    a punctuation mark and a CJK character are words of their own; whatever else stands together is one word. Unlike
    there, symbols of any alphabet (currency, arrows, emoji) are words of their own too, as entities end at them.
    Combining marks, joiners and control characters belong to the character before them.
    """
    if not text:
        return np.zeros((0, 2), np.int64)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    distinct, inverse = np.unique(points, return_inverse=True)
    kinds = np.array([_kind(chr(point)) for point in distinct.tolist()], np.uint8)[inverse]
    # A mark is of the kind of what carries it; one without a carrier is like a letter.
    carriers = np.maximum.accumulate(np.where(kinds == _MARK, -1, np.arange(len(kinds))))
    carried = np.where(carriers < 0, _RUN, kinds[carriers])
    orphans = (kinds == _MARK) & (carried == _SPACE)
    solid = np.where(orphans, _RUN, carried)
    before = np.concatenate([[_SPACE], solid[:-1]])
    begins = (solid != _SPACE) & ((before == _SPACE) | ((kinds != _MARK) & ((solid == _ALONE) | (before == _ALONE))))
    first = np.flatnonzero(begins)
    stops = np.append(np.flatnonzero(begins | (solid == _SPACE)), len(text))
    return np.stack([first, stops[np.searchsorted(stops, first, "right")]], axis=1)


def joined(words: list[str]) -> np.ndarray:
    """int64 [W, 2]: where `words` stand in their text, which is `words` joined by blanks."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    behind = np.cumsum(lengths + 1) - 1
    return np.stack([behind - lengths, behind], axis=1)


def _kind(character: str) -> int:
    if character.isspace() and not "\x1c" <= character <= "\x1f":
        return _SPACE
    category = unicodedata.category(character)
    if category[0] in "PS" or is_ideograph(character):
        return _ALONE
    return _MARK if category[0] == "M" or category in ("Cc", "Cf") else _RUN


def is_ideograph(character: str) -> bool:
    """The CJK blocks of google-research/bert tokenization.py, BasicTokenizer._is_chinese_char."""
    point = ord(character)
    return (
        0x4E00 <= point <= 0x9FFF
        or 0x3400 <= point <= 0x4DBF
        or 0x20000 <= point <= 0x2A6DF
        or 0x2A700 <= point <= 0x2CEAF
        or 0xF900 <= point <= 0xFAFF
        or 0x2F800 <= point <= 0x2FA1F
    )
