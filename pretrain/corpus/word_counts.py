"""How many words a document has, also in scripts that put no blanks between words.

Such a script's words are counted by its letters: two ideographs, syllables or kana, or four letters of Thai, Lao,
Khmer, Burmese, Tibetan and the like, are a word, about their mean length. A document has the words between blanks, or
those of such letters if they are more.
"""

import functools

import numpy as np

from pretrain.common import scripts

_QUARTERS = 4  # of a word, the unit of the weights
_OF_KINDS = np.array([0, 0, 0, 1, 2, 2, 1], np.uint8)  # TIBETAN, IDEOGRAPH, KANA and COMPLEX have some
_LEAD = 0xE0  # the least first byte of three bytes in UTF-8


@functools.cache
def _weights() -> tuple[np.ndarray, bytes]:
    """uint8 [0x11000]: quarters of a word by the first three bytes of a character, and the most by its first alone.

    These are a character, or 64 of those with four bytes. A mark counts as the letter before it in the code.
    """
    kinds = scripts.kinds()
    letters = np.maximum.accumulate(np.where(kinds >= scripts.LETTER, np.arange(len(kinds)), 0))
    each = np.where(kinds == scripts.OTHER, 0, _OF_KINDS[kinds[letters]])
    weights = np.concatenate([each[: 1 << 16], each[::64]])
    return weights, bytes(_LEAD) + weights.reshape(-1, 1 << 12).max(axis=1).tobytes().ljust(256 - _LEAD, b"\0")


def document_words(raw: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64 [D]: the words of each document of `raw`, texts in UTF-8 end to end.

    Args:
        starts: int [W], where words between blanks start, ascending.
        ends: int [D], where documents end, ascending.
    """
    words = np.diff(np.searchsorted(starts, ends), prepend=0)
    if raw.isascii():
        return words
    weights, by_lead = _weights()
    leads = np.flatnonzero(np.frombuffer(raw.translate(by_lead), np.uint8))
    if not leads.size:
        return words
    text = np.frombuffer(raw, np.uint8)
    places = (text[leads] - _LEAD).astype(np.int64) << 12 | (text[leads + 1] & 63).astype(np.int64) << 6
    quarters = np.append(0, np.cumsum(weights[places | text[leads + 2] & 63], dtype=np.int64))
    return np.maximum(words, np.diff(quarters[np.searchsorted(leads, ends)], prepend=0) // _QUARTERS)


def count_words(text: str) -> int:
    """The words of a text, as `document_words` counts them."""
    raw = text.encode()
    spaced = np.arange(len(raw.split()))  # only their number counts
    return int(document_words(raw, spaced, np.array([len(raw)]))[0])
