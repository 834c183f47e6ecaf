"""Adds filler to micro-batches: dummy sequences, ignored by all losses, so that there are few distinct shapes.

The number of tokens of a micro-batch differs from step to step. On a GPU, each new shape costs time: memory of new
sizes is allocated, and a graph captured for one shape (`engine.cuda_graphs`) cannot be replayed for another.
"""

import dataclasses

import torch
from torch import Tensor

from pretrain.batches.batch import Filler, MicroBatch
from pretrain.batches.pairs import IGNORED

_MIN_MULTIPLE = 16  # smallest multiple to which numbers of tokens and of predictions are rounded; suits tensor cores

# Maximum relative growth by rounding, except that filler sequences may add a few more tokens. In a run of mini.yaml,
# where the masking share and the number of sequences change, 600 micro-batches have 46 shapes instead of 457, with 2 %
# more tokens and 4 % more entries in `masked_rows`.
_TOKEN_GROWTH, _ROW_GROWTH, _SEQUENCE_GROWTH = 1 / 16, 1 / 8, 1 / 4


def with_filler(batch: MicroBatch, sequence_length: int) -> MicroBatch:
    """Append filler to a micro-batch, to round up its numbers of tokens, sequences and entries of `masked_rows`.

    At least one filler sequence is added, none longer than `sequence_length`. The entries added to `masked_rows` are
    all the index of the last filler token. The added labels, of these entries and of the sequences, are `IGNORED`.

    Args:
        batch: a micro-batch without filler.
        sequence_length: maximum sequence length of the phase, at least 2.
    """
    tokens, sequences, rows = len(batch.input_ids), len(batch.lengths), len(batch.masked_rows)
    token_unit = _rounding_unit(tokens, _TOKEN_GROWTH, _MIN_MULTIPLE)
    min_filler_sequences = -(-token_unit // (sequence_length - 1))
    sequence_unit = _rounding_unit(sequences, _SEQUENCE_GROWTH)
    filler_sequences = _shortfall(sequences + min_filler_sequences, sequence_unit) + min_filler_sequences
    filler_tokens = _shortfall(tokens + filler_sequences, token_unit) + filler_sequences
    filler_lengths = [(filler_tokens + index) // filler_sequences for index in range(filler_sequences)]
    # The last filler sequence has `filler_rows` + 1 query positions; the longest sequence must be at least as long.
    max_row_unit = 1 << (max(*batch.lengths, *filler_lengths).bit_length() - 1)
    filler_rows = _shortfall(rows, min(max_row_unit, _rounding_unit(rows, _ROW_GROWTH, _MIN_MULTIPLE)))
    ends = tokens + torch.tensor(filler_lengths).cumsum(0)
    return dataclasses.replace(
        batch,
        input_ids=_append(batch.input_ids, filler_tokens, 0),
        token_types=_append(batch.token_types, filler_tokens, 0),
        positions=torch.cat([batch.positions, *map(torch.arange, filler_lengths)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends.int()]),
        masked_rows=_append(batch.masked_rows, filler_rows, tokens + filler_tokens - 1),
        masked_labels=_append(batch.masked_labels, filler_rows, IGNORED),
        nsp_labels=_append(batch.nsp_labels, filler_sequences, IGNORED) if len(batch.nsp_labels) else batch.nsp_labels,
        token_keys=_append(batch.token_keys, filler_tokens, 0),
        lengths=(*batch.lengths, *filler_lengths),
        filler=Filler(filler_sequences, filler_rows),
    )


def _rounding_unit(count: int, growth: float, minimum: int = 1) -> int:
    """Return the unit for rounding `count` up: a power of two, at most `growth` * `count`, but at least `minimum`."""
    return max(minimum, 1 << max(0, int(count * growth).bit_length() - 1))


def _shortfall(count: int, unit: int) -> int:
    return -count % unit


def _append(values: Tensor, count: int, value: int) -> Tensor:
    return torch.cat([values, values.new_full((count,), value)])
