"""Documents as flat arrays of characters and terms, for filters that count: numpy processes all documents together.

A character is a UTF-16 unit of a document's comparable form. Terms, from which n-grams are made, are runs of letters
and digits in lower case. In scripts without blanks between words, each letter with its marks is a term, and only a
fraction of a word. An n-gram is the shortest sequence of terms from a given one on that has n words, so it does not
depend on its position. The hashes of terms do not depend on the process.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.common import scripts
from pretrain.common.scripts import LETTER, MARK, OTHER

WORD = 4  # quarters, the unit of lengths
# Length of a term by its kind; for Tibetan and COMPLEX, of each of its characters.
_QUARTERS = np.array([0, 0, WORD, 1, 3, 2, 1])
_UNITS = 1 << 16
_HIGH, _LOW, _ROW = 0xD800, 0xDC00, 1024  # surrogates; a high one represents a row of characters
_MAX_GAP = 64  # characters between changed ones that are converted together
_CHANGES = 1 << 7  # flag of a kind: the character may differ in the comparable form
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that its powers have inverses modulo 2^64


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values (the finalizer of splitmix64, Steele et al. 2014)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True, eq=False)
class DocumentTerms:
    """D documents with C characters and T terms.

    units uint16 [C], with a NUL after each document; term_starts, term_ends int64 [T]; terms int64 [D+1]: the first
    term of each document; term_sums uint64 [T+1]: running sums from which `grams` makes hashes; quarters int64 [T+1]:
    quarters of words before each term; None if each term is a word.
    """

    units: np.ndarray
    term_starts: np.ndarray
    term_ends: np.ndarray
    terms: np.ndarray
    term_sums: np.ndarray
    quarters: np.ndarray | None

    def sequence_hashes(self, starts: np.ndarray | slice, ends: np.ndarray | slice) -> np.ndarray:
        """uint64: a hash of the terms [starts[i], ends[i]), which does not depend on their position."""
        _, inverses = _powers(len(self.term_sums))
        return mixed((self.term_sums[ends] - self.term_sums[starts]) * inverses[starts])

    def sequence_ends(self, starts: np.ndarray, quarters: np.ndarray | int) -> np.ndarray:
        """int64: one past the last term of the shortest sequences with `quarters` or more; above T if there is none."""
        if self.quarters is None:
            return starts + -(-quarters // WORD)
        return self._until(self.quarters[starts] + quarters)

    @functools.cached_property
    def _terms_of(self) -> np.ndarray:
        """int64: by quarters of words from 0 on, how many terms reach them; above T past the last."""
        assert self.quarters is not None
        counts = np.diff(self.quarters, prepend=-1, append=self.quarters[-1] + 1)
        return np.repeat(np.arange(len(counts)), counts)

    def _until(self, quarters: np.ndarray) -> np.ndarray:
        return self._terms_of[np.clip(quarters, 0, len(self._terms_of) - 1)]

    def grams(self, n: int) -> np.ndarray:
        """uint64 [G]: hashes of n words from each term on, while there are as many, also across documents."""
        if self.quarters is None:
            count = max(0, len(self.term_starts) - n + 1)
            return self.sequence_hashes(slice(count), slice(n, n + count))
        starts = np.arange(int(self._until(self.quarters[-1] - n * WORD + 1)))
        return self.sequence_hashes(starts, self.sequence_ends(starts, n * WORD))

    def gram_documents(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [D] each: first of `grams(n)` of each document, and how many of them lie within it."""
        first, ends = self.terms[:-1], self.terms[1:]
        if self.quarters is None:
            return first, np.maximum(0, ends - first - n + 1)
        return first, np.maximum(0, self._until(self.quarters[ends] - n * WORD + 1) - first)

    def document_quarters(self) -> np.ndarray:
        """int64 [D]: quarters of words of each document."""
        return np.diff(self.terms * WORD if self.quarters is None else self.quarters[self.terms])


