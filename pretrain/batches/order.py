"""Counter-based randomness, keyed permutations, and the mixture of sources (invariant 1).

Everything is stateless. Every random number is a hash of a key and a counter, and a permutation is evaluated pointwise,
so sample 150,000,000 costs as much as sample 0.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the increment and the
# finalizer of SplitMix64 (variant 13 of David Stafford's mixers).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

_LONGEST_PERIOD = 1 << 31  # samples: products of two counts fit 64 bits
_ROUNDS = 8  # half-rounds of the permutation; with 6, neighbors in small epochs still show a bias


def root_key(*parts: str | int) -> np.uint64:
    """Return a 64-bit key that depends on all `parts`."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def draw(key: np.ndarray | np.uint64, counter: np.ndarray | int) -> np.ndarray:
    """Return 64 pseudo-random bits, uint64, for each pair of `key` and `counter` (broadcast)."""
    # At least one dimension: numpy warns of the intended wrap-around of scalars.
    bits = np.atleast_1d(np.asarray(counter).astype(np.uint64)) + np.uint64(1)
    return _mix(bits * _INCREMENT + key)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) from 64 random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    """Return int64, uniform on 0 .. size-1 (to size / 2**32), from 64 random bits; 1 <= size < 2**32."""
    high = bits >> np.uint64(32)
    high *= np.asarray(size).astype(np.uint64)
    high >>= np.uint64(32)
    return high.view(np.int64)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges of counts[0] integers from starts[0], of counts[1] from starts[1], ..."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray) -> np.ndarray:
    """Map `index` by a keyed pseudo-random permutation of 0 .. size-1.

    `index` int64 [B], `size` [B] or one for all, `key` uint64 [B] (one permutation per key and size) -> int64
    [B]. A Feistel network over the next power of two, walked along its cycle until it lands inside.
    """
    result, sizes = index.astype(np.uint64), np.broadcast_to(size, index.shape)
    # Below 8 the halves are too small to hash well.
    width = np.maximum(8, np.ceil(np.log2(np.maximum(sizes, 2)))).astype(np.int64)
    for bits in np.unique(width).tolist():
        outside = np.flatnonzero(width == bits)
        while len(outside):
            walked = _feistel(result[outside], bits, key[outside])
            result[outside] = walked
            outside = outside[walked >= sizes[outside]]
    return result.view(np.int64)


class Mixture:
    """The endless sequence of samples of several sources, interleaved evenly (invariant 1).

    `shares[s]` samples of source s go into one period. In any stretch of it, a source has its share of the samples to
    within a few: the sources are halved again and again, and each half gets its samples at even distances. So the
    source of a sample, and how many samples of this source come before it, are known from its number alone. A source
    without a share changes nothing: it may be added to a corpus later.

    Args:
        shares: samples of each source in a period; at least one is above 0.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        scale = max(1.0, sum(shares) / _LONGEST_PERIOD)
        self.shares = tuple(max(1, int(share / scale)) if share else 0 for share in shares)
        self.period = sum(self.shares)
        self._read = np.flatnonzero(self.shares)  # the sources that have a share
        self._parts = [share for share in self.shares if share]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number of earlier samples of this source) of samples counted from 0; int64 [B] each."""
        period, within = np.divmod(samples, self.period)
        source, before = np.empty_like(samples), np.empty_like(samples)
        self._halve(0, len(self._parts), np.arange(len(samples)), within, source, before)
        return self._read[source], before + period * np.array(self._parts)[source]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        period, within = divmod(samples, self.period)
        counts = np.zeros(len(self.shares), np.int64)
        counts[self._read] = self._counts(0, len(self._parts), within)
        return (period * np.array(self.shares) + counts).tolist()

    def _halve(
        self, low: int, high: int, rows: np.ndarray, index: np.ndarray, source: np.ndarray, before: np.ndarray
    ) -> None:
        if not len(rows):
            return
        if high - low == 1:
            source[rows], before[rows] = low, index
            return
        middle = (low + high) // 2
        first, both = sum(self._parts[low:middle]), sum(self._parts[low:high])
        of_first = index * first // both
        is_first = (index + 1) * first // both > of_first
        self._halve(low, middle, rows[is_first], of_first[is_first], source, before)
        self._halve(middle, high, rows[~is_first], (index - of_first)[~is_first], source, before)

    def _counts(self, low: int, high: int, samples: int) -> list[int]:
        if high - low == 1:
            return [samples]
        middle = (low + high) // 2
        first = samples * sum(self._parts[low:middle]) // sum(self._parts[low:high])
        return [*self._counts(low, middle, first), *self._counts(middle, high, samples - first)]


def _mix(bits: np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
    """Scramble uint64 in place; `scratch` is overwritten."""
    shifted = np.right_shift(bits, _SHIFTS[0], out=scratch)
    bits ^= shifted
    bits *= _FIRST
    bits ^= np.right_shift(bits, _SHIFTS[1], out=shifted)
    bits *= _SECOND
    bits ^= np.right_shift(bits, _SHIFTS[2], out=shifted)
    return bits


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Evaluate the network over `bits` bits once: each half is changed by a hash of the other.

    Round n changes a half by `draw(key, 2**(bits - bits // 2) * n + other half)`, computed in place.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    key, round_increment = key + _INCREMENT, (high_mask + np.uint64(1)) * np.array([_INCREMENT])
    drawn, scratch = np.empty_like(value), np.empty_like(value)
    for number in range(_ROUNDS):
        source, changed, mask = (low, high, high_mask) if number % 2 else (high, low, low_mask)
        np.multiply(source, _INCREMENT, out=drawn)
        drawn += key
        changed ^= np.bitwise_and(_mix(drawn, scratch), mask, out=drawn)
        key += round_increment
    return high << low_bits | low
