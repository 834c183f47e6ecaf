"""Find documents that share sequences of 13 words with evaluation sets (Brown et al. 2020, appendix C).

`terms` defines terms (about one word each), n-grams (sequences of terms) and units (UTF-16 characters).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config import ContaminationConfig
from pretrain.corpus.filters.evaluation_sets import PREFIX_WORDS, set_names
from pretrain.corpus.filters.terms import DocumentTerms

_SLOTS_PER_GRAM = 16  # slots per n-gram in `_is_prefix`, a one-hash Bloom filter that avoids most lookups
_MAX_BITS = 26  # log2 of the maximum number of slots


class Matches(NamedTuple):
    """N-grams of evaluation sets that occur in D documents."""

    sets: np.ndarray  # int64 [D], index of the first set that has an n-gram of the document; -1 if none has
    excerpts: list[str]  # [D], text of the document's first n-gram that is in this set
    matched_examples: np.ndarray  # int64, indices of the examples with these n-grams, counted over all sets


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
        document_count = len(batch.document_starts) - 1
        first_sets, first_matches = np.full(document_count, -1), np.zeros((document_count, 2), np.int64)
        matched_examples = [np.zeros(0, np.int64)]
        for starts, ends, examples in self._table.find(batch):
            sets = np.searchsorted(self._table.first_examples, examples, "right") - 1
            documents = np.searchsorted(batch.document_starts, starts, "right") - 1
            matched_examples.append(examples)
            # The last assignment to an index wins, so sort each document's first set, and its first match, to the end.
            order = np.lexsort((starts, sets))[::-1]
            order = order[(first_sets[documents[order]] < 0) | (sets[order] < first_sets[documents[order]])]
            first_sets[documents[order]] = sets[order]
            first_matches[documents[order]] = np.stack([starts[order], ends[order] - 1], 1)
        found = zip(first_sets, first_matches, strict=True)
        excerpts = [_text_between(batch, *terms) if set_index >= 0 else "" for set_index, terms in found]
        return Matches(first_sets, excerpts, np.unique(np.concatenate(matched_examples)))


class _Table:
    """The table of n-grams of all sets, written by `evaluation_sets.write_table`."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:  # `write_table` describes them
            self.hashes, self._examples = arrays["hashes"], arrays["texts"]
            self.lengths, self.first_examples = arrays["lengths"].tolist(), arrays["first"]
            self._prefixes = arrays["beginnings"]
        bits = min(_MAX_BITS, max(16, (_SLOTS_PER_GRAM * len(self._prefixes)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._is_prefix = np.zeros(1 << bits, bool)
        self._is_prefix[(self._prefixes >> self._shift).astype(np.int64)] = True

    def find(self, batch: DocumentTerms) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each length of n-grams, yield the matches: (first terms, end terms, indices of examples), int64 each."""
        grams = batch.grams(PREFIX_WORDS)
        starts = np.flatnonzero(self._is_prefix[(grams >> self._shift).astype(np.int64)])
        starts = starts[_look_up(self._prefixes, grams[starts])[1]]
        document_ends = batch.document_starts[np.searchsorted(batch.document_starts, starts, "right")]
        for length in self.lengths:
            ends = batch.sequence_ends(starts, length)
            valid_starts, ends = starts[ends <= document_ends], ends[ends <= document_ends]
            indices, is_known = _look_up(self.hashes, batch.sequence_hashes(valid_starts, ends))
            yield valid_starts[is_known], ends[is_known], self._examples[indices[is_known]]


def _look_up(known: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each value in the ascending array `known`, int64 [N], and whether it is there, bool [N]."""
    if not len(known):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    indices = np.searchsorted(known, values).clip(max=len(known) - 1)
    return indices, known[indices] == values


def _text_between(batch: DocumentTerms, first: int, last: int) -> str:
    """Return the text from the term with the index `first` to the term with the index `last`, inclusive."""
    return batch.units[batch.term_starts[first] : batch.term_ends[last]].tobytes().decode("utf-16-le", "replace")
