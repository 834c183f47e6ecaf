"""Plans of samples as spans of the corpus (`SamplePlan`), and their concatenated tokens (`PackedTokens`)."""

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
    """The spans and lengths of B samples; arrays are int64 [B] unless noted.

    `start_a` and `start_b` are token offsets within the shards `shard_a` and `shard_b`. `length_a` and `length_b`
    exclude special tokens; without pairs, `length_b` is 0.
    """

    sample_index: np.ndarray  # index of the sample within its phase, counted across epochs
    key: np.ndarray  # uint64, random key of the sample
    shard_a: np.ndarray
    start_a: np.ndarray
    length_a: np.ndarray
    shard_b: np.ndarray
    start_b: np.ndarray
    length_b: np.ndarray
    label: np.ndarray  # 0: B follows A, or no pairs; 1: B is random (nsp) or A follows B (sop); IGNORED: no label
    lengths: np.ndarray  # number of tokens, including special tokens
    document: np.ndarray  # index of the document that contains the first token; used only if segments cross documents
    separators: np.ndarray  # number of separators between the documents of the segment
    ends_at_sentence: np.ndarray  # bool, whether the end of the sample is a sentence boundary

    @property
    def content_length(self) -> np.ndarray:
        """Number of tokens of each sample that are not special, int64 [B]."""
        return self.length_a + self.length_b

    def __getitem__(self, rows: np.ndarray) -> SamplePlan:
        return SamplePlan(**{name: values[rows] for name, values in self.__dict__.items()})

    @staticmethod
    def concatenate(plans: Sequence[SamplePlan]) -> SamplePlan:
        """Concatenate several plans."""
        names = [field.name for field in fields(SamplePlan)]
        return SamplePlan(**{name: np.concatenate([getattr(plan, name) for plan in plans]) for name in names})


@dataclass(frozen=True)
class PackedTokens:
    """S concatenated sequences with T tokens in total, before masking."""

    input_ids: np.ndarray  # int64 [T]
    token_types: np.ndarray  # int64 [T], 0 for the first segment, 1 for the second
    positions: np.ndarray  # int64 [T], position of each token within its sequence
    starts: np.ndarray  # int64 [S+1], start of each sequence; the last value is T
    sequence: np.ndarray  # int64 [T], index of the sequence that each token belongs to
    is_content: np.ndarray  # bool [T], False for [CLS] and [SEP]


def gather(shards: TokenShards, text: ShardText, plan: SamplePlan, *, paired: bool) -> PackedTokens:
    """Fetch the concatenated tokens of a plan: [CLS] A [SEP] B [SEP] if `paired`, else [CLS] A [SEP].

    If a sequence crosses documents, there is also a [SEP] between documents.

    Raises `InputError` if a token is not in the vocabulary.
    """
    special = shards.special_ids
    starts = np.concatenate(([0], np.cumsum(plan.lengths)))
    cls_positions = starts[:-1]
    source_index, seps, token_types = _pair_layout(text, plan, cls_positions) if paired else _layout(text, plan)
    positions = np.arange(starts[-1])
    sequence = np.repeat(np.arange(len(cls_positions)), plan.lengths)
    source_index += positions  # the layouts return it relative to the position
    # Special tokens are not in the shards: fetch any token, which is replaced below.
    source_index[cls_positions] = source_index[cls_positions + 1]
    source_index[seps] = source_index[1]
    input_ids = text.tokens.array.take(source_index).astype(np.int64)
    if (largest := input_ids.max()) >= shards.vocabulary_size:
        raise InputError(
            f"{shards.folder}: token id {largest} in a shard, but the vocabulary has "
            f"{shards.vocabulary_size} entries; a shard is damaged. Prepare the corpus again."
        )
    input_ids[cls_positions] = special["cls"]
    input_ids[seps] = special["sep"]
    is_content = np.ones(starts[-1], bool)
    is_content[cls_positions] = False
    is_content[seps] = False
    return PackedTokens(input_ids, token_types, positions - cls_positions[sequence], starts, sequence, is_content)


def _pair_layout(text: ShardText, plan: SamplePlan, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Like `_layout`, for [CLS] A [SEP] B [SEP]; `starts`, int64 [S], are the starts of the sequences."""
    source_a = text.tokens.span_starts(plan.shard_a, plan.start_a, plan.length_a)
    source_b = text.tokens.span_starts(plan.shard_b, plan.start_b, plan.length_b)
    b_starts = starts + plan.length_a + 2
    lengths = _interleave(plan.length_a + 2, plan.length_b + 1)
    offsets = np.repeat(_interleave(source_a - starts - 1, source_b - b_starts), lengths)
    token_types = np.repeat(np.tile((0, 1), len(starts)), lengths)
    return offsets, np.concatenate((b_starts - 1, b_starts + plan.length_b)), token_types


def _layout(text: ShardText, plan: SamplePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (per output position, index of its source token minus the position; positions of [SEP]; token types)."""
    start = plan.start_a
    source_start = text.tokens.span_starts(plan.shard_a, start, plan.length_a)
    sequence, document_start = document_starts(text, plan.shard_a, start, plan.length_a, plan.document, plan.separators)
    is_first = np.diff(sequence, prepend=-1) > 0
    ends = np.append(document_start[1:], 0)
    is_last = np.append(is_first[1:], True)
    ends[is_last] = (start + plan.length_a)[sequence[is_last]]
    lengths = ends - document_start + 1 + is_first  # [CLS] before a sequence's first document, [SEP] after every one
    output_ends = np.cumsum(lengths)
    offsets = source_start[sequence] + document_start - start[sequence] - (output_ends - 1 - (ends - document_start))
    return np.repeat(offsets, lengths), output_ends - 1, np.zeros(output_ends[-1], np.int64)


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack((first, second), axis=1).reshape(-1)
