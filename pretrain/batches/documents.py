"""Documents and sentences of all shards, looked up by number and by token offset, vectorised over samples."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pretrain.batches.order import below
from pretrain.corpus.shards import TokenShards

# Where samples begin is kept for groups of neighbouring documents: of one document each, of more where there would be
# over _GROUPS groups, of _LARGEST_GROUP at most. Finding a sample counts those of its group anew.
_GROUPS = 1 << 21
_LARGEST_GROUP = 32
_ROWS = 1 << 16  # documents counted at a time when a corpus is opened, whole groups
_COUNTED_AT_ONCE = 1 << 14  # documents counted at a time when samples are found: they fit a core's cache
# Looking up a sample maps about seven places of the shards into the process, usually 64 kB each. In a corpus of more
# than _KEEP_MAPPED bytes they are unmapped after _SAMPLES_MAPPED samples.
_KEEP_MAPPED = 1 << 28
_SAMPLES_MAPPED = 512


@dataclass(frozen=True)
class Documents:
    """Documents looked up by number; int64 [B] each. Offsets are within the shard."""

    number: np.ndarray
    shard: np.ndarray
    first: np.ndarray  # first sentence
    last: np.ndarray  # one past the last sentence
    begin: np.ndarray  # first token
    tokens: np.ndarray


class DocumentTable:
    """Documents of all shards under one numbering, source by source, and how many samples each has.

    Args:
        shards: the corpus; it has at least one shard.
        reach: tokens that a sample reads on average.
        least_sentences: sentences that a document needs to have a sample, at least 1.
        joined: count the text of each shard as one document, so that samples are evenly spread over the shard. The
            real documents are then found by `document_at` alone.
    """

    def __init__(self, shards: TokenShards, reach: int, *, least_sentences: int, joined: bool = False) -> None:
        self.least_sentences = least_sentences
        ordered = sorted(shards.shards, key=lambda shard: shard.source)
        self._reach = reach
        tables = [_one_document(shard.documents) if joined else shard.documents for shard in ordered]
        self._sentences = Joined([np.asarray(shard.sentences).view(np.int64) for shard in ordered])
        self._rows = Joined([np.asarray(table).view(np.int64).reshape(-1) for table in tables])
        self._real = Joined([np.asarray(shard.documents).view(np.int64).reshape(-1) for shard in ordered])
        self._real_count = np.array([len(shard.documents) - 1 for shard in ordered])
        self.tokens = Joined([shard.tokens for shard in ordered])
        self._mapped = [array for shard in ordered for array in (shard.sentences, shard.documents, shard.tokens)]
        self._large = sum(array.nbytes for array in self._mapped) > _KEEP_MAPPED
        self._looked_up = 0
        counts = np.array([len(table) - 1 for table in tables])
        self._first_document = _bounds(counts)
        self.documents = int(self._first_document[-1])
        self._group = 1
        while self._group < _LARGEST_GROUP and self.documents > _GROUPS * self._group:
            self._group *= 2
        self._first_group = _bounds(-(-counts // self._group))  # a group's documents are of one shard
        self._starts = self._sample_starts(tables)
        shard_bounds = np.searchsorted([shard.source for shard in ordered], np.arange(len(shards.sources) + 1))
        self._source_first = self._first_document[shard_bounds[:-1]]
        self._source_count = np.diff(self._first_document[shard_bounds])
        self._source_start = self._starts[self._first_group[shard_bounds]].astype(np.int64)
        self.samples: list[int] = np.diff(self._source_start).tolist()

    def looked_up(self, samples: int) -> None:
        """Count samples looked up; from time to time unmap what they mapped. It stays in the page cache."""
        self._looked_up += samples
        if self._large and self._looked_up >= _SAMPLES_MAPPED:
            self._looked_up = 0
            for array in self._mapped:
                _forget(array)

    def find(self, source: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document number, sample within it, samples it has) of each slot of each source; int64 [B] each."""
        sample = self._source_start[source] + slot
        # The samples take the table's type, so that numpy does not convert the table.
        group = np.searchsorted(self._starts, sample.astype(self._starts.dtype), side="right") - 1
        index = sample - self._starts[group]
        if self._group == 1:
            return group, index, (self._starts[group + 1] - self._starts[group]).astype(np.int64)
        shard = np.searchsorted(self._first_group, group, side="right") - 1
        row = self._group * (group - self._first_group[shard])
        number, count = self._first_document[shard] + row, np.empty_like(index)
        step = _COUNTED_AT_ONCE // self._group
        for begin in range(0, len(slot), step):
            some = slice(begin, begin + step)
            inside, before, count[some] = self._within(shard[some], row[some], index[some])
            number[some] += inside
            index[some] -= before
        return number, index, count

    def _within(
        self, shard: np.ndarray, row: np.ndarray, index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document within its group, samples of the group before it, samples it has); int64 [B] each.

        Args:
            shard: of the group.
            row: its first document, counted within the shard.
            index: sample within the group.
        """
        own = np.minimum(self._first_document[shard + 1] - self._first_document[shard] - row, self._group)
        place = self._rows.spans(shard, 2 * row, 2 * own + 2)
        # A shard's last group may be smaller: documents without sentences, which have no samples, fill it up.
        column = place[:, None] + 2 * np.minimum(np.arange(self._group + 1), own[:, None])
        sentences = np.diff(self._rows.array.take(column), axis=1)
        column += 1
        counts = self._samples_of(sentences, np.diff(self._rows.array.take(column), axis=1))
        ends = counts.cumsum(axis=1)
        inside = np.count_nonzero(ends <= index[:, None], axis=1)
        at = np.arange(len(index)), inside
        return inside, ends[at] - counts[at], counts[at]

    def look_up(self, number: np.ndarray) -> Documents:
        shard = np.searchsorted(self._first_document, number, side="right") - 1
        row = 2 * (number - self._first_document[shard])
        first, begin, last, end = (self._rows.at(shard, row + column) for column in range(4))
        return Documents(number, shard, first, last, begin, end - begin)

    def another(self, documents: Documents, bits: np.ndarray) -> np.ndarray:
        """Number of a random other document of the same source, or of any source if that has only one."""
        source = np.searchsorted(self._source_first, documents.number, side="right") - 1
        # Sources without documents share their first number with the next source that has some: take the latter.
        alone = self._source_count[source] < 2
        first = np.where(alone, 0, self._source_first[source])
        count = np.where(alone, self.documents, self._source_count[source])
        number = first + below(bits, count - 1)
        return number + (number >= documents.number)

    def offset(self, shard: np.ndarray, sentence: np.ndarray) -> np.ndarray:
        """Token offset at which sentences begin; int64 [B]."""
        return self._sentences.at(shard, sentence)

    def document_at(self, shard: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The real document, counted within its shard, that holds the token at `offset`; int64 [B]."""
        low, high = np.zeros_like(offset), self._real_count[shard]
        for _ in range(int(high.max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            reached = self.document_begin(shard, middle) <= offset
            low, high = np.where(reached, middle, low), np.where(reached, high, middle)
        return low

    def document_begin(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """Token offset at which real documents of shards begin, or their last one ends; int64 [B]."""
        return self._real.at(shard, 2 * document + 1)

    def document_first(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """First sentence of real documents of shards, or one past their last; int64 [B]."""
        return self._real.at(shard, 2 * document)

    def has_document(self, shard: np.ndarray, document: np.ndarray) -> np.ndarray:
        """bool [B]: whether shards have real documents of these numbers."""
        return document < self._real_count[shard]

    def first_at_least(self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The first sentence in [low, high) that begins at or after `offset`, or `high`; a binary search."""
        left = np.maximum(high - low, 0)
        search = np.flatnonzero(left)
        begins = np.zeros_like(low)
        begins[search] = self._sentences.spans(shard[search], low[search], left[search])
        place, last = begins.copy(), begins + np.maximum(left - 1, 0)
        for _ in range(int(left.max(initial=0)).bit_length()):
            half = left >> 1
            # Where nothing is left, `place` may be past the span, which must not be read.
            before = self._sentences.array.take(np.minimum(place + half, last), mode="clip") < offset
            before &= left > 0
            half += 1
            place += half * before
            left = np.where(before, left - half, half - 1)
        return low + place - begins

    def _sample_starts(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """How many samples come before each group, and how many there are: 32 bits each if they suffice."""
        most = sum(int(table[-1, 1]) for table in tables) // self._reach + self.documents
        starts = np.zeros(self._first_group[-1] + 1, np.uint32 if most < 1 << 32 else np.int64)
        done = 1
        for table in tables:
            for begin in range(0, len(table) - 1, _ROWS):
                rows = np.diff(table[begin : begin + _ROWS + 1].view(np.int64), axis=0)
                counts = self._samples_of(rows[:, 0], rows[:, 1])
                sums = np.add.reduceat(counts, np.arange(0, len(counts), self._group))
                starts[done : done + len(sums)] = sums
                done += len(sums)
            _forget(table)
        return np.cumsum(starts, out=starts)

    def _samples_of(self, sentences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """How many samples documents of so many sentences and tokens have; int64 of the same shape."""
        counts = 2 * tokens
        counts += self._reach
        counts //= 2 * self._reach  # rounds tokens / reach
        np.maximum(counts, 1, out=counts)
        counts *= sentences >= self.least_sentences
        return counts


class Joined:
    """Many arrays of one type, read by one `take` in place, without a copy.

    A view spans from the lowest of them in memory to the highest. What lies between them is never read,
    since every index is checked against its own array first.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [np.asarray(array) for array in arrays]  # keeps the memory alive
        self._lengths = np.array([len(array) for array in self._arrays])
        bytes_each = self._arrays[0].itemsize
        addresses = np.array([array.__array_interface__["data"][0] for array in self._arrays])
        lowest = self._arrays[int(addresses.argmin())]
        self._begins, odd = np.divmod(addresses - addresses.min(), bytes_each)
        if odd.any() or any(a.dtype != lowest.dtype or not a.flags.c_contiguous for a in self._arrays):
            raise ValueError("arrays must be contiguous, aligned and of one type")
        length = int((self._begins + self._lengths).max())
        self.array = as_strided(lowest, (length,), (bytes_each,), writeable=False)

    def at(self, which: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Element `index` of array `which`, each [B]."""
        return self.array.take(self._place(which, index))

    def spans(self, which: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Indices into `.array` of spans of at least one element, checked at both ends; int64 [B]."""
        self._place(which, begin + length - 1)
        return self._place(which, begin)

    def _place(self, which: np.ndarray, index: np.ndarray) -> np.ndarray:
        # A negative index becomes a huge unsigned one.
        if (index.view(np.uint64) >= self._lengths[which].view(np.uint64)).any():
            raise IndexError("an offset points outside its shard; the corpus is damaged")
        return self._begins[which] + index


def _one_document(documents: np.ndarray) -> np.ndarray:
    """A table of documents [D+1, 2] as that of one document with all their sentences and tokens."""
    return np.array([(0, 0), documents[-1]], documents.dtype)


def _bounds(counts: np.ndarray) -> np.ndarray:
    """Where each of neighbouring ranges begins, and the last one ends."""
    return np.concatenate(([0], np.cumsum(counts)))


def _forget(array: np.ndarray) -> None:
    """Release the pages of a mapped file, so that they do not count as this process's memory."""
    if isinstance(array.base, mmap.mmap):
        array.base.madvise(mmap.MADV_DONTNEED)
