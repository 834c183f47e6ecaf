"""Counter-based random numbers, keyed permutations, and the mixture of sources (invariant 1 in docs/invariants.md).

Everything is stateless: a random number is a hash of a key and a counter, and a permutation is evaluated pointwise. So
sample 150,000,000 is computed as fast as sample 0.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the increment and the
# finalizer of SplitMix64 (variant 13 of David Stafford's mixers).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

_MAX_PERIOD = 1 << 31  # maximum number of samples in a period, so that the product of two counts fits in 64 bits
_ROUNDS = 8  # half-rounds of the Feistel network; with 6, results for adjacent indices in a small range are correlated


def root_key(*parts: str | int) -> np.uint64:
    """Return a 64-bit key that depends on all `parts`."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def draw(key: np.ndarray | np.uint64, counter: np.ndarray | int) -> np.ndarray:
    """Return 64 pseudo-random bits, uint64, for each pair of `key` and `counter` (broadcast)."""
    # The array must have a dimension: for scalars, numpy warns about overflow, which is intended here.
    bits = np.atleast_1d(np.asarray(counter).astype(np.uint64)) + np.uint64(1)
    return _mix_bits(bits * _INCREMENT + key)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Convert 64 random bits to float64 in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    """Convert 64 random bits to uniform int64 in 0 .. size-1; 1 <= size < 2**32, relative bias below size / 2**32."""
    high = bits >> np.uint64(32)
    high *= np.asarray(size).astype(np.uint64)
    high >>= np.uint64(32)
    return high.view(np.int64)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ranges of integers: counts[0] integers from starts[0] on, counts[1] from starts[1] on, ..."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray) -> np.ndarray:
    """Map `index` by a keyed pseudo-random permutation of 0 .. size-1.

    `index` int64 [B], `size` [B] or a scalar, `key` uint64 [B] (one permutation per key and size) -> int64 [B]. A
    Feistel network over the next power of two is applied repeatedly until the result is below `size` (cycle walking).
    """
    result, sizes = index.astype(np.uint64), np.broadcast_to(size, index.shape)
    # With fewer than 8 bits, the halves are too small to hash well.
    bit_widths = np.maximum(8, np.ceil(np.log2(np.maximum(sizes, 2)))).astype(np.int64)
    for bits in np.unique(bit_widths).tolist():
        unfinished = np.flatnonzero(bit_widths == bits)
        while len(unfinished):
            mapped = _feistel(result[unfinished], bits, key[unfinished])
            result[unfinished] = mapped
            unfinished = unfinished[mapped >= sizes[unfinished]]
    return result.view(np.int64)


class Mixture:
    """An infinite sequence of samples of several sources, evenly interleaved (invariant 1).

    A period has `shares[s]` samples of source s. Any range of samples has about the same proportions: the list
    of sources is halved recursively, and each half gets evenly spaced samples. So a sample's index determines its
    source and the number of earlier samples of this source. Sources with a share of 0 have no effect.

    Args:
        shares: number of samples of each source in a period; at least one is positive.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        scale = max(1.0, sum(shares) / _MAX_PERIOD)
        self.shares = tuple(max(1, int(share / scale)) if share else 0 for share in shares)
        self.period = sum(self.shares)
        self._nonzero = np.flatnonzero(self.shares)  # indices of the sources that have a share
        self._nonzero_shares = [share for share in self.shares if share]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each of `samples`, and its index among the samples of this source; int64 [B] each."""
        period, position = np.divmod(samples, self.period)
        source, index_in_source = np.empty_like(samples), np.empty_like(samples)
        self._locate(0, len(self._nonzero_shares), np.arange(len(samples)), position, source, index_in_source)
        return self._nonzero[source], index_in_source + period * np.array(self._nonzero_shares)[source]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        period, position = divmod(samples, self.period)
        counts = np.zeros(len(self.shares), np.int64)
        counts[self._nonzero] = self._counts(0, len(self._nonzero_shares), position)
        return (period * np.array(self.shares) + counts).tolist()

    def _locate(
        self, low: int, high: int, rows: np.ndarray, index: np.ndarray, source: np.ndarray, index_in_source: np.ndarray
    ) -> None:
        """Locate the samples `rows`, given the `index` of each among the samples of the sources low .. high-1."""
        if not len(rows):
            return
        if high - low == 1:
            source[rows], index_in_source[rows] = low, index
            return
        middle = (low + high) // 2
        first_share, total = sum(self._nonzero_shares[low:middle]), sum(self._nonzero_shares[low:high])
        count_in_first = index * first_share // total  # number of earlier samples of the first half's sources
        is_in_first = (index + 1) * first_share // total > count_in_first
        self._locate(low, middle, rows[is_in_first], count_in_first[is_in_first], source, index_in_source)
        self._locate(middle, high, rows[~is_in_first], (index - count_in_first)[~is_in_first], source, index_in_source)

    def _counts(self, low: int, high: int, samples: int) -> list[int]:
        """Return how many of the first `samples` samples of the sources low .. high-1 are from each of them."""
        if high - low == 1:
            return [samples]
        middle = (low + high) // 2
        in_first = samples * sum(self._nonzero_shares[low:middle]) // sum(self._nonzero_shares[low:high])
        return [*self._counts(low, middle, in_first), *self._counts(middle, high, samples - in_first)]


def _mix_bits(bits: np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
    """Mix the bits of uint64 values in place, using `scratch` as temporary memory."""
    shifted = np.right_shift(bits, _SHIFTS[0], out=scratch)
    bits ^= shifted
    bits *= _MULTIPLIER1
    bits ^= np.right_shift(bits, _SHIFTS[1], out=shifted)
    bits *= _MULTIPLIER2
    bits ^= np.right_shift(bits, _SHIFTS[2], out=shifted)
    return bits


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Permute `value` by a Feistel network over `bits` bits: rounds alternately XOR one half with a hash of the other.

    The hash in round n is `draw(key, 2**(bits - bits // 2) * n + other half)`, computed in place.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    key, round_increment = key + _INCREMENT, (high_mask + np.uint64(1)) * np.array([_INCREMENT])
    hashed, scratch = np.empty_like(value), np.empty_like(value)
    for round_index in range(_ROUNDS):
        unchanged, changed, mask = (low, high, high_mask) if round_index % 2 else (high, low, low_mask)
        np.multiply(unchanged, _INCREMENT, out=hashed)
        hashed += key
        changed ^= np.bitwise_and(_mix_bits(hashed, scratch), mask, out=hashed)
        key += round_increment
    return high << low_bits | low
