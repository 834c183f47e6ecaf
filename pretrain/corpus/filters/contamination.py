"""Documents that contain text of evaluation sets: common sequences of 13 words (Brown et al. 2020, appendix C)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config import ContaminationConfig
from pretrain.corpus.filters.evaluation_sets import BEGINNING, set_names
from pretrain.corpus.filters.text_columns import TextColumns

_SLOTS_PER_GRAM = 16  # of a table that settles most look-ups: what the beginnings of all n-grams are not
_MOST_BITS = 26


class Matches(NamedTuple):
    """Text of evaluation sets in D documents.

    sets int64 [D]: the first set that a document has text of, -1 if there is none; words [D]: its first such words;
    seen int64: the texts of all sets that were found.
    """

    sets: np.ndarray
    words: list[str]
    seen: np.ndarray


class Contamination:
    """Finds n-grams of evaluation sets; the table of them is read when the first document is."""

    def __init__(self, config: ContaminationConfig, table: Path) -> None:
        self.names = set_names(config)
        self._path = table
        self._table: _Table | None = None

    def find(self, columns: TextColumns) -> Matches:
        """The matches in the documents of `columns`."""
        if self._table is None:
            self._table = _Table(self._path)
        count = len(columns.terms) - 1
        found, places = np.full(count, -1), np.zeros((count, 2), np.int64)
        seen = [np.zeros(0, np.int64)]
        for begins, ends, owners in self._table.find(columns):
            sets = np.searchsorted(self._table.first, owners, "right") - 1
            documents = np.searchsorted(columns.terms, begins, "right") - 1
            seen.append(owners)
            # The last of equal indices wins, so those of the first sets, and of the first places, come last.
            order = np.lexsort((begins, sets))[::-1]
            order = order[(found[documents[order]] < 0) | (sets[order] < found[documents[order]])]
            found[documents[order]] = sets[order]
            places[documents[order]] = np.stack([begins[order], ends[order] - 1], 1)
        words = [_words(columns, *place) if one >= 0 else "" for one, place in zip(found, places, strict=True)]
        return Matches(found, words, np.unique(np.concatenate(seen)))


class _Table:
    """The n-grams of all sets, as `evaluation_sets.write_table` wrote them."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.hashes, self._texts = arrays["hashes"], arrays["texts"]
            self.lengths, self.first = arrays["lengths"].tolist(), arrays["first"]
            self._beginnings = arrays["beginnings"]
        bits = min(_MOST_BITS, max(16, (_SLOTS_PER_GRAM * len(self._beginnings)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._may_be = np.zeros(1 << bits, bool)
        self._may_be[(self._beginnings >> self._shift).astype(np.int64)] = True

    def find(self, columns: TextColumns) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The n-grams of documents that a set has: (first terms, ends, the texts that have them) for each length."""
        grams = columns.grams(BEGINNING)
        may_begin = np.flatnonzero(self._may_be[(grams >> self._shift).astype(np.int64)])
        may_begin = may_begin[_places(self._beginnings, grams[may_begin])[1]]
        limits = columns.terms[np.searchsorted(columns.terms, may_begin, "right")]
        for length in self.lengths:
            ends = columns.sequence_ends(may_begin, length)
            begins, ends = may_begin[ends <= limits], ends[ends <= limits]
            place, known = _places(self.hashes, columns.sequence_hashes(begins, ends))
            yield begins[known], ends[known], self._texts[place[known]]


def _places(ascending: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N], bool [N]: the place of each of `values` among `ascending`, and whether it is there."""
    if not len(ascending):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    place = np.searchsorted(ascending, values).clip(max=len(ascending) - 1)
    return place, ascending[place] == values


def _words(columns: TextColumns, first: int, last: int) -> str:
    """The text from one term to another."""
    return columns.units[columns.term_starts[first] : columns.term_ends[last]].tobytes().decode("utf-16-le", "replace")
