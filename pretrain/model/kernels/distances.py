"""The terms of disentangled attention: products of queries and keys with distance embeddings.

He et al. 2021, DeBERTa, arXiv:2006.03654, section 3.1: a score is q . k + q . k' + k . q', where k' (c2p) and q' (p2c)
are projections of a table's row for the distance from query to key. Each query and key is multiplied once by all table
rows for the distances in its group; the products are then gathered by distance.

Shape letters: N heads of width D, P rows of the table; inside a group of G units L keys and Q queries each, B = G * N;
X = G * Q or G * L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.common.transfers import to_device
from pretrain.model.kernels.grouping import SequenceGroup


class DistanceTables(NamedTuple):
    """The projected distance embeddings. A term that the model lacks is None."""

    keys: Tensor | None = None  # [N, P, D], multiplied with queries: c2p
    queries: Tensor | None = None  # [N, P, D], multiplied with keys: p2c
    row_by_distance: Tensor | None = None  # as `layout.RelativeRows.row_by_distance`

    @property
    def term_count(self) -> int:
        """The number of products in a score in addition to query times key."""
        return (self.keys is not None) + (self.queries is not None)

    def zero_gradients(self, like: Tensor) -> DistanceTables:
        """Return fp32 zeros in the shapes of keys and queries, [0] for None, on the device of `like`."""
        shapes = ((0,) if x is None else x.shape for x in self[:2])
        return DistanceTables(*(like.new_zeros(shape, dtype=torch.float32) for shape in shapes))

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return (keys, queries) of a result of `zero_gradients`, which has no None."""
        assert self.keys is not None
        assert self.queries is not None
        return self.keys, self.queries


