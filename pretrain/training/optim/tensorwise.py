"""Optimizers whose step depends on whole tensors, although ZeRO's flat shards hold pieces of many tensors.

Given a table that maps pieces to tensors, they sum per-tensor statistics, all-reduce them, and then step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.model.parameters import stacked_parts
from pretrain.training.optim.lists import foreach, single_or_list, uses_foreach
from pretrain.training.optim.skipping import SkippingOptimizer

# torch computes norms in fp32: over the 31 M entries of BERT-Large's word embeddings, the error is 1.1e-3 (measured,
# torch 2.13 on a CPU). Norms of rows of this length are exact to 1e-7; their squares are added in fp64.
_NORM_ROW_LENGTH = 1 << 16


class Segment(NamedTuple):
    """Entries [start, stop) of a flat parameter, which belong to one tensor."""

    start: int
    stop: int
    tensor_id: int
    tensor_start: int = 0  # index of the first of these entries in the flattened tensor


class TensorPiece(NamedTuple):
    """One worker's entries of a tensor in a step: 1-D views of weights, gradient and moments."""

    tensor_id: int
    correction1: Tensor  # bias correction of `exp_avg`, an fp32 scalar that the pieces of a parameter share
    correction2: Tensor  # the same for `exp_avg_sq`
    weights: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def assign_tensor_ids(names: Iterable[str]) -> dict[str, range]:
    """Return the tensor ids of each parameter: one, or several for stacked projections such as query, key and value."""
    ids: dict[str, range] = {}
    count = 0
    for name in names:
        parts = stacked_parts(name)
        ids[name] = range(count, count + parts)
        count += parts
    return ids


def cut_segments(ids: range, numel: int, start: int, stop: int, offset: int) -> list[Segment]:
    """Return the segments of entries [start, stop) of one parameter, which are stored at `offset` in a flat shard.

    Args:
        ids: the parameter's tensor ids, from `assign_tensor_ids`; each tensor has an equal part of the entries.
        numel: number of entries of the whole parameter.
        start, stop: range of the entries in this shard; may be empty.
        offset: index of entry `start` in the shard.
    """
    size, segments = numel // len(ids), []
    for index, tensor_id in enumerate(ids):
        low, high = max(start, index * size), min(stop, (index + 1) * size)
        if low < high:
            segments.append(Segment(offset + low - start, offset + high - start, tensor_id, low - index * size))
    return segments


