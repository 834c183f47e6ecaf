"""The arguments of attention besides the hidden states: its weights, which tokens attend to which, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.positions import Rotation


class RelativeRows(NamedTuple):
    """The embeddings of distances that a micro-batch reads, for disentangled positions."""

    embeddings: Tensor  # [P, H], normalised if the model does that
    row_of: Tensor  # int64 [2M - 1] on the host: the row of the distances 1 - M to M - 1, query minus key; ascending


class TokenLayout(NamedTuple):
    """The sequences of an unpadded micro-batch of T tokens, and its query positions."""

    cu_seqlens: Tensor  # int32 [S + 1], where the sequences begin on the token axis; the first is 0, the last T
    lengths: tuple[int, ...]  # tokens of each sequence, on the host: to read `cu_seqlens` would wait for a GPU
    rows: Tensor | None  # int64 [R], ascending: the query positions; None if every token is one
    keys: Tensor  # int32 [T], the dropout seed of each token as a query
    rotation: Rotation | None = None  # of queries and keys, [T, K]
    distance_bias: Tensor | None = None  # [N, 2M - 1], added to the scores: of the distances 1 - M to M - 1
    relative: RelativeRows | None = None  # for disentangled positions

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)


class AttentionOptions(NamedTuple):
    """How to attend."""

    heads: int
    dropout: float = 0.0  # probability of dropping an attention weight
    fused: bool = False  # let torch.compile fuse the steps between the matmuls
    window: int = 0  # tokens that a query attends to on each side; 0 if to all


class HeadNorms(NamedTuple):
    """The norms of queries and keys: gains [D] that all heads share, and the epsilon."""

    query: Tensor
    key: Tensor
    eps: float


class RelativeProjection(NamedTuple):
    """How embeddings of distances are projected: which terms there are, and weights of their own if there are such."""

    terms: str  # as `ModelConfig.relative_terms`
    key: tuple[Tensor, Tensor | None] | None = None  # weight [H, H] and bias
    query: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> RelativeProjection:
        """Those of a module whose parameters are `parameters.layer_parameters`."""
        own = (
            (layer_weight, getattr(layer, f"{name}_bias", None))
            if (layer_weight := getattr(layer, f"{name}_weight", None)) is not None
            else None
            for name in ("position_key", "position_query")
        )
        return cls(model.relative_terms, *own)


class ProjectionWeights(NamedTuple):
    """The projections to query, key and value. Either stacked, or the query apart if it has more heads."""

    weights: tuple[Tensor, ...]  # one [3H, H], or [H, H] and [2 * kv_heads * D, H]
    biases: tuple[Tensor | None, ...]
    norms: HeadNorms | None = None
    relative: RelativeProjection | None = None  # of embeddings of distances, for disentangled positions

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> ProjectionWeights:
        """Those of a module whose parameters are `parameters.layer_parameters`."""
        names = ("qkv",) if model.kv_heads in (0, model.heads) else ("q", "kv")
        weights = tuple(getattr(layer, f"{name}_weight") for name in names)
        norms = HeadNorms(layer.q_norm_weight, layer.k_norm_weight, model.layer_norm_eps) if model.qk_norm else None
        biases = tuple(getattr(layer, f"{name}_bias", None) for name in names)
        relative = RelativeProjection.of(layer, model) if model.disentangled else None
        return cls(weights, biases, norms, relative)

    @property
    def only_product(self) -> bool:
        """Whether query, key and value are their product with its bias, and nothing else."""
        return len(self.weights) == 1 and self.norms is None


def query_boundaries(rows_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int32 [S + 1]: where the sequences begin among the query positions `rows_R`, int64 and ascending."""
    return torch.searchsorted(rows_R, cu_seqlens.long()).int()
