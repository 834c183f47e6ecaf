"""The order of samples: counter-based randomness and the order of an epoch (invariant 1).

Nothing here has state. Every random number is a hash of a key and a counter, and an epoch's order is a keyed
permutation evaluated point by point, so sample 150,000,000 costs as much as sample 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the increment and the
# finaliser of SplitMix64 (variant 13 of David Stafford's mixers).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

_ROUNDS = 8  # half-rounds of the permutation; with 6, neighbours in small epochs still show a bias


def root_key(*parts: str | int) -> np.uint64:
    """A 64-bit key that depends on every one of `parts`."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def draw(key: np.ndarray | np.uint64, counter: np.ndarray | int) -> np.ndarray:
    """64 pseudo-random bits, uint64, for each pair of `key` and `counter` (broadcast)."""
    # An array even of one counter: numpy warns of the intended wrap-around in scalars.
    bits = np.atleast_1d(np.asarray(counter).astype(np.uint64)) + np.uint64(1)
    return _mix(bits * _INCREMENT + key)


def uniform(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from 64 random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bits: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    """int64, uniform on 0 .. size-1 (to size / 2**32), from 64 random bits; 1 <= size < 2**32."""
    high = bits >> np.uint64(32)
    high *= np.asarray(size).astype(np.uint64)
    high >>= np.uint64(32)
    return high.view(np.int64)


def binomial(count: np.ndarray, key: np.ndarray, counter: int) -> np.ndarray:
    """int64: how many of `count` fair coins show heads, exactly; uses counters from `counter` on."""
    heads = np.zeros(len(count), np.int64)
    tossed = 0
    while len(rows := np.flatnonzero(count > tossed)):
        coins = np.minimum(count[rows] - tossed, 64)
        bits = draw(key[rows], counter + tossed // 64) >> (64 - coins).astype(np.uint64)
        heads[rows] += np.bitwise_count(bits)
        tossed += 64
    return heads


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a keyed pseudo-random permutation of 0 .. size-1 maps `index`.

    `index` int64 [B], `key` uint64 [B] (one permutation per key) -> int64 [B]. A Feistel network over the
    next power of two, walked along its cycle until it lands inside.
    """
    result = index.astype(np.uint64)
    bits = max(8, (size - 1).bit_length())  # below that the halves are too small to hash well
    outside = np.arange(len(result))
    while len(outside):
        walked = _feistel(result[outside], bits, key[outside])
        result[outside] = walked
        outside = outside[walked >= size]
    return result.view(np.int64)


@dataclass(frozen=True)
class EpochPosition:
    """The sources of samples; int64 [B] each."""

    source: np.ndarray
    epoch: np.ndarray  # of the source: how often it was read before
    slot: np.ndarray  # 0 .. samples of the source - 1


class Order:
    """The endless sequence of samples: epoch after epoch, each a new mixture of all sources.

    `sizes[s]` samples make one epoch of source s, and `weights[s]` epochs of it go into one epoch of the mixture. A
    source continues where the last epoch stopped, so with weight 0.5 two epochs read it once. Weight 0 leaves it out.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], key: np.uint64) -> None:
        self.sizes = tuple(sizes)
        self.shares = tuple(max(1, round(w * n)) if n and w else 0 for n, w in zip(sizes, weights, strict=True))
        self.samples_per_epoch = sum(self.shares)
        self._bounds = np.cumsum((0, *self.shares))
        self._epoch_key, self._source_key = draw(key, np.arange(2))

    def locate(self, samples: np.ndarray) -> EpochPosition:
        """The position of each sample; `samples` int64 [B] counts from 0, across epochs."""
        epoch, index = np.divmod(samples, self.samples_per_epoch)
        index = permute(index, self.samples_per_epoch, draw(self._epoch_key, epoch))
        source = np.searchsorted(self._bounds, index, side="right") - 1
        source_epoch, slot = np.empty_like(index), np.empty_like(index)
        for number, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            rows = np.flatnonzero(source == number)
            if not len(rows):
                continue
            taken = epoch[rows] * share + index[rows] - self._bounds[number]
            source_epoch[rows], unshuffled = np.divmod(taken, size)
            key = draw(draw(self._source_key, number), source_epoch[rows])
            slot[rows] = permute(unshuffled, size, key)
        return EpochPosition(source, source_epoch, slot)


def _mix(bits: np.ndarray, spare: np.ndarray | None = None) -> np.ndarray:
    """Scramble uint64 in place; `spare` is overwritten."""
    shifted = np.right_shift(bits, _SHIFTS[0], out=spare)
    bits ^= shifted
    bits *= _FIRST
    bits ^= np.right_shift(bits, _SHIFTS[1], out=shifted)
    bits *= _SECOND
    bits ^= np.right_shift(bits, _SHIFTS[2], out=shifted)
    return bits


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """One evaluation of the network over `bits` bits: each half is changed by a hash of the other.

    Round n changes a half by `draw(key, 2**(bits - bits // 2) * n + other half)`, computed in place.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    key, round_increment = key + _INCREMENT, (high_mask + np.uint64(1)) * np.array([_INCREMENT])
    drawn, spare = np.empty_like(value), np.empty_like(value)
    for number in range(_ROUNDS):
        source, changed, mask = (low, high, high_mask) if number % 2 else (high, low, low_mask)
        np.multiply(source, _INCREMENT, out=drawn)
        drawn += key
        changed ^= np.bitwise_and(_mix(drawn, spare), mask, out=drawn)
        key += round_increment
    return high << low_bits | low
