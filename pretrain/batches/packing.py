"""Sequences across documents: RoBERTa's FULL-SENTENCES input (Liu et al. 2019, section 4.2).

A sequence consists of consecutive sentences. If a document ends before the sequence is full, a separator and the next
document of the shard follow. Everything is vectorized over samples.
"""

import numpy as np

from pretrain.batches.text import ShardText


def document_starts(
    text: ShardText,
    shard: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    document: np.ndarray,
    separators: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each document in spans of tokens; the first document of a span starts at the span's start.

    Args:
        text: the shards.
        shard: shard of each span; int64 [B], like the others.
        start: token offset of each span within its shard.
        length: tokens of each span.
        document: document of each span's first token.
        separators: number of each span's documents, minus one.

    Returns:
        (span of each document, ascending; its token offset within the shard), int64 [D] each.
    """
    rows, starts = [np.arange(len(start))], [start]
    unfinished = np.flatnonzero(separators)
    document = document[unfinished]
    while len(unfinished):
        document = document + 1
        boundary = text.document_start(shard[unfinished], document)
        inside = boundary < start[unfinished] + length[unfinished]
        unfinished, document, boundary = unfinished[inside], document[inside], boundary[inside]
        rows.append(unfinished)
        starts.append(boundary)
    row, offset = np.concatenate(rows), np.concatenate(starts)
    order = np.lexsort((offset, row))
    row, offset = row[order], offset[order]
    new = np.append(True, (np.diff(row) > 0) | (np.diff(offset) > 0))  # empty documents are dropped
    return row[new], offset[new]