class DistanceTerms:
    """The distance terms of one group, for a slice `b` of its B rows at a time: whole units, or some heads of one unit.

    Args:
        group: the group.
        token_GQ: int64, the index of each query's token.
        heads: N.
        window: as in `layout.AttentionOptions`.
        tables: the projected distance embeddings of the layer.
    """

    def __init__(self, group: SequenceGroup, token_GQ: Tensor, heads: int, window: int, tables: DistanceTables) -> None:
        self._heads, self._tables = heads, tables
        if tables.row_by_distance is None:
            return
        key_GL, middle = group.keys.index_GL, len(tables.row_by_distance) // 2
        limit = min(middle, window or middle, key_GL.shape[1] - 1)
        if group.queries is group.keys:  # if all tokens are queries, distances are equal in all units
            token_GQ = key_GL = torch.arange(key_GL.shape[1], device=key_GL.device)[None]
        distance_GQL = (token_GQ[..., None] - key_GL[:, None]).clamp_(-limit, limit)  # masked keys may be farther
        first, last = (int(tables.row_by_distance[middle + distance]) for distance in (-limit, limit))
        self._reached = slice(first, last + 1)  # table rows for the distances in the group
        self._row_GQL = to_device(tables.row_by_distance, key_GL.device)[distance_GQL + middle] - self._reached.start

    def unscaled_scores(self, b: slice, q_BQD: Tensor, k_BLD: Tensor) -> Tensor:
        """Return the scores of rows `b` before scaling, [B, Q, L], from their queries and keys."""
        if not self._tables.term_count:
            return torch.bmm(q_BQD, k_BLD.mT)
        keys_NPD, queries_NPD = self.reached_rows(b, len(q_BQD), self._tables)
        row_GNQL, heads = self._table_rows(b, len(q_BQD)), self._heads_in(len(q_BQD))
        terms: list[Tensor] = []
        if keys_NPD is not None:
            products_NXP = torch.bmm(_by_head(q_BQD, heads).flatten(1, 2), keys_NPD.mT)
            terms.append(products_NXP.unflatten(1, (-1, q_BQD.shape[1])).transpose(0, 1).gather(-1, row_GNQL))
        if queries_NPD is not None:
            products_NPX = torch.bmm(queries_NPD, _by_head(k_BLD, heads).flatten(1, 2).mT)
            products_GNPL = products_NPX.unflatten(2, (-1, k_BLD.shape[1])).permute(2, 0, 1, 3)
            terms.append(products_GNPL.gather(-2, row_GNQL))
        sum_BQL = (terms[0] if len(terms) == 1 else terms[0].add_(terms[1])).flatten(0, 1)
        return sum_BQL.baddbmm_(q_BQD, k_BLD.mT)

    def add_gradients(
        self,
        b: slice,
        grad_BQL: Tensor,
        operands: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        grad_tables: DistanceTables,
    ) -> None:
        """Add the contribution of the distance terms of rows `b` to the gradients.

        Args:
            grad_BQL: gradient of the unscaled scores.
            operands: queries [B, Q, D] and keys [B, L, D] of these rows.
            grads: gradients of the operands, updated in place.
            grad_tables: a result of `DistanceTables.zero_gradients`, updated in place.
        """
        if not self._tables.term_count:
            return
        (q_BQD, k_BLD), (grad_q_BQD, grad_k_BLD) = operands, grads
        count = len(q_BQD)
        (keys_NPD, queries_NPD), heads = self.reached_rows(b, count, self._tables), self._heads_in(count)
        grad_keys_NPD, grad_queries_NPD = self.reached_rows(b, count, grad_tables)
        row_GNQL, grad_GNQL = self._table_rows(b, count), grad_BQL.unflatten(0, (-1, heads)).float()
        (units, _, queries, length), reached = row_GNQL.shape, self._reached.stop - self._reached.start
        if keys_NPD is not None and grad_keys_NPD is not None:
            sums_GNQP = grad_GNQL.new_zeros(units, heads, queries, reached).scatter_add_(-1, row_GNQL, grad_GNQL)
            sums_NXP = sums_GNQP.to(q_BQD.dtype).transpose(0, 1).flatten(1, 2)
            grad_q_BQD += _by_unit(torch.bmm(sums_NXP, keys_NPD), queries)
            grad_keys_NPD += torch.bmm(sums_NXP.mT, _by_head(q_BQD, heads).flatten(1, 2))
        if queries_NPD is not None and grad_queries_NPD is not None:
            sums_GNPL = grad_GNQL.new_zeros(units, heads, reached, length).scatter_add_(-2, row_GNQL, grad_GNQL)
            sums_NPX = sums_GNPL.to(k_BLD.dtype).permute(1, 2, 0, 3).flatten(2)
            grad_k_BLD += _by_unit(torch.bmm(sums_NPX.mT, queries_NPD), length)
            grad_queries_NPD += torch.bmm(sums_NPX, _by_head(k_BLD, heads).flatten(1, 2))

    def _heads_in(self, count: int) -> int:
        """Return the number of heads among `count` rows."""
        return min(self._heads, count)

    def _table_rows(self, b: slice, count: int) -> Tensor:
        """Return the table row of each score, counted from the first reached row: int64 [G, N, Q, L], expanded."""
        heads = self._heads_in(count)
        first, units = b.start // self._heads, count // heads
        row_GQL = self._row_GQL if len(self._row_GQL) == 1 else self._row_GQL[first : first + units]
        return row_GQL[:, None].expand(units, heads, -1, -1)

    def reached_rows(self, b: slice, count: int, tables: DistanceTables) -> tuple[Tensor | None, Tensor | None]:
        """Return (keys, queries) of `tables` at the reached rows, for the heads among rows `b`: each [N, P, D]."""
        first, heads = b.start % self._heads, self._heads_in(count)
        keys, queries = (
            None if x is None or x.dim() == 1 else x[first : first + heads, self._reached] for x in tables[:2]
        )
        return keys, queries


def _by_head(x_BLD: Tensor, heads: int) -> Tensor:
    """[G * N, L, D] -> [N, G, L, D]."""
    return x_BLD.unflatten(0, (-1, heads)).transpose(0, 1)


def _by_unit(x_NXD: Tensor, length: int) -> Tensor:
    """[N, G * L, D] -> [G * N, L, D]."""
    return x_NXD.unflatten(1, (-1, length)).transpose(0, 1).flatten(0, 1)
