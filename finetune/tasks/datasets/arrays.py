"""Index arithmetic for concatenated sequences, and for repeated strings."""

from collections.abc import Sequence

import numpy as np


def concatenate_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the integers from starts[i] to starts[i] + lengths[i] (exclusive), for each i, concatenated, int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def unique_strings(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return (distinct strings in order of first occurrence, index of each string among them, int64 [N])."""
    index_of: dict[str, int] = {}  # np.unique sorts the strings, which takes ten times as long
    indices = np.fromiter((index_of.setdefault(text, len(index_of)) for text in texts), np.int64, len(texts))
    return list(index_of), indices
