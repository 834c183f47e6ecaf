"""Ragged arrays: rows of unequal length, concatenated."""

from collections.abc import Sequence

import numpy as np


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from starts[i] to starts[i] + lengths[i] (exclusive) for all i, int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return (distinct strings in order of first occurrence, index of each string among them, int64 [N])."""
    index: dict[str, int] = {}  # np.unique sorts the strings, which takes ten times as long
    indices = np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int64, len(texts))
    return list(index), indices
