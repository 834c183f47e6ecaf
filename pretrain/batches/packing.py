"""Sequences that cross documents: RoBERTa's FULL-SENTENCES input (Liu et al. 2019, section 4.2).

Each sequence concatenates consecutive sentences. If a document ends before the sequence is full, a separator and the
next document of the shard follow. Everything is vectorized over samples.
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
        shard: index of each span's shard; int64 [B], like the other arrays.
        start: token offset of each span within its shard.
        length: number of tokens of each span.
        document: index of the document that contains each span's first token.
        separators: number of separators in each span: its documents, minus one.

    Returns:
        (index of each document's span, ascending; token offset of its start within the shard), int64 [D] each.
    """
    spans, starts = [np.arange(len(start))], [start]
    unfinished = np.flatnonzero(separators)
    document = document[unfinished]
    while len(unfinished):
        document = document + 1
        boundary = text.document_start(shard[unfinished], document)
        is_inside = boundary < start[unfinished] + length[unfinished]
        unfinished, document, boundary = unfinished[is_inside], document[is_inside], boundary[is_inside]
        spans.append(unfinished)
        starts.append(boundary)
    span, offset = np.concatenate(spans), np.concatenate(starts)
    order = np.lexsort((offset, span))
    span, offset = span[order], offset[order]
    is_kept = np.append(True, (np.diff(span) > 0) | (np.diff(offset) > 0))  # drops empty documents
    return span[is_kept], offset[is_kept]
