"""Input of a training step: micro-batches of concatenated sequences, and the counts that normalize their losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pretrain.common.transfers import to_device

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Batch = TypeVar("Batch", bound="DataclassInstance")


class Filler(NamedTuple):
    """Size of the filler at the end of a micro-batch: dummy sequences that all losses ignore (`filler.py`)."""

    sequences: int = 0  # number of filler sequences
    rows: int = 0  # number of filler entries in `MicroBatch.masked_rows`


NO_FILLER = Filler()


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass of one rank: S concatenated sequences of T tokens, of which K are to be predicted.

    Sequences are in ascending order of length, unpadded (invariant 2 in docs/invariants.md). Filler is at the end.
    """

    input_ids: Tensor  # int64 [T], after masking
    token_types: Tensor  # int64 [T], 0 for the first segment, 1 for the second
    positions: Tensor  # int64 [T], 0 .. length-1 within each sequence
    cu_seqlens: Tensor  # int32 [S+1], start of each sequence; the last value is T
    masked_rows: Tensor  # int64 [K], ascending indices of the tokens to predict (rows of a [T, H] tensor)
    masked_labels: Tensor  # int64 [K], ids of these tokens before masking
    nsp_labels: Tensor  # int64 [S], NSP: 0 next, 1 random; SOP: 0 in order, 1 swapped; -100: none. Empty without pairs
    token_keys: Tensor  # int32 [T], pseudo-random bits that depend on (sample, position), to seed dropout
    lengths: tuple[int, ...]  # number of tokens of each sequence, ascending except for filler
    filler: Filler = NO_FILLER

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences that are not filler."""
        return self.lengths[: len(self.lengths) - self.filler.sequences]

    @property
    def targets(self) -> int:
        """Number of tokens to predict, without filler."""
        return len(self.masked_rows) - self.filler.rows

    def to(self, device: torch.device) -> MicroBatch:
        """Return the batch on `device`, copied asynchronously."""
        return copy_to(self, device)


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one optimizer step, with the global counts that normalize the losses (invariant 3)."""

    micro_batches: tuple[MicroBatch, ...]  # the same number on every rank
    sequences: int  # number of sequences, over all ranks
    tokens: int  # number of tokens, over all ranks
    masked: int  # number of tokens to predict, over all ranks
    epoch: int  # epoch of the first sample
    first_sample: int  # index of the first sample within the phase, counted across epochs
    labeled: int = 0  # number of sentence pairs with an NSP or SOP label, over all ranks
    text: str = ""  # name of the held-out text that the samples are from; "" in training
    copies: int = 1  # number of ranks that have identical samples; sums and counts over ranks include all copies

    def to(self, device: torch.device) -> StepBatch:
        """Return the batch with its micro-batches on `device`."""
        return dataclasses.replace(self, micro_batches=tuple(batch.to(device) for batch in self.micro_batches))

    def pinned(self) -> StepBatch:
        """Return the batch with its micro-batches in page-locked memory."""
        return dataclasses.replace(self, micro_batches=tuple(map(pinned, self.micro_batches)))


def copy_to(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a dataclass with its tensors on `device`, copied asynchronously."""
    copied = {name: to_device(value, device) for name, value in _tensor_fields(batch).items() if value.device != device}
    return dataclasses.replace(batch, **copied) if copied else batch


def pinned(batch: Batch) -> Batch:
    """Return a copy of a dataclass with its tensors in page-locked memory, for asynchronous copies to a GPU."""
    return dataclasses.replace(batch, **{name: value.pin_memory() for name, value in _tensor_fields(batch).items()})


def _tensor_fields(batch: DataclassInstance) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class MaskedSequence:
    """A sequence with tokens to predict.

    Attributes:
        ids: int64 [L], token ids after masking, including special tokens.
        masked_positions: int64 [K], ascending positions of the tokens to predict; never 0.
        labels: int64 [K], ids of these tokens before masking.
    """

    ids: np.ndarray
    masked_positions: np.ndarray
    labels: np.ndarray


def masked_batch(sequences: Sequence[MaskedSequence]) -> MicroBatch:
    """Concatenate sequences, which must be in ascending order of length, into one unpadded micro-batch."""
    lengths = np.array([len(sequence.ids) for sequence in sequences], np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    masked_rows = np.concatenate([s.masked_positions + start for s, start in zip(sequences, starts, strict=False)])
    tokens = int(starts[-1])
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences])),
        token_types=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.from_numpy(np.arange(tokens) - np.repeat(starts[:-1], lengths)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        masked_rows=torch.from_numpy(masked_rows),
        masked_labels=torch.from_numpy(np.concatenate([sequence.labels for sequence in sequences])),
        nsp_labels=torch.zeros(0, dtype=torch.int64),
        token_keys=torch.zeros(tokens, dtype=torch.int32),
        lengths=tuple(lengths.tolist()),
    )
