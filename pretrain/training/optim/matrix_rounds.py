"""Which worker orthogonalizes which matrix, and which pieces travel: the plan of a Muon step over sharded matrices.

Each matrix has one owner. The workers send it their pieces, it orthogonalizes the whole, and sends the pieces back. So
the work is divided, each entry travels once in each direction, and the result does not depend on how ZeRO cut the
matrices. Matrices are handled in rounds, which bounds the memory of the copies.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# Entries of a round, for each worker. 64 MB in fp32: larger rounds spare few collectives and need more memory.
ROUND_ENTRIES = 1 << 24

Shape = tuple[int, int]


class Workers(Protocol):
    """The workers that step together; `pretrain.training.engine.RankGroup` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]: ...  # of each rank, on every rank
    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` entries of 1-D `values` to each rank r, in order; the `received[r]` entries from each."""
        ...


class MatrixPiece(NamedTuple):
    """Entries of a matrix that a worker holds; sorted, they lie in the order of the matrix."""

    tensor_id: int
    first: int  # of its entries, in the flattened matrix
    numel: int
    flat: int  # number of the flat tensor that holds them
    start: int  # of its entries, there


@dataclass(frozen=True)
class Round:
    """The part of one worker in one round: pieces by the worker that they go to or come from.

    Attributes:
        owned: shapes of the matrices that this worker orthogonalizes, by tensor id.
        sent: this worker's pieces, by owner.
        gathered: pieces of the owned matrices, by sender.
        returned: pieces of the owned matrices, by receiver.
        taken: this worker's pieces, by owner.
    """

    owned: dict[int, Shape]
    sent: list[list[MatrixPiece]]
    gathered: list[list[MatrixPiece]]
    returned: list[list[MatrixPiece]]
    taken: list[list[MatrixPiece]]


def plan_rounds(
    held: Sequence[Iterable[MatrixPiece]], shapes: Mapping[int, Shape], rank: int, shared: bool
) -> list[Round]:
    """The rounds of `rank`.

    Args:
        held: the pieces of each worker.
        shapes: of all matrices, by tensor id.
        rank: the worker whose part is returned.
        shared: every worker holds all matrices, so an owner needs no pieces of others.

    Returns:
        The rounds in order. All workers get as many, and what one sends in a round another expects in it.
    """
    pieces = [sorted(of_rank) for of_rank in held]
    ids = sorted({piece.tensor_id for of_rank in pieces for piece in of_rank}, key=lambda i: (shapes[i], i))
    rounds = []
    for members in _cut(ids, shapes, ROUND_ENTRIES * len(pieces)):
        owner = _owners(members, shapes, len(pieces))
        taken = [_by(owner, (p for p in of_rank if p.tensor_id in owner), len(pieces)) for of_rank in pieces]
        sent = [[own if o == r or not shared else [] for o, own in enumerate(taken[r])] for r in range(len(pieces))]
        rounds.append(
            Round(
                owned={i: shapes[i] for i in members if owner[i] == rank},
                sent=sent[rank],
                gathered=[by_owner[rank] for by_owner in sent],
                returned=[by_owner[rank] for by_owner in taken],
                taken=taken[rank],
            )
        )
    return rounds


def _cut(ids: list[int], shapes: Mapping[int, Shape], most: int) -> Iterator[list[int]]:
    """`ids` in runs of at most `most` entries, or of one matrix."""
    run: list[int] = []
    entries = 0
    for tensor_id in ids:
        numel = shapes[tensor_id][0] * shapes[tensor_id][1]
        if run and entries + numel > most:
            yield run
            run, entries = [], 0
        run.append(tensor_id)
        entries += numel
    if run:
        yield run


def _owners(ids: list[int], shapes: Mapping[int, Shape], workers: int) -> dict[int, int]:
    """The owner of each matrix: the most expensive first, each to the worker with the least work."""
    heap = [(0, worker) for worker in range(workers)]
    owner: dict[int, int] = {}
    for tensor_id in sorted(ids, key=lambda i: (-_work(shapes[i]), i)):
        load, worker = heap[0]
        owner[tensor_id] = worker
        heapq.heapreplace(heap, (load + _work(shapes[tensor_id]), worker))
    return owner


def _work(shape: Shape) -> int:
    """Of an orthogonalization, up to a factor: products of the Gram matrix with the matrix and with itself."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def _by(owner: Mapping[int, int], pieces: Iterable[MatrixPiece], workers: int) -> list[list[MatrixPiece]]:
    found: list[list[MatrixPiece]] = [[] for _ in range(workers)]
    for piece in pieces:
        found[owner[piece.tensor_id]].append(piece)
    return found
