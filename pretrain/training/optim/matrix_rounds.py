"""The plan of a Muon step over sharded matrices: the owner of each matrix, and the pieces that workers exchange.

Each matrix has one owner. The other workers send the owner their pieces; the owner orthogonalizes the whole matrix and
sends the pieces back. So the work is divided, each entry is sent once in each direction, and the result does not depend
on ZeRO's sharding. Matrices are processed in rounds, which bounds the memory of the copies.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# Maximum number of entries per round and worker: 64 MB in fp32. Larger rounds need more memory and save little time.
ROUND_ENTRIES = 1 << 24

Shape = tuple[int, int]  # (rows, columns)


class Workers(Protocol):
    """The workers that step together; `pretrain.training.engine.RankGroup` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]: ...  # the values of all ranks, on every rank
    def all_to_all(self, values: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """Send each rank r the next `sent_sizes[r]` entries of 1-D `values`; return `received_sizes[r]` from each."""
        ...


class MatrixPiece(NamedTuple):
    """Consecutive entries of a matrix that a worker stores. Sorted pieces of a matrix are in its order."""

    tensor_id: int
    matrix_start: int  # index of the first entry in the flattened matrix
    numel: int
    flat_index: int  # index of the flat tensor that stores the entries
    flat_start: int  # index of the first entry in the flat tensor


@dataclass(frozen=True)
class Round:
    """The work of one worker in a round. Each list of lists has the pieces that are exchanged with each worker.

    Attributes:
        owned: shapes of the matrices that this worker orthogonalizes, by tensor id.
        sent: pieces that this worker sends to each owner.
        gathered: pieces of the owned matrices that it gets from each worker.
        returned: updated pieces of the owned matrices that it sends back to each worker.
        received: updated pieces that it gets back from each owner.
    """

    owned: dict[int, Shape]
    sent: list[list[MatrixPiece]]
    gathered: list[list[MatrixPiece]]
    returned: list[list[MatrixPiece]]
    received: list[list[MatrixPiece]]


def plan_rounds(
    pieces_by_rank: Sequence[Iterable[MatrixPiece]], shapes: Mapping[int, Shape], rank: int, replicated: bool
) -> list[Round]:
    """Plan the rounds of `rank`.

    Args:
        pieces_by_rank: the pieces that each worker stores.
        shapes: the shapes of all matrices, by tensor id.
        rank: the worker whose rounds are returned.
        replicated: whether every worker stores all matrices, so that owners need no pieces from other workers.

    Returns:
        The rounds in order: the same number for all workers, with matching sends and receives.
    """
    pieces = [sorted(rank_pieces) for rank_pieces in pieces_by_rank]
    ids = sorted({piece.tensor_id for rank_pieces in pieces for piece in rank_pieces}, key=lambda i: (shapes[i], i))
    rounds = []
    for round_ids in _split_ids(ids, shapes, ROUND_ENTRIES * len(pieces)):
        owner_of = _assign_owners(round_ids, shapes, len(pieces))
        received = [_group_by_owner(rank_pieces, owner_of, len(pieces)) for rank_pieces in pieces]
        sent = [
            [to_owner if owner == sender or not replicated else [] for owner, to_owner in enumerate(by_owner)]
            for sender, by_owner in enumerate(received)
        ]
        rounds.append(
            Round(
                owned={i: shapes[i] for i in round_ids if owner_of[i] == rank},
                sent=sent[rank],
                gathered=[by_owner[rank] for by_owner in sent],
                returned=[by_owner[rank] for by_owner in received],
                received=received[rank],
            )
        )
    return rounds


def _split_ids(ids: list[int], shapes: Mapping[int, Shape], max_entries: int) -> Iterator[list[int]]:
    """Split `ids` into lists of matrices with at most `max_entries` in total; a larger matrix is alone in its list."""
    round_ids: list[int] = []
    entries = 0
    for tensor_id in ids:
        numel = shapes[tensor_id][0] * shapes[tensor_id][1]
        if round_ids and entries + numel > max_entries:
            yield round_ids
            round_ids, entries = [], 0
        round_ids.append(tensor_id)
        entries += numel
    if round_ids:
        yield round_ids


def _assign_owners(ids: list[int], shapes: Mapping[int, Shape], workers: int) -> dict[int, int]:
    """Assign an owner to each matrix: the most expensive first, each to the worker with the least work."""
    heap = [(0, worker) for worker in range(workers)]
    owner_of: dict[int, int] = {}
    for tensor_id in sorted(ids, key=lambda i: (-_cost(shapes[i]), i)):
        load, worker = heap[0]
        owner_of[tensor_id] = worker
        heapq.heapreplace(heap, (load + _cost(shapes[tensor_id]), worker))
    return owner_of


def _cost(shape: Shape) -> int:
    """Return the relative cost of orthogonalizing a matrix: of its Gram matrix, and of the products with it."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def _group_by_owner(
    pieces: Iterable[MatrixPiece], owner_of: Mapping[int, int], workers: int
) -> list[list[MatrixPiece]]:
    by_owner: list[list[MatrixPiece]] = [[] for _ in range(workers)]
    for piece in pieces:
        if piece.tensor_id in owner_of:
            by_owner[owner_of[piece.tensor_id]].append(piece)
    return by_owner
