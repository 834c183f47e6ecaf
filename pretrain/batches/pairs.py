"""Samples cut from documents: pairs of segments whose relation is predicted, or full sentences in one segment.

After Devlin et al., appendix A.2, and google-research/bert create_pretraining_data.py, but addressed by number: a
sample's beginning is computed, without a pass over the corpus (invariant 1). Everything is vectorised over samples.

A sample reads on average R tokens from where it begins (a true pair reads the whole target, a random one only
its first segment), so a document of n tokens gets max(1, round(n / R)) samples: each token is read about once
per epoch, and counts do not depend on chance. They begin at even distances from the document's first token to
R tokens before its end, moved together by up to half that distance in every epoch. The first and the last stay
where they are in every other epoch, so that heads and tails are read often enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pretrain import config
from pretrain.batches.documents import Documents, DocumentTable
from pretrain.batches.order import Order, below, binomial, draw, root_key, uniform
from pretrain.batches.packing import fill_across_documents, pieces
from pretrain.batches.replay import mixture_weights
from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards

# Counters of the independent random numbers of one sample.
_SHORT, _TARGET, _SPLIT, _RANDOM_NEXT, _TAIL, _OTHER, _BEGIN, _WINDOW_A, _WINDOW_B = range(9)
_TRUNCATE_A, _TRUNCATE_B = 1 << 16, 2 << 16  # each followed by one counter per 64 tokens cut off


@dataclass(frozen=True)
class SamplePlan:
    """The locations of the tokens of B samples, and the lengths of the samples; int64 [B] each, `key` uint64 [B].

    Begins are token offsets within the shard. The lengths are final (truncated) and exclude special tokens;
    without pairs `length_b` is 0 everywhere.
    """

    number: np.ndarray  # of each sample in its phase, counted across epochs
    key: np.ndarray  # the random key of each sample
    shard_a: np.ndarray
    begin_a: np.ndarray
    length_a: np.ndarray
    shard_b: np.ndarray
    begin_b: np.ndarray
    length_b: np.ndarray
    label: np.ndarray  # 0 B follows A; 1 B comes from another document (nsp), or A follows B (sop)
    lengths: np.ndarray  # special tokens included

    @property
    def ordinary(self) -> np.ndarray:
        """Tokens of each sample without special ones, int64 [B]."""
        return self.length_a + self.length_b

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

    A sample is a pure function of the corpus, `seed`, `phase`, `weights` and its number, which counts from 0 across
    epochs. `weights` replaces those of the sources that it names. Raises `InputError` if the corpus has no sample, or
    no source of such a name.
    """

    def __init__(
        self,
        shards: TokenShards,
        pairs: config.PairsConfig,
        *,
        sequence_length: int,
        seed: int,
        phase: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not shards.shards:
            raise InputError(f"{shards.folder}: no text in this split. Prepare the corpus again.")
        self.shards = shards
        self.pairs = pairs
        self.paired = pairs.has_classifier
        self.special_tokens = 3 if self.paired else 2  # at least
        self.room = sequence_length - self.special_tokens
        self.reach = max(1, round(_share_read(pairs) * self.room))
        self._corpus = DocumentTable(
            shards,
            self.reach,
            least_sentences=2 if self.paired else 1,
            joined=pairs.chosen_format == "full_sentences",
        )
        if pairs.chosen_objective == "nsp" and self._corpus.documents < 2:
            raise InputError(
                f"{shards.folder}: {self._corpus.documents} documents, but "
                "random next sentences need at least two. Add documents or set pairs.objective: none."
            )
        key = root_key(shards.fingerprint, seed, phase)
        order_key, self._sample_key, self._anchor_key = draw(key, np.arange(3))
        mixture = shards.weights(weights or {}, f"phases.{phase}.weights")
        mixture = mixture_weights(shards.sources, mixture, self._corpus.samples)
        self._order = Order(self._corpus.samples, mixture, order_key)
        if not self.samples_per_epoch:
            raise InputError(
                f"{shards.folder}: no document has the {self._corpus.least_sentences} sentences a sample "
                "needs. Add text or set pairs.objective: none."
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
        if self.paired:
            return self._pairs(samples, key, documents, anchor, target, last)
        return self._full_sentences(samples, key, documents, anchor, target)

    def gather(self, plan: SamplePlan) -> Rows:
        """Fetch the tokens of a plan end to end: [CLS] A [SEP] B [SEP], or [CLS] A [SEP].

        In full sentences across documents, a [SEP] stands between documents, too.
        """
        special = self.shards.special_ids
        starts = np.concatenate(([0], np.cumsum(plan.lengths)))
        begins = starts[:-1]
        source, separators, token_types = self._pair_layout(plan, begins) if self.paired else self._layout(plan)
        index = np.arange(starts[-1])
        sequence = np.repeat(np.arange(len(begins)), plan.lengths)
        source += index
        # Special tokens are in no shard: point them at a token that is.
        source[begins] = source[begins + 1]
        source[separators] = source[1]
        input_ids = self._corpus.tokens.array.take(source).astype(np.int64)
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

    def _pair_layout(self, plan: SamplePlan, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_layout`, of [CLS] A [SEP] B [SEP]; `begins` int64 [S], where each sequence begins."""
        tokens = self._corpus.tokens
        from_a = tokens.spans(plan.shard_a, plan.begin_a, plan.length_a)
        from_b = tokens.spans(plan.shard_b, plan.begin_b, plan.length_b)
        begins_b = begins + plan.length_a + 2
        runs = _interleave(plan.length_a + 2, plan.length_b + 1)
        source = np.repeat(_interleave(from_a - begins - 1, from_b - begins_b), runs)
        token_types = np.repeat(np.tile((0, 1), len(begins)), runs)
        return source, np.concatenate((begins_b - 1, begins_b + plan.length_b)), token_types

    def _layout(self, plan: SamplePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the token that each row of the token axis is read from, less the row; rows of [SEP]; token types)."""
        corpus, shard, begin = self._corpus, plan.shard_a, plan.begin_a
        first = corpus.tokens.spans(shard, begin, plan.length_a)
        separators = plan.lengths - plan.length_a - self.special_tokens
        row, piece = pieces(corpus, shard, begin, plan.length_a, separators)
        opens = np.diff(row, prepend=-1) > 0
        ends = np.append(piece[1:], 0)
        closes = np.append(opens[1:], True)
        ends[closes] = (begin + plan.length_a)[row[closes]]
        runs = ends - piece + 1 + opens  # [CLS] before a sequence's first piece, [SEP] after every one
        stop = np.cumsum(runs)
        source = np.repeat(first[row] + piece - begin[row] - (stop - 1 - (ends - piece)), runs)
        return source, stop - 1, np.zeros(stop[-1], np.int64)

    def _anchors(self, samples: np.ndarray) -> tuple[Documents, np.ndarray, np.ndarray]:
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
        self,
        number: np.ndarray,
        key: np.ndarray,
        documents: Documents,
        anchor: np.ndarray,
        target: np.ndarray,
        last: np.ndarray,
    ) -> SamplePlan:
        corpus, shard = self._corpus, documents.shard
        begin = corpus.offset(shard, anchor)
        end = corpus.first_at_least(shard, anchor + 1, documents.last, begin + target)
        end = np.maximum(end, anchor + 2)
        split = anchor + 1 + below(draw(key, _SPLIT), end - anchor - 1)
        label = uniform(draw(key, _RANDOM_NEXT)) < self.pairs.random_next_share
        if self.pairs.chosen_objective == "sop":
            first_a, end_a = np.where(label, split, anchor), np.where(label, end, split)
            shard_b, first_b, end_b = shard, np.where(label, anchor, split), np.where(label, split, end)
        else:
            # A random pair leaves its second half unread. No sample after a document's last one would read
            # it, so there either half is kept.
            tail = label & last & (draw(key, _TAIL) >> np.uint64(63)).astype(bool)
            first_a, end_a = np.where(tail, split, anchor), np.where(tail, end, split)
            length_a = corpus.offset(shard, end_a) - corpus.offset(shard, first_a)
            other_shard, other_first, other_end = self._random_next(key, documents, target - length_a)
            shard_b = np.where(label, other_shard, shard)
            first_b, end_b = np.where(label, other_first, split), np.where(label, other_end, end)
        begin_a, begin_b = corpus.offset(shard, first_a), corpus.offset(shard_b, first_b)
        lengths = (corpus.offset(shard, end_a) - begin_a, corpus.offset(shard_b, end_b) - begin_b)
        begin_a, length_a, begin_b, length_b = self._shortened(key, begin_a, lengths[0], begin_b, lengths[1])
        whole = length_a + length_b + self.special_tokens
        return SamplePlan(
            number, key, shard, begin_a, length_a, shard_b, begin_b, length_b, label.astype(np.int64), whole
        )

    def _random_next(
        self, key: np.ndarray, documents: Documents, room: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, first sentence, one past the last) of `room` tokens or a little more from other documents."""
        corpus = self._corpus
        other = corpus.look_up(corpus.another(documents, draw(key, _OTHER)))
        first = other.first + below(draw(key, _BEGIN), other.last - other.first)
        filled = corpus.offset(other.shard, first) + np.maximum(room, 1)
        return other.shard, first, corpus.first_at_least(other.shard, first + 1, other.last, filled)

    def _shortened(
        self, key: np.ndarray, begin_a: np.ndarray, length_a: np.ndarray, begin_b: np.ndarray, length_b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(begin, length) of A and of B, after they were cut to fit the room."""
        begin_a, length_a = _window(begin_a, length_a, 2 * self.room, draw(key, _WINDOW_A))
        begin_b, length_b = _window(begin_b, length_b, 2 * self.room, draw(key, _WINDOW_B))
        cut_a, cut_b = _truncation(length_a, length_b, self.room)
        begin_a = begin_a + binomial(cut_a, key, _TRUNCATE_A)
        begin_b = begin_b + binomial(cut_b, key, _TRUNCATE_B)
        return begin_a, length_a - cut_a, begin_b, length_b - cut_b

    def _full_sentences(
        self, number: np.ndarray, key: np.ndarray, documents: Documents, anchor: np.ndarray, target: np.ndarray
    ) -> SamplePlan:
        corpus, shard = self._corpus, documents.shard
        begin = corpus.offset(shard, anchor)
        separators = nothing = np.zeros_like(begin)
        if self.pairs.chosen_format == "full_sentences":
            end, separators = fill_across_documents(corpus, shard, anchor, target)
        else:
            end = corpus.first_at_least(shard, anchor + 1, documents.last + 1, begin + target + 1) - 1
        length = corpus.offset(shard, np.maximum(end, anchor + 1)) - begin
        begin, length = _window(begin, length, self.room, draw(key, _WINDOW_A))
        whole = length + separators + self.special_tokens
        return SamplePlan(number, key, shard, begin, length, shard, begin, nothing, nothing, whole)


def _share_read(pairs: config.PairsConfig) -> float:
    """The share of a full sequence's tokens that a sample reads on average."""
    # A true pair reads all of its target, a random one half of it on average, a swapped one all of it; full sentences
    # lose the last one, which does not fit.
    return {"nsp": 1 - pairs.random_next_share / 2, "sop": 1.0, "none": 0.9}[pairs.chosen_objective]


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
