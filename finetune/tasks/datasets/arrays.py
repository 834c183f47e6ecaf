"""Rows of unequal length that lie end to end in one array."""

from collections.abc import Sequence

import numpy as np


def ragged(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: begins[0], begins[0] + 1, ... for lengths[0] items, then likewise from begins[1], and so on."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - ends + lengths, lengths)


def distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(the distinct texts in the order of their first coming, int64 [N]: which of them each text is)."""
    numbers: dict[str, int] = {}  # np.unique sorts objects, which takes ten times as long
    which = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
    return list(numbers), which
