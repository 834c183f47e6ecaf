"""Samples planned as spans of the corpus (`SamplePlan`), and their concatenated tokens (`Rows`)."""

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
    """The spans and lengths of B samples, int64 [B] each unless noted.

    `start_a` and `start_b` are token offsets within the shard. Segment lengths exclude special tokens; without pairs,
    `length_b` is 0.
    """

    number: np.ndarray  # of each sample in its phase, counted across epochs
    key: np.ndarray  # uint64, random key
    shard_a: np.ndarray
    start_a: np.ndarray
    length_a: np.ndarray
    shard_b: np.ndarray
    start_b: np.ndarray
    length_b: np.ndarray
    label: np.ndarray  # 0: B follows A, or no pairs; 1: B is random (nsp) or A follows B (sop); IGNORED: no label
    lengths: np.ndarray  # tokens of each sample, including special tokens
    document: np.ndarray  # of the first token, if the segment crosses documents; otherwise unused
    separators: np.ndarray  # number of separators between documents of the segment
    at_end: np.ndarray  # bool, whether the sample's span stops at a sentence boundary

    @property
    def ordinary(self) -> np.ndarray:
        """Number of ordinary (not special) tokens of each sample, int64 [B]."""
        return self.length_a + self.length_b

    def __getitem__(self, rows: np.ndarray) -> SamplePlan:
        return SamplePlan(**{name: values[rows] for name, values in self.__dict__.items()})

    @staticmethod
    def concatenate(plans: Sequence[SamplePlan]) -> SamplePlan:
        """Concatenate several plans."""
        names = [field.name for field in fields(SamplePlan)]
        return SamplePlan(**{name: np.concatenate([getattr(plan, name) for plan in plans]) for name in names})


@dataclass(frozen=True)
class Rows:
    """S concatenated sequences with T tokens in total, before masking."""

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
    cls_rows = starts[:-1]
    source, separators, token_types = _pair_layout(text, plan, cls_rows) if paired else _layout(text, plan)
    index = np.arange(starts[-1])
    sequence = np.repeat(np.arange(len(cls_rows)), plan.lengths)
    source += index
    # Special tokens are not in the shards: point them at any token.
    source[cls_rows] = source[cls_rows + 1]
    source[separators] = source[1]
    input_ids = text.tokens.array.take(source).astype(np.int64)
    if (largest := input_ids.max()) >= shards.vocabulary_size:
        raise InputError(
            f"{shards.folder}: token {largest} in a shard, but the vocabulary has "
            f"{shards.vocabulary_size} entries; a shard is damaged. Prepare the corpus again."
        )
    input_ids[cls_rows] = special["cls"]
    input_ids[separators] = special["sep"]
    ordinary = np.ones(starts[-1], bool)
    ordinary[cls_rows] = False
    ordinary[separators] = False
    return Rows(input_ids, token_types, index - cls_rows[sequence], starts, sequence, ordinary)


def _pair_layout(text: ShardText, plan: SamplePlan, cls_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same as `_layout` for [CLS] A [SEP] B [SEP]; `cls_rows` int64 [S] are the starts of the sequences."""
    from_a = text.tokens.spans(plan.shard_a, plan.start_a, plan.length_a)
    from_b = text.tokens.spans(plan.shard_b, plan.start_b, plan.length_b)
    cls_rows_b = cls_rows + plan.length_a + 2
    spans = _interleave(plan.length_a + 2, plan.length_b + 1)
    source = np.repeat(_interleave(from_a - cls_rows - 1, from_b - cls_rows_b), spans)
    token_types = np.repeat(np.tile((0, 1), len(cls_rows)), spans)
    return source, np.concatenate((cls_rows_b - 1, cls_rows_b + plan.length_b)), token_types


def _layout(text: ShardText, plan: SamplePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (index of each row's token, minus the row; rows of [SEP]; token types) for [CLS] A [SEP]."""
    start = plan.start_a
    first = text.tokens.spans(plan.shard_a, start, plan.length_a)
    row, document_start = document_starts(text, plan.shard_a, start, plan.length_a, plan.document, plan.separators)
    is_first = np.diff(row, prepend=-1) > 0
    ends = np.append(document_start[1:], 0)
    is_last = np.append(is_first[1:], True)
    ends[is_last] = (start + plan.length_a)[row[is_last]]
    spans = ends - document_start + 1 + is_first  # [CLS] before a sequence's first document, [SEP] after every one
    row_ends = np.cumsum(spans)
    source = np.repeat(first[row] + document_start - start[row] - (row_ends - 1 - (ends - document_start)), spans)
    return source, row_ends - 1, np.zeros(row_ends[-1], np.int64)


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack((first, second), axis=1).reshape(-1)
