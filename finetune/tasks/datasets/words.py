"""Rule-based segmentation of plain text into words, and the character offsets of given words."""

import unicodedata

import numpy as np

from pretrain.common import scripts

_SPACE, _WORD_PART, _SINGLE, _MARK = range(4)  # kinds of characters; a _SINGLE is a word by itself


def cut_words(text: str) -> np.ndarray:
    """Return int64 [W, 2]: start and end (exclusive) of each word of `text`, in characters.

    Follows BERT's pre-tokenizer (google-research/bert tokenization.py, BasicTokenizer): whitespace separates words;
    each punctuation mark and CJK character is a word; any other run of characters is one word. Unlike in BERT, each
    symbol (currency, arrow, emoji) is a word too, because entities end at them, and so is each letter of a script
    without spaces (kana, Thai, Khmer). Marks, joiners and control characters belong to the character before them.
    """
    if not text:
        return np.zeros((0, 2), np.int64)
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    distinct, inverse = np.unique(code_points, return_inverse=True)
    kinds = np.array([_kind(chr(code_point)) for code_point in distinct.tolist()], np.uint8)[inverse]
    # A mark has the kind of its base character; a mark without one is treated as part of a word.
    bases = np.maximum.accumulate(np.where(kinds == _MARK, -1, np.arange(len(kinds))))
    base_kinds = np.where(bases < 0, _WORD_PART, kinds[bases])
    has_no_base = (kinds == _MARK) & (base_kinds == _SPACE)
    final_kinds = np.where(has_no_base, _WORD_PART, base_kinds)
    previous = np.concatenate([[_SPACE], final_kinds[:-1]])
    is_split = (kinds != _MARK) & ((final_kinds == _SINGLE) | (previous == _SINGLE))
    is_start = (final_kinds != _SPACE) & ((previous == _SPACE) | is_split)
    starts = np.flatnonzero(is_start)
    stops = np.append(np.flatnonzero(is_start | (final_kinds == _SPACE)), len(text))
    return np.stack([starts, stops[np.searchsorted(stops, starts, "right")]], axis=1)


def joined_offsets(words: list[str]) -> np.ndarray:
    """Return int64 [W, 2]: start and end (exclusive) of each word in `" ".join(words)`."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ends = np.cumsum(lengths + 1) - 1
    return np.stack([ends - lengths, ends], axis=1)


def _kind(character: str) -> int:
    if character.isspace() and not "\x1c" <= character <= "\x1f":
        return _SPACE
    category = unicodedata.category(character)
    if category[0] in "PS" or scripts.STARTS_UNIT.match(character):
        return _SINGLE
    return _MARK if category in ("Cc", "Cf") or scripts.CONTINUATION.match(character) else _WORD_PART
