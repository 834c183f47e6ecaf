"""Optimizers whose step depends on whole tensors, over ZeRO's flat shards with pieces of many tensors.

They get a table that maps pieces to tensors, sum statistics by tensor and over the workers, and then step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.model.parameters import stacked_parts
from pretrain.training.optim.lists import common, foreach, in_lists
from pretrain.training.optim.skipping import SkippingOptimizer

# torch sums a norm in fp32: over the 31 M entries of BERT-Large's word embeddings the error is 1.1e-3
# (measured, torch 2.13 CPU). Norms of rows this long are exact to 1e-7; their squares are added in fp64.
_NORM_ROW = 1 << 16


class Segment(NamedTuple):
    """Entries `start` to `stop` of a flat parameter, which are entries of tensor `tensor_id` from `first` on."""

    start: int
    stop: int
    tensor_id: int
    first: int = 0


class TensorPiece(NamedTuple):
    """Entries of a tensor in a step: 1-D views, and bias corrections of the moments."""

    tensor_id: int
    correction1: Tensor  # fp32 scalars; the pieces of a parameter share them
    correction2: Tensor
    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


def number_tensors(names: Iterable[str]) -> dict[str, range]:
    """Return tensor ids by parameter name: one, or several for stacked projections such as query, key and value."""
    ids: dict[str, range] = {}
    count = 0
    for name in names:
        parts = stacked_parts(name)
        ids[name] = range(count, count + parts)
        count += parts
    return ids


def cut_segments(ids: range, numel: int, first: int, last: int, offset: int) -> list[Segment]:
    """Return the segments of entries `first` to `last` of one parameter, at `offset` in a flat shard.

    Args:
        ids: the parameter's tensor ids, from `number_tensors`; its `numel` entries divide evenly among them.
        numel: entries of the whole parameter.
        first, last: half-open range of the entries in this shard; may be empty.
        offset: position of entry `first` in the shard.
    """
    part = numel // len(ids)
    segments = []
    for number, tensor_id in enumerate(ids):
        start, stop = max(first, number * part), min(last, (number + 1) * part)
        if start < stop:
            segments.append(Segment(offset + start - first, offset + stop - first, tensor_id, start - number * part))
    return segments


def cut(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Return views of the segments of a flat tensor, which are in ascending order."""
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

    Groups have `names`. Parameters must be contiguous fp32. Before the first step, call `set_segments` and set the
    state: moments and a step count. A stacked parameter is treated as several tensors.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._segments: dict[Tensor, Sequence[Segment]] = {}
        self._tensor_count = 0
        self._reduce: Callable[[Tensor], Any] = lambda norms: None
        self._cached_ids: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}  # cache of `_ids_and_sizes`

    def set_segments(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        tensor_count: int,
        reduce: Callable[[Tensor], Any],
    ) -> None:
        """Set the content of the flat parameters, after a wrapper has flattened and sharded them.

        Args:
            segments: for each flat parameter that steps by tensor, its pieces in ascending order. Entries outside of
                pieces are padding and are not changed.
            tensor_count: number of tensors over all workers; ids are smaller.
            reduce: sums an fp64 vector [2 * tensor_count] over the workers, in place. `step` calls it once if any of
                its groups steps by tensor, so all workers must step the same groups in the same order.
        """
        self._segments, self._tensor_count, self._reduce = dict(segments), tensor_count, reduce
        self._cached_ids.clear()

    def _pieces(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Sequence[Segment]]]:
        """Yield the group's parameters with their pieces."""
        return ((parameter, self._segments[parameter]) for parameter in group["params"])

    def _start_step(
        self, group: dict[str, Any], parts: Iterable[tuple[Tensor, Sequence[Segment]]]
    ) -> list[TensorPiece]:
        """Return the pieces of the parameters that have a gradient, and increment their step counts."""
        present = [(parameter, segments) for parameter, segments in parts if parameter.grad is not None]
        if not present:
            return []
        states = [self.state[parameter] for parameter, _ in present]
        counts, (beta1, beta2) = [state["step"] for state in states], group["betas"]
        self._advance_counts(counts)
        # The counts stay on the device: reading them would wait for all queued work. Until the first step that is not
        # skipped, they are 0, and so would be the corrections.
        steps = torch.stack(counts).double().clamp(min=1)
        corrections = zip((1 - beta1**steps).float().unbind(), (1 - beta2**steps).float().unbind(), strict=True)
        pieces: list[TensorPiece] = []
        for (parameter, segments), state, pair in zip(present, states, corrections, strict=True):
            assert parameter.grad is not None
            views = (cut(x, segments) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
            pieces += [
                TensorPiece(segment.tensor_id, *pair, *tensors)
                for segment, *tensors in zip(segments, *views, strict=True)
            ]
        return pieces

    def _advance(self, group: dict[str, Any], run: Sequence[TensorPiece]) -> list[Tensor]:
        """Update the moments of pieces with their gradients; return copies of the bias-corrected second moments."""
        _, _, corrections, _, gradients, means, squares = zip(*run, strict=True)
        beta1, beta2 = group["betas"]
        self._lerp_means(means, gradients, 1 - beta1)
        foreach._foreach_mul_(squares, self._one_minus(1 - beta2))
        foreach._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        return list(foreach._foreach_div(squares, common(corrections)))

    def _ids_and_sizes(self, pieces: Sequence[TensorPiece]) -> tuple[Tensor, Tensor]:
        """Return (int64 tensor ids, fp64 numbers of entries) of pieces, cached on their device."""
        key = tuple((piece.tensor_id, piece.weights.numel()) for piece in pieces)
        if key not in self._cached_ids:
            ids, sizes = zip(*key, strict=True)
            device = pieces[0].weights.device
            self._cached_ids[key] = torch.tensor(ids).to(device), torch.tensor(sizes, dtype=torch.float64).to(device)
        return self._cached_ids[key]

    def _zeros(self) -> Tensor:
        """Return fp64 zeros [2, tensors] on the device of the parameters."""
        device = next(p.device for group in self.param_groups for p in group["params"])
        return torch.zeros(2, self._tensor_count, dtype=torch.float64, device=device)


def divide_means(group: dict[str, Any], run: Sequence[TensorPiece], corrected: Sequence[Tensor]) -> None:
    """Replace the gradients of pieces by Adam's update; overwrite the second moments `corrected`."""
    foreach._foreach_sqrt_(corrected)
    foreach._foreach_add_(corrected, group["eps"])
    foreach._foreach_mul_(corrected, common([piece.correction1 for piece in run]))
    gradients = [piece.gradient for piece in run]
    foreach._foreach_copy_(gradients, [piece.mean for piece in run])
    foreach._foreach_div_(gradients, corrected)


def square_sums(values: Sequence[Tensor]) -> Tensor:
    """Return fp64 [len(values)], the sum of squares of each 1-D tensor."""
    if not in_lists(values[0]):
        return torch.stack([square_sum(x) for x in values])
    # The CUDA kernel first sums chunks of 2^16 entries, and then the chunks (aten ForeachReduceOp.cu).
    return torch.stack(foreach._foreach_norm(values, 2, dtype=torch.float32)).double().square()


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of squares of `values` [n], an fp64 scalar."""
    whole = values.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _NORM_ROW), dim=1, dtype=torch.float32).double()
    tail = torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double()
    return rows.square().sum() + tail.square()
