"""Balancing: assign the sequences of a global batch to ranks and micro-batches (invariants 2 and 3 in
docs/invariants.md).

There are two levels, so that the work of a rank does not grow with the number of ranks. First a batch is divided into
parts: consecutive samples for a group of consecutive ranks, regardless of their lengths. Then the sequences of a part
are balanced across its ranks and micro-batches, which needs only the lengths in this part. Samples are in random
order, so parts of thousands of sequences have nearly the same number of tokens. A smaller batch has only one part.
If machines read different text, each machine's samples are a part (see `source.SourceSamples.owners`).
"""

import heapq
from dataclasses import dataclass

import numpy as np

PART_SEQUENCES = 8192  # approximate number of sequences in a part; the more, the more equal are the parts
_MIN_VECTORIZED = 32  # minimum number of sequences in a vectorized step; for fewer, a heap is faster
_INT16_END = 1 << 15  # lengths below this are sorted as 16-bit integers, in linear time


@dataclass(frozen=True)
class BatchPart:
    """Samples of a global batch, and the consecutive ranks that share them."""

    first_sample: int  # index of the first sample in the batch
    sequences: int  # number of consecutive samples
    first_rank: int
    ranks: int  # number of consecutive ranks
    machine: int = -1  # if >= 0, index of a machine: the part has only the samples that this machine reads


@dataclass(frozen=True)
class Assignment:
    """The sequences of a part, assigned to its ranks' micro-batches. Rank r of R has the micro-batches r, r + R, ..."""

    descending: np.ndarray  # int64 [B], indices of the sequences in descending order of length
    micro_batch_index: np.ndarray  # int64 [B], micro-batch of each sequence, in the order of `descending`
    micro_batches: int  # number of micro-batches per rank

    def members(self, micro_batch: int) -> np.ndarray:
        """Return the indices of the sequences of a micro-batch in ascending order of length, int64."""
        return self.descending[np.flatnonzero(self.micro_batch_index == micro_batch)[::-1]]


def parts(sequences: int, world_size: int) -> list[BatchPart]:
    """Divide a batch of `sequences` >= `world_size` into parts of about `PART_SEQUENCES`, at most one per rank."""
    count = number_of_parts(sequences, world_size)
    return [balanced_part(index, count, sequences, world_size) for index in range(count)]


def part_of(rank: int, sequences: int, world_size: int) -> BatchPart:
    """Return the part that includes `rank`, without computing the other parts."""
    count = number_of_parts(sequences, world_size)
    return balanced_part(((rank + 1) * count - 1) // world_size, count, sequences, world_size)


def number_of_parts(sequences: int, world_size: int) -> int:
    """Return the number of parts of a batch."""
    return max(1, min(world_size, round(sequences / PART_SEQUENCES)))


def part_of_machine(machine: int, machines: int, sequences: int, world_size: int) -> BatchPart:
    """Return the part of a machine: the samples of a batch that it reads, divided among its ranks."""
    ranks = world_size // machines
    return BatchPart(0, sequences, machine * ranks, ranks, machine)


def balance(lengths: np.ndarray, ranks: int, budget: int, *, micro_batches: int = 1) -> Assignment:
    """Distribute sequences over `ranks` * M micro-batches of at most `budget` tokens.

    M is as small as possible, but at least `micro_batches`. Sequences are assigned in descending order of length, each
    to the micro-batch with the fewest tokens (Graham's LPT rule), so that all get nearly the same number of tokens. If
    M micro-batches suffice, so does any larger number: with more of them, the emptiest one never has more tokens.

    Args:
        lengths: tokens of each sequence, int64 [B]; B >= `ranks` * `micro_batches`, no length above `budget`, and none
            above half of it if B is not a multiple of `ranks`. Under these conditions no micro-batch is empty.
    """
    longest = int(lengths.max())
    descending = np.argsort(-lengths.astype(np.int16 if longest < _INT16_END else np.int64), kind="stable")
    descending_lengths = lengths[descending]
    micro_batches = max(micro_batches, -(-int(descending_lengths.sum()) // (ranks * budget)))
    while (assignment := _assign_by_length(descending_lengths, ranks * micro_batches, budget)) is None:
        micro_batches += 1
    return Assignment(descending, assignment, micro_batches)


def balanced_part(index: int, count: int, sequences: int, world_size: int) -> BatchPart:
    """Return part `index` of `count`. The ranks per part, and the samples per rank, differ by at most one."""
    first_rank, stop_rank = index * world_size // count, (index + 1) * world_size // count
    first, stop = (rank * sequences // world_size for rank in (first_rank, stop_rank))
    return BatchPart(first, stop - first, first_rank, stop_rank - first_rank)


def _assign_by_length(lengths: np.ndarray, bin_count: int, budget: int) -> np.ndarray | None:
    """Return the index of each sequence's bin, given descending `lengths`, or None if a bin would exceed `budget`.

    `bins` has the value load * bin_count + index for each bin, in ascending order. In one vectorized step, each of the
    emptiest bins gets one sequence; the step stops before a bin would get a second one.
    """
    assignment = np.empty(len(lengths), np.int64)
    bins, assigned = np.arange(bin_count), 0
    while assigned < len(lengths):
        step_size = min(bin_count, len(lengths) - assigned)
        filled = bins[:step_size] + lengths[assigned : assigned + step_size] * bin_count
        is_reused = np.minimum.accumulate(filled)[:-1] < bins[1:step_size]
        step_size = int(is_reused.argmax()) + 1 if is_reused.any() else step_size
        if step_size < min(_MIN_VECTORIZED, len(lengths) - assigned):
            return _assign_one_by_one(lengths, assignment, assigned, bins, budget)
        if (filled[:step_size] // bin_count).max() > budget:
            return None
        assignment[assigned : assigned + step_size] = bins[:step_size] % bin_count
        bins[:step_size] = filled[:step_size]
        bins.sort()
        assigned += step_size
    return assignment


def _assign_one_by_one(
    lengths: np.ndarray, assignment: np.ndarray, assigned: int, bins: np.ndarray, budget: int
) -> np.ndarray | None:
    """Finish `assignment` with a heap, starting at sequence `assigned`; `bins` is as in `_assign_by_length`."""
    heap, bin_count, chosen_bins = bins.tolist(), len(bins), []
    limit = (budget + 1) * bin_count
    for length in lengths[assigned:].tolist():
        emptiest = heap[0]
        filled = emptiest + length * bin_count
        if filled >= limit:
            return None
        heapq.heapreplace(heap, filled)
        chosen_bins.append(emptiest % bin_count)
    assignment[assigned:] = chosen_bins
    return assignment
