"""Cut documents, and pairs of documents, into overlapping windows that cover every token."""

import numpy as np


def slide(lengths: np.ndarray, capacity: np.ndarray | int, overlap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents of `lengths` tokens into windows; return (index of document, start, length), int64 [F] each.

    A document of at most `capacity` tokens, or an empty one, is one window. In a longer one, each window starts
    `capacity - overlap` tokens after the previous one; the last stops at the document's end (google-research/bert
    run_squad.py, convert_examples_to_features).
    """
    capacity = np.broadcast_to(np.asarray(capacity, np.int64), lengths.shape)
    stride = np.maximum(capacity - overlap, 1)
    counts = 1 + np.maximum(0, -(-(lengths - capacity) // stride))
    document_F = np.repeat(np.arange(len(lengths)), counts)
    index_F = np.arange(len(document_F)) - np.repeat(np.cumsum(counts) - counts, counts)
    start_F = index_F * stride[document_F]
    return document_F, start_F, np.minimum(capacity[document_F], lengths[document_F] - start_F)


def cut_pairs(
    first_lengths: np.ndarray, second_lengths: np.ndarray, capacity: int, overlap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut pairs of documents, given their numbers of tokens, int64 [N] each, into windows.

    If the shorter document fits in half of the window, every window contains it, and the longer one slides through the
    rest. If both are longer than half a window, each slides through one half, with half the overlap. Windows at the
    same relative position are paired, so the longer document determines their number.

    Returns:
        (index of pair, start in the first document, length, start in the second, length), int64 [F], in order of pairs.
    """
    shorter, longer = np.minimum(first_lengths, second_lengths), np.maximum(first_lengths, second_lengths)
    # Rows: index of pair; start and length in the shorter document; start and length in the longer one.
    windows = np.concatenate(
        [
            _slide_one(shorter, longer, np.flatnonzero(shorter <= capacity // 2), capacity, overlap),
            _slide_both(shorter, longer, np.flatnonzero(shorter > capacity // 2), capacity, overlap),
        ],
        axis=1,
    )
    pair, *ranges = windows[:, np.argsort(windows[0], kind="stable")]
    is_first_longer = (first_lengths > second_lengths)[pair]
    return (
        pair,
        np.where(is_first_longer, ranges[2], ranges[0]),
        np.where(is_first_longer, ranges[3], ranges[1]),
        np.where(is_first_longer, ranges[0], ranges[2]),
        np.where(is_first_longer, ranges[1], ranges[3]),
    )


def select_evenly(examples: np.ndarray, num_examples: int, limit: int) -> np.ndarray:
    """Return the indices of at most `limit` windows of each of N examples, evenly spaced from the first to the last.

    `examples`, int64 [F] and ascending, has the index of each window's example; each example has at least one window.
    """
    counts = np.bincount(examples, minlength=num_examples)
    num_kept = np.minimum(counts, limit)
    example, index = _index_in_groups(num_kept)
    steps = np.maximum(num_kept - 1, 1)[example]
    index = (2 * index * (counts[example] - 1) + steps) // (2 * steps)  # rounded, not truncated
    return (np.cumsum(counts) - counts)[example] + index


def _slide_one(shorter: np.ndarray, longer: np.ndarray, pairs: np.ndarray, capacity: int, overlap: int) -> np.ndarray:
    """Return rows as in `cut_pairs`, int64 [5, F]: each window contains the whole shorter document."""
    pair, start, length = slide(longer[pairs], capacity - shorter[pairs], overlap)
    return np.stack([pairs[pair], np.zeros_like(start), shorter[pairs][pair], start, length])


def _slide_both(shorter: np.ndarray, longer: np.ndarray, pairs: np.ndarray, capacity: int, overlap: int) -> np.ndarray:
    """Return rows as in `cut_pairs`, int64 [5, F]: each document slides through one half of the window."""
    half = capacity // 2
    short, long = slide(shorter[pairs], half, overlap // 2), slide(longer[pairs], capacity - half, overlap // 2)
    short_counts, long_counts = (np.bincount(document, minlength=len(pairs)) for document in (short[0], long[0]))
    counts = np.maximum(short_counts, long_counts)
    pair, index = _index_in_groups(counts)
    short_index = (np.cumsum(short_counts) - short_counts)[pair] + index * short_counts[pair] // counts[pair]
    long_index = (np.cumsum(long_counts) - long_counts)[pair] + index * long_counts[pair] // counts[pair]
    return np.stack(
        [pairs[pair], short[1][short_index], short[2][short_index], long[1][long_index], long[2][long_index]]
    )


def _index_in_groups(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (group, index within the group), int64 [sum of counts] each, for groups of `counts` items."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
