"""Repetition within documents: lines and n-grams that occur more than once (Rae et al. 2021, table A1).

Most documents repeat little. A table of counts by the lowest bits of each hash bounds the figure of every document
from above, in one pass without sorting; only the few documents that this bound does not clear are counted exactly.
A figure that is cleared is given as 0.
"""

import functools

import numpy as np

from pretrain.corpus.filters.text_columns import TextColumns, mixed

_DOCUMENT_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_TABLE_BITS = 18
_SHORTEST = 5  # a longer sequence that is repeated repeats its first 5 words, and all others within it


def repeated_lines(texts: TextColumns) -> np.ndarray:
    """bool [L]: lines whose terms another line before, of the same document, has. Lines without terms do not count."""
    first = np.searchsorted(texts.term_starts, texts.line_starts)
    last = np.searchsorted(texts.term_starts, texts.line_ends)
    hashes = texts.sequence_hashes(first, last)
    filled = np.flatnonzero(last > first)
    document = np.repeat(np.arange(len(texts.document_ends)), np.diff(texts.lines))
    repeated = np.zeros(len(hashes), bool)
    repeated[filled] = _is_repeated(_within(hashes[filled], document[filled]))
    return repeated


def top_share(texts: TextColumns, n: int, threshold: float) -> np.ndarray:
    """float64 [D]: share of a document's characters in its most frequent n-gram, 0 if it is below `threshold`.

    Of equally frequent n-grams the longest counts; one that occurs once counts nothing.
    """
    shares = np.zeros(len(texts.document_ends))
    total = _characters(texts)
    suspects = np.flatnonzero(_most_of_top(texts, n) > threshold * total)
    for document in suspects.tolist():
        hashes, lengths = _grams_of(texts, n, document)
        _, example, counts = np.unique(hashes, return_index=True, return_counts=True)
        most = counts.max()
        if most > 1:
            shares[document] = most * lengths[example[counts == most]].max() / total[document]
    return shares


def repeated_share(texts: TextColumns, n: int, threshold: float) -> np.ndarray:
    """float64 [D]: share of a document's characters in n-grams that it had before, 0 if it is below `threshold`.

    Characters in several such n-grams count once; the first occurrence does not count.
    """
    shares = np.zeros(len(texts.document_ends))
    total = _characters(texts)
    suspects = np.flatnonzero(_most_repeated(texts, min(n, _SHORTEST)) > threshold * total)
    for document in suspects.tolist():
        hashes, _ = _grams_of(texts, n, document)
        repeated = _is_repeated(hashes)
        terms = slice(texts.terms[document], texts.terms[document + 1])
        covered = _covered(repeated, n)
        lengths = texts.term_ends[terms] - texts.term_starts[terms]
        shares[document] = lengths[covered].sum() / total[document]
    return shares


def _most_of_top(texts: TextColumns, n: int) -> np.ndarray:
    """int64 [D]: an upper bound for the characters in the most frequent n-gram, which begins with a pair of words."""
    most = np.zeros(len(texts.document_ends), np.int64)
    first, within = texts.gram_documents(n)
    filled = np.flatnonzero(within)
    if filled.size:
        lengths = texts.term_ends[n - 1 :] - texts.term_starts[: len(texts.term_starts) - n + 1]
        # A gram across a document's end is no gram, but may only raise the bound.
        most[filled] = np.maximum.reduceat(_pair_counts(texts)[: len(lengths)] * lengths, first[filled])
    return most


@functools.lru_cache(maxsize=1)
def _pair_counts(texts: TextColumns) -> np.ndarray:
    """int64: for each pair of words at least as many as there are equal ones in its document, 0 for one."""
    counts = _counts_at_most(*_grams_by_document(texts, 2))
    counts[counts == 1] = 0
    return counts


@functools.lru_cache(maxsize=1)
def _most_repeated(texts: TextColumns, n: int) -> np.ndarray:
    """int64 [D]: an upper bound for the characters in n-grams, or longer ones, that were there before."""
    grams, documents = _grams_by_document(texts, n)
    suspects = np.flatnonzero(_counts_at_most(grams, documents) > 1)
    repeated = np.zeros(len(grams), bool)
    repeated[suspects] = _is_repeated(_within(grams[suspects], documents[suspects]))
    lengths = texts.term_ends - texts.term_starts
    sums = np.append(0, np.cumsum(lengths * _covered(repeated, n)))
    return sums[texts.terms[1:]] - sums[texts.terms[:-1]]


def _grams_by_document(texts: TextColumns, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the n-grams, and the document in which each begins."""
    documents = np.repeat(np.arange(len(texts.document_ends), dtype=np.uint64), np.diff(texts.terms))
    grams = texts.grams(n)
    return grams, documents[: len(grams)]


def _grams_of(texts: TextColumns, n: int, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and lengths in characters of the n-grams of one document that has some."""
    begin, end = texts.terms[document], texts.terms[document + 1] - n + 1
    starts = np.arange(begin, max(begin, end))
    lengths = texts.term_ends[starts + n - 1] - texts.term_starts[starts]
    return texts.sequence_hashes(starts, starts + n), lengths


def _within(hashes: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Hashes that differ between documents."""
    return mixed(hashes ^ (documents.astype(np.uint64) * _DOCUMENT_FACTOR))


def _counts_at_most(hashes: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """int64: for each hash at least as many as there are equal ones in its document."""
    slots = (hashes ^ (documents * _DOCUMENT_FACTOR)) & np.uint64((1 << _TABLE_BITS) - 1)
    slots = slots.astype(np.int32)
    return np.bincount(slots, minlength=1)[slots]


def _is_repeated(hashes: np.ndarray) -> np.ndarray:
    """bool: values that occurred before."""
    order = np.argsort(hashes, kind="stable")
    repeated = np.zeros(len(hashes), bool)
    repeated[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
    return repeated


def _covered(begins: np.ndarray, n: int) -> np.ndarray:
    """bool [grams + n - 1]: the terms that a chosen n-gram covers."""
    changes = np.zeros(len(begins) + n, np.int32)
    changes[: len(begins)] += begins
    changes[n : n + len(begins)] -= begins
    return np.cumsum(changes)[:-1] > 0


def _characters(texts: TextColumns) -> np.ndarray:
    """int64 [D]: characters from the first word to the last."""
    sums = np.append(0, np.cumsum(texts.line_ends - texts.line_starts))
    return sums[texts.lines[1:]] - sums[texts.lines[:-1]]
