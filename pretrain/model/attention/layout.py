"""The arguments of attention besides the tensors: which tokens attend to which, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLayout(NamedTuple):
    """The sequences of an unpadded micro-batch of T tokens, and its query positions."""

    cu_seqlens: Tensor  # int32 [S + 1], where the sequences begin on the token axis; the first is 0, the last T
    max_seqlen: int  # length of the longest sequence
    rows: Tensor | None  # int64 [R], ascending: the query positions; None if every token is one
    keys: Tensor  # int32 [T], the dropout seed of each token as a query


class AttentionOptions(NamedTuple):
    """How to attend."""

    heads: int
    dropout: float = 0.0  # probability of dropping an attention weight
    fused: bool = False  # let torch.compile fuse the steps between the matmuls


def query_boundaries(rows_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int32 [S + 1]: where the sequences begin among the query positions `rows_R`, int64 and ascending."""
    return torch.searchsorted(rows_R, cu_seqlens.long()).int()
