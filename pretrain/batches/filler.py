"""Filler: sequences that are excluded from all losses, and added to micro-batches so that these have few shapes.

The number of tokens of a micro-batch differs from step to step. On a GPU, each new shape costs time: memory of other
sizes is allocated, and a graph captured for one shape (`engine.cuda_graphs`) cannot be replayed for another.
"""

import dataclasses

import torch
from torch import Tensor

from pretrain.batches.batch import Filler, MicroBatch
from pretrain.batches.pairs import IGNORED

_MIN_MULTIPLE = 16  # numbers of tokens and of masked rows are multiples of 16, which suit tensor cores

# Maximum relative growth by rounding; additional sequences add a few more tokens. In a run of mini.yaml, where the
# masking share and the number of sequences change, 600 micro-batches have 46 shapes instead of 457, with 2 % more
# tokens and 4 % more masked rows.
_TOKENS, _ROWS, _SEQUENCES = 1 / 16, 1 / 8, 1 / 4


def with_filler(batch: MicroBatch, sequence_length: int) -> MicroBatch:
    """Append filler to a micro-batch, to round up its numbers of tokens, sequences and masked rows.

    Filler has at least one sequence, and none is longer than `sequence_length`. Additional masked rows all refer to its
    last token. Their labels, and the labels of the additional sequences, are `IGNORED`.

    Args:
        batch: a micro-batch without filler.
        sequence_length: maximum sequence length of the phase, at least 2.
    """
    tokens, sequences, rows = len(batch.input_ids), len(batch.lengths), len(batch.masked_rows)
    to_tokens = _multiple(tokens, _TOKENS, _MIN_MULTIPLE)
    # At least one sequence, and enough to hold the missing tokens.
    min_sequences = -(-to_tokens // (sequence_length - 1))
    more_sequences = _missing_to_multiple(sequences + min_sequences, _multiple(sequences, _SEQUENCES)) + min_sequences
    more_tokens = _missing_to_multiple(tokens + more_sequences, to_tokens) + more_sequences
    lengths = [(more_tokens + index) // more_sequences for index in range(more_sequences)]
    # A sequence has at most as many query positions as the longest one has tokens; its first token is always a query.
    max_rows = 1 << (max(*batch.lengths, *lengths).bit_length() - 1)
    more_rows = _missing_to_multiple(rows, min(max_rows, _multiple(rows, _ROWS, _MIN_MULTIPLE)))
    ends = tokens + torch.tensor(lengths).cumsum(0)
    return dataclasses.replace(
        batch,
        input_ids=_append(batch.input_ids, more_tokens, 0),
        token_types=_append(batch.token_types, more_tokens, 0),
        positions=torch.cat([batch.positions, *map(torch.arange, lengths)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends.int()]),
        masked_rows=_append(batch.masked_rows, more_rows, tokens + more_tokens - 1),
        masked_labels=_append(batch.masked_labels, more_rows, IGNORED),
        nsp_labels=_append(batch.nsp_labels, more_sequences, IGNORED) if len(batch.nsp_labels) else batch.nsp_labels,
        token_keys=_append(batch.token_keys, more_tokens, 0),
        lengths=(*batch.lengths, *lengths),
        filler=Filler(more_sequences, more_rows),
    )


def _multiple(count: int, share: float, minimum: int = 1) -> int:
    """Return the power of two to whose multiple `count` is rounded: at most `share` of `count`, at least `minimum`."""
    return max(minimum, 1 << max(0, int(count * share).bit_length() - 1))


def _missing_to_multiple(count: int, multiple: int) -> int:
    return -count % multiple


def _append(values: Tensor, count: int, value: int) -> Tensor:
    return torch.cat([values, values.new_full((count,), value)])