def segment_views(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Return a view of each segment of a flat tensor; the segments are in ascending order."""
    sizes, indices, end = [], [], 0
    for start, stop, *_ in segments:
        if start > end:
            sizes.append(start - end)
        indices.append(len(sizes))
        sizes.append(stop - start)
        end = stop
    parts = flat.view(-1).split([*sizes, flat.numel() - end])
    return [parts[index] for index in indices]


class TensorwiseOptimizer(SkippingOptimizer):
    """An optimizer whose step depends on whole tensors.

    Each param group has an entry `names`, one name per parameter. Parameters must be contiguous fp32. Before the first
    step, call `set_segments` and set the state: moments and a step count. A stacked parameter is treated as several
    tensors.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._segments: dict[Tensor, Sequence[Segment]] = {}
        self._tensor_count = 0
        self._reduce: Callable[[Tensor], Any] = lambda norms: None
        self._cached_ids: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}  # of `_ids_and_sizes`

    def set_segments(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        tensor_count: int,
        reduce: Callable[[Tensor], Any],
    ) -> None:
        """Set which tensors the flat parameters contain, after a wrapper such as ZeRO has flattened and sharded them.

        Args:
            segments: for each flat parameter whose step depends on whole tensors, its segments in ascending order.
                Entries outside of segments are padding and are not changed.
            tensor_count: number of tensors over all workers; every id is smaller.
            reduce: sums an fp64 vector [2 * tensor_count] over the workers, in place. `step` calls it once if the step
                of any group depends on whole tensors, so all workers must step the same groups.
        """
        self._segments, self._tensor_count, self._reduce = dict(segments), tensor_count, reduce
        self._cached_ids.clear()

    def _parameters_with_segments(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Sequence[Segment]]]:
        """Yield the group's parameters with their segments."""
        return ((parameter, self._segments[parameter]) for parameter in group["params"])

    def _start_step(
        self, group: dict[str, Any], parameters: Iterable[tuple[Tensor, Sequence[Segment]]]
    ) -> list[TensorPiece]:
        """Return the pieces of the parameters that have a gradient, and increment their step counts."""
        with_gradient = [(parameter, segments) for parameter, segments in parameters if parameter.grad is not None]
        if not with_gradient:
            return []
        states = [self.state[parameter] for parameter, _ in with_gradient]
        counts, (beta1, beta2) = [state["step"] for state in states], group["betas"]
        self._advance_counts(counts)
        # The counts stay on the device: reading them would wait for all queued work. Until the first step that is not
        # skipped, they are 0, and the corrections would be 0, too.
        steps = torch.stack(counts).double().clamp(min=1)
        pairs = zip((1 - beta1**steps).float().unbind(), (1 - beta2**steps).float().unbind(), strict=True)
        pieces: list[TensorPiece] = []
        for (parameter, segments), state, corrections in zip(with_gradient, states, pairs, strict=True):
            assert parameter.grad is not None
            views = (
                segment_views(x, segments) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            pieces += [
                TensorPiece(segment.tensor_id, *corrections, *tensors)
                for segment, *tensors in zip(segments, *views, strict=True)
            ]
        return pieces

    def _update_moments(self, group: dict[str, Any], pieces: Sequence[TensorPiece]) -> list[Tensor]:
        """Update the moments of pieces with their gradients; return copies of the bias-corrected second moments."""
        _, _, corrections, _, gradients, exp_avgs, exp_avg_sqs = zip(*pieces, strict=True)
        beta1, beta2 = group["betas"]
        self._lerp_means(exp_avgs, gradients, 1 - beta1)
        foreach._foreach_mul_(exp_avg_sqs, self._one_minus(1 - beta2))
        foreach._foreach_addcmul_(exp_avg_sqs, gradients, gradients, value=1 - beta2)
        return list(foreach._foreach_div(exp_avg_sqs, single_or_list(corrections)))

    def _ids_and_sizes(self, pieces: Sequence[TensorPiece]) -> tuple[Tensor, Tensor]:
        """Return (int64 tensor id, fp64 number of entries) of each piece, cached on the device of the pieces."""
        key = tuple((piece.tensor_id, piece.weights.numel()) for piece in pieces)
        if key not in self._cached_ids:
            ids, sizes = zip(*key, strict=True)
            device = pieces[0].weights.device
            self._cached_ids[key] = torch.tensor(ids).to(device), torch.tensor(sizes, dtype=torch.float64).to(device)
        return self._cached_ids[key]

    def _zero_sums(self) -> Tensor:
        """Return zeros for two sums per tensor, fp64 [2, tensors], on the device of the parameters."""
        device = next(p.device for group in self.param_groups for p in group["params"])
        return torch.zeros(2, self._tensor_count, dtype=torch.float64, device=device)


def write_adam_updates(group: dict[str, Any], pieces: Sequence[TensorPiece], corrected: Sequence[Tensor]) -> None:
    """Overwrite the gradients of pieces with Adam's updates; also overwrites `corrected`, from `_update_moments`."""
    foreach._foreach_sqrt_(corrected)
    foreach._foreach_add_(corrected, group["eps"])
    foreach._foreach_mul_(corrected, single_or_list([piece.correction1 for piece in pieces]))
    gradients = [piece.gradient for piece in pieces]
    foreach._foreach_copy_(gradients, [piece.exp_avg for piece in pieces])
    foreach._foreach_div_(gradients, corrected)


def sums_of_squares(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each 1-D tensor, fp64 [len(values)]."""
    if not uses_foreach(values[0]):
        return torch.stack([sum_of_squares(x) for x in values])
    # The CUDA kernel sums chunks of 2^16 entries, then their sums (aten ForeachReduceOp.cu), so fp32 suffices.
    return torch.stack(foreach._foreach_norm(values, 2, dtype=torch.float32)).double().square()


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of a 1-D tensor, an fp64 scalar."""
    whole = values.numel() // _NORM_ROW_LENGTH * _NORM_ROW_LENGTH
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _NORM_ROW_LENGTH), dim=1, dtype=torch.float32).double()
    tail = torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double()
    return rows.square().sum() + tail.square()
