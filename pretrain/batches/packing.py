"""Sequences across documents: RoBERTa's FULL-SENTENCES input (Liu et al. 2019, section 4.2).

A sequence consists of consecutive sentences. If a document is over before the sequence is full, a separator and the
next document of the shard follow. Everything is vectorized over samples.
"""

import numpy as np

from pretrain.batches.text import ShardText


def document_starts(
    text: ShardText,
    shard: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
    document: np.ndarray,
    separators: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each document in spans of tokens; for the first one of a span, the start of the span.

    Args:
        text: the text.
        shard: shard of each span; int64 [B], like the others.
        begin: token offset of each span within its shard.
        length: tokens of each span.
        document: the document of its first token.
        separators: number of its documents, minus one.

    Returns:
        (the span of each document, ascending; its token offset within the shard), int64 [D] each.
    """
    rows, begins = [np.arange(len(begin))], [begin]
    unfinished = np.flatnonzero(separators)
    document = document[unfinished]
    while len(unfinished):
        document = document + 1
        boundary = text.document_begin(shard[unfinished], document)
        inside = boundary < begin[unfinished] + length[unfinished]
        unfinished, document, boundary = unfinished[inside], document[inside], boundary[inside]
        rows.append(unfinished)
        begins.append(boundary)
    row, start = np.concatenate(rows), np.concatenate(begins)
    order = np.lexsort((start, row))
    row, start = row[order], start[order]
    new = np.append(True, (np.diff(row) > 0) | (np.diff(start) > 0))  # empty documents are dropped
    return row[new], start[new]