def document_terms(texts: Sequence[str]) -> DocumentTerms:
    """Convert one or more documents, which contain no NUL and no lone surrogate."""
    units = np.frombuffer(("\0".join(texts) + "\0").encode("utf-16-le"), np.uint16)
    kinds = _kinds()[units]
    if kinds.max() >= _CHANGES:
        units, kinds = _comparable(units, kinds)
    starts, ends, quarters = _terms(kinds)
    return DocumentTerms(
        units=units,
        term_starts=starts,
        term_ends=ends,
        terms=np.concatenate([[0], np.searchsorted(starts, np.flatnonzero(units == 0))]),
        term_sums=_term_sums(units, starts, ends),
        quarters=quarters,
    )


def _comparable(units: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `units` in comparable form, and their kinds; only changed characters and their neighbors are converted."""
    changed = np.flatnonzero(kinds >= _CHANGES)
    apart = np.diff(changed) > _MAX_GAP
    starts, ends = np.maximum(changed[np.append(True, apart)] - 1, 0), changed[np.append(apart, True)] + 1
    starts -= units[starts] // _ROW == _LOW // _ROW  # do not split surrogate pairs
    ends += units[ends] // _ROW == _LOW // _ROW
    formed, of_kinds, done = [], [], 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        text = scripts.comparable(units[start:end].tobytes().decode("utf-16-le"))
        formed += units[done:start], np.frombuffer(text.encode("utf-16-le"), np.uint16)
        of_kinds += kinds[done:start], _kinds()[formed[-1]] & (_CHANGES - 1)
        done = end
    return np.concatenate([*formed, units[done:]]), np.concatenate([*of_kinds, kinds[done:]])


def _runs(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the runs of true values; the last value is false."""
    changes = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    changes = np.append(0, changes) if inside[0] else changes
    return changes[::2], changes[1::2]


def _terms(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return starts and ends of terms, and the quarters of words before each and after the last. A NUL ends `kinds`."""
    marks = np.flatnonzero(kinds == MARK)
    if marks.size:  # a mark has the kind of its base character
        begins = np.diff(marks, prepend=-2) != 1
        kinds[marks] = kinds[marks[begins][np.cumsum(begins) - 1] - 1]
    inside, single = kinds != OTHER, kinds > LETTER
    if not single.any():
        return *_runs(inside), None
    is_mark = np.zeros(len(kinds), bool)
    is_mark[marks] = True
    begins = inside.copy()
    begins[1:] &= ~inside[:-1] | (single[1:] | single[:-1]) & ~is_mark[1:]
    starts = np.flatnonzero(begins)
    ends = np.flatnonzero(inside[:-1] & (begins[1:] | ~inside[1:])) + 1
    quarters = _QUARTERS[kinds[starts]]
    quarters *= np.where(quarters == 1, ends - starts, 1)
    return starts, ends, np.append(0, np.cumsum(quarters)) if (quarters != WORD).any() else None


def _term_sums(units: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return running sums of the terms' hashes times powers: differences are polynomials (Karp & Rabin 1987)."""
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
    """uint8 [65536]: the kind of each UTF-16 unit, with _CHANGES if its comparable form may differ.

    A high surrogate has the kind of an eighth of its characters: few scripts fill a row. A low one is a mark on it.
    """
    known, changes = scripts.kinds(), scripts.changing() * np.uint8(_CHANGES)
    kinds = known[:_UNITS] | changes[:_UNITS]
    rows = np.where(known == MARK, OTHER, known)[_UNITS:].reshape(-1, _ROW)
    # One of the planes without letters has characters that are dropped.
    kinds[_HIGH : _HIGH + _ROW], kinds[_LOW : _LOW + _ROW] = OTHER | _CHANGES, MARK
    kinds[_HIGH : _HIGH + len(rows)] = np.sort(rows)[:, -_ROW // 8] | changes[_UNITS:].reshape(-1, _ROW).max(axis=1)
    return kinds


@functools.cache
def _letter_hashes() -> np.ndarray:
    """uint64 [65536]: a hash of each unit in lower case."""
    folded = np.arange(_UNITS, dtype=np.uint64)
    for unit in range(_UNITS):
        character = chr(unit)
        if character != (form := character.casefold()):
            folded[unit] = next(ord(x) for x in (form, character.lower(), character) if len(x) == 1)
    return mixed(folded + np.uint64(1))
