"""Samples cut from documents: sentence pairs for next-sentence prediction, or full sentences in one segment.

After Devlin et al., appendix A.2, and google-research/bert create_pretraining_data.py, but addressed by number: a
sample's beginning is computed, without a pass over the corpus (invariant 1). Everything is vectorised over samples.

A sample reads on average R tokens from where it begins (a true pair reads the whole target, a random one only
its first segment), so a document of n tokens gets max(1, round(n / R)) samples: each token is read about once
per epoch, and counts do not depend on chance. They begin at even distances from the document's first token to
R tokens before its end, moved together by up to half that distance in every epoch. The first and the last stay
where they are in every other epoch, so that heads and tails are read often enough.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pretrain import config
from pretrain.batches.order import Order, below, binomial, draw, root_key, uniform
from pretrain.batches.replay import mixture_weights
from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards

# Counters of the independent random numbers of one sample.
_SHORT, _TARGET, _SPLIT, _RANDOM_NEXT, _TAIL, _OTHER, _BEGIN, _WINDOW_A, _WINDOW_B = range(9)
_TRUNCATE_A, _TRUNCATE_B = 1 << 16, 2 << 16  # each followed by one counter per 64 tokens cut off

_ROWS = 1 << 18  # documents counted at a time when a corpus is opened
# Looking up a sample maps about seven places of the shards into the process, usually 64 kB each. In a corpus of more
# than _KEEP_MAPPED bytes they are unmapped after _SAMPLES_MAPPED samples.
_KEEP_MAPPED = 1 << 28
_SAMPLES_MAPPED = 512


@dataclass(frozen=True)
class SamplePlan:
    """The locations of the tokens of B samples, and the lengths of the samples; int64 [B] each, `key` uint64 [B].

    Begins are token offsets within the shard. The lengths are final (truncated) and exclude special tokens;
    without next-sentence prediction `length_b` is 0 everywhere.
    """

    key: np.ndarray  # the random key of each sample
    shard_a: np.ndarray
    begin_a: np.ndarray
    length_a: np.ndarray
    shard_b: np.ndarray
    begin_b: np.ndarray
    length_b: np.ndarray
    label: np.ndarray  # 0 B follows A, 1 B comes from another document
    lengths: np.ndarray  # special tokens included

    def __getitem__(self, rows: np.ndarray) -> SamplePlan:
        return SamplePlan(**{name: values[rows] for name, values in self.__dict__.items()})


@dataclass(frozen=True)
class Rows:
    """S sequences end to end in T tokens, before masking."""

    input_ids: np.ndarray  # int64 [T]
    token_types: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    starts: np.ndarray  # int64 [S+1]
    sequence: np.ndarray  # int64 [T], the sequence each token belongs to
    ordinary: np.ndarray  # bool [T], False on [CLS] and [SEP]


class Sampler:
    """The samples of one split of a corpus at one sequence length.

    A sample is a pure function of the corpus, `seed`, `phase` and its number, which counts from 0 across epochs.
    Raises `InputError` if the corpus has no sample.
    """

    def __init__(
        self, shards: TokenShards, pairs: config.PairsConfig, *, sequence_length: int, seed: int, phase: int
    ) -> None:
        if not shards.shards:
            raise InputError(f"{shards.folder}: no text in this split. Prepare the corpus again.")
        self.shards = shards
        self.pairs = pairs
        self.special_tokens = 3 if pairs.next_sentence else 2
        self.room = sequence_length - self.special_tokens
        # A true pair reads all of its target, a random one half of it on average; full sentences lose the
        # last one, which does not fit.
        reads = 1 - pairs.random_next_share / 2 if pairs.next_sentence else 0.9
        self.reach = max(1, round(reads * self.room))
        self._corpus = _Corpus(shards, self.reach, least_sentences=2 if pairs.next_sentence else 1)
        if pairs.next_sentence and self._corpus.documents < 2:
            raise InputError(
                f"{shards.folder}: {self._corpus.documents} documents, but "
                "random next sentences need at least two. Add documents or set pairs.next_sentence: false."
            )
        key = root_key(shards.fingerprint, seed, phase)
        order_key, self._sample_key, self._anchor_key = draw(key, np.arange(3))
        weights = mixture_weights(shards.sources, self._corpus.samples)
        self._order = Order(self._corpus.samples, weights, order_key)
        if not self.samples_per_epoch:
            raise InputError(
                f"{shards.folder}: no document has the {self._corpus.least_sentences} sentences a sample "
                "needs. Add text or set pairs.next_sentence: false."
            )

    @property
    def samples_per_epoch(self) -> int:
        return self._order.samples_per_epoch

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan `samples` (int64 [B], counted across epochs); reads sentence and document offsets, no tokens."""
        self._corpus.looked_up(len(samples))
        key = draw(self._sample_key, samples)
        documents, anchor, last = self._anchors(samples)
        short = uniform(draw(key, _SHORT)) < self.pairs.short_share
        target = np.where(short, 2 + below(draw(key, _TARGET), self.room - 1), self.room)
        if self.pairs.next_sentence:
            return self._pairs(key, documents, anchor, target, last)
        return self._full_sentences(key, documents, anchor, target)

    def gather(self, plan: SamplePlan) -> Rows:
        """Fetch the tokens of a plan: [CLS] A [SEP] B [SEP], or [CLS] A [SEP], end to end."""
        tokens, special = self._corpus.tokens, self.shards.special_ids
        from_a = tokens.spans(plan.shard_a, plan.begin_a, plan.length_a)
        starts = np.concatenate(([0], np.cumsum(plan.lengths)))
        begins = starts[:-1]
        if self.pairs.next_sentence:
            from_b = tokens.spans(plan.shard_b, plan.begin_b, plan.length_b)
            begins_b = begins + plan.length_a + 2
            runs = _interleave(plan.length_a + 2, plan.length_b + 1)
            source = np.repeat(_interleave(from_a - begins - 1, from_b - begins_b), runs)
            token_types = np.repeat(np.tile((0, 1), len(begins)), runs)
            separators = np.concatenate((begins_b - 1, starts[1:] - 1))
        else:
            source = np.repeat(from_a - begins - 1, plan.lengths)
            token_types = np.zeros(starts[-1], np.int64)
            separators = starts[1:] - 1
        index = np.arange(starts[-1])
        sequence = np.repeat(np.arange(len(begins)), plan.lengths)
        source += index
        # Special tokens are in no shard: point them at a token that is.
        source[begins] = from_a
        source[separators] = from_a[0]
        input_ids = tokens.array.take(source).astype(np.int64)
        if (largest := input_ids.max()) >= self.shards.vocabulary_size:
            raise InputError(
                f"{self.shards.folder}: token {largest} in a shard, but the vocabulary has "
                f"{self.shards.vocabulary_size} entries; a shard is damaged. Prepare the corpus again."
            )
        input_ids[begins] = special["cls"]
        input_ids[separators] = special["sep"]
        ordinary = np.ones(starts[-1], bool)
        ordinary[begins] = False
        ordinary[separators] = False
        return Rows(input_ids, token_types, index - begins[sequence], starts, sequence, ordinary)

    def _anchors(self, samples: np.ndarray) -> tuple[_Documents, np.ndarray, np.ndarray]:
        """Document of each sample, the sentence it begins with, whether it is the document's last."""
        place = self._order.locate(samples)
        number, index, count = self._corpus.find(place.source, place.slot)
        documents = self._corpus.look_up(number)
        bits = draw(draw(self._anchor_key, place.epoch), number)
        coin = (bits & np.uint64(1)).astype(bool)
        outer = (index == 0) | (index == count - 1)
        jitter = np.where(outer & coin, 0.0, uniform(bits) - 0.5)
        steps = np.clip(index + jitter, 0, count - 1)
        steps = np.where(count == 1, coin & (documents.tokens > self.room), steps)
        slack = np.maximum(documents.tokens - self.reach, 0)
        offset = (steps * (slack / np.maximum(count - 1, 1))).astype(np.int64)
        sentence = self._corpus.first_at_least(
            documents.shard, documents.first, documents.last, documents.begin + offset
        )
        anchor = np.minimum(sentence, documents.last - self._corpus.least_sentences)
        return documents, anchor, index == count - 1

    def _pairs(
        self, key: np.ndarray, documents: _Documents, anchor: np.ndarray, target: np.ndarray, last: np.ndarray
    ) -> SamplePlan:
        corpus, shard = self._corpus, documents.shard
        begin = corpus.offset(shard, anchor)
        end = corpus.first_at_least(shard, anchor + 1, documents.last, begin + target)
        end = np.maximum(end, anchor + 2)
        split = anchor + 1 + below(draw(key, _SPLIT), end - anchor - 1)
        label = uniform(draw(key, _RANDOM_NEXT)) < self.pairs.random_next_share
        # A random pair leaves its second half unread. No sample after a document's last one would read
        # it, so there either half is kept.
        tail = label & last & (draw(key, _TAIL) >> np.uint64(63)).astype(bool)
        first_a, end_a = np.where(tail, split, anchor), np.where(tail, end, split)
        begin_a = corpus.offset(shard, first_a)
        length_a = corpus.offset(shard, end_a) - begin_a

        other = corpus.look_up(corpus.another(documents, draw(key, _OTHER)))
        first_b = other.first + below(draw(key, _BEGIN), other.last - other.first)
        filled = corpus.offset(other.shard, first_b) + np.maximum(target - length_a, 1)
        end_b = corpus.first_at_least(other.shard, first_b + 1, other.last, filled)
        shard_b = np.where(label, other.shard, shard)
        begin_b = corpus.offset(shard_b, np.where(label, first_b, split))
        length_b = corpus.offset(shard_b, np.where(label, end_b, end)) - begin_b

        begin_a, length_a = _window(begin_a, length_a, 2 * self.room, draw(key, _WINDOW_A))
        begin_b, length_b = _window(begin_b, length_b, 2 * self.room, draw(key, _WINDOW_B))
        cut_a, cut_b = _truncation(length_a, length_b, self.room)
        begin_a += binomial(cut_a, key, _TRUNCATE_A)
        begin_b += binomial(cut_b, key, _TRUNCATE_B)
        length_a -= cut_a
        length_b -= cut_b
        lengths = length_a + length_b + self.special_tokens
        return SamplePlan(key, shard, begin_a, length_a, shard_b, begin_b, length_b, label.astype(np.int64), lengths)

    def _full_sentences(
        self, key: np.ndarray, documents: _Documents, anchor: np.ndarray, target: np.ndarray
    ) -> SamplePlan:
        corpus, shard = self._corpus, documents.shard
        begin = corpus.offset(shard, anchor)
        end = corpus.first_at_least(shard, anchor + 1, documents.last + 1, begin + target + 1) - 1
        length = corpus.offset(shard, np.maximum(end, anchor + 1)) - begin
        begin, length = _window(begin, length, self.room, draw(key, _WINDOW_A))
        nothing = np.zeros_like(begin)
        return SamplePlan(key, shard, begin, length, shard, begin, nothing, nothing, length + self.special_tokens)


