"""Optimizers whose step depends on whole tensors, over flat shards with pieces of many tensors.

ZeRO passes an optimizer flat shards. So these optimizers take a table that maps pieces to tensors, add up their
statistics by tensor, and sum these over the workers before they step.
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
    """Entries `start` to `stop` of a flat parameter: entries of tensor `tensor_id` from `first` on."""

    start: int
    stop: int
    tensor_id: int
    first: int = 0


class TensorPiece(NamedTuple):
    """Entries of a tensor in a step: 1-D views, and the bias corrections of the moments."""

    tensor_id: int
    correction1: Tensor  # fp32 scalars; the pieces of a parameter share them
    correction2: Tensor
    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


def number_tensors(names: Iterable[str]) -> dict[str, range]:
    """Return tensor ids by parameter name: one each, several for stacked projections such as query, key and value."""
    ids: dict[str, range] = {}
    count = 0
    for name in names:
        parts = stacked_parts(name)
        ids[name] = range(count, count + parts)
        count += parts
    return ids


def cut_segments(ids: range, numel: int, first: int, last: int, offset: int) -> list[Segment]:
    """Return the segments of entries `first` to `last` of one parameter, which start at `offset` of a flat shard.

    Args:
        ids: the parameter's tensor ids, from `number_tensors`; its `numel` entries divide evenly among them.
        numel: entries of the whole parameter.
        first, last: the half-open range of its entries that this shard holds; may be empty.
        offset: of entry `first` in the shard.
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
    state: moments and a count of steps. A stacked parameter counts as several tensors.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._segments: dict[Tensor, Sequence[Segment]] = {}
        self._tensor_count = 0
        self._reduce: Callable[[Tensor], Any] = lambda norms: None
        self._numbers: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}  # cache of `_ids_and_sizes`

    def set_segments(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        tensor_count: int,
        reduce: Callable[[Tensor], Any],
    ) -> None:
        """Set the content of the flat parameters, after a wrapper has flattened and sharded them.

        Args:
            segments: for each flat parameter that steps by tensor, its pieces in ascending order. Entries
                in no piece are padding and are not changed.
            tensor_count: number of tensors over all workers; ids are below it.
            reduce: sums an fp64 vector [2 * tensor_count] over the workers, in place. `step` calls it once
                if any of its groups steps by tensor, so all workers must step the same groups in the same order.
        """
        self._segments, self._tensor_count, self._reduce = dict(segments), tensor_count, reduce
        self._numbers.clear()

    def _pieces(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Sequence[Segment]]]:
        """Yield the group's parameters with their pieces."""
        return ((parameter, self._segments[parameter]) for parameter in group["params"])

    def _begin(self, group: dict[str, Any], parts: Iterable[tuple[Tensor, Sequence[Segment]]]) -> list[TensorPiece]:
        """Return the pieces of the parameters that have a gradient, and increment their step counts."""
        present = [(parameter, segments) for parameter, segments in parts if parameter.grad is not None]
        if not present:
            return []
        states = [self.state[parameter] for parameter, _ in present]
        counts, (beta1, beta2) = [state["step"] for state in states], group["betas"]
        self._advance_counts(counts)
        # The counts stay on their device: reading them would wait for all work queued there.
        # Before the first step that is not skipped they are 0, and so would be the corrections.
        steps = torch.stack(counts).double().clamp(min=1)
        corrections = zip((1 - beta1**steps).float().unbind(), (1 - beta2**steps).float().unbind(), strict=True)
        pieces: list[TensorPiece] = []
        for (parameter, segments), state, both in zip(present, states, corrections, strict=True):
            assert parameter.grad is not None
            views = (cut(x, segments) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
            pieces += [
                TensorPiece(segment.tensor_id, *both, *of_segment)
                for segment, *of_segment in zip(segments, *views, strict=True)
            ]
        return pieces

    def _advance(self, group: dict[str, Any], run: Sequence[TensorPiece]) -> list[Tensor]:
        """Advance the moments of pieces by their gradients; return new, bias-corrected second moments."""
        _, _, corrections, _, gradients, means, squares = zip(*run, strict=True)
        beta1, beta2 = group["betas"]
        self._blend(means, gradients, 1 - beta1)
        foreach._foreach_mul_(squares, self._remaining(1 - beta2))
        foreach._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        return list(foreach._foreach_div(squares, common(corrections)))

    def _ids_and_sizes(self, pieces: Sequence[TensorPiece]) -> tuple[Tensor, Tensor]:
        """Return (int64 tensor ids, fp64 numbers of entries) of pieces, on their device; they are copied there once."""
        key = tuple((piece.tensor_id, piece.weights.numel()) for piece in pieces)
        if key not in self._numbers:
            ids, sizes = zip(*key, strict=True)
            device = pieces[0].weights.device
            self._numbers[key] = torch.tensor(ids).to(device), torch.tensor(sizes, dtype=torch.float64).to(device)
        return self._numbers[key]

    def _zeros(self) -> Tensor:
        """Return fp64 zeros [2, tensors] on the device of the parameters."""
        device = next(p.device for group in self.param_groups for p in group["params"])
        return torch.zeros(2, self._tensor_count, dtype=torch.float64, device=device)


def divide_means(group: dict[str, Any], run: Sequence[TensorPiece], corrected: Sequence[Tensor]) -> None:
    """Replace the gradients of pieces by Adam's update; overwrites the second moments `corrected`."""
    foreach._foreach_sqrt_(corrected)
    foreach._foreach_add_(corrected, group["eps"])
    foreach._foreach_mul_(corrected, common([piece.correction1 for piece in run]))
    gradients = [piece.gradient for piece in run]
    foreach._foreach_copy_(gradients, [piece.mean for piece in run])
    foreach._foreach_div_(gradients, corrected)


def square_sums(values: Sequence[Tensor]) -> Tensor:
    """Return fp64 [len(values)], the sum of squares of each [n]."""
    if not in_lists(values[0]):
        return torch.stack([square_sum(x) for x in values])
    # The CUDA kernel adds rows of 2^16 entries, and then the rows (aten ForeachReduceOp.cu).
    return torch.stack(foreach._foreach_norm(values, 2, dtype=torch.float32)).double().square()


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of squares of `values` [n], an fp64 scalar."""
    whole = values.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _NORM_ROW), dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double()
    return rows.square().sum() + rest.square()
