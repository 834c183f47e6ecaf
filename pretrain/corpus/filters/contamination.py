"""Documents that contain text of evaluation sets: common sequences of 13 words (Brown et al. 2020, appendix C)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.config import ContaminationConfig
from pretrain.corpus.filters.evaluation_sets import SHORTEST, set_names
from pretrain.corpus.filters.text_columns import TextColumns
from pretrain.corpus.filters.verdicts import Verdicts

_SLOTS_PER_GRAM = 16  # of a table that settles most look-ups: what the beginnings of all n-grams are not
_MOST_BITS = 26


class Contamination:
    """Finds n-grams of evaluation sets; the table of them is read when the first document is."""

    def __init__(self, config: ContaminationConfig, table: Path) -> None:
        self._names = set_names(config)
        self._path = table
        self._table: _Table | None = None

    def judge(self, texts: Sequence[str], columns: TextColumns) -> Verdicts:
        """The verdicts; a document counts for the first set that it has text of."""
        if self._table is None:
            self._table = _Table(self._path)
        broken, places = np.full(len(texts), -1), np.zeros((len(texts), 2), np.int64)
        seen = [np.zeros(0, np.int64)]
        for n, begins, owners in self._table.find(columns):
            sets = np.searchsorted(self._table.first, owners, "right") - 1
            documents = np.searchsorted(columns.terms, begins, "right") - 1
            seen.append(owners)
            # The last of equal indices wins, so those of the first sets, and of the first places, come last.
            order = np.lexsort((begins, sets))[::-1]
            order = order[(broken[documents[order]] < 0) | (sets[order] < broken[documents[order]])]
            broken[documents[order]] = sets[order]
            places[documents[order]] = np.stack([begins[order], begins[order] + n - 1], 1)
        found = [_words(columns, *places[number]) if broken[number] >= 0 else "" for number in range(len(texts))]
        return Verdicts(self._names, broken, found, seen=np.unique(np.concatenate(seen)))


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

    def find(self, columns: TextColumns) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(n, first terms of the n-grams of documents that a set has, the texts that have them) for each length."""
        grams = columns.grams(SHORTEST)
        may_begin = np.flatnonzero(self._may_be[(grams >> self._shift).astype(np.int64)])
        may_begin = may_begin[_places(self._beginnings, grams[may_begin])[1]]
        ends = columns.terms[np.searchsorted(columns.terms, may_begin, "right")]
        for n in self.lengths:
            begins = may_begin[may_begin + n <= ends]
            place, known = _places(self.hashes, columns.sequence_hashes(begins, begins + n))
            yield n, begins[known], self._texts[place[known]]


def _places(ascending: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N], bool [N]: the place of each of `values` among `ascending`, and whether it is there."""
    if not len(ascending):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    place = np.searchsorted(ascending, values).clip(max=len(ascending) - 1)
    return place, ascending[place] == values


def _words(columns: TextColumns, first: int, last: int) -> str:
    """The text from one term to another."""
    return columns.units[columns.term_starts[first] : columns.term_ends[last]].tobytes().decode("utf-16-le", "replace")
