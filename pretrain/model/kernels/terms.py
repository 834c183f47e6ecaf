"""The terms that change the scores of a group: the window mask of a local layer, and biases by distance.

Shape letters: T tokens, N heads, inside a group of G units L keys and Q queries each, B = G * N; M - 1
is the largest distance in the table of biases.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.model.kernels.grouping import SequenceGroup


class ScoreTerms(NamedTuple):
    """Arguments of `kernels.softmax` for some of a group's B rows; all None if scores are plain products."""

    first_key_BQ: Tensor | None  # int32, index of the first key that each query attends to, within its unit
    last_key_BQ: Tensor | None  # int32, index of the last key, likewise
    bias_BQL: Tensor | None = None  # fp32, bias added to the scaled product


class GroupTerms:
    """The score terms of one group, for a slice of its B rows at a time.

    Args:
        group: the group.
        token_GQ: int64, the index of each query's token.
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
        self._bounds = _window_bounds(group, token_GQ, window, heads) if window else None
        self._bias = distance_bias
        self._key_GL, self._token_GQ = group.keys.index_GL, token_GQ

    def for_rows(self, rows: slice) -> ScoreTerms:
        """Return the score terms of these rows."""
        first_key_BQ, last_key_BQ = (None, None) if self._bounds is None else (x[rows] for x in self._bounds)
        if self._bias is None:
            return ScoreTerms(first_key_BQ, last_key_BQ)
        return ScoreTerms(first_key_BQ, last_key_BQ, self._bias.float().flatten()[self._table_indices(rows)])

    def add_gradient(self, grad_bias_NM: Tensor, rows: slice, grad_BQL: Tensor) -> None:
        """Add the gradients of these rows' scores to the gradient of the table of biases, fp32 [N, 2M - 1]."""
        grad_bias_NM.view(-1).index_add_(0, self._table_indices(rows).flatten(), grad_BQL.float().flatten())

    def _table_indices(self, rows: slice) -> Tensor:
        """Return the index in the flattened table of each score's bias, int64 [B, Q, L]."""
        assert self._bias is not None
        row_B = torch.arange(rows.start, min(rows.stop, len(self._key_GL) * self._heads), device=self._key_GL.device)
        unit_B, columns = row_B // self._heads, self._bias.shape[1]
        column_BQL = self._key_GL[unit_B][:, None] - self._token_GQ[unit_B][..., None] + columns // 2
        column_BQL.clamp_(0, columns - 1)  # distances of padding may exceed the table
        return column_BQL + (row_B % self._heads)[:, None, None] * columns


def _window_bounds(group: SequenceGroup, token_GQ: Tensor, window: int, heads: int) -> tuple[Tensor, Tensor] | None:
    """Return (first_key_BQ, last_key_BQ) of `ScoreTerms`; None if every query attends to its whole unit."""
    keys = group.keys
    if keys.index_GL.shape[1] <= window + 1:
        return None
    count_G1 = keys.valid_GL.sum(1, keepdim=True)
    position_GQ = token_GQ - keys.index_GL[:, :1]
    # Padding may repeat a query of another unit, but must attend to at least one key, or its softmax would be NaN.
    first_GQ = (position_GQ - window).clamp_min(0).minimum(count_G1 - 1)
    last_GQ = (position_GQ + window).minimum(count_G1 - 1).maximum(first_GQ)
    first_key_BQ, last_key_BQ = (x.int().repeat_interleave(heads, 0) for x in (first_GQ, last_GQ))
    return first_key_BQ, last_key_BQ
