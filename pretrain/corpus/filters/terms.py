"""Documents as flat arrays of characters and terms, so that numpy can process n-grams of many documents together.

A character is a UTF-16 unit of a document's normalized text (`scripts.normalize`). Terms, the units of n-grams, are
lowercased runs of letters and digits. In scripts without spaces between words, each letter with its marks is a term,
which counts as a fraction of a word. An n-gram is the shortest sequence of terms, from a given one on, that has at
least n words. The hashes of terms are the same in all processes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.common import scripts
from pretrain.common.scripts import LETTER, MARK, OTHER

QUARTERS_PER_WORD = 4  # terms are measured in quarters of a word
# Length of a term, in quarters, by its kind in `scripts`; for TIBETAN and COMPLEX, the length of each character.
_QUARTERS_BY_KIND = np.array([0, 0, QUARTERS_PER_WORD, 1, 3, 2, 1])
_UNITS = 1 << 16  # number of UTF-16 units
_HIGH, _LOW = 0xD800, 0xDC00  # the first high and the first low surrogate
_SURROGATES = 1024  # number of high surrogates, of low surrogates, and of characters with the same high surrogate
_MAX_GAP = 64  # maximum distance between two changing characters that are normalized together
_CHANGES = 1 << 7  # flag that is added to the kind of a character that normalization may change
_FACTOR = 0x9E3779B97F4A7C15  # base of the rolling hash; odd, so that its powers have inverses modulo 2^64


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values (the finalizer of splitmix64, Steele et al. 2014)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True, eq=False)
class DocumentTerms:
    """D documents with C characters and T terms."""

    units: np.ndarray  # uint16 [C], the characters, with a NUL after each document
    term_starts: np.ndarray  # int64 [T], index in `units` of each term's start
    term_ends: np.ndarray  # int64 [T], index in `units` of each term's end
    document_starts: np.ndarray  # int64 [D+1], index of each document's first term
    term_sums: np.ndarray  # uint64 [T+1], running sums from which `sequence_hashes` computes hashes
    quarters: np.ndarray | None  # int64 [T+1], quarters of words before each term; None if every term is a word

    def sequence_hashes(self, starts: np.ndarray | slice, ends: np.ndarray | slice) -> np.ndarray:
        """Return a hash of each sequence of terms [starts[i], ends[i]), uint64, independent of its position."""
        _, inverses = _powers(len(self.term_sums))
        return mix_bits((self.term_sums[ends] - self.term_sums[starts]) * inverses[starts])

    def sequence_ends(self, starts: np.ndarray, quarters: np.ndarray | int) -> np.ndarray:
        """Return the end of the shortest sequence with at least `quarters` from each start, int64; > T if none has."""
        if self.quarters is None:
            return starts + -(-quarters // QUARTERS_PER_WORD)
        return self._term_index(self.quarters[starts] + quarters)

    @functools.cached_property
    def _terms_by_quarters(self) -> np.ndarray:
        """The number of terms that together have at least 0, 1, ... quarters, int64; more than T if all have fewer."""
        assert self.quarters is not None
        counts = np.diff(self.quarters, prepend=-1, append=self.quarters[-1] + 1)
        return np.repeat(np.arange(len(counts)), counts)

    def _term_index(self, quarters: np.ndarray) -> np.ndarray:
        return self._terms_by_quarters[np.clip(quarters, 0, len(self._terms_by_quarters) - 1)]

    def grams(self, n: int) -> np.ndarray:
        """Return the hash of the n-gram that starts at each term, uint64 [G]; n-grams may cross documents."""
        if self.quarters is None:
            count = max(0, len(self.term_starts) - n + 1)
            return self.sequence_hashes(slice(count), slice(n, n + count))
        starts = np.arange(int(self._term_index(self.quarters[-1] - n * QUARTERS_PER_WORD + 1)))
        return self.sequence_hashes(starts, self.sequence_ends(starts, n * QUARTERS_PER_WORD))

    def document_grams(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the index in `grams(n)` of each document's first n-gram, and its number of n-grams; int64 [D]."""
        first, ends = self.document_starts[:-1], self.document_starts[1:]
        if self.quarters is None:
            return first, np.maximum(0, ends - first - n + 1)
        return first, np.maximum(0, self._term_index(self.quarters[ends] - n * QUARTERS_PER_WORD + 1) - first)

    def document_quarters(self) -> np.ndarray:
        """Return the length of each document in quarters of words, int64 [D]."""
        starts = self.document_starts
        return np.diff(starts * QUARTERS_PER_WORD if self.quarters is None else self.quarters[starts])


def document_terms(texts: Sequence[str]) -> DocumentTerms:
    """Return the terms of one or more documents, which contain neither NUL nor lone surrogates."""
    units = np.frombuffer(("\0".join(texts) + "\0").encode("utf-16-le"), np.uint16)
    kinds = _kinds()[units]
    if kinds.max() >= _CHANGES:
        units, kinds = _normalize(units, kinds)
    starts, ends, quarters = _terms(kinds)
    return DocumentTerms(
        units=units,
        term_starts=starts,
        term_ends=ends,
        document_starts=np.concatenate([[0], np.searchsorted(starts, np.flatnonzero(units == 0))]),
        term_sums=_term_sums(units, starts, ends),
        quarters=quarters,
    )


