"""Sequences across documents: RoBERTa's FULL-SENTENCES input (Liu et al. 2019, section 4.2).

A sequence holds neighboring sentences. Where a document ends before the sequence is full, a separator follows and the
next document of the shard begins. Everything is vectorized over samples.
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
    """Where each document begins in spans of tokens, the first one of a span where the span does.

    Args:
        text: the text.
        shard: of each span; int64 [B] as are the others.
        begin: token offset of each span within its shard.
        length: its tokens.
        document: that holds its first token.
        separators: its documents, less one.

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
    new = np.append(True, (np.diff(row) > 0) | (np.diff(start) > 0))  # an empty document begins where the next one does
    return row[new], start[new]
