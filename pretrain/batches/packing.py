"""Full sentences across documents: RoBERTa's FULL-SENTENCES input (Liu et al. 2019, section 4.2).

A sequence holds neighbouring sentences. Where a document ends before the sequence is full, a separator follows and the
next document of the shard begins. Everything is vectorised over samples.
"""

from __future__ import annotations

import numpy as np

from pretrain.batches.documents import DocumentTable


def fill_across_documents(
    corpus: DocumentTable, shard: np.ndarray, anchor: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where sequences of full sentences end that begin with sentence `anchor`.

    Args:
        corpus: the text.
        shard: of each sample; int64 [B] as are the others.
        anchor: first sentence of each sample, of its shard.
        target: most tokens of each sample, separators between documents included.

    Returns:
        (one past the last sentence, separators between documents). A first sentence that is longer than its target is
        taken nevertheless.
    """
    begin = corpus.offset(shard, anchor)
    document = corpus.document_at(shard, begin)
    separators = np.zeros_like(begin)
    first, unfinished = anchor.copy(), np.arange(len(begin))
    while len(unfinished):
        which, number = shard[unfinished], document[unfinished]
        end = corpus.document_begin(which, number + 1)
        empty = end == corpus.document_begin(which, number)
        # The document fits, with one more token and the separator before it, which an empty document has already.
        fits = end - begin[unfinished] + separators[unfinished] + 1 + ~empty <= target[unfinished]
        goes_on = fits & corpus.has_document(which, number + 1)
        unfinished = unfinished[goes_on]
        document[unfinished] += 1
        separators[unfinished] += ~empty[goes_on]
        first[unfinished] = corpus.document_first(shard[unfinished], document[unfinished])
    last = corpus.document_first(shard, document + 1)
    end = corpus.first_at_least(shard, first, last + 1, begin + target - separators + 1) - 1
    separators -= (end == first) & (first > anchor)  # of a document that gives no sentence
    return np.maximum(end, anchor + 1), separators


def pieces(
    corpus: DocumentTable, shard: np.ndarray, begin: np.ndarray, length: np.ndarray, separators: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The parts of spans of tokens that come from one document each.

    Args:
        corpus: the text.
        shard: of each span; int64 [B] as are the others.
        begin: token offset of each span within its shard.
        length: its tokens.
        separators: its documents, less one.

    Returns:
        (the span of each piece, ascending; the piece's token offset within the shard), int64 [P] each.
    """
    rows, begins = [np.arange(len(begin))], [begin]
    unfinished = np.flatnonzero(separators)
    document = corpus.document_at(shard[unfinished], begin[unfinished])
    while len(unfinished):
        document = document + 1
        boundary = corpus.document_begin(shard[unfinished], document)
        inside = boundary < begin[unfinished] + length[unfinished]
        unfinished, document, boundary = unfinished[inside], document[inside], boundary[inside]
        rows.append(unfinished)
        begins.append(boundary)
    row, piece = np.concatenate(rows), np.concatenate(begins)
    order = np.lexsort((piece, row))
    row, piece = row[order], piece[order]
    new = np.append(True, (np.diff(row) > 0) | (np.diff(piece) > 0))  # an empty document begins where the next one does
    return row[new], piece[new]
