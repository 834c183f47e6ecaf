"""Planned samples as spans of the corpus (`SamplePlan`), and their concatenated tokens (`Rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from pretrain.batches.packing import document_starts
from pretrain.batches.text import ShardText
from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards


@dataclass(frozen=True)
class SamplePlan:
    """The tokens of B samples and the lengths of the samples; int64 [B] each, `key` uint64 [B].

    `begin_a` and `begin_b` are token offsets within the shard. Segment lengths exclude special tokens; without pairs,
    `length_b` is 0.
    """

    number: np.ndarray  # of each sample in its phase, counted across epochs
    key: np.ndarray  # the random key of each sample
    shard_a: np.ndarray
    begin_a: np.ndarray
    length_a: np.ndarray
    shard_b: np.ndarray
    begin_b: np.ndarray
    length_b: np.ndarray
    label: np.ndarray  # 0 B follows A, or no pairs; 1 B is another document's (nsp), A follows B (sop); IGNORED alone
    lengths: np.ndarray  # special tokens included
    document: np.ndarray  # of the first token, if a segment crosses documents; otherwise unused
    separators: np.ndarray  # between documents of one segment
    at_end: np.ndarray  # bool, whether the sample's span stops at a sentence boundary

    @property
    def ordinary(self) -> np.ndarray:
        """Tokens of each sample without special ones, int64 [B]."""
        return self.length_a + self.length_b

    def __getitem__(self, rows: np.ndarray) -> SamplePlan:
        return SamplePlan(**{name: values[rows] for name, values in self.__dict__.items()})

    @staticmethod
    def joined(plans: Sequence[SamplePlan]) -> SamplePlan:
        """Concatenate several plans."""
        names = [field.name for field in fields(SamplePlan)]
        return SamplePlan(**{name: np.concatenate([getattr(plan, name) for plan in plans]) for name in names})


@dataclass(frozen=True)
class Rows:
    """S concatenated sequences of T tokens, before masking."""

    input_ids: np.ndarray  # int64 [T]
    token_types: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    starts: np.ndarray  # int64 [S+1]
    sequence: np.ndarray  # int64 [T], the sequence each token belongs to
    ordinary: np.ndarray  # bool [T], False on [CLS] and [SEP]


def gather(shards: TokenShards, text: ShardText, plan: SamplePlan, *, paired: bool) -> Rows:
    """Fetch the concatenated tokens of a plan: [CLS] A [SEP] B [SEP] if `paired`, else [CLS] A [SEP].

    With full sentences across documents, there is a [SEP] between documents, too.

    Raises `InputError` if a token is not in the vocabulary.
    """
    special = shards.special_ids
    starts = np.concatenate(([0], np.cumsum(plan.lengths)))
    begins = starts[:-1]
    source, separators, token_types = _pair_layout(text, plan, begins) if paired else _layout(text, plan)
    index = np.arange(starts[-1])
    sequence = np.repeat(np.arange(len(begins)), plan.lengths)
    source += index
    # Special tokens are not in the shards: point them at any token.
    source[begins] = source[begins + 1]
    source[separators] = source[1]
    input_ids = text.tokens.array.take(source).astype(np.int64)
    if (largest := input_ids.max()) >= shards.vocabulary_size:
        raise InputError(
            f"{shards.folder}: token {largest} in a shard, but the vocabulary has "
            f"{shards.vocabulary_size} entries; a shard is damaged. Prepare the corpus again."
        )
    input_ids[begins] = special["cls"]
    input_ids[separators] = special["sep"]
    ordinary = np.ones(starts[-1], bool)
    ordinary[begins] = False
    ordinary[separators] = False
    return Rows(input_ids, token_types, index - begins[sequence], starts, sequence, ordinary)


def _pair_layout(text: ShardText, plan: SamplePlan, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the `_layout` of [CLS] A [SEP] B [SEP]; `begins` int64 [S] are the starts of the sequences."""
    from_a = text.tokens.spans(plan.shard_a, plan.begin_a, plan.length_a)
    from_b = text.tokens.spans(plan.shard_b, plan.begin_b, plan.length_b)
    begins_b = begins + plan.length_a + 2
    runs = _interleave(plan.length_a + 2, plan.length_b + 1)
    source = np.repeat(_interleave(from_a - begins - 1, from_b - begins_b), runs)
    token_types = np.repeat(np.tile((0, 1), len(begins)), runs)
    return source, np.concatenate((begins_b - 1, begins_b + plan.length_b)), token_types


def _layout(text: ShardText, plan: SamplePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (index of the token that each row is read from, minus the row; rows of [SEP]; token types)."""
    begin = plan.begin_a
    first = text.tokens.spans(plan.shard_a, begin, plan.length_a)
    row, start = document_starts(text, plan.shard_a, begin, plan.length_a, plan.document, plan.separators)
    opens = np.diff(row, prepend=-1) > 0
    ends = np.append(start[1:], 0)
    closes = np.append(opens[1:], True)
    ends[closes] = (begin + plan.length_a)[row[closes]]
    runs = ends - start + 1 + opens  # [CLS] before a sequence's first document, [SEP] after every one
    stop = np.cumsum(runs)
    source = np.repeat(first[row] + start - begin[row] - (stop - 1 - (ends - start)), runs)
    return source, stop - 1, np.zeros(stop[-1], np.int64)


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack((first, second), axis=1).reshape(-1)
