"""Forward and backward passes as CUDA graphs: with one launch, the host replays all recorded kernels.

A pass of a small model has hundreds of short kernels. Launching them takes the host several times as long as they run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.training.engine.gradient_sums import GradientSums
from pretrain.training.optim.lists import foreach

WARMUP_PASSES = 2  # number of passes of a shape before one is recorded: recording rare shapes is not worth it
_MAX_RECORDINGS = 64  # number of recordings, after which the least recently used one is deleted

# Function that maps (the module's output, fp32 weights of its losses on the device) to (loss, sums for metrics [n]).
LossAndTotals = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class PassGraphs:
    """Passes of a module, recorded for each shape of its micro-batches.

    The first passes of a shape are launched kernel by kernel, which compiles them; the next one is recorded. Recordings
    share one memory pool, since only one is replayed at a time. Launched passes do not use this pool.
    """

    replay_count = 0

    def __init__(self, module: nn.Module, sums: GradientSums) -> None:
        self._module, self._sums = module, sums
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._loss_weights: Tensor | None = None  # weights of the losses, in memory that recorded passes read
        self._launch_counts: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        self._pool: Any = None

    def run(
        self, batch: Any, loss_weights: Sequence[float], compute: LossAndTotals, variant: Hashable = None
    ) -> Tensor:
        """Add the gradients of one micro-batch to the sums, and return its totals.

        Args:
            batch: a dataclass of tensors on the device and `lengths` on the host; other fields must not vary.
            loss_weights: weights of the losses, equal for all micro-batches of a step.
            compute: function that computes the loss and the totals; must be the same function in each call.
            variant: a hashable value of anything else that the module's passes depend on.
        """
        if self._loss_weights is None:
            device = next(value.device for value in vars(batch).values() if isinstance(value, Tensor))
            self._loss_weights = torch.zeros(len(loss_weights), device=device)
        for entry, weight in zip(self._loss_weights, loss_weights, strict=True):
            entry.fill_(weight)
        # A pass overwrites empty sums and adds to others, which takes different kernels.
        key = variant, self._sums.is_empty, shape_key(batch)
        if self._launch_counts[key] < WARMUP_PASSES:
            self._launch_counts[key] += 1
            return self._run_pass(batch, compute)[0]
        recording = self._recordings.pop(key, None)
        if recording is None:
            if len(self._recordings) == _MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            recording = self._record(with_common_lengths(batch), compute)
        else:
            recording.copy_in(batch)
            self._sums.mark_filled(recording.parameters)
        self._recordings[key] = recording  # puts the most recently used one at the end
        recording.graph.replay()
        self.replay_count += 1
        return recording.totals.clone()

    def _run_pass(self, batch: Any, compute: LossAndTotals) -> tuple[Tensor, list[nn.Parameter]]:
        """Run a pass without the module's gradient hooks; return (totals, the parameters that have a gradient)."""
        assert self._loss_weights is not None
        # Autograd waits for the stream on which a leaf was first used, which must be the recorded one. So each pass has
        # new leaves, which share the parameters' memory.
        leaves: dict[str, Tensor] = {name: nn.Parameter(p.detach()) for name, p in self._parameters.items()}
        loss, totals = compute(torch.func.functional_call(self._module, leaves, batch), self._loss_weights)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        pairs = zip(self._parameters.values(), gradients, strict=True)
        used = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        self._sums.add(used)
        return totals.detach(), [parameter for parameter, _ in used]

    def _record(self, batch: Any, compute: LossAndTotals) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Threads that build batches allocate pinned memory meanwhile, which the other capture modes do not allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            totals, parameters = self._run_pass(batch, compute)
        return _Recording(graph, batch, totals, parameters)


class _Recording(NamedTuple):
    """A recorded pass."""

    graph: torch.cuda.CUDAGraph
    batch: Any  # the input that the graph reads
    totals: Tensor  # the output that the graph writes
    parameters: list[nn.Parameter]  # parameters whose gradients the graph adds to the sums

    def copy_in(self, batch: Any) -> None:
        """Copy a micro-batch of the same shape to the recording's input."""
        inputs, values = tensors_of(self.batch), tensors_of(batch)
        foreach._foreach_copy_(list(inputs.values()), list(values.values()))


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors among a batch's fields, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def with_common_lengths(batch: Any) -> Any:
    """Copy a batch, with every length replaced by the bound that all batches of its shape share."""
    copies = {name: value.clone() for name, value in tensors_of(batch).items()}
    return dataclasses.replace(batch, **copies, lengths=(_length_bound(batch.lengths),) * len(batch.lengths))


def shape_key(batch: Any) -> Any:
    """Return a micro-batch's shape as a key; a recording can replay all micro-batches with the same key."""
    return _length_bound(batch.lengths), *(tuple(value.shape) for value in tensors_of(batch).values())


def _length_bound(lengths: Sequence[int]) -> int:
    """Return a power of two that no length exceeds; the attention kernel needs only a bound."""
    return 1 << (max(lengths) - 1).bit_length()