@dataclass(frozen=True)
class _Documents:
    """Documents looked up by number; int64 [B] each. Offsets are within the shard."""

    number: np.ndarray
    shard: np.ndarray
    first: np.ndarray  # first sentence
    last: np.ndarray  # one past the last sentence
    begin: np.ndarray  # first token
    tokens: np.ndarray


class _Corpus:
    """Documents of all shards under one numbering, source by source, and how many samples each has."""

    def __init__(self, shards: TokenShards, reach: int, *, least_sentences: int) -> None:
        self.least_sentences = least_sentences
        ordered = sorted(shards.shards, key=lambda shard: shard.source)
        self._sentences = _Joined([np.asarray(shard.sentences).view(np.int64) for shard in ordered])
        self._rows = _Joined([np.asarray(shard.documents).view(np.int64).reshape(-1) for shard in ordered])
        self.tokens = _Joined([shard.tokens for shard in ordered])
        self._mapped = [array for shard in ordered for array in (shard.sentences, shard.documents, shard.tokens)]
        self._large = sum(array.nbytes for array in self._mapped) > _KEEP_MAPPED
        self._looked_up = 0
        self._first_document = np.cumsum([0, *(len(shard.documents) - 1 for shard in ordered)])
        self.documents = int(self._first_document[-1])
        self._starts, first, count = [], [], []
        for source in range(len(shards.sources)):
            own = [shard.documents for shard in ordered if shard.source == source]
            first.append(sum(len(shard.documents) - 1 for shard in ordered if shard.source < source))
            self._starts.append(_sample_starts(own, reach, least_sentences))
            count.append(len(self._starts[-1]) - 1)
        self.samples = [int(starts[-1]) for starts in self._starts]
        self._source_first, self._source_count = np.array(first), np.array(count)

    def looked_up(self, samples: int) -> None:
        """Count samples looked up; from time to time unmap what they mapped. It stays in the page cache."""
        self._looked_up += samples
        if self._large and self._looked_up >= _SAMPLES_MAPPED:
            self._looked_up = 0
            for array in self._mapped:
                _forget(array)

    def find(self, source: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document number, sample within it, samples it has) of each slot of each source; int64 [B] each."""
        number, index, count = np.empty_like(slot), np.empty_like(slot), np.empty_like(slot)
        for which, starts in enumerate(self._starts):
            rows = np.flatnonzero(source == which)
            if not len(rows):
                continue
            # The slots take the table's type, so that numpy does not convert the table.
            document = np.searchsorted(starts, slot[rows].astype(starts.dtype), side="right") - 1
            begin = starts[document].astype(np.int64)
            number[rows] = document + self._source_first[which]
            index[rows] = slot[rows] - begin
            count[rows] = starts[document + 1].astype(np.int64) - begin
        return number, index, count

    def look_up(self, number: np.ndarray) -> _Documents:
        shard = np.searchsorted(self._first_document, number, side="right") - 1
        row = 2 * (number - self._first_document[shard])
        first, begin, last, end = (self._rows.at(shard, row + column) for column in range(4))
        return _Documents(number, shard, first, last, begin, end - begin)

    def another(self, documents: _Documents, bits: np.ndarray) -> np.ndarray:
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

    def first_at_least(self, shard: np.ndarray, low: np.ndarray, high: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The first sentence in [low, high) that begins at or after `offset`, or `high`; a binary search."""
        low, high = low.copy(), high.copy()
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            open_ = low < high
            reached = self._sentences.at(shard, np.where(open_, middle, 0)) >= offset
            high = np.where(open_ & reached, middle, high)
            low = np.where(open_ & ~reached, middle + 1, low)
        return low


