"""Inputs of the encoder, and arguments of the attention operators other than query, key and value."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pretrain.model.positions import Rotation


class UnpaddedBatch(Protocol):
    """The fields that the encoder reads from a batch, such as a `pretrain.batches.batch.MicroBatch`."""

    @property
    def input_ids(self) -> Tensor: ...  # int64 [T]
    @property
    def token_types(self) -> Tensor: ...  # int64 [T]
    @property
    def positions(self) -> Tensor: ...  # int64 [T]
    @property
    def cu_seqlens(self) -> Tensor: ...  # int32 [S + 1]
    @property
    def token_keys(self) -> Tensor: ...  # int32 [T], dropout seeds
    @property
    def lengths(self) -> tuple[int, ...]: ...  # number of tokens of each sequence


class Tokens(NamedTuple):
    """An `UnpaddedBatch` derived from another one."""

    input_ids: Tensor
    token_types: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    token_keys: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: UnpaddedBatch, input_ids: Tensor, token_keys: Tensor) -> Tokens:
        """Return `batch` with other tokens and dropout seeds."""
        return cls(input_ids, batch.token_types, batch.positions, batch.cu_seqlens, token_keys, batch.lengths)


class RelativeRows(NamedTuple):
    """The distance embeddings that a micro-batch uses, for disentangled positions."""

    embeddings: Tensor  # [P, H], normalized if the model has `relative_norm`
    row_by_distance: Tensor  # int64 [2M - 1], on the host: row of each distance from 1 - M to M - 1 (query - key)


class TokenLayout(NamedTuple):
    """The sequences of an unpadded micro-batch of T tokens, and its query positions."""

    cu_seqlens: Tensor  # int32 [S + 1], offsets of the sequences on the token axis; the first is 0, the last T
    lengths: tuple[int, ...]  # length of each sequence, on the host: reading `cu_seqlens` would wait for a GPU
    queries: Tensor | None  # int64 [R], ascending: the query positions; None if every token is a query
    seeds: Tensor  # int32 [T], the dropout seed of each token as a query
    rotation: Rotation | None = None  # rotary angles of each token, [T, K]
    distance_bias: Tensor | None = None  # [N, 2M - 1], bias of the scores at each distance from 1 - M to M - 1
    relative: RelativeRows | None = None  # distance embeddings, for disentangled positions

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)


class AttentionOptions(NamedTuple):
    """Options of the attention operators."""

    heads: int
    dropout: float = 0.0  # probability of dropping an attention weight
    fused: bool = False  # let torch.compile fuse the operations between the matmuls
    window: int = 0  # number of tokens that a query attends to on each side; 0 means all


def query_boundaries(queries_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int32 [S + 1], offsets of the sequences among the query positions `queries_R` (int64, ascending)."""
    return torch.searchsorted(queries_R, cu_seqlens.long()).int()
