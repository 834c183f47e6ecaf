"""How many words a document has, also in scripts that put no blanks between words.

Such a script's words are counted by its letters: two ideographs or kana, or four letters of Thai, Lao, Khmer, Burmese
or Tibetan, are a word, about their mean length. A document has the words between blanks, or those of such letters if
they are more.
"""

import numpy as np

_QUARTERS = 4  # of a word, the unit of the weights
# (first and last code point, quarters of a word), in whole blocks of 64 code points: those with one second byte.
_UNSPACED = (
    (0x0E00, 0x0FFF, 1),  # Thai, Lao, Tibetan
    (0x1000, 0x107F, 1),  # Myanmar
    (0x1780, 0x17FF, 1),  # Khmer
    (0x3040, 0x30FF, 2),  # kana
    (0x3400, 0x4DBF, 2),  # ideographs; hexagrams follow
    (0x4E00, 0x9FFF, 2),
    (0x20000, 0x3FFFF, 2),
)


def _weights() -> np.ndarray:
    """uint8 [256, 256]: quarters of a word for a character by its first two bytes in UTF-8."""
    weights = np.zeros((256, 256), np.uint8)
    for first, last, quarters in _UNSPACED:
        for character in range(first, last + 1, 64):
            lead, second = chr(character).encode()[:2]
            weights[lead, second] = quarters
    return weights


_WEIGHTS = _weights()
_LEADS = _WEIGHTS.max(axis=1).tobytes()


def document_words(raw: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64 [D]: the words of each document of `raw`, texts in UTF-8 end to end.

    Args:
        starts: int [W], where words between blanks start, ascending.
        ends: int [D], where documents end, ascending.
    """
    words = np.diff(np.searchsorted(starts, ends), prepend=0)
    if raw.isascii():
        return words
    leads = np.flatnonzero(np.frombuffer(raw.translate(_LEADS), np.uint8))
    if not leads.size:
        return words
    text = np.frombuffer(raw, np.uint8)
    quarters = np.append(0, np.cumsum(_WEIGHTS[text[leads], text[leads + 1]], dtype=np.int64))
    return np.maximum(words, np.diff(quarters[np.searchsorted(leads, ends)], prepend=0) // _QUARTERS)


def count_words(text: str) -> int:
    """The words of a text, as `document_words` counts them."""
    raw = text.encode()
    spaced = np.arange(len(raw.split()))  # only their number counts
    return int(document_words(raw, spaced, np.array([len(raw)]))[0])