class _Joined:
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


def _sample_starts(documents: list[np.ndarray], reach: int, least_sentences: int) -> np.ndarray:
    """Cumulative sample counts of a source's documents, [D+1], in 32 bits if they suffice."""
    tokens = sum(int(table[-1, 1]) for table in documents)
    total = sum(len(table) - 1 for table in documents)
    starts = np.zeros(total + 1, np.uint32 if tokens // reach + total < 1 << 32 else np.uint64)
    done = 1
    for table in documents:
        for begin in range(0, len(table) - 1, _ROWS):
            rows = np.diff(table[begin : begin + _ROWS + 1].view(np.int64), axis=0)
            counts = np.maximum((2 * rows[:, 1] + reach) // (2 * reach), 1)  # rounds n / reach
            counts[rows[:, 0] < least_sentences] = 0
            starts[done : done + len(counts)] = counts
            done += len(counts)
        _forget(table)
    return np.cumsum(starts, out=starts)


def _forget(array: np.ndarray) -> None:
    """Release the pages of a mapped file, so that they do not count as this process's memory."""
    if isinstance(array.base, mmap.mmap):
        array.base.madvise(mmap.MADV_DONTNEED)


def _window(begin: np.ndarray, length: np.ndarray, most: int, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For a span longer than `most` tokens (one huge sentence) a window of `most`, uniform over it."""
    spare = np.maximum(length - most, 0)
    return begin + below(bits, spare + 1), length - spare


def _truncation(length_a: np.ndarray, length_b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to cut from A and B, as if one by one from the longer side, from B when they are equal."""
    excess = np.maximum(length_a + length_b - room, 0)
    longer = length_a - length_b
    first = np.minimum(excess, np.abs(longer))
    rest = excess - first
    return np.where(longer > 0, first, 0) + rest // 2, np.where(longer < 0, first, 0) + (rest + 1) // 2


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack((first, second), axis=1).reshape(-1)
