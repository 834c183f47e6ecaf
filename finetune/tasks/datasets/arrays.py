"""Ragged arrays: rows of unequal length, concatenated."""

from collections.abc import Sequence

import numpy as np


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges of lengths[0] integers from starts[0], of lengths[1] from starts[1], ...; int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return (distinct strings in order of first occurrence, index of each string among them, int64 [N])."""
    numbers: dict[str, int] = {}  # np.unique sorts the strings, which takes ten times as long
    indices = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
    return list(numbers), indices
