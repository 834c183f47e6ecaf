"""Find documents that share sequences of 13 words with evaluation sets (Brown et al. 2020, appendix C)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config import ContaminationConfig
from pretrain.corpus.filters.evaluation_sets import PREFIX, set_names
from pretrain.corpus.filters.terms import DocumentTerms

_SLOTS_PER_GRAM = 16  # slots of `_is_prefix`, a one-hash Bloom filter that rejects most lookups, per n-gram
_MAX_BITS = 26  # log2 of the maximum number of slots


class Matches(NamedTuple):
    """Occurrences of evaluation sets' text in D documents.

    sets int64 [D], index of the first set whose text the document contains, -1 for none; words [D], the first words of
    the document that are in this set; seen int64, indices of the found examples over all sets.
    """

    sets: np.ndarray
    words: list[str]
    seen: np.ndarray


class Contamination:
    """Finds n-grams of evaluation sets in documents. The table of n-grams is loaded when it is first needed."""

    def __init__(self, config: ContaminationConfig, path: Path) -> None:
        self.names = set_names(config)
        self._path = path
        self._table: _Table | None = None

    def find(self, batch: DocumentTerms) -> Matches:
        """Return the matches in the documents of `batch`."""
        if self._table is None:
            self._table = _Table(self._path)
        count = len(batch.document_starts) - 1
        first_sets, term_ranges = np.full(count, -1), np.zeros((count, 2), np.int64)
        seen = [np.zeros(0, np.int64)]
        for starts, ends, examples in self._table.find(batch):
            sets = np.searchsorted(self._table.first_examples, examples, "right") - 1
            documents = np.searchsorted(batch.document_starts, starts, "right") - 1
            seen.append(examples)
            # The last assignment to an index wins, so the first sets, and the first terms, must come last.
            order = np.lexsort((starts, sets))[::-1]
            order = order[(first_sets[documents[order]] < 0) | (sets[order] < first_sets[documents[order]])]
            first_sets[documents[order]] = sets[order]
            term_ranges[documents[order]] = np.stack([starts[order], ends[order] - 1], 1)
        found = zip(first_sets, term_ranges, strict=True)
        words = [_words(batch, *terms) if index >= 0 else "" for index, terms in found]
        return Matches(first_sets, words, np.unique(np.concatenate(seen)))


class _Table:
    """The table of n-grams of all sets, written by `evaluation_sets.write_table`."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.hashes, self._examples = arrays["hashes"], arrays["texts"]
            self.lengths, self.first_examples = arrays["lengths"].tolist(), arrays["first"]
            self._prefixes = arrays["beginnings"]
        bits = min(_MAX_BITS, max(16, (_SLOTS_PER_GRAM * len(self._prefixes)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._is_prefix = np.zeros(1 << bits, bool)
        self._is_prefix[(self._prefixes >> self._shift).astype(np.int64)] = True

    def find(self, batch: DocumentTerms) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (start terms, end terms, indices of examples), for each length, of the n-grams that are in a set."""
        grams = batch.grams(PREFIX)
        starts = np.flatnonzero(self._is_prefix[(grams >> self._shift).astype(np.int64)])
        starts = starts[_look_up(self._prefixes, grams[starts])[1]]
        limits = batch.document_starts[np.searchsorted(batch.document_starts, starts, "right")]
        for length in self.lengths:
            ends = batch.sequence_ends(starts, length)
            valid_starts, ends = starts[ends <= limits], ends[ends <= limits]
            index, is_known = _look_up(self.hashes, batch.sequence_hashes(valid_starts, ends))
            yield valid_starts[is_known], ends[is_known], self._examples[index[is_known]]


def _look_up(ascending: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each value in the sorted array, int64 [N], and whether it is there, bool [N]."""
    if not len(ascending):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    index = np.searchsorted(ascending, values).clip(max=len(ascending) - 1)
    return index, ascending[index] == values


def _words(batch: DocumentTerms, first: int, last: int) -> str:
    """Return the text from the term `first` to the term `last`."""
    return batch.units[batch.term_starts[first] : batch.term_ends[last]].tobytes().decode("utf-16-le", "replace")
