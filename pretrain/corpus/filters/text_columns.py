"""Documents as columns of characters and terms, for filters that count: numpy passes over all texts at once.

A character is a unit of UTF-16. Terms, of which n-grams are made, are runs of letters and digits in lower case, or one
ideograph or kana each; their hashes do not depend on the process.
"""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_OTHER, _LETTER, _IDEOGRAPH = range(3)  # kinds of characters; digits count as letters

_UNITS = 1 << 16
_IDEOGRAPHS = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF))  # CJK and kana
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that its powers have inverses modulo 2^64


def mixed(values: np.ndarray) -> np.ndarray:
    """uint64 values with their bits spread over all 64 (the finalizer of splitmix64, Steele et al. 2014)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True, eq=False)
class TextColumns:
    """D documents with C characters and T terms.

    units uint16 [C], with a NUL after each document; term_starts, term_ends int64 [T]; terms int64 [D+1]: the first
    term of each document; term_sums uint64 [T+1]: running sums from which `grams` makes hashes.
    """

    units: np.ndarray
    term_starts: np.ndarray
    term_ends: np.ndarray
    terms: np.ndarray
    term_sums: np.ndarray

    def sequence_hashes(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """uint64: a hash of the terms `starts[i]` to before `ends[i]`, the same wherever they stand."""
        _, inverses = _powers(len(self.term_sums))
        return mixed((self.term_sums[ends] - self.term_sums[starts]) * inverses[starts])

    def grams(self, n: int) -> np.ndarray:
        """uint64 [T-n+1]: hashes of n neighboring terms each, those that cross a document's end included."""
        count = max(0, len(self.term_starts) - n + 1)
        _, inverses = _powers(len(self.term_sums))
        return mixed((self.term_sums[n : n + count] - self.term_sums[:count]) * inverses[:count])

    def gram_documents(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [D]: first gram of each document among `grams(n)`, and how many of them lie within it."""
        counts = np.maximum(0, np.diff(self.terms) - n + 1)
        return np.minimum(self.terms[:-1], max(0, len(self.term_starts) - n + 1)), counts


def text_columns(texts: Sequence[str]) -> TextColumns:
    """The columns of `texts`, at least one; a text has no NUL and no lone surrogate."""
    units = np.frombuffer(("\0".join(texts) + "\0").encode("utf-16-le"), np.uint16)
    starts, ends = _term_bounds(_kinds()[units])
    return TextColumns(
        units=units,
        term_starts=starts,
        term_ends=ends,
        terms=np.concatenate([[0], np.searchsorted(starts, np.flatnonzero(units == 0))]),
        term_sums=_term_sums(units, starts, ends),
    )


def _runs(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the runs of true values; the last value is false."""
    changes = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    changes = np.append(0, changes) if inside[0] else changes
    return changes[::2], changes[1::2]


def _term_bounds(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inside = kinds >= _LETTER
    starts, ends = _runs(inside)
    single = np.flatnonzero(kinds == _IDEOGRAPH)
    if not single.size:
        return starts, ends
    begins, stops = np.zeros(len(kinds), bool), np.zeros(len(kinds) + 1, bool)
    begins[starts] = stops[ends] = begins[single] = stops[single + 1] = True
    begins[single + 1] |= inside[single + 1]
    stops[single] |= inside[np.maximum(single - 1, 0)] & (single > 0)
    return np.flatnonzero(begins), np.flatnonzero(stops)


def _term_sums(units: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Running sums of the terms' hashes times powers: differences are polynomials (Karp & Rabin 1987)."""
    powers, inverses = _powers(len(units) + 1)
    sums = np.zeros(len(units) + 1, np.uint64)
    np.cumsum(_letter_hashes()[units] * powers[: len(units)], out=sums[1:])
    hashes = mixed((sums[ends] - sums[starts]) * inverses[starts])
    total = np.zeros(len(starts) + 1, np.uint64)
    np.cumsum(hashes * powers[: len(starts)], out=total[1:])
    return total


_known_powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [count or more]: powers of _FACTOR modulo 2^64, and their inverses."""
    global _known_powers
    if len(_known_powers[0]) < count:
        size = max(1 << 16, 1 << (count - 1).bit_length())
        inverse = pow(_FACTOR, -1, 1 << 64)
        _known_powers = _geometric(_FACTOR, size), _geometric(inverse, size)
    return _known_powers


def _geometric(factor: int, count: int) -> np.ndarray:
    values = np.full(count, factor, np.uint64)
    values[0] = 1
    return np.multiply.accumulate(values)


@functools.cache
def _kinds() -> np.ndarray:
    """uint8 [65536]: the kind of each unit of UTF-16."""
    letters = (_LETTER if unicodedata.category(chr(unit))[0] in "LMN" else _OTHER for unit in range(_UNITS))
    kinds = np.fromiter(letters, np.uint8, _UNITS)
    for first, last in _IDEOGRAPHS:
        span = kinds[first : last + 1]
        span[span == _LETTER] = _IDEOGRAPH
    return kinds


@functools.cache
def _letter_hashes() -> np.ndarray:
    """uint64 [65536]: a hash of each unit in lower case."""
    folded = np.arange(_UNITS, dtype=np.uint64)
    for unit in range(_UNITS):
        lower = chr(unit).lower() if not 0xD800 <= unit < 0xE000 else ""
        if len(lower) == 1:
            folded[unit] = ord(lower)
    return mixed(folded + np.uint64(1))
