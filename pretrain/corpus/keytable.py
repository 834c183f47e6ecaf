"""A hash table whose operations take arrays of keys, so that each needs only a few calls of numpy."""

import numpy as np


class KeyTable:
    """Open-addressing hash table from keys, each of `width` uint64, to int32 values. Keys are passed column by column.

    The first uint64 of a key must not be 0, which marks an empty slot; for words, it never is, as they contain no NUL.
    """

    _HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplicative hash
    _MIX = np.uint64(0xC2B2AE3D27D4EB4F)  # xxHash64's second prime

    def __init__(self, width: int, capacity: int) -> None:
        """Reserve space for `capacity` keys; the table grows if it gets more."""
        self._width = width
        self._bits = (3 * capacity).bit_length()
        self._size = 0
        self._allocate()

    def find_or_insert(self, keys: list[np.ndarray], next_value: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the value of each key, and the new keys, which are inserted with next_value, next_value + 1, ..."""
        values, missing = self.find(keys)
        if not missing.size:
            return values, [key[:0] for key in keys]
        new, inverse = distinct([key[missing] for key in keys])
        values[missing] = next_value + inverse
        self._insert(new, np.arange(next_value, next_value + len(new[0]), dtype=np.int32))
        return values, new

    def _allocate(self) -> None:
        self._keys = [np.zeros(1 << self._bits, np.uint64) for _ in range(self._width)]
        self._values = np.zeros(1 << self._bits, np.int32)

    def _hash_slots(self, keys: list[np.ndarray]) -> np.ndarray:
        mixed = keys[0] if self._width == 1 else keys[0] ^ (keys[1] * self._MIX)
        return ((mixed * self._HASH) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _slots_match(self, slots: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        same = self._keys[0][slots] == keys[0]
        return same if self._width == 1 else same & (self._keys[1][slots] == keys[1])

    def find(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return (values, indices of the keys that are not in the table, whose values are arbitrary)."""
        slots = self._hash_slots(keys)
        values = self._values[slots]
        pending = np.flatnonzero(~self._slots_match(slots, keys))
        missing = []
        while pending.size:
            probed = slots[pending]
            empty = self._keys[0][probed] == 0
            missing.append(pending[empty])
            pending = pending[~empty]
            probed = (probed[~empty] + 1) & ((1 << self._bits) - 1)
            slots[pending] = probed
            values[pending] = self._values[probed]
            pending = pending[~self._slots_match(probed, [key[pending] for key in keys])]
        return values, np.sort(np.concatenate(missing)) if missing else pending

    def _insert(self, keys: list[np.ndarray], values: np.ndarray) -> None:
        """Insert distinct keys that are not in the table."""
        self._size += len(values)
        if 3 * self._size > 1 << self._bits:  # load factor of a third: 1.25 probes on average
            is_used = self._keys[0] != 0
            old, old_values = [key[is_used] for key in self._keys], self._values[is_used]
            while 3 * self._size > 1 << self._bits:
                self._bits += 1
            self._allocate()
            keys = [np.concatenate(pair) for pair in zip(old, keys, strict=True)]
            values = np.concatenate([old_values, values])
        slots = self._hash_slots(keys)
        pending = np.arange(len(values))
        claim = np.empty(1 << self._bits, np.int64)
        while pending.size:
            probed = slots[pending]
            free = self._keys[0][probed] == 0
            claim[probed[free]] = pending[free]  # several keys may claim a slot; the last one written wins
            won = free & (claim[probed] == pending)
            for stored, key in zip(self._keys, keys, strict=True):
                stored[probed[won]] = key[pending[won]]
            self._values[probed[won]] = values[pending[won]]
            slots[pending[~won]] = (probed[~won] + 1) & ((1 << self._bits) - 1)
            pending = pending[~won]


def distinct(keys: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the distinct keys, ascending, and the index of each key among them (like `np.unique`)."""
    order = np.lexsort(keys[::-1])
    ordered = [key[order] for key in keys]
    first = np.ones(len(order), bool)
    first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in ordered])
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(first) - 1
    return [key[first] for key in ordered], inverse
