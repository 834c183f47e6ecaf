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

# Maximum matrix entries per round and worker: 64 MB in fp32. Larger rounds save few collectives and need more memory.
ROUND_ENTRIES = 1 << 24

Shape = tuple[int, int]  # (rows, columns)


class Workers(Protocol):
    """The workers that step together; `pretrain.training.engine.RankGroup` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]: ...  # the values of all ranks, on every rank
    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` entries of 1-D `values` to each rank r, in order; return `received[r]` entries from each."""
        ...


class MatrixPiece(NamedTuple):
    """Entries of a matrix that a worker stores; sorted pieces are in the order of the matrix."""

    tensor_id: int
    matrix_start: int  # index of the first entry in the flattened matrix
    numel: int
    flat: int  # index of the flat tensor that stores the entries
    start: int  # index of the first entry in the flat tensor


@dataclass(frozen=True)
class Round:
    """The work of one worker in a round. Each list has one entry per worker: the pieces exchanged with that worker.

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
    stored: Sequence[Iterable[MatrixPiece]], shapes: Mapping[int, Shape], rank: int, shared: bool
) -> list[Round]:
    """Plan the rounds of `rank`.

    Args:
        stored: the pieces that each worker stores.
        shapes: the shapes of all matrices, by tensor id.
        rank: the worker whose rounds are returned.
        shared: whether every worker stores all matrices, so that owners need no pieces from other workers.

    Returns:
        The rounds in order: the same number for all workers, with matching sends and receives.
    """
    pieces = [sorted(rank_pieces) for rank_pieces in stored]
    ids = sorted({piece.tensor_id for rank_pieces in pieces for piece in rank_pieces}, key=lambda i: (shapes[i], i))
    rounds = []
    for members in _split(ids, shapes, ROUND_ENTRIES * len(pieces)):
        owner = _owners(members, shapes, len(pieces))
        received = [
            _by_owner(owner, (p for p in rank_pieces if p.tensor_id in owner), len(pieces)) for rank_pieces in pieces
        ]
        sent = [[ps if o == r or not shared else [] for o, ps in enumerate(received[r])] for r in range(len(pieces))]
        rounds.append(
            Round(
                owned={i: shapes[i] for i in members if owner[i] == rank},
                sent=sent[rank],
                gathered=[by_owner[rank] for by_owner in sent],
                returned=[by_owner[rank] for by_owner in received],
                received=received[rank],
            )
        )
    return rounds


def _split(ids: list[int], shapes: Mapping[int, Shape], max_entries: int) -> Iterator[list[int]]:
    """Split `ids` into lists of matrices with at most `max_entries` in total, or of one larger matrix."""
    matrices: list[int] = []
    entries = 0
    for tensor_id in ids:
        numel = shapes[tensor_id][0] * shapes[tensor_id][1]
        if matrices and entries + numel > max_entries:
            yield matrices
            matrices, entries = [], 0
        matrices.append(tensor_id)
        entries += numel
    if matrices:
        yield matrices


def _owners(ids: list[int], shapes: Mapping[int, Shape], workers: int) -> dict[int, int]:
    """Assign an owner to each matrix: the most expensive first, each to the worker with the least work."""
    heap = [(0, worker) for worker in range(workers)]
    owner: dict[int, int] = {}
    for tensor_id in sorted(ids, key=lambda i: (-_cost(shapes[i]), i)):
        load, worker = heap[0]
        owner[tensor_id] = worker
        heapq.heapreplace(heap, (load + _cost(shapes[tensor_id]), worker))
    return owner


def _cost(shape: Shape) -> int:
    """Return the relative cost of orthogonalizing a matrix: its Gram matrix, and the products with it."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def _by_owner(owner: Mapping[int, int], pieces: Iterable[MatrixPiece], workers: int) -> list[list[MatrixPiece]]:
    by_owner: list[list[MatrixPiece]] = [[] for _ in range(workers)]
    for piece in pieces:
        by_owner[owner[piece.tensor_id]].append(piece)
    return by_owner