def _normalize(units: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the normalized units and their kinds; only text around characters that may change is processed."""
    changing = np.flatnonzero(kinds >= _CHANGES)
    is_distant = np.diff(changing) > _MAX_GAP
    starts, ends = np.maximum(changing[np.append(True, is_distant)] - 1, 0), changing[np.append(is_distant, True)] + 1
    starts -= units[starts] // _SURROGATES == _LOW // _SURROGATES  # do not split surrogate pairs
    ends += units[ends] // _SURROGATES == _LOW // _SURROGATES
    converted, converted_kinds, copied = [], [], 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        text = scripts.normalize(units[start:end].tobytes().decode("utf-16-le"))
        converted += units[copied:start], np.frombuffer(text.encode("utf-16-le"), np.uint16)
        converted_kinds += kinds[copied:start], _kinds()[converted[-1]] & (_CHANGES - 1)
        copied = end
    return np.concatenate([*converted, units[copied:]]), np.concatenate([*converted_kinds, kinds[copied:]])


def _runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of runs of true values in `mask`; the last value must be false."""
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    changes = np.append(0, changes) if mask[0] else changes
    return changes[::2], changes[1::2]


def _terms(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return `term_starts`, `term_ends` and `quarters` of `DocumentTerms`; the last kind must be OTHER."""
    marks = np.flatnonzero(kinds == MARK)
    if marks.size:  # a mark has the kind of its base character
        is_start = np.diff(marks, prepend=-2) != 1
        kinds[marks] = kinds[marks[is_start][np.cumsum(is_start) - 1] - 1]
    in_term, is_single = kinds != OTHER, kinds > LETTER  # a single letter is a term
    if not is_single.any():
        return *_runs(in_term), None
    is_mark = np.zeros(len(kinds), bool)
    is_mark[marks] = True
    is_start = in_term.copy()
    is_start[1:] &= ~in_term[:-1] | (is_single[1:] | is_single[:-1]) & ~is_mark[1:]
    starts = np.flatnonzero(is_start)
    ends = np.flatnonzero(in_term[:-1] & (is_start[1:] | ~in_term[1:])) + 1
    quarters = _QUARTERS_BY_KIND[kinds[starts]]
    quarters *= np.where(quarters == 1, ends - starts, 1)
    return starts, ends, np.append(0, np.cumsum(quarters)) if (quarters != QUARTERS_PER_WORD).any() else None


def _term_sums(units: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return running sums of hash times power of `_FACTOR`, for rolling hashes (Karp & Rabin 1987) of sequences."""
    powers, inverses = _powers(len(units) + 1)
    unit_sums = np.zeros(len(units) + 1, np.uint64)
    np.cumsum(_unit_hashes()[units] * powers[: len(units)], out=unit_sums[1:])
    term_hashes = mix_bits((unit_sums[ends] - unit_sums[starts]) * inverses[starts])
    term_sums = np.zeros(len(starts) + 1, np.uint64)
    np.cumsum(term_hashes * powers[: len(starts)], out=term_sums[1:])
    return term_sums


_known_powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return powers of _FACTOR modulo 2^64, and their inverses, uint64 [count or more]."""
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
    """Return the kind of each UTF-16 unit, with the flag _CHANGES if normalization may change it, uint8 [65536].

    The kind of a high surrogate is the highest kind that an eighth of its characters have or exceed. A low surrogate is
    a MARK, so that it belongs to the high surrogate before it.
    """
    known, changes = scripts.kinds(), scripts.changeable_mask() * np.uint8(_CHANGES)
    kinds = known[:_UNITS] | changes[:_UNITS]
    by_high = np.where(known == MARK, OTHER, known)[_UNITS:].reshape(-1, _SURROGATES)
    may_change = changes[_UNITS:].reshape(-1, _SURROGATES).max(axis=1)
    # Planes without letters are OTHER; one of them has characters that normalization drops.
    kinds[_HIGH : _HIGH + _SURROGATES], kinds[_LOW : _LOW + _SURROGATES] = OTHER | _CHANGES, MARK
    kinds[_HIGH : _HIGH + len(by_high)] = np.sort(by_high)[:, -_SURROGATES // 8] | may_change
    return kinds


@functools.cache
def _unit_hashes() -> np.ndarray:
    """Return a hash of each UTF-16 unit that ignores case, uint64 [65536]."""
    folded = np.arange(_UNITS, dtype=np.uint64)
    for unit in range(_UNITS):
        character = chr(unit)
        if character != (form := character.casefold()):
            folded[unit] = next(ord(variant) for variant in (form, character.lower(), character) if len(variant) == 1)
    return mix_bits(folded + np.uint64(1))
