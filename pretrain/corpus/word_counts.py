"""The number of words in a document, also in scripts without spaces between words.

In such scripts, words are estimated from letters, by their mean length: two ideographs, syllables or kana, or four
letters of scripts such as Thai, Lao, Khmer, Burmese and Tibetan, are a word. The count of a document is the maximum of
its words separated by whitespace and this estimate.
"""

import functools

import numpy as np

from pretrain.common import scripts

_QUARTERS_PER_WORD = 4  # weights are in quarters of a word
_QUARTERS_BY_KIND = np.array([0, 0, 0, 1, 2, 2, 1], np.uint8)  # weight of a letter by its kind in `scripts`
_MIN_LEAD = 0xE0  # the smallest first byte of a three-byte character in UTF-8


@functools.cache
def _weights() -> tuple[np.ndarray, bytes]:
    """Return (weights by the first three bytes of a character, uint8 [0x11000]; maximum weight by the first byte).

    Three bytes are a character, or the prefix of 64 four-byte characters. A mark has the weight of its letter.
    """
    kinds = scripts.kinds()
    letters = np.maximum.accumulate(np.where(kinds >= scripts.LETTER, np.arange(len(kinds)), 0))
    unit_weights = np.where(kinds == scripts.OTHER, 0, _QUARTERS_BY_KIND[kinds[letters]])
    weights = np.concatenate([unit_weights[: 1 << 16], unit_weights[::64]])
    return weights, bytes(_MIN_LEAD) + weights.reshape(-1, 1 << 12).max(axis=1).tobytes().ljust(256 - _MIN_LEAD, b"\0")


def document_words(raw: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Count the words of each document in `raw`, concatenated documents in UTF-8; int64 [D].

    Args:
        starts: int [W], offsets of the words separated by whitespace, ascending.
        ends: int [D], offsets of the ends of documents, ascending.
    """
    words = np.diff(np.searchsorted(starts, ends), prepend=0)
    if raw.isascii():
        return words
    weights, by_lead = _weights()
    leads = np.flatnonzero(np.frombuffer(raw.translate(by_lead), np.uint8))
    if not leads.size:
        return words
    text = np.frombuffer(raw, np.uint8)
    indices = (text[leads] - _MIN_LEAD).astype(np.int64) << 12 | (text[leads + 1] & 63).astype(np.int64) << 6
    quarters = np.append(0, np.cumsum(weights[indices | text[leads + 2] & 63], dtype=np.int64))
    return np.maximum(words, np.diff(quarters[np.searchsorted(leads, ends)], prepend=0) // _QUARTERS_PER_WORD)


def count_words(text: str) -> int:
    """Count the words of a document, as `document_words` does."""
    raw = text.encode()
    word_starts = np.arange(len(raw.split()))  # only their number matters
    return int(document_words(raw, word_starts, np.array([len(raw)]))[0])
