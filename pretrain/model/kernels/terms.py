"""Terms added to query-key products in a group's scores: the window of a local layer, and relative positions.

Shape letters: T tokens, N heads, inside a group of G units L keys and Q queries each, B = G * N; M the largest distance
in a table of biases, plus one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.model.kernels.grouping import SequenceGroup


class ScoreTerms(NamedTuple):
    """Arguments of `kernels.softmax` for some rows of a group; all None if the scores are only products."""

    first_BQ: Tensor | None  # int32, the first and the last key that a query attends to
    last_BQ: Tensor | None
    bias_BQL: Tensor | None = None  # fp32, added to the scaled scores


class GroupTerms:
    """The terms of one group, for a slice of its B rows at a time.

    Args:
        group: the group.
        token_GQ: int64, the token row of each query.
        heads: N.
        window: as in `layout.AttentionOptions`.
        distance_bias: as `layout.TokenLayout.distance_bias`.
    """

    def __init__(
        self,
        group: SequenceGroup,
        token_GQ: Tensor,
        heads: int,
        window: int,
        distance_bias: Tensor | None,
    ) -> None:
        self._heads = heads
        self._bounds = _bounds(group, token_GQ, window, heads) if window else None
        self._bias = distance_bias
        self._key_GL, self._token_GQ = group.keys.index_GL, token_GQ

    def of(self, b: slice) -> ScoreTerms:
        """Return the terms of rows `b`."""
        first_BQ, last_BQ = (None, None) if self._bounds is None else (x[b] for x in self._bounds)
        if self._bias is None:
            return ScoreTerms(first_BQ, last_BQ)
        return ScoreTerms(first_BQ, last_BQ, self._bias.float().flatten()[self._entries(b)])

    def add_gradient(self, total_NM: Tensor, b: slice, grad_BQL: Tensor) -> None:
        """Add the gradient of the biases that rows `b` used to fp32 `total_NM` [N, 2M - 1]."""
        total_NM.view(-1).index_add_(0, self._entries(b).flatten(), grad_BQL.float().flatten())

    def _entries(self, b: slice) -> Tensor:
        """Return int64 [B, Q, L]: the entry of the flattened table for each score."""
        assert self._bias is not None
        row_B = torch.arange(b.start, min(b.stop, len(self._key_GL) * self._heads), device=self._key_GL.device)
        unit_B, columns = row_B // self._heads, self._bias.shape[1]
        column_BQL = self._key_GL[unit_B][:, None] - self._token_GQ[unit_B][..., None] + columns // 2
        column_BQL.clamp_(0, columns - 1)  # padding may exceed the table
        return column_BQL + (row_B % self._heads)[:, None, None] * columns


def _bounds(group: SequenceGroup, token_GQ: Tensor, window: int, heads: int) -> tuple[Tensor, Tensor] | None:
    """Return int32 [B, Q] twice: the first and the last key in the unit for each query; None if it attends to all."""
    keys = group.keys
    if keys.index_GL.shape[1] <= window + 1:
        return None
    count_G1 = keys.valid_GL.sum(1, keepdim=True)
    position_GQ = token_GQ - keys.index_GL[:, :1]
    # Padding may repeat a query of another unit: it, too, needs a key, or its weights would be NaN.
    first_GQ = (position_GQ - window).clamp_min(0).minimum(count_G1 - 1)
    last_GQ = (position_GQ + window).minimum(count_G1 - 1).maximum(first_GQ)
    first_BQ, last_BQ = (x.int().repeat_interleave(heads, 0) for x in (first_GQ, last_GQ))
    return first_BQ, last_BQ
