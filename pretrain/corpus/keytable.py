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
        is_equal = self._keys[0][slots] == keys[0]
        return is_equal if self._width == 1 else is_equal & (self._keys[1][slots] == keys[1])

    def find(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return (values, indices of the keys that are not in the table, whose values are arbitrary)."""
        slots = self._hash_slots(keys)
        values = self._values[slots]
        pending = np.flatnonzero(~self._slots_match(slots, keys))
        missing = []
        while pending.size:
            probed = slots[pending]
            is_empty = self._keys[0][probed] == 0
            missing.append(pending[is_empty])
            pending = pending[~is_empty]
            probed = (probed[~is_empty] + 1) & ((1 << self._bits) - 1)
            slots[pending] = probed
            values[pending] = self._values[probed]
            pending = pending[~self._slots_match(probed, [key[pending] for key in keys])]
        return values, np.sort(np.concatenate(missing)) if missing else pending

    def _insert(self, keys: list[np.ndarray], values: np.ndarray) -> None:
        """Insert distinct keys that are not in the table."""
        self._size += len(values)
        if 3 * self._size > 1 << self._bits:  # load factor of a third: 1.25 probes on average
            is_used = self._keys[0] != 0
            old_keys, old_values = [key[is_used] for key in self._keys], self._values[is_used]
            while 3 * self._size > 1 << self._bits:
                self._bits += 1
            self._allocate()
            keys = [np.concatenate(pair) for pair in zip(old_keys, keys, strict=True)]
            values = np.concatenate([old_values, values])
        slots = self._hash_slots(keys)
        pending = np.arange(len(values))
        claimant = np.empty(1 << self._bits, np.int64)  # index of the key that gets each slot
        while pending.size:
            probed = slots[pending]
            is_empty = self._keys[0][probed] == 0
            claimant[probed[is_empty]] = pending[is_empty]  # several keys may claim a slot; the last one written wins
            wins = is_empty & (claimant[probed] == pending)
            for column, key in zip(self._keys, keys, strict=True):
                column[probed[wins]] = key[pending[wins]]
            self._values[probed[wins]] = values[pending[wins]]
            slots[pending[~wins]] = (probed[~wins] + 1) & ((1 << self._bits) - 1)
            pending = pending[~wins]


def distinct(keys: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the distinct keys, ascending, and the index of each key among them (like `np.unique`)."""
    order = np.lexsort(keys[::-1])
    ordered = [key[order] for key in keys]
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in ordered])
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(is_first) - 1
    return [key[is_first] for key in ordered], inverse
