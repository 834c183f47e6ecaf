"""Long texts, and pairs of them, as overlapping windows that show every token."""

import numpy as np


def slide(lengths: np.ndarray, capacity: np.ndarray | int, overlap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut texts into overlapping windows: (text number, begin, length), int64 [F] each.

    A text of at most `capacity` tokens is one window (also an empty one); of a longer one, each window begins
    `capacity - overlap` tokens after the one before, and the last ends where the text ends (google-research/bert
    run_squad.py, convert_examples_to_features).
    """
    capacity = np.broadcast_to(np.asarray(capacity, np.int64), lengths.shape)
    stride = np.maximum(capacity - overlap, 1)
    counts = 1 + np.maximum(0, -(-(lengths - capacity) // stride))
    text = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * stride[text]
    return text, begin, np.minimum(capacity[text], lengths[text] - begin)


def cut_pairs(
    first: np.ndarray, second: np.ndarray, capacity: int, overlap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Windows over pairs of texts of `first` and `second` tokens, int64 [N] each.

    If the shorter text fits in half of the window, every window has all of it, and the longer text slides through the
    rest. If both are longer than half a window, each slides through one half, with half the overlap. A window of one
    is paired with the window of the other at the same relative position, so the longer text determines their number.

    Returns:
        (pair, begin in first, length, begin in second, length), int64 [F] each, in order of the pairs.
    """
    shorter, longer = np.minimum(first, second), np.maximum(first, second)
    # Columns of F: pair, begin and length in the shorter, begin and length in the longer.
    windows = np.concatenate(
        [
            _with_whole(shorter, longer, np.flatnonzero(shorter <= capacity // 2), capacity, overlap),
            _side_by_side(shorter, longer, np.flatnonzero(shorter > capacity // 2), capacity, overlap),
        ],
        axis=1,
    )
    pair, *sides = windows[:, np.argsort(windows[0], kind="stable")]
    swapped = (first > second)[pair]
    return (
        pair,
        np.where(swapped, sides[2], sides[0]),
        np.where(swapped, sides[3], sides[1]),
        np.where(swapped, sides[0], sides[2]),
        np.where(swapped, sides[1], sides[3]),
    )


def spread(examples: np.ndarray, count: int, most: int) -> np.ndarray:
    """Rows of at most `most` windows of each of `count` examples, evenly from its first to its last.

    `examples`, int64 [F] and ascending, is the example of each window; an example has one at least.
    """
    counts = np.bincount(examples, minlength=count)
    kept = np.minimum(counts, most)
    example, number = _numbered(kept)
    steps = np.maximum(kept - 1, 1)[example]
    number = (2 * number * (counts[example] - 1) + steps) // (2 * steps)  # rounded
    return (np.cumsum(counts) - counts)[example] + number


def _with_whole(shorter: np.ndarray, longer: np.ndarray, pairs: np.ndarray, capacity: int, overlap: int) -> np.ndarray:
    """int64 [5, F]: the shorter whole in each window."""
    pair, begin, length = slide(longer[pairs], capacity - shorter[pairs], overlap)
    return np.stack([pairs[pair], np.zeros_like(begin), shorter[pairs][pair], begin, length])


def _side_by_side(
    shorter: np.ndarray, longer: np.ndarray, pairs: np.ndarray, capacity: int, overlap: int
) -> np.ndarray:
    """int64 [5, F]: both in windows of half the capacity."""
    half = capacity // 2
    short, long = slide(shorter[pairs], half, overlap // 2), slide(longer[pairs], capacity - half, overlap // 2)
    shorts, longs = (np.bincount(side[0], minlength=len(pairs)) for side in (short, long))
    counts = np.maximum(shorts, longs)
    pair, number = _numbered(counts)
    at_short = (np.cumsum(shorts) - shorts)[pair] + number * shorts[pair] // counts[pair]
    at_long = (np.cumsum(longs) - longs)[pair] + number * longs[pair] // counts[pair]
    return np.stack([pairs[pair], short[1][at_short], short[2][at_short], long[1][at_long], long[2][at_long]])


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which, number within it from 0 on), int64 [sum of counts] each, for `counts` items of each."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
